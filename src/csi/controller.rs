//! CSI Controller: volumes of this node are created, deleted, listed and measured.

use super::{
    Edge, TOPOLOGY, parse,
    pb::csi::{self as pb, controller_server},
};
use crate::{
    blocking::blocking,
    chain::Chain,
    node::Node,
    units::Bytes,
    volume::{Claim, Entry, GRAIN, NewVolume, Outcome, Volume, VolumeId},
};
use pb::controller_service_capability::{Rpc, Type, rpc};
use std::{collections::HashMap, sync::Arc};
use tonic::{Request, Response, Status};
use tracing::info;

/// The Controller service.
#[derive(Debug)]
pub struct Controller(pub Edge);

/// What is served; everything else answers UNIMPLEMENTED.
const CAPABILITIES: [rpc::Type; 5] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::GetVolume,
    rpc::Type::SingleNodeMultiWriter,
];

#[tonic::async_trait]
impl controller_server::Controller for Controller {
    #[tracing::instrument(skip_all, fields(volume_name = request.get_ref().name))]
    async fn create_volume(
        &self,
        request: Request<pb::CreateVolumeRequest>,
    ) -> Result<Response<pb::CreateVolumeResponse>, Status> {
        let new = self.new_volume(request.into_inner())?;
        let id = VolumeId::of_name(&new.name);
        let create = |claim: Arc<Claim>, node: Node| async move {
            blocking(move || node.volumes().create(&claim, new)).await
        };
        let (volume, outcome) = self.0.claimed(&id, create).await?;
        if outcome == Outcome::Done {
            info!(volume = %id, size = %volume.size(), pool = %volume.pool(), "created");
        }
        let volume = Some(self.message(&volume));
        Ok(Response::new(pb::CreateVolumeResponse { volume }))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn delete_volume(
        &self,
        request: Request<pb::DeleteVolumeRequest>,
    ) -> Result<Response<pb::DeleteVolumeResponse>, Status> {
        if let Ok(id) = parse::volume_id(request.into_inner().volume_id)? {
            let delete = |claim: Arc<Claim>, node: Node| async move {
                node.refuse_staged(claim.volume())?;
                blocking(move || node.volumes().delete(&claim)).await.map_err(Status::from)
            };
            if self.0.claimed(&id, delete).await? == Outcome::Done {
                info!(volume = %id, "deleted");
            }
        }
        Ok(Response::new(pb::DeleteVolumeResponse::default()))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn validate_volume_capabilities(
        &self,
        request: Request<pb::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<pb::ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        let id = parse::volume_id(request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(parse::Error::Empty("volume_capabilities").into());
        }
        let volume = self.0.find(id)?;
        let wishes = parse::capabilities(&request.volume_capabilities)
            .map(drop)
            .and_then(|()| parse::parameters(request.parameters.clone()).map(drop))
            .and_then(|()| context_of(&volume, &request.volume_context));
        let response = match wishes {
            Ok(()) => pb::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(pb::validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: HashMap::new(),
                }),
                message: String::new(),
            },
            Err(error) => pb::ValidateVolumeCapabilitiesResponse {
                confirmed: None,
                message: Chain(&error).to_string(),
            },
        };
        Ok(Response::new(response))
    }

    #[tracing::instrument(skip_all)]
    async fn list_volumes(
        &self,
        request: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<pb::ListVolumesResponse>, Status> {
        let request = request.into_inner();
        let (after, count) = parse::page(request.max_entries, &request.starting_token)?;
        // One more than the page holds tells whether another page follows.
        let volumes = self.0.node.volumes();
        let mut page = volumes.list(after.as_ref(), count.saturating_add(1));
        let more = page.len() > count;
        page.truncate(count);
        let next_token = match page.last() {
            Some((last, _)) if more => parse::token(last),
            Some(_) | None => String::new(),
        };
        let entry = |(id, entry): (VolumeId, Entry)| {
            let volume = match entry {
                Entry::Volume(volume) => self.message(&volume),
                Entry::Damaged { .. } => self.named(&id, Bytes::ZERO, HashMap::new()),
            };
            pb::list_volumes_response::Entry { volume: Some(volume), status: None }
        };
        let entries = page.into_iter().map(entry).collect();
        Ok(Response::new(pb::ListVolumesResponse { entries, next_token }))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn controller_get_volume(
        &self,
        request: Request<pb::ControllerGetVolumeRequest>,
    ) -> Result<Response<pb::ControllerGetVolumeResponse>, Status> {
        let volume = self.0.find(parse::volume_id(request.into_inner().volume_id)?)?;
        Ok(Response::new(pb::ControllerGetVolumeResponse {
            volume: Some(self.message(&volume)),
            status: Some(pb::controller_get_volume_response::VolumeStatus::default()),
        }))
    }

    #[tracing::instrument(skip_all)]
    async fn get_capacity(
        &self,
        request: Request<pb::GetCapacityRequest>,
    ) -> Result<Response<pb::GetCapacityResponse>, Status> {
        let request = request.into_inner();
        let parameters = parse::parameters(request.parameters)?;
        let elsewhere = request
            .accessible_topology
            .is_some_and(|topology| !parse::is_here(&topology, self.0.node.name()));
        let unserved = !request.volume_capabilities.is_empty()
            && parse::capabilities(&request.volume_capabilities).is_err();
        let (mut sum, mut largest) = (Bytes::ZERO, Bytes::ZERO);
        if !elsewhere && !unserved {
            let volumes = self.0.node.volumes().clone();
            let spaces = blocking(move || volumes.space(parameters.pool())).await?;
            let free = || spaces.iter().map(|(_, space)| space.free.round_down(GRAIN));
            (sum, largest) = (free().sum(), free().max().unwrap_or_default());
        }
        Ok(Response::new(pb::GetCapacityResponse {
            available_capacity: sum.into(),
            maximum_volume_size: Some(largest.into()),
            minimum_volume_size: Some(GRAIN.into()),
        }))
    }

    async fn controller_get_capabilities(
        &self,
        _request: Request<pb::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<pb::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |kind: rpc::Type| pb::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        Ok(Response::new(pb::ControllerGetCapabilitiesResponse {
            capabilities: CAPABILITIES.map(capability).into(),
        }))
    }

    async fn controller_publish_volume(
        &self,
        _request: Request<pb::ControllerPublishVolumeRequest>,
    ) -> Result<Response<pb::ControllerPublishVolumeResponse>, Status> {
        Err(unimplemented("ControllerPublishVolume"))
    }

    async fn controller_unpublish_volume(
        &self,
        _request: Request<pb::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<pb::ControllerUnpublishVolumeResponse>, Status> {
        Err(unimplemented("ControllerUnpublishVolume"))
    }

    async fn create_snapshot(
        &self,
        _request: Request<pb::CreateSnapshotRequest>,
    ) -> Result<Response<pb::CreateSnapshotResponse>, Status> {
        Err(unimplemented("CreateSnapshot"))
    }

    async fn delete_snapshot(
        &self,
        _request: Request<pb::DeleteSnapshotRequest>,
    ) -> Result<Response<pb::DeleteSnapshotResponse>, Status> {
        Err(unimplemented("DeleteSnapshot"))
    }

    async fn list_snapshots(
        &self,
        _request: Request<pb::ListSnapshotsRequest>,
    ) -> Result<Response<pb::ListSnapshotsResponse>, Status> {
        Err(unimplemented("ListSnapshots"))
    }

    async fn get_snapshot(
        &self,
        _request: Request<pb::GetSnapshotRequest>,
    ) -> Result<Response<pb::GetSnapshotResponse>, Status> {
        Err(unimplemented("GetSnapshot"))
    }

    async fn controller_expand_volume(
        &self,
        _request: Request<pb::ControllerExpandVolumeRequest>,
    ) -> Result<Response<pb::ControllerExpandVolumeResponse>, Status> {
        Err(unimplemented("ControllerExpandVolume"))
    }

    async fn controller_modify_volume(
        &self,
        _request: Request<pb::ControllerModifyVolumeRequest>,
    ) -> Result<Response<pb::ControllerModifyVolumeResponse>, Status> {
        Err(unimplemented("ControllerModifyVolume"))
    }
}

/// The answer to an RPC whose capability is not advertised.
pub(super) fn unimplemented(rpc: &str) -> Status {
    Status::unimplemented(format!("{rpc} is not among the capabilities of this driver"))
}

impl Controller {
    fn new_volume(&self, request: pb::CreateVolumeRequest) -> Result<NewVolume, parse::Error> {
        parse::name(&request.name)?;
        let access_modes = parse::capabilities(&request.volume_capabilities)?;
        let size = parse::size(request.capacity_range)?;
        let parameters = parse::parameters(request.parameters)?;
        let source = request.volume_content_source.map(|source| format!("{source:?}"));
        parse::not_served("volume_content_source", source)?;
        let mutable = request.mutable_parameters.into_keys().next();
        parse::not_served("mutable_parameters", mutable.map(|key| format!("{key:?}")))?;
        parse::topology(request.accessibility_requirements.as_ref(), self.0.node.name())?;
        Ok(NewVolume { name: request.name, size, parameters, access_modes })
    }

    fn message(&self, volume: &Volume) -> pb::Volume {
        self.named(volume.id(), volume.size(), context(volume))
    }

    fn named(&self, id: &VolumeId, size: Bytes, context: HashMap<String, String>) -> pb::Volume {
        let node = self.0.node.name().to_string();
        pb::Volume {
            capacity_bytes: size.into(),
            volume_id: id.to_string(),
            volume_context: context,
            content_source: None,
            accessible_topology: vec![pb::Topology {
                segments: HashMap::from([(TOPOLOGY.to_owned(), node)]),
            }],
        }
    }
}

/// What a volume says of itself to whoever attaches it.
fn context(volume: &Volume) -> HashMap<String, String> {
    HashMap::from([
        ("pool".to_owned(), volume.pool().to_string()),
        ("publish".to_owned(), "vhost-user".to_owned()),
    ])
}

/// An error where a caller believes something of the volume that is not so.
fn context_of(volume: &Volume, believed: &HashMap<String, String>) -> Result<(), parse::Error> {
    for (key, is) in context(volume) {
        if let Some(believed) = believed.get(&key).filter(|believed| **believed != is).cloned() {
            return Err(parse::Error::Context { key, is, believed });
        }
    }
    Ok(())
}
