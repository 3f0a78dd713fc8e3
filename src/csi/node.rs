//! CSI Node: volumes are staged and published on this machine.

use super::{
    Edge, TOPOLOGY, ephemeral, parse,
    pb::csi::{self as pb, node_server},
};
use crate::{
    blocking::blocking,
    node::{
        Node, Publish, Stage,
        filesystem::{Share, Stats},
    },
    volume::{Claim, SizeRange, VolumeId},
};
use pb::{
    node_service_capability::{Rpc, Type, rpc},
    volume_usage::Unit,
};
use std::{collections::HashMap, path::Path, sync::Arc};
use tonic::{Request, Response, Status};

/// The Node service.
#[derive(Debug)]
pub struct NodeService(pub Edge);

/// What is served; everything else answers UNIMPLEMENTED.
const CAPABILITIES: [rpc::Type; 6] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::ExpandVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeMountGroup,
    rpc::Type::VolumeCondition,
];

fn usage_of(share: Share, unit: Unit) -> pb::VolumeUsage {
    let count = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let Share { total, used, available } = share;
    let (total, used, available) = (count(total), count(used), count(available));
    pb::VolumeUsage { available, total, used, unit: unit.into() }
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn node_stage_volume(
        &self,
        request: Request<pb::NodeStageVolumeRequest>,
    ) -> Result<Response<pb::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = parse::volume_id(request.volume_id)?;
        let staging_path = parse::path("staging_target_path", request.staging_target_path)?;
        let capability = parse::capability(request.volume_capability)?;
        let volume = self.0.find(id)?;
        let capability = parse::used(&capability, volume.parameters().publish())?;
        let source = volume.master().map(|master| &master.source);
        let mut secrets = request.secrets;
        let passphrase = parse::passphrase(volume.is_encrypted(), &mut secrets)?;
        let secrets = parse::secrets(source, secrets)?;
        let id = volume.id().clone();
        let stage = Stage { staging_path, capability, secrets, passphrase };
        let work = |claim: Arc<Claim>, node: Node| async move { node.stage(&claim, stage).await };
        self.0.claimed(&id, work).await?;
        Ok(Response::new(pb::NodeStageVolumeResponse::default()))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn node_unstage_volume(
        &self,
        request: Request<pb::NodeUnstageVolumeRequest>,
    ) -> Result<Response<pb::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = parse::volume_id(request.volume_id)?;
        let path = parse::path("staging_target_path", request.staging_target_path)?;
        if let Ok(id) = id {
            let work =
                |claim: Arc<Claim>, node: Node| async move { node.unstage(&claim, &path).await };
            self.0.claimed(&id, work).await?;
        }
        Ok(Response::new(pb::NodeUnstageVolumeResponse::default()))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn node_publish_volume(
        &self,
        request: Request<pb::NodePublishVolumeRequest>,
    ) -> Result<Response<pb::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = ephemeral::volume_id(request.volume_id.clone())?;
        let target = parse::path("target_path", request.target_path.clone())?;
        let capability = parse::capability(request.volume_capability.clone())?;
        if ephemeral::is_asked(&request) {
            let inline = ephemeral::inline(request, target, &capability)?;
            let id = VolumeId::of_name(&inline.new.name);
            let work = |claim: Arc<Claim>, node: Node| async move {
                node.publish_inline(claim, inline).await
            };
            self.0.claimed(&id, work).await?;
            return Ok(Response::new(pb::NodePublishVolumeResponse::default()));
        }
        let volume = self.0.find(id)?;
        let capability = parse::used(&capability, volume.parameters().publish())?;
        let id = volume.id().clone();
        if request.staging_target_path.is_empty() {
            return Err(parse::Error::NoStaging.into());
        }
        let staging_path = parse::path("staging_target_path", request.staging_target_path)?;
        let access = parse::access(request.readonly);
        let publish = Publish { staging_path, target, capability, access };
        let work = |claim: Arc<Claim>, node: Node| async move {
            node.serve(&claim).await?;
            node.publish(&claim, &publish).await
        };
        self.0.claimed(&id, work).await?;
        Ok(Response::new(pb::NodePublishVolumeResponse::default()))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn node_unpublish_volume(
        &self,
        request: Request<pb::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<pb::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = ephemeral::volume_id(request.volume_id)?;
        let target = parse::path("target_path", request.target_path)?;
        if let Ok(id) = id {
            let work =
                |claim: Arc<Claim>, node: Node| async move { node.leave(claim, &target).await };
            self.0.claimed(&id, work).await?;
        }
        Ok(Response::new(pb::NodeUnpublishVolumeResponse::default()))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn node_get_volume_stats(
        &self,
        request: Request<pb::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<pb::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        let id = ephemeral::volume_id(request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(parse::Error::Empty("volume_path").into());
        }
        let id = self.0.find(id)?.id().clone();
        // Only compared with what is known, so that any path we do not know is just not found.
        let volume = self.0.node.volume_at(&id, Path::new(&request.volume_path))?;
        let condition = self.0.condition(&id).await;
        let stats = match self.0.node.filesystem_stats(&id).await {
            // What is broken cannot be measured, and is told of all the same.
            Err(_) if condition.abnormal => None,
            stats => stats?,
        };
        let usage = if let Some(stats) = stats {
            let Stats { bytes, inodes } = stats;
            let (bytes, inodes) = ((bytes, Unit::Bytes), (inodes, Unit::Inodes));
            [bytes, inodes].map(|(share, unit)| usage_of(share, unit)).into()
        } else {
            let measured = blocking(move || (volume.size(), volume.allocated())).await;
            let (total, used) = (measured.0.count(), measured.1.count());
            let share = Share { total, used, available: total.saturating_sub(used) };
            vec![usage_of(share, Unit::Bytes)]
        };
        let volume_condition = Some(condition);
        Ok(Response::new(pb::NodeGetVolumeStatsResponse { usage, volume_condition }))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn node_expand_volume(
        &self,
        request: Request<pb::NodeExpandVolumeRequest>,
    ) -> Result<Response<pb::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = parse::volume_id(request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(parse::Error::Empty("volume_path").into());
        }
        let id = self.0.find(id)?.id().clone();
        let volume = self.0.node.volume_at(&id, Path::new(&request.volume_path))?;
        // Without one it is as large as the controller was asked for.
        let range = request.capacity_range.map(|range| parse::new_size(Some(range)));
        let range = range.transpose()?.unwrap_or(SizeRange::at_least(volume.size()));
        let work =
            |claim: Arc<Claim>, node: Node| async move { node.expand_here(claim, range).await };
        let volume = self.0.claimed(&id, work).await?;
        let capacity_bytes = volume.size().into();
        Ok(Response::new(pb::NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<pb::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<pb::NodeGetCapabilitiesResponse>, Status> {
        let capability = |kind: rpc::Type| pb::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        Ok(Response::new(pb::NodeGetCapabilitiesResponse {
            capabilities: CAPABILITIES.map(capability).into(),
        }))
    }

    async fn node_get_info(
        &self,
        _request: Request<pb::NodeGetInfoRequest>,
    ) -> Result<Response<pb::NodeGetInfoResponse>, Status> {
        let node = self.0.node.name().to_string();
        Ok(Response::new(pb::NodeGetInfoResponse {
            node_id: node.clone(),
            max_volumes_per_node: 0, // no limit of ours
            accessible_topology: Some(pb::Topology {
                segments: HashMap::from([(TOPOLOGY.to_owned(), node)]),
            }),
        }))
    }
}
