//! The loss hunt: `scripts/guest/hunt.rs` in a guest, what it found, and the same questions asked
//! of the image behind the guest's disk.

use crate::{
    harness::{Driver, part},
    qsd::{Image, Qsd},
    vm::{Job, Vm},
};
use serde_json::json;
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
    time::Duration,
};

/// What `hunt write` found.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) writes: u64,
    pub(crate) reads: u64,
    pub(crate) errors: u64,
    pub(crate) lost: u64,
    pub(crate) median: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
    /// The times in which nothing was answered, in order.
    pub(crate) stalls: Vec<Duration>,
    /// Its ERROR lines.
    pub(crate) complaints: Vec<String>,
}

impl Outcome {
    /// What it said; `None` where it did not come to an end.
    pub(crate) fn of(said: &str) -> Option<Self> {
        let result = said.lines().find_map(|line| line.strip_prefix("RESULT "))?;
        let fields: HashMap<_, _> = result.split(' ').filter_map(|f| f.split_once('=')).collect();
        let micros = |name| Some(Duration::from_micros(number(&fields, name)?));
        let stalls = fields.get("stalls_us")?.split(',').filter(|stall| !stall.is_empty());
        let complaints = said.lines().filter(|line| line.starts_with("ERROR"));
        Some(Self {
            writes: number(&fields, "writes")?,
            reads: number(&fields, "reads")?,
            errors: number(&fields, "errors")?,
            lost: number(&fields, "lost")?,
            median: micros("p50_us")?,
            p99: micros("p99_us")?,
            max: micros("max_us")?,
            stalls: stalls
                .map(|us| us.parse().map(Duration::from_micros))
                .collect::<Result<_, _>>()
                .ok()?,
            complaints: complaints.map(str::to_owned).collect(),
        })
    }

    /// Asserts that the guest saw nothing but what it should.
    pub(crate) fn assert_clean(&self) {
        assert_eq!((self.errors, self.lost), (0, 0), "{:#?}", self.complaints);
        assert!(self.writes > 0 && self.reads > 0, "{self:?}");
    }
}

fn number<T: FromStr>(fields: &HashMap<&str, &str>, name: &str) -> Option<T> {
    fields.get(name)?.parse().ok()
}

/// Starts the hunt in a guest, with more options, and waits until it writes.
pub(crate) async fn begin(vm: &mut Vm, options: &str) -> Job {
    let job = "hunt write /dev/vda --until /tmp/over --table /tmp/table";
    let job = vm.start(&format!("rm -f /tmp/over; {job} {options}")).await;
    vm.wait_for(&job, "READY").await;
    job
}

/// Ends the hunt in a guest: what it found, and its table.
pub(crate) async fn end(vm: &mut Vm, job: Job) -> (Outcome, String) {
    vm.run("touch /tmp/over").await;
    let said = vm.wait_for(&job, "RESULT ").await;
    let outcome = Outcome::of(&said).unwrap();
    (outcome, vm.run("cat /tmp/table").await)
}

/// What the host knows of the writes of a guest, without asking the guest: the disk on which it notes
/// each write that was acknowledged, before the next one of that block.
pub(crate) struct Journal(PathBuf);

/// What a journal held at a moment: of each block, the number of its last acknowledged write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notes {
    run: u64,
    writers: u64,
    acknowledged: Vec<u64>,
}

impl Journal {
    /// An empty one.
    pub(crate) fn new(file: PathBuf) -> Self {
        fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        Self(file)
    }

    /// The file, for the machine.
    pub(crate) fn file(&self) -> &Path {
        &self.0
    }

    /// What it holds; read until it is the same twice, as a number may be half there.
    pub(crate) fn read(&self) -> Notes {
        let mut before = self.look();
        loop {
            let now = self.look();
            let halves = before.acknowledged.iter().zip(&now.acknowledged);
            if halves.clone().all(|(before, now)| before <= now && now - before < 64) {
                return before;
            }
            before = now;
        }
    }

    fn look(&self) -> Notes {
        let bytes = fs::read(&self.0).unwrap();
        let (head, notes) = bytes.split_at(512);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let [magic, run, writers, blocks] = [0, 1, 2, 3].map(|at| number(&head[at * 8..][..8]));
        assert_eq!(magic, u64::from_le_bytes(*b"qsd-note"), "nothing was noted yet");
        let notes = notes.chunks_exact(8).take(blocks.try_into().unwrap());
        Notes { run, writers, acknowledged: notes.map(number).collect() }
    }
}

impl Notes {
    /// The table of what a disk may hold that was copied between two moments: nothing older than what
    /// was acknowledged at the first, and nothing newer than what was in flight at the second.
    pub(crate) fn table(&self, after: &Self) -> String {
        assert_eq!((self.run, self.writers), (after.run, after.writers));
        let lines = self.acknowledged.iter().zip(&after.acknowledged);
        let lines = lines.map(|(old, new)| format!("{old} {}\n", new + 1));
        format!("{} {}\n{}", self.run, self.writers, lines.collect::<String>())
    }
}

/// Asserts that an image holds what the table of a hunt says, past the host's page cache.
pub(crate) fn assert_holds(image: &Path, table: &str) {
    assert_eq!(verify(image, table), (true, "RESULT blocks=4096 errors=0 lost=0\n".to_owned()));
}

/// Whether an image holds what the table of a hunt says, and what `hunt` says about it.
fn verify(image: &Path, table: &str) -> (bool, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file.as_file(), table.as_bytes()).unwrap();
    let hunt = Command::new(part("guest/hunt"))
        .arg("verify")
        .arg(image)
        .arg("--table")
        .arg(file.path())
        .output()
        .unwrap();
    (hunt.status.success(), String::from_utf8(hunt.stdout).unwrap())
}

/// The most requests in flight among some looks at a guest's disk.
async fn deepest(vm: &mut Vm, looks: u32) -> u64 {
    let mut deepest = 0;
    for _ in 0..looks {
        let (reads, writes) = vm.in_flight().await;
        deepest = deepest.max(reads + writes);
    }
    deepest
}

#[test]
fn what_a_hunt_said_is_understood() {
    let said = "READY\nERROR fsync: no\nRESULT writes=7 reads=6 errors=1 lost=0 \
                p50_us=5 p99_us=4 max_us=3 stalls_us=3100,4000\n";
    let outcome = Outcome::of(said).unwrap();
    assert_eq!((outcome.writes, outcome.reads, outcome.errors, outcome.lost), (7, 6, 1, 0));
    assert_eq!([outcome.median, outcome.p99, outcome.max].map(|time| time.as_micros()), [5, 4, 3]);
    assert_eq!(outcome.stalls, [3100, 4000].map(Duration::from_micros));
    assert_eq!(outcome.complaints, ["ERROR fsync: no"]);
    let none = Outcome::of(
        "RESULT writes=7 reads=6 errors=1 lost=0 p50_us=5 p99_us=4 max_us=3 stalls_us=",
    );
    assert_eq!(none.unwrap().stalls, []);
    assert!(Outcome::of("READY\n").is_none());
}

#[tokio::test]
async fn a_published_volume_loses_nothing_at_depth() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let mut vm = Vm::on(&driver.socket("pvc-1")).cpus(2).queues(2).boot().await;
    assert_eq!(vm.run("ls /sys/block/vda/mq | wc -l").await.trim(), "2");
    let job = begin(&mut vm, "").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let depth = deepest(&mut vm, 20).await;
    let (outcome, table) = end(&mut vm, job).await;
    eprintln!("{depth} in flight: {outcome:?}");
    outcome.assert_clean();
    assert!(depth > 4, "{depth} in flight");
    // While nothing is in flight: otherwise the disk can hang (facts/relay.md, D7).
    vm.stop().await;
    assert_eq!(vm.qmp("query-status", json!({})).await["running"], false);
    vm.cont().await;
    vm.run("hunt verify /dev/vda --table /tmp/table").await;
    vm.assert_no_errors().await;
    vm.power_off().await;
    let layer = fs::read_dir(driver.path("pool/layers")).unwrap().next().unwrap().unwrap().path();
    assert_holds(&layer, &table);
    driver.remove("pvc-1").await;
}

#[tokio::test]
async fn damage_behind_the_guest_is_found_from_the_host() {
    let qsd = Qsd::on(Image::Raw).write_back().limits(json!({ "iops-write": 200 })).start().await;
    let mut vm = Vm::on(&qsd.socket(0)).boot().await;
    let job = begin(&mut vm, "").await;
    assert!(deepest(&mut vm, 20).await >= 8, "every writer waits for the throttle");
    let (outcome, table) = end(&mut vm, job).await;
    outcome.assert_clean();
    assert_holds(&qsd.flat(), &table);
    // It writes over blocks of the hunt, and with what the hunt never wrote.
    let said = vm.run("hunt flush /dev/vda --writes 32 --every 16").await;
    assert_eq!(said, "RESULT writes=32 flushes=2\n");
    let (holds, said) = verify(&qsd.flat(), &table);
    assert!(!holds && said.contains("ERROR block 31: "), "{said}");
    assert!(said.ends_with("RESULT blocks=4096 errors=32 lost=32\n"), "{said}");
}

#[tokio::test]
async fn a_daemon_of_another_version_serves_an_overlay_and_is_started_again() {
    let newer = part("bin/qemu-storage-daemon-newer");
    let version = |program| Command::new(program).arg("--version").output().unwrap().stdout;
    assert_ne!(version(newer.clone()), version(part("bin/qemu-storage-daemon")));
    let mut qsd = Qsd::on(Image::Overlay).program(newer).start().await;
    let mut vm = Vm::on(&qsd.socket(0)).reconnect(Duration::from_millis(20)).boot().await;
    let job = begin(&mut vm, "").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (outcome, table) = end(&mut vm, job).await;
    outcome.assert_clean();
    // While nothing is in flight (facts/relay.md, D6).
    let before = qsd.pid();
    qsd.kill();
    qsd.launch().await;
    assert_ne!(qsd.pid(), before);
    vm.run("hunt verify /dev/vda --table /tmp/table").await;
    vm.assert_no_errors().await;
    vm.power_off().await;
    assert_holds(&qsd.flat(), &table);
}

#[tokio::test]
async fn an_idle_guest_moves_to_another_vm() {
    let qsd = Qsd::on(Image::Raw).exports(2).start().await;
    let machine = |export| Vm::on(&qsd.socket(export)).without_reconnect().cpus(2).queues(2);
    let mut vm = machine(0).boot().await;
    let hunt = begin(&mut vm, "").await;
    let (outcome, table) = end(&mut vm, hunt).await;
    outcome.assert_clean();
    let job = vm.start("echo here; sleep 1; echo '  there'; false").await;
    let mut other = machine(1).incoming(&qsd.path("migration")).await;
    vm.migrate_to(&mut other).await;
    assert_eq!(other.collect(job).await, (1, "here\n  there\n".to_owned()));
    other.run("hunt verify /dev/vda --table /tmp/table").await;
    let hunt = begin(&mut other, "--writers 4 --readers 8").await;
    let (outcome, next) = end(&mut other, hunt).await;
    outcome.assert_clean();
    other.assert_no_errors().await;
    other.power_off().await;
    assert_ne!(table, next);
    assert_holds(&qsd.flat(), &next);
}
