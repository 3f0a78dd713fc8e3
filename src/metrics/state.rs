//! What a node is like now, and what happened on it, as metrics.

use super::text::{Family, Kind, Text};
use crate::{
    node::{Cause, Counted, Fate, Node, Part, Staged, View},
    relay,
    units::Bytes,
    volume::{Entry, LayerId, Sight, SnapshotEntry, Volume, Way},
};
use std::{collections::BTreeMap, time::Duration};

/// Writes all there is to see of a node.
pub(super) async fn write(text: &mut Text, node: &Node) {
    let view = node.view().await;
    write_parts(text, &view, node.has_supervisor());
    write_pools(text, &view);
    write_daemons(text, &view.staged, &node.counted());
    write_relay(text, &view);
    let stalls = "Time for which requests of VMs were held up by the loss of a daemon or a move";
    text.family("qsd_csi_relay_stall_seconds", Kind::Histogram, stalls)
        .durations(&[], &node.counted().stalls);
    if let Some(sight) = &view.sight {
        write_volumes(text, sight, &view);
        write_jobs(text, sight);
    }
}

fn write_parts(text: &mut Text, view: &View, has_supervisor: bool) {
    let help = "Whether a supervisor answers: without one no daemon can be started";
    text.gauge("qsd_csi_supervisor_up", help, u8::from(has_supervisor));
    if view.staged.iter().any(|one| one.is_relayed) {
        let help = "Whether the relay answers; told while volumes are staged that need it";
        text.gauge("qsd_csi_relay_up", help, u8::from(view.relayed.is_some()));
    }
    let help = "Whether a part of these metrics is missing because nobody answered in time";
    let mut family = text.family("qsd_csi_metrics_late", Kind::Gauge, help);
    for part in Part::ALL {
        family.value(&[("part", part.as_str())], u8::from(view.late.contains(&part)));
    }
}

fn write_pools(text: &mut Text, view: &View) {
    let mut each = |name, help: &str, value: &dyn Fn(&crate::volume::PoolName) -> Option<u64>| {
        let mut family = text.family(name, Kind::Gauge, help);
        for (pool, _) in &view.pools {
            if let Some(value) = value(pool) {
                family.value(&[("pool", pool.as_str())], value);
            }
        }
    };
    let space = |pool: &_| {
        let (_, space) = view.pools.iter().find(|(other, _)| other == pool)?;
        space.as_ref().ok().copied()
    };
    let help = "Whether the pool is there, takes writes, and its disk answers";
    each("qsd_csi_pool_up", help, &|pool| Some(u64::from(space(pool).is_some())));
    let help = "Size of the file system of the pool";
    each("qsd_csi_pool_size_bytes", help, &|pool| Some(space(pool)?.total.count()));
    let help = "Free bytes of the file system of the pool";
    each("qsd_csi_pool_free_bytes", help, &|pool| Some(space(pool)?.free.count()));
    let help = "What the pool spends on its layers";
    each("qsd_csi_pool_allocated_bytes", help, &|pool| {
        Some(view.allocated.get(pool)?.values().copied().sum::<Bytes>().count())
    });
    let help = "Sum of the sizes of the volumes of the pool";
    each("qsd_csi_pool_promised_bytes", help, &|pool| {
        let own = usable(view.sight.as_ref()?).filter(|volume| volume.pool() == pool);
        Some(own.map(Volume::size).sum::<Bytes>().count())
    });
    let help = "Layers in the pool";
    each("qsd_csi_layers", help, &|pool| {
        let layers = view.sight.as_ref()?.layers.values();
        u64::try_from(layers.filter(|one| one.pool == *pool).count()).ok()
    });
}

fn write_daemons(text: &mut Text, staged: &[Staged], counted: &Counted) {
    let up = staged.iter().filter(|one| one.version.is_some()).count();
    text.gauge("qsd_csi_daemons", "Staged volumes that a daemon serves", up);
    let help = "Staged volumes that no daemon serves";
    text.gauge("qsd_csi_daemons_down", help, staged.len() - up);
    let mut versions = BTreeMap::<_, u64>::new();
    for version in staged.iter().filter_map(|one| one.version.as_ref()) {
        *versions.entry(version.as_str()).or_default() += 1;
    }
    let help = "Daemons by the version of qemu-storage-daemon that they run";
    let mut family = text.family("qsd_csi_daemons_by_version", Kind::Gauge, help);
    for (version, count) in versions {
        family.value(&[("version", version)], count);
    }
    let help = "Daemons that were replaced by another, by the reason";
    let mut family = text.family("qsd_csi_daemon_restarts_total", Kind::Counter, help);
    for cause in Cause::ALL {
        family.value(&[("reason", cause.as_str())], counted.restarts(cause));
    }
    let help = "Daemons of a staged volume that were replaced by another";
    let mut family = text.family("qsd_csi_volume_daemon_restarts_total", Kind::Counter, help);
    for one in staged {
        family.value(&[("volume", one.volume.as_str())], one.restarts);
    }
    text.gauge("qsd_csi_volumes_staged", "Volumes that are staged", staged.len());
    let published = staged.iter().filter(|one| one.targets > 0).count();
    text.gauge("qsd_csi_volumes_published", "Volumes that are published", published);
    let help = "Background work that ended: merges of layers and copies for clones";
    let mut family = text.family("qsd_csi_jobs_ended_total", Kind::Counter, help);
    for way in Way::NAMES {
        for fate in Fate::ALL {
            let labels = [("way", way), ("outcome", fate.as_str())];
            family.value(&labels, counted.jobs(way, fate));
        }
    }
}

/// What the relay tells of each volume that it serves.
fn write_relay(text: &mut Text, view: &View) {
    let Some(relayed) = &view.relayed else { return };
    let known: Vec<_> = view.staged.iter().map(|one| &one.volume).collect();
    let all: Vec<_> = known
        .into_iter()
        .filter_map(|id| Some((id.as_str(), relayed.get(&id.run_key())?)))
        .collect();
    let mut each = |name, kind, help: &str, value: &dyn Fn(&relay::Relayed) -> f64| {
        let mut family = text.family(name, kind, help);
        for (volume, one) in &all {
            family.value(&[("volume", volume)], value(one));
        }
    };
    let front = |one: &relay::Relayed, value: fn(&relay::FrontEnd) -> u64| {
        one.front_end.as_ref().map(value).unwrap_or_default()
    };
    let help = "Since when a VM is connected, in seconds since 1970; 0 if none is";
    each("qsd_csi_relay_connected_timestamp_seconds", Kind::Gauge, help, &|one| {
        float(front(one, |front| front.since))
    });
    let help = "Requests of a VM without an answer";
    each("qsd_csi_relay_requests_in_flight", Kind::Gauge, help, &|one| {
        float(front(one, |front| front.in_flight))
    });
    let help = "How long the oldest of them has been waiting at least";
    each("qsd_csi_relay_oldest_request_seconds", Kind::Gauge, help, &|one| {
        Duration::from_millis(front(one, |front| front.oldest_ms)).as_secs_f64()
    });
    let help = "The longest time requests were held up by the loss of a daemon or a move";
    each("qsd_csi_relay_longest_stall_seconds", Kind::Gauge, help, &|one| {
        Duration::from_micros(one.longest_stall_us).as_secs_f64()
    });
    let help = "Daemons that were lost and replaced under a VM";
    each("qsd_csi_relay_daemons_lost_total", Kind::Counter, help, &|one| float(one.losses));
    let help = "Moves to another daemon under a VM";
    each("qsd_csi_relay_handovers_total", Kind::Counter, help, &|one| float(one.handovers));
    let help = "Connections refused because there was one, or the volume was in use as a file";
    each("qsd_csi_relay_connections_refused_total", Kind::Counter, help, &|one| float(one.refused));
}

fn write_volumes(text: &mut Text, sight: &Sight, view: &View) {
    let usable: Vec<_> = usable(sight).collect();
    text.gauge("qsd_csi_volumes", "Volumes that can be used", usable.len());
    let help = "Volumes whose record or layer is damaged";
    text.gauge("qsd_csi_volumes_damaged", help, sight.volumes.len() - usable.len());
    let is_whole = |entry: &&SnapshotEntry| matches!(entry, SnapshotEntry::Snapshot(_));
    let snapshots = sight.snapshots.values().filter(is_whole).count();
    text.gauge("qsd_csi_snapshots", "Snapshots that can be used", snapshots);
    let help = "Snapshots whose record or layer is damaged";
    text.gauge("qsd_csi_snapshots_damaged", help, sight.snapshots.len() - snapshots);
    let mut each = |name, help: &str, value: &dyn Fn(&Volume) -> Option<u64>| {
        let mut family = text.family(name, Kind::Gauge, help);
        for volume in &usable {
            if let Some(value) = value(volume) {
                let labels = [("volume", volume.id().as_str()), ("pool", volume.pool().as_str())];
                family.value(&labels, value);
            }
        }
    };
    let help = "Size of a volume";
    each("qsd_csi_volume_size_bytes", help, &|volume| Some(volume.size().count()));
    let help = "Layers that a volume stands on, its own active one included";
    each("qsd_csi_volume_layers", help, &|volume| u64::try_from(volume.layers().len()).ok());
    let help = "What the pool spends on a volume; layers that others need too count in full";
    each("qsd_csi_volume_allocated_bytes", help, &|volume| {
        let spent = view.allocated.get(volume.pool())?;
        let layers = volume.layers().iter().filter_map(|layer| spent.get(&layer.id).copied());
        Some(layers.sum::<Bytes>().count())
    });
    if let Some(conditions) = &view.conditions {
        let help = "Whether something is wrong with a volume; its condition says what";
        let mut family = text.family("qsd_csi_volume_abnormal", Kind::Gauge, help);
        for (id, condition) in conditions {
            family.value(&[("volume", id.as_str())], u8::from(condition.is_abnormal()));
        }
    }
}

fn write_jobs(text: &mut Text, sight: &Sight) {
    let jobs = sight.layers.values().filter_map(|one| Some((one, one.job.as_ref()?)));
    let jobs: Vec<_> = jobs.collect();
    let help = "Background work under way: merges of layers and copies for clones";
    let mut family = text.family("qsd_csi_jobs", Kind::Gauge, help);
    for way in Way::NAMES {
        family
            .value(&[("way", way)], jobs.iter().filter(|(_, job)| job.way.as_str() == way).count());
    }
    let failing = sight.layers.values().filter(|one| one.trouble.is_some()).count();
    let help = "Layers with which background work failed; it is tried again";
    text.gauge("qsd_csi_jobs_failing", help, failing);
    let write = |mut family: Family<'_>, value: &dyn Fn(&crate::volume::Job) -> Bytes| {
        for (standing, job) in &jobs {
            let layer = standing.layer.id.to_string();
            let volume = named_after(standing.layer.id, sight);
            let labels =
                [("volume", volume.as_str()), ("layer", layer.as_str()), ("way", job.way.as_str())];
            family.value(&labels, value(job).count());
        }
    };
    let help = "How far background work has come";
    write(text.family("qsd_csi_job_processed_bytes", Kind::Gauge, help), &|job| job.done);
    let help = "How far it has to go";
    write(text.family("qsd_csi_job_size_bytes", Kind::Gauge, help), &|job| job.total);
}

/// The volume that stands on a layer; empty where several do, or only snapshots.
fn named_after(layer: LayerId, sight: &Sight) -> String {
    let stands = |volume: &&Volume| volume.layers().iter().any(|other| other.id == layer);
    let mut all = usable(sight).filter(stands);
    match (all.next(), all.next()) {
        (Some(volume), None) => volume.id().to_string(),
        (Some(_), Some(_)) | (None, _) => String::new(),
    }
}

fn usable(sight: &Sight) -> impl Iterator<Item = &Volume> {
    sight.volumes.values().filter_map(|entry| match entry {
        Entry::Volume(volume) => Some(&**volume),
        Entry::Damaged { .. } => None,
    })
}

/// Requests, losses and seconds since 1970 fit into 32 bits, until 2106.
fn float(count: u64) -> f64 {
    u32::try_from(count).map_or(f64::from(u32::MAX), f64::from)
}
