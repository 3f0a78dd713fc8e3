//! Creation of a blank volume.

use super::{
    AccessMode, Claim, Entry, Error, LayerId, Outcome, Parameters, SizeRange, Volume, VolumeId,
    Volumes, record,
    record::{LayerRecord, Phase, VolumeRecord},
};
use crate::{
    crash,
    pool::{self, Pool},
    units::Bytes,
};
use std::{collections::BTreeSet, sync::Arc};

/// What a caller wants of a new volume.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// The CSI name.
    pub name: String,
    /// The sizes that will do.
    pub size: SizeRange,
    /// Parameters, checked.
    pub parameters: Parameters,
    /// How it will be used.
    pub access_modes: BTreeSet<AccessMode>,
}

impl Volumes {
    /// Creates a volume, or finds the one that an earlier call with the same wishes created.
    ///
    /// Intent, layer, record of the layer, result: a crash between any two leaves a record in
    /// phase `Creating`, which start-up takes back; a failure takes back at once.
    pub fn create(&self, claim: &Claim, new: NewVolume) -> Result<(Volume, Outcome), Error> {
        let id = claim.volume();
        debug_assert_eq!(*id, VolumeId::of_name(&new.name), "the claim is for this name");
        let pools = self.candidates(new.parameters.pool())?;
        if let Some(volume) = self.existing(id, &new)? {
            return Ok((volume, Outcome::AlreadySo));
        }
        self.finish_deletion(id)?;
        let pool = roomiest(&pools, new.size.chosen())?;
        let volume = make(&pool, id, new).map_err(Error::pool(id))?;
        self.index().insert(id.clone(), Entry::Volume(volume.clone()));
        Ok((volume, Outcome::Done))
    }

    /// The volume of this id if there is one that `new` would do with.
    fn existing(&self, id: &VolumeId, new: &NewVolume) -> Result<Option<Volume>, Error> {
        let volume = match self.find(id) {
            Ok(volume) => volume,
            Err(Error::NotFound(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        match difference(&volume.record, new) {
            Some(what) => Err(Error::Different { volume: id.clone(), what }),
            None => Ok(Some(volume)),
        }
    }
}

/// In what an existing volume is not what is wanted now, with both values.
fn difference(old: &VolumeRecord, new: &NewVolume) -> Option<String> {
    if old.name != new.name {
        return Some(format!("name: {:?}, not {:?}", old.name, new.name));
    }
    if !new.size.accepts(old.size) {
        let (old, new) = (old.size.count(), new.size.chosen().count());
        return Some(format!("capacity_range: it has {old} bytes, not {new}"));
    }
    if old.parameters != new.parameters {
        let (old, new) = (old.parameters.given(), new.parameters.given());
        return Some(format!("parameters: {old:?}, not {new:?}"));
    }
    if old.access_modes != new.access_modes {
        let (old, new) = (&old.access_modes, &new.access_modes);
        return Some(format!("volume_capabilities: {old:?}, not {new:?}"));
    }
    None
}

/// Of these pools the one with most room, if `size` fits into it.
fn roomiest(pools: &[Arc<Pool>], size: Bytes) -> Result<Arc<Pool>, Error> {
    let mut largest = Bytes::ZERO;
    let mut best: Option<(Bytes, &Arc<Pool>)> = None;
    for pool in pools {
        let space = pool.space().map_err(Error::Capacity)?;
        largest = largest.max(space.total);
        if best.is_none_or(|(free, _)| space.free > free) {
            best = Some((space.free, pool));
        }
    }
    match best {
        Some((free, pool)) if size <= free => Ok(pool.clone()),
        Some((free, pool)) if size <= largest => {
            Err(Error::PoolFull { pool: pool.name().clone(), size, free })
        }
        Some(_) | None => Err(Error::TooLarge { size, total: largest }),
    }
}

fn make(pool: &Arc<Pool>, id: &VolumeId, new: NewVolume) -> Result<Volume, pool::Error> {
    let (active, size) = (LayerId::draw(), new.size.chosen());
    let intent = VolumeRecord::new(
        new.name,
        size,
        new.parameters,
        new.access_modes,
        Phase::Creating { active },
    );
    let volume = Volume {
        id: id.clone(),
        pool: pool.clone(),
        record: intent.in_phase(Phase::Ready { active }),
    };
    let steps = || {
        record(pool, &pool.volume_record(id), &intent)?;
        crash::point("volume-create-intent");
        pool.create_layer(active, size)?;
        crash::point("volume-create-layer");
        record(pool, &pool.layer_record(active), &LayerRecord::raw(size))?;
        crash::point("volume-create-layer-record");
        record(pool, &pool.volume_record(id), &volume.record)?;
        crash::point("volume-create-done");
        Ok(())
    };
    steps().inspect_err(|_| {
        if let Err(error) = volume.remove(pool.volume_record(id)) {
            tracing::warn!(volume = %id, %error, "taking back a creation: start-up will finish it");
        }
    })?;
    Ok(volume)
}
