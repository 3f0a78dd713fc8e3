//! The durable records of the domain, as they lie in a pool (design: Records).

use super::{AccessMode, Encryption, LayerId, Master, Parameters, SnapshotId, Throttle, VolumeId};
use crate::{store::Version, units::Bytes};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, time::SystemTime};

/// One volume: `POOL/records/volumes/<id>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VolumeRecord {
    pub(super) version: Version<1>,
    /// The CSI name; the id of the record follows from it.
    pub(super) name: String,
    /// Size the guest sees. While the active layer has more, the volume is being expanded.
    pub(super) size: Bytes,
    /// As they were given, for the comparison that idempotency asks for.
    pub(super) parameters: Parameters,
    /// The access modes it was created for.
    pub(super) access_modes: BTreeSet<AccessMode>,
    /// What it was made from, if not blank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<Content>,
    /// The limits that hold now.
    #[serde(default, skip_serializing_if = "Throttle::is_unlimited")]
    pub(super) throttle: Throttle,
    /// Set while a file system is made on it, which held nothing before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) formatting: bool,
    /// What ends it.
    #[serde(default, skip_serializing_if = "Lifecycle::is_persistent")]
    pub(super) lifecycle: Lifecycle,
    pub(super) phase: Phase,
}

/// What ends a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lifecycle {
    /// Its deletion.
    #[default]
    Persistent,
    /// The end of the pod that it was made for.
    Ephemeral,
}

impl Lifecycle {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
    fn is_persistent(&self) -> bool {
        *self == Self::Persistent
    }
}

/// What a volume is made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// Another volume, as it was at that moment.
    Volume(VolumeId),
}

/// How far the life of a volume has come. Only `Ready` is at rest; one whose end is decided lies in
/// another directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub(super) enum Phase {
    /// Intended; its layer may be there in part. Nobody was told of it: start-up takes it back.
    Creating {
        active: LayerId,
        /// The layer that it is to stand on. Its last name may be gone by now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<LayerId>,
        /// The layer that is put onto the source, so that the volume can stand on what was active.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        overlay: Option<LayerId>,
        /// The layer that is to become a copy of what it is made from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        copy: Option<LayerId>,
        /// The remote master that it is to stand on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        master: Option<LayerId>,
    },
    /// Usable.
    Ready { active: LayerId },
}

impl VolumeRecord {
    /// The same volume, further on.
    pub(super) fn in_phase(&self, phase: Phase) -> Self {
        Self { phase, ..self.clone() }
    }
}

impl Phase {
    /// The layer that takes the writes.
    pub(super) fn active(&self) -> LayerId {
        match self {
            Self::Creating { active, .. } | Self::Ready { active } => *active,
        }
    }
}

/// One snapshot: `POOL/records/snapshots/<id>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SnapshotRecord {
    pub(super) version: Version<1>,
    /// The CSI name; the id of the record follows from it.
    pub(super) name: String,
    /// The volume it was taken of; it may be gone, and another have its id.
    pub(super) source: VolumeId,
    /// The layer that the snapshot is a name for.
    pub(super) layer: LayerId,
    /// Size of the volume at that moment.
    pub(super) size: Bytes,
    pub(super) phase: Cut,
}

/// How far a snapshot has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub(super) enum Cut {
    /// Intended. Start-up drives it on if the volume stands on `overlay` already, else takes it
    /// back.
    Cutting { overlay: LayerId },
    /// Usable.
    Ready { created: SystemTime },
}

/// One layer: `POOL/records/layers/<uuid>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerRecord {
    pub(super) version: Version<1>,
    /// The layer it stands on; a raw layer stands on nothing.
    pub(super) parent: Option<LayerId>,
    pub(super) format: Format,
    /// Size it presents.
    pub(super) size: Bytes,
    /// Set where it is not plain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) encryption: Option<Encryption>,
    /// The remote master that it is: then it has no file, and stands on nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) master: Option<Master>,
    /// The layer whose file holds its bytes, where that is not its own: it was committed into that
    /// file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<LayerId>,
    /// Set while it is to be made independent of its parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) detach: Option<Detach>,
    /// Set while a merge has left something to remove.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) leftovers: Option<Leftovers>,
}

/// A layer is to get all it needs from below into its own file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Detach {
    /// At most so many bytes a second; 0: as fast as can be.
    pub(super) bytes_per_second: Bytes,
}

/// What is not needed any more after a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Leftovers {
    /// The layer that was its parent.
    pub(super) layer: LayerId,
    /// The file that was its own, and in which format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<(LayerId, Format)>,
}

impl LayerRecord {
    /// A layer without a parent.
    pub(super) fn bottom(format: Format, size: Bytes) -> Self {
        Self {
            version: Version,
            parent: None,
            format,
            size,
            encryption: None,
            master: None,
            file: None,
            detach: None,
            leftovers: None,
        }
    }

    /// An empty layer on `parent`.
    pub(super) fn overlay(parent: LayerId, size: Bytes) -> Self {
        Self { parent: Some(parent), ..Self::bottom(Format::Qcow2, size) }
    }
}

/// How the bytes of a layer lie in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// As the guest sees them, holes where nothing was written.
    Raw,
    /// QEMU's own: it can stand on another layer.
    Qcow2,
}

impl Format {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Raw, Self::Qcow2];

    /// The name QEMU has for it, and the extension of its files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}
