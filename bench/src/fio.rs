//! fio on a plain file: what the disk below gives without any of this.

use crate::load::{Direction, Durability, Load, Order};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::{path::Path, process::Output};
use tokio::process::Command;

const PROGRAM: &str = "fio";

/// The version of fio.
pub(crate) async fn version() -> anyhow::Result<String> {
    let output = output(Command::new(PROGRAM).arg("--version")).await?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Writes all of the file once, so that later requests meet blocks that are there.
pub(crate) async fn prepare(file: &Path, size: u64) -> anyhow::Result<()> {
    let mut fio = command(file, size);
    fio.args(["--rw=write", "--bs=1M", "--iodepth=8", "--fallocate=none", "--end_fsync=1"]);
    output(&mut fio).await.map(drop)
}

/// Keeps `load` up for its time; requests a second. What is written is as durable as it says.
pub(crate) async fn run(file: &Path, load: &Load) -> anyhow::Result<f64> {
    let mut fio = command(file, load.span);
    let (pattern, part) = match (load.order, load.direction) {
        (Order::Random, Direction::Read) => ("randread", "read"),
        (Order::Random, Direction::Write(_)) => ("randwrite", "write"),
        (Order::Sequential, Direction::Read) => ("read", "read"),
        (Order::Sequential, Direction::Write(_)) => ("write", "write"),
    };
    fio.arg(format!("--rw={pattern}"))
        .arg(format!("--bs={}", load.block))
        .arg(format!("--runtime={}ms", load.time.as_millis()))
        .args(["--time_based", "--norandommap", "--group_reporting"]);
    let flushes = match load.direction {
        Direction::Write(Durability::AfterFlush { writes }) => writes,
        Direction::Write(Durability::AtEnd) => {
            fio.arg("--sync=dsync");
            0
        }
        Direction::Write(Durability::AtLast) | Direction::Read => 0,
    };
    fio.arg(format!("--fdatasync={flushes}"));
    if flushes > 1 {
        // With a queue fio 3.33 flushes some ten times as often as it is told to.
        fio.args(["--thread", "--ioengine=psync"]).arg(format!("--numjobs={}", load.depth));
    } else {
        fio.arg(format!("--iodepth={}", load.depth));
    }
    let report: Value = serde_json::from_slice(&output(&mut fio).await?.stdout)?;
    let job = &report["jobs"][0];
    let done = job[part]["total_ios"].as_u64().unwrap_or_default();
    let syncs = job["sync"]["lat_ns"]["N"].as_u64().unwrap_or_default();
    // Some are under way at the end.
    let expected = done.checked_div(flushes).unwrap_or_default().saturating_sub(load.depth.into());
    ensure!(syncs >= expected, "fio flushed {syncs} times, not {expected}");
    let rate = job[part]["iops"].as_f64();
    rate.with_context(|| format!("fio did not say how many {part}s a second there were"))
}

/// One thread, direct I/O through `io_uring`, as the daemons do it, unless something else is said.
fn command(file: &Path, size: u64) -> Command {
    let mut fio = Command::new(PROGRAM);
    fio.args(["--name=reference", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={size}"));
    fio
}

async fn output(command: &mut Command) -> anyhow::Result<Output> {
    let output = command.kill_on_drop(true).output().await.context(PROGRAM)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "fio: {}: {said}", output.status);
    Ok(output)
}
