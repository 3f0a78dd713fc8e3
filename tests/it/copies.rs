//! The calls that make snapshots and copies, for tests.

use crate::harness::{Driver, GIB, create_request};
use qsd_csi::csi::pb::csi::{self as pb, volume_content_source};
use tonic::Status;
use volume_content_source::{SnapshotSource, Type, VolumeSource};

/// What a volume is made from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Snapshot(String),
    Volume(String),
}

impl Source {
    pub(crate) fn message(&self) -> pb::VolumeContentSource {
        let r#type = match self.clone() {
            Self::Snapshot(snapshot_id) => Type::Snapshot(SnapshotSource { snapshot_id }),
            Self::Volume(volume_id) => Type::Volume(VolumeSource { volume_id }),
        };
        pb::VolumeContentSource { r#type: Some(r#type) }
    }
}

/// A volume to be created.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) source: Option<Source>,
    pub(crate) parameters: Vec<(&'static str, &'static str)>,
}

impl Driver {
    /// Creates a volume as it is wished for.
    pub(crate) async fn fulfil(&self, wish: &Wish) -> Result<(), Status> {
        let mut request = create_request(&wish.name, wish.size.try_into().unwrap());
        request.volume_content_source = wish.source.as_ref().map(Source::message);
        let parameters = wish.parameters.iter();
        request.parameters =
            parameters.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.controller().create_volume(request).await.map(drop)
    }

    /// Creates a volume of 1 GiB from something.
    pub(crate) async fn create_from(&self, name: &str, source: Source) -> Result<(), Status> {
        let size = GIB.try_into().unwrap();
        let wish = Wish { name: name.into(), size, source: Some(source), parameters: Vec::new() };
        self.fulfil(&wish).await
    }

    /// Takes a snapshot of a volume.
    pub(crate) async fn snapshot(&self, name: &str, volume_id: &str) -> Result<(), Status> {
        let request = pb::CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: volume_id.into(),
            ..Default::default()
        };
        let snapshot = self.controller().create_snapshot(request).await?.into_inner().snapshot;
        assert!(snapshot.unwrap().ready_to_use);
        Ok(())
    }

    pub(crate) async fn delete_snapshot(&self, snapshot_id: &str) -> Result<(), Status> {
        let request =
            pb::DeleteSnapshotRequest { snapshot_id: snapshot_id.into(), ..Default::default() };
        self.controller().delete_snapshot(request).await.map(drop)
    }

    /// Expands a volume.
    pub(crate) async fn expand(&self, volume_id: &str, size: u64) -> Result<(), Status> {
        let required_bytes = size.try_into().unwrap();
        let request = pb::ControllerExpandVolumeRequest {
            volume_id: volume_id.into(),
            capacity_range: Some(pb::CapacityRange { required_bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        self.controller().controller_expand_volume(request).await.map(drop)
    }

    /// Changes limits of a volume.
    pub(crate) async fn modify(
        &self,
        volume_id: &str,
        limits: &[(&str, &str)],
    ) -> Result<(), Status> {
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let request = pb::ControllerModifyVolumeRequest {
            volume_id: volume_id.into(),
            mutable_parameters: limits.iter().map(text).collect(),
            ..Default::default()
        };
        self.controller().controller_modify_volume(request).await.map(drop)
    }

    /// Stages and publishes a volume.
    pub(crate) async fn attach(&self, volume_id: &str) {
        self.stage(volume_id).await.unwrap();
        self.publish(volume_id).await.unwrap();
    }

    /// Unpublishes and unstages a volume.
    pub(crate) async fn detach(&self, volume_id: &str) {
        self.unpublish(volume_id).await.unwrap();
        self.unstage(volume_id).await.unwrap();
    }
}
