//! Percentiles, medians and how numbers are written. Pure.

use std::time::Duration;

/// Durations of one operation, measured one after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    pub(crate) fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub(crate) fn p50(&self) -> Duration {
        self.percentile(50)
    }

    /// Below 100 samples this is the slowest one.
    pub(crate) fn p99(&self) -> Duration {
        self.percentile(99)
    }

    /// The nearest rank: the smallest sample that `percent` of all samples do not exceed.
    fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100);
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }
}

/// The middle value, or the mean of the two in the middle; 0 of nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// The lowest and the highest value; zeroes of nothing.
pub(crate) fn extremes(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let mut values = values.into_iter();
    let Some(first) = values.next() else { return (0.0, 0.0) };
    values.fold((first, first), |(low, high), value| (low.min(value), high.max(value)))
}

/// `a / b`, and 0 where there is no b.
pub(crate) fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// In milliseconds.
pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A count as a float; above 2^32 it loses nothing that a figure shows.
pub(crate) fn float(count: u64) -> f64 {
    let (high, low) = (count >> 32, count & u64::from(u32::MAX));
    let part = |part: u64| u32::try_from(part).map_or(0.0, f64::from);
    part(high) * 2_f64.powi(32) + part(low)
}

/// What is to be reached.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    /// The goal, and whether `value` meets it. Nothing fails for a goal that is missed.
    pub(crate) fn judge(self, value: f64) -> String {
        let (sign, goal, met) = match self {
            Self::AtLeast(goal) => (">=", goal, value >= goal),
            Self::AtMost(goal) => ("<=", goal, value <= goal),
        };
        format!("goal {sign} {goal}: {}", if met { "met" } else { "missed" })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_percentile_is_the_nearest_rank_whatever_the_order() {
        let mut samples = Samples::default();
        for n in (1..=200).rev() {
            samples.push(Duration::from_millis(n));
        }
        assert_eq!(samples.p50(), Duration::from_millis(100));
        assert_eq!(samples.p99(), Duration::from_millis(198));
    }

    #[test]
    fn few_samples_have_percentiles_too() {
        let mut samples = Samples::default();
        assert_eq!(samples.p99(), Duration::ZERO);
        samples.push(Duration::from_millis(7));
        assert_eq!(samples.p50(), Duration::from_millis(7));
        assert_eq!(samples.p99(), Duration::from_millis(7));
    }

    #[test]
    fn a_median_is_the_middle() {
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(median([3.0, 1.0, 2.0]), 2.0));
        assert!(close(median([4.0, 1.0, 2.0, 3.0]), 2.5));
        assert!(close(median([]), 0.0));
    }

    #[test]
    fn extremes_are_found_wherever_they_are() {
        let close = |a: (f64, f64), b: (f64, f64)| (a.0 - b.0).abs() + (a.1 - b.1).abs() < 1e-9;
        assert!(close(extremes([2.0, 1.0, 3.0]), (1.0, 3.0)));
        assert!(close(extremes([]), (0.0, 0.0)));
    }

    #[test]
    fn a_large_count_keeps_its_size() {
        assert!((float(1 << 40) - 1_099_511_627_776.0).abs() < 1e-3);
        assert!((float(4095) - 4095.0).abs() < 1e-9);
    }

    #[test]
    fn a_goal_is_judged_and_named() {
        assert_eq!(Goal::AtLeast(0.75).judge(0.8), "goal >= 0.75: met");
        assert_eq!(Goal::AtMost(10.0).judge(10.1), "goal <= 10: missed");
    }
}
