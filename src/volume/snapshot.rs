//! Snapshots: names for frozen layers. A snapshot outlives its volume.
//!
//! ```text
//! begin: intent, overlay | freeze, by the node | finish: Ready        delete: deleting/ -- reclaim -- (nothing)
//! ```

use super::{
    Begun, Claim, Error, Freeze, Layer, LayerId, Outcome, PoolName, SnapshotId, VolumeId, Volumes,
    record,
    record::{Cut, SnapshotRecord},
    state::Kept,
};
use crate::{
    chain::Chain,
    clock, crash,
    pool::{self, Kind, Pool},
    store,
    units::Bytes,
};
use std::{ops::Bound, sync::Arc, time::SystemTime};

/// What a caller wants of a new snapshot.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// The CSI name.
    pub name: String,
    /// The volume to take it of.
    pub source: VolumeId,
}

/// A snapshot that can be used.
#[derive(Clone, Debug)]
pub struct Snapshot {
    id: SnapshotId,
    pool: Arc<Pool>,
    record: SnapshotRecord,
    created: SystemTime,
    layers: Vec<Layer>,
}

/// What stands under a snapshot id: a snapshot, or the reason why not.
#[derive(Clone, Debug)]
pub enum SnapshotEntry {
    /// A snapshot.
    Snapshot(Snapshot),
    /// A record that cannot be used; nothing touches it.
    Damaged {
        /// The pool it lies in.
        pool: PoolName,
        /// What is wrong, for a person.
        reason: String,
    },
}

/// A snapshot that is being taken.
#[derive(Debug)]
pub struct Taking {
    id: SnapshotId,
    intent: SnapshotRecord,
    freeze: Freeze,
}

impl Snapshot {
    /// Its id.
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// The name it was created with.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// The volume it was taken of.
    pub fn source(&self) -> &VolumeId {
        &self.record.source
    }

    /// Size of a volume made from it, at least.
    pub fn size(&self) -> Bytes {
        self.record.size
    }

    /// When it was taken.
    pub fn created(&self) -> SystemTime {
        self.created
    }

    /// The pool it lies in.
    pub fn pool(&self) -> &PoolName {
        self.pool.name()
    }

    /// Its layers, from its own down.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub(super) fn layer(&self) -> LayerId {
        self.record.layer
    }

    pub(super) fn pool_itself(&self) -> Arc<Pool> {
        self.pool.clone()
    }
}

impl Taking {
    /// The layer that is to be frozen before the snapshot is finished.
    pub fn freeze(&self) -> &Freeze {
        &self.freeze
    }
}

impl Volumes {
    /// The snapshot with this id.
    pub fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot, Error> {
        match self.snapshot_entry(id)? {
            SnapshotEntry::Snapshot(snapshot) => Ok(snapshot),
            SnapshotEntry::Damaged { pool, reason } => {
                self.require_no_wait(&pool).map_err(Error::snapshot(id))?;
                Err(Error::DamagedSnapshot { snapshot: id.clone(), reason })
            }
        }
    }

    /// What stands under this id, damaged or not.
    pub fn snapshot_entry(&self, id: &SnapshotId) -> Result<SnapshotEntry, Error> {
        let state = self.state.lock();
        let kept = state.snapshots.get(id).ok_or_else(|| Error::NoSnapshot(id.clone()))?;
        Ok(entry(id, kept, |layer| state.layers_from(layer)))
    }

    /// At most `count` snapshots that can be used, in order of id from the first one after `after`,
    /// of one volume or of all.
    pub fn list_snapshots(
        &self,
        source: Option<&VolumeId>,
        after: Option<&SnapshotId>,
        count: usize,
    ) -> Vec<Snapshot> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let state = self.state.lock();
        let rest = state.snapshots.range((start, Bound::Unbounded));
        let usable = rest.filter_map(|(id, kept)| {
            let is_meant = source.is_none_or(|source| {
                kept.usable().is_some_and(|(_, record)| record.source == *source)
            });
            if !is_meant {
                return None; // before its layers are looked up: there may be many
            }
            match entry(id, kept, |layer| state.layers_from(layer)) {
                SnapshotEntry::Snapshot(snapshot) => Some(snapshot),
                SnapshotEntry::Damaged { .. } => None,
            }
        });
        usable.take(count).collect()
    }

    /// Begins to take a snapshot, or finds the one that an earlier call with the same wishes took.
    pub fn begin_snapshot(
        &self,
        claim: &Claim<SnapshotId>,
        source: &Claim,
        new: NewSnapshot,
    ) -> Result<Begun<Snapshot, Taking>, Error> {
        let id = claim.snapshot();
        debug_assert_eq!(*id, SnapshotId::of_name(&new.name), "the claim is for this name");
        debug_assert_eq!(source.volume(), &new.source, "the claim is for this volume");
        if let Some(snapshot) = self.existing_snapshot(id, &new)? {
            return Ok(Begun::Exists(snapshot));
        }
        self.finish_snapshot_deletion(id)?;
        let freeze = self.plan_freeze(&new.source)?;
        let intent = SnapshotRecord {
            version: store::Version,
            name: new.name,
            source: new.source,
            layer: freeze.frozen(),
            size: freeze.size(),
            phase: Cut::Cutting { overlay: freeze.overlay() },
        };
        let taking = Taking { id: id.clone(), intent, freeze };
        match self.record_taking(&taking).map_err(Error::snapshot(id)) {
            Ok(()) => Ok(Begun::New(taking)),
            Err(error) => {
                self.abandon_snapshot(claim, taking);
                Err(error)
            }
        }
    }

    /// The snapshot of this id if there is one that `new` would do with.
    pub fn existing_snapshot(
        &self,
        id: &SnapshotId,
        new: &NewSnapshot,
    ) -> Result<Option<Snapshot>, Error> {
        let snapshot = match self.snapshot(id) {
            Ok(snapshot) => snapshot,
            Err(Error::NoSnapshot(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let what = if snapshot.record.name != new.name {
            format!("name: {:?}, not {:?}", snapshot.record.name, new.name)
        } else if snapshot.record.source != new.source {
            format!("source_volume_id: {}, not {}", snapshot.record.source, new.source)
        } else {
            return Ok(Some(snapshot));
        };
        Err(Error::DifferentSnapshot { snapshot: id.clone(), what })
    }

    fn record_taking(&self, taking: &Taking) -> Result<(), pool::Error> {
        let pool = taking.freeze.pool();
        record(pool, &pool.record(Kind::Snapshot, &taking.id), &taking.intent)?;
        crash::point("snapshot-intent");
        self.make_overlay(&taking.freeze)
    }

    /// Gives the frozen layer its name. Afterwards the snapshot is usable.
    pub fn finish_snapshot(
        &self,
        claim: &Claim<SnapshotId>,
        taking: Taking,
    ) -> Result<Snapshot, Error> {
        debug_assert_eq!(claim.snapshot(), &taking.id, "the claim is for this snapshot");
        let Taking { id, intent, freeze } = taking;
        self.name_layer(freeze.pool(), &id, intent).map_err(Error::snapshot(&id))?;
        drop(freeze); // from here on its name keeps it
        self.snapshot(&id)
    }

    /// Records that a snapshot is taken.
    pub(super) fn name_layer(
        &self,
        pool: &Arc<Pool>,
        id: &SnapshotId,
        intent: SnapshotRecord,
    ) -> Result<(), pool::Error> {
        let phase = Cut::Ready { created: clock::now() };
        let ready = SnapshotRecord { phase, ..intent };
        record(pool, &pool.record(Kind::Snapshot, id), &ready)?;
        let kept = Kept::Usable { pool: pool.clone(), record: ready };
        self.state.lock().snapshots.insert(id.clone(), kept);
        crash::point("snapshot-done");
        Ok(())
    }

    /// Takes back a snapshot that goes no further.
    pub fn abandon_snapshot(&self, claim: &Claim<SnapshotId>, taking: Taking) {
        debug_assert_eq!(claim.snapshot(), &taking.id, "the claim is for this snapshot");
        let Taking { id, intent, freeze } = taking;
        let pool = freeze.pool().clone();
        drop(freeze);
        if let Err(error) = self.take_back_snapshot(&pool, &id, &intent) {
            tracing::warn!(snapshot = %id, error = %Chain(&error), "taking back a snapshot: start-up will finish it");
        }
    }

    /// Removes what a snapshot that was not taken made, and its record last.
    pub(super) fn take_back_snapshot(
        &self,
        pool: &Arc<Pool>,
        id: &SnapshotId,
        intent: &SnapshotRecord,
    ) -> Result<(), pool::Error> {
        let Cut::Cutting { overlay } = intent.phase else { return Ok(()) };
        self.discard_overlay(pool, &intent.source, overlay)?;
        let path = pool.record(Kind::Snapshot, id);
        pool.remove_record(&path)
    }

    /// Deletes a snapshot, and its layer where nothing needs it; one that is gone is fine.
    ///
    /// As with a volume the intent is a move of its record, which needs no space.
    pub fn delete_snapshot(&self, claim: &Claim<SnapshotId>) -> Result<Outcome, Error> {
        let id = claim.snapshot();
        let found = match self.snapshot(id) {
            Ok(snapshot) => Some(snapshot),
            Err(Error::NoSnapshot(_)) => {
                // It may be about to be deleted where nobody can look now.
                let all = self.pools.iter().try_for_each(|pool| pool.require());
                all.map_err(Error::snapshot(id))?;
                None
            }
            Err(error) => return Err(error),
        };
        if let Some(snapshot) = &found {
            let pool = &snapshot.pool;
            let from = pool.record(Kind::Snapshot, id);
            let moved = store::relocate(&from, &pool.record(Kind::DeletingSnapshot, id));
            moved.map_err(|source| pool.store(source)).map_err(Error::snapshot(id))?;
            crash::point("snapshot-delete-intent");
            self.state.lock().snapshots.remove(id);
        }
        let finished = self.finish_snapshot_deletion(id)?;
        Ok(if found.is_some() { Outcome::Done } else { finished })
    }

    /// Drives on a deletion that broke off, if there is one.
    fn finish_snapshot_deletion(&self, id: &SnapshotId) -> Result<Outcome, Error> {
        let mut outcome = Outcome::AlreadySo;
        for pool in &self.pools {
            let finished = self.remove_snapshot(pool, id).map_err(Error::snapshot(id))?;
            outcome = if finished == Outcome::Done { finished } else { outcome };
        }
        Ok(outcome)
    }

    /// Removes what a snapshot needed whose end is decided, and its record last.
    pub(super) fn remove_snapshot(
        &self,
        pool: &Pool,
        id: &SnapshotId,
    ) -> Result<Outcome, pool::Error> {
        let path = pool.record(Kind::DeletingSnapshot, id);
        let condemned = store::load::<SnapshotRecord>(&path);
        let Some(condemned) = condemned.map_err(|source| pool.store(source))? else {
            return Ok(Outcome::AlreadySo);
        };
        self.reclaim(condemned.layer)?;
        crash::point("snapshot-delete-reclaimed");
        pool.remove_record(&path)?;
        Ok(Outcome::Done)
    }
}

pub(super) fn entry(
    id: &SnapshotId,
    kept: &Kept<SnapshotRecord>,
    layers_from: impl FnOnce(LayerId) -> Result<Vec<Layer>, String>,
) -> SnapshotEntry {
    let (pool, record) = match kept {
        Kept::Usable { pool, record } => (pool, record),
        Kept::Damaged { pool, reason, .. } => {
            return SnapshotEntry::Damaged { pool: pool.clone(), reason: reason.clone() };
        }
    };
    let Cut::Ready { created } = record.phase else {
        let reason = "it was not finished".to_owned();
        return SnapshotEntry::Damaged { pool: pool.name().clone(), reason };
    };
    match layers_from(record.layer) {
        Err(reason) => SnapshotEntry::Damaged { pool: pool.name().clone(), reason },
        Ok(layers) => {
            let (id, pool, record) = (id.clone(), pool.clone(), record.clone());
            SnapshotEntry::Snapshot(Snapshot { id, pool, record, created, layers })
        }
    }
}
