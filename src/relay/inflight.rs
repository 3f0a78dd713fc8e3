//! The inflight buffer: shared memory in which a back-end notes which requests it holds.
//!
//! Its layout is the standard's (vhost-user, "Inflight I/O tracking", split virtqueue). A back-end
//! that starts on a buffer whose `version` is set takes up the requests noted in it; on one with
//! `version` 0 it begins with nothing (facts/relay.md sections 4 and 5).

use super::message::Shape;
use std::{fs::File, io, os::fd::OwnedFd};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _, VolatileSlice};

/// Where the fields of a ring's part are, and of an entry in it.
const VERSION: usize = 8;
const LAST: usize = 12;
const ENTRIES: usize = 16;
const ENTRY: usize = 16;
const COUNTER: usize = 8;

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

impl Inflight {
    /// Maps the buffer; its file must be as long as the shape says.
    pub(super) fn map(shape: Shape, descriptor: &OwnedFd) -> io::Result<Self> {
        let file = File::from(descriptor.try_clone()?);
        let size = usize::try_from(shape.size).map_err(io::Error::other)?;
        // vm-memory looks that the file is long enough: no access can run beyond it, unless its
        // owner cuts it, which is why memfds of QEMU and QSD are sealed against shrinking.
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
