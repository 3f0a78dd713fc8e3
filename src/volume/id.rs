//! Names: volumes, layers, pools, nodes, and what is derived from them.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{fmt, path::Path, str::FromStr};

/// What is wrong with a name, and with which.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no {kind}: {rule}")]
pub struct InvalidName {
    kind: &'static str,
    text: String,
    rule: &'static str,
}

/// Declares a validated name: a private string, checked once.
macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $valid:expr, $rule:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;
            fn try_from(text: String) -> Result<Self, InvalidName> {
                let valid: fn(&str) -> bool = $valid;
                if valid(&text) {
                    return Ok(Self(text));
                }
                Err(InvalidName { kind: $kind, text, rule: $rule })
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                text.to_owned().try_into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.pad(&self.0)
            }
        }
    };
}

name! {
    /// A volume id as we issue it: also the name of its record, so it is safe as a file name.
    VolumeId, "volume id", is_id,
    "ours have 1 to 63 characters of a-z, 0-9, '.' and '-' and begin with a letter or digit"
}

name! {
    /// A snapshot id as we issue it: also the name of its record, so it is safe as a file name.
    SnapshotId, "snapshot id", is_id,
    "ours have 1 to 63 characters of a-z, 0-9, '.' and '-' and begin with a letter or digit"
}

name! {
    /// The name of a pool, as the `pool` parameter has it.
    PoolName, "pool name",
    |text| has_length(text, 63) && text.bytes().all(|byte| byte == b'-' || is_alphanumeric(byte)),
    "it has 1 to 63 characters of a-z, 0-9 and '-'"
}

name! {
    /// The name of a node: CSI's node id and the value of its topology segment, so it obeys the
    /// rule for a Kubernetes label value.
    NodeName, "node id",
    |text| {
        let bytes = text.as_bytes();
        let ends = [bytes.first(), bytes.last()];
        has_length(text, 63)
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(byte))
            && ends.into_iter().flatten().all(u8::is_ascii_alphanumeric)
    },
    "it has 1 to 63 letters, digits, '.', '_' and '-', and a letter or digit at each end"
}

name! {
    /// The name of a volume's run directory: 32 hex digits, long enough that nobody finds two
    /// volumes with the same, short enough for a socket path of 107 bytes (facts/qsd.md section 1).
    RunKey, "run key",
    |text| text.len() == RunKey::LENGTH && text.bytes().all(is_hex),
    "it has 32 hex digits"
}

impl RunKey {
    /// Its characters.
    pub const LENGTH: usize = 32;

    /// The name of the run directory of who reads a volume at this target, beside others: no id
    /// has a NUL byte in it.
    pub(crate) fn of_reader(volume: &VolumeId, target: &Path) -> Self {
        let target = target.display();
        Self(hex_digest(&format!("{volume}\0{target}"), Self::LENGTH))
    }

    /// A key of no volume, used nowhere before.
    pub(crate) fn draw() -> Self {
        Self(uuid::Uuid::new_v4().simple().to_string())
    }
}

/// The id of one layer, drawn at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(uuid::Uuid);

impl LayerId {
    /// A new id, used nowhere before.
    pub(crate) fn draw() -> Self {
        Self(uuid::Uuid::new_v4())
    }

    /// The name of the run directory of whoever works on this layer for no volume.
    pub fn run_key(self) -> RunKey {
        RunKey(self.0.simple().to_string())
    }

    /// The name of the node of this layer's file in a block graph: `L` and 30 of the 32 hex digits
    /// of the id, as a node name has less than 32 characters (facts/qsd.md section 1).
    pub fn node_name(self) -> String {
        let digits = self.0.simple().to_string();
        format!("L{}", &digits[..NODE_DIGITS])
    }
}

/// The hex digits of a layer id that fit into a node name.
const NODE_DIGITS: usize = 30;

impl FromStr for LayerId {
    type Err = uuid::Error;
    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        text.parse().map(Self)
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

/// How many hex digits of a digest stand for a name that is no id itself.
const DIGITS: usize = 32;

impl VolumeId {
    /// The id of the volume with this CSI name.
    pub fn of_name(name: &str) -> Self {
        Self(id_of_name(name))
    }

    /// The name of the volume's run directory and of its daemon.
    pub fn run_key(&self) -> RunKey {
        RunKey(hex_digest(&self.0, RunKey::LENGTH))
    }
}

impl SnapshotId {
    /// The id of the snapshot with this CSI name.
    pub fn of_name(name: &str) -> Self {
        Self(id_of_name(name))
    }
}

/// The name itself where it can be an id, else `x-` and 32 hex digits of its SHA-256.
///
/// A name that already looks like such a digest is digested too, or it could meet another's.
fn id_of_name(name: &str) -> String {
    if is_id(name) && !is_digest(name) {
        return name.to_owned();
    }
    format!("x-{}", hex_digest(name, DIGITS))
}

fn hex_digest(text: &str, digits: usize) -> String {
    let digest = Sha256::digest(text);
    let hex = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    hex.take(digits).filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
}

fn is_id(text: &str) -> bool {
    let all = text.bytes().all(|byte| byte == b'.' || byte == b'-' || is_alphanumeric(byte));
    has_length(text, 63) && all && text.bytes().next().is_some_and(is_alphanumeric)
}

fn is_digest(text: &str) -> bool {
    text.strip_prefix("x-").is_some_and(|rest| rest.len() == DIGITS && rest.bytes().all(is_hex))
}

fn has_length(text: &str, most: usize) -> bool {
    (1..=most).contains(&text.len())
}

fn is_alphanumeric(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn is_hex(byte: u8) -> bool {
    byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_plain_name_is_its_own_id() {
        for name in ["pvc-1", "a", "0", "a.b-c.d", &"n".repeat(63)] {
            assert_eq!(VolumeId::of_name(name).as_str(), name);
        }
    }

    #[test]
    fn any_other_name_gets_a_digest_and_none_can_be_mistaken_for_it() {
        let digest = VolumeId::of_name("My Volume");
        assert_eq!(digest.as_str(), "x-f436f1b4e06fc9f390b2f6479707ff47");
        assert_ne!(VolumeId::of_name(digest.as_str()), digest);
        for name in ["", "..", "../x", "-a", "A", "é", "a/b", "a_b", &"n".repeat(64)] {
            assert!(is_digest(VolumeId::of_name(name).as_str()), "{name}");
        }
    }

    #[test]
    fn names_say_what_is_wrong_with_them() {
        let error = "Fast".parse::<PoolName>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"Fast\" is no pool name: it has 1 to 63 characters of a-z, 0-9 and '-'"
        );
        for name in ["", "-a", "a-", "a b", "a/b", &"n".repeat(64)] {
            assert!(name.parse::<NodeName>().is_err(), "{name}");
        }
        assert!("Node_1.example".parse::<NodeName>().is_ok());
    }

    proptest! {
        #[test]
        fn an_id_is_safe_as_a_file_name_and_reads_back(name in ".{0,200}") {
            let id = VolumeId::of_name(&name);
            prop_assert!(!id.as_str().contains('/') && !id.as_str().starts_with('.'));
            prop_assert_eq!(VolumeId::try_from(id.to_string()), Ok(id.clone()));
            prop_assert!(RunKey::try_from(id.run_key().to_string()).is_ok());
        }
    }
}
