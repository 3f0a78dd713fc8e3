//! The driver dies at every crash point, is started again, and the call repeated as a sidecar
//! would: it ends as if nothing had happened, and nothing is left behind.

use crate::{
    copies::{Source, Wish},
    harness::{Driver, daemons_below, names, until},
};
use std::{collections::BTreeSet, fs, os::unix::fs::FileExt as _, path::Path};

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
    ("stage", &["node-stage-intent", "node-stage-daemon", "node-stage-served", "node-stage-done"]),
    (
        "publish",
        &[
            "node-publish-intent",
            "image-place",
            "image-shown",
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
        &["volume-expand-intent", "image-hidden", "volume-expand-grown", "volume-expand-done"],
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

async fn call(driver: &Driver, name: &str) -> Result<(), tonic::Status> {
    match name {
        "create" => {
            driver.try_create("pvc-1").await?;
            write_something(driver);
            Ok(())
        }
        "stage" => driver.stage("pvc-1").await,
        "publish" => driver.publish("pvc-1").await,
        "upgrade" => driver.upgrade("pvc-1").await,
        "snapshot" | "snapshot above" | "snapshot again" => driver.snapshot(name, "pvc-1").await,
        "clone" => driver.create_from("clone", Source::Volume("pvc-1".into())).await,
        "restore" => driver.create_from("restored", Source::Snapshot("snapshot".into())).await,
        "expand" => driver.expand("pvc-1", 2 << 30).await,
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

/// So that the layer of the volume has more than what is put onto it: it is committed to.
fn write_something(driver: &Driver) {
    let layers = driver.path("pool/layers");
    for name in names(&layers) {
        let file = fs::File::options().write(true).open(layers.join(name)).unwrap();
        file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    }
}

fn id_of(name: &str) -> String {
    qsd_csi::volume::SnapshotId::of_name(name).to_string()
}

#[tokio::test]
async fn a_crash_at_any_point_of_a_call_heals_by_itself() {
    let mut driver = Driver::start().await;
    for (crashing, points) in POINTS {
        for point in points {
            for (name, _) in POINTS {
                if name == crashing {
                    crash_at(&mut driver, point).await;
                    let outcome = call(&driver, name).await;
                    assert!(outcome.is_err(), "{name}: {point} was not reached");
                    assert!(!driver.ended().success(), "{point}");
                    relaunch(&mut driver).await;
                    assert_at_rest(&driver, point).await;
                }
                let outcome = call(&driver, name).await;
                outcome.unwrap_or_else(|error| panic!("{name} after {point}: {error}"));
                if name == "publish" || name == "upgrade" {
                    assert!(driver.socket("pvc-1").exists(), "{point}");
                    assert_eq!(driver.daemons().await.len(), 1, "{point}");
                }
            }
            driver.assert_empty().await;
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
    let mut driver = Driver::start().await;
    for (cause, left, points) in BACKGROUND {
        for point in points {
            for (name, _) in POINTS {
                if name != cause {
                    call(&driver, name).await.unwrap();
                    continue;
                }
                crash_at(&mut driver, point).await;
                // The call may have ended before the work begins.
                _ = call(&driver, name).await;
                let ended = tokio::task::block_in_place(|| driver.ended());
                assert!(!ended.success(), "{point}");
                relaunch(&mut driver).await;
                call(&driver, name).await.unwrap();
                assert_at_rest(&driver, point).await;
                let layers = driver.path("pool/layers");
                until("all is merged", async || names(&layers).len() == left).await;
            }
            driver.assert_empty().await;
        }
    }
}

#[tokio::test]
async fn a_crash_while_a_crash_is_healed_heals_by_itself() {
    let mut driver = Driver::start().await;
    for (crashing, first, second) in START_UP {
        for (name, _) in POINTS {
            if name == crashing {
                crash_at(&mut driver, first).await;
                call(&driver, name).await.unwrap_err();
                driver.ended();
                driver.launch(&[], Some(second));
                assert!(!driver.ended().success(), "{second}");
                relaunch(&mut driver).await;
                assert_at_rest(&driver, second).await;
            }
            call(&driver, name).await.unwrap();
        }
        driver.assert_empty().await;
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
