//! One sequence: what is done, what should come of it, and what did.
//!
//! Each time a volume is attached, the dice say whether its guest has a socket or a block device.

use super::{
    guest::{Action, Broken, Guest, Loaded, some_sectors},
    held::{Held, Way},
    picture::{Picture, SECTOR, read},
    records::{Reader, Records},
};
use crate::{
    copies::{Source, Wish},
    harness::{Dice, Driver, LIMIT, daemons_below, names, signal, until},
    local::Use,
};
use qsd_csi_vhost::Space;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::time::sleep;
use tonic::{Code, Status};

/// Sizes are multiples of this, in sectors.
const GRAIN: usize = 8;

/// Blank volumes have so many sectors, and the largest so many: some clusters of 128 KiB.
const SMALLEST: usize = 640;
const LARGEST: usize = 8192;

/// Names are few, so that they are used again.
const VOLUMES: usize = 5;
const SNAPSHOTS: usize = 9;

/// Work that failed is left alone for 30 s.
const MERGED: Duration = Duration::from_mins(2);

/// Places where the driver dies.
const POINTS: [&str; 31] = [
    "freeze-overlay",
    "freeze-overlay-record",
    "freeze-overlay-open",
    "freeze-adopted",
    "freeze-done",
    "snapshot-intent",
    "snapshot-done",
    "snapshot-delete-intent",
    "snapshot-delete-reclaimed",
    "volume-create-intent",
    "volume-create-layer",
    "volume-create-layer-record",
    "volume-create-done",
    "volume-expand-intent",
    "volume-expand-told",
    "volume-expand-grown",
    "volume-expand-done",
    "volume-delete-intent",
    "volume-delete-reclaimed",
    "layer-remove-intent",
    "layer-remove-file",
    "layer-remove-done",
    "layer-forgotten",
    "work-begun",
    "work-moved",
    "workshop-moved",
    "merge-recorded",
    "merge-file-removed",
    "merge-done",
    "node-stage-daemon",
    "node-unstage-stopped",
];

/// What is done in a step, and how often.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write,
    Discard,
    Create,
    Attach,
    Detach,
    Reconnect,
    Snapshot,
    Restore,
    Clone,
    Expand,
    DeleteVolume,
    DeleteSnapshot,
    KillDaemon,
    KillDriver,
    EndDriver,
    MoveDaemon,
    Settle,
    ReadCopy,
    Crash,
}

const STEPS: [(Step, usize); 19] = [
    (Step::Write, 20),
    (Step::Discard, 5),
    (Step::Create, 4),
    (Step::Attach, 10),
    (Step::Detach, 5),
    (Step::Reconnect, 2),
    (Step::Snapshot, 14),
    (Step::Restore, 7),
    (Step::Clone, 5),
    (Step::Expand, 5),
    (Step::DeleteVolume, 4),
    (Step::DeleteSnapshot, 9),
    (Step::KillDaemon, 5),
    (Step::KillDriver, 3),
    (Step::EndDriver, 1),
    (Step::MoveDaemon, 2),
    (Step::Settle, 4),
    (Step::ReadCopy, 3),
    (Step::Crash, 8),
];

/// How a volume is used.
enum Stand {
    Idle,
    Published,
    Used(Guest),
}

struct Volume {
    held: Held,
    stand: Stand,
}

/// What a volume may have held at some moment of a call: all batches that had ended when the call
/// began, none that began after it ended, and of one in flight any part.
struct Window {
    before: Picture,
    /// The same, with what the end of a daemon may have taken of it.
    held: Held,
    batches: Vec<Vec<Action>>,
    earliest: usize,
    latest: usize,
}

impl Window {
    /// Whether a volume held this at one moment.
    fn holds(&self, found: &Picture) -> bool {
        let mut now = self.before.clone();
        let note = |picture: &mut Picture, batch: &Vec<Action>| {
            for action in batch {
                action.apply(picture);
            }
        };
        self.batches[..self.earliest].iter().for_each(|batch| note(&mut now, batch));
        for at in self.earliest..=self.latest {
            let mut next = now.clone();
            self.batches.get(at).into_iter().for_each(|batch| note(&mut next, batch));
            let all = 0..now.sectors();
            let either = now.at(all.clone()).iter().zip(next.at(all.clone()));
            if either.zip(found.at(all)).all(|((now, next), is)| is == now || is == next) {
                return true;
            }
            now = next;
        }
        false
    }

    fn assert_holds(&self, found: &Picture, what: &str) {
        let Self { before, batches, earliest, latest, .. } = self;
        assert!(
            self.holds(found),
            "{what} is of no moment from {earliest} to {latest} of {}: {}; {batches:?}",
            batches.len(),
            before.difference(found)
        );
    }
}

/// Loads that run, and how far each had come when the call began.
struct Loads(BTreeMap<String, (Loaded, usize)>);

pub(super) struct Sequence {
    seed: u64,
    driver: Driver,
    dice: Dice,
    stamps: Arc<AtomicU32>,
    volumes: BTreeMap<String, Volume>,
    snapshots: BTreeMap<String, Picture>,
    begun: Instant,
    done: Vec<String>,
    is_over: bool,
}

impl Drop for Sequence {
    fn drop(&mut self) {
        if !self.is_over || std::env::var_os("QSD_CSI_TELL").is_some() {
            let (seed, done) = (self.seed, self.done.join("\n  "));
            eprintln!("QSD_CSI_SEED={seed} QSD_CSI_ROUNDS=1 failed after\n  {done}");
        }
    }
}

impl Sequence {
    pub(super) async fn begin(seed: u64) -> Self {
        // Knuth's multiplier, so that seeds next to each other do not begin alike.
        let dice = Dice::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self {
            seed,
            driver: Driver::start().await,
            dice,
            stamps: Arc::new(AtomicU32::new(1)),
            volumes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            begun: Instant::now(),
            done: Vec::new(),
            is_over: false,
        }
    }

    /// One step, and a look at all that there is.
    pub(super) async fn step(&mut self) {
        let step = self.choose();
        match step {
            Step::Crash => self.crash().await,
            other => self.take(other).await,
        }
        self.note("  compare".to_owned());
        self.compare(Reader::Own).await;
        self.note("  done".to_owned());
    }

    /// Takes all away again: nothing is left. What was done, in numbers.
    pub(super) async fn end(mut self) -> String {
        self.settle().await;
        self.compare(Reader::Own).await;
        for snapshot in self.snapshots.keys().cloned().collect::<Vec<_>>() {
            self.read_copy(&snapshot).await;
        }
        while !(self.volumes.is_empty() && self.snapshots.is_empty()) {
            let step = [Step::Detach, Step::DeleteVolume, Step::DeleteSnapshot][self.roll(3)];
            self.take(step).await;
            self.compare(Reader::Own).await;
        }
        until("the last work is broken off", async || {
            names(&self.driver.path("pool/layers")).is_empty()
                && daemons_below(self.driver.scratch()).is_empty()
        })
        .await;
        self.driver.assert_empty().await;
        self.is_over = true;
        self.warnings()
    }

    fn choose(&mut self) -> Step {
        let mut at = self.roll(STEPS.iter().map(|(_, weight)| weight).sum());
        for (step, weight) in STEPS {
            if at < weight {
                return step;
            }
            at -= weight;
        }
        unreachable!("the dice are no larger")
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Write => self.write().await,
            Step::Discard => self.discard().await,
            Step::Create => self.create(None).await,
            Step::Attach => self.attach().await,
            Step::Detach => self.detach().await,
            Step::Reconnect => self.reconnect().await,
            Step::Snapshot => self.snapshot().await,
            Step::Restore => {
                let source = pick(&mut self.dice, self.snapshots.keys());
                if let Some(source) = source {
                    self.create(Some(Source::Snapshot(source))).await;
                }
            }
            Step::Clone => {
                let source = pick(&mut self.dice, self.volumes.keys());
                if let Some(source) = source {
                    self.create(Some(Source::Volume(source))).await;
                }
            }
            Step::Expand => self.expand().await,
            Step::DeleteVolume => self.delete_volume().await,
            Step::DeleteSnapshot => self.delete_snapshot().await,
            Step::KillDaemon => self.kill_daemon().await,
            Step::KillDriver => self.restart(Driver::restart).await,
            Step::EndDriver => self.restart(end_and_start).await,
            Step::MoveDaemon => self.move_daemon().await,
            Step::Settle => self.settle().await,
            Step::ReadCopy => {
                let snapshot = pick(&mut self.dice, self.snapshots.keys());
                if let Some(snapshot) = snapshot {
                    self.read_copy(&snapshot).await;
                }
            }
            Step::Crash => unreachable!("crashes are not nested"),
        }
    }

    /// A step while a crash point is armed; whether it is reached or not.
    async fn crash(&mut self) {
        let point = POINTS[self.roll(POINTS.len())];
        self.note(format!("crash at {point}:"));
        self.driver.kill();
        self.driver.launch(&[], Some(point));
        self.await_driver().await;
        let likely = [
            Step::Snapshot,
            Step::Restore,
            Step::Clone,
            Step::Expand,
            Step::DeleteVolume,
            Step::DeleteSnapshot,
            Step::Attach,
            Step::Detach,
        ];
        let step = match point.split('-').next() {
            Some("freeze") => [Step::Snapshot, Step::Clone][self.roll(2)],
            Some("snapshot") if point.contains("delete") => Step::DeleteSnapshot,
            Some("snapshot") => Step::Snapshot,
            Some("volume") if point.contains("create") => {
                [Step::Create, Step::Restore, Step::Clone][self.roll(3)]
            }
            Some("volume") if point.contains("expand") => Step::Expand,
            _ => likely[self.roll(likely.len())],
        };
        self.take(step).await;
        // Background work may come to the point a little later.
        sleep(Duration::from_millis(self.dice.roll(50))).await;
        if !self.driver.has_ended() {
            self.driver.kill();
        }
        self.driver.launch(&[], None);
        self.driver.answers().await;
        self.assert_undamaged().await;
    }

    /// Waits for a driver that may die at its start.
    async fn await_driver(&mut self) {
        let begin = Instant::now();
        while self.driver.identity().probe(qsd_csi::csi::pb::csi::ProbeRequest {}).await.is_err() {
            assert!(begin.elapsed() < LIMIT, "the driver does not answer");
            self.revive();
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts a driver that died, as its keeper would.
    fn revive(&mut self) {
        if self.driver.has_ended() {
            self.note("  it died".to_owned());
            self.driver.launch(&[], None);
        }
    }

    /// Calls until it succeeds, as a sidecar does.
    async fn persist(&mut self, what: String, call: impl AsyncFn(&Driver) -> Result<(), Status>) {
        self.note(what.clone());
        let begin = Instant::now();
        while let Err(error) = call(&self.driver).await {
            self.note(format!("  {error}"));
            assert!(begin.elapsed() < LIMIT, "{what}: {error}");
            let may_pass = matches!(error.code(), Code::Aborted | Code::Unavailable);
            sleep(Duration::from_millis(10)).await;
            if !may_pass {
                // A driver that dies breaks the connection in some way, and is gone a little later.
                until(&format!("{what}: {error}"), async || self.driver.has_ended()).await;
            }
            self.revive();
            self.await_driver().await;
        }
    }

    async fn write(&mut self) {
        let Some(name) = self.pick_used() else { return self.attach().await };
        let count = 1 + self.roll(12);
        let actions: Vec<_> = (0..count).map(|_| self.action(&name)).collect();
        self.note(format!("write {count} times to {name}"));
        let volume = self.volumes.get_mut(&name).unwrap();
        let done = volume.guest().try_act(actions.clone()).await;
        for action in &actions {
            match done {
                Ok(()) => volume.held.apply(action),
                Err(Broken) => volume.held.attempt(action),
            }
        }
        if done.is_err() {
            self.mend(&name).await;
        }
    }

    fn action(&mut self, volume: &str) -> Action {
        let sectors = some_sectors(&mut self.dice, self.volumes[volume].held.picture.sectors());
        match self.roll(8) {
            0 => Action::Zero { sectors, space: Space::Free },
            1 => Action::Zero { sectors, space: Space::Keep },
            2 => Action::Flush,
            _ => Action::Write { sectors, stamp: self.stamps.fetch_add(1, SeqCst) },
        }
    }

    /// Discards, and notes what is read there from now on. Only a flush makes a discard last: what
    /// a dying daemon has in memory of it is lost, and old data comes back.
    async fn discard(&mut self) {
        let Some(name) = self.pick_used() else { return self.attach().await };
        for _ in 0..=self.roll(3) {
            let sectors = some_sectors(&mut self.dice, self.volumes[&name].held.picture.sectors());
            self.note(format!("discard {sectors:?} of {name}"));
            let volume = self.volumes.get_mut(&name).unwrap();
            let discard = Action::Discard { sectors: sectors.clone() };
            volume.held.attempt(&discard);
            let actions = vec![discard, Action::Flush];
            let found = match volume.guest().try_act(actions).await {
                Ok(()) => volume.guest().try_read(sectors.clone()).await,
                Err(Broken) => Err(Broken),
            };
            match found {
                Ok(found) => {
                    volume.held.discard(sectors.start, &read(&found, sectors.start).unwrap());
                }
                Err(Broken) => self.mend(&name).await,
            }
        }
    }

    async fn create(&mut self, source: Option<Source>) {
        let Some(name) = free("pvc", VOLUMES, &self.volumes, &mut self.dice) else { return };
        let least = match &source {
            None => SMALLEST,
            Some(Source::Snapshot(snapshot)) => self.snapshots[snapshot].sectors(),
            Some(Source::Volume(volume)) => self.volumes[volume].held.picture.sectors(),
        };
        let sectors = if source.is_none() || self.roll(4) == 0 { self.more(least) } else { least };
        let parameters = self.parameters(source.as_ref());
        let wish = Wish { name: name.clone(), size: bytes(sectors), source, parameters };
        let loads = self.begin_loads().await;
        self.persist(format!("{wish:?}"), async |driver| driver.fulfil(&wish).await).await;
        let mut windows = self.end_loads(loads).await;
        let picture = match &wish.source {
            None => Picture::blank(sectors),
            Some(Source::Snapshot(snapshot)) => self.snapshots[snapshot].grown(sectors),
            Some(Source::Volume(volume)) => {
                let window = windows.remove(volume).unwrap();
                let found = self
                    .on_disk(Reader::Own, |records| records.active(&name).map(str::to_owned))
                    .await;
                self.assert_cut(volume, window, &found, &name).await;
                found
            }
        };
        let is_through = wish.parameters.contains(&("cache", "writethrough"));
        let held = Held::new(picture, is_through);
        self.volumes.insert(name, Volume { held, stand: Stand::Idle });
    }

    /// Asserts that this was cut from a volume in a call. One whose daemon died meanwhile may have
    /// lost what was not flushed; and of what was made durable in the call, the cut may lack any.
    async fn assert_cut(&mut self, volume: &str, mut window: Window, found: &Picture, what: &str) {
        if self.is_broken(volume).await {
            let (mut held, ended) = (window.held, window.earliest.min(window.batches.len()));
            let (ended, later) = window.batches.split_at(ended);
            ended.iter().flatten().for_each(|action| held.apply(action));
            later.iter().flatten().for_each(|action| held.attempt(action));
            held.grow(found.sectors());
            held.assert_allows(found, what);
            return self.mend(volume).await;
        }
        window.before.grow(found.sectors());
        window.assert_holds(found, what);
    }

    /// Whether a volume is used as a block device that has died.
    async fn is_broken(&self, name: &str) -> bool {
        let volume = &self.volumes[name];
        match &volume.stand {
            Stand::Used(guest) => guest.try_read(0..1).await.is_err(),
            Stand::Idle | Stand::Published => false,
        }
    }

    /// What becomes of a pod whose block device has died: it is started again. Then the volume is
    /// as the last flush left it, or newer.
    async fn mend(&mut self, name: &str) {
        let found = loop {
            self.note(format!("{name} is published anew"));
            self.leave(name).await;
            self.enter(name, Way::Device).await;
            let size = self.volumes[name].held.picture.sectors();
            if self.use_disk(name).is_ok()
                && let Ok(found) = self.volumes[name].guest().try_read(0..size).await
            {
                break Picture::of(&found).unwrap();
            }
        };
        self.volumes.get_mut(name).unwrap().held.adopt(&found, name);
    }

    async fn enter(&mut self, name: &str, way: Way) {
        let as_device = (way == Way::Device).then_some(Use::Block);
        let stage = async |driver: &Driver| match as_device {
            Some(block) => driver.stage_as(name, block).await,
            None => driver.stage(name).await,
        };
        self.persist(format!("stage {name} as {way:?}"), stage).await;
        let publish = async |driver: &Driver| match as_device {
            Some(block) => driver.publish_as(name, block).await,
            None => driver.publish(name).await,
        };
        self.persist(format!("publish {name}"), publish).await;
        self.volumes.get_mut(name).unwrap().stand = Stand::Published;
    }

    async fn leave(&mut self, name: &str) {
        self.volumes.get_mut(name).unwrap().stand = Stand::Idle;
        let unpublish = async |driver: &Driver| driver.unpublish(name).await;
        self.persist(format!("unpublish {name}"), unpublish).await;
        let unstage = async |driver: &Driver| driver.unstage(name).await;
        self.persist(format!("unstage {name}"), unstage).await;
    }

    /// A guest takes its disk.
    fn use_disk(&mut self, name: &str) -> Result<(), Broken> {
        let guest = match self.volumes[name].held.way() {
            Way::Socket => Guest::connect(&self.driver.socket(name)),
            Way::Device => Guest::open(&self.driver.path(&format!("target-{name}")))?,
        };
        self.volumes.get_mut(name).unwrap().stand = Stand::Used(guest);
        Ok(())
    }

    fn parameters(&mut self, source: Option<&Source>) -> Vec<(&'static str, &'static str)> {
        let mut parameters = Vec::new();
        if self.roll(3) == 0 {
            parameters.push(("cache", "writethrough"));
        }
        if source.is_none() {
            if self.roll(3) == 0 {
                parameters.push(("format", "qcow2"));
            }
            return parameters;
        }
        let mode = ["copy-on-write", "copy-on-read", "clone"][self.roll(3)];
        parameters.push(("copyMode", mode));
        if mode == "clone" && self.roll(2) == 0 {
            parameters.push(("cloneBytesPerSecond", "8Mi"));
        }
        parameters
    }

    /// Some larger size, mostly not at the end of a cluster.
    fn more(&mut self, sectors: usize) -> usize {
        let room = (LARGEST.max(sectors + 256) - sectors) / GRAIN;
        sectors + self.roll(room) * GRAIN
    }

    async fn attach(&mut self) {
        let idle = self.volumes.iter().filter(|(_, volume)| matches!(volume.stand, Stand::Idle));
        let idle: Vec<_> = idle.map(|(name, _)| name.clone()).collect();
        let Some(name) = pick(&mut self.dice, idle.iter()) else {
            if self.volumes.len() < VOLUMES {
                Box::pin(self.create(None)).await;
            }
            return;
        };
        let way = [Way::Socket, Way::Device][self.roll(2)];
        self.volumes.get_mut(&name).unwrap().held.attach(way);
        self.enter(&name, way).await;
        if self.roll(6) > 0 && self.use_disk(&name).is_err() {
            self.mend(&name).await;
        }
    }

    async fn detach(&mut self) {
        let Some(name) = self.pick_published() else { return };
        // As file systems do when they are unmounted.
        while let Stand::Used(guest) = &self.volumes[&name].stand
            && guest.try_act(vec![Action::Flush]).await.is_err()
        {
            self.mend(&name).await;
        }
        self.volumes.get_mut(&name).unwrap().held.apply(&Action::Flush);
        self.leave(&name).await;
    }

    /// Another guest takes the place of the one before.
    async fn reconnect(&mut self) {
        if let Some(name) = self.pick_published() {
            self.note(format!("connect anew to {name}"));
            self.volumes.get_mut(&name).unwrap().stand = Stand::Published;
            if self.use_disk(&name).is_err() {
                self.mend(&name).await;
            }
        }
    }

    async fn snapshot(&mut self) {
        let Some(source) = pick(&mut self.dice, self.volumes.keys()) else { return };
        let Some(name) = free("snap", SNAPSHOTS, &self.snapshots, &mut self.dice) else { return };
        let loads = self.begin_loads().await;
        self.maybe_kill_daemon().await;
        let take = async |driver: &Driver| driver.snapshot(&name, &source).await;
        self.persist(format!("snapshot {name} of {source}"), take).await;
        let mut windows = self.end_loads(loads).await;
        let found =
            self.on_disk(Reader::Own, |records| records.named(&name).map(str::to_owned)).await;
        let window = windows.remove(&source).unwrap();
        self.assert_cut(&source, window, &found, &name).await;
        self.snapshots.insert(name, found);
    }

    async fn expand(&mut self) {
        let Some(name) = pick(&mut self.dice, self.volumes.keys()) else { return };
        let sectors = self.more(self.volumes[&name].held.picture.sectors() + GRAIN);
        let loads = self.begin_loads().await;
        self.maybe_kill_daemon().await;
        let expand = async |driver: &Driver| driver.expand(&name, bytes(sectors)).await;
        self.persist(format!("expand {name} to {sectors}"), expand).await;
        self.end_loads(loads).await;
        let volume = self.volumes.get_mut(&name).unwrap();
        volume.held.grow(sectors);
        if self.is_broken(&name).await {
            return self.mend(&name).await;
        }
        if let Stand::Used(guest) = &self.volumes[&name].stand {
            until("the guest sees the new size", async || {
                // A device may die while it is looked at.
                guest.try_read(0..1).await.is_err()
                    || matches!(guest.capacity().await, Ok(size) if size == bytes(sectors))
            })
            .await;
        }
    }

    async fn delete_volume(&mut self) {
        let idle = self.volumes.iter().filter(|(_, volume)| matches!(volume.stand, Stand::Idle));
        let idle: Vec<_> = idle.map(|(name, _)| name.clone()).collect();
        if let Some(name) = pick(&mut self.dice, idle.iter()) {
            self.persist(format!("delete {name}"), async |driver| driver.delete(&name).await).await;
            self.volumes.remove(&name);
        }
    }

    async fn delete_snapshot(&mut self) {
        if let Some(name) = pick(&mut self.dice, self.snapshots.keys()) {
            let delete = async |driver: &Driver| driver.delete_snapshot(&name).await;
            self.persist(format!("delete {name}"), delete).await;
            self.snapshots.remove(&name);
        }
    }

    async fn kill_daemon(&mut self) {
        let loads = self.begin_loads().await;
        self.kill_some_daemon().await;
        self.end_loads(loads).await;
    }

    /// Now and then a daemon dies while a call is at work.
    async fn maybe_kill_daemon(&mut self) {
        if self.roll(6) == 0 {
            self.kill_some_daemon().await;
        }
    }

    async fn kill_some_daemon(&mut self) {
        let delay = Duration::from_micros(self.dice.roll(20_000));
        let daemons = self.driver.daemons().await;
        if let Some(daemon) = pick(&mut self.dice, daemons.iter()) {
            self.note(format!("daemon {daemon} dies in {delay:?}"));
            tokio::spawn(async move {
                sleep(delay).await;
                signal(daemon, "KILL");
            });
        }
    }

    async fn restart(&mut self, restart: impl AsyncFn(&mut Driver)) {
        self.note("another driver".to_owned());
        let loads = self.begin_loads().await;
        restart(&mut self.driver).await;
        self.end_loads(loads).await;
        self.assert_undamaged().await;
    }

    /// A volume is moved to another daemon; one that is used as a block device stays.
    async fn move_daemon(&mut self) {
        let Some(name) = self.pick_published() else { return };
        if self.volumes[&name].held.way() == Way::Device {
            self.note(format!("{name} is not moved"));
            let refused = self.driver.upgrade(&name).await.unwrap_err();
            assert!(
                matches!(refused.code(), Code::FailedPrecondition | Code::Aborted),
                "{refused}"
            );
            return;
        }
        let loads = self.begin_loads().await;
        let upgrade = async |driver: &Driver| driver.upgrade(&name).await;
        self.persist(format!("move {name}"), upgrade).await;
        self.end_loads(loads).await;
    }

    /// Waits until all is merged that can be, and looks at what then lies there.
    async fn settle(&mut self) {
        self.note("settle".to_owned());
        self.use_sockets();
        let attached: BTreeSet<_> = self.volumes.iter().filter_map(Volume::attached).collect();
        let devices = attached.iter().filter(|name| self.volumes[*name].held.way() == Way::Device);
        let devices: BTreeSet<_> = devices.cloned().collect();
        let begin = Instant::now();
        loop {
            let records = self.records();
            let unmerged = records.unmerged_beside(&attached, &devices);
            if unmerged.is_empty() {
                break;
            }
            assert!(begin.elapsed() < MERGED, "{unmerged:#?}\n{records:#?}");
            sleep(Duration::from_millis(10)).await;
        }
        let files: BTreeSet<_> = names(&self.driver.path("pool/layers")).into_iter().collect();
        assert_eq!(files, self.records().needed(), "files of layers");
        self.compare(Reader::Own).await;
        self.compare(Reader::Qemu).await;
    }

    /// A volume that nobody uses by its socket may be in use as `disk.img`: then its active layer
    /// stays, too.
    fn use_sockets(&mut self) {
        for (name, volume) in &mut self.volumes {
            let Volume { held, stand } = volume;
            if matches!(stand, Stand::Published) && held.way() == Way::Socket {
                *stand = Stand::Used(Guest::connect(&self.driver.socket(name)));
            }
        }
    }

    /// A volume restored from a snapshot shows a guest what the snapshot holds.
    async fn read_copy(&mut self, snapshot: &str) {
        let picture = self.snapshots[snapshot].clone();
        let (name, parameters) = ("copy".to_owned(), vec![("copyMode", "copy-on-read")]);
        let source = Some(Source::Snapshot(snapshot.to_owned()));
        let wish = Wish { name: name.clone(), size: bytes(picture.sectors()), source, parameters };
        self.persist(format!("{wish:?}"), async |driver| driver.fulfil(&wish).await).await;
        self.persist("stage copy".to_owned(), async |driver| driver.stage(&name).await).await;
        self.persist("publish copy".to_owned(), async |driver| driver.publish(&name).await).await;
        {
            let guest = Guest::connect(&self.driver.socket(&name));
            let found = Picture::of(&guest.read(0..picture.sectors()).await).unwrap();
            picture.assert_is(&found, snapshot);
        }
        self.persist("leave copy".to_owned(), async |driver| driver.unpublish(&name).await).await;
        self.persist("unstage copy".to_owned(), async |driver| driver.unstage(&name).await).await;
        self.persist("delete copy".to_owned(), async |driver| driver.delete(&name).await).await;
    }

    /// Some guests begin to load their disks.
    async fn begin_loads(&mut self) -> Loads {
        let mut loads = BTreeMap::new();
        for (name, volume) in &self.volumes {
            if let Stand::Used(guest) = &volume.stand
                && self.dice.roll(2) == 0
            {
                let dice = Dice::new(self.dice.roll(u64::MAX));
                let sectors = volume.held.picture.sectors();
                let load = guest.load(dice, sectors, self.stamps.clone());
                loads.insert(name.clone(), (load, 0));
            }
        }
        if !loads.is_empty() {
            sleep(Duration::from_millis(self.dice.roll(20))).await;
        }
        for (load, ended) in loads.values_mut() {
            *ended = load.journal.ended();
        }
        self.note(format!("under load: {:?}", loads.keys()));
        Loads(loads)
    }

    /// Waits for the last answers. A driver that died on an armed point after its call is started
    /// again, or a daemon that it was just replacing would be missed for ever.
    async fn end_load(&mut self, load: Loaded) -> Vec<Vec<Action>> {
        let mut end = pin!(load.end());
        loop {
            tokio::select! {
                batches = &mut end => return batches,
                () = sleep(Duration::from_millis(5)) => self.revive(),
            }
        }
    }

    /// Ends them: what each volume may have held meanwhile.
    async fn end_loads(&mut self, loads: Loads) -> BTreeMap<String, Window> {
        let Loads(loads) = loads;
        let mut windows = BTreeMap::new();
        let begun: Vec<_> = loads.values().map(|(load, _)| load.journal.begun()).collect();
        for ((name, (load, earliest)), latest) in loads.into_iter().zip(begun) {
            let journal = load.journal.clone();
            let batches = self.end_load(load).await;
            let held = &mut self.volumes.get_mut(&name).unwrap().held;
            let (before, earlier) = (held.picture.clone(), held.clone());
            let done = batches.len() - usize::from(journal.is_broken());
            batches[..done].iter().flatten().for_each(|action| held.apply(action));
            batches[done..].iter().flatten().for_each(|action| held.attempt(action));
            windows.insert(name, Window { before, held: earlier, batches, earliest, latest });
        }
        for (name, volume) in &self.volumes {
            windows.entry(name.clone()).or_insert_with(|| {
                let held = volume.held.clone();
                let (before, batches) = (held.picture.clone(), Vec::new());
                Window { before, held, batches, earliest: 0, latest: 0 }
            });
        }
        windows
    }

    /// Compares every volume and snapshot with the model.
    async fn compare(&mut self, reader: Reader) {
        let names: Vec<_> = self.volumes.keys().cloned().collect();
        for name in &names {
            let volume = &self.volumes[name];
            let found = match &volume.stand {
                Stand::Used(guest) => {
                    let sectors = 0..volume.held.picture.sectors();
                    let Ok(found) = guest.try_read(sectors).await else {
                        self.mend(name).await;
                        continue;
                    };
                    Picture::of(&found).unwrap()
                }
                Stand::Idle | Stand::Published => {
                    self.on_disk(reader, |records| records.active(name).map(str::to_owned)).await
                }
            };
            volume.held.picture.assert_is(&found, name);
        }
        for (name, picture) in &self.snapshots {
            let found =
                self.on_disk(reader, |records| records.named(name).map(str::to_owned)).await;
            picture.assert_is(&found, name);
        }
    }

    /// What lies on the disk below a volume or snapshot, past the driver.
    async fn on_disk(&self, reader: Reader, top: impl Fn(&Records) -> Option<String>) -> Picture {
        let begin = Instant::now();
        loop {
            let records = self.records();
            let found = top(&records).and_then(|top| records.picture(&top, reader));
            // A merge may have taken away a layer of those that were just read of.
            if let Some(found) = found {
                return found.unwrap_or_else(|error| panic!("{error}\n{records:#?}"));
            }
            assert!(begin.elapsed() < LIMIT, "it is not there: {records:#?}");
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn assert_undamaged(&self) {
        let volumes = self.driver.inspect().await;
        assert!(volumes.iter().all(|volume| volume.damage.is_empty()), "{volumes:#?}");
    }

    fn records(&self) -> Records {
        Records::of(&self.driver.path("pool"))
    }

    /// What the driver warned of, each kind once, with how often.
    fn warnings(&self) -> String {
        let log = fs::read_to_string(self.driver.path("log")).unwrap();
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        for line in lines.filter(|line| line["level"] == "WARN" || line["level"] == "ERROR") {
            let text = format!("{} {} {}", line["message"], line["reason"], line["error"]);
            let kind: String = text.chars().filter(|letter| !letter.is_ascii_digit()).collect();
            *kinds.entry(kind).or_default() += 1;
        }
        format!("{} steps, warnings: {kinds:#?}", self.done.len())
    }

    fn pick_used(&mut self) -> Option<String> {
        let used = self.volumes.iter().filter(|(_, one)| matches!(one.stand, Stand::Used(_)));
        let used: Vec<_> = used.map(|(name, _)| name.clone()).collect();
        pick(&mut self.dice, used.iter())
    }

    fn pick_published(&mut self) -> Option<String> {
        let published: Vec<_> = self.volumes.iter().filter_map(Volume::attached).collect();
        pick(&mut self.dice, published.iter())
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.dice.roll(sides.try_into().unwrap()).try_into().unwrap()
    }

    fn note(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.done.push(format!("{:6} ms: {what}", self.begun.elapsed().as_millis()));
    }
}

impl Volume {
    fn guest(&self) -> &Guest {
        match &self.stand {
            Stand::Used(guest) => guest,
            Stand::Idle | Stand::Published => panic!("it has a guest"),
        }
    }

    fn attached((name, volume): (&String, &Self)) -> Option<String> {
        match volume.stand {
            Stand::Idle => None,
            Stand::Published | Stand::Used(_) => Some(name.clone()),
        }
    }
}

async fn end_and_start(driver: &mut Driver) {
    assert!(driver.terminate().await.success());
    driver.launch(&[], None);
    driver.answers().await;
}

fn pick<'a, T: Clone + 'a>(
    dice: &mut Dice,
    mut from: impl ExactSizeIterator<Item = &'a T>,
) -> Option<T> {
    let count = u64::try_from(from.len()).unwrap();
    if count == 0 {
        return None;
    }
    from.nth(dice.roll(count).try_into().unwrap()).cloned()
}

/// A name that is not used.
fn free<T>(kind: &str, most: usize, used: &BTreeMap<String, T>, dice: &mut Dice) -> Option<String> {
    let names: Vec<_> = (1..=most).map(|number| format!("{kind}-{number}")).collect();
    let free: Vec<_> = names.iter().filter(|name| !used.contains_key(*name)).cloned().collect();
    pick(dice, free.iter())
}

fn bytes(sectors: usize) -> u64 {
    (sectors * SECTOR).try_into().unwrap()
}
