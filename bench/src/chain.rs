//! Layers: what it costs to read through many of them, and to write durably into an overlay.
//!
//! A volume is made deep by snapshots. Between two of them every n-th block is written, so that each
//! layer of a chain of n holds its share, and a random read may go to any of them.

use crate::{
    Plan, blocking,
    client::Client,
    driver::Driver,
    graph::Cache,
    load::{Direction, Durability, Load, Order},
    plot::{Bar, Chart, Group},
    report::{Report, Table},
    say::say,
    scratch::Paths,
    stats::{extremes, median, ratio},
    vhost::{Disk, Loading as _, Wait},
};
use anyhow::ensure;

/// Layers of the volumes that are read; the first is the reference.
const DEPTHS: [u64; 3] = [1, 4, 8];

/// Bytes of a block that lies in one layer: smaller than a cluster of an overlay.
const SHARE: u64 = 16 << 10;

/// Memory for requests in flight.
const MEMORY: usize = 1 << 20;

/// What durable writes go to, in the order of a round.
const TARGETS: [Target; 5] = [
    Target { id: "raw", cache: Cache::Writethrough, kind: Kind::Raw },
    Target { id: "thin", cache: Cache::Writethrough, kind: Kind::Thin },
    Target { id: "worn", cache: Cache::Writethrough, kind: Kind::Worn },
    Target { id: "fresh", cache: Cache::Writethrough, kind: Kind::Fresh },
    Target { id: "auto", cache: Cache::Writeback, kind: Kind::Raw },
];

/// A volume that is written to.
#[derive(Clone, Copy, Debug)]
struct Target {
    id: &'static str,
    cache: Cache,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A raw layer with every block written before.
    Raw,
    /// A raw layer that has nothing yet; another one each round.
    Thin,
    /// An overlay with every block written before.
    Worn,
    /// An overlay that has nothing yet; another one each round.
    Fresh,
}

impl Kind {
    fn is_overlay(self) -> bool {
        matches!(self, Self::Worn | Self::Fresh)
    }
}

/// Rates of one volume, a round each.
#[derive(Debug, Default)]
struct Rates {
    asleep: Vec<f64>,
    polling: Vec<f64>,
}

/// Measures reads through chains, and durable writes.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let mut driver = Driver::start(report.dir()).await?;
    let reads = reads(&mut driver, plan).await?;
    let writes = writes(&mut driver, plan).await?;
    driver.end().await?;
    tell_reads(&reads, report)?;
    tell_writes(&writes, report);
    Ok(())
}

async fn reads(driver: &mut Driver, plan: &Plan) -> anyhow::Result<Vec<Rates>> {
    let load = load(plan, Direction::Read, 32);
    let mut disks = Vec::new();
    for depth in DEPTHS {
        let id = format!("chain-{depth}");
        let paths = driver.scratch.paths(&id)?;
        driver.client.create(&id, plan.span, Cache::Writeback).await?;
        driver.client.attach(&id, &paths).await?;
        let disk = deepen(&mut driver.client, &id, &paths, depth, plan.span).await?;
        disks.push(disk);
    }
    let rounds = plan.goal_rounds;
    let run = blocking(move || {
        let mut rates: Vec<_> = DEPTHS.iter().map(|_| Rates::default()).collect();
        for round in 1..=rounds {
            for (disk, rates) in disks.iter_mut().zip(&mut rates) {
                rates.asleep.push(disk.keep_up(&load, Wait::Eventfd)?);
                rates.polling.push(disk.keep_up(&load, Wait::Polling)?);
            }
            say(format!("{load} through {DEPTHS:?} layers, round {round} of {rounds}"));
        }
        Ok(rates)
    });
    let rates = run.await?;
    for depth in DEPTHS {
        let id = format!("chain-{depth}");
        let paths = driver.scratch.paths(&id)?;
        driver.client.detach(&id, &paths).await?;
        driver.client.delete(&id).await?;
        for level in 1..depth {
            driver.client.delete_snapshot(&format!("{id}-{level}")).await?;
        }
    }
    Ok(rates)
}

/// Makes a chain of an attached volume: each layer has its share of the blocks.
async fn deepen(
    client: &mut Client,
    id: &str,
    paths: &Paths,
    depth: u64,
    span: u64,
) -> anyhow::Result<Disk> {
    let socket = paths.target.join("vhost.sock");
    let mut disk = blocking(move || {
        let mut disk = Disk::connect(&socket, MEMORY)?;
        disk.fill();
        disk.write_all(span)?;
        Ok(disk)
    })
    .await?;
    for level in 1..depth {
        client.snapshot(&format!("{id}-{level}"), id).await?;
        disk = blocking(move || {
            let block = vec![u8::try_from(level)?; usize::try_from(SHARE)?];
            for number in (0..span / SHARE).filter(|number| number % depth == level) {
                disk.write(number * SHARE, &block)?;
            }
            Ok(disk)
        })
        .await?;
    }
    let volumes = client.list().await?;
    let found = volumes.iter().find(|volume| volume.volume_id == id);
    let layers = found.map_or(0, |volume| volume.layers.len());
    ensure!(u64::try_from(layers)? == depth, "{id} has {layers} layers, not {depth}");
    say(format!("a volume of {depth} layers ..."));
    Ok(disk)
}

async fn writes(driver: &mut Driver, plan: &Plan) -> anyhow::Result<Vec<[Rates; TARGETS.len()]>> {
    let loads = write_loads(plan);
    let mut rates: Vec<[Rates; TARGETS.len()]> = loads.iter().map(|_| Default::default()).collect();
    for target in TARGETS {
        driver.client.create(target.id, plan.span, target.cache).await?;
        let paths = driver.scratch.paths(target.id)?;
        driver.client.attach(target.id, &paths).await?;
        fill(&paths, plan.span).await?;
        if target.kind.is_overlay() {
            driver.client.snapshot(&format!("{}-0", target.id), target.id).await?;
        }
        if target.kind == Kind::Worn {
            fill(&paths, plan.span).await?;
        }
    }
    for round in 1..=plan.rounds {
        for (load, rates) in loads.iter().zip(&mut rates) {
            for (target, rates) in TARGETS.iter().zip(rates) {
                let paths = driver.scratch.paths(target.id)?;
                let socket = paths.target.join("vhost.sock");
                for (wait, rates) in
                    [(Wait::Eventfd, &mut rates.asleep), (Wait::Polling, &mut rates.polling)]
                {
                    if matches!(target.kind, Kind::Thin | Kind::Fresh) {
                        refresh(driver, *target, &paths, plan.span).await?;
                    }
                    let (socket, load) = (socket.clone(), *load);
                    let run = blocking(move || {
                        let mut disk = Disk::connect(&socket, MEMORY)?;
                        disk.fill();
                        disk.keep_up(&load, wait)
                    });
                    rates.push(run.await?);
                }
            }
            say(format!("{load} to raw and overlays, round {round} of {}", plan.rounds));
        }
    }
    for target in TARGETS {
        let paths = driver.scratch.paths(target.id)?;
        driver.client.detach(target.id, &paths).await?;
        driver.client.delete(target.id).await?;
        if target.kind.is_overlay() {
            driver.client.delete_snapshot(&format!("{}-0", target.id)).await?;
        }
    }
    Ok(rates)
}

/// A volume anew, whose active layer has nothing yet.
async fn refresh(
    driver: &mut Driver,
    target: Target,
    paths: &Paths,
    span: u64,
) -> anyhow::Result<()> {
    let Target { id, cache, kind } = target;
    driver.client.detach(id, paths).await?;
    driver.client.delete(id).await?;
    if kind.is_overlay() {
        driver.client.restore(id, &format!("{id}-0"), cache).await?;
    } else {
        driver.client.create(id, span, cache).await?;
    }
    driver.client.attach(id, paths).await?;
    Ok(())
}

async fn fill(paths: &Paths, span: u64) -> anyhow::Result<()> {
    let socket = paths.target.join("vhost.sock");
    blocking(move || {
        let mut disk = Disk::connect(&socket, MEMORY)?;
        disk.fill();
        disk.write_all(span)
    })
    .await
}

fn load(plan: &Plan, direction: Direction, depth: u16) -> Load {
    let (order, block, span, time) = (Order::Random, 4096, plan.span, plan.time);
    Load { order, direction, block, depth, span, time }
}

fn write_loads(plan: &Plan) -> [Load; 3] {
    [
        load(plan, Direction::Write(Durability::AtEnd), 1),
        load(plan, Direction::Write(Durability::AtEnd), 32),
        load(plan, Direction::Write(Durability::AfterFlush { writes: 32 }), 32),
    ]
}

/// The median of the ratios of each round, and the lowest and the highest.
fn against(own: &[f64], base: &[f64]) -> String {
    let ratios = || own.iter().zip(base).map(|(own, base)| ratio(*own, *base));
    let (lowest, highest) = extremes(ratios());
    format!("{:.2} ({lowest:.2} to {highest:.2})", median(ratios()))
}

fn tell_reads(reads: &[Rates], report: &mut Report) -> anyhow::Result<()> {
    report.heading("Reading through layers");
    report.text(
        "4 KiB random reads a second at depth 32 through the published socket. Every layer of a \
         chain holds its share of the blocks; one layer is raw, the others are overlays. Rates \
         are medians; a ratio is the median of the ratios of each round to the volume of one \
         layer, in brackets the lowest and the highest.",
    );
    let mut table = Table::new(["layers", "asleep (eventfd)", "ratio", "polling", "ratio"]);
    for (depth, rates) in DEPTHS.iter().zip(reads) {
        let rate = |rates: &[f64]| format!("{:.0}", median(rates.iter().copied()));
        table.row([
            depth.to_string(),
            rate(&rates.asleep),
            against(&rates.asleep, &reads[0].asleep),
            rate(&rates.polling),
            against(&rates.polling, &reads[0].polling),
        ]);
    }
    report.table(&table);
    let middle = |own: &[f64], base: &[f64]| {
        median(own.iter().zip(base).map(|(own, base)| ratio(*own, *base)))
    };
    let bar = |name: &str, value| Bar { name: name.to_owned(), value, upto: None };
    let group = |(depth, rates): (&u64, &Rates)| Group {
        name: format!("{depth} layers"),
        bars: vec![
            bar("asleep (eventfd)", middle(&rates.asleep, &reads[0].asleep)),
            bar("polling", middle(&rates.polling, &reads[0].polling)),
        ],
    };
    let chart = Chart {
        title: "Reads a second through a chain, as a ratio to one raw layer".to_owned(),
        unit: "ratio",
        groups: DEPTHS.iter().zip(reads).map(group).collect(),
        goal: Some(1.0),
    };
    report.figure("chain.svg", "reads a second through a chain", &chart)
}

fn tell_writes(writes: &[[Rates; TARGETS.len()]], report: &mut Report) {
    report.heading("Writing into an overlay");
    report.text(
        "4 KiB random writes a second, each durable when it is acknowledged (`cache: writethrough`), \
         as ratios in the same round. In `raw` and `overlay` (qcow2) every block was written before; \
         `thin` and `fresh` are the same with nothing in them yet, so that each first write also \
         allocates. An overlay always acknowledges so, as its tables are in the memory of the \
         daemon. `auto` is the raw volume as it is by default, which acknowledges before, and is \
         durable after a flush.",
    );
    let columns = [
        "load",
        "raw: asleep / polling",
        "overlay : raw",
        "thin : raw",
        "fresh : thin",
        "auto : raw",
    ];
    let mut table = Table::new(columns);
    for (load, [raw, thin, worn, fresh, auto]) in LOADS.iter().zip(writes) {
        let rate = |rates: &[f64]| format!("{:.0}", median(rates.iter().copied()));
        let cell = |own: &Rates, base: &Rates| {
            let asleep = against(&own.asleep, &base.asleep);
            format!("{asleep} / {}", against(&own.polling, &base.polling))
        };
        table.row([
            (*load).to_owned(),
            format!("{} / {}", rate(&raw.asleep), rate(&raw.polling)),
            cell(worn, raw),
            cell(thin, raw),
            cell(fresh, thin),
            cell(auto, raw),
        ]);
    }
    report.table(&table);
}

/// What the loads of `write_loads` are called.
const LOADS: [&str; 3] = ["durable, depth 1", "durable, depth 32", "depth 32, flush after 32"];
