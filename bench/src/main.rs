//! `qsd-csi-bench`: what qsd-csi costs, each figure beside a reference taken in the same run.
//!
//! ```text
//! make bench                                       all parts, some 12 minutes on 2 cores
//! target/release/qsd-csi-bench --only data         one part: control, memory, restart, copies, data, chain, relay or crowd
//! target/release/qsd-csi-bench --quick             seconds: shows that it works, not how fast
//! target/release/qsd-csi-bench --only tune         settings of bare daemons against each other
//! ```
//!
//! It drives the `qsd-csi` that lies beside it as `standalone`, over its gRPC socket, as root, with
//! `qemu-storage-daemon` and `fio` from `PATH`. The pool lies below the report, on a disk; the run
//! directory on a tmpfs where there is one. All of it is gone afterwards, also after Ctrl-C: every
//! process is ended by its pid, every mount undone.
//!
//! | part | figure | unit | reference |
//! |---|---|---|---|
//! | control | latency of CSI calls with 1, 100 and 500 volumes published | ms | a bare daemon from spawn to its end; one durable 4 KiB file |
//! | restart | start of the driver with 500 volumes published, and after a reboot | ms | the same with none |
//! | memory | memory of daemons, driver, supervisor and relay, as proportional set size (PSS) | KiB | bare daemons that serve nothing |
//! | data | requests a second through the published socket | IOPS | fio on a file of the same file system |
//! | data | durable writes with `cache: auto` | IOPS | `cache: writethrough` |
//! | copies | time until a restore or clone of 1 TiB can be used | ms | one of 1 GiB |
//! | chain | reads a second through 4 and 8 layers | IOPS | one layer |
//! | chain | durable writes into an overlay | IOPS | a raw layer |
//! | relay | requests a second through the relay | IOPS | the same daemon without one |
//! | crowd | memory, processor time and recovery with 200 clients | KiB, %, ms | the same with one |
//! | tune | requests a second of bare daemons with other settings | IOPS | fio, likewise |
//!
//! Figures depend on the machine; ratios to a reference less so. Goals are judged, and nothing
//! fails where one is missed. The report is `report.md` with its plots, in `target/bench`.

mod chain;
mod client;
mod control;
mod copies;
mod crowd;
mod data;
mod driver;
mod fio;
mod fleet;
mod graph;
mod load;
mod machine;
mod memory;
mod plot;
mod process;
mod qsd;
mod reboot;
mod relay;
mod relayed;
mod report;
mod restart;
mod say;
mod scratch;
mod stats;
mod tune;
mod vhost;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use driver::Driver;
use fleet::Fleet;
use report::Report;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use say::say;
use std::{io::Write as _, path::PathBuf, process::ExitCode, time::Duration};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};

/// Measures qsd-csi, each figure beside a reference taken in the same run.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Args {
    /// Measure this part only; may be given several times
    #[arg(long, value_name = "PART")]
    only: Vec<Part>,
    /// Show within seconds that it works; the figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Where to write the report, on the disk to measure [default: bench, beside the programs]
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Latency of CSI calls
    Control,
    /// Start-up with many volumes, also after a reboot
    Restart,
    /// Memory of all processes
    Memory,
    /// Requests a second through a published socket
    Data,
    /// Snapshots, restores and clones of a small and a large volume
    Copies,
    /// Reads through many layers, and durable writes into an overlay
    Chain,
    /// What the relay costs a request
    Relay,
    /// What the relay takes with many volumes, and how long its end is felt
    Crowd,
    /// Settings of bare daemons against each other; not part of a whole run
    Tune,
}

/// How much to do.
#[derive(Clone, Debug)]
struct Plan {
    /// Volumes that exist while calls are measured, ascending.
    levels: Vec<usize>,
    /// Samples of each call.
    samples: usize,
    /// Starts of the driver, of each kind.
    starts: usize,
    /// Bytes of a disk that requests touch.
    span: u64,
    /// Times that each pair alternates; those with a goal have more.
    rounds: usize,
    goal_rounds: usize,
    /// How long one side of a pair runs.
    time: Duration,
    /// Rounds with and without a relay.
    pairs: usize,
    /// Volumes on one relay.
    crowd: usize,
    /// How long they are idle.
    idle: Duration,
}

impl Plan {
    fn new(quick: bool) -> Self {
        if quick {
            Self {
                levels: vec![1, 6],
                samples: 4,
                starts: 1,
                span: 32 << 20,
                rounds: 1,
                goal_rounds: 1,
                time: Duration::from_millis(200),
                pairs: 1,
                crowd: 6,
                idle: Duration::from_secs(1),
            }
        } else {
            Self {
                levels: vec![1, 100, 500],
                samples: 60,
                starts: 5,
                span: 1 << 30,
                rounds: 3,
                goal_rounds: 7,
                time: Duration::from_secs(2),
                pairs: 30,
                crowd: 200,
                idle: Duration::from_secs(10),
            }
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match start(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs until the end or a signal. Either way the guards of `run` undo all it did.
fn start(args: Args) -> anyhow::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            outcome = run(args) => outcome,
            _ = terminate.recv() => anyhow::bail!("told to end"),
            _ = interrupt.recv() => anyhow::bail!("interrupted"),
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(10)); // lets a load end that is under way
    outcome
}

async fn run(args: Args) -> anyhow::Result<()> {
    let begin = Instant::now();
    let dir = match args.report {
        Some(dir) => std::path::absolute(dir)?,
        None => default_dir()?,
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    _ = std::fs::remove_file(dir.join(driver::LOG)); // of an earlier run
    take_all_files()?;
    let plan = Plan::new(args.quick);
    let wanted = |part: Part| match args.only.as_slice() {
        [] => part != Part::Tune,
        only => only.contains(&part),
    };
    let mut report = Report::new(&dir);
    report.heading("qsd-csi, measured");
    report.text(machine::describe(&dir).await?);
    if args.quick {
        report.text("A quick run: these figures mean nothing.");
    }
    let of_levels: Vec<_> = [Part::Control, Part::Memory, Part::Restart]
        .into_iter()
        .filter(|part| wanted(*part))
        .collect();
    if !of_levels.is_empty() {
        levels(&plan, &mut report, &of_levels).await?;
    }
    if wanted(Part::Data) {
        data::measure(&plan, &mut report).await?;
    }
    if wanted(Part::Copies) {
        copies::measure(&plan, &mut report).await?;
    }
    if wanted(Part::Chain) {
        chain::measure(&plan, &mut report).await?;
    }
    if wanted(Part::Relay) {
        relay::measure(&plan, &mut report).await?;
    }
    if wanted(Part::Crowd) {
        crowd::measure(&plan, &mut report).await?;
    }
    if wanted(Part::Tune) {
        tune::measure(&plan, &mut report).await?;
    }
    report.text(format!("The run took {} s.", begin.elapsed().as_secs()));
    let path = report.write()?;
    say(format!("\nreport: {}", path.display()));
    Ok(())
}

/// Control plane and memory, while volumes become more and more; start-up when there are most.
async fn levels(plan: &Plan, report: &mut Report, parts: &[Part]) -> anyhow::Result<()> {
    let [control, memory, restart] =
        [Part::Control, Part::Memory, Part::Restart].map(|part| parts.contains(&part));
    let mut driver = Driver::start(report.dir()).await?;
    let mut fleet = Fleet::default();
    let mut calls = control::Calls::default();
    let mut sizes = memory::Sizes::default();
    for level in &plan.levels {
        fleet.grow(&mut driver, *level).await?;
        if memory {
            sizes.measure(&mut driver, *level).await?;
        }
        if control {
            calls.measure(&mut driver, *level, plan.samples).await?;
        }
    }
    if control {
        calls.tell(report)?;
    }
    if restart {
        restart::measure(&mut driver, plan.starts, report).await?;
        reboot::measure(&mut driver, &fleet, plan.starts, report).await?;
    }
    if memory {
        sizes.tell(report);
    }
    fleet.clear(&mut driver).await?;
    driver.end().await
}

/// `bench` beside the directory that this program lies in: `target/bench`.
fn default_dir() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let target = program.parent().and_then(|profile| profile.parent());
    Ok(target.context("this program lies in no target directory; say --report")?.join("bench"))
}

/// Each of many clients has a handful of files open.
fn take_all_files() -> anyhow::Result<()> {
    let most = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?)
}

/// Runs what blocks where it holds up nobody.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    tokio::task::spawn_blocking(work).await?
}
