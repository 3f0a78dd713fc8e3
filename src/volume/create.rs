//! Creation of a volume: blank, or on a snapshot, another volume, or a remote master.
//!
//! ```text
//! begin: intent -- (overlay on the source volume) | freeze, by the node | finish: layer, its record -- Ready
//! ```
//!
//! A crash before the end leaves a record in phase `Creating`, which start-up takes back; a failure
//! takes back at once.
//!
//! What a volume stands on:
//!
//! ```text
//!  active -> base                    a layer of the source, or a remote master
//!  active -> copy -> base            to be made independent
//! ```
//!
//! The copy has the size of the base, whatever becomes of the volume: while a layer is streamed
//! into, QEMU fills no buffer that a guest reads from beyond the end of the layer below (`work`).
//! Then it is merged with the active layer like any other.

use super::{
    AccessMode, Begun, Claim, Content, CopyMode, Encryption, Error, FoundMaster, Freeze, LayerId,
    Lifecycle, Outcome, Parameters, SizeRange, Throttle, Volume, VolumeId, Volumes,
    master::{Bottom, Role},
    record,
    record::{Detach, LayerRecord, Phase, VolumeRecord},
    state::{Hold, Kept},
};
use crate::{
    chain::Chain,
    crash,
    pool::{self, Kind, Pool},
    store,
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
    /// The limits it begins with.
    pub throttle: Throttle,
    /// How it will be used.
    pub access_modes: BTreeSet<AccessMode>,
    /// What to make it from, if not blank.
    pub content: Option<Content>,
    /// The master that its parameters name, once it was looked at.
    pub master: Option<FoundMaster>,
    /// What ends it.
    pub lifecycle: Lifecycle,
}

/// A volume that is being created.
#[derive(Debug)]
pub struct Creation {
    id: VolumeId,
    pool: Arc<Pool>,
    intent: VolumeRecord,
    base: Option<Base>,
    copy: Option<BaseCopy>,
}

/// A copy of the base that is to be made in the background.
#[derive(Clone, Copy, Debug)]
struct BaseCopy {
    layer: LayerId,
    /// That of the base.
    size: Bytes,
}

/// What a new volume stands on.
#[derive(Debug)]
pub(super) enum Base {
    /// A layer that is frozen already.
    Frozen(Hold),
    /// The active layer of another volume, which is to be frozen first.
    Active(Freeze),
    /// A remote master, of which a record is to be made.
    Master(Box<Bottom>),
}

/// Where a new volume goes, and on what.
pub(super) struct Place {
    pub(super) pool: Arc<Pool>,
    pub(super) size: Bytes,
    /// Size of the base.
    pub(super) least: Bytes,
    pub(super) base: Option<Base>,
}

impl Place {
    /// The copy to be made of the base in between, if there is to be one.
    fn copy(&self, new: &NewVolume) -> Option<BaseCopy> {
        let is_copied = new.parameters.copy_mode() == CopyMode::Clone && self.base.is_some();
        is_copied.then(|| BaseCopy { layer: LayerId::draw(), size: self.least })
    }
}

impl Creation {
    /// The active layer of another volume that is to be frozen before the creation is finished.
    pub fn freeze(&self) -> Option<&Freeze> {
        match &self.base {
            Some(Base::Active(freeze)) => Some(freeze),
            Some(Base::Frozen(_) | Base::Master(_)) | None => None,
        }
    }
}

impl Base {
    fn layer(&self) -> LayerId {
        match self {
            Self::Frozen(hold) => hold.layer(),
            Self::Active(freeze) => freeze.frozen(),
            Self::Master(bottom) => bottom.layer,
        }
    }

    /// Whether it is the volume itself.
    fn is_active(&self) -> bool {
        matches!(self, Self::Master(bottom) if bottom.role == Role::Active)
    }
}

impl Volumes {
    /// Begins to create a volume, or finds the one that an earlier call with the same wishes
    /// created. The volume it is made from is claimed by the caller.
    pub fn begin_creation(
        &self,
        claim: &Claim,
        new: NewVolume,
    ) -> Result<Begun<Volume, Creation>, Error> {
        let id = claim.volume();
        debug_assert_eq!(*id, VolumeId::of_name(&new.name), "the claim is for this name");
        let pools = self.candidates(new.parameters.pool())?;
        if let Some(volume) = self.existing(id, &new)? {
            return Ok(Begun::Exists(volume));
        }
        self.finish_deletion(id)?;
        let place = self.place(&pools, &new)?;
        let copy = place.copy(&new);
        let Place { pool, size, base, .. } = place;
        let intent = new.intent(size, base.as_ref(), copy);
        let creation = Creation { id: id.clone(), pool, intent, base, copy };
        match self.record_intent(&creation).map_err(Error::pool(id)) {
            Ok(()) => Ok(Begun::New(creation)),
            Err(error) => {
                self.abandon_creation(claim, creation);
                Err(error)
            }
        }
    }

    /// Makes the layer of a volume whose source is frozen by now. Afterwards it is usable.
    pub fn finish_creation(&self, claim: &Claim, creation: Creation) -> Result<Volume, Error> {
        debug_assert_eq!(claim.volume(), &creation.id, "the claim is for this volume");
        if let Err(error) = self.make_volume(&creation).map_err(Error::pool(&creation.id)) {
            self.abandon_creation(claim, creation);
            return Err(error);
        }
        self.find(&creation.id)
    }

    /// Takes back a creation that goes no further.
    pub fn abandon_creation(&self, claim: &Claim, creation: Creation) {
        debug_assert_eq!(claim.volume(), &creation.id, "the claim is for this volume");
        let Creation { id, pool, intent, base, .. } = creation;
        drop(base); // what is held cannot be reclaimed
        if let Err(error) = self.take_back_volume(&pool, &id, &intent) {
            tracing::warn!(volume = %id, error = %Chain(&error), "taking back a creation: start-up will finish it");
        }
    }

    /// Removes what a creation made, however far it came, and its record last.
    pub(super) fn take_back_volume(
        &self,
        pool: &Arc<Pool>,
        id: &VolumeId,
        intent: &VolumeRecord,
    ) -> Result<(), pool::Error> {
        let Phase::Creating { active, base, overlay, copy, master } = intent.phase else {
            return Ok(());
        };
        if let (Some(overlay), Some(Content::Volume(source))) = (overlay, &intent.content) {
            self.discard_overlay(pool, source, overlay)?;
        }
        for made in [Some(active), copy, master].into_iter().flatten() {
            self.forget_layer(pool, made)?;
        }
        // The snapshot that it stood on may have been deleted meanwhile.
        if let Some(base) = base {
            self.reclaim(base)?;
        }
        pool.remove_lock(id)?;
        let path = pool.record(Kind::Volume, id);
        pool.remove_record(&path)
    }

    fn record_intent(&self, creation: &Creation) -> Result<(), pool::Error> {
        let Creation { id, pool, intent, base, .. } = creation;
        record(pool, &pool.record(Kind::Volume, id), intent)?;
        crash::point("volume-create-intent");
        match base {
            Some(Base::Active(freeze)) => self.make_overlay(freeze),
            Some(Base::Master(bottom)) => self.make_bottom(pool, bottom),
            Some(Base::Frozen(_)) | None => Ok(()),
        }
    }

    fn make_volume(&self, creation: &Creation) -> Result<(), pool::Error> {
        let Creation { id, pool, intent, base, copy } = creation;
        let active = intent.phase.active();
        if !base.as_ref().is_some_and(Base::is_active) {
            let below = match (base, copy) {
                (Some(base), Some(copy)) => Some(self.make_copy(pool, intent, base, *copy)?),
                (base, _) => base.as_ref().map(Base::layer),
            };
            let format = intent.parameters.blank_format();
            let bottom = || LayerRecord::bottom(format, intent.size);
            let above = |below| LayerRecord::overlay(below, intent.size);
            let layer = below.map_or_else(bottom, above);
            let layer = self.make_layer(pool, active, layer, intent.encryption())?;
            crash::point("volume-create-layer");
            self.add_layer(pool, active, layer)?;
            crash::point("volume-create-layer-record");
        }
        pool.lock_of(id)?; // now, as a pool that is full later has no room for it
        let ready = intent.in_phase(Phase::Ready { active });
        record(pool, &pool.record(Kind::Volume, id), &ready)?;
        let kept = Kept::Usable { pool: pool.clone(), record: ready };
        self.state.lock().volumes.insert(id.clone(), kept);
        crash::point("volume-create-done");
        Ok(())
    }

    fn make_copy(
        &self,
        pool: &Arc<Pool>,
        intent: &VolumeRecord,
        base: &Base,
        copy: BaseCopy,
    ) -> Result<LayerId, pool::Error> {
        let BaseCopy { layer, size } = copy;
        let above = LayerRecord::overlay(base.layer(), size);
        let above = self.make_layer(pool, layer, above, intent.encryption())?;
        crash::point("volume-create-copy");
        self.add_layer(pool, layer, LayerRecord { detach: intent.detach(), ..above })?;
        crash::point("volume-create-copy-record");
        Ok(layer)
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

    fn place(&self, pools: &[Arc<Pool>], new: &NewVolume) -> Result<Place, Error> {
        let Some(content) = &new.content else {
            if new.parameters.source().is_some() {
                return self.place_on_master(pools, new);
            }
            let size = new.size.chosen();
            let pool = self.roomiest(pools, size)?;
            return Ok(Place { pool, size, least: Bytes::ZERO, base: None });
        };
        if new.parameters.copy_mode() == CopyMode::None {
            return Err(Error::NotASource(content.clone()));
        }
        let (pool, least, base) = self.base(content)?;
        let below = self.state.lock().layer(base.layer());
        if new.parameters.is_encrypted() && below.is_some_and(|below| below.encryption.is_none()) {
            return Err(Error::PlainSource(content.clone()));
        }
        let size = new
            .size
            .chosen_for(least)
            .ok_or_else(|| Error::SmallerThanSource { content: content.clone(), size: least })?;
        if !pools.iter().any(|one| one.name() == pool.name()) {
            let (content, pool) = (content.clone(), pool.name().clone());
            return Err(Error::SourceElsewhere { content, pool });
        }
        self.roomiest(std::slice::from_ref(&pool), size)?;
        Ok(Place { pool, size, least, base: Some(base) })
    }

    /// What a volume is to stand on: its pool and its size, too.
    fn base(&self, content: &Content) -> Result<(Arc<Pool>, Bytes, Base), Error> {
        match content {
            Content::Snapshot(id) => {
                let snapshot = self.snapshot(id)?;
                let hold = self.state.hold(snapshot.layer());
                // It may have been deleted since it was found.
                self.snapshot(id)?;
                let hold = hold.ok_or_else(|| Error::NoSnapshot(id.clone()))?;
                Ok((snapshot.pool_itself(), snapshot.size(), Base::Frozen(hold)))
            }
            Content::Volume(id) => {
                let freeze = self.plan_freeze(id)?;
                Ok((freeze.pool().clone(), freeze.size(), Base::Active(freeze)))
            }
        }
    }

    /// Of these pools the one with most room, if `size` fits into it.
    pub(super) fn roomiest(&self, pools: &[Arc<Pool>], size: Bytes) -> Result<Arc<Pool>, Error> {
        let mut largest = Bytes::ZERO;
        let mut best: Option<(Bytes, &Arc<Pool>)> = None;
        let mut trouble = None;
        for pool in pools {
            let space = match pool.require_writable().and_then(|()| pool.space()) {
                Ok(space) => self.promised(space),
                // Others may do.
                Err(error) => {
                    trouble = Some(error);
                    continue;
                }
            };
            largest = largest.max(space.total);
            if best.is_none_or(|(free, _)| space.free > free) {
                best = Some((space.free, pool));
            }
        }
        match (best, trouble) {
            (Some((free, pool)), _) if size <= free => Ok(pool.clone()),
            (_, Some(error)) => Err(Error::Capacity(error)),
            (Some((free, pool)), None) if size <= largest => {
                Err(Error::PoolFull { pool: pool.name().clone(), size, free })
            }
            (Some(_) | None, None) => Err(Error::TooLarge { size, total: largest }),
        }
    }
}

impl NewVolume {
    fn intent(self, size: Bytes, base: Option<&Base>, copy: Option<BaseCopy>) -> VolumeRecord {
        let (mut active, mut overlay, mut master) = (LayerId::draw(), None, None);
        let mut below = None;
        let copy = copy.map(|copy| copy.layer);
        match base {
            Some(Base::Active(freeze)) => {
                (below, overlay) = (Some(freeze.frozen()), Some(freeze.overlay()));
            }
            Some(Base::Frozen(hold)) => below = Some(hold.layer()),
            Some(Base::Master(bottom)) => match bottom.role {
                Role::Active => active = bottom.layer,
                Role::Base => master = Some(bottom.layer),
            },
            None => {}
        }
        VolumeRecord {
            version: store::Version,
            name: self.name,
            size,
            parameters: self.parameters,
            access_modes: self.access_modes,
            content: self.content,
            throttle: self.throttle,
            formatting: false,
            lifecycle: self.lifecycle,
            phase: Phase::Creating { active, base: below, overlay, copy, master },
        }
    }
}

impl VolumeRecord {
    /// What its layers are to be where what they stand on is plain.
    fn encryption(&self) -> Option<Encryption> {
        self.parameters.is_encrypted().then_some(Encryption::Pending)
    }

    /// How the layer of a new volume is to be made independent, if it is.
    pub(super) fn detach(&self) -> Option<Detach> {
        let bytes_per_second = self.parameters.clone_speed();
        (self.parameters.copy_mode() == CopyMode::Clone).then_some(Detach { bytes_per_second })
    }
}

/// In what an existing volume is not what is wanted now, with both values.
fn difference(old: &VolumeRecord, new: &NewVolume) -> Option<String> {
    if old.name != new.name {
        return Some(format!("name: {:?}, not {:?}", old.name, new.name));
    }
    if old.lifecycle != new.lifecycle {
        return Some(format!("lifecycle: {:?}, not {:?}", old.lifecycle, new.lifecycle));
    }
    if old.content != new.content {
        let text = |content: &Option<Content>| {
            content.as_ref().map_or_else(|| "nothing".to_owned(), ToString::to_string)
        };
        let (old, new) = (text(&old.content), text(&new.content));
        return Some(format!("volume_content_source: {old}, not {new}"));
    }
    if !new.size.accepts(old.size) {
        let (old, new) = (old.size.count(), new.size.chosen().count());
        return Some(format!("capacity_range: it has {old} bytes, not {new}"));
    }
    if old.parameters != new.parameters {
        let (old, new) = (old.parameters.shown(), new.parameters.shown());
        return Some(format!("parameters: {old:?}, not {new:?}"));
    }
    if old.access_modes != new.access_modes {
        let (old, new) = (&old.access_modes, &new.access_modes);
        return Some(format!("volume_capabilities: {old:?}, not {new:?}"));
    }
    None
}

impl<Found, New> Begun<Found, New> {
    /// What a call did that ended there, or goes on from there.
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Exists(_) => Outcome::AlreadySo,
            Self::New(_) => Outcome::Done,
        }
    }
}
