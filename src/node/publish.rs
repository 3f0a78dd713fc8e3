//! Publishing: what is staged is bound onto targets (`local`).

use super::{
    Attached, Capability, Error, Form, HostPath, Node,
    attachment::{Attachment, Phase},
    host::{Bound, Error as HostError, Target},
};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    source::Access,
    volume::{Claim, Outcome, VolumeId},
};
use tracing::{info, warn};

/// How a volume is to be published.
#[derive(Clone, Debug)]
pub struct Publish {
    /// Where it is staged.
    pub staging_path: HostPath,
    /// Where it is to appear.
    pub target: HostPath,
    /// How it will be used.
    pub capability: Capability,
    /// What will be done with it there.
    pub access: Access,
}

impl Node {
    /// Publishes a staged volume at a target.
    ///
    /// The target is noted before it is mounted: a crash in between leaves an empty directory that
    /// a repeat, or the unpublishing, finds.
    pub async fn publish(&self, claim: &Claim, publish: &Publish) -> Result<Outcome, Error> {
        let id = claim.volume();
        self.volumes.find(id)?;
        let attachment = self.staged(claim, &publish.staging_path)?;
        let target = publish.target.as_path();
        publish.target.require_other_than(&publish.staging_path)?;
        publish.target.require_outside(self.config.run.path())?;
        self.volumes.pool_dirs().try_for_each(|pool| publish.target.require_outside(pool))?;
        let known = attachment.targets.iter().any(|other| other == target);
        let (volume, is, asked) = (id.clone(), attachment.capability(), publish.capability.clone());
        match attachment.targets.first() {
            _ if known && is != asked => {
                return Err(Error::PublishedOtherwise { volume, is, asked });
            }
            _ if known && attachment.access_at(target) != publish.access => {
                let (target, asked) = (target.to_owned(), publish.access);
                return Err(Error::PublishedForOther { volume, target, asked });
            }
            Some(other) if !known && !asked.access.is_for_several() => {
                return Err(Error::Published { volume, target: other.clone() });
            }
            _ if is != asked => return Err(Error::NotStagedFor { volume, is, asked }),
            Some(_) | None => {}
        }
        let writes = is.access.access() == Access::Write;
        if is.form == Form::Block && writes && publish.access == Access::Read {
            return Err(Error::WritableDevice { volume, is });
        }
        let intended = attachment.with_target(target, publish.access);
        let whose = if known { Target::Noted } else { Target::New };
        self.note(intended.clone())?;
        crash::point("node-publish-intent");
        let daemon = self.serving_daemon(id);
        let bound = async {
            self.settle_image(id).await?;
            self.bind(&intended, &publish.target, whose).await
        };
        let bound = self.blame(daemon.as_ref(), id, bound.await).await;
        if bound.is_err() && !known {
            if let Err(error) = self.close_reader(id, target).await {
                warn!(volume = %id, error = %Chain(&error), "taking back a publishing");
            }
            // Nothing of ours is there: the target is somebody else's.
            self.forget_target(claim, &publish.target)?;
            self.leave_image(id);
        }
        crash::point("node-publish-done");
        if bound? == Bound::Already {
            return Ok(Outcome::AlreadySo);
        }
        info!(volume = %id, target_path = %target.display(), "volume published");
        Ok(Outcome::Done)
    }

    /// Takes a volume away from a target, and removes the target. Not published there is fine.
    ///
    /// The target is forgotten after it is gone: a crash in between is found by the repeat.
    pub async fn unpublish(&self, claim: &Claim, target: &HostPath) -> Result<Outcome, Error> {
        let id = claim.volume();
        let unbound = self.unbind(id, &self.form_at(id, target).await?, target).await;
        let obstacle = match unbound {
            Ok(()) => None,
            // Something else is there, so we are not.
            Err(Error::Host(
                error @ (HostError::Malformed { .. } | HostError::Unsuitable { .. }),
            )) => Some(error),
            // It may still be ours.
            Err(error) => return Err(error),
        };
        crash::point("node-unpublish-removed");
        self.close_reader(id, target.as_path()).await?;
        let forgotten = self.forget_target(claim, target)?;
        self.leave_image(id);
        if let Some(error) = obstacle {
            return Err(error.into());
        }
        if forgotten == Outcome::Done {
            info!(volume = %id, target_path = %target.as_path().display(), "volume unpublished");
        }
        Ok(forgotten)
    }

    /// The form in which the volume is at a target: of one that nobody knows, by what is there.
    async fn form_at(&self, id: &VolumeId, target: &HostPath) -> Result<Form, Error> {
        if let Some(attached) = self.find(id) {
            return Ok(attached.attachment.form);
        }
        let target = target.clone();
        let is_directory = blocking(move || target.is_directory()).await?;
        Ok(if is_directory { Form::VhostUser } else { Form::Block })
    }

    fn forget_target(&self, claim: &Claim, target: &HostPath) -> Result<Outcome, Error> {
        let id = claim.volume();
        let Some(Attached { attachment, .. }) = self.find(id) else {
            return Ok(Outcome::AlreadySo);
        };
        let next = attachment.without_target(target.as_path());
        if next == attachment {
            return Ok(Outcome::AlreadySo);
        }
        self.note_leaving(next)?;
        Ok(Outcome::Done)
    }

    /// The attachment that this call is about.
    fn staged(&self, claim: &Claim, staging_path: &HostPath) -> Result<Attachment, Error> {
        let (id, path) = (claim.volume(), staging_path.as_path());
        let attachment = self.find(id).map(|attached| attached.attachment);
        let staged =
            attachment.filter(|one| one.phase == Phase::Staged && one.staging_path == path);
        staged.ok_or_else(|| Error::NotStaged { volume: id.clone(), path: path.to_owned() })
    }
}
