//! What is done to a disk, said once for both sides of a pair.

use std::{fmt, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Random,
    Sequential,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write(Durability),
}

/// When what is written is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// When a write ends: the disk is writethrough, a plain file opened with `O_DSYNC`.
    AtEnd,
    /// After a flush. Each slot of the queue writes so many times, one write after the other, and
    /// then flushes, as a process would that calls `fdatasync` after so many writes.
    AfterFlush {
        /// The writes before a flush.
        writes: u64,
    },
    /// Whenever the disk likes.
    AtLast,
}

/// Requests of one size, so many at a time, within the first bytes of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) order: Order,
    pub(crate) direction: Direction,
    /// Bytes a request.
    pub(crate) block: u32,
    /// Requests in flight.
    pub(crate) depth: u16,
    /// Bytes of the disk that are touched.
    pub(crate) span: u64,
    pub(crate) time: Duration,
}

impl Load {
    /// Whether it writes, and a write is durable when it ends.
    pub(crate) fn is_durable_at_end(&self) -> bool {
        self.direction == Direction::Write(Durability::AtEnd)
    }

    /// Whether it writes like `other`, but not as durably.
    pub(crate) fn is_otherwise_durable(&self, other: &Self) -> bool {
        let same = (self.order, self.block, self.depth) == (other.order, other.block, other.depth);
        same && matches!(self.direction, Direction::Write(_)) && self.direction != other.direction
    }

    /// The offset of the `nth` request.
    ///
    /// `splitmix64`, a public-domain mixing function, makes the numbers random enough.
    pub(crate) fn offset(&self, nth: u64) -> u64 {
        let blocks = self.span / u64::from(self.block);
        let index = match self.order {
            Order::Sequential => nth,
            Order::Random => mixed(nth),
        };
        index % blocks * u64::from(self.block)
    }
}

fn mixed(nth: u64) -> u64 {
    let mut z = nth.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl fmt::Display for Load {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (direction, how) = match self.direction {
            Direction::Read => ("read", String::new()),
            Direction::Write(Durability::AtEnd) => ("durable write", String::new()),
            Direction::Write(Durability::AfterFlush { writes: 1 }) => {
                ("write", ", flush after each".to_owned())
            }
            Direction::Write(Durability::AfterFlush { writes }) => {
                ("write", format!(", flush after {writes}"))
            }
            Direction::Write(Durability::AtLast) => ("write", ", no flush".to_owned()),
        };
        let order = match self.order {
            Order::Random => "random",
            Order::Sequential => "sequential",
        };
        write!(out, "{} KiB {order} {direction}, depth {}{how}", self.block / 1024, self.depth)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use std::collections::BTreeSet;

    fn load(order: Order) -> Load {
        let time = Duration::ZERO;
        Load { order, direction: Direction::Read, block: 4096, depth: 1, span: 1 << 20, time }
    }

    #[test]
    fn sequential_requests_follow_each_other_and_begin_again() {
        let load = load(Order::Sequential);
        assert_eq!([load.offset(0), load.offset(1), load.offset(256)], [0, 4096, 0]);
    }

    #[test]
    fn random_requests_are_aligned_and_reach_nearly_all_of_the_span() {
        let load = load(Order::Random);
        let offsets: BTreeSet<u64> = (0..2560).map(|nth| load.offset(nth)).collect();
        assert!(offsets.iter().all(|offset| offset % 4096 == 0 && *offset < 1 << 20));
        assert!(offsets.len() > 250, "{}", offsets.len());
    }
}
