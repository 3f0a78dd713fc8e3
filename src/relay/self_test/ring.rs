//! A driver's side of one split virtqueue (virtio 1.2, section 2.7), just large enough to ask an
//! export for blocks: every request is a read, so no disk comes to harm.
//!
//! It knows which requests have not ended, and holds every end against that: one that ends twice,
//! or that nobody asked for, is an error.

use crate::relay::{
    message::{Code, Message},
    said::{Item, RingItem, Said, Word},
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::{
    collections::BTreeSet, fs::File, io, os::fd::OwnedFd, sync::Arc, sync::atomic::Ordering,
};
use vm_memory::{ByteValued, Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

/// The number of the ring.
pub(super) const RING: u32 = 0;

/// Its entries.
pub(super) const SIZE: u16 = 256;

/// Each request takes three descriptors: its header, its block, its status.
const PARTS: u16 = 3;
const SLOTS: u16 = SIZE / PARTS;

/// What one request reads.
const BLOCK: usize = 4096;

/// Where things are in the memory.
const DESCRIPTORS: usize = 0;
const AVAILABLE: usize = 0x1000;
const USED: usize = 0x2000;
const HEADERS: usize = 0x3000;
const STATUSES: usize = 0x4000;
const BLOCKS: usize = 0x5000;
const MEMORY: usize = BLOCKS + SLOTS_LONG * BLOCK;
const SLOTS_LONG: usize = 85;
const _: () = assert!(SLOTS == 85);

/// In both rings: where the running index is, and where the entries begin.
const INDEX: usize = 2;
const ENTRIES: usize = 4;

/// Where the memory begins, for the guest and for the front-end alike.
const BASE: u64 = 1 << 20;

/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// What a status and the last byte of a block are before a request has been done.
const UNTOUCHED: u8 = 0xa5;

/// The memory of a guest that has nothing but this ring.
#[derive(Debug)]
pub(super) struct Ring {
    memory: MmapRegion,
    descriptor: Arc<OwnedFd>,
    /// Requests put into the available ring, and ends seen in the used ring, since the beginning.
    asked: u16,
    seen: u16,
    /// The first descriptors of the requests that have not ended.
    open: BTreeSet<u16>,
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        let descriptor = memfd_create("qsd-csi-self-test", MemfdFlags::CLOEXEC)?;
        ftruncate(&descriptor, u64::try_from(MEMORY).map_err(io::Error::other)?)?;
        let file = FileOffset::new(File::from(descriptor.try_clone()?), 0);
        let memory = MmapRegion::from_file(file, MEMORY).map_err(io::Error::other)?;
        let descriptor = Arc::new(descriptor);
        Ok(Self { memory, descriptor, asked: 0, seen: 0, open: BTreeSet::new() })
    }

    /// Says where the memory is, and the ring in it.
    pub(super) fn describe(&self, said: &mut Said) {
        let address = |at: usize| BASE + wide(at);
        let region = [1, BASE, wide(MEMORY), BASE, 0].map(u64::to_le_bytes).concat();
        let memory = Message::new(Code::SetMemTable, region);
        said.set(
            Item::Memory,
            Word { message: memory, descriptors: vec![self.descriptor.clone()] },
        );
        let state =
            |code, value: u32| Message::new(code, [RING, value].map(u32::to_le_bytes).concat());
        let places = [u64::from(RING), address(DESCRIPTORS), address(USED), address(AVAILABLE), 0];
        let places = Message::new(Code::SetVringAddr, places.map(u64::to_le_bytes).concat());
        for (item, message) in [
            (RingItem::Size, state(Code::SetVringNum, SIZE.into())),
            (RingItem::Base, state(Code::SetVringBase, 0)),
            (RingItem::Addresses, places),
            (RingItem::Enable, state(Code::SetVringEnable, 1)),
        ] {
            said.set(Item::Ring(RING, item), Word { message, descriptors: Vec::new() });
        }
    }

    /// Asks for so many blocks, and shows all of the requests at once; the first descriptors.
    pub(super) fn ask(&mut self, count: usize) -> BTreeSet<u16> {
        let slots = (0..SLOTS).map(|slot| slot * PARTS);
        let free: BTreeSet<_> =
            slots.filter(|head| !self.open.contains(head)).take(count).collect();
        assert_eq!(free.len(), count, "there is room for what is asked at once");
        for head in &free {
            self.write_request(*head);
            let place = usize::from(self.asked % SIZE);
            self.write(AVAILABLE + ENTRIES + 2 * place, *head);
            self.asked = self.asked.wrapping_add(1);
        }
        self.open.extend(&free);
        self.publish(AVAILABLE, self.asked);
        free
    }

    /// Looks which requests have ended since the last look.
    pub(super) fn collect(&mut self) -> Result<(), String> {
        while self.seen != self.published(USED) {
            let place = usize::from(self.seen % SIZE);
            let head: u32 = self.read(USED + ENTRIES + 8 * place);
            let open = u16::try_from(head).ok().filter(|head| self.open.remove(head));
            let head = open.ok_or("a request ended that was not in flight: it was done twice")?;
            self.seen = self.seen.wrapping_add(1);
            let slot = usize::from(head / PARTS);
            let status: u8 = self.read(STATUSES + slot);
            let last: u8 = self.read(BLOCKS + BLOCK * slot + BLOCK - 1);
            if status != 0 || last == UNTOUCHED {
                return Err(format!("a request ended that was not done, with status {status}"));
            }
        }
        Ok(())
    }

    /// The requests that have not ended as far as was seen.
    pub(super) fn open(&self) -> &BTreeSet<u16> {
        &self.open
    }

    /// Ends a request in the back-end's place, without doing it.
    pub(super) fn end(&mut self, head: u16) {
        let place = usize::from(self.seen % SIZE);
        self.write(USED + ENTRIES + 8 * place, [u32::from(head), 0]);
        self.seen = self.seen.wrapping_add(1);
        self.publish(USED, self.seen);
        self.open.remove(&head);
    }

    /// Whether a back-end has laid hands on a request, ended or not.
    pub(super) fn is_touched(&self, head: u16) -> bool {
        self.read::<u8>(STATUSES + usize::from(head / PARTS)) != UNTOUCHED
    }

    fn write_request(&self, head: u16) {
        let slot = usize::from(head / PARTS);
        let (header, block, status) = (HEADERS + 16 * slot, BLOCKS + BLOCK * slot, STATUSES + slot);
        let sector = wide(slot * BLOCK / 512);
        self.write(header, [0, sector]); // VIRTIO_BLK_T_IN
        self.write(block + BLOCK - 1, UNTOUCHED);
        self.write(status, UNTOUCHED);
        for (descriptor, address, length, flags) in [
            (head, header, 16, NEXT),
            (head + 1, block, BLOCK, NEXT | WRITE),
            (head + 2, status, 1, WRITE),
        ] {
            let at = DESCRIPTORS + 16 * usize::from(descriptor);
            self.write(at, BASE + wide(address));
            self.write(at + 8, u32::try_from(length).expect("a block is short"));
            self.write(at + 12, [flags, descriptor + 1]);
        }
    }

    fn publish(&self, ring: usize, index: u16) {
        let memory = self.memory.as_volatile_slice();
        memory.store(index, ring + INDEX, Ordering::Release).expect(WITHIN);
    }

    fn published(&self, ring: usize) -> u16 {
        let memory = self.memory.as_volatile_slice();
        memory.load(ring + INDEX, Ordering::Acquire).expect(WITHIN)
    }

    fn read<T: ByteValued>(&self, at: usize) -> T {
        self.memory.as_volatile_slice().read_obj(at).expect(WITHIN)
    }

    fn write<T: ByteValued>(&self, at: usize, value: T) {
        self.memory.as_volatile_slice().write_obj(value, at).expect(WITHIN);
    }
}

const WITHIN: &str = "it lies within the memory";

fn wide(at: usize) -> u64 {
    u64::try_from(at).expect("usize has at most 64 bits")
}
