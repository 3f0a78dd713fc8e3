//! The loss hunt: daemons are killed at random moments while a VM that never reconnects writes, and
//! while what changes layers is under way. No acknowledged write is lost, the guest sees no error.
//!
//! What was acknowledged is noted outside of the guest before the guest goes on, so it is known of
//! each moment what a snapshot that is taken then must hold. Few kills here; `make hunt` has many.

use crate::{
    copies::{Source, Wish},
    crash::relaunch,
    harness::{Dice, Driver, LIMIT, all_of, is_alive, part, signal, until},
    hunt::{self, Journal, Notes},
    model::{
        guest::{Action, Guest, LONGEST},
        picture::{SECTOR, read},
        records::{Reader, Records},
    },
    survival::{a_while, rounds, tell, tell_hunt},
    vm::{Job, Vm},
};
use qsd_csi::qsd::{Command as Qmp, Monitor};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::Write as _,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    time::{Duration, Instant},
};
use tokio::time::sleep;
use tonic::{Code, Status};

/// Twice what the load needs, so that a snapshot is read in no time.
const DISK: u64 = 32 << 20;

/// What a volume holds that is copied while it is written to, behind what the load needs.
const ORIGIN: u64 = 48 << 20;

/// Where that begins: the load of a hunt ends there.
const BEHIND: u64 = 16 << 20;

/// How long after the beginning of what is to be hit the daemon is killed at most, in milliseconds.
const LATEST: u64 = 60;

/// What is to be hit by a kill.
struct Target<'a> {
    name: &'a str,
    begun: AtomicU64,
    is_under_way: AtomicBool,
    over: AtomicBool,
}

impl<'a> Target<'a> {
    fn new(name: &'a str) -> Self {
        Self { name, begun: 0.into(), is_under_way: false.into(), over: false.into() }
    }

    /// Makes a call until it succeeds, as a sidecar would.
    async fn call(&self, call: impl AsyncFn() -> Result<(), Status>) {
        self.begun.fetch_add(1, SeqCst);
        self.is_under_way.store(true, SeqCst);
        persist(call).await;
        self.is_under_way.store(false, SeqCst);
    }

    fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }
}

/// Makes a call until it succeeds. A daemon that dies meanwhile is no reason for another code.
async fn persist(call: impl AsyncFn() -> Result<(), Status>) {
    let begin = Instant::now();
    while let Err(error) = call().await {
        let expected = [Code::Unavailable, Code::Aborted];
        assert!(expected.contains(&error.code()), "{error:?}");
        assert!(begin.elapsed() < LIMIT, "{error:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// The volume of a hunt, as the driver sees it while it is served and the VM is connected.
struct Served {
    pid: i32,
    monitor: PathBuf,
    losses: u64,
    last_stall: Duration,
}

async fn served(driver: &Driver) -> Option<Served> {
    let volumes = driver.inspect().await;
    let volume = volumes.into_iter().find(|one| one.volume_id == "pvc-1").unwrap();
    let attachment = volume.attachment.unwrap();
    let (daemon, relay) = (attachment.daemon?, attachment.relay?);
    relay.front_end?;
    Some(Served {
        pid: daemon.pid,
        monitor: daemon.monitor.into(),
        losses: relay.losses,
        last_stall: Duration::from_micros(relay.last_stall_us),
    })
}

/// Kills the daemon, and waits until another serves: how long requests were held up.
async fn kill(driver: &Driver, victim: &Served) -> Duration {
    signal(victim.pid, "KILL");
    let mut held_up = Duration::ZERO;
    until("another one serves", async || {
        let now = served(driver).await;
        let next = now.filter(|now| now.losses > victim.losses && now.pid != victim.pid);
        held_up = next.as_ref().map(|next| next.last_stall).unwrap_or_default();
        next.is_some()
    })
    .await;
    held_up
}

/// Waits for the daemon that serves.
async fn victim(driver: &Driver) -> Served {
    let mut found = None;
    until("it is served", async || {
        found = served(driver).await;
        found.is_some()
    })
    .await;
    found.unwrap()
}

/// Kills the daemon so many times while calls are under way, at random moments.
async fn kill_during_calls(driver: &Driver, target: &Target<'_>, seed: u64) -> Vec<Duration> {
    let mut dice = Dice::new(seed);
    let mut stalls = Vec::new();
    let mut last = 0;
    while stalls.len() < rounds(3) {
        until(target.name, async || {
            target.is_under_way.load(SeqCst) && target.begun.load(SeqCst) > last
        })
        .await;
        sleep(Duration::from_millis(dice.roll(LATEST))).await;
        let victim = victim(driver).await;
        if target.is_under_way.load(SeqCst) {
            last = target.begun.load(SeqCst);
            stalls.push(kill(driver, &victim).await);
        }
    }
    target.over.store(true, SeqCst);
    stalls
}

/// Kills the daemon so many times while it runs a job of this kind, at random moments.
async fn kill_during_jobs(driver: &Driver, target: &Target<'_>, seed: u64) -> Vec<Duration> {
    let mut dice = Dice::new(seed);
    let mut stalls = Vec::new();
    while stalls.len() < rounds(3) {
        let mut job = String::new();
        until(target.name, async || {
            let Some(served) = served(driver).await else { return false };
            let found = job_of(&served, target.name).await;
            job = found.clone().unwrap_or_default();
            found.is_some()
        })
        .await;
        sleep(Duration::from_millis(dice.roll(LATEST))).await;
        let Some(victim) = served(driver).await else { continue };
        if job_of(&victim, target.name).await == Some(job) {
            stalls.push(kill(driver, &victim).await);
        }
    }
    target.over.store(true, SeqCst);
    stalls
}

/// The id of the job of this kind that a daemon runs, asked by the monitor for people.
async fn job_of(served: &Served, kind: &str) -> Option<String> {
    let monitor = Monitor::connect(&served.monitor).await.ok()?;
    let jobs = monitor.execute(Qmp::new("query-jobs", json!({}))).await.ok()?;
    let is_at_work = |job: &&Value| {
        job["type"] == kind && ["running", "ready"].contains(&job["status"].as_str().unwrap())
    };
    let found = jobs.as_array().unwrap().iter().find(is_at_work)?;
    Some(found["id"].as_str().unwrap().to_owned())
}

/// A volume with a VM on it that loads it all the time.
struct Hunt {
    driver: Driver,
    vm: Vm,
    job: Job,
    journal: Journal,
}

impl Hunt {
    /// On a blank volume.
    async fn begin() -> Self {
        let driver = Driver::start().await;
        let (name, source, parameters) = ("pvc-1".to_owned(), None, Vec::new());
        driver.fulfil(&Wish { name, size: DISK, source, parameters }).await.unwrap();
        Self::on(driver).await
    }

    async fn on(driver: Driver) -> Self {
        driver.attach("pvc-1").await;
        let journal = Journal::new(driver.path("journal"));
        let machine = Vm::on(&driver.socket("pvc-1")).without_reconnect().cpus(2).queues(2);
        let mut vm = machine.journal(journal.file()).boot().await;
        let job = hunt::begin(&mut vm, "--journal /dev/vdb").await;
        Self { driver, vm, job, journal }
    }

    fn records(&self) -> Records {
        Records::of(&self.driver.path("pool"))
    }

    /// Kills the daemon so many times, at random moments.
    async fn kill_often(&self, seed: u64) -> Vec<Duration> {
        let mut dice = Dice::new(seed);
        let mut stalls = Vec::new();
        for _ in 0..rounds(3) {
            a_while(&mut dice).await;
            stalls.push(kill(&self.driver, &victim(&self.driver).await).await);
        }
        stalls
    }

    /// Takes snapshots one after the other, and deletes older ones, until it is over.
    async fn take_snapshots(&self, target: &Target<'_>) {
        let mut checked = 0;
        for number in 0.. {
            if target.is_over() {
                break;
            }
            let name = format!("snap-{number}");
            let before = self.journal.read();
            target.call(async || self.driver.snapshot(&name, "pvc-1").await).await;
            let after = self.journal.read();
            if number % 3 == 0 {
                self.assert_holds_snapshot(&name, &before, &after).await;
                checked += 1;
            }
            if number >= 2 {
                let old = format!("snap-{}", number - 2);
                persist(async || self.driver.delete_snapshot(&old).await).await;
            }
        }
        eprintln!("{}: {checked} snapshots compared", target.name);
    }

    /// That a snapshot holds what was acknowledged before it was taken, and nothing that was written
    /// after it.
    async fn assert_holds_snapshot(&self, name: &str, before: &Notes, after: &Notes) {
        let table = before.table(after);
        loop {
            let (records, name, table) = (self.records(), name.to_owned(), table.clone());
            let compare = move || {
                let bytes = records.bytes(records.named(&name).unwrap(), Reader::Own)?;
                hunt::assert_holds(file_of(&bytes).path(), &table);
                Some(())
            };
            // What is below it may just be merged; what it holds is the same.
            if tokio::task::spawn_blocking(compare).await.unwrap().is_some() {
                return;
            }
        }
    }

    /// Has the active layer committed again and again, until it is over.
    async fn have_layers_committed(&self, target: &Target<'_>) {
        for number in 0.. {
            if target.is_over() {
                return;
            }
            let name = format!("snap-{number}");
            persist(async || self.driver.snapshot(&name, "pvc-1").await).await;
            sleep(Duration::from_millis(100)).await; // for something to be there to be committed
            persist(async || self.driver.delete_snapshot(&name).await).await;
            let begin = Instant::now();
            let is_merged = || self.records().unmerged(&["pvc-1".to_owned()].into()).is_empty();
            while !is_merged() && begin.elapsed() < Duration::from_secs(5) && !target.is_over() {
                sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Expands the volume again and again, until it is over: its size.
    async fn expand(&self, target: &Target<'_>) -> u64 {
        let mut size = DISK;
        while !target.is_over() {
            size += 1 << 20;
            target.call(async || self.driver.expand("pvc-1", size).await).await;
        }
        size
    }

    /// Ends the load, and sees that all it wrote is there, in the guest and behind it.
    async fn end(mut self, what: &str, stalls: Vec<Duration>) -> Driver {
        let (outcome, table) = hunt::end(&mut self.vm, self.job).await;
        let kills = stalls.len();
        eprintln!("{what}: {kills} kills, each while it was under way");
        tell(&format!("{what}: requests held up by a kill"), stalls);
        tell_hunt(what, &outcome);
        tell(&format!("{what}: times without any answer in the guest"), outcome.stalls.clone());
        outcome.assert_clean();
        self.vm.assert_no_errors().await;
        self.vm.power_off().await;
        let noted = self.journal.read();
        let mut driver = self.driver;
        assert_sound(&mut driver).await;
        driver.detach("pvc-1").await;
        for reader in [Reader::Own, Reader::Qemu] {
            let flat = file_of(&bytes_of(&driver, reader).await);
            hunt::assert_holds(flat.path(), &table);
            hunt::assert_holds(flat.path(), &noted.table(&noted));
        }
        driver
    }
}

/// What the volume holds; layers may be merged while they are read.
async fn bytes_of(driver: &Driver, reader: Reader) -> Vec<u8> {
    let mut bytes = None;
    until("its layers stay for long enough", async || {
        let records = Records::of(&driver.path("pool"));
        bytes = records.bytes(records.active("pvc-1").unwrap(), reader);
        bytes.is_some()
    })
    .await;
    bytes.unwrap()
}

/// Bytes as a file.
fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Asserts that `qemu-img check` finds no fault in any layer, leaked clusters of killed daemons apart,
/// whatever is under way when all that could write to them is killed at once.
async fn assert_sound(driver: &mut Driver) {
    driver.kill();
    for pid in all_of(driver) {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    let records = Records::of(&driver.path("pool"));
    let qcow2 = |layer: &&String| records.layers[*layer]["format"] == "qcow2";
    for layer in records.layers.keys().filter(qcow2) {
        let image = records.file(layer);
        let check = Command::new(part("bin/qemu-img"))
            .args(["check", "-U", "--output=json", "--image-opts"])
            .arg(format!("driver=qcow2,file.filename={},backing=", image.display()))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&check.stdout).into_owned();
        let found: Value = serde_json::from_str(&text).unwrap_or_default();
        let [errors, corruptions] = ["check-errors", "corruptions"].map(|what| &found[what]);
        assert!(errors == 0 && (corruptions.is_null() || corruptions == 0), "{layer}: {check:?}");
    }
    relaunch(driver).await;
}

/// Deletes all there is, and sees that nothing is left.
async fn clear(driver: Driver) {
    until("all is merged", async || {
        Records::of(&driver.path("pool")).unmerged(&BTreeSet::new()).is_empty()
    })
    .await;
    for snapshot in Records::of(&driver.path("pool")).snapshots.keys() {
        driver.delete_snapshot(snapshot).await.unwrap();
    }
    for volume in driver.inspect().await {
        driver.delete(&volume.volume_id).await.unwrap();
    }
    driver.assert_empty().await;
}

#[tokio::test]
async fn nothing_is_lost_of_a_raw_volume() {
    let hunt = Hunt::begin().await;
    let stalls = hunt.kill_often(31).await;
    clear(hunt.end("load on a raw volume", stalls).await).await;
}

#[tokio::test]
async fn nothing_is_lost_of_an_overlay_three_deep() {
    let hunt = Hunt::begin().await;
    for name in ["one", "two", "three"] {
        hunt.driver.snapshot(name, "pvc-1").await.unwrap();
        sleep(Duration::from_millis(200)).await;
    }
    let chain = hunt.records();
    assert_eq!(chain.chain(chain.active("pvc-1").unwrap()).len(), 4, "three layers on a raw one");
    let stalls = hunt.kill_often(32).await;
    clear(hunt.end("load on an overlay three deep", stalls).await).await;
}

#[tokio::test]
async fn nothing_is_lost_while_snapshots_are_taken() {
    let hunt = Hunt::begin().await;
    let target = Target::new("snapshot");
    let kills = kill_during_calls(&hunt.driver, &target, 33);
    let (stalls, ()) = tokio::join!(kills, hunt.take_snapshots(&target));
    clear(hunt.end("CreateSnapshot", stalls).await).await;
}

#[tokio::test]
async fn nothing_is_lost_while_a_clone_is_copied() {
    let driver = Driver::start().await;
    let (name, source, parameters) = ("origin".to_owned(), None, Vec::new());
    driver.fulfil(&Wish { name, size: ORIGIN, source, parameters }).await.unwrap();
    driver.attach("origin").await;
    let sectors = |bytes: u64| usize::try_from(bytes).unwrap() / SECTOR;
    let write = |first| Action::Write { sectors: first..first + LONGEST, stamp: 7 };
    let writes = (0..sectors(ORIGIN)).step_by(LONGEST).map(write);
    Guest::connect(&driver.socket("origin")).act(writes.collect()).await;
    driver.detach("origin").await;
    let source = Some(Source::Volume("origin".to_owned()));
    let parameters = vec![("copyMode", "clone"), ("cloneBytesPerSecond", "256Ki")];
    let name = "pvc-1".to_owned();
    driver.fulfil(&Wish { name, size: ORIGIN, source, parameters }).await.unwrap();
    let hunt = Hunt::on(driver).await;
    let stalls = kill_during_jobs(&hunt.driver, &Target::new("stream"), 34).await;
    let driver = hunt.end("stream of a clone", stalls).await;
    let bytes = bytes_of(&driver, Reader::Qemu).await;
    let behind = &bytes[usize::try_from(BEHIND).unwrap()..];
    let stamps = read(behind, sectors(BEHIND)).unwrap();
    assert!(stamps.iter().all(|stamp| *stamp == 7), "what was copied is not what was there");
    for volume in ["pvc-1", "origin"] {
        driver.delete(volume).await.unwrap(); // which ends the copying
    }
    clear(driver).await;
}

#[tokio::test]
async fn nothing_is_lost_while_layers_are_committed() {
    let hunt = Hunt::begin().await;
    let target = Target::new("commit");
    let kills = kill_during_jobs(&hunt.driver, &target, 35);
    let (stalls, ()) = tokio::join!(kills, hunt.have_layers_committed(&target));
    clear(hunt.end("commit of the active layer", stalls).await).await;
}

#[tokio::test]
async fn nothing_is_lost_while_the_volume_grows() {
    let mut hunt = Hunt::begin().await;
    let target = Target::new("resize");
    let kills = kill_during_calls(&hunt.driver, &target, 36);
    let (stalls, size) = tokio::join!(kills, hunt.expand(&target));
    until("the guest sees the size", async || {
        let sectors = hunt.vm.run("cat /sys/block/vda/size").await;
        sectors.trim().parse::<u64>().unwrap() * 512 == size
    })
    .await;
    clear(hunt.end("ControllerExpandVolume", stalls).await).await;
}
