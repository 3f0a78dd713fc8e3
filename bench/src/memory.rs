//! Memory of all processes while volumes are published and idle.

use crate::{
    blocking,
    driver::Driver,
    process::pss,
    qsd::Bare,
    relayed::Relay,
    report::{Report, Table},
    say::say,
    stats::{Goal, float, median},
};
use anyhow::Context as _;
use std::path::{Path, PathBuf};

/// Bare daemons to compare with.
const BARE: usize = 10;

/// Sizes at one level, in KiB.
#[derive(Clone, Copy, Debug)]
struct Size {
    volumes: usize,
    /// Of a volume's daemon: the middle one, and the largest.
    daemon: f64,
    largest: f64,
    bare: f64,
    driver: u64,
    supervisor: u64,
    keeper: u64,
    worker: u64,
}

/// The sizes at all levels.
#[derive(Debug, Default)]
pub(crate) struct Sizes(Vec<Size>);

impl Sizes {
    pub(crate) async fn measure(
        &mut self,
        driver: &mut Driver,
        volumes: usize,
    ) -> anyhow::Result<()> {
        say(format!("memory with {volumes} volumes ..."));
        let sockets = driver.scratch.sockets().to_owned();
        // Their sizes are taken together: they share what is not written to.
        let bare = blocking(move || start_bare(&sockets)).await?;
        let sizes = |pids: Vec<i32>| pids.into_iter().map(pss).collect::<anyhow::Result<Vec<_>>>();
        let of_bare = sizes(pids(&bare)?)?;
        let of_daemons = sizes(driver.client.daemons().await?)?;
        let supervisor = driver.scratch.supervisor().context("there is no supervisor")?;
        let relay = Relay::of(&driver.scratch)?.pids().await?;
        self.0.push(Size {
            volumes,
            daemon: median(of_daemons.iter().copied().map(float)),
            largest: float(of_daemons.iter().copied().max().unwrap_or_default()),
            bare: median(of_bare.into_iter().map(float)),
            driver: pss(driver.pid()?)?,
            supervisor: pss(supervisor)?,
            keeper: pss(relay.keeper)?,
            worker: pss(relay.worker)?,
        });
        blocking(move || bare.into_iter().try_for_each(Bare::quit)).await
    }

    pub(crate) fn tell(&self, report: &mut Report) {
        report.heading("Memory");
        report.text(format!(
            "Proportional set size (PSS) in KiB: private pages, and of shared ones the share of \
             the process; so it falls where many daemons share one program. Volumes are published \
             and idle, one daemon each, without a VM. The reference is the middle one of {BARE} daemons that \
             serve nothing, taken at the same time.",
        ));
        let mut table = Table::new([
            "volumes",
            "daemon, median",
            "daemon, largest",
            "bare daemon",
            "x reference",
            "driver",
            "supervisor",
            "relay: keeper",
            "relay: worker",
        ]);
        for size in &self.0 {
            table.row([
                size.volumes.to_string(),
                format!("{:.0}", size.daemon),
                format!("{:.0}", size.largest),
                format!("{:.0}", size.bare),
                format!("{:.2}", size.daemon / size.bare.max(1.0)),
                size.driver.to_string(),
                size.supervisor.to_string(),
                size.keeper.to_string(),
                size.worker.to_string(),
            ]);
        }
        report.table(&table);
        if let Some(last) = self.0.last() {
            let mib = last.daemon / 1024.0;
            let judged = Goal::AtMost(3.0).judge(mib);
            let volumes = last.volumes;
            report.text(format!(
                "{mib:.2} MiB a published idle volume with {volumes} of them; {judged}"
            ));
        }
    }
}

fn start_bare(dir: &Path) -> anyhow::Result<Vec<Bare>> {
    let own = |n: usize| -> anyhow::Result<PathBuf> {
        let dir = dir.join(format!("bare-{n}"));
        std::fs::create_dir_all(&dir)?;
        Ok(dir)
    };
    (0..BARE).map(|n| Bare::start(&own(n)?)).collect()
}

fn pids(bare: &[Bare]) -> anyhow::Result<Vec<i32>> {
    bare.iter().map(|daemon| Ok(i32::try_from(daemon.pid())?)).collect()
}
