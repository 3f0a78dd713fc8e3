//! Mounting and unmounting, also when the device is dead.

use super::{Error, Kind, MountFlags, tool_error};
use crate::{
    blocking::blocking,
    node::{
        HostPath,
        device::{Access, LoopDevice},
        host::{Bound, LOOP_MAJOR, Mounted},
        tool::{self, Tool},
    },
};
use std::time::Duration;

/// A log that is replayed takes seconds.
const MOUNT: Duration = Duration::from_mins(5);

/// What was not written yet is written first; a device that is stuck must not hold up the rest.
const UNMOUNT: Duration = Duration::from_mins(1);

/// Letting go waits for nothing.
const LET_GO: Duration = Duration::from_secs(10);

/// The most mounts on top of each other that are undone in one go.
const LAYERS: usize = 64;

/// What it took to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmounted {
    /// Nothing was mounted.
    Already,
    /// All of it is written, and the device is free.
    Now,
    /// It is out of the way, but somebody has something in it open, or it hangs: the device is free
    /// when that ends.
    Later,
}

/// Mounts the file system on the device at a directory. Already mounted there is fine.
pub async fn mount(
    device: &LoopDevice,
    at: &HostPath,
    kind: Kind,
    flags: &MountFlags,
    access: Access,
) -> Result<Bound, Error> {
    let read_only = access == Access::Read || flags.are_read_only();
    if let Some(mounted) = table(at).await? {
        return match mounted.device == device.device_number() {
            true if mounted.read_only == read_only => Ok(Bound::Already),
            // Also when ext4 stopped writing after an error.
            true if mounted.read_only => Err(at.unsuitable("is mounted read-only already").into()),
            true => Err(at.unsuitable("is mounted writable already").into()),
            false => Err(at.unsuitable("is a mount point of something else").into()),
        };
    }
    at.require_empty()?;
    let flags = flags.after(&own_flags(kind, device.access(), read_only));
    let tool = Tool::new("mount", MOUNT).args(&["-t", kind.as_str(), "-o", &flags, "--"]);
    match tool.arg(device.path()).arg(at.as_path()).run().await {
        Ok(_) => Ok(Bound::Now),
        // The kernel's EUCLEAN, in mount's words.
        Err(tool::Error::Failed { said, .. }) if said.contains("needs cleaning") => {
            Err(Error::Damaged { kind, device: device.path(), said })
        }
        Err(error) => Err(tool_error("mounting", &device.path())(error)),
    }
}

fn own_flags(kind: Kind, device: Access, read_only: bool) -> Vec<&'static str> {
    let mut flags = vec![if read_only { "ro" } else { "rw" }];
    // A log is replayed by writing.
    match (kind, device) {
        (Kind::Ext4, Access::Read) => flags.push("noload"),
        (Kind::Xfs, Access::Read) => flags.extend(["nouuid", "norecovery"]),
        // A clone has the UUID of its origin, and is mounted beside it.
        (Kind::Xfs, Access::Write) => flags.push("nouuid"),
        (Kind::Ext4, Access::Write) => {}
    }
    flags
}

/// Unmounts every file system of ours that is mounted here. Anything else stays, and is an error.
pub async fn unmount(at: &HostPath) -> Result<Unmounted, Error> {
    let mut outcome = Unmounted::Already;
    // A repeat that came in between may have mounted twice.
    for _ in 0..LAYERS {
        let Some(mounted) = table(at).await? else { return Ok(outcome) };
        if mounted.device.0 != LOOP_MAJOR || Kind::parse(&mounted.kind).is_err() {
            return Err(at.unsuitable("is a mount point of something else").into());
        }
        outcome = match (unmount_one(at).await?, outcome) {
            (Unmounted::Later, _) | (_, Unmounted::Later) => Unmounted::Later,
            (now, _) => now,
        };
    }
    Err(at.unsuitable("has too many mounts on top of each other").into())
}

async fn unmount_one(at: &HostPath) -> Result<Unmounted, Error> {
    // Nothing in it is looked at: it may be dead.
    let umount = |limit, more: &[&str]| {
        Tool::new("umount", limit).args(more).args(&["--no-canonicalize", "--"]).arg(at.as_path())
    };
    if umount(UNMOUNT, &[]).run().await.is_ok() {
        return Ok(Unmounted::Now);
    }
    let let_go = umount(LET_GO, &["--lazy"]).run().await;
    let_go.map_err(tool_error("unmounting", at.as_path()))?;
    Ok(Unmounted::Later)
}

async fn table(at: &HostPath) -> Result<Option<Mounted>, Error> {
    let place = at.clone();
    Ok(blocking(move || place.mounted()).await?)
}

/// An error unless the file system on this device is mounted here.
pub(super) async fn require_mounted(device: &LoopDevice, at: &HostPath) -> Result<(), Error> {
    match table(at).await? {
        Some(mounted) if mounted.device == device.device_number() => Ok(()),
        _ => Err(at.unsuitable("does not show the file system").into()),
    }
}
