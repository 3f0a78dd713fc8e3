//! Restores and clones: how long until a copy can be used, and that its size does not matter.
//!
//! Usable: created, staged, published, and read through the published socket.

use crate::{
    Plan, blocking,
    client::Client,
    driver::Driver,
    graph::Cache,
    report::{Report, Table},
    say::say,
    scratch::Paths,
    stats::{Goal, Samples, ms, ratio},
    vhost::{Disk, Request, Wait},
};
use anyhow::{Context as _, ensure};
use qsd_csi::csi::pb::inspect;
use std::{fs::OpenOptions, os::unix::fs::FileExt as _, path::PathBuf, time::Duration};
use tokio::time::{Instant, sleep};

/// Sizes of what is copied; the first is the reference.
const SIZES: [(&str, u64); 2] = [("1gi", 1 << 30), ("1ti", 1 << 40)];

/// A copy is usable within this time, in milliseconds.
const GOAL: f64 = 30.0;

/// What it takes until a volume can be used.
const PARTS: [&str; 4] = ["CreateVolume", "NodeStageVolume", "NodePublishVolume", "first read"];

/// How long what the driver does by itself may take, and how often it is looked at.
const REST: Duration = Duration::from_mins(1);
const LOOK: Duration = Duration::from_millis(50);

/// What is read.
const BLOCK: usize = 4096;

/// Times of one size.
#[derive(Debug, Default)]
struct Times {
    snapshot: Samples,
    restore: Usable,
    clone: Usable,
    blank: Usable,
}

/// Times until a volume can be used: all of it, and each part.
#[derive(Debug, Default)]
struct Usable {
    all: Samples,
    parts: [Samples; PARTS.len()],
}

/// Measures copies of a small and a large volume, in turns.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let mut driver = Driver::start(report.dir()).await?;
    for (name, size) in SIZES {
        driver.client.create(name, size, Cache::Writeback).await?;
        // As much as fits into the small one, and ten times that into the large one.
        fill(&mut driver, name, plan.span.min(size / 2) * if size > 1 << 30 { 10 } else { 1 })
            .await?;
    }
    let mut times = SIZES.map(|_| Times::default());
    for round in 0..plan.samples / 2 {
        for ((name, size), times) in SIZES.iter().zip(&mut times) {
            turn(&mut driver, name, *size, round, times).await?;
        }
    }
    say(format!("{} copies of each size", plan.samples / 2));
    for (name, _) in SIZES {
        driver.client.delete(name).await?;
    }
    driver.end().await?;
    tell(&times, report);
    Ok(())
}

/// Writes so much into the layer of a volume that nobody has open, all over it.
async fn fill(driver: &mut Driver, volume: &str, bytes: u64) -> anyhow::Result<()> {
    let volumes = driver.client.list().await?;
    let found = volumes.iter().find(|one| one.volume_id == volume).context("no such volume")?;
    let layer = PathBuf::from(&found.layers.first().context("a volume without a layer")?.path);
    let size = u64::try_from(found.capacity_bytes)?;
    say(format!("writing {} MiB into a volume of {} GiB ...", bytes >> 20, size >> 30));
    blocking(move || {
        let file = OpenOptions::new().write(true).open(layer)?;
        let block = vec![7; 1 << 20];
        let blocks = bytes >> 20;
        for number in 0..blocks {
            file.write_all_at(&block, (size / blocks * number) & !4095)?;
        }
        Ok(file.sync_all()?)
    })
    .await
}

/// One snapshot, one volume made from it, one clone, and one blank volume to compare with.
async fn turn(
    driver: &mut Driver,
    name: &str,
    size: u64,
    round: usize,
    times: &mut Times,
) -> anyhow::Result<()> {
    let [snapshot, copy] = ["snapshot", "copy"].map(|what| format!("{what}-{name}-{round}"));
    let paths = driver.scratch.paths(&copy)?;
    let client = &mut driver.client;
    rest(client, 1).await?;
    times.snapshot.push(client.snapshot(&snapshot, name).await?);
    let made = client.restore(&copy, &snapshot, Cache::Writeback).await?;
    use_it(client, &copy, &paths, made, &mut times.restore).await?;
    rest(client, 2).await?;
    let made = client.clone_of(&copy, name).await?;
    use_it(client, &copy, &paths, made, &mut times.clone).await?;
    rest(client, 2).await?;
    let made = client.create(&copy, size, Cache::Writeback).await?;
    use_it(client, &copy, &paths, made, &mut times.blank).await?;
    client.delete_snapshot(&snapshot).await?;
    Ok(())
}

/// Waits until the driver has merged what was left to be merged, which would take a core meanwhile:
/// until no volume has more layers than that, and no job runs.
async fn rest(client: &mut Client, most: usize) -> anyhow::Result<()> {
    let begin = Instant::now();
    let at_rest = |volume: &inspect::Volume| {
        volume.layers.len() <= most && volume.layers.iter().all(|layer| layer.job.is_none())
    };
    while !client.list().await?.iter().all(at_rest) {
        ensure!(begin.elapsed() < REST, "layers are not merged");
        sleep(LOOK).await;
    }
    Ok(())
}

/// Uses a volume that was made within this time, and removes it.
async fn use_it(
    client: &mut Client,
    volume: &str,
    paths: &Paths,
    made: Duration,
    times: &mut Usable,
) -> anyhow::Result<()> {
    let staged = client.stage(volume, paths).await?;
    let published = client.publish(volume, paths).await?;
    let (socket, begin) = (paths.target.join("vhost.sock"), Instant::now());
    blocking(move || {
        let mut disk = Disk::connect(&socket, BLOCK)?;
        disk.run(Request::Read { offset: 0, memory: 0..BLOCK }, Wait::Eventfd)
    })
    .await?;
    let parts = [made, staged, published, begin.elapsed()];
    times.all.push(parts.iter().sum());
    for (samples, part) in times.parts.iter_mut().zip(parts) {
        samples.push(part);
    }
    client.detach(volume, paths).await?;
    client.delete(volume).await?;
    Ok(())
}

fn tell(times: &[Times; 2], report: &mut Report) {
    report.heading("Snapshots and copies");
    report.text(
        "Milliseconds: a snapshot of a volume that is at rest; and until a copy can be used, that \
         is created, staged, published, and read through its socket for the first time, from a \
         snapshot (restore) and from a volume (clone), beside a blank volume of the same size. The \
         ratio is that of the large size to the small one, in the same rounds. Each begins when the \
         driver has merged what the one before has left.",
    );
    let [small, large] = times;
    let cell = |samples: &Samples| format!("{:.1} / {:.1}", ms(samples.p50()), ms(samples.p99()));
    let mut table = Table::new(["what", "1 GiB p50 / p99", "1 TiB p50 / p99", "ratio", "goal"]);
    let mut row = |name: String, small: &Samples, large: &Samples, goal: Option<f64>| {
        table.row([
            name,
            cell(small),
            cell(large),
            format!("{:.2}", ratio(ms(large.p50()), ms(small.p50()))),
            goal.map_or_else(String::new, |goal| Goal::AtMost(goal).judge(ms(large.p50()))),
        ]);
    };
    row("snapshot".to_owned(), &small.snapshot, &large.snapshot, None);
    for (name, small, large, goal) in [
        ("restore", &small.restore, &large.restore, Some(GOAL)),
        ("clone", &small.clone, &large.clone, Some(GOAL)),
        ("blank", &small.blank, &large.blank, None),
    ] {
        row(format!("{name}, until usable"), &small.all, &large.all, goal);
        for ((part, small), large) in PARTS.iter().zip(&small.parts).zip(&large.parts) {
            row(format!("{name}: {part}"), small, large, None);
        }
    }
    report.table(&table);
}
