//! The driver dies at every crash point, is started again, and the call repeated as a sidecar
//! would: it ends as if nothing had happened, and nothing is left behind. Whatever is there holds
//! what it held before.

use crate::{
    copies::{Source, Wish},
    harness::{Driver, daemons_below, names, until},
    model::{
        guest::{Action, Guest, LONGEST},
        picture::{Picture, SECTOR, Stamp},
        records::{Reader, Records},
    },
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// Of the volume, before and after it is expanded.
const SIZES: [u64; 2] = [2 << 20, 4 << 20];

/// Every crash point, by the call that comes past it, in the order of the calls.
const POINTS: [(&str, &[&str]); 19] = [
    (
        "create",
        &[
            "volume-create-intent",
            "volume-create-layer",
            "volume-create-layer-record",
            "volume-create-done",
        ],
    ),
    (
        "stage",
        &[
            "node-stage-intent",
            "image-place",
            "image-begun",
            "node-stage-daemon",
            "node-stage-served",
            "node-stage-done",
        ],
    ),
    (
        "publish",
        &[
            "node-publish-intent",
            "node-publish-directory",
            "node-publish-bound",
            "node-publish-done",
        ],
    ),
    ("upgrade", &["node-upgrade-beside", "node-upgrade-moved"]),
    (
        "snapshot",
        &[
            "snapshot-intent",
            "freeze-overlay",
            "freeze-overlay-record",
            "freeze-overlay-open",
            "freeze-adopted",
            "freeze-done",
            "snapshot-done",
        ],
    ),
    (
        "clone",
        &[
            "volume-create-intent",
            "freeze-overlay",
            "freeze-overlay-record",
            "freeze-overlay-open",
            "freeze-adopted",
            "freeze-done",
            "volume-create-layer",
            "volume-create-layer-record",
            "volume-create-done",
        ],
    ),
    ("restore", &["volume-create-layer", "volume-create-layer-record", "volume-create-done"]),
    (
        "expand",
        &[
            "volume-expand-intent",
            "image-hidden",
            "volume-expand-grown",
            "image-place",
            "image-shown",
            "volume-expand-done",
        ],
    ),
    ("modify", &["volume-modify-recorded"]),
    ("snapshot above", &["snapshot-intent"]),
    ("unpublish", &["node-unpublish-unmounted", "node-unpublish-removed"]),
    ("delete restored", &["volume-delete-intent", "layer-remove-intent", "layer-remove-done"]),
    ("delete clone", &["layer-remove-file", "volume-delete-reclaimed"]),
    ("delete snapshot", &["snapshot-delete-intent", "snapshot-delete-reclaimed"]),
    ("delete snapshot above", &["snapshot-delete-reclaimed"]),
    ("unstage", &["node-unstage-intent", "node-unstage-relay", "node-unstage-stopped"]),
    ("snapshot again", &["freeze-overlay-record", "freeze-adopted", "snapshot-done"]),
    ("delete snapshot again", &["snapshot-delete-intent"]),
    (
        "delete",
        &[
            "volume-delete-intent",
            "layer-remove-intent",
            "layer-remove-file",
            "layer-remove-done",
            "volume-delete-reclaimed",
        ],
    ),
];

/// Crash points of background work, by the call that gives cause for it, and how many layers it
/// leaves: between two layers with names, in the active layer, and in a daemon of its own. No other
/// work can come first.
const BACKGROUND: [(&str, usize, &[&str]); 3] = [
    (
        "delete clone",
        3,
        &["work-begun", "work-moved", "merge-recorded", "merge-file-removed", "merge-done"],
    ),
    (
        "delete snapshot above",
        1,
        &["commit-ready", "commit-stopped", "merge-recorded", "merge-file-removed", "merge-done"],
    ),
    (
        "delete snapshot again",
        1,
        &["work-begun", "workshop-moved", "merge-recorded", "merge-file-removed", "merge-done"],
    ),
];

/// Crash points of start-up, by a point at which the driver died before in the call.
const START_UP: [(&str, &str, &str); 2] = [
    ("create", "volume-create-layer", "layer-forgotten"),
    ("snapshot", "freeze-overlay-record", "layer-forgotten"),
];

/// A driver, and what is to be on its volumes and snapshots, by id.
struct Walk {
    driver: Driver,
    held: BTreeMap<String, Picture>,
    last: Stamp,
}

impl Walk {
    async fn begin() -> Self {
        Self { driver: Driver::start().await, held: BTreeMap::new(), last: 0 }
    }

    async fn call(&self, name: &str) -> Result<(), tonic::Status> {
        let driver = &self.driver;
        match name {
            "create" => {
                let (name, [size, _]) = ("pvc-1".to_owned(), SIZES);
                driver.fulfil(&Wish { name, size, source: None, parameters: vec![] }).await
            }
            "stage" => driver.stage("pvc-1").await,
            "publish" => driver.publish("pvc-1").await,
            "upgrade" => driver.upgrade("pvc-1").await,
            "snapshot" | "snapshot above" | "snapshot again" => {
                driver.snapshot(name, "pvc-1").await
            }
            "clone" => self.copy("clone", Source::Volume("pvc-1".into())).await,
            "restore" => self.copy("restored", Source::Snapshot("snapshot".into())).await,
            "expand" => driver.expand("pvc-1", SIZES[1]).await,
            "modify" => driver.modify("pvc-1", &[("iops", "5000")]).await,
            "delete restored" => driver.delete("restored").await,
            "delete clone" => driver.delete("clone").await,
            "delete snapshot" => driver.delete_snapshot("snapshot").await,
            "unpublish" => driver.unpublish("pvc-1").await,
            "unstage" => driver.unstage("pvc-1").await,
            "delete snapshot above" => driver.delete_snapshot(&id_of("snapshot above")).await,
            "delete snapshot again" => driver.delete_snapshot(&id_of("snapshot again")).await,
            "delete" => driver.delete("pvc-1").await,
            other => panic!("no call {other}"),
        }
    }

    async fn copy(&self, name: &str, source: Source) -> Result<(), tonic::Status> {
        let (name, [size, _]) = (name.to_owned(), SIZES);
        let source = Some(source);
        self.driver.fulfil(&Wish { name, size, source, parameters: vec![] }).await
    }

    /// Notes what is there after a call, and writes something else to the volume where it is
    /// published.
    async fn note(&mut self, name: &str) {
        let now = |walk: &Self| walk.held["pvc-1"].clone();
        match name {
            "create" => {
                let blank = Picture::blank(sectors(SIZES[0]));
                self.held.insert("pvc-1".into(), blank);
            }
            // So that the layer of the volume has more than what is put onto it: it is committed to.
            "publish" => self.write(sectors(1 << 20)).await,
            "snapshot" | "snapshot above" | "snapshot again" => {
                self.held.insert(id_of(name), now(self));
            }
            "clone" => {
                self.held.insert("clone".into(), now(self));
                self.write(8).await;
            }
            "restore" => {
                self.held.insert("restored".into(), self.held["snapshot"].clone());
            }
            "expand" => {
                let larger = now(self).grown(sectors(SIZES[1]));
                self.held.insert("pvc-1".into(), larger);
                self.write(16).await;
            }
            "modify" | "stage" | "upgrade" | "unpublish" | "unstage" => {}
            "delete" => drop(self.held.remove("pvc-1")),
            _ => {
                let gone = name.strip_prefix("delete ").unwrap();
                self.held.remove(&id_of(gone)).unwrap();
            }
        }
    }

    /// A VM comes, writes to the first sectors, and leaves.
    async fn write(&mut self, sectors: usize) {
        let guest = Guest::connect(&self.driver.socket("pvc-1"));
        self.last += 1;
        let stamp = self.last;
        let parts = (0..sectors).step_by(LONGEST);
        let parts = parts.map(|first| first..(first + LONGEST).min(sectors));
        let writes = parts.map(|sectors| Action::Write { sectors, stamp });
        guest.act(writes.chain([Action::Flush]).collect()).await;
        self.held.get_mut("pvc-1").unwrap().write(0..sectors, stamp);
    }

    /// Everything that no unfinished call is about holds what it is to hold.
    async fn assert_holds(&self, unfinished: &str, what: &str) {
        let about = match unfinished {
            "expand" | "delete" => "pvc-1".to_owned(),
            name => id_of(name.strip_prefix("delete ").unwrap_or(name)),
        };
        for (id, picture) in self.held.iter().filter(|(id, _)| **id != about) {
            let read = || {
                let records = Records::of(&self.driver.path("pool"));
                let top = records.active(id).or_else(|| records.named(id))?.to_owned();
                records.picture(&top, Reader::Own)
            };
            let mut found = None;
            until(&format!("{id} is there"), async || {
                found = read(); // a layer may just have been merged
                found.is_some()
            })
            .await;
            let found = found.unwrap().unwrap_or_else(|error| panic!("{what}: {id}: {error}"));
            picture.assert_is(&found, &format!("{what}: {id}"));
        }
    }

    /// The call, after the driver died in it at a point.
    async fn repeat(&mut self, name: &str, point: &str) {
        relaunch(&mut self.driver).await;
        assert_at_rest(&self.driver, point).await;
        self.assert_holds(name, &format!("after {point} in {name}")).await;
        self.go_on(name, point).await;
        self.assert_holds("", &format!("after {point} and {name}")).await;
        eprintln!("{point} in {name}: {} volumes and snapshots as they were", self.held.len());
    }

    async fn go_on(&mut self, name: &str, point: &str) {
        let outcome = self.call(name).await;
        outcome.unwrap_or_else(|error| panic!("{name} after {point}: {error}"));
        self.note(name).await;
    }
}

fn sectors(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap() / SECTOR
}

fn id_of(name: &str) -> String {
    qsd_csi::volume::SnapshotId::of_name(name).to_string()
}

#[tokio::test]
async fn a_crash_at_any_point_of_a_call_heals_by_itself() {
    let mut walk = Walk::begin().await;
    for (crashing, points) in POINTS {
        for point in points {
            for (name, _) in POINTS {
                if name == crashing {
                    crash_at(&mut walk.driver, point).await;
                    let outcome = walk.call(name).await;
                    assert!(outcome.is_err(), "{name}: {point} was not reached");
                    assert!(!walk.driver.ended().success(), "{point}");
                    walk.repeat(name, point).await;
                } else {
                    walk.go_on(name, point).await;
                }
                if name == "publish" || name == "upgrade" {
                    assert!(walk.driver.socket("pvc-1").exists(), "{point}");
                    assert_eq!(walk.driver.daemons().await.len(), 1, "{point}");
                }
            }
            walk.driver.assert_empty().await;
        }
    }
}

/// What a larger clone is made of goes, and with it the last of its source.
#[tokio::test]
async fn a_crash_leaves_nothing_of_a_copy_that_is_larger() {
    let mut driver = Driver::start().await;
    for point in [
        "volume-create-intent",
        "volume-create-copy",
        "volume-create-copy-record",
        "volume-create-layer",
        "volume-create-layer-record",
    ] {
        driver.try_create("pvc-1").await.unwrap();
        driver.snapshot("snapshot", "pvc-1").await.unwrap();
        driver.delete("pvc-1").await.unwrap();
        crash_at(&mut driver, point).await;
        let wish = Wish {
            name: "copy".into(),
            size: 2 << 30,
            source: Some(Source::Snapshot("snapshot".into())),
            parameters: vec![("copyMode", "clone")],
        };
        driver.fulfil(&wish).await.unwrap_err();
        assert!(!driver.ended().success(), "{point}");
        relaunch(&mut driver).await;
        assert_at_rest(&driver, point).await;
        driver.fulfil(&wish).await.unwrap();
        driver.delete("copy").await.unwrap();
        driver.delete_snapshot("snapshot").await.unwrap();
        driver.assert_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_any_point_of_background_work_heals_by_itself() {
    let mut walk = Walk::begin().await;
    for (cause, left, points) in BACKGROUND {
        for point in points {
            for (name, _) in POINTS {
                if name != cause {
                    walk.go_on(name, point).await;
                    continue;
                }
                crash_at(&mut walk.driver, point).await;
                // The call may have ended before the work begins.
                _ = walk.call(name).await;
                let ended = tokio::task::block_in_place(|| walk.driver.ended());
                assert!(!ended.success(), "{point}");
                walk.repeat(name, point).await;
                let layers = walk.driver.path("pool/layers");
                until("all is merged", async || names(&layers).len() == left).await;
                walk.assert_holds("", &format!("merged after {point}")).await;
            }
            walk.driver.assert_empty().await;
        }
    }
}

#[tokio::test]
async fn a_crash_while_a_crash_is_healed_heals_by_itself() {
    let mut walk = Walk::begin().await;
    for (crashing, first, second) in START_UP {
        for (name, _) in POINTS {
            if name == crashing {
                crash_at(&mut walk.driver, first).await;
                walk.call(name).await.unwrap_err();
                walk.driver.ended();
                walk.driver.launch(&[], Some(second));
                assert!(!walk.driver.ended().success(), "{second}");
                walk.repeat(name, second).await;
            } else {
                walk.go_on(name, second).await;
            }
        }
        walk.driver.assert_empty().await;
    }
}

/// Starts the driver again, to die at a point.
pub(crate) async fn crash_at(driver: &mut Driver, point: &str) {
    driver.kill();
    driver.launch(&[], Some(point));
    driver.answers().await;
}

/// Starts the driver that died.
pub(crate) async fn relaunch(driver: &mut Driver) {
    driver.launch(&[], None);
    driver.answers().await;
}

/// Nothing is half done: every layer has its file and every file its layer, every daemon its
/// attachment, and no end is left undecided.
async fn assert_at_rest(driver: &Driver, point: &str) {
    let volumes = driver.inspect().await;
    assert!(volumes.iter().all(|volume| volume.damage.is_empty()), "{point}");
    let count = |dir: &str| names(&driver.path(dir)).len();
    assert_eq!(count("pool/records/volumes"), volumes.len(), "{point}");
    until("as many files as layers", async || count("pool/layers") == count("pool/records/layers"))
        .await;
    for dir in ["deleting", "deleting-snapshots", "deleting-layers"] {
        let dir = format!("pool/records/{dir}");
        until("what is deleted is gone", async || count(&dir) == 0).await;
    }
    let staged = volumes.iter().filter(|volume| volume.attachment.is_some()).count();
    until("what is staged is served", async || driver.daemons().await.len() == staged).await;
    until("daemons of nobody are gone", async || daemons_below(driver.scratch()).len() == staged)
        .await;
}

#[test]
fn the_walk_knows_every_point_there_is() {
    let calls = POINTS.iter().flat_map(|(_, points)| points.iter().copied());
    let work = BACKGROUND.iter().flat_map(|(_, _, points)| points.iter().copied());
    let walked = calls.chain(work).chain(crate::remote::trouble::POINTS);
    let walked = walked.chain(crate::local::POINTS).chain(crate::ephemeral::POINTS);
    let walked = walked.chain(crate::encryption::POINTS).chain(crate::modes::POINTS);
    let known: BTreeSet<String> =
        walked.chain(START_UP.map(|(_, _, point)| point)).map(str::to_owned).collect();
    let mut found = BTreeSet::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    assert_eq!(known, found);
}

fn collect(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, found);
        } else {
            let text = fs::read_to_string(&path).unwrap();
            let points = text.split("crash::point(\"").skip(1);
            found.extend(points.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
        }
    }
}
