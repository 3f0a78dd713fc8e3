//! The relay of the driver under test: its two processes, and what it says of the volumes.

use crate::{process, scratch::Scratch};
use anyhow::Context as _;
use qsd_csi::{
    relay::{Client, Relayed, Status},
    run::RunDir,
};
use std::path::PathBuf;

/// Reaches the relay, whichever processes it consists of by now.
#[derive(Clone, Debug)]
pub(crate) struct Relay {
    client: Client,
    dir: PathBuf,
}

/// The processes of a relay, by pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pids {
    pub(crate) keeper: i32,
    pub(crate) worker: i32,
}

impl Relay {
    /// The relay of the driver that works in `scratch`.
    pub(crate) fn of(scratch: &Scratch) -> anyhow::Result<Self> {
        let client = Client::new(RunDir::open(&scratch.run())?);
        Ok(Self { client, dir: scratch.run().join("relay") })
    }

    /// Both processes; waits for them where they are just starting.
    pub(crate) async fn pids(&self) -> anyhow::Result<Pids> {
        let worker = i32::try_from(self.client.list().await?.pid)?;
        let keeper = process::reading_below(&self.dir).first().copied();
        Ok(Pids { keeper: keeper.context("there is no keeper")?, worker })
    }

    /// Whether a worker other than `before` serves `count` volumes, from a VM to a daemon.
    pub(crate) async fn serves(&self, count: usize, before: Option<Pids>) -> bool {
        let Some(Status { pid, volumes, .. }) = self.client.look().await else { return false };
        let is_other = before.is_none_or(|before| i32::try_from(pid) != Ok(before.worker));
        is_other && volumes.iter().filter(|volume| is_served(volume)).count() == count
    }
}

fn is_served(volume: &Relayed) -> bool {
    volume.front_end.as_ref().is_some_and(|front| front.trouble.is_empty() && !front.paused)
}
