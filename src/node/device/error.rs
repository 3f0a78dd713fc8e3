//! Why there is no device, or still one.

use super::Bytes;
use crate::node::tool;
use std::{
    io,
    path::{Path, PathBuf},
};

/// What went wrong with a device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `losetup` did not do it.
    #[error("loop device over {}", file.display())]
    Losetup {
        /// The file below.
        file: PathBuf,
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
    /// The file does not answer: its daemon is stuck.
    #[error("{} does not answer", file.display())]
    Silent {
        /// The file.
        file: PathBuf,
    },
    /// Others were attaching the same file all the time.
    #[error("{} is being attached by others", file.display())]
    Contended {
        /// The file.
        file: PathBuf,
    },
    /// There is a device, but not the one that was asked for.
    #[error("{} is over {} already, {what}", device.display(), file.display())]
    Other {
        /// The device.
        device: PathBuf,
        /// The file.
        file: PathBuf,
        /// What is different.
        what: &'static str,
    },
    /// The file system below does not do direct I/O.
    #[error("{} does not take direct I/O", file.display())]
    NotDirect {
        /// The file.
        file: PathBuf,
    },
    /// The path came to lead to another file meanwhile.
    #[error("{} became another file while it was attached", file.display())]
    Replaced {
        /// The file.
        file: PathBuf,
    },
    /// The file is not as large as it should be.
    #[error("{} has {is}, not {expected}", device.display())]
    Small {
        /// The device.
        device: PathBuf,
        /// Its size.
        is: Bytes,
        /// The size it should have.
        expected: Bytes,
    },
}

pub(super) fn io_error(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

pub(super) fn losetup_error(file: &Path) -> impl FnOnce(tool::Error) -> Error + use<> {
    let file = file.to_owned();
    move |source| Error::Losetup { file, source }
}
