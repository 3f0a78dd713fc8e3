//! Freezing the active layer of a volume: an empty layer is put onto it, and takes the writes from
//! then on.
//!
//! ```text
//! intent (of a snapshot or clone) -- overlay, its record -- volume record -- (daemon) -- result
//!                                                           ^
//!                          before: start-up takes it back  |  after: start-up drives it on
//! ```
//!
//! The record of the volume comes before the daemon: a daemon that dies in between is started
//! again with the empty overlay on top, which changes nothing. The other way round, what it wrote
//! into the overlay would be lost.

use super::{
    Claim, Error, Format, Layer, LayerId, VolumeId, Volumes, record,
    record::{LayerRecord, Phase, VolumeRecord},
    state::{Hold, Kept, KeptLayer, layer_record},
};
use crate::{
    crash,
    pool::{self, Kind, Pool},
    store,
    units::Bytes,
};
use std::sync::Arc;

/// An active layer that is about to be frozen. Until it is finished or taken back, nothing merges
/// or removes it.
#[derive(Debug)]
pub struct Freeze {
    volume: VolumeId,
    pool: Arc<Pool>,
    frozen: Hold,
    overlay: LayerId,
    size: Bytes,
}

impl Freeze {
    /// The volume whose layer it is.
    pub fn volume(&self) -> &VolumeId {
        &self.volume
    }

    /// The layer that is frozen.
    pub fn frozen(&self) -> LayerId {
        self.frozen.layer()
    }

    /// The layer that is put onto it.
    pub(super) fn overlay(&self) -> LayerId {
        self.overlay
    }

    /// Size of the volume.
    pub(super) fn size(&self) -> Bytes {
        self.size
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl Volumes {
    /// Plans to freeze the active layer of a volume. Nothing is written yet.
    pub(super) fn plan_freeze(&self, volume: &VolumeId) -> Result<Freeze, Error> {
        let found = self.find(volume)?;
        found.refuse_master()?;
        let active = found.record.phase.active();
        let frozen = self.state.hold(active).ok_or_else(|| Error::NotFound(volume.clone()))?;
        let (pool, size) = (found.pool.clone(), found.size());
        Ok(Freeze { volume: volume.clone(), pool, frozen, overlay: LayerId::draw(), size })
    }

    /// Makes the overlay, on which nothing stands yet. The intent that names it is recorded.
    pub(super) fn make_overlay(&self, freeze: &Freeze) -> Result<(), pool::Error> {
        let Freeze { pool, overlay, size, .. } = freeze;
        let record = LayerRecord::overlay(freeze.frozen(), *size);
        let record = self.make_layer(pool, *overlay, record, None)?;
        crash::point("freeze-overlay");
        self.add_layer(pool, *overlay, record)?;
        self.state.lock().jobs.leave_alone(*overlay);
        crash::point("freeze-overlay-record");
        Ok(())
    }

    /// The two layers of a freeze, for the daemon of the volume: the one that is frozen, and the
    /// one that is put onto it.
    pub fn layers_of(&self, freeze: &Freeze) -> Option<(Layer, Layer)> {
        let state = self.state.lock();
        Some((state.layer(freeze.frozen())?, state.layer(freeze.overlay)?))
    }

    /// Lets the volume stand on the overlay, from now on and after every restart.
    pub fn adopt_overlay(&self, claim: &Claim, freeze: &Freeze) -> Result<(), Error> {
        debug_assert_eq!(claim.volume(), &freeze.volume, "the claim is for this volume");
        self.change(claim, |record| record.phase = Phase::Ready { active: freeze.overlay })?;
        crash::point("freeze-adopted");
        Ok(())
    }

    /// Takes an overlay back onto which the volume was not put.
    pub(super) fn discard_overlay(
        &self,
        pool: &Pool,
        volume: &VolumeId,
        overlay: LayerId,
    ) -> Result<(), pool::Error> {
        let is_adopted = match self.state.lock().volumes.get(volume) {
            Some(Kept::Usable { record, .. }) => record.phase.active() == overlay,
            // Nobody knows where a damaged volume stands.
            Some(Kept::Damaged { .. }) => true,
            None => false,
        };
        let is_adopted = is_adopted || is_named(pool, volume, overlay);
        if is_adopted || self.state.lock().children(overlay).next().is_some() {
            return Ok(());
        }
        self.forget_layer(pool, overlay)
    }

    /// Records a layer whose file is there.
    pub(super) fn add_layer(
        &self,
        pool: &Arc<Pool>,
        id: LayerId,
        made: LayerRecord,
    ) -> Result<(), pool::Error> {
        record(pool, &layer_record(pool, id), &made)?;
        let layer = KeptLayer { pool: pool.clone(), record: made };
        self.state.lock().layers.insert(id, layer);
        Ok(())
    }

    /// Removes a layer that an intent names and nothing uses yet, however far it was made.
    pub(super) fn forget_layer(&self, pool: &Pool, id: LayerId) -> Result<(), pool::Error> {
        for format in Format::ALL {
            pool.remove_layer(id, format)?;
        }
        crash::point("layer-forgotten");
        pool.remove_record(&pool.record(Kind::Layer, id))?;
        self.state.lock().layers.remove(&id);
        Ok(())
    }
}

/// Whether the record of a volume may name this layer. What is known in memory is not enough: where
/// a record was replaced and that could not be made durable, there was an error, and it may be there.
fn is_named(pool: &Pool, volume: &VolumeId, layer: LayerId) -> bool {
    match store::load::<VolumeRecord>(&pool.record(Kind::Volume, volume)) {
        Ok(Some(record)) => record.phase.active() == layer,
        Ok(None) => false,
        Err(_) => true,
    }
}
