//! Latency, memory and throughput of qsd-csi, each beside a reference in the same run.
//!
//! ```text
//! make bench                                  everything, some five minutes
//! target/release/qsd-csi-bench --only data    a part: control or data
//! target/release/qsd-csi-bench --quick        a short run, for a look at the program itself
//! ```
//!
//! - control: latency of calls with 1, 100 and 500 volumes published, against the bare work in
//!   them (a daemon started and ended; a record made durable); memory; start-up of the driver.
//! - data: 4 KiB random and 128 KiB sequential requests through the published socket, one queue,
//!   one client thread (`--wait`: it sleeps on an eventfd, or polls the ring), against fio with `io_uring` and direct I/O on a
//!   file of the same pool, in turns; writes durable on both sides (fio: `sync=dsync`).
//!
//! Prints the figures and writes `target/bench/report.md` with plots. A goal that is missed is
//! said, and fails nothing: times are of the machine as much as of the program.

mod control;
mod data;
mod driver;
mod fio;
mod load;
mod qsd;
mod report;
mod say;
mod shared;
mod stats;
mod vhost;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use report::{Plot, Row};
use say::say;
use stats::ms;
use std::{path::Path, time::Duration};

/// Measure qsd-csi against references in the same run.
#[derive(Debug, Parser)]
struct Args {
    /// Measure one part only
    #[arg(long)]
    only: Option<Part>,
    /// A short run whose figures mean little
    #[arg(long)]
    quick: bool,
    /// How the client of the data plane learns that a request has ended
    #[arg(long, value_enum, default_value = "eventfd")]
    wait: vhost::Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Control,
    Data,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    tokio::select! {
        done = run(&args) => done,
        // What was started is ended by being dropped.
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
    }
}

async fn run(args: &Args) -> anyhow::Result<()> {
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(2).context("this program lies in target/")?;
    let target = target.join("bench");
    std::fs::create_dir_all(&target)?;
    let wants = |part| args.only.is_none_or(|only| only == part);
    let (mut rows, mut plots) = (Vec::new(), Vec::new());
    if wants(Part::Control) {
        control(&target, args.quick, &mut rows, &mut plots).await?;
    }
    if wants(Part::Data) {
        data(&target, args, &mut rows, &mut plots).await?;
    }
    for row in &rows {
        say(format_args!("{:58} {:9.2} {:3}  {}", row.name, row.value, row.unit, row.note));
    }
    let path = report::write(&target, &about(args.quick).await?, &rows, &plots)?;
    say(format_args!("report: {}", path.display()));
    Ok(())
}

async fn about(quick: bool) -> anyhow::Result<String> {
    let cores = std::thread::available_parallelism()?;
    let sockets = tempfile::tempdir()?;
    let qemu = qsd::Bare::start(sockets.path())?.version()?;
    let kind = if quick { "A quick run; its figures mean little. " } else { "" };
    Ok(format!("{kind}{cores} cores, qemu-storage-daemon {qemu}, {}.", fio::version().await?))
}

async fn control(
    target: &Path,
    quick: bool,
    rows: &mut Vec<Row>,
    plots: &mut Vec<Plot>,
) -> anyhow::Result<()> {
    say("control plane");
    let (counts, samples): (&[usize], _) = if quick { (&[1, 3], 5) } else { (&[1, 100, 500], 60) };
    let reference = control::reference(target, samples)?;
    let (steps, starts) = control::measure(target, counts, samples).await?;
    rows.extend(control::rows(&steps, &starts, &reference));
    let bars = steps.iter().flat_map(|step| {
        let bar = |name: &str, p50| (format!("{name}, {} volumes", step.volumes), ms(p50));
        [
            bar("CreateVolume", step.create.p50()),
            bar("Stage+Publish", step.attach.p50()),
            bar("Unpublish+Unstage", step.detach.p50()),
            bar("DeleteVolume", step.delete.p50()),
        ]
    });
    let title = "Latency of calls, p50";
    plots.push(Plot { file: "control.svg", title, unit: "ms", bars: bars.collect(), mark: None });
    Ok(())
}

async fn data(
    target: &Path,
    args: &Args,
    rows: &mut Vec<Row>,
    plots: &mut Vec<Plot>,
) -> anyhow::Result<()> {
    say("data plane");
    let (rounds, time) = if args.quick { (1, 200) } else { (5, 3000) };
    let pairs = data::measure(target, rounds, Duration::from_millis(time), args.wait).await?;
    rows.extend(data::rows(&pairs));
    let bars = pairs.iter().map(|pair| (pair.name.clone(), pair.ratio)).collect();
    let title = "Throughput, published volume to fio on a file";
    plots.push(Plot { file: "data.svg", title, unit: "x", bars, mark: Some(1.0) });
    Ok(())
}
