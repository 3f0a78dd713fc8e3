//! The machine "rebooted" while volumes are published: every process killed, mounts undone, the run
//! directory lost, half-written files in the pool. How long until calls are served, and until all
//! volumes are published again.

use crate::{
    client::Client,
    driver::Driver,
    fleet::Fleet,
    report::{Report, Table},
    say::say,
    stats::{Samples, ms},
};
use anyhow::Context as _;
use rustix::process::Signal;
use std::{fs, path::Path};
use tokio::{task::JoinSet, time::Instant};

/// How many callers stage volumes at once.
const CALLERS: usize = 16;

/// Reboots `count` times, and once with nothing in the pool.
pub(crate) async fn measure(
    driver: &mut Driver,
    fleet: &Fleet,
    count: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let volumes = fleet.names().len();
    report.heading("Reboot");
    report.text(format!(
        "Every process is killed, mounts are undone, the run directory is removed, and beside each \
         record lies a half of it. From the spawn of `qsd-csi standalone` until Identity.Probe \
         answers, by when every record is at rest; then until all volumes are staged and published \
         again by {CALLERS} callers at once, in milliseconds. With none, as a reference."
    ));
    let mut table = Table::new(["volumes", "serves, median", "slowest", "all published, median"]);
    let (mut starts, mut published) = (Samples::default(), Samples::default());
    for _ in 0..count {
        say(format!("a reboot with {volumes} volumes ..."));
        driver.stop(Signal::KILL).await?;
        driver.scratch.lose_run()?;
        strew(&driver.scratch.pool())?;
        starts.push(driver.start_again().await?);
        let begin = Instant::now();
        publish(driver, fleet).await?;
        published.push(begin.elapsed());
    }
    table.row([
        volumes.to_string(),
        format!("{:.0}", ms(starts.p50())),
        format!("{:.0}", ms(starts.p99())),
        format!("{:.0}", ms(published.p50())),
    ]);
    let mut empty = Driver::start(report.dir()).await?;
    let mut starts = Samples::default();
    for _ in 0..count {
        empty.stop(Signal::KILL).await?;
        empty.scratch.lose_run()?;
        starts.push(empty.start_again().await?);
    }
    table.row([
        "0".to_owned(),
        format!("{:.0}", ms(starts.p50())),
        format!("{:.0}", ms(starts.p99())),
        String::new(),
    ]);
    report.table(&table);
    Ok(())
}

/// The halves of records, as temporary files that never got their names.
fn strew(pool: &Path) -> anyhow::Result<()> {
    for kind in ["layers", "volumes"] {
        let dir = pool.join("records").join(kind);
        let records: Vec<_> = fs::read_dir(&dir)?.collect::<Result<_, _>>()?;
        for (number, record) in records.into_iter().enumerate() {
            let half = fs::metadata(record.path())?.len() / 2;
            let draft = dir.join(format!(".tmp{number:06}"));
            fs::copy(record.path(), &draft).with_context(|| draft.display().to_string())?;
            fs::File::options().write(true).open(&draft)?.set_len(half)?;
        }
    }
    Ok(())
}

async fn publish(driver: &Driver, fleet: &Fleet) -> anyhow::Result<()> {
    let mut callers = JoinSet::new();
    for first in 0..CALLERS {
        let own = fleet.names().iter().skip(first).step_by(CALLERS);
        let own = own.map(|volume| Ok((volume.clone(), driver.scratch.paths(volume)?)));
        let own = own.collect::<anyhow::Result<Vec<_>>>()?;
        let endpoint = driver.scratch.endpoint();
        callers.spawn(async move {
            let mut client = Client::connect(&endpoint).await?;
            for (volume, paths) in own {
                client.attach(&volume, &paths).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(outcome) = callers.join_next().await {
        outcome??;
    }
    Ok(())
}
