//! From the words of the domain to the messages of Inspect.

use super::pb;
use crate::{
    chain::Chain,
    node::{Attachments, Node, Relayed},
    pool::Pool,
    relay,
    units::Bytes,
    volume::{
        Content, Entry, Job, Layer, LayerId, Lifecycle, PoolName, Sight, Snapshot, SnapshotEntry,
        SnapshotId, Standing, Volume, VolumeId, Way,
    },
};
use std::path::Path;

/// Tells of what there was at one moment.
pub(super) struct Teller {
    node: Node,
    relayed: Relayed,
    sight: Sight,
    chains: Chains,
}

/// Whether layers are told with each volume and snapshot that stands on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chains {
    Told,
    /// They would be many: each snapshot of a volume stands on those before it.
    LeftOut,
}

impl Teller {
    pub(super) fn new(node: Node, relayed: Relayed, chains: Chains) -> Self {
        let sight = node.volumes().look();
        Self { node, relayed, sight, chains }
    }

    pub(super) fn pools(&self) -> Vec<pb::Pool> {
        let mut pools: Vec<_> = self.node.volumes().pools().iter().collect();
        pools.sort_by_key(|pool| pool.name());
        pools.into_iter().map(|pool| self.pool(pool)).collect()
    }

    fn pool(&self, pool: &Pool) -> pb::Pool {
        let (space, trouble) = match pool.space() {
            Ok(space) => (space, String::new()),
            Err(error) => (crate::pool::Space::default(), Chain(&error).to_string()),
        };
        pb::Pool {
            name: pool.name().to_string(),
            directory: text(pool.dir()),
            total_bytes: space.total.into(),
            free_bytes: space.free.into(),
            allocated_bytes: self.spent_by(pool.name()).into(),
            trouble,
        }
    }

    fn spent_by(&self, pool: &PoolName) -> Bytes {
        let own = self.sight.layers.values().filter(|standing| standing.pool == *pool);
        own.map(Standing::allocated).sum()
    }

    pub(super) fn layers(&self) -> Vec<pb::Layer> {
        self.sight.layers.values().map(layer).collect()
    }

    pub(super) fn volumes(&self) -> Vec<pb::Volume> {
        self.sight.volumes.iter().map(|(id, entry)| self.volume_entry(id, entry)).collect()
    }

    pub(super) fn volume(&self, id: &VolumeId) -> Option<pb::Volume> {
        Some(self.volume_entry(id, self.sight.volumes.get(id)?))
    }

    fn volume_entry(&self, id: &VolumeId, entry: &Entry) -> pb::Volume {
        match entry {
            Entry::Volume(volume) => pb::Volume {
                attachment: self.node.attachment(id).map(|one| pb::Attachment {
                    relay: self.relayed_as(&one).map(relay),
                    ..attachment(one)
                }),
                ..self.usable_volume(volume)
            },
            Entry::Damaged { pool, reason } => pb::Volume {
                volume_id: id.to_string(),
                pool: pool.to_string(),
                damage: reason.clone(),
                ..Default::default()
            },
        }
    }

    /// What the relay tells of a volume: of several VMs, of one that is there.
    fn relayed_as(&self, one: &Attachments) -> Option<&relay::Relayed> {
        let relayed = || one.relayed_as.iter().filter_map(|key| self.relayed.get(key));
        relayed().find(|relayed| relayed.front_end.is_some()).or_else(|| relayed().next())
    }

    fn usable_volume(&self, volume: &Volume) -> pb::Volume {
        let limits = volume.throttle().limits();
        let copy_mode = volume.content().map(|_| volume.parameters().copy_mode().as_str());
        pb::Volume {
            volume_id: volume.id().to_string(),
            name: volume.name().to_owned(),
            pool: volume.pool().to_string(),
            capacity_bytes: volume.size().into(),
            allocated_bytes: self.sight.allocated(volume.layers()).into(),
            parameters: volume.parameters().shown().into_iter().collect(),
            layers: self.chain(volume.layers()),
            attachment: None,
            damage: String::new(),
            own_bytes: self.sight.own(volume.layers()).into(),
            limits: limits.map(|(key, limit)| (key.to_owned(), limit)).collect(),
            copy_mode: copy_mode.unwrap_or_default().to_owned(),
            source: volume.content().map(source),
            ephemeral: volume.lifecycle() == Lifecycle::Ephemeral,
        }
    }

    pub(super) fn snapshots(&self) -> Vec<pb::Snapshot> {
        self.sight.snapshots.iter().map(|(id, entry)| self.snapshot_entry(id, entry)).collect()
    }

    pub(super) fn snapshot(&self, id: &SnapshotId) -> Option<pb::Snapshot> {
        Some(self.snapshot_entry(id, self.sight.snapshots.get(id)?))
    }

    fn snapshot_entry(&self, id: &SnapshotId, entry: &SnapshotEntry) -> pb::Snapshot {
        match entry {
            SnapshotEntry::Snapshot(snapshot) => self.usable_snapshot(snapshot),
            SnapshotEntry::Damaged { pool, reason } => pb::Snapshot {
                snapshot_id: id.to_string(),
                pool: pool.to_string(),
                damage: reason.clone(),
                ..Default::default()
            },
        }
    }

    fn usable_snapshot(&self, snapshot: &Snapshot) -> pb::Snapshot {
        pb::Snapshot {
            snapshot_id: snapshot.id().to_string(),
            name: snapshot.name().to_owned(),
            pool: snapshot.pool().to_string(),
            source_volume_id: snapshot.source().to_string(),
            capacity_bytes: snapshot.size().into(),
            created: Some(snapshot.created().into()),
            allocated_bytes: self.sight.allocated(snapshot.layers()).into(),
            own_bytes: self.sight.own(snapshot.layers()).into(),
            layers: self.chain(snapshot.layers()),
            damage: String::new(),
        }
    }

    fn chain(&self, layers: &[Layer]) -> Vec<pb::Layer> {
        match self.chains {
            Chains::Told => self.sight.standings(layers).map(layer).collect(),
            Chains::LeftOut => Vec::new(),
        }
    }
}

fn layer(standing: &Standing) -> pb::Layer {
    let Standing { layer, .. } = standing;
    let id = |id: &LayerId| id.to_string();
    pb::Layer {
        path: layer.place.to_string(),
        format: layer.format.as_str().to_owned(),
        capacity_bytes: layer.size.into(),
        allocated_bytes: standing.allocated().into(),
        layer_id: layer.id.to_string(),
        pool: standing.pool.to_string(),
        parent_id: standing.parent.as_ref().map(id).unwrap_or_default(),
        volume_id: standing.volume.as_ref().map(ToString::to_string).unwrap_or_default(),
        snapshot_ids: standing.snapshots.iter().map(ToString::to_string).collect(),
        detaching: standing.detaching,
        job: standing.job.as_ref().map(|one| job(one, standing)),
        trouble: standing.trouble.clone().unwrap_or_default(),
    }
}

fn job(job: &Job, standing: &Standing) -> pb::Job {
    let kind = match &job.way {
        Way::Stream { base: None, .. } if standing.detaching => "clone",
        way => way.as_str(),
    };
    pb::Job { kind: kind.to_owned(), done_bytes: job.done.into(), total_bytes: job.total.into() }
}

fn source(content: &Content) -> pb::volume::Source {
    match content {
        Content::Snapshot(id) => pb::volume::Source::SourceSnapshotId(id.to_string()),
        Content::Volume(id) => pb::volume::Source::SourceVolumeId(id.to_string()),
    }
}

fn attachment(attachment: Attachments) -> pb::Attachment {
    let (daemon, trouble) = match attachment.daemon {
        Ok(daemon) => {
            let daemon = pb::Daemon {
                pid: daemon.pid(),
                version: daemon.version(),
                monitor: text(&attachment.monitor),
                restarts: attachment.restarts,
            };
            (Some(daemon), String::new())
        }
        Err(trouble) => (None, trouble),
    };
    pb::Attachment {
        staging_path: text(&attachment.staging_path),
        target_paths: attachment.targets.iter().map(|target| text(target)).collect(),
        form: attachment.capability.used(),
        socket: attachment.socket.as_deref().map(text).unwrap_or_default(),
        daemon,
        trouble,
        relay: None,
        warning: attachment.warning,
        last_death: attachment.last_death.map(|death| pb::Death {
            pid: death.pid,
            how: death.how,
            at: death.at,
            times: death.times,
        }),
    }
}

fn relay(relayed: &relay::Relayed) -> pb::Relay {
    let front_end = relayed.front_end.as_ref().map(|front| pb::FrontEnd {
        pid: front.pid,
        connected_since: front.since,
        in_flight: front.in_flight,
        oldest_ms: front.oldest_ms,
        paused: front.paused,
    });
    pb::Relay {
        front_end,
        losses: relayed.losses,
        handovers: relayed.handovers,
        refused: relayed.refused,
        last_stall_us: relayed.last_stall_us,
        longest_stall_us: relayed.longest_stall_us,
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
