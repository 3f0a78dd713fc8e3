//! In which form a volume is published: what the consumer finds at the target.

use super::filesystem::{Kind, MountFlags};
use crate::{source::Access, volume::AccessMode};
use serde::{Deserialize, Serialize};
use std::fmt;

/// In which form a volume is published.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// A directory with a vhost-user-blk socket.
    #[default]
    VhostUser,
    /// A block device.
    Block,
    /// A file system on a block device.
    Filesystem {
        /// Of this kind.
        kind: Kind,
        /// Mounted so.
        flags: MountFlags,
    },
}

/// How a volume is used, as CSI's capabilities say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// By whom.
    pub access: AccessMode,
    /// In which form.
    pub form: Form,
    /// The group that may use it besides root, where the form has owners.
    pub group: Option<Group>,
}

/// A group of the host, by its number (CSI's `volume_mount_group`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Group(u32);

impl Group {
    /// The group with this number.
    pub fn new(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    pub fn number(self) -> u32 {
        self.0
    }
}

impl Form {
    /// Whether a consumer outlives the daemon: the relay leads it to the next one.
    pub(super) fn is_relayed(&self) -> bool {
        match self {
            Self::VhostUser => true,
            Self::Block | Self::Filesystem { .. } => false,
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUser => out.write_str("vhost-user-blk socket"),
            Self::Block => out.write_str("block device"),
            Self::Filesystem { kind, flags } => write!(out, "{kind} file system{flags}"),
        }
    }
}

impl Capability {
    /// What it is to whoever uses it.
    pub fn used(&self) -> String {
        match self.access.access() {
            Access::Read => format!("{}, read-only", self.form),
            Access::Write => self.form.to_string(),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({}", self.access.as_str(), self.form)?;
        match self.group {
            Some(group) => write!(out, ", group {})", group.0),
            None => out.write_str(")"),
        }
    }
}
