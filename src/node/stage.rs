//! Staging: the daemon of a volume is started, its export opened, and ended again.

use super::{
    Attached, Capability, Cause, Entrance, Error, Form, HostPath, Node, Service,
    attachment::{Attachment, Phase},
    image::Image,
};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    qsd::{self, Daemon},
    run::{DaemonKey, Slot},
    source::{Access, Secrets},
    volume::{Claim, Outcome, Passphrase, VolumeId},
};
use std::path::PathBuf;
use tracing::{info, warn};

/// How a volume is to be staged.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Where CSI wants to find it; nothing is put there in the vhost-user form.
    pub staging_path: HostPath,
    /// How it will be used.
    pub capability: Capability,
    /// What lets us in where its master is.
    pub secrets: Secrets,
    /// What opens its layers, where it is encrypted.
    pub passphrase: Option<Passphrase>,
}

impl Node {
    /// Stages a volume: afterwards a daemon serves it.
    ///
    /// A crash before the end leaves an attachment in phase `Staging`, which start-up takes back;
    /// a failure takes back at once.
    pub async fn stage(&self, claim: &Claim, stage: Stage) -> Result<Outcome, Error> {
        let id = claim.volume();
        self.volumes.find(id)?;
        let staging_path = stage.staging_path.clone();
        blocking(move || staging_path.require_directory()).await?;
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
        if is.capability() != stage.capability {
            let (is, asked) = (is.capability(), stage.capability);
            return Err(Error::StagedOtherwise { volume: id.clone(), is, asked });
        }
        self.require_same(id, stage.passphrase.as_ref())?;
        self.keep_secrets(id, &stage)?;
        let outcome = self.serve(claim).await?;
        let daemon = self.serving_daemon(id);
        if let (Some(daemon), Form::Filesystem { .. }) = (&daemon, &is.form) {
            // Or each program that looks at its device would wait for one that is stuck.
            daemon.answers().await.map_err(|error| Error::daemon(id)(error.into()))?;
        }
        let mounted = self.mount_staged(claim, is).await;
        self.blame(daemon.as_ref(), id, mounted).await?;
        Ok(outcome)
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
        let Capability { access, form, .. } = &stage.capability;
        if self.volumes.find(id)?.is_encrypted()
            && matches!(form, Form::Filesystem { .. })
            && access.access() == Access::Read
        {
            let (volume, access) = (id.clone(), access.as_str());
            return Err(Error::EncryptedForReaders { volume, access });
        }
        let dir = self.dir(id);
        // Of an attachment that nobody knows any more or that was to end: its directory may still
        // be published, so it stays, and what runs there is taken over or ended.
        let is_left_over = dir.exists();
        let staging_path = stage.staging_path.as_path().to_owned();
        let intent = Attachment::new(id.clone(), staging_path, stage.capability.clone());
        let steps = async {
            dir.create().map_err(Error::run(dir.path()))?;
            self.save(&intent)?;
            crash::point("node-stage-intent");
            self.keep_secrets(id, stage)?;
            self.interrupt(id).await;
            self.encrypt(claim, stage.passphrase.as_ref()).await?;
            let (daemon, image) = if is_left_over {
                (self.try_restart(id).await?.0, Image::Hidden)
            } else {
                let launch = self.launch(id, Slot::A)?;
                self.check_images(id).await?;
                let daemon = launch.start(&self.supervisor).await.map_err(Error::daemon(id))?;
                let image = self.begin_image(&intent, &daemon).await;
                (daemon, image)
            };
            crash::point("node-stage-daemon");
            self.lead_to(id, &daemon).await?;
            crash::point("node-stage-served");
            let mounted = self.mount_staged(claim, &intent).await;
            self.blame(Some(&daemon), id, mounted).await?;
            let staged = intent.in_phase(Phase::Staged);
            self.save(&staged)?;
            self.attached().insert(id.clone(), Attached { image, ..Attached::new(staged) });
            self.serves(id, daemon, Entrance::Staged);
            let Capability { access, form, .. } = &stage.capability;
            info!(volume = %id, access = access.as_str(), %form, "volume staged");
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
            // One whose record cannot be read is ended all the same; else there is nothing.
            let is_left_over = self.dir(id).exists();
            self.clear(id).await?;
            return Ok(if is_left_over { Outcome::Done } else { Outcome::AlreadySo });
        };
        if attachment.staging_path != staging_path.as_path() {
            return Ok(Outcome::AlreadySo);
        }
        if let Some(target) = self.still_published(&attachment).await? {
            return Err(Error::Published { volume: id.clone(), target });
        }
        self.note_leaving(attachment.in_phase(Phase::Unstaging))?;
        crash::point("node-unstage-intent");
        self.interrupt(id).await;
        self.let_go(id).await?;
        crash::point("node-unstage-relay");
        if let Service::Up(daemon) = service {
            daemon.stop(&self.supervisor).await?;
            info!(volume = %id, pid = daemon.pid(), reason = "unstaged", "daemon ended");
        }
        crash::point("node-unstage-stopped");
        self.remove_part(id).await?;
        self.attached().remove(id);
        self.nudge(); // what was in use may be merged now
        info!(volume = %id, "volume unstaged");
        Ok(Outcome::Done)
    }

    /// A target at which the volume is really mounted. One that was only noted, by a call that
    /// died or found something else there, does not count.
    async fn still_published(&self, attachment: &Attachment) -> Result<Option<PathBuf>, Error> {
        for target in &attachment.targets {
            if self.is_bound(attachment, HostPath::noted(target.clone())).await? {
                return Ok(Some(target.clone()));
            }
        }
        Ok(None)
    }

    /// Ends whatever still serves the volume, and removes its part of the run directory.
    pub(super) async fn clear(&self, id: &VolumeId) -> Result<(), Error> {
        if self.dir(id).exists() {
            self.let_go(id).await?;
            self.remove_part(id).await?;
        }
        Ok(())
    }

    /// Has nobody use the volume any more. What is mounted is written first, so the daemon is there
    /// for that.
    pub(super) async fn let_go(&self, id: &VolumeId) -> Result<(), Error> {
        if let Some(attachment) = self.noted(id) {
            self.unmount_staged(&attachment).await?;
        }
        self.lead_no_more(id).await
    }

    /// Ends the daemons of a volume that nobody uses, and removes its part of the run directory.
    async fn remove_part(&self, id: &VolumeId) -> Result<(), Error> {
        self.clear_readers(id).await?;
        for slot in Slot::ALL {
            let key = DaemonKey { volume: id.run_key(), slot };
            self.supervisor.kill(&key).await?;
        }
        let dir = self.dir(id);
        dir.remove().map_err(Error::run(dir.path()))
    }

    /// An error unless the images of a volume are what the records say: a daemon would serve what a
    /// header leads to.
    async fn check_images(&self, id: &VolumeId) -> Result<(), Error> {
        let volume = self.volumes.find(id)?;
        Ok(blocking(move || volume.check()).await?)
    }

    /// Serves an attachment again, on the same paths: takes over the daemon that runs, or starts
    /// another.
    ///
    /// A daemon that runs but cannot be taken over is left alone while the volume is published,
    /// since a VM may be at work on it.
    pub(super) async fn restart(&self, claim: &Claim) -> Result<(), Error> {
        let id = claim.volume();
        match self.try_restart(id).await {
            Ok((daemon, outcome)) => {
                let entrance = match outcome {
                    Outcome::Done => Entrance::Again,
                    Outcome::AlreadySo => Entrance::TakenOver,
                };
                self.serves(id, daemon, entrance);
                self.settle_image_if_can_be(id).await;
                Ok(())
            }
            Err(error) => {
                if let Some(one) = self.attached().get_mut(id) {
                    one.service = Service::Down { reason: Chain(&error).to_string() };
                }
                Err(error)
            }
        }
    }

    /// The same where a VM waits for it: an attempt that fails is followed by others.
    pub(super) async fn restart_for_sure(&self, claim: &Claim) -> Result<(), Error> {
        let outcome = self.restart(claim).await;
        if outcome.is_err() {
            self.revive_later(claim.volume());
        }
        outcome
    }

    async fn try_restart(&self, id: &VolumeId) -> Result<(Daemon, Outcome), Error> {
        let key = self.serving(id);
        let running = self.running().await?;
        self.end_other(&key, &running).await?;
        self.interrupt(id).await;
        let launch = self.launch(id, key.slot)?;
        if let Some(pid) = running.get(&key) {
            let published = self.find(id).is_some_and(|one| !one.attachment.targets.is_empty());
            match launch.adopt(*pid).await {
                Ok(daemon) => {
                    self.lead_to(id, &daemon).await?;
                    return Ok((daemon, Outcome::AlreadySo));
                }
                Err(qsd::Error::Outdated { what, .. }) => {
                    // What it has acknowledged is on disk, or is flushed as it ends.
                    self.gives_up(id, *pid, Cause::Outdated, &what);
                    self.supervisor.terminate(&key, qsd::FLUSH).await?;
                }
                Err(error) if published => return Err(Error::daemon(id)(error)),
                Err(error) => {
                    self.gives_up(id, *pid, Cause::Doubtful, &Chain(&error).to_string());
                }
            }
        }
        self.supervisor.kill(&key).await?;
        self.check_images(id).await?;
        let launch = launch.afresh(|| self.dir(id).next_disk());
        let daemon = launch.start(&self.supervisor).await.map_err(Error::daemon(id))?;
        self.lead_to(id, &daemon).await?;
        Ok((daemon, Outcome::Done))
    }
}
