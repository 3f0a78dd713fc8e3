//! One operation a volume or snapshot at a time: who holds the `Claim` works on it, and nobody
//! else.

use super::{SnapshotId, VolumeId};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::Notify;

/// Another operation is still under way.
#[derive(Debug, thiserror::Error)]
#[error("another operation on {0} is under way; try again")]
pub struct Busy(Claimed, Holder);

impl Busy {
    /// Whether it is over in a moment: the driver itself has something to put in order.
    pub fn is_brief(&self) -> bool {
        self.1 == Holder::Driver
    }
}

/// Who works on something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// A call.
    Caller,
    /// The driver, which puts something in order.
    Driver,
}

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
pub struct InFlight {
    all: Arc<Mutex<HashMap<Claimed, Holder>>>,
    released: Arc<Notify>,
}

/// Proof that this task alone works on the volume or snapshot; dropping it lets the next one in.
#[derive(Debug)]
pub struct Claim<Id: Clone + Into<Claimed> = VolumeId> {
    all: InFlight,
    id: Id,
}

impl InFlight {
    /// Takes the volume or snapshot for a call, or says that somebody else has it.
    pub fn claim<Id: Clone + Into<Claimed>>(&self, id: &Id) -> Result<Claim<Id>, Busy> {
        self.claim_as(id, Holder::Caller)
    }

    /// Takes the volume or snapshot for a moment, for what the driver puts in order by itself.
    pub fn claim_briefly<Id: Clone + Into<Claimed>>(&self, id: &Id) -> Result<Claim<Id>, Busy> {
        self.claim_as(id, Holder::Driver)
    }

    fn claim_as<Id: Clone + Into<Claimed>>(
        &self,
        id: &Id,
        holder: Holder,
    ) -> Result<Claim<Id>, Busy> {
        let claimed = id.clone().into();
        let mut all = self.all();
        if let Some(holder) = all.get(&claimed) {
            return Err(Busy(claimed, *holder));
        }
        all.insert(claimed, holder);
        Ok(Claim { all: self.clone(), id: id.clone() })
    }

    /// Whether somebody works on it.
    pub(super) fn is_taken(&self, id: impl Into<Claimed>) -> bool {
        self.all().contains_key(&id.into())
    }

    /// Waits until a claim ends: what it was in the way of can be done. One that ended while nobody
    /// waited counts.
    pub async fn released(&self) {
        self.released.notified().await;
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Claimed, Holder>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.all.all().remove(&self.id.clone().into());
        self.all.released.notify_one();
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

    #[tokio::test]
    async fn the_end_of_a_claim_is_heard_also_by_who_listens_later() {
        let all = InFlight::default();
        drop(all.claim(&"pvc-1".parse::<VolumeId>().unwrap()).unwrap());
        all.released().await;
    }

    #[test]
    fn who_comes_second_knows_whether_it_is_worth_waiting() {
        let all = InFlight::default();
        let volume: VolumeId = "pvc-1".parse().unwrap();
        let first = all.claim_briefly(&volume).unwrap();
        assert!(all.claim(&volume).unwrap_err().is_brief());
        drop(first);
        let _second = all.claim(&volume).unwrap();
        assert!(!all.claim_briefly(&volume).unwrap_err().is_brief());
    }
}
