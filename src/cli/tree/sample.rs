//! A node to draw in tests: two lines of volumes, a copy under way, a blank volume, and damage.

use crate::{
    cli::client::Things,
    csi::pb::inspect::{Job, Layer, Pool, Snapshot, Volume, volume::Source},
};
use prost_types::Timestamp;

const GIB: i64 = 1 << 30;
const MIB: i64 = 1 << 20;

pub(super) fn things() -> Things {
    let layers = vec![
        layer("b", "", "", &["monday"]),
        Layer {
            job: Some(Job { kind: "clone".into(), done_bytes: 550 * MIB, total_bytes: GIB }),
            detaching: true,
            ..layer("c", "b", "restored", &[])
        },
        layer("d", "b", "", &["tuesday"]),
        layer("e", "d", "disk", &[]),
        layer("f", "", "", &[]),
        Layer { detaching: true, ..layer("g", "f", "copy", &[]) },
        layer("h", "f", "base", &[]),
        layer("a", "", "blank", &[]),
    ];
    let volume = |id: &str| Volume {
        volume_id: id.into(),
        pool: "main".into(),
        capacity_bytes: GIB,
        ..Default::default()
    };
    let snapshot = |id: &str| Snapshot {
        snapshot_id: id.into(),
        pool: "main".into(),
        source_volume_id: "disk".into(),
        created: Some(Timestamp { seconds: 1_795_283_304, nanos: 5 }),
        ..Default::default()
    };
    let source = Some(Source::SourceVolumeId("base".into()));
    Things {
        run_dir: None,
        volumes: vec![
            volume("base"),
            volume("blank"),
            Volume { damage: "its record is gone".into(), ..volume("broken") },
            Volume { source, ..volume("copy") },
            volume("disk"),
            volume("restored"),
        ],
        snapshots: vec![snapshot("monday"), snapshot("tuesday")],
        pools: vec![Pool {
            name: "main".into(),
            directory: "/srv/a & b".into(),
            total_bytes: 100 * GIB,
            free_bytes: 60 * GIB,
            allocated_bytes: 20 * GIB,
            trouble: String::new(),
        }],
        layers,
    }
}

fn layer(id: &str, parent: &str, volume: &str, snapshots: &[&str]) -> Layer {
    let whole = |id: &str| if id.is_empty() { String::new() } else { id.repeat(32) };
    Layer {
        layer_id: whole(id),
        pool: "main".into(),
        path: format!("/srv/{id}"),
        format: if parent.is_empty() { "raw" } else { "qcow2" }.into(),
        capacity_bytes: GIB,
        allocated_bytes: 3 * MIB,
        parent_id: whole(parent),
        volume_id: volume.into(),
        snapshot_ids: snapshots.iter().map(|&id| id.into()).collect(),
        ..Default::default()
    }
}
