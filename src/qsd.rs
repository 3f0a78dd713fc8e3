//! qemu-storage-daemon: its monitor, the block graph it is told to build, and its life.
//!
//! Owns everything that is said to a daemon. A `Launch` is what one needs to have a daemon; a
//! `Daemon` is held only after its graph stood and its export was open.

mod agent;
mod daemon;
mod encryption;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod graph;
mod live;
mod master;
mod monitor;
mod program;
mod readers;

pub use daemon::{Daemon, Error, FLUSH, Launch, Workshop, start_trial};
pub use graph::{Durability, Outlet, QUEUES, Reader, Reads, Writes};
pub use live::Jobs;
pub use live::{Height, JobState};
pub use master::{Credentials, Error as MasterError, Master};
pub use monitor::{Command, Error as MonitorError, Monitor};
pub use program::{Identity, Programs, Version, identity};
