//! A front-end that says what it is told to, and can be a good one: a disk with one queue.
//!
//! It reaches its own memory through the file of it, as one that maps nothing.

use crate::harness::LIMIT;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    fs::File,
    io::{IoSlice, IoSliceMut, Read as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::FileExt as _, net::UnixStream},
    },
    path::Path,
    time::{Duration, Instant},
};

pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const SET_OWNER: u32 = 3;
pub(crate) const SET_MEM_TABLE: u32 = 5;
pub(crate) const SET_VRING_NUM: u32 = 8;
pub(crate) const SET_VRING_ADDR: u32 = 9;
pub(crate) const SET_VRING_BASE: u32 = 10;
pub(crate) const GET_VRING_BASE: u32 = 11;
pub(crate) const SET_VRING_KICK: u32 = 12;
pub(crate) const SET_VRING_CALL: u32 = 13;
pub(crate) const SET_VRING_ERR: u32 = 14;
pub(crate) const GET_PROTOCOL: u32 = 15;
pub(crate) const SET_PROTOCOL: u32 = 16;
pub(crate) const GET_QUEUE_NUM: u32 = 17;
pub(crate) const SET_VRING_ENABLE: u32 = 18;
pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
pub(crate) const GET_CONFIG: u32 = 24;
pub(crate) const GET_INFLIGHT: u32 = 31;
pub(crate) const SET_INFLIGHT: u32 = 32;
pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
pub(crate) const ADD_MEM_REG: u32 = 37;
pub(crate) const REM_MEM_REG: u32 = 38;

/// The one version there is, as flags.
pub(crate) const PLAIN: u32 = 1;
pub(crate) const REPLY: u32 = 4;
pub(crate) const NEED_REPLY: u32 = 8;

/// Where a front-end's memory is, for the guest and for itself.
pub(crate) const USER: u64 = 0x7000_0000;
pub(crate) const MEMORY: u64 = 1 << 20;
pub(crate) const RING: u16 = 8;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEAD: u64 = 0x4000;
const DATA: u64 = 0x1_0000;

/// Requests of a disk.
const IN: u32 = 0;
const OUT: u32 = 1;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

/// A connection that speaks as it likes.
pub(crate) struct Front {
    pub(crate) socket: UnixStream,
}

/// Numbers, one after the other, little endian.
pub(crate) fn body(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Two half words: a ring and a number.
pub(crate) fn ring(index: u32, number: u32) -> Vec<u8> {
    [index, number].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A region of guest memory, as in `ADD_MEM_REG`: a count or padding, guest, size, user, offset.
pub(crate) fn region(guest: u64, size: u64, user: u64) -> Vec<u8> {
    body(&[1, guest, size, user, 0])
}

/// The addresses of a ring, which its memory is known by.
pub(crate) fn addresses(index: u32, base: u64) -> Vec<u8> {
    let head = ring(index, 0);
    [head, body(&[base + DESCRIPTORS, base + USED, base + AVAILABLE, 0])].concat()
}

/// The shape of an inflight buffer.
pub(crate) fn shape(size: u64, rings: u16, ring_size: u16) -> Vec<u8> {
    let mut bytes = body(&[size, 0]);
    bytes.extend(rings.to_le_bytes());
    bytes.extend(ring_size.to_le_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// Memory to share.
pub(crate) fn memfd(size: u64) -> File {
    let file = File::from(memfd_create("front", MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(size).unwrap();
    file
}

/// Memory that cannot be cut.
pub(crate) fn sealed(size: u64) -> File {
    let file = memfd(size);
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    file
}

pub(crate) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

impl Front {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::try_connect(path).unwrap()
    }

    pub(crate) fn try_connect(path: &Path) -> std::io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(LIMIT))?;
        Ok(Self { socket })
    }

    /// Bytes, as one send; whether all of them were taken.
    pub(crate) fn raw(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(256))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let flags = SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags)
            .is_ok_and(|sent| sent == bytes.len())
    }

    pub(crate) fn say(&self, request: u32, flags: u32, body: &[u8], fds: &[&dyn AsFd]) -> bool {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.raw(&message(request, flags, body), &fds)
    }

    /// What is answered: the body, and the descriptors.
    pub(crate) fn answer(&mut self, request: u32) -> (Vec<u8>, Vec<OwnedFd>) {
        self.try_answer(request).expect("an answer")
    }

    pub(crate) fn try_answer(&mut self, request: u32) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut descriptors = Vec::new();
        let mut there = 0;
        while there < header.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut header[there..])];
            let received = recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::empty());
            let length = received.ok().filter(|one| one.bytes > 0)?.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            there += length;
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, PLAIN | REPLY), "the answer");
        let mut body = vec![0; word(8).try_into().unwrap()];
        self.socket.read_exact(&mut body).ok()?;
        Some((body, descriptors))
    }

    pub(crate) fn ask(&mut self, request: u32, body: &[u8]) -> Vec<u8> {
        assert!(self.say(request, PLAIN, body, &[]), "request {request}");
        self.answer(request).0
    }

    pub(crate) fn ask_number(&mut self, request: u32) -> u64 {
        u64::from_le_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Sets something and has it confirmed.
    pub(crate) fn set(&mut self, request: u32, body: &[u8], fds: &[&dyn AsFd]) {
        assert!(self.say(request, PLAIN | NEED_REPLY, body, fds), "request {request}");
        assert_eq!(self.answer(request).0, [0; 8], "request {request}");
    }

    /// Waits until the other side has hung up.
    pub(crate) fn is_dropped(&mut self) -> bool {
        self.is_dropped_within(LIMIT)
    }

    pub(crate) fn is_dropped_within(&mut self, limit: Duration) -> bool {
        let begin = Instant::now();
        self.socket.set_read_timeout(Some(limit)).unwrap();
        let mut bytes = [0; 4096];
        while begin.elapsed() < limit {
            match self.socket.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
        false
    }

    /// As far as every good front-end comes before there is a ring.
    pub(crate) fn negotiate(&mut self) {
        let features = self.ask_number(GET_FEATURES);
        let protocol = self.ask_number(GET_PROTOCOL);
        assert!(self.say(SET_PROTOCOL, PLAIN, &body(&[protocol]), &[]));
        assert!(self.say(SET_OWNER, PLAIN, &[], &[]));
        assert_eq!(self.ask_number(GET_QUEUE_NUM), 64);
        self.set(SET_FEATURES, &body(&[features & (1 << 32 | 1 << 30)]), &[]);
    }
}

impl Drop for Front {
    /// At once, also where a process that another test has just forked still has a copy.
    fn drop(&mut self) {
        _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

/// The bytes of a message.
pub(crate) fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap();
    let mut bytes: Vec<u8> =
        [request, flags, size].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(body);
    bytes
}

/// A front-end as it should be, with one queue.
pub(crate) struct Disk {
    pub(crate) front: Front,
    memory: File,
    kick: OwnedFd,
    call: OwnedFd,
    next: u16,
}

impl Disk {
    pub(crate) fn open(path: &Path) -> Self {
        let mut front = Front::connect(path);
        front.negotiate();
        let mut disk = Self { front, memory: memfd(MEMORY), kick: event(), call: event(), next: 0 };
        disk.front.set(ADD_MEM_REG, &region(0, MEMORY, USER), &[&disk.memory]);
        disk.start(0);
        disk
    }

    /// Starts the ring where it ended.
    pub(crate) fn start(&mut self, base: u16) {
        let front = &mut self.front;
        front.set(SET_VRING_NUM, &ring(0, RING.into()), &[]);
        front.set(SET_VRING_BASE, &ring(0, base.into()), &[]);
        front.set(SET_VRING_ADDR, &addresses(0, USER), &[]);
        front.set(SET_VRING_CALL, &body(&[0]), &[&self.call]);
        front.set(SET_VRING_KICK, &body(&[0]), &[&self.kick]);
        front.set(SET_VRING_ENABLE, &ring(0, 1), &[]);
    }

    /// Stops the ring; where it ended.
    pub(crate) fn stop(&mut self) -> u16 {
        let answer = self.front.ask(GET_VRING_BASE, &ring(0, 0));
        u16::from_le_bytes(answer[4..6].try_into().unwrap())
    }

    /// Puts a request on the ring, with its data or room for it.
    fn submit(&mut self, request: u32, sector: u64, data: &[u8]) {
        let mut head = request.to_le_bytes().to_vec();
        head.extend([0; 4]);
        head.extend(sector.to_le_bytes());
        head.push(0xff); // the status
        self.memory.write_all_at(&head, HEAD).unwrap();
        self.memory.write_all_at(data, DATA).unwrap();
        let (next, writable) = (1_u16, 2_u16);
        let data_flags = next | if request == IN { writable } else { 0 };
        let length = u32::try_from(data.len()).unwrap();
        for (index, (address, length, flags)) in
            [(HEAD, 16_u32, next), (DATA, length, data_flags), (HEAD + 16, 1, writable)]
                .into_iter()
                .enumerate()
        {
            let index = u16::try_from(index).unwrap();
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend((index + 1).to_le_bytes());
            self.memory.write_all_at(&bytes, DESCRIPTORS + 16 * u64::from(index)).unwrap();
        }
        let slot = AVAILABLE + 4 + 2 * u64::from(self.next % RING);
        self.memory.write_all_at(&[0; 2], slot).unwrap();
        self.next = self.next.wrapping_add(1);
        self.memory.write_all_at(&self.next.to_le_bytes(), AVAILABLE + 2).unwrap();
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// How many requests have ended.
    pub(crate) fn ended(&self) -> u16 {
        let mut used = [0; 2];
        self.memory.read_exact_at(&mut used, USED + 2).unwrap();
        u16::from_le_bytes(used)
    }

    /// Waits for the last request, which succeeds.
    pub(crate) fn finish(&mut self) {
        assert_eq!(self.outcome(), 0, "the request");
    }

    /// Waits for the last request, as a guest does: for the interrupt. Its status.
    pub(crate) fn outcome(&mut self) -> u8 {
        let begin = Instant::now();
        while self.ended() != self.next {
            assert!(begin.elapsed() < LIMIT / 2, "a request does not end");
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
            _ = poll(&mut fds, Some(&limit));
            _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        let mut status = [0xff];
        self.memory.read_exact_at(&mut status, HEAD + 16).unwrap();
        status[0]
    }

    pub(crate) fn begin_write(&mut self, sector: u64, fill: u8) {
        self.submit(OUT, sector, &[fill; 512]);
    }

    pub(crate) fn write(&mut self, sector: u64, fill: u8) {
        self.begin_write(sector, fill);
        self.finish();
    }

    /// Writes so many sectors.
    pub(crate) fn fill(&mut self, sector: u64, sectors: u32, fill: u8) {
        self.submit(OUT, sector, &vec![fill; usize::try_from(sectors).unwrap() * 512]);
        self.finish();
    }

    /// Discards sectors, or has them zeroed.
    pub(crate) fn clear(&mut self, request: u32, sector: u64, sectors: u32) {
        let segment = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
        self.submit(request, 0, &segment);
        self.finish();
    }

    pub(crate) fn read(&mut self, sector: u64) -> Vec<u8> {
        self.try_read(sector).unwrap()
    }

    /// Reads, or fails with this status.
    pub(crate) fn try_read(&mut self, sector: u64) -> Result<Vec<u8>, u8> {
        self.begin_read(sector);
        match self.outcome() {
            0 => {
                let mut data = vec![0; 512];
                self.memory.read_exact_at(&mut data, DATA).unwrap();
                Ok(data)
            }
            status => Err(status),
        }
    }

    pub(crate) fn begin_read(&mut self, sector: u64) {
        self.submit(IN, sector, &[0; 512]);
    }

    /// Writes, and reads it back.
    pub(crate) fn works(&mut self, sector: u64, fill: u8) {
        self.write(sector, fill);
        assert_eq!(self.read(sector), [fill; 512], "sector {sector}");
    }
}
