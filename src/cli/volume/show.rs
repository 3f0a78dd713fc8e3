//! `list` and `show`: what there is to tell of volumes.

use super::state;
use crate::{
    cli::{
        json,
        output::{Output, layer, say, say_json, say_rows, size, spent, table},
    },
    csi::pb::inspect::{self, volume::Source},
};
use std::{
    collections::BTreeMap,
    time::{Duration, UNIX_EPOCH},
};

pub(super) fn list(output: Output, volumes: Vec<inspect::Volume>) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(&volumes.into_iter().map(json::Volume::from).collect::<Vec<_>>());
    }
    if volumes.is_empty() {
        return say("no volumes; create one: qsd-csi volume create NAME --size 10Gi");
    }
    let header = ["VOLUME", "SIZE", "OWN", "SHARED", "POOL", "STATE"];
    let row = |volume: inspect::Volume| {
        let state = lasting(&volume);
        vec![
            volume.volume_id,
            size(volume.capacity_bytes),
            size(volume.own_bytes),
            size(volume.allocated_bytes - volume.own_bytes),
            volume.pool,
            state,
        ]
    };
    say(&table(&header, volumes.into_iter().map(row)))
}

/// The state of a volume, and whether it goes with its pod.
fn lasting(volume: &inspect::Volume) -> String {
    let lasting = if volume.ephemeral { ", ephemeral" } else { "" };
    format!("{}{lasting}", state(volume))
}

pub(super) fn show(output: Output, volume: inspect::Volume) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(&json::Volume::from(volume));
    }
    let mut rows = vec![
        ("volume", volume.volume_id.clone()),
        ("name", volume.name.clone()),
        ("pool", volume.pool.clone()),
        ("size", size(volume.capacity_bytes)),
        ("allocated", spent(volume.own_bytes, volume.allocated_bytes)),
        ("state", lasting(&volume)),
    ];
    rows.extend(source(&volume).map(|source| ("source", source)));
    if !volume.damage.is_empty() {
        rows.push(("damage", volume.damage));
    }
    let parameters: BTreeMap<_, _> = volume.parameters.into_iter().collect();
    rows.extend(parameters.into_iter().map(|(key, value)| ("parameter", format!("{key}={value}"))));
    let limits: BTreeMap<_, _> = volume.limits.iter().collect();
    rows.extend(limits.into_iter().map(|(key, limit)| ("limit", format!("{key}={limit}"))));
    rows.extend(volume.layers.iter().map(|one| ("layer", layer(one))));
    rows.extend(volume.attachment.map(tell_attachment).into_iter().flatten());
    say_rows(&rows)
}

/// What a volume was made from, and how it stands to that.
fn source(volume: &inspect::Volume) -> Option<String> {
    let source = match volume.source.as_ref()? {
        Source::SourceSnapshotId(id) => format!("snapshot {id}"),
        Source::SourceVolumeId(id) => format!("volume {id}"),
    };
    let is_copying = volume.layers.iter().any(|layer| layer.detaching);
    let state = match volume.copy_mode.as_str() {
        "clone" if is_copying => ", still needed",
        "clone" => ", not needed any more",
        _ => "",
    };
    Some(format!("{source}, {}{state}", volume.copy_mode))
}

fn tell_attachment(attachment: inspect::Attachment) -> Vec<(&'static str, String)> {
    let mut rows = vec![("staged at", attachment.staging_path)];
    rows.extend(attachment.target_paths.into_iter().map(|path| ("published at", path)));
    rows.push(("as", attachment.form));
    if !attachment.socket.is_empty() {
        rows.push(("socket", attachment.socket));
    }
    if let Some(daemon) = attachment.daemon {
        rows.push(("daemon", format!("pid {}, QEMU {}", daemon.pid, daemon.version)));
        rows.push(("restarts", daemon.restarts.to_string()));
        rows.push(("monitor", daemon.monitor));
    } else {
        rows.push(("trouble", attachment.trouble));
    }
    if let Some(death) = attachment.last_death {
        let now = crate::clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ago = now.as_secs().saturating_sub(death.at);
        let inspect::Death { pid, how, times, .. } = death;
        rows.push((
            "last death",
            format!("{ago} s ago, pid {pid}, {how}; {times} since it was staged"),
        ));
    }
    if !attachment.warning.is_empty() {
        rows.push(("warning", attachment.warning));
    }
    rows.extend(attachment.relay.map(|relay| tell_relay(&relay)).into_iter().flatten());
    rows
}

fn tell_relay(relay: &inspect::Relay) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    match &relay.front_end {
        None => rows.push(("VM", "none is connected".to_owned())),
        Some(front) => {
            let now = crate::clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let since = now.saturating_sub(Duration::from_secs(front.connected_since));
            rows.push(("VM", format!("pid {}, connected for {} s", front.pid, since.as_secs())));
            let requests = match front.in_flight {
                0 => "none".to_owned(),
                count => format!("{count}, the oldest for at least {} ms", front.oldest_ms),
            };
            rows.push(("in flight", requests));
            if front.paused {
                rows.push(("paused", "requests are held back".to_owned()));
            }
        }
    }
    rows.push(("survived", format!("{} ends of daemons", relay.losses)));
    rows.push(("moved", format!("{} times", relay.handovers)));
    if relay.refused > 0 {
        rows.push(("refused", format!("{} second connections", relay.refused)));
    }
    if relay.longest_stall_us > 0 {
        let (last, worst) = (relay.last_stall_us, relay.longest_stall_us);
        rows.push(("stalls", format!("last {last} us, longest {worst} us")));
    }
    rows
}
