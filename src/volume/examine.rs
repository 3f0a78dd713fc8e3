//! What is wrong with the records and layers of pools, by the rules of start-up, and nothing is
//! changed: no lock is taken, so somebody may be at work on them meanwhile.

use super::{
    Format, LayerId, Overcommit, SnapshotId, VolumeId, Volumes,
    record::{Cut, LayerRecord, Phase, SnapshotRecord, VolumeRecord},
    recover::load,
    state::{Kept, State, file_of, layer_record},
};
use crate::{
    finding::{Cure, Finding, Weight},
    pool::{self, Kind, Pool},
    qcow2,
    units::Bytes,
};
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use std::{
    collections::BTreeSet,
    fs::File,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What a look at pools found.
#[derive(Debug, Default)]
pub struct Examination {
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// What broke off, and the driver settles by itself when it starts.
    pub pending: Vec<String>,
    /// The volumes that there are, also those that cannot be used.
    pub volumes: BTreeSet<VolumeId>,
    /// How many snapshots there are.
    pub snapshots: usize,
    /// How many layers there are.
    pub layers: usize,
}

/// The layers that records speak of.
#[derive(Default)]
struct Named {
    /// By whatever record, also as what is to be made or removed.
    all: BTreeSet<LayerId>,
    /// By who needs them: volumes and snapshots, also half-made ones, and what those stand on.
    needed: BTreeSet<LayerId>,
    /// Whether a record cannot be read, which may speak of any.
    is_unclear: bool,
}

const RECORD: &str = "put the record back from a backup of the pool, or restore the volume from \
                      one; do not edit or remove it, for what it named is kept as long as it is \
                      there";

const LAYER: &str = "put the file back as it was, from a backup of the pool, or restore the volume \
                     from a backup. Nothing of it is removed meanwhile";

impl Volumes {
    /// Looks at all there is in these pools.
    pub fn examine(pools: Vec<Arc<Pool>>) -> Result<Examination, pool::Error> {
        let volumes = Self::read(pools, Overcommit::NONE)?;
        let mut found = Examination::default();
        let mut named = Named::default();
        for pool in &volumes.pools {
            named.read(pool, &volumes.state.lock(), &mut found)?;
        }
        {
            let state = volumes.state.lock();
            found.volumes = state.volumes.keys().cloned().collect();
            (found.snapshots, found.layers) = (state.snapshots.len(), state.layers.len());
            named.follow(&state);
        }
        volumes.examine_volumes(&mut found);
        volumes.examine_snapshots(&mut found);
        volumes.examine_layers(&named, &mut found);
        for pool in &volumes.pools {
            examine_files(pool, &named, &mut found)?;
        }
        Ok(found)
    }

    fn examine_volumes(&self, found: &mut Examination) {
        for id in found.volumes.clone() {
            if let Some(Kept::Usable { record, .. }) = self.state.lock().volumes.get(&id)
                && matches!(record.phase, Phase::Creating { .. })
            {
                found.pending.push(format!("creation of volume {id}"));
                continue;
            }
            let Some(reason) = self.check_volume(&id) else { continue };
            let path = self.record_of(&id);
            let next = if reason.starts_with("layer ") { LAYER } else { RECORD };
            let about = format!("volume {id}");
            let finding = Finding::new(Weight::Damage, "volume-damaged", about, reason);
            found.findings.push(finding.at(path).next(next).means(
                "the volume cannot be staged, copied or deleted until that is mended; other \
                     volumes are not affected",
            ));
        }
    }

    fn record_of(&self, id: &VolumeId) -> PathBuf {
        let state = self.state.lock();
        let pool = state.volumes.get(id).map(Kept::pool);
        let pool = self.pools.iter().find(|one| Some(one.name()) == pool);
        pool.map_or_else(PathBuf::new, |pool| pool.record(Kind::Volume, id))
    }

    fn examine_snapshots(&self, found: &mut Examination) {
        let all: Vec<_> = self.state.lock().snapshots.keys().cloned().collect();
        for id in all {
            let Some(reason) = self.check_snapshot(&id) else { continue };
            let pool = self.state.lock().snapshots.get(&id).map(|kept| kept.pool().clone());
            let pool = self.pools.iter().find(|one| Some(one.name()) == pool.as_ref());
            let path = pool.map_or_else(PathBuf::new, |pool| pool.record(Kind::Snapshot, &id));
            let next = if reason.starts_with("layer ") { LAYER } else { RECORD };
            let about = format!("snapshot {id}");
            let finding = Finding::new(Weight::Damage, "snapshot-damaged", about, reason);
            found.findings.push(finding.at(path).next(next).means(
                "no volume can be made from the snapshot until that is mended. While its record \
                 cannot be read, nothing is removed or merged in its pool",
            ));
        }
    }

    /// Layers with a record that nobody needs.
    fn examine_layers(&self, named: &Named, found: &mut Examination) {
        let state = self.state.lock();
        for (id, kept) in &state.layers {
            let path = state.layer(*id).and_then(|layer| Some(layer.path()?.to_owned()));
            if let Some(path) = path.filter(|_| kept.record.format == Format::Qcow2) {
                found.findings.extend(examine_name(*id, &path));
            }
            if named.needed.contains(id) {
                continue;
            }
            let Some(layer) = state.layer(*id) else { continue };
            let what =
                format!("no volume or snapshot stands on it; it holds {}", layer.allocated());
            let finding =
                Finding::new(Weight::Trouble, "layer-unneeded", format!("layer {id}"), what);
            let path = layer.path().map_or_else(|| layer_record(&kept.pool, *id), Path::to_owned);
            let next = if named.is_unclear {
                "mend the records that cannot be read first: one of them may need it"
            } else {
                "nothing, if you miss no volume: no crash of the driver leaves one, so a record \
                 was removed by somebody else. Bring that back, or keep the file"
            };
            found.findings.push(
                finding
                    .at(path)
                    .means(
                        "it may be all that is left of a volume or snapshot whose record is lost",
                    )
                    .next(next),
            );
        }
    }
}

impl Named {
    /// Takes note of what the records of a pool speak of, and tells of those that cannot be read.
    fn read(
        &mut self,
        pool: &Arc<Pool>,
        state: &State,
        found: &mut Examination,
    ) -> Result<(), pool::Error> {
        for (path, stem) in pool.records(Kind::Layer)? {
            let Ok(id) = stem.parse::<LayerId>() else {
                self.unreadable(&path, "its name is no layer id".to_owned(), found);
                continue;
            };
            self.all.insert(id);
            match load::<LayerRecord>(&path) {
                Ok(record) => self.layer(&record, id),
                Err(reason) => self.unreadable(&path, reason, found),
            }
        }
        for (path, stem) in pool.records(Kind::DeletingLayer)? {
            match load::<LayerRecord>(&path) {
                Ok(record) => {
                    found.pending.push(format!("removal of layer {stem}"));
                    if let Ok(id) = stem.parse() {
                        self.layer(&record, id);
                    }
                    self.needed.extend(record.parent);
                }
                Err(reason) => self.unreadable(&path, reason, found),
            }
        }
        for (kind, word) in [(Kind::Volume, ""), (Kind::DeletingVolume, "deletion of volume ")] {
            for (path, stem) in pool.records(kind)? {
                match load::<VolumeRecord>(&path) {
                    Ok(record) => self.volume(&record),
                    Err(reason) if kind == Kind::DeletingVolume => {
                        self.unreadable(&path, reason, found);
                        continue;
                    }
                    // It is told with its volume, if its name is that of one.
                    Err(_) if VolumeId::try_from(stem.clone()).is_ok() => self.is_unclear = true,
                    Err(reason) => self.unreadable(&path, reason, found),
                }
                if !word.is_empty() {
                    found.pending.push(format!("{word}{stem}"));
                }
            }
        }
        for (kind, word) in
            [(Kind::Snapshot, "snapshot "), (Kind::DeletingSnapshot, "deletion of snapshot ")]
        {
            for (path, stem) in pool.records(kind)? {
                match load::<SnapshotRecord>(&path) {
                    Ok(record) => {
                        self.needed.insert(record.layer);
                        let is_at_rest = kind == Kind::Snapshot && self.cut(&record);
                        if !is_at_rest {
                            found.pending.push(format!("{word}{stem}"));
                        }
                    }
                    Err(_) if kind == Kind::Snapshot && SnapshotId::try_from(stem).is_ok() => {
                        self.is_unclear = true; // it is told with its snapshot
                    }
                    Err(reason) => self.unreadable(&path, reason, found),
                }
            }
        }
        for (id, layer) in &state.layers {
            if layer.record.leftovers.is_some() && layer.pool.name() == pool.name() {
                found.pending.push(format!("merge of layer {id}"));
            }
        }
        Ok(())
    }

    fn unreadable(&mut self, path: &Path, reason: String, found: &mut Examination) {
        self.is_unclear = true;
        let name = path.file_stem().unwrap_or_default().display();
        let finding =
            Finding::new(Weight::Damage, "record-unreadable", format!("record {name}"), reason);
        found.findings.push(finding.at(path).next(RECORD).means(
            "what it speaks of cannot be used until it can be read. Nothing is removed or merged \
             in its pool meanwhile",
        ));
    }

    fn layer(&mut self, record: &LayerRecord, id: LayerId) {
        self.all.insert(file_of(id, record));
        self.all.extend(record.parent);
        if let Some(left) = &record.leftovers {
            self.all.insert(left.layer);
            self.all.extend(left.file.map(|(file, _)| file));
        }
    }

    fn volume(&mut self, record: &VolumeRecord) {
        self.needed.insert(record.phase.active());
        if let Phase::Creating { base, overlay, copy, master, .. } = record.phase {
            self.needed.extend([base, overlay, copy, master].into_iter().flatten());
        }
    }

    /// Whether a snapshot is at rest.
    fn cut(&mut self, record: &SnapshotRecord) -> bool {
        match record.phase {
            Cut::Cutting { overlay } => {
                self.needed.insert(overlay);
                false
            }
            Cut::Ready { .. } => true,
        }
    }

    /// What something needed stands on is needed, as far as that is known.
    fn follow(&mut self, state: &State) {
        let mut next: Vec<_> = self.needed.iter().copied().collect();
        while let Some(id) = next.pop() {
            let parent = state.layers.get(&id).and_then(|layer| layer.record.parent);
            next.extend(parent.filter(|parent| self.needed.insert(*parent)));
        }
        self.all.extend(&self.needed);
    }
}

/// A header that names a file which is no layer. QEMU names layers there, and nobody goes by it.
fn examine_name(id: LayerId, path: &Path) -> Option<Finding> {
    let name = qcow2::named_backing(&File::open(path).ok()?).ok()??;
    if name.contains("/layers/") {
        return None;
    }
    let what = format!("its header names {name:?} as what lies below it, which is no layer");
    let finding = Finding::new(Weight::Trouble, "header-foreign", format!("layer {id}"), what);
    Some(
        finding
            .at(path)
            .means(
                "nothing of that file is served: what a layer stands on is said by records alone. \
                 But somebody has changed the header",
            )
            .next(
                "find out who did. Do not open the file with other programs, which would go by it",
            ),
    )
}

/// Files that no record speaks of.
fn examine_files(pool: &Pool, named: &Named, found: &mut Examination) -> Result<(), pool::Error> {
    for (id, path) in pool.layers()? {
        if named.all.contains(&id) {
            continue;
        }
        let about = format!("file {id}");
        if !named.is_unclear && holds_nothing(&path).unwrap_or(false) {
            let what = "no record names this layer, and there is no byte of data in it".to_owned();
            let finding = Finding::new(Weight::Garbage, "layer-empty", about, what);
            let cure = Cure::RemoveFile(path.clone());
            found.findings.push(
                finding.at(path).means("nothing").next("qsd-csi doctor --fix").cured_by(cure),
            );
            continue;
        }
        let what = "no record names this layer, and it may hold data".to_owned();
        found.findings.push(
            Finding::new(Weight::Trouble, "layer-unnamed", about, what)
                .at(path)
                .means("it may be all that is left of a volume or snapshot whose record is lost")
                .next(
                    "keep the file until you know whose it was: it is never removed by itself, as \
                     no crash of the driver leaves one",
                ),
        );
    }
    Ok(())
}

/// Whether a layer provides no byte, data or zeroes, in whatever format.
fn holds_nothing(path: &Path) -> Result<bool, qcow2::Error> {
    let Ok(file) = File::open(path) else { return Ok(false) };
    let Ok(data) = file.metadata() else { return Ok(false) };
    if path.extension().is_some_and(|name| name == "qcow2") && data.len() > 0 {
        // An encrypted one has at least a key.
        let header = qcow2::header_of_ours(&file, qcow2::Expected::Plain)?;
        return Ok(header.size() > Bytes::ZERO && qcow2::allocation(&file)?.is_empty());
    }
    // What was written is data to the kernel, also before it has a place on the disk.
    let is_hole = matches!(seek(&file, SeekFrom::Data(0)), Err(Errno::NXIO));
    Ok(data.is_file() && data.blocks() == 0 && is_hole)
}
