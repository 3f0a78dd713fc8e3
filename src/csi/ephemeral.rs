//! Ephemeral inline volumes: a pod says itself what volume it gets (`volumes[].csi`), which is made
//! by `NodePublishVolume` alone and gone with `NodeUnpublishVolume` (facts/kubernetes.md section 2d).
//!
//! Whoever may make a pod says what is in it. So nothing of another tenant can be named: neither a
//! snapshot or volume to start from, nor a file of this machine.

use super::{
    parse::{self, Error},
    pb::csi as pb,
};
use crate::{
    node::{HostPath, Inline},
    units::Bytes,
    volume::{Lifecycle, NewVolume, SizeRange, VolumeId},
};

/// Set by kubelet, and by nobody else: a pod's own attributes cannot begin so.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// The digits of a SHA-256.
const DIGITS: usize = 64;

/// Whether kubelet asks for a volume that goes with its pod.
pub(super) fn is_asked(request: &pb::NodePublishVolumeRequest) -> bool {
    request.volume_context.get(EPHEMERAL).is_some_and(|value| value == "true")
}

/// The volume that an id of a Node call names. Kubelet names those of pods itself, in more letters
/// than an id of ours has.
pub(super) fn volume_id(id: String) -> Result<Result<VolumeId, crate::volume::InvalidName>, Error> {
    let digits = id.strip_prefix("csi-").unwrap_or_default();
    if digits.len() == DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(Ok(VolumeId::of_name(&id)));
    }
    parse::volume_id(id)
}

/// What a pod asks for.
pub(super) fn inline(
    request: pb::NodePublishVolumeRequest,
    target: HostPath,
    capability: &pb::VolumeCapability,
) -> Result<Inline, Error> {
    parse::name(&request.volume_id).map_err(Error::of_volume_id)?;
    if !request.staging_target_path.is_empty() {
        let (field, value) = ("staging_target_path", request.staging_target_path);
        let instead = "an ephemeral volume is not staged; leave it empty";
        return Err(Error::NotServed { field, value, instead });
    }
    let mut attributes = request.volume_context;
    let size = attributes.remove("size").map_or(Ok(SizeRange::ANY), |size| range(&size))?;
    // What a pod mounts is a file system, unless it says otherwise.
    attributes.entry("publish".to_owned()).or_insert_with(|| "filesystem".to_owned());
    let parameters = parse::parameters(attributes).map_err(|error| match error {
        Error::Parameter(error) => Error::Attribute(error),
        other => other,
    })?;
    if let Some(source) = parameters.source()
        && source.names_a_file()
    {
        let (field, value) = ("volume_context: source", source.to_string());
        let instead = "a pod cannot name a file of its node";
        return Err(Error::NotServed { field, value, instead });
    }
    let secrets = parse::secrets(parameters.source(), request.secrets)?;
    let used = parse::used(capability, parameters.publish())?;
    let access = parse::access(request.readonly);
    let new = NewVolume {
        name: request.volume_id,
        size,
        throttle: parameters.throttle().clone(),
        parameters,
        access_modes: [used.access].into(),
        content: None,
        master: None, // nobody has looked at it yet
        lifecycle: Lifecycle::Ephemeral,
    };
    Ok(Inline { new, secrets, target, capability: used, access })
}

fn range(text: &str) -> Result<SizeRange, Error> {
    let size = text.parse::<Bytes>().ok().and_then(|size| i64::try_from(size.count()).ok());
    let range = size.and_then(|size| SizeRange::new(size, 0).ok());
    range.ok_or_else(|| Error::Size(text.to_owned()))
}

#[cfg(test)]
mod test {
    use super::*;

    fn request(attributes: &[(&str, &str)]) -> pb::NodePublishVolumeRequest {
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pb::NodePublishVolumeRequest {
            volume_id: format!("csi-{}", "a1".repeat(32)),
            volume_context: attributes.iter().map(text).collect(),
            ..Default::default()
        }
    }

    fn parsed(attributes: &[(&str, &str)]) -> Result<Inline, String> {
        use pb::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
        let capability = pb::VolumeCapability {
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
            access_type: Some(AccessType::Mount(MountVolume::default())),
        };
        let target = HostPath::parse("target_path", "/t".to_owned()).unwrap();
        let inline = inline(request(attributes), target, &capability);
        inline.map_err(|error| crate::chain::Chain(&error).to_string())
    }

    #[test]
    fn only_kubelet_asks_for_a_volume_of_a_pod() {
        assert!(is_asked(&request(&[(EPHEMERAL, "true")])));
        assert!(!is_asked(&request(&[(EPHEMERAL, "false")])));
        assert!(!is_asked(&request(&[("ephemeral", "true")])));
    }

    #[test]
    fn a_volume_of_a_pod_is_known_by_what_kubelet_calls_it() {
        let id = request(&[]).volume_id;
        assert_eq!(volume_id(id.clone()).unwrap().unwrap(), VolumeId::of_name(&id));
        assert_eq!(volume_id("pvc-1".to_owned()).unwrap().unwrap().to_string(), "pvc-1");
        assert!(volume_id(format!("csi-{}", "g".repeat(64))).unwrap().is_err());
        assert!(volume_id(String::new()).is_err());
    }

    #[test]
    fn a_pod_says_what_it_gets() {
        let inline = parsed(&[(EPHEMERAL, "true"), ("csi.storage.k8s.io/pod.name", "p")]).unwrap();
        assert_eq!(inline.new.size, SizeRange::ANY);
        assert!(matches!(inline.capability.form, crate::node::Form::Filesystem { .. }));
        assert_eq!(inline.new.lifecycle, Lifecycle::Ephemeral);
        let inline = parsed(&[("size", "2Gi"), ("publish", "vhost-user"), ("pool", "p")]).unwrap();
        assert_eq!(inline.new.size.chosen(), Bytes::gib(2));
        assert_eq!(inline.capability.form, crate::node::Form::VhostUser);
        for (key, value, said) in [
            ("size", "0", "volume_context: size is \"0\""),
            ("size", "much", "volume_context: size is \"much\""),
            ("size", "99999Pi", "volume_context: size is \"99999Pi\""),
            ("snapshot", "gold", "volume_context: parameters: unknown key \"snapshot\""),
            ("publish", "nfs", "volume_context: parameters: publish is \"nfs\""),
            ("source", "nbd+unix:///e?socket=/run/x", "a pod cannot name a file of its node"),
            ("source", "rbd:pool/image:conf=/etc/shadow", "a pod cannot name a file of its node"),
        ] {
            let error = parsed(&[(key, value)]).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
