//! From protobuf to the words of the domain. What is wrong is said with its field and its value.

use super::{TOPOLOGY, pb::csi as pb};
use crate::{
    node::{
        Capability, Form, Group, HostError, HostPath,
        filesystem::{self, Kind, MountFlags},
    },
    source::{Access, SecretError, Secrets, Source},
    units::Bytes,
    volume::{
        AccessMode, Content, InvalidName, NewSnapshot, NodeName, ParameterError, Parameters,
        Passphrase, PublishAs, RangeError, SizeRange, SnapshotId, VolumeId,
    },
};
use pb::{
    volume_capability::{AccessType, access_mode::Mode},
    volume_content_source::Type as ContentType,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What is wrong with a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0}: it is required, and empty")]
    Empty(&'static str),
    #[error("{field}: {text:?} has {length} bytes, more than {most}")]
    TooLong { field: &'static str, text: String, length: usize, most: usize },
    #[error("{field}: {text:?} has a control character in it")]
    Control { field: &'static str, text: String },
    #[error("{field}: {value} is not served; {instead}")]
    NotServed { field: &'static str, value: String, instead: &'static str },
    #[error("{field}: {value} is below 0")]
    Negative { field: &'static str, value: i32 },
    #[error("starting_offset: {offset} is not within the snapshot, which has {} bytes", size.count())]
    Offset { offset: i64, size: Bytes },
    #[error("starting_token: {0:?} is not one that this driver gave out; begin without a token")]
    Token(String),
    #[error(
        "accessibility_requirements: no topology names this node; it is {TOPOLOGY}={node}, asked \
         was for {asked}"
    )]
    Topology { node: NodeName, asked: String },
    #[error("staging_target_path: it is empty; stage the volume first and say where")]
    NoStaging,
    #[error("volume_content_source")]
    Source(#[source] InvalidName),
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    #[error(transparent)]
    Filesystem(#[from] filesystem::Error),
    #[error(transparent)]
    Secrets(#[from] SecretError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("volume_context: size is {0:?}, and must be more than 0 bytes, such as 10Gi")]
    Size(String),
    #[error("volume_context")]
    Attribute(#[source] ParameterError),
    #[error("volume_context: {key} is {is:?}, not {believed:?}")]
    Context { key: String, is: String, believed: String },
}

impl Error {
    /// The same of a name that stands in `volume_id`.
    pub(super) fn of_volume_id(self) -> Self {
        let field = "volume_id";
        match self {
            Self::Empty(_) => Self::Empty(field),
            Self::TooLong { text, length, most, .. } => Self::TooLong { field, text, length, most },
            Self::Control { text, .. } => Self::Control { field, text },
            other => other,
        }
    }
}

/// CSI's limit on every string without one of its own (spec, "Size Limits").
const LONGEST: usize = 128;

/// What the token of a page begins with; the id of the last entry of the page before follows.
const TOKEN: &str = "after:";

/// The volume an id names. Empty is the caller's mistake; an id that is not ours is only unknown.
pub(super) fn volume_id(id: String) -> Result<Result<VolumeId, InvalidName>, Error> {
    if id.is_empty() {
        return Err(Error::Empty("volume_id"));
    }
    Ok(VolumeId::try_from(id))
}

/// The snapshot an id names. Empty is the caller's mistake; an id that is not ours is only unknown.
pub(super) fn snapshot_id(
    field: &'static str,
    id: String,
) -> Result<Result<SnapshotId, InvalidName>, Error> {
    if id.is_empty() {
        return Err(Error::Empty(field));
    }
    Ok(SnapshotId::try_from(id))
}

/// A snapshot that is asked for, of a volume whose id may be none of ours.
pub(super) fn new_snapshot(
    request: pb::CreateSnapshotRequest,
) -> Result<Result<NewSnapshot, InvalidName>, Error> {
    name(&request.name)?;
    if request.source_volume_id.is_empty() {
        return Err(Error::Empty("source_volume_id"));
    }
    if let Some(key) = request.parameters.into_keys().find(|key| !is_reserved(key)) {
        let (field, value) = ("parameters", format!("{key:?}"));
        return Err(Error::NotServed { field, value, instead: "a snapshot has no parameters" });
    }
    let source = VolumeId::try_from(request.source_volume_id);
    Ok(source.map(|source| NewSnapshot { name: request.name, source }))
}

/// Keys that the external-snapshotter adds for its own use.
fn is_reserved(key: &str) -> bool {
    key.starts_with("csi.storage.k8s.io/")
}

/// What a volume is to be made from.
pub(super) fn content(source: Option<pb::VolumeContentSource>) -> Result<Option<Content>, Error> {
    let Some(source) = source else { return Ok(None) };
    let empty = |id: &str, field| if id.is_empty() { Err(Error::Empty(field)) } else { Ok(()) };
    match source.r#type {
        None => Err(Error::Empty("volume_content_source")),
        Some(ContentType::Snapshot(source)) => {
            empty(&source.snapshot_id, "volume_content_source.snapshot.snapshot_id")?;
            let id = source.snapshot_id.try_into().map_err(Error::Source)?;
            Ok(Some(Content::Snapshot(id)))
        }
        Some(ContentType::Volume(source)) => {
            empty(&source.volume_id, "volume_content_source.volume.volume_id")?;
            let id = source.volume_id.try_into().map_err(Error::Source)?;
            Ok(Some(Content::Volume(id)))
        }
    }
}

/// Limits that are to change.
pub(super) fn mutable_parameters(given: HashMap<String, String>) -> BTreeMap<String, String> {
    given.into_iter().collect()
}

/// The sizes that will do for a volume that is to grow; CSI requires the range.
pub(super) fn new_size(range: Option<pb::CapacityRange>) -> Result<SizeRange, Error> {
    let range = range.ok_or(Error::Empty("capacity_range"))?;
    Ok(SizeRange::new(range.required_bytes, range.limit_bytes)?)
}

/// A name for a new volume or snapshot: anything but too long a text, or one with the control characters that
/// CSI bans.
pub(super) fn name(name: &str) -> Result<(), Error> {
    let (field, text) = ("name", || name.chars().take(LONGEST).collect());
    match name {
        "" => Err(Error::Empty(field)),
        _ if name.len() > LONGEST => {
            Err(Error::TooLong { field, text: text(), length: name.len(), most: LONGEST })
        }
        _ if name.chars().any(is_banned) => Err(Error::Control { field, text: text() }),
        _ => Ok(()),
    }
}

/// Control characters, save common white space (CSI spec, `CreateVolumeRequest.name`).
fn is_banned(letter: char) -> bool {
    letter.is_control() && !matches!(letter, '\t' | '\n' | '\r')
}

/// The sizes that will do. No range at all leaves the choice to us, and one without bounds does
/// where there is a master, whose size it is then.
pub(super) fn size(
    range: Option<pb::CapacityRange>,
    master: Option<&Source>,
) -> Result<SizeRange, Error> {
    match range {
        None => Ok(SizeRange::ANY),
        Some(pb::CapacityRange { required_bytes: 0, limit_bytes: 0 }) if master.is_some() => {
            Ok(SizeRange::ANY)
        }
        Some(range) => Ok(SizeRange::new(range.required_bytes, range.limit_bytes)?),
    }
}

/// Parameters of a `StorageClass`.
pub(super) fn parameters(given: HashMap<String, String>) -> Result<Parameters, Error> {
    let given: BTreeMap<_, _> = given.into_iter().collect();
    Ok(given.try_into()?)
}

/// The secrets of a request, as the master needs them; where there is none they mean nothing.
pub(super) fn secrets(
    master: Option<&Source>,
    given: HashMap<String, String>,
) -> Result<Secrets, Error> {
    Ok(master.map(|master| Secrets::new(master, given)).transpose()?.unwrap_or_default())
}

/// The passphrase among the secrets of a request, which an encrypted volume needs. Elsewhere it is
/// left with the others.
pub(super) fn passphrase(
    is_encrypted: bool,
    given: &mut HashMap<String, String>,
) -> Result<Option<Passphrase>, Error> {
    if !is_encrypted {
        return Ok(None);
    }
    Ok(Some(Passphrase::take(given)?.ok_or_else(Passphrase::missing)?))
}

/// A path that CSI requires.
pub(super) fn path(field: &'static str, text: String) -> Result<HostPath, Error> {
    if text.is_empty() {
        return Err(Error::Empty(field));
    }
    Ok(HostPath::parse(field, text)?)
}

/// The access modes of a volume's capabilities; there is at least one, and all are served.
pub(super) fn capabilities(
    capabilities: &[pb::VolumeCapability],
    publish: PublishAs,
) -> Result<BTreeSet<AccessMode>, Error> {
    if capabilities.is_empty() {
        return Err(Error::Empty("volume_capabilities"));
    }
    let field = "volume_capabilities";
    let mode = |one| use_of(one, publish, field).map(|used| used.access);
    capabilities.iter().map(mode).collect()
}

/// The one capability that CSI requires, which makes sense for some volume.
pub(super) fn capability(
    capability: Option<pb::VolumeCapability>,
) -> Result<pb::VolumeCapability, Error> {
    let field = "volume_capability";
    let capability = capability.ok_or(Error::Empty(field))?;
    mode_of(&capability, field)?;
    if capability.access_type.is_none() {
        form_of(&capability, PublishAs::default(), field)?;
    }
    Ok(capability)
}

/// What a capability asks for of a volume that is published so.
pub(super) fn used(
    capability: &pb::VolumeCapability,
    publish: PublishAs,
) -> Result<Capability, Error> {
    use_of(capability, publish, "volume_capability")
}

/// The group a volume is given to; a block device has none of its own.
fn group_of(one: &pb::VolumeCapability, field: &'static str) -> Result<Option<Group>, Error> {
    match &one.access_type {
        Some(AccessType::Mount(mount)) if !mount.volume_mount_group.is_empty() => {
            let text = &mount.volume_mount_group;
            text.parse().map(|number| Some(Group::new(number))).map_err(|_| Error::NotServed {
                field,
                value: format!("volume_mount_group {text:?}"),
                instead: "it is the number of a group",
            })
        }
        Some(AccessType::Mount(_) | AccessType::Block(_)) | None => Ok(None),
    }
}

/// A file system of ours is for one kernel, which knows nothing of another that writes.
fn use_of(
    one: &pb::VolumeCapability,
    publish: PublishAs,
    field: &'static str,
) -> Result<Capability, Error> {
    let (form, access) = (form_of(one, publish, field)?, mode_of(one, field)?);
    if access == AccessMode::MultiNodeMultiWriter && matches!(form, Form::Filesystem { .. }) {
        let value = format!("access mode {} with a file system", access.as_str());
        let instead = "ext4 and xfs have one writer; several take volumeMode Block, or \
                       publish: vhost-user, and something on it that keeps them apart";
        return Err(Error::NotServed { field, value, instead });
    }
    Ok(Capability { access, form, group: group_of(one, field)? })
}

/// What is done with a volume at a target.
pub(super) fn access(readonly: bool) -> Access {
    if readonly { Access::Read } else { Access::Write }
}

/// The vhost-user form is a directory: access type `mount`, whose file system and mount options
/// have no meaning here. A default `fs_type`, which provisioners add by themselves, is passed over.
fn form_of(
    one: &pb::VolumeCapability,
    publish: PublishAs,
    field: &'static str,
) -> Result<Form, Error> {
    let refuse = |value: String, instead| Err(Error::NotServed { field, value, instead });
    match &one.access_type {
        Some(AccessType::Mount(mount)) if publish == PublishAs::Filesystem => {
            let kind = Kind::parse(&mount.fs_type)?;
            let flags = MountFlags::parse(mount.mount_flags.iter().map(String::as_str))?;
            Ok(Form::Filesystem { kind, flags })
        }
        Some(AccessType::Mount(mount)) if !mount.mount_flags.is_empty() => {
            let flags = format!("mount_flags {:?}", mount.mount_flags);
            refuse(flags, "a vhost-user socket has no mount options")
        }
        Some(AccessType::Mount(_)) => Ok(Form::VhostUser),
        Some(AccessType::Block(_)) => Ok(Form::Block),
        None => refuse("no access type".to_owned(), "use access type mount or block"),
    }
}

fn mode_of(one: &pb::VolumeCapability, field: &'static str) -> Result<AccessMode, Error> {
    let refuse = |value: String, instead| Err(Error::NotServed { field, value, instead });
    let mode = one.access_mode.as_ref().map_or(0, |mode| mode.mode);
    match Mode::try_from(mode) {
        Ok(Mode::SingleNodeWriter) => Ok(AccessMode::SingleNodeWriter),
        Ok(Mode::SingleNodeSingleWriter) => Ok(AccessMode::SingleNodeSingleWriter),
        Ok(Mode::SingleNodeMultiWriter) => Ok(AccessMode::SingleNodeMultiWriter),
        Ok(Mode::SingleNodeReaderOnly) => Ok(AccessMode::SingleNodeReaderOnly),
        Ok(Mode::MultiNodeReaderOnly) => Ok(AccessMode::MultiNodeReaderOnly),
        Ok(Mode::MultiNodeMultiWriter) => Ok(AccessMode::MultiNodeMultiWriter),
        Ok(Mode::MultiNodeSingleWriter) => refuse(
            "access mode MULTI_NODE_SINGLE_WRITER".to_owned(),
            "nothing here tells its one writer from its readers; use SINGLE_NODE_WRITER, or \
             MULTI_NODE_READER_ONLY for a copy",
        ),
        other => {
            let name =
                other.map_or_else(|_| mode.to_string(), |mode| mode.as_str_name().to_owned());
            refuse(format!("access mode {name}"), "use one of those that CSI names")
        }
    }
}

/// An error where the requirements leave no room for this node.
pub(super) fn topology(
    requirements: Option<&pb::TopologyRequirement>,
    node: &NodeName,
) -> Result<(), Error> {
    let Some(requirements) = requirements else { return Ok(()) };
    let topologies = if requirements.requisite.is_empty() {
        &requirements.preferred
    } else {
        &requirements.requisite
    };
    if topologies.is_empty() || topologies.iter().any(|one| is_here(one, node)) {
        return Ok(());
    }
    let asked: Vec<_> = topologies.iter().map(|one| format!("{:?}", one.segments)).collect();
    Err(Error::Topology { node: node.clone(), asked: asked.join(" or ") })
}

/// Whether a topology is that of this node.
pub(super) fn is_here(topology: &pb::Topology, node: &NodeName) -> bool {
    topology.segments.iter().all(|(key, value)| key == TOPOLOGY && value == node.as_str())
}

/// How many entries are wanted at most, 0 being any number.
pub(super) fn most(field: &'static str, value: i32) -> Result<usize, Error> {
    let count = usize::try_from(value).map_err(|_| Error::Negative { field, value })?;
    Ok(if count == 0 { usize::MAX } else { count })
}

/// Where in a snapshot to begin; at its end is fine, for who has all but the end of the stream.
pub(super) fn offset(offset: i64, size: Bytes) -> Result<u64, Error> {
    let inside = u64::try_from(offset).ok().filter(|offset| *offset <= size.count());
    inside.ok_or(Error::Offset { offset, size })
}

/// Where a page begins and how many entries it may have.
pub(super) fn page<Id: std::str::FromStr>(
    max_entries: i32,
    token: &str,
) -> Result<(Option<Id>, usize), Error> {
    let count = most("max_entries", max_entries)?;
    let after = if token.is_empty() {
        None
    } else {
        let id = token.strip_prefix(TOKEN).and_then(|id| id.parse().ok());
        Some(id.ok_or_else(|| Error::Token(token.to_owned()))?)
    };
    Ok((after, count))
}

/// The token for the page after this volume or snapshot.
pub(super) fn token(last: impl std::fmt::Display) -> String {
    format!("{TOKEN}{last}")
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    fn mount(mode: Mode) -> pb::VolumeCapability {
        pb::VolumeCapability {
            access_mode: Some(pb::volume_capability::AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(pb::volume_capability::MountVolume::default())),
        }
    }

    #[test]
    fn any_name_csi_allows_is_allowed() {
        let longest = "n".repeat(128);
        for good in ["a", "/../", "Grüße 1", "tab\tin", &longest] {
            assert!(name(good).is_ok(), "{good}");
        }
        assert!(name("").unwrap_err().to_string().starts_with("name: "));
        assert!(name(&"n".repeat(129)).unwrap_err().to_string().contains("129 bytes"));
        assert!(name("a\0b").unwrap_err().to_string().contains("\"a\\0b\""));
        assert!(name("a\u{85}b").is_err());
    }

    #[test]
    fn only_modes_that_are_served_pass() {
        for mode in [
            Mode::SingleNodeWriter,
            Mode::SingleNodeMultiWriter,
            Mode::SingleNodeReaderOnly,
            Mode::MultiNodeReaderOnly,
            Mode::MultiNodeMultiWriter,
        ] {
            assert!(capabilities(&[mount(mode)], PublishAs::VhostUser).is_ok());
        }
        for (mode, publish) in [
            (Mode::Unknown, PublishAs::VhostUser),
            (Mode::MultiNodeSingleWriter, PublishAs::VhostUser),
            (Mode::MultiNodeMultiWriter, PublishAs::Filesystem),
        ] {
            let both = [mount(Mode::SingleNodeWriter), mount(mode)];
            let error = capabilities(&both, publish).unwrap_err();
            assert!(error.to_string().contains(mode.as_str_name()), "{error}");
        }
        let block = pb::VolumeCapability {
            access_type: Some(AccessType::Block(pb::volume_capability::BlockVolume {})),
            ..mount(Mode::SingleNodeWriter)
        };
        for publish in [PublishAs::VhostUser, PublishAs::Filesystem] {
            assert_eq!(used(&block, publish).unwrap().form, Form::Block);
        }
        let neither = pb::VolumeCapability { access_type: None, ..block };
        assert!(capability(Some(neither)).unwrap_err().to_string().contains("no access type"));
        let mut ntfs = mount(Mode::SingleNodeWriter);
        let Some(AccessType::Mount(mount)) = &mut ntfs.access_type else { unreachable!() };
        mount.fs_type = "ntfs".to_owned();
        assert_eq!(used(&ntfs, PublishAs::VhostUser).unwrap().form, Form::VhostUser);
        let error = used(&ntfs, PublishAs::Filesystem).unwrap_err();
        assert!(error.to_string().contains("fs_type: \"ntfs\""), "{error}");
        assert!(matches!(
            capabilities(&[], PublishAs::VhostUser),
            Err(Error::Empty("volume_capabilities"))
        ));
        assert!(matches!(capability(None), Err(Error::Empty("volume_capability"))));
    }

    #[test]
    fn a_page_goes_on_behind_its_token() {
        let last: VolumeId = "pvc-1".parse().unwrap();
        assert_eq!(page(2, &token(&last)).unwrap(), (Some(last), 2));
        let page = page::<VolumeId>;
        assert_eq!(page(0, "").unwrap(), (None, usize::MAX));
        assert!(matches!(page(-1, ""), Err(Error::Negative { .. })));
        for foreign in ["x", "after:", "after:NO", "AFTER:a"] {
            assert!(matches!(page(0, foreign), Err(Error::Token(_))), "{foreign}");
        }
    }

    #[test]
    fn a_volume_can_only_be_made_where_its_topology_leads() {
        let node: NodeName = "node-1".parse().unwrap();
        let at = |key: &str, value: &str| pb::Topology {
            segments: HashMap::from([(key.to_owned(), value.to_owned())]),
        };
        let require = |requisite: Vec<_>, preferred: Vec<_>| {
            topology(Some(&pb::TopologyRequirement { requisite, preferred }), &node)
        };
        assert!(topology(None, &node).is_ok());
        assert!(require(vec![], vec![]).is_ok());
        assert!(require(vec![at(TOPOLOGY, "other"), at(TOPOLOGY, "node-1")], vec![]).is_ok());
        let error = require(vec![at(TOPOLOGY, "other")], vec![]).unwrap_err();
        assert!(error.to_string().contains("other") && error.to_string().contains("node-1"));
        assert!(require(vec![at("zone", "node-1")], vec![]).is_err());
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".{0,200}", count: i32) {
            _ = name(&text);
            _ = page::<VolumeId>(count, &text);
            _ = path("target_path", text.clone());
            _ = volume_id(text);
        }
    }
}
