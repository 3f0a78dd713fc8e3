//! The qcow2 format: what is done to an image file that no daemon writes to.
//!
//! Daemons do all input and output of data; this reads and writes what lies around it, with
//! positioned reads and writes and without a process. Layouts are the format's (QEMU,
//! `docs/interop/qcow2`). Foreign bytes are checked before they are believed: whatever a file
//! holds, reading it ends, and takes memory in proportion to what is there.
//!
//! ```text
//!  an empty image of ours, in clusters of 128 KiB
//!  | 0 header | 1 refcount table | 2 refcount block | 3.. L1 table, all zero |
//! ```
//!
//! The volume code makes overlays (`create`) and enlarges them (`grow`); changed blocks are found
//! by what each layer provides (`Map`, `allocation`).

mod allocation;
mod create;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod grow;
mod header;
mod luks;
mod ours;

pub use allocation::{Map, allocation};
pub use create::{create, create_encrypted};
pub use grow::grow;
pub use header::{Header, header};
pub use luks::{LuksHeader, luks_header};
pub use ours::{Expected, header_of_ours, named_backing};

use crate::units::Bytes;
use std::io;

/// What every image begins with.
const MAGIC: [u8; 4] = *b"QFI\xfb";

/// The longest L1 table that QEMU opens is 32 MiB, 8 bytes an entry.
const MOST_L1_ENTRIES: u64 = (32 << 20) / 8;

/// Of an L1 or L2 entry: bits 9 to 55, the offset of what it stands for.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Where the fields of a header are.
mod field {
    pub(super) const VERSION: usize = 4;
    pub(super) const BACKING_FILE: usize = 8;
    pub(super) const BACKING_FILE_LENGTH: usize = 16;
    pub(super) const CLUSTER_BITS: usize = 20;
    pub(super) const SIZE: usize = 24;
    pub(super) const CRYPT_METHOD: usize = 32;
    pub(super) const L1_ENTRIES: usize = 36;
    pub(super) const L1_TABLE: usize = 40;
    pub(super) const REFCOUNT_TABLE: usize = 48;
    pub(super) const REFCOUNT_TABLE_CLUSTERS: usize = 56;
    pub(super) const SNAPSHOTS: usize = 60;
    pub(super) const SNAPSHOTS_TABLE: usize = 64;
    pub(super) const INCOMPATIBLE: usize = 72;
    pub(super) const COMPATIBLE: usize = 80;
    pub(super) const AUTOCLEAR: usize = 88;
    pub(super) const REFCOUNT_ORDER: usize = 96;
    pub(super) const HEADER_LENGTH: usize = 100;
    /// With the padding behind it.
    pub(super) const COMPRESSION: usize = 104;
}

/// Features that a program must know, or leave the image alone.
mod incompatible {
    pub(super) const DIRTY: u64 = 1 << 0;
    pub(super) const CORRUPT: u64 = 1 << 1;
    /// Compressed clusters are not of zlib; nothing here looks into one.
    pub(super) const COMPRESSION_TYPE: u64 = 1 << 3;
    /// L2 entries with a bitmap of 32 subclusters.
    pub(super) const EXTENDED_L2: u64 = 1 << 4;
    pub(super) const KNOWN: u64 = COMPRESSION_TYPE | EXTENDED_L2;
}

/// What is wrong with an image, or with what is asked of it. The caller says which image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("{action} the image")]
    Io {
        /// What was tried, as a gerund.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// It begins with something else.
    #[error("no qcow2 image: it begins with {0:02x?}")]
    Magic([u8; 4]),
    /// Its refcounts are not to be relied on.
    #[error("image is marked dirty: it was not closed; `qemu-img check -r all` repairs it")]
    Dirty,
    /// QEMU found it damaged.
    #[error("image is marked corrupt: QEMU found its tables damaged; see `qemu-img check`")]
    Corrupt,
    /// It has features that we do not know, or do not want.
    #[error("image has incompatible features {0:#x}, which are not supported")]
    Features(u64),
    /// A field of the header makes no sense, or is beyond what is supported.
    #[error("image with {field} {value}, which {why}")]
    Field {
        /// Its name in the format.
        field: &'static str,
        /// What it says.
        value: u64,
        /// What is wrong with that.
        why: &'static str,
    },
    /// A table says what cannot be.
    #[error("image is damaged: {table} entry {index} is {entry:#x}, which {why}")]
    Damaged {
        /// Which table, `L1` or `L2`.
        table: &'static str,
        /// Which entry of it; of all L2 tables together.
        index: u64,
        /// What it says.
        entry: u64,
        /// What is wrong with that.
        why: &'static str,
    },
    /// An image was to become smaller.
    #[error("image has {} bytes and cannot shrink to {}", from.count(), to.count())]
    Shrink {
        /// The size it has.
        from: Bytes,
        /// The size that was asked for.
        to: Bytes,
    },
    /// An image was to become larger than it can.
    #[error("image can grow to {limit} in place, and not to {} bytes", to.count())]
    Limit {
        /// The size it could have.
        limit: Bytes,
        /// The size that was asked for.
        to: Bytes,
    },
}

impl Error {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    /// The same for who goes by its kind: a full file system, or a size that cannot be.
    pub fn into_io(self) -> io::Error {
        let kind = match &self {
            Self::Io { source, .. } => source.kind(),
            Self::Limit { .. } => io::ErrorKind::FileTooLarge,
            Self::Magic(_)
            | Self::Dirty
            | Self::Corrupt
            | Self::Features(_)
            | Self::Field { .. }
            | Self::Damaged { .. }
            | Self::Shrink { .. } => io::ErrorKind::Other,
        };
        io::Error::new(kind, self)
    }
}

/// The 32-bit field of a header that is long enough.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(*bytes[at..].first_chunk().expect("the caller has read so far"))
}

/// The 64-bit field of a header that is long enough.
fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(*bytes[at..].first_chunk().expect("the caller has read so far"))
}

/// A size or index as memory counts.
fn index(count: u64) -> usize {
    usize::try_from(count).expect("tables are bounded, and this is a 64-bit program")
}

#[cfg(test)]
mod sample;
