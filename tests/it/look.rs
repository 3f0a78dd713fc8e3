//! What people are told of volumes, snapshots and layers: who stands on what, and who pays for it.

use crate::harness::{Driver, GIB, create_request, until};
use pb::volume_content_source::{SnapshotSource, Type, VolumeSource};
use qsd_csi::csi::pb::{
    csi as pb,
    inspect::{Layer, Pool, Snapshot, Volume},
};
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt as _,
    path::Path,
};
use tonic::Code;

/// One MiB.
const MIB: i64 = 1 << 20;

/// Takes a snapshot; its id.
async fn snapshot(driver: &Driver, name: &str, volume: &str) -> String {
    let request = pb::CreateSnapshotRequest {
        name: name.into(),
        source_volume_id: volume.into(),
        ..Default::default()
    };
    let response = driver.controller().create_snapshot(request).await.unwrap();
    response.into_inner().snapshot.unwrap().snapshot_id
}

/// Creates a volume from another or a snapshot; its id.
async fn create_from(driver: &Driver, name: &str, source: Type, parameters: &[(&str, &str)]) {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    let request = pb::CreateVolumeRequest {
        volume_content_source: Some(pb::VolumeContentSource { r#type: Some(source) }),
        parameters: parameters.iter().map(owned).collect(),
        ..create_request(name, GIB)
    };
    driver.controller().create_volume(request).await.unwrap();
}

/// Gives a raw layer that nobody has open this many bytes of data.
fn fill(path: &str, bytes: i64) {
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
    snapshot(&driver, "gold", "base").await;
    let gold = Type::Snapshot(SnapshotSource { snapshot_id: "gold".into() });
    create_from(&driver, "vm", gold, &[("copyMode", "copy-on-read"), ("iops", "100")]).await;
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
        assert_eq!(volume.layers, [active.clone(), bottom.clone()]);
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
            snapshot(&driver, &format!("{volume}-{number}"), volume).await;
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
    for id in ["nobody", "NOT OURS"] {
        assert_eq!(ids(id, "").await.unwrap_err().code(), Code::NotFound);
    }
}

#[tokio::test]
async fn a_clone_shows_how_far_it_has_come() {
    let driver = Driver::start().await;
    driver.create("base").await;
    fill(&driver.inspect().await[0].layers[0].path, 8 * MIB);
    let base = Type::Volume(VolumeSource { volume_id: "base".into() });
    let parameters = [("copyMode", "clone"), ("cloneBytesPerSecond", "1Mi")];
    create_from(&driver, "copy", base, &parameters).await;
    let top = async || of(&driver.inspect().await, "copy").layers[0].clone();
    until("the clone is worked on", async || {
        let Layer { job, .. } = top().await;
        job.is_some_and(|job| job.done_bytes > 0 && job.done_bytes < job.total_bytes)
    })
    .await;
    let Layer { detaching, job, trouble, .. } = top().await;
    assert!(detaching && job.unwrap().kind == "clone" && trouble.is_empty());
}

#[tokio::test]
async fn what_is_damaged_is_told_with_its_reason() {
    let mut driver = Driver::start().await;
    driver.create("base").await;
    snapshot(&driver, "gold", "base").await;
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
