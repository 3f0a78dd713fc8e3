//! A guest's disk that is a block device: read and written past the page cache. It ends with its
//! daemon, and says so with I/O errors.

use super::{
    guest::{Action, Broken, LONGEST},
    picture::{self, SECTOR},
};
use qsd_csi_vhost::Space;
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use std::{
    fs,
    io::{self, Seek as _, SeekFrom},
    ops::Range,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

/// What memory must be aligned to that a device writes from.
const ALIGNMENT: usize = 4096;

/// An open block device.
pub(super) struct Device {
    path: PathBuf,
    file: fs::File,
    memory: Vec<u8>,
}

impl Device {
    /// Opens a device; one that is dead may be opened all the same.
    pub(super) fn open(path: &Path) -> Result<Self, Broken> {
        let mut options = fs::File::options();
        let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let file = broken(file)?;
        let memory = vec![0; LONGEST * SECTOR + ALIGNMENT];
        Ok(Self { path: path.to_owned(), file, memory })
    }

    /// Does one thing, to its end.
    pub(super) fn run(&mut self, action: &Action) -> Result<(), Broken> {
        broken(self.try_run(action))
    }

    fn try_run(&mut self, action: &Action) -> io::Result<()> {
        match action {
            Action::Write { sectors, stamp } => {
                let memory = aligned(&mut self.memory, sectors.len() * SECTOR);
                picture::fill(memory, sectors.start, *stamp);
                self.file.write_all_at(memory, offset(sectors))
            }
            Action::Zero { sectors, space: Space::Keep } => {
                self.allocate(FallocateFlags::ZERO_RANGE, sectors)
            }
            Action::Zero { sectors, space: Space::Free } => {
                let whole = whole(sectors);
                self.zero(&(sectors.start..whole.start))?;
                self.allocate(FallocateFlags::PUNCH_HOLE, &whole)?;
                self.zero(&(whole.end..sectors.end))
            }
            Action::Discard { sectors } => self.discard(&whole(sectors)),
            Action::Flush => self.file.sync_all(),
        }
    }

    fn allocate(&self, way: FallocateFlags, sectors: &Range<usize>) -> io::Result<()> {
        if sectors.is_empty() {
            return Ok(());
        }
        let way = way | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, way, offset(sectors), length(sectors))?)
    }

    fn zero(&mut self, sectors: &Range<usize>) -> io::Result<()> {
        let memory = aligned(&mut self.memory, sectors.len() * SECTOR);
        memory.fill(0);
        self.file.write_all_at(memory, offset(sectors))
    }

    /// `BLKDISCARD`, which is an ioctl that the safe part of our libraries does not have.
    fn discard(&self, sectors: &Range<usize>) -> io::Result<()> {
        if sectors.is_empty() {
            return Ok(());
        }
        let mut discard = Command::new("blkdiscard");
        discard.arg("--force").args(["--offset", &offset(sectors).to_string()]);
        discard.args(["--length", &length(sectors).to_string()]).arg(&self.path);
        let output = discard.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.success() {
            true => Ok(()),
            false if said.contains("Input/output error") => Err(Errno::IO.into()),
            false => Err(io::Error::other(said.into_owned())),
        }
    }

    pub(super) fn read(&mut self, sectors: Range<usize>) -> Result<Vec<u8>, Broken> {
        let mut all = Vec::new();
        for first in sectors.clone().step_by(LONGEST) {
            let part = first..sectors.end.min(first + LONGEST);
            let memory = aligned(&mut self.memory, part.len() * SECTOR);
            memory.fill(0xee);
            broken(self.file.read_exact_at(memory, offset(&part)))?;
            all.extend_from_slice(memory);
        }
        Ok(all)
    }

    pub(super) fn capacity(&mut self) -> Result<u64, Broken> {
        broken(self.file.seek(SeekFrom::End(0)))
    }
}

/// A device that is dead gives I/O errors, or has nothing any more where it was just to grow, and
/// nothing else may go wrong.
fn broken<T>(outcome: io::Result<T>) -> Result<T, Broken> {
    outcome.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::IO | Errno::NXIO | Errno::NOTCONN | Errno::NOSPC) => Broken,
        None if error.kind() == io::ErrorKind::UnexpectedEof => Broken,
        _ => panic!("{error}"),
    })
}

fn aligned(memory: &mut [u8], length: usize) -> &mut [u8] {
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    &mut memory[start..start + length]
}

/// The blocks within these sectors that can be given back. One that is given back in part, in which
/// a qcow2 layer sees no sense, has the kernel discard nothing on the device any more.
fn whole(sectors: &Range<usize>) -> Range<usize> {
    const BLOCK: usize = 4096 / SECTOR;
    let start = sectors.start.next_multiple_of(BLOCK).min(sectors.end);
    start..(sectors.end / BLOCK * BLOCK).max(start)
}

fn offset(sectors: &Range<usize>) -> u64 {
    u64::try_from(sectors.start * SECTOR).unwrap()
}

fn length(sectors: &Range<usize>) -> u64 {
    u64::try_from(sectors.len() * SECTOR).unwrap()
}
