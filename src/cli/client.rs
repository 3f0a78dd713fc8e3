//! The calls that commands for people make, and what to do where one fails.

use super::{Endpoint, output::Output};
use crate::{
    csi::pb::{
        csi::{
            self as pb, controller_client::ControllerClient, node_client::NodeClient,
            snapshot_metadata_client::SnapshotMetadataClient,
        },
        inspect::{self, inspect_client::InspectClient, thing::Thing},
    },
    units::Bytes,
    volume::GRAIN,
};
use anyhow::{Context as _, anyhow};
use pb::{
    volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode},
    volume_content_source::{SnapshotSource, Type as Content, VolumeSource},
};
use std::{collections::BTreeMap, path::PathBuf};
use tonic::{
    Code, Status, Streaming,
    transport::{Channel, Endpoint as Address},
};

/// Which driver to ask, and how to answer.
#[derive(Debug, clap::Args)]
pub(super) struct Driver {
    /// Socket of the driver
    #[arg(
        long,
        global = true,
        value_name = "unix://PATH",
        env = "CSI_ENDPOINT",
        default_value = "unix:///run/qsd-csi/csi.sock"
    )]
    endpoint: Endpoint,
    /// How to answer
    #[arg(long, short, global = true, value_enum, default_value = "table")]
    pub(super) output: Output,
}

impl Driver {
    pub(super) async fn connect(&self) -> anyhow::Result<Client> {
        Client::connect(&self.endpoint).await
    }
}

/// What a call is about, and so where to look when it fails.
#[derive(Clone, Copy, Debug)]
enum About {
    Volume,
    Snapshot,
}

/// A volume that is to be made.
#[derive(Debug)]
pub(super) struct NewVolume {
    pub(super) name: String,
    /// Without it, the driver chooses: that of the source.
    pub(super) size: Option<Bytes>,
    pub(super) source: Option<Source>,
    pub(super) parameters: BTreeMap<String, String>,
}

/// What a volume is to be made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Snapshot(String),
    Volume(String),
}

/// Ranges of a snapshot, in ascending order.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// Size of the snapshot.
    pub(super) capacity: i64,
    pub(super) blocks: Vec<pb::BlockMetadata>,
}

/// Of what the parts of an answer tell.
impl FromIterator<(i64, Vec<pb::BlockMetadata>)> for Ranges {
    fn from_iter<I: IntoIterator<Item = (i64, Vec<pb::BlockMetadata>)>>(parts: I) -> Self {
        let mut all = Self::default();
        for (capacity, blocks) in parts {
            all.capacity = capacity;
            all.blocks.extend(blocks);
        }
        all
    }
}

/// All there is on a node.
#[derive(Debug, Default)]
pub(super) struct Things {
    /// The run directory of the driver, by one that tells it.
    pub(super) run_dir: Option<PathBuf>,
    pub(super) pools: Vec<inspect::Pool>,
    pub(super) layers: Vec<inspect::Layer>,
    pub(super) volumes: Vec<inspect::Volume>,
    pub(super) snapshots: Vec<inspect::Snapshot>,
}

pub(super) struct Client {
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    metadata: SnapshotMetadataClient<Channel>,
    inspect: InspectClient<Channel>,
}

impl Client {
    pub(super) async fn connect(endpoint: &Endpoint) -> anyhow::Result<Self> {
        let channel = Address::try_from(endpoint.to_string())?.connect().await;
        let channel = channel.map_err(|error| {
            let error = anyhow::Error::from(error);
            let cause = error.root_cause();
            anyhow!(
                "no driver answers at {endpoint}: {cause}\nnext: start one \
                 (qsd-csi standalone --help) or say where it is with --endpoint"
            )
        })?;
        Ok(Self {
            controller: ControllerClient::new(channel.clone()),
            node: NodeClient::new(channel.clone()),
            metadata: SnapshotMetadataClient::new(channel.clone()),
            inspect: InspectClient::new(channel),
        })
    }

    pub(super) async fn create(&mut self, new: NewVolume) -> anyhow::Result<pb::Volume> {
        let range = |size| pb::CapacityRange { required_bytes: i64::from(size), limit_bytes: 0 };
        let about = match &new.source {
            Some(Source::Snapshot(_)) => About::Snapshot,
            Some(Source::Volume(_)) | None => About::Volume,
        };
        let request = pb::CreateVolumeRequest {
            name: new.name,
            capacity_range: new.size.map(range),
            volume_capabilities: vec![capability()],
            parameters: new.parameters.into_iter().collect(),
            volume_content_source: new.source.map(content),
            ..Default::default()
        };
        let response = self.controller.create_volume(request).await.map_err(explain(about))?;
        response.into_inner().volume.context("the driver answered without a volume")
    }

    pub(super) async fn delete(&mut self, volume_id: String) -> anyhow::Result<()> {
        let request = pb::DeleteVolumeRequest { volume_id, ..Default::default() };
        self.controller.delete_volume(request).await.map(drop).map_err(explain(About::Volume))
    }

    /// Gives a volume this size; one that is larger is refused, as none shrinks.
    pub(super) async fn resize(&mut self, volume_id: String, size: Bytes) -> anyhow::Result<Bytes> {
        // Any larger size would do for CSI without a limit.
        let limit = size.round_up(GRAIN).unwrap_or(size);
        let range = pb::CapacityRange { required_bytes: size.into(), limit_bytes: limit.into() };
        let request = pb::ControllerExpandVolumeRequest {
            volume_id,
            capacity_range: Some(range),
            ..Default::default()
        };
        let response = self.controller.controller_expand_volume(request).await;
        let bytes = response.map_err(explain(About::Volume))?.into_inner().capacity_bytes;
        Ok(Bytes::try_from(bytes)?)
    }

    /// Changes limits of a volume.
    pub(super) async fn modify(
        &mut self,
        volume_id: String,
        limits: BTreeMap<String, String>,
    ) -> anyhow::Result<()> {
        let mutable_parameters = limits.into_iter().collect();
        let request = pb::ControllerModifyVolumeRequest {
            volume_id,
            mutable_parameters,
            ..Default::default()
        };
        let response = self.controller.controller_modify_volume(request).await;
        response.map(drop).map_err(explain(About::Volume))
    }

    pub(super) async fn create_snapshot(
        &mut self,
        name: String,
        source_volume_id: String,
    ) -> anyhow::Result<pb::Snapshot> {
        let request = pb::CreateSnapshotRequest { name, source_volume_id, ..Default::default() };
        let response = self.controller.create_snapshot(request).await;
        let response = response.map_err(explain(About::Volume))?;
        response.into_inner().snapshot.context("the driver answered without a snapshot")
    }

    pub(super) async fn delete_snapshot(&mut self, snapshot_id: String) -> anyhow::Result<()> {
        let request = pb::DeleteSnapshotRequest { snapshot_id, ..Default::default() };
        let response = self.controller.delete_snapshot(request).await;
        response.map(drop).map_err(explain(About::Snapshot))
    }

    /// The snapshots of one volume, or of all.
    pub(super) async fn snapshots(
        &mut self,
        volume_id: Option<String>,
    ) -> anyhow::Result<Vec<inspect::Snapshot>> {
        let source_volume_id = volume_id.unwrap_or_default();
        self.list_snapshots(inspect::ListSnapshotsRequest {
            source_volume_id,
            ..Default::default()
        })
        .await
    }

    pub(super) async fn snapshot(
        &mut self,
        snapshot_id: String,
    ) -> anyhow::Result<inspect::Snapshot> {
        anyhow::ensure!(!snapshot_id.is_empty(), "the snapshot id is empty");
        let request = inspect::ListSnapshotsRequest { snapshot_id, ..Default::default() };
        let found = self.list_snapshots(request).await?;
        found.into_iter().next().context("the driver answered without a snapshot")
    }

    async fn list_snapshots(
        &mut self,
        request: inspect::ListSnapshotsRequest,
    ) -> anyhow::Result<Vec<inspect::Snapshot>> {
        let response = self.inspect.list_snapshots(request).await;
        let answer = response.map_err(explain(About::Snapshot))?.into_inner();
        collect(answer).await.map_err(explain(About::Snapshot))
    }

    /// In which ranges a snapshot differs from an earlier one of the same volume.
    pub(super) async fn changed(&mut self, base: String, target: String) -> anyhow::Result<Ranges> {
        let request = pb::GetMetadataDeltaRequest {
            base_snapshot_id: base,
            target_snapshot_id: target,
            ..Default::default()
        };
        let response = self.metadata.get_metadata_delta(request).await;
        let answer = response.map_err(explain(About::Snapshot))?.into_inner();
        let parts = collect(answer).await.map_err(explain(About::Snapshot))?;
        let parts = parts.into_iter();
        Ok(parts.map(|part| (part.volume_capacity_bytes, part.block_metadata)).collect())
    }

    /// Which ranges of a snapshot hold data.
    pub(super) async fn held(&mut self, snapshot_id: String) -> anyhow::Result<Ranges> {
        let request = pb::GetMetadataAllocatedRequest { snapshot_id, ..Default::default() };
        let response = self.metadata.get_metadata_allocated(request).await;
        let answer = response.map_err(explain(About::Snapshot))?.into_inner();
        let parts = collect(answer).await.map_err(explain(About::Snapshot))?;
        let parts = parts.into_iter();
        Ok(parts.map(|part| (part.volume_capacity_bytes, part.block_metadata)).collect())
    }

    /// All there is.
    pub(super) async fn look(&mut self) -> anyhow::Result<Things> {
        let response = self.inspect.look(inspect::LookRequest {}).await;
        let answer = response.map_err(explain(About::Volume))?.into_inner();
        let all = collect(answer).await.map_err(explain(About::Volume))?;
        let mut things = Things::default();
        for thing in all.into_iter().filter_map(|one| one.thing) {
            match thing {
                Thing::Pool(pool) => things.pools.push(pool),
                Thing::Layer(layer) => things.layers.push(layer),
                Thing::Volume(volume) => things.volumes.push(volume),
                Thing::Snapshot(snapshot) => things.snapshots.push(snapshot),
                Thing::Driver(driver) => things.run_dir = Some(driver.run_directory.into()),
            }
        }
        Ok(things)
    }

    /// The volumes with which something is wrong, each with what.
    pub(super) async fn ill(&mut self) -> anyhow::Result<Vec<(String, String)>> {
        let listed = self.controller.list_volumes(pb::ListVolumesRequest::default()).await;
        let listed = listed.map_err(explain(About::Volume))?.into_inner().entries;
        let ill = |entry: pb::list_volumes_response::Entry| {
            let condition = entry.status?.volume_condition?;
            condition.abnormal.then_some((entry.volume?.volume_id, condition.message))
        };
        Ok(listed.into_iter().filter_map(ill).collect())
    }

    pub(super) async fn list(&mut self) -> anyhow::Result<Vec<inspect::Volume>> {
        self.volumes(String::new()).await.map_err(explain(About::Volume))
    }

    pub(super) async fn show(&mut self, volume_id: String) -> anyhow::Result<inspect::Volume> {
        self.try_show(volume_id).await.map_err(explain(About::Volume))
    }

    /// Tells of a volume, or what the driver said, without what to do next.
    pub(super) async fn try_show(&mut self, volume_id: String) -> Result<inspect::Volume, Status> {
        if volume_id.is_empty() {
            return Err(Status::invalid_argument("the volume id is empty"));
        }
        let found = self.volumes(volume_id).await?;
        let none = || Status::internal("the driver answered without a volume");
        found.into_iter().next().ok_or_else(none)
    }

    async fn volumes(&mut self, volume_id: String) -> Result<Vec<inspect::Volume>, Status> {
        let request = inspect::ListVolumesRequest { volume_id };
        collect(self.inspect.list_volumes(request).await?.into_inner()).await
    }

    pub(super) async fn upgrade_daemon(
        &mut self,
        volume_id: String,
        force: bool,
    ) -> anyhow::Result<inspect::UpgradeDaemonResponse> {
        let request = inspect::UpgradeDaemonRequest { volume_id, force };
        let response = self.inspect.upgrade_daemon(request).await;
        Ok(response.map_err(explain(About::Volume))?.into_inner())
    }

    pub(super) async fn stage(&mut self, volume_id: &str, path: &str) -> anyhow::Result<()> {
        let request = pb::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: path.to_owned(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.node.node_stage_volume(request).await.map(drop).map_err(explain(About::Volume))
    }

    pub(super) async fn publish(
        &mut self,
        volume_id: &str,
        staging_path: &str,
        target: &str,
    ) -> anyhow::Result<()> {
        let request = pb::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: staging_path.to_owned(),
            target_path: target.to_owned(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.node.node_publish_volume(request).await.map(drop).map_err(explain(About::Volume))
    }

    pub(super) async fn unpublish(&mut self, volume_id: &str, target: &str) -> anyhow::Result<()> {
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: target.to_owned(),
        };
        self.node.node_unpublish_volume(request).await.map(drop).map_err(explain(About::Volume))
    }

    pub(super) async fn unstage(&mut self, volume_id: &str, path: &str) -> anyhow::Result<()> {
        let request = pb::NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: path.to_owned(),
        };
        self.node.node_unstage_volume(request).await.map(drop).map_err(explain(About::Volume))
    }
}

fn capability() -> pb::VolumeCapability {
    pb::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn content(source: Source) -> pb::VolumeContentSource {
    let content = match source {
        Source::Snapshot(snapshot_id) => Content::Snapshot(SnapshotSource { snapshot_id }),
        Source::Volume(volume_id) => Content::Volume(VolumeSource { volume_id }),
    };
    pb::VolumeContentSource { r#type: Some(content) }
}

async fn collect<T>(mut answer: Streaming<T>) -> Result<Vec<T>, Status> {
    let mut all = Vec::new();
    while let Some(one) = answer.message().await? {
        all.push(one);
    }
    Ok(all)
}

/// Makes an error of what the driver said, with what to do next.
fn explain(about: About) -> impl FnOnce(Status) -> anyhow::Error {
    move |status| {
        // A method that a driver does not know has no message.
        let text = match status.message() {
            "" => status.code().description(),
            text => text,
        };
        match next(about, status.code()) {
            "" => anyhow!("{text}"),
            next => anyhow!("{text}\nnext: {next}"),
        }
    }
}

fn next(about: About, code: Code) -> &'static str {
    match (code, about) {
        (Code::NotFound, About::Volume) => "see the volumes there are: qsd-csi volume list",
        (Code::NotFound, About::Snapshot) => "see the snapshots there are: qsd-csi snapshot list",
        (Code::AlreadyExists, _) => "choose another name, or look at what there is: qsd-csi tree",
        (Code::FailedPrecondition, _) => "see what stands in the way: qsd-csi volume show",
        (Code::Aborted, _) => "wait a moment and try again",
        (Code::Unimplemented, _) => "the driver is older than this program; start the driver anew",
        (Code::Unavailable, _) => "try again; `qsd-csi doctor` and the log of the driver say more",
        (Code::ResourceExhausted, _) => "free some space, or ask for less",
        (Code::Internal | Code::Unknown, _) => {
            "`qsd-csi doctor` and the log of the driver say more"
        }
        _ => "",
    }
}
