//! What lies in a pool, read without the driver: its records as plain JSON, its layers by
//! `qemu-img`.

use super::picture::Picture;
use crate::harness::{names, part};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// The records of a pool.
#[derive(Debug)]
pub(crate) struct Records {
    pool: PathBuf,
    pub(crate) volumes: BTreeMap<String, Value>,
    pub(crate) snapshots: BTreeMap<String, Value>,
    pub(crate) layers: BTreeMap<String, Value>,
    /// Of what is on its way out.
    pub(crate) condemned: Vec<String>,
}

impl Records {
    pub(crate) fn of(pool: &Path) -> Self {
        let kind = |dir: &str| {
            let dir = pool.join("records").join(dir);
            let load = |name: String| {
                // It may be gone by now.
                let text = fs::read_to_string(dir.join(&name)).ok()?;
                Some((name.strip_suffix(".json")?.to_owned(), serde_json::from_str(&text).unwrap()))
            };
            names(&dir).into_iter().filter_map(load).collect()
        };
        let condemned = ["deleting", "deleting-snapshots", "deleting-layers"];
        let condemned = condemned.map(|dir| names(&pool.join("records").join(dir)));
        Self {
            pool: pool.to_owned(),
            volumes: kind("volumes"),
            snapshots: kind("snapshots"),
            layers: kind("layers"),
            condemned: condemned.concat(),
        }
    }

    /// The layer that takes the writes of a volume.
    pub(crate) fn active(&self, volume: &str) -> Option<&str> {
        self.volumes.get(volume)?["phase"]["ready"]["active"].as_str()
    }

    /// The layer that a snapshot is a name for.
    pub(crate) fn named(&self, snapshot: &str) -> Option<&str> {
        self.snapshots.get(snapshot)?["layer"].as_str()
    }

    /// The layers from one down.
    pub(crate) fn chain(&self, top: &str) -> Vec<String> {
        let mut chain = vec![top.to_owned()];
        while let Some(parent) =
            chain.last().and_then(|last| self.layers.get(last)?["parent"].as_str())
        {
            assert!(!chain.iter().any(|one| one == parent), "{parent} stands on itself");
            chain.push(parent.to_owned());
        }
        chain
    }

    /// The layers that stand on one.
    pub(crate) fn children(&self, layer: &str) -> Vec<&str> {
        let on_it = self.layers.iter().filter(|(_, record)| record["parent"] == layer);
        on_it.map(|(id, _)| id.as_str()).collect()
    }

    /// Whether a snapshot names this layer.
    pub(crate) fn is_named(&self, layer: &str) -> bool {
        self.snapshots.values().any(|record| record["layer"] == layer)
    }

    /// The volumes that stand on a layer, directly or not.
    pub(crate) fn users(&self, layer: &str) -> Vec<&str> {
        let stands = |volume: &&str| {
            self.active(volume).is_some_and(|top| self.chain(top).iter().any(|one| one == layer))
        };
        self.volumes.keys().map(String::as_str).filter(stands).collect()
    }

    /// The file of a layer.
    pub(crate) fn file(&self, layer: &str) -> PathBuf {
        let record = &self.layers[layer];
        let file = record["file"].as_str().unwrap_or(layer);
        self.pool.join("layers").join(format!("{file}.{}", record["format"].as_str().unwrap()))
    }

    pub(crate) fn allocated(&self, layer: &str) -> u64 {
        fs::metadata(self.file(layer)).map_or(0, |data| data.blocks() * 512)
    }

    /// The files that the layers of all volumes and snapshots lie in.
    pub(crate) fn needed(&self) -> BTreeSet<String> {
        let volumes = self.volumes.keys().filter_map(|volume| self.active(volume));
        let snapshots = self.snapshots.keys().filter_map(|snapshot| self.named(snapshot));
        let layers = volumes.chain(snapshots).flat_map(|top| self.chain(top));
        let files = layers.map(|layer| self.file(&layer));
        files.map(|file| file.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    /// What is still to be merged, as a person would expect it: by the names and numbers that lie
    /// there, and by which volumes a daemon has open.
    pub(crate) fn unmerged(&self, attached: &BTreeSet<String>) -> Vec<String> {
        let mut unmerged = self.condemned.clone();
        for (layer, record) in &self.layers {
            if !record["leftovers"].is_null() {
                unmerged.push(format!("{layer} has leftovers"));
            }
            let open = self.users(layer).into_iter().filter(|volume| attached.contains(*volume));
            let open: Vec<_> = open.collect();
            let (Some(parent), true) = (record["parent"].as_str(), open.len() < 2) else {
                continue;
            };
            if !record["detach"].is_null() {
                unmerged.push(format!("{layer} is a clone"));
            }
            let is_written = open.iter().any(|volume| self.active(volume) == Some(layer));
            let is_smaller = self.allocated(layer) < self.allocated(parent);
            if !self.is_named(parent)
                && self.children(parent).len() == 1
                && !(is_written && is_smaller)
            {
                unmerged.push(format!("{layer} stands alone on {parent}"));
            }
        }
        unmerged
    }

    /// What the layers from one down hold, read past the page cache and past all locks; `None`
    /// where one has gone meanwhile.
    pub(crate) fn picture(&self, top: &str, scratch: &Path) -> Option<Result<Picture, String>> {
        let chain = self.chain(top);
        let mut node = Value::Null;
        for layer in chain.iter().rev() {
            let record = self.layers.get(layer)?;
            let file = json!({ "driver": "file", "filename": self.file(layer) });
            let below = std::mem::take(&mut node);
            node = json!({ "driver": record["format"], "file": file });
            if record["format"] == "qcow2" {
                node["backing"] = below;
            }
        }
        let raw = tempfile::NamedTempFile::new_in(scratch).unwrap();
        let convert = Command::new(part("bin/qemu-img"))
            .args(["convert", "-U", "-T", "none", "-O", "raw", &format!("json:{node}")])
            .arg(raw.path())
            .output()
            .unwrap();
        let is_there = chain.iter().all(|layer| self.file(layer).exists());
        if !convert.status.success() {
            let said = String::from_utf8_lossy(&convert.stderr).into_owned();
            return is_there.then_some(Err(format!("{chain:?}: {said}")));
        }
        let bytes = fs::read(raw.path()).unwrap();
        match Picture::of(&bytes) {
            Err(_) if !is_there => None,
            found => Some(found),
        }
    }
}
