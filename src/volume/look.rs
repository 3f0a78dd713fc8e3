//! All there is at one moment, for a person: who stands on what, what is done with it, and what
//! would be free without it.

use super::{
    Entry, Job, Layer, LayerId, PoolName, SnapshotEntry, SnapshotId, VolumeId, Volumes, entry,
    record::{SnapshotRecord, VolumeRecord},
    snapshot,
    state::{Kept, KeptLayer, State},
};
use crate::units::Bytes;
use std::{collections::BTreeMap, sync::OnceLock};

/// All there is at one moment.
#[derive(Clone, Debug)]
pub struct Sight {
    /// The volumes.
    pub volumes: BTreeMap<VolumeId, Entry>,
    /// The snapshots.
    pub snapshots: BTreeMap<SnapshotId, SnapshotEntry>,
    /// The layers.
    pub layers: BTreeMap<LayerId, Standing>,
}

/// One layer among the others.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The layer.
    pub layer: Layer,
    /// The pool it lies in.
    pub pool: PoolName,
    /// The layer it stands on.
    pub parent: Option<LayerId>,
    /// How many layers stand on it.
    pub children: usize,
    /// The volume that writes to it; without one it is frozen.
    pub volume: Option<VolumeId>,
    /// The snapshots that are names for it.
    pub snapshots: Vec<SnapshotId>,
    /// Whether it is to be made independent of what is below.
    pub detaching: bool,
    /// What is done with it now.
    pub job: Option<Job>,
    /// Why that failed the last time, in words.
    pub trouble: Option<String>,
    allocated: OnceLock<Bytes>,
}

impl Sight {
    /// What the pool really spends on the layers of a volume or snapshot.
    pub fn allocated(&self, layers: &[Layer]) -> Bytes {
        self.standings(layers).map(Standing::allocated).sum()
    }

    /// The same for those of them, from the top one down, that nothing else needs.
    pub fn own(&self, layers: &[Layer]) -> Bytes {
        let own = self.standings(layers).take_while(|standing| standing.needed_by() <= 1);
        own.map(Standing::allocated).sum()
    }

    /// What is known of these layers.
    pub fn standings(&self, layers: &[Layer]) -> impl Iterator<Item = &Standing> {
        layers.iter().filter_map(|layer| self.layers.get(&layer.id))
    }
}

impl Standing {
    /// What the pool really spends on it. The file system is asked once.
    pub fn allocated(&self) -> Bytes {
        *self.allocated.get_or_init(|| self.layer.allocated())
    }

    /// How many need it: volumes, snapshots, and layers on it.
    fn needed_by(&self) -> usize {
        self.children + self.snapshots.len() + usize::from(self.volume.is_some())
    }
}

impl Volumes {
    /// All there is now.
    pub fn look(&self) -> Sight {
        let state = self.state.lock();
        let volume =
            |(id, kept): (&VolumeId, &Kept<VolumeRecord>)| (id.clone(), entry(&state, id, kept));
        let snapshot = |(id, kept): (&SnapshotId, &Kept<SnapshotRecord>)| {
            (id.clone(), snapshot::entry(id, kept, |layer| state.layers_from(layer)))
        };
        Sight {
            volumes: state.volumes.iter().map(volume).collect(),
            snapshots: state.snapshots.iter().map(snapshot).collect(),
            layers: state.standings(),
        }
    }
}

impl State {
    /// Every layer with all that is known of it, in one pass over each kind of record.
    fn standings(&self) -> BTreeMap<LayerId, Standing> {
        let alone = |(id, kept): (&LayerId, &KeptLayer)| Some((*id, self.standing(*id, kept)?));
        let mut all: BTreeMap<_, _> = self.layers.iter().filter_map(alone).collect();
        for parent in self.layers.values().filter_map(|kept| kept.record.parent) {
            if let Some(standing) = all.get_mut(&parent) {
                standing.children += 1;
            }
        }
        for (id, kept) in &self.volumes {
            let active = kept.usable().map(|(_, record)| record.phase.active());
            if let Some(standing) = active.and_then(|active| all.get_mut(&active)) {
                standing.volume = Some(id.clone());
            }
        }
        for (id, kept) in &self.snapshots {
            let layer = kept.usable().map(|(_, record)| record.layer);
            if let Some(standing) = layer.and_then(|layer| all.get_mut(&layer)) {
                standing.snapshots.push(id.clone());
            }
        }
        all
    }

    fn standing(&self, id: LayerId, kept: &KeptLayer) -> Option<Standing> {
        Some(Standing {
            layer: self.layer(id)?,
            pool: kept.pool.name().clone(),
            parent: kept.record.parent,
            children: 0,
            volume: None,
            snapshots: Vec::new(),
            detaching: kept.record.detach.is_some(),
            job: self.jobs.of(id),
            trouble: self.jobs.trouble(id).map(str::to_owned),
            allocated: OnceLock::new(),
        })
    }
}
