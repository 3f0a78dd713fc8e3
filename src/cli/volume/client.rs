//! The calls that `qsd-csi volume` makes, and what to do where one fails.

use crate::cli::Endpoint;
use crate::{
    csi::pb::{
        csi::{self as pb, controller_client::ControllerClient, node_client::NodeClient},
        inspect::{self, inspect_client::InspectClient},
    },
    units::Bytes,
};
use anyhow::{Context as _, anyhow};
use pb::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
use std::collections::BTreeMap;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint as Address},
};

pub(in crate::cli) struct Client {
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    inspect: InspectClient<Channel>,
}

impl Client {
    pub(in crate::cli) async fn connect(endpoint: &Endpoint) -> anyhow::Result<Self> {
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
            inspect: InspectClient::new(channel),
        })
    }

    pub(super) async fn create(
        &mut self,
        name: String,
        size: Bytes,
        parameters: BTreeMap<String, String>,
    ) -> anyhow::Result<pb::Volume> {
        let size = i64::from(size);
        let request = pb::CreateVolumeRequest {
            name,
            capacity_range: Some(pb::CapacityRange { required_bytes: size, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            parameters: parameters.into_iter().collect(),
            ..Default::default()
        };
        let response =
            self.controller.create_volume(request).await.map_err(|status| explain(&status))?;
        response.into_inner().volume.context("the driver answered without a volume")
    }

    pub(super) async fn delete(&mut self, volume_id: String) -> anyhow::Result<()> {
        let request = pb::DeleteVolumeRequest { volume_id, ..Default::default() };
        self.controller.delete_volume(request).await.map(drop).map_err(|status| explain(&status))
    }

    pub(in crate::cli) async fn list(&mut self) -> anyhow::Result<Vec<inspect::Volume>> {
        self.inspect(String::new()).await
    }

    pub(super) async fn show(&mut self, volume_id: String) -> anyhow::Result<inspect::Volume> {
        anyhow::ensure!(!volume_id.is_empty(), "the volume id is empty");
        let found = self.inspect(volume_id).await?;
        found.into_iter().next().context("the driver answered without a volume")
    }

    async fn inspect(&mut self, volume_id: String) -> anyhow::Result<Vec<inspect::Volume>> {
        let request = inspect::ListVolumesRequest { volume_id };
        let mut stream = self
            .inspect
            .list_volumes(request)
            .await
            .map_err(|status| explain(&status))?
            .into_inner();
        let mut volumes = Vec::new();
        while let Some(volume) = stream.message().await.map_err(|status| explain(&status))? {
            volumes.push(volume);
        }
        Ok(volumes)
    }

    pub(in crate::cli) async fn upgrade_daemon(
        &mut self,
        volume_id: String,
        force: bool,
    ) -> anyhow::Result<inspect::UpgradeDaemonResponse> {
        let request = inspect::UpgradeDaemonRequest { volume_id, force };
        let response = self.inspect.upgrade_daemon(request).await;
        Ok(response.map_err(|status| explain(&status))?.into_inner())
    }

    pub(super) async fn stage(&mut self, volume_id: &str, path: &str) -> anyhow::Result<()> {
        let request = pb::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: path.to_owned(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.node.node_stage_volume(request).await.map(drop).map_err(|status| explain(&status))
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
        self.node.node_publish_volume(request).await.map(drop).map_err(|status| explain(&status))
    }

    pub(super) async fn unpublish(&mut self, volume_id: &str, target: &str) -> anyhow::Result<()> {
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: target.to_owned(),
        };
        self.node.node_unpublish_volume(request).await.map(drop).map_err(|status| explain(&status))
    }

    pub(super) async fn unstage(&mut self, volume_id: &str, path: &str) -> anyhow::Result<()> {
        let request = pb::NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: path.to_owned(),
        };
        self.node.node_unstage_volume(request).await.map(drop).map_err(|status| explain(&status))
    }
}

fn capability() -> pb::VolumeCapability {
    pb::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// What the driver said, and what to do next.
fn explain(status: &Status) -> anyhow::Error {
    let next = match status.code() {
        Code::NotFound => "see the volumes there are: qsd-csi volume list",
        Code::AlreadyExists => {
            "choose another name, or look at the one there is: \
                                qsd-csi volume show"
        }
        Code::FailedPrecondition => "see what stands in the way: qsd-csi volume show",
        Code::Aborted => "wait a moment and try again",
        Code::Unavailable => "try again; the log of the driver says more",
        Code::ResourceExhausted => "free some space, or ask for less",
        Code::Internal | Code::Unknown => "the log of the driver says more",
        _ => "",
    };
    let text = status.message();
    if next.is_empty() { anyhow!("{text}") } else { anyhow!("{text}\nnext: {next}") }
}
