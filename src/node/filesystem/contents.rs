//! What is on a device: a file system that volumes can have, nothing at all, or something else.

use super::{Error, Kind, io_error, tool_error};
use crate::{
    blocking::blocking,
    node::{device::LoopDevice, tool::Tool},
    units::Bytes,
};
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use std::{
    fmt,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::time::timeout;

/// `blkid` reads some hundred kilobytes.
const BLKID: Duration = Duration::from_secs(30);

/// Only what is allocated is read, and only until the first byte that is not zero; but somebody may
/// have filled a large volume with zeros.
const SCAN: Duration = Duration::from_mins(10);

/// As much is read at a time.
const CHUNK: u64 = 1 << 20;

/// What a device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, from end to end.
    Nothing,
    /// A file system that volumes can have.
    FileSystem(Kind),
    /// Something else, or who knows what.
    Foreign(String),
}

impl fmt::Display for Contents {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => out.write_str("nothing"),
            Self::FileSystem(kind) => write!(out, "a file system of kind {kind}"),
            Self::Foreign(what) => out.write_str(what),
        }
    }
}

/// Looks what the device holds.
pub async fn probe(device: &LoopDevice) -> Result<Contents, Error> {
    let path = device.path();
    // Low-level: what somebody else noted about the device earlier does not count.
    let tool = Tool::new("blkid", BLKID).args(&["--probe", "--output", "export"]).arg(&path);
    let ended = tool.end().await.map_err(tool_error("probing", &path))?;
    match ended.code() {
        Some(0) => Ok(known(&ended.text())),
        // It also says so of a device that cannot be read.
        Some(2) => unknown(device).await,
        Some(8) => Ok(Contents::Foreign("signatures of several kinds".to_owned())),
        _ => Err(tool_error("probing", &path)(ended.refusal())),
    }
}

/// From the `KEY=value` lines of `blkid`.
pub(in crate::node) fn known(text: &str) -> Contents {
    let value = |key: &str| {
        let mut values = text.lines().filter_map(|line| line.split_once('='));
        values.find_map(|(name, value)| (name == key).then_some(value))
    };
    match (value("TYPE"), value("PTTYPE")) {
        (Some("ext4"), None) => Contents::FileSystem(Kind::Ext4),
        (Some("xfs"), None) => Contents::FileSystem(Kind::Xfs),
        (_, Some(table)) => Contents::Foreign(format!("a partition table ({table})")),
        (Some(other), None) => Contents::Foreign(format!("a signature of {other}")),
        (None, None) => Contents::Foreign("a signature that has no name".to_owned()),
    }
}

/// What nobody knows may be somebody's data all the same.
async fn unknown(device: &LoopDevice) -> Result<Contents, Error> {
    let path = device.path();
    let (size, file) = (device.size()?, device.file().to_owned());
    let gave_up = Arc::new(AtomicBool::new(false));
    let scan = Scan { device: path.clone(), size: size.count(), gave_up: gave_up.clone() };
    let found = timeout(SCAN, blocking(move || scan.first_byte(&file))).await;
    let Ok(found) = found else {
        gave_up.store(true, Ordering::Relaxed);
        return Err(Error::Silent { action: "reading", path });
    };
    Ok(match found.map_err(io_error("reading", &path))? {
        None => Contents::Nothing,
        Some(offset) => {
            let place = Bytes::new(offset);
            Contents::Foreign(format!("data that no known format explains, at byte {place}"))
        }
    })
}

/// A search for a byte that is not zero.
struct Scan {
    device: PathBuf,
    size: u64,
    gave_up: Arc<AtomicBool>,
}

impl Scan {
    /// Where the first one is, as far as is told: holes of the `file` below the device are skipped,
    /// so that an empty volume of any size takes no time. Both ends are read in any case.
    fn first_byte(&self, file: &Path) -> io::Result<Option<u64>> {
        let device = File::open(&self.device)?;
        // What the host still holds back is not in the file below.
        device.sync_all()?;
        let below = File::open(file)?;
        let last = self.size.saturating_sub(CHUNK);
        for start in [0, last] {
            let found = self.search(&device, start, (start + CHUNK).min(self.size))?;
            if found.is_some() {
                return Ok(found);
            }
        }
        let mut offset = 0;
        while let Some((start, end)) = self.next_data(&below, offset)? {
            let found = self.search(&device, start, end)?;
            if found.is_some() {
                return Ok(found);
            }
            offset = end;
        }
        Ok(None)
    }

    /// The next part that is allocated; all the rest where the file does not tell.
    fn next_data(&self, file: &File, offset: u64) -> io::Result<Option<(u64, u64)>> {
        if offset >= self.size {
            return Ok(None);
        }
        let start = match seek(file, SeekFrom::Data(offset)) {
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => offset,
            start => start?,
        };
        let end = seek(file, SeekFrom::Hole(start)).unwrap_or(self.size).min(self.size);
        // An answer that leads nowhere is none.
        Ok(Some((start, if end > start { end } else { self.size })))
    }

    fn search(&self, device: &File, start: u64, end: u64) -> io::Result<Option<u64>> {
        let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or(usize::MAX)];
        let mut offset = start;
        while offset < end {
            if self.gave_up.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let length = usize::try_from((end - offset).min(CHUNK)).unwrap_or(usize::MAX);
            let part = &mut buffer[..length];
            device.read_exact_at(part, offset)?;
            if let Some(at) = part.iter().position(|byte| *byte != 0) {
                return Ok(Some(offset.saturating_add(u64::try_from(at).unwrap_or_default())));
            }
            offset = offset.saturating_add(CHUNK);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_the_two_kinds_without_anything_else_are_ours() {
        let ext4 = "DEVNAME=/dev/loop0\nUUID=1\nVERSION=1.0\nTYPE=ext4\nUSAGE=filesystem\n";
        assert_eq!(known(ext4), Contents::FileSystem(Kind::Ext4));
        for (text, what) in [
            ("TYPE=ext3\nUSAGE=filesystem\n", "ext3"),
            ("TYPE=xfs\nPTTYPE=dos\n", "dos"),
            ("PTTYPE=gpt\n", "gpt"),
            ("TYPE=crypto_LUKS\n", "crypto_LUKS"),
            ("LABEL=TYPE=ext4\n", "no name"),
            ("", "no name"),
        ] {
            let contents = known(text);
            assert!(matches!(&contents, Contents::Foreign(it) if it.contains(what)), "{text}");
        }
    }
}
