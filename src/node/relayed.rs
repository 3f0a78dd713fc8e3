//! The relay, as the node sees it: which daemon it leads to, and what it has to tell.

use super::{Cause, Error, Group, Node, Service, image::Image};
use crate::{
    chain::Chain,
    qsd::{Daemon, Outlet},
    relay::{self, Attach},
    run::DaemonKey,
    volume::{RunKey, VolumeId},
};
use std::{collections::HashMap, time::Duration};
use tokio::time::sleep;
use tracing::{error, info, warn};

/// How often the relay is asked whether all is well.
const ROUND: Duration = Duration::from_secs(1);

/// What the relay knows of the volumes it serves.
pub type Relayed = HashMap<RunKey, relay::Relayed>;

/// The volumes that the relay serves, each by its key.
pub(super) fn by_key(status: relay::Status) -> Relayed {
    status.volumes.into_iter().map(|one| (one.key.clone(), one)).collect()
}

impl Node {
    /// What the relay has to tell of the volumes; nothing while it does not answer.
    pub async fn relayed(&self) -> Relayed {
        self.relay.look().await.map(by_key).unwrap_or_default()
    }

    /// Has the relay lead VMs to this daemon, if it serves any.
    pub(super) async fn relay_to(&self, id: &VolumeId, daemon: &Daemon) -> Result<(), Error> {
        let Outlet::Socket(backend) = daemon.outlet().clone() else { return Ok(()) };
        let tracking = self.tracking(daemon).await?;
        let group = self.group(id).map(Group::number);
        let attach = Attach { key: id.run_key(), backend, tracking, group };
        let fail = |source| Error::Relay { volume: id.clone(), source };
        self.relay.attach(attach).await.map_err(fail)
    }

    /// Has the relay let go of a volume. One that does not answer finds no note of it when it does.
    pub(super) async fn relay_no_more(&self, id: &VolumeId) -> Result<(), Error> {
        let dir = self.dir(id);
        let noted = dir.relay().exists() || dir.vhost_socket().exists();
        let forgotten = dir.forget_relay().map_err(Error::run(dir.path()));
        if !noted {
            return forgotten;
        }
        match self.relay.detach(&id.run_key()).await {
            Err(error @ relay::Error::Unreachable { .. }) => {
                warn!(volume = %id, error = %Chain(&error), "nobody relays it");
                forgotten
            }
            outcome => outcome.map_err(|source| Error::Relay { volume: id.clone(), source }),
        }
    }

    /// Ends the daemon in the other place of the volume: what a move broke off with.
    ///
    /// The relay is not connected to it, so nothing is in flight there.
    pub(super) async fn end_other(
        &self,
        serving: &DaemonKey,
        running: &HashMap<DaemonKey, i32>,
    ) -> Result<(), Error> {
        let other = DaemonKey { slot: serving.slot.other(), ..serving.clone() };
        if running.contains_key(&other) {
            info!(key = %other, reason = "it serves nobody", "daemon ended");
            self.supervisor.kill(&other).await?;
        }
        Ok(())
    }

    /// Sees to it that the relay serves all that is staged, and ends daemons that it finds deaf.
    pub(super) async fn watch_relay(self) {
        loop {
            tokio::select! {
                () = sleep(ROUND) => self.look_after_relay().await,
                () = self.stop.cancelled() => return,
            }
        }
    }

    async fn look_after_relay(&self) {
        let served: Vec<_> = {
            let attached = self.attached();
            let daemon = |(id, one): (&VolumeId, &super::Attached)| match &one.service {
                Service::Up(daemon) if one.attachment.form.is_relayed() => {
                    Some((id.clone(), daemon.clone(), self.relay_keys(&one.attachment)))
                }
                Service::Up(_) | Service::Down { .. } => None,
            };
            attached.iter().filter_map(daemon).collect()
        };
        if served.is_empty() {
            return;
        }
        let relayed = self.relayed().await;
        self.tally.note_stalls(&relayed);
        for (id, daemon, keys) in served {
            let front = |key: &RunKey| relayed.get(key).and_then(|one| one.front_end.as_ref());
            if !keys.iter().all(|key| relayed.contains_key(key)) {
                self.relay_again(&id, &daemon).await;
                continue;
            }
            if daemon.require_files().is_ok() {
                self.follow_guest(&id, front(&id.run_key()).is_some()).await;
            }
            if keys.iter().any(|key| front(key).is_some_and(|front| front.deaf)) {
                self.end_deaf(&id, &daemon).await;
            }
        }
    }

    /// A VM that has come closes `disk.img`, and opens it as it goes.
    async fn follow_guest(&self, id: &VolumeId, has_guest: bool) {
        let is_published = self.find(id).is_some_and(|one| one.attachment.shares_socket());
        let is_settled = match self.image(id) {
            Image::Hidden | Image::Closed => has_guest,
            Image::Shown => !has_guest,
            Image::Contested => false,
        };
        if is_published
            && !is_settled
            && let Ok(_claim) = self.claims.claim_briefly(id)
        {
            self.settle_image_if_can_be(id).await;
        }
    }

    async fn relay_again(&self, id: &VolumeId, daemon: &Daemon) {
        let Ok(_claim) = self.claims.claim_briefly(id) else { return };
        let is_served = |one: super::Attached| matches!(one.service, Service::Up(now) if now.pid() == daemon.pid());
        if !self.find(id).is_some_and(is_served) {
            return;
        }
        match self.lead_to(id, daemon).await {
            Ok(()) => info!(volume = %id, "volume relayed again"),
            Err(error) => error!(volume = %id, error = %Chain(&error), "volume not relayed"),
        }
    }

    /// Its requests are noted, and the next daemon does them again.
    async fn end_deaf(&self, id: &VolumeId, daemon: &Daemon) {
        let Ok(_claim) = self.claims.claim_briefly(id) else { return };
        let error = "it did not answer the relay";
        warn!(volume = %id, pid = daemon.pid(), error, "daemon is deaf");
        self.gives_up(id, daemon.pid(), Cause::Deaf, error);
        if let Err(error) = self.supervisor.kill(daemon.key()).await {
            error!(volume = %id, error = %Chain(&error), "daemon does not end");
        }
    }
}
