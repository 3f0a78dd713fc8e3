//! The data plane: a published volume against a plain file on the same file system.
//!
//! The client is what a VM would be, with one queue and one thread, once asleep until the daemon
//! signals an eventfd and once polling. Which is faster depends on the machine: a poller saves
//! the wake-ups, and takes a core, which on a machine with two is one of those that complete
//! durable writes. fio has one thread too.

use crate::{
    Plan, blocking,
    client::Client,
    driver::Driver,
    fio,
    graph::Cache,
    load::{Direction, Durability, Load, Order},
    plot::{Bar, Chart, Group},
    process::pss,
    report::{Report, Table},
    say::say,
    scratch::Paths,
    stats::{Goal, extremes, median, ratio},
    vhost::{Disk, Loading as _, Wait},
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

/// The clients of two volumes.
struct Disks {
    /// `cache: auto`, so a write is durable after a flush.
    auto: Disk,
    /// `cache: writethrough`, so a write is durable when it ends.
    writethrough: Disk,
}

/// A published volume.
struct Volume {
    id: &'static str,
    paths: Paths,
    layer: PathBuf,
    daemon: i32,
}

/// Publishes two volumes and measures them.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let mut driver = Driver::start(report.dir()).await?;
    let auto = Volume::publish(&mut driver, "auto", Cache::Writeback, plan.span).await?;
    let durable = Volume::publish(&mut driver, "durable", Cache::Writethrough, plan.span).await?;
    let before = pss(auto.daemon)?;
    let mut disks =
        Disks { auto: auto.open(plan.span).await?, writethrough: durable.open(plan.span).await? };
    let file = driver.scratch.disk().join("fio.raw");
    say(format!("writing all {} MiB of a plain file once ...", plan.span >> 20));
    fio::prepare(&file, plan.span).await?;

    let mut results = Vec::new();
    for group in groups(plan) {
        let has_goal = group.iter().any(|(_, goal)| goal.is_some());
        let rounds = if has_goal { plan.goal_rounds } else { plan.rounds };
        let measured;
        (disks, measured) = alternate(disks, &file, &group, rounds).await?;
        results.extend(measured);
    }
    drop(disks);
    let after = pss(auto.daemon)?;
    auto.remove(&mut driver.client).await?;
    durable.remove(&mut driver.client).await?;
    driver.end().await?;
    tell(&results, report)?;
    report.text(format!(
        "PSS of the first daemon, which has but one other of the driver's to share its program \
         with: {before} KiB before the load, {after} KiB after it."
    ));
    Ok(())
}

impl Volume {
    async fn publish(
        driver: &mut Driver,
        id: &'static str,
        cache: Cache,
        size: u64,
    ) -> anyhow::Result<Self> {
        let paths = driver.scratch.paths(id)?;
        driver.client.create(id, size, cache).await?;
        driver.client.attach(id, &paths).await?;
        let volumes = driver.client.list().await?;
        let volume = volumes.into_iter().find(|volume| volume.volume_id == id);
        let volume = volume.context("the volume is not listed")?;
        let layer = volume.layers.first().context("the volume has no layer")?.path.clone().into();
        let daemon = volume.attachment.and_then(|attachment| attachment.daemon);
        let daemon = daemon.context("the volume has no daemon")?.pid;
        Ok(Self { id, paths, layer, daemon })
    }

    /// A client of it, after a look that it stores what is written.
    async fn open(&self, span: u64) -> anyhow::Result<Disk> {
        let (socket, layer) = (self.paths.target.join("vhost.sock"), self.layer.clone());
        let open = blocking(move || {
            let mut disk = Disk::connect(&socket, MEMORY)?;
            check(&mut disk, &layer, span)?;
            drop(disk);
            let mut disk = Disk::connect(&socket, MEMORY)?; // a second client finds it, too
            prepare(&mut disk, span)?;
            Ok(disk)
        });
        open.await
    }

    async fn remove(self, client: &mut Client) -> anyhow::Result<()> {
        client.detach(self.id, &self.paths).await?;
        client.delete(self.id).await?;
        Ok(())
    }
}

impl Disks {
    /// The one that is as durable as a load wants it.
    fn of(&mut self, load: &Load) -> &mut Disk {
        match load.direction {
            Direction::Write(Durability::AtEnd) => &mut self.writethrough,
            Direction::Write(Durability::AfterFlush { .. } | Durability::AtLast)
            | Direction::Read => &mut self.auto,
        }
    }
}

/// What is measured, with the ratio to reach; the loads of a group alternate.
fn groups(plan: &Plan) -> Vec<Vec<(Load, Option<f64>)>> {
    let load = |order, direction, block, depth| Load {
        order,
        direction,
        block,
        depth,
        span: plan.span,
        time: plan.time,
    };
    let random = |direction, depth| load(Order::Random, direction, 4096, depth);
    let sequential = |direction| load(Order::Sequential, direction, 128 << 10, 8);
    let durable = Direction::Write(Durability::AtEnd);
    let flushed = |writes| Direction::Write(Durability::AfterFlush { writes });
    vec![
        vec![(random(Direction::Read, 1), None)],
        vec![(random(Direction::Read, 32), Some(0.75))],
        vec![(random(durable, 1), None), (random(flushed(1), 1), None)],
        vec![
            (random(durable, 32), Some(0.70)),
            (random(flushed(1), 32), None),
            (random(flushed(32), 32), None),
            (random(Direction::Write(Durability::AtLast), 32), None),
        ],
        vec![(sequential(Direction::Read), None)],
        vec![(sequential(durable), None)],
    ]
}

/// Reads must return what was written: here, from the next connection on, and in the layer.
fn check(disk: &mut Disk, layer: &Path, span: u64) -> anyhow::Result<()> {
    let capacity = disk.capacity()?;
    ensure!(capacity == span, "the disk has {capacity} bytes, not {span}");
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
    say(format!("writing all {} MiB of a disk once ...", span >> 20));
    disk.fill();
    disk.write_all(span)
}

async fn alternate(
    mut disks: Disks,
    file: &Path,
    group: &[(Load, Option<f64>)],
    rounds: usize,
) -> anyhow::Result<(Disks, Vec<Rounds>)> {
    let none = |(load, goal): &(Load, Option<f64>)| {
        let (fio, sleeping, polling) = (Vec::new(), Vec::new(), Vec::new());
        Rounds { load: *load, goal: *goal, fio, sleeping, polling }
    };
    let mut all: Vec<_> = group.iter().map(none).collect();
    for round in 1..=rounds {
        for one in &mut all {
            disks = one.round(disks, file).await?;
            let last = |rates: &[f64]| rates.last().copied().unwrap_or_default();
            let (fio, sleeping) = (last(&one.fio), last(&one.sleeping));
            let polling = last(&one.polling);
            say(format!(
                "{}, round {round} of {rounds}: fio {fio:.0}, eventfd {sleeping:.0} ({:.2}), \
                 polling {polling:.0} ({:.2})",
                one.load,
                ratio(sleeping, fio),
                ratio(polling, fio),
            ));
        }
    }
    Ok((disks, all))
}

impl Rounds {
    /// One more round.
    async fn round(&mut self, disks: Disks, file: &Path) -> anyhow::Result<Disks> {
        let load = self.load;
        self.fio.push(fio::run(file, &load).await?);
        let run = blocking(move || {
            let mut disks = disks;
            let sleeping = disks.of(&load).keep_up(&load, Wait::Eventfd)?;
            let polling = disks.of(&load).keep_up(&load, Wait::Polling)?;
            Ok((disks, sleeping, polling))
        });
        let (disks, sleeping, polling) = run.await?;
        self.sleeping.push(sleeping);
        self.polling.push(polling);
        Ok(disks)
    }

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
         system. Every block was written before. A *durable* write is durable when it ends: the \
         volume has `cache: writethrough`, fio opens with O_DSYNC. All else is a volume with \
         `cache: auto`, and of its writes those are durable that were flushed: `flush after each` \
         is a queue in which each slot writes and then flushes, as so many processes would that \
         call fdatasync after each write, against fio with fdatasync=1; with `flush after 32` each \
         slot writes 32 times in between, and fio has a thread a slot. Flushes are not counted. \
         The sides alternate; IOPS are medians over the rounds, a ratio is the median of the \
         ratios of each round.",
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
    compare(results, report);
    report.figure("data.svg", "requests a second, as a ratio to fio", &chart(results))
}

/// Volumes with `cache: auto` against the one with `cache: writethrough`, in the same rounds.
fn compare(results: &[Rounds], report: &mut Report) {
    report.text(
        "The same writes with `cache: auto` against durable ones of a volume with `cache: \
         writethrough`, in the same rounds and at the same depth: medians of the ratios of each \
         round, in brackets the lowest and the highest. With a flush after each, both promise the \
         same.",
    );
    let mut table = Table::new(["cache: auto", "client asleep (eventfd)", "client polling"]);
    for durable in results.iter().filter(|one| one.load.is_durable_at_end()) {
        let others = results.iter().filter(|one| one.load.is_otherwise_durable(&durable.load));
        for other in others {
            let cell = |own: &[f64], base: &[f64]| {
                let ratios = || own.iter().zip(base).map(|(own, base)| ratio(*own, *base));
                let (lowest, highest) = extremes(ratios());
                format!("{:.2} ({lowest:.2} to {highest:.2})", median(ratios()))
            };
            table.row([
                other.load.to_string(),
                cell(&other.sleeping, &durable.sleeping),
                cell(&other.polling, &durable.polling),
            ]);
        }
    }
    report.table(&table);
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
