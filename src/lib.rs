//! qsd-csi: a CSI driver on qemu-storage-daemon (QSD), one daemon a volume.
//!
//! ```text
//!  kubelet, sidecars, `qsd-csi volume`          VMs: QEMU with vhost-user-blk
//!        | CSI + Inspect, one unix socket             | vhost.sock   ^ data: shared memory
//!  +-----v------------------------------------+       |
//!  | csi      parse, claim, call, answer      |       |
//!  |  |    \                                  |       |
//!  |  v     v                                 |       |
//!  | node   volume     domain, no gRPC        |       |
//!  |  |  \    |  \                            |       |
//!  |  |   \   v   v                           |       |
//!  |  |    | pool store   records and layers  |       |
//!  |  v    v                                  |       |
//!  | supervisor, relay    qsd                 |       |              |
//!  +---|------------------|-------------------+       |              |
//!      | JSON lines       | QMP                qsd-csi relay         |
//!  qsd-csi supervisor     +-------------------------+ | back.sock    |
//!      +-- parent of relay and of --> qemu-storage-daemon x volumes -+
//! ```
//!
//! Arrows point down only. `units`, `volume::id` and the parsing of parameters are the pure core.
//! Records live in the pools (durable) and in the run directory (until the next boot); a process
//! may die at any instant, and the next one goes on from the records. See ARCHITECTURE.md.

mod abreast;
mod blocking;
mod bound;
mod chain;
pub mod cli;
mod clock;
mod code;
mod crash;
pub mod csi;
pub mod doctor;
pub mod durations;
pub mod extents;
pub mod finding;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod metrics;
pub mod node;
pub mod pool;
pub mod qcow2;
pub mod qsd;
pub mod relay;
pub mod run;
pub mod source;
pub mod store;
pub mod supervisor;
pub mod units;
pub mod volume;
