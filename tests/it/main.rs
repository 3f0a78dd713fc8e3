//! Drives the built driver over its socket, with real storage daemons, real virtual machines and
//! the real csi-sanity. A missing part fails a test; `make setup` installs them all.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on fails, and says what it measured"
)]

mod adversity;
mod bad_input;
mod broken;
mod cli;
mod condition;
mod copies;
mod crash;
mod deaths;
mod disk;
mod doctor;
mod encryption;
mod ephemeral;
mod full;
mod harness;
mod hunt;
mod image;
mod lifecycle;
mod listing;
mod live;
mod local;
mod look;
mod loss;
mod metadata;
mod model;
mod modes;
mod overfull;
mod processes;
mod qsd;
mod reboot;
mod relay;
mod remote;
mod sanity;
mod see;
mod spec;
mod storm;
mod supervisor;
mod survival;
mod vm;
