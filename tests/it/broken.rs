//! Broken data: the damage stays with its volume, is told, and nothing is mended by guessing. What is
//! served is right, or an error.

use crate::{
    copies::Source,
    disk::SmallDisk,
    doctor::{Tree, put},
    harness::{Dice, Driver, create_request, daemons_below, names, signal, until},
    local::Use,
};
use qsd_csi::csi::pb::csi::{self as pb, VolumeCondition};
use std::{
    fs, io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tokio::time::sleep;
use tonic::{Code, Status};

const SIZE: usize = 4 << 20;

/// How many volumes are broken in a round, each in a way of its own.
const BROKEN: u64 = 5;

/// How much of an image is its header.
const HEADER: u64 = 200;

/// A volume, what it holds, and the files that it is made of.
struct Stored {
    name: String,
    content: Vec<u8>,
}

impl Stored {
    /// One with data in the layer that it writes to, and in one below. Its snapshot lives on.
    async fn new(driver: &Driver, name: &str, seed: u64) -> Self {
        let (base, snap) = (format!("{name}-base"), format!("{name}-snap"));
        let mut dice = Dice::new(seed);
        let mut content: Vec<_> =
            (0..SIZE).map(|_| u8::try_from(dice.roll(256)).unwrap()).collect();
        let size = i64::try_from(SIZE).unwrap();
        let create =
            |request| async move { driver.controller().create_volume(request).await.unwrap() };
        create(Use::Block.create(&base, None, size)).await;
        put_device(&driver.opened(&base, Use::Block).await, 0, &content);
        driver.snapshot(&snap, &base).await.unwrap();
        driver.close_one(&base).await;
        create(Use::Block.create(name, Some(&Source::Snapshot(snap)), size)).await;
        driver.delete(&base).await.unwrap();
        content[1 << 20..2 << 20].fill(u8::try_from(seed % 200 + 1).unwrap());
        put_device(&driver.opened(name, Use::Block).await, 1 << 20, &content[1 << 20..2 << 20]);
        driver.close_one(name).await;
        Self { name: name.to_owned(), content }
    }

    /// Breaks something of it; where, what was there, and what is there now.
    fn spoil(&self, driver: &Driver, dice: &mut Dice) -> Spoilt {
        let active = driver.active(&self.name);
        let layer = active.file_stem().unwrap().to_str().unwrap();
        let record = |place: &str| driver.path(&format!("pool/records/{place}.json"));
        let (path, most) = match dice.roll(4) {
            0 => (record(&format!("volumes/{}", self.name)), u64::MAX),
            1 => (record(&format!("layers/{layer}")), u64::MAX),
            2 => (record(&format!("snapshots/{}-snap", self.name)), u64::MAX),
            _ => (active.clone(), HEADER),
        };
        let right = fs::read(&path).unwrap();
        let mut wrong = right.clone();
        let length = u64::try_from(right.len()).unwrap().min(most);
        let at = usize::try_from(dice.roll(length)).unwrap();
        let how = match dice.roll(4) {
            0 => {
                wrong.truncate(at);
                "cut"
            }
            1 => {
                let end = (at + 16).min(wrong.len());
                wrong[at..end].fill(0);
                "zeroed"
            }
            _ => {
                wrong[at] ^= 1 << dice.roll(8);
                "flipped"
            }
        };
        put(&path, &wrong);
        let what = format!("{how} at {at} of {}", path.display());
        Spoilt { path, right, wrong, what }
    }
}

struct Spoilt {
    path: PathBuf,
    right: Vec<u8>,
    wrong: Vec<u8>,
    what: String,
}

fn put_device(device: &Path, at: u64, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(device).unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.sync_all().unwrap();
}

fn content_of(device: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; SIZE];
    fs::File::open(device)?.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

impl Driver {
    async fn close_one(&self, name: &str) {
        self.unpublish(name).await.unwrap();
        self.unstage(name).await.unwrap();
    }

    async fn told(&self, volume: &str) -> VolumeCondition {
        let request = pb::ControllerGetVolumeRequest { volume_id: volume.into() };
        let got = self.controller().controller_get_volume(request).await.unwrap().into_inner();
        got.status.unwrap().volume_condition.unwrap()
    }

    /// Whether a volume is served, with what it is to hold or an error; an error says where.
    async fn serves_right(&self, stored: &Stored, what: &str) -> Result<(), Status> {
        let name = &stored.name;
        self.stage_as(name, Use::Block).await?;
        self.publish_as(name, Use::Block).await?;
        if let Ok(read) = content_of(&self.path(&format!("target-{name}"))) {
            assert!(read == stored.content, "{name}: wrong bytes were served: {what}");
        }
        self.close_one(name).await;
        Ok(())
    }
}

/// `QSD_CSI_ROUNDS` makes it longer, `QSD_CSI_SEED` repeats it.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_broken_no_wrong_byte_is_served_and_others_go_on() {
    let given = |name: &str, few| std::env::var(name).map_or(few, |text| text.parse().unwrap());
    let (seed, rounds) = (given("QSD_CSI_SEED", 1), given("QSD_CSI_ROUNDS", 2));
    eprintln!("QSD_CSI_SEED={seed} QSD_CSI_ROUNDS={rounds}");
    let mut dice = Dice::new(seed);
    let mut driver = Driver::start().await;
    let mut all = Vec::new();
    for number in 0..=BROKEN {
        all.push(Stored::new(&driver, &format!("v{number}"), seed + number).await);
    }
    let (mut refused, mut served) = (0, 0);
    for _ in 0..rounds {
        driver.terminate().await;
        let (whole, broken) = all.split_last().unwrap();
        let spoilt: Vec<_> = broken.iter().map(|one| one.spoil(&driver, &mut dice)).collect();
        driver.launch(&[], None);
        driver.answers().await;
        driver.serves_right(whole, "nothing of it is broken").await.unwrap();
        assert!(!driver.told(&whole.name).await.abnormal);
        for (stored, spoilt) in broken.iter().zip(&spoilt) {
            let (name, what) = (&stored.name, &spoilt.what);
            match driver.serves_right(stored, what).await {
                Ok(()) => served += 1,
                Err(error) => {
                    refused += 1;
                    assert_eq!(error.code(), Code::Internal, "{what}: {error}");
                    assert!(error.message().contains(name.as_str()), "{what}: {error}");
                    let told = driver.told(name).await;
                    // Behind its fields, a header has what only QEMU judges.
                    let is_qemus = error.message().contains("qemu-storage-daemon");
                    let is_named =
                        told.message.contains("layer") || told.message.contains("record");
                    let is_told = told.abnormal && is_named;
                    assert!(is_told || is_qemus, "{what}: {told:?}: {error}");
                }
            }
            // What its snapshot stands on is right, too, or it is not used.
            let copy = format!("{name}-copy");
            let source = Source::Snapshot(format!("{name}-snap"));
            if driver.create_from(&copy, source).await.is_ok() {
                driver.delete(&copy).await.unwrap();
            }
            assert!(fs::read(&spoilt.path).unwrap() == spoilt.wrong, "{what}: it was changed");
        }
        driver.terminate().await;
        for Spoilt { path, right, .. } in &spoilt {
            put(path, right);
        }
        driver.launch(&[], None);
        driver.answers().await;
        for stored in &all {
            let healed = driver.serves_right(stored, "the right bytes are back").await;
            healed.unwrap_or_else(|error| panic!("{}: {error}", stored.name));
            assert!(!driver.told(&stored.name).await.abnormal);
        }
    }
    eprintln!("{refused} broken volumes refused, {served} served, all with the right bytes");
    assert!(refused > 0);
}

/// What broke while the driver runs is seen before a daemon opens it.
#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_breaks_under_the_driver_is_not_served_and_heals() {
    let driver = Driver::start().await;
    let stored = Stored::new(&driver, "v", 1).await;
    let active = driver.active("v");
    let file = fs::File::options().read(true).write(true).open(&active).unwrap();
    let mut right = [0; 8];
    file.read_exact_at(&mut right, 40).unwrap();
    // Where its L1 table is; QEMU would take what it finds there for one.
    file.write_all_at(&(0x00c0_0000_u64).to_be_bytes(), 40).unwrap();
    let error = driver.serves_right(&stored, "l1_table_offset").await.unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("l1_table_offset"), "{error}");
    file.write_all_at(&right, 40).unwrap();
    driver.serves_right(&stored, "it is right again").await.unwrap();
    // Under a daemon that serves, it matters when that dies.
    driver.opened("v", Use::Block).await;
    file.write_all_at(&(0x00c0_0000_u64).to_be_bytes(), 40).unwrap();
    signal(driver.daemons().await[0], "KILL");
    until("it is told", async || driver.told("v").await.message.contains("l1_table_offset")).await;
    file.write_all_at(&right, 40).unwrap();
    until("it is served again", async || driver.daemons().await.len() == 1).await;
    driver.close_one("v").await;
    driver.serves_right(&stored, "it is right again").await.unwrap();
}

fn in_pool(name: &str, pool: &str) -> pb::CreateVolumeRequest {
    let mut request = create_request(name, 4 << 20);
    request.parameters = [("pool".to_owned(), pool.to_owned())].into();
    request
}

/// Every call on a pool that cannot be used says so by its name, and those on another one go on.
async fn assert_unavailable(driver: &Driver, words: &str) {
    let snapshot = driver.snapshot("s", "far").await;
    let capacity = pb::GetCapacityRequest {
        parameters: in_pool("x", "second").parameters,
        ..Default::default()
    };
    let answers = [
        ("create", driver.controller().create_volume(in_pool("new", "second")).await.map(drop)),
        ("stage", driver.stage("far").await),
        ("snapshot", snapshot),
        ("expand", driver.expand("far", 8 << 20).await),
        ("modify", driver.modify("far", &[("iops", "500")]).await),
        ("delete", driver.delete("far").await),
        ("capacity", driver.controller().get_capacity(capacity).await.map(drop)),
    ];
    for (call, answer) in answers {
        if call == "capacity" && words == "read-only" {
            continue; // what is free can be told
        }
        let error = answer.expect_err(call);
        assert_eq!(error.code(), Code::Unavailable, "{call}: {error}");
        let is_named = error.message().contains("pool second") || error.message().contains(words);
        assert!(is_named, "{call}: {error}");
    }
    let told = driver.told("far").await;
    assert!(told.abnormal && told.message.contains("pool second"), "{told:?}");
    assert!(!driver.told("near").await.abnormal);
    driver.controller().create_volume(create_request("anywhere", 4 << 20)).await.unwrap();
    driver.delete("anywhere").await.unwrap();
    driver.attach("near").await;
    driver.detach("near").await;
}

async fn assert_back(driver: &Driver) {
    assert!(!driver.told("far").await.abnormal, "{:?}", driver.told("far").await);
    driver.attach("far").await;
    driver.snapshot("s", "far").await.unwrap();
    driver.detach("far").await;
    driver.delete_snapshot("s").await.unwrap();
}

async fn with_second_pool(dir: &Path) -> Driver {
    let driver = Driver::start_with(&["--pool", &format!("second={}", dir.display())]).await;
    driver.controller().create_volume(in_pool("near", "main")).await.unwrap();
    driver.controller().create_volume(in_pool("far", "second")).await.unwrap();
    driver
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_vanishes_under_the_driver_comes_back() {
    let disk = SmallDisk::new();
    let [pool, away] = ["pool", "away"].map(|name| disk.path().join(name));
    let mut driver = with_second_pool(&pool).await;
    assert_back(&driver).await;
    let run = |program: &str, arguments: &[&Path]| {
        assert!(Command::new(program).args(arguments).status().unwrap().success(), "{program}");
    };
    run("mv", &[&pool, &away]);
    assert_unavailable(&driver, "is gone").await;
    // Another directory in its place is not the pool.
    fs::create_dir_all(pool.join("layers")).unwrap();
    fs::create_dir_all(pool.join("records/volumes")).unwrap();
    assert_unavailable(&driver, "is gone").await;
    fs::remove_dir_all(&pool).unwrap();
    run("mv", &[&away, &pool]);
    assert_back(&driver).await;
    // Under a VM, or whoever else has it, it is unmounted as soon as they let go.
    let image = disk.path().parent().unwrap().join("image");
    run("umount", &[Path::new("--lazy"), &disk.path()]);
    assert_unavailable(&driver, "is gone").await;
    run("mount", &[Path::new("-o"), Path::new("loop"), &image, &disk.path()]);
    if driver.told("far").await.abnormal {
        // By way of another device it is another file system to the kernel.
        driver.terminate().await;
        driver.launch(&["--pool", &format!("second={}", pool.display())], None);
        driver.answers().await;
    }
    assert_back(&driver).await;
    driver.delete("far").await.unwrap();
    driver.delete("near").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_becomes_read_only_is_told_of_and_heals() {
    let disk = SmallDisk::new();
    let driver = with_second_pool(&disk.path().join("pool")).await;
    let remount = |how: &str| {
        let options = format!("remount,{how}");
        let done = Command::new("mount").args(["-o", &options]).arg(disk.path()).status();
        assert!(done.unwrap().success());
    };
    remount("ro");
    assert_unavailable(&driver, "read-only").await;
    assert!(driver.told("far").await.message.contains("is read-only"));
    remount("rw");
    assert_back(&driver).await;
    driver.delete("far").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_cannot_say_what_it_is_waits_while_others_are_served() {
    let disk = SmallDisk::new();
    let pool = disk.path().join("pool");
    let mut driver = with_second_pool(&pool).await;
    driver.controller().create_volume(in_pool("held", "second")).await.unwrap();
    driver.snapshot("old", "far").await.unwrap();
    driver.attach("held").await;
    let held = driver.daemons().await;
    driver.terminate().await;
    let identity = pool.join("pool.json");
    let whole = fs::read(&identity).unwrap();
    put(&identity, &whole[..20]);
    let before = Tree::of(&pool);
    driver.launch(&["--pool", &format!("second={}", pool.display())], None);
    until("it serves", async || {
        let request = pb::GetPluginInfoRequest {};
        driver.identity().get_plugin_info(request).await.is_ok()
    })
    .await;
    let probed = driver.identity().probe(pb::ProbeRequest {}).await.unwrap_err();
    assert!(probed.message().contains("pool second is not used"), "{probed}");
    assert_unavailable(&driver, "pool.json").await;
    let told = driver.told("far").await;
    assert!(told.message.contains("pool.json is damaged"), "{told:?}");
    let again = driver.controller().create_volume(in_pool("far", "main")).await.unwrap_err();
    assert_eq!(again.code(), Code::Unavailable, "{again}");
    let deleted = driver.delete_snapshot("old").await.unwrap_err();
    assert_eq!(deleted.code(), Code::Unavailable, "{deleted}");
    assert!(Tree::of(&pool) == before, "nothing is done with it");
    assert_eq!(daemons_below(driver.scratch()), held, "whoever has a volume goes on");
    put(&identity, &whole);
    until("it is back", async || !driver.told("far").await.abnormal).await;
    assert_back(&driver).await;
    until("it is taken over", async || driver.daemons().await == held).await;
    driver.detach("held").await;
    driver.delete_snapshot("old").await.unwrap();
    for volume in ["held", "far", "near"] {
        driver.delete(volume).await.unwrap();
    }
}

/// Without another start, and not before the right bytes are there.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_damaged_at_the_start_is_served_once_it_is_put_right() {
    let mut driver = Driver::start().await;
    let stored = Stored::new(&driver, "v", 1).await;
    let record = |place: &str| driver.path(&format!("pool/records/{place}.json"));
    let [volume, snapshot] = ["volumes/v", "snapshots/v-snap"].map(record);
    let active = driver.active("v");
    let layer = record(&format!("layers/{}", active.file_stem().unwrap().to_str().unwrap()));
    let older = fs::read(&volume).unwrap();
    driver.snapshot("later", "v").await.unwrap();
    driver.delete_snapshot("v-snap").await.unwrap();
    driver.snapshot("v-snap", "v").await.unwrap();
    driver.terminate().await;
    let (whole, right) = (Tree::of(&driver.path("pool")), fs::read(&volume).unwrap());
    for path in [&volume, &snapshot, &layer, &active] {
        put(path, &fs::read(path).unwrap()[..30]);
    }
    driver.launch(&[], None);
    driver.answers().await;
    assert!(driver.told("v").await.abnormal);
    let error = driver.serves_right(&stored, "it is damaged").await.unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{error}");
    let copy = || driver.create_from("copy", Source::Snapshot("v-snap".into()));
    copy().await.unwrap_err();
    // An older record names a layer that is to stay as it is by now.
    whole.restore(&driver.path("pool"));
    put(&volume, &older);
    until("all else is right", async || copy().await.is_ok()).await;
    assert!(driver.told("v").await.abnormal);
    driver.serves_right(&stored, "its record is an older one").await.unwrap_err();
    put(&volume, &right);
    until("it is right", async || !driver.told("v").await.abnormal).await;
    driver.serves_right(&stored, "it is right again").await.unwrap();
    let copied = Stored { name: "copy".into(), content: stored.content };
    driver.serves_right(&copied, "a copy of it").await.unwrap();
    for volume in ["v", "copy"] {
        driver.delete(volume).await.unwrap();
    }
    for snapshot in ["v-snap", "later"] {
        driver.delete_snapshot(snapshot).await.unwrap();
    }
    until("all layers are gone", async || names(&driver.path("pool/layers")).is_empty()).await;
    driver.assert_empty().await;
}

/// Nobody knows which of the two is right, so what either of them may need stays as it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_two_pools_have_keeps_its_layers_in_both() {
    let second = tempfile::tempdir().unwrap();
    let mut driver = with_second_pool(second.path()).await;
    driver.snapshot("snap", "near").await.unwrap();
    driver.create_from("child", Source::Snapshot("snap".into())).await.unwrap();
    driver.delete("near").await.unwrap();
    driver.terminate().await;
    let pools = [driver.path("pool"), second.path().to_owned()];
    let [own, others] = pools.clone().map(|pool| pool.join("records/snapshots/snap.json"));
    fs::copy(&own, &others).unwrap();
    let layers = || pools.iter().map(|pool| names(&pool.join("layers"))).collect::<Vec<_>>();
    let before = layers();
    relaunch(&mut driver, second.path()).await;
    sleep(Duration::from_secs(8)).await; // it is looked at again every 5 s
    assert_eq!(layers(), before);
    assert!(driver.create_from("copy", Source::Snapshot("snap".into())).await.is_err());
    // Of one pool less, it is the other's.
    fs::remove_file(&others).unwrap();
    until("it is clear whose it is", async || {
        driver.create_from("copy", Source::Snapshot("snap".into())).await.is_ok()
    })
    .await;
}

async fn relaunch(driver: &mut Driver, second: &Path) {
    driver.launch(&["--pool", &format!("second={}", second.display())], None);
    driver.answers().await;
}

/// Nothing depends on the time of day: order, ids, deadlines and what is tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_changes_nothing_but_what_it_says() {
    let mut driver = Driver::start().await;
    let set = |driver: &Driver, seconds: i64| {
        put(&driver.path("clock"), seconds.to_string().as_bytes());
    };
    set(&driver, 1_800_000_000);
    driver.kill();
    driver.set_clock("clock");
    driver.launch(&[], None);
    driver.answers().await;
    let size = i64::try_from(SIZE).unwrap();
    driver.controller().create_volume(Use::Block.create("v", None, size)).await.unwrap();
    let device = driver.opened("v", Use::Block).await;
    // Forwards by years, back by many, to where the clock of a machine without a battery begins,
    // and beyond.
    let times = [1_800_000_000, 4_000_000_000, 900_000_000, 0, -1_000_000];
    for (number, time) in (0_u8..).zip(times) {
        set(&driver, time);
        put_device(&device, 0, &vec![number + 1; SIZE]);
        driver.snapshot(&format!("s{number}"), "v").await.unwrap();
        let found = driver.snapshots(&format!("s{number}"), "").await.unwrap().remove(0);
        assert_eq!(found.created.unwrap().seconds, time.max(0));
        let daemons = driver.daemons().await;
        signal(daemons[0], "KILL");
        until("another daemon", async || {
            let now = driver.daemons().await;
            now.len() == 1 && now != daemons
        })
        .await;
        driver.close_one("v").await;
        driver.opened("v", Use::Block).await;
    }
    driver.close_one("v").await;
    driver.restart().await;
    for number in 0_u8..5 {
        let copy = format!("c{number}");
        let source = Source::Snapshot(format!("s{number}"));
        let create = Use::Block.create(&copy, Some(&source), size);
        driver.controller().create_volume(create).await.unwrap();
        let read = content_of(&driver.opened(&copy, Use::Block).await).unwrap();
        assert!(read == vec![number + 1; SIZE], "snapshot {number} holds what it held");
        driver.close_one(&copy).await;
    }
    // What changed between two is what came between them, whatever the clock says of them.
    let delta = |base: &str, target: &str| {
        let (mut metadata, base, target) = (driver.metadata(), base.to_owned(), target.to_owned());
        async move {
            let request = pb::GetMetadataDeltaRequest {
                base_snapshot_id: base,
                target_snapshot_id: target,
                ..Default::default()
            };
            metadata.get_metadata_delta(request).await?.into_inner().message().await
        }
    };
    assert!(delta("s1", "s4").await.unwrap().is_some());
    assert_eq!(delta("s4", "s1").await.unwrap_err().code(), Code::InvalidArgument);
}

/// An older record names a layer that is frozen by now, also where no snapshot does: a clone stands on it.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_record_writes_to_nothing_that_a_clone_stands_on() {
    let mut driver = Driver::start().await;
    let size = i64::try_from(SIZE).unwrap();
    let request = Use::Block.create("v", None, size);
    driver.controller().create_volume(request).await.unwrap();
    put_device(&driver.opened("v", Use::Block).await, 0, &vec![1; SIZE]);
    driver.close_one("v").await;
    let volume = driver.path("pool/records/volumes/v.json");
    let older = fs::read(&volume).unwrap();
    driver.create_from("k", Source::Volume("v".into())).await.unwrap();
    driver.terminate().await;
    put(&volume, &older);
    driver.launch(&[], None);
    driver.answers().await;
    let told = driver.told("v").await;
    assert!(told.abnormal && told.message.contains("stands on it"), "{told:?}");
    assert_eq!(driver.stage("v").await.unwrap_err().code(), Code::Internal);
    assert!(!driver.told("k").await.abnormal);
    let seen = content_of(&driver.opened("k", Use::Block).await).unwrap();
    assert!(seen == vec![1; SIZE], "the clone shows {} of another volume", seen[0]);
}

/// A volume that is right again a moment before its snapshots takes nothing from them.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_snapshot_needs_that_is_not_right_yet_stays_while_its_volume_is_served() {
    let mut driver = Driver::start().await;
    let size = i64::try_from(SIZE).unwrap();
    driver.controller().create_volume(Use::Block.create("v", None, size)).await.unwrap();
    put_device(&driver.opened("v", Use::Block).await, 0, &vec![1; SIZE]);
    driver.close_one("v").await;
    let (layer, spare) = (driver.active("v"), driver.path("spare"));
    let all: Vec<_> = (0..12).map(|number| format!("s{number:02}")).collect();
    for name in &all {
        driver.snapshot(name, "v").await.unwrap();
    }
    driver.terminate().await;
    fs::File::create(&spare).unwrap();
    let exchange = {
        let layer = layer.clone();
        move || {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            renameat_with(CWD, &layer, CWD, &spare, RenameFlags::EXCHANGE).unwrap();
        }
    };
    exchange();
    driver.launch(&[], None);
    driver.answers().await;
    assert!(driver.told("v").await.abnormal);
    // It is put back while it is looked at.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (stopped, file) = (stop.clone(), layer.clone());
    let putter = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::SeqCst) {
            exchange();
            std::thread::sleep(Duration::from_micros(30));
        }
        if fs::metadata(&file).unwrap().len() == 0 {
            exchange();
        }
    });
    until("the volume is right", async || !driver.told("v").await.abnormal).await;
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    putter.join().unwrap();
    sleep(Duration::from_secs(12)).await;
    let mut lost = Vec::new();
    for name in &all {
        let copy =
            driver.create_from(&format!("copy-{name}"), Source::Snapshot(name.clone())).await;
        lost.extend(copy.err().map(|error| format!("{name}: {}", error.message())));
    }
    assert!(lost.is_empty(), "lost {lost:#?}");
}
