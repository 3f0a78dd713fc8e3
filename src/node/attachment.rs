//! What is staged and published: `RUN/<key>/attachment.json`.
//!
//! It outlives the driver, which finds by it what it served, and not a reboot, after which nothing
//! is staged.

use super::form::{Capability, Form, Group};
use crate::{
    source::Access,
    store::{self, Version},
    volume::{AccessMode, VolumeId},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// One staged volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Attachment {
    version: Version<1>,
    pub(super) volume: VolumeId,
    pub(super) staging_path: PathBuf,
    pub(super) access: AccessMode,
    #[serde(default)]
    pub(super) form: Form,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<Group>,
    pub(super) phase: Phase,
    /// The target paths, each noted before it is mounted and forgotten after it is gone.
    pub(super) targets: Vec<PathBuf>,
    /// Those of them that only reading was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    read_only: Vec<PathBuf>,
}

/// How far the life of an attachment has come. Only `Staged` is at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Phase {
    /// Intended; nobody was told of it: start-up takes it back.
    Staging,
    /// Served.
    Staged,
    /// Its end is decided: start-up and every repeat drive it on.
    Unstaging,
}

impl Attachment {
    pub(super) fn new(volume: VolumeId, staging_path: PathBuf, capability: Capability) -> Self {
        let Capability { access, form, group } = capability;
        let (version, phase) = (Version, Phase::Staging);
        let (targets, read_only) = (Vec::new(), Vec::new());
        Self { version, volume, staging_path, access, form, group, phase, targets, read_only }
    }

    /// How the volume is used.
    pub(super) fn capability(&self) -> Capability {
        Capability { access: self.access, form: self.form.clone(), group: self.group }
    }

    /// The same attachment, further on.
    pub(super) fn in_phase(&self, phase: Phase) -> Self {
        Self { phase, ..self.clone() }
    }

    /// What was asked for at a target.
    pub(super) fn access_at(&self, target: &Path) -> Access {
        let is_it = |other: &PathBuf| other == target;
        if self.read_only.iter().any(is_it) { Access::Read } else { Access::Write }
    }

    /// Whether whoever is served at this target has a socket of their own, which refuses writes.
    pub(super) fn has_reader_at(&self, target: &Path) -> bool {
        let reads = [self.access.access(), self.access_at(target)].contains(&Access::Read);
        reads && self.form == Form::VhostUser
    }

    /// Whether some target of it may be one where the socket is everybody's.
    pub(super) fn may_share_socket(&self) -> bool {
        self.form == Form::VhostUser && self.access.access() == Access::Write
    }

    /// Whether it is published where the socket is everybody's, with `disk.img` beside it.
    pub(super) fn shares_socket(&self) -> bool {
        self.targets.iter().any(|target| !self.has_reader_at(target))
    }

    /// Whether its active layer may be replaced under who uses it: the relay holds back one VM, which
    /// is the only one.
    pub(super) fn may_move(&self) -> bool {
        let has_reader = self.targets.iter().any(|target| self.has_reader_at(target));
        self.form.is_relayed() && self.access.access() == Access::Write && !has_reader
    }

    /// The same attachment with one more target.
    pub(super) fn with_target(&self, target: &Path, access: Access) -> Self {
        let mut next = self.without_target(target);
        next.targets.push(target.to_owned());
        if access == Access::Read {
            next.read_only.push(target.to_owned());
        }
        next
    }

    /// The same attachment without this target.
    pub(super) fn without_target(&self, target: &Path) -> Self {
        let mut next = self.clone();
        next.targets.retain(|other| other != target);
        next.read_only.retain(|other| other != target);
        next
    }

    pub(super) fn save(&self, path: &Path) -> Result<(), store::Error> {
        store::replace_volatile(path, self)
    }
}
