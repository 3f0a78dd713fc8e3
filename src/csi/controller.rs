//! CSI Controller: volumes of this node are created, deleted, listed and measured.

use super::{
    Edge, TOPOLOGY, known, parse,
    pb::csi::{self as pb, controller_server},
};
use crate::{
    blocking::blocking,
    chain::Chain,
    node::{Form, Node},
    units::Bytes,
    volume::{
        Claim, Content, Entry, GRAIN, Lifecycle, NewVolume, Outcome, Passphrase, PublishAs,
        Snapshot, SnapshotId, Volume, VolumeId,
    },
};
use pb::{
    controller_service_capability::{Rpc, Type, rpc},
    volume_content_source::{SnapshotSource, Type as ContentType, VolumeSource},
};
use std::{collections::HashMap, sync::Arc};
use tonic::{Request, Response, Status};
use tracing::info;

/// The Controller service.
#[derive(Debug)]
pub struct Controller(pub Edge);

/// What is served; everything else answers UNIMPLEMENTED.
const CAPABILITIES: [rpc::Type; 12] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::CreateDeleteSnapshot,
    rpc::Type::ListSnapshots,
    rpc::Type::GetSnapshot,
    rpc::Type::CloneVolume,
    rpc::Type::ExpandVolume,
    rpc::Type::ModifyVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::GetVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeCondition,
];

#[tonic::async_trait]
impl controller_server::Controller for Controller {
    #[tracing::instrument(skip_all, fields(volume_name = request.get_ref().name))]
    async fn create_volume(
        &self,
        request: Request<pb::CreateVolumeRequest>,
    ) -> Result<Response<pb::CreateVolumeResponse>, Status> {
        let mut request = request.into_inner();
        let mut secrets = std::mem::take(&mut request.secrets);
        let new = self.new_volume(request)?;
        if new.parameters.is_encrypted() || new.content.is_some() {
            Passphrase::take(&mut secrets).map_err(parse::Error::from)?; // it is used when it is staged
        }
        let secrets = parse::secrets(new.parameters.source(), secrets)?;
        let id = VolumeId::of_name(&new.name);
        let create =
            |claim: Arc<Claim>, node: Node| async move { node.create(claim, new, secrets).await };
        let (volume, outcome) = self.0.claimed(&id, create).await?;
        if outcome == Outcome::Done {
            info!(volume = %id, size = %volume.size(), pool = %volume.pool(), "volume created");
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
            let delete = |claim: Arc<Claim>, node: Node| async move { node.delete(claim).await };
            if self.0.claimed(&id, delete).await? == Outcome::Done {
                info!(volume = %id, "volume deleted");
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
        let publish = volume.parameters().publish();
        let wishes = parse::capabilities(&request.volume_capabilities, publish)
            .map(drop)
            .and_then(|()| parse::parameters(request.parameters.clone()).map(drop))
            .and_then(|()| {
                let changes = parse::mutable_parameters(request.mutable_parameters.clone());
                Ok(volume.throttle().with(&changes).map(drop)?)
            })
            .and_then(|()| context_of(&volume, &request.volume_context));
        let response = match wishes {
            Ok(()) => pb::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(pb::validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
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
        let ids = page.iter().map(|(id, _)| id.clone()).collect();
        let conditions = self.0.conditions(ids).await;
        let entry = |((id, entry), condition): ((VolumeId, Entry), pb::VolumeCondition)| {
            let status = pb::list_volumes_response::VolumeStatus {
                published_node_ids: Vec::new(),
                volume_condition: Some(condition),
            };
            let volume = Some(self.entry_message(&id, &entry));
            pb::list_volumes_response::Entry { volume, status: Some(status) }
        };
        let entries = page.into_iter().zip(conditions).map(entry).collect();
        Ok(Response::new(pb::ListVolumesResponse { entries, next_token }))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn controller_get_volume(
        &self,
        request: Request<pb::ControllerGetVolumeRequest>,
    ) -> Result<Response<pb::ControllerGetVolumeResponse>, Status> {
        let id = known(parse::volume_id(request.into_inner().volume_id)?)?;
        let entry = self.0.node.volumes().entry(&id)?;
        let status = pb::controller_get_volume_response::VolumeStatus {
            published_node_ids: Vec::new(),
            volume_condition: Some(self.0.condition(&id).await),
        };
        Ok(Response::new(pb::ControllerGetVolumeResponse {
            volume: Some(self.entry_message(&id, &entry)),
            status: Some(status),
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
            && parse::capabilities(&request.volume_capabilities, parameters.publish()).is_err();
        let (mut sum, mut largest) = (Bytes::ZERO, Bytes::ZERO);
        if !elsewhere && !unserved {
            let volumes = self.0.node.volumes().clone();
            let measured = volumes.clone();
            let spaces = blocking(move || measured.space(parameters.pool())).await?;
            let promised = |space| volumes.promised(space).free.round_down(GRAIN);
            let free = || spaces.iter().map(|(_, space)| promised(*space));
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

    #[tracing::instrument(skip_all, fields(snapshot_name = request.get_ref().name))]
    async fn create_snapshot(
        &self,
        request: Request<pb::CreateSnapshotRequest>,
    ) -> Result<Response<pb::CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        let new = parse::new_snapshot(request)?;
        let new = match new {
            Ok(new) => new,
            Err(unknown) => return Err(unknown.into()),
        };
        let id = SnapshotId::of_name(&new.name);
        let work = |claim: Arc<Claim<SnapshotId>>, node: Node| async move {
            node.snapshot(claim, new).await
        };
        let (snapshot, outcome) = self.0.claimed(&id, work).await?;
        if outcome == Outcome::Done {
            info!(snapshot = %id, volume = %snapshot.source(), "snapshot created");
        }
        let snapshot = Some(snapshot_message(&snapshot));
        Ok(Response::new(pb::CreateSnapshotResponse { snapshot }))
    }

    #[tracing::instrument(skip_all, fields(snapshot = request.get_ref().snapshot_id))]
    async fn delete_snapshot(
        &self,
        request: Request<pb::DeleteSnapshotRequest>,
    ) -> Result<Response<pb::DeleteSnapshotResponse>, Status> {
        if let Ok(id) = parse::snapshot_id("snapshot_id", request.into_inner().snapshot_id)? {
            let work = |claim: Arc<Claim<SnapshotId>>, node: Node| async move {
                node.delete_snapshot(claim).await
            };
            if self.0.claimed(&id, work).await? == Outcome::Done {
                info!(snapshot = %id, "snapshot deleted");
            }
        }
        Ok(Response::new(pb::DeleteSnapshotResponse::default()))
    }

    #[tracing::instrument(skip_all)]
    async fn list_snapshots(
        &self,
        request: Request<pb::ListSnapshotsRequest>,
    ) -> Result<Response<pb::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let (after, count) = parse::page(request.max_entries, &request.starting_token)?;
        let mut page = self.snapshots(
            &request.snapshot_id,
            &request.source_volume_id,
            after.as_ref(),
            count.saturating_add(1),
        );
        let more = page.len() > count;
        page.truncate(count);
        let next_token = match page.last() {
            Some(last) if more => parse::token(last.id()),
            Some(_) | None => String::new(),
        };
        let entry = |snapshot: &Snapshot| pb::list_snapshots_response::Entry {
            snapshot: Some(snapshot_message(snapshot)),
        };
        let entries = page.iter().map(entry).collect();
        Ok(Response::new(pb::ListSnapshotsResponse { entries, next_token }))
    }

    #[tracing::instrument(skip_all, fields(snapshot = request.get_ref().snapshot_id))]
    async fn get_snapshot(
        &self,
        request: Request<pb::GetSnapshotRequest>,
    ) -> Result<Response<pb::GetSnapshotResponse>, Status> {
        let id = parse::snapshot_id("snapshot_id", request.into_inner().snapshot_id)??;
        let snapshot = self.0.node.volumes().snapshot(&id)?;
        let snapshot = Some(snapshot_message(&snapshot));
        Ok(Response::new(pb::GetSnapshotResponse { snapshot }))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn controller_expand_volume(
        &self,
        request: Request<pb::ControllerExpandVolumeRequest>,
    ) -> Result<Response<pb::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = parse::volume_id(request.volume_id)?;
        let range = parse::new_size(request.capacity_range)?;
        let capability = request.volume_capability.map(|one| parse::capability(Some(one)));
        let capability = capability.transpose()?;
        let volume = self.0.find(id)?;
        let (id, publish) = (volume.id().clone(), volume.parameters().publish());
        let used = capability.map(|one| parse::used(&one, publish)).transpose()?;
        // Whoever does not say how it is used may have a file system on it.
        let has_file_system = match used {
            Some(used) => matches!(used.form, Form::Filesystem { .. }),
            None => publish == PublishAs::Filesystem,
        };
        let work = |claim: Arc<Claim>, node: Node| async move { node.expand(claim, range).await };
        let (volume, _) = self.0.claimed(&id, work).await?;
        Ok(Response::new(pb::ControllerExpandVolumeResponse {
            capacity_bytes: volume.size().into(),
            // A guest has been told, and a block device has grown.
            node_expansion_required: has_file_system,
        }))
    }

    #[tracing::instrument(skip_all, fields(volume = request.get_ref().volume_id))]
    async fn controller_modify_volume(
        &self,
        request: Request<pb::ControllerModifyVolumeRequest>,
    ) -> Result<Response<pb::ControllerModifyVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = self.0.find(parse::volume_id(request.volume_id)?)?.id().clone();
        let changes = parse::mutable_parameters(request.mutable_parameters);
        let work =
            |claim: Arc<Claim>, node: Node| async move { node.modify(&claim, &changes).await };
        self.0.claimed(&id, work).await?;
        Ok(Response::new(pb::ControllerModifyVolumeResponse::default()))
    }
}

/// The answer to an RPC whose capability is not advertised.
pub(super) fn unimplemented(rpc: &str) -> Status {
    Status::unimplemented(format!("{rpc} is not among the capabilities of this driver"))
}

impl Controller {
    fn new_volume(&self, request: pb::CreateVolumeRequest) -> Result<NewVolume, parse::Error> {
        parse::name(&request.name)?;
        let parameters = parse::parameters(request.parameters)?;
        let access_modes = parse::capabilities(&request.volume_capabilities, parameters.publish())?;
        let size = parse::size(request.capacity_range, parameters.source())?;
        let changes = parse::mutable_parameters(request.mutable_parameters);
        let throttle = parameters.throttle().with(&changes)?;
        let content = parse::content(request.volume_content_source)?;
        parse::topology(request.accessibility_requirements.as_ref(), self.0.node.name())?;
        let name = request.name;
        let master = None; // nobody has looked at it yet
        let lifecycle = Lifecycle::Persistent;
        Ok(NewVolume { name, size, parameters, throttle, access_modes, content, master, lifecycle })
    }

    /// The snapshots that a list asks for, from the first one after `after`. One that is damaged is
    /// not told of: CSI has no way to say so.
    fn snapshots(
        &self,
        id: &str,
        source: &str,
        after: Option<&SnapshotId>,
        count: usize,
    ) -> Vec<Snapshot> {
        let volumes = self.0.node.volumes();
        // An id that is not ours is unknown, and so the list is empty.
        let source = (!source.is_empty()).then(|| source.parse::<VolumeId>());
        let Ok(source) = source.transpose() else { return Vec::new() };
        if id.is_empty() {
            return volumes.list_snapshots(source.as_ref(), after, count);
        }
        let one = id.parse().ok().and_then(|id: SnapshotId| volumes.snapshot(&id).ok());
        let is_meant = |one: &Snapshot| source.as_ref().is_none_or(|source| one.source() == source);
        one.filter(is_meant).into_iter().collect()
    }

    /// One that is damaged has a name, and a condition that says so.
    fn entry_message(&self, id: &VolumeId, entry: &Entry) -> pb::Volume {
        match entry {
            Entry::Volume(volume) => self.message(volume),
            Entry::Damaged { .. } => self.named(id, Bytes::ZERO, HashMap::new()),
        }
    }

    fn message(&self, volume: &Volume) -> pb::Volume {
        let message = self.named(volume.id(), volume.size(), context(volume));
        let content_source = volume.content().map(content_message);
        pb::Volume { content_source, ..message }
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

fn content_message(content: &Content) -> pb::VolumeContentSource {
    let r#type = match content {
        Content::Snapshot(id) => {
            ContentType::Snapshot(SnapshotSource { snapshot_id: id.to_string() })
        }
        Content::Volume(id) => ContentType::Volume(VolumeSource { volume_id: id.to_string() }),
    };
    pb::VolumeContentSource { r#type: Some(r#type) }
}

fn snapshot_message(snapshot: &Snapshot) -> pb::Snapshot {
    pb::Snapshot {
        size_bytes: snapshot.size().into(),
        snapshot_id: snapshot.id().to_string(),
        source_volume_id: snapshot.source().to_string(),
        creation_time: Some(snapshot.created().into()),
        ready_to_use: true,
        group_snapshot_id: String::new(),
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
