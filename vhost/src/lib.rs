//! A vhost-user-blk client: what a virtual machine is to a storage daemon, with one queue.
//!
//! Tests and benchmarks connect with it to a published `vhost.sock`. It keeps to its connection, as
//! a VM without `reconnect` does: a request that gets no answer is lost.

mod shared;

use anyhow::{Context as _, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shared::Shared;
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

/// A request that takes longer is lost, unless the client is told to be more patient.
const LOST: Duration = Duration::from_secs(10);

/// How a client learns that a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It looks at the ring again and again, and asks the daemon not to signal.
    Polling,
    /// It sleeps until the daemon signals an eventfd, as a guest sleeps until an interrupt.
    Eventfd,
}

/// What becomes of the space of blocks that are zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// It may be given back.
    Free,
    /// It stays.
    Keep,
}

/// What a request is to do. Memory is that of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read into a part of the memory.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// Where to.
        memory: Range<usize>,
    },
    /// Write a part of the memory.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// Where from.
        memory: Range<usize>,
    },
    /// Have these bytes read as zeroes.
    WriteZeroes {
        /// First byte on the disk.
        offset: u64,
        /// How many.
        length: u64,
        /// What becomes of their space.
        space: Space,
    },
    /// Nobody needs these bytes any more.
    Discard {
        /// First byte on the disk.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// Make durable all that has ended.
    Flush,
}

/// An open disk.
pub struct Disk {
    queue: VirtioBlkQueue<'static, u16>,
    notifier: Box<dyn QueueNotifier>,
    signal: Arc<EventFd>,
    memory: Shared,
    patience: Duration,
    /// Last, as the queue lies in memory that it owns.
    transport: Box<VirtioBlkTransport>,
}

impl Disk {
    /// Connects to the socket at `path`, with `bytes` of memory for requests in flight.
    pub fn connect(path: &Path, bytes: usize) -> anyhow::Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let of_disk = VirtioBlkFeatureFlags::MQ
            | VirtioBlkFeatureFlags::FLUSH
            | VirtioBlkFeatureFlags::DISCARD
            | VirtioBlkFeatureFlags::WRITE_ZEROES;
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
            patience: LOST,
            transport,
        })
    }

    /// The same, with so much patience for a request.
    #[must_use]
    pub fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Bytes of the disk at the moment.
    pub fn capacity(&self) -> anyhow::Result<u64> {
        Ok(self.transport.get_config()?.capacity.to_native() * 512)
    }

    /// Whether the other side of the socket still answers.
    pub fn is_answered(&self) -> bool {
        self.transport.get_config().is_ok()
    }

    /// What requests carry. No part may be touched while a request for it is in flight.
    pub fn memory(&mut self) -> &mut [u8] {
        &mut self.memory.bytes
    }

    /// Writes `block` at `offset` and waits.
    pub fn write(&mut self, offset: u64, block: &[u8]) -> anyhow::Result<()> {
        self.memory.bytes[..block.len()].copy_from_slice(block);
        self.run(Request::Write { offset, memory: 0..block.len() }, Wait::Polling)
    }

    /// Reads `length` bytes at `offset` and waits.
    pub fn read(&mut self, offset: u64, length: usize) -> anyhow::Result<&[u8]> {
        self.memory.bytes[..length].fill(0);
        self.run(Request::Read { offset, memory: 0..length }, Wait::Polling)?;
        Ok(&self.memory.bytes[..length])
    }

    /// Has one request done, while no other is in flight.
    pub fn run(&mut self, request: Request, wait: Wait) -> anyhow::Result<()> {
        self.wait_by(wait);
        self.submit(request, 0)?;
        self.notify()?;
        self.drain(wait, 1)
    }

    /// Says how it waits from now on.
    pub fn wait_by(&mut self, wait: Wait) {
        self.queue.set_used_notif_enabled(wait == Wait::Eventfd);
    }

    /// Puts a request into the queue; `slot` is told when it has ended.
    pub fn submit(&mut self, request: Request, slot: u16) -> anyhow::Result<()> {
        let (queue, bytes) = (&mut self.queue, &mut self.memory.bytes);
        match request {
            Request::Read { offset, memory } => queue.read(offset, &mut bytes[memory], slot)?,
            Request::Write { offset, memory } => queue.write(offset, &bytes[memory], slot)?,
            Request::WriteZeroes { offset, length, space } => {
                queue.write_zeroes(offset, length, space == Space::Free, slot)?;
            }
            Request::Discard { offset, length } => queue.discard(offset, length, slot)?,
            Request::Flush => queue.flush(slot)?,
        }
        Ok(())
    }

    /// Tells the daemon of what was submitted.
    pub fn notify(&mut self) -> anyhow::Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify()?;
        }
        Ok(())
    }

    /// Waits until so many requests have ended.
    pub fn drain(&mut self, wait: Wait, mut count: u16) -> anyhow::Result<()> {
        let mut ended = Vec::new();
        while count > 0 {
            self.await_ends(wait, &mut ended)?;
            count = count.saturating_sub(u16::try_from(ended.len())?);
            ended.clear();
        }
        Ok(())
    }

    /// Waits until at least one request has ended; their slots go into `ended`.
    pub fn await_ends(&mut self, wait: Wait, ended: &mut Vec<u16>) -> anyhow::Result<()> {
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
                ensure!(since.elapsed() < self.patience, "a request is lost");
            }
        }
    }

    fn sleep(&self) -> anyhow::Result<()> {
        let limit = Timespec::try_from(self.patience)?;
        let ready = poll(&mut [PollFd::new(&*self.signal, PollFlags::IN)], Some(&limit))?;
        ensure!(ready > 0, "a request is lost");
        self.signal.read()?;
        Ok(())
    }
}
