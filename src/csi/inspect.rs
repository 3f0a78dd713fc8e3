//! The Inspect service: what a person wants to know of the volumes of a node.

mod tell;

use super::{
    Edge, known, parse,
    pb::inspect::{self as pb, inspect_server, thing},
};
use crate::{
    blocking::blocking,
    node::{Node, When},
    volume::{Claim, Error, Outcome},
};
use std::{pin::Pin, sync::Arc};
use tell::{Chains, Teller};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

/// The Inspect service.
#[derive(Debug)]
pub struct Inspect(pub Edge);

type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl inspect_server::Inspect for Inspect {
    type ListVolumesStream = Answer<pb::Volume>;
    type ListSnapshotsStream = Answer<pb::Snapshot>;
    type LookStream = Answer<pb::Thing>;

    async fn list_volumes(
        &self,
        request: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<Answer<pb::Volume>>, Status> {
        let asked = request.into_inner().volume_id;
        if asked.is_empty() {
            return Ok(stream(self.look(Chains::Told, Teller::volumes).await));
        }
        let id = known(parse::volume_id(asked)?)?;
        let of_it = id.clone();
        let found = self.look(Chains::Told, move |teller| teller.volume(&of_it)).await;
        Ok(stream(vec![found.ok_or(Error::NotFound(id))?]))
    }

    async fn list_snapshots(
        &self,
        request: Request<pb::ListSnapshotsRequest>,
    ) -> Result<Response<Answer<pb::Snapshot>>, Status> {
        let pb::ListSnapshotsRequest { snapshot_id, source_volume_id } = request.into_inner();
        let mut found = if snapshot_id.is_empty() {
            self.look(Chains::LeftOut, Teller::snapshots).await
        } else {
            let id = parse::snapshot_id("snapshot_id", snapshot_id)??;
            let of_it = id.clone();
            let found = self.look(Chains::Told, move |teller| teller.snapshot(&of_it)).await;
            vec![found.ok_or(Error::NoSnapshot(id))?]
        };
        if !source_volume_id.is_empty() {
            found.retain(|snapshot| snapshot.source_volume_id == source_volume_id);
        }
        Ok(stream(found))
    }

    async fn look(
        &self,
        _request: Request<pb::LookRequest>,
    ) -> Result<Response<Answer<pb::Thing>>, Status> {
        let run_directory = self.0.node.run_dir().display().to_string();
        let things = self.look(Chains::LeftOut, |teller| {
            let driver = [thing::Thing::Driver(pb::Driver { run_directory })].into_iter();
            let pools = teller.pools().into_iter().map(thing::Thing::Pool);
            let layers = teller.layers().into_iter().map(thing::Thing::Layer);
            let volumes = teller.volumes().into_iter().map(thing::Thing::Volume);
            let snapshots = teller.snapshots().into_iter().map(thing::Thing::Snapshot);
            let all = driver.chain(pools).chain(layers).chain(volumes).chain(snapshots);
            all.map(|thing| pb::Thing { thing: Some(thing) }).collect()
        });
        Ok(stream(things.await))
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
            version: upgrade.daemon.version(),
            stopped_us: u64::try_from(upgrade.stopped.as_micros()).unwrap_or(u64::MAX),
        }))
    }
}

impl Inspect {
    /// Tells of what there is now, on a thread that may block.
    async fn look<T: Send + 'static>(
        &self,
        chains: Chains,
        tell: impl FnOnce(&Teller) -> T + Send + 'static,
    ) -> T {
        let node: Node = self.0.node.clone();
        let relayed = node.relayed().await;
        blocking(move || tell(&Teller::new(node, relayed, chains))).await
    }
}

fn stream<T: Send + 'static>(all: Vec<T>) -> Response<Answer<T>> {
    Response::new(Box::pin(tokio_stream::iter(all.into_iter().map(Ok))))
}
