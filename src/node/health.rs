//! Whether the node can do its work, and what there is to see of it, in bounded time: a pool whose
//! disk hangs, a relay or a file system that does not answer is named, and holds up nobody.
//!
//! What may hang is asked on a thread of its own, by one at a time: as long as one hangs no second
//! is sent after it.

use super::{
    Attached, Condition, Node, Relayed, Service,
    condition::{full, is_full},
    relayed::by_key,
};
use crate::{
    chain::Chain,
    pool::{Pool, Space},
    units::Bytes,
    volume::{Layer, LayerId, PoolName, Sight, VolumeId},
};
use futures_util::future::join_all;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tracing::{error, info};

/// How long anything may take to answer that is asked here: kubelet and Prometheus wait for some
/// seconds at most, and for several of them.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a disk may take to answer until its pool counts as lost. One that is only busy answers
/// sooner; until then what it said last holds.
const LOST: Duration = Duration::from_secs(10);

/// How often it is looked after the pools.
const ROUND: Duration = Duration::from_secs(5);

/// What became of each question, and whose turn it is to ask.
#[derive(Debug, Default)]
pub(super) struct Health {
    relay: Turn,
    records: Turn,
    conditions: Turn,
    damage: Turn,
    pools: Mutex<BTreeMap<PoolName, PoolHealth>>,
    supervisor_is_gone: AtomicBool,
}

#[derive(Clone, Debug, Default)]
struct PoolHealth {
    space: Turn,
    layers: Turn,
    /// How full it was the last time.
    last: Option<Space>,
    /// What is wrong with it, as far as was told.
    trouble: Option<String>,
}

/// Lets one ask at a time.
#[derive(Clone, Debug)]
struct Turn {
    turn: Arc<Semaphore>,
    /// When the question was asked that has no answer yet.
    since: Arc<Mutex<Option<Instant>>>,
}

/// One of the things that could not be looked at in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The relay.
    Relay,
    /// What the records say.
    Records,
    /// How the volumes fare.
    Conditions,
    /// What the pools spend on layers.
    Layers,
}

/// All there is to see of a node at one moment.
#[derive(Debug, Default)]
pub struct View {
    /// What the records say.
    pub sight: Option<Sight>,
    /// What the relay has to tell.
    pub relayed: Option<Relayed>,
    /// What is wrong with each volume.
    pub conditions: Option<BTreeMap<VolumeId, Condition>>,
    /// How full each pool is, or what is wrong with it.
    pub pools: Vec<(PoolName, Result<Space, String>)>,
    /// What the pools spend on layers.
    pub allocated: BTreeMap<PoolName, HashMap<LayerId, Bytes>>,
    /// The volumes that are staged.
    pub staged: Vec<Staged>,
    /// What did not answer in time.
    pub late: Vec<Part>,
}

/// What is known of a staged volume without asking anybody.
#[derive(Clone, Debug)]
pub struct Staged {
    /// Which.
    pub volume: VolumeId,
    /// At how many places it is published.
    pub targets: usize,
    /// Whether the relay is between it and its VM.
    pub is_relayed: bool,
    /// The version of its daemon; none while it has none.
    pub version: Option<String>,
    /// How often its daemon was started again since the driver started.
    pub restarts: u64,
}

impl Default for Turn {
    fn default() -> Self {
        Self { turn: Arc::new(Semaphore::new(1)), since: Arc::default() }
    }
}

impl Turn {
    /// The answer, or none where it does not come in time. Who asked before is waited for first.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let asked = async {
            let turn = self.turn.clone().acquire_owned().await.ok()?;
            let since = self.since.clone();
            *since.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            let asked = tokio::task::spawn_blocking(move || {
                let _turn = turn; // for as long as it takes
                let answer = question();
                *since.lock().unwrap_or_else(PoisonError::into_inner) = None;
                answer
            });
            asked.await.ok()
        };
        timeout(PATIENCE, asked).await.ok().flatten()
    }

    /// For how long the question has had no answer.
    fn open(&self) -> Duration {
        let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Relay, Self::Records, Self::Conditions, Self::Layers];

    /// As metrics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Records => "records",
            Self::Conditions => "conditions",
            Self::Layers => "layers",
        }
    }
}

impl Health {
    pub(super) fn note_supervisor(&self, is_gone: bool) {
        self.supervisor_is_gone.store(is_gone, Ordering::Relaxed);
    }

    fn of(&self, pool: &Pool) -> PoolHealth {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.entry(pool.name().clone()).or_default().clone()
    }

    /// Notes what a pool was like when it was opened.
    pub(super) fn begin(&self, pool: &Pool) {
        let last = pool.space().ok();
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.entry(pool.name().clone()).or_default().last = last;
    }

    /// Tells of a pool that is lost, or back, once.
    fn note(&self, pool: &PoolName, found: &Result<Space, String>) {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let one = pools.entry(pool.clone()).or_default();
        one.last = found.as_ref().ok().copied().or(one.last);
        let (known, trouble) = (&mut one.trouble, found.as_ref().err().map(String::as_str));
        match (&known, trouble) {
            (None, Some(reason)) => error!(%pool, reason, "pool lost"),
            (Some(before), Some(reason)) if before != reason => {
                error!(%pool, reason, "pool lost otherwise");
            }
            (Some(_), None) => info!(%pool, "pool back"),
            (Some(_), Some(_)) | (None, None) => return,
        }
        *known = trouble.map(str::to_owned);
    }
}

impl Node {
    /// Whether the node can do its work, or all that keeps it from it.
    pub async fn readiness(&self) -> Result<(), String> {
        let pools = self.pools().await.into_iter();
        let mut troubles: Vec<_> = pools.filter_map(|(_, space)| space.err()).collect();
        if !self.has_supervisor() {
            troubles.push("no supervisor answers, and so no daemon can be started".to_owned());
        }
        if troubles.is_empty() { Ok(()) } else { Err(troubles.join("; ")) }
    }

    /// Whether there is a supervisor.
    pub fn has_supervisor(&self) -> bool {
        !self.health.supervisor_is_gone.load(Ordering::Relaxed)
    }

    /// How full each pool is, or what is wrong with it.
    pub async fn pools(&self) -> Vec<(PoolName, Result<Space, String>)> {
        join_all(self.volumes.pools().iter().map(async |pool| {
            let asked = pool.clone();
            let known = self.health.of(pool);
            let answer = known.space.ask(move || asked.check()).await;
            let space = match (answer, known.last) {
                (Some(Ok(space)), _) => Ok(space),
                (Some(Err(trouble)), _) => Err(Chain(&trouble).to_string()),
                (None, Some(last)) if known.space.open() < LOST => {
                    known.trouble.map_or(Ok(last), Err)
                }
                (None, _) => {
                    let (name, dir) = (pool.name(), pool.dir().display());
                    Err(format!("pool {name}: its disk does not answer ({dir})"))
                }
            };
            self.health.note(pool.name(), &space);
            (pool.name().clone(), space)
        }))
        .await
    }

    /// All there is to see, as far as it answers in time.
    pub async fn view(&self) -> View {
        let mut view = View { staged: self.staged_volumes(), ..View::default() };
        let volumes = self.volumes.clone();
        let records = self.health.records.ask(move || volumes.look());
        let (pools, sight, relayed) = tokio::join!(self.pools(), records, self.relayed_in_time());
        (view.pools, view.sight) = (pools, sight);
        if relayed.is_none() {
            view.late.push(Part::Relay);
        }
        view.relayed = relayed.flatten();
        if let Some(relayed) = &view.relayed {
            self.tally.note_stalls(relayed);
        }
        if view.sight.is_none() {
            view.late.push(Part::Records);
            return view;
        }
        let (conditions, allocated) = tokio::join!(self.all_conditions(&view), self.spent(&view));
        view.conditions = conditions;
        if view.conditions.is_none() {
            view.late.push(Part::Conditions);
        }
        if allocated.len() < view.pools.len() {
            view.late.push(Part::Layers);
        }
        view.allocated = allocated;
        view
    }

    /// What the relay has to tell, or nothing where none answers; nothing at all where it does not
    /// in time.
    pub(super) async fn relayed_in_time(&self) -> Option<Option<Relayed>> {
        let relay = self.relay.clone();
        let status = self.health.relay.ask(move || relay.look_now()).await?;
        Some(status.map(by_key))
    }

    fn staged_volumes(&self) -> Vec<Staged> {
        let staged = |(id, one): (&VolumeId, &Attached)| Staged {
            volume: id.clone(),
            targets: one.attachment.targets.len(),
            is_relayed: one.attachment.form.is_relayed(),
            version: match &one.service {
                Service::Up(daemon) => Some(daemon.version()),
                Service::Down { .. } => None,
            },
            restarts: one.restarts,
        };
        self.attached().iter().map(staged).collect()
    }

    async fn all_conditions(&self, view: &View) -> Option<BTreeMap<VolumeId, Condition>> {
        let ids: Vec<_> = view.sight.as_ref()?.volumes.keys().cloned().collect();
        let relayed = view.relayed.clone().unwrap_or_default();
        let troubles = troubles_of(&view.pools);
        let node = self.clone();
        let conditions = move || {
            let condition = |id: VolumeId| {
                let condition = node.condition_in(&id, &relayed, &troubles);
                (id, condition)
            };
            ids.into_iter().map(condition).collect()
        };
        self.health.conditions.ask(conditions).await
    }

    /// What each pool spends on its layers, where its disk tells in time.
    async fn spent(&self, view: &View) -> BTreeMap<PoolName, HashMap<LayerId, Bytes>> {
        let Some(sight) = &view.sight else { return BTreeMap::new() };
        let mut layers: BTreeMap<_, Vec<Layer>> = BTreeMap::new();
        for standing in sight.layers.values() {
            layers.entry(&standing.pool).or_default().push(standing.layer.clone());
        }
        let spent = join_all(self.volumes.pools().iter().map(async |pool| {
            let layers = layers.get(pool.name()).cloned().unwrap_or_default();
            let measure =
                move || layers.iter().map(|layer| (layer.id, layer.allocated())).collect();
            let spent = self.health.of(pool).layers.ask(measure).await?;
            Some((pool.name().clone(), spent))
        }));
        spent.await.into_iter().flatten().collect()
    }

    /// Looks after the pools, so that one that is lost is told of though nobody asks.
    pub(super) async fn watch_pools(self) {
        loop {
            self.pools().await;
            let volumes = self.volumes.clone();
            if self.health.damage.ask(move || volumes.heal()).await == Some(true) {
                self.nudge(); // what was damaged kept work from being done
            }
            tokio::select! {
                () = sleep(ROUND) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }
}

/// What is wrong with the volumes of each pool, because it is wrong with the pool.
pub(super) fn troubles_of(
    pools: &[(PoolName, Result<Space, String>)],
) -> BTreeMap<PoolName, String> {
    let trouble = |(name, space): &(PoolName, Result<Space, String>)| match space {
        Ok(space) => is_full(*space).then(|| (name.clone(), full(name, *space))),
        Err(reason) => Some((name.clone(), reason.clone())),
    };
    pools.iter().filter_map(trouble).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn nobody_is_sent_after_one_who_hangs() {
        let turn = Turn::default();
        let (release, hangs) = mpsc::channel::<()>();
        assert_eq!(turn.ask(move || _ = hangs.recv()).await, None);
        let (told, asked) = mpsc::channel();
        assert_eq!(turn.ask(move || told.send(()).unwrap()).await, None);
        assert!(asked.try_recv().is_err(), "it was not even asked");
        assert!(turn.open() >= PATIENCE);
        drop(release);
        assert_eq!(turn.ask(|| 7).await, Some(7));
        assert_eq!(turn.open(), Duration::ZERO);
    }

    #[test]
    fn a_pool_that_is_lost_is_told_of_once() {
        let (health, pool) = (Health::default(), "fast".parse().unwrap());
        let known = || health.pools.lock().unwrap().get(&pool).unwrap().trouble.clone();
        let lost = |reason: &str| Err(reason.to_owned());
        let space = || Ok(Space::default());
        for found in [space(), lost("away"), lost("away"), lost("read-only"), space()] {
            health.note(&pool, &found);
            assert_eq!(known(), found.err());
        }
    }
}
