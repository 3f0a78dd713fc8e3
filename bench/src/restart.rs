//! Starts of the driver while volumes are published: how long until it answers.

use crate::{
    driver::Driver,
    report::{Report, Table},
    say::say,
    stats::{Samples, ms},
};
use rustix::process::Signal;

/// Ends and starts the driver, `count` times by each signal, and once with nothing published.
pub(crate) async fn measure(
    driver: &mut Driver,
    count: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let daemons = driver.client.daemons().await?;
    let volumes = daemons.len();
    report.heading("Start-up");
    report.text(format!(
        "From the spawn of `qsd-csi standalone` until Identity.Probe answers, in milliseconds, \
         with {volumes} volumes published, after it was ended by a signal; and with none, as a \
         reference. The daemons go on in between: the same pids before and after?"
    ));
    let mut table =
        Table::new(["ended by", "volumes", "median ms", "slowest ms", "daemons untouched"]);
    for (name, signal) in [("SIGTERM", Signal::TERM), ("SIGKILL", Signal::KILL)] {
        say(format!("{count} starts with {volumes} volumes after {name} ..."));
        let mut starts = Samples::default();
        let mut untouched = true;
        for _ in 0..count {
            driver.stop(signal).await?;
            starts.push(driver.start_again().await?);
            untouched &= driver.client.daemons().await? == daemons;
        }
        table.row([
            name.to_owned(),
            volumes.to_string(),
            format!("{:.0}", ms(starts.p50())),
            format!("{:.0}", ms(starts.p99())),
            if untouched { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    let mut starts = Samples::default();
    let mut empty = Driver::start(report.dir()).await?;
    for _ in 0..count {
        empty.stop(Signal::TERM).await?;
        starts.push(empty.start_again().await?);
    }
    table.row([
        "SIGTERM".to_owned(),
        "0".to_owned(),
        format!("{:.0}", ms(starts.p50())),
        format!("{:.0}", ms(starts.p99())),
        String::new(),
    ]);
    report.table(&table);
    drop(empty);
    Ok(())
}
