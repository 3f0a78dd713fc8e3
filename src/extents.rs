//! Extents: which bytes of a disk are meant, as ranges.
//!
//! Owns the one form in which layers say what they provide and snapshots what changed: ascending
//! ranges that neither overlap nor touch, so that equal sets are equal values.

use crate::units::Bytes;
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use std::{fs::File, io, ops::Range};

/// A set of bytes of a disk, as ascending ranges that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    ranges: Vec<Range<u64>>,
}

impl Extents {
    /// All bytes of a disk of `size`.
    pub fn whole(size: Bytes) -> Self {
        Self::from(0..size.count())
    }

    /// Adds a range. Cheap where ranges come in ascending order.
    pub fn push(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if range.start < last.start => *self = self.union(&Self::from(range)),
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => self.ranges.push(range),
        }
    }

    /// What is in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut union = Self::default();
        let (mut left, mut right) = (&self.ranges[..], &other.ranges[..]);
        loop {
            let next = match (left.split_first(), right.split_first()) {
                (Some((first, rest)), Some((second, _))) if first.start <= second.start => {
                    left = rest;
                    first
                }
                (_, Some((first, rest))) => {
                    right = rest;
                    first
                }
                (Some((first, rest)), None) => {
                    left = rest;
                    first
                }
                (None, None) => return union,
            };
            union.push(next.clone());
        }
    }

    /// What of it lies within `window`.
    #[must_use]
    pub fn within(&self, window: Range<u64>) -> Self {
        if window.is_empty() {
            return Self::default();
        }
        let first = self.ranges.partition_point(|range| range.end <= window.start);
        let clip = |range: &Range<u64>| range.start.max(window.start)..range.end.min(window.end);
        let inside = self.ranges[first..].iter().take_while(|range| range.start < window.end);
        Self { ranges: inside.map(clip).collect() }
    }

    /// What of it a disk of `size` has.
    #[must_use]
    pub fn clip(&self, size: Bytes) -> Self {
        self.within(0..size.count())
    }

    /// What of it lies at `offset` or after it.
    #[must_use]
    pub fn starting_at(&self, offset: u64) -> Self {
        self.within(offset..u64::MAX)
    }

    /// The ranges, in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range<u64>> {
        self.ranges.iter().cloned()
    }

    /// How many ranges there are.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many bytes they have together.
    pub fn total(&self) -> Bytes {
        self.ranges.iter().map(|range| Bytes::new(range.end - range.start)).sum()
    }
}

/// Of ranges in any order, which may overlap.
impl FromIterator<Range<u64>> for Extents {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut sorted: Vec<_> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        sorted.sort_unstable_by_key(|range| range.start);
        let mut extents = Self::default();
        for range in sorted {
            extents.push(range);
        }
        extents
    }
}

impl From<Range<u64>> for Extents {
    fn from(range: Range<u64>) -> Self {
        let mut extents = Self::default();
        extents.push(range);
        extents
    }
}

impl IntoIterator for Extents {
    type Item = Range<u64>;
    type IntoIter = std::vec::IntoIter<Range<u64>>;

    fn into_iter(self) -> Self::IntoIter {
        self.ranges.into_iter()
    }
}

/// The bytes of a part of a file that are not in holes; what is in holes reads as zeroes.
///
/// Where a file system does not tell holes, all of it. Moves the file's position.
pub fn raw_allocation(file: &File, window: Range<u64>) -> io::Result<Extents> {
    let mut extents = Extents::default();
    let mut end = window.start;
    while end < window.end {
        let Some(start) = next(file, SeekFrom::Data(end))? else { break };
        // A file has a hole at its end, unless it became shorter just now.
        let Some(hole) = next(file, SeekFrom::Hole(start))? else { break };
        extents.push(start..hole);
        end = hole;
    }
    Ok(extents.within(window))
}

/// Where the next data or hole is; none beyond the end of the file.
fn next(file: &File, from: SeekFrom) -> io::Result<Option<u64>> {
    match seek(file, from) {
        Ok(offset) => Ok(Some(offset)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use std::{collections::BTreeSet, os::unix::fs::FileExt as _};

    /// The naive model: each byte for itself.
    fn bytes_of(ranges: &[Range<u64>]) -> BTreeSet<u64> {
        ranges.iter().cloned().flatten().collect()
    }

    fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        vec((0..200_u64, 0..20_u64).prop_map(|(start, length)| start..start + length), 0..20)
    }

    fn require_form(extents: &Extents) {
        let ranges: Vec<_> = extents.iter().collect();
        assert!(ranges.iter().all(|range| range.start < range.end), "{ranges:?}");
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
    }

    fn require(extents: &Extents, model: &BTreeSet<u64>) {
        require_form(extents);
        assert_eq!(bytes_of(&extents.ranges), *model);
        assert_eq!(extents.total(), Bytes::new(model.iter().map(|_| 1).sum()));
    }

    proptest! {
        #[test]
        fn any_order_of_ranges_gives_the_same_set(ranges in ranges()) {
            let model = bytes_of(&ranges);
            require(&ranges.iter().cloned().collect(), &model);
            let mut pushed = Extents::default();
            for range in ranges {
                pushed.push(range);
            }
            require(&pushed, &model);
        }

        #[test]
        fn a_union_has_what_either_has(left in ranges(), right in ranges()) {
            let union = Extents::from_iter(left.clone()).union(&Extents::from_iter(right.clone()));
            require(&union, &bytes_of(&[left, right].concat()));
        }

        #[test]
        fn a_window_shows_what_is_within(ranges in ranges(), start in 0..220_u64, end in 0..220_u64) {
            let extents = Extents::from_iter(ranges.clone());
            let all = bytes_of(&ranges);
            let model = |window: Range<u64>| {
                all.iter().copied().filter(|byte| window.contains(byte)).collect()
            };
            require(&extents.within(start..end), &model(start..end));
            require(&extents.clip(Bytes::new(end)), &model(0..end));
            require(&extents.starting_at(start), &model(start..u64::MAX));
        }
    }

    #[test]
    fn a_disk_without_bytes_has_no_ranges() {
        assert!(Extents::whole(Bytes::ZERO).is_empty());
        let whole = Extents::whole(Bytes::gib(1));
        assert_eq!((whole.len(), whole.iter().next()), (1, Some(0..1 << 30)));
    }

    const TIB: u64 = 1 << 40;

    #[test]
    fn what_was_written_to_a_sparse_file_is_found() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(TIB).unwrap();
        assert!(raw_allocation(&file, 0..TIB).unwrap().is_empty());
        for offset in [0, 1 << 20, TIB - 4096] {
            file.write_all_at(&[1; 4096], offset).unwrap();
        }
        let found = raw_allocation(&file, 0..TIB).unwrap();
        require_form(&found);
        for offset in [0, 1 << 20, TIB - 4096] {
            assert_eq!(found.within(offset..offset + 4096).total(), Bytes::new(4096), "{offset}");
        }
        assert!(found.total() <= Bytes::new(3 << 17), "{found:?}");
        for window in [0..0, 1..4095, 4000..(1 << 20) + 1, 1 << 20..TIB, TIB - 1..2 * TIB] {
            let part = raw_allocation(&file, window.clone()).unwrap();
            assert_eq!(part, found.within(window.clone()), "{window:?}");
        }
    }

    #[test]
    fn a_file_that_ends_in_a_hole_or_has_nothing_is_no_trouble() {
        let file = tempfile::tempfile().unwrap();
        assert!(raw_allocation(&file, 0..TIB).unwrap().is_empty());
        file.write_all_at(&[1; 4096], 0).unwrap();
        file.set_len(1 << 20).unwrap();
        let found = raw_allocation(&file, 0..TIB).unwrap();
        assert_eq!(found.within(0..4096).total(), Bytes::new(4096));
    }
}
