//! Processes that come and go: drivers, supervisors, daemons, machines.

use crate::{
    harness::{
        Driver, all_of, daemons_below, is_alive, mounts_below, names, signal, supervisors_of,
        unmount, until,
    },
    vm::Vm,
};
use std::fs;
use tonic::Code;

/// Starts a writer in the guest: blocks with their own numbers, each synced, each number noted
/// only after its write was acknowledged.
const WRITER: &str = "(n=0; while [ ! -e /stop ]; do printf '%016d' $n > /block; \
    dd if=/block of=/dev/vda bs=4096 seek=$n conv=notrunc,sync oflag=direct 2> /dev/null \
    || echo $n >> /failed; n=$((n+1)); echo $n > /next; mv /next /acknowledged; done; touch /stopped) \
    > /dev/null 2>&1 &";

/// Compares every acknowledged block with its number, past the page cache.
const VERIFY: &str = "echo 3 > /proc/sys/vm/drop_caches; n=0; \
    while [ $n -lt $(cat /acknowledged) ]; do \
    dd if=/dev/vda bs=4096 skip=$n count=1 iflag=direct 2> /dev/null | head -c 16; echo; \
    n=$((n+1)); done > /found; \
    n=0; while [ $n -lt $(cat /acknowledged) ]; do printf '%016d\\n' $n; n=$((n+1)); done > /want; \
    cmp /found /want && cat /acknowledged";

async fn acknowledged(vm: &mut Vm) -> u32 {
    vm.run("cat /acknowledged 2> /dev/null || echo 0").await.trim().parse().unwrap()
}

async fn progress(vm: &mut Vm) {
    let before = acknowledged(vm).await;
    until("the guest writes", async || acknowledged(vm).await > before + 5).await;
}

async fn stop_and_verify(mut vm: Vm) -> u32 {
    vm.run("touch /stop; while [ ! -e /stopped ]; do sleep 0.05; done").await;
    assert_eq!(vm.run("cat /failed 2> /dev/null || true").await, "", "failed writes");
    let count = vm.run(VERIFY).await.trim().parse().unwrap();
    vm.assert_no_errors().await;
    vm.power_off().await;
    count
}

#[tokio::test]
async fn a_vm_writes_on_while_the_driver_is_killed_twenty_times() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemons = driver.daemons().await;
    let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
    vm.run(WRITER).await;
    for _ in 0..20 {
        progress(&mut vm).await;
        driver.restart().await;
        assert_eq!(driver.daemons().await, daemons, "the daemon is untouched");
    }
    let count = stop_and_verify(vm).await;
    eprintln!("20 kills of the driver: {count} acknowledged blocks, all there");
    assert_eq!(driver.inspect().await.len(), 1);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn an_upgrade_of_the_driver_leaves_what_is_published() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemons = driver.daemons().await;
    assert!(driver.terminate().await.success());
    assert!(!driver.path("csi.sock").exists(), "it takes its socket with it");
    assert!(daemons.iter().all(|pid| is_alive(*pid)));
    assert!(driver.socket("pvc-1").exists());
    driver.launch(&[], None);
    driver.answers().await;
    assert_eq!(driver.daemons().await, daemons);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_told_to_end_finishes_the_calls_in_flight() {
    let mut driver = Driver::start().await;
    driver.create("pvc-1").await;
    let request = driver.stage_request("pvc-1");
    fs::create_dir(&request.staging_target_path).unwrap();
    let mut node = driver.node();
    let call = tokio::spawn(async move { node.node_stage_volume(request).await });
    let run = driver.path("run");
    until("the call is in flight", async || names(&run).iter().any(|name| name.len() == 32)).await;
    assert!(driver.terminate().await.success());
    call.await.unwrap().unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    assert_eq!(driver.daemons().await.len(), 1);
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_daemon_that_dies_is_started_again_and_the_vm_goes_on() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
    vm.run(WRITER).await;
    // One request in flight: with several, the guest needs the relay (facts/relay.md, D6).
    for kill in 1..=5 {
        progress(&mut vm).await;
        let before = driver.daemons().await;
        signal(before[0], "KILL");
        until("another daemon serves", async || {
            let now = driver.daemons().await;
            now.len() == 1 && now != before
        })
        .await;
        let attachment = driver.inspect().await.remove(0).attachment.unwrap();
        assert_eq!(attachment.daemon.unwrap().restarts, kill);
    }
    let count = stop_and_verify(vm).await;
    eprintln!("5 kills of the daemon: {count} acknowledged blocks, all there");
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn daemons_outlive_their_supervisor_and_the_next_one_knows_them() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemons = driver.daemons().await;
    let first = supervisors_of(&driver.path("run"));
    assert_eq!(first.len(), 1);
    signal(first[0], "KILL");
    until("another supervisor is there", async || {
        let now = supervisors_of(&driver.path("run"));
        now.len() == 1 && now != first
    })
    .await;
    assert_eq!(driver.daemons().await, daemons);
    // The new one reports the end of a daemon that is not its child.
    signal(daemons[0], "KILL");
    until("another daemon serves", async || {
        let now = driver.daemons().await;
        now.len() == 1 && now != daemons
    })
    .await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn what_dies_while_the_driver_is_away_is_started_again() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    driver.published("pvc-2").await;
    let daemons = driver.daemons().await;
    driver.kill();
    for pid in supervisors_of(&driver.path("run")).iter().chain(&daemons) {
        signal(*pid, "KILL");
    }
    driver.launch(&[], None);
    driver.answers().await;
    assert_eq!(driver.daemons().await.len(), 2, "before the first call is answered");
    assert!(driver.socket("pvc-1").exists() && driver.socket("pvc-2").exists());
    for volume in ["pvc-1", "pvc-2"] {
        driver.remove(volume).await;
    }
    driver.assert_empty().await;
}

/// As after the end of the kernel that had them.
fn unmount_all(driver: &Driver) {
    mounts_below(driver.scratch()).iter().rev().for_each(|mount| unmount(mount));
}

#[tokio::test]
async fn after_a_reboot_nothing_is_staged_and_everything_can_be() {
    let mut driver = Driver::start().await;
    let volume = driver.published("pvc-1").await;
    driver.kill();
    for pid in all_of(&driver) {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    unmount_all(&driver);
    // A run directory on a disk: it outlived the boot that it tells of.
    fs::File::create(driver.path("run/boot")).unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    assert!(driver.inspect().await[0].attachment.is_none());
    assert_eq!(driver.publish(&volume).await.unwrap_err().code(), Code::FailedPrecondition);
    driver.stage(&volume).await.unwrap();
    driver.publish(&volume).await.unwrap();
    driver.remove(&volume).await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_run_directory_that_was_wiped_can_still_be_unpublished_and_published() {
    let mut driver = Driver::start().await;
    let volume = driver.published("pvc-1").await;
    let other = driver.published("pvc-2").await;
    driver.kill();
    for pid in all_of(&driver) {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    driver.wipe_run();
    driver.launch(&[], None);
    driver.answers().await;
    driver.remove(&other).await;
    // A kubelet that starts again stages and publishes again, over what is still mounted.
    driver.stage(&volume).await.unwrap();
    driver.publish(&volume).await.unwrap();
    assert!(driver.socket(&volume).exists());
    driver.remove(&volume).await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn two_drivers_do_not_share_a_pool_a_run_directory_or_a_socket() {
    let driver = Driver::start().await;
    for (run, pool, socket, words) in [
        ("run", "pool-2", "csi-2.sock", "run-dir"),
        ("run-2", "pool", "csi-2.sock", "pool"),
        ("run-2", "pool-2", "csi.sock", "endpoint"),
    ] {
        let output = crate::harness::qsd_csi()
            .args(["standalone", "--node-id", "node-2"])
            .args(["--endpoint", &format!("unix://{}", driver.text(socket))])
            .args(["--run-dir", &driver.text(run)])
            .args(["--pool", &format!("main={}", driver.text(pool))])
            .arg("--qsd")
            .arg(crate::harness::part("bin/qemu-storage-daemon"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(words), "{text}");
    }
    driver.create("pvc-1").await;
    driver.delete("pvc-1").await.unwrap();
}

#[tokio::test]
async fn a_supervisor_without_daemons_and_clients_ends_by_itself() {
    let mut driver = Driver::start().await;
    let supervisor = supervisors_of(&driver.path("run"))[0];
    driver.terminate().await;
    until("the supervisor ends", async || !is_alive(supervisor)).await;
    assert!(!driver.path("run/supervisor.sock").exists());
}

#[tokio::test]
async fn a_daemon_that_cannot_start_is_an_error_with_its_own_words() {
    let driver = Driver::start_on("/bin/false".into(), &[]).await;
    driver.create("pvc-1").await;
    let error = driver.stage("pvc-1").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.message().contains("exit code 1"), "{error}");
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn damage_stays_with_its_volume_and_is_told() {
    let mut driver = Driver::start().await;
    for name in ["record", "layer", "short", "whole"] {
        driver.create(name).await;
    }
    driver.kill();
    fs::File::create(driver.path("pool/records/volumes/record.json")).unwrap();
    let layer_of = |name: &str| {
        let record = fs::read(driver.path(&format!("pool/records/volumes/{name}.json"))).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        let id = record["phase"]["ready"]["active"].as_str().unwrap().to_owned();
        driver.path(&format!("pool/layers/{id}.raw"))
    };
    fs::remove_file(layer_of("layer")).unwrap();
    fs::File::options().write(true).open(layer_of("short")).unwrap().set_len(512).unwrap();
    let layers = names(&driver.path("pool/layers")).len();
    driver.launch(&[], None);
    driver.answers().await;
    for (name, words) in
        [("record", "record.json"), ("layer", "No such file"), ("short", "512 bytes")]
    {
        for error in [driver.stage(name).await.unwrap_err(), driver.delete(name).await.unwrap_err()]
        {
            assert_eq!(error.code(), Code::Internal);
            assert!(error.message().contains(words), "{error}");
        }
        assert_eq!(driver.try_create(name).await.unwrap_err().code(), Code::Internal);
    }
    assert_eq!(names(&driver.path("pool/layers")).len(), layers, "nothing was judged garbage");
    assert_eq!(driver.inspect().await.iter().filter(|one| !one.damage.is_empty()).count(), 3);
    driver.stage("whole").await.unwrap();
    driver.publish("whole").await.unwrap();
    driver.remove("whole").await;
}

#[tokio::test]
async fn a_daemon_that_does_not_answer_is_left_alone_and_taken_over_when_it_does() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemons = driver.daemons().await;
    driver.kill();
    signal(daemons[0], "STOP");
    driver.launch(&[], None);
    driver.answers().await;
    let attachment = driver.inspect().await.remove(0).attachment.unwrap();
    assert!(attachment.trouble.contains("no answer"), "{}", attachment.trouble);
    let error = driver.stage("pvc-1").await.unwrap_err();
    assert!([Code::Unavailable, Code::Aborted].contains(&error.code()), "{error}");
    assert!(is_alive(daemons[0]), "a VM may be at work on it");
    signal(daemons[0], "CONT");
    until("it is taken over", async || driver.daemons().await == daemons).await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_volume_whose_attachment_cannot_be_read_is_not_deleted_under_its_daemon() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    driver.kill();
    let part = driver.part();
    fs::File::create(part.join("attachment.json")).unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    let error = driver.delete("pvc-1").await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains(part.to_str().unwrap()), "{error}");
    assert_eq!(names(&driver.path("pool/layers")).len(), 1);
    // Staging it again, as kubelet does after its restart, mends it under the running VM.
    let daemons = daemons_below(driver.scratch());
    driver.stage("pvc-1").await.unwrap();
    driver.publish("pvc-1").await.unwrap();
    assert_eq!(driver.daemons().await, daemons);
    assert!(driver.socket("pvc-1").exists());
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}
