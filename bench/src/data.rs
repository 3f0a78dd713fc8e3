//! The data plane: a published volume against a plain file on the same file system.
//!
//! The client is what a VM would be, with one queue and one thread, once asleep until the daemon
//! signals an eventfd and once polling. Which is faster depends on the machine: a poller saves
//! the wake-ups, and takes a core, which on a machine with two is one of those that complete
//! durable writes. fio has one thread too.

use crate::Plan;
use crate::{
    blocking,
    driver::Driver,
    fio,
    load::{Direction, Load, Order},
    plot::{Bar, Chart, Group},
    process::pss,
    report::{Report, Table},
    say::say,
    stats::{Goal, median, ratio},
    vhost::{Disk, Wait},
};
use anyhow::{Context as _, ensure};
use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

/// Memory for requests in flight: 8 of 1 MiB.
const MEMORY: usize = 8 << 20;

/// Blocks that are written, read back and compared.
const CHECKED: u64 = 512;

/// Requests a second of all rounds of one load.
#[derive(Debug)]
struct Rounds {
    load: Load,
    goal: Option<f64>,
    fio: Vec<f64>,
    sleeping: Vec<f64>,
    polling: Vec<f64>,
}

/// Publishes a volume and measures it.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let mut driver = Driver::start(report.dir()).await?;
    let paths = driver.scratch.paths("data")?;
    driver.client.create("data", plan.span).await?;
    driver.client.attach("data", &paths).await?;
    let volumes = driver.client.list().await?;
    let volume = volumes.into_iter().next().context("the volume is not listed")?;
    let layer = volume.layers.first().context("the volume has no layer")?;
    let daemon = volume.attachment.and_then(|attachment| attachment.daemon);
    let daemon = daemon.context("the volume has no daemon")?.pid;
    let before = pss(daemon)?;

    let socket = paths.target.join("vhost.sock");
    let (layer, span) = (PathBuf::from(&layer.path), plan.span);
    let disk = blocking(move || {
        let mut disk = Disk::connect(&socket, MEMORY)?;
        check(&mut disk, &layer, span)?;
        drop(disk);
        let mut disk = Disk::connect(&socket, MEMORY)?; // a second client finds it, too
        prepare(&mut disk, span)?;
        Ok(disk)
    });
    let mut disk = disk.await?;
    let file = driver.scratch.disk().join("fio.raw");
    fio::prepare(&file, plan.span).await?;

    let mut results = Vec::new();
    for (load, goal) in loads(plan) {
        let rounds = if goal.is_some() { plan.goal_rounds } else { plan.rounds };
        let measured;
        (disk, measured) = alternate(disk, &file, load, goal, rounds).await?;
        results.push(measured);
    }
    drop(disk);
    let after = pss(daemon)?;
    driver.client.detach("data", &paths).await?;
    driver.client.delete("data").await?;
    driver.end().await?;
    tell(&results, report)?;
    report.text(format!(
        "PSS of its daemon, which has no other of the driver's to share its program with: \
         {before} KiB before the load, {after} KiB after it."
    ));
    Ok(())
}

/// What is measured, with the ratio to reach.
fn loads(plan: &Plan) -> Vec<(Load, Option<f64>)> {
    let load = |order, direction, block, depth| Load {
        order,
        direction,
        block,
        depth,
        span: plan.span,
        time: plan.time,
    };
    let (random, sequential) = (Order::Random, Order::Sequential);
    vec![
        (load(random, Direction::Read, 4096, 1), None),
        (load(random, Direction::Read, 4096, 32), Some(0.75)),
        (load(random, Direction::Write, 4096, 1), None),
        (load(random, Direction::Write, 4096, 32), Some(0.70)),
        (load(sequential, Direction::Read, 128 << 10, 8), None),
        (load(sequential, Direction::Write, 128 << 10, 8), None),
    ]
}

/// Reads must return what was written: here, from the next connection on, and in the layer.
fn check(disk: &mut Disk, layer: &Path, span: u64) -> anyhow::Result<()> {
    ensure!(disk.capacity() == span, "the disk has {} bytes, not {span}", disk.capacity());
    let step = span / CHECKED;
    let block = |n: u64| -> Vec<u8> { n.to_le_bytes().repeat(512) };
    for n in 0..CHECKED {
        disk.write(n * step, &block(n + 1))?;
    }
    let file = File::open(layer)?;
    let mut stored = vec![0; 4096];
    for n in 0..CHECKED {
        ensure!(disk.read(n * step, 4096)? == block(n + 1), "block {n} reads as something else");
        file.read_exact_at(&mut stored, n * step)?;
        ensure!(stored == block(n + 1), "block {n} is not in the layer");
    }
    say(format!("{CHECKED} blocks read back as they were written, and are in the layer"));
    Ok(())
}

/// Writes all of the disk once, so that later requests meet blocks that are there.
fn prepare(disk: &mut Disk, span: u64) -> anyhow::Result<()> {
    say(format!("writing all {} MiB once, on both sides ...", span >> 20));
    disk.fill();
    disk.write_all(span)
}

async fn alternate(
    mut disk: Disk,
    file: &Path,
    load: Load,
    goal: Option<f64>,
    rounds: usize,
) -> anyhow::Result<(Disk, Rounds)> {
    let (fio, sleeping, polling) = (Vec::new(), Vec::new(), Vec::new());
    let mut all = Rounds { load, goal, fio, sleeping, polling };
    for round in 1..=rounds {
        all.fio.push(fio::run(file, &load).await?);
        for wait in [Wait::Eventfd, Wait::Polling] {
            let rate;
            (disk, rate) = blocking(move || {
                let rate = disk.run(&load, wait)?;
                Ok((disk, rate))
            })
            .await?;
            match wait {
                Wait::Eventfd => all.sleeping.push(rate),
                Wait::Polling => all.polling.push(rate),
            }
        }
        let last = |rates: &[f64]| rates.last().copied().unwrap_or_default();
        let (fio, sleeping, polling) = (last(&all.fio), last(&all.sleeping), last(&all.polling));
        say(format!(
            "{load}, round {round} of {rounds}: fio {fio:.0}, eventfd {sleeping:.0} ({:.2}), \
             polling {polling:.0} ({:.2})",
            ratio(sleeping, fio),
            ratio(polling, fio),
        ));
    }
    Ok((disk, all))
}

impl Rounds {
    /// The median of the ratios of each pair.
    fn ratio(&self, wait: Wait) -> f64 {
        let rates = match wait {
            Wait::Eventfd => &self.sleeping,
            Wait::Polling => &self.polling,
        };
        median(rates.iter().zip(&self.fio).map(|(rate, fio)| ratio(*rate, *fio)))
    }

    fn best(&self) -> (f64, &'static str) {
        let (sleeping, polling) = (self.ratio(Wait::Eventfd), self.ratio(Wait::Polling));
        if polling > sleeping { (polling, "polling") } else { (sleeping, "eventfd") }
    }
}

fn tell(results: &[Rounds], report: &mut Report) -> anyhow::Result<()> {
    report.heading("Data plane");
    report.text(
        "Requests a second (IOPS) through the published vhost-user-blk socket, one queue and one \
         thread, against fio (`io_uring`, direct I/O, one thread) on a file of the same file \
         system. Every block was written before. A write is durable when it ends: the export is \
         writethrough, fio opens with O_DSYNC. The sides alternate; IOPS are medians over the \
         rounds, a ratio is the median of the ratios of each round.",
    );
    let mut table = Table::new([
        "load",
        "fio IOPS",
        "client asleep (eventfd)",
        "ratio",
        "client polling",
        "ratio",
        "the faster client",
    ]);
    for rounds in results {
        let rate = |rates: &[f64]| format!("{:.0}", median(rates.iter().copied()));
        let (best, name) = rounds.best();
        table.row([
            rounds.load.to_string(),
            rate(&rounds.fio),
            rate(&rounds.sleeping),
            format!("{:.2}", rounds.ratio(Wait::Eventfd)),
            rate(&rounds.polling),
            format!("{:.2}", rounds.ratio(Wait::Polling)),
            match rounds.goal {
                Some(goal) => format!("{name} {best:.2}; {}", Goal::AtLeast(goal).judge(best)),
                None => format!("{name} {best:.2}"),
            },
        ]);
    }
    report.table(&table);
    report.figure("data.svg", "requests a second, as a ratio to fio", &chart(results))
}

fn chart(results: &[Rounds]) -> Chart {
    let bar = |name: &str, value| Bar { name: name.to_owned(), value, upto: None };
    let group = |rounds: &Rounds| Group {
        name: rounds.load.to_string(),
        bars: vec![
            bar("client asleep (eventfd)", rounds.ratio(Wait::Eventfd)),
            bar("client polling", rounds.ratio(Wait::Polling)),
        ],
    };
    Chart {
        title: "Requests a second as a ratio to fio on a plain file (line: fio)".to_owned(),
        unit: "ratio",
        groups: results.iter().map(group).collect(),
        goal: Some(1.0),
    }
}
