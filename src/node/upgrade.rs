//! The move of a volume to another daemon under its VM: a new qemu-storage-daemon is taken up.
//!
//! ```text
//! serving (slot a) ---------------------------------------------> ended
//!        new daemon beside it (slot b), graph, export -- relay moves --> serving
//! ```
//!
//! With a qcow2 layer, or a remote master that is written, there is only ever one daemon, and the VM waits some tens of milliseconds.
//!
//! The relay notes where it leads to while nothing is in flight, and that note alone says which of
//! two daemons serves: a crash at any instant leaves one that does and one that nobody uses, which
//! start-up ends.

use super::{Entrance, Error, Node};
use crate::{
    chain::Chain,
    crash,
    qsd::{self, Daemon, Launch},
    relay,
    run::DaemonKey,
    volume::{Claim, Format, Layer, Outcome, VolumeId},
};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tracing::warn;

/// What became of an upgrade.
#[derive(Clone, Debug)]
pub struct Upgrade {
    /// `AlreadySo`: the daemon was of the newest program.
    pub outcome: Outcome,
    /// The daemon that serves now.
    pub daemon: Daemon,
    /// How long the rings of the VM stood still.
    pub stopped: Duration,
}

/// When a daemon is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// If it does not run the newest program.
    Outdated,
    /// In any case.
    Always,
}

impl Node {
    /// Hands a volume over to a daemon of the newest program.
    pub async fn upgrade(&self, claim: &Claim, when: When) -> Result<Upgrade, Error> {
        let id = claim.volume();
        // One that has just died is started again first.
        let Some(old) = self.served(claim).await? else {
            return Err(Error::NotServed(id.clone()));
        };
        let form = self.form(id);
        if !form.is_relayed() {
            return Err(Error::BoundToDaemon { volume: id.clone(), form });
        }
        self.interrupt(id).await;
        let serving = old.key().clone();
        let next = DaemonKey { slot: serving.slot.other(), ..serving.clone() };
        let launch = self.launch(id, next.slot)?;
        if when == When::Outdated && runs(&old, &launch.program) {
            let (outcome, stopped) = (Outcome::AlreadySo, Duration::ZERO);
            return Ok(Upgrade { outcome, daemon: old, stopped });
        }
        self.make_way(id, &old).await?;
        let is_alone = |active: &Layer| active.format == Format::Qcow2 || active.master().is_some();
        // Only one VM can be moved without an end of its daemon.
        let is_shared = !self.find(id).is_some_and(|one| one.attachment.may_move());
        if is_shared || launch.layers.first().is_some_and(is_alone) {
            return self.replace_by_newest(claim, &old).await;
        }
        self.end_other(&serving, &self.running().await?).await?;
        let launch = Launch { beside: Some(serving), ..launch };
        let daemon = launch.start(&self.supervisor).await.map_err(Error::daemon(id))?;
        crash::point("node-upgrade-beside");
        let socket = self.backend_socket(id, next.slot);
        let stopped = match self.relay.switch(&next.volume, &socket).await {
            Ok(stopped) => stopped,
            Err(error) => return Err(self.stay(id, &next, error).await),
        };
        crash::point("node-upgrade-moved");
        self.serves(id, daemon.clone(), Entrance::Moved(stopped));
        if let Err(error) = old.stop(&self.supervisor).await {
            warn!(volume = %id, error = %Chain(&error), "ending the daemon it moved from");
        }
        self.settle_image_if_can_be(id).await;
        Ok(Upgrade { outcome: Outcome::Done, daemon, stopped })
    }

    /// Two daemons cannot have a qcow2 layer open for writing, so the old one ends first. The relay
    /// keeps what the VM asks for meanwhile.
    async fn replace_by_newest(&self, claim: &Claim, old: &Daemon) -> Result<Upgrade, Error> {
        let id = claim.volume();
        let begin = Instant::now();
        self.replace(claim, old).await?;
        let Some(daemon) = self.serving_daemon(id) else {
            return Err(Error::NotServed(id.clone()));
        };
        let stopped = begin.elapsed();
        Ok(Upgrade { outcome: Outcome::Done, daemon, stopped })
    }

    /// The relay did not move, or did and could not say so: its note tells, and the daemon that it
    /// does not lead to goes.
    async fn stay(&self, id: &VolumeId, next: &DaemonKey, source: relay::Error) -> Error {
        let serving = self.serving(id);
        if serving == *next {
            warn!(volume = %id, "it moved all the same");
        }
        let ended = async { self.end_other(&serving, &self.running().await?).await };
        if let Err(error) = ended.await {
            warn!(volume = %id, error = %Chain(&error), "ending the daemon it did not move to");
        }
        Error::Relay { volume: id.clone(), source }
    }
}

/// Whether a daemon runs this very program, not one that was at its path before.
fn runs(daemon: &Daemon, program: &Path) -> bool {
    let running = qsd::identity(Path::new(&format!("/proc/{}/exe", daemon.pid())));
    matches!((running, qsd::identity(program)), (Ok(is), Ok(newest)) if is == newest)
}
