//! What driver and supervisor say to each other: JSON, one message a line.
//!
//! The supervisor greets; then each request gets one reply, in order. After `Watch` the connection
//! carries the exits of daemons and no more requests.

use crate::run::DaemonKey;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of this protocol. A driver refuses a supervisor that speaks another.
pub(super) const VERSION: u32 = 2;

/// More than any message has: a list of ten thousand daemons.
pub(super) const LONGEST_LINE: usize = 16 << 20;

/// The first line from the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Greeting {
    /// `VERSION` of the supervisor.
    pub version: u32,
    /// Its process id.
    pub pid: i32,
}

/// What a driver asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    /// Start a daemon.
    Spawn(Spawn),
    /// Tell of all daemons, also of those whose end nobody has cleared by a new spawn.
    List,
    /// Send a signal to a daemon; one that has ended is fine.
    Signal {
        /// Which daemon.
        key: DaemonKey,
        /// What to send.
        signal: Signal,
    },
    /// Answer once the daemon does not run.
    Wait(DaemonKey),
    /// Forget the end of a daemon.
    Forget(DaemonKey),
    /// Report exits from now on.
    Watch,
}

/// A daemon to start. Its directory exists.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spawn {
    /// Which daemon.
    pub key: DaemonKey,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// A file that no other daemon may have: locked while the daemon lives, wherever its run
    /// directory is by then.
    pub exclusive: PathBuf,
    /// The daemon that it is to take over from, and with which it shares that lock meanwhile.
    pub beside: Option<DaemonKey>,
}

/// The signals a driver may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Signal {
    /// SIGTERM: finish and go.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// What the supervisor answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// The daemon runs.
    Spawned {
        /// Its process id.
        pid: i32,
    },
    /// All daemons.
    List(Vec<Process>),
    /// It is done.
    Done,
    /// It is not, and why.
    Refused(String),
}

/// A daemon as the supervisor knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Which daemon.
    pub key: DaemonKey,
    /// Its process id, or what it was.
    pub pid: i32,
    /// Whether it runs.
    pub state: State,
}

/// Whether a daemon runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It does.
    Running,
    /// It ended: how, in words, with the last line it said.
    Exited(String),
}

/// The end of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Which daemon.
    pub key: DaemonKey,
    /// Its process id.
    pub pid: i32,
    /// How it ended, in words, with the last line it said.
    pub how: String,
}
