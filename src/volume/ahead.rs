//! What a copy that has a limit has ahead of it.
//!
//! QEMU counts against the limit all that a job looks at, also what was copied before it was begun
//! again, and what is empty: a copy of a large disk with little in it would take hours, and one that
//! is interrupted ever so often would never end. So the limit is lifted where there is nothing to
//! copy.
//!
//! What the layers provide is read from their files once the job has begun. Where a file is just
//! being written to, the answer may be wrong: then some bytes are copied too fast or too slowly, and
//! no others than should be.

use super::{
    Error, Work,
    changed::{Open, provided},
};
use crate::extents::Extents;
use std::ops::Range;

/// How much of a disk is looked at in one go.
const WINDOW: u64 = 4 << 30;

/// What a copy has ahead of it.
#[derive(Debug)]
pub struct Ahead {
    upper: Vec<Open>,
    below: Vec<Open>,
    size: u64,
    /// Where there is nothing to copy, and what is to be copied after it, as far as is known.
    free: Range<u64>,
    busy: Range<u64>,
}

impl Ahead {
    /// Of work that streams into its upper layer all that is below.
    pub fn of(work: &Work) -> Result<Self, Error> {
        let mut layers = work.layers().iter().cloned();
        let upper: Vec<_> = layers.by_ref().take(1).map(Open::of).collect::<Result<_, _>>()?;
        let below = layers.map(Open::of).collect::<Result<_, _>>()?;
        let size = work.upper().size.count();
        Ok(Self { upper, below, size, free: 0..0, busy: 0..0 })
    }

    /// How many bytes there are from `offset` on before the next that is to be copied.
    pub fn nothing_for(&mut self, offset: u64) -> Result<u64, Error> {
        if self.busy.contains(&offset) || offset >= self.size {
            return Ok(0);
        }
        if !self.free.contains(&offset) {
            self.look(offset)?;
        }
        Ok(if self.free.contains(&offset) { self.free.end - offset } else { 0 })
    }

    fn look(&mut self, offset: u64) -> Result<(), Error> {
        let mut start = offset;
        while start < self.size {
            let window = start..start.saturating_add(WINDOW).min(self.size);
            let (has, wants) = (provided(&self.upper, &window)?, provided(&self.below, &window)?);
            if let Some(next) = first_of(&wants, &has) {
                (self.free, self.busy) = (offset..next.start, next);
                return Ok(());
            }
            start = window.end;
        }
        (self.free, self.busy) = (offset..self.size, self.size..self.size);
        Ok(())
    }
}

/// The first range of what is wanted that is not there.
fn first_of(wanted: &Extents, there: &Extents) -> Option<Range<u64>> {
    wanted.iter().find_map(|range| {
        let mut start = range.start;
        for other in there.within(range.clone()).iter() {
            if start < other.start {
                return Some(start..other.start);
            }
            start = other.end;
        }
        (start < range.end).then_some(start..range.end)
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_to_be_copied_is_what_only_lies_below() {
        let set = |ranges: &[(u64, u64)]| {
            ranges.iter().map(|(start, end)| *start..*end).collect::<Extents>()
        };
        for (wanted, there, first) in [
            (set(&[]), set(&[]), None),
            (set(&[]), set(&[(0, 9)]), None),
            (set(&[(2, 5)]), set(&[]), Some(2..5)),
            (set(&[(2, 5)]), set(&[(0, 9)]), None),
            (set(&[(2, 5)]), set(&[(0, 3)]), Some(3..5)),
            (set(&[(2, 9)]), set(&[(0, 3), (4, 9)]), Some(3..4)),
            (set(&[(2, 5), (7, 9)]), set(&[(2, 5)]), Some(7..9)),
            (set(&[(2, 5), (7, 9)]), set(&[(2, 8)]), Some(8..9)),
        ] {
            assert_eq!(first_of(&wanted, &there), first, "{wanted:?} {there:?}");
        }
    }
}
