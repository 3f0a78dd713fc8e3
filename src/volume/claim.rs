//! One operation a volume or snapshot at a time: who holds the `Claim` works on it, and nobody
//! else.

use super::{SnapshotId, VolumeId};
use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Another operation is still under way.
#[derive(Debug, thiserror::Error)]
#[error("another operation on {0} is under way; try again")]
pub struct Busy(Claimed);

/// What can be claimed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Claimed {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(SnapshotId),
}

/// What is claimed at the moment. CSI asks for ABORTED, not for a queue.
#[derive(Clone, Default, Debug)]
pub struct InFlight(Arc<Mutex<HashSet<Claimed>>>);

/// Proof that this task alone works on the volume or snapshot; dropping it lets the next one in.
#[derive(Debug)]
pub struct Claim<Id: Clone + Into<Claimed> = VolumeId> {
    all: InFlight,
    id: Id,
}

impl InFlight {
    /// Takes the volume or snapshot, or says that somebody else has it.
    pub fn claim<Id: Clone + Into<Claimed>>(&self, id: &Id) -> Result<Claim<Id>, Busy> {
        let claimed = id.clone().into();
        if self.set().insert(claimed.clone()) {
            Ok(Claim { all: self.clone(), id: id.clone() })
        } else {
            Err(Busy(claimed))
        }
    }

    /// Whether somebody works on it.
    pub(super) fn is_taken(&self, id: impl Into<Claimed>) -> bool {
        self.set().contains(&id.into())
    }

    fn set(&self) -> MutexGuard<'_, HashSet<Claimed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// The volume that is claimed.
    pub fn volume(&self) -> &VolumeId {
        &self.id
    }
}

impl Claim<SnapshotId> {
    /// The snapshot that is claimed.
    pub fn snapshot(&self) -> &SnapshotId {
        &self.id
    }
}

impl<Id: Clone + Into<Claimed>> Drop for Claim<Id> {
    fn drop(&mut self) {
        self.all.set().remove(&self.id.clone().into());
    }
}

impl From<VolumeId> for Claimed {
    fn from(id: VolumeId) -> Self {
        Self::Volume(id)
    }
}

impl From<SnapshotId> for Claimed {
    fn from(id: SnapshotId) -> Self {
        Self::Snapshot(id)
    }
}

impl fmt::Display for Claimed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(out, "volume {id}"),
            Self::Snapshot(id) => write!(out, "snapshot {id}"),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_second_claim_waits_for_the_first_to_end() {
        let all = InFlight::default();
        let volume: VolumeId = "pvc-1".parse().unwrap();
        let first = all.claim(&volume).unwrap();
        assert!(all.claim(&volume).is_err());
        assert!(all.claim(&"pvc-2".parse::<VolumeId>().unwrap()).is_ok());
        assert!(all.claim(&"pvc-1".parse::<SnapshotId>().unwrap()).is_ok());
        drop(first);
        assert!(all.claim(&volume).is_ok());
    }
}
