//! A vhost-user-blk client: what a virtual machine is to a storage daemon, with one queue.

use crate::{
    load::{Direction, Durability, Load},
    shared::Shared,
};
use anyhow::{Context as _, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    ops::Range,
    os::fd::AsRawFd as _,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

/// Descriptors of the queue; a request takes three. QEMU's own default for this device.
const QUEUE_SIZE: u16 = 128;

/// A request that takes longer is lost.
const LOST: Duration = Duration::from_secs(10);

/// How a client learns that a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It looks at the ring again and again, and asks the daemon not to signal.
    Polling,
    /// It sleeps until the daemon signals an eventfd, as a guest sleeps until an interrupt.
    Eventfd,
}

/// An open disk.
pub(crate) struct Disk {
    queue: VirtioBlkQueue<'static, u16>,
    notifier: Box<dyn QueueNotifier>,
    signal: Arc<EventFd>,
    /// One block a request in flight.
    memory: Shared,
    capacity: u64,
    /// Last, as the queue lies in memory that it owns.
    transport: Box<VirtioBlkTransport>,
}

impl Disk {
    /// Connects to the socket at `path`, with `bytes` of memory for requests in flight.
    pub(crate) fn connect(path: &Path, bytes: usize) -> anyhow::Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let of_disk = VirtioBlkFeatureFlags::MQ | VirtioBlkFeatureFlags::FLUSH;
        let features = features.bits() | of_disk.bits();
        let text = path.to_str().context("a socket path that is not UTF-8")?;
        let vhost = VhostUser::new(text, features);
        let vhost = vhost.with_context(|| format!("connecting to {text}"))?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(vhost);
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, QUEUE_SIZE)?;
        let queue = queues.pop().context("a disk without a queue")?;
        let flush = VirtioBlkFeatureFlags::FLUSH.bits();
        ensure!(transport.get_features() & flush == flush, "{text} offers no flush");
        let memory = Shared::new(bytes)?;
        let address = memory.bytes.as_ptr().addr();
        transport.map_mem_region(address, bytes, memory.file.as_raw_fd(), 0)?;
        Ok(Self {
            queue,
            notifier: transport.get_submission_notifier(0),
            signal: transport.get_completion_fd(0),
            memory,
            capacity: transport.get_config()?.capacity.to_native() * 512,
            transport,
        })
    }

    /// Bytes of the disk.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Whether the other side of the socket still answers.
    pub(crate) fn is_answered(&self) -> bool {
        self.transport.get_config().is_ok()
    }

    /// Keeps `load` up for its time; requests a second, flushes not counted.
    pub(crate) fn run(&mut self, load: &Load, wait: Wait) -> anyhow::Result<f64> {
        self.queue.set_used_notif_enabled(wait == Wait::Eventfd);
        let mut slots: Vec<_> = (0..load.depth).map(|slot| Slot::new(load, slot)).collect();
        let (mut next, mut done) = (0, 0_u64);
        let mut ended: Vec<u16> = (0..load.depth).collect();
        let begin = Instant::now();
        let mut elapsed = Duration::ZERO;
        while elapsed < load.time {
            for number in ended.drain(..) {
                match slots[usize::from(number)].turn(load) {
                    Turn::Flush => self.queue.flush(number)?,
                    Turn::Request => {
                        self.submit(load, number, load.offset(next))?;
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

    /// Writes `block` at `offset` and waits.
    pub(crate) fn write(&mut self, offset: u64, block: &[u8]) -> anyhow::Result<()> {
        self.memory.bytes[..block.len()].copy_from_slice(block);
        self.queue.write(offset, &self.memory.bytes[..block.len()], 0)?;
        self.notify()?;
        self.drain(Wait::Polling, 1)
    }

    /// Writes all of the first `span` bytes, 1 MiB at a time, with what `fill` put in.
    pub(crate) fn write_all(&mut self, span: u64) -> anyhow::Result<()> {
        for offset in (0..span).step_by(1 << 20) {
            let length = usize::try_from((span - offset).min(1 << 20))?;
            self.queue.write(offset, &self.memory.bytes[..length], 0)?;
            self.notify()?;
            self.drain(Wait::Polling, 1)?;
        }
        Ok(())
    }

    /// Reads `length` bytes at `offset`.
    pub(crate) fn read(&mut self, offset: u64, length: usize) -> anyhow::Result<&[u8]> {
        self.memory.bytes[..length].fill(0);
        self.queue.read(offset, &mut self.memory.bytes[..length], 0)?;
        self.notify()?;
        self.drain(Wait::Polling, 1)?;
        Ok(&self.memory.bytes[..length])
    }

    /// What requests carry that write: anything but zeroes, which some disks would not store.
    pub(crate) fn fill(&mut self) {
        for (index, byte) in self.memory.bytes.iter_mut().enumerate() {
            *byte = u8::try_from(index % 251).map_or(1, |value| value.wrapping_add(1));
        }
    }

    fn submit(&mut self, load: &Load, slot: u16, offset: u64) -> anyhow::Result<()> {
        let range = place(slot, load.block)?;
        match load.direction {
            Direction::Read => self.queue.read(offset, &mut self.memory.bytes[range], slot)?,
            Direction::Write(_) => self.queue.write(offset, &self.memory.bytes[range], slot)?,
        }
        Ok(())
    }

    fn notify(&mut self) -> anyhow::Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify()?;
        }
        Ok(())
    }

    fn drain(&mut self, wait: Wait, mut count: u16) -> anyhow::Result<()> {
        let mut ended = Vec::new();
        while count > 0 {
            self.await_ends(wait, &mut ended)?;
            count = count.saturating_sub(u16::try_from(ended.len())?);
            ended.clear();
        }
        Ok(())
    }

    /// Waits until at least one request has ended; their slots go into `ended`.
    fn await_ends(&mut self, wait: Wait, ended: &mut Vec<u16>) -> anyhow::Result<()> {
        let mut tries = 0_u32;
        let mut since = None;
        loop {
            for completion in self.queue.completions() {
                ensure!(completion.ret == 0, "a request ended with error {}", completion.ret);
                ended.push(completion.context);
            }
            if !ended.is_empty() {
                return Ok(());
            }
            match wait {
                Wait::Eventfd => self.sleep()?,
                Wait::Polling => std::hint::spin_loop(),
            }
            tries = tries.wrapping_add(1);
            if tries.is_multiple_of(4096) {
                let since = *since.get_or_insert_with(Instant::now);
                ensure!(since.elapsed() < LOST, "a request is lost");
            }
        }
    }

    fn sleep(&self) -> anyhow::Result<()> {
        let limit = Timespec::try_from(LOST)?;
        let ready = poll(&mut [PollFd::new(&*self.signal, PollFlags::IN)], Some(&limit))?;
        ensure!(ready > 0, "a request is lost");
        self.signal.read()?;
        Ok(())
    }
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
