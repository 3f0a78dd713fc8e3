//! The life of one daemon: started with its graph, found again, ended.
//!
//! ```text
//! Launch -- start --> process, with graph and export ----- handshake --> Daemon -- stop --> (gone)
//!    |                   |                                    |             ^
//!    |                   +-- ends, hangs, or is deaf ---------+             |
//!    |                   v                                                  |
//!    |                killed                                                |
//!    |                   v                                                  |
//!    |                process -- handshake --> graph, export ---------------+
//!    |                   |           |               |                      |
//!    |                   +-- ends, hangs, or is deaf-+                      |
//!    |                   v                                                  |
//!    |                killed, and once more (ATTEMPTS)                      |
//!    +-- adopt: it runs already; its export is looked for ------------------+
//! ```
//!
//! A monitor reads byte by byte, 3.6 us each (10.0.13), and a volume takes some 2 KB: until a daemon
//! serves an overlay on a raw layer, 12.2 ms instead of 7.1 by its command line. So it is told there
//! what to serve. Over its monitor it is where that does not succeed, as only the monitor gives
//! reasons that a program can tell from each other; and where there is more to it than files.

use super::{
    Command, Durability, Jobs, Monitor, Outlet, encryption,
    graph::{self, Plan, Reader, Reads, Remote, Sharing, Writes},
    master::{self, Bottom, Credentials, Master},
    monitor::{self, HANDSHAKE},
    program::Version,
};
use crate::{
    blocking::blocking,
    chain::Chain,
    qcow2,
    run::{self, DaemonDir, DaemonKey},
    source::Access,
    supervisor::{self, Spawn, State},
    units::Bytes,
    volume::{Layer, Passphrase, Throttle},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The supervisor could not start or end it.
    #[error(transparent)]
    Supervisor(#[from] supervisor::Error),
    /// It does not answer, or says no.
    #[error("qemu-storage-daemon")]
    Monitor(#[from] monitor::Error),
    /// The remote master of the volume is the trouble.
    #[error(transparent)]
    Master(#[from] master::Error),
    /// It would lose what is written through a file.
    #[error(
        "qemu-storage-daemon {} corrupts what is written through FUSE at the same time; 10.0.13 \
         does not", version_text(*.0)
    )]
    TooOld(Version),
    /// The place for the file that it exports cannot be made.
    #[error("{}", path.display())]
    Place {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The passphrase is not that of the layers.
    #[error("secrets: {} does not open the layers", Passphrase::KEY)]
    Locked,
    /// It ended before it could serve.
    #[error("qemu-storage-daemon ended at its start: {0}")]
    Ended(String),
    /// It serves the volume, but not as the records have it by now.
    #[error("qemu-storage-daemon {pid} {what}")]
    Outdated {
        /// Its process id.
        pid: i32,
        /// What it does instead.
        what: String,
    },
    /// It runs, but does not serve what it should.
    #[error("qemu-storage-daemon {pid} {what}")]
    Foreign {
        /// Its process id.
        pid: i32,
        /// What it does instead.
        what: String,
    },
}

/// All it takes to have the daemon of one volume.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Which daemon.
    pub key: DaemonKey,
    /// The qemu-storage-daemon to run.
    pub program: PathBuf,
    /// Its directory; exists.
    pub dir: DaemonDir,
    /// A file that it holds while it lives, so that no other daemon serves the volume, wherever its
    /// run directory is by then.
    pub exclusive: PathBuf,
    /// Where its export is to be.
    pub outlet: Outlet,
    /// The layers of the volume, from the active one down.
    pub layers: Vec<Layer>,
    /// Who we are to the server of its master.
    pub credentials: Credentials,
    /// What opens the layers, where they are encrypted.
    pub passphrase: Option<Passphrase>,
    /// What becomes of data that is read from below the active layer.
    pub reads: Reads,
    /// What is let pass.
    pub throttle: Throttle,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// Where they go.
    pub writes: Writes,
    /// Who reads the volume through an export of their own.
    pub readers: Vec<Reader>,
    /// The daemon to take over from, which serves until then.
    pub beside: Option<DaemonKey>,
}

/// All it takes to have a daemon of no volume, for work on layers or a look at a master.
#[derive(Clone, Debug)]
pub struct Workshop {
    /// Which daemon.
    pub key: DaemonKey,
    /// The qemu-storage-daemon to run.
    pub program: PathBuf,
    /// Its directory; exists.
    pub dir: DaemonDir,
}

/// A daemon that serves its volume.
#[derive(Clone, Debug)]
pub struct Daemon {
    key: DaemonKey,
    monitor: Monitor,
    pid: i32,
    version: Version,
    outlet: Outlet,
    durability: Durability,
    since: Instant,
}

/// A daemon that loses the start-up race is deaf; one in some thousands does
/// (facts/qsd.md section 1).
const ATTEMPTS: u32 = 3;

/// A daemon ends within 30 ms of being told (facts/qsd.md section 15); with much to flush, later.
pub const FLUSH: Duration = Duration::from_secs(10);

/// What a daemon that was killed had in flight keeps its layers open, and QEMU's locks of them held,
/// for a moment after its end: the kernel ends its requests later.
const AFTERLIFE: Duration = Duration::from_millis(100);

/// How often a monitor that is not there yet is tried. Less than tokio's clock can tell.
const RETRY: Duration = Duration::from_micros(250);

/// The longest command line: the kernel takes 128 KiB in one argument, and some MiB in all.
const LONGEST_LINE: usize = 64 << 10;

/// The first version that does not (facts/qsd.md, D3).
const FIRST_WITH_FUSE: Version = [10, 0, 13];

/// A daemon that was told all: its monitor, its process id, the version it reports.
type Started = (Monitor, i32, Version);

/// A daemon to be started, and what it is to be told.
struct Start<'a> {
    key: &'a DaemonKey,
    program: &'a Path,
    dir: &'a DaemonDir,
    exclusive: &'a Path,
    beside: Option<&'a DaemonKey>,
    bottom: Option<Bottom>,
    passphrase: Option<&'a Passphrase>,
    /// The file that it is to export, if it is.
    file: Option<&'a Path>,
    commands: Vec<Command>,
}

/// Starts a daemon of nobody, with an empty disk that lets so many requests pass a second, exported
/// like a volume: to try what a program does. It is to be ended by its key.
pub async fn start_trial(
    key: &DaemonKey,
    program: &Path,
    dir: &DaemonDir,
    requests_per_second: u32,
    supervisor: &supervisor::Client,
) -> Result<(), Error> {
    let exclusive = dir.path();
    let commands = graph::trial(requests_per_second, &dir.backend_socket());
    let (beside, bottom, passphrase, file) = (None, None, None, None);
    let start = Start { key, program, dir, exclusive, beside, bottom, passphrase, file, commands };
    start.run(supervisor).await.map(drop)
}

impl Workshop {
    /// Starts the daemon on layers that nobody has open. It is to be stopped.
    ///
    /// A remote master at their bottom is opened where somebody says who we are to its server. Else
    /// it is barred: what would need it fails.
    pub async fn start(
        &self,
        layers: &[Layer],
        credentials: Option<&Credentials>,
        supervisor: &supervisor::Client,
    ) -> Result<Daemon, Error> {
        let bottom = credentials.and_then(|one| Bottom::of(layers, one, Access::Write));
        let master = if bottom.is_some() { Remote::Open } else { Remote::Barred };
        let start = self.begin(bottom, graph::workshop(layers, master));
        let (monitor, pid, version) = start.run(supervisor).await?;
        let outlet = Outlet::Socket(self.dir.backend_socket()); // where nothing is exported
        let (key, since, durability) = (self.key.clone(), Instant::now(), Durability::OnFlush);
        Ok(Daemon { key, monitor, pid, version, outlet, durability, since })
    }

    /// Opens a remote master in the daemon, and says what it has. The daemon is to be killed.
    pub async fn measure(
        &self,
        master: &Master,
        supervisor: &supervisor::Client,
    ) -> Result<Bytes, Error> {
        let monitor = self.bare(supervisor).await?;
        master.open(&monitor, &self.dir).await
    }

    fn begin(&self, bottom: Option<Bottom>, commands: Vec<Command>) -> Start<'_> {
        let Self { key, program, dir } = self;
        let (exclusive, beside, passphrase, file) = (dir.path(), None, None, None);
        Start { key, program, dir, exclusive, beside, bottom, passphrase, file, commands }
    }

    /// The monitor of a daemon that has nothing open.
    pub(super) async fn bare(&self, supervisor: &supervisor::Client) -> Result<Monitor, Error> {
        let (monitor, ..) = self.begin(None, Vec::new()).run(supervisor).await?;
        Ok(monitor)
    }
}

impl Launch {
    /// Starts the daemon, builds its graph and opens its export.
    pub async fn start(&self, supervisor: &supervisor::Client) -> Result<Daemon, Error> {
        if let Outlet::File(file) = &self.outlet {
            let place = |source| Error::Place { path: file.clone(), source };
            run::make_mount_point(file).map_err(place)?;
        }
        if let Writes::Scratch(file) = &self.writes {
            let place = |source| Error::Place { path: file.clone(), source };
            self.make_scratch(file).map_err(place)?;
        }
        let plan = Plan {
            layers: &self.layers,
            reads: self.reads,
            throttle: &self.throttle,
            outlet: &self.outlet,
            durability: self.durability,
            writes: &self.writes,
            readers: &self.readers,
            sharing: if self.beside.is_some() { Sharing::Handover } else { Sharing::Alone },
        };
        let start = Start {
            key: &self.key,
            program: &self.program,
            dir: &self.dir,
            exclusive: &self.exclusive,
            beside: self.beside.as_ref(),
            bottom: Bottom::of(&self.layers, &self.credentials, self.writes.access()),
            passphrase: self.passphrase.as_ref(),
            file: match &self.outlet {
                Outlet::File(file) => Some(file),
                Outlet::Socket(_) => None,
            },
            commands: graph::commands(plan),
        };
        let (monitor, pid, version) = start.run(supervisor).await?;
        Ok(self.daemon(monitor, pid, version))
    }

    /// What an earlier daemon wrote is worth nothing.
    fn make_scratch(&self, file: &Path) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        let image = options.write(true).create(true).truncate(true).mode(0o600).open(file)?;
        qcow2::create(&image, self.layers.first().map_or(Bytes::ZERO, |active| active.size))
    }

    fn daemon(&self, monitor: Monitor, pid: i32, version: Version) -> Daemon {
        Daemon {
            key: self.key.clone(),
            monitor,
            pid,
            version,
            outlet: self.outlet.clone(),
            durability: self.durability,
            since: Instant::now(),
        }
    }

    /// To be started after another, with an export that is not in the way of what is left of that.
    #[must_use]
    pub fn afresh(self, place: impl FnOnce() -> PathBuf) -> Self {
        let outlet = match self.outlet {
            socket @ Outlet::Socket(_) => socket,
            Outlet::File(_) => Outlet::File(place()),
        };
        Self { outlet, ..self }
    }

    /// Takes over a daemon that runs, after a look at what it serves.
    pub async fn adopt(&self, pid: i32) -> Result<Daemon, Error> {
        let monitor = Monitor::connect(&self.dir.monitor()).await?;
        let exports = monitor.execute(Command::new("query-block-exports", json!({}))).await?;
        let exports: Vec<_> = exports.as_array().into_iter().flatten().collect();
        let outdated = |what: &str| Err(Error::Outdated { pid, what: what.to_owned() });
        if exports.is_empty() {
            return outdated("exports nothing"); // who started it died before it was told all
        }
        let daemon = self.daemon(monitor.clone(), pid, version(&monitor).await?);
        let own: Vec<_> = self.layers.iter().map(|layer| layer.file.node_name()).collect();
        let (stack, besides) = daemon.layers().await?;
        if !own.iter().any(|own| stack.contains(own) || besides.contains(own)) {
            let what = format!("serves {stack:?}, and the layers are {own:?}");
            return Err(Error::Foreign { pid, what });
        }
        // Work of an earlier driver: what it moved stays moved, but nobody records an end.
        let (stack, besides) = match daemon.end_jobs().await? {
            Jobs::None => (stack, besides),
            Jobs::LeftGraph => daemon.layers().await?,
            Jobs::ChangedGraph => return outdated("has merged layers"),
        };
        if stack != own || !besides.is_empty() {
            return outdated("has other layers");
        }
        let ids = exports.iter().filter_map(|export| export["id"].as_str());
        let is_main = |id: &&str| *id != graph::IMAGE && !id.starts_with(Reader::EXPORT);
        let main: Vec<_> = ids.filter(is_main).collect();
        if main != [self.outlet.export(self.durability, &self.writes)] {
            return outdated("has other exports");
        }
        daemon.set_readers(&self.readers).await?;
        daemon.freeze(self.layers.get(1..).unwrap_or_default()).await?;
        daemon.require_throttle(&self.throttle).await?;
        Ok(daemon)
    }
}

impl Start<'_> {
    /// An attempt that fails leaves no process. A refusal is final, and so is an end before the
    /// handshake, which has a reason; a daemon that hangs or is deaf gets another attempt. One that
    /// did not obey its options is started once more without: then it says why so that we understand.
    async fn run(&self, supervisor: &supervisor::Client) -> Result<Started, Error> {
        let (mut attempt, mut options) = (1, self.options());
        loop {
            let error = match self.attempt(options.as_deref(), supervisor).await {
                Ok(started) => return Ok(started),
                Err(error) => error,
            };
            supervisor.kill(self.key).await?;
            if options.take().is_some() && error.is_of_options() {
                debug!(key = %self.key, error = %Chain(&error), "a daemon is told step by step");
                continue;
            }
            if !error.may_pass() || attempt == ATTEMPTS {
                return Err(error);
            }
            warn!(key = %self.key, attempt, error = %Chain(&error), "a daemon did not start well");
            attempt += 1;
            sleep(AFTERLIFE).await;
            if let Some(file) = self.file {
                // What died may have mounted it, also a moment later, by the program that mounts for
                // it; and the next one cannot on what is dead.
                let place = |source| Error::Place { path: file.to_owned(), source };
                run::clear_mount_point(file).map_err(place)?;
            }
        }
    }

    /// The commands as options of a command line, where that can hold them: what is secret cannot
    /// be there, and what depends on the version must wait for it.
    fn options(&self) -> Option<Vec<String>> {
        if self.bottom.is_some() || self.passphrase.is_some() || self.file.is_some() {
            return None;
        }
        let options: Vec<_> =
            self.commands.iter().map(graph::option).collect::<Option<Vec<_>>>()?.concat();
        let length: usize = options.iter().map(String::len).sum();
        (length <= LONGEST_LINE).then_some(options)
    }

    /// One attempt, with these options or step by step.
    async fn attempt(
        &self,
        options: Option<&[String]>,
        supervisor: &supervisor::Client,
    ) -> Result<Started, Error> {
        let pid = supervisor.spawn(self.process(options.unwrap_or_default())).await?;
        let monitor = tokio::select! {
            monitor = self.monitor() => monitor?,
            end = self.end(supervisor) => return Err(end),
        };
        let version = version(&monitor).await?;
        if options.is_some() {
            return Ok((monitor, pid, version));
        }
        if self.file.is_some() {
            require_files(version)?;
        }
        if let Some(bottom) = &self.bottom {
            bottom.open(&monitor, self.dir).await?;
        }
        if let Some(passphrase) = self.passphrase {
            encryption::tell(&monitor, passphrase).await?;
        }
        for command in self.commands.clone() {
            monitor.execute(command).await.map_err(encryption::refused)?;
        }
        if self.passphrase.is_some() {
            encryption::forget(&monitor).await?;
        }
        Ok((monitor, pid, version))
    }

    /// How the daemon ended, once it does.
    async fn end(&self, supervisor: &supervisor::Client) -> Error {
        let how = async {
            supervisor.wait(self.key).await?;
            supervisor.list().await
        };
        let all = match how.await {
            Ok(all) => all,
            Err(error) => return error.into(),
        };
        let own = all.into_iter().find(|process| process.key == *self.key);
        Error::Ended(match own.map(|process| process.state) {
            Some(State::Exited(how)) => how,
            Some(State::Running) | None => "nobody saw how".to_owned(),
        })
    }

    /// The options come first: when there is a monitor, they were obeyed.
    fn process(&self, options: &[String]) -> Spawn {
        let monitor = |id: &str, socket: PathBuf| {
            let path = socket.display().to_string().replace(',', ",,"); // QEMU's own escape
            let chardev = format!("socket,id={id},path={path},server=on,wait=off");
            ["--chardev".to_owned(), chardev, "--monitor".to_owned(), format!("chardev={id}")]
        };
        let mut arguments = options.to_vec();
        arguments.extend(monitor("qmp", self.dir.monitor()));
        arguments.extend(monitor("dbg", self.dir.debug_monitor()));
        Spawn {
            key: self.key.clone(),
            program: self.program.to_owned(),
            arguments,
            exclusive: self.exclusive.to_owned(),
            beside: self.beside.cloned(),
        }
    }

    /// The monitor of a daemon that is just starting.
    async fn monitor(&self) -> Result<Monitor, monitor::Error> {
        let deadline = Instant::now() + HANDSHAKE;
        loop {
            match Monitor::connect(&self.dir.monitor()).await {
                Err(monitor::Error::Connect(error))
                    if is_not_there_yet(&error) && Instant::now() < deadline =>
                {
                    blocking(|| std::thread::sleep(RETRY)).await;
                }
                outcome => return outcome,
            }
        }
    }
}

impl Error {
    /// Whether it is how a daemon ends that does not obey an option.
    fn is_of_options(&self) -> bool {
        matches!(self, Self::Ended(how) if how.starts_with("exit code 1"))
    }

    /// Whether another attempt may end better: not after a refusal, which has a reason.
    fn may_pass(&self) -> bool {
        match self {
            Self::Supervisor(_)
            | Self::Master(_)
            | Self::Foreign { .. }
            | Self::Outdated { .. }
            | Self::TooOld(_)
            | Self::Place { .. }
            | Self::Locked
            | Self::Ended(_) => false,
            Self::Monitor(error) => match error {
                monitor::Error::Refused { desc, .. } => is_of_lock(desc) || error.is_of_mount(),
                monitor::Error::Connect(_)
                | monitor::Error::Closed
                | monitor::Error::Deadline { .. } => true,
            },
        }
    }
}

/// Whether QEMU refused a layer because somebody has it open.
fn is_of_lock(desc: &str) -> bool {
    desc.starts_with("Failed to get ") && desc.contains(" lock")
}

fn is_not_there_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// The version that a daemon reports of itself.
async fn version(monitor: &Monitor) -> Result<Version, monitor::Error> {
    let answer = monitor.execute(Command::new("query-version", json!({}))).await?;
    let part = |name: &str| answer["qemu"][name].as_u64().and_then(|part| part.try_into().ok());
    Ok(["major", "minor", "micro"].map(|name| part(name).unwrap_or_default()))
}

fn require_files(version: Version) -> Result<(), Error> {
    if version < FIRST_WITH_FUSE { Err(Error::TooOld(version)) } else { Ok(()) }
}

fn version_text([major, minor, micro]: Version) -> String {
    format!("{major}.{minor}.{micro}")
}

impl Daemon {
    /// Which it is.
    pub fn key(&self) -> &DaemonKey {
        &self.key
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How long it has served since it was started or found.
    pub fn served(&self) -> Duration {
        self.since.elapsed()
    }

    /// The QEMU version it reports.
    pub fn version(&self) -> String {
        version_text(self.version)
    }

    /// An error where it would lose what is written through a file (facts/qsd.md, D3).
    pub fn require_files(&self) -> Result<(), Error> {
        require_files(self.version)
    }

    /// When it acknowledges writes.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Where its export is.
    pub fn outlet(&self) -> &Outlet {
        &self.outlet
    }

    /// The same daemon, with another export in the place of the one it had.
    pub(super) fn exporting(&self, socket: &Path, durability: Durability) -> Self {
        Self { outlet: Outlet::Socket(socket.to_owned()), durability, ..self.clone() }
    }

    /// The layers that it has open, by the names of their nodes: those below the export from the
    /// active one down, and others.
    async fn layers(&self) -> Result<(Vec<String>, BTreeSet<String>), monitor::Error> {
        Ok(graph::layers_of(&self.execute(graph::query_graph()).await?))
    }

    pub(super) fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    pub(super) async fn execute(&self, command: Command) -> Result<Value, monitor::Error> {
        self.monitor.execute(command).await
    }

    /// An error unless it answers, in the time that any command has.
    pub async fn answers(&self) -> Result<(), monitor::Error> {
        version(&self.monitor).await.map(drop)
    }

    /// Ends when the daemon does, or no longer talks to us.
    pub async fn closed(&self) {
        self.monitor.closed().await;
    }

    /// Lets it flush and end; one that does not within `FLUSH` is killed.
    pub async fn stop(&self, supervisor: &supervisor::Client) -> Result<(), supervisor::Error> {
        let key = &self.key;
        let quit = async {
            // The answer is often cut off by the end of the daemon itself.
            _ = self.monitor.execute(Command::new("quit", json!({}))).await;
            supervisor.wait(key).await
        };
        if !matches!(timeout(FLUSH, quit).await, Ok(Ok(()))) {
            warn!(%key, pid = self.pid, "a daemon did not end when told to");
        }
        supervisor.kill(key).await
    }
}
