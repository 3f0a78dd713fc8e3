//! Many volumes on one relay, each with a client that does nothing: what the relay takes, and how
//! long its end is felt.
//!
//! The clients are all in this process, with one page of memory each beside their queue. When their
//! sockets close they do as a QEMU with `reconnect-ms` does: connect and negotiate anew.

use crate::{
    Plan, blocking,
    driver::Driver,
    fleet::Fleet,
    process::{cpu_time, pss, runs, signal},
    relayed::{Pids, Relay},
    report::{Report, Table},
    say::say,
    stats::{Samples, float, ms, ratio},
    vhost::Disk,
};
use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use std::{path::PathBuf, thread, time::Duration};
use tokio::time::{Instant, sleep};

/// How often a client tries to connect.
const RECONNECT: Duration = Duration::from_millis(10);

/// How often the relay is asked whether all are served.
const ASK: Duration = Duration::from_millis(2);

/// What takes longer will never happen.
const LIMIT: Duration = Duration::from_mins(1);

/// A relay that ran so long is followed by another at once, and has done what connecting left.
const STEADY: Duration = Duration::from_millis(500);

/// A client, and where it connects.
struct Member {
    socket: PathBuf,
    disk: Disk,
}

/// What one relay takes with so many clients.
#[derive(Debug)]
struct Figures {
    volumes: usize,
    /// PSS in KiB.
    keeper: u64,
    worker: u64,
    /// Processor time of both, of the time of one core.
    busy: f64,
    worker_lost: Samples,
    both_lost: Samples,
}

/// With one volume, and with many.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let mut driver = Driver::start(report.dir()).await?;
    let mut fleet = Fleet::default();
    let mut crowd = Vec::new();
    let mut all = Vec::new();
    for count in [1, plan.crowd] {
        fleet.grow(&mut driver, count).await?;
        let paths = fleet.paths(&driver)?.split_off(crowd.len());
        let sockets: Vec<_> = paths.iter().map(|paths| paths.target.join("vhost.sock")).collect();
        let more: Vec<_> =
            blocking(move || sockets.into_iter().map(Member::connect).collect()).await?;
        crowd.extend(more);
        let figures;
        (crowd, figures) = observe(&driver, crowd, plan).await?;
        all.push(figures);
    }
    drop(crowd);
    fleet.clear(&mut driver).await?;
    driver.end().await?;
    tell(&all, plan, report);
    Ok(())
}

async fn observe(
    driver: &Driver,
    mut crowd: Vec<Member>,
    plan: &Plan,
) -> anyhow::Result<(Vec<Member>, Figures)> {
    let relay = Relay::of(&driver.scratch)?;
    let count = crowd.len();
    served(&relay, count, None).await?;
    sleep(STEADY).await;
    let pids = relay.pids().await?;
    let (keeper, worker) = (pss(pids.keeper)?, pss(pids.worker)?);
    say(format!("{count} idle clients for {} s ...", plan.idle.as_secs()));
    let busy = busy(pids, plan.idle).await?;
    let (mut worker_lost, mut both_lost) = (Samples::default(), Samples::default());
    say(format!("{} ends of the worker, with {count} clients ...", plan.starts));
    for _ in 0..plan.starts {
        let before = relay.pids().await?;
        let begin = Instant::now();
        signal(before.worker, Signal::KILL);
        served(&relay, count, Some(before)).await?;
        worker_lost.push(begin.elapsed());
        crowd = blocking(move || check(crowd)).await?;
        sleep(STEADY).await;
    }
    say(format!("{} ends of keeper and worker, with {count} clients ...", plan.starts));
    for _ in 0..plan.starts {
        let before = relay.pids().await?;
        let begin = Instant::now();
        // Stopped first: it would give everything to the next keeper within milliseconds.
        signal(before.worker, Signal::STOP);
        signal(before.keeper, Signal::KILL);
        signal(before.worker, Signal::KILL);
        crowd = blocking(move || reconnect(crowd, before)).await?;
        both_lost.push(begin.elapsed());
        served(&relay, count, Some(before)).await?;
        crowd = blocking(move || check(crowd)).await?;
        sleep(STEADY).await;
    }
    let volumes = count;
    Ok((crowd, Figures { volumes, keeper, worker, busy, worker_lost, both_lost }))
}

/// The processor time of both, of the time of one core.
async fn busy(pids: Pids, time: Duration) -> anyhow::Result<f64> {
    let taken = || anyhow::Ok(cpu_time(pids.keeper)? + cpu_time(pids.worker)?);
    let (before, begin) = (taken()?, Instant::now());
    sleep(time).await;
    let taken = taken()?.saturating_sub(before);
    Ok(ratio(taken.as_secs_f64(), begin.elapsed().as_secs_f64()))
}

/// Waits until a worker other than `before` serves all.
async fn served(relay: &Relay, count: usize, before: Option<Pids>) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !relay.serves(count, before).await {
        ensure!(begin.elapsed() < LIMIT, "the relay does not serve {count} volumes");
        sleep(ASK).await;
    }
    Ok(())
}

/// Every client is answered, by the relay and by its daemon.
fn check(mut crowd: Vec<Member>) -> anyhow::Result<Vec<Member>> {
    for member in &mut crowd {
        let socket = member.socket.display();
        ensure!(member.disk.is_answered(), "{socket}: the relay is gone");
        member.disk.read(0, 4096).with_context(|| socket.to_string())?;
    }
    Ok(crowd)
}

/// All at the same time, as so many QEMUs would.
fn reconnect(crowd: Vec<Member>, before: Pids) -> anyhow::Result<Vec<Member>> {
    while runs(before.keeper) || runs(before.worker) {
        thread::sleep(Duration::from_micros(100));
    }
    thread::scope(|scope| {
        let again = |member: Member| scope.spawn(move || member.connect_again());
        let threads: Vec<_> = crowd.into_iter().map(again).collect();
        threads.into_iter().map(|thread| thread.join().expect("a client that ends")).collect()
    })
}

impl Member {
    fn connect(socket: PathBuf) -> anyhow::Result<Self> {
        let disk = Disk::connect(&socket, 4096)?;
        Ok(Self { socket, disk })
    }

    /// Until it has read a block.
    fn connect_again(self) -> anyhow::Result<Self> {
        let Self { socket, disk } = self;
        ensure!(!disk.is_answered(), "{}: it is still connected", socket.display());
        drop(disk);
        let begin = std::time::Instant::now();
        loop {
            match Disk::connect(&socket, 4096) {
                Ok(mut disk) => {
                    disk.read(0, 4096)?;
                    return Ok(Self { socket, disk });
                }
                Err(error) if begin.elapsed() > LIMIT => return Err(error),
                Err(_) => thread::sleep(RECONNECT),
            }
        }
    }
}

fn tell(all: &[Figures], plan: &Plan, report: &mut Report) {
    report.heading("Many volumes on one relay");
    report.text(format!(
        "Every volume is published and has a client that is connected and idle. Memory is PSS; \
         processor time is that of keeper and worker together over {} s, of one core, exact to \
         0.1 % in 10 s. The relay is ended by SIGKILL {} times each way: `worker` is the time from \
         there until another one says of every volume that it is served (asked every {} ms); the \
         data goes on meanwhile. After `keeper and worker` the sockets of the clients are closed: \
         the time until the last one has connected anew (each tries every {} ms) and has read a \
         block.",
        plan.idle.as_secs(),
        plan.starts,
        ASK.as_millis(),
        RECONNECT.as_millis(),
    ));
    let [one, many] = all else { return };
    let [first, last] = [one, many].map(|one| format!("volumes: {}", one.volumes));
    let mut table = Table::new(["figure", &first, &last, "ratio", "per further volume"]);
    let further = float(u64::try_from(many.volumes.saturating_sub(one.volumes)).unwrap_or(0));
    let mut row = |name: &str, value: &dyn Fn(&Figures) -> f64, unit: &str| {
        let (first, last) = (value(one), value(many));
        let each = ratio(last - first, further);
        table.row([
            name.to_owned(),
            format!("{first:.1} {unit}"),
            format!("{last:.1} {unit}"),
            if first > 0.0 { format!("{:.1}", ratio(last, first)) } else { String::new() },
            format!("{each:.3} {unit}"),
        ]);
    };
    row("keeper, memory", &|one| float(one.keeper), "KiB");
    row("worker, memory", &|one| float(one.worker), "KiB");
    row("processor time, idle", &|one| one.busy * 100.0, "%");
    row("worker ended: all served, median", &|one| ms(one.worker_lost.p50()), "ms");
    row("worker ended: all served, slowest", &|one| ms(one.worker_lost.p99()), "ms");
    row("keeper and worker ended, median", &|one| ms(one.both_lost.p50()), "ms");
    row("keeper and worker ended, slowest", &|one| ms(one.both_lost.p99()), "ms");
    report.table(&table);
}
