//! The domain on one node: volumes and their layers. No gRPC, no QMP.
//!
//! Owns the records of all pools and an index of them in memory. Promises that a call either
//! happened or left nothing behind, whatever instant the process dies at:
//!
//! ```text
//!            create                                          delete
//!  (nothing) ------> Creating -- layer, its record --> Ready ------> deleting/ -- layer, its record --> (nothing)
//!                       |                                               |
//!                       +-- start-up: taken back                        +-- start-up: driven on
//! ```
//!
//! Called by the gRPC edge (`csi`) and by `node`. Everything that changes a volume takes its
//! `Claim`. The calls block on the file system; async callers run them on a blocking thread.

mod claim;
mod create;
mod delete;
mod id;
mod parameters;
mod record;
mod recover;

pub use claim::{Busy, Claim, InFlight};
pub use create::NewVolume;
pub use id::{InvalidName, LayerId, NodeName, PoolName, RunKey, VolumeId};
pub use parameters::{AccessMode, Cache, GRAIN, ParameterError, Parameters, RangeError, SizeRange};
pub use record::Format;

use crate::{
    pool::{self, Pool, Space},
    store,
    units::Bytes,
};
use record::VolumeRecord;
use std::{
    collections::BTreeMap,
    ops::Bound,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Why the domain said no.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No volume has this id.
    #[error("volume {0} does not exist")]
    NotFound(VolumeId),
    /// The name is taken by a volume that differs.
    #[error("volume {volume} exists already with another {what}")]
    Different {
        /// The volume that exists.
        volume: VolumeId,
        /// In what it differs, with both values.
        what: String,
    },
    /// The record, or the layer it names, cannot be used.
    #[error("volume {volume} is damaged: {reason}")]
    Damaged {
        /// The volume.
        volume: VolumeId,
        /// What is wrong, for a person.
        reason: String,
    },
    /// No pool has this name.
    #[error("parameters: pool is {0:?}, and this node has no pool of that name")]
    UnknownPool(String),
    /// The volume would fit if the pool were emptier.
    #[error(
        "capacity_range: {size} ({} bytes) are more than the {free} free in pool {pool}",
        size.count()
    )]
    PoolFull {
        /// The pool.
        pool: PoolName,
        /// Size of the volume.
        size: Bytes,
        /// What is free.
        free: Bytes,
    },
    /// The volume fits into no pool, however empty.
    #[error(
        "capacity_range: {size} ({} bytes) are more than the {total} of the largest pool",
        size.count()
    )]
    TooLarge {
        /// Size of the volume.
        size: Bytes,
        /// What the largest pool that was asked for has.
        total: Bytes,
    },
    /// A pool refused.
    #[error("volume {volume}")]
    Pool {
        /// The volume worked on.
        volume: VolumeId,
        /// Which pool, and why.
        source: pool::Error,
    },
    /// A pool cannot tell how full it is.
    #[error("capacity")]
    Capacity(#[source] pool::Error),
}

/// Whether a call changed anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did.
    Done,
    /// All was as asked for already.
    AlreadySo,
}

/// A volume that can be used.
#[derive(Clone, Debug)]
pub struct Volume {
    id: VolumeId,
    pool: Arc<Pool>,
    record: VolumeRecord,
}

/// What stands under an id: a volume, or the reason why not.
#[derive(Clone, Debug)]
pub enum Entry {
    /// A volume.
    Volume(Volume),
    /// A record that cannot be used; nothing touches it.
    Damaged {
        /// The pool it lies in.
        pool: PoolName,
        /// What is wrong, for a person.
        reason: String,
    },
}

/// One layer of a volume, as a daemon or a person wants to know it.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Where its bytes lie.
    pub path: PathBuf,
    /// How they lie there.
    pub format: Format,
    /// Size it presents.
    pub size: Bytes,
    /// What the pool really spends on it.
    pub allocated: Bytes,
}

/// All volumes of the node.
#[derive(Debug)]
pub struct Volumes {
    pools: Vec<Arc<Pool>>,
    index: Mutex<BTreeMap<VolumeId, Entry>>,
}

impl Volume {
    /// Its id.
    pub fn id(&self) -> &VolumeId {
        &self.id
    }

    /// The name it was created with.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Size the guest sees.
    pub fn size(&self) -> Bytes {
        self.record.size
    }

    /// The pool it lies in.
    pub fn pool(&self) -> &PoolName {
        self.pool.name()
    }

    /// The parameters it was created with.
    pub fn parameters(&self) -> &Parameters {
        &self.record.parameters
    }

    /// Its layers, from the active one down.
    pub fn layers(&self) -> Vec<Layer> {
        let (active, format) = (self.record.phase.active(), Format::Raw);
        vec![Layer {
            path: self.pool.layer(active, format),
            format,
            size: self.record.size,
            allocated: self.pool.allocated(active, format),
        }]
    }

    /// What the pool really spends on it.
    pub fn allocated(&self) -> Bytes {
        self.layers().iter().map(|layer| layer.allocated).sum()
    }
}

impl Volumes {
    /// The volume with this id.
    pub fn find(&self, id: &VolumeId) -> Result<Volume, Error> {
        match self.index().get(id) {
            Some(Entry::Volume(volume)) => Ok(volume.clone()),
            Some(Entry::Damaged { reason, .. }) => {
                Err(Error::Damaged { volume: id.clone(), reason: reason.clone() })
            }
            None => Err(Error::NotFound(id.clone())),
        }
    }

    /// What stands under this id, damaged or not.
    pub fn entry(&self, id: &VolumeId) -> Result<Entry, Error> {
        self.index().get(id).cloned().ok_or_else(|| Error::NotFound(id.clone()))
    }

    /// At most `count` entries in order of id, from the first one after `after`.
    pub fn list(&self, after: Option<&VolumeId>, count: usize) -> Vec<(VolumeId, Entry)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let index = self.index();
        let rest = index.range((start, Bound::Unbounded));
        rest.take(count).map(|(id, entry)| (id.clone(), entry.clone())).collect()
    }

    /// The space of every pool, or of the one asked for.
    pub fn space(&self, pool: Option<&PoolName>) -> Result<Vec<(PoolName, Space)>, Error> {
        let space = |pool: &Arc<Pool>| Ok((pool.name().clone(), pool.space()?));
        let spaces: Result<_, pool::Error> = self.candidates(pool)?.iter().map(space).collect();
        spaces.map_err(Error::Capacity)
    }

    /// The directories of all pools.
    pub fn pool_dirs(&self) -> impl Iterator<Item = &Path> {
        self.pools.iter().map(|pool| pool.dir())
    }

    /// The pools a volume with this `pool` parameter may lie in.
    fn candidates(&self, asked: Option<&PoolName>) -> Result<Vec<Arc<Pool>>, Error> {
        let Some(asked) = asked else { return Ok(self.pools.clone()) };
        let pool = self.pools.iter().find(|pool| pool.name() == asked).cloned();
        let pool = pool.ok_or_else(|| Error::UnknownPool(asked.to_string()))?;
        Ok(vec![pool])
    }

    fn index(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Entry>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Error {
    /// Wraps what a pool said while `volume` was worked on.
    fn pool(volume: &VolumeId) -> impl Fn(pool::Error) -> Self {
        let volume = volume.clone();
        move |source| Self::Pool { volume: volume.clone(), source }
    }
}

/// Writes a record of `pool` durably.
fn record<T: serde::Serialize>(pool: &Pool, path: &Path, record: &T) -> Result<(), pool::Error> {
    store::replace(path, record).map_err(|source| pool.store(source))
}
