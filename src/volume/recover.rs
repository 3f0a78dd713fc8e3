//! Start-up: every record is driven to rest before the first call is served.

use super::{
    LayerId, Overcommit, PoolName, SnapshotId, Volume, VolumeId, Volumes,
    layer::Layer,
    record::{Cut, LayerRecord, Phase, SnapshotRecord, VolumeRecord},
    state::{Kept, KeptLayer, Shared, State, file_of},
};
use crate::{
    abreast::abreast,
    chain::Chain,
    pool::{self, Kind, Pool},
    store,
    units::Bytes,
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tracing::{error, info, warn};

impl Volumes {
    /// Takes stock of these pools: what broke off is taken back or driven on. What makes no sense
    /// is reported and left alone.
    pub fn recover(pools: Vec<Arc<Pool>>, overcommit: Overcommit) -> Result<Self, pool::Error> {
        let begin = Instant::now();
        let volumes = Self::read(pools, overcommit)?;
        for pool in volumes.readable() {
            volumes.settle_layers(pool)?;
            volumes.settle_deletions(pool)?;
            volumes.settle_snapshots(pool)?;
            volumes.settle_volumes(pool);
        }
        volumes.check_images();
        volumes.report_strays()?;
        volumes.tell_of_rest(begin.elapsed());
        Ok(volumes)
    }

    /// Says what there is, and how long it took until all of it was at rest.
    fn tell_of_rest(&self, took: Duration) {
        let state = self.state.lock();
        let State { volumes, snapshots, layers, .. } = &*state;
        let [volumes, snapshots, layers] = [volumes.len(), snapshots.len(), layers.len()];
        info!(volumes, snapshots, layers, seconds = took.as_secs_f64(), "records at rest");
    }

    /// The pools that do not wait to be made readable.
    fn readable(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.iter().filter(|pool| pool.waits().is_none())
    }

    /// Reads all records, and changes nothing.
    pub(super) fn read(pools: Vec<Arc<Pool>>, overcommit: Overcommit) -> Result<Self, pool::Error> {
        let (state, encrypting) = (Shared::default(), Mutex::default());
        let volumes = Self { pools, overcommit, state, encrypting };
        for pool in volumes.readable() {
            let mut state = volumes.state.lock();
            read_layers(&mut state, pool)?;
            read_volumes(&mut state, pool)?;
            read_snapshots(&mut state, pool)?;
        }
        for pool in &volumes.pools {
            if let Some(reason) = pool.waits() {
                let reason = format!("pool {}: {reason}", pool.name());
                note_names(&mut volumes.state.lock(), pool, &reason)?;
            }
        }
        Ok(volumes)
    }

    /// Drives on removals and merges that broke off.
    fn settle_layers(&self, pool: &Arc<Pool>) -> Result<(), pool::Error> {
        let has_leftovers = |(id, layer): (&LayerId, &KeptLayer)| {
            (layer.pool.name() == pool.name() && layer.record.leftovers.is_some()).then_some(*id)
        };
        let merged: Vec<_> = self.state.lock().layers.iter().filter_map(has_leftovers).collect();
        // One after the other: what one leaves may have something left itself.
        for id in merged {
            report(&format!("merge of layer {id}"), self.clear_leftovers(id));
        }
        for (path, stem) in pool.records(Kind::DeletingLayer)? {
            let Ok(id) = stem.parse::<LayerId>() else { continue };
            if self.state.lock().unclear.contains(pool.name()) {
                warn!(layer = %id, "its removal waits: a record of the pool cannot be read");
                continue;
            }
            match load::<LayerRecord>(&path) {
                Ok(record) => {
                    let removed = self.finish_removal(pool, id, &record);
                    report(&format!("removal of layer {id}"), removed);
                }
                Err(reason) => error!(layer = %id, reason, "left alone"),
            }
        }
        Ok(())
    }

    /// Drives on deletions that broke off.
    fn settle_deletions(&self, pool: &Arc<Pool>) -> Result<(), pool::Error> {
        abreast(&pool.records(Kind::DeletingVolume)?, |(_, stem)| {
            let Ok(id) = VolumeId::try_from(stem.clone()) else { return };
            report(&format!("deletion of volume {id}"), self.remove_volume(pool, &id));
        });
        abreast(&pool.records(Kind::DeletingSnapshot)?, |(_, stem)| {
            let Ok(id) = SnapshotId::try_from(stem.clone()) else { return };
            report(&format!("deletion of snapshot {id}"), self.remove_snapshot(pool, &id));
        });
        Ok(())
    }

    /// A snapshot whose volume stands on the overlay already is finished; any other is taken back.
    fn settle_snapshots(&self, pool: &Arc<Pool>) -> Result<(), pool::Error> {
        for (path, stem) in pool.records(Kind::Snapshot)? {
            let Ok(id) = SnapshotId::try_from(stem) else { continue };
            let Ok(record) = load::<SnapshotRecord>(&path) else { continue };
            let Cut::Cutting { overlay } = record.phase else { continue };
            let stands = {
                let state = self.state.lock();
                match state.volumes.get(&record.source) {
                    Some(Kept::Usable { record, .. }) => Ok(record.phase.active() == overlay),
                    Some(Kept::Damaged { .. }) => Err("its volume is damaged"),
                    None => Ok(false),
                }
            };
            let settled = match stands {
                Ok(true) => self.name_layer(pool, &id, record),
                Ok(false) => self.take_back_snapshot(pool, &id, &record),
                Err(reason) => {
                    error!(snapshot = %id, reason, "a snapshot that broke off; left alone");
                    let (pool, keeps) = (pool.name().clone(), Some(record.layer));
                    let kept = Kept::Damaged { pool, reason: reason.to_owned(), keeps };
                    self.state.lock().snapshots.entry(id).or_insert(kept);
                    continue;
                }
            };
            report(&format!("snapshot {id}"), settled);
        }
        Ok(())
    }

    /// Takes back creations that broke off.
    fn settle_volumes(&self, pool: &Arc<Pool>) {
        let broken_off = |(id, kept): (&VolumeId, &Kept<VolumeRecord>)| {
            let (place, record) = kept.usable()?;
            let is_creating = matches!(record.phase, Phase::Creating { .. });
            (is_creating && place.name() == pool.name()).then(|| (id.clone(), record.clone()))
        };
        let creating: Vec<_> = self.state.lock().volumes.iter().filter_map(broken_off).collect();
        abreast(&creating, |(id, record)| {
            self.state.lock().volumes.remove(id);
            let taken_back = self.take_back_volume(pool, id, record);
            report(&format!("creation of volume {id}"), taken_back);
        });
    }

    /// Looks whether the images are what the records say.
    fn check_images(&self) {
        let all: Vec<_> = self.state.lock().volumes.keys().cloned().collect();
        let checked = abreast(&all, |id| self.check_volume(id));
        for (id, reason) in all.into_iter().zip(checked) {
            let Some(reason) = reason else { continue };
            error!(volume = %id, reason, "damaged; left alone");
            let mut state = self.state.lock();
            let Some(kept) = state.volumes.get_mut(&id) else { continue };
            *kept = Kept::damaged(kept.pool(), reason);
        }
        let usable = |(id, kept): (&SnapshotId, &Kept<SnapshotRecord>)| {
            kept.usable().is_some().then(|| id.clone())
        };
        let snapshots: Vec<_> = self.state.lock().snapshots.iter().filter_map(usable).collect();
        let checked = abreast(&snapshots, |id| self.check_snapshot(id));
        let mut state = self.state.lock();
        for (id, reason) in snapshots.into_iter().zip(checked) {
            let Some(reason) = reason else { continue };
            error!(snapshot = %id, reason, "damaged; left alone");
            let Some(kept) = state.snapshots.get_mut(&id) else { continue };
            let keeps = kept.usable().map(|(_, record)| record.layer);
            *kept = Kept::Damaged { pool: kept.pool().clone(), reason, keeps };
        }
    }

    /// What is wrong with a volume, if anything.
    pub(super) fn check_volume(&self, id: &VolumeId) -> Option<String> {
        let volume = match self.find(id) {
            Ok(volume) => volume,
            Err(super::Error::Damaged { reason, .. }) => return Some(reason),
            Err(_) => return None,
        };
        let shared = self.state.lock().shared(id, volume.record.phase.active());
        shared.or_else(|| volume.check_images().err())
    }

    /// What is wrong with a snapshot, if anything.
    pub(super) fn check_snapshot(&self, id: &SnapshotId) -> Option<String> {
        let layers = {
            let state = self.state.lock();
            match state.snapshots.get(id)? {
                Kept::Damaged { reason, .. } => Err(reason.clone()),
                Kept::Usable { record, .. } => state.layers_from(record.layer),
            }
        };
        layers.and_then(|all| check_frozen(&all)).err()
    }

    /// Tells of layers that no record names. No crash of ours leaves one, so it is what is left of
    /// something whose record was lost: data that somebody may want, and nothing of ours to remove.
    fn report_strays(&self) -> Result<(), pool::Error> {
        let state = self.state.lock();
        let mut needed = BTreeSet::new();
        let volumes =
            state.volumes.values().filter_map(|kept| Some(kept.usable()?.1.phase.active()));
        let snapshots = state.snapshots.values().filter_map(|kept| Some(kept.usable()?.1.layer));
        for top in volumes.chain(snapshots) {
            for id in state.chain(top).unwrap_or_default() {
                needed.extend(state.layers.get(&id).map(|layer| file_of(id, &layer.record)));
            }
        }
        for pool in self.readable() {
            for (file, path) in pool.layers()? {
                if !needed.contains(&file) {
                    warn!(layer = %path.display(), "nothing that can be used has this layer");
                }
            }
        }
        Ok(())
    }
}

/// Where a record lies, its name, and what it says.
type Found<T> = (PathBuf, String, Result<T, String>);

/// All records of a kind.
fn read_all<T: serde::de::DeserializeOwned + Send>(
    pool: &Pool,
    kind: Kind,
) -> Result<Vec<Found<T>>, pool::Error> {
    let all = pool.records(kind)?;
    let read = abreast(&all, |(path, _)| load(path));
    Ok(all.into_iter().zip(read).map(|((path, stem), read)| (path, stem, read)).collect())
}

impl State {
    /// Of one that two pools have nobody knows which is right.
    fn take_in_volume(&mut self, id: VolumeId, kept: Kept<VolumeRecord>) {
        let kept = match self.volumes.get(&id) {
            Some(other) => twice(&format!("volume {id}"), kept.pool(), other.pool()),
            None => kept,
        };
        self.volumes.insert(id, kept);
    }

    fn take_in_snapshot(&mut self, id: SnapshotId, kept: Kept<SnapshotRecord>) {
        let kept = match self.snapshots.get(&id) {
            Some(other) => {
                self.unclear.extend([kept.pool().clone(), other.pool().clone()]);
                twice(&format!("snapshot {id}"), kept.pool(), other.pool())
            }
            None => kept,
        };
        self.snapshots.insert(id, kept);
    }

    /// What else needs the layer that a volume writes to to stay as it is, or writes to it, too.
    pub(super) fn shared(&self, id: &VolumeId, active: LayerId) -> Option<String> {
        let writes = |(other, kept): (&VolumeId, &Kept<VolumeRecord>)| {
            let is_on_it = kept.usable().is_some_and(|(_, record)| record.phase.active() == active);
            (is_on_it && other != id).then(|| format!("volume {other} writes to it, too"))
        };
        let named = |name: &SnapshotId| format!("snapshot {name} is to keep it as it is");
        let other = self.volumes.iter().find_map(writes);
        let other = other.or_else(|| self.snapshots_of(active).next().map(named));
        // As with an older record, from before a clone was made. What broke off is needed by nobody.
        let above = || self.children(active).find(|child| self.is_needed(*child));
        let other = other.or_else(|| Some(format!("layer {} stands on it", above()?)));
        other.map(|other| format!("the layer that it writes to, {active}, is not its own: {other}"))
    }
}

impl Volume {
    /// An error unless its images are what the records say: before a daemon opens them, which would
    /// serve what a header leads to.
    pub fn check(&self) -> Result<(), super::Error> {
        let damaged = |reason| super::Error::Damaged { volume: self.id.clone(), reason };
        self.check_images().map_err(damaged)
    }

    fn check_images(&self) -> Result<(), String> {
        check_all(&self.layers, self.record.size)
    }
}

/// The same of a volume of this size with these layers, from the active one down.
pub(super) fn check_all(layers: &[Layer], size: Bytes) -> Result<(), String> {
    let Some((active, below)) = layers.split_first() else { return Ok(()) };
    check_frozen(below).and_then(|()| check_image(active, size))
}

fn read_layers(state: &mut State, pool: &Arc<Pool>) -> Result<(), pool::Error> {
    for (path, stem, read) in read_all::<LayerRecord>(pool, Kind::Layer)? {
        let Ok(id) = stem.parse::<LayerId>() else {
            error!(path = %path.display(), "a record whose name is no layer id; left alone");
            continue;
        };
        match read {
            Ok(record) => {
                state.layers.insert(id, KeptLayer { pool: pool.clone(), record });
            }
            Err(reason) => {
                error!(layer = %id, reason, "damaged; left alone");
                state.unclear.insert(pool.name().clone());
                state.unreadable.insert(id, pool.clone());
            }
        }
    }
    Ok(())
}

fn read_volumes(state: &mut State, pool: &Arc<Pool>) -> Result<(), pool::Error> {
    for (path, stem, read) in read_all::<VolumeRecord>(pool, Kind::Volume)? {
        let Ok(id) = VolumeId::try_from(stem) else {
            error!(path = %path.display(), "a record whose name is no volume id; left alone");
            continue;
        };
        let read =
            read.and_then(|record| named(&path, VolumeId::of_name(&record.name) == id, record));
        let kept = keep(pool, read).unwrap_or_else(|reason| {
            error!(volume = %id, reason, "damaged; left alone");
            Kept::damaged(pool.name(), reason)
        });
        state.take_in_volume(id, kept);
    }
    Ok(())
}

/// Takes in what was read of another pool.
pub(super) fn merge(state: &mut State, other: State) {
    state.layers.extend(other.layers);
    state.unclear.extend(other.unclear);
    state.unreadable.extend(other.unreadable);
    other.volumes.into_iter().for_each(|(id, kept)| state.take_in_volume(id, kept));
    other.snapshots.into_iter().for_each(|(id, kept)| state.take_in_snapshot(id, kept));
}

fn read_snapshots(state: &mut State, pool: &Arc<Pool>) -> Result<(), pool::Error> {
    for (path, stem, read) in read_all::<SnapshotRecord>(pool, Kind::Snapshot)? {
        let Ok(id) = SnapshotId::try_from(stem) else {
            error!(path = %path.display(), "a record whose name is no snapshot id; left alone");
            continue;
        };
        if matches!(&read, Ok(record) if matches!(record.phase, Cut::Cutting { .. })) {
            continue; // it is settled, and known then
        }
        let read =
            read.and_then(|record| named(&path, SnapshotId::of_name(&record.name) == id, record));
        let kept = keep(pool, read).unwrap_or_else(|reason| {
            error!(snapshot = %id, reason, "damaged; left alone");
            state.unclear.insert(pool.name().clone());
            Kept::damaged(pool.name(), reason)
        });
        state.take_in_snapshot(id, kept);
    }
    Ok(())
}

/// Of a pool that waits, only the names are known: they are taken, and nothing is done with them. One
/// that another pool has, too, is damaged there.
fn note_names(state: &mut State, pool: &Pool, reason: &str) -> Result<(), pool::Error> {
    let name = pool.name();
    for (_, stem) in pool.records(Kind::Volume)? {
        let Ok(id) = VolumeId::try_from(stem) else { continue };
        let kept = match state.volumes.get(&id) {
            Some(other) => twice(&format!("volume {id}"), other.pool(), name),
            None => Kept::damaged(name, reason.to_owned()),
        };
        state.volumes.insert(id, kept);
    }
    for (_, stem) in pool.records(Kind::Snapshot)? {
        let Ok(id) = SnapshotId::try_from(stem) else { continue };
        let kept = match state.snapshots.get(&id) {
            Some(other) => {
                state.unclear.insert(other.pool().clone());
                twice(&format!("snapshot {id}"), other.pool(), name)
            }
            None => Kept::damaged(name, reason.to_owned()),
        };
        state.snapshots.insert(id, kept);
    }
    state.unclear.insert(name.clone());
    Ok(())
}

fn keep<Record>(pool: &Arc<Pool>, read: Result<Record, String>) -> Result<Kept<Record>, String> {
    Ok(Kept::Usable { pool: pool.clone(), record: read? })
}

fn named<Record>(path: &Path, is_its: bool, record: Record) -> Result<Record, String> {
    if is_its { Ok(record) } else { Err(format!("{}: it has the name of another", path.display())) }
}

fn twice<Record>(what: &str, pool: &PoolName, other: &PoolName) -> Kept<Record> {
    let reason = format!("pools {other} and {pool} both have a {what}");
    error!(reason, "damaged; left alone");
    Kept::damaged(pool, reason)
}

pub(super) fn load<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, String> {
    match store::load(path) {
        Ok(Some(record)) => Ok(record),
        Ok(None) => Err(format!("record {} is missing", path.display())),
        Err(error) => Err(Chain(&error).to_string()),
    }
}

/// What is wrong with frozen images, if anything. One has at least the size that is recorded of it: it
/// may have been committed into.
pub fn check_frozen(layers: &[Layer]) -> Result<(), String> {
    layers.iter().try_for_each(|layer| {
        let most = Bytes::new(u64::MAX);
        check_size(layer, layer.size, most)
    })
}

/// The image that takes the writes has the size of the volume, or up to what it is being expanded
/// to.
fn check_image(active: &Layer, size: Bytes) -> Result<(), String> {
    check_size(active, size, active.size)
}

/// A remote master is looked at when it is opened.
fn check_size(layer: &Layer, least: Bytes, most: Bytes) -> Result<(), String> {
    let (Some(path), Some(found)) = (layer.path(), layer.image_size()) else { return Ok(()) };
    let path = path.display();
    let found = found.map_err(|error| format!("layer {path}: {error}"))?;
    if found < least || found > most {
        let (found, recorded) = (found.count(), layer.size.count());
        return Err(format!("layer {path}: it has {found} bytes, and {recorded} are recorded"));
    }
    Ok(())
}

/// What goes wrong with one thing stays with it.
fn report<T>(what: &str, outcome: Result<T, pool::Error>) {
    match outcome {
        Ok(_) => info!(what, "went on with what broke off"),
        Err(error) => error!(what, error = %Chain(&error), "left alone"),
    }
}
