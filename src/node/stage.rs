//! Staging: the daemon of a volume is started, its export opened, and ended again.

use super::{
    Attached, Error, HostPath, Node, Service,
    attachment::{Attachment, Phase},
};
use crate::{
    chain::Chain,
    crash,
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
        let Some(attached) = self.find(id) else {
            self.stage_afresh(claim, &stage).await?;
            return Ok(Outcome::Done);
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
        match attached.service {
            Service::Up(_) => Ok(Outcome::AlreadySo),
            Service::Down { .. } => {
                self.restart(claim).await?;
                Ok(Outcome::Done)
            }
        }
    }

    async fn stage_afresh(&self, claim: &Claim, stage: &Stage) -> Result<(), Error> {
        let id = claim.volume();
        let dir = self.dir(id);
        if dir.exists() {
            // Of an attachment nobody knows any more; whatever runs there holds the lock.
            self.clear(id).await?;
        }
        let staging_path = stage.staging_path.as_path().to_owned();
        let intent = Attachment::new(id.clone(), staging_path, stage.access);
        let steps = async {
            dir.create().map_err(Error::run(dir.path()))?;
            self.save(&intent)?;
            crash::point("node-stage-intent");
            let daemon = self.launch(id)?.start(&self.supervisor).await;
            let daemon = daemon.map_err(Error::daemon(id))?;
            crash::point("node-stage-served");
            info!(volume = %id, pid = daemon.pid(), version = daemon.version(), "staged");
            let attached = Attached::new(intent.in_phase(Phase::Staged), Service::Up(daemon));
            self.save(&attached.attachment)?;
            self.attached().insert(id.clone(), attached);
            Ok(())
        };
        let outcome = steps.await;
        if outcome.is_err()
            && let Err(error) = self.clear(id).await
        {
            warn!(volume = %id, error = %Chain(&error), "taking back a staging");
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

    /// Starts the daemon of an attachment again, on the same paths.
    pub(super) async fn restart(&self, claim: &Claim) -> Result<(), Error> {
        let id = claim.volume();
        self.supervisor.kill(&id.run_key()).await?;
        let launch = self.launch(id)?;
        let outcome = launch.start(&self.supervisor).await.map_err(Error::daemon(id));
        let mut attached = self.attached();
        let Some(one) = attached.get_mut(id) else { return outcome.map(drop) };
        match outcome {
            Ok(daemon) => {
                one.restarts += 1;
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
}
