//! Deletion of a volume.

use super::{Claim, Entry, Error, Format, Outcome, Volume, Volumes, record, record::Phase};
use crate::{crash, pool, store};
use std::{io, path::PathBuf};

impl Volumes {
    /// Deletes a volume and its layer; one that is gone is fine.
    ///
    /// The caller has made sure that nothing uses it. Once the intent is recorded there is no way
    /// back: a crash after it is driven on at start-up, a failure by the next call.
    pub fn delete(&self, claim: &Claim) -> Result<Outcome, Error> {
        let id = claim.volume();
        let volume = match self.index().get(id) {
            None => return Ok(Outcome::AlreadySo),
            Some(Entry::Volume(volume)) => volume.clone(),
            Some(Entry::Damaged { reason, .. }) => {
                return Err(Error::Damaged { volume: id.clone(), reason: reason.clone() });
            }
        };
        let intended = volume.intend_deletion().map_err(Error::pool(id))?;
        self.index().insert(id.clone(), Entry::Volume(intended.clone()));
        intended.remove().map_err(Error::pool(id))?;
        self.index().remove(id);
        Ok(Outcome::Done)
    }
}

impl Volume {
    /// The volume with the intent to delete it recorded.
    ///
    /// A full pool has no room for that, and deletion is the way out: then the record goes first,
    /// which needs none. A crash after that leaves layers that nothing names, which start-up
    /// removes.
    fn intend_deletion(&self) -> Result<Self, pool::Error> {
        let intent = self.record.in_phase(Phase::Deleting { active: self.record.phase.active() });
        let path = self.pool.volume_record(&self.id);
        match record(&self.pool, &path, &intent) {
            Err(error) if error.io_kind() == Some(io::ErrorKind::StorageFull) => {
                store::remove(&path).map_err(|source| self.pool.store(source))?;
            }
            outcome => outcome?,
        }
        crash::point("volume-delete-intent");
        Ok(Self { record: intent, ..self.clone() })
    }

    /// Removes all that belongs to the volume, its record last. Every step may be repeated.
    pub(super) fn remove(&self) -> Result<(), pool::Error> {
        let (pool, active) = (&self.pool, self.record.phase.active());
        let remove = |path: PathBuf| store::remove(&path).map_err(|source| pool.store(source));
        pool.remove_layer(active, Format::Raw)?;
        crash::point("volume-remove-layer");
        remove(pool.layer_record(active))?;
        crash::point("volume-remove-layer-record");
        remove(pool.volume_record(&self.id))?;
        crash::point("volume-remove-done");
        Ok(())
    }
}
