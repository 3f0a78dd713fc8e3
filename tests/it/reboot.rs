//! The machine ends in the middle of everything, and starts again with an empty run directory and half
//! of what was being done on its disks.

use crate::{
    copies::Wish,
    crash::{crash_at, relaunch},
    harness::{Driver, all_of, is_alive, loops_below, mounts_below, names, signal, unmount, until},
    local::Use,
    model::{
        guest::{Action, Guest},
        picture::read,
    },
};
use futures_util::StreamExt as _;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};
use tonic::Status;

/// `make bench` has 500.
const VOLUMES: u32 = 20;

/// How many are staged at once afterwards, as kubelet does.
const ABREAST: usize = 8;

const SIZE: u64 = 64 << 20;

fn name(number: u32) -> String {
    format!("pvc-{number}")
}

/// How a volume is used, where that is not by a socket.
fn way(number: u32) -> Option<Use> {
    match number % 5 {
        3 => Some(Use::Block),
        4 => Some(Use::Ext4),
        _ => None,
    }
}

async fn create(driver: &Driver, number: u32) -> Result<(), Status> {
    let size = SIZE.try_into().unwrap();
    if let Some(way) = way(number) {
        return driver
            .controller()
            .create_volume(way.create(&name(number), None, size))
            .await
            .map(drop);
    }
    let (name, source, parameters) = (name(number), None, Vec::new());
    driver.fulfil(&Wish { name, size: SIZE, source, parameters }).await
}

async fn attach(driver: &Driver, number: u32) {
    let name = name(number);
    match way(number) {
        Some(way) => drop(driver.opened(&name, way).await),
        None => driver.attach(&name).await,
    }
}

/// All files of a pool, and what they hold.
fn files_of(pool: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let dirs = names(&pool.join("records")).into_iter().map(|dir| pool.join("records").join(dir));
    let dirs = dirs.chain([pool.join("layers")]);
    let files = dirs.flat_map(|dir| names(&dir).into_iter().map(move |name| dir.join(name)));
    files.map(|file| (file.clone(), fs::read(file).unwrap())).collect()
}

/// What a call leaves that breaks off at a point: the files that were not there before.
async fn left_by(
    driver: &mut Driver,
    point: &str,
    call: impl AsyncFn(&Driver),
) -> BTreeMap<PathBuf, Vec<u8>> {
    let before: BTreeSet<_> = files_of(&driver.path("pool")).into_keys().collect();
    crash_at(driver, point).await;
    call(driver).await;
    assert!(!driver.ended().success(), "{point}");
    let mut left = files_of(&driver.path("pool"));
    left.retain(|file, _| !before.contains(file));
    assert!(!left.is_empty(), "{point} leaves nothing");
    relaunch(driver).await;
    left
}

/// Ends the machine: every process, mount and device, and what lies on tmpfs.
async fn end_machine(driver: &mut Driver) {
    driver.kill();
    for pid in all_of(driver) {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    for device in loops_below(driver.scratch()) {
        // One that is mounted goes with the mount.
        _ = Command::new("losetup").arg("--detach").arg(format!("/dev/{device}")).status();
    }
    for mount in mounts_below(driver.scratch()).iter().rev() {
        unmount(mount);
    }
    fs::remove_dir_all(driver.path("run")).unwrap();
}

/// What the log says of the last start.
fn told(driver: &Driver) -> String {
    let log = fs::read_to_string(driver.path("log")).unwrap();
    let line = log.lines().rev().find(|line| line.contains("records at rest"));
    line.expect("it says how long it took").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_every_volume_can_be_staged_again() {
    let mut driver = Driver::start().await;
    for number in 0..VOLUMES {
        create(&driver, number).await.unwrap();
        attach(&driver, number).await;
        if way(number).is_none() {
            let write = Action::Write { sectors: 0..8, stamp: number + 1 };
            Guest::connect(&driver.socket(&name(number))).act(vec![write, Action::Flush]).await;
        }
        if number % 4 == 0 {
            driver.snapshot(&format!("snap-{number}"), &name(number)).await.unwrap();
        }
    }
    driver.create("gone").await;
    let mut strewn = BTreeMap::new();
    strewn.extend(
        left_by(&mut driver, "volume-create-layer-record", async |driver| {
            driver.try_create("half").await.unwrap_err();
        })
        .await,
    );
    strewn.extend(
        left_by(&mut driver, "freeze-overlay-record", async |driver| {
            driver.snapshot("half", &name(1)).await.unwrap_err();
        })
        .await,
    );
    strewn.extend(
        left_by(&mut driver, "volume-delete-intent", async |driver| {
            driver.delete("gone").await.unwrap_err();
        })
        .await,
    );
    let records = files_of(&driver.path("pool"));
    end_machine(&mut driver).await;
    // Some of the records half, as the temporary files that they are before they get their names.
    for (number, (file, bytes)) in records.iter().enumerate() {
        let half = bytes.len().min(4096) / 2;
        strewn.insert(file.with_file_name(format!(".tmp{number:06}")), bytes[..half].to_vec());
    }
    for (file, bytes) in &strewn {
        if !file.exists() {
            fs::File::create(file).unwrap().set_len(bytes.len().try_into().unwrap()).unwrap();
            let file = fs::File::options().write(true).open(file).unwrap();
            file.write_all_at(&bytes[..bytes.len().min(1 << 20)], 0).unwrap();
        }
    }
    let begin = Instant::now();
    relaunch(&mut driver).await;
    let served = begin.elapsed();
    let count = |dir: &str| names(&driver.path(dir)).len();
    for dir in ["deleting", "deleting-snapshots", "deleting-layers"] {
        assert_eq!(count(&format!("pool/records/{dir}")), 0, "{dir}");
    }
    assert_eq!(count("pool/records/volumes"), usize::try_from(VOLUMES).unwrap());
    assert_eq!(count("pool/layers"), count("pool/records/layers"));
    let said = told(&driver);
    assert!(said.contains(&format!("\"volumes\":{VOLUMES}")), "{said}");
    let begin = Instant::now();
    let attach = |number| attach(&driver, number);
    futures_util::stream::iter(0..VOLUMES).for_each_concurrent(ABREAST, attach).await;
    eprintln!(
        "{VOLUMES} volumes: served after {served:?}, all published {:?} later; {said}",
        begin.elapsed()
    );
    for number in (0..VOLUMES).filter(|number| way(*number).is_none()) {
        let guest = Guest::connect(&driver.socket(&name(number)));
        assert_eq!(read(&guest.read(0..8).await, 0).unwrap(), [number + 1; 8], "{number}");
    }
    for number in 0..VOLUMES {
        driver.remove(&name(number)).await;
    }
    for number in (0..VOLUMES).step_by(4) {
        driver.delete_snapshot(&format!("snap-{number}")).await.unwrap();
    }
    driver.assert_empty().await;
}
