//! Deletion: of a volume, and of layers that nothing needs any more.

use super::{
    Claim, Error, LayerId, Outcome, VolumeId, Volumes,
    record::{LayerRecord, VolumeRecord},
    state::{Kept, KeptLayer, file_of},
};
use crate::{
    crash,
    pool::{self, Kind, Pool},
    store,
};
use std::sync::Arc;

impl Volumes {
    /// Deletes a volume and the layers that only it needs; one that is gone is fine. Snapshots of
    /// it stay.
    ///
    /// The caller has made sure that nothing uses it. The intent is a move of its record, which
    /// needs no space: deletion is the way out of a full pool. After it there is no way back: a
    /// crash is driven on at start-up, a failure by the next call.
    pub fn delete(&self, claim: &Claim) -> Result<Outcome, Error> {
        let id = claim.volume();
        let found = self.state.lock().volumes.get(id).cloned();
        match &found {
            Some(Kept::Usable { pool, .. }) => {
                self.intend_deletion(pool, id).map_err(Error::pool(id))?;
            }
            Some(Kept::Damaged { pool, reason, .. }) => {
                self.require_no_wait(pool).map_err(Error::pool(id))?;
                return Err(Error::Damaged { volume: id.clone(), reason: reason.clone() });
            }
            // It may be about to be deleted where nobody can look now.
            None => {
                let all = self.pools.iter().try_for_each(|pool| pool.require());
                all.map_err(Error::pool(id))?;
            }
        }
        let finished = self.finish_deletion(id)?;
        Ok(if found.is_some() { Outcome::Done } else { finished })
    }

    /// Decides the end of a volume.
    fn intend_deletion(&self, pool: &Pool, id: &VolumeId) -> Result<(), pool::Error> {
        let from = pool.record(Kind::Volume, id);
        let moved = store::relocate(&from, &pool.record(Kind::DeletingVolume, id));
        moved.map_err(|source| pool.store(source))?;
        crash::point("volume-delete-intent");
        self.state.lock().volumes.remove(id);
        Ok(())
    }

    /// Drives on a deletion that broke off, if there is one.
    pub(super) fn finish_deletion(&self, id: &VolumeId) -> Result<Outcome, Error> {
        let mut outcome = Outcome::AlreadySo;
        for pool in &self.pools {
            if self.remove_volume(pool, id).map_err(Error::pool(id))? == Outcome::Done {
                outcome = Outcome::Done;
            }
        }
        Ok(outcome)
    }

    /// The layers that go when this one loses its one name, from it down; none where others need it.
    /// What is only held counts, too: it may be let go at any moment.
    pub(super) fn would_go(&self, top: LayerId) -> Vec<LayerId> {
        let state = self.state.lock();
        let names =
            |id| usize::from(state.volume_on(id).is_some()) + state.snapshots_of(id).count();
        let (mut gone, mut next) = (Vec::new(), Some(top));
        while let Some(id) = next {
            let above = gone.last().copied();
            let keeps_one = usize::from(above.is_none());
            let is_needed =
                names(id) > keeps_one || state.children(id).any(|child| Some(child) != above);
            if is_needed {
                break;
            }
            gone.push(id);
            next = state.layers.get(&id).and_then(|layer| layer.record.parent);
        }
        gone
    }

    /// Removes what a volume needed whose end is decided, and its record last.
    pub(super) fn remove_volume(&self, pool: &Pool, id: &VolumeId) -> Result<Outcome, pool::Error> {
        let path = pool.record(Kind::DeletingVolume, id);
        let condemned = store::load::<VolumeRecord>(&path);
        let Some(condemned) = condemned.map_err(|source| pool.store(source))? else {
            return Ok(Outcome::AlreadySo);
        };
        self.reclaim(condemned.phase.active())?;
        pool.remove_lock(id)?;
        crash::point("volume-delete-reclaimed");
        pool.remove_record(&path)?;
        Ok(Outcome::Done)
    }

    /// Removes a layer if nothing needs it, and then the one below likewise, and so on.
    ///
    /// The record of each is moved away first, and goes last, when the layer below has been seen
    /// to: start-up goes on from any of them.
    pub(super) fn reclaim(&self, layer: LayerId) -> Result<(), pool::Error> {
        let mut above: Option<(Arc<Pool>, LayerId)> = None;
        let mut next = Some(layer);
        while let Some(id) = next {
            let taken = self.take_unneeded(id);
            if let Some(KeptLayer { pool, record }) = &taken {
                let from = pool.record(Kind::Layer, id);
                let moved = store::relocate(&from, &pool.record(Kind::DeletingLayer, id));
                if let Err(source) = moved {
                    let back = KeptLayer { pool: pool.clone(), record: record.clone() };
                    self.state.lock().layers.insert(id, back);
                    return Err(pool.store(source));
                }
                crash::point("layer-remove-intent");
            }
            if let Some((pool, id)) = above.take() {
                forget_condemned(&pool, id)?;
            }
            next = None;
            if let Some(KeptLayer { pool, record }) = taken {
                self.remove_file(&pool, id, &record)?;
                crash::point("layer-remove-file");
                next = record.parent;
                above = Some((pool, id));
            }
        }
        above.map_or(Ok(()), |(pool, id)| forget_condemned(&pool, id))
    }

    /// Drives on the removal of a layer that broke off.
    pub(super) fn finish_removal(
        &self,
        pool: &Arc<Pool>,
        id: LayerId,
        record: &LayerRecord,
    ) -> Result<(), pool::Error> {
        self.remove_file(pool, id, record)?;
        if let Some(parent) = record.parent {
            self.reclaim(parent)?;
        }
        forget_condemned(pool, id)
    }

    /// Removes the file of a layer, unless another layer has its bytes there by now.
    fn remove_file(
        &self,
        pool: &Pool,
        id: LayerId,
        record: &LayerRecord,
    ) -> Result<(), pool::Error> {
        let file = file_of(id, record);
        if self.state.lock().is_file_used(file, id) {
            return Ok(());
        }
        pool.remove_layer(file, record.format)
    }

    /// Takes a layer out of the graph if nothing needs it.
    fn take_unneeded(&self, id: LayerId) -> Option<KeptLayer> {
        let mut state = self.state.lock();
        let layer = state.layers.get(&id)?;
        if state.unclear.contains(layer.pool.name()) {
            tracing::warn!(layer = %id, "left: a record of the pool cannot be read");
            return None;
        }
        if state.is_needed(id) { None } else { state.layers.remove(&id) }
    }
}

/// Removes the last trace of a layer.
fn forget_condemned(pool: &Pool, id: LayerId) -> Result<(), pool::Error> {
    pool.remove_record(&pool.record(Kind::DeletingLayer, id))?;
    crash::point("layer-remove-done");
    Ok(())
}
