//! The control plane: how long a call takes while other volumes exist.

use crate::{
    blocking,
    driver::Driver,
    fleet,
    graph::Cache,
    plot::{Bar, Chart, Group},
    qsd::Bare,
    report::{Report, Table},
    say::say,
    stats::{Goal, Samples, ms, ratio},
};
use std::{
    fs::File,
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

/// What a call is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reference {
    /// A bare daemon: spawn, handshake, `quit`, end.
    Spawn,
    /// One durable file: 4 KiB written, fsync, rename, fsync of the directory.
    Write,
}

/// One kind of call at one level, or a reference.
#[derive(Clone, Debug)]
struct Row {
    name: &'static str,
    against: Option<Reference>,
    samples: Samples,
}

/// All that was measured while `volumes` existed.
#[derive(Clone, Debug)]
struct Level {
    volumes: usize,
    rows: Vec<Row>,
    spawn: Duration,
    write: Duration,
}

/// The latencies at all levels.
#[derive(Debug, Default)]
pub(crate) struct Calls(Vec<Level>);

const CREATE: &str = "CreateVolume";
const ATTACH: &str = "NodeStage + NodePublish";
const DETACH: &str = "NodeUnpublish + NodeUnstage";
const DELETE: &str = "DeleteVolume";

impl Calls {
    /// Takes one more volume through its life, again and again.
    pub(crate) async fn measure(
        &mut self,
        driver: &mut Driver,
        volumes: usize,
        count: usize,
    ) -> anyhow::Result<()> {
        say(format!("{count} samples of each call with {volumes} volumes ..."));
        let (mut create, mut attach) = (Samples::default(), Samples::default());
        let (mut detach, mut delete) = (Samples::default(), Samples::default());
        let (mut spawn, mut write) = (Samples::default(), Samples::default());
        for _ in 0..count {
            let paths = driver.scratch.paths("sample")?;
            let client = &mut driver.client;
            create.push(client.create("sample", fleet::SIZE, Cache::Writeback).await?);
            attach.push(client.attach("sample", &paths).await?);
            detach.push(client.detach("sample", &paths).await?);
            delete.push(client.delete("sample").await?);
            let sockets = driver.scratch.sockets().to_owned();
            spawn.push(blocking(move || spawn_bare(&sockets)).await?);
            let disk = driver.scratch.disk().to_owned();
            write.push(blocking(move || write_durably(&disk)).await?);
        }
        let (spawned, written) = (spawn.p50(), write.p50());
        let row = |name, against, samples| Row { name, against, samples };
        let rows = vec![
            row(CREATE, Some(Reference::Write), create),
            row(ATTACH, Some(Reference::Spawn), attach),
            row(DETACH, Some(Reference::Spawn), detach),
            row(DELETE, Some(Reference::Write), delete),
            row("reference: bare daemon, spawn to end", None, spawn),
            row("reference: durable 4 KiB file", None, write),
        ];
        self.0.push(Level { volumes, rows, spawn: spawned, write: written });
        Ok(())
    }

    pub(crate) fn tell(&self, report: &mut Report) -> anyhow::Result<()> {
        report.heading("Control plane");
        report.text(
            "Latency in milliseconds, one call after the other, while so many volumes are \
             published. The last column is p50 divided by p50 of a reference at the same level: \
             for creation and deletion one durable file (4 KiB, fsync, rename, fsync of the \
             directory), else a bare qemu-storage-daemon from its spawn over the QMP handshake \
             and `quit` to its end.",
        );
        let mut table = Table::new(["volumes", "call", "p50 ms", "p99 ms", "x reference"]);
        for level in &self.0 {
            for row in &level.rows {
                table.row([
                    level.volumes.to_string(),
                    row.name.to_owned(),
                    format!("{:.1}", ms(row.samples.p50())),
                    format!("{:.1}", ms(row.samples.p99())),
                    level.against(row).map_or_else(String::new, |ratio| format!("{ratio:.1}")),
                ]);
            }
        }
        report.table(&table);
        self.judge(report);
        report.figure("control.svg", "latency of calls by number of volumes", &self.chart())
    }

    fn judge(&self, report: &mut Report) {
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else { return };
        let mut table = Table::new(["call", "figure", "value", "goal"]);
        for (name, goal) in [(CREATE, 10.0), (ATTACH, 60.0)] {
            let p50 = ms(first.p50(name).max(last.p50(name)));
            let text = format!("{p50:.1} ms");
            let figure = "p50, the larger of first and last level".to_owned();
            table.row([name.to_owned(), figure, text, Goal::AtMost(goal).judge(p50)]);
        }
        for name in [CREATE, ATTACH, DETACH, DELETE] {
            let growth = ratio(ms(last.p50(name)), ms(first.p50(name)));
            let goal = match name {
                CREATE | ATTACH => Goal::AtMost(1.5).judge(growth),
                _ => String::new(),
            };
            let figure = format!("p50 at {} / p50 at {}", last.volumes, first.volumes);
            table.row([name.to_owned(), figure, format!("{growth:.2}"), goal]);
        }
        for (name, growth) in [
            ("reference: bare daemon", ratio(ms(last.spawn), ms(first.spawn))),
            ("reference: durable file", ratio(ms(last.write), ms(first.write))),
        ] {
            let figure = format!("p50 at {} / p50 at {}", last.volumes, first.volumes);
            let why = "the machine's own drift".to_owned();
            table.row([name.to_owned(), figure, format!("{growth:.2}"), why]);
        }
        report.table(&table);
    }

    fn chart(&self) -> Chart {
        let group = |name: &str| Group {
            name: name.to_owned(),
            bars: self.0.iter().map(|level| level.bar(name)).collect(),
        };
        let groups = [CREATE, ATTACH, DETACH, DELETE].map(group).into();
        let title = "Latency by number of volumes: p50, line up to p99".to_owned();
        Chart { title, unit: "ms", groups, goal: None }
    }
}

impl Level {
    fn samples(&self, name: &str) -> Samples {
        let row = self.rows.iter().find(|row| row.name == name);
        row.map(|row| row.samples.clone()).unwrap_or_default()
    }

    fn p50(&self, name: &str) -> Duration {
        self.samples(name).p50()
    }

    fn bar(&self, name: &str) -> Bar {
        let samples = self.samples(name);
        Bar {
            name: format!("{} volumes", self.volumes),
            value: ms(samples.p50()),
            upto: Some(ms(samples.p99())),
        }
    }

    fn against(&self, row: &Row) -> Option<f64> {
        let reference = match row.against? {
            Reference::Spawn => self.spawn,
            Reference::Write => self.write,
        };
        Some(ratio(ms(row.samples.p50()), ms(reference)))
    }
}

fn spawn_bare(dir: &Path) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    Bare::start(dir)?.quit()?;
    Ok(begin.elapsed())
}

fn write_durably(dir: &Path) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(&[b'x'; 4096])?;
    file.as_file().sync_all()?;
    file.persist(dir.join("durable"))?;
    File::open(dir)?.sync_all()?;
    Ok(begin.elapsed())
}
