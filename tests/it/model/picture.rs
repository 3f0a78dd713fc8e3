//! What a disk holds, sector by sector: the number of the write that was last there.

use std::{collections::BTreeSet, ops::Range};

/// What a disk writes whole or not at all.
pub(crate) const SECTOR: usize = 512;

/// The number of a write; 0 is a sector of zeroes.
pub(crate) type Stamp = u32;

/// The content of a whole disk.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Picture(Vec<Stamp>);

impl Picture {
    /// A disk of so many sectors of zeroes.
    pub(crate) fn blank(sectors: usize) -> Self {
        Self(vec![0; sectors])
    }

    /// What these bytes show; an error tells of the first sector that nobody wrote so.
    pub(crate) fn of(bytes: &[u8]) -> Result<Self, String> {
        read(bytes, 0).map(Self)
    }

    pub(crate) fn sectors(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn at(&self, sectors: Range<usize>) -> &[Stamp] {
        &self.0[sectors]
    }

    /// Makes it larger; what is new is blank.
    pub(crate) fn grow(&mut self, sectors: usize) {
        assert!(sectors >= self.0.len(), "no disk shrinks");
        self.0.resize(sectors, 0);
    }

    /// The same, larger.
    pub(crate) fn grown(&self, sectors: usize) -> Self {
        let mut larger = self.clone();
        larger.grow(sectors);
        larger
    }

    /// Notes a write; with 0 one of zeroes.
    pub(crate) fn write(&mut self, sectors: Range<usize>, stamp: Stamp) {
        self.0[sectors].fill(stamp);
    }

    /// After a discard, each sector holds what it held, or nothing. Notes what was found there.
    pub(crate) fn adopt_discarded(&mut self, first: usize, found: &[Stamp]) -> Result<(), String> {
        for (sector, (is, found)) in (first..).zip(self.0[first..].iter_mut().zip(found)) {
            if *found != 0 && found != is {
                return Err(format!(
                    "sector {sector} was discarded; it held {is}, and now {found}"
                ));
            }
            *is = *found;
        }
        Ok(())
    }

    /// Asserts that these are the same.
    pub(crate) fn assert_is(&self, found: &Self, what: &str) {
        assert!(self == found, "{what}: {}", self.difference(found));
    }

    /// In what another one differs, for a person.
    pub(crate) fn difference(&self, found: &Self) -> String {
        if self.sectors() != found.sectors() {
            return format!("{} sectors, not {}", found.sectors(), self.sectors());
        }
        let differing: Vec<_> =
            (0..self.sectors()).filter(|at| self.0[*at] != found.0[*at]).collect();
        let some = differing.iter().take(8);
        let some = some.map(|at| format!("{at}: {}, not {}", found.0[*at], self.0[*at]));
        let some: Vec<_> = some.collect();
        format!("{} sectors differ; {}", differing.len(), some.join("; "))
    }
}

/// Fills bytes as a write of this number does: every 8 of them say which sector they are of.
pub(crate) fn fill(bytes: &mut [u8], first: usize, stamp: Stamp) {
    for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
        bytes[..8].copy_from_slice(&word(sector, stamp).to_le_bytes());
        // Twice as much each time; a loop over words takes ten times as long in a debug build.
        for length in [8, 16, 32, 64, 128, 256] {
            bytes.copy_within(..length, length);
        }
    }
}

/// The numbers of the writes that left these bytes.
pub(crate) fn read(bytes: &[u8], first: usize) -> Result<Vec<Stamp>, String> {
    let sectors = (first..).zip(bytes.chunks_exact(SECTOR));
    sectors.map(|(sector, bytes)| read_sector(bytes, sector)).collect()
}

fn read_sector(bytes: &[u8], sector: usize) -> Result<Stamp, String> {
    let begin = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    if bytes[8..] != bytes[..SECTOR - 8] {
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let words: BTreeSet<_> = words.collect();
        return Err(format!("sector {sector} is torn: it holds {words:x?}"));
    }
    let stamp = Stamp::try_from(begin >> 32).unwrap();
    if begin != word(sector, stamp) {
        return Err(format!("sector {sector} holds {begin:#x}, which was never written there"));
    }
    Ok(stamp)
}

fn word(sector: usize, stamp: Stamp) -> u64 {
    if stamp == 0 {
        return 0;
    }
    (u64::from(stamp) << 32) | u64::try_from(sector).unwrap()
}

#[test]
fn what_is_filled_is_read_again_and_nothing_else() {
    let mut bytes = vec![0; 4 * SECTOR];
    fill(&mut bytes[SECTOR..3 * SECTOR], 8, 5);
    assert_eq!(read(&bytes, 7).unwrap(), [0, 5, 5, 0]);
    assert!(read(&bytes, 0).unwrap_err().contains("sector 1 holds 0x500000008"));
    bytes[2 * SECTOR - 1] ^= 1;
    assert!(read(&bytes, 7).unwrap_err().contains("sector 8 is torn"));
}
