//! Start-up: every record is driven to rest before the first call is served.

use super::{
    Entry, Format, PoolName, Volume, VolumeId, Volumes,
    record::{LayerRecord, Phase, VolumeRecord},
};
use crate::{
    chain::Chain,
    pool::{self, Pool},
    store,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::{Arc, Mutex},
};
use tracing::{error, info};

impl Volumes {
    /// Takes stock of these pools: broken-off creations are taken back, broken-off deletions
    /// driven on, and layers that nothing names removed.
    ///
    /// A record that makes no sense is reported and left alone, and then no layer of its pool is
    /// judged to be garbage either.
    pub fn recover(pools: Vec<Arc<Pool>>) -> Result<Self, pool::Error> {
        let mut index = BTreeMap::new();
        for pool in &pools {
            for (id, entry) in volumes_of(pool)? {
                if let Some(other) = index.insert(id.clone(), entry) {
                    let damaged = claimed_twice(&id, pool.name(), &other);
                    index.insert(id, damaged);
                }
            }
        }
        Ok(Self { pools, index: Mutex::new(index) })
    }
}

/// The volumes of one pool, after all that was under way in it is at rest.
fn volumes_of(pool: &Arc<Pool>) -> Result<BTreeMap<VolumeId, Entry>, pool::Error> {
    let mut entries = BTreeMap::new();
    let mut all_clear = true;
    for (path, stem) in pool.volume_records()? {
        let Ok(id) = VolumeId::try_from(stem) else {
            error!(path = %path.display(), "a record whose name is no volume id; left alone");
            all_clear = false;
            continue;
        };
        match read(pool, &id, &path) {
            Ok(Some(volume)) => _ = entries.insert(id, Entry::Volume(volume)),
            Ok(None) => {}
            Err(reason) => {
                error!(volume = %id, reason, "damaged; left alone");
                all_clear = false;
                entries.insert(id, Entry::Damaged { pool: pool.name().clone(), reason });
            }
        }
    }
    if all_clear {
        remove_garbage(pool, &entries)?;
    }
    Ok(entries)
}

/// The volume a record tells of, or `None` when driving it to rest ended it.
fn read(pool: &Arc<Pool>, id: &VolumeId, path: &Path) -> Result<Option<Volume>, String> {
    let record: VolumeRecord = load(path)?;
    if VolumeId::of_name(&record.name) != *id {
        return Err(format!("{}: it is for volume {:?}", path.display(), record.name));
    }
    let volume = Volume { id: id.clone(), pool: pool.clone(), record };
    match volume.record.phase {
        Phase::Creating { .. } => {
            info!(volume = %id, "taking back a creation that broke off");
            volume.remove().map_err(|error| Chain(&error).to_string())?;
            Ok(None)
        }
        Phase::Deleting { .. } => {
            info!(volume = %id, "going on with a deletion that broke off");
            volume.remove().map_err(|error| Chain(&error).to_string())?;
            Ok(None)
        }
        Phase::Ready { active } => {
            let layer: LayerRecord = load(&pool.layer_record(active))?;
            let path = pool.layer(active, layer.format);
            let data = fs::metadata(&path).map_err(|e| format!("layer {}: {e}", path.display()))?;
            let (found, size) = (data.len(), volume.record.size);
            if found != size.count() || layer.size != size {
                let (path, size) = (path.display(), size.count());
                return Err(format!("layer {path}: it has {found} bytes, and {size} are recorded"));
            }
            Ok(Some(volume))
        }
    }
}

/// Removes the layers that no record names. The caller has read every record: a damaged one might
/// name any of them.
fn remove_garbage(
    pool: &Arc<Pool>,
    entries: &BTreeMap<VolumeId, Entry>,
) -> Result<(), pool::Error> {
    let active = |entry: &Entry| match entry {
        Entry::Volume(volume) => Some(volume.record.phase.active()),
        Entry::Damaged { .. } => None,
    };
    let named: BTreeSet<_> = entries.values().filter_map(active).collect();
    for (id, path) in pool.layers()? {
        if !named.contains(&id) {
            info!(layer = %path.display(), "removing a layer that nothing names");
            pool.remove_layer(id, Format::Raw)?;
        }
    }
    for (path, stem) in pool.layer_records()? {
        if stem.parse().is_ok_and(|id| !named.contains(&id)) {
            store::remove(&path).map_err(|source| pool.store(source))?;
        }
    }
    Ok(())
}

fn load<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, String> {
    match store::load(path) {
        Ok(Some(record)) => Ok(record),
        Ok(None) => Err(format!("record {} is missing", path.display())),
        Err(error) => Err(Chain(&error).to_string()),
    }
}

fn claimed_twice(id: &VolumeId, pool: &PoolName, other: &Entry) -> Entry {
    let other = match other {
        Entry::Volume(volume) => volume.pool(),
        Entry::Damaged { pool, .. } => pool,
    };
    let reason = format!("pools {other} and {pool} both have a volume of this id");
    error!(volume = %id, reason, "damaged; left alone");
    Entry::Damaged { pool: pool.clone(), reason }
}
