//! How long things took: a histogram with the same bounds for everything.
//!
//! Each bound is twice the one before, from half a millisecond (a call that finds all done) to 16 s.
//! It is kept as plain numbers, so that the relay can hand it on when it is replaced.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Bounds; what took longer than the last is counted beyond it.
const BOUNDS: usize = 16;

/// The first of them.
const FIRST: Duration = Duration::from_micros(500);

/// How many took how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Durations {
    /// How many took at most so long as the bound of the same place, and longer than the one before.
    counts: [u64; BOUNDS + 1],
    /// The sum of all, in microseconds.
    sum_us: u64,
}

impl Durations {
    /// Counts one more.
    pub fn note(&mut self, time: Duration) {
        let place = bounds().position(|bound| time <= bound).unwrap_or(BOUNDS);
        self.counts[place] = self.counts[place].saturating_add(1);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.sum_us = self.sum_us.saturating_add(micros);
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// How long they took together.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_us)
    }

    /// How many took at most as long as each bound.
    pub fn up_to(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut sum = 0_u64;
        bounds().zip(self.counts).map(move |(bound, count)| {
            sum = sum.saturating_add(count);
            (bound, sum)
        })
    }

    /// Adds what came in since `before`; all of it where that was of an earlier count.
    pub fn add_since(&mut self, now: &Self, before: &Self) {
        let goes_on = now.counts.iter().zip(before.counts).all(|(now, before)| *now >= before);
        let before = if goes_on { *before } else { Self::default() };
        for ((sum, now), before) in self.counts.iter_mut().zip(now.counts).zip(before.counts) {
            *sum = sum.saturating_add(now.saturating_sub(before));
        }
        let more = now.sum_us.saturating_sub(before.sum_us);
        self.sum_us = self.sum_us.saturating_add(more);
    }
}

fn bounds() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(FIRST), |bound| Some(*bound * 2)).take(BOUNDS)
}

#[cfg(test)]
mod test {
    use super::*;

    fn of(millis: &[u64]) -> Durations {
        let mut all = Durations::default();
        for one in millis {
            all.note(Duration::from_millis(*one));
        }
        all
    }

    #[test]
    fn what_took_long_is_counted_in_every_bound_above_it() {
        let all = of(&[0, 1, 3, 600, 60_000]);
        assert_eq!((all.count(), all.sum()), (5, Duration::from_millis(60_604)));
        let at = |micros| {
            let bound = Duration::from_micros(micros);
            all.up_to().find(|(one, _)| *one == bound).map(|(_, count)| count)
        };
        assert_eq!((at(500), at(1000), at(4000)), (Some(1), Some(2), Some(3)));
        assert_eq!((at(512_000), at(1_024_000)), (Some(3), Some(4)));
        assert_eq!(all.up_to().last(), Some((Duration::from_millis(16_384), 4)));
    }

    #[test]
    fn what_was_counted_before_is_not_counted_again() {
        let (mut sum, first) = (of(&[7]), of(&[1, 2]));
        sum.add_since(&first, &Durations::default());
        sum.add_since(&of(&[1, 2, 9]), &first);
        assert_eq!(sum, of(&[7, 1, 2, 9]));
        // Of another relay, or another attachment.
        sum.add_since(&of(&[5]), &of(&[1, 2, 9]));
        assert_eq!(sum, of(&[7, 1, 2, 9, 5]));
    }
}
