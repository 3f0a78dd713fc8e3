//! CSI Identity: who we are, what we can do, whether we are well.

use super::{
    DRIVER, Edge,
    pb::csi::{self as pb, identity_server},
};
use pb::plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
use tonic::{Request, Response, Status};

/// The Identity service.
#[derive(Debug)]
pub struct Identity(pub Edge);

#[tonic::async_trait]
impl identity_server::Identity for Identity {
    async fn get_plugin_info(
        &self,
        _request: Request<pb::GetPluginInfoRequest>,
    ) -> Result<Response<pb::GetPluginInfoResponse>, Status> {
        Ok(Response::new(pb::GetPluginInfoResponse {
            name: DRIVER.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<pb::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<pb::GetPluginCapabilitiesResponse>, Status> {
        let capability = |kind: service::Type| pb::PluginCapability {
            r#type: Some(Type::Service(Service { r#type: kind.into() })),
        };
        let kinds = [
            service::Type::ControllerService,
            service::Type::VolumeAccessibilityConstraints,
            service::Type::SnapshotMetadataService,
        ];
        let online = VolumeExpansion { r#type: volume_expansion::Type::Online.into() };
        let expansion = pb::PluginCapability { r#type: Some(Type::VolumeExpansion(online)) };
        let capabilities = kinds.map(capability).into_iter().chain([expansion]).collect();
        Ok(Response::new(pb::GetPluginCapabilitiesResponse { capabilities }))
    }

    /// The same story as `/readyz` tells.
    async fn probe(
        &self,
        _request: Request<pb::ProbeRequest>,
    ) -> Result<Response<pb::ProbeResponse>, Status> {
        self.0.node.readiness().await.map_err(Status::failed_precondition)?;
        Ok(Response::new(pb::ProbeResponse { ready: Some(true) }))
    }
}
