//! What a snapshot holds, and in what it differs from an earlier one: both are told by what its
//! layers provide, so nothing is tracked while a guest writes.
//!
//! ```text
//!  target:  L7 -- L5 -- L4 -- base: L2 -- L1 -- L0        changed since base: L7 + L5 + L4
//!           \______ provide the changes                   allocated in target: all of them
//! ```
//!
//! Layers may be merged meanwhile. What they provide together stays the same or becomes more, never
//! less, so a range may be read of other files than the range before it: when a file is gone, or
//! says nonsense because something is just being moved into it, the layers are looked up again.
//! This rests on merges being in the files, and not only in a daemon, before they are recorded.

use super::{Error, Format, Layer, Snapshot, SnapshotId, Volumes};
use crate::{
    chain::Chain,
    extents::{Extents, raw_allocation},
    qcow2,
    units::Bytes,
};
use std::{fmt, fs::File, io, ops::Range, sync::Arc};

/// How much of a disk is looked at in one go: some megabytes of extents at the very worst.
const WINDOW: u64 = 16 << 30;

/// How often a range is read of other files, or again. A merge ends in one change of files, and the
/// next one takes a while.
const ATTEMPTS: usize = 3;

/// What is wanted to know of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// What a snapshot holds.
    Allocated(SnapshotId),
    /// In what a snapshot may differ from an earlier one of the same volume.
    Changed(Pair),
}

/// Two snapshots that are compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The earlier one.
    pub base: SnapshotId,
    /// The later one.
    pub target: SnapshotId,
}

impl fmt::Display for Pair {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "snapshots {} and {}", self.base, self.target)
    }
}

/// Why a layer cannot tell what it provides.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The file system refused.
    #[error("reading what it provides")]
    Io(#[from] io::Error),
    /// The image makes no sense.
    #[error(transparent)]
    Image(#[from] qcow2::Error),
}

/// The answer, from some offset on, in parts that ascend. The first error ends it.
#[derive(Debug)]
pub struct Ranges {
    volumes: Arc<Volumes>,
    wanted: Wanted,
    size: Bytes,
    next: u64,
    open: Vec<Open>,
}

/// A layer whose file is open, so that it can be read even when it is merged away.
#[derive(Debug)]
pub(super) struct Open {
    layer: Layer,
    content: Content,
}

/// Where a layer says what it provides.
#[derive(Debug)]
enum Content {
    Raw(File),
    Image(File, qcow2::Map),
    /// It does not say, so it is all there.
    Master,
}

impl Ranges {
    /// Opens what is wanted.
    pub fn open(volumes: Arc<Volumes>, wanted: Wanted) -> Result<Self, Error> {
        let (size, open) = volumes.open_layers(&wanted)?;
        Ok(Self { volumes, wanted, size, next: 0, open })
    }

    /// The same without what lies before `offset`.
    #[must_use]
    pub fn starting_at(self, offset: u64) -> Self {
        Self { next: offset, ..self }
    }

    /// The size of the snapshot, the later one of two.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// What the layers provide of a part of the disk.
    fn read(&mut self, window: &Range<u64>) -> Result<Extents, Error> {
        let mut found = provided(&self.open, window);
        for _ in 1..ATTEMPTS {
            let Err(error) = &found else { break };
            tracing::debug!(error = %Chain(error), "looking the layers up again");
            (_, self.open) = self.volumes.open_layers(&self.wanted)?;
            found = provided(&self.open, window);
        }
        found
    }
}

impl Iterator for Ranges {
    type Item = Result<Extents, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let size = self.size.count();
        if self.next >= size {
            return None;
        }
        let window = self.next..self.next.saturating_add(WINDOW).min(size);
        let found = self.read(&window);
        self.next = if found.is_ok() { window.end } else { size };
        Some(found)
    }
}

impl Volumes {
    /// Opens the layers that provide what is wanted, all at once, and says what size it has.
    fn open_layers(&self, wanted: &Wanted) -> Result<(Bytes, Vec<Open>), Error> {
        let mut opened = self.try_open_layers(wanted);
        for _ in 1..ATTEMPTS {
            let Err(Error::Unreadable { .. }) = &opened else { break };
            opened = self.try_open_layers(wanted);
        }
        opened
    }

    fn try_open_layers(&self, wanted: &Wanted) -> Result<(Bytes, Vec<Open>), Error> {
        let (size, layers) = match wanted {
            Wanted::Allocated(snapshot) => {
                let snapshot = self.snapshot(snapshot)?;
                (snapshot.size(), snapshot.layers().to_vec())
            }
            Wanted::Changed(pair) => {
                let (base, target) = (self.snapshot(&pair.base)?, self.snapshot(&pair.target)?);
                (target.size(), between(&base, &target)?.to_vec())
            }
        };
        Ok((size, layers.into_iter().map(Open::of).collect::<Result<_, _>>()?))
    }
}

/// The layers that came after those of the base, from the target's own down.
fn between<'a>(base: &'a Snapshot, target: &'a Snapshot) -> Result<&'a [Layer], Error> {
    let pair = || Pair { base: base.id().clone(), target: target.id().clone() };
    if base.source() != target.source() {
        let (base_of, target_of) = (base.source().clone(), target.source().clone());
        return Err(Error::OfTwoVolumes { pair: pair(), base_of, target_of });
    }
    let depth = |below: &Snapshot, above: &'a Snapshot| {
        above.layers().iter().position(|layer| layer.id == below.layer())
    };
    match depth(base, target) {
        Some(depth) => Ok(&target.layers()[..depth]),
        None if depth(target, base).is_some() => Err(Error::WrongOrder(pair())),
        None => Err(Error::Unrelated(pair())),
    }
}

impl Open {
    pub(super) fn of(layer: Layer) -> Result<Self, Error> {
        let open = || {
            let Some(path) = layer.path() else { return Ok(Content::Master) };
            let file = File::open(path)?;
            Ok(match layer.format {
                Format::Raw => Content::Raw(file),
                Format::Qcow2 => {
                    let map = qcow2::Map::read(&file)?;
                    Content::Image(file, map)
                }
            })
        };
        match open() {
            Ok(content) => Ok(Self { layer, content }),
            Err(source) => Err(unreadable(&layer, source)),
        }
    }

    fn within(&self, window: &Range<u64>) -> Result<Extents, Error> {
        let found = match &self.content {
            Content::Raw(file) => raw_allocation(file, window.clone()).map_err(LayerError::Io),
            Content::Image(file, map) => {
                map.within(file, window.clone()).map_err(LayerError::Image)
            }
            Content::Master => {
                let end = window.end.min(self.layer.size.count());
                Ok(Extents::from(window.start.min(end)..end))
            }
        };
        found.map_err(|source| unreadable(&self.layer, source))
    }
}

/// What these layers provide together.
pub(super) fn provided(layers: &[Open], window: &Range<u64>) -> Result<Extents, Error> {
    layers.iter().try_fold(Extents::default(), |all, layer| Ok(all.union(&layer.within(window)?)))
}

fn unreadable(layer: &Layer, source: LayerError) -> Error {
    Error::Unreadable { layer: layer.id, place: layer.place.clone(), source }
}
