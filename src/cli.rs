//! The command line: the processes of the driver, and commands for people.

mod client;
mod daemon;
mod doctor;
mod json;
mod output;
mod progress;
mod relay;
mod snapshot;
mod standalone;
mod tree;
mod volume;

use crate::{run::RunDir, supervisor};
use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{
    fmt,
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
};
use tracing::Level;
use tracing_subscriber::EnvFilter;

/// CSI driver on qemu-storage-daemon: local disks for virtual machines.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve CSI (Identity, Controller, Node) for this machine on one unix socket
    Standalone(standalone::Args),
    /// Be the parent of the storage daemons; started by the driver itself
    Supervisor {
        /// Run directory of the driver
        #[arg(long, value_name = "DIR")]
        run_dir: PathBuf,
    },
    /// Stand between VMs and daemons, so that disks outlive daemons; started by the supervisor
    Relay(relay::Args),
    /// Look after the storage daemons of volumes
    Daemon(daemon::Args),
    /// Create, look at, attach, change and delete volumes by hand
    Volume(volume::Args),
    /// Take, look at and delete snapshots by hand
    Snapshot(snapshot::Args),
    /// Look at pools, records, layers, daemons, mounts, loop devices and locks, with or without a
    /// driver, and say what is wrong: exit code 0 where all is well, 1 where something is wrong, 2
    /// where it cannot be told
    Doctor(doctor::Args),
    /// Draw pools, volumes, snapshots and layers, and what is done with them, as a tree
    Tree(tree::Args),
}

/// How long threads that may hang are waited for at the end; what changes anything has ended by then.
const LAST_THREADS: std::time::Duration = std::time::Duration::from_secs(1);

/// Runs the subcommand to its end.
pub fn run(args: Args) -> ExitCode {
    // What the doctor finds it says itself.
    start_tracing(if matches!(args.command, Command::Doctor(_)) { "off" } else { "info" });
    raise_file_limit();
    let outcome = match args.command {
        Command::Standalone(args) => block_on(standalone::run(args)),
        Command::Supervisor { run_dir } => block_on(supervise(&run_dir)),
        Command::Relay(args) => relay::run(args),
        Command::Daemon(args) => block_on(daemon::run(args)),
        Command::Volume(args) => block_on(volume::run(args)),
        Command::Snapshot(args) => block_on(snapshot::run(args)),
        Command::Tree(args) => block_on(tree::run(args)),
        Command::Doctor(args) => return diagnose(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has gone, which is its right.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Exit codes of its own: who runs it by a script tells what is wrong from what cannot be told.
fn diagnose(args: doctor::Args) -> ExitCode {
    block_on(doctor::run(args)).unwrap_or_else(|error| {
        _ = writeln!(io::stderr(), "error: {error:#}");
        ExitCode::from(2)
    })
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(work);
    // A thread that asks a disk which does not answer would keep the process for ever.
    runtime.shutdown_timeout(LAST_THREADS);
    outcome
}

async fn supervise(run_dir: &Path) -> anyhow::Result<()> {
    supervisor::run(RunDir::open(run_dir)?).await
}

/// Logs go to standard error: for people where that is a terminal, else one JSON object a line.
/// `QSD_CSI_LOG_FORMAT` (`text` or `json`) says otherwise, and holds for all processes that are
/// started from here. `QSD_CSI_LOG` sets what is logged: a level of our own, or what else tracing's
/// `EnvFilter` knows.
fn start_tracing(default: &str) {
    let wished = std::env::var("QSD_CSI_LOG").unwrap_or_else(|_| default.to_owned());
    let wished = match wished.parse::<Level>() {
        Ok(level) => format!("{},qsd_csi={level}", level.min(Level::WARN)), // of libraries, no more
        Err(_) => wished,
    };
    let filter = EnvFilter::try_new(wished).unwrap_or_else(|_| EnvFilter::new(default));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let is_for_people = match std::env::var("QSD_CSI_LOG_FORMAT").as_deref() {
        Ok("text") => true,
        Ok("json") => false,
        Ok(_) | Err(_) => io::stderr().is_terminal(),
    };
    if is_for_people {
        log.init();
    } else {
        log.json().flatten_event(true).with_span_list(false).init();
    }
}

/// Takes all the files we may have: a daemon costs the supervisor two, and the driver one, a VM
/// costs each process of the relay some dozen, and the usual limit of 1024 would end at some hundred
/// volumes.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
}

/// Where CSI is served: `unix://PATH`, with an absolute path.
#[derive(Clone, Debug)]
struct Endpoint(PathBuf);

impl Endpoint {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("unix://").map(Path::new);
        match path {
            Some(path) if path.is_absolute() => Ok(Self(path.to_owned())),
            Some(_) | None => Err("write unix:// and an absolute path, such as \
                                   unix:///run/qsd-csi/csi.sock"
                .to_owned()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "unix://{}", self.0.display())
    }
}
