//! A reader of layers of its own: what the driver and QEMU wrote is read by neither.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

/// What every L2 table entry of ours says of 32 parts of a cluster: 128 KiB, as 32 times 4 KiB.
const CLUSTER: u64 = 128 << 10;
const PARTS: u64 = 32;
const PART: u64 = CLUSTER / PARTS;

/// Entries of an L2 table, of 16 bytes each.
const ENTRIES: u64 = CLUSTER / 16;

/// Bits of an entry that are no part of an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Offsets of fields (QEMU's docs/interop/qcow2.txt).
const SIZE: u64 = 24;
const L1_TABLE: u64 = 40;

/// One layer.
#[derive(Debug)]
pub(crate) enum Image {
    Raw(File),
    Qcow2(File),
}

impl Image {
    /// The size of the disk that it describes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Raw(file) => file.metadata().unwrap().len(),
            Self::Qcow2(file) => long(file, SIZE),
        }
    }

    /// Opens a layer of this format; `None` where it has gone.
    pub(crate) fn open(path: &Path, format: &str) -> Option<Self> {
        let file = File::open(path).ok()?;
        Some(if format == "raw" { Self::Raw(file) } else { Self::Qcow2(file) })
    }

    /// Puts what this layer has itself over what those below have.
    pub(crate) fn paint(&self, disk: &mut [u8]) {
        let end = disk.len().min(index(self.size()));
        let (disk, beyond) = disk.split_at_mut(end);
        beyond.fill(0);
        match self {
            Self::Raw(file) => read(file, 0, disk),
            Self::Qcow2(file) => {
                for (number, cluster) in (0..).zip(disk.chunks_mut(index(CLUSTER))) {
                    paint_cluster(file, number, cluster);
                }
            }
        }
    }
}

fn paint_cluster(file: &File, number: u64, cluster: &mut [u8]) {
    let table = long(file, long(file, L1_TABLE) + number / ENTRIES * 8) & OFFSET;
    if table == 0 {
        return;
    }
    let entry = table + number % ENTRIES * 16;
    let (offset, parts) = (long(file, entry) & OFFSET, long(file, entry + 8));
    for (part, bytes) in (0..PARTS).zip(cluster.chunks_mut(index(PART))) {
        let (is_data, is_zero) = (parts >> part & 1 == 1, parts >> (part + PARTS) & 1 == 1);
        assert!(!(is_data && is_zero), "part {part} of cluster {number} is data and zero");
        if is_data {
            read(file, offset + part * PART, bytes);
        } else if is_zero {
            bytes.fill(0);
        }
    }
}

/// Reads bytes; those past the end of the file are zeroes.
fn read(file: &File, mut offset: u64, mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        let count = file.read_at(bytes, offset).unwrap();
        if count == 0 {
            bytes.fill(0);
            return;
        }
        bytes = &mut bytes[count..];
        offset += u64::try_from(count).unwrap();
    }
}

fn long(file: &File, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    read(file, offset, &mut bytes);
    u64::from_be_bytes(bytes)
}

fn index(number: u64) -> usize {
    number.try_into().unwrap()
}
