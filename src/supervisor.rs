//! The supervisor: the parent of all daemons of a node, so that they outlive the driver.
//!
//! Small, and hardly ever changes: it spawns, lists, signals, reports exits and keeps the last of
//! what a daemon said. It knows nothing of volumes: a daemon has a `DaemonKey` and a directory. It also
//! sees to it that the relay runs while a daemon does.
//!
//! ```text
//!  driver -- supervisor.sock, JSON lines --> supervisor -- parent of --> daemons
//!     |                                          ^                          |
//!     +-- starts one, detached, when none answers +-- adopted by the next one if this one dies
//! ```
//!
//! - Each daemon holds the `lock` of its place as its standard input: locked for as long as it lives,
//!   whoever else dies, and the mark by which the next supervisor knows it.
//! - A supervisor that dies takes no daemon with it; the next one finds them in `/proc`.
//! - It ends by itself when it has had neither a daemon nor a client for some seconds.

mod client;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod process;
mod protocol;
mod server;

pub use client::{Client, Error, Exits};
pub(crate) use process::daemons;
pub use protocol::{Exit, Process, Signal, Spawn, State};
pub use server::run;
