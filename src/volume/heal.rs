//! What was damaged when the driver started, and was put right since, is served without another
//! start.
//!
//! ```text
//! pool.json damaged:  pool waits, untouched -- pool.json put back --> read and driven to rest like at a start
//! record damaged:     kept apart, untouched -- file put back -------> looked at like at a start, and taken in
//! ```
//!
//! Only a record at rest is taken in beside volumes that are served: what broke off besides is left
//! to the next start. What a record says of others still holds, as nobody touches what is damaged,
//! and nothing is removed or merged in a pool with a layer or snapshot that cannot be read.

use super::{
    LayerId, PoolName, SnapshotId, VolumeId, Volumes,
    record::{Cut, LayerRecord, Phase, SnapshotRecord, VolumeRecord},
    recover::{check_all, check_frozen, load, merge},
    state::{Kept, KeptLayer, State, layer_record},
};
use crate::{
    chain::Chain,
    pool::{self, Kind, Pool},
};
use serde::de::DeserializeOwned;
use std::{collections::BTreeSet, fmt, path::PathBuf, sync::Arc};
use tracing::{error, info};

impl Volumes {
    /// Looks again at what is damaged. Whether something of it can be used by now. Takes as long as
    /// the disks of the pools take.
    pub fn heal(&self) -> bool {
        let waiting: Vec<_> = self.pools.iter().filter(|pool| pool.waits().is_some()).collect();
        let mut is_better = false;
        for pool in waiting {
            match self.take_in(pool) {
                Ok(taken) => is_better |= taken,
                Err(error) => error!(pool = %pool.name(), error = %Chain(&error), "pool waits"),
            }
        }
        // A record may be where nobody can look now, too.
        if self.pools.iter().any(|pool| pool.require().is_err()) {
            return is_better;
        }
        let (layers, snapshots, volumes) = self.state.lock().damaged();
        let layers = layers.into_iter().filter(|(id, pool)| self.heal_layer(*id, pool)).count();
        let mut unclear = BTreeSet::new();
        let mut count = layers;
        for (id, pool) in snapshots {
            match self.heal_snapshot(&id) {
                Found::Right => count += 1,
                Found::Unreadable => {
                    unclear.insert(pool);
                    // Of one that several have, none knows which of its layers it needs.
                    unclear.extend(
                        self.places(Kind::Snapshot, &id).map(|(pool, _)| pool.name().clone()),
                    );
                }
                Found::Wrong => {}
            }
        }
        count += volumes.into_iter().filter(|id| self.heal_volume(id) == Found::Right).count();
        let mut state = self.state.lock();
        unclear.extend(state.unreadable.values().map(|pool| pool.name().clone()));
        state.unclear.retain(|pool| unclear.contains(pool));
        is_better || count > 0
    }

    /// An error where a pool of this name waits: what is wrong is wrong with the pool then.
    pub(super) fn require_no_wait(&self, pool: &PoolName) -> Result<(), pool::Error> {
        let waits = |one: &&Arc<Pool>| one.name() == pool && one.waits().is_some();
        self.pools.iter().find(waits).map_or(Ok(()), |pool| pool.require())
    }

    /// Reads a pool that can be used by now, and drives it to rest before anybody has it.
    fn take_in(&self, pool: &Arc<Pool>) -> Result<bool, pool::Error> {
        let Some(own) = pool.again()? else { return Ok(false) };
        let own = Arc::new(own);
        let taken = Self::recover(vec![own.clone()], self.overcommit)?;
        own.require()?;
        let taken = std::mem::take(&mut *taken.state.lock());
        let mut state = self.state.lock();
        state.volumes.retain(|_, kept| kept.pool() != pool.name());
        state.snapshots.retain(|_, kept| kept.pool() != pool.name());
        state.unclear.remove(pool.name());
        merge(&mut state, taken);
        pool.end_wait();
        info!(pool = %pool.name(), "pool taken in");
        Ok(true)
    }

    fn heal_layer(&self, id: LayerId, pool: &Arc<Pool>) -> bool {
        let Ok(record) = load::<LayerRecord>(&layer_record(pool, id)) else { return false };
        if record.leftovers.is_some() {
            return false;
        }
        info!(layer = %id, "put right");
        self.state.lock().take_in_layer(id, pool.clone(), record);
        true
    }

    fn heal_snapshot(&self, id: &SnapshotId) -> Found {
        let is_its = |record: &SnapshotRecord| SnapshotId::of_name(&record.name) == *id;
        let read = self.read_again(Kind::Snapshot, id, is_its);
        let Some((pool, record)) = read else { return Found::Unreadable };
        if !matches!(record.phase, Cut::Ready { .. }) {
            return Found::Unreadable;
        }
        let layers = {
            let mut state = self.state.lock();
            // Kept from now on, whatever is found of it.
            if let Some(Kept::Damaged { keeps, .. }) = state.snapshots.get_mut(id) {
                *keeps = Some(record.layer);
            }
            if state.volume_on(record.layer).is_some() {
                return Found::Wrong; // which writes to what the snapshot is to keep
            }
            state.layers_from(record.layer)
        };
        if layers.and_then(|all| check_frozen(&all)).is_err() {
            return Found::Wrong;
        }
        info!(snapshot = %id, "put right");
        self.state.lock().snapshots.insert(id.clone(), Kept::Usable { pool, record });
        Found::Right
    }

    fn heal_volume(&self, id: &VolumeId) -> Found {
        let is_its = |record: &VolumeRecord| VolumeId::of_name(&record.name) == *id;
        let read = self.read_again(Kind::Volume, id, is_its);
        let Some((pool, record)) = read else { return Found::Unreadable };
        let Phase::Ready { active } = record.phase else { return Found::Unreadable };
        let layers = {
            let state = self.state.lock();
            // An older record than the right one names a layer that is frozen by now.
            if state.shared(id, active).is_some() || state.children(active).next().is_some() {
                return Found::Wrong;
            }
            state.layers_from(active)
        };
        if layers.and_then(|all| check_all(&all, record.size)).is_err() {
            return Found::Wrong;
        }
        info!(volume = %id, "put right");
        self.state.lock().volumes.insert(id.clone(), Kept::Usable { pool, record });
        Found::Right
    }

    /// The record of this name, if one pool alone has it, it can be read, and it is its own.
    fn read_again<Record: DeserializeOwned>(
        &self,
        kind: Kind,
        name: impl fmt::Display,
        is_its: impl FnOnce(&Record) -> bool,
    ) -> Option<(Arc<Pool>, Record)> {
        let mut places = self.places(kind, name);
        let (Some((pool, path)), None) = (places.next(), places.next()) else { return None };
        let record = load(&path).ok()?;
        is_its(&record).then_some((pool, record))
    }

    /// The pools that have a record of this name, each with where.
    fn places(
        &self,
        kind: Kind,
        name: impl fmt::Display,
    ) -> impl Iterator<Item = (Arc<Pool>, PathBuf)> {
        let place = move |pool: &Arc<Pool>| (pool.clone(), pool.record(kind, &name));
        self.pools.iter().map(place).filter(|(_, path)| path.exists())
    }
}

/// What became of something damaged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It can be used.
    Right,
    /// Its record can be read, and it cannot be used.
    Wrong,
    /// Its record cannot be read, or broke off.
    Unreadable,
}

/// The layers, snapshots and volumes that cannot be used.
type Damaged = (Vec<(LayerId, Arc<Pool>)>, Vec<(SnapshotId, PoolName)>, Vec<VolumeId>);

impl State {
    fn damaged(&self) -> Damaged {
        let layers = self.unreadable.iter().map(|(id, pool)| (*id, pool.clone()));
        let is_damaged = |kept: &Kept<_>| matches!(kept, Kept::Damaged { .. });
        let snapshots = self.snapshots.iter().filter(|(_, kept)| is_damaged(kept));
        let snapshots = snapshots.map(|(id, kept)| (id.clone(), kept.pool().clone()));
        let volumes = self.volumes.iter().filter(|(_, kept)| kept.usable().is_none());
        (layers.collect(), snapshots.collect(), volumes.map(|(id, _)| id.clone()).collect())
    }

    fn take_in_layer(&mut self, id: LayerId, pool: Arc<Pool>, record: LayerRecord) {
        self.unreadable.remove(&id);
        self.layers.entry(id).or_insert(KeptLayer { pool, record });
    }
}
