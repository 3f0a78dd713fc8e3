//! The relay: it stands between VMs and daemons on the vhost-user control channel, so that a VM's
//! disk outlives the daemon behind it.
//!
//! ```text
//!  QEMU -- vhost.sock --> relay -- back.sock --> qemu-storage-daemon
//!    |                                                 |
//!    +---- rings and data: shared memory, direct ------+
//! ```
//!
//! It records what a front-end sets, and says it all again to the next daemon when one dies, is
//! upgraded or replaced. An inflight buffer tells that one which requests to do again. Nothing of
//! the data passes through it, so it costs nothing a request. Why each of its steps is as it is:
//! facts/relay.md.
//!
//! ```text
//!  keeper (process)   keeps descriptors and state; does nothing else
//!    | kept           what the two say to each other
//!  worker (process) --> volume (thread) --> session --+--> requests      what it asks for
//!    | keep             | place, watch                +--> link, park    the daemon behind it
//!    | protocol, client                               +--> said          what is to be replayed
//!                                                           |
//!    self_test ------> backend, inflight, memory <----------+
//!                         +--> wire --> message           bytes and meaning
//! ```
//!
//! What it relies on is no promise of QSD's, so each version is tried first: `self_test`.

mod backend;
mod client;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod inflight;
mod keep;
mod keeper;
mod kept;
mod lease;
mod link;
mod memory;
mod message;
mod park;
mod place;
mod protocol;
mod quiet;
mod requests;
mod said;
mod self_test;
mod session;
mod volume;
mod watch;
mod wire;
mod worker;

pub use backend::Tracking;
pub use client::{Client, Error};
pub use lease::is_open;
pub use protocol::{Attach, FrontEnd, Relayed, Status};
pub use self_test::{REQUESTS_PER_SECOND, self_test};

use crate::run::RunDir;

/// Runs the keeper, which runs the worker.
pub fn keep(run: RunDir) -> anyhow::Result<()> {
    keeper::run(run)
}

/// Runs the worker.
pub fn work(run: RunDir) -> anyhow::Result<()> {
    worker::run(run)
}
