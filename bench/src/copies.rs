//! Restores and clones: how long until a copy can be used, and that its size does not matter.
//!
//! Usable: created, staged and published, so that a VM could connect.

use crate::{
    Plan, blocking,
    driver::Driver,
    graph::Cache,
    report::{Report, Table},
    say::say,
    stats::{Goal, Samples, ms, ratio},
};
use anyhow::Context as _;
use std::{fs::OpenOptions, os::unix::fs::FileExt as _, path::PathBuf};

/// Sizes of what is copied; the first is the reference.
const SIZES: [(&str, u64); 2] = [("1gi", 1 << 30), ("1ti", 1 << 40)];

/// A copy is usable within this time, in milliseconds.
const GOAL: f64 = 30.0;

/// Times of one size.
#[derive(Debug, Default)]
struct Times {
    snapshot: Samples,
    restore: Samples,
    clone: Samples,
    blank: Samples,
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
    times.snapshot.push(client.snapshot(&snapshot, name).await?);
    let made = client.restore(&copy, &snapshot, Cache::Writeback).await?;
    times.restore.push(made + client.attach(&copy, &paths).await?);
    client.detach(&copy, &paths).await?;
    client.delete(&copy).await?;
    let made = client.clone_of(&copy, name).await?;
    times.clone.push(made + client.attach(&copy, &paths).await?);
    client.detach(&copy, &paths).await?;
    client.delete(&copy).await?;
    let made = client.create(&copy, size, Cache::Writeback).await?;
    times.blank.push(made + client.attach(&copy, &paths).await?);
    client.detach(&copy, &paths).await?;
    client.delete(&copy).await?;
    client.delete_snapshot(&snapshot).await?;
    Ok(())
}

fn tell(times: &[Times; 2], report: &mut Report) {
    report.heading("Snapshots and copies");
    report.text(
        "Milliseconds: a snapshot of a volume that is at rest; and until a copy can be used, that \
         is created, staged and published, from a snapshot (restore) and from a volume (clone), \
         beside a blank volume of the same size. The ratio is that of the large size to the small \
         one, in the same rounds.",
    );
    let [small, large] = times;
    let mut table = Table::new(["what", "1 GiB p50 / p99", "1 TiB p50 / p99", "ratio", "goal"]);
    let rows = [
        ("snapshot", &small.snapshot, &large.snapshot, None),
        ("restore, until usable", &small.restore, &large.restore, Some(GOAL)),
        ("clone, until usable", &small.clone, &large.clone, Some(GOAL)),
        ("blank, until usable", &small.blank, &large.blank, None),
    ];
    for (name, small, large, goal) in rows {
        let cell =
            |samples: &Samples| format!("{:.1} / {:.1}", ms(samples.p50()), ms(samples.p99()));
        table.row([
            name.to_owned(),
            cell(small),
            cell(large),
            format!("{:.2}", ratio(ms(large.p50()), ms(small.p50()))),
            goal.map_or_else(String::new, |goal| Goal::AtMost(goal).judge(ms(large.p50()))),
        ]);
    }
    report.table(&table);
}
