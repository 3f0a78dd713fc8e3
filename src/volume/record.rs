//! The durable records of the domain, as they lie in a pool (design: Records).

use super::{AccessMode, LayerId, Parameters};
use crate::{store::Version, units::Bytes};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// One volume: `POOL/records/volumes/<id>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VolumeRecord {
    version: Version<1>,
    /// The CSI name; the id of the record follows from it.
    pub(crate) name: String,
    /// Size the guest sees.
    pub(crate) size: Bytes,
    /// As they were given, for the comparison that idempotency asks for.
    pub(crate) parameters: Parameters,
    /// The access modes it was created for.
    pub(crate) access_modes: BTreeSet<AccessMode>,
    pub(crate) phase: Phase,
}

/// How far the life of a volume has come. Only `Ready` is at rest; one whose end is decided lies in
/// another directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub(super) enum Phase {
    /// Intended; its layer may be there in part. Nobody was told of it: start-up takes it back.
    Creating { active: LayerId },
    /// Usable.
    Ready { active: LayerId },
}

impl VolumeRecord {
    pub(crate) fn new(
        name: String,
        size: Bytes,
        parameters: Parameters,
        access_modes: BTreeSet<AccessMode>,
        phase: Phase,
    ) -> Self {
        Self { version: Version, name, size, parameters, access_modes, phase }
    }

    /// The same volume, further on.
    pub(crate) fn in_phase(&self, phase: Phase) -> Self {
        Self { phase, ..self.clone() }
    }
}

impl Phase {
    /// The layer that takes the writes.
    pub(super) fn active(&self) -> LayerId {
        match self {
            Self::Creating { active } | Self::Ready { active } => *active,
        }
    }
}

/// One layer: `POOL/records/layers/<uuid>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerRecord {
    version: Version<1>,
    /// The layer it stands on; a raw layer stands on nothing.
    pub(crate) parent: Option<LayerId>,
    pub(crate) format: Format,
    /// Size it presents.
    pub(crate) size: Bytes,
}

impl LayerRecord {
    /// A raw layer without a parent.
    pub(crate) fn raw(size: Bytes) -> Self {
        Self { version: Version, parent: None, format: Format::Raw, size }
    }
}

/// How the bytes of a layer lie in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// As the guest sees them, holes where nothing was written.
    Raw,
}

impl Format {
    /// The name QEMU has for it, and the extension of its files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
        }
    }
}
