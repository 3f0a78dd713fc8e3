//! What a driver finds when it starts, and what it does when a daemon dies.
//!
//! Start-up drives every attachment to rest before the first call is served: what is staged is
//! taken over, or started again; what was being staged is taken back; what was being unstaged is
//! driven on. Afterwards one task watches the supervisor, and starts again what dies.

use super::{
    Attached, CLAIM_RETRY, Cause, Config, Entrance, Error, Leaving, Node, Service,
    attachment::{Attachment, Phase},
};
use crate::{
    chain::Chain,
    qsd::Daemon,
    relay,
    run::{DaemonKey, Slot},
    store, supervisor,
    supervisor::{Process, State},
    volume::{Claim, InFlight, RunKey, VolumeId, Volumes},
};
use futures_util::StreamExt as _;
use std::{collections::HashMap, fs, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, info, warn};

/// Attachments looked at side by side at start-up: most of the time goes in waiting for daemons.
const ABREAST: usize = 16;

/// How long the first new start of a daemon waits that died soon after its last one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// How long a new start waits at most, however often the daemon died.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A daemon that served this long before it died is started again at once. One that dies of a
/// request which it is given again dies sooner.
const STEADY: Duration = Duration::from_millis(100);

/// How long the supervisor's report of a death may come after the end of the monitor.
const REPORT: Duration = Duration::from_millis(20);

/// How a daemon ended of which only the end of its monitor was seen.
pub(super) const MONITOR_CLOSED: &str = "its monitor closed the connection";

/// How long a supervisor that cannot be had is left alone.
const SUPERVISOR_RETRY: Duration = Duration::from_secs(1);

impl Node {
    /// Brings the node up on what its run directory holds.
    pub async fn start(config: Config, volumes: Arc<Volumes>) -> Result<Self, Error> {
        let supervisor = supervisor::Client::new(config.run.clone(), config.program.clone());
        let relay = relay::Client::new(config.run.clone());
        let node = Self {
            config: Arc::new(config),
            volumes,
            supervisor,
            relay,
            trials: Arc::default(),
            tally: Arc::default(),
            health: Arc::default(),
            claims: InFlight::default(),
            attached: Arc::default(),
            work: Arc::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        };
        for pool in node.volumes.pools() {
            node.health.begin(pool);
        }
        // From here on no exit goes unseen: the watch is there before the list is asked for.
        let exits = node.supervisor.watch().await?;
        let running = node.running().await?;
        node.forget_earlier_boot(&running)?;
        node.try_newest().await;
        let begin = Instant::now();
        let keys = node.config.run.keys().map_err(Error::run(node.config.run.path()))?;
        let count = keys.len();
        futures_util::stream::iter(keys)
            .for_each_concurrent(ABREAST, |key| node.settle(key, &running))
            .await;
        if count > 0 {
            info!(count, seconds = begin.elapsed().as_secs_f64(), "attachments settled");
        }
        // From here on VMs wait in our time.
        node.tally.note_stalls(&node.relayed_in_time().await.flatten().unwrap_or_default());
        node.tasks.spawn(node.clone().watch(exits));
        node.tasks.spawn(node.clone().watch_relay());
        node.tasks.spawn(node.clone().watch_pools());
        node.tasks.spawn(node.clone().tend());
        node.tasks.spawn(node.clone().resume_expansions());
        Ok(node)
    }

    /// After a reboot everything in the run directory tells of processes and mounts that are gone.
    ///
    /// A note that is lost or cannot be read says nothing, so then it counts whether any daemon
    /// runs: none of an earlier boot can.
    fn forget_earlier_boot(&self, running: &HashMap<DaemonKey, i32>) -> Result<(), Error> {
        let run = &self.config.run;
        let fail = || Error::run(run.path());
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(fail())?;
        let boot = boot.trim().to_owned();
        let is_earlier = match store::load::<String>(&run.boot()) {
            Ok(Some(noted)) if noted == boot => return Ok(()),
            Ok(Some(_)) => true,
            Ok(None) | Err(_) => running.is_empty(),
        };
        for key in run.keys().map_err(fail())?.iter().filter(|_| is_earlier) {
            if let Err(error) = run.volume(key).remove() {
                error!(%key, %error, "what is left of an earlier boot stays");
            }
        }
        store::replace_volatile(&run.boot(), &boot).map_err(|source| Error::Boot { source })
    }

    /// The daemons that run.
    pub(super) async fn running(&self) -> Result<HashMap<DaemonKey, i32>, Error> {
        let running = |process: Process| match process.state {
            State::Running => Some((process.key, process.pid)),
            State::Exited(_) => None,
        };
        Ok(self.supervisor.list().await?.into_iter().filter_map(running).collect())
    }

    /// Drives one attachment to rest. What goes wrong stays with it.
    async fn settle(&self, key: RunKey, running: &HashMap<DaemonKey, i32>) {
        if let Err(error) = self.try_settle(&key, running).await {
            error!(%key, error = %Chain(&error), "an attachment is not at rest; left alone");
        }
    }

    async fn try_settle(
        &self,
        key: &RunKey,
        running: &HashMap<DaemonKey, i32>,
    ) -> Result<(), Error> {
        if self.settle_reader(key).await? {
            return Ok(());
        }
        let dir = self.config.run.volume(key);
        let attachment = store::load::<Attachment>(&dir.attachment())
            .map_err(|source| Error::Attachment { key: key.clone(), source })?;
        let Some(attachment) = attachment else {
            // Died before its record was written, or after it was removed.
            for slot in Slot::ALL {
                self.supervisor.kill(&DaemonKey { volume: key.clone(), slot }).await?;
            }
            return dir.remove().map_err(Error::run(dir.path()));
        };
        let id = attachment.volume.clone();
        match attachment.phase {
            Phase::Staging | Phase::Unstaging => {
                info!(volume = %id, phase = ?attachment.phase, "clearing what broke off");
                self.end(&id, running).await
            }
            Phase::Staged => {
                self.attached().insert(id.clone(), Attached::new(attachment));
                self.take_over(&id, running).await;
                Ok(())
            }
        }
    }

    /// Lets a daemon of nobody flush and end, and clears what is left.
    async fn end(&self, id: &VolumeId, running: &HashMap<DaemonKey, i32>) -> Result<(), Error> {
        let serving = self.serving(id);
        if let Some(pid) = running.get(&serving)
            && let Ok(launch) = self.launch(id, serving.slot)
            && let Ok(daemon) = launch.adopt(*pid).await
        {
            self.let_go(id).await?;
            daemon.stop(&self.supervisor).await?;
        }
        self.clear(id).await
    }

    /// Takes over the daemon of an attachment, or starts it again.
    async fn take_over(&self, id: &VolumeId, running: &HashMap<DaemonKey, i32>) {
        let serving = self.serving(id);
        let Some(&pid) = running.get(&serving) else {
            self.note_missed_death(id, serving).await;
            return self.start_revival(id.clone()).await;
        };
        let adopted = async {
            self.end_other(&serving, running).await?;
            let daemon = self.launch(id, serving.slot)?.adopt(pid).await;
            let daemon = daemon.map_err(Error::daemon(id))?;
            self.lead_to(id, &daemon).await?;
            Ok::<_, Error>(daemon)
        };
        match adopted.await {
            Ok(daemon) => {
                self.serves(id, daemon, Entrance::TakenOver);
                self.settle_image_if_can_be(id).await;
            }
            Err(error) if error.is_outdated() => self.start_revival(id.clone()).await,
            // A VM may be at work on it: a deaf daemon serves, and so it is not killed.
            Err(error) => {
                let reason = format!("its daemon {pid} cannot be taken over: {}", Chain(&error));
                error!(volume = %id, pid, reason, "daemon left alone");
                if let Some(one) = self.attached().get_mut(id) {
                    one.service = Service::Down { reason };
                }
                self.tasks.spawn(self.clone().revive(id.clone(), FIRST_PAUSE));
            }
        }
    }

    /// Waits for the end of a daemon's monitor, which is the end of the daemon, however it came and
    /// whoever else saw it. The supervisor's report says more, so it may come first.
    pub(super) async fn watch_monitor(self, id: VolumeId, daemon: Daemon) {
        tokio::select! {
            () = daemon.closed() => sleep(REPORT).await,
            () = self.stop.cancelled() => return,
        }
        self.note_death(&id, daemon.pid(), MONITOR_CLOSED);
    }

    /// The first attempt at once, and if that fails further ones in the background. A remote master
    /// may take its time, and nobody waits for it.
    async fn start_revival(&self, id: VolumeId) {
        if self.volumes.find(&id).is_ok_and(|volume| volume.master().is_some()) {
            _ = self.tasks.spawn(self.clone().revive(id, Duration::ZERO));
            return;
        }
        let Ok(claim) = self.claims.claim_briefly(&id) else { return };
        if let Err(error) = self.restart(&claim).await {
            error!(volume = %id, error = %Chain(&error), "volume not served");
            self.tasks.spawn(self.clone().revive(id, FIRST_PAUSE));
        }
    }

    /// Waits for daemons to die, and starts them again; starts the supervisor again, too.
    async fn watch(self, mut exits: supervisor::Exits) {
        loop {
            let exit = tokio::select! {
                exit = exits.next() => exit,
                () = self.stop.cancelled() => return,
            };
            match exit {
                Ok(exit) => self.note_exit(&exit.key, exit.pid, &exit.how),
                Err(error) => {
                    warn!(error = %Chain(&error), "supervisor lost");
                    self.health.note_supervisor(true);
                    tokio::select! {
                        again = self.watch_again() => exits = again,
                        () = self.stop.cancelled() => return,
                    }
                }
            }
        }
    }

    /// Watches a new supervisor, and looks what died while nobody watched.
    async fn watch_again(&self) -> supervisor::Exits {
        loop {
            let again = async {
                let exits = self.supervisor.watch().await?;
                Ok::<_, Error>((exits, self.running().await?))
            };
            match again.await {
                Ok((exits, running)) => {
                    self.health.note_supervisor(false);
                    info!("supervisor back");
                    self.note_missing(&running);
                    return exits;
                }
                Err(error) => error!(error = %Chain(&error), "no supervisor"),
            }
            sleep(SUPERVISOR_RETRY).await;
        }
    }

    fn note_missing(&self, running: &HashMap<DaemonKey, i32>) {
        let up = |(id, one): (&VolumeId, &Attached)| match &one.service {
            Service::Up(daemon) => Some((id.clone(), daemon.key().clone(), daemon.pid())),
            Service::Down { .. } => None,
        };
        let up: Vec<_> = self.attached().iter().filter_map(up).collect();
        for (id, key, pid) in up {
            if running.get(&key) != Some(&pid) {
                self.note_death(&id, pid, "it ended while there was no supervisor");
            }
        }
    }

    fn note_exit(&self, key: &DaemonKey, pid: i32, how: &str) {
        let id = self.attached().keys().find(|id| id.run_key() == key.volume).cloned();
        if let Some(id) = id {
            self.note_death(&id, pid, how);
        }
    }

    /// The daemon of an attachment died: says so, and has it started again.
    fn note_death(&self, id: &VolumeId, pid: i32, how: &str) {
        let mut attached = self.attached();
        let dead = attached.get_mut(id).filter(|one| {
            one.attachment.phase == Phase::Staged
                && matches!(&one.service, Service::Up(daemon) if daemon.pid() == pid)
        });
        let Some(one) = dead else { return };
        let Service::Up(daemon) = &one.service else { return };
        let pause = if one.is_given_up(pid) {
            debug!(volume = %id, pid, reason = how, "daemon ended");
            Duration::ZERO // whoever ended it has the claim, and starts the next
        } else {
            one.hasty_ends = if daemon.served() < STEADY { one.hasty_ends + 1 } else { 0 };
            let pause = pause_after(one.hasty_ends);
            let seconds = daemon.served().as_secs_f64();
            warn!(volume = %id, pid, reason = how, seconds, ?pause, "daemon died");
            self.keep_death(id, daemon.key().clone(), pid, how);
            let error = how.to_owned();
            one.leaving = Some(Leaving { pid: Some(pid), cause: Cause::Died, error });
            pause
        };
        one.service = Service::Down { reason: how.to_owned() };
        self.tasks.spawn(self.clone().revive(id.clone(), pause));
    }

    /// Has the daemon of a volume started again in the background.
    pub(super) fn revive_later(&self, id: &VolumeId) {
        self.tasks.spawn(self.clone().revive(id.clone(), FIRST_PAUSE));
    }

    /// Starts the daemon of a volume again, ever more patiently, until it serves or is not wanted.
    async fn revive(self, id: VolumeId, mut pause: Duration) {
        loop {
            let claim = tokio::select! {
                claim = self.claim_after(&id, pause) => claim,
                () = self.stop.cancelled() => return,
            };
            let down = |one: &Attached| {
                one.attachment.phase == Phase::Staged && matches!(one.service, Service::Down { .. })
            };
            if !self.attached().get(&id).is_some_and(down) {
                return;
            }
            let before = self.trouble(&id);
            match self.restart(&claim).await {
                Ok(()) => return,
                // Told of once, and not again at each attempt.
                Err(error) if self.trouble(&id) == before => {
                    debug!(volume = %id, error = %Chain(&error), "volume not served");
                }
                Err(error) => error!(volume = %id, error = %Chain(&error), "volume not served"),
            }
            pause = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        }
    }

    /// Why no daemon serves an attachment.
    fn trouble(&self, id: &VolumeId) -> Option<String> {
        match self.find(id)?.service {
            Service::Up(_) => None,
            Service::Down { reason } => Some(reason),
        }
    }

    async fn claim_after(&self, id: &VolumeId, pause: Duration) -> Claim {
        sleep(pause).await;
        loop {
            match self.claims.claim_briefly(id) {
                Ok(claim) => return claim,
                Err(_) => sleep(CLAIM_RETRY).await,
            }
        }
    }
}

/// How long to wait after the daemon ended so many times in a row soon after it began.
fn pause_after(hasty_ends: u32) -> Duration {
    match hasty_ends.checked_sub(1) {
        None => Duration::ZERO,
        Some(more) => FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(more)).min(LONGEST_PAUSE),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_daemon_that_keeps_dying_is_started_ever_more_patiently() {
        let pauses: Vec<_> = [0, 1, 2, 3, 7, 8, u32::MAX].map(pause_after).into();
        assert_eq!(pauses[..4], [0, 100, 200, 400].map(Duration::from_millis));
        assert_eq!(pauses[4..], [6_400, 10_000, 10_000].map(Duration::from_millis));
    }
}
