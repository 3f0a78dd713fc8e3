//! `qsd-csi doctor`: what is wrong, for people and for scripts.

use super::{
    client::Driver,
    output::{Output, say, say_json},
    standalone::{PoolAt, RUN_DIR},
};
use crate::{
    doctor::{Config, Cured, Report},
    finding::{Finding, Weight},
};
use anyhow::Context as _;
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode, time::Duration};
use tokio::time::timeout;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A pool and the directory that holds its volumes; may be given several times. Without any, the
    /// driver is asked for its pools
    #[arg(long = "pool", value_name = "NAME=DIR")]
    pools: Vec<PoolAt>,
    /// Run directory of the driver; need not be there. Without it, the driver is asked
    /// [default: /run/qsd-csi, where no driver answers]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Remove what is provably worth nothing; only while no driver runs
    #[arg(long)]
    fix: bool,
    #[command(flatten)]
    driver: Driver,
}

/// How long a driver may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// What it says to scripts.
#[derive(Serialize)]
struct Said<'a> {
    healthy: bool,
    findings: &'a [Finding],
    fixed: Vec<Fixed<'a>>,
    pending: &'a [String],
    driver_pid: Option<i32>,
    pools: usize,
    volumes: usize,
    snapshots: usize,
    layers: usize,
    staged: usize,
}

#[derive(Serialize)]
struct Fixed<'a> {
    #[serde(flatten)]
    finding: &'a Finding,
    /// Why it could not be removed.
    trouble: Option<String>,
}

/// Looks, and says what there is: 0 where all is well, 1 where something is wrong.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let asked = timeout(ANSWER, ask(&args.driver)).await;
    let asked = asked.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer for {ANSWER:?}")));
    let mut pools: Vec<_> = args.pools.into_iter().map(|at| (at.name, at.dir)).collect();
    if pools.is_empty() {
        let text = "which pools? No driver answers that could tell; name them: --pool NAME=DIR";
        let asked = asked.as_ref().map_err(|error| anyhow::anyhow!("{error:#}")).context(text)?;
        for (name, dir) in &asked.pools {
            pools.push((name.parse()?, dir.into()));
        }
    }
    let told = asked.as_ref().ok().and_then(|asked| asked.run_dir.clone());
    let run_dir = args.run_dir.or(told).unwrap_or_else(|| RUN_DIR.into());
    let config = Config { pools, run_dir };
    let fix = args.fix;
    let (mut report, cured) = if fix {
        config.cure().await?
    } else {
        (tokio::task::spawn_blocking(move || config.examine()).await??, Vec::new())
    };
    match (asked, report.driver) {
        (Ok(asked), Some(_)) => asked.tell(&mut report),
        (Err(error), Some(pid)) => report.findings.push(deaf(pid, &error)),
        (Ok(_) | Err(_), None) => {}
    }
    let is_cured = cured.iter().all(|one| one.trouble.is_none());
    let is_healthy = report.findings.is_empty() && is_cured;
    match args.driver.output {
        Output::Json => say_json(&Said::of(is_healthy, &report, &cured))?,
        Output::Table => say(&text(is_healthy, &report, &cured))?,
    }
    Ok(if is_healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a driver that runs has to say itself.
struct Asked {
    run_dir: Option<PathBuf>,
    pools: Vec<(String, String)>,
    /// The volumes of which it says that something is wrong, and what.
    ill: Vec<(String, String)>,
}

async fn ask(driver: &Driver) -> anyhow::Result<Asked> {
    let mut client = driver.connect().await?;
    let things = client.look().await?;
    let run_dir = things.run_dir;
    let pools = things.pools.into_iter().map(|pool| (pool.name, pool.directory)).collect();
    Ok(Asked { run_dir, pools, ill: client.ill().await? })
}

impl Asked {
    fn tell(self, report: &mut Report) {
        for (id, what) in self.ill {
            let about = format!("volume {id}");
            if report.findings.iter().any(|finding| finding.about == about) {
                continue; // it is told already, and more of it
            }
            report.findings.push(
                Finding::new(Weight::Trouble, "condition", about, what)
                    .means("see what it says; the driver goes on with other volumes")
                    .next(format!("qsd-csi volume show {id}")),
            );
        }
    }
}

fn deaf(pid: i32, error: &anyhow::Error) -> Finding {
    let why = format!("{error:#}");
    let why = why.lines().next().unwrap_or_default();
    let what = format!("it runs, process {pid}, and does not answer: {why}");
    Finding::new(Weight::Trouble, "driver-deaf", "driver".to_owned(), what)
        .means("what is published goes on; nothing is staged, created or started again")
        .next("see its log, and start it anew: what is published stays. Or say where it is with --endpoint")
}

impl<'a> Said<'a> {
    fn of(healthy: bool, report: &'a Report, cured: &'a [Cured]) -> Self {
        let fixed = |one: &'a Cured| Fixed {
            finding: &one.finding,
            trouble: one.trouble.as_ref().map(ToString::to_string),
        };
        Self {
            healthy,
            findings: &report.findings,
            fixed: cured.iter().map(fixed).collect(),
            pending: &report.pending,
            driver_pid: report.driver,
            pools: report.pools,
            volumes: report.volumes,
            snapshots: report.snapshots,
            layers: report.layers,
            staged: report.staged,
        }
    }
}

fn text(is_healthy: bool, report: &Report, cured: &[Cured]) -> String {
    let Report { pools, volumes, snapshots, layers, staged, .. } = report;
    let driver = match report.driver {
        Some(pid) => format!("the driver runs, process {pid}"),
        None => "no driver runs".to_owned(),
    };
    let mut lines = vec![format!(
        "looked at {pools} pools, {volumes} volumes ({staged} staged), {snapshots} snapshots, \
         {layers} layers; {driver}"
    )];
    for one in cured {
        let Finding { about, what, .. } = &one.finding;
        let place = place(&one.finding);
        lines.push(match &one.trouble {
            None => format!("removed  {about}: {what}{place}"),
            Some(error) => format!("left     {about}: {what}{place}: {error}"),
        });
    }
    for finding in &report.findings {
        let Finding { weight, about, what, means, next, .. } = finding;
        lines.push(format!("\n{:8} {about}: {what}", weight.as_str()));
        lines.extend(finding.path.as_ref().map(|path| format!("  where  {}", path.display())));
        let rows = [("means", means), ("next", next)];
        let told = rows.into_iter().filter(|(_, text)| !text.is_empty());
        lines.extend(told.map(|(name, text)| format!("  {name:5}  {text}")));
    }
    if !report.pending.is_empty() {
        lines.push(format!(
            "\nbroke off, and is settled by the driver when it starts: {}",
            report.pending.join(", ")
        ));
    }
    lines.push(match report.findings.len() {
        _ if is_healthy => "all is well".to_owned(),
        0 => "something could not be removed".to_owned(),
        1 => "\n1 finding".to_owned(),
        more => format!("\n{more} findings"),
    });
    lines.join("\n")
}

fn place(finding: &Finding) -> String {
    finding.path.as_ref().map_or_else(String::new, |path| format!(" ({})", path.display()))
}
