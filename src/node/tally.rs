//! What happened since the driver started, as a monitoring system counts it.

use super::{Cause, Relayed};
use crate::{durations::Durations, volume::RunKey};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// How background work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// All was moved.
    Finished,
    /// Somebody needed the layers; it is begun again.
    Interrupted,
    /// It did not succeed; it is begun again later.
    Failed,
}

impl Fate {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Finished, Self::Interrupted, Self::Failed];

    /// As metrics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

/// What happened.
#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<Counted>);

/// What was counted so far.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    restarts: BTreeMap<Cause, u64>,
    jobs: BTreeMap<(&'static str, Fate), u64>,
    /// How long VMs waited for a daemon, or for a move to one.
    pub stalls: Durations,
    /// What the relay had counted at the last look, volume by volume; none before the first.
    last: Option<HashMap<RunKey, Durations>>,
}

impl Counted {
    /// How many daemons were replaced for this reason.
    pub fn restarts(&self, cause: Cause) -> u64 {
        self.restarts.get(&cause).copied().unwrap_or_default()
    }

    /// How many times work of this kind ended so.
    pub fn jobs(&self, way: &'static str, fate: Fate) -> u64 {
        self.jobs.get(&(way, fate)).copied().unwrap_or_default()
    }
}

impl Tally {
    /// All of it.
    pub(super) fn counted(&self) -> Counted {
        self.lock().clone()
    }

    pub(super) fn note_restart(&self, cause: Cause) {
        *self.lock().restarts.entry(cause).or_default() += 1;
    }

    pub(super) fn note_job(&self, way: &'static str, fate: Fate) {
        *self.lock().jobs.entry((way, fate)).or_default() += 1;
    }

    /// Takes over what the relay counted since the last look. What it had counted at the first was
    /// before our time.
    pub(super) fn note_stalls(&self, relayed: &Relayed) {
        let mut counted = self.lock();
        let now = relayed.iter().map(|(key, one)| (key.clone(), one.stalls)).collect();
        let Some(last) = counted.last.replace(now) else { return };
        for (key, one) in relayed {
            let before = last.get(key).copied().unwrap_or_default();
            counted.stalls.add_since(&one.stalls, &before);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::{relay, volume::VolumeId};
    use std::time::Duration;

    fn relayed(stalls: &[(&str, u64)]) -> Relayed {
        let one = |(name, count): &(&str, u64)| {
            let key = VolumeId::of_name(name).run_key();
            let mut stalls = Durations::default();
            for _ in 0..*count {
                stalls.note(Duration::from_millis(3));
            }
            let one = relay::Relayed {
                key: key.clone(),
                backend: "/b".into(),
                tracking: relay::Tracking::Works,
                front_end: None,
                losses: 0,
                handovers: 0,
                refused: 0,
                last_stall_us: 0,
                longest_stall_us: 0,
                stalls,
            };
            (key, one)
        };
        stalls.iter().map(one).collect()
    }

    #[test]
    fn a_stall_is_counted_once_whatever_becomes_of_its_volume() {
        let tally = Tally::default();
        for (seen, sum) in [
            (relayed(&[("a", 5)]), 0), // of an earlier driver's time
            (relayed(&[("a", 6), ("b", 2)]), 3),
            (relayed(&[("a", 6)]), 3),           // b is unstaged,
            (relayed(&[("a", 6), ("b", 1)]), 4), // and staged again
        ] {
            tally.note_stalls(&seen);
            assert_eq!(tally.counted().stalls.count(), sum);
        }
    }
}
