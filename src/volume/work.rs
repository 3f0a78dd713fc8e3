//! What is done in the background so that chains stay short and clones become independent.
//!
//! A layer without a name and with one child is merged with that child, whichever way moves less:
//!
//! ```text
//! stream:  child <- lower <- base    what is in the lower goes into the child     child <- base
//! commit:  child <- lower <- base    what is in the child goes into the lower     child (in the lower's file) <- base
//! ```
//!
//! Until the last step, which replaces one record, the child reads the same whatever was moved: a
//! crash costs only work. A commit changes the lower layer, which is why it has no name and no
//! other child. Work yields to calls: who changes a volume interrupts what touches its layers, and
//! it is begun again afterwards; what was moved stays.
//!
//! This module says what is to be done and records what was done. The node does it (`node::tend`).

use super::{
    Encryption, Error, Format, InFlight, Layer, LayerId, Login, SnapshotId, VolumeId, Volumes,
    record,
    record::{LayerRecord, Leftovers},
    state::{KeptLayer, Shared, State, file_of, layer_record},
};
use crate::{crash, pool, units::Bytes};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Layers below the active one that a volume has at most, if unnamed ones among them can be merged.
const DEEPEST: usize = 8;

/// How long the active layer of a volume that is served is left alone after it was put on. Who takes
/// one snapshot soon takes the next, which would interrupt the work.
pub const QUIET: Duration = Duration::from_secs(1);

/// Bytes of size that are looked at in the time in which one byte is moved.
const LOOKS_A_BYTE: u64 = 512;

/// Bytes that are moved rather down than up where a volume stays raw by that: it is faster from then
/// on, and an overlay that a raw layer went into is never raw again.
const RAW_IS_WORTH: u64 = 1 << 30;

/// How long work that failed is left alone: a daemon that died was none of its fault, so not for long
/// the first time, and twice as long each further time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// How long work is left alone at most, however often it failed; and how long after that it must not
/// fail again for its failures to be forgotten.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What is under way, by the layer that it is for.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    running: HashMap<LayerId, Running>,
    failed: HashMap<LayerId, Failed>,
    /// Layers that were just put on, and until when they are left alone.
    fresh: HashMap<LayerId, Instant>,
}

#[derive(Debug)]
struct Failed {
    /// Until when it is left alone.
    until: Instant,
    reason: String,
    /// How often in a row.
    times: u32,
}

#[derive(Debug)]
struct Running {
    touched: Vec<LayerId>,
    interrupted: CancellationToken,
    done: watch::Receiver<()>,
    purpose: Purpose,
    way: Way,
    progress: Arc<Progress>,
}

/// How layers are to be made fewer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// What lies between the upper layer and `base`, or the bottom, goes into the upper.
    Stream {
        /// What the upper stands on afterwards.
        base: Option<Layer>,
        /// At most so many bytes a second; 0: as fast as can be.
        bytes_per_second: Bytes,
    },
    /// What is in the upper layer goes into the one below.
    Commit {
        /// That one.
        into: Layer,
    },
}

/// What work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A clone that is to be independent. It may be slow on purpose, and take days.
    Copy,
    /// A chain that is to be shorter.
    Merge,
}

/// Why work did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It may well fail again.
    Own,
    /// The daemon that was at it died.
    OfDaemon,
}

/// How a volume is used at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Nobody has its layers open.
    Unattached,
    /// A daemon serves it.
    Served,
    /// A daemon serves it as a file: nothing can be done with its active layer, and what uses it
    /// ends with that daemon.
    Bound,
    /// The same, and through a node above the one that a commit begins at: nothing is committed.
    Shown,
    /// A daemon should serve it, and none does.
    Unserved,
}

/// Where the layers are open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// Nowhere.
    Workshop,
    /// In the daemon of this volume.
    Daemon(VolumeId),
}

/// How far work has come, in bytes.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

/// Something to be done; nobody else touches the layers meanwhile. It is over when this is dropped.
#[derive(Debug)]
pub struct Work {
    shared: Shared,
    upper: Layer,
    way: Way,
    layers: Vec<Layer>,
    site: Site,
    interrupted: CancellationToken,
    progress: Arc<Progress>,
    _done: watch::Sender<()>,
}

/// Something that is being done, for a person.
#[derive(Clone, Debug)]
pub struct Job {
    /// In which way.
    pub way: Way,
    /// Bytes that were looked at.
    pub done: Bytes,
    /// Bytes there are to look at.
    pub total: Bytes,
}

/// What could be done.
#[derive(Clone, Copy)]
struct Plan {
    upper: LayerId,
    lower: LayerId,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Make the upper independent of all that is below.
    Detach(Bytes),
    /// Merge the two, either way.
    Merge,
    /// Take the upper off the lower, which others need.
    Bypass,
}

impl Jobs {
    /// What is being done for a layer.
    pub(super) fn of(&self, layer: LayerId) -> Option<Job> {
        let running = self.running.get(&layer)?;
        let (done, total) = running.progress.get();
        Some(Job { way: running.way.clone(), done, total })
    }

    /// This layer was just put on.
    pub(super) fn leave_alone(&mut self, layer: LayerId) {
        self.fresh.insert(layer, Instant::now() + QUIET);
    }

    /// Why it failed the last time, in words.
    pub(super) fn trouble(&self, layer: LayerId) -> Option<&str> {
        self.failed.get(&layer).map(|failed| failed.reason.as_str())
    }

    /// Notes that it failed: how long it is to be left alone. That a daemon died under it says
    /// nothing of the work itself.
    fn fail(&mut self, upper: LayerId, reason: String, cause: Failure, now: Instant) -> Duration {
        let before = self.failed.get(&upper).filter(|_| cause == Failure::Own);
        let times = before.map_or(1, |failed| failed.times.saturating_add(1));
        let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(times - 1)).min(LONGEST_PAUSE);
        self.failed.insert(upper, Failed { until: now + pause, reason, times });
        pause
    }

    /// Forgets what failed and was not tried again since, or went well for long.
    fn forgive(&mut self, now: Instant) {
        self.failed.retain(|_, failed| failed.until + LONGEST_PAUSE > now);
    }

    fn is_left_alone(&self, upper: LayerId, now: Instant) -> bool {
        self.failed.get(&upper).is_some_and(|failed| failed.until > now)
    }
}

impl Way {
    /// The names of all.
    pub const NAMES: [&str; 2] = ["stream", "commit"];

    /// The name QEMU has for it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Stream { .. } => "stream",
            Self::Commit { .. } => "commit",
        }
    }
}

impl Site {
    /// The volume whose daemon it is.
    pub fn volume(&self) -> Option<&VolumeId> {
        match self {
            Self::Workshop => None,
            Self::Daemon(volume) => Some(volume),
        }
    }
}

impl Progress {
    /// Notes how far it has come.
    pub fn set(&self, done: u64, total: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    fn get(&self) -> (Bytes, Bytes) {
        let read = |value: &AtomicU64| Bytes::new(value.load(Ordering::Relaxed));
        (read(&self.done), read(&self.total))
    }
}

impl Work {
    /// The layer that gets what is moved, or whose content moves.
    pub fn upper(&self) -> &Layer {
        &self.upper
    }

    /// In which way.
    pub fn way(&self) -> &Way {
        &self.way
    }

    /// The layers from the upper one down.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Where they are open.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Ends when somebody else needs the layers.
    pub async fn interrupted(&self) {
        self.interrupted.cancelled().await;
    }

    /// Whether somebody else needs the layers.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.is_cancelled()
    }

    /// How far it has come.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.shared.lock().jobs.running.remove(&self.upper.id);
    }
}

impl Volumes {
    /// The next thing to do for this purpose, if there is any whose layers nobody works on.
    pub fn next_work(
        &self,
        purpose: Purpose,
        claims: &InFlight,
        used: impl Fn(&VolumeId) -> Use,
    ) -> Option<Work> {
        let plans = |state: &State| match purpose {
            Purpose::Copy => state.detachments(),
            Purpose::Merge => [state.merges(), state.bypasses()].concat(),
        };
        let measured = self.measured(plans);
        let mut state = self.state.lock();
        let now = Instant::now();
        state.jobs.forgive(now);
        state.jobs.fresh.retain(|_, until| *until > now);
        for plan in plans(&state) {
            let judged = state.judge(&plan, claims, &used, &measured);
            let Some((way, site)) = judged else { continue };
            let (Some(upper), Ok(layers)) =
                (state.layer(plan.upper), state.layers_from(plan.upper))
            else {
                continue;
            };
            let (done, is_done) = watch::channel(());
            let interrupted = CancellationToken::new();
            let progress = Arc::<Progress>::default();
            let running = Running {
                touched: plan.touched(),
                interrupted: interrupted.clone(),
                done: is_done,
                purpose,
                way: way.clone(),
                progress: progress.clone(),
            };
            state.jobs.running.insert(upper.id, running);
            drop(state);
            let shared = self.state.clone();
            return Some(Work {
                shared,
                upper,
                way,
                layers,
                site,
                interrupted,
                progress,
                _done: done,
            });
        }
        None
    }

    /// What the pools spend on the layers of these plans. A disk that does not answer holds up
    /// whoever asks, so nobody waits for that with the state locked.
    fn measured(&self, plans: impl Fn(&State) -> Vec<Plan>) -> HashMap<LayerId, Bytes> {
        let layers: Vec<_> = {
            let state = self.state.lock();
            let both = |plan: &Plan| [state.layer(plan.upper), state.layer(plan.lower)];
            plans(&state).iter().flat_map(both).flatten().collect()
        };
        layers.into_iter().map(|layer| (layer.id, layer.allocated())).collect()
    }

    /// A merge that is under way in the chain of this volume and ought to end before another layer
    /// is put on, as there are too many already: what is heard when it ends.
    pub fn pressing_merge(&self, id: &VolumeId) -> Option<watch::Receiver<()>> {
        let state = self.state.lock();
        let active = state.volumes.get(id)?.usable()?.1.phase.active();
        let chain = state.chain(active).ok()?;
        if chain.iter().filter(|layer| state.can_merge(**layer)).count() <= DEEPEST {
            return None;
        }
        let merge = |layer| {
            let running = state.jobs.running.get(layer)?;
            (running.purpose == Purpose::Merge).then(|| running.done.clone())
        };
        chain.iter().find_map(merge)
    }

    /// Has all work on these layers stopped, and waits until it is. Whoever holds the claims of
    /// what they belong to sees none begin again.
    pub async fn interrupt(&self, layers: &[LayerId]) {
        loop {
            let running: Vec<_> = {
                let state = self.state.lock();
                let touching = |running: &&Running| {
                    running.touched.iter().any(|touched| layers.contains(touched))
                };
                let found = state.jobs.running.values().filter(touching);
                found.map(|one| (one.interrupted.clone(), one.done.clone())).collect()
            };
            if running.is_empty() {
                return;
            }
            for (interrupted, mut done) in running {
                interrupted.cancel();
                while done.changed().await.is_ok() {}
            }
        }
    }

    /// Work for this layer did not succeed, for a reason in words: how long it is left alone.
    pub fn work_failed(&self, upper: LayerId, reason: String, cause: Failure) -> Duration {
        self.state.lock().jobs.fail(upper, reason, cause, Instant::now())
    }

    /// Records that the data is where the work was to bring it, durably, and removes what is not
    /// needed any more.
    pub fn finish_work(&self, work: &Work) -> Result<(), Error> {
        self.try_finish(work).map_err(|source| Error::Layer { layer: work.upper.id, source })
    }

    fn try_finish(&self, work: &Work) -> Result<(), pool::Error> {
        let id = work.upper.id;
        let state = self.state.lock();
        let Some(upper) = state.layers.get(&id).cloned() else { return Ok(()) };
        let below = upper.record.parent;
        let Some(lower) = below.and_then(|below| Some((below, state.layers.get(&below)?.clone())))
        else {
            return Ok(());
        };
        drop(state);
        let next = after(&work.way, (id, &upper.record), (lower.0, &lower.1.record));
        self.replace_layer(id, &upper, next)?;
        self.state.lock().jobs.failed.remove(&id);
        crash::point("merge-recorded");
        self.clear_leftovers(id)
    }

    /// Removes what a merge has left, and the note of it.
    pub(super) fn clear_leftovers(&self, id: LayerId) -> Result<(), pool::Error> {
        let kept = self.state.lock().layers.get(&id).cloned();
        let Some(kept) = kept else { return Ok(()) };
        let Some(Leftovers { layer, file }) = kept.record.leftovers else { return Ok(()) };
        let is_unclear = self.state.lock().unclear.contains(kept.pool.name());
        if is_unclear {
            return Ok(()); // another layer may have its bytes in that file
        }
        if let Some((file, format)) = file
            && !self.state.lock().is_file_used(file, layer)
        {
            kept.pool.remove_layer(file, format)?;
        }
        crash::point("merge-file-removed");
        self.reclaim(layer)?;
        let next = LayerRecord { leftovers: None, ..kept.record.clone() };
        self.replace_layer(id, &kept, next)?;
        crash::point("merge-done");
        Ok(())
    }

    fn replace_layer(
        &self,
        id: LayerId,
        kept: &KeptLayer,
        next: LayerRecord,
    ) -> Result<(), pool::Error> {
        if !self.state.lock().layers.contains_key(&id) {
            return Ok(()); // it was removed meanwhile, by whoever held its last name
        }
        record(&kept.pool, &layer_record(&kept.pool, id), &next)?;
        let next = KeptLayer { pool: kept.pool.clone(), record: next };
        self.state.lock().layers.insert(id, next);
        Ok(())
    }
}

/// The record of the upper layer after the work.
fn after(way: &Way, upper: (LayerId, &LayerRecord), lower: (LayerId, &LayerRecord)) -> LayerRecord {
    let (id, record) = upper;
    let (lower, below) = lower;
    match way {
        Way::Stream { base, .. } => LayerRecord {
            parent: base.as_ref().map(|base| base.id),
            detach: base.as_ref().and(record.detach.or(below.detach)),
            leftovers: Some(Leftovers { layer: lower, file: None }),
            ..record.clone()
        },
        Way::Commit { .. } => LayerRecord {
            parent: below.parent,
            format: below.format,
            encryption: below.encryption,
            file: Some(file_of(lower, below)),
            detach: below.parent.and(record.detach.or(below.detach)),
            leftovers: Some(Leftovers {
                layer: lower,
                file: Some((file_of(id, record), record.format)),
            }),
            ..record.clone()
        },
    }
}

impl Plan {
    /// The layers whose files change or go.
    fn touched(&self) -> Vec<LayerId> {
        match self.kind {
            Kind::Merge => vec![self.upper, self.lower],
            Kind::Detach(_) | Kind::Bypass => vec![self.upper],
        }
    }
}

impl State {
    fn detachments(&self) -> Vec<Plan> {
        let plan = |(id, layer): (&LayerId, &KeptLayer)| {
            let kind = Kind::Detach(layer.record.detach?.bytes_per_second);
            Some(Plan { upper: *id, lower: layer.record.parent?, kind })
        };
        self.layers.iter().filter_map(plan).collect()
    }

    /// Every layer without a name and with one child, and that child.
    fn merges(&self) -> Vec<Plan> {
        let mut children: HashMap<LayerId, Vec<LayerId>> = HashMap::new();
        for (id, layer) in &self.layers {
            if let Some(parent) = layer.record.parent {
                children.entry(parent).or_default().push(*id);
            }
        }
        let plan = |(lower, children): (LayerId, Vec<LayerId>)| match children[..] {
            [upper] if self.can_merge(lower) => Some(Plan { upper, lower, kind: Kind::Merge }),
            _ => None,
        };
        let mut plans: Vec<_> = children.into_iter().filter_map(plan).collect();
        // Below an active layer first: nothing interrupts that, and no guest waits for it.
        plans.sort_by_key(|plan| self.volume_on(plan.upper).is_some());
        plans
    }

    /// The lowest unnamed layer of each chain that is too long.
    fn bypasses(&self) -> Vec<Plan> {
        let active = self.volumes.values().filter_map(|kept| Some(kept.usable()?.1.phase.active()));
        let plan = |active: LayerId| {
            let chain = self.chain(active).ok()?;
            if chain.len() <= DEEPEST + 1 {
                return None;
            }
            let mut pairs = chain.windows(2).rev();
            pairs.find_map(|pair| match pair {
                [upper, lower] if self.can_merge(*lower) => {
                    Some(Plan { upper: *upper, lower: *lower, kind: Kind::Bypass })
                }
                _ => None,
            })
        };
        active.filter_map(plan).collect()
    }

    /// Whether a layer can go when its one child has what is in it. A master is no part of this: it
    /// is copied where that was asked for, and only then. A copy is made whole first.
    fn can_merge(&self, id: LayerId) -> bool {
        let is_master_or_copy =
            |layer: &KeptLayer| layer.record.master.is_some() || layer.record.detach.is_some();
        self.snapshots_of(id).next().is_none()
            && !self.is_held(id)
            && !self.layers.get(&id).is_some_and(is_master_or_copy)
    }

    fn stands_on_master(&self, id: LayerId) -> bool {
        let layers = self.layers_from(id).unwrap_or_default();
        layers.last().is_some_and(|layer| layer.master().is_some())
    }

    /// Whether the layers below can be opened where nobody has them open.
    fn opens_without_secrets(&self, id: LayerId) -> bool {
        let layers = self.layers_from(id).unwrap_or_default();
        let login = layers.last().and_then(Layer::master).map(|master| master.login);
        login.is_none_or(|login| login == Login::Open)
    }

    /// Whether the layers below can be opened there: where nobody has them open, nobody knows the
    /// passphrase.
    fn opens_without_passphrase(&self, id: LayerId) -> bool {
        let layers = self.layers_from(id).unwrap_or_default();
        !layers.iter().any(|layer| layer.encryption == Some(Encryption::Luks))
    }

    /// How and where a plan can be carried out now, if it can.
    fn judge(
        &self,
        plan: &Plan,
        claims: &InFlight,
        used: &impl Fn(&VolumeId) -> Use,
        measured: &HashMap<LayerId, Bytes>,
    ) -> Option<(Way, Site)> {
        let pool = self.layers.get(&plan.upper)?.pool.name();
        let lower = self.layer(plan.lower)?;
        let is_blocked = self.unclear.contains(pool)
            || self.is_held(plan.upper)
            || self.jobs.is_left_alone(plan.upper, Instant::now())
            || self.is_worked_on(plan);
        if is_blocked {
            return None;
        }
        let (volumes, snapshots) = self.names_above(plan.upper);
        if volumes.is_empty() && snapshots.is_empty() {
            return None; // it is just being removed
        }
        if volumes.iter().any(|one| claims.is_taken((*one).clone()))
            || snapshots.iter().any(|one| claims.is_taken((*one).clone()))
        {
            return None;
        }
        let site = site(&volumes, used)?;
        if site != Site::Workshop && self.jobs.fresh.contains_key(&plan.upper) {
            return None;
        }
        let upper = self.layer(plan.upper)?;
        let is_file = |volume| matches!(used(volume), Use::Bound | Use::Shown);
        if self.volume_on(plan.upper).is_some_and(is_file) {
            return None; // QEMU has no job on the layer that a file shows
        }
        if site == Site::Workshop && !self.opens_without_passphrase(plan.upper) {
            return None;
        }
        // Plain text goes into no layer that is to be encrypted, and out of none that is.
        if upper.encryption == Some(Encryption::Pending) {
            return None;
        }
        let is_alike = upper.encryption == lower.encryption;
        let commits = is_alike
            && match &site {
                Site::Workshop => true,
                Site::Daemon(volume) => used(volume) != Use::Shown,
            };
        // While a layer is streamed into, QEMU fills no buffer that a guest reads from beyond the
        // end of the layer below, and says that it did.
        let is_streamable = site == Site::Workshop || lower.size >= upper.size;
        let way = match plan.kind {
            Kind::Detach(_)
                if site == Site::Workshop && !self.opens_without_secrets(plan.upper) =>
            {
                return None;
            }
            Kind::Detach(_) | Kind::Bypass if !is_streamable => return None,
            Kind::Detach(bytes_per_second) => Way::Stream { base: None, bytes_per_second },
            Kind::Bypass => self.stream(plan.lower),
            Kind::Merge => {
                let is_topmost = site == Site::Workshop || self.volume_on(plan.upper).is_some();
                // The commit of a topmost layer moves whole clusters, and reads what is around: of a
                // master that cannot be had here. A stream moves what is there.
                let is_barred = site == Site::Workshop && self.stands_on_master(plan.upper);
                // One that came only now has its turn next time.
                let allocated = [measured.get(&upper.id)?, measured.get(&lower.id)?].map(|it| *it);
                let is_cheaper = is_commit_cheaper((&upper, &lower), allocated, is_topmost);
                if is_streamable && !(is_alike && is_cheaper && !is_barred) {
                    self.stream(plan.lower)
                } else if commits {
                    Way::Commit { into: lower }
                } else {
                    // It waits: a raw layer that is streamed is raw no more. The bound of a chain
                    // holds all the same.
                    return None;
                }
            }
        };
        Some((way, site))
    }

    fn stream(&self, lower: LayerId) -> Way {
        let below = self.layers.get(&lower).and_then(|layer| layer.record.parent);
        let base = below.and_then(|below| self.layer(below));
        Way::Stream { base, bytes_per_second: Bytes::ZERO }
    }

    /// Whether other work touches a layer that this would need, or the other way round.
    fn is_worked_on(&self, plan: &Plan) -> bool {
        let needed: BTreeSet<_> = self.chain(plan.upper).unwrap_or_default().into_iter().collect();
        let touched = plan.touched();
        self.jobs.running.iter().any(|(upper, running)| {
            let theirs = self.chain(*upper).unwrap_or_default();
            running.touched.iter().any(|one| needed.contains(one))
                || theirs.iter().any(|one| touched.contains(one))
        })
    }

    /// The volumes and snapshots that stand on this layer, directly or not.
    fn names_above(&self, id: LayerId) -> (Vec<&VolumeId>, Vec<&SnapshotId>) {
        let (mut volumes, mut snapshots, mut next) = (Vec::new(), Vec::new(), vec![id]);
        while let Some(layer) = next.pop() {
            volumes.extend(self.volume_on(layer));
            snapshots.extend(self.snapshots_of(layer));
            next.extend(self.children(layer));
        }
        (volumes, snapshots)
    }
}

/// Whether less is to be done to move the upper layer down than the lower one up.
///
/// What is in the topmost layer is found at once; otherwise QEMU looks at every 512 KiB of the
/// size, also where there is nothing: 6 s of a core for a TiB.
fn is_commit_cheaper(
    (upper, lower): (&Layer, &Layer),
    [in_upper, in_lower]: [Bytes; 2],
    is_topmost: bool,
) -> bool {
    let looks = if is_topmost { upper.size.count() / LOOKS_A_BYTE } else { 0 };
    let raw = match lower.format {
        Format::Raw => RAW_IS_WORTH,
        Format::Qcow2 => 0,
    };
    let down = in_lower.count().saturating_add(looks).saturating_add(raw);
    in_upper.count() <= down
}

/// Where the layers of these volumes are open, if that is one place.
fn site(volumes: &[&VolumeId], used: &impl Fn(&VolumeId) -> Use) -> Option<Site> {
    let mut site = Site::Workshop;
    for volume in volumes {
        match used(volume) {
            Use::Unattached => {}
            Use::Served | Use::Bound | Use::Shown if site == Site::Workshop => {
                site = Site::Daemon((*volume).clone());
            }
            Use::Served | Use::Bound | Use::Shown | Use::Unserved => return None,
        }
    }
    Some(site)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn work_that_goes_on_to_fail_is_tried_ever_more_patiently() {
        let (mut jobs, layer, now) = (Jobs::default(), LayerId::draw(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let pause = jobs.fail(layer, "why".to_owned(), Failure::Own, now);
            assert!(jobs.is_left_alone(layer, now) && !jobs.is_left_alone(layer, now + pause));
            jobs.forgive(now + pause);
            assert_eq!(jobs.trouble(layer), Some("why"));
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
        let afterwards = now + LONGEST_PAUSE * 2;
        jobs.forgive(afterwards);
        assert_eq!(jobs.trouble(layer), None);
        for _ in 0..3 {
            let pause = jobs.fail(layer, "why".to_owned(), Failure::OfDaemon, afterwards);
            assert_eq!(pause, FIRST_PAUSE);
        }
    }
}
