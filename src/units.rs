//! Sizes. `Bytes` is the only size in the program; people write and read it as `10Gi`.

use serde::{Deserialize, Serialize};
use std::{fmt, num::TryFromIntError, str::FromStr};

/// A number of bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(u64);

/// The suffixes of a Kubernetes quantity, each with its factor.
const SUFFIXES: [(&str, u64); 12] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("Ei", 1 << 60),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000),
];

/// The suffixes a size is printed with, largest first.
const SHOWN: [(&str, u64); 5] =
    [("Pi", 1 << 50), ("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];

impl Bytes {
    /// No bytes at all.
    pub const ZERO: Self = Self(0);

    /// `count` bytes.
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// `count` binary gigabytes (GiB).
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// The count as a plain number.
    pub const fn count(self) -> u64 {
        self.0
    }

    /// The next multiple of `grain` at or above this size, if there is one.
    pub fn round_up(self, grain: Self) -> Option<Self> {
        self.0.checked_next_multiple_of(grain.0).map(Self)
    }

    /// The last multiple of `grain` at or below this size.
    #[must_use]
    pub const fn round_down(self, grain: Self) -> Self {
        Self(self.0 - self.0 % grain.0)
    }

    /// The difference, zero where `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The sum, the largest count where it does not fit.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::ZERO, Self::saturating_add)
    }
}

impl TryFrom<i64> for Bytes {
    type Error = TryFromIntError;
    fn try_from(count: i64) -> Result<Self, Self::Error> {
        u64::try_from(count).map(Self)
    }
}

/// For CSI's `int64` fields; a size that large cannot come from a file system.
impl From<Bytes> for i64 {
    fn from(size: Bytes) -> Self {
        Self::try_from(size.0).unwrap_or(Self::MAX)
    }
}

/// Exact where a binary suffix divides the size (`10Gi`), else rounded to two digits (`1.46Gi`).
impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((suffix, factor)) = SHOWN.iter().find(|(_, factor)| self.0 >= *factor) else {
            return out.pad(&self.0.to_string());
        };
        if self.0.is_multiple_of(*factor) {
            return out.pad(&format!("{}{suffix}", self.0 / factor));
        }
        let hundredths = (u128::from(self.0) * 100 + u128::from(factor / 2)) / u128::from(*factor);
        out.pad(&format!("{}.{:02}{suffix}", hundredths / 100, hundredths % 100))
    }
}

/// What is wrong with a size that somebody wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no size; write bytes or a quantity such as 512Mi, 10Gi or 1.5Ti")]
pub struct ParseError(String);

/// A Kubernetes quantity: `4096`, `10Gi`, `1.5Ti`, `20G`.
impl FromStr for Bytes {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || ParseError(text.to_owned());
        let (number, factor) = SUFFIXES
            .iter()
            .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
            .unwrap_or((text, 1));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |part: &str| {
            let plain = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            if plain { part.parse::<u64>().ok() } else { None }
        };
        if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        // Twelve digits keep the fraction's product within 128 bits and beyond any real need.
        let fraction = &fraction[..fraction.len().min(12)];
        let scale = 10_u128.pow(u32::try_from(fraction.len()).map_err(|_| wrong())?);
        let whole = u128::from(digits(whole).ok_or_else(wrong)?) * u128::from(factor);
        let part = u128::from(digits(fraction).ok_or_else(wrong)?) * u128::from(factor) / scale;
        u64::try_from(whole + part).map(Self).map_err(|_| wrong())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn people_write_quantities_as_in_kubernetes() {
        for (text, count) in [
            ("0", 0),
            ("4096", 4096),
            ("10Gi", 10 << 30),
            ("1.5Ti", 3 << 39),
            ("20G", 20_000_000_000),
            ("0.5Ki", 512),
            ("15Ei", 15 << 60),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(count)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_its_text() {
        for text in [
            "",
            "Gi",
            "-1",
            "+1",
            "10 Gi",
            "10GB",
            "1.Gi",
            ".5Gi",
            "1e3",
            "16Ei",
            "1.é",
            "1.0000000000000x",
            "0.0000000000000.5Gi",
        ] {
            assert_eq!(text.parse::<Bytes>(), Err(ParseError(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_short() {
        for (count, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (10 << 30, "10Gi"),
            (3 << 29, "1.50Gi"),
            (u64::MAX, "16384.00Pi"),
        ] {
            assert_eq!(Bytes(count).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_whole_units_come_back(text in "\\PC{0,12}", count: u32) {
            _ = text.parse::<Bytes>();
            let size = Bytes(u64::from(count) << 20);
            let shown = format!("{count}Mi");
            prop_assert_eq!(shown.parse(), Ok(size));
        }
    }
}
