//! `qsd-csi snapshot`: names for what volumes were at a moment, for people.

use super::{
    client::{Driver, Ranges},
    json,
    output::{Output, layer, quoted, say, say_done, say_json, say_rows, size, spent, table},
};
use crate::csi::pb::{csi as pb, inspect};
use clap::Subcommand;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    driver: Driver,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Take a snapshot of a volume, also under its VM
    Create {
        /// Its name; also its id, where that is possible
        name: String,
        /// The volume to take it of
        #[arg(long, value_name = "VOLUME")]
        volume: String,
    },
    /// List all snapshots of the node, or those of a volume
    List {
        /// The volume they were taken of
        #[arg(long, value_name = "VOLUME")]
        volume: Option<String>,
    },
    /// Tell all of one snapshot
    Show {
        /// Its id
        snapshot_id: String,
    },
    /// Tell which bytes of a volume may have changed from one snapshot to another
    Diff {
        /// The earlier snapshot
        base: String,
        /// The later one
        target: String,
    },
    /// Tell which bytes of a snapshot hold data; all others are zeroes
    Data {
        /// Its id
        snapshot_id: String,
    },
    /// Delete a snapshot; what was made from it stays
    Delete {
        /// Its id
        snapshot_id: String,
    },
}

pub(super) async fn run(args: Args) -> anyhow::Result<()> {
    let mut client = args.driver.connect().await?;
    let output = args.driver.output;
    match args.command {
        Command::Create { name, volume } => {
            created(output, client.create_snapshot(name, volume).await?)
        }
        Command::List { volume } => list(output, client.snapshots(volume).await?),
        Command::Show { snapshot_id } => show(output, client.snapshot(snapshot_id).await?),
        Command::Diff { base, target } => tell_ranges(output, &client.changed(base, target).await?),
        Command::Data { snapshot_id } => tell_ranges(output, &client.held(snapshot_id).await?),
        Command::Delete { snapshot_id } => {
            // CSI calls a snapshot that is not there deleted; a person may have mistyped.
            client.snapshot(snapshot_id.clone()).await?;
            client.delete_snapshot(snapshot_id.clone()).await?;
            say_done(output, "snapshot", &snapshot_id, "deleted")
        }
    }
}

fn created(output: Output, snapshot: pb::Snapshot) -> anyhow::Result<()> {
    let pb::Snapshot { snapshot_id, source_volume_id, size_bytes, creation_time, .. } = snapshot;
    match output {
        Output::Json => say_json(&serde_json::json!({
            "snapshot_id": snapshot_id,
            "source_volume_id": source_volume_id,
            "capacity_bytes": size_bytes,
            "created": creation_time.map(json::time),
        })),
        Output::Table => {
            let size = size(size_bytes);
            say(&format!("snapshot {snapshot_id} of volume {source_volume_id} has {size}"))?;
            let id = quoted(&snapshot_id);
            say(&format!("next: qsd-csi volume create NAME --from-snapshot {id}"))
        }
    }
}

fn list(output: Output, snapshots: Vec<inspect::Snapshot>) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(&snapshots.into_iter().map(json::Snapshot::from).collect::<Vec<_>>());
    }
    if snapshots.is_empty() {
        return say("no snapshots; take one, also while a VM writes: \
                    qsd-csi snapshot create NAME --volume VOLUME");
    }
    let header = ["SNAPSHOT", "VOLUME", "SIZE", "OWN", "SHARED", "CREATED", "POOL"];
    let row = |snapshot: inspect::Snapshot| {
        let created = match snapshot.created {
            Some(created) => json::time(created),
            None => "damaged".to_owned(),
        };
        vec![
            snapshot.snapshot_id,
            snapshot.source_volume_id,
            size(snapshot.capacity_bytes),
            size(snapshot.own_bytes),
            size(snapshot.allocated_bytes - snapshot.own_bytes),
            created,
            snapshot.pool,
        ]
    };
    say(&table(&header, snapshots.into_iter().map(row)))
}

fn show(output: Output, snapshot: inspect::Snapshot) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(&json::Snapshot::from(snapshot));
    }
    let mut rows = vec![
        ("snapshot", snapshot.snapshot_id),
        ("name", snapshot.name),
        ("volume", snapshot.source_volume_id),
        ("pool", snapshot.pool),
        ("size", size(snapshot.capacity_bytes)),
        ("allocated", spent(snapshot.own_bytes, snapshot.allocated_bytes)),
    ];
    rows.extend(snapshot.created.map(|created| ("created", json::time(created))));
    if !snapshot.damage.is_empty() {
        rows.push(("damage", snapshot.damage));
    }
    rows.extend(snapshot.layers.iter().map(|one| ("layer", layer(one))));
    say_rows(&rows)
}

fn tell_ranges(output: Output, ranges: &Ranges) -> anyhow::Result<()> {
    let Ranges { capacity, blocks } = ranges;
    let sum: i64 = blocks.iter().map(|block| block.size_bytes).sum();
    if output == Output::Json {
        let range = |block: &pb::BlockMetadata| serde_json::json!({ "byte_offset": block.byte_offset, "size_bytes": block.size_bytes });
        return say_json(&serde_json::json!({
            "capacity_bytes": capacity,
            "sum_bytes": sum,
            "ranges": blocks.iter().map(range).collect::<Vec<_>>(),
        }));
    }
    if !blocks.is_empty() {
        // There may be a million of them: too many for a table that measures each.
        let width = capacity.to_string().len().max("OFFSET".len());
        let row = |block: &pb::BlockMetadata| {
            format!("\n{:<width$}  {}", block.byte_offset, block.size_bytes)
        };
        let rows: String = blocks.iter().map(row).collect();
        say(&format!("{:<width$}  BYTES{rows}", "OFFSET"))?;
    }
    let count = match blocks.len() {
        1 => "1 range".to_owned(),
        count => format!("{count} ranges"),
    };
    say(&format!("{count}, {} of {}", size(sum), size(*capacity)))
}
