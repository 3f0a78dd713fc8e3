//! Background work on layers: merges, and clones that become independent.
//!
//! The domain says what is to be done and where the layers are open; it is done by the one daemon
//! that has them, or by one that is started for it. Work yields to calls, and is begun again.

use super::{Error, Node, Service};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    qsd::{self, Daemon, JobState},
    run::{DaemonKey, Slot},
    volume::{Layer, Site, Use, VolumeId, Way, Work},
};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tracing::{info, warn};

/// How many jobs run at the same time.
const ABREAST: usize = 4;

/// How often it is looked for work that nothing announced.
const ROUND: Duration = Duration::from_secs(5);

/// How soon a job is looked at that has just begun, and how often one that takes long.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

/// How a job ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// All was moved.
    Moved,
    /// Somebody needs the layers.
    Interrupted,
}

impl Node {
    /// Has it looked for work soon.
    pub(super) fn nudge(&self) {
        self.work.notify_one();
    }

    /// Finds work and has it done, until the driver ends.
    pub(super) async fn tend(self) {
        let slots = Arc::new(Semaphore::new(ABREAST));
        loop {
            let slot = tokio::select! {
                slot = slots.clone().acquire_owned() => slot,
                () = self.stop.cancelled() => return,
            };
            let Ok(slot) = slot else { return };
            if let Some(work) = self.next_work().await {
                self.tasks.spawn(self.clone().carry_out(work, slot));
                continue;
            }
            tokio::select! {
                () = self.work.notified() => {}
                () = sleep(ROUND) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    async fn next_work(&self) -> Option<Work> {
        let node = self.clone();
        blocking(move || node.volumes.next_work(&node.claims, |id| node.used(id))).await
    }

    fn used(&self, id: &VolumeId) -> Use {
        match self.attached().get(id).map(|one| &one.service) {
            None => Use::Unattached,
            Some(Service::Up(_)) => Use::Served,
            Some(Service::Down { .. }) => Use::Unserved,
        }
    }

    async fn carry_out(self, work: Work, slot: OwnedSemaphorePermit) {
        let layer = work.upper().id;
        info!(%layer, way = name(work.way()), site = ?work.site(), "moving data between layers");
        let outcome = match work.site() {
            Site::Workshop => self.work_in_workshop(&work).await,
            Site::Daemon(volume) => self.work_in_daemon(volume, &work).await,
        };
        match outcome {
            Ok(Ended::Moved) => info!(%layer, "moved"),
            Ok(Ended::Interrupted) => info!(%layer, "interrupted; it is begun again"),
            Err(error) => {
                warn!(%layer, error = %Chain(&error), "moving data between layers");
                work.failed();
                return;
            }
        }
        drop(work);
        drop(slot);
        self.nudge();
    }

    /// Work in the daemon that has the layers open. Its graph changes as the job ends, and the
    /// records follow; a driver that dies in between finds a daemon that serves the same bytes, and
    /// replaces it.
    async fn work_in_daemon(&self, id: &VolumeId, work: &Work) -> Result<Ended, Error> {
        let Some(Service::Up(daemon)) = self.find(id).map(|one| one.service) else {
            return Ok(Ended::Interrupted);
        };
        let failed = |error: qsd::MonitorError| Error::daemon(id)(error.into());
        if self.run_job(&daemon, work).await.map_err(failed)? == Ended::Interrupted {
            return Ok(Ended::Interrupted);
        }
        crash::point("work-moved");
        let gone = gone(work);
        self.finish_work(work)?;
        for layer in gone {
            daemon.close_layer(&layer).await.map_err(failed)?;
        }
        daemon.dismiss_job().await.map_err(failed)?;
        Ok(Ended::Moved)
    }

    /// Work in a daemon of its own, on layers that nobody has open. A crash leaves a daemon and a
    /// directory of no attachment, which start-up clears.
    async fn work_in_workshop(&self, work: &Work) -> Result<Ended, Error> {
        let key = DaemonKey { volume: work.upper().id.run_key(), slot: Slot::A };
        let dir = self.config.run.volume(&key.volume);
        let (program, place) = (self.config.qsd.newest(), dir.daemon(key.slot));
        let failed = |source| Error::Workshop { layer: work.upper().id, source };
        let job = async {
            dir.create().map_err(Error::run(dir.path()))?;
            let layers = work.layers();
            let started =
                qsd::start_workshop(&key, &program, &place, layers, &self.supervisor).await;
            let daemon = started.map_err(failed)?;
            let ended = self.run_job(&daemon, work).await.map_err(|error| failed(error.into()))?;
            daemon.stop(&self.supervisor).await?;
            Ok(ended)
        };
        let outcome = job.await;
        self.supervisor.kill(&key).await?;
        if let Err(error) = dir.remove() {
            warn!(error = %Chain(&error), "what is left of a workshop stays");
        }
        if matches!(outcome, Ok(Ended::Moved)) {
            crash::point("workshop-moved");
            self.finish_work(work)?;
        }
        outcome
    }

    /// The work must stay what it is until all is recorded, so it is lent and not moved.
    fn finish_work(&self, work: &Work) -> Result<(), Error> {
        Ok(tokio::task::block_in_place(|| self.volumes.finish_work(work))?)
    }

    async fn run_job(&self, daemon: &Daemon, work: &Work) -> Result<Ended, qsd::MonitorError> {
        if work.is_interrupted() {
            return Ok(Ended::Interrupted);
        }
        daemon.start_job(work.upper(), work.way()).await?;
        crash::point("work-begun");
        let [mut pause, longest] = LOOKS;
        loop {
            let state = tokio::select! {
                () = sleep(pause) => daemon.job().await?,
                () = work.interrupted() => daemon.cancel_job().await?,
                () = self.stop.cancelled() => daemon.cancel_job().await?,
            };
            pause = (pause * 2).min(longest);
            match state {
                JobState::Running { done, total } => work.progress().set(done, total),
                JobState::Done => return Ok(Ended::Moved),
                JobState::Failed(reason) => {
                    daemon.dismiss_job().await?;
                    if work.is_interrupted() || self.stop.is_cancelled() {
                        return Ok(Ended::Interrupted);
                    }
                    return Err(qsd::MonitorError::Refused { command: "job", desc: reason });
                }
            }
        }
    }
}

fn name(way: &Way) -> &'static str {
    match way {
        Way::Stream { .. } => "stream",
        Way::Commit { .. } => "commit",
    }
}

/// The layers that a daemon has no use for after the work, from the top down.
fn gone(work: &Work) -> Vec<Layer> {
    match work.way() {
        Way::Commit { .. } => vec![work.upper().clone()],
        Way::Stream { base, .. } => {
            let below = work.layers().iter().skip(1);
            let is_gone = |layer: &&Layer| base.as_ref().is_none_or(|base| base.id != layer.id);
            below.take_while(is_gone).cloned().collect()
        }
    }
}
