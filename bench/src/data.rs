//! The data plane: a published volume against fio on a plain file of the same disk, in turns.

use crate::{
    driver::Driver,
    fio,
    load::{Direction, Load, Order},
    report::Row,
    say::say,
    stats::{Goal, median, ratio},
    vhost::{Disk, Wait},
};
use anyhow::ensure;
use std::{path::Path, time::Duration};

/// Bytes that are touched, on both sides.
const SPAN: u64 = 1 << 30;

/// Memory for requests in flight.
const MEMORY: usize = 8 << 20;

/// One kind of load, measured in pairs.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) name: String,
    /// Requests a second, medians of all rounds.
    pub(crate) volume: f64,
    pub(crate) file: f64,
    /// The median of the ratios of each round.
    pub(crate) ratio: f64,
    goal: Option<Goal>,
}

/// Runs every load `rounds` times for `time` on each side.
pub(crate) async fn measure(
    target: &Path,
    rounds: usize,
    time: Duration,
    wait: Wait,
) -> anyhow::Result<Vec<Pair>> {
    let driver = Driver::start(target).await?;
    driver.create("data", i64::try_from(SPAN)?).await?;
    driver.attach("data").await?;
    let file = driver.pool().join("reference");
    fio::prepare(&file, SPAN).await?;
    let mut disk = Disk::connect(&driver.socket("data"), MEMORY, wait)?;
    ensure!(disk.capacity() == SPAN, "the volume has {} bytes", disk.capacity());
    prepare(&mut disk)?;
    let mut pairs = Vec::new();
    for (load, goal) in loads(time) {
        let pair = pair(&mut disk, &file, &load, goal, rounds).await?;
        say(format_args!(
            "  {}: {:.0} and {:.0} a second, ratio {:.2}",
            pair.name, pair.volume, pair.file, pair.ratio
        ));
        pairs.push(pair);
    }
    verify(&mut disk)?;
    drop(disk);
    std::fs::remove_file(&file)?;
    driver.finish(&["data".to_owned()]).await?;
    Ok(pairs)
}

fn loads(time: Duration) -> Vec<(Load, Option<Goal>)> {
    use {
        Direction::{Read, Write},
        Order::{Random, Sequential},
    };
    let load = |order, direction, block, depth, goal: Option<f64>| {
        (Load { order, direction, block, depth, span: SPAN, time }, goal.map(Goal::AtLeast))
    };
    vec![
        load(Random, Read, 4096, 1, None),
        load(Random, Read, 4096, 32, Some(0.75)),
        load(Random, Write, 4096, 1, None),
        load(Random, Write, 4096, 32, Some(0.70)),
        load(Sequential, Read, 128 << 10, 8, None),
        load(Sequential, Write, 128 << 10, 8, None),
    ]
}

async fn pair(
    disk: &mut Disk,
    file: &Path,
    load: &Load,
    goal: Option<Goal>,
    rounds: usize,
) -> anyhow::Result<Pair> {
    let (mut volume, mut reference) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        volume.push(tokio::task::block_in_place(|| disk.run(load))?);
        reference.push(fio::run(file, load).await?);
    }
    let ratios = volume.iter().zip(&reference).map(|(volume, file)| ratio(*volume, *file));
    Ok(Pair {
        name: load.to_string(),
        ratio: median(ratios),
        volume: median(volume),
        file: median(reference),
        goal,
    })
}

/// Writes all of the volume once, so that later requests meet blocks that are there.
fn prepare(disk: &mut Disk) -> anyhow::Result<()> {
    disk.fill();
    let block = vec![0x5a; 1 << 20];
    for offset in (0..SPAN).step_by(1 << 20) {
        disk.write(offset, &block)?;
    }
    Ok(())
}

/// What was written is read back: speed without that would be worth nothing.
fn verify(disk: &mut Disk) -> anyhow::Result<()> {
    for number in 0..64_u8 {
        let offset = u64::from(number) * (SPAN / 64);
        let block = vec![number; 4096];
        disk.write(offset, &block)?;
        ensure!(disk.read(offset, 4096)? == block, "block {offset} is not what was written");
    }
    Ok(())
}

/// The figures as rows of the report.
pub(crate) fn rows(pairs: &[Pair]) -> Vec<Row> {
    let row = |pair: &Pair| {
        let rates = format!("{:.0} and {:.0} a second", pair.volume, pair.file);
        let judged = pair.goal.map(|goal| format!("; {}", goal.judge(pair.ratio)));
        Row {
            name: format!("{}, volume to fio", pair.name),
            value: pair.ratio,
            unit: "x",
            note: rates + &judged.unwrap_or_default(),
        }
    };
    pairs.iter().map(row).collect()
}
