//! Deletion of a volume.

use super::{
    Claim, Entry, Error, Format, Outcome, Volume, VolumeId, Volumes, record, record::Phase,
};
use crate::{crash, pool, store};
use std::path::PathBuf;

impl Volumes {
    /// Deletes a volume and its layer; one that is gone is fine.
    ///
    /// The caller has made sure that nothing uses it. Once the intent is recorded there is no way
    /// back: a crash after it is driven on at start-up, a failure by the next call.
    pub fn delete(&self, claim: &Claim) -> Result<Outcome, Error> {
        let id = claim.volume();
        let Some(volume) = self.deletable(id)? else { return Ok(Outcome::AlreadySo) };
        volume.delete().map_err(Error::pool(id))?;
        self.index().remove(id);
        Ok(Outcome::Done)
    }

    /// The volume, marked in the index as one that nobody may use any more.
    fn deletable(&self, id: &VolumeId) -> Result<Option<Volume>, Error> {
        match self.index().get_mut(id) {
            None => Ok(None),
            Some(Entry::Damaged { reason, .. }) => {
                Err(Error::Damaged { volume: id.clone(), reason: reason.clone() })
            }
            Some(Entry::Volume(volume)) => {
                let active = volume.record.phase.active();
                volume.record.phase = Phase::Deleting { active };
                Ok(Some(volume.clone()))
            }
        }
    }
}

impl Volume {
    /// Intent, then removal.
    pub(super) fn delete(&self) -> Result<(), pool::Error> {
        let intent = self.record.in_phase(Phase::Deleting { active: self.record.phase.active() });
        record(&self.pool, &self.pool.volume_record(&self.id), &intent)?;
        crash::point("volume-delete-intent");
        self.remove()
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
