//! A guest of one disk: a thread with a vhost-user-blk client or a block device, which does what it
//! is told, or loads the disk by itself until it is told to stop.

use super::{
    device::Device,
    picture::{self, Picture, SECTOR, Stamp},
};
use crate::harness::Dice;
use qsd_csi_vhost::{Disk, Request, Space, Wait};
use std::{
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};
use tokio::sync::oneshot;

/// The longest request.
pub(crate) const LONGEST: usize = 256 * 1024 / SECTOR;

/// Requests in flight under load.
const DEPTH: usize = 4;

/// How long a request may take: a daemon that keeps dying is started again ever more patiently.
const PATIENCE: Duration = Duration::from_secs(40);

/// Something to be done.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Write { sectors: Range<usize>, stamp: Stamp },
    Zero { sectors: Range<usize>, space: Space },
    Discard { sectors: Range<usize> },
    Flush,
}

impl Action {
    /// Notes in a picture what it does. A discard does nothing that is known beforehand.
    pub(crate) fn apply(&self, picture: &mut Picture) {
        match self {
            Self::Write { sectors, stamp } => picture.write(sectors.clone(), *stamp),
            Self::Zero { sectors, .. } => picture.write(sectors.clone(), 0),
            Self::Discard { .. } | Self::Flush => {}
        }
    }

    /// Its request, with what it carries in the memory of one of the slots.
    fn prepare(&self, disk: &mut Disk, slot: usize) -> Request {
        let place = |sectors: &Range<usize>| (bytes(sectors.start), bytes(sectors.len()));
        match self {
            Self::Write { sectors, stamp } => {
                let start = slot * LONGEST * SECTOR;
                let memory = start..start + sectors.len() * SECTOR;
                picture::fill(&mut disk.memory()[memory.clone()], sectors.start, *stamp);
                Request::Write { offset: place(sectors).0, memory }
            }
            Self::Zero { sectors, space } => {
                let (offset, length) = place(sectors);
                Request::WriteZeroes { offset, length, space: *space }
            }
            Self::Discard { sectors } => {
                let (offset, length) = place(sectors);
                Request::Discard { offset, length }
            }
            Self::Flush => Request::Flush,
        }
    }
}

/// What a load did so far, in batches; those of one batch are in flight at the same time.
#[derive(Default)]
pub(crate) struct Journal {
    batches: Mutex<Vec<Vec<Action>>>,
    ended: AtomicUsize,
    over: AtomicBool,
    is_broken: AtomicBool,
}

impl Journal {
    /// How many batches have ended.
    pub(crate) fn ended(&self) -> usize {
        self.ended.load(SeqCst)
    }

    /// How many batches were begun.
    pub(crate) fn begun(&self) -> usize {
        self.batches.lock().unwrap().len()
    }

    pub(crate) fn batches(&self) -> Vec<Vec<Action>> {
        self.batches.lock().unwrap().clone()
    }

    /// Whether the last batch met an I/O error, and was the last for that.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(SeqCst)
    }
}

/// The disk is dead: nothing it is told succeeds any more.
#[derive(Debug)]
pub(crate) struct Broken;

/// What a guest has of its disk.
enum Medium {
    Socket(Disk),
    Device(Device),
}

enum Order {
    Do(Vec<Action>, oneshot::Sender<Result<(), Broken>>),
    Read(Range<usize>, oneshot::Sender<Result<Vec<u8>, Broken>>),
    Capacity(oneshot::Sender<Result<u64, Broken>>),
    Load(Load, oneshot::Sender<()>),
}

/// A load that begins: with which dice, on how many sectors, from which write on.
struct Load {
    dice: Dice,
    sectors: usize,
    stamps: Arc<AtomicU32>,
    journal: Arc<Journal>,
}

/// A connected guest. It leaves when this is dropped.
pub(crate) struct Guest {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// A load that runs.
pub(crate) struct Loaded {
    pub(crate) journal: Arc<Journal>,
    end: oneshot::Receiver<()>,
}

impl Loaded {
    /// Ends it: all that it did.
    pub(crate) async fn end(self) -> Vec<Vec<Action>> {
        self.journal.over.store(true, SeqCst);
        self.end.await.expect("the guest lives");
        self.journal.batches()
    }
}

impl Guest {
    /// Connects to a published socket.
    pub(crate) fn connect(socket: &Path) -> Self {
        let disk = Disk::connect(socket, DEPTH * LONGEST * SECTOR).unwrap().patient(PATIENCE);
        Self::of(Medium::Socket(disk))
    }

    /// Opens a published block device. One that is dead may be opened all the same.
    pub(crate) fn open(device: &Path) -> Result<Self, Broken> {
        let device = Device::open(device)?;
        Ok(Self::of(Medium::Device(device)))
    }

    fn of(medium: Medium) -> Self {
        let (orders, taken) = mpsc::channel();
        let thread = thread::spawn(move || serve(medium, &taken));
        Self { orders: Some(orders), thread: Some(thread) }
    }

    /// Has these done, one after the other.
    pub(crate) async fn act(&self, actions: Vec<Action>) {
        self.try_act(actions).await.expect("a socket does not break");
    }

    /// The same where the disk may die.
    pub(crate) async fn try_act(&self, actions: Vec<Action>) -> Result<(), Broken> {
        self.ask(|reply| Order::Do(actions, reply)).await
    }

    /// Reads some sectors.
    pub(crate) async fn read(&self, sectors: Range<usize>) -> Vec<u8> {
        self.try_read(sectors).await.expect("a socket does not break")
    }

    /// The same where the disk may die.
    pub(crate) async fn try_read(&self, sectors: Range<usize>) -> Result<Vec<u8>, Broken> {
        self.ask(|reply| Order::Read(sectors, reply)).await
    }

    /// The size of the disk as it is told.
    pub(crate) async fn capacity(&self) -> Result<u64, Broken> {
        self.ask(Order::Capacity).await
    }

    /// Loads the disk until it is told to end.
    pub(crate) fn load(&self, dice: Dice, sectors: usize, stamps: Arc<AtomicU32>) -> Loaded {
        let journal = Arc::<Journal>::default();
        let (reply, end) = oneshot::channel();
        let load = Load { dice, sectors, stamps, journal: journal.clone() };
        self.send(Order::Load(load, reply));
        Loaded { journal, end }
    }

    async fn ask<T>(&self, order: impl FnOnce(oneshot::Sender<T>) -> Order) -> T {
        let (reply, answer) = oneshot::channel();
        self.send(order(reply));
        answer.await.expect("the guest lives")
    }

    fn send(&self, order: Order) {
        let orders = self.orders.as_ref().expect("it is there until it is dropped");
        orders.send(order).expect("the guest lives");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It panicked where a request was lost, and has said so.
        _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// The life of a guest.
fn serve(mut medium: Medium, orders: &mpsc::Receiver<Order>) {
    for order in orders {
        // Who asked may have given up.
        match order {
            Order::Do(actions, reply) => {
                let one_by_one = &mut actions.into_iter();
                _ = reply.send(one_by_one.try_for_each(|action| medium.run_batch(&[action])));
            }
            Order::Read(sectors, reply) => _ = reply.send(medium.read(sectors)),
            Order::Capacity(reply) => _ = reply.send(medium.capacity()),
            Order::Load(load, reply) => {
                keep_up(&mut medium, load);
                _ = reply.send(());
            }
        }
    }
}

fn keep_up(medium: &mut Medium, mut load: Load) {
    while !load.journal.over.load(SeqCst) {
        let batch = load.batch();
        load.journal.batches.lock().unwrap().push(batch.clone());
        if medium.run_batch(&batch).is_err() {
            load.journal.is_broken.store(true, SeqCst);
            return;
        }
        load.journal.ended.fetch_add(1, SeqCst);
        thread::sleep(Duration::from_micros(load.dice.roll(500)));
    }
}

impl Medium {
    /// A socket never breaks: its guest waits for the next daemon. A device does one thing after
    /// the other.
    fn run_batch(&mut self, batch: &[Action]) -> Result<(), Broken> {
        match self {
            Self::Socket(disk) => run_batch(disk, batch),
            Self::Device(device) => {
                batch.iter().try_for_each(|action| device.run(action))?;
            }
        }
        Ok(())
    }

    fn read(&mut self, sectors: Range<usize>) -> Result<Vec<u8>, Broken> {
        match self {
            Self::Socket(disk) => Ok(read(disk, sectors)),
            Self::Device(device) => device.read(sectors),
        }
    }

    fn capacity(&mut self) -> Result<u64, Broken> {
        match self {
            Self::Socket(disk) => Ok(disk.capacity().unwrap()),
            Self::Device(device) => device.capacity(),
        }
    }
}

impl Load {
    /// Some requests that do not touch each other.
    fn batch(&mut self) -> Vec<Action> {
        let count = 1 + index(self.dice.roll(u64::try_from(DEPTH).unwrap()));
        let mut batch: Vec<(Range<usize>, Action)> = Vec::new();
        for _ in 0..count {
            let sectors = some_sectors(&mut self.dice, self.sectors);
            let apart =
                |other: &Range<usize>| sectors.end <= other.start || other.end <= sectors.start;
            if batch.iter().all(|(other, _)| apart(other)) {
                batch.push((sectors.clone(), self.action(sectors)));
            }
        }
        batch.into_iter().map(|(_, action)| action).collect()
    }

    fn action(&mut self, sectors: Range<usize>) -> Action {
        match self.dice.roll(8) {
            0 => Action::Zero { sectors, space: Space::Free },
            1 => Action::Zero { sectors, space: Space::Keep },
            _ => Action::Write { sectors, stamp: self.stamps.fetch_add(1, SeqCst) },
        }
    }
}

/// Some part of a disk: mostly short, often at a border of 4 or 128 KiB, often not.
pub(crate) fn some_sectors(dice: &mut Dice, of: usize) -> Range<usize> {
    let longest = [1, 8, 16, 64, LONGEST][index(dice.roll(5))].min(of);
    let length = if dice.roll(2) == 0 { longest } else { 1 + below(dice, longest) };
    let grain = [1, 8, 256][index(dice.roll(3))];
    let start = below(dice, of - length + 1) / grain * grain;
    start..start + length
}

fn below(dice: &mut Dice, sides: usize) -> usize {
    index(dice.roll(u64::try_from(sides).unwrap()))
}

fn run_batch(disk: &mut Disk, batch: &[Action]) {
    disk.wait_by(Wait::Eventfd);
    for (slot, action) in batch.iter().enumerate() {
        let request = action.prepare(disk, slot);
        disk.submit(request, slot.try_into().unwrap()).unwrap();
    }
    disk.notify().unwrap();
    disk.drain(Wait::Eventfd, batch.len().try_into().unwrap()).unwrap();
}

fn read(disk: &mut Disk, sectors: Range<usize>) -> Vec<u8> {
    let mut all = Vec::new();
    for first in sectors.clone().step_by(LONGEST) {
        let length = (sectors.end - first).min(LONGEST) * SECTOR;
        disk.memory()[..length].fill(0xee);
        let request = Request::Read { offset: bytes(first), memory: 0..length };
        disk.run(request, Wait::Eventfd).unwrap();
        all.extend_from_slice(&disk.memory()[..length]);
    }
    all
}

fn bytes(sectors: usize) -> u64 {
    u64::try_from(sectors * SECTOR).unwrap()
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap()
}
