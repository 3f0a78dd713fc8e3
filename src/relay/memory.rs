//! What the relay reads of a guest's memory: how far a ring has come.
//!
//! Read, not mapped: a front-end may cut its memory, and who looks at a mapping of it then dies.

use super::said::Said;
use rustix::io::pread;
use std::io;

/// Where the index of an available and of a used ring is in it (virtio 1.2, sections 2.7.6 and
/// 2.7.8).
const INDEX: u64 = 2;

/// How far a ring has come, modulo 65536.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Requests that the guest has made.
    pub(super) made: u16,
    /// Requests that the back-end has ended.
    pub(super) ended: u16,
}

/// How far a ring has come.
pub(super) fn progress(said: &Said, ring: u32) -> io::Result<Progress> {
    let addresses = said.addresses(ring).ok_or_else(missing)?;
    let [made, ended] = [addresses.available, addresses.used].map(|start| index(said, start));
    Ok(Progress { made: made?, ended: ended? })
}

fn index(said: &Said, start: u64) -> io::Result<u16> {
    let at = start + INDEX;
    let (region, file) = said.region_of(at).ok_or_else(missing)?;
    let mut bytes = [0; 2];
    match pread(file, &mut bytes, region.offset + (at - region.user))? {
        2 => Ok(u16::from_le_bytes(bytes)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the ring is not in the memory")
}
