//! Settings of the block graph against each other, on bare daemons.
//!
//! One daemon a variant, all on one file, taking turns: what the machine does in one round, it
//! does to all. The first variant is what the driver does (src/qsd/graph.rs), said here again.

use crate::{
    Plan, blocking, fio,
    graph::{Cache, Settings, Throttle},
    load::{Direction, Durability, Load, Order},
    process::pss,
    qsd::Bare,
    report::{Report, Table},
    say::say,
    scratch::Scratch,
    stats::{median, ratio},
    vhost::{Disk, Loading as _, Wait},
};
use std::path::Path;

/// One way to build the graph.
#[derive(Clone, Copy, Debug)]
struct Variant {
    name: &'static str,
    settings: Settings,
}

fn variants() -> [Variant; 8] {
    let driver = Settings::of_driver(Cache::Writethrough);
    let variant = |name, settings| Variant { name, settings };
    [
        variant("as the driver does", driver),
        variant("num-queues 1", Settings { queues: 1, ..driver }),
        variant("num-queues 16", Settings { queues: 16, ..driver }),
        variant("aio native", Settings { aio: "native", ..driver }),
        variant("aio threads", Settings { aio: "threads", ..driver }),
        variant("iothread", Settings { iothread: Some(32_768), ..driver }),
        variant("iothread that sleeps", Settings { iothread: Some(0), ..driver }),
        variant("no throttle filter", Settings { throttle: Throttle::Absent, ..driver }),
    ]
}

/// A daemon with one variant, and its client.
struct Candidate {
    variant: Variant,
    daemon: Bare,
    disk: Disk,
    /// PSS in KiB with the export but no client, all variants running.
    idle: u64,
    rates: Vec<Vec<f64>>,
}

/// Measures the variants.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let scratch = Scratch::new(report.dir())?;
    let (image, file) = (scratch.disk().join("disk.raw"), scratch.disk().join("fio.raw"));
    say(format!("writing two files of {} MiB ...", plan.span >> 20));
    fio::prepare(&image, plan.span).await?;
    fio::prepare(&file, plan.span).await?;
    let sockets = scratch.sockets().to_owned();
    let mut all = blocking(move || candidates(&image, &sockets)).await?;
    let loads = loads(plan);
    let mut reference = Vec::new();
    for load in &loads {
        let mut rates = Vec::new();
        for round in 1..=plan.goal_rounds {
            say(format!("{load}, round {round} of {}", plan.goal_rounds));
            rates.push(fio::run(&file, load).await?);
            let load = *load;
            all = blocking(move || turn(all, &load)).await?;
        }
        for candidate in &mut all {
            candidate.rates.push(Vec::new());
        }
        reference.push(rates);
    }
    tell(&all, &loads, &reference, report);
    let pid = |candidate: &Candidate| i32::try_from(candidate.daemon.pid());
    let after = pss(pid(&all[0])?)?;
    report.text(format!("PSS of the first after all loads: {after} KiB."));
    Ok(())
}

fn loads(plan: &Plan) -> [Load; 4] {
    let load = |direction, depth| Load {
        order: Order::Random,
        direction,
        block: 4096,
        depth,
        span: plan.span,
        time: plan.time / 2,
    };
    let durable = Direction::Write(Durability::AtEnd);
    [load(Direction::Read, 1), load(Direction::Read, 32), load(durable, 1), load(durable, 32)]
}

fn candidates(image: &Path, sockets: &Path) -> anyhow::Result<Vec<Candidate>> {
    let mut daemons = Vec::new();
    for (number, variant) in variants().into_iter().enumerate() {
        let dir = sockets.join(format!("variant-{number}"));
        std::fs::create_dir_all(&dir)?;
        let mut daemon = Bare::start(&dir)?;
        let socket = dir.join("vhost.sock");
        variant.settings.export(&mut daemon, image, &socket)?;
        daemons.push((variant, daemon, socket));
    }
    let sizes: Vec<u64> = daemons
        .iter()
        .map(|(_, daemon, _)| pss(i32::try_from(daemon.pid())?))
        .collect::<anyhow::Result<_>>()?;
    let connect =
        |((variant, daemon, socket), idle): ((Variant, Bare, std::path::PathBuf), u64)| {
            let mut disk = Disk::connect(&socket, 1 << 20)?;
            disk.fill();
            Ok(Candidate { variant, daemon, disk, idle, rates: vec![Vec::new()] })
        };
    daemons.into_iter().zip(sizes).map(connect).collect()
}

/// Each candidate once, with a client that sleeps, as most guests do.
fn turn(mut all: Vec<Candidate>, load: &Load) -> anyhow::Result<Vec<Candidate>> {
    for candidate in &mut all {
        let rate = candidate.disk.keep_up(load, Wait::Eventfd)?;
        candidate.rates.last_mut().expect("a list for the load under way").push(rate);
    }
    Ok(all)
}

fn tell(all: &[Candidate], loads: &[Load], reference: &[Vec<f64>], report: &mut Report) {
    report.heading("Settings of bare daemons");
    report.text(
        "Requests a second (IOPS), medians, with one client that sleeps until it is signalled; in \
         brackets the median of the ratios to fio in the same round. PSS in KiB with the export \
         but without a client, while all variants run. `aio native` falls back to threads where \
         fs.aio-max-nr is used up: 1024 a busy daemon, of 65536 by default.",
    );
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|n| loads[n].to_string());
    let mut table = Table::new(["variant", "PSS idle", &first, &second, &third, &fourth]);
    let fio = |n: usize| format!("{:.0}", median(reference[n].iter().copied()));
    table.row(["fio".to_owned(), String::new(), fio(0), fio(1), fio(2), fio(3)]);
    for candidate in all {
        let cell = |n: usize| {
            let rates = &candidate.rates[n];
            let pairs = rates.iter().zip(&reference[n]);
            let ratio = median(pairs.map(|(rate, fio)| ratio(*rate, *fio)));
            format!("{:.0} ({ratio:.2})", median(rates.iter().copied()))
        };
        let name = candidate.variant.name.to_owned();
        table.row([name, candidate.idle.to_string(), cell(0), cell(1), cell(2), cell(3)]);
    }
    report.table(&table);
}
