//! Throttling: the limits of a volume, which may be changed while it is used.

use super::ParameterError;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The limits of a volume; what is not in it is unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, u64>", into = "BTreeMap<String, u64>")]
pub struct Throttle(BTreeMap<&'static str, u64>);

/// One limit: its key, QEMU's name for it, and whether it counts bytes.
struct Limit {
    key: &'static str,
    qemu: &'static str,
    unit: Unit,
    /// For a burst: the key of the limit that it may exceed for a moment.
    base: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Requests,
    Bytes,
}

/// All limits there are (design: Life of a volume; QEMU's `ThrottleLimits`).
const LIMITS: [Limit; 12] = [
    limit("iops", "iops-total", Unit::Requests, None),
    limit("iopsRead", "iops-read", Unit::Requests, None),
    limit("iopsWrite", "iops-write", Unit::Requests, None),
    limit("bytesPerSecond", "bps-total", Unit::Bytes, None),
    limit("bytesPerSecondRead", "bps-read", Unit::Bytes, None),
    limit("bytesPerSecondWrite", "bps-write", Unit::Bytes, None),
    limit("iopsMax", "iops-total-max", Unit::Requests, Some("iops")),
    limit("iopsReadMax", "iops-read-max", Unit::Requests, Some("iopsRead")),
    limit("iopsWriteMax", "iops-write-max", Unit::Requests, Some("iopsWrite")),
    limit("bytesPerSecondMax", "bps-total-max", Unit::Bytes, Some("bytesPerSecond")),
    limit("bytesPerSecondReadMax", "bps-read-max", Unit::Bytes, Some("bytesPerSecondRead")),
    limit("bytesPerSecondWriteMax", "bps-write-max", Unit::Bytes, Some("bytesPerSecondWrite")),
];

/// A total and a limit of one direction exclude each other (facts/qsd.md section 8).
const EXCLUSIVE: [(&str, [&str; 2]); 2] = [
    ("iops", ["iopsRead", "iopsWrite"]),
    ("bytesPerSecond", ["bytesPerSecondRead", "bytesPerSecondWrite"]),
];

/// QEMU's own bound (`THROTTLE_VALUE_MAX`).
const MOST: u64 = 1_000_000_000_000_000;

const fn limit(
    key: &'static str,
    qemu: &'static str,
    unit: Unit,
    base: Option<&'static str>,
) -> Limit {
    Limit { key, qemu, unit, base }
}

impl Throttle {
    /// Whether this is a key of a limit.
    pub(super) fn is_key(key: &str) -> bool {
        find(key).is_some()
    }

    /// Nothing is limited.
    pub fn is_unlimited(&self) -> bool {
        self.0.is_empty()
    }

    /// The limits by their keys, in requests or bytes a second.
    pub fn limits(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(key, value)| (*key, *value))
    }

    /// Every limit by QEMU's name, 0 where there is none: QEMU keeps what it is not told anew
    /// (facts/qsd.md section 8).
    pub(crate) fn qemu(&self) -> impl Iterator<Item = (&'static str, u64)> {
        LIMITS.iter().map(|limit| (limit.qemu, self.0.get(limit.key).copied().unwrap_or(0)))
    }

    /// These limits with the changes that somebody wrote; 0 lifts one. All of them or none.
    pub fn with(&self, changes: &BTreeMap<String, String>) -> Result<Self, ParameterError> {
        let mut next = self.clone();
        for (key, text) in changes {
            let limit = find(key).ok_or_else(|| ParameterError::NotMutable(key.clone()))?;
            match limit.parse(text)? {
                0 => next.0.remove(limit.key),
                value => next.0.insert(limit.key, value),
            };
        }
        next.check()?;
        Ok(next)
    }

    fn check(&self) -> Result<(), ParameterError> {
        for (total, parts) in EXCLUSIVE {
            for part in parts {
                if self.0.contains_key(total) && self.0.contains_key(part) {
                    return Err(ParameterError::Exclusive { total, part });
                }
            }
        }
        for limit in &LIMITS {
            let (Some(base), Some(burst)) = (limit.base, self.0.get(limit.key)) else { continue };
            if self.0.get(base).is_none_or(|base| burst < base) {
                return Err(ParameterError::Burst { key: limit.key, value: *burst, base });
            }
        }
        Ok(())
    }
}

impl Limit {
    fn parse(&self, text: &str) -> Result<u64, ParameterError> {
        let wrong =
            |expected| ParameterError::Value { key: self.key, value: text.to_owned(), expected };
        let (value, expected) = match self.unit {
            Unit::Requests => {
                let digits = text.bytes().all(|byte| byte.is_ascii_digit());
                let value = if digits { text.parse().ok() } else { None };
                (value, "a number of requests a second, up to 10^15; 0 for no limit")
            }
            Unit::Bytes => {
                let value = text.parse().map(Bytes::count).ok();
                (value, "bytes a second such as 100Mi, up to 10^15; 0 for no limit")
            }
        };
        value.filter(|value| *value <= MOST).ok_or_else(|| wrong(expected))
    }
}

fn find(key: &str) -> Option<&'static Limit> {
    LIMITS.iter().find(|limit| limit.key == key)
}

impl TryFrom<BTreeMap<String, u64>> for Throttle {
    type Error = ParameterError;

    fn try_from(limits: BTreeMap<String, u64>) -> Result<Self, ParameterError> {
        let text = limits.into_iter().map(|(key, value)| (key, value.to_string())).collect();
        Self::default().with(&text)
    }
}

impl From<Throttle> for BTreeMap<String, u64> {
    fn from(throttle: Throttle) -> Self {
        throttle.limits().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn changes(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_what_is_named_changes_and_zero_lifts_a_limit() {
        let one = Throttle::default()
            .with(&changes(&[("iops", "100"), ("iopsMax", "200"), ("bytesPerSecondRead", "1Mi")]))
            .unwrap();
        let two = one.with(&changes(&[("iopsMax", "0"), ("bytesPerSecondRead", "2Mi")])).unwrap();
        let limits: Vec<_> = two.limits().collect();
        assert_eq!(limits, [("bytesPerSecondRead", 2 << 20), ("iops", 100)]);
        let told: BTreeMap<_, _> = two.qemu().collect();
        assert_eq!(told.len(), 12);
        assert_eq!(
            (told["iops-total"], told["iops-total-max"], told["bps-read"]),
            (100, 0, 2 << 20)
        );
        assert!(
            two.with(&changes(&[("iops", "0"), ("bytesPerSecondRead", "0")]))
                .unwrap()
                .is_unlimited()
        );
    }

    #[test]
    fn what_qemu_would_refuse_is_refused_by_name() {
        for (pairs, words) in [
            (&[("iops", "1"), ("iopsRead", "1")][..], "iopsRead"),
            (&[("bytesPerSecond", "1"), ("bytesPerSecondWrite", "1")], "bytesPerSecondWrite"),
            (&[("iopsMax", "1")], "iopsMax"),
            (&[("iops", "10"), ("iopsMax", "9")], "iopsMax"),
            (&[("iops", "-1")], "\"-1\""),
            (&[("iops", "1Gi")], "\"1Gi\""),
            (&[("bytesPerSecond", "1e3")], "\"1e3\""),
            (&[("iops", "1000000000000001")], "10^15"),
            (&[("iops", "")], "\"\""),
            (&[("pool", "x")], "\"pool\""),
        ] {
            let error = Throttle::default().with(&changes(pairs)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn limits_read_back_from_a_record() {
        let one = Throttle::default().with(&changes(&[("iops", "100")])).unwrap();
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(text, r#"{"iops":100}"#);
        assert_eq!(serde_json::from_str::<Throttle>(&text).unwrap(), one);
        assert!(serde_json::from_str::<Throttle>(r#"{"pool":1}"#).is_err());
    }
}
