//! The control plane: how long calls take, what volumes cost in memory, how fast a driver starts.

use crate::{
    driver::Driver,
    qsd::Bare,
    report::Row,
    say::say,
    stats::{Goal, Samples, float, median, ms, ratio},
};
use rustix::process::Signal;
use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

/// Bytes of each volume; sparse, so that any number fits anywhere.
const SIZE: i64 = 64 << 20;

/// What was measured with so many volumes published.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) volumes: usize,
    pub(crate) create: Samples,
    pub(crate) attach: Samples,
    pub(crate) detach: Samples,
    pub(crate) delete: Samples,
    /// PSS of one daemon, of the driver, of the supervisor, in MiB.
    pub(crate) daemon: f64,
    pub(crate) driver: f64,
    pub(crate) supervisor: f64,
}

/// What the same costs without a driver.
#[derive(Debug)]
pub(crate) struct Reference {
    /// A daemon is started, greets, and is told to end.
    pub(crate) daemon: Samples,
    /// 4 KiB are written, synced, renamed, and the directory synced.
    pub(crate) record: Samples,
    /// PSS of a daemon that serves nothing, in MiB.
    pub(crate) pss: f64,
}

/// Measures with each number of volumes published, and how fast a driver starts with the last.
pub(crate) async fn measure(
    target: &Path,
    counts: &[usize],
    samples: usize,
) -> anyhow::Result<(Vec<Step>, Samples)> {
    let mut driver = Driver::start(target).await?;
    let mut volumes = Vec::new();
    let mut steps = Vec::new();
    for count in counts {
        while volumes.len() < *count {
            let volume = format!("volume-{}", volumes.len());
            driver.create(&volume, SIZE).await?;
            driver.attach(&volume).await?;
            volumes.push(volume);
        }
        let step = one(&driver, *count, samples).await?;
        say(format_args!(
            "  {count:3} volumes: create {:.1} ms, stage+publish {:.1} ms, unpublish+unstage \
             {:.1} ms, delete {:.1} ms (p50); {:.2} MiB a daemon",
            ms(step.create.p50()),
            ms(step.attach.p50()),
            ms(step.detach.p50()),
            ms(step.delete.p50()),
            step.daemon,
        ));
        steps.push(step);
    }
    let starts = restart(&mut driver).await?;
    say(format_args!("  start with {} volumes: {:.0} ms", volumes.len(), ms(starts.p50())));
    driver.finish(&volumes).await?;
    Ok((steps, starts))
}

async fn one(driver: &Driver, volumes: usize, samples: usize) -> anyhow::Result<Step> {
    let [mut create, mut attach, mut detach, mut delete] = [(); 4].map(|()| Samples::default());
    for number in 0..samples {
        let volume = format!("sample-{number}");
        create.push(timed(driver.create(&volume, SIZE)).await?);
        attach.push(timed(driver.attach(&volume)).await?);
        detach.push(timed(driver.detach(&volume)).await?);
        delete.push(timed(driver.delete(&volume)).await?);
    }
    let daemons = driver.daemons().await?;
    let pss = daemons.iter().map(|pid| pss(*pid)).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(Step {
        volumes,
        create,
        attach,
        detach,
        delete,
        daemon: pss.iter().sum::<f64>() / float(daemons.len().try_into()?),
        driver: self::pss(driver.pid()?)?,
        supervisor: self::pss(driver.supervisor()?)?,
    })
}

/// Ends and starts the driver again, politely and not, below daemons that must not notice.
async fn restart(driver: &mut Driver) -> anyhow::Result<Samples> {
    let daemons = driver.daemons().await?;
    let mut starts = Samples::default();
    for signal in [Signal::TERM, Signal::KILL, Signal::TERM, Signal::KILL, Signal::KILL] {
        driver.end(signal).await?;
        starts.push(driver.launch().await?);
        anyhow::ensure!(driver.daemons().await? == daemons, "a restart touched a daemon");
    }
    Ok(starts)
}

async fn timed(call: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    call.await?;
    Ok(begin.elapsed())
}

/// Proportional set size of a process, in MiB.
fn pss(pid: i32) -> anyhow::Result<f64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib: u64 = line.unwrap_or("0 kB").trim().trim_end_matches(" kB").parse()?;
    Ok(float(kib) / 1024.0)
}

/// The same work without a driver.
pub(crate) fn reference(target: &Path, samples: usize) -> anyhow::Result<Reference> {
    let dir = tempfile::tempdir_in(target)?;
    let sockets = tempfile::tempdir()?;
    let (mut daemon, mut record) = (Samples::default(), Samples::default());
    for _ in 0..samples {
        let begin = Instant::now();
        Bare::start(sockets.path())?.quit()?;
        daemon.push(begin.elapsed());
        let begin = Instant::now();
        write_record(dir.path())?;
        record.push(begin.elapsed());
    }
    let bare = (0..8).map(|_| Bare::start(tempfile::tempdir()?.path()));
    let bare = bare.collect::<anyhow::Result<Vec<_>>>()?;
    let sizes = bare.iter().map(|one| pss(one.pid().try_into()?));
    let pss = median(sizes.collect::<anyhow::Result<Vec<_>>>()?);
    Ok(Reference { daemon, record, pss })
}

#[expect(clippy::disallowed_methods, reason = "the reference is a record without the store")]
fn write_record(dir: &Path) -> anyhow::Result<()> {
    let draft = dir.join("draft");
    let mut file = File::create(&draft)?;
    file.write_all(&[7; 4096])?;
    file.sync_all()?;
    fs::rename(&draft, dir.join("record"))?;
    File::open(dir)?.sync_all()?;
    Ok(())
}

/// The figures as rows of the report.
pub(crate) fn rows(steps: &[Step], starts: &Samples, reference: &Reference) -> Vec<Row> {
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return Vec::new() };
    let mut rows = Vec::new();
    let mut figure = |name: &str, value: f64, unit, note: String| {
        rows.push(Row { name: name.to_owned(), value, unit, note });
    };
    let record = ms(reference.record.p50());
    let daemon = ms(reference.daemon.p50());
    figure("durable record, bare, p50", record, "ms", "reference".to_owned());
    figure("daemon start, greeting and quit, bare, p50", daemon, "ms", "reference".to_owned());
    for step in steps {
        let calls: [(_, &Samples, Option<Goal>, f64); 4] = [
            ("CreateVolume", &step.create, Some(Goal::AtMost(10.0)), record),
            ("Stage+Publish", &step.attach, Some(Goal::AtMost(60.0)), daemon),
            ("Unpublish+Unstage", &step.detach, None, daemon),
            ("DeleteVolume", &step.delete, None, record),
        ];
        for (name, samples, goal, reference) in calls {
            let name = format!("{name}, {} volumes", step.volumes);
            let (p50, p99) = (ms(samples.p50()), ms(samples.p99()));
            let times = format!("{:.1} x the bare reference", ratio(p50, reference));
            let judged = goal.map(|goal| format!("; {}", goal.judge(p50))).unwrap_or_default();
            figure(&format!("{name}, p50"), p50, "ms", format!("{times}{judged}"));
            figure(&format!("{name}, p99"), p99, "ms", String::new());
        }
    }
    for (name, few, many) in [
        ("CreateVolume", &first.create, &last.create),
        ("Stage+Publish", &first.attach, &last.attach),
    ] {
        let grown = ratio(ms(many.p50()), ms(few.p50()));
        let name = format!("{name}, p50 at {} to {} volumes", last.volumes, first.volumes);
        figure(&name, grown, "x", Goal::AtMost(1.5).judge(grown));
    }
    let per_volume = format!(
        "{:.1} x a bare daemon; {}",
        ratio(last.daemon, reference.pss),
        Goal::AtMost(3.0).judge(last.daemon)
    );
    figure("PSS of a bare daemon", reference.pss, "MiB", "reference".to_owned());
    figure("PSS a published idle volume", last.daemon, "MiB", per_volume);
    for step in steps {
        let count = step.volumes;
        figure(&format!("PSS of the driver, {count} volumes"), step.driver, "MiB", String::new());
        let name = format!("PSS of the supervisor, {count} volumes");
        figure(&name, step.supervisor, "MiB", String::new());
    }
    let name = format!("start of the driver with {} published, p50", last.volumes);
    figure(&name, ms(starts.p50()), "ms", "SIGTERM and SIGKILL in turn".to_owned());
    rows
}
