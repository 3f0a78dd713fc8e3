//! Snapshots, clones, and the end of volumes: what freezes or removes layers, also of a volume that
//! a VM is writing to.
//!
//! ```text
//! domain: intent, empty overlay      domain: the volume stands on it
//!         |                                   |
//! daemon: overlay opened  -------------------------> overlay put on: writes go there
//! ```
//!
//! What the daemon does not do as told, the next one does: it is built from the records.

use super::{Cause, Error, Node, Service};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    qsd::{self, Daemon, Outlet},
    relay,
    source::Secrets,
    volume::{
        Begun, Claim, Content, Format, Freeze, Layer, NewSnapshot, NewVolume, Outcome, QUIET,
        Snapshot, SnapshotId, Volume, VolumeId,
    },
};
use std::sync::Arc;
use tracing::{error, info};

impl Node {
    /// Creates a volume, or finds the one that an earlier call with the same wishes created.
    pub async fn create(
        &self,
        claim: Arc<Claim>,
        mut new: NewVolume,
        secrets: Secrets,
    ) -> Result<(Volume, Outcome), Error> {
        // A second call finds the volume though its source may be gone or busy by then.
        let source = match (&new.content, self.volumes.find(claim.volume())) {
            (Some(Content::Volume(source)), Err(_)) => {
                self.wait_for_merges(source).await;
                Some(self.claim_source(source).await?)
            }
            _ => None,
        };
        if let (None, Some(master), Err(_)) =
            (&new.content, new.parameters.source(), self.volumes.find(claim.volume()))
        {
            new.master = Some(self.look_at(master, &new.parameters, secrets).await?);
        }
        let (volumes, by) = (self.volumes.clone(), claim.clone());
        let begun = blocking(move || volumes.begin_creation(&by, new)).await?;
        let outcome = begun.outcome();
        let creation = match begun {
            Begun::Exists(volume) => return Ok((volume, outcome)),
            Begun::New(creation) => creation,
        };
        if let (Some(freeze), Some(source)) = (creation.freeze(), &source)
            && let Err(error) = self.freeze(source, freeze).await
        {
            let volumes = self.volumes.clone();
            blocking(move || volumes.abandon_creation(&claim, creation)).await;
            return Err(error);
        }
        let volumes = self.volumes.clone();
        let made = blocking(move || volumes.finish_creation(&claim, creation)).await;
        self.nudge();
        Ok((made?, outcome))
    }

    /// Claims a volume whose active layer is to be frozen.
    async fn claim_source(&self, source: &VolumeId) -> Result<Arc<Claim>, Error> {
        self.volumes.find(source)?;
        let claim = Arc::new(self.claim(source).await?);
        self.resume_expansion(&claim).await?;
        Ok(claim)
    }

    /// Takes a snapshot, or finds the one that an earlier call with the same wishes took.
    pub async fn snapshot(
        &self,
        claim: Arc<Claim<SnapshotId>>,
        new: NewSnapshot,
    ) -> Result<(Snapshot, Outcome), Error> {
        // A second call finds the snapshot though its volume may be gone or busy by then.
        if let Some(snapshot) = self.volumes.existing_snapshot(claim.snapshot(), &new)? {
            return Ok((snapshot, Outcome::AlreadySo));
        }
        self.wait_for_merges(&new.source).await;
        let source = self.claim_source(&new.source).await?;
        let (volumes, by, of) = (self.volumes.clone(), claim.clone(), source.clone());
        let begun = blocking(move || volumes.begin_snapshot(&by, &of, new)).await?;
        let outcome = begun.outcome();
        let taking = match begun {
            Begun::Exists(snapshot) => return Ok((snapshot, outcome)),
            Begun::New(taking) => taking,
        };
        let frozen = self.freeze(&source, taking.freeze()).await;
        let volumes = self.volumes.clone();
        if let Err(error) = frozen {
            blocking(move || volumes.abandon_snapshot(&claim, taking)).await;
            return Err(error);
        }
        let taken = blocking(move || volumes.finish_snapshot(&claim, taking)).await;
        self.nudge();
        Ok((taken?, outcome))
    }

    /// Deletes a snapshot; one that is gone is fine.
    pub async fn delete_snapshot(&self, claim: Arc<Claim<SnapshotId>>) -> Result<Outcome, Error> {
        self.volumes.interrupt(&self.volumes.only_of_snapshot(claim.snapshot())).await;
        let volumes = self.volumes.clone();
        let outcome = blocking(move || volumes.delete_snapshot(&claim)).await;
        self.nudge();
        Ok(outcome?)
    }

    /// Deletes a volume that is not staged; one that is gone is fine. Its snapshots stay.
    pub async fn delete(&self, claim: Arc<Claim>) -> Result<Outcome, Error> {
        self.refuse_staged(claim.volume())?;
        self.volumes.interrupt(&self.volumes.only_of_volume(claim.volume())).await;
        let volumes = self.volumes.clone();
        let outcome = blocking(move || volumes.delete(&claim)).await;
        self.nudge();
        Ok(outcome?)
    }

    /// The daemon of a volume, if it is staged. One that does not serve is put right first: it may
    /// still have the layers open.
    pub(super) async fn served(&self, claim: &Claim) -> Result<Option<Daemon>, Error> {
        self.serve(claim).await?;
        match self.find(claim.volume()).map(|one| one.service) {
            Some(Service::Up(daemon)) => Ok(Some(daemon)),
            Some(Service::Down { .. }) => Err(Error::NotServed(claim.volume().clone())),
            None => Ok(None),
        }
    }

    /// Has background work on the layers of a volume stopped. Under its claim none begins again.
    pub(super) async fn interrupt(&self, id: &VolumeId) {
        self.volumes.interrupt(&self.volumes.layers_of_volume(id)).await;
    }

    /// Freezes the active layer of a volume: from now on the overlay takes the writes.
    ///
    /// A crash before the record of the volume is replaced leaves all as it was; after it, the
    /// daemon may still write to the layer below, which is why start-up has it replaced by one that
    /// does not.
    async fn freeze(&self, claim: &Claim, freeze: &Freeze) -> Result<(), Error> {
        let id = claim.volume();
        // Work further down goes on, also in the daemon: it touches neither the layer that is frozen
        // nor the one that is put onto it (measured with 10.0.13 and 11.1.3).
        self.volumes.interrupt(&[freeze.frozen()]).await;
        let Some(daemon) = self.served(claim).await? else {
            return Ok(self.volumes.adopt_overlay(claim, freeze)?);
        };
        let Some((active, overlay)) = self.volumes.layers_of(freeze) else {
            return Err(Error::NotServed(id.clone()));
        };
        let passphrase = self.passphrase(&self.volumes.find(id)?)?;
        let ready = async {
            let daemon = self.acknowledge_for(id, daemon.clone(), overlay.format).await?;
            let access = self.access(id);
            let added = daemon.add_overlay(&overlay, access, passphrase.as_ref()).await;
            added.map_err(|error| Error::daemon(id)(error.into()))?;
            Ok(daemon)
        };
        let daemon = match ready.await {
            Ok(daemon) => daemon,
            Err(error) => {
                _ = self.replace_doubtful(claim, &daemon, &error).await;
                return Err(error);
            }
        };
        crash::point("freeze-overlay-open");
        if let Err(error) = self.volumes.adopt_overlay(claim, freeze) {
            self.close_overlay(claim, &daemon, &overlay).await;
            return Err(error.into());
        }
        if let Err(error) = daemon.put_on(&active, &overlay).await {
            let error = Error::daemon(id)(error.into());
            // While it goes on, what is to be frozen changes.
            self.replace_doubtful(claim, &daemon, &error).await?;
        }
        crash::point("freeze-done");
        self.nudge_after(QUIET);
        Ok(())
    }

    /// Sees to it that the daemon acknowledges writes as an active layer of this format needs it:
    /// of a qcow2 layer, something is in the memory of the daemon (facts/qsd.md, D2).
    ///
    /// The relay moves the VM from one export to the other while nothing is in flight. A crash in
    /// between leaves two, or one that is more careful than need be.
    async fn acknowledge_for(
        &self,
        id: &VolumeId,
        daemon: Daemon,
        format: Format,
    ) -> Result<Daemon, Error> {
        let Outlet::Socket(socket) = daemon.outlet() else { return Ok(daemon) };
        let (before, after) = (daemon.durability(), self.durability(id, &self.form(id), format)?);
        if before == after {
            return Ok(daemon);
        }
        let failed = |error: qsd::MonitorError| Error::daemon(id)(error.into());
        let place = self.config.run.daemon(daemon.key());
        let backend = place.other_backend_socket(socket);
        let next = daemon.add_export(&backend, after).await.map_err(failed)?;
        let moved = self.relay.switch(&id.run_key(), &backend).await;
        let stopped =
            moved.map_err(|source: relay::Error| Error::Relay { volume: id.clone(), source })?;
        let seconds = stopped.as_secs_f64();
        info!(volume = %id, seconds, durability = ?after, "export replaced");
        next.remove_export(before).await.map_err(failed)?;
        if let Some(one) = self.attached().get_mut(id) {
            one.service = Service::Up(next.clone());
        }
        Ok(next)
    }

    async fn close_overlay(&self, claim: &Claim, daemon: &Daemon, overlay: &Layer) {
        if let Err(error) = daemon.close_layer(overlay).await {
            let error = Error::daemon(claim.volume())(error.into());
            _ = self.replace_doubtful(claim, daemon, &error).await;
        }
    }

    /// Ends a daemon of which it is not known what it has done, and starts another from the
    /// records. The relay keeps what the VM has asked for meanwhile. What cannot be done now is done
    /// later; an error says that the daemon may still be at work until then.
    pub(super) async fn replace_doubtful(
        &self,
        claim: &Claim,
        daemon: &Daemon,
        why: &Error,
    ) -> Result<(), Error> {
        let id = claim.volume();
        self.gives_up(id, daemon.pid(), Cause::Doubtful, &Chain(why).to_string());
        let ended = async {
            if why.is_of_deaf_daemon() {
                self.supervisor.kill(daemon.key()).await?; // it would not hear that it is to end
            }
            daemon.stop(&self.supervisor).await
        };
        if let Err(error) = ended.await {
            let reason = Chain(&error).to_string();
            error!(volume = %id, pid = daemon.pid(), error = reason, "daemon does not end");
            if let Some(one) = self.attached().get_mut(id) {
                one.service = Service::Down { reason };
            }
            self.revive_later(id);
            return Err(error.into());
        }
        if let Err(error) = self.restart_for_sure(claim).await {
            error!(volume = %id, error = %Chain(&error), "volume not served");
        }
        Ok(())
    }

    /// Lets a daemon end, and starts another from the records in its place. The relay keeps what
    /// the VM asks for meanwhile.
    pub(super) async fn replace(&self, claim: &Claim, daemon: &Daemon) -> Result<(), Error> {
        self.gives_up(claim.volume(), daemon.pid(), Cause::Upgraded, "");
        daemon.stop(&self.supervisor).await?;
        self.restart_for_sure(claim).await
    }
}
