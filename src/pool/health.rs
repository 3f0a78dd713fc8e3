//! Whether a pool is what was opened, can be written, and has a disk that answers.

use super::{Error, Pool, Space, open_direct};
use std::{
    io::{self, Read as _},
    path::Path,
};

/// What is read of the disk, and what it is to be aligned to: no disk has larger blocks.
const BLOCK: usize = 4096;

impl Pool {
    /// How full it is, if all is well with it. Takes as long as its disk takes to answer.
    pub fn check(&self) -> Result<Space, Error> {
        self.require_writable()?;
        let space = self.space()?;
        let file = self.identity();
        read_from_disk(&file).map_err(self.io("reading", &file))?;
        Ok(space)
    }
}

/// Has the disk itself read, past what the kernel has in memory.
fn read_from_disk(file: &Path) -> io::Result<()> {
    let mut file = open_direct(file)?;
    let mut buffer = vec![0; 2 * BLOCK];
    let begin = buffer.as_ptr().align_offset(BLOCK);
    file.read(&mut buffer[begin..begin + BLOCK]).map(drop)
}
