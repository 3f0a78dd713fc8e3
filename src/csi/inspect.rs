//! The Inspect service: what a person wants to know of the volumes of a node.

use super::{
    Edge, known, parse,
    pb::inspect::{self as pb, inspect_server},
};
use crate::{
    blocking::blocking,
    node::{Attachments, Node, Relayed, When},
    relay,
    volume::{Claim, Entry, Layer, Outcome, Volume, VolumeId},
};
use std::{path::Path, pin::Pin, sync::Arc};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

/// The Inspect service.
#[derive(Debug)]
pub struct Inspect(pub Edge);

type Answer = Pin<Box<dyn Stream<Item = Result<pb::Volume, Status>> + Send>>;

#[tonic::async_trait]
impl inspect_server::Inspect for Inspect {
    type ListVolumesStream = Answer;

    async fn list_volumes(
        &self,
        request: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<Answer>, Status> {
        let node = self.0.node.clone();
        let asked = request.into_inner().volume_id;
        let entries = if asked.is_empty() {
            node.volumes().list(None, usize::MAX)
        } else {
            let id = known(parse::volume_id(asked)?)?;
            let entry = node.volumes().entry(&id)?;
            vec![(id, entry)]
        };
        let relayed = node.relayed().await;
        let tell = move || {
            entries.iter().map(|(id, entry)| Ok(tell(&node, &relayed, id, entry))).collect()
        };
        let volumes: Vec<_> = blocking(tell).await;
        Ok(Response::new(Box::pin(tokio_stream::iter(volumes))))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn upgrade_daemon(
        &self,
        request: Request<pb::UpgradeDaemonRequest>,
    ) -> Result<Response<pb::UpgradeDaemonResponse>, Status> {
        let request = request.into_inner();
        let id = self.0.find(parse::volume_id(request.volume_id)?)?.id().clone();
        let when = if request.force { When::Always } else { When::Outdated };
        let work = |claim: Arc<Claim>, node: Node| async move { node.upgrade(&claim, when).await };
        let upgrade = self.0.claimed(&id, work).await?;
        Ok(Response::new(pb::UpgradeDaemonResponse {
            replaced: upgrade.outcome == Outcome::Done,
            pid: upgrade.daemon.pid(),
            version: upgrade.daemon.version().to_owned(),
            stopped_us: u64::try_from(upgrade.stopped.as_micros()).unwrap_or(u64::MAX),
        }))
    }
}

fn tell(node: &Node, relayed: &Relayed, id: &VolumeId, entry: &Entry) -> pb::Volume {
    match entry {
        Entry::Volume(volume) => pb::Volume {
            attachment: node.attachment(id).map(|attachment| pb::Attachment {
                relay: relayed.get(&id.run_key()).map(tell_relay),
                ..tell_attachment(attachment)
            }),
            ..tell_volume(volume)
        },
        Entry::Damaged { pool, reason } => pb::Volume {
            volume_id: id.to_string(),
            pool: pool.to_string(),
            damage: reason.clone(),
            ..Default::default()
        },
    }
}

fn tell_volume(volume: &Volume) -> pb::Volume {
    let layers = volume.layers();
    pb::Volume {
        volume_id: volume.id().to_string(),
        name: volume.name().to_owned(),
        pool: volume.pool().to_string(),
        capacity_bytes: volume.size().into(),
        allocated_bytes: layers.iter().map(Layer::allocated).sum::<crate::units::Bytes>().into(),
        parameters: volume.parameters().given().clone().into_iter().collect(),
        layers: layers
            .iter()
            .map(|layer| pb::Layer {
                path: text(&layer.path),
                format: layer.format.as_str().to_owned(),
                capacity_bytes: layer.size.into(),
                allocated_bytes: layer.allocated().into(),
            })
            .collect(),
        attachment: None,
        damage: String::new(),
    }
}

fn tell_attachment(attachment: Attachments) -> pb::Attachment {
    let (daemon, trouble) = match attachment.daemon {
        Ok(daemon) => {
            let daemon = pb::Daemon {
                pid: daemon.pid(),
                version: daemon.version().to_owned(),
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
        socket: text(&attachment.socket),
        daemon,
        trouble,
        relay: None,
        warning: attachment.warning,
    }
}

fn tell_relay(relayed: &relay::Relayed) -> pb::Relay {
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
