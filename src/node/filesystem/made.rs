//! Making a file system, and checking one before it is mounted.

use super::{Contents, Error, Kind, contents::probe, io_error, tool_error};
use crate::node::{
    device::{Access, LoopDevice},
    host,
    tool::{Ended, Tool},
};
use std::{fs::File, io, os::unix::fs::OpenOptionsExt as _, path::Path, time::Duration};

/// 1 TiB takes a second.
const MAKE: Duration = Duration::from_mins(5);

/// 1 TiB takes a thousand requests; without it all would be well, too.
const CLEAR: Duration = Duration::from_mins(2);

/// One that was not unmounted takes seconds, one that is broken may take very long; to kill a
/// repair halfway is the worse choice.
const CHECK: Duration = Duration::from_hours(1);

/// What may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// Zeros alone.
    Never,
    /// Whatever is there: the caller noted that it began to make a file system on what held nothing,
    /// and not that it ended.
    BrokenOff,
}

/// Makes a file system, durably. The device must hold nothing, and be used by nobody.
pub async fn make(device: &LoopDevice, kind: Kind, overwrite: Overwrite) -> Result<(), Error> {
    let path = device.path();
    require_unused(&path)?;
    if overwrite == Overwrite::BrokenOff {
        // Gives back what was written, so that the next attempt finds nothing like the first did.
        let discard = Tool::new("blkdiscard", CLEAR).arg("--force").arg(&path).run().await;
        if let Err(error) = discard {
            tracing::warn!(device = %path.display(), error = %crate::chain::Chain(&error), "not cleared");
        }
    }
    let zeroed = match (probe(device).await?, overwrite) {
        (Contents::Nothing, _) => true,
        (_, Overwrite::BrokenOff) => false,
        (contents, Overwrite::Never) => return Err(Error::Occupied { device: path, contents }),
    };
    let program = match kind {
        Kind::Ext4 => make_ext4(zeroed),
        Kind::Xfs => make_xfs(),
    };
    program.arg(&path).run().await.map_err(tool_error("making a file system on", &path))?;
    let sync = || File::open(&path)?.sync_all();
    sync().map_err(io_error("writing", &path))
}

/// A device that is known to be zeros needs no zeros written, now or by the kernel later: 1 TiB takes
/// 16 MiB of its pool, where it would take 17 GiB.
fn make_ext4(zeroed: bool) -> Tool {
    let zeros = if zeroed {
        "nodiscard,assume_storage_prezeroed=1"
    } else {
        "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
    };
    // Nothing is held back for root: there is none in there.
    Tool::new("mkfs.ext4", MAKE).args(&["-q", "-F", "-m", "0", "-E", zeros])
}

/// The log is written in blocks of 4 KiB, which a layer takes as they are. It is what a new file
/// system takes of its pool: 64 MiB up to 128 GiB, 512 MiB for 1 TiB.
fn make_xfs() -> Tool {
    Tool::new("mkfs.xfs", MAKE).args(&["-q", "-f", "-K", "-s", "size=4096"])
}

/// An error where somebody has the device mounted, in whichever namespace.
pub(super) fn require_unused(device: &Path) -> Result<(), Error> {
    let exclusive = libc::O_EXCL | libc::O_CLOEXEC;
    match File::options().read(true).custom_flags(exclusive).open(device) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Err(Error::InUse { device: device.to_owned() })
        }
        opened => opened.map(drop).map_err(io_error("opening", device)),
    }
}

/// Repairs what can be repaired without a person, before the file system is mounted. One that is
/// mounted, or cannot be written, is left as it is; xfs replays its log when it is mounted.
pub async fn check(device: &LoopDevice, kind: Kind) -> Result<(), Error> {
    let path = device.path();
    let mounted = host::is_mounted(device.device_number());
    let mounted = mounted.map_err(io_error("listing the mounts of", &path))?;
    if mounted || kind == Kind::Xfs || device.access() == Access::Read {
        return Ok(());
    }
    let tool = Tool::new("e2fsck", CHECK).arg("-p").arg(&path);
    let ended = tool.end().await.map_err(tool_error("checking", &path))?;
    judge(&ended, kind, &path)
}

/// By the exit code of e2fsck(8): a sum of bits.
pub(super) fn judge(ended: &Ended, kind: Kind, device: &Path) -> Result<(), Error> {
    match ended.code() {
        // 1: repaired. 2: repaired, and a root file system would have to be booted anew.
        Some(0..=3) => Ok(()),
        // 4: not repaired.
        Some(4..=7) => Err(Error::Damaged { kind, device: device.to_owned(), said: ended.said() }),
        _ => Err(tool_error("checking", device)(ended.refusal())),
    }
}
