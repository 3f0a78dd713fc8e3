//! What driver and relay say to each other: JSON, one message a line, one reply each.

use super::backend::Tracking;
use crate::{durations::Durations, volume::RunKey};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// More than any message has: a list of ten thousand volumes.
pub(super) const LONGEST_LINE: u64 = 16 << 20;

/// What a driver, or a person, asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    /// Serve a volume, from now on and after every restart; so already is fine.
    Attach(Attach),
    /// Serve it no more. A front-end is let go; none such is fine.
    Detach(RunKey),
    /// Tell of everything.
    List,
    /// Tell of one volume. A relay of an earlier version refuses.
    Look(RunKey),
    /// Hold the requests of a volume back, at most so long, and answer once none is in flight.
    Pause { key: RunKey, most_ms: u64 },
    /// Let them flow again.
    Resume(RunKey),
    /// Move to another back-end.
    Switch { key: RunKey, backend: PathBuf },
    /// Run this program as the relay, with everything that is connected.
    Upgrade(PathBuf),
}

/// A volume to serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Which: its socket is `RUN/<key>/export/vhost.sock`.
    pub key: RunKey,
    /// The socket of the daemon's export.
    pub backend: PathBuf,
    /// What the self-test of this qemu-storage-daemon said.
    pub tracking: Tracking,
    /// The group that may connect besides root, by its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
}

/// What the relay answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    Done,
    /// Whether requests had been held back until now.
    Resumed(bool),
    /// For how long the rings stood still, in microseconds.
    Switched(u64),
    List(Status),
    /// The volume, if it is served.
    Volume(Option<Box<Relayed>>),
    /// It did not do it, and why.
    Refused(String),
}

/// The relay as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The process id of the worker.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Its program.
    pub program: PathBuf,
    /// The volumes it serves.
    pub volumes: Vec<Relayed>,
}

/// One volume, as the relay sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relayed {
    /// Which.
    pub key: RunKey,
    /// The socket of the daemon's export.
    pub backend: PathBuf,
    /// Whether requests outlive a daemon.
    pub tracking: Tracking,
    /// Who is connected.
    pub front_end: Option<FrontEnd>,
    /// Daemons that were lost and replaced under a VM.
    pub losses: u64,
    /// Moves to another daemon under a VM.
    pub handovers: u64,
    /// Connections refused because there was one, or the volume was in use as a file.
    pub refused: u64,
    /// How long requests were held up last time, in microseconds; 0: never.
    pub last_stall_us: u64,
    /// And at worst.
    pub longest_stall_us: u64,
    /// All of them; none by a relay of an earlier version.
    #[serde(default)]
    pub stalls: Durations,
}

/// A connected front-end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontEnd {
    /// Its process, as its socket tells; 0 where that is in a namespace we cannot see.
    pub pid: i32,
    /// When it connected, in seconds since 1970.
    pub since: u64,
    /// Requests of the VM without an answer.
    pub in_flight: u64,
    /// How long the oldest of them has been waiting at least, in milliseconds.
    pub oldest_ms: u64,
    /// Whether requests are held back.
    pub paused: bool,
    /// Why there is no daemon behind it; empty if there is one.
    pub trouble: String,
    /// Whether the daemon did not answer, and should be replaced.
    pub deaf: bool,
}
