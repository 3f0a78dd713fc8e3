//! The client of `qsd-csi-vhost` under a load.

use crate::load::{Direction, Durability, Load};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

pub(crate) use qsd_csi_vhost::{Disk, Request, Wait};

/// A disk that can be loaded.
pub(crate) trait Loading {
    /// Keeps `load` up for its time; requests a second, flushes not counted.
    fn keep_up(&mut self, load: &Load, wait: Wait) -> anyhow::Result<f64>;

    /// Writes all of the first `span` bytes, 1 MiB at a time, with what `fill` put in.
    fn write_all(&mut self, span: u64) -> anyhow::Result<()>;

    /// What requests carry that write: anything but zeroes, which some disks would not store.
    fn fill(&mut self);
}

impl Loading for Disk {
    fn keep_up(&mut self, load: &Load, wait: Wait) -> anyhow::Result<f64> {
        self.wait_by(wait);
        let mut slots: Vec<_> = (0..load.depth).map(|slot| Slot::new(load, slot)).collect();
        let (mut next, mut done) = (0, 0_u64);
        let mut ended: Vec<u16> = (0..load.depth).collect();
        let begin = Instant::now();
        let mut elapsed = Duration::ZERO;
        while elapsed < load.time {
            for number in ended.drain(..) {
                match slots[usize::from(number)].turn(load) {
                    Turn::Flush => self.submit(Request::Flush, number)?,
                    Turn::Request => {
                        self.submit(request(load, number, load.offset(next))?, number)?;
                        next += 1;
                    }
                }
            }
            self.notify()?;
            self.await_ends(wait, &mut ended)?;
            let requests = ended.iter().filter(|number| !slots[usize::from(**number)].flushes());
            done += u64::try_from(requests.count())?;
            elapsed = begin.elapsed();
        }
        let under_way = load.depth.saturating_sub(u16::try_from(ended.len())?);
        self.drain(wait, under_way)?;
        Ok(crate::stats::float(done) / elapsed.as_secs_f64())
    }

    fn write_all(&mut self, span: u64) -> anyhow::Result<()> {
        for offset in (0..span).step_by(1 << 20) {
            let length = usize::try_from((span - offset).min(1 << 20))?;
            self.run(Request::Write { offset, memory: 0..length }, Wait::Polling)?;
        }
        Ok(())
    }

    fn fill(&mut self) {
        for (index, byte) in self.memory().iter_mut().enumerate() {
            *byte = u8::try_from(index % 251).map_or(1, |value| value.wrapping_add(1));
        }
    }
}

/// The memory holds one block a request in flight.
fn request(load: &Load, slot: u16, offset: u64) -> anyhow::Result<Request> {
    let memory = place(slot, load.block)?;
    Ok(match load.direction {
        Direction::Read => Request::Read { offset, memory },
        Direction::Write(_) => Request::Write { offset, memory },
    })
}

/// One place in the queue: a process of a guest, with one request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    /// Writes since the last flush.
    written: u64,
    now: Turn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Request,
    Flush,
}

impl Slot {
    /// Their flushes are spread evenly from the start on.
    fn new(load: &Load, number: u16) -> Self {
        let written = match load.direction {
            Direction::Write(Durability::AfterFlush { writes }) => {
                u64::from(number) * writes / u64::from(load.depth)
            }
            Direction::Write(Durability::AtEnd | Durability::AtLast) | Direction::Read => 0,
        };
        Self { written, now: Turn::Request }
    }

    /// What it does next; what it did before has ended.
    fn turn(&mut self, load: &Load) -> Turn {
        let flush_after = match load.direction {
            Direction::Write(Durability::AfterFlush { writes }) => Some(writes),
            Direction::Write(Durability::AtEnd | Durability::AtLast) | Direction::Read => None,
        };
        (self.written, self.now) = match flush_after {
            Some(writes) if self.written >= writes => (0, Turn::Flush),
            Some(_) | None => (self.written + 1, Turn::Request),
        };
        self.now
    }

    fn flushes(self) -> bool {
        self.now == Turn::Flush
    }
}

fn place(slot: u16, block: u32) -> anyhow::Result<Range<usize>> {
    let block = usize::try_from(block)?;
    let start = usize::from(slot) * block;
    Ok(start..start + block)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::load::Order;

    fn turns(durability: Durability, number: u16, count: usize) -> Vec<Turn> {
        let direction = Direction::Write(durability);
        let (order, time) = (Order::Random, Duration::ZERO);
        let load = Load { order, direction, block: 4096, depth: 4, span: 1 << 20, time };
        let mut slot = Slot::new(&load, number);
        (0..count).map(|_| slot.turn(&load)).collect()
    }

    #[test]
    fn a_slot_flushes_after_so_many_writes() {
        use Turn::{Flush, Request};
        let each = Durability::AfterFlush { writes: 1 };
        assert_eq!(turns(each, 0, 4), [Request, Flush, Request, Flush]);
        let pairs = Durability::AfterFlush { writes: 2 };
        assert_eq!(turns(pairs, 0, 4), [Request, Request, Flush, Request]);
        assert_eq!(turns(pairs, 3, 4), [Request, Flush, Request, Request]);
        assert_eq!(turns(Durability::AtLast, 3, 3), [Request; 3]);
    }
}
