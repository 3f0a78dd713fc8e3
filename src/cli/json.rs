//! What commands say to scripts: the driver's answers as JSON, sizes in bytes. What is not so is
//! null.

use super::volume::state;
use crate::csi::pb::inspect;
use prost_types::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;

/// A volume.
#[expect(clippy::struct_field_names, reason = "CSI's own name, as in every answer")]
#[derive(Serialize)]
pub(super) struct Volume {
    volume_id: String,
    name: String,
    pool: String,
    capacity_bytes: i64,
    allocated_bytes: i64,
    own_bytes: i64,
    state: &'static str,
    ephemeral: bool,
    source: Option<Source>,
    copy_mode: Option<String>,
    limits: BTreeMap<String, u64>,
    parameters: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layers: Vec<Layer>,
    attachment: Option<Attachment>,
    damage: Option<String>,
}

/// What a volume was made from.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Source {
    SnapshotId(String),
    VolumeId(String),
}

/// A snapshot.
#[expect(clippy::struct_field_names, reason = "CSI's own name, as in every answer")]
#[derive(Serialize)]
pub(super) struct Snapshot {
    snapshot_id: String,
    name: String,
    pool: String,
    source_volume_id: String,
    capacity_bytes: i64,
    created: Option<String>,
    allocated_bytes: i64,
    own_bytes: i64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layers: Vec<Layer>,
    damage: Option<String>,
}

/// A layer.
#[expect(clippy::struct_field_names, reason = "as with volumes and snapshots")]
#[derive(Serialize)]
pub(super) struct Layer {
    layer_id: String,
    pool: String,
    path: String,
    format: String,
    capacity_bytes: i64,
    allocated_bytes: i64,
    parent_id: Option<String>,
    frozen: bool,
    volume_id: Option<String>,
    snapshot_ids: Vec<String>,
    detaching: bool,
    job: Option<Job>,
    trouble: Option<String>,
}

#[derive(Serialize)]
struct Job {
    kind: String,
    done_bytes: i64,
    total_bytes: i64,
}

/// A pool.
#[derive(Serialize)]
pub(super) struct Pool {
    name: String,
    directory: String,
    total_bytes: i64,
    free_bytes: i64,
    allocated_bytes: i64,
    trouble: Option<String>,
}

#[derive(Serialize)]
struct Attachment {
    staging_path: String,
    target_paths: Vec<String>,
    form: String,
    socket: Option<String>,
    daemon: Option<Daemon>,
    trouble: Option<String>,
    warning: Option<String>,
    last_death: Option<Death>,
    relay: Option<Relay>,
}

#[derive(Serialize)]
struct Death {
    pid: i32,
    how: String,
    at: u64,
    times: u64,
}

#[derive(Serialize)]
struct Relay {
    front_end: Option<FrontEnd>,
    losses: u64,
    handovers: u64,
    refused: u64,
    last_stall_us: u64,
    longest_stall_us: u64,
}

#[derive(Serialize)]
struct FrontEnd {
    pid: i32,
    connected_since: u64,
    in_flight: u64,
    oldest_ms: u64,
    paused: bool,
}

#[derive(Serialize)]
struct Daemon {
    pid: i32,
    version: String,
    monitor: String,
    restarts: u64,
}

impl From<inspect::Volume> for Volume {
    fn from(volume: inspect::Volume) -> Self {
        let daemon = |daemon: inspect::Daemon| Daemon {
            pid: daemon.pid,
            version: daemon.version,
            monitor: daemon.monitor,
            restarts: daemon.restarts,
        };
        let front_end = |front: inspect::FrontEnd| FrontEnd {
            pid: front.pid,
            connected_since: front.connected_since,
            in_flight: front.in_flight,
            oldest_ms: front.oldest_ms,
            paused: front.paused,
        };
        let relay = |relay: inspect::Relay| Relay {
            front_end: relay.front_end.map(front_end),
            losses: relay.losses,
            handovers: relay.handovers,
            refused: relay.refused,
            last_stall_us: relay.last_stall_us,
            longest_stall_us: relay.longest_stall_us,
        };
        Self {
            state: state(&volume),
            volume_id: volume.volume_id,
            name: volume.name,
            pool: volume.pool,
            capacity_bytes: volume.capacity_bytes,
            allocated_bytes: volume.allocated_bytes,
            own_bytes: volume.own_bytes,
            source: volume.source.map(Source::from),
            ephemeral: volume.ephemeral,
            copy_mode: some(volume.copy_mode),
            limits: volume.limits.into_iter().collect(),
            parameters: volume.parameters.into_iter().collect(),
            layers: volume.layers.into_iter().map(Layer::from).collect(),
            attachment: volume.attachment.map(|attachment| Attachment {
                staging_path: attachment.staging_path,
                target_paths: attachment.target_paths,
                form: attachment.form,
                socket: some(attachment.socket),
                daemon: attachment.daemon.map(daemon),
                trouble: some(attachment.trouble),
                warning: some(attachment.warning),
                last_death: attachment.last_death.map(|death| {
                    let inspect::Death { pid, how, at, times } = death;
                    Death { pid, how, at, times }
                }),
                relay: attachment.relay.map(relay),
            }),
            damage: some(volume.damage),
        }
    }
}

impl From<inspect::volume::Source> for Source {
    fn from(source: inspect::volume::Source) -> Self {
        match source {
            inspect::volume::Source::SourceSnapshotId(id) => Self::SnapshotId(id),
            inspect::volume::Source::SourceVolumeId(id) => Self::VolumeId(id),
        }
    }
}

impl From<inspect::Snapshot> for Snapshot {
    fn from(snapshot: inspect::Snapshot) -> Self {
        Self {
            snapshot_id: snapshot.snapshot_id,
            name: snapshot.name,
            pool: snapshot.pool,
            source_volume_id: snapshot.source_volume_id,
            capacity_bytes: snapshot.capacity_bytes,
            created: snapshot.created.map(time),
            allocated_bytes: snapshot.allocated_bytes,
            own_bytes: snapshot.own_bytes,
            layers: snapshot.layers.into_iter().map(Layer::from).collect(),
            damage: some(snapshot.damage),
        }
    }
}

impl From<inspect::Layer> for Layer {
    fn from(layer: inspect::Layer) -> Self {
        let job = |job: inspect::Job| Job {
            kind: job.kind,
            done_bytes: job.done_bytes,
            total_bytes: job.total_bytes,
        };
        Self {
            layer_id: layer.layer_id,
            pool: layer.pool,
            path: layer.path,
            format: layer.format,
            capacity_bytes: layer.capacity_bytes,
            allocated_bytes: layer.allocated_bytes,
            parent_id: some(layer.parent_id),
            frozen: layer.volume_id.is_empty(),
            volume_id: some(layer.volume_id),
            snapshot_ids: layer.snapshot_ids,
            detaching: layer.detaching,
            job: layer.job.map(job),
            trouble: some(layer.trouble),
        }
    }
}

impl From<inspect::Pool> for Pool {
    fn from(pool: inspect::Pool) -> Self {
        Self {
            name: pool.name,
            directory: pool.directory,
            total_bytes: pool.total_bytes,
            free_bytes: pool.free_bytes,
            allocated_bytes: pool.allocated_bytes,
            trouble: some(pool.trouble),
        }
    }
}

/// The moment to the second, as in `2026-11-21T17:48:24Z`.
pub(super) fn time(time: Timestamp) -> String {
    Timestamp { nanos: 0, ..time }.to_string()
}

fn some(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}
