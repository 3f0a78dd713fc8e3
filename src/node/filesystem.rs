//! File systems on volumes: made, checked, mounted, grown and measured.
//!
//! ```text
//! attach -> probe -+- Nothing ------------> make -+-> check -> mount -> grow, stats, own_by
//!                  +- FileSystem(kind) -----------+
//!                  +- Foreign: an error, for ever
//! ```
//!
//! Promises that nothing is ever overwritten but a device that reads as zeros from end to end, or
//! one on which the caller knows that making a file system broke off. Each step may be repeated.
//! Works by the programs of e2fsprogs, xfsprogs and util-linux, each with a deadline. Called by
//! staging, publishing and expanding; knows nothing of volumes.

mod contents;
mod flags;
mod grown;
mod made;
mod mounted;
mod room;

#[cfg(any(test, fuzzing))]
pub(super) use contents::known;
pub use contents::{Contents, probe};
pub use flags::MountFlags;
pub use grown::{grow, grow_unmounted, is_grown};
pub use made::{Overwrite, check, make};
pub use mounted::{Unmounted, mount, unmount};
pub use room::{Share, Stats, own_by, stats};

use super::{device, host, tool};
use serde::{Deserialize, Serialize};
use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// Why a file system could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody makes such a file system.
    #[error("fs_type: {0:?} is not a file system for volumes; there are ext4 and xfs")]
    Kind(String),
    /// A mount flag that would do more than mount this file system here.
    #[error("mount_flags: {flag:?} {why}")]
    Flag {
        /// The flag.
        flag: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There is something on the device, which stays.
    #[error("{} holds {contents}, which is not overwritten", device.display())]
    Occupied {
        /// The device.
        device: PathBuf,
        /// What it holds.
        contents: Contents,
    },
    /// The device is in use, so that nothing can be made on it.
    #[error("{} is in use", device.display())]
    InUse {
        /// The device.
        device: PathBuf,
    },
    /// The host does not let the driver grow what is mounted.
    #[error("growing the file system on {} while it is mounted takes CAP_SYS_RESOURCE", device.display())]
    NotPermitted {
        /// The device.
        device: PathBuf,
    },
    /// The file system needs a person.
    #[error("the {kind} file system on {} is damaged: {said}", device.display())]
    Damaged {
        /// Of which kind it is.
        kind: Kind,
        /// The device.
        device: PathBuf,
        /// The end of what the program said.
        said: String,
    },
    /// A program did not do its work.
    #[error("{action} {}", path.display())]
    Tool {
        /// What was tried, as a gerund.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: tool::Error,
    },
    /// The host refused.
    #[error("{action} {}", path.display())]
    Io {
        /// What was tried, as a gerund.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What is below does not answer.
    #[error("{action} {} takes too long", path.display())]
    Silent {
        /// What was tried, as a gerund.
        action: &'static str,
        /// With what.
        path: PathBuf,
    },
    /// The place where it is to be mounted will not do.
    #[error(transparent)]
    Place(#[from] host::Error),
    /// The device below will not do.
    #[error(transparent)]
    Device(#[from] device::Error),
}

/// The kinds of file systems that volumes can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// What a volume has when nobody says.
    Ext4,
    /// The other one.
    Xfs,
}

impl Kind {
    /// From CSI's `fs_type`; empty is the default.
    pub fn parse(text: &str) -> Result<Self, Error> {
        match text {
            "" | "ext4" => Ok(Self::Ext4),
            "xfs" => Ok(Self::Xfs),
            other => Err(Error::Kind(other.to_owned())),
        }
    }

    /// Its name, as the kernel and CSI have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.as_str())
    }
}

fn tool_error(action: &'static str, path: &Path) -> impl FnOnce(tool::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Tool { action, path, source }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

#[cfg(test)]
mod test;
