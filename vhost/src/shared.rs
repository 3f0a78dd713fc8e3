//! Memory that a storage daemon can reach: the only `unsafe` of this crate.

use memmap2::MmapMut;
use rustix::fs::{MemfdFlags, memfd_create};
use std::{fs::File, io, os::fd::OwnedFd};

/// Memory of this process that another may map as well.
pub(crate) struct Shared {
    pub(crate) file: File,
    pub(crate) bytes: MmapMut,
}

impl Shared {
    pub(crate) fn new(length: usize) -> io::Result<Self> {
        let memory: OwnedFd = memfd_create("qsd-csi-vhost", MemfdFlags::CLOEXEC)?;
        let file = File::from(memory);
        file.set_len(u64::try_from(length).map_err(io::Error::other)?)?;
        #[expect(unsafe_code, reason = "vhost-user needs memory that the daemon maps too")]
        // SAFETY: the memfd was made right here, has its full length and is never cut. The only
        // other process that maps it is the daemon, which writes to a block of it only while a
        // request for that block is in flight, and nobody looks at the block until that ends.
        let bytes = unsafe { MmapMut::map_mut(&file) }?;
        Ok(Self { file, bytes })
    }
}
