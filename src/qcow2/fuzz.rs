//! Fuzzing of image files.

use super::{Error, Map, allocation, create_encrypted, field, grow, header, luks_header};
use crate::units::Bytes;
use rustix::fs::{MemfdFlags, memfd_create};
use std::{fs::File, os::unix::fs::FileExt as _};

/// How much of each cluster is given, where clusters are large; the rest of the file is a hole.
const PART: usize = 1024;

/// The size of the file in such parts, with the holes between them.
const PARTS: u64 = 16;

/// Any bytes, taken for what an image file, or each large cluster of it, begins with.
pub fn image(bytes: &[u8]) {
    let file = holding(bytes);
    let map = match Map::read(&file) {
        Ok(map) => map,
        Err(error) => return refused(&error),
    };
    let size = map.header().size();
    match allocation(&file) {
        Ok(extents) => {
            let ranges: Vec<_> = extents.iter().collect();
            assert!(ranges.iter().all(|range| range.start < range.end));
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            assert!(ranges.last().is_none_or(|last| last.end <= size.count()));
            // A part is what the whole has there.
            let (start, end) = (size.count() / 3, size.count() / 3 * 2);
            let part = map.within(&file, start..end).expect("the whole was read");
            assert_eq!(part, extents.within(start..end));
        }
        Err(error) => refused(&error),
    }
    encrypted(&file);
    for more in [0, 512, 1 << 20] {
        grown(bytes, size.saturating_add(Bytes::new(more)));
    }
}

fn holding(bytes: &[u8]) -> File {
    let file = empty();
    // The last byte of `cluster_bits`.
    let step = match bytes.get(field::CLUSTER_BITS + 3) {
        Some(bits @ 14..=21) => 1 << bits,
        Some(_) | None => 1024,
    };
    for (place, part) in (0..PARTS).zip(bytes.chunks(PART)) {
        file.write_all_at(part, place * step).expect("there is memory");
    }
    file.set_len(PARTS * step).expect("there is memory");
    file
}

/// An overlay takes the LUKS header over as it is.
fn encrypted(file: &File) {
    let Ok(luks) = luks_header(file) else { return };
    let overlay = empty();
    create_encrypted(&overlay, Bytes::new(1 << 20), &luks).expect("memory can be written");
    assert!(luks_header(&overlay).is_ok_and(|taken| taken == luks));
}

/// An image that grew provides what it did before, and one that did not is as it was.
fn grown(bytes: &[u8], size: Bytes) {
    let (old, new) = (holding(bytes), holding(bytes));
    match grow(&new, size) {
        Ok(()) => {
            assert_eq!(header(&new).map(|header| header.size()).ok(), Some(size));
            if let Ok(before) = allocation(&old) {
                assert_eq!(allocation(&new).ok(), Some(before));
            }
        }
        Err(error) => {
            refused(&error);
            assert_eq!(header(&new).ok(), header(&old).ok());
        }
    }
}

/// What is refused says which field or table it is.
fn refused(error: &Error) {
    match error {
        Error::Field { field: name, .. } | Error::Damaged { table: name, .. } => {
            assert!(error.to_string().contains(name));
        }
        _ => assert!(!error.to_string().is_empty()),
    }
}

/// A file in memory.
fn empty() -> File {
    memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("there is memory").into()
}
