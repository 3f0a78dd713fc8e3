//! The trial of a qemu-storage-daemon: whether it behaves as the relay relies on.
//!
//! Each program is tried once, with a daemon of nobody: the newest when the driver starts, any other
//! before the relay leads to the first daemon that runs it. Where it fails, volumes are served all the same, with a warning: requests in
//! flight do not outlive the daemon (facts/relay.md section 7).

use super::{Error, Node};
use crate::{
    blocking::blocking,
    chain::Chain,
    qsd::{self, Daemon, Identity},
    relay::{self, Tracking},
    run::{DaemonKey, Slot},
    volume::RunKey,
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{sync::OnceCell, time::Instant};
use tracing::{error, info, warn};

/// A machine that is very busy can make a good one look bad.
const ATTEMPTS: u32 = 3;

/// What a trial found: nothing, or what does not work, in words.
type Finding = Result<(), String>;

/// What was found out so far.
#[derive(Debug, Default)]
pub(super) struct Trials(Mutex<HashMap<Identity, Arc<OnceCell<Finding>>>>);

impl Node {
    /// Tries the program that new daemons will run, before anybody needs one.
    pub(super) async fn try_newest(&self) {
        let program = self.config.qsd.newest();
        if let Err(error) = self.finding(&program).await {
            error!(error = %Chain(&error), "this qemu-storage-daemon cannot be tried");
        }
    }

    /// Whether requests outlive this daemon.
    pub(super) async fn tracking(&self, daemon: &Daemon) -> Result<Tracking, Error> {
        let finding = self.finding(&program_of(daemon)).await?;
        Ok(if finding.is_ok() { Tracking::Works } else { Tracking::Unavailable })
    }

    async fn finding(&self, program: &Path) -> Result<Finding, Error> {
        let identity = qsd::identity(program).map_err(Error::run(program))?;
        let cell = self.trials.of(identity);
        cell.get_or_try_init(|| self.try_program(program)).await.cloned()
    }

    /// What is not as it should be with a daemon; empty if nothing.
    pub(super) fn warning(&self, daemon: &Daemon) -> String {
        let identity = qsd::identity(&program_of(daemon)).ok();
        let cell = identity.map(|identity| self.trials.of(identity));
        match cell.as_ref().and_then(|cell| cell.get()) {
            Some(Err(reason)) => format!("requests in flight do not outlive the daemon: {reason}"),
            Some(Ok(())) | None => String::new(),
        }
    }

    async fn try_program(&self, program: &Path) -> Result<Finding, Error> {
        let begin = Instant::now();
        let mut attempt = 1;
        loop {
            let outcome = self.try_once(program).await?;
            let seconds = begin.elapsed().as_secs_f64();
            match &outcome {
                Ok(()) => info!(seconds, "requests outlive this qemu-storage-daemon"),
                Err(reason) if attempt < ATTEMPTS => {
                    warn!(reason, attempt, "a trial failed");
                    attempt += 1;
                    continue;
                }
                Err(reason) => error!(reason, "requests do not outlive this qemu-storage-daemon"),
            }
            return Ok(outcome);
        }
    }

    /// A crash in between leaves a daemon and a directory of no attachment, which start-up clears.
    async fn try_once(&self, program: &Path) -> Result<Finding, Error> {
        let volume = RunKey::draw();
        let dir = self.config.run.volume(&volume);
        let key = DaemonKey { volume, slot: Slot::A };
        let place = dir.daemon(key.slot);
        let (supervisor, limit) = (&self.supervisor, relay::REQUESTS_PER_SECOND);
        let trial = async {
            dir.create().map_err(Error::run(dir.path()))?;
            let started = qsd::start_trial(&key, program, &place, limit, supervisor).await;
            started.map_err(|source| Error::Trial { program: program.to_owned(), source })?;
            let socket = place.backend_socket();
            Ok(blocking(move || relay::self_test(&socket)).await)
        };
        let outcome = trial.await;
        supervisor.kill(&key).await?;
        if let Err(error) = dir.remove() {
            warn!(error = %Chain(&error), "what is left of a trial stays");
        }
        outcome
    }
}

/// As the process has it: the file at its path may be another one by now.
fn program_of(daemon: &Daemon) -> PathBuf {
    PathBuf::from(format!("/proc/{}/exe", daemon.pid()))
}

impl Trials {
    fn of(&self, program: Identity) -> Arc<OnceCell<Finding>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(program).or_default().clone()
    }
}
