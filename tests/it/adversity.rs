//! What a hostile reading of the driver tried, and must never work again.

use crate::{
    disk::SmallDisk,
    harness::{
        Dice, Driver, LIMIT, create_request, daemons_below, is_alive, mount, names, part, signal,
        supervisors_of, until,
    },
    vm::Vm,
};
use pb::volume_capability::access_mode::Mode;
use qsd_csi::csi::pb::csi as pb;
use std::{
    fs,
    io::{ErrorKind, Write as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};
use tonic::Code;

/// Waits until the one volume is served by a daemon that lives.
async fn served(driver: &Driver) {
    until("a living daemon serves", async || {
        let daemons = driver.daemons().await;
        daemons.len() == 1 && is_alive(daemons[0]) && driver.socket("pvc-1").exists()
    })
    .await;
}

/// The processes that have a layer of the pool open.
fn users_of_layers(driver: &Driver) -> Vec<i32> {
    let layers = driver.path("pool/layers");
    let opens_layer = |pid: &i32| {
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut files = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
        files.any(|file| file.starts_with(&layers))
    };
    let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    let pids = names.filter_map(|name| name.to_str()?.parse().ok());
    pids.filter(opens_layer).collect()
}

/// An acknowledged write is on the disk, not only in the host's memory: each one is followed by a
/// flush of the disk that the pool lies on.
#[tokio::test]
async fn every_acknowledged_write_was_made_durable_first() {
    let disk = SmallDisk::new();
    {
        let pool = format!("small={}", disk.path().join("pool").display());
        let driver = Driver::start_with(&["--pool", &pool]).await;
        let mut request = create_request("pvc-1", 16 << 20);
        let parameters = [("pool", "small"), ("cache", "writethrough")];
        request.parameters =
            parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        driver.controller().create_volume(request).await.unwrap();
        driver.stage("pvc-1").await.unwrap();
        driver.publish("pvc-1").await.unwrap();
        let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
        let write = "dd if=/dev/zero of=/dev/vda bs=4096 count=200 oflag=direct 2>&1";
        vm.run(write).await; // so that the second time changes no metadata
        let before = disk.flushes();
        vm.run(write).await;
        let flushes = disk.flushes() - before;
        eprintln!("200 acknowledged writes: {flushes} flushes");
        assert!(flushes >= 200, "{flushes}");
        vm.power_off().await;
        driver.remove("pvc-1").await;
    }
}

#[tokio::test]
async fn a_pod_cannot_write_into_what_is_published_to_it() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let target = driver.path("target-pvc-1");
    let error = fs::File::create(target.join("junk")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    let error = fs::remove_file(driver.socket("pvc-1")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    // Repeated by a kubelet that starts again, it stays so.
    driver.publish("pvc-1").await.unwrap();
    assert!(fs::File::create(target.join("junk")).is_err());
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_deaf_daemon_that_dies_later_is_started_again() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemon = driver.daemons().await[0];
    signal(daemon, "STOP");
    driver.restart().await;
    signal(daemon, "KILL");
    served(&driver).await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_daemon_that_dies_while_it_is_taken_over_is_started_again() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemon = driver.daemons().await[0];
    driver.kill();
    signal(daemon, "STOP"); // holds the driver in the handshake
    driver.launch(&[], None);
    tokio::time::sleep(Duration::from_secs(1)).await;
    signal(daemon, "KILL");
    driver.answers().await;
    served(&driver).await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_repeated_staging_does_not_kill_a_daemon_that_was_only_slow() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemon = driver.daemons().await[0];
    signal(daemon, "STOP");
    driver.restart().await;
    signal(daemon, "CONT");
    until("it is staged", async || driver.stage("pvc-1").await.is_ok()).await;
    assert_eq!(driver.daemons().await, [daemon]);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_lost_note_of_the_boot_is_no_reboot_while_daemons_run() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemons = driver.daemons().await;
    driver.kill();
    fs::remove_file(driver.path("run/boot")).unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    driver.stage("pvc-1").await.unwrap();
    assert_eq!(driver.daemons().await, daemons);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_layer_never_has_two_daemons() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let first = driver.daemons().await;
    driver.kill();
    // Nothing is left by which anybody could know the daemon, but that it runs.
    for pid in supervisors_of(&driver.path("run")) {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    driver.wipe_run();
    driver.launch(&[], None);
    driver.answers().await;
    let error = driver.stage("pvc-1").await.unwrap_err();
    assert!(error.message().contains("another daemon has it"), "{error}");
    assert_eq!(users_of_layers(&driver), first);
    signal(first[0], "KILL");
    until("it is staged", async || driver.stage("pvc-1").await.is_ok()).await;
    driver.publish("pvc-1").await.unwrap();
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// A process whose standard input has the path of a lock of ours, in a mount namespace of its own.
#[tokio::test]
async fn a_stranger_is_not_taken_for_a_daemon() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let daemons = driver.daemons().await;
    let (run, part) = (driver.text("run"), driver.part().join("a").display().to_string());
    let script = format!(
        "mount -t tmpfs none {run} && mkdir -p {part} && touch {part}/lock && \
         exec sleep 1000 < {part}/lock"
    );
    let mut stranger = Command::new("unshare").args(["-m", "sh", "-c", &script]).spawn().unwrap();
    let input = PathBuf::from(format!("/proc/{}/fd/0", stranger.id()));
    let lock = driver.part().join("a/lock");
    until("it poses", async || fs::read_link(&input).is_ok_and(|path| path == lock)).await;
    let first = supervisors_of(&driver.path("run"));
    signal(first[0], "KILL");
    until("another supervisor is there", async || {
        let now = supervisors_of(&driver.path("run"));
        now.len() == 1 && now != first
    })
    .await;
    driver.remove("pvc-1").await;
    until("the daemon ends", async || !is_alive(daemons[0])).await;
    assert!(stranger.try_wait().unwrap().is_none(), "a stranger was killed");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn what_is_left_of_an_earlier_boot_does_not_stop_the_driver() {
    let mut driver = Driver::start().await;
    driver.kill();
    let part = driver.path("run/0123456789abcdef0123456789abcdef");
    fs::create_dir_all(part.join("foreign")).unwrap();
    fs::File::create(driver.path("run/boot")).unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    fs::remove_dir(part.join("foreign")).unwrap();
    driver.restart().await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn data_whose_record_is_lost_is_not_thrown_away() {
    let mut driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.kill();
    let layers = names(&driver.path("pool/layers"));
    fs::remove_file(driver.path("pool/records/volumes/pvc-1.json")).unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    assert_eq!(names(&driver.path("pool/layers")), layers);
}

#[tokio::test]
async fn a_target_that_was_noted_but_never_mounted_stops_nothing() {
    let mut driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.stage("pvc-1").await.unwrap();
    driver.kill();
    fs::create_dir(driver.path("target-pvc-1")).unwrap();
    fs::File::create(driver.path("target-pvc-1/foreign")).unwrap();
    driver.launch(&[], Some("node-publish-intent"));
    driver.answers().await;
    driver.publish("pvc-1").await.unwrap_err();
    driver.ended();
    driver.launch(&[], None);
    driver.answers().await;
    assert_eq!(driver.publish("pvc-1").await.unwrap_err().code(), Code::FailedPrecondition);
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn targets_in_places_of_the_driver_or_in_one_another_are_refused() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let other = driver.create("pvc-2").await;
    driver.stage(&other).await.unwrap();
    for (path, code) in [
        ("run/x", Code::InvalidArgument),
        ("pool/records/volumes/evil.json", Code::InvalidArgument),
        ("staging-pvc-2", Code::InvalidArgument),
        ("target-pvc-1/sub", Code::FailedPrecondition),
    ] {
        let publish = pb::NodePublishVolumeRequest {
            target_path: driver.text(path),
            ..driver.publish_request(&other)
        };
        let error = driver.node().node_publish_volume(publish).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
    }
    driver.publish(&other).await.unwrap();
    driver.remove(&other).await;
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn paths_that_no_file_system_takes_are_not_our_fault() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.stage("pvc-1").await.unwrap();
    fs::File::create(driver.path("file")).unwrap();
    symlink(driver.path("loop"), driver.path("loop")).unwrap();
    for (path, code) in [
        (driver.text(&"n".repeat(300)), Code::InvalidArgument),
        (format!("{}/x", driver.text("file")), Code::FailedPrecondition),
        (format!("{}/x", driver.text("loop")), Code::FailedPrecondition),
    ] {
        let publish = pb::NodePublishVolumeRequest {
            target_path: path.clone(),
            ..driver.publish_request("pvc-1")
        };
        let error = driver.node().node_publish_volume(publish).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        let stage = pb::NodeStageVolumeRequest {
            staging_target_path: path,
            ..driver.stage_request("pvc-1")
        };
        let error = driver.node().node_stage_volume(stage).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
    }
    driver.unstage("pvc-1").await.unwrap();
}

#[tokio::test]
async fn another_target_with_another_mode_is_a_failed_precondition() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let other_mode = Some(mount(Mode::SingleNodeSingleWriter));
    for (path, code) in [("other", Code::FailedPrecondition), ("target-pvc-1", Code::AlreadyExists)]
    {
        let publish = pb::NodePublishVolumeRequest {
            target_path: driver.text(path),
            volume_capability: other_mode.clone(),
            ..driver.publish_request("pvc-1")
        };
        let error = driver.node().node_publish_volume(publish).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
    }
    driver.remove("pvc-1").await;
}

#[tokio::test]
async fn very_long_values_get_their_code_through() {
    let driver = Driver::start().await;
    for length in [4_000, 100_000, 1_000_000] {
        let get = pb::ControllerGetVolumeRequest { volume_id: "é".repeat(length) };
        let error = driver.controller().controller_get_volume(get).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{length}");
        let mut request = create_request("pvc-1", 1 << 20);
        request.parameters = [("pool".to_owned(), "É".repeat(length))].into();
        let error = driver.controller().create_volume(request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{length}");
    }
}

#[tokio::test]
async fn files_are_closed_again() {
    let driver = Driver::start().await;
    let supervisor = supervisors_of(&driver.path("run"))[0];
    let open = |pid: i32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let count = || (open(driver.pid()), open(supervisor));
    driver.create("pvc-1").await;
    driver.stage("pvc-1").await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    let before = count();
    for _ in 0..100 {
        driver.stage("pvc-1").await.unwrap();
        driver.unstage("pvc-1").await.unwrap();
    }
    until("all files are closed", async || {
        let now = count();
        now.0 <= before.0 && now.1 <= before.1
    })
    .await;
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_supervisor_belongs_to_nobody() {
    let driver = Driver::start().await;
    let supervisor = supervisors_of(&driver.path("run"))[0];
    let session = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().split(' ').nth(4).unwrap().to_owned()
    };
    assert_ne!(session(supervisor), session(driver.pid()));
}

/// Driver, supervisor and daemons are killed at any moment of any call; `QSD_CSI_SEED` repeats it.
#[tokio::test(flavor = "multi_thread")]
async fn random_kills_heal() {
    let seed = std::env::var("QSD_CSI_SEED").map_or(1, |seed| seed.parse().unwrap());
    eprintln!("QSD_CSI_SEED={seed}");
    let mut dice = Dice::new(seed);
    let mut driver = Driver::start().await;
    let volumes = ["pvc-1", "pvc-2", "pvc-3"];
    for round in 0..40 {
        let plan: Vec<_> = (0..30).map(|_| (dice.roll(3), dice.roll(6))).collect();
        let calls = plan.chunks(10).map(|plan| call_all(&driver, &volumes, plan));
        let wait = Duration::from_micros(dice.roll(60_000));
        _ = tokio::time::timeout(wait, futures_util::future::join_all(calls)).await;
        let victim = dice.roll(4);
        let mut pids = Vec::new();
        if victim.is_multiple_of(2) {
            pids.extend(supervisors_of(&driver.path("run")));
        }
        if victim == 3 {
            pids.extend(daemons_below(driver.scratch()));
        }
        for pid in pids {
            signal(pid, "KILL");
        }
        if victim > 0 {
            driver.restart().await;
        }
        if round % 4 == 3 {
            remove_all(&driver, &volumes).await;
        }
    }
}

async fn call_all(driver: &Driver, volumes: &[&str], plan: &[(u64, u64)]) {
    for (volume, step) in plan {
        let volume = volumes[usize::try_from(*volume).unwrap()];
        _ = match step {
            0 => driver.try_create(volume).await.map(drop),
            1 => driver.stage(volume).await,
            2 => driver.publish(volume).await,
            3 => driver.unpublish(volume).await,
            4 => driver.unstage(volume).await,
            _ => driver.delete(volume).await,
        };
    }
}

async fn remove_all(driver: &Driver, volumes: &[&str]) {
    for volume in volumes {
        let begin = Instant::now();
        loop {
            let order = [
                driver.unpublish(volume).await,
                driver.unstage(volume).await,
                driver.delete(volume).await,
            ];
            if order.iter().all(Result::is_ok) {
                break;
            }
            assert!(begin.elapsed() < LIMIT, "{volume}: {order:?}");
        }
    }
    until("a supervisor is there", async || driver.path("run/supervisor.sock").exists()).await;
    driver.assert_empty().await;
}

/// A storage daemon that cannot be started for a moment, just as one was to take the place of
/// another. Once nobody tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_could_not_be_replaced_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let (program, broken) = (dir.path().join("qsd"), dir.path().join("broken"));
    let (real, mark) = (part("bin/qemu-storage-daemon"), broken.display());
    let script =
        format!("#!/bin/sh\n[ -e '{mark}' ] && exit 1\nexec '{}' \"$@\"\n", real.display());
    {
        let mut file = fs::File::create(&program).unwrap();
        file.write_all(script.as_bytes()).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o755)).unwrap();
    }
    let driver = Driver::start_on(program, &[]).await;
    driver.published("pvc-1").await;
    fs::File::create(&broken).unwrap();
    driver.expand("pvc-1", 2 << 30).await.unwrap_err();
    fs::remove_file(&broken).unwrap();
    until("it is served", async || driver.daemons().await.len() == 1).await;
    driver.expand("pvc-1", 2 << 30).await.unwrap();
    assert_eq!(driver.inspect().await[0].capacity_bytes, 2 << 30);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}
