//! The inflight buffer: shared memory in which a back-end notes which requests it holds.
//!
//! Its layout is the standard's (vhost-user, "Inflight I/O tracking", split virtqueue). A back-end
//! that starts on a buffer whose `version` is set takes up the requests noted in it; on one with
//! `version` 0 it begins with nothing (facts/relay.md sections 4 and 5).

use super::message::Shape;
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, ftruncate, memfd_create,
};
use std::{fs::File, io, os::fd::OwnedFd};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _, VolatileSlice};

/// Where the fields of a ring's part are, and of an entry in it.
const VERSION: usize = 8;
const LAST: usize = 12;
const ENTRIES: usize = 16;
const ENTRY: usize = 16;
const COUNTER: usize = 8;

/// Where libvhost-user lets the part of the next ring begin.
const ALIGNMENT: u64 = 64;

/// The only version there is.
const CURRENT: u16 = 1;

/// A mapped inflight buffer.
#[derive(Debug)]
pub(super) struct Inflight {
    region: MmapRegion,
    shape: Shape,
}

/// A request that a back-end holds: which, and how many came before it on its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Held {
    pub(super) ring: u32,
    pub(super) entry: u32,
    pub(super) counter: u64,
}

/// An empty buffer. A back-end would make one just so, but libvhost-user keeps those that are asked
/// for and not used: a front-end that asks again and again would take all memory.
pub(super) fn create(rings: u16, ring_size: u16) -> io::Result<(Shape, OwnedFd)> {
    let entries = u64::from(ring_size) * 16;
    let size = u64::from(rings) * (16 + entries).next_multiple_of(ALIGNMENT);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let buffer = memfd_create("qsd-csi-inflight", flags)?;
    ftruncate(&buffer, size)?;
    fcntl_add_seals(&buffer, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((Shape { size, offset: 0, rings, ring_size }, buffer))
}

impl Inflight {
    /// Maps the buffer; its file must be as long as the shape says, and stay so.
    pub(super) fn map(shape: Shape, descriptor: &OwnedFd) -> io::Result<Self> {
        let file = File::from(descriptor.try_clone()?);
        let size = usize::try_from(shape.size).map_err(io::Error::other)?;
        require_solid(shape, &file)?;
        let region = MmapRegion::from_file(FileOffset::new(file, shape.offset), size);
        Ok(Self { region: region.map_err(io::Error::other)?, shape })
    }

    /// The requests of these rings (each with its size) that the back-end holds.
    pub(super) fn held(&self, rings: &[(u32, u32)]) -> Vec<Held> {
        let mut held = Vec::new();
        for (ring, size) in rings {
            let Some(part) = self.part(*ring) else { continue };
            for entry in 0..(*size).min(self.shape.ring_size.into()) {
                let at = ENTRIES + ENTRY * usize::try_from(entry).unwrap_or(usize::MAX);
                if part.read_obj::<u8>(at).is_ok_and(|noted| noted == 1) {
                    let counter = part.read_obj::<u64>(at + COUNTER).unwrap_or_default();
                    held.push(Held { ring: *ring, entry, counter });
                }
            }
        }
        held
    }

    /// Has the next back-end, or the next kick, begin with nothing rather than with what is noted.
    pub(super) fn forget(&self, ring: u32) {
        self.set_version(ring, 0);
    }

    /// Has the next back-end take up what is noted, also where `forget` was never seen by the last.
    pub(super) fn keep(&self, ring: u32) {
        self.set_version(ring, CURRENT);
    }

    /// Leaves the ring as a back-end does that dies with one request running and one just ended,
    /// which is in the used ring but still noted here. For the self-test.
    pub(super) fn note_death(&self, ring: u32, running: u16, ended: u16) {
        let Some(part) = self.part(ring) else { return };
        for entry in [running, ended] {
            let at = ENTRIES + ENTRY * usize::from(entry);
            _ = part.write_obj(0_u64, at + COUNTER);
            _ = part.write_obj(1_u8, at);
        }
        _ = part.write_obj(ended, LAST);
    }

    fn set_version(&self, ring: u32, version: u16) {
        if let Some(part) = self.part(ring) {
            // Within the part, by its size.
            _ = part.write_obj(version, VERSION);
        }
    }

    fn part(&self, ring: u32) -> Option<VolatileSlice<'_>> {
        let size = self.region.size() / usize::from(self.shape.rings);
        self.region.get_slice(usize::try_from(ring).ok()?.checked_mul(size)?, size).ok()
    }
}

/// That no access can run beyond the file, whatever its owner does: it would end the worker, and
/// the next one again. The buffers of QEMU and QSD are memory, sealed against shrinking.
fn require_solid(shape: Shape, file: &File) -> io::Result<()> {
    let refuse = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return refuse("it can be cut");
    }
    if fstatfs(file)?.f_type != TMPFS {
        return refuse("it is of huge pages, which may run out"); // they can be sealed, too
    }
    let length = file.metadata()?.len();
    if shape.offset.checked_add(shape.size).is_none_or(|end| end > length) {
        return refuse("its file is too short");
    }
    Ok(())
}

/// What `statfs` calls ordinary shared memory.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

#[cfg(test)]
mod test {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

    const SHAPE: Shape = Shape { size: 4096, offset: 0, rings: 1, ring_size: 128 };

    fn memory(size: u64, seals: SealFlags) -> OwnedFd {
        let file = File::from(memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(size).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file.into()
    }

    #[test]
    fn a_buffer_of_our_own_is_as_a_front_end_may_give_it_back() {
        for (rings, ring_size) in [(1, 1), (1, 3), (2, 128), (64, 1024)] {
            let (shape, buffer) = create(rings, ring_size).unwrap();
            let message = super::super::message::Message::inflight_buffer(shape);
            message.parse(1).unwrap();
            assert_eq!(message.as_shape(), Some(shape));
            assert_eq!(Inflight::map(shape, &buffer).unwrap().held(&[(0, 1024)]), []);
        }
        // As libvhost-user has it: 16 bytes an entry, and 2.
        assert_eq!(create(64, 1024).unwrap().0.size, 64 * 16448);
    }

    #[test]
    fn a_buffer_that_is_sealed_and_long_enough_is_mapped() {
        assert!(Inflight::map(SHAPE, &memory(4096, SealFlags::SHRINK)).is_ok());
    }

    #[test]
    fn a_buffer_that_could_be_cut_or_is_too_short_is_refused() {
        for (size, seals) in
            [(4096, SealFlags::empty()), (4096, SealFlags::GROW), (4095, SealFlags::SHRINK)]
        {
            assert!(Inflight::map(SHAPE, &memory(size, seals)).is_err(), "{size} {seals:?}");
        }
        assert!(Inflight::map(SHAPE, &tempfile::tempfile().unwrap().into()).is_err());
        assert!(Inflight::map(SHAPE, &std::io::pipe().unwrap().1.into()).is_err());
    }
}
