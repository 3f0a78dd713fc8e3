//! Publishing in the vhost-user form: the directory with `vhost.sock`, bound onto the target.

use super::{Attached, Error, HostPath, Node, attachment::Phase, host::Bound};
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
        let Attached { attachment, .. } = self.staged(claim, publish)?;
        let target = publish.target.as_path();
        publish.target.require_outside(self.config.run.path())?;
        let known = attachment.targets.iter().any(|other| other == target);
        let shared = publish.access == AccessMode::SingleNodeMultiWriter;
        if let Some(other) = attachment.targets.first()
            && !known
            && !shared
        {
            return Err(Error::Published { volume: id.clone(), target: other.clone() });
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
        target.unbind(&id.run_key())?;
        crash::point("node-unpublish-removed");
        self.forget_target(claim, target)
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
        self.note(next)?;
        info!(volume = %id, target_path = %target.as_path().display(), "unpublished");
        Ok(Outcome::Done)
    }

    /// The attachment that this call is about.
    fn staged(&self, claim: &Claim, publish: &Publish) -> Result<Attached, Error> {
        let (id, path) = (claim.volume(), publish.staging_path.as_path());
        let staged = self.find(id).filter(|Attached { attachment, .. }| {
            attachment.phase == Phase::Staged && attachment.staging_path == path
        });
        let Some(attached) = staged else {
            return Err(Error::NotStaged { volume: id.clone(), path: path.to_owned() });
        };
        let (is, asked) = (attached.attachment.access, publish.access);
        if is != asked {
            return Err(Error::StagedOtherwise { volume: id.clone(), is, asked });
        }
        Ok(attached)
    }
}
