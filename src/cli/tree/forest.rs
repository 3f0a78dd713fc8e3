//! What there is on a node as trees of layers: pure, from what the driver tells to what is drawn.
//!
//! The line of a volume is what it was before, snapshot by snapshot: the layers below its active
//! one. At a layer that several stand on, the line of the volume that it was goes on, and the
//! others branch off.

use crate::{
    cli::{
        client::Things,
        json,
        output::{activity, bytes},
        volume::state,
    },
    csi::pb::inspect::{Layer, Pool, Snapshot, Volume, volume::Source},
    units::Bytes,
};
use std::collections::{HashMap, HashSet};

/// One pool and the trees in it.
#[derive(Debug)]
pub(super) struct Grove {
    pub(super) name: String,
    pub(super) directory: String,
    pub(super) total: Bytes,
    pub(super) free: Bytes,
    pub(super) allocated: Bytes,
    /// Why it cannot tell its size; empty if it can.
    pub(super) trouble: String,
    /// The layers that stand on nothing.
    pub(super) roots: Vec<Tree>,
    /// What cannot be used, and so stands nowhere.
    pub(super) damaged: Vec<Damaged>,
}

/// One layer and all that stands on it.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) kind: Kind,
    /// The volume or the snapshots, or what can be said of a layer without a name.
    pub(super) label: String,
    pub(super) format: String,
    pub(super) size: Bytes,
    pub(super) allocated: Bytes,
    /// How it is used, in a few words.
    pub(super) state: String,
    pub(super) activity: Option<Activity>,
    pub(super) branches: Vec<Tree>,
    /// Where the line of the volume goes on.
    pub(super) next: Option<Box<Tree>>,
}

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A volume writes to it.
    Volume,
    /// A snapshot is a name for it.
    Snapshot,
    /// Only what stands on it needs it.
    Unnamed,
}

/// What is done with a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Activity {
    /// Data is moved.
    Job {
        /// How far it has come, in words.
        words: String,
        done: Bytes,
        total: Bytes,
    },
    /// It waits for its turn.
    Wait(String),
    /// It failed, and waits to be tried again.
    Trouble(String),
}

/// A volume or snapshot whose record cannot be used.
#[derive(Debug)]
pub(super) struct Damaged {
    pub(super) what: String,
    pub(super) reason: String,
}

/// The trees of every pool.
pub(super) fn grow(things: &Things) -> Vec<Grove> {
    let soil = Soil::new(things);
    things.pools.iter().map(|pool| soil.grove(pool)).collect()
}

impl Grove {
    /// How full it is, in words.
    pub(super) fn figures(&self) -> String {
        if !self.trouble.is_empty() {
            return self.trouble.clone();
        }
        let layers = match self.roots.iter().map(Tree::count).sum() {
            1_usize => "1 layer".to_owned(),
            count => format!("{count} layers"),
        };
        format!("{} in {layers}, {} of {} free", self.allocated, self.free, self.total)
    }
}

impl Tree {
    /// What stands right on it: the branches, then where the line goes on.
    pub(super) fn children(&self) -> impl Iterator<Item = &Self> {
        self.branches.iter().chain(self.next.as_deref())
    }

    /// What is said of it where something is done with it.
    pub(super) fn words(&self, activity: &str) -> String {
        if self.state.is_empty() {
            activity.to_owned()
        } else {
            format!("{activity}, {}", self.state)
        }
    }

    fn count(&self) -> usize {
        1 + self.children().map(Self::count).sum::<usize>()
    }
}

impl Activity {
    /// In words.
    pub(super) fn words(&self) -> &str {
        match self {
            Self::Job { words, .. } | Self::Wait(words) | Self::Trouble(words) => words,
        }
    }

    /// Whether somebody should look after it.
    pub(super) fn is_trouble(&self) -> bool {
        matches!(self, Self::Trouble(_))
    }
}

/// All things, found by their ids.
struct Soil<'a> {
    things: &'a Things,
    layers: HashMap<&'a str, &'a Layer>,
    /// The layers that volumes write to.
    active: HashMap<&'a str, &'a Layer>,
    volumes: HashMap<&'a str, &'a Volume>,
    snapshots: HashMap<&'a str, &'a Snapshot>,
    /// What stands on a layer; on nothing, for the empty id.
    children: HashMap<&'a str, Vec<&'a Layer>>,
    /// For a layer, the one above it in the line of the volume that it was.
    lines: HashMap<&'a str, &'a str>,
}

impl<'a> Soil<'a> {
    fn new(things: &'a Things) -> Self {
        let written = things.layers.iter().filter(|layer| !layer.volume_id.is_empty());
        let mut soil = Self {
            things,
            layers: things.layers.iter().map(|one| (one.layer_id.as_str(), one)).collect(),
            active: written.map(|one| (one.volume_id.as_str(), one)).collect(),
            volumes: things.volumes.iter().map(|one| (one.volume_id.as_str(), one)).collect(),
            snapshots: things.snapshots.iter().map(|one| (one.snapshot_id.as_str(), one)).collect(),
            children: HashMap::new(),
            lines: HashMap::new(),
        };
        soil.children = soil.children();
        soil.lines = soil.lines();
        soil
    }

    fn children(&self) -> HashMap<&'a str, Vec<&'a Layer>> {
        let mut children: HashMap<_, Vec<_>> = HashMap::new();
        for layer in &self.things.layers {
            let parent = self.layers.get_key_value(layer.parent_id.as_str());
            let parent = parent.map(|(id, _)| *id).unwrap_or_default();
            children.entry(parent).or_default().push(layer);
        }
        for siblings in children.values_mut() {
            siblings.sort_by_cached_key(|layer| (layer.volume_id.is_empty(), label(layer)));
        }
        children
    }

    /// The layers of a volume by pairs, a lower one and the one that stands on it, from the top
    /// down.
    fn steps(&self, volume: &str) -> impl Iterator<Item = (&'a Layer, &'a Layer)> {
        let below = |upper: &Layer| self.layers.get(upper.parent_id.as_str()).copied();
        let top = self.active.get(volume).copied();
        let line = std::iter::successors(top, move |upper| below(upper));
        // Layers that stand on themselves would have no end.
        let line = line.take(self.layers.len());
        line.filter_map(move |upper| Some((below(upper)?, upper)))
    }

    /// A snapshot is on the line of the volume it was taken of, and so is the layer at which a
    /// volume that was made from that one branched off.
    fn lines(&self) -> HashMap<&'a str, &'a str> {
        let mut lines = HashMap::new();
        for copy in &self.things.volumes {
            let Some(Source::SourceVolumeId(source)) = &copy.source else { continue };
            let steps = self.steps(&copy.volume_id);
            let below: HashSet<_> = steps.map(|(lower, _)| lower.layer_id.as_str()).collect();
            let is_shared = |lower: &Layer| below.contains(lower.layer_id.as_str());
            let shared = self.steps(source).find(|(lower, _)| is_shared(lower));
            lines.extend(shared.map(ids));
        }
        for volume in &self.things.volumes {
            let own = self.steps(&volume.volume_id);
            lines.extend(own.filter(|(lower, _)| self.was(lower, volume)).map(ids));
        }
        lines
    }

    /// Whether a snapshot of the volume is a name for the layer.
    fn was(&self, layer: &Layer, volume: &Volume) -> bool {
        let snapshots = layer.snapshot_ids.iter().filter_map(|id| self.snapshots.get(id.as_str()));
        snapshots.into_iter().any(|snapshot| snapshot.source_volume_id == volume.volume_id)
    }

    fn grove(&self, pool: &Pool) -> Grove {
        let roots = self.children.get("").into_iter().flatten();
        let own = roots.filter(|layer| layer.pool == pool.name);
        Grove {
            name: pool.name.clone(),
            directory: pool.directory.clone(),
            total: bytes(pool.total_bytes),
            free: bytes(pool.free_bytes),
            allocated: bytes(pool.allocated_bytes),
            trouble: pool.trouble.clone(),
            roots: own.map(|layer| self.tree(layer)).collect(),
            damaged: self.damaged(&pool.name),
        }
    }

    fn tree(&self, layer: &Layer) -> Tree {
        let id = layer.layer_id.as_str();
        let children = self.children.get(id).map(Vec::as_slice).unwrap_or_default();
        let line = match children {
            [only] => Some(only.layer_id.as_str()),
            _ => self.lines.get(id).copied(),
        };
        let (next, branches): (Vec<_>, Vec<_>) =
            children.iter().partition(|child| line == Some(child.layer_id.as_str()));
        Tree {
            kind: kind(layer),
            label: label(layer),
            format: layer.format.clone(),
            size: bytes(layer.capacity_bytes),
            allocated: bytes(layer.allocated_bytes),
            state: self.state(layer),
            activity: activity_of(layer),
            branches: branches.into_iter().map(|child| self.tree(child)).collect(),
            next: next.first().map(|child| Box::new(self.tree(child))),
        }
    }

    fn state(&self, layer: &Layer) -> String {
        if let Some(volume) = self.volumes.get(layer.volume_id.as_str()) {
            return state(volume).to_owned();
        }
        let named = layer.snapshot_ids.iter().find_map(|id| self.snapshots.get(id.as_str()));
        match named {
            Some(Snapshot { source_volume_id, created: Some(created), .. }) => {
                format!("{} of {source_volume_id}", json::time(*created))
            }
            Some(_) => String::new(),
            None if self.is_used(layer) => String::new(),
            None => "not used".to_owned(),
        }
    }

    fn is_used(&self, layer: &Layer) -> bool {
        kind(layer) != Kind::Unnamed || self.children.contains_key(layer.layer_id.as_str())
    }

    fn damaged(&self, pool: &str) -> Vec<Damaged> {
        let of = |kind: &str, id: &str, reason: &str| Damaged {
            what: format!("{kind} {id}"),
            reason: reason.to_owned(),
        };
        let volumes = self.things.volumes.iter().filter(|one| one.pool == pool);
        let volumes = volumes.filter(|one| !one.damage.is_empty());
        let snapshots = self.things.snapshots.iter().filter(|one| one.pool == pool);
        let snapshots = snapshots.filter(|one| !one.damage.is_empty());
        volumes
            .map(|one| of("volume", &one.volume_id, &one.damage))
            .chain(snapshots.map(|one| of("snapshot", &one.snapshot_id, &one.damage)))
            .collect()
    }
}

fn ids<'a>((lower, upper): (&'a Layer, &'a Layer)) -> (&'a str, &'a str) {
    (lower.layer_id.as_str(), upper.layer_id.as_str())
}

fn kind(layer: &Layer) -> Kind {
    match (layer.volume_id.is_empty(), layer.snapshot_ids.is_empty()) {
        (false, _) => Kind::Volume,
        (true, false) => Kind::Snapshot,
        (true, true) => Kind::Unnamed,
    }
}

fn label(layer: &Layer) -> String {
    match kind(layer) {
        Kind::Volume => layer.volume_id.clone(),
        Kind::Snapshot => layer.snapshot_ids.join(", "),
        Kind::Unnamed => {
            let id: String = layer.layer_id.chars().take(8).collect();
            format!("layer {id}")
        }
    }
}

fn activity_of(layer: &Layer) -> Option<Activity> {
    let words = activity(layer)?;
    Some(match &layer.job {
        Some(job) => {
            Activity::Job { words, done: bytes(job.done_bytes), total: bytes(job.total_bytes) }
        }
        None if layer.trouble.is_empty() => Activity::Wait(words),
        None => Activity::Trouble(words),
    })
}

#[cfg(test)]
mod test {
    use super::{super::sample, *};

    #[test]
    fn the_line_of_a_volume_goes_on_until_that_is_gone() {
        let mut things = sample::things();
        let labels = |tree: &Tree| tree.branches.iter().map(|one| one.label.clone()).collect();
        let monday = |things: &Things| -> (Vec<String>, Option<String>) {
            let groves = grow(things);
            let monday = groves[0].roots.iter().find(|tree| tree.label == "monday").unwrap();
            (labels(monday), monday.next.as_ref().map(|tree| tree.label.clone()))
        };
        assert_eq!(monday(&things), (vec!["restored".into()], Some("tuesday".into())));
        things.volumes.retain(|volume| volume.volume_id != "disk");
        assert_eq!(monday(&things), (vec!["restored".into(), "tuesday".into()], None));
    }

    #[test]
    fn a_layer_whose_parent_nobody_knows_is_drawn_all_the_same() {
        let mut things = sample::things();
        things.layers.retain(|layer| !layer.layer_id.starts_with('b'));
        let labels: Vec<_> = grow(&things)[0].roots.iter().map(|one| one.label.clone()).collect();
        assert!(["restored", "tuesday"].iter().all(|id| labels.contains(&(*id).to_owned())));
    }

    #[test]
    fn what_stands_on_itself_ends_all_the_same() {
        let mut things = sample::things();
        for layer in &mut things.layers {
            layer.parent_id.clone_from(&layer.layer_id);
        }
        assert_eq!(grow(&things)[0].roots.len(), 0);
    }
}
