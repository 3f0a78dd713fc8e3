//! The load of the loss hunt, on a raw disk in the test guest or on a file of the host.
//!
//! ```text
//! hunt write DEVICE [--writers 8] [--readers 4] [--blocks 4096] [--seconds N] [--until FILE]
//!                   [--table FILE] [--journal DISK] [--patience 20]
//! hunt verify DEVICE --table FILE
//! hunt flush DEVICE --writes 320 --every 16
//! ```
//!
//! `write` fills the blocks, prints READY, and loads the disk from all its threads at once until
//! the seconds are over or the file is there. Each writer owns a share of the blocks and has one
//! write in flight, mostly of 4 KiB, now and then of 64; readers check what they read against what
//! was acknowledged before and issued since. Then it reads every block once more, and prints
//!
//! ```text
//! RESULT writes=9 reads=9 errors=0 lost=0 p50_us=1 p99_us=1 max_us=1 stalls_us=3100,4000
//! ```
//!
//! `lost` blocks hold at the end what they must not; `errors` are those and all else that went
//! wrong, each an ERROR line. The times are those of requests (writes, reads, fsyncs); a stall is
//! a time in which none completed. A request that takes longer than the patience is an error too,
//! and ends it all, with no block read once more: threads that wait for a disk cannot be ended, but
//! what is known is told.
//!
//! The journal is a disk or file on which each acknowledged write is noted before its writer goes on,
//! for whoever looks at it from outside of the guest: a sector with "qsd-note", the number of the run,
//! of its writers and of its blocks, then a number for each block, of its last acknowledged write.
//!
//! `verify` checks a disk against the table that `write` left. `flush` writes one after another
//! and flushes after every so many, for those who count what arrives.
//!
//! Only `std`: `scripts/guest/build` compiles it, linked statically. Cargo knows it as an example,
//! to lint and test it.

#![expect(clippy::print_stdout, reason = "it reports to whoever started it")]

use std::{
    collections::HashMap,
    env,
    error::Error,
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    ops::{Range, RangeInclusive},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
    sync::{
        Arc, Barrier, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

type Failure = Box<dyn Error>;

/// The unit of all requests.
const BLOCK: usize = 4096;

/// What a disk writes whole or not at all, so that a read beside a write sees old ones and new.
const SECTOR: usize = 512;

/// The blocks of a long request.
const LONG: usize = 16;

/// The notes in a sector of a journal: 8 bytes each.
const NOTES: usize = SECTOR / 8;

/// One write in so many is a long one.
const LONG_ONE_IN: usize = 16;

/// After so many writes, a writer asks for all to be durable.
const FSYNC_EVERY: usize = 50;

/// The longest time without a completion that is not worth a word.
const STALL: Duration = Duration::from_millis(3);

/// How many stalls are told, the longest ones.
const STALLS_TOLD: usize = 1000;

/// How many errors are told; all are counted.
const ERRORS_TOLD: u64 = 200;

/// How often the main thread looks around.
const TICK: Duration = Duration::from_millis(10);

/// `O_DIRECT` of x86: past the page cache of whoever runs this.
const DIRECT: i32 = 0o40000;

fn main() -> ExitCode {
    match run(env::args().skip(1)) {
        Ok(code) => code,
        Err(error) => {
            println!("ERROR {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut words: impl Iterator<Item = String>) -> Result<ExitCode, Failure> {
    let mode = words.next().unwrap_or_default();
    let device = PathBuf::from(words.next().ok_or("which device?")?);
    let mut options = Options::parse(words)?;
    match mode.as_str() {
        "write" => write(&device, Plan::parse(options)?),
        "verify" => {
            let table = options.take::<PathBuf>("table")?.ok_or("--table is missing")?;
            options.finish()?;
            verify(&device, &table)
        }
        "flush" => {
            let (writes, every) = (options.number("writes", 320)?, options.number("every", 16)?);
            options.finish()?;
            flush(&device, writes, every)
        }
        _ => Err("hunt write, verify or flush".into()),
    }
}

/// The words `--name value` of a command line.
struct Options(HashMap<String, String>);

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut options = HashMap::new();
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").ok_or_else(|| format!("not an option: {word}"))?;
            let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
            options.insert(name.to_owned(), value);
        }
        Ok(Self(options))
    }

    fn take<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, Failure> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        let parsed = value.parse();
        parsed.map(Some).map_err(|_| format!("--{name}: not {value}").into())
    }

    fn number(&mut self, name: &str, default: usize) -> Result<usize, Failure> {
        Ok(self.take(name)?.unwrap_or(default))
    }

    fn finish(self) -> Result<(), Failure> {
        self.0.keys().next().map_or(Ok(()), |name| Err(format!("unknown option --{name}").into()))
    }
}

/// What `write` is to do.
struct Plan {
    writers: usize,
    readers: usize,
    blocks: usize,
    length: Option<Duration>,
    until: Option<PathBuf>,
    table: Option<PathBuf>,
    journal: Option<PathBuf>,
    patience: Duration,
}

impl Plan {
    fn parse(mut options: Options) -> Result<Self, Failure> {
        let plan = Self {
            writers: options.number("writers", 8)?,
            readers: options.number("readers", 4)?,
            blocks: options.number("blocks", 4096)?,
            length: options.take("seconds")?.map(Duration::from_secs),
            until: options.take("until")?,
            table: options.take("table")?,
            journal: options.take("journal")?,
            patience: Duration::from_secs(options.take("patience")?.unwrap_or(20)),
        };
        options.finish()?;
        if plan.writers == 0 || !plan.blocks.is_multiple_of(plan.writers) {
            return Err("the blocks must be shared out evenly".into());
        }
        if plan.blocks / plan.writers < LONG {
            return Err("a share must have room for a long write".into());
        }
        if plan.journal.is_some() && !(plan.blocks / plan.writers).is_multiple_of(NOTES) {
            return Err("a share must fill sectors of the journal".into());
        }
        if plan.length.is_none() && plan.until.is_none() {
            return Err("--seconds or --until says when to end".into());
        }
        Ok(plan)
    }
}

fn write(device: &Path, plan: Plan) -> Result<ExitCode, Failure> {
    let nanos = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.subsec_nanos();
    let run = (u64::from(nanos) << 32) | u64::from(std::process::id());
    let table = Table::new(run, plan.writers, plan.blocks);
    let journal = plan.journal.as_deref().map(|path| Journal::begin(path, &table)).transpose()?;
    let load = Arc::new(Load::new(open(device)?, table, journal, plan));
    if load.wait(load.start()) {
        let last = Arc::clone(&load);
        load.wait(vec![thread::spawn(move || last.verify())]);
    }
    if let Some(path) = &load.plan.table {
        load.table.write(path)?;
    }
    load.report.result(load.lost.load(SeqCst));
    Ok(load.report.verdict())
}

fn verify(device: &Path, table: &Path) -> Result<ExitCode, Failure> {
    let table = Table::from_text(&fs::read_to_string(table)?).ok_or("that is no table")?;
    let report = Report::new(1);
    let lost = Reader::new(&open(device)?, &table, &report, 0).check_all();
    let errors = report.errors.load(SeqCst);
    println!("RESULT blocks={} errors={errors} lost={lost}", table.blocks.len());
    Ok(report.verdict())
}

fn flush(device: &Path, writes: usize, every: usize) -> Result<ExitCode, Failure> {
    let (file, mut buffer, mut flushes) = (open(device)?, Buffer::new(BLOCK), 0);
    buffer.bytes().fill(0xa5);
    for write in 0..writes {
        file.write_all_at(buffer.bytes(), offset(write))?;
        if (write + 1).is_multiple_of(every) {
            file.sync_data()?;
            flushes += 1;
        }
    }
    println!("RESULT writes={writes} flushes={flushes}");
    Ok(ExitCode::SUCCESS)
}

fn open(device: &Path) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(DIRECT).open(device)
}

/// What all threads of `write` share.
struct Load {
    file: File,
    table: Table,
    journal: Option<Journal>,
    plan: Plan,
    report: Report,
    lost: AtomicUsize,
    /// Writers and readers begin together, when all blocks are filled.
    filled: Barrier,
    ready: OnceLock<Instant>,
    over: AtomicBool,
}

impl Load {
    fn new(file: File, table: Table, journal: Option<Journal>, plan: Plan) -> Self {
        let threads = plan.writers + plan.readers;
        Self {
            file,
            table,
            journal,
            // One more, who verifies.
            report: Report::new(threads + 1),
            lost: AtomicUsize::new(0),
            filled: Barrier::new(threads),
            ready: OnceLock::new(),
            over: AtomicBool::new(false),
            plan,
        }
    }

    fn start(self: &Arc<Self>) -> Vec<JoinHandle<()>> {
        let spawn = |thread| {
            let load = Arc::clone(self);
            thread::spawn(move || {
                if thread < load.plan.writers { load.write(thread) } else { load.read(thread) }
            })
        };
        (0..self.plan.writers + self.plan.readers).map(spawn).collect()
    }

    /// Waits for threads to end, and says when they have to. False: some wait for the disk.
    fn wait(&self, threads: Vec<JoinHandle<()>>) -> bool {
        while !threads.iter().all(JoinHandle::is_finished) {
            let hung = self.report.older_than(self.plan.patience);
            if hung > 0 {
                // Told in any case, however many errors came before.
                self.report.errors.fetch_add(1, SeqCst);
                println!("ERROR the disk hangs: {hung} requests are not answered");
                return false;
            }
            if self.is_time() {
                self.over.store(true, SeqCst);
            }
            thread::sleep(TICK);
        }
        for thread in threads {
            thread.join().expect("no thread panics");
        }
        true
    }

    fn is_time(&self) -> bool {
        let Some(ready) = self.ready.get() else { return false };
        self.plan.length.is_some_and(|length| ready.elapsed() >= length)
            || self.plan.until.as_ref().is_some_and(|file| file.exists())
    }

    /// The life of a writer.
    fn write(&self, writer: usize) {
        let share = self.table.share(writer);
        let mut buffer = Buffer::new(LONG * BLOCK);
        for first in share.clone().step_by(LONG) {
            self.write_blocks(writer, first..share.end.min(first + LONG), &mut buffer);
        }
        self.begin();
        let mut dice = Dice::new(self.table.run, writer);
        for write in 1_usize.. {
            if self.over.load(SeqCst) {
                return;
            }
            let length = if dice.roll(LONG_ONE_IN) == 0 { LONG } else { 1 };
            let first = share.start + dice.roll(share.len() - length + 1);
            self.write_blocks(writer, first..first + length, &mut buffer);
            self.report.writes.fetch_add(1, SeqCst);
            if write.is_multiple_of(FSYNC_EVERY)
                && let Err(error) = self.report.request(writer, || self.file.sync_all())
            {
                self.report.error(&format!("fsync: {error}"));
            }
        }
    }

    fn write_blocks(&self, writer: usize, blocks: Range<usize>, buffer: &mut Buffer) {
        let bytes = &mut buffer.bytes()[..blocks.len() * BLOCK];
        for (block, bytes) in blocks.clone().zip(bytes.chunks_exact_mut(BLOCK)) {
            let sequence = self.table.blocks[block].issue();
            for (sector, bytes) in bytes.chunks_exact_mut(SECTOR).enumerate() {
                self.table.stamp(block, sector, sequence).write(bytes);
            }
        }
        match self.report.request(writer, || self.file.write_all_at(bytes, offset(blocks.start))) {
            Ok(()) => {
                blocks.clone().for_each(|block| self.table.blocks[block].acknowledge());
                self.note(blocks, buffer);
            }
            Err(error) => self.report.error(&format!("writing blocks {blocks:?}: {error}")),
        }
    }

    fn note(&self, blocks: Range<usize>, buffer: &mut Buffer) {
        let Some(journal) = &self.journal else { return };
        if let Err(error) = journal.note(&self.table, blocks, &mut buffer.bytes()[..SECTOR]) {
            self.report.error(&format!("the journal: {error}"));
        }
    }

    /// The life of a reader.
    fn read(&self, thread: usize) {
        let mut reader = self.reader(thread);
        self.begin();
        let mut dice = Dice::new(self.table.run, thread);
        while !self.over.load(SeqCst) {
            let length = 1 + dice.roll(LONG);
            let first = dice.roll(self.plan.blocks - length + 1);
            reader.check(first..first + length);
            self.report.reads.fetch_add(1, SeqCst);
        }
    }

    /// What is left of the disk when all threads have ended.
    fn verify(&self) {
        self.report.excuse_pause();
        let lost = self.reader(self.plan.writers + self.plan.readers).check_all();
        self.lost.store(lost, SeqCst);
    }

    fn reader(&self, thread: usize) -> Reader<'_> {
        Reader::new(&self.file, &self.table, &self.report, thread)
    }

    fn begin(&self) {
        if self.filled.wait().is_leader() {
            _ = self.ready.set(Instant::now());
            println!("READY");
        }
    }
}

/// Reads blocks and compares them with the table.
struct Reader<'a> {
    file: &'a File,
    table: &'a Table,
    report: &'a Report,
    thread: usize,
    buffer: Buffer,
}

impl<'a> Reader<'a> {
    fn new(file: &'a File, table: &'a Table, report: &'a Report, thread: usize) -> Self {
        Self { file, table, report, thread, buffer: Buffer::new(LONG * BLOCK) }
    }

    /// Reads all blocks: how many are wrong.
    fn check_all(&mut self) -> usize {
        let end = self.table.blocks.len();
        let parts = (0..end).step_by(LONG).map(|first| first..end.min(first + LONG));
        parts.map(|blocks| self.check(blocks)).sum()
    }

    /// Reads some blocks with one request: how many are wrong, each of which is reported.
    fn check(&mut self, blocks: Range<usize>) -> usize {
        let (table, bytes) = (self.table, &mut self.buffer.bytes()[..blocks.len() * BLOCK]);
        let oldest: Vec<_> = table.blocks[blocks.clone()].iter().map(Block::acknowledged).collect();
        let read = || self.file.read_exact_at(bytes, offset(blocks.start));
        if let Err(error) = self.report.request(self.thread, read) {
            self.report.error(&format!("reading blocks {blocks:?}: {error}"));
            return blocks.len();
        }
        let mut wrong = 0;
        for ((block, oldest), bytes) in blocks.zip(oldest).zip(bytes.chunks_exact(BLOCK)) {
            let newest = table.blocks[block].issued.load(SeqCst);
            if let Err(reason) = judge(bytes, table, block, oldest..=newest) {
                self.report.error(&format!("block {block}: {reason}"));
                wrong += 1;
            }
        }
        wrong
    }
}

/// The sequence numbers of one block: of its last write that was issued, and acknowledged.
#[derive(Default)]
struct Block {
    issued: AtomicU64,
    acknowledged: AtomicU64,
}

impl Block {
    fn issue(&self) -> u64 {
        self.issued.fetch_add(1, SeqCst) + 1
    }

    /// One write of a block is in flight at a time: the last one issued.
    fn acknowledge(&self) {
        self.acknowledged.store(self.issued.load(SeqCst), SeqCst);
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(SeqCst)
    }
}

/// What every block may hold.
struct Table {
    /// Tells the blocks of this run from those of earlier ones.
    run: u64,
    writers: usize,
    blocks: Vec<Block>,
}

impl Table {
    fn new(run: u64, writers: usize, blocks: usize) -> Self {
        Self { run, writers, blocks: (0..blocks).map(|_| Block::default()).collect() }
    }

    /// The blocks that a writer owns.
    fn share(&self, writer: usize) -> Range<usize> {
        let share = self.blocks.len() / self.writers;
        writer * share..(writer + 1) * share
    }

    /// What a write puts into a sector of a block.
    fn stamp(&self, block: usize, sector: usize, sequence: u64) -> Stamp {
        let writer = block / (self.blocks.len() / self.writers);
        let sector = block * (BLOCK / SECTOR) + sector;
        Stamp { run: self.run, sector: wide(sector), writer: wide(writer), sequence }
    }

    /// A line for all, and one a block: acknowledged, issued.
    fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        writeln!(file, "{} {}", self.run, self.writers)?;
        for block in &self.blocks {
            writeln!(file, "{} {}", block.acknowledged(), block.issued.load(SeqCst))?;
        }
        file.flush()
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.lines().map(|line| line.split_once(' '));
        let (run, writers) = lines.next()??;
        let blocks: Option<Vec<_>> = lines
            .map(|line| {
                let (acknowledged, issued) = line?;
                let issued = AtomicU64::new(issued.parse().ok()?);
                Some(Block { issued, acknowledged: AtomicU64::new(acknowledged.parse().ok()?) })
            })
            .collect();
        let table =
            Self { run: run.parse().ok()?, writers: writers.parse().ok()?, blocks: blocks? };
        (table.writers > 0 && table.blocks.len() >= table.writers).then_some(table)
    }
}

/// Where acknowledged writes are noted. Of each of its sectors one writer has all blocks.
struct Journal(File);

impl Journal {
    const MAGIC: u64 = u64::from_le_bytes(*b"qsd-note");

    fn begin(path: &Path, table: &Table) -> io::Result<Self> {
        let (file, mut buffer) = (open(path)?, Buffer::new(SECTOR));
        let head = [Self::MAGIC, table.run, wide(table.writers), wide(table.blocks.len())];
        put(buffer.bytes(), head.into_iter());
        file.write_all_at(buffer.bytes(), 0)?;
        Ok(Self(file))
    }

    /// Writes the sectors with the notes of some blocks.
    fn note(&self, table: &Table, blocks: Range<usize>, buffer: &mut [u8]) -> io::Result<()> {
        for sector in blocks.start / NOTES..blocks.end.div_ceil(NOTES) {
            let noted = table.blocks.iter().skip(sector * NOTES).map(Block::acknowledged);
            put(buffer, noted);
            self.0.write_all_at(buffer, wide((1 + sector) * SECTOR))?;
        }
        Ok(())
    }
}

/// Fills a sector with numbers as long as there are some.
fn put(sector: &mut [u8], numbers: impl Iterator<Item = u64>) {
    for (bytes, number) in sector.chunks_exact_mut(8).zip(numbers) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
}

/// The words every sector begins with, and from which all others follow.
#[derive(Clone, Copy, PartialEq)]
struct Stamp {
    run: u64,
    sector: u64,
    writer: u64,
    sequence: u64,
}

impl Stamp {
    const MAGIC: u64 = u64::from_le_bytes(*b"qsd-hunt");

    fn words(self) -> impl Iterator<Item = u64> {
        let head = [Self::MAGIC, self.run, self.sector, self.writer, self.sequence];
        // Any odd number would do; these are the golden ratio and Knuth's for MMIX.
        let mix =
            |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let seed = head.into_iter().fold(0, mix);
        let body = (1..).map(move |n: u64| seed ^ n.wrapping_mul(6_364_136_223_846_793_005));
        head.into_iter().chain(body).take(SECTOR / 8)
    }

    fn write(self, sector: &mut [u8]) {
        put(sector, self.words());
    }

    /// The stamp a sector claims to have, if it has one.
    fn read(sector: &[u8]) -> Option<Self> {
        let mut words = words_of(sector);
        let mut next = || words.next().expect("a sector has 64 words");
        let is_ours = next() == Self::MAGIC;
        let stamp = Self { run: next(), sector: next(), writer: next(), sequence: next() };
        is_ours.then_some(stamp)
    }
}

fn words_of(sector: &[u8]) -> impl Iterator<Item = u64> {
    let words = sector.chunks_exact(8);
    words.map(|bytes| u64::from_le_bytes(bytes.try_into().expect("chunks of 8 bytes")))
}

/// Whether a block holds, in each of its sectors, something that was written there, neither older
/// nor newer than allowed.
fn judge(
    bytes: &[u8],
    table: &Table,
    block: usize,
    allowed: RangeInclusive<u64>,
) -> Result<(), String> {
    for (sector, bytes) in bytes.chunks_exact(SECTOR).enumerate() {
        let Some(found) = Stamp::read(bytes) else {
            let what = if bytes.iter().all(|byte| *byte == 0) { "zeros" } else { "garbage" };
            return Err(format!("sector {sector} holds {what}, not one of {allowed:?}"));
        };
        let Stamp { sequence, .. } = found;
        let wanted = table.stamp(block, sector, sequence);
        if found.run != wanted.run {
            return Err(format!("sector {sector} holds what an earlier run wrote"));
        }
        if found != wanted {
            return Err(format!("sector {sector} holds sector {} of the disk", found.sector));
        }
        if !wanted.words().eq(words_of(bytes)) {
            return Err(format!("sector {sector} holds half of write {sequence}"));
        }
        if !allowed.contains(&sequence) {
            return Err(format!("sector {sector} holds write {sequence}, not one of {allowed:?}"));
        }
    }
    Ok(())
}

/// What is known of the run so far.
struct Report {
    start: Instant,
    writes: AtomicU64,
    reads: AtomicU64,
    errors: AtomicU64,
    completed: Mutex<Completed>,
    /// Since when each thread waits for its request.
    waiting: Vec<Mutex<Option<Instant>>>,
}

/// The requests that were answered.
#[derive(Default)]
struct Completed {
    last: Duration,
    /// In microseconds, and small: the guest has little memory.
    latencies: Vec<u32>,
    stalls: Vec<Duration>,
}

impl Report {
    fn new(threads: usize) -> Self {
        Self {
            start: Instant::now(),
            writes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            completed: Mutex::default(),
            waiting: (0..threads).map(|_| Mutex::default()).collect(),
        }
    }

    /// Does a request of a thread, and remembers how long it took.
    fn request<T>(&self, thread: usize, io: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        *lock(&self.waiting[thread]) = Some(begin);
        let outcome = io();
        let latency = u32::try_from(begin.elapsed().as_micros()).unwrap_or(u32::MAX);
        let mut completed = lock(&self.completed);
        completed.latencies.push(latency);
        let now = self.start.elapsed();
        let pause = now.saturating_sub(completed.last);
        if pause > STALL {
            completed.stalls.push(pause);
        }
        completed.last = now;
        *lock(&self.waiting[thread]) = None;
        outcome
    }

    /// Nobody asked anything of the disk since the last completion.
    fn excuse_pause(&self) {
        lock(&self.completed).last = self.start.elapsed();
    }

    /// How many requests have been waiting for so long.
    fn older_than(&self, patience: Duration) -> usize {
        let waiting = self.waiting.iter().filter_map(|waiting| *lock(waiting));
        waiting.filter(|since| since.elapsed() > patience).count()
    }

    fn error(&self, what: &str) {
        if self.errors.fetch_add(1, SeqCst) < ERRORS_TOLD {
            println!("ERROR {what}");
        }
    }

    fn result(&self, lost: usize) {
        let mut completed = lock(&self.completed);
        completed.latencies.sort_unstable();
        let Completed { latencies, stalls, .. } = &*completed;
        let percentile = |percent| {
            let rank = latencies.len().saturating_sub(1) * percent / 100;
            latencies.get(rank).copied().unwrap_or_default()
        };
        let stalls: Vec<_> = longest(stalls).iter().map(|us| us.as_micros().to_string()).collect();
        println!(
            "RESULT writes={} reads={} errors={} lost={lost} p50_us={} p99_us={} max_us={} stalls_us={}",
            self.writes.load(SeqCst),
            self.reads.load(SeqCst),
            self.errors.load(SeqCst),
            percentile(50),
            percentile(99),
            percentile(100),
            stalls.join(",")
        );
    }

    fn verdict(&self) -> ExitCode {
        if self.errors.load(SeqCst) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// The longest stalls, in order of time.
fn longest(stalls: &[Duration]) -> Vec<Duration> {
    let mut sorted = stalls.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let least = sorted.get(STALLS_TOLD).copied().unwrap_or_default();
    stalls.iter().copied().filter(|stall| *stall > least).collect()
}

/// A thread that panicked ends the run elsewhere.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory where direct I/O wants it.
struct Buffer {
    bytes: Vec<u8>,
    range: Range<usize>,
}

impl Buffer {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, range: start..start + length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.range.clone()]
    }
}

/// Numbers that look random; the constants are Knuth's for MMIX.
struct Dice(u64);

impl Dice {
    fn new(run: u64, thread: usize) -> Self {
        Self(run ^ (wide(thread) << 16))
    }

    /// A number below `sides`.
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % sides
    }
}

fn offset(block: usize) -> u64 {
    wide(block * BLOCK)
}

fn wide(number: usize) -> u64 {
    number.try_into().expect("64 bits")
}

#[cfg(test)]
mod test {
    use super::*;

    /// A file that was loaded for a moment.
    struct Hunted {
        dir: PathBuf,
    }

    impl Hunted {
        fn new(name: &str) -> Self {
            let dir = env::temp_dir().join(format!("hunt-{}-{name}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            let hunted = Self { dir };
            File::create_new(hunted.path("disk")).unwrap().set_len(1 << 20).unwrap();
            let table = hunted.path("table").display().to_string();
            let plan = ["--writers", "4", "--readers", "2", "--blocks", "256", "--seconds", "1"];
            let plan = plan.into_iter().chain(["--table", &table]).map(str::to_owned);
            let plan = Plan::parse(Options::parse(plan).unwrap()).unwrap();
            assert_eq!(write(&hunted.path("disk"), plan).unwrap(), ExitCode::SUCCESS);
            hunted
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.join(name)
        }

        fn table(&self) -> Table {
            Table::from_text(&fs::read_to_string(self.path("table")).unwrap()).unwrap()
        }

        /// How many blocks are wrong when sector 3 of block 17 holds this.
        fn lost_with(&self, sector: &[u8]) -> usize {
            let file = File::options().read(true).write(true).open(self.path("disk")).unwrap();
            let place = offset(17) + wide(3 * SECTOR);
            let mut before = [0; SECTOR];
            file.read_exact_at(&mut before, place).unwrap();
            file.write_all_at(sector, place).unwrap();
            file.sync_all().unwrap();
            let report = Report::new(1);
            let lost = Reader::new(&file, &self.table(), &report, 0).check_all();
            file.write_all_at(&before, place).unwrap();
            lost
        }

        fn lost_with_stamp(&self, change: impl FnOnce(&mut Stamp)) -> usize {
            let table = self.table();
            let mut stamp = table.stamp(17, 3, table.blocks[17].acknowledged());
            change(&mut stamp);
            let mut sector = [0; SECTOR];
            stamp.write(&mut sector);
            self.lost_with(&sector)
        }
    }

    impl Drop for Hunted {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.dir).unwrap();
        }
    }

    #[test]
    fn a_disk_that_loses_nothing_passes() {
        let hunted = Hunted::new("passes");
        let verdict = verify(&hunted.path("disk"), &hunted.path("table")).unwrap();
        assert_eq!(verdict, ExitCode::SUCCESS);
        assert_eq!(hunted.lost_with_stamp(|_| {}), 0, "what is there may be put there");
        assert!(hunted.table().blocks.iter().map(Block::acknowledged).max().unwrap() > 1);
    }

    #[test]
    fn every_kind_of_damage_is_found() {
        let hunted = Hunted::new("damage");
        assert_eq!(hunted.lost_with(&[0; SECTOR]), 1, "zeros");
        assert_eq!(hunted.lost_with(&[7; SECTOR]), 1, "garbage");
        assert_eq!(hunted.lost_with_stamp(|stamp| stamp.sequence -= 1), 1, "an older write");
        assert_eq!(hunted.lost_with_stamp(|stamp| stamp.sequence += 1), 1, "one not issued");
        assert_eq!(hunted.lost_with_stamp(|stamp| stamp.sector += 1), 1, "another sector");
        assert_eq!(hunted.lost_with_stamp(|stamp| stamp.writer += 1), 1, "another writer");
        assert_eq!(hunted.lost_with_stamp(|stamp| stamp.run += 1), 1, "an earlier run");
    }

    #[test]
    fn one_flipped_bit_is_found() {
        let hunted = Hunted::new("bit");
        let table = hunted.table();
        for place in [0, 8, 16, 24, 32, 40, SECTOR - 1] {
            let mut sector = [0; SECTOR];
            table.stamp(17, 3, table.blocks[17].acknowledged()).write(&mut sector);
            sector[place] ^= 1;
            assert_eq!(hunted.lost_with(&sector), 1, "byte {place}");
        }
    }

    #[test]
    fn damage_ends_verification_in_failure() {
        let hunted = Hunted::new("failure");
        let disk = File::options().write(true).open(hunted.path("disk")).unwrap();
        disk.write_all_at(&[0; BLOCK], offset(255)).unwrap();
        let verdict = verify(&hunted.path("disk"), &hunted.path("table")).unwrap();
        assert_eq!(verdict, ExitCode::FAILURE);
    }

    #[test]
    fn a_time_without_completions_is_a_stall() {
        let report = Report::new(1);
        report.request(0, || thread::sleep(2 * STALL));
        thread::sleep(2 * STALL);
        report.excuse_pause();
        report.request(0, || ());
        let completed = lock(&report.completed);
        assert_eq!((completed.stalls.len(), completed.latencies.len()), (1, 2));
        assert!(completed.latencies[0] >= 6000);
    }

    #[test]
    fn a_request_that_is_not_answered_is_seen() {
        let report = Report::new(2);
        report.request(1, || assert_eq!(report.older_than(Duration::ZERO), 1));
        assert_eq!(report.older_than(Duration::ZERO), 0);
    }

    #[test]
    fn only_the_longest_stalls_are_told_in_order_of_time() {
        let stalls: Vec<_> = (0..1500).map(Duration::from_micros).rev().collect();
        assert_eq!(longest(&stalls), stalls[..STALLS_TOLD]);
    }

    #[test]
    fn nonsense_on_the_command_line_is_refused() {
        let parse = |line: &str| run(line.split(' ').map(str::to_owned)).unwrap_err().to_string();
        assert_eq!(parse("write /none --seconds x"), "--seconds: not x");
        assert_eq!(
            parse("write /none --blocks 4095 --until /x"),
            "the blocks must be shared out evenly"
        );
        assert_eq!(
            parse("write /none --blocks 8 --until /x"),
            "a share must have room for a long write"
        );
        assert_eq!(
            parse("write /none --blocks 160 --journal /j --until /x"),
            "a share must fill sectors of the journal"
        );
        assert_eq!(parse("write /none"), "--seconds or --until says when to end");
        assert_eq!(parse("flush /none --speed 3"), "unknown option --speed");
        assert_eq!(parse("sing /none"), "hunt write, verify or flush");
    }
}
