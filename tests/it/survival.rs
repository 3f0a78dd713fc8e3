//! VMs that never reconnect outlive daemons, relays and versions, and nothing is lost on the way.
//!
//! Short here; `make hunt` runs the same with `QSD_CSI_ROUNDS` set, one after another. What was
//! measured is printed.

use crate::{
    harness::{
        Dice, Driver, GIB, create_request, daemons_below, part, relays_of, signal, supervisors_of,
        until,
    },
    hunt::{self, Outcome, assert_holds},
    qsd::{Image, Qsd},
    relay::process::{Relay, key},
    vm::Vm,
};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// How often what is tested happens: a few times, or as often as `make hunt` says.
pub(crate) fn rounds(few: usize) -> usize {
    let given = std::env::var("QSD_CSI_ROUNDS").ok();
    given.map_or(few, |rounds| rounds.parse().expect("QSD_CSI_ROUNDS is a number"))
}

/// Prints p50, p99 and the longest of some times.
pub(crate) fn tell(what: &str, mut times: Vec<Duration>) {
    if times.is_empty() {
        return eprintln!("{what}: never");
    }
    times.sort();
    let at = |part: usize| times[(times.len() * part).div_ceil(100).max(1) - 1];
    let (count, p50, p99, max) = (times.len(), at(50), at(99), at(100));
    eprintln!("{what}: {count} times, p50 {p50:?}, p99 {p99:?}, max {max:?}");
}

pub(crate) fn tell_hunt(what: &str, outcome: &Outcome) {
    let Outcome { writes, reads, errors, lost, median, p99, max, .. } = outcome;
    let stall = outcome.stalls.iter().max().copied().unwrap_or_default();
    eprintln!(
        "{what}: {writes} writes, {reads} reads, {errors} errors, {lost} lost; latency p50 \
         {median:?}, p99 {p99:?}, max {max:?}; longest time without any answer {stall:?}"
    );
}

/// Some time in which requests pile up.
pub(crate) async fn a_while(dice: &mut Dice) {
    sleep(Duration::from_millis(100 + dice.roll(300))).await;
}

/// The relay of a hand-made daemon, and its socket for a VM.
fn relayed(relay: &Relay, number: u32, backend: &Path) -> PathBuf {
    let key = key(number);
    fs::create_dir_all(relay.run().join(&key).join("export")).unwrap();
    let attach = json!({ "key": key, "backend": backend, "tracking": "works" });
    assert_eq!(relay.ask(&json!({ "attach": attach })), "done");
    relay.socket(&key)
}

fn micros(status: &serde_json::Value, field: &str) -> Duration {
    Duration::from_micros(status[field].as_u64().unwrap())
}

/// A volume published by a driver, and a VM on it that never reconnects, at work.
struct Work {
    driver: Driver,
    vm: Vm,
    job: crate::vm::Job,
}

impl Work {
    async fn begin(driver: Driver) -> Self {
        driver.published("pvc-1").await;
        let machine = Vm::on(&driver.socket("pvc-1")).without_reconnect().cpus(2).queues(2);
        let mut vm = machine.boot().await;
        let job = hunt::begin(&mut vm, "").await;
        Self { driver, vm, job }
    }

    /// Ends the load, and sees that all it wrote is there, in the guest and behind it.
    async fn end(mut self, what: &str) -> Driver {
        let (outcome, table) = hunt::end(&mut self.vm, self.job).await;
        tell_hunt(what, &outcome);
        outcome.assert_clean();
        self.vm.assert_no_errors().await;
        self.vm.power_off().await;
        let layers = fs::read_dir(self.driver.path("pool/layers")).unwrap();
        let layer = layers.map(|entry| entry.unwrap().path()).next().unwrap();
        assert_holds(&layer, &table);
        self.driver
    }
}

#[tokio::test]
async fn daemons_die_and_a_raw_volume_loses_nothing() {
    let work = Work::begin(Driver::start().await).await;
    let mut dice = Dice::new(1);
    let mut stalls = Vec::new();
    for round in 1..=rounds(8) {
        a_while(&mut dice).await;
        let daemon = work.driver.daemons().await[0];
        signal(daemon, "KILL");
        until("another one serves", async || {
            let volume = work.driver.inspect().await.remove(0);
            let relay = volume.attachment.unwrap().relay.unwrap();
            let done = relay.losses == u64::try_from(round).unwrap();
            if done {
                stalls.push(Duration::from_micros(relay.last_stall_us));
            }
            done
        })
        .await;
    }
    tell("daemon killed, requests held up", stalls);
    let driver = work.end("raw volume").await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn daemons_die_and_a_qcow2_overlay_loses_nothing() {
    let mut qsd = Qsd::on(Image::Overlay).start().await;
    let relay = Relay::start();
    let socket = relayed(&relay, 1, &qsd.socket(0));
    let mut vm = Vm::on(&socket).without_reconnect().cpus(2).queues(2).boot().await;
    let job = hunt::begin(&mut vm, "").await;
    let mut dice = Dice::new(2);
    let mut stalls = Vec::new();
    for round in 1..=rounds(8) {
        a_while(&mut dice).await;
        qsd.kill();
        qsd.launch().await;
        until("it serves again", async || relay.status(&key(1))["losses"] == round).await;
        stalls.push(micros(&relay.status(&key(1)), "last_stall_us"));
    }
    tell("daemon killed, requests held up", stalls);
    let (outcome, table) = hunt::end(&mut vm, job).await;
    tell_hunt("qcow2 overlay", &outcome);
    outcome.assert_clean();
    vm.assert_no_errors().await;
    vm.power_off().await;
    assert_holds(&qsd.flat(), &table);
}

/// What the two tests above would find without the relay, though this VM does reconnect.
#[tokio::test]
async fn without_the_relay_the_same_load_breaks_the_disk() {
    let limits = json!({ "iops-write": 400 });
    let mut qsd = Qsd::on(Image::Raw).limits(limits).start().await;
    let machine = Vm::on(&qsd.socket(0)).reconnect(Duration::from_millis(20));
    let mut vm = machine.cpus(2).queues(2).boot().await;
    let job = hunt::begin(&mut vm, "--patience 5").await;
    let mut dice = Dice::new(3);
    for _ in 0..6 {
        a_while(&mut dice).await;
        qsd.kill();
        qsd.launch().await;
    }
    let (outcome, _) = hunt::end(&mut vm, job).await;
    tell_hunt("bare socket", &outcome);
    assert_ne!(outcome.errors, 0, "the hunt finds nothing where there is something");
}

#[tokio::test]
async fn a_guest_is_stopped_and_goes_on_under_load() {
    let limits = json!({ "iops-write": 400 });
    let qsd = Qsd::on(Image::Raw).limits(limits).start().await;
    let relay = Relay::start();
    let socket = relayed(&relay, 1, &qsd.socket(0));
    let mut vm = Vm::on(&socket).without_reconnect().cpus(2).queues(2).boot().await;
    let job = hunt::begin(&mut vm, "").await;
    let mut dice = Dice::new(4);
    let mut times = Vec::new();
    for _ in 0..rounds(5).min(20) {
        a_while(&mut dice).await;
        let begin = Instant::now();
        vm.stop().await;
        times.push(begin.elapsed());
        vm.cont().await;
    }
    tell("stop, with what was in flight drained", times);
    let (outcome, table) = hunt::end(&mut vm, job).await;
    tell_hunt("stop and cont", &outcome);
    outcome.assert_clean();
    vm.assert_no_errors().await;
    vm.power_off().await;
    assert_holds(&qsd.flat(), &table);
}

/// From one VM to the next, each on a socket of its own, as two nodes would have.
#[tokio::test]
async fn a_guest_moves_from_vm_to_vm_under_load() {
    let limits = json!({ "iops-write": 400 });
    let qsd = Qsd::on(Image::Raw).exports(2).limits(limits).start().await;
    let relay = Relay::start();
    let sockets = [relayed(&relay, 1, &qsd.socket(0)), relayed(&relay, 2, &qsd.socket(1))];
    let machine = |at: usize| Vm::on(&sockets[at]).without_reconnect().cpus(2).queues(2);
    let mut vm = machine(0).boot().await;
    let job = hunt::begin(&mut vm, "").await;
    let mut dice = Dice::new(5);
    let mut times = Vec::new();
    for round in 1..=rounds(3).min(20) {
        a_while(&mut dice).await;
        let mut other = machine(round % 2).incoming(&qsd.path(&format!("to-{round}"))).await;
        let begin = Instant::now();
        vm.migrate_to(&mut other).await;
        times.push(begin.elapsed());
        vm = other;
    }
    tell("live migration, whole", times);
    let (outcome, table) = hunt::end(&mut vm, job).await;
    tell_hunt("live migration", &outcome);
    outcome.assert_clean();
    vm.assert_no_errors().await;
    vm.power_off().await;
    assert_holds(&qsd.flat(), &table);
}

#[tokio::test]
async fn a_volume_moves_between_versions_under_load() {
    let versions = ["bin/qemu-storage-daemon", "bin/qemu-storage-daemon-newer"].map(part);
    let links = tempfile::tempdir().unwrap();
    let installed = links.path().join("qemu-storage-daemon");
    std::os::unix::fs::symlink(&versions[0], &installed).unwrap();
    let work = Work::begin(Driver::start_on(installed.clone(), &[]).await).await;
    let mut dice = Dice::new(6);
    let (mut stopped, mut seen) = (Vec::new(), std::collections::BTreeSet::new());
    for round in 1..=rounds(6).min(100) {
        a_while(&mut dice).await;
        fs::remove_file(&installed).unwrap();
        std::os::unix::fs::symlink(&versions[round % 2], &installed).unwrap();
        let answer = work.driver.try_upgrade("pvc-1").await.unwrap();
        assert!(answer.replaced);
        assert_eq!(work.driver.daemons().await, [answer.pid]);
        stopped.push(Duration::from_micros(answer.stopped_us));
        seen.insert(answer.version);
    }
    assert!(!work.driver.try_upgrade("pvc-1").await.unwrap().replaced, "it is the newest");
    assert_eq!(seen.len(), 2, "{seen:?}");
    tell(&format!("handover between {seen:?}, rings stopped"), stopped);
    let driver = work.end("handover").await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// It does not die, it does not answer: the relay finds out, and the node ends it.
#[tokio::test]
async fn a_daemon_that_is_stuck_under_a_vm_is_replaced() {
    let work = Work::begin(Driver::start().await).await;
    let stuck = work.driver.daemons().await;
    let begin = Instant::now();
    signal(stuck[0], "STOP");
    until("another one serves", async || {
        let serving = work.driver.daemons().await;
        serving.len() == 1 && serving != stuck && connected(&work.driver).await
    })
    .await;
    eprintln!("a stopped daemon was replaced after {:?}", begin.elapsed());
    let driver = work.end("stuck daemon").await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// Whatever a move broke off at, one daemon serves, and the other is gone.
#[tokio::test]
async fn relays_and_drivers_die_in_the_middle_of_moves() {
    let mut work = Work::begin(Driver::start().await).await;
    let run = work.driver.path("run");
    let mut dice = Dice::new(10);
    let mut moved = 0;
    for _ in 0..rounds(8) {
        a_while(&mut dice).await;
        let worker = relays_of(&run).pop().unwrap();
        let killer = tokio::task::spawn_blocking({
            let delay = Duration::from_micros(dice.roll(30_000));
            move || {
                std::thread::sleep(delay);
                signal(worker, "KILL");
            }
        });
        moved += u32::from(work.driver.upgrade("pvc-1").await.is_ok());
        killer.await.unwrap();
        until("one daemon serves", async || one_daemon_serves(&work.driver).await).await;
    }
    for point in ["node-upgrade-beside", "node-upgrade-moved"] {
        work.driver.kill();
        work.driver.launch(&[], Some(point));
        work.driver.answers().await;
        a_while(&mut dice).await;
        work.driver.upgrade("pvc-1").await.unwrap_err();
        assert!(!work.driver.ended().success(), "{point}");
        work.driver.launch(&[], None);
        work.driver.answers().await;
        until("one daemon serves", async || one_daemon_serves(&work.driver).await).await;
    }
    eprintln!("{moved} moves came to their end, the others began anew");
    let driver = work.end("moves broken off").await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

async fn one_daemon_serves(driver: &Driver) -> bool {
    let serving = driver.daemons().await;
    connected(driver).await && serving.len() == 1 && daemons_below(driver.scratch()) == serving
}

#[tokio::test]
async fn relays_die_and_no_guest_notices() {
    let work = Work::begin(Driver::start().await).await;
    let run = work.driver.path("run");
    let mut dice = Dice::new(7);
    for round in 1..=rounds(8).min(100) {
        a_while(&mut dice).await;
        let relays = relays_of(&run);
        assert_eq!(relays.len(), 2, "a keeper and a worker");
        // Now and then the keeper, whose loss the worker makes good.
        let victim = relays[usize::from(round % 4 != 0)];
        signal(victim, "KILL");
        // And now and then a daemon, which the next worker has to replace.
        if round % 3 == 0 {
            signal(work.driver.daemons().await[0], "KILL");
        }
        until("both are there again", async || {
            let now = relays_of(&run);
            now.len() == 2 && !now.contains(&victim) && connected(&work.driver).await
        })
        .await;
    }
    // A new program takes over what the old one had.
    let program = work.driver.path("qsd-csi");
    fs::copy(env!("CARGO_BIN_EXE_qsd-csi"), &program).unwrap();
    let upgrade = ["relay", "--run-dir", &work.driver.text("run"), "upgrade"];
    let upgraded = crate::harness::qsd_csi().args(upgrade).arg(&program).status().unwrap();
    assert!(upgraded.success());
    until("the new one serves", async || {
        let worker = relays_of(&run).pop();
        let is = worker.and_then(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok());
        is.as_ref() == Some(&program) && connected(&work.driver).await
    })
    .await;
    signal(work.driver.daemons().await[0], "KILL");
    a_while(&mut dice).await;
    let driver = work.end("relays killed").await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// Whether the relay answers and has a VM and a daemon.
async fn connected(driver: &Driver) -> bool {
    let attachment = driver.inspect().await.remove(0).attachment.unwrap();
    attachment.daemon.is_some() && attachment.relay.is_some_and(|relay| relay.front_end.is_some())
}

/// The one case that is left to QEMU; its own copy of the inflight buffer saves what was in flight.
#[tokio::test]
async fn both_relay_processes_die_and_a_guest_that_reconnects_goes_on() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let machine = Vm::on(&driver.socket("pvc-1")).reconnect(Duration::from_millis(50));
    let mut vm = machine.cpus(2).queues(2).boot().await;
    let job = hunt::begin(&mut vm, "").await;
    let run = driver.path("run");
    let mut dice = Dice::new(8);
    for round in 1..=rounds(4).min(50) {
        a_while(&mut dice).await;
        let relays = relays_of(&run);
        for pid in &relays {
            signal(*pid, "KILL");
        }
        if round % 2 == 0 {
            signal(driver.daemons().await[0], "KILL");
        }
        until("both are there again", async || {
            let now = relays_of(&run);
            now.len() == 2
                && now.iter().all(|pid| !relays.contains(pid))
                && connected(&driver).await
        })
        .await;
    }
    let (outcome, table) = hunt::end(&mut vm, job).await;
    tell_hunt("both relay processes killed", &outcome);
    outcome.assert_clean();
    vm.assert_no_errors().await;
    vm.power_off().await;
    let layer = fs::read_dir(driver.path("pool/layers")).unwrap().next().unwrap().unwrap().path();
    assert_holds(&layer, &table);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// Everything that serves dies at once but the VM, again and again.
#[tokio::test]
async fn driver_supervisor_relay_and_daemon_die_under_a_vm() {
    let mut work = Work::begin(Driver::start().await).await;
    let run = work.driver.path("run");
    let mut dice = Dice::new(9);
    for _ in 0..rounds(3).min(20) {
        a_while(&mut dice).await;
        let worker = relays_of(&run).pop().unwrap();
        let victims = [supervisors_of(&run), vec![worker], work.driver.daemons().await].concat();
        work.driver.kill();
        for pid in victims {
            signal(pid, "KILL");
        }
        work.driver.launch(&[], None);
        work.driver.answers().await;
        until("all is back", async || connected(&work.driver).await).await;
    }
    let driver = work.end("all but the keeper killed").await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_second_vm_is_refused_at_once_and_the_first_goes_on() {
    let work = Work::begin(Driver::start().await).await;
    let socket = work.driver.socket("pvc-1");
    let mut times = Vec::new();
    for _ in 0..3 {
        let begin = Instant::now();
        let second = Command::new(part("bin/qemu-system-x86_64"))
            .args(["-nodefaults", "-display", "none", "-m", "64M"])
            .args(["-machine", "q35,accel=tcg,memory-backend=mem"])
            .args(["-object", "memory-backend-memfd,id=mem,size=64M,share=on"])
            .arg("-chardev")
            .arg(format!("socket,id=disk,path={}", socket.display()))
            .args(["-device", "vhost-user-blk-pci,chardev=disk"])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        times.push(begin.elapsed());
        assert!(!second.status.success());
    }
    tell("a second VM's QEMU from start to end", times);
    let volume = work.driver.inspect().await.remove(0);
    assert!(volume.attachment.unwrap().relay.unwrap().refused >= 3);
    let driver = work.end("beside refused ones").await;
    driver.remove("pvc-1").await;
}

/// Where the self-test finds that requests are not noted, the relay passes through.
#[tokio::test]
async fn a_daemon_that_notes_no_requests_is_served_as_plainly_as_without_a_relay() {
    let mut qsd = Qsd::on(Image::Raw).start().await;
    let relay = Relay::start();
    let socket = relayed(&relay, 1, &qsd.socket(0));
    let attach = json!({ "key": key(1), "backend": qsd.socket(0), "tracking": "unavailable" });
    assert_eq!(relay.ask(&json!({ "attach": attach })), "done");
    let mut vm = Vm::on(&socket).without_reconnect().cpus(2).queues(2).boot().await;
    let job = hunt::begin(&mut vm, "").await;
    sleep(Duration::from_secs(1)).await;
    let (outcome, table) = hunt::end(&mut vm, job).await;
    outcome.assert_clean();
    let pause = relay.ask(&json!({ "pause": { "key": key(1), "most_ms": 1000 } }));
    assert!(pause["refused"].as_str().unwrap().contains("does not note requests"), "{pause}");
    let elsewhere = json!({ "switch": { "key": key(1), "backend": qsd.path("none") } });
    assert!(relay.ask(&elsewhere)["refused"].is_string());
    // While nothing is in flight the next daemon goes on where this one ended.
    qsd.kill();
    qsd.launch().await;
    until("it serves again", async || relay.status(&key(1))["losses"] == 1).await;
    vm.run("hunt verify /dev/vda --table /tmp/table").await;
    vm.assert_no_errors().await;
    vm.power_off().await;
    assert_holds(&qsd.flat(), &table);
}

/// A fence for snapshots of several volumes: requests are held back, and a holder who dies does not
/// hold them for ever.
#[tokio::test]
async fn requests_are_held_back_and_let_go() {
    let qsd = Qsd::on(Image::Raw).start().await;
    let relay = Relay::start();
    let socket = relayed(&relay, 1, &qsd.socket(0));
    let mut vm = Vm::on(&socket).without_reconnect().cpus(2).queues(2).boot().await;
    let job = hunt::begin(&mut vm, "").await;
    let writes = || {
        let io = fs::read_to_string(format!("/proc/{}/io", qsd.pid())).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        line.unwrap().parse::<u64>().unwrap()
    };
    let mut dice = Dice::new(11);
    let mut times = Vec::new();
    for _ in 0..rounds(5).min(100) {
        a_while(&mut dice).await;
        let begin = Instant::now();
        let pause = json!({ "pause": { "key": key(1), "most_ms": 10_000 } });
        assert_eq!(relay.ask(&pause), "done");
        times.push(begin.elapsed());
        let (status, before) = (relay.status(&key(1)), writes());
        assert_eq!(status["front_end"]["paused"], true);
        sleep(Duration::from_millis(50)).await;
        assert_eq!(writes(), before, "something was written all the same");
        assert_eq!(relay.ask(&json!({ "resume": key(1) })), json!({ "resumed": true }));
        let before = writes();
        until("it writes again", async || writes() > before).await;
    }
    tell("requests held back", times);
    let pause = json!({ "pause": { "key": key(1), "most_ms": 200 } });
    assert_eq!(relay.ask(&pause), "done");
    until("nobody resumes", async || relay.status(&key(1))["front_end"]["paused"] == false).await;
    assert_eq!(relay.ask(&json!({ "resume": key(1) })), json!({ "resumed": false }));
    let (outcome, table) = hunt::end(&mut vm, job).await;
    outcome.assert_clean();
    vm.assert_no_errors().await;
    vm.power_off().await;
    assert_holds(&qsd.flat(), &table);
}

#[tokio::test]
async fn of_several_storage_daemons_the_newest_runs() {
    let newer = part("bin/qemu-storage-daemon-newer").display().to_string();
    let driver = Driver::start_with(&["--qsd", &newer]).await;
    driver.published("pvc-1").await;
    let version = driver.inspect().await.remove(0).attachment.unwrap().daemon.unwrap().version;
    assert!(!version.starts_with("10."), "{version}");
    driver.remove("pvc-1").await;
}

/// `auto` on a raw layer: the guest's own flushes reach the disk, and nothing else does.
#[tokio::test]
async fn the_guest_says_when_a_write_is_durable() {
    let disk = crate::disk::SmallDisk::new();
    {
        let pool = format!("small={}", disk.path().join("pool").display());
        let driver = Driver::start_with(&["--pool", &pool]).await;
        for (name, cache) in [("auto", "auto"), ("through", "writethrough")] {
            let mut request = create_request(name, GIB / 64);
            let parameters = [("pool", "small"), ("cache", cache)];
            request.parameters =
                parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
            driver.controller().create_volume(request).await.unwrap();
            driver.stage(name).await.unwrap();
            driver.publish(name).await.unwrap();
            let mut vm = Vm::boot(&driver.socket(name)).await;
            let mode = vm.run("cat /sys/block/vda/queue/write_cache").await;
            assert_eq!(mode.trim(), "write back");
            let writes = "hunt flush /dev/vda --writes 320 --every 16";
            vm.run(writes).await; // so that the second time changes no metadata
            let before = disk.flushes();
            vm.run(writes).await;
            let flushes = disk.flushes() - before;
            eprintln!("cache {cache}: 320 writes, 20 fdatasync in the guest: {flushes} flushes");
            match cache {
                "auto" => assert!((20..40).contains(&flushes), "{flushes}"),
                _ => assert!(flushes >= 320, "{flushes}"),
            }
            vm.power_off().await;
            driver.remove(name).await;
        }
    }
}
