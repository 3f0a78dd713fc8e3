//! How many requests of a VM have no answer, and for how long.
//!
//! A ring tells how many requests the guest has made and how many have ended; the inflight buffer
//! tells which of them the daemon has fetched, and so the age of each. What a daemon that is stuck
//! has not even fetched shows as a ring that does not come further.

use super::{inflight::Held, memory, session::Session};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// What was seen at the last look.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Requests that the daemon has fetched, and when each was first seen.
    fetched: HashMap<Held, Instant>,
    /// Rings with requests, how many had ended on each, and since when it has been so.
    waiting: HashMap<u32, (u16, Instant)>,
}

/// Requests without an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) count: u64,
    /// How long the oldest has been waiting at least.
    pub(super) oldest: Duration,
}

impl Watch {
    /// Looks at the rings of a session.
    pub(super) fn look(&mut self, session: &Session) -> Open {
        let now = Instant::now();
        let held = session.held();
        let since = |one: &Held| self.fetched.get(one).copied().unwrap_or(now);
        self.fetched = held.iter().map(|one| (*one, since(one))).collect();
        let (mut count, mut waiting) = (0, HashMap::new());
        for ring in session.said.started() {
            let Ok(progress) = memory::progress(&session.said, ring) else { continue };
            let open = progress.made.wrapping_sub(progress.ended);
            count += u64::from(open);
            if open > 0 {
                let before = self.waiting.get(&ring).filter(|(ended, _)| *ended == progress.ended);
                let since = before.map_or(now, |(_, since)| *since);
                waiting.insert(ring, (progress.ended, since));
            }
        }
        self.waiting = waiting;
        let starts = self.fetched.values().chain(self.waiting.values().map(|(_, since)| since));
        let oldest = starts.map(|since| now - *since).max().unwrap_or_default();
        Open { count, oldest }
    }

    /// Forgets what was seen.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
