//! `qsd-csi doctor` finds what is wrong, names it, and harms nothing.

use crate::{
    copies::Source,
    disk::SmallDisk,
    harness::{
        Driver, create_request, is_alive, loops_below, mount, mounts_below, names, qsd_csi,
        relays_of, signal, supervisors_of, until,
    },
    model::guest::Guest,
};
use qsd_csi::csi::pb::csi::{self as pb, volume_capability::access_mode::Mode};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

/// So small that all bytes of a pool can be compared.
const SIZE: i64 = 4 << 20;

/// Every byte below a directory, and who may read it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Tree(BTreeMap<PathBuf, (u32, Vec<u8>)>);

impl Tree {
    pub(crate) fn of(dir: &Path) -> Self {
        let mut tree = BTreeMap::new();
        let mut dirs = vec![dir.to_owned()];
        while let Some(dir) = dirs.pop() {
            for name in names(&dir) {
                let path = dir.join(name);
                let data = path.symlink_metadata().unwrap();
                if data.is_dir() {
                    dirs.push(path);
                } else if data.is_file() {
                    let bytes = fs::read(&path).unwrap();
                    tree.insert(path, (data.permissions().mode(), bytes));
                }
            }
        }
        Self(tree)
    }

    /// Has everything below the directory as it was, and writes only what is not.
    pub(crate) fn restore(&self, dir: &Path) {
        let now = Self::of(dir);
        for path in now.0.keys().filter(|path| !self.0.contains_key(*path)) {
            fs::remove_file(path).unwrap();
        }
        for (path, (mode, bytes)) in &self.0 {
            if now.0.get(path) == Some(&(*mode, bytes.clone())) {
                continue;
            }
            put(path, bytes);
            fs::set_permissions(path, fs::Permissions::from_mode(*mode)).unwrap();
        }
    }

    /// Those that are not the same in another one.
    fn differ(&self, other: &Self) -> Vec<PathBuf> {
        let all = self.0.keys().chain(other.0.keys());
        let mut differ: Vec<_> =
            all.filter(|path| self.0.get(*path) != other.0.get(*path)).cloned().collect();
        differ.dedup();
        differ
    }
}

/// Writes a file as somebody else would: not by way of the driver.
pub(crate) fn put(path: &Path, bytes: &[u8]) {
    let mut file = fs::File::create(path).unwrap();
    file.write_all(bytes).unwrap();
}

/// What the doctor said.
struct Said {
    code: i32,
    answer: Value,
}

impl Said {
    fn findings(&self) -> &[Value] {
        self.answer["findings"].as_array().unwrap()
    }

    fn is_well(&self) -> bool {
        self.code == 0 && self.findings().is_empty()
    }

    /// Whether it says this kind of thing of this.
    fn names(&self, code: &str, words: &str) -> bool {
        let is_it =
            |finding: &&Value| finding["code"] == code && finding.to_string().contains(words);
        let found = self.findings().iter().find(is_it);
        if let Some(finding) = found {
            for part in ["about", "what", "means", "next"] {
                assert!(finding[part].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
            }
        }
        found.is_some()
    }
}

impl Driver {
    fn doctor(&self, more: &[&str]) -> Said {
        self.doctor_at(&self.path("pool"), more)
    }

    fn doctor_at(&self, pool: &Path, more: &[&str]) -> Said {
        let output = qsd_csi()
            .args(["doctor", "--output", "json", "--endpoint", &self.endpoint()])
            .arg("--run-dir")
            .arg(self.path("run"))
            .args(["--pool", &format!("main={}", pool.display())])
            .args(more)
            .output()
            .unwrap();
        let code = output.status.code().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let answer = match code {
            0 | 1 => serde_json::from_slice(&output.stdout).unwrap(),
            _ => Value::String(error.into_owned()),
        };
        Said { code, answer }
    }

    /// The active layer of a volume, as a file.
    pub(crate) fn active(&self, volume: &str) -> PathBuf {
        let record = self.path(&format!("pool/records/volumes/{volume}.json"));
        let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
        let id = record["phase"]["ready"]["active"].as_str().unwrap();
        let all = ["raw", "qcow2"].map(|format| self.path(&format!("pool/layers/{id}.{format}")));
        all.into_iter().find(|path| path.exists()).unwrap()
    }

    /// A pool with a blank volume, and one that was made from a snapshot of another, which is gone.
    async fn stocked() -> Self {
        let driver = Self::start().await;
        for name in ["plain", "other", "gone"] {
            let request = create_request(name, SIZE);
            driver.controller().create_volume(request).await.unwrap();
        }
        let active = fs::File::options().write(true).open(driver.active("gone")).unwrap();
        active.write_all_at(&[7; 4096], 0).unwrap();
        driver.snapshot("snap", "gone").await.unwrap();
        driver.create_from("copy", Source::Snapshot("snap".into())).await.unwrap();
        driver.delete("gone").await.unwrap();
        driver
    }
}

/// Changes a record as somebody would who knows what it means.
fn edit(record: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    value.as_object_mut().unwrap().remove("checksum");
    change(&mut value);
    put(record, value.to_string().as_bytes());
}

fn cut(path: &Path, length: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap();
}

fn flip(path: &Path, at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

fn id_of(layer: &Path) -> String {
    layer.file_stem().unwrap().to_str().unwrap().to_owned()
}

fn record_of_layer(driver: &Driver, layer: &Path) -> PathBuf {
    driver.path(&format!("pool/records/layers/{}.json", id_of(layer)))
}

const STRAY: &str = "0b5ff2f4-6d4e-4c39-a2b6-3a83b9e2d001";

/// A fault: what it is, how it is planted, and what the doctor is to call it and to name.
type Fault = (&'static str, fn(&Driver), &'static str, &'static str);

/// Those of a pool that is not in use. What is garbage ends with `!`.
const FAULTS: [Fault; 21] = [
    ("truncated record", |all| cut(&volume(all, "plain"), 40), "volume-damaged", "volume plain"),
    ("flipped record", |all| flip(&volume(all, "plain"), 30), "volume-damaged", "plain.json"),
    (
        "record of a newer version",
        |all| edit(&volume(all, "plain"), |record| record["version"] = 2.into()),
        "volume-damaged",
        "format version 2",
    ),
    (
        "missing layer",
        |all| fs::remove_file(all.active("plain")).unwrap(),
        "volume-damaged",
        "No such file",
    ),
    ("truncated header", |all| cut(&all.active("copy"), 50), "volume-damaged", "volume copy"),
    ("flipped header", |all| flip(&all.active("copy"), 45), "volume-damaged", "l1_table_offset"),
    (
        "planted backing file",
        |all| {
            let file = fs::File::options().write(true).open(all.active("copy")).unwrap();
            file.write_all_at(&[0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 11], 8).unwrap();
            file.write_all_at(b"/etc/shadow", 512).unwrap();
        },
        "header-foreign",
        "/etc/shadow",
    ),
    ("short layer", |all| cut(&all.active("plain"), 4096), "volume-damaged", "4096 bytes"),
    (
        "unnamed layer with data",
        |all| put(&all.path(&format!("pool/layers/{STRAY}.raw")), b"all that is left"),
        "layer-unnamed",
        STRAY,
    ),
    (
        "unnamed layer without data",
        |all| {
            let path = all.path(&format!("pool/layers/{STRAY}.raw"));
            fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
        },
        "layer-empty!",
        STRAY,
    ),
    (
        "temporary file",
        |all| put(&all.path("pool/records/volumes/.tmpAbCdEf"), b"{"),
        "file-temporary!",
        ".tmpAbCdEf",
    ),
    (
        "cycle of layers",
        |all| {
            let active = all.active("copy");
            edit(&record_of_layer(all, &active), |record| record["parent"] = id_of(&active).into());
        },
        "volume-damaged",
        "stands on itself",
    ),
    (
        "two volumes on a layer",
        |all| {
            let active = id_of(&all.active("plain"));
            edit(&volume(all, "other"), |record| {
                record["phase"]["ready"]["active"] = active.into();
            });
        },
        "volume-damaged",
        "volume other writes to it, too",
    ),
    (
        "snapshot without its layer",
        |all| {
            let record = all.path("pool/records/snapshots/snap.json");
            edit(&record, |record| record["layer"] = STRAY.into());
        },
        "snapshot-damaged",
        "snapshot snap",
    ),
    (
        "truncated record of a layer",
        |all| cut(&record_of_layer(all, &all.active("plain")), 10),
        "record-unreadable",
        "records/layers",
    ),
    (
        "lost record of a volume",
        |all| fs::remove_file(volume(all, "plain")).unwrap(),
        "layer-unneeded",
        "no volume or snapshot stands on it",
    ),
    (
        "record with the name of another",
        |all| edit(&volume(all, "plain"), |record| record["name"] = "other".into()),
        "volume-damaged",
        "the name of another",
    ),
    (
        "layer for everybody",
        |all| {
            let mode = fs::Permissions::from_mode(0o644);
            fs::set_permissions(all.active("plain"), mode).unwrap();
        },
        "rights-wide",
        "mode 0644",
    ),
    ("lock of nobody", |all| put(&all.path("pool/locks/nobody"), b""), "lock-unnamed!", "nobody"),
    ("damaged pool", |all| cut(&all.path("pool/pool.json"), 3), "pool-unreadable", "pool.json"),
    (
        "pool that was lost",
        |all| fs::remove_file(all.path("pool/pool.json")).unwrap(),
        "pool-gone",
        "no pool in this directory",
    ),
];

fn volume(driver: &Driver, name: &str) -> PathBuf {
    driver.path(&format!("pool/records/volumes/{name}.json"))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_planted_fault_is_found_and_named_and_nothing_is_harmed() {
    let mut driver = Driver::stocked().await;
    driver.terminate().await;
    let pool = driver.path("pool");
    let whole = Tree::of(&pool);
    assert!(driver.doctor(&[]).is_well(), "{}", driver.doctor(&[]).answer);
    for (fault, plant, code, words) in FAULTS {
        plant(&driver);
        let planted = Tree::of(&pool);
        assert_eq!(planted.differ(&whole).len(), 1, "{fault}: planted");
        let said = driver.doctor(&[]);
        assert_eq!(said.code, 1, "{fault}: {}", said.answer);
        let named = said.names(code.trim_end_matches('!'), words);
        assert!(named, "{fault}: {:#}", said.answer);
        assert_eq!(Tree::of(&pool).differ(&planted), [""; 0].map(PathBuf::from), "{fault}");
        let fixed = driver.doctor(&["--fix"]);
        if code.ends_with('!') {
            assert!(fixed.is_well(), "{fault}: {}", fixed.answer);
            assert!(fixed.answer["fixed"][0].to_string().contains(words), "{}", fixed.answer);
        } else {
            assert_eq!(fixed.code, 1, "{fault}: {}", fixed.answer);
            assert_eq!(Tree::of(&pool).differ(&planted), [""; 0].map(PathBuf::from), "{fault}");
            whole.restore(&pool);
        }
        assert!(Tree::of(&pool) == whole, "{fault}: {:?}", Tree::of(&pool).differ(&whole));
        assert!(driver.doctor(&[]).is_well(), "{fault}: {}", driver.doctor(&[]).answer);
    }
    eprintln!("{} faults of a pool found, named, and nothing harmed", FAULTS.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_away_locked_read_only_or_on_another_machine_is_told_apart() {
    let mut driver = Driver::stocked().await;
    driver.terminate().await;
    let [pool, away] = ["pool", "away"].map(|name| driver.path(name));
    let run = |from: &Path, to: &Path| {
        assert!(Command::new("mv").args([from, to]).status().unwrap().success());
    };
    run(&pool, &away);
    assert!(driver.doctor(&[]).names("pool-gone", "no such directory"));
    fs::create_dir(&pool).unwrap();
    assert!(driver.doctor(&[]).names("pool-gone", "no pool in this directory"));
    assert_eq!(names(&pool), [""; 0], "none is made");
    // Carried to another machine: no driver, no run directory, another place.
    let whole = Tree::of(&away);
    fs::remove_dir_all(driver.path("run")).unwrap();
    let said = driver.doctor_at(&away, &[]);
    assert!(said.is_well(), "{}", said.answer);
    assert_eq!(said.answer["volumes"], 3);
    assert!(!driver.path("run").exists() && Tree::of(&away) == whole);
    let held = fs::File::open(&away).unwrap();
    held.lock().unwrap();
    let said = driver.doctor_at(&away, &[]);
    assert!(said.names("pool-locked", &std::process::id().to_string()), "{}", said.answer);
    let refused = driver.doctor_at(&away, &["--fix"]);
    assert_eq!(refused.code, 2);
    assert!(refused.answer.to_string().contains("in use by another process"), "{}", refused.answer);
    drop(held);
    let disk = SmallDisk::new();
    assert!(Command::new("cp").arg("-a").args([&away, &disk.path()]).status().unwrap().success());
    let remount = ["-o", "remount,ro"];
    assert!(Command::new("mount").args(remount).arg(disk.path()).status().unwrap().success());
    for more in [&[][..], &["--fix"]] {
        let said = driver.doctor_at(&disk.path().join("away"), more);
        assert!(
            said.code == 1 && said.names("pool-read-only", "takes no writes"),
            "{}",
            said.answer
        );
    }
    let unknown = qsd_csi().args(["doctor", "--endpoint", &driver.endpoint()]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("--pool"));
}

/// A driver that is gone, and what it served.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_staged_is_looked_at_without_a_driver() {
    let mut driver = Driver::start().await;
    driver.published("vm").await;
    let part = driver.part();
    driver.kill();
    let pool = Tree::of(&part);
    assert!(driver.doctor(&[]).is_well(), "{}", driver.doctor(&[]).answer);
    assert!(driver.doctor(&["--fix"]).is_well(), "what is staged stays");
    let daemon = crate::harness::daemons_below(driver.scratch())[0];
    signal(daemon, "STOP");
    let said = driver.doctor(&[]);
    assert!(said.names("daemon-stopped", &daemon.to_string()), "{}", said.answer);
    signal(daemon, "CONT");
    until("it goes on", async || driver.doctor(&[]).is_well()).await;
    let attachment = part.join("attachment.json");
    let whole = fs::read(&attachment).unwrap();
    cut(&attachment, 20);
    let said = driver.doctor(&["--fix"]);
    assert!(said.names("attachment-unreadable", "volume vm"), "{}", said.answer);
    assert_eq!(fs::metadata(&attachment).unwrap().len(), 20);
    put(&attachment, &whole);
    for pid in supervisors_of(&driver.path("run")).into_iter().chain(relays_of(&driver.path("run")))
    {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    let said = driver.doctor(&[]);
    for (code, words) in
        [("relay-gone", "keeper"), ("relay-gone", "worker"), ("supervisor-gone", "")]
    {
        assert!(said.names(code, words), "{}", said.answer);
    }
    // The daemon lives, and nothing is left by which it is known.
    driver.wipe_run();
    let said = driver.doctor(&[]);
    assert!(said.names("opener-unknown", &format!("process {daemon}")), "{}", said.answer);
    assert!(said.names("mount-stale", "target-vm") || !driver.path("run").exists());
    fs::create_dir(driver.path("run")).unwrap();
    let said = driver.doctor(&[]);
    assert!(said.names("mount-stale", "target-vm"), "{}", said.answer);
    let fixed = driver.doctor(&["--fix"]);
    assert!(fixed.names("opener-unknown", &daemon.to_string()) && is_alive(daemon));
    assert!(fixed.answer["fixed"].to_string().contains("target-vm"), "{}", fixed.answer);
    assert_eq!(mounts_below(driver.scratch()), Vec::<PathBuf>::new());
    signal(daemon, "KILL");
    until("it is gone", async || !is_alive(daemon)).await;
    assert!(driver.doctor(&[]).is_well(), "{}", driver.doctor(&[]).answer);
    drop(pool);
    driver.launch(&[], None);
    driver.answers().await;
    driver.stage("vm").await.unwrap();
    driver.kill();
    signal(crate::harness::daemons_below(driver.scratch())[0], "KILL");
    until("its end is seen", async || driver.doctor(&[]).names("daemon-gone", "volume vm")).await;
    driver.launch(&[], None);
    driver.answers().await;
    until("it serves again", async || driver.doctor(&[]).is_well()).await;
    driver.unstage("vm").await.unwrap();
    driver.delete("vm").await.unwrap();
    driver.assert_empty().await;
}

/// Which targets are read is in the attachment of the volume alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_a_volume_whose_attachment_cannot_be_read_is_named_and_left_alone() {
    let mut driver = Driver::start().await;
    let capability = mount(Mode::MultiNodeMultiWriter);
    let mut request = create_request("vm", SIZE);
    request.volume_capabilities = vec![capability.clone()];
    driver.controller().create_volume(request).await.unwrap();
    let mut request = driver.stage_request("vm");
    request.volume_capability = Some(capability.clone());
    fs::create_dir_all(&request.staging_target_path).unwrap();
    driver.node().node_stage_volume(request).await.unwrap();
    let part = driver.part();
    let mut request = driver.publish_request("vm");
    request.volume_capability = Some(capability);
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    request.target_path = driver.text("target-reader");
    request.readonly = true;
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    let readers = names(&driver.path("run")).into_iter().filter(|name| name.len() == 32);
    let readers: Vec<_> = readers.map(|name| driver.path("run").join(name)).collect();
    let reader = readers.iter().find(|dir| **dir != part).unwrap();
    let target = driver.path("target-reader");
    driver.kill();
    assert!(driver.doctor(&[]).is_well(), "{}", driver.doctor(&[]).answer);
    let attachment = part.join("attachment.json");
    let whole = fs::read(&attachment).unwrap();
    cut(&attachment, 20);
    let kept = [Tree::of(reader), Tree::of(&part)];
    for more in [&[][..], &["--fix"]] {
        let said = driver.doctor(more);
        assert!(said.names("reader-unclear", "target-reader"), "{}", said.answer);
        assert!(said.names("attachment-unreadable", "volume vm"), "{}", said.answer);
        assert_eq!(said.findings().len(), 2, "{}", said.answer);
    }
    let stays = |when: &str| {
        assert!([Tree::of(reader), Tree::of(&part)] == kept, "{when}");
        assert!(mounts_below(target.parent().unwrap()).contains(&target), "{when}");
    };
    stays("after a fix");
    driver.launch(&[], None);
    driver.answers().await;
    stays("after a start");
    put(&attachment, &whole);
    driver.restart().await;
    assert!(driver.doctor(&[]).is_well(), "{}", driver.doctor(&[]).answer);
    drop(Guest::connect(&target.join("vhost.sock")));
    let request = pb::NodeUnpublishVolumeRequest {
        volume_id: request.volume_id,
        target_path: request.target_path,
    };
    driver.node().node_unpublish_volume(request).await.unwrap();
    driver.remove("vm").await;
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_answers_says_where_it_keeps_all() {
    let driver = Driver::start().await;
    driver.create("vm").await;
    let mut doctor = qsd_csi();
    doctor.args(["doctor", "--output", "json", "--endpoint", &driver.endpoint()]);
    let output = doctor.output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["healthy"], &answer["volumes"]), (&true.into(), &1.into()), "{answer}");
    assert!(answer["driver_pid"].is_u64(), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_knows_in_the_run_directory_is_removed() {
    let mut driver = Driver::start().await;
    driver.published("vm").await;
    driver.kill();
    let key = "0123456789abcdef0123456789abcdef";
    let part = driver.path("run").join(key);
    fs::create_dir_all(part.join("export")).unwrap();
    fs::create_dir(driver.path("elsewhere")).unwrap();
    let mut mount = Command::new("mount");
    mount.arg("--bind").arg(part.join("export")).arg(driver.path("elsewhere"));
    assert!(mount.status().unwrap().success());
    let disk = part.join("disk.0");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    assert!(Command::new("losetup").arg("--find").arg(&disk).status().unwrap().success());
    let device = loops_below(driver.scratch()).pop().unwrap();
    let said = driver.doctor(&[]);
    for (code, words) in
        [("part-unexplained", key), ("mount-stale", "elsewhere"), ("device-stale", &device)]
    {
        assert!(said.names(code, words), "{code}: {}", said.answer);
    }
    assert_eq!(said.findings().len(), 3, "{}", said.answer);
    let fixed = driver.doctor(&["--fix"]);
    assert!(fixed.is_well(), "{}", fixed.answer);
    assert!(!part.exists() && loops_below(driver.scratch()).is_empty());
    assert!(mounts_below(driver.scratch()).iter().all(|mount| !mount.ends_with("elsewhere")));
    driver.launch(&[], None);
    driver.answers().await;
    assert_eq!(driver.daemons().await.len(), 1, "what is published was left alone");
    driver.remove("vm").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_at_work_is_not_disturbed_and_gives_no_false_alarm() {
    let driver = std::sync::Arc::new(Driver::stocked().await);
    driver.published("vm").await;
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (worker, halt) = (driver.clone(), stop.clone());
    let work = tokio::spawn(async move {
        let mut rounds = 0;
        while !halt.load(std::sync::atomic::Ordering::SeqCst) {
            worker.published("busy").await;
            worker.snapshot("busy", "busy").await.unwrap();
            worker.create_from("clone", Source::Volume("vm".into())).await.unwrap();
            worker.delete_snapshot("busy").await.unwrap();
            worker.delete("clone").await.unwrap();
            worker.remove("busy").await;
            rounds += 1;
        }
        rounds
    });
    for _ in 0..6 {
        let doctor = driver.clone();
        let said = tokio::task::spawn_blocking(move || doctor.doctor(&[])).await.unwrap();
        assert!(said.is_well(), "{:#}", said.answer);
        assert_eq!(said.answer["driver_pid"], driver.pid());
    }
    let refused = driver.doctor(&["--fix"]);
    assert_eq!(refused.code, 2, "{}", refused.answer);
    assert!(refused.answer.to_string().contains(&driver.pid().to_string()), "{}", refused.answer);
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    let rounds = work.await.unwrap();
    assert!(rounds > 0);
    eprintln!("6 looks while a driver did {rounds} rounds of calls: no false alarm");
    // What is really wrong is told under a driver, too.
    fs::remove_file(driver.active("plain")).unwrap();
    let daemon = driver.daemons().await[0];
    signal(daemon, "STOP");
    let said = driver.doctor(&[]);
    signal(daemon, "CONT");
    assert!(said.names("volume-damaged", "volume plain"), "{}", said.answer);
    assert!(said.names("daemon-stopped", "volume vm"), "{}", said.answer);
    signal(driver.pid(), "STOP");
    let said = driver.doctor(&[]);
    signal(driver.pid(), "CONT");
    assert!(said.names("driver-deaf", &driver.pid().to_string()), "{}", said.answer);
}
