//! Start-up: every record is driven to rest before the first call is served.

use super::{
    Entry, PoolName, Volume, VolumeId, Volumes,
    delete::condemned,
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
use tracing::{error, info, warn};

impl Volumes {
    /// Takes stock of these pools: broken-off creations are taken back, broken-off deletions
    /// driven on. What makes no sense is reported and left alone.
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
    finish_deletions(pool)?;
    let mut entries = BTreeMap::new();
    for (path, stem) in pool.volume_records()? {
        let Ok(id) = VolumeId::try_from(stem) else {
            error!(path = %path.display(), "a record whose name is no volume id; left alone");
            continue;
        };
        match read(pool, &id, &path) {
            Ok(Some(volume)) => _ = entries.insert(id, Entry::Volume(volume)),
            Ok(None) => {}
            Err(reason) => {
                error!(volume = %id, reason, "damaged; left alone");
                entries.insert(id, Entry::Damaged { pool: pool.name().clone(), reason });
            }
        }
    }
    report_strays(pool, &entries)?;
    Ok(entries)
}

/// Drives on the deletions that broke off.
fn finish_deletions(pool: &Arc<Pool>) -> Result<(), pool::Error> {
    for (path, stem) in pool.deleting_records()? {
        let Ok(id) = VolumeId::try_from(stem) else { continue };
        let finished = condemned(pool, &id).and_then(|volume| match volume {
            Some(volume) => volume.remove(path.clone()),
            None => Ok(()),
        });
        match finished {
            Ok(()) => info!(volume = %id, "went on with a deletion that broke off"),
            Err(error) => error!(volume = %id, error = %Chain(&error), "deletion; left alone"),
        }
    }
    Ok(())
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
            volume.remove(path.to_owned()).map_err(|error| Chain(&error).to_string())?;
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

/// Tells of layers that no record names. No crash of ours leaves one, so it is what is left of a
/// volume whose record was lost: data that somebody may want, and nothing of ours to remove.
fn report_strays(pool: &Arc<Pool>, entries: &BTreeMap<VolumeId, Entry>) -> Result<(), pool::Error> {
    let active = |entry: &Entry| match entry {
        Entry::Volume(volume) => Some(volume.record.phase.active()),
        Entry::Damaged { .. } => None,
    };
    let named: BTreeSet<_> = entries.values().filter_map(active).collect();
    for (id, path) in pool.layers()? {
        if !named.contains(&id) {
            warn!(layer = %path.display(), "no volume that can be used has this layer");
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
