//! The one binary: parse the arguments, run a subcommand.

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    qsd_csi::cli::run(qsd_csi::cli::Args::parse())
}
