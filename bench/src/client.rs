//! The calls to the driver, each with the time it took.

use crate::{graph::Cache, scratch::Paths};
use anyhow::Context as _;
use qsd_csi::csi::pb::{
    csi::{
        self as pb,
        controller_client::ControllerClient,
        identity_client::IdentityClient,
        node_client::NodeClient,
        volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode},
        volume_content_source::{SnapshotSource, Type as Content, VolumeSource},
    },
    inspect::{self, inspect_client::InspectClient},
};
use std::{collections::HashMap, path::Path, time::Duration};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

pub(crate) struct Client {
    identity: IdentityClient<Channel>,
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    inspect: InspectClient<Channel>,
}

impl Client {
    pub(crate) async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?.connect().await?;
        Ok(Self {
            identity: IdentityClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            node: NodeClient::new(channel.clone()),
            inspect: InspectClient::new(channel),
        })
    }

    /// An error unless the driver is ready.
    pub(crate) async fn probe(&mut self) -> anyhow::Result<()> {
        let answer = self.identity.probe(pb::ProbeRequest {}).await?.into_inner();
        anyhow::ensure!(answer.ready != Some(false), "the driver is not ready");
        Ok(())
    }

    pub(crate) async fn create(
        &mut self,
        name: &str,
        size: u64,
        cache: Cache,
    ) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request = pb::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(pb::CapacityRange {
                required_bytes: i64::try_from(size)?,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![capability()],
            parameters: parameters(cache),
            ..Default::default()
        };
        let answer = self.controller.create_volume(request).await.context("CreateVolume")?;
        let elapsed = begin.elapsed();
        let volume = answer.into_inner().volume.context("CreateVolume without a volume")?;
        anyhow::ensure!(volume.volume_id == name, "{name} is called {}", volume.volume_id);
        Ok(elapsed)
    }

    /// Creates a volume from a snapshot.
    pub(crate) async fn restore(
        &mut self,
        name: &str,
        snapshot: &str,
        cache: Cache,
    ) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let snapshot = SnapshotSource { snapshot_id: snapshot.to_owned() };
        let source = pb::VolumeContentSource { r#type: Some(Content::Snapshot(snapshot)) };
        let request = pb::CreateVolumeRequest {
            name: name.to_owned(),
            volume_capabilities: vec![capability()],
            parameters: parameters(cache),
            volume_content_source: Some(source),
            ..Default::default()
        };
        self.controller.create_volume(request).await.context("CreateVolume")?;
        Ok(begin.elapsed())
    }

    /// Creates a volume from another one.
    pub(crate) async fn clone_of(&mut self, name: &str, volume: &str) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let volume = VolumeSource { volume_id: volume.to_owned() };
        let source = pb::VolumeContentSource { r#type: Some(Content::Volume(volume)) };
        let request = pb::CreateVolumeRequest {
            name: name.to_owned(),
            volume_capabilities: vec![capability()],
            volume_content_source: Some(source),
            ..Default::default()
        };
        self.controller.create_volume(request).await.context("CreateVolume")?;
        Ok(begin.elapsed())
    }

    pub(crate) async fn snapshot(&mut self, name: &str, volume: &str) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request = pb::CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.to_owned(),
            ..Default::default()
        };
        self.controller.create_snapshot(request).await.context("CreateSnapshot")?;
        Ok(begin.elapsed())
    }

    pub(crate) async fn delete_snapshot(&mut self, snapshot: &str) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request =
            pb::DeleteSnapshotRequest { snapshot_id: snapshot.to_owned(), ..Default::default() };
        self.controller.delete_snapshot(request).await.context("DeleteSnapshot")?;
        Ok(begin.elapsed())
    }

    pub(crate) async fn delete(&mut self, volume: &str) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request =
            pb::DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
        self.controller.delete_volume(request).await.context("DeleteVolume")?;
        Ok(begin.elapsed())
    }

    /// `NodeStageVolume` and `NodePublishVolume`.
    pub(crate) async fn attach(&mut self, volume: &str, paths: &Paths) -> anyhow::Result<Duration> {
        Ok(self.stage(volume, paths).await? + self.publish(volume, paths).await?)
    }

    pub(crate) async fn stage(&mut self, volume: &str, paths: &Paths) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request = pb::NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: text(&paths.staging),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.node.node_stage_volume(request).await.context("NodeStageVolume")?;
        Ok(begin.elapsed())
    }

    pub(crate) async fn publish(
        &mut self,
        volume: &str,
        paths: &Paths,
    ) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request = pb::NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: text(&paths.staging),
            target_path: text(&paths.target),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.node.node_publish_volume(request).await.context("NodePublishVolume")?;
        Ok(begin.elapsed())
    }

    /// `NodeUnpublishVolume` and `NodeUnstageVolume`.
    pub(crate) async fn detach(&mut self, volume: &str, paths: &Paths) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            target_path: text(&paths.target),
        };
        self.node.node_unpublish_volume(request).await.context("NodeUnpublishVolume")?;
        let request = pb::NodeUnstageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: text(&paths.staging),
        };
        self.node.node_unstage_volume(request).await.context("NodeUnstageVolume")?;
        Ok(begin.elapsed())
    }

    /// All volumes, as a person sees them.
    pub(crate) async fn list(&mut self) -> anyhow::Result<Vec<inspect::Volume>> {
        let request = inspect::ListVolumesRequest::default();
        let mut stream = self.inspect.list_volumes(request).await?.into_inner();
        let mut volumes = Vec::new();
        while let Some(volume) = stream.message().await? {
            volumes.push(volume);
        }
        Ok(volumes)
    }

    /// The daemons of all volumes that are staged, by pid, in order of volume.
    pub(crate) async fn daemons(&mut self) -> anyhow::Result<Vec<i32>> {
        let volumes = self.list().await?;
        let daemon = |volume: inspect::Volume| volume.attachment?.daemon;
        Ok(volumes.into_iter().filter_map(daemon).map(|daemon| daemon.pid).collect())
    }
}

fn parameters(cache: Cache) -> HashMap<String, String> {
    match cache {
        Cache::Writeback => HashMap::new(), // what `auto` is, for a raw volume
        Cache::Writethrough => [("cache".to_owned(), "writethrough".to_owned())].into(),
    }
}

fn capability() -> pb::VolumeCapability {
    pb::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
