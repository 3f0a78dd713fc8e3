//! The domain on one node: volumes, snapshots and their layers. No gRPC, no QMP.
//!
//! Owns the records of all pools and what they say in memory. Promises that a call either happened
//! or left nothing behind, whatever instant the process dies at:
//!
//! ```text
//!            create                                          delete
//!  (nothing) ------> Creating -- layer, its record --> Ready ------> deleting/ -- layers --> (nothing)
//!                       |                                               |
//!                       +-- start-up: taken back                        +-- start-up: driven on
//! ```
//!
//! A volume or a snapshot is a name for a layer, and layers stand on each other. Reference counts
//! are never stored: a layer is needed while a record names it or a layer stands on it.
//!
//! Called by the gRPC edge (`csi`) and by `node`. Everything that changes a volume takes its
//! `Claim`. The calls block on the file system; async callers run them on a blocking thread.

mod ahead;
mod changed;
mod claim;
mod create;
mod delete;
mod encryption;
mod examine;
mod expand;
mod freeze;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod heal;
mod id;
mod layer;
mod look;
mod master;
mod parameters;
mod record;
mod recover;
mod snapshot;
mod state;
mod throttle;
mod work;

pub use ahead::Ahead;
pub use changed::{LayerError, Pair, Ranges, Wanted};
pub use claim::{Busy, Claim, Claimed, InFlight};
pub use create::{Creation, NewVolume};
pub use encryption::{Encryption, Passphrase};
pub use examine::Examination;
pub use freeze::Freeze;
pub use id::{InvalidName, LayerId, NodeName, PoolName, RunKey, SnapshotId, VolumeId};
pub use layer::{Layer, Login, Master, Place};
pub use look::{Sight, Standing};
pub use master::FoundMaster;
pub use parameters::{
    AccessMode, Cache, CopyMode, GRAIN, Overcommit, ParameterError, Parameters, PublishAs,
    RangeError, SizeRange,
};
pub use record::{Content, Format, Lifecycle};
pub use recover::check_frozen;
pub use snapshot::{NewSnapshot, Snapshot, SnapshotEntry, Taking};
pub use throttle::Throttle;
pub use work::{Failure, Job, Progress, Purpose, QUIET, Site, Use, Way, Work};

use crate::{
    pool::{self, Pool, Space},
    source::Source,
    units::Bytes,
};
use record::VolumeRecord;
use state::{Kept, Shared, State};
use std::{
    fmt,
    ops::Bound,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
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
    /// No snapshot has this id.
    #[error("snapshot {0} does not exist")]
    NoSnapshot(SnapshotId),
    /// The name is taken by a snapshot that differs.
    #[error("snapshot {snapshot} exists already with another {what}")]
    DifferentSnapshot {
        /// The snapshot that exists.
        snapshot: SnapshotId,
        /// In what it differs, with both values.
        what: String,
    },
    /// The record of the snapshot, or a layer of it, cannot be used.
    #[error("snapshot {snapshot} is damaged: {reason}")]
    DamagedSnapshot {
        /// The snapshot.
        snapshot: SnapshotId,
        /// What is wrong, for a person.
        reason: String,
    },
    /// The volume cannot be its source itself.
    #[error(
        "parameters: copyMode is \"none\", and {0} cannot be written to by another volume; use \
         copy-on-write, copy-on-read or clone"
    )]
    NotASource(Content),
    /// The volume would be smaller than what it is made from.
    #[error("capacity_range: {content} has {} bytes, and the volume can be no smaller", size.count())]
    SmallerThanSource {
        /// What it is made from.
        content: Content,
        /// The size of that.
        size: Bytes,
    },
    /// The volume would be smaller than its master.
    #[error(
        "capacity_range: source {master} has {} bytes, and the volume can be no smaller",
        size.count()
    )]
    SmallerThanMaster {
        /// Its master.
        master: Source,
        /// The size of that.
        size: Bytes,
    },
    /// The volume is its master, and is to have another size.
    #[error(
        "capacity_range: source {master} has {} bytes, and with copyMode none the volume has as \
         many",
        size.count()
    )]
    NotSizeOfMaster {
        /// Its master.
        master: Source,
        /// The size of that.
        size: Bytes,
    },
    /// The volume is its master, which is not ours to freeze or to enlarge.
    #[error(
        "volume {volume} is {master} itself (copyMode none), so it has no snapshots, clones or \
         other sizes"
    )]
    IsMaster {
        /// The volume.
        volume: VolumeId,
        /// Its master.
        master: Source,
    },
    /// The volume is to be encrypted, and what it is made from is not.
    #[error(
        "parameters: encryption is \"luks\", and {0} is not encrypted; a copy is what its source is"
    )]
    PlainSource(Content),
    /// The volume is to lie in another pool than what it is made from.
    #[error("parameters: {content} lies in pool {pool}, and so must the volume")]
    SourceElsewhere {
        /// What it is made from.
        content: Content,
        /// Where that lies.
        pool: PoolName,
    },
    /// The volume would become smaller.
    #[error("capacity_range: volume {volume} has {} bytes and never shrinks; asked was for {}", is.count(), asked.count())]
    Shrinks {
        /// The volume.
        volume: VolumeId,
        /// What it has.
        is: Bytes,
        /// What was asked for.
        asked: Bytes,
    },
    /// A pool refused while a snapshot was worked on.
    #[error("snapshot {snapshot}")]
    Snapshot {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Which pool, and why.
        #[source]
        error: pool::Error,
    },
    /// A pool refused while a layer was worked on.
    #[error("layer {layer}")]
    Layer {
        /// The layer.
        layer: LayerId,
        /// Which pool, and why.
        source: pool::Error,
    },
    /// Snapshots of two volumes were to be compared.
    #[error(
        "base_snapshot_id, target_snapshot_id: {pair} are of two volumes, {base_of} and {target_of}"
    )]
    OfTwoVolumes {
        /// The snapshots.
        pair: Pair,
        /// The volume of the base.
        base_of: VolumeId,
        /// The volume of the target.
        target_of: VolumeId,
    },
    /// The base is the later one.
    #[error("base_snapshot_id, target_snapshot_id: of {0} the base is the later one; swap them")]
    WrongOrder(Pair),
    /// The target does not stand on the base.
    #[error("no record of what changed between {0} was kept; make a full copy")]
    Unrelated(Pair),
    /// A layer cannot tell what it provides.
    #[error("layer {layer}: {place}")]
    Unreadable {
        /// The layer.
        layer: LayerId,
        /// Where it lies.
        place: Place,
        /// Why not.
        source: LayerError,
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

/// What a call that makes something finds: the thing itself, or room for it.
#[derive(Debug)]
pub enum Begun<Found, New> {
    /// It is there already, as was asked for.
    Exists(Found),
    /// It is being made.
    New(New),
}

/// A volume that can be used.
#[derive(Clone, Debug)]
pub struct Volume {
    id: VolumeId,
    pool: Arc<Pool>,
    record: VolumeRecord,
    layers: Vec<Layer>,
}

/// What stands under an id: a volume, or the reason why not.
#[derive(Clone, Debug)]
pub enum Entry {
    /// A volume.
    Volume(Box<Volume>),
    /// A record that cannot be used; nothing touches it.
    Damaged {
        /// The pool it lies in.
        pool: PoolName,
        /// What is wrong, for a person.
        reason: String,
    },
}

/// All volumes of the node.
#[derive(Debug)]
pub struct Volumes {
    pools: Vec<Arc<Pool>>,
    overcommit: Overcommit,
    state: Shared,
    /// Held while layers are encrypted that volumes may share.
    encrypting: Mutex<()>,
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

    /// The limits that hold now.
    pub fn throttle(&self) -> &Throttle {
        &self.record.throttle
    }

    /// What ends it.
    pub fn lifecycle(&self) -> Lifecycle {
        self.record.lifecycle
    }

    /// What it was made from, if not blank.
    pub fn content(&self) -> Option<&Content> {
        self.record.content.as_ref()
    }

    /// The file that whoever serves the volume holds, so that nobody else does.
    pub fn lock(&self) -> Result<PathBuf, Error> {
        self.pool.lock_of(&self.id).map_err(Error::pool(&self.id))
    }

    /// Its layers, from the active one down.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Whether it is encrypted, or will be from when it is first used.
    pub fn is_encrypted(&self) -> bool {
        self.layers.first().is_some_and(|active| active.encryption.is_some())
    }

    /// The remote master at its bottom, if there is one.
    pub fn master(&self) -> Option<&Master> {
        self.layers.last().and_then(Layer::master)
    }

    /// An error where the volume is its master, which is not ours to change so.
    fn refuse_master(&self) -> Result<(), Error> {
        match self.layers.first().and_then(Layer::master) {
            None => Ok(()),
            Some(Master { source, .. }) => {
                Err(Error::IsMaster { volume: self.id.clone(), master: source.clone() })
            }
        }
    }

    /// What the pool really spends on it. Layers that others need too are counted in full.
    pub fn allocated(&self) -> Bytes {
        self.layers.iter().map(Layer::allocated).sum()
    }
}

impl Volumes {
    /// The volume with this id.
    pub fn find(&self, id: &VolumeId) -> Result<Volume, Error> {
        match self.entry(id)? {
            Entry::Volume(volume) => Ok(*volume),
            Entry::Damaged { pool, reason } => {
                self.require_no_wait(&pool).map_err(Error::pool(id))?;
                Err(Error::Damaged { volume: id.clone(), reason })
            }
        }
    }

    /// What stands under this id, damaged or not.
    pub fn entry(&self, id: &VolumeId) -> Result<Entry, Error> {
        let state = self.state.lock();
        let kept = state.volumes.get(id).ok_or_else(|| Error::NotFound(id.clone()))?;
        Ok(entry(&state, id, kept))
    }

    /// At most `count` entries in order of id, from the first one after `after`.
    pub fn list(&self, after: Option<&VolumeId>, count: usize) -> Vec<(VolumeId, Entry)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let state = self.state.lock();
        let rest = state.volumes.range((start, Bound::Unbounded));
        rest.take(count).map(|(id, kept)| (id.clone(), entry(&state, id, kept))).collect()
    }

    /// The space of every pool, or of the one asked for.
    pub fn space(&self, pool: Option<&PoolName>) -> Result<Vec<(PoolName, Space)>, Error> {
        let space = |pool: &Arc<Pool>| Ok((pool.name().clone(), pool.space()?));
        let spaces: Result<_, pool::Error> = self.candidates(pool)?.iter().map(space).collect();
        spaces.map_err(Error::Capacity)
    }

    /// What a pool really spends on all its layers.
    pub fn allocated(&self, pool: &PoolName) -> Bytes {
        let layers: Vec<_> = {
            let state = self.state.lock();
            let own = state.layers.iter().filter(|(_, layer)| layer.pool.name() == pool);
            own.filter_map(|(id, _)| state.layer(*id)).collect()
        };
        layers.iter().map(Layer::allocated).sum()
    }

    /// What may be promised of a space.
    pub fn promised(&self, space: Space) -> Space {
        let Space { total, free } = space;
        Space { total: self.overcommit.of(total), free: self.overcommit.of(free) }
    }

    /// All pools.
    pub fn pools(&self) -> &[Arc<Pool>] {
        &self.pools
    }

    /// The directories of all pools.
    pub fn pool_dirs(&self) -> impl Iterator<Item = &Path> {
        self.pools.iter().map(|pool| pool.dir())
    }

    /// The layers that nothing but this snapshot needs; none where there is no such snapshot.
    pub fn only_of_snapshot(&self, id: &SnapshotId) -> Vec<LayerId> {
        let top = self.snapshot(id).ok().and_then(|one| Some(one.layers().first()?.id));
        top.map(|top| self.would_go(top)).unwrap_or_default()
    }

    /// The layers that nothing but this volume needs; none where there is no such volume.
    pub fn only_of_volume(&self, id: &VolumeId) -> Vec<LayerId> {
        let top = self.find(id).ok().map(|one| one.record.phase.active());
        top.map(|top| self.would_go(top)).unwrap_or_default()
    }

    /// The layers that a volume stands on, from the active one down; none where there is no such
    /// volume.
    pub fn layers_of_volume(&self, id: &VolumeId) -> Vec<LayerId> {
        let found = self.find(id);
        found.map_or_else(|_| Vec::new(), |one| one.layers().iter().map(|one| one.id).collect())
    }

    /// The pools a volume with this `pool` parameter may lie in.
    fn candidates(&self, asked: Option<&PoolName>) -> Result<Vec<Arc<Pool>>, Error> {
        let Some(asked) = asked else { return Ok(self.pools.clone()) };
        let pool = self.pools.iter().find(|pool| pool.name() == asked).cloned();
        let pool = pool.ok_or_else(|| Error::UnknownPool(asked.to_string()))?;
        Ok(vec![pool])
    }
}

fn entry(state: &State, id: &VolumeId, kept: &Kept<VolumeRecord>) -> Entry {
    match kept {
        Kept::Damaged { pool, reason, .. } => {
            Entry::Damaged { pool: pool.clone(), reason: reason.clone() }
        }
        Kept::Usable { pool, record } => match state.layers_from(record.phase.active()) {
            Err(reason) => Entry::Damaged { pool: pool.name().clone(), reason },
            Ok(layers) => {
                let (id, pool, record) = (id.clone(), pool.clone(), record.clone());
                Entry::Volume(Box::new(Volume { id, pool, record, layers }))
            }
        },
    }
}

impl fmt::Display for Content {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Snapshot(id) => write!(out, "snapshot {id}"),
            Self::Volume(id) => write!(out, "volume {id}"),
        }
    }
}

impl Error {
    /// Wraps what a pool said while `volume` was worked on.
    fn pool(volume: &VolumeId) -> impl Fn(pool::Error) -> Self + use<> {
        let volume = volume.clone();
        move |source| Self::Pool { volume: volume.clone(), source }
    }

    /// Wraps what a pool said while `snapshot` was worked on.
    fn snapshot(snapshot: &SnapshotId) -> impl Fn(pool::Error) -> Self + use<> {
        let snapshot = snapshot.clone();
        move |error| Self::Snapshot { snapshot: snapshot.clone(), error }
    }
}

/// Writes a record of `pool` durably.
fn record<T: serde::Serialize>(pool: &Pool, path: &Path, record: &T) -> Result<(), pool::Error> {
    pool.write_record(path, record)
}
