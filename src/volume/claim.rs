//! One operation a volume at a time: who holds the `Claim` works on the volume, and nobody else.

use super::VolumeId;
use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Another operation on the volume is still under way.
#[derive(Debug, thiserror::Error)]
#[error("another operation on volume {0} is under way; try again")]
pub struct Busy(VolumeId);

/// The volumes with an operation in flight. CSI asks for ABORTED, not for a queue.
#[derive(Clone, Default, Debug)]
pub struct InFlight(Arc<Mutex<HashSet<VolumeId>>>);

/// Proof that this task alone works on the volume; dropping it lets the next one in.
#[derive(Debug)]
pub struct Claim {
    all: InFlight,
    volume: VolumeId,
}

impl InFlight {
    /// Takes the volume, or says that somebody else has it.
    pub fn claim(&self, volume: &VolumeId) -> Result<Claim, Busy> {
        if self.set().insert(volume.clone()) {
            Ok(Claim { all: self.clone(), volume: volume.clone() })
        } else {
            Err(Busy(volume.clone()))
        }
    }

    fn set(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// The volume that is claimed.
    pub fn volume(&self) -> &VolumeId {
        &self.volume
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.all.set().remove(&self.volume);
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
        assert!(all.claim(&"pvc-2".parse().unwrap()).is_ok());
        drop(first);
        assert!(all.claim(&volume).is_ok());
    }
}
