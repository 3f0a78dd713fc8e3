//! Publishing in the vhost-user form: the directory with `vhost.sock`, bound onto the target.

use super::{
    Attached, Error, HostPath, Node,
    attachment::{Attachment, Phase},
    host::{Bound, Error as HostError},
};
use crate::{
    crash,
    volume::{AccessMode, Claim, Outcome},
};
use tracing::info;

/// How a volume is to be published.
#[derive(Clone, Debug)]
pub struct Publish {
    /// Where it is staged.
    pub staging_path: HostPath,
    /// Where it is to appear.
    pub target: HostPath,
    /// How it will be used.
    pub access: AccessMode,
}

impl Node {
    /// Publishes a staged volume at a target.
    ///
    /// The target is noted before it is mounted: a crash in between leaves an empty directory that
    /// a repeat, or the unpublishing, finds.
    pub fn publish(&self, claim: &Claim, publish: &Publish) -> Result<Outcome, Error> {
        let id = claim.volume();
        self.volumes.find(id)?;
        let attachment = self.staged(claim, &publish.staging_path)?;
        let target = publish.target.as_path();
        publish.target.require_other_than(&publish.staging_path)?;
        publish.target.require_outside(self.config.run.path())?;
        self.volumes.pool_dirs().try_for_each(|pool| publish.target.require_outside(pool))?;
        let known = attachment.targets.iter().any(|other| other == target);
        let (volume, is, asked) = (id.clone(), attachment.access, publish.access);
        match attachment.targets.first() {
            _ if known && is != asked => {
                return Err(Error::PublishedOtherwise { volume, is, asked });
            }
            Some(other) if !known && asked != AccessMode::SingleNodeMultiWriter => {
                return Err(Error::Published { volume, target: other.clone() });
            }
            _ if is != asked => return Err(Error::NotStagedFor { volume, is, asked }),
            Some(_) | None => {}
        }
        self.note(attachment.with_target(target))?;
        crash::point("node-publish-intent");
        let bound = publish.target.bind(&self.dir(id).export(), &id.run_key());
        if bound.is_err() && !known {
            // Nothing of ours is there: the target is somebody else's.
            self.forget_target(claim, &publish.target)?;
        }
        crash::point("node-publish-done");
        if bound? == Bound::Already {
            return Ok(Outcome::AlreadySo);
        }
        info!(volume = %id, target_path = %target.display(), "published");
        Ok(Outcome::Done)
    }

    /// Takes a volume away from a target, and removes the target. Not published there is fine.
    ///
    /// The target is forgotten after it is gone: a crash in between is found by the repeat.
    pub fn unpublish(&self, claim: &Claim, target: &HostPath) -> Result<Outcome, Error> {
        let id = claim.volume();
        let obstacle = match target.unbind(&id.run_key()) {
            Ok(()) => None,
            // It may still be ours.
            Err(error @ HostError::Io { .. }) => return Err(error.into()),
            // Something else is there, so we are not.
            Err(error @ (HostError::Malformed { .. } | HostError::Unsuitable { .. })) => {
                Some(error)
            }
        };
        crash::point("node-unpublish-removed");
        let forgotten = self.forget_target(claim, target)?;
        obstacle.map_or(Ok(forgotten), |error| Err(error.into()))
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
        info!(volume = %id, target_path = %target.as_path().display(), "unpublished");
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
