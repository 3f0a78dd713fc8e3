//! Whether a pool is what was opened, can be written, and has a disk that answers.

use super::{Pool, Space};
use crate::volume::PoolName;
use rustix::fs::{OFlags, StatVfsMountFlags};
use std::{
    fs::{self, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// What is wrong with a pool as a whole.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// It cannot be looked at: its directory is gone, or its disk fails.
    #[error("pool {pool}: {}", path.display())]
    Unreadable {
        /// The pool.
        pool: PoolName,
        /// What was looked at.
        path: PathBuf,
        /// Why it cannot be read.
        source: io::Error,
    },
    /// Another directory lies at its path: its file system is not mounted there any more.
    #[error(
        "pool {pool}: {} is another directory than the driver opened; mount its file system there \
         again, and start the driver again if that does not help",
        dir.display()
    )]
    Replaced {
        /// The pool.
        pool: PoolName,
        /// Its directory.
        dir: PathBuf,
    },
    /// Its file system takes no writes.
    #[error(
        "pool {pool}: the file system of {} is read-only; see what the kernel's log says of it",
        dir.display()
    )]
    ReadOnly {
        /// The pool.
        pool: PoolName,
        /// Its directory.
        dir: PathBuf,
    },
}

/// What is read of the disk, and what it is to be aligned to: no disk has larger blocks.
const BLOCK: usize = 4096;

impl Pool {
    /// How full it is, if all is well with it. Takes as long as its disk takes to answer.
    pub fn check(&self) -> Result<Space, Trouble> {
        let unreadable = |path: PathBuf| {
            let pool = self.name.clone();
            move |source| Trouble::Unreadable { pool, path, source }
        };
        let (pool, dir) = (self.name.clone(), self.dir.clone());
        let opened = self.lock.metadata().map_err(unreadable(dir.clone()))?;
        let there = fs::metadata(&dir).map_err(unreadable(dir.clone()))?;
        if (opened.dev(), opened.ino()) != (there.dev(), there.ino()) {
            return Err(Trouble::Replaced { pool, dir });
        }
        let fs = rustix::fs::statvfs(&dir)
            .map_err(|error| unreadable(dir.clone())(io::Error::from(error)))?;
        if fs.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Err(Trouble::ReadOnly { pool, dir });
        }
        let file = dir.join("pool.json");
        read_from_disk(&file).map_err(unreadable(file))?;
        Ok(Self::space_of(&fs))
    }
}

/// Has the disk itself read, past what the kernel has in memory.
fn read_from_disk(file: &Path) -> io::Result<()> {
    let direct = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    let mut file = OpenOptions::new().read(true).custom_flags(direct).open(file)?;
    let mut buffer = vec![0; 2 * BLOCK];
    let begin = buffer.as_ptr().align_offset(BLOCK);
    file.read(&mut buffer[begin..begin + BLOCK]).map(drop)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_pool_that_is_carried_away_is_told_of_until_it_is_back() {
        let scratch = tempfile::tempdir().unwrap();
        let (dir, away) = (scratch.path().join("pool"), scratch.path().join("away"));
        let pool = Pool::open("fast".parse().unwrap(), &dir).unwrap();
        assert!(pool.check().is_ok());
        let carry = |from, to| {
            rustix::fs::rename(from, to).unwrap();
        };
        carry(&dir, &away);
        let error = pool.check().unwrap_err();
        assert!(matches!(error, Trouble::Unreadable { .. }), "{error}");
        fs::create_dir(&dir).unwrap(); // as a mount point is without its file system
        let error = pool.check().unwrap_err();
        assert!(matches!(error, Trouble::Replaced { .. }), "{error}");
        assert!(error.to_string().contains("pool fast"), "{error}");
        fs::remove_dir(&dir).unwrap();
        carry(&away, &dir);
        assert!(pool.check().is_ok());
    }
}
