//! The qcow2 format: what is done to an image file that no daemon has open.
//!
//! Daemons do all input and output; this reads and writes what lies around the data, with positioned
//! reads and writes and no daemon. Layouts are the format's (QEMU, `docs/interop/qcow2`). Foreign
//! bytes are checked before they are believed: whatever a file holds, reading it ends soon and takes
//! bounded memory.
//!
//! ```text
//!  an empty image of ours, in clusters of 128 KiB
//!  | 0 header | 1 refcount table | 2 refcount block | 3.. L1 table, all zero |
//! ```

mod create;

pub use create::create;

/// What every image begins with.
const MAGIC: [u8; 4] = *b"QFI\xfb";

/// Incompatible feature: L2 entries with a bitmap of 32 subclusters.
const EXTENDED_L2: u64 = 1 << 4;

/// Where the fields of a header are.
mod field {
    pub(super) const VERSION: usize = 4;
    pub(super) const CLUSTER_BITS: usize = 20;
    pub(super) const SIZE: usize = 24;
    pub(super) const L1_ENTRIES: usize = 36;
    pub(super) const L1_TABLE: usize = 40;
    pub(super) const REFCOUNT_TABLE: usize = 48;
    pub(super) const REFCOUNT_TABLE_CLUSTERS: usize = 56;
    pub(super) const INCOMPATIBLE: usize = 72;
    pub(super) const REFCOUNT_ORDER: usize = 96;
    pub(super) const HEADER_LENGTH: usize = 100;
}
