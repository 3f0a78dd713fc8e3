//! What people are told of volumes, snapshots and layers: who stands on what, and who pays for it.

use crate::{
    copies::{Source, Wish},
    harness::{Driver, GIB, until},
};
use qsd_csi::csi::pb::inspect::{Layer, Pool, Snapshot, Volume};
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt as _,
    path::Path,
};
use tonic::Code;

/// One MiB.
const MIB: i64 = 1 << 20;

/// A copy of 1 GiB.
fn copy(name: &str, source: Source, parameters: [(&'static str, &'static str); 2]) -> Wish {
    Wish { name: name.into(), size: 1 << 30, source: Some(source), parameters: parameters.into() }
}

/// Gives a raw layer that nobody has open this many bytes of data.
pub(crate) fn fill(path: &str, bytes: i64) {
    let file: File = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&vec![7; usize::try_from(bytes).unwrap()], 0).unwrap();
    file.sync_all().unwrap();
}

fn of<'a>(volumes: &'a [Volume], id: &str) -> &'a Volume {
    volumes.iter().find(|volume| volume.volume_id == id).unwrap()
}

#[tokio::test]
async fn a_look_tells_what_stands_on_what_and_who_pays_for_it() {
    let driver = Driver::start().await;
    driver.create("base").await;
    fill(&driver.inspect().await[0].layers[0].path, 8 * MIB);
    driver.snapshot("gold", "base").await.unwrap();
    let parameters = [("copyMode", "copy-on-read"), ("iops", "100")];
    let vm = copy("vm", Source::Snapshot("gold".into()), parameters);
    driver.fulfil(&vm).await.unwrap();
    let things = driver.look().await;
    let Pool { name, directory, total_bytes, free_bytes, allocated_bytes, trouble } =
        &things.pools[0];
    assert_eq!((name.as_str(), directory, trouble.as_str()), ("main", &driver.text("pool"), ""));
    assert!(total_bytes > free_bytes && *free_bytes > 0);
    let spent: i64 = things.layers.iter().map(|layer| layer.allocated_bytes).sum();
    assert!(*allocated_bytes == spent && spent >= 8 * MIB, "{allocated_bytes} of {spent}");
    let bottom = things.layers.iter().find(|layer| layer.parent_id.is_empty()).unwrap();
    assert_eq!(bottom.snapshot_ids, ["gold"]);
    assert_eq!((bottom.format.as_str(), bottom.volume_id.as_str()), ("raw", ""));
    for id in ["base", "vm"] {
        let active = things.layers.iter().find(|layer| layer.volume_id == id).unwrap();
        assert_eq!(active.parent_id, bottom.layer_id);
        let volume = of(&things.volumes, id);
        assert_eq!(volume.layers, [], "they are told once");
        let listed = driver.inspect().await;
        assert_eq!(of(&listed, id).layers, [active.clone(), bottom.clone()]);
        assert_eq!(volume.own_bytes, active.allocated_bytes);
        assert_eq!(volume.allocated_bytes, active.allocated_bytes + bottom.allocated_bytes);
    }
    let vm = of(&things.volumes, "vm");
    assert_eq!((vm.copy_mode.as_str(), vm.limits["iops"]), ("copy-on-read", 100));
    assert!(format!("{:?}", vm.source).contains("gold"));
    let gold = &things.snapshots[0];
    assert_eq!((gold.source_volume_id.as_str(), gold.capacity_bytes), ("base", GIB));
    assert_eq!((gold.own_bytes, gold.allocated_bytes), (0, bottom.allocated_bytes));
    assert!(gold.created.is_some());
    for id in ["base", "vm"] {
        driver.delete(id).await.unwrap();
    }
    let gold = &driver.look().await.snapshots[0];
    assert_eq!(gold.own_bytes, gold.allocated_bytes, "nothing else needs it");
}

#[tokio::test]
async fn snapshots_are_listed_by_volume_and_by_id() {
    let driver = Driver::start().await;
    for volume in ["a", "b"] {
        driver.create(volume).await;
        for number in [2, 1] {
            driver.snapshot(&format!("{volume}-{number}"), volume).await.unwrap();
        }
    }
    let ids = async |id: &str, volume: &str| {
        let found = driver.snapshots(id, volume).await;
        found.map(|all| all.into_iter().map(|one| one.snapshot_id).collect::<Vec<_>>())
    };
    assert_eq!(ids("", "").await.unwrap(), ["a-1", "a-2", "b-1", "b-2"]);
    assert_eq!(ids("", "b").await.unwrap(), ["b-1", "b-2"]);
    assert_eq!(ids("", "nobody").await.unwrap(), [""; 0]);
    assert_eq!(ids("b-1", "").await.unwrap(), ["b-1"]);
    assert_eq!(driver.snapshots("b-1", "").await.unwrap()[0].layers.len(), 2);
    for id in ["nobody", "NOT OURS"] {
        assert_eq!(ids(id, "").await.unwrap_err().code(), Code::NotFound);
    }
}

#[tokio::test]
async fn a_clone_shows_how_far_it_has_come() {
    let driver = Driver::start().await;
    driver.create("base").await;
    fill(&driver.inspect().await[0].layers[0].path, 8 * MIB);
    let parameters = [("copyMode", "clone"), ("cloneBytesPerSecond", "1Mi")];
    let slow = copy("copy", Source::Volume("base".into()), parameters);
    driver.fulfil(&slow).await.unwrap();
    let made = async || of(&driver.inspect().await, "copy").layers[1].clone();
    until("the clone is worked on", async || {
        let Layer { job, .. } = made().await;
        job.is_some_and(|job| job.done_bytes > 0 && job.done_bytes < job.total_bytes)
    })
    .await;
    let Layer { detaching, job, trouble, .. } = made().await;
    assert!(detaching && job.unwrap().kind == "clone" && trouble.is_empty());
}

#[tokio::test]
async fn what_is_damaged_is_told_with_its_reason() {
    let mut driver = Driver::start().await;
    driver.create("base").await;
    driver.snapshot("gold", "base").await.unwrap();
    driver.kill();
    spoil(&driver.path("pool/records/snapshots/gold.json"));
    driver.launch(&[], None);
    driver.answers().await;
    let Snapshot { snapshot_id, damage, pool, .. } = &driver.look().await.snapshots[0];
    assert_eq!((snapshot_id.as_str(), pool.as_str()), ("gold", "main"));
    assert!(damage.contains("gold.json"), "{damage}");
}

fn spoil(record: &Path) {
    OpenOptions::new().write(true).open(record).unwrap().write_all_at(b"?", 0).unwrap();
}
