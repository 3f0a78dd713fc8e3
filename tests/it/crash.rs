//! The driver dies at every crash point, is started again, and the call repeated as a sidecar
//! would: it ends as if nothing had happened, and nothing is left behind.

use crate::harness::{Driver, daemons_below, names, until};
use std::{collections::BTreeSet, fs, path::Path};

/// Every crash point, by the call that comes past it.
const POINTS: [(&str, &[&str]); 7] = [
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
            "node-publish-directory",
            "node-publish-bound",
            "node-publish-done",
        ],
    ),
    ("upgrade", &["node-upgrade-beside", "node-upgrade-moved"]),
    ("unpublish", &["node-unpublish-unmounted", "node-unpublish-removed"]),
    ("unstage", &["node-unstage-intent", "node-unstage-relay", "node-unstage-stopped"]),
    (
        "delete",
        &[
            "volume-delete-intent",
            "volume-remove-layer",
            "volume-remove-layer-record",
            "volume-remove-done",
        ],
    ),
];

async fn call(driver: &Driver, name: &str) -> Result<(), tonic::Status> {
    match name {
        "create" => driver.try_create("pvc-1").await.map(drop),
        "stage" => driver.stage("pvc-1").await,
        "publish" => driver.publish("pvc-1").await,
        "upgrade" => driver.upgrade("pvc-1").await,
        "unpublish" => driver.unpublish("pvc-1").await,
        "unstage" => driver.unstage("pvc-1").await,
        "delete" => driver.delete("pvc-1").await,
        other => panic!("no call {other}"),
    }
}

#[tokio::test]
async fn a_crash_at_any_point_heals_by_itself() {
    let mut driver = Driver::start().await;
    for (crashing, points) in POINTS {
        for point in points {
            for (name, _) in POINTS {
                if name == crashing {
                    driver.kill();
                    driver.launch(&[], Some(point));
                    driver.answers().await;
                    let outcome = call(&driver, name).await;
                    assert!(outcome.is_err(), "{point} was not reached");
                    assert!(!driver.ended().success(), "{point}");
                    driver.launch(&[], None);
                    driver.answers().await;
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

/// Nothing is half done: every layer has its volume, every daemon its attachment.
async fn assert_at_rest(driver: &Driver, point: &str) {
    let volumes = driver.inspect().await;
    assert!(volumes.iter().all(|volume| volume.damage.is_empty()), "{point}");
    for dir in ["pool/layers", "pool/records/layers", "pool/records/volumes"] {
        assert_eq!(names(&driver.path(dir)).len(), volumes.len(), "{point}: {dir}");
    }
    let staged = volumes.iter().filter(|volume| volume.attachment.is_some()).count();
    assert_eq!(driver.daemons().await.len(), staged, "{point}");
    until("daemons of nobody are gone", async || daemons_below(driver.scratch()).len() == staged)
        .await;
}

#[test]
fn the_walk_knows_every_point_there_is() {
    let known: BTreeSet<String> =
        POINTS.iter().flat_map(|(_, points)| points.iter()).map(|&point| point.into()).collect();
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
