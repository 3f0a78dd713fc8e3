//! What lies in a pool, read without the driver: its records as plain JSON, its layers by a reader
//! of our own or by `qemu-img`.

use super::{image::Image, picture::Picture};
use crate::harness::{names, part};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Who reads layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// `image.rs`, quickly.
    Own,
    /// `qemu-img`, past the page cache.
    Qemu,
}

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
        self.unmerged_beside(attached, &BTreeSet::new())
    }

    /// The same where some volumes are used as block devices: their active layers stay.
    pub(crate) fn unmerged_beside(
        &self,
        attached: &BTreeSet<String>,
        devices: &BTreeSet<String>,
    ) -> Vec<String> {
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
            // The parent may be gone by now: records are read one after the other.
            let below = self.layers.get(parent).and_then(|parent| parent["size"].as_u64());
            let is_short = below < record["size"].as_u64();
            if !record["detach"].is_null() && (open.is_empty() || !is_short) {
                unmerged.push(format!("{layer} is a clone"));
            }
            let stays = devices.iter().any(|volume| self.active(volume) == Some(layer));
            if !stays && !self.is_named(parent) && self.children(parent).len() == 1 {
                unmerged.push(format!("{layer} stands alone on {parent}"));
            }
        }
        unmerged
    }

    /// What the layers from one down hold, read past all locks; `None` where one has gone
    /// meanwhile.
    pub(crate) fn picture(&self, top: &str, reader: Reader) -> Option<Result<Picture, String>> {
        let (chain, bytes) = (self.chain(top), self.bytes(top, reader)?);
        match Picture::of(&bytes) {
            Err(_) if !chain.iter().all(|layer| self.file(layer).exists()) => None,
            found => Some(found),
        }
    }

    /// The same as it lies there.
    pub(crate) fn bytes(&self, top: &str, reader: Reader) -> Option<Vec<u8>> {
        let chain = self.chain(top);
        if !chain.iter().all(|layer| self.layers.contains_key(layer)) {
            return None;
        }
        match reader {
            Reader::Own => self.read(&chain),
            Reader::Qemu => self.convert(&chain),
        }
    }

    fn read(&self, chain: &[String]) -> Option<Vec<u8>> {
        let open = |layer: &String| {
            Image::open(&self.file(layer), self.layers[layer]["format"].as_str().unwrap())
        };
        let images: Vec<_> = chain.iter().map(open).collect::<Option<_>>()?;
        let mut disk = vec![0; images[0].size().try_into().unwrap()];
        images.iter().rev().for_each(|image| image.paint(&mut disk));
        Some(disk)
    }

    fn convert(&self, chain: &[String]) -> Option<Vec<u8>> {
        let mut node = Value::Null;
        for layer in chain.iter().rev() {
            let format = &self.layers[layer]["format"];
            let file = json!({ "driver": "file", "filename": self.file(layer) });
            let below = std::mem::take(&mut node);
            node = json!({ "driver": format, "file": file });
            if format == "qcow2" {
                node["backing"] = below;
            }
        }
        let raw = tempfile::NamedTempFile::new().unwrap();
        let convert = Command::new(part("bin/qemu-img"))
            .args(["convert", "-U", "-T", "none", "-O", "raw", &format!("json:{node}")])
            .arg(raw.path())
            .output()
            .unwrap();
        if !convert.status.success() {
            let is_there = chain.iter().all(|layer| self.file(layer).exists());
            assert!(!is_there, "{chain:?}: {}", String::from_utf8_lossy(&convert.stderr));
            return None;
        }
        Some(fs::read(raw.path()).unwrap())
    }
}
