//! What the relay reads of a guest's memory: how far a ring has come, and that only where the
//! back-end notes no requests.

use super::said::Said;
use std::{fs::File, io};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

/// Where the index of a used ring is in it (virtio 1.2, section 2.7.8).
const INDEX: u64 = 2;

/// The index of the used ring: how many requests the back-end has ended, modulo 65536.
pub(super) fn used_index(said: &Said, ring: u32) -> io::Result<u16> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "the ring is not in the memory");
    let used = said.addresses(ring).ok_or_else(missing)?.used;
    let (region, file) = said.region_of(used).ok_or_else(missing)?;
    let size = usize::try_from(region.size).map_err(io::Error::other)?;
    let offset = FileOffset::new(File::from(file.try_clone()?), region.offset);
    // Whole, because huge pages can be mapped only from their beginnings.
    let mapped = MmapRegion::<()>::from_file(offset, size).map_err(io::Error::other)?;
    let at = usize::try_from(used - region.user + INDEX).map_err(io::Error::other)?;
    mapped.as_volatile_slice().read_obj(at).map_err(io::Error::other)
}
