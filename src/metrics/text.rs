//! The text format of Prometheus, version 0.0.4, which everything that scrapes understands.

use crate::durations::Durations;
use std::fmt::{Display, Write as _};

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only ever grows, but for a new start.
    Counter,
    /// Is as it is now.
    Gauge,
    /// How many took how long.
    Histogram,
}

/// The text so far.
#[derive(Debug, Default)]
pub(super) struct Text(String);

/// A metric whose values are being written. All have the same labels.
#[derive(Debug)]
pub(super) struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
}

/// Names and values.
pub(super) type Labels<'a> = &'a [(&'static str, &'a str)];

impl Text {
    /// Begins a metric.
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Family<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { text: &mut self.0, name }
    }

    /// A gauge without labels.
    pub(super) fn gauge(&mut self, name: &'static str, help: &str, value: impl Display) {
        self.family(name, Kind::Gauge, help).value(&[], value);
    }

    /// All of it.
    pub(super) fn into_string(self) -> String {
        self.0
    }
}

impl Family<'_> {
    /// One value.
    pub(super) fn value(&mut self, labels: Labels<'_>, value: impl Display) {
        self.line("", labels, None, value);
    }

    /// One histogram.
    pub(super) fn durations(&mut self, labels: Labels<'_>, all: &Durations) {
        for (bound, count) in all.up_to() {
            self.line("_bucket", labels, Some(&bound.as_secs_f64().to_string()), count);
        }
        self.line("_bucket", labels, Some("+Inf"), all.count());
        self.line("_sum", labels, None, all.sum().as_secs_f64());
        self.line("_count", labels, None, all.count());
    }

    fn line(&mut self, suffix: &str, labels: Labels<'_>, bound: Option<&str>, value: impl Display) {
        _ = write!(self.text, "{}{suffix}", self.name);
        let all = labels.iter().copied().chain(bound.map(|bound| ("le", bound)));
        let mut before = '{';
        for (name, value) in all {
            _ = write!(self.text, "{before}{name}=\"{}\"", escaped(value));
            before = ',';
        }
        let end = if before == ',' { "}" } else { "" };
        _ = writeln!(self.text, "{end} {value}");
    }
}

/// Names of volumes are plain, but those of pools come from outside.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod test {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_metric_says_what_it_is() {
        let mut text = Text::default();
        let mut family = text.family("a_total", Kind::Counter, "How often");
        family.value(&[], 3);
        family.value(&[("x", "1"), ("y", "\"\\\n")], 0.5);
        let expected = "# HELP a_total How often\n# TYPE a_total counter\na_total 3\n\
                        a_total{x=\"1\",y=\"\\\"\\\\\\n\"} 0.5\n";
        assert_eq!(text.into_string(), expected);
    }

    #[test]
    fn a_histogram_ends_with_all_there_were() {
        let (mut text, mut all) = (Text::default(), Durations::default());
        all.note(Duration::from_millis(1));
        all.note(Duration::from_mins(1));
        text.family("s_seconds", Kind::Histogram, "Time").durations(&[("a", "b")], &all);
        let text = text.into_string();
        for line in [
            "s_seconds_bucket{a=\"b\",le=\"0.0005\"} 0",
            "s_seconds_bucket{a=\"b\",le=\"0.001\"} 1",
            "s_seconds_bucket{a=\"b\",le=\"16.384\"} 1",
            "s_seconds_bucket{a=\"b\",le=\"+Inf\"} 2",
            "s_seconds_sum{a=\"b\"} 60.001",
            "s_seconds_count{a=\"b\"} 2",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
    }
}
