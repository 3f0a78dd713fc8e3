//! How daemons of a volume died, kept for people: `RUN/<key>/death.json`.
//!
//! It goes with the attachment. The next driver finds it, so that whoever comes later still learns why.

use super::{Cause, Leaving, Node, attachment::Phase, recover::MONITOR_CLOSED};
use crate::{
    chain::Chain,
    clock,
    run::DaemonKey,
    store::{self, Version},
    supervisor::State,
    volume::VolumeId,
};
use serde::{Deserialize, Serialize};
use std::time::UNIX_EPOCH;
use tracing::warn;

/// How a daemon ends that was told to.
const AS_TOLD: &str = "exit code 0";

/// The last time that the daemon of a volume died.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Death {
    version: Version<1>,
    /// Its process id.
    pub pid: i32,
    /// Its signal or exit code, and the last that it said.
    pub how: String,
    /// When, in seconds since 1970.
    pub at: u64,
    /// How often one died since the volume was staged.
    pub times: u64,
}

impl Node {
    /// Notes that a daemon died, in the background: whoever starts the next one does not wait for it.
    pub(super) fn keep_death(&self, id: &VolumeId, key: DaemonKey, pid: i32, how: &str) {
        let (node, id, how) = (self.clone(), id.clone(), how.to_owned());
        self.tasks.spawn(async move {
            let how = node.how_exactly(&key, pid, how).await;
            if how.starts_with(AS_TOLD) {
                return;
            }
            // Nobody removes the directory of what is staged, and nobody unstages it meanwhile.
            let attached = node.attached();
            if attached.get(&id).is_none_or(|one| one.attachment.phase != Phase::Staged) {
                return;
            }
            let dir = node.dir(&id);
            let times = node.last_death(&id).map_or(1, |last| last.times.saturating_add(1));
            let now = clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let death = Death { version: Version, pid, how, at: now.as_secs(), times };
            if let Err(error) = store::replace_volatile(&dir.death(), &death) {
                warn!(volume = %id, error = %Chain(&error), "noting how its daemon died");
            }
        });
    }

    /// Tells of a daemon that died while no driver was there, and keeps how it did.
    pub(super) async fn note_missed_death(&self, id: &VolumeId, key: DaemonKey) {
        let all = self.supervisor.list().await.unwrap_or_default();
        let ended = all.into_iter().find(|process| process.key == key);
        let (pid, how) = match ended.map(|process| (process.pid, process.state)) {
            Some((pid, State::Exited(how))) => (Some(pid), how),
            Some((_, State::Running)) | None => (None, "nobody saw how".to_owned()),
        };
        let reason = format!("while there was no driver: {how}");
        warn!(volume = %id, pid, reason, "daemon died");
        if !how.starts_with(AS_TOLD) {
            self.keep_death(id, key, pid.unwrap_or_default(), &reason);
        }
        if let Some(one) = self.attached().get_mut(id) {
            one.leaving = Some(Leaving { pid, cause: Cause::Died, error: reason });
        }
    }

    /// The end of the monitor may be seen before the supervisor tells of the end of the process.
    async fn how_exactly(&self, key: &DaemonKey, pid: i32, how: String) -> String {
        if how != MONITOR_CLOSED {
            return how;
        }
        let all = self.supervisor.list().await.unwrap_or_default();
        let it = all.into_iter().find(|process| process.key == *key && process.pid == pid);
        match it.map(|process| process.state) {
            Some(State::Exited(how)) => how,
            Some(State::Running) | None => how,
        }
    }

    /// How a daemon of this volume died the last time, if one did since it was staged.
    pub(super) fn last_death(&self, id: &VolumeId) -> Option<Death> {
        store::load(&self.dir(id).death()).ok().flatten()
    }
}
