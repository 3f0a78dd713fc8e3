//! Background work on layers: merges, and clones that become independent.
//!
//! The domain says what is to be done and where the layers are open; it is done by the one daemon
//! that has them, or by one that is started for it. Work yields to calls, and is begun again.

use super::{CLAIM_RETRY, Cause, Error, Fate, Node, Service, image::Image};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    qsd::{self, Credentials, Daemon, Height, JobState},
    source::{Access, Secrets},
    volume::{Ahead, Claim, Failure, Layer, Purpose, Site, Use, VolumeId, Way, Work, check_frozen},
};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

/// How many merges run at the same time.
const MERGES_ABREAST: usize = 4;

/// How many clones are copied at the same time. They may be slow on purpose, and each is a daemon of
/// some megabytes.
const COPIES_ABREAST: usize = 16;

/// How often it is looked for work that nothing announced.
const ROUND: Duration = Duration::from_secs(5);

/// How soon a job is looked at that has just begun, and how often one that takes long.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

/// How long whoever freezes a layer waits at most while too many are to be merged.
const HELD_UP: Duration = Duration::from_secs(2);

/// How long a VM is held back at most while the last writes are committed.
const HELD: Duration = Duration::from_secs(5);

/// How long the relay takes at most to tell whether a VM was held back, if it can tell now.
const ANSWER: Duration = Duration::from_millis(500);

/// The job itself, as that which ended with an error.
const JOB: &str = "job";

/// How far a job is followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follow {
    /// Until it ended.
    UntilDone,
    /// Until it only follows writes.
    UntilReady,
}

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

    /// The same in a while.
    pub(super) fn nudge_after(&self, time: Duration) {
        let node = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = sleep(time) => node.nudge(),
                () = node.stop.cancelled() => {}
            }
        });
    }

    /// Lets merges get ahead of whoever freezes layers faster than they are merged, for a while.
    pub(super) async fn wait_for_merges(&self, id: &VolumeId) {
        let deadline = Instant::now() + HELD_UP;
        while let Some(mut done) = self.volumes.pressing_merge(id) {
            if timeout_at(deadline, done.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Finds work and has it done, until the driver ends. Copies come first: what is merged with a
    /// layer that is to be copied is to be copied, too. They never keep merges waiting.
    pub(super) async fn tend(self) {
        let slots = [(Purpose::Copy, COPIES_ABREAST), (Purpose::Merge, MERGES_ABREAST)]
            .map(|(purpose, abreast)| (purpose, Arc::new(Semaphore::new(abreast))));
        while !self.stop.is_cancelled() {
            let mut begun = false;
            for (purpose, slots) in &slots {
                let Ok(slot) = slots.clone().try_acquire_owned() else { continue };
                let Some(work) = self.next_work(*purpose).await else { continue };
                self.tasks.spawn(self.clone().carry_out(work, slot));
                begun = true;
            }
            if begun {
                continue;
            }
            tokio::select! {
                () = self.work.notified() => {}
                () = self.claims.released() => {}
                () = sleep(ROUND) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    async fn next_work(&self, purpose: Purpose) -> Option<Work> {
        let node = self.clone();
        let used = move |id: &VolumeId| node.used(id);
        let (volumes, claims) = (self.volumes.clone(), self.claims.clone());
        blocking(move || volumes.next_work(purpose, &claims, used)).await
    }

    fn used(&self, id: &VolumeId) -> Use {
        let attached = self.attached();
        let Some(one) = attached.get(id) else { return Use::Unattached };
        match &one.service {
            Service::Up(_) if matches!(one.image, Image::Shown | Image::Contested) => Use::Shown,
            Service::Up(_) if one.attachment.may_move() => Use::Served,
            Service::Up(_) => Use::Bound,
            Service::Down { .. } => Use::Unserved,
        }
    }

    async fn carry_out(self, work: Work, slot: OwnedSemaphorePermit) {
        let (layer, way, begin) = (work.upper().id, work.way().as_str(), Instant::now());
        let site = work.site().clone();
        let volume = site.volume().map(tracing::field::display);
        info!(volume, %layer, way, "job started");
        let outcome = match work.site().clone() {
            Site::Workshop => self.work_in_workshop(work).await,
            Site::Daemon(volume) => self.work_in_daemon(&volume, work).await,
        };
        let seconds = begin.elapsed().as_secs_f64();
        let fate = match outcome {
            Ok(Ended::Moved) => {
                info!(volume, %layer, way, seconds, "job finished");
                Fate::Finished
            }
            Ok(Ended::Interrupted) => {
                info!(volume, %layer, way, seconds, "job interrupted");
                Fate::Interrupted
            }
            Err(error) => {
                let reason = Chain(&error).to_string();
                warn!(volume, %layer, way, seconds, error = reason, "job failed");
                let is_of_daemon = error.is_of_ended_daemon();
                let cause = if is_of_daemon { Failure::OfDaemon } else { Failure::Own };
                let pause = self.volumes.work_failed(layer, reason, cause);
                self.nudge_after(pause);
                Fate::Failed
            }
        };
        self.tally.note_job(way, fate);
        drop(slot);
        self.nudge();
    }

    /// Work in the daemon that has the layers open. Its graph changes as the job ends, and the
    /// records follow; a driver that dies in between finds a daemon that serves the same bytes, and
    /// replaces it.
    async fn work_in_daemon(&self, id: &VolumeId, work: Work) -> Result<Ended, Error> {
        let Some(daemon) = self.serving_daemon(id) else {
            return Ok(Ended::Interrupted);
        };
        let is_commit = matches!(work.way(), Way::Commit { .. });
        let is_active = self.height(&work) == Height::Active;
        if (is_commit || is_active) && self.image(id) != Image::Hidden {
            // It stays away until the VM that is there has left.
            let Some(_claim) = self.claim_for(id, &work).await else {
                return Ok(Ended::Interrupted);
            };
            self.make_way(id, &daemon).await?;
        }
        if is_commit && is_active {
            return self.commit_active(id, &daemon, work).await;
        }
        match self.follow_job(&daemon, &work, Follow::UntilDone).await {
            Ok(Ended::Moved) => {}
            Ok(Ended::Interrupted) => return Ok(Ended::Interrupted),
            Err(error) => {
                drop(work);
                return Err(self.give_up_job(id, &daemon, error).await);
            }
        }
        crash::point("work-moved");
        let finished = self.finish_work(&work);
        let tidied = match finished {
            Ok(()) => self.tidy(id, &daemon, Left::by(&work)).await,
            Err(_) => Ok(()),
        };
        drop(work); // whoever replaces a daemon waits for the end of all work on it
        // Of one whose work was not recorded the layers are not those of the records.
        match (finished, tidied) {
            (Ok(()), Ok(())) => Ok(Ended::Moved),
            (Ok(()), Err(error)) => {
                self.give_up(id, &daemon, error).await;
                Ok(Ended::Moved)
            }
            (Err(error), _) => {
                self.replace_if_free(id, &daemon, &error).await;
                Err(error)
            }
        }
    }

    /// Commits the active layer of a volume that is written to meanwhile.
    ///
    /// ```text
    /// job follows the writes -- VM held back -- job ends, in step -- daemon ends -- VM was held all the time? record -- next daemon
    /// ```
    ///
    /// Before the record is replaced, the active layer has every byte; after it, the one below has,
    /// and nothing was written in between, as the relay held the VM back or there was no daemon.
    async fn commit_active(
        &self,
        id: &VolumeId,
        daemon: &Daemon,
        work: Work,
    ) -> Result<Ended, Error> {
        let failed = |error: qsd::MonitorError| Error::daemon(id)(error.into());
        match self.follow_job(daemon, &work, Follow::UntilReady).await {
            Ok(Ended::Moved) => {}
            Ok(Ended::Interrupted) => return Ok(Ended::Interrupted),
            Err(error) => {
                drop(work);
                return Err(self.give_up_job(id, daemon, error).await);
            }
        }
        let Some(claim) = self.claim_for(id, &work).await else {
            let Err(error) = self.call_off(daemon, &work).await else {
                return Ok(Ended::Interrupted);
            };
            drop(work);
            return Err(self.give_up(id, daemon, error).await);
        };
        crash::point("commit-ready");
        let begin = Instant::now();
        let key = id.run_key();
        let relayed = |source| Error::Relay { volume: id.clone(), source };
        let paused = tokio::select! {
            paused = self.relay.pause(&key, HELD) => paused.map_err(relayed),
            // While a VM that just connects waits for a daemon, the relay does nothing else.
            () = daemon.closed() => Err(failed(qsd::MonitorError::Closed)),
        };
        if let Err(error) = paused {
            let called_off = self.call_off(daemon, &work).await;
            drop(work);
            if let Err(error) = called_off {
                _ = self.replace_doubtful(&claim, daemon, &failed(error)).await;
            }
            _ = self.relay.resume(&key).await; // it may be held by now
            return Err(error);
        }
        let settled = async {
            let state = daemon.end_ready_job().await?;
            let Left { changed, below, .. } = Left::by(&work);
            // Durable now, however the daemon ends.
            daemon.reopen(&changed, below.as_ref(), Access::Write).await?;
            Ok(state)
        };
        let settled = settled.await.map_err(failed);
        self.gives_up(id, daemon.pid(), Cause::Merged, "");
        let stopped = daemon.stop(&self.supervisor).await;
        crash::point("commit-stopped");
        // Requests wait for a daemon from here on, held back or not. The relay does nothing else while
        // a VM that just connects waits for one: then it is not known what was held back.
        let held = timeout(ANSWER, self.relay.resume(&key)).await.unwrap_or(Ok(false));
        let outcome = match (settled, stopped, held) {
            (Ok(JobState::Done), Ok(()), Ok(true)) => {
                self.finish_work(&work).map(|()| Ended::Moved)
            }
            (Err(error), _, _) => Err(error),
            (_, Err(error), _) => Err(error.into()),
            (_, _, Err(source)) => Err(relayed(source)),
            (Ok(_), Ok(()), Ok(_)) => Ok(Ended::Interrupted),
        };
        drop(work); // or the restart would wait for it
        self.restart_for_sure(&claim).await?;
        debug!(volume = %id, seconds = begin.elapsed().as_secs_f64(), "active layer committed");
        outcome
    }

    /// The same where a job failed. One that said why has left the daemon as it was before.
    async fn give_up_job(&self, id: &VolumeId, daemon: &Daemon, error: qsd::MonitorError) -> Error {
        if matches!(error, qsd::MonitorError::Refused { command: JOB, .. }) {
            return Error::daemon(id)(error.into());
        }
        self.give_up(id, daemon, error).await
    }

    /// Replaces a daemon with which work did not succeed: what it has open is not known for sure.
    async fn give_up(&self, id: &VolumeId, daemon: &Daemon, error: qsd::MonitorError) -> Error {
        let error = Error::daemon(id)(error.into());
        self.replace_if_free(id, daemon, &error).await;
        error
    }

    /// Replaces a daemon of which it is not known what it has open, unless somebody works on the
    /// volume: whoever does sees to it himself.
    async fn replace_if_free(&self, id: &VolumeId, daemon: &Daemon, why: &Error) {
        if let Ok(claim) = self.claims.claim_briefly(id) {
            _ = self.replace_doubtful(&claim, daemon, why).await;
        } else {
            warn!(volume = %id, error = %Chain(why), "layers stay open");
        }
    }

    /// The claim of a volume, unless somebody needs its layers first.
    async fn claim_for(&self, id: &VolumeId, work: &Work) -> Option<Claim> {
        loop {
            match self.claims.claim_briefly(id) {
                Ok(claim) if !work.is_interrupted() => return Some(claim),
                Ok(_) => return None,
                Err(_) => tokio::select! {
                    () = work.interrupted() => return None,
                    () = self.stop.cancelled() => return None,
                    () = sleep(CLAIM_RETRY) => {}
                },
            }
        }
    }

    /// Has a daemon close what it has no use for, and write to no frozen layer any more: others may
    /// want to read it as soon as the work is over.
    async fn tidy(
        &self,
        id: &VolumeId,
        daemon: &Daemon,
        left: Left,
    ) -> Result<(), qsd::MonitorError> {
        daemon.dismiss_job().await?;
        for layer in &left.gone {
            daemon.close_layer(layer).await?;
        }
        if self.volumes.layers_of_volume(id).first() != Some(&left.changed.id) {
            daemon.reopen(&left.changed, left.below.as_ref(), Access::Read).await?;
        }
        Ok(())
    }

    /// Work in a daemon of its own, on layers that nobody has open. A crash leaves a daemon and a
    /// directory of no attachment, which start-up clears.
    async fn work_in_workshop(&self, work: Work) -> Result<Ended, Error> {
        let workshop = self.workshop(work.upper().id.run_key())?;
        let failed = |source| Error::Workshop { layer: work.upper().id, source };
        let credentials = self.credentials_for(&work);
        let layers = work.layers().to_vec();
        let checked = blocking(move || check_frozen(&layers)).await;
        let damaged = |desc| failed(qsd::MonitorError::Refused { command: "opening", desc }.into());
        let job = async {
            checked.map_err(damaged)?;
            let started = workshop.start(work.layers(), credentials.as_ref(), &self.supervisor);
            let daemon = started.await.map_err(failed)?;
            let ended = self.follow_job(&daemon, &work, Follow::UntilDone).await;
            let ended = ended.map_err(|error| failed(error.into()))?;
            daemon.stop(&self.supervisor).await?;
            Ok(ended)
        };
        let outcome = job.await;
        self.clear_workshop(&workshop).await?;
        if matches!(outcome, Ok(Ended::Moved)) {
            crash::point("workshop-moved");
            self.finish_work(&work)?;
        }
        outcome
    }

    /// Who we are to the server of a remote master, where the work reads it: only what needs no
    /// secrets is ever read outside of an attachment.
    fn credentials_for(&self, work: &Work) -> Option<Credentials> {
        match work.way() {
            Way::Stream { base: None, .. } => {
                let (node, secrets) = (self.config.name.clone(), Secrets::default());
                Some(Credentials { node, secrets })
            }
            Way::Stream { base: Some(_), .. } | Way::Commit { .. } => None,
        }
    }

    /// The work must stay what it is until all is recorded, so it is lent and not moved.
    fn finish_work(&self, work: &Work) -> Result<(), Error> {
        Ok(tokio::task::block_in_place(|| self.volumes.finish_work(work))?)
    }

    /// A workshop has the upper layer and what is below it open, and nothing else.
    fn height(&self, work: &Work) -> Height {
        let Site::Daemon(id) = work.site() else { return Height::Active };
        let active = self.volumes.layers_of_volume(id).first().copied();
        if active == Some(work.upper().id) { Height::Active } else { Height::Below }
    }

    /// Begins a job and follows it.
    async fn follow_job(
        &self,
        daemon: &Daemon,
        work: &Work,
        follow: Follow,
    ) -> Result<Ended, qsd::MonitorError> {
        if work.is_interrupted() {
            return Ok(Ended::Interrupted);
        }
        daemon.end_jobs().await?; // what is left of one that failed
        daemon.start_job(work.upper(), work.way(), self.height(work)).await?;
        crash::point("work-begun");
        let [mut pause, longest] = LOOKS;
        let mut pace = Pace::of(work);
        loop {
            let state = tokio::select! {
                () = sleep(pause) => daemon.job().await?,
                () = self.called_off(work) => daemon.cancel_job().await?,
            };
            pause = (pause * 2).min(longest);
            let state = match state {
                JobState::Pending => self.finalize(daemon, work).await?,
                other => other,
            };
            match state {
                JobState::Running { done, total } => {
                    work.progress().set(done, total);
                    pace = pace.keep(daemon, done).await;
                }
                JobState::Ready if follow == Follow::UntilReady => return Ok(Ended::Moved),
                JobState::Ready => daemon.complete_job().await?,
                JobState::Done => return Ok(Ended::Moved),
                JobState::Pending => {}
                JobState::Failed(reason) => {
                    self.put_back(daemon, work).await?;
                    if work.is_interrupted() || self.stop.is_cancelled() {
                        return Ok(Ended::Interrupted);
                    }
                    return Err(qsd::MonitorError::Refused { command: JOB, desc: reason });
                }
            }
        }
    }

    /// Has a job that has moved all change the graph, and what it moved made durable.
    async fn finalize(&self, daemon: &Daemon, work: &Work) -> Result<JobState, qsd::MonitorError> {
        let state = daemon.finalize_job().await?;
        if state == JobState::Done {
            let Left { changed, below, .. } = Left::by(work);
            daemon.reopen(&changed, below.as_ref(), Access::Write).await?;
        }
        Ok(state)
    }

    /// Ends a job that only follows writes, and leaves the daemon as it was before.
    async fn call_off(&self, daemon: &Daemon, work: &Work) -> Result<(), qsd::MonitorError> {
        daemon.cancel_job().await?;
        self.put_back(daemon, work).await
    }

    /// Leaves a daemon as it was before a job that came to nothing.
    async fn put_back(&self, daemon: &Daemon, work: &Work) -> Result<(), qsd::MonitorError> {
        daemon.dismiss_job().await?;
        if let Site::Daemon(_) = work.site() {
            let frozen = usize::from(self.height(work) == Height::Active);
            daemon.freeze(&work.layers()[frozen..]).await?;
        }
        Ok(())
    }

    async fn called_off(&self, work: &Work) {
        tokio::select! {
            () = work.interrupted() => {}
            () = self.stop.cancelled() => {}
        }
    }
}

/// How fast a copy with a limit goes on. While no driver looks, it keeps the speed that it had last.
enum Pace {
    /// As it was told at its begin.
    Steady,
    /// At its limit, or so much faster as nothing is to be copied for a second.
    Limited { ahead: Ahead, limit: u64, speed: u64 },
}

impl Pace {
    fn of(work: &Work) -> Self {
        let Way::Stream { base: None, bytes_per_second } = work.way() else { return Self::Steady };
        let limit = bytes_per_second.count();
        if limit == 0 {
            return Self::Steady;
        }
        match tokio::task::block_in_place(|| Ahead::of(work)) {
            Ok(ahead) => Self::Limited { ahead, limit, speed: limit },
            Err(error) => {
                debug!(error = %Chain(&error), "a copy does not know what is ahead of it");
                Self::Steady
            }
        }
    }

    /// Has a job that has come so far go on no faster than it may. Never as fast as would bring it
    /// beyond what is empty before the next look at it.
    async fn keep(self, daemon: &Daemon, done: u64) -> Self {
        let Self::Limited { mut ahead, limit, speed } = self else { return self };
        let free = tokio::task::block_in_place(|| ahead.nothing_for(done)).unwrap_or_default();
        let next = limit.max(free);
        // A job that has just ended refuses, and is as well without.
        if next != speed && daemon.set_job_speed(next).await.is_err() {
            return Self::Limited { ahead, limit, speed };
        }
        Self::Limited { ahead, limit, speed: next }
    }
}

/// What a daemon has open after work.
struct Left {
    /// Layers that it has no use for, from the top down.
    gone: Vec<Layer>,
    /// The layer that got what was moved.
    changed: Layer,
    /// What that stands on now.
    below: Option<Layer>,
}

impl Left {
    fn by(work: &Work) -> Self {
        let lower = work.layers().iter().skip(1);
        match work.way() {
            Way::Commit { into } => Self {
                gone: vec![work.upper().clone()],
                changed: into.clone(),
                below: work.layers().get(2).cloned(),
            },
            Way::Stream { base, .. } => {
                let is_gone = |layer: &&Layer| base.as_ref().is_none_or(|base| base.id != layer.id);
                Self {
                    gone: lower.take_while(is_gone).cloned().collect(),
                    changed: work.upper().clone(),
                    below: base.clone(),
                }
            }
        }
    }
}
