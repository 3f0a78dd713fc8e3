//! Lines of log that a front-end can cause: only so many, and how many more there were.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

/// Some starts of a VM, with all that is said of each; then it is no VM that starts.
const MOST: u32 = 20;
const WHILE: Duration = Duration::from_mins(1);

/// What one volume may still say.
#[derive(Debug)]
pub(super) struct Quiet {
    begun: Cell<Instant>,
    lines: Cell<u32>,
}

impl Quiet {
    pub(super) fn new() -> Self {
        Self { begun: Cell::new(Instant::now()), lines: Cell::new(0) }
    }

    /// Whether another line may be said; the first of a while tells how many were not.
    pub(super) fn allows(&self, volume: &str) -> bool {
        self.allows_at(volume, Instant::now())
    }

    fn allows_at(&self, volume: &str, now: Instant) -> bool {
        if now.saturating_duration_since(self.begun.get()) >= WHILE {
            let unsaid = self.lines.get().saturating_sub(MOST);
            if unsaid > 0 {
                tracing::warn!(
                    key = volume,
                    unsaid,
                    "front-ends came and went too often to tell of"
                );
            }
            self.begun.set(now);
            self.lines.set(0);
        }
        self.lines.set(self.lines.get().saturating_add(1));
        self.lines.get() <= MOST
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_so_many_lines_are_said_in_a_while() {
        let quiet = Quiet::new();
        let begin = quiet.begun.get();
        let said = |now| (0..1000).filter(|_| quiet.allows_at("v", now)).count();
        assert_eq!(said(begin), 20);
        assert_eq!(said(begin + WHILE / 2), 0);
        assert_eq!(said(begin + WHILE), 20);
    }
}
