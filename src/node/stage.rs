//! Staging: the daemon of a volume is started, its export opened, and ended again.

use super::{
    Attached, Error, HostPath, Node, Service,
    attachment::{Attachment, Phase},
};
use crate::{
    chain::Chain,
    crash,
    qsd::Daemon,
    volume::{AccessMode, Claim, Outcome, VolumeId},
};
use tracing::{info, warn};

/// How a volume is to be staged.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Where CSI wants to find it; nothing is put there in the vhost-user form.
    pub staging_path: HostPath,
    /// How it will be used.
    pub access: AccessMode,
}

impl Node {
    /// Stages a volume: afterwards a daemon serves it.
    ///
    /// A crash before the end leaves an attachment in phase `Staging`, which start-up takes back;
    /// a failure takes back at once.
    pub async fn stage(&self, claim: &Claim, stage: Stage) -> Result<Outcome, Error> {
        let id = claim.volume();
        self.volumes.find(id)?;
        stage.staging_path.require_directory()?;
        let attached = match self.find(id) {
            Some(attached) if attached.attachment.phase == Phase::Staged => attached,
            // Nothing, or an unstaging that broke off, which staging afresh finishes.
            Some(_) | None => {
                self.stage_afresh(claim, &stage).await?;
                return Ok(Outcome::Done);
            }
        };
        let is = &attached.attachment;
        if is.staging_path != stage.staging_path.as_path() {
            let path = is.staging_path.clone();
            return Err(Error::StagedElsewhere { volume: id.clone(), path });
        }
        if is.access != stage.access {
            let (is, asked) = (is.access, stage.access);
            return Err(Error::StagedOtherwise { volume: id.clone(), is, asked });
        }
        self.serve(claim).await
    }

    /// Sees to it that a staged volume is served.
    pub async fn serve(&self, claim: &Claim) -> Result<Outcome, Error> {
        match self.find(claim.volume()).map(|attached| attached.service) {
            Some(Service::Down { .. }) => self.restart(claim).await.map(|()| Outcome::Done),
            Some(Service::Up(_)) | None => Ok(Outcome::AlreadySo),
        }
    }

    async fn stage_afresh(&self, claim: &Claim, stage: &Stage) -> Result<(), Error> {
        let id = claim.volume();
        let dir = self.dir(id);
        // Of an attachment that nobody knows any more or that was to end: its directory may still
        // be published, so it stays, and what runs there is taken over or ended.
        let is_left_over = dir.exists();
        let staging_path = stage.staging_path.as_path().to_owned();
        let intent = Attachment::new(id.clone(), staging_path, stage.access);
        let steps = async {
            dir.create().map_err(Error::run(dir.path()))?;
            self.save(&intent)?;
            crash::point("node-stage-intent");
            let daemon = if is_left_over {
                self.try_restart(id).await?.0
            } else {
                let daemon = self.launch(id)?.start(&self.supervisor).await;
                daemon.map_err(Error::daemon(id))?
            };
            crash::point("node-stage-served");
            info!(volume = %id, pid = daemon.pid(), version = daemon.version(), "staged");
            let attached = Attached::new(intent.in_phase(Phase::Staged), Service::Up(daemon));
            self.save(&attached.attachment)?;
            self.attached().insert(id.clone(), attached);
            Ok(())
        };
        let outcome = steps.await;
        if outcome.is_err() {
            self.attached().remove(id);
            if let Err(error) = self.clear(id).await {
                warn!(volume = %id, error = %Chain(&error), "taking back a staging");
            }
        }
        crash::point("node-stage-done");
        outcome
    }

    /// Unstages a volume: afterwards nothing serves it. Not staged, or not there, is fine.
    ///
    /// Once the intent is recorded there is no way back: a crash after it is driven on at
    /// start-up, a failure by the next call.
    pub async fn unstage(&self, claim: &Claim, staging_path: &HostPath) -> Result<Outcome, Error> {
        let id = claim.volume();
        let Some(Attached { attachment, service, .. }) = self.find(id) else {
            return Ok(Outcome::AlreadySo);
        };
        if attachment.staging_path != staging_path.as_path() {
            return Ok(Outcome::AlreadySo);
        }
        if let Some(target) = attachment.targets.first() {
            return Err(Error::Published { volume: id.clone(), target: target.clone() });
        }
        self.note(attachment.in_phase(Phase::Unstaging))?;
        crash::point("node-unstage-intent");
        if let Service::Up(daemon) = service {
            daemon.stop(&id.run_key(), &self.supervisor).await?;
        }
        crash::point("node-unstage-stopped");
        self.clear(id).await?;
        self.attached().remove(id);
        info!(volume = %id, "unstaged");
        Ok(Outcome::Done)
    }

    /// Ends whatever still serves the volume, and removes its part of the run directory.
    pub(super) async fn clear(&self, id: &VolumeId) -> Result<(), Error> {
        let key = id.run_key();
        self.supervisor.kill(&key).await?;
        let dir = self.config.run.volume(&key);
        dir.remove().map_err(Error::run(dir.path()))
    }

    /// Serves an attachment again, on the same paths: takes over the daemon that runs, or starts
    /// another.
    ///
    /// A daemon that runs but cannot be taken over is left alone while the volume is published,
    /// since a VM may be at work on it.
    pub(super) async fn restart(&self, claim: &Claim) -> Result<(), Error> {
        let id = claim.volume();
        let outcome = self.try_restart(id).await;
        let mut attached = self.attached();
        let Some(one) = attached.get_mut(id) else { return outcome.map(drop) };
        match outcome {
            Ok((daemon, new)) => {
                one.restarts += u64::from(new == Outcome::Done);
                info!(volume = %id, pid = daemon.pid(), restarts = one.restarts, "served again");
                one.service = Service::Up(daemon);
                Ok(())
            }
            Err(error) => {
                one.service = Service::Down { reason: Chain(&error).to_string() };
                Err(error)
            }
        }
    }

    async fn try_restart(&self, id: &VolumeId) -> Result<(Daemon, Outcome), Error> {
        let (key, launch) = (id.run_key(), self.launch(id)?);
        if let Some(pid) = self.running().await?.get(&key) {
            let published = self.find(id).is_some_and(|one| !one.attachment.targets.is_empty());
            match launch.adopt(*pid).await {
                Ok(daemon) => return Ok((daemon, Outcome::AlreadySo)),
                Err(error) if published => return Err(Error::daemon(id)(error)),
                Err(error) => warn!(volume = %id, pid, error = %Chain(&error), "killing a daemon"),
            }
        }
        self.supervisor.kill(&key).await?;
        let daemon = launch.start(&self.supervisor).await.map_err(Error::daemon(id))?;
        Ok((daemon, Outcome::Done))
    }
}
