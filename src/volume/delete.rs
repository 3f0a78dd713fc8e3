//! Deletion of a volume.

use super::{
    Claim, Entry, Error, Format, Outcome, Volume, VolumeId, Volumes, record::VolumeRecord,
};
use crate::{
    crash,
    pool::{self, Pool},
    store,
};
use std::{path::PathBuf, sync::Arc};

impl Volumes {
    /// Deletes a volume and its layer; one that is gone is fine.
    ///
    /// The caller has made sure that nothing uses it. The intent is a move of its record, which
    /// needs no space: deletion is the way out of a full pool. After it there is no way back: a
    /// crash is driven on at start-up, a failure by the next call.
    pub fn delete(&self, claim: &Claim) -> Result<Outcome, Error> {
        let id = claim.volume();
        let volume = match self.index().get(id) {
            None => None,
            Some(Entry::Volume(volume)) => Some(volume.clone()),
            Some(Entry::Damaged { reason, .. }) => {
                return Err(Error::Damaged { volume: id.clone(), reason: reason.clone() });
            }
        };
        if let Some(volume) = &volume {
            volume.intend_deletion().map_err(Error::pool(id))?;
            self.index().remove(id);
        }
        let finished = self.finish_deletion(id)?;
        Ok(if volume.is_some() { Outcome::Done } else { finished })
    }

    /// Drives on a deletion that broke off, if there is one.
    pub(super) fn finish_deletion(&self, id: &VolumeId) -> Result<Outcome, Error> {
        let mut outcome = Outcome::AlreadySo;
        for pool in &self.pools {
            if let Some(volume) = condemned(pool, id).map_err(Error::pool(id))? {
                volume.remove(pool.deleting_record(id)).map_err(Error::pool(id))?;
                outcome = Outcome::Done;
            }
        }
        Ok(outcome)
    }
}

/// The volume of this id whose end is decided.
pub(super) fn condemned(pool: &Arc<Pool>, id: &VolumeId) -> Result<Option<Volume>, pool::Error> {
    let record = store::load::<VolumeRecord>(&pool.deleting_record(id));
    let record = record.map_err(|source| pool.store(source))?;
    Ok(record.map(|record| Volume { id: id.clone(), pool: pool.clone(), record }))
}

impl Volume {
    /// Decides the end of the volume.
    fn intend_deletion(&self) -> Result<(), pool::Error> {
        let (pool, id) = (&self.pool, &self.id);
        let moved = store::relocate(&pool.volume_record(id), &pool.deleting_record(id));
        moved.map_err(|source| pool.store(source))?;
        crash::point("volume-delete-intent");
        Ok(())
    }

    /// Removes all that belongs to the volume, its `record` last. Every step may be repeated.
    pub(super) fn remove(&self, record: PathBuf) -> Result<(), pool::Error> {
        let (pool, active) = (&self.pool, self.record.phase.active());
        let remove = |path: PathBuf| store::remove(&path).map_err(|source| pool.store(source));
        pool.remove_layer(active, Format::Raw)?;
        crash::point("volume-remove-layer");
        remove(pool.layer_record(active))?;
        crash::point("volume-remove-layer-record");
        remove(record)?;
        crash::point("volume-remove-done");
        Ok(())
    }
}
