//! Layers under a guest that never pauses: frozen, merged and removed while it writes and reads.

use crate::{
    copies::{Source, Wish},
    harness::{Dice, Driver, LIMIT, names, signal, until},
    hunt::{self, Outcome, assert_holds},
    model::{
        guest::{Action, Guest, LONGEST},
        picture::{Picture, SECTOR, read},
        records::{Reader, Records},
    },
    survival::{rounds, tell, tell_hunt},
    vm::{Job, Vm},
};
use std::{
    collections::BTreeSet,
    io::Write as _,
    sync::{Arc, atomic::AtomicU32},
    time::{Duration, Instant},
};

fn sectors(size: u64) -> usize {
    usize::try_from(size).unwrap() / SECTOR
}

/// Snapshots come and go under a client with several requests in flight, every byte of which is
/// checked.
#[tokio::test(flavor = "multi_thread")]
async fn snapshots_come_and_go_under_a_guest() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let sectors = (8 << 20) / SECTOR;
    let guest = Guest::connect(&driver.socket("pvc-1"));
    let mut picture = Picture::blank(sectors);
    let stamps = Arc::new(AtomicU32::new(1));
    for round in 0..30_u32 {
        let load = guest.load(Dice::new(round.into()), sectors, stamps.clone());
        let name = format!("snap-{round}");
        driver.snapshot(&name, "pvc-1").await.unwrap();
        driver.delete_snapshot(&name).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        for action in load.end().await.iter().flatten() {
            action.apply(&mut picture);
        }
        for look in 0..10 {
            let found = Picture::of(&guest.read(0..sectors).await).unwrap();
            picture.assert_is(&found, &format!("round {round}, look {look}"));
        }
    }
    drop(guest);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// A clone is larger than its source, and read while it is copied: what lies beyond the end of the
/// source is zero.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reads_a_larger_clone_while_it_is_copied() {
    let driver = Driver::start().await;
    let size = 2 << 20;
    let wish =
        |name: &str, size, source, parameters| Wish { name: name.into(), size, source, parameters };
    driver.fulfil(&wish("pvc-1", size, None, vec![])).await.unwrap();
    let mut picture = Picture::blank(2 * sectors(size));
    {
        driver.attach("pvc-1").await;
        let guest = Guest::connect(&driver.socket("pvc-1"));
        let write = Action::Write { sectors: 0..512, stamp: 1 };
        write.apply(&mut picture);
        guest.act(vec![write]).await;
        drop(guest);
        driver.detach("pvc-1").await;
    }
    let slowly = vec![("copyMode", "clone"), ("cloneBytesPerSecond", "1Mi")];
    let source = Some(Source::Volume("pvc-1".to_owned()));
    driver.fulfil(&wish("pvc-2", 2 * size, source, slowly)).await.unwrap();
    driver.attach("pvc-2").await;
    let guest = Guest::connect(&driver.socket("pvc-2"));
    let (begin, mut looks) = (Instant::now(), 0_u32);
    let attached = ["pvc-2".to_owned()].into();
    while !Records::of(&driver.path("pool")).unmerged(&attached).is_empty() {
        assert!(begin.elapsed() < LIMIT, "it does not become independent under a guest");
        let found = Picture::of(&guest.read(0..picture.sectors()).await).unwrap();
        picture.assert_is(&found, "the clone");
        looks += 1;
    }
    assert!(looks > 5, "it was independent before it was looked at");
    let found = Picture::of(&guest.read(0..picture.sectors()).await).unwrap();
    picture.assert_is(&found, "the clone on its own");
    drop(guest);
    driver.detach("pvc-2").await;
    for volume in ["pvc-1", "pvc-2"] {
        driver.delete(volume).await.unwrap();
    }
    driver.assert_empty().await;
}

/// What is written into a large volume: some sectors every so often.
const EVERY: usize = (8 << 30) / SECTOR;
const SOME: usize = 8;

/// Copies are there at once, however large the volume is, and hold what it held at that moment.
#[tokio::test(flavor = "multi_thread")]
async fn copies_of_a_large_volume_are_there_at_once() {
    let driver = Driver::start_with(&["--overcommit", "1000"]).await;
    let mut calls = Vec::new();
    for size in [1 << 30, 1 << 40] {
        let name = format!("pvc-{size}");
        let wish = |name: &str, source| {
            let (name, parameters) = (name.to_owned(), Vec::new());
            Wish { name, size, source, parameters }
        };
        driver.fulfil(&wish(&name, None)).await.unwrap();
        driver.attach(&name).await;
        let guest = Guest::connect(&driver.socket(&name));
        let places = || (0..sectors(size)).step_by(EVERY).chain([sectors(size) - SOME]);
        let writes = |stamp| {
            let write = move |first| Action::Write { sectors: first..first + SOME, stamp };
            places().map(write).collect()
        };
        guest.act(writes(1)).await;
        let begin = Instant::now();
        driver.snapshot("snap-1", &name).await.unwrap();
        let taken = begin.elapsed();
        guest.act(writes(2)).await;
        let begin = Instant::now();
        let source = Some(Source::Snapshot("snap-1".to_owned()));
        driver.fulfil(&wish("restored", source)).await.unwrap();
        let restored = begin.elapsed();
        let begin = Instant::now();
        driver.fulfil(&wish("clone", Some(Source::Volume(name.clone())))).await.unwrap();
        calls.push((size >> 30, taken, restored, begin.elapsed()));
        guest.act(writes(3)).await;
        drop(guest);
        driver.attach("restored").await;
        driver.attach("clone").await;
        for (volume, stamp) in [("restored", 1), ("clone", 2), (&name, 3)] {
            let guest = Guest::connect(&driver.socket(volume));
            for first in places() {
                let found = guest.read(first..first + SOME).await;
                assert_eq!(read(&found, first).unwrap(), [stamp; SOME], "{volume}: {first}");
            }
        }
        for volume in ["restored", "clone", &name] {
            driver.remove(volume).await;
        }
        driver.delete_snapshot("snap-1").await.unwrap();
    }
    for (size, taken, restored, cloned) in calls {
        eprintln!("{size} GiB: snapshot {taken:?}, restored {restored:?}, cloned {cloned:?}");
    }
    driver.assert_empty().await;
}

/// A volume with a VM on it that never reconnects, and loads it all the time.
struct Loaded {
    driver: Driver,
    vm: Vm,
    job: Job,
}

/// A guest should not be without an answer for so long.
const GOAL: Duration = Duration::from_millis(50);

/// About as long as a hundred snapshots take.
const BASELINE: Duration = Duration::from_secs(6);

/// Twice what the load needs, so that a snapshot is read in no time.
const DISK: u64 = 32 << 20;

impl Loaded {
    async fn begin() -> Self {
        let driver = Driver::start().await;
        let (name, source, parameters) = ("pvc-1".to_owned(), None, Vec::new());
        driver.fulfil(&Wish { name, size: DISK, source, parameters }).await.unwrap();
        driver.attach("pvc-1").await;
        let machine = Vm::on(&driver.socket("pvc-1")).without_reconnect().cpus(2).queues(2);
        let mut vm = machine.boot().await;
        let job = hunt::begin(&mut vm, "").await;
        Self { driver, vm, job }
    }

    fn records(&self) -> Records {
        Records::of(&self.driver.path("pool"))
    }

    /// Waits until no layer is left that could be merged: how many the volume has.
    async fn merged(&self) -> usize {
        let attached = ["pvc-1".to_owned()].into();
        let unmerged = || self.records().unmerged(&attached).len();
        let mut left = unmerged();
        while left > 0 {
            until("fewer layers are left", async || unmerged() < left).await;
            left = unmerged();
        }
        let records = self.records();
        records.chain(records.active("pvc-1").unwrap()).len()
    }

    /// How the blocks of the load lie in a snapshot: the numbers of their last writes.
    fn sequences(&self, snapshot: &str) -> Vec<u64> {
        let records = self.records();
        let bytes = records.bytes(records.named(snapshot).unwrap(), Reader::Own).unwrap();
        bytes[..bytes.len() / 2].chunks(4096).map(|block| sequence_of(block, snapshot)).collect()
    }

    /// Ends the load, and begins another.
    async fn turn(mut self, what: &str) -> Self {
        let (outcome, _) = hunt::end(&mut self.vm, self.job).await;
        tell_stalls(what, &outcome);
        outcome.assert_clean();
        let job = hunt::begin(&mut self.vm, "").await;
        Self { job, ..self }
    }

    /// Ends the load, and sees that all it wrote is there, in the guest and behind it.
    async fn end(mut self, what: &str) {
        let (outcome, table) = hunt::end(&mut self.vm, self.job).await;
        tell_stalls(what, &outcome);
        outcome.assert_clean();
        self.vm.assert_no_errors().await;
        self.vm.power_off().await;
        self.driver.detach("pvc-1").await;
        until("all is merged", async || {
            Records::of(&self.driver.path("pool")).unmerged(&BTreeSet::new()).is_empty()
        })
        .await;
        let records = Records::of(&self.driver.path("pool"));
        let top = records.active("pvc-1").unwrap();
        for reader in [Reader::Own, Reader::Qemu] {
            let mut flat = tempfile::NamedTempFile::new().unwrap();
            flat.write_all(&records.bytes(top, reader).unwrap()).unwrap();
            assert_holds(flat.path(), &table);
        }
        for snapshot in records.snapshots.keys() {
            self.driver.delete_snapshot(snapshot).await.unwrap();
        }
        self.driver.delete("pvc-1").await.unwrap();
        self.driver.assert_empty().await;
    }
}

/// Prints what a guest felt.
fn tell_stalls(what: &str, outcome: &Outcome) {
    tell_hunt(what, outcome);
    let stalls = &outcome.stalls;
    let long = stalls.iter().filter(|stall| **stall >= GOAL).count();
    tell(&format!("{what}: {long} of {GOAL:?} or more; times without any answer"), stalls.clone());
}

/// The number of the write that a block is of; each of its sectors holds a whole one.
fn sequence_of(block: &[u8], snapshot: &str) -> u64 {
    let word =
        |sector: &[u8], at: usize| u64::from_le_bytes(sector[at * 8..][..8].try_into().unwrap());
    let numbers: BTreeSet<_> = block.chunks(SECTOR).map(|sector| word(sector, 4)).collect();
    for sector in block.chunks(SECTOR) {
        assert_eq!(word(sector, 0), u64::from_le_bytes(*b"qsd-hunt"), "{snapshot}: {sector:x?}");
    }
    // A write that was in flight may have come half-way.
    *numbers.first().unwrap()
}

/// No write that a snapshot has is missing in the next one.
/// What a guest feels is told of each part: with no snapshot at all, which is what the machine does to
/// it; while snapshots are taken; and while they are deleted, and layers merged.
#[tokio::test]
async fn a_hundred_snapshots_are_taken_under_a_vm() {
    let work = Loaded::begin().await;
    tokio::time::sleep(BASELINE).await;
    let work = work.turn("no snapshot").await;
    let mut dice = Dice::new(21);
    let (mut times, mut before) = (Vec::new(), Vec::new());
    let count = rounds(100);
    for round in 0..count {
        let (name, begin) = (format!("snap-{round}"), Instant::now());
        work.driver.snapshot(&name, "pvc-1").await.unwrap();
        times.push(begin.elapsed());
        tokio::time::sleep(Duration::from_millis(dice.roll(60))).await;
        if round % 10 == 9 {
            let now = work.sequences(&name);
            let is_older = before.iter().zip(&now).any(|(before, now)| now < before);
            assert!(!is_older, "{name} lacks what a snapshot before it has");
            before = now;
        }
    }
    tell("CreateSnapshot under a VM", times);
    let chain = work.merged().await;
    assert_eq!(chain, count + 1, "every layer has a name");
    let work = work.turn(&format!("{count} snapshots")).await;
    let mut left: Vec<_> = (0..count).map(|number| format!("snap-{number}")).collect();
    while left.len() > 3 {
        let at = usize::try_from(dice.roll(left.len().try_into().unwrap())).unwrap();
        work.driver.delete_snapshot(&left.swap_remove(at)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(dice.roll(60))).await;
    }
    assert_eq!(work.merged().await, left.len() + 1, "every layer has a name");
    work.end("deletions").await;
}

#[tokio::test]
async fn snapshots_come_and_go_under_a_vm() {
    let work = Loaded::begin().await;
    let mut dice = Dice::new(22);
    let (mut taken, mut deleted, mut longest) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds(40) {
        let (name, begin) = (format!("snap-{}", round % 3), Instant::now());
        work.driver.snapshot(&name, "pvc-1").await.unwrap();
        taken.push(begin.elapsed());
        tokio::time::sleep(Duration::from_millis(dice.roll(60))).await;
        let begin = Instant::now();
        work.driver.delete_snapshot(&name).await.unwrap();
        deleted.push(begin.elapsed());
        let records = work.records();
        longest = longest.max(records.chain(records.active("pvc-1").unwrap()).len());
    }
    tell("CreateSnapshot", taken);
    tell("DeleteSnapshot", deleted);
    let left = work.merged().await;
    eprintln!("at most {longest} layers, {left} at the end");
    assert!(longest <= 20, "merges do not keep up: {longest} layers at once");
    assert!(left <= 2, "{left} layers are left");
    assert_eq!(names(&work.driver.path("pool/layers")).len(), left, "files of layers");
    work.end("snapshots that come and go").await;
}

/// A daemon that was started and not told everything serves nobody, and is replaced.
#[tokio::test(flavor = "multi_thread")]
async fn the_driver_dies_while_it_starts_a_daemon_again() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    driver.snapshot("snap-1", "pvc-1").await.unwrap();
    let guest = Guest::connect(&driver.socket("pvc-1"));
    let mut dice = Dice::new(23);
    for _ in 0..rounds(15) {
        signal(driver.daemons().await[0], "KILL");
        tokio::time::sleep(Duration::from_millis(dice.roll(40))).await;
        driver.restart().await;
        guest.act(vec![Action::Write { sectors: 0..8, stamp: 1 }]).await;
        until("it is served", async || driver.daemons().await.len() == 1).await;
    }
    drop(guest);
    driver.remove("pvc-1").await;
    driver.delete_snapshot("snap-1").await.unwrap();
    driver.assert_empty().await;
}

/// As many slow copies as jobs run at the same time. Once they kept all other layers from being
/// merged, for hours.
#[tokio::test(flavor = "multi_thread")]
async fn slow_copies_do_not_hold_up_merges() {
    let driver = Driver::start().await;
    let size = 8 << 20;
    let wish =
        |name: &str, size, source, parameters| Wish { name: name.into(), size, source, parameters };
    driver.fulfil(&wish("pvc-1", size, None, vec![])).await.unwrap();
    driver.attach("pvc-1").await;
    let writes = (0..sectors(size)).step_by(LONGEST);
    let write = |first| Action::Write { sectors: first..first + LONGEST, stamp: 1 };
    Guest::connect(&driver.socket("pvc-1")).act(writes.map(write).collect()).await;
    driver.snapshot("snap-1", "pvc-1").await.unwrap();
    let slowly = || vec![("copyMode", "clone"), ("cloneBytesPerSecond", "4Ki")];
    let source = || Some(Source::Snapshot("snap-1".to_owned()));
    for number in 0..6 {
        let name = format!("slow-{number}");
        driver.fulfil(&wish(&name, size, source(), slowly())).await.unwrap();
    }
    until("all are copied side by side", async || {
        let layers = driver.look().await.layers;
        layers.iter().filter(|layer| layer.job.is_some()).count() == 6
    })
    .await;
    driver.create("pvc-2").await;
    driver.stage("pvc-2").await.unwrap(); // published, its active layer is left alone
    for name in ["one", "two"] {
        driver.snapshot(name, "pvc-2").await.unwrap();
        driver.delete_snapshot(name).await.unwrap();
    }
    until("its layers are merged", async || {
        let volumes = driver.inspect().await;
        volumes.iter().any(|one| one.volume_id == "pvc-2" && one.layers.len() == 1)
    })
    .await;
    driver.unstage("pvc-2").await.unwrap();
    driver.detach("pvc-1").await;
    driver.delete_snapshot("snap-1").await.unwrap();
    for volume in driver.inspect().await {
        driver.delete(&volume.volume_id).await.unwrap();
    }
    driver.assert_empty().await;
}

/// What is copied slowly is what there is: once what is empty took as long as what is not, and what
/// was copied already took as long once more after each interruption.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_copy_spends_no_time_on_what_is_empty_or_copied() {
    let mut driver = Driver::start().await;
    let size = 2 << 30; // 17 minutes, if all of it counted
    let wish =
        |name: &str, source, parameters| Wish { name: name.into(), size, source, parameters };
    driver.fulfil(&wish("pvc-1", None, vec![])).await.unwrap();
    driver.attach("pvc-1").await;
    let parts =
        [0..24 << 20, size - (2 << 20)..size].map(|part| sectors(part.start)..sectors(part.end));
    let first = parts.iter().flat_map(|part| part.clone().step_by(LONGEST));
    let write = |first| Action::Write { sectors: first..first + LONGEST, stamp: 1 };
    Guest::connect(&driver.socket("pvc-1")).act(first.map(write).collect()).await;
    driver.detach("pvc-1").await;
    let slowly = vec![("copyMode", "clone"), ("cloneBytesPerSecond", "2Mi")];
    let source = Some(Source::Volume("pvc-1".to_owned()));
    let begin = Instant::now();
    driver.fulfil(&wish("pvc-2", source, slowly)).await.unwrap();
    driver.stage("pvc-2").await.unwrap();
    let is_copied = async |driver: &Driver, most: u64| {
        let volumes = driver.inspect().await;
        let copy = volumes.iter().find(|one| one.volume_id == "pvc-2").unwrap();
        let alone = copy.layers.len() == 1;
        alone || copy.layers[0].allocated_bytes >= i64::try_from(most).unwrap()
    };
    until("most is copied", async || is_copied(&driver, 20 << 20).await).await;
    let first = begin.elapsed();
    driver.restart().await;
    until("all is copied", async || is_copied(&driver, u64::MAX >> 1).await).await;
    assert!(first > Duration::from_secs(8), "20 MiB, faster than 2 MiB/s: {first:?}");
    driver.publish("pvc-2").await.unwrap();
    let guest = Guest::connect(&driver.socket("pvc-2"));
    for part in parts {
        let found = guest.read(part.start..part.start + LONGEST).await;
        assert_eq!(read(&found, part.start).unwrap(), [1; LONGEST]);
    }
    drop(guest);
    driver.detach("pvc-2").await;
    for volume in ["pvc-1", "pvc-2"] {
        driver.delete(volume).await.unwrap();
    }
    driver.assert_empty().await;
}

/// Snapshots of a volume that was empty. Once the raw layer below went up into the first of them, and
/// the volume was an overlay for ever, with half the writes a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_raw_volume_is_raw_again_without_its_snapshots() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let guest = Guest::connect(&driver.socket("pvc-1"));
    for number in 0..3 {
        driver.snapshot(&format!("snap-{number}"), "pvc-1").await.unwrap();
        let sectors = number * LONGEST..(number + 1) * LONGEST;
        guest.act(vec![Action::Write { sectors, stamp: 1 }]).await;
    }
    for number in 0..3 {
        driver.delete_snapshot(&format!("snap-{number}")).await.unwrap();
        until("it is merged", async || driver.inspect().await[0].layers.len() == 3 - number).await;
    }
    assert_eq!(driver.inspect().await[0].layers[0].format, "raw");
    for number in 0..3 {
        let found = guest.read(number * LONGEST..(number + 1) * LONGEST).await;
        assert_eq!(read(&found, number * LONGEST).unwrap(), [1; LONGEST]);
    }
    drop(guest);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}
