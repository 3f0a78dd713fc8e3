//! Changes to a volume that is there: its size and its limits, also while a VM uses it.

use super::{Cause, Error, Node};
use crate::{
    blocking::blocking,
    chain::Chain,
    qsd::{self, Daemon},
    source::Access,
    units::Bytes,
    volume::{Claim, Outcome, SizeRange, Volume, VolumeId},
};
use std::{collections::BTreeMap, sync::Arc};
use tracing::{info, warn};

impl Node {
    /// Expands a volume. One that is as large already is fine; none shrinks.
    pub async fn expand(
        &self,
        claim: Arc<Claim>,
        range: SizeRange,
    ) -> Result<(Volume, Outcome), Error> {
        let id = claim.volume();
        if !range.accepts(self.volumes.find(id)?.size()) {
            self.refuse_only_read(id)?;
        }
        self.interrupt(id).await; // the end of a merge replaces the record of the layer, too
        let (volumes, of) = (self.volumes.clone(), claim.clone());
        let intended = blocking(move || volumes.intend_expansion(&of, range)).await?;
        let Some(size) = intended else {
            return Ok((self.volumes.find(id)?, Outcome::AlreadySo));
        };
        Ok((self.carry_out_expansion(claim, size).await?, Outcome::Done))
    }

    /// Expands a volume where it is used: also its file system, if it has one here.
    pub async fn expand_here(&self, claim: Arc<Claim>, range: SizeRange) -> Result<Volume, Error> {
        let (volume, _) = self.expand(claim, range).await?;
        let daemon = self.serving_daemon(volume.id());
        let grown = self.grow_filesystem(volume.id()).await;
        self.blame(daemon.as_ref(), volume.id(), grown).await?;
        Ok(volume)
    }

    /// Drives on the expansions that broke off. Who claims such a volume first does so himself, or
    /// changes nothing of its layers.
    pub(super) async fn resume_expansions(self) {
        for id in self.volumes.broken_off_expansions() {
            let Ok(claim) = self.claims.claim_briefly(&id) else { continue };
            if let Err(error) = self.resume_expansion(&Arc::new(claim)).await {
                warn!(volume = %id, error = %Chain(&error), "an expansion that broke off");
            }
        }
    }

    /// Drives on an expansion that broke off, if there is one: what is frozen has the size that is
    /// recorded of it.
    pub(super) async fn resume_expansion(&self, claim: &Arc<Claim>) -> Result<(), Error> {
        if let Some(size) = self.volumes.find(claim.volume())?.grows_to() {
            self.carry_out_expansion(claim.clone(), size).await?;
        }
        Ok(())
    }

    /// Gives a volume the size that was decided on.
    async fn carry_out_expansion(&self, claim: Arc<Claim>, size: Bytes) -> Result<Volume, Error> {
        let id = claim.volume();
        self.interrupt(id).await;
        match self.served(&claim).await? {
            Some(daemon) => self.grow_served(&claim, &daemon, size).await?,
            None => self.grow_image(&claim).await?,
        }
        let (volumes, of) = (self.volumes.clone(), claim.clone());
        let volume = blocking(move || volumes.finish_expansion(&of)).await?;
        info!(volume = %id, %size, "volume expanded");
        self.nudge();
        Ok(volume)
    }

    async fn grow_image(&self, claim: &Arc<Claim>) -> Result<(), Error> {
        let (volumes, of) = (self.volumes.clone(), claim.clone());
        Ok(blocking(move || volumes.grow_image(&of)).await?)
    }

    /// A guest that is connected sees the new size; where there is none, the daemon must not be
    /// told (facts/kubevirt.md section 0.7), so it makes way for one that opens the larger image.
    async fn grow_served(
        &self,
        claim: &Arc<Claim>,
        daemon: &Daemon,
        size: Bytes,
    ) -> Result<(), Error> {
        let id = claim.volume();
        self.refuse_only_read(id)?;
        // A file grows in place, and whoever has it open would not survive another daemon.
        if !self.form(id).is_relayed() {
            let grown = daemon.resize(size).await;
            grown.map_err(|error| Error::daemon(id)(error.into()))?;
            let grown = self.grow_device(id, size).await;
            return self.blame(Some(daemon), id, grown).await;
        }
        self.make_way(id, daemon).await?;
        if self.has_guest(id).await {
            match self.resize(id, daemon, size).await {
                Ok(()) => {
                    self.settle_image_if_can_be(id).await;
                    return Ok(());
                }
                Err(error) => {
                    let error = Error::daemon(id)(error.into());
                    warn!(volume = %id, error = %Chain(&error), "resizing");
                }
            }
        }
        self.gives_up(id, daemon.pid(), Cause::Resized, "");
        daemon.stop(&self.supervisor).await?;
        let grown = self.grow_image(claim).await;
        self.restart_for_sure(claim).await?;
        grown
    }

    /// Gives a disk that a guest has another size. No export may be there to which none was ever
    /// connected, so those of readers without one make way meanwhile.
    async fn resize(
        &self,
        id: &VolumeId,
        daemon: &Daemon,
        size: Bytes,
    ) -> Result<(), qsd::MonitorError> {
        let readers = self.find(id).map(|one| self.readers(&one.attachment)).unwrap_or_default();
        let relayed = self.relayed().await;
        let has_guest = |reader: &&qsd::Reader| {
            relayed.get(&reader.key).is_some_and(|one| one.front_end.is_some())
        };
        let used: Vec<_> = readers.iter().filter(has_guest).cloned().collect();
        daemon.set_readers(&used).await?;
        daemon.resize(size).await?;
        daemon.set_readers(&readers).await
    }

    /// An error where a volume is staged to be read: its layers are open so.
    fn refuse_only_read(&self, id: &VolumeId) -> Result<(), Error> {
        let Some(one) = self.find(id) else { return Ok(()) };
        match one.attachment.access.access() {
            Access::Write => Ok(()),
            Access::Read => {
                let (volume, is) = (id.clone(), one.attachment.capability());
                Err(Error::OnlyRead { volume, is })
            }
        }
    }

    pub(super) async fn has_guest(&self, id: &VolumeId) -> bool {
        self.relay.look_at(&id.run_key()).await.is_some_and(|one| one.front_end.is_some())
    }

    /// Changes the limits of a volume: those that are named, all of them or none.
    pub async fn modify(
        &self,
        claim: &Claim,
        changes: &BTreeMap<String, String>,
    ) -> Result<Outcome, Error> {
        let id = claim.volume();
        let before = self.volumes.find(id)?.throttle().clone();
        let after = before.with(changes)?;
        if before == after {
            return Ok(Outcome::AlreadySo);
        }
        self.volumes.set_throttle(claim, after.clone())?;
        if let Some(daemon) = self.serving_daemon(id)
            && let Err(error) = daemon.set_throttle(&after).await
        {
            // What a daemon that does not answer would still do, the record of the limits undoes
            // when it is taken over or replaced.
            let taken_back = self.volumes.set_throttle(claim, before);
            let error = Error::daemon(id)(error.into());
            _ = self.replace_doubtful(claim, &daemon, &error).await;
            taken_back?;
            return Err(error);
        }
        info!(volume = %id, limits = ?after.limits().collect::<Vec<_>>(), "volume modified");
        Ok(Outcome::Done)
    }
}
