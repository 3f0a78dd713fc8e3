//! What the records say, in memory: who stands on what, and who needs it.

use super::{
    LayerId, PoolName, SnapshotId, VolumeId,
    layer::{Layer, Place},
    record::{LayerRecord, SnapshotRecord, VolumeRecord},
    work::Jobs,
};
use crate::pool::{Kind, Pool};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// All that is known of the pools. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared(Arc<Mutex<State>>);

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a layer from being merged or removed while something is built on it; `None` where
    /// there is no such layer.
    pub(super) fn hold(&self, layer: LayerId) -> Option<Hold> {
        let mut state = self.lock();
        if !state.layers.contains_key(&layer) {
            return None;
        }
        *state.holds.entry(layer).or_default() += 1;
        Some(Hold { shared: self.clone(), layer })
    }
}

/// The records, and what is done with them at the moment.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) volumes: BTreeMap<VolumeId, Kept<VolumeRecord>>,
    pub(super) snapshots: BTreeMap<SnapshotId, Kept<SnapshotRecord>>,
    pub(super) layers: BTreeMap<LayerId, KeptLayer>,
    /// Pools with a record of a layer or snapshot that cannot be read, so that nobody knows what
    /// it needs: nothing is removed or merged there.
    pub(super) unclear: BTreeSet<PoolName>,
    /// The layers whose records cannot be read.
    pub(super) unreadable: BTreeMap<LayerId, Arc<Pool>>,
    pub(super) jobs: Jobs,
    holds: HashMap<LayerId, usize>,
}

/// A record that can be used, or the reason why not.
#[derive(Clone, Debug)]
pub(super) enum Kept<Record> {
    Usable {
        pool: Arc<Pool>,
        record: Record,
    },
    Damaged {
        pool: PoolName,
        reason: String,
        /// The layer that a snapshot is to keep all the same, as its record says.
        keeps: Option<LayerId>,
    },
}

/// A layer that there is.
#[derive(Clone, Debug)]
pub(super) struct KeptLayer {
    pub(super) pool: Arc<Pool>,
    pub(super) record: LayerRecord,
}

/// Keeps a layer from being merged or removed until it is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    shared: Shared,
    layer: LayerId,
}

impl Hold {
    pub(super) fn layer(&self) -> LayerId {
        self.layer
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(count) = state.holds.get_mut(&self.layer) {
            *count -= 1;
            if *count == 0 {
                state.holds.remove(&self.layer);
            }
        }
    }
}

impl<Record> Kept<Record> {
    /// One of which nobody knows what it needs.
    pub(super) fn damaged(pool: &PoolName, reason: String) -> Self {
        Self::Damaged { pool: pool.clone(), reason, keeps: None }
    }

    pub(super) fn usable(&self) -> Option<(&Arc<Pool>, &Record)> {
        match self {
            Self::Usable { pool, record } => Some((pool, record)),
            Self::Damaged { .. } => None,
        }
    }

    pub(super) fn pool(&self) -> &PoolName {
        match self {
            Self::Usable { pool, .. } => pool.name(),
            Self::Damaged { pool, .. } => pool,
        }
    }
}

impl State {
    /// The layers from `top` down, or what is wrong with them.
    pub(super) fn chain(&self, top: LayerId) -> Result<Vec<LayerId>, String> {
        let mut chain = vec![top];
        let mut below = top;
        loop {
            let Some(layer) = self.layers.get(&below) else {
                return Err(format!("layer {below} has no record that can be used"));
            };
            match layer.record.parent {
                None => return Ok(chain),
                Some(parent) if chain.contains(&parent) => {
                    return Err(format!("layer {parent} stands on itself"));
                }
                Some(parent) => chain.push(parent),
            }
            below = layer.record.parent.unwrap_or(below);
        }
    }

    /// The same, as a daemon or a person wants to know them.
    pub(super) fn layers_from(&self, top: LayerId) -> Result<Vec<Layer>, String> {
        let chain = self.chain(top)?;
        Ok(chain.into_iter().filter_map(|id| self.layer(id)).collect())
    }

    pub(super) fn layer(&self, id: LayerId) -> Option<Layer> {
        let KeptLayer { pool, record } = self.layers.get(&id)?;
        Some(Layer {
            id,
            file: file_of(id, record),
            place: place_of(pool, id, record),
            format: record.format,
            encryption: record.encryption,
            size: record.size,
        })
    }

    /// The layers that stand on this one.
    pub(super) fn children(&self, id: LayerId) -> impl Iterator<Item = LayerId> {
        let on_it = move |(child, layer): (&LayerId, &KeptLayer)| {
            (layer.record.parent == Some(id)).then_some(*child)
        };
        self.layers.iter().filter_map(on_it)
    }

    /// The volumes whose active layer is this one; never more than one.
    pub(super) fn volume_on(&self, id: LayerId) -> Option<&VolumeId> {
        let on_it = |kept: &Kept<VolumeRecord>| {
            kept.usable().is_some_and(|(_, record)| record.phase.active() == id)
        };
        self.volumes.iter().find_map(|(volume, kept)| on_it(kept).then_some(volume))
    }

    /// The snapshots that name this layer, also those that cannot be used now.
    pub(super) fn snapshots_of(&self, id: LayerId) -> impl Iterator<Item = &SnapshotId> {
        let of_it = move |kept: &Kept<SnapshotRecord>| match kept {
            Kept::Usable { record, .. } => record.layer == id,
            Kept::Damaged { keeps, .. } => *keeps == Some(id),
        };
        self.snapshots.iter().filter_map(move |(name, kept)| of_it(kept).then_some(name))
    }

    pub(super) fn is_held(&self, id: LayerId) -> bool {
        self.holds.contains_key(&id)
    }

    /// Whether anybody needs the layer: a volume, a snapshot, a layer on it, or who is just
    /// building something on it.
    pub(super) fn is_needed(&self, id: LayerId) -> bool {
        self.is_held(id)
            || self.volume_on(id).is_some()
            || self.snapshots_of(id).next().is_some()
            || self.children(id).next().is_some()
    }

    /// Whether a layer other than `but` has its bytes in this file.
    pub(super) fn is_file_used(&self, file: LayerId, but: LayerId) -> bool {
        self.layers.iter().any(|(id, layer)| *id != but && file_of(*id, &layer.record) == file)
    }
}

/// The id under which the file of a layer lies.
pub(super) fn file_of(id: LayerId, record: &LayerRecord) -> LayerId {
    record.file.unwrap_or(id)
}

fn place_of(pool: &Pool, id: LayerId, record: &LayerRecord) -> Place {
    match &record.master {
        None => Place::File(pool.layer(file_of(id, record), record.format)),
        Some(master) => Place::Master(master.clone()),
    }
}

/// Where the record of a layer lies.
pub(super) fn layer_record(pool: &Pool, id: LayerId) -> PathBuf {
    pool.record(Kind::Layer, id)
}
