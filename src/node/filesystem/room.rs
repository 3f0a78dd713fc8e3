//! How full a file system is, and whom its root belongs to.

use super::{Error, io_error};
use crate::{blocking::blocking, node::HostPath};
use rustix::fs::{CWD, Gid, Mode, OFlags, fchmod, fchown, openat, statvfs};
use std::{io, path::PathBuf, time::Duration};
use tokio::time::timeout;

/// What is below a file system may be stuck.
const ASK: Duration = Duration::from_secs(5);

/// How much of something there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// In all.
    pub total: u64,
    /// Taken.
    pub used: u64,
    /// To be had.
    pub available: u64,
}

/// How full a file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// In bytes.
    pub bytes: Share,
    /// In files and directories.
    pub inodes: Share,
}

/// How full the file system is that is mounted here.
pub async fn stats(at: &HostPath) -> Result<Stats, Error> {
    let told = on(at, "measuring", |path| Ok(statvfs(&path)?)).await?;
    let bytes = |blocks: u64| blocks.saturating_mul(told.f_frsize);
    Ok(Stats {
        bytes: Share {
            total: bytes(told.f_blocks),
            used: bytes(told.f_blocks.saturating_sub(told.f_bfree)),
            available: bytes(told.f_bavail),
        },
        inodes: Share {
            total: told.f_files,
            used: told.f_files.saturating_sub(told.f_ffree),
            available: told.f_favail,
        },
    })
}

/// Lets a group write to the root of the file system that is mounted here, and have what is made in
/// it, as kubelet does for an `fsGroup`; what is in it already is left as it is.
pub async fn own_by(at: &HostPath, group: u32) -> Result<(), Error> {
    on(at, "giving a group", move |path| {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = openat(CWD, &path, flags, Mode::empty())?;
        let mode = Mode::from_raw_mode(rustix::fs::fstat(&root)?.st_mode & 0o7777);
        fchown(&root, None, Some(Gid::from_raw(group)))?;
        Ok(fchmod(&root, mode | Mode::RWXG | Mode::SGID)?)
    })
    .await
}

/// Does what may hang, and does not wait for it for ever.
async fn on<T: Send + 'static>(
    at: &HostPath,
    action: &'static str,
    work: impl FnOnce(PathBuf) -> io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    let path = at.as_path().to_owned();
    let done = timeout(ASK, blocking(move || work(path))).await;
    let done = done.map_err(|_| Error::Silent { action, path: at.as_path().to_owned() })?;
    done.map_err(io_error(action, at.as_path()))
}
