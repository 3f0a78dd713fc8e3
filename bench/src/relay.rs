//! What the relay costs a request: a published volume against bare daemons without a relay.
//!
//! All serve the same file with the same graph and settings. Of the bare daemons there are two, so
//! that one against the other shows how much of a ratio is noise.

use crate::{
    Plan, blocking,
    driver::Driver,
    graph::{Cache, Settings},
    load::{Direction, Durability, Load, Order},
    qsd::Bare,
    report::{Report, Table},
    say::say,
    stats::{Goal, extremes, median, ratio},
    vhost::{Disk, Loading as _, Wait},
};
use anyhow::Context as _;
use std::{fs, path::Path};

/// Requests a second, round by round, of one load.
struct Rounds {
    load: Load,
    relayed: Vec<f64>,
    direct: Vec<f64>,
    other: Vec<f64>,
}

/// The three sides; a daemon ends after its client.
struct Sides {
    relayed: Disk,
    direct: (Disk, Bare),
    other: (Disk, Bare),
}

/// Measures it.
pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let mut driver = Driver::start(report.dir()).await?;
    let paths = driver.scratch.paths("relayed")?;
    driver.client.create("relayed", plan.span, Cache::Writeback).await?;
    driver.client.attach("relayed", &paths).await?;
    let volumes = driver.client.list().await?;
    let layer = volumes.first().and_then(|volume| volume.layers.first());
    let layer = layer.context("the volume has no layer")?.path.clone();
    let (socket, dir) = (paths.target.join("vhost.sock"), driver.scratch.sockets().to_owned());
    let span = plan.span;
    let connect = blocking(move || {
        let mut relayed = Disk::connect(&socket, 1 << 20)?;
        relayed.fill();
        say(format!("writing all {} MiB once ...", span >> 20));
        relayed.write_all(span)?;
        let layer = Path::new(&layer);
        let (direct, other) = (bare(layer, &dir.join("a"))?, bare(layer, &dir.join("b"))?);
        Ok(Sides { relayed, direct, other })
    });
    let mut sides = connect.await?;
    let mut results = Vec::new();
    for load in loads(plan) {
        let rounds = plan.pairs;
        let result;
        (sides, result) = blocking(move || alternate(sides, load, rounds)).await?;
        results.push(result);
    }
    drop(sides);
    driver.client.detach("relayed", &paths).await?;
    driver.client.delete("relayed").await?;
    driver.end().await?;
    tell(&results, report);
    Ok(())
}

fn bare(image: &Path, dir: &Path) -> anyhow::Result<(Disk, Bare)> {
    fs::create_dir_all(dir)?;
    let socket = dir.join("vhost.sock");
    let mut daemon = Bare::start_apart(dir)?;
    Settings::of_driver(Cache::Writeback).export(&mut daemon, image, &socket)?;
    let mut disk = Disk::connect(&socket, 1 << 20)?;
    disk.fill();
    Ok((disk, daemon))
}

fn loads(plan: &Plan) -> [Load; 4] {
    let load = |direction, depth| Load {
        order: Order::Random,
        direction,
        block: 4096,
        depth,
        span: plan.span,
        time: plan.time / 5, // short, so that what else the machine does meets all sides
    };
    let write = Direction::Write(Durability::AtLast);
    [load(Direction::Read, 1), load(Direction::Read, 32), load(write, 1), load(write, 32)]
}

/// One after the other, each round beginning with another one, with a client that sleeps, as most
/// guests do.
fn alternate(mut sides: Sides, load: Load, rounds: usize) -> anyhow::Result<(Sides, Rounds)> {
    let (relayed, direct, other) = (Vec::new(), Vec::new(), Vec::new());
    let mut all = Rounds { load, relayed, direct, other };
    for round in 1..=rounds {
        let Sides { relayed, direct, other } = &mut sides;
        let mut turns = [
            (relayed, &mut all.relayed),
            (&mut direct.0, &mut all.direct),
            (&mut other.0, &mut all.other),
        ];
        let places = turns.len();
        turns.rotate_left(round % places);
        for (disk, rates) in &mut turns {
            rates.push(disk.keep_up(&load, Wait::Eventfd)?);
        }
        all.say(round, rounds);
    }
    Ok((sides, all))
}

impl Rounds {
    fn say(&self, round: usize, rounds: usize) {
        let load = self.load;
        let last = |rates: &[f64]| rates.last().copied().unwrap_or_default();
        let [relayed, direct, other] =
            [&self.relayed, &self.direct, &self.other].map(|one| last(one));
        say(format!(
            "{load}, round {round} of {rounds}: relay {relayed:.0}, direct {direct:.0} ({:.2}), \
             another direct {other:.0} ({:.2})",
            ratio(relayed, direct),
            ratio(other, direct),
        ));
    }
}

fn tell(results: &[Rounds], report: &mut Report) {
    report.heading("Through the relay");
    report.text(
        "Requests a second (IOPS) of one client that sleeps until it is signalled: through the \
         relay, and connected to a daemon without one. All daemons have the same graph and \
         settings (those of `cache: auto`) and serve the same file; the sides alternate. A ratio \
         is that of the medians; in brackets the lowest and the highest of the single rounds. \
         The last column is one daemon without relay against another: the noise.",
    );
    let mut table =
        Table::new(["load", "direct IOPS", "relay IOPS", "relay / direct", "goal", "noise"]);
    for rounds in results {
        let middle = |rates: &[f64]| median(rates.iter().copied());
        let against = |rates: &[f64]| ratio(middle(rates), middle(&rounds.direct));
        let spread = |rates: &[f64]| {
            let ratios = rates.iter().zip(&rounds.direct).map(|(rate, base)| ratio(*rate, *base));
            let (lowest, highest) = extremes(ratios);
            format!("{:.3} ({lowest:.2} to {highest:.2})", against(rates))
        };
        table.row([
            rounds.load.to_string(),
            format!("{:.0}", middle(&rounds.direct)),
            format!("{:.0}", middle(&rounds.relayed)),
            spread(&rounds.relayed),
            Goal::AtLeast(0.97).judge(against(&rounds.relayed)),
            spread(&rounds.other),
        ]);
    }
    report.table(&table);
}
