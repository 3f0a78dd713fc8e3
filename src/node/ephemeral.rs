//! Ephemeral volumes: made when a pod is, and gone with it. One call publishes them, and one takes
//! them away.
//!
//! ```text
//! publish:    create -- stage -- publish
//! unpublish:  unpublish -- unstage -- delete
//! ```
//!
//! Each step is one of a persistent volume, with its records. The record of the volume says from
//! the first step on that it goes with its pod: after a crash a repeat of either call goes on from
//! what it finds, and after a reboot the second one finds the volume alone.

use super::{Capability, Error, HostPath, Node, Publish, Stage};
use crate::{
    chain::Chain,
    crash,
    source::{Access, Secrets},
    volume::{Claim, Lifecycle, NewVolume, Outcome, VolumeId},
};
use std::{fs, io, os::unix::fs::DirBuilderExt as _, sync::Arc};
use tracing::{info, warn};

/// A volume that goes with a pod.
#[derive(Clone, Debug)]
pub struct Inline {
    /// What it is to be.
    pub new: NewVolume,
    /// What lets us in where its master is.
    pub secrets: Secrets,
    /// Where it is to appear.
    pub target: HostPath,
    /// How it will be used.
    pub capability: Capability,
    /// Whether it may be written to.
    pub access: Access,
}

impl Node {
    /// Makes a volume for a pod, and publishes it. What fails leaves nothing of a volume that was
    /// not there before; one that was may be that of a pod which is started again.
    pub async fn publish_inline(&self, claim: Arc<Claim>, inline: Inline) -> Result<(), Error> {
        let Inline { new, secrets, target, capability, access } = inline;
        let open = Publish {
            staging_path: self.inline_staging(claim.volume()),
            target,
            capability,
            access,
        };
        let (volume, created) = self.create(claim.clone(), new, secrets.clone()).await?;
        if created == Outcome::Done {
            let (size, pool) = (volume.size(), volume.pool());
            info!(volume = %volume.id(), %size, %pool, reason = "a pod needs it", "volume created");
        }
        crash::point("ephemeral-created");
        let published = self.open_inline(&claim, secrets, open).await;
        if published.is_err()
            && created == Outcome::Done
            && let Err(error) = self.end_inline(claim.clone()).await
        {
            warn!(volume = %claim.volume(), error = %Chain(&error), "taking back a volume of a pod");
        }
        published
    }

    async fn open_inline(
        &self,
        claim: &Claim,
        secrets: Secrets,
        publish: Publish,
    ) -> Result<(), Error> {
        let (staging_path, capability) = (publish.staging_path.clone(), publish.capability.clone());
        let made = fs::DirBuilder::new().mode(0o700).create(staging_path.as_path());
        made.or_else(unless(io::ErrorKind::AlreadyExists))
            .map_err(Error::run(staging_path.as_path()))?;
        let passphrase = None; // none is encrypted
        self.stage(claim, Stage { staging_path, capability, secrets, passphrase }).await?;
        crash::point("ephemeral-staged");
        self.serve(claim).await?;
        self.publish(claim, &publish).await.map(drop)
    }

    /// Takes a volume away from a target, and one that goes with its pod altogether.
    pub async fn leave(&self, claim: Arc<Claim>, target: &HostPath) -> Result<(), Error> {
        let is_inline = |volume: crate::volume::Volume| volume.lifecycle() == Lifecycle::Ephemeral;
        let is_inline = self.volumes.find(claim.volume()).is_ok_and(is_inline);
        self.unpublish(&claim, target).await?;
        if !is_inline {
            return Ok(());
        }
        crash::point("ephemeral-unpublished");
        let elsewhere = self.find(claim.volume()).map(|one| one.attachment.targets);
        if elsewhere.is_none_or(|targets| targets.is_empty()) {
            self.end_inline(claim).await?;
        }
        Ok(())
    }

    async fn end_inline(&self, claim: Arc<Claim>) -> Result<(), Error> {
        let id = claim.volume().clone();
        let staging_path = self.inline_staging(&id);
        self.unstage(&claim, &staging_path).await?;
        fs::remove_dir(staging_path.as_path())
            .or_else(unless(io::ErrorKind::NotFound))
            .map_err(Error::run(staging_path.as_path()))?;
        crash::point("ephemeral-unstaged");
        if self.delete(claim).await? == Outcome::Done {
            info!(volume = %id, reason = "its pod is gone", "volume deleted");
        }
        Ok(())
    }

    /// Where a volume of a pod is staged: nobody else says where.
    fn inline_staging(&self, id: &VolumeId) -> HostPath {
        HostPath::noted(self.config.run.staging(&id.run_key()))
    }
}

/// An error, unless it is of this kind.
fn unless(kind: io::ErrorKind) -> impl FnOnce(io::Error) -> io::Result<()> {
    move |error| if error.kind() == kind { Ok(()) } else { Err(error) }
}
