//! Settings of the block graph against each other, on bare daemons.
//!
//! One daemon a variant, all on one file, taking turns: what the machine does in one round, it
//! does to all. The first variant is what the driver does (src/qsd/graph.rs), said here again.

use crate::{
    Plan, blocking, fio,
    load::{Direction, Load, Order},
    process::pss,
    qsd::Bare,
    report::{Report, Table},
    say::say,
    scratch::Scratch,
    stats::{median, ratio},
    vhost::{Disk, Wait},
};
use serde_json::{Value, json};
use std::path::Path;

/// One way to build the graph.
#[derive(Clone, Copy, Debug)]
struct Variant {
    name: &'static str,
    queues: u16,
    aio: &'static str,
    /// How long the iothread polls, in nanoseconds; 32768 where nothing is said.
    poll: Option<u64>,
    throttle: Throttle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Throttle {
    Present,
    Absent,
}

const DRIVER: Variant = Variant {
    name: "as the driver does",
    queues: 64,
    aio: "io_uring",
    poll: None,
    throttle: Throttle::Present,
};

const VARIANTS: [Variant; 8] = [
    DRIVER,
    Variant { name: "num-queues 1", queues: 1, ..DRIVER },
    Variant { name: "num-queues 16", queues: 16, ..DRIVER },
    Variant { name: "aio native", aio: "native", ..DRIVER },
    Variant { name: "aio threads", aio: "threads", ..DRIVER },
    Variant { name: "poll-max-ns 0", poll: Some(0), ..DRIVER },
    Variant { name: "poll-max-ns 1000000", poll: Some(1_000_000), ..DRIVER },
    Variant { name: "no throttle filter", throttle: Throttle::Absent, ..DRIVER },
];

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
    [
        load(Direction::Read, 1),
        load(Direction::Read, 32),
        load(Direction::Write, 1),
        load(Direction::Write, 32),
    ]
}

fn candidates(image: &Path, sockets: &Path) -> anyhow::Result<Vec<Candidate>> {
    let mut daemons = Vec::new();
    for (number, variant) in VARIANTS.into_iter().enumerate() {
        let dir = sockets.join(format!("variant-{number}"));
        std::fs::create_dir_all(&dir)?;
        let mut daemon = Bare::start(&dir)?;
        let socket = dir.join("vhost.sock");
        for (command, arguments) in graph(variant, image, &socket) {
            daemon.execute(command, &arguments)?;
        }
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

fn graph(variant: Variant, image: &Path, socket: &Path) -> Vec<(&'static str, Value)> {
    let mut iothread = json!({ "qom-type": "iothread", "id": "io0" });
    if let Some(poll) = variant.poll {
        iothread["poll-max-ns"] = poll.into();
    }
    let file = json!({
        "driver": "file", "filename": image, "aio": variant.aio, "discard": "unmap",
        "cache": { "direct": true }, "locking": "off", // as all variants share the file
    });
    let layer = json!({
        "driver": "raw", "node-name": "L0", "discard": "unmap", "cache": { "direct": true },
        "file": file,
    });
    let mut commands = vec![("object-add", iothread), ("blockdev-add", layer)];
    let mut top = "L0";
    if variant.throttle == Throttle::Present {
        top = "top";
        let group = json!({ "qom-type": "throttle-group", "id": "tg", "limits": {} });
        commands.push(("object-add", group));
        let filter = json!({
            "driver": "throttle", "node-name": top, "throttle-group": "tg", "file": "L0",
        });
        commands.push(("blockdev-add", filter));
    }
    let export = json!({
        "type": "vhost-user-blk", "id": "vu", "node-name": top, "writable": true,
        "writethrough": true, "iothread": "io0", "fixed-iothread": true,
        "num-queues": variant.queues, "addr": { "type": "unix", "path": socket },
    });
    commands.push(("block-export-add", export));
    commands
}

/// Each candidate once, with a client that sleeps, as most guests do.
fn turn(mut all: Vec<Candidate>, load: &Load) -> anyhow::Result<Vec<Candidate>> {
    for candidate in &mut all {
        let rate = candidate.disk.run(load, Wait::Eventfd)?;
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
