//! Growing a file system with its device, while it is mounted.

use super::{
    Error, Kind,
    made::{judge, require_unused},
    mounted::require_mounted,
    tool_error,
};
use crate::{
    node::{
        HostPath,
        device::LoopDevice,
        tool::{self, Tool},
    },
    units::Bytes,
};
use std::{io, time::Duration};

/// What is tried, for errors.
const GROWING: &str = "growing the file system on";

/// Only tables are written.
const GROW: Duration = Duration::from_mins(10);

/// Only tables are read.
const ASK: Duration = Duration::from_secs(30);

/// What is too small for a group of its own stays unused: at the end of ext4, less than a group's
/// tables, which are some 6 MiB.
const UNUSED: Bytes = Bytes::new(8 << 20);

/// All of the tables are read first.
const GROW_UNMOUNTED: Duration = Duration::from_hours(1);

/// What `resize2fs` says without `CAP_SYS_RESOURCE`, which the kernel asks for.
const NOT_PERMITTED: &str = "Permission denied to resize";

/// Has the file system that is mounted at `at` fill its device. One that does already is fine.
pub async fn grow(at: &HostPath, device: &LoopDevice, kind: Kind) -> Result<(), Error> {
    require_mounted(device, at).await?;
    let tool = match kind {
        Kind::Ext4 => Tool::new("resize2fs", GROW).arg(device.path()),
        Kind::Xfs => Tool::new("xfs_growfs", GROW).arg("-d").arg(at.as_path()),
    };
    match tool.run().await {
        Err(tool::Error::Failed { said, .. }) if said.contains(NOT_PERMITTED) => {
            Err(Error::NotPermitted { device: device.path() })
        }
        outcome => outcome.map(drop).map_err(tool_error(GROWING, &device.path())),
    }
}

/// The same before it is mounted, which ext4 allows to those who may not do it later. What grows only
/// while it is mounted is left as it is.
pub async fn grow_unmounted(device: &LoopDevice, kind: Kind) -> Result<(), Error> {
    if kind == Kind::Xfs {
        return Ok(());
    }
    let path = device.path();
    require_unused(&path)?;
    // It grows nothing that was not checked whole.
    let check = Tool::new("e2fsck", GROW_UNMOUNTED).args(&["-f", "-p"]).arg(&path).end().await;
    judge(&check.map_err(tool_error("checking", &path))?, kind, &path)?;
    let grow = Tool::new("resize2fs", GROW_UNMOUNTED).arg(&path).run().await;
    grow.map(drop).map_err(tool_error(GROWING, &path))
}

/// Whether the file system that is mounted at `at` fills its device.
pub async fn is_grown(at: &HostPath, device: &LoopDevice, kind: Kind) -> Result<bool, Error> {
    require_mounted(device, at).await?;
    let tool = match kind {
        Kind::Ext4 => Tool::new("dumpe2fs", ASK).arg("-h").arg(device.path()),
        Kind::Xfs => Tool::new("xfs_growfs", ASK).arg("-n").arg(at.as_path()),
    };
    let measuring = "measuring the file system on";
    let text = tool.run().await.map_err(tool_error(measuring, &device.path()))?;
    let size = match kind {
        Kind::Ext4 => ext4_size(&text),
        Kind::Xfs => xfs_size(&text),
    };
    let size = size.ok_or_else(|| Error::Io {
        action: measuring,
        path: device.path(),
        source: io::Error::other("nobody tells its size"),
    })?;
    Ok(device.size()?.saturating_sub(size) < UNUSED)
}

fn ext4_size(text: &str) -> Option<Bytes> {
    let value = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.split_once(':'));
        let value = values.find_map(|(key, value)| (key == name).then_some(value))?;
        value.trim().parse::<u64>().ok()
    };
    value("Block count")?.checked_mul(value("Block size")?).map(Bytes::new)
}

/// From such as `data     =          bsize=4096   blocks=262144, imaxpct=25`.
fn xfs_size(text: &str) -> Option<Bytes> {
    let line = text.lines().find(|line| line.starts_with("data "))?;
    let value = |name: &str| {
        let mut words = line.split([' ', ',']).filter_map(|word| word.split_once('='));
        words.find_map(|(key, value)| (key == name).then_some(value))?.parse::<u64>().ok()
    };
    value("blocks")?.checked_mul(value("bsize")?).map(Bytes::new)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sizes_are_read_from_what_the_programs_say() {
        let ext4 = "Inode count:              65536\nBlock count:              262144\n\
            Reserved block count:     0\nBlock size:               4096\n";
        assert_eq!(ext4_size(ext4), Some(Bytes::gib(1)));
        let xfs = "meta-data=/dev/loop0  isize=512 agcount=4, agsize=65536 blks\n\
            data     =                       bsize=4096   blocks=262144, imaxpct=25\n\
            log      =internal log           bsize=4096   blocks=16384, version=2\n";
        assert_eq!(xfs_size(xfs), Some(Bytes::gib(1)));
        assert_eq!((ext4_size(""), xfs_size("")), (None, None));
    }
}
