//! The gRPC edge: the only place that knows protobuf types and `Status`.
//!
//! Every handler parses, claims the volume, calls the domain, and answers. What changes anything
//! runs in a task of its own (`detached`), because tonic drops a handler whose client hangs up.

mod controller;
mod ephemeral;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod identity;
mod inspect;
mod metadata;
mod node;
mod parse;
mod status;

pub mod pb;
pub use controller::Controller;
pub use identity::Identity;
pub use inspect::Inspect;
pub use metadata::SnapshotMetadata;
pub use node::NodeService;

use crate::{
    node::Condition,
    volume::{Claim, Claimed, InvalidName, Volume, VolumeId},
};
use std::sync::Arc;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tracing::Instrument as _;

/// The name of the driver, as `CSIDriver` and every `StorageClass` write it.
pub const DRIVER: &str = "qsd-csi.io";

/// The topology key whose value is the name of the node.
pub const TOPOLOGY: &str = "topology.qsd-csi.io/node";

/// What all services share.
#[derive(Clone, Debug)]
pub struct Edge {
    node: crate::node::Node,
    tasks: TaskTracker,
}

impl Edge {
    /// The edge of this node.
    pub fn new(node: crate::node::Node) -> Self {
        Self { node, tasks: TaskTracker::new() }
    }

    /// Waits for what callers that hung up left running.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// The volume of this id.
    fn find(&self, id: Result<VolumeId, InvalidName>) -> Result<Volume, Status> {
        Ok(self.node.volumes().find(&known(id)?)?)
    }

    /// The condition of a volume.
    async fn condition(&self, id: &VolumeId) -> pb::csi::VolumeCondition {
        let mut conditions = self.conditions(vec![id.clone()]).await;
        conditions.pop().expect("as many conditions as volumes")
    }

    /// The conditions of these volumes, in their order.
    async fn conditions(&self, ids: Vec<VolumeId>) -> Vec<pb::csi::VolumeCondition> {
        let told = |condition: Condition| pb::csi::VolumeCondition {
            abnormal: condition.is_abnormal(),
            message: condition.to_string(),
        };
        self.node.conditions(ids).await.into_iter().map(told).collect()
    }

    /// Claims the volume or snapshot, so that nobody else works on it until `work` ends, and runs
    /// `work` to its end even if the client hangs up.
    async fn claimed<Id, T, E, W>(
        &self,
        id: &Id,
        work: impl FnOnce(Arc<Claim<Id>>, crate::node::Node) -> W,
    ) -> Result<T, Status>
    where
        Id: Clone + Into<Claimed>,
        T: Send + 'static,
        E: Into<Status> + Send + 'static,
        W: Future<Output = Result<T, E>> + Send + 'static,
    {
        let claim = Arc::new(self.node.claim(id).await?);
        let work = work(claim, self.node.clone()).in_current_span();
        let outcome = self.tasks.spawn(work).await;
        let outcome = outcome.map_err(|died| Status::internal(format!("a task died: {died}")))?;
        outcome.map_err(Into::into)
    }
}

/// The id, if it is one of ours; another is unknown, not invalid.
fn known(id: Result<VolumeId, InvalidName>) -> Result<VolumeId, Status> {
    Ok(id?)
}
