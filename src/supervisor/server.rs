//! The supervisor process.

use super::{
    process::{self, Ending, Handle},
    protocol::{
        Exit, Greeting, LONGEST_LINE, Process, Reply, Request, Signal, Spawn, State, VERSION,
    },
};
use crate::{
    bound::Bound,
    run::{DaemonKey, RunDir},
};
use anyhow::Context as _;
use futures_util::SinkExt as _;
use rustix::{fs::Mode, process::umask};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::{UnixListener, UnixStream},
    signal::unix::{SignalKind, signal},
    sync::{Notify, broadcast},
    time::{Instant, interval, sleep},
};
use tokio_stream::StreamExt as _;
use tokio_util::codec::{Framed, LinesCodec};
use tracing::{debug, info, warn};

/// How long it waits for its predecessor, which lets go within milliseconds of its end.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// How long it stays without a daemon and a client: a driver that restarts is back by then.
const IDLE: Duration = Duration::from_secs(5);

/// A relay that ran this long is followed by another at once, any other a little later.
const STEADY: Duration = Duration::from_millis(200);
const RELAY_PAUSE: Duration = Duration::from_millis(100);

/// How often it looks whether it is idle, and whether a log is too long.
const ROUND: Duration = Duration::from_secs(1);

/// Exits that a slow watcher may fall behind; one that falls further is told to list again.
const EXITS: usize = 1024;

/// Files and sockets of a daemon get mode 0660 (facts/qsd.md section 1). The supervisor makes no
/// directories, which would need the execute bits.
const UMASK: u32 = 0o117;

#[derive(Clone)]
struct Supervisor {
    run: RunDir,
    daemons: Arc<Mutex<BTreeMap<DaemonKey, Daemon>>>,
    exits: broadcast::Sender<Exit>,
    clients: Arc<AtomicUsize>,
    relay_wanted: Arc<Notify>,
}

enum Daemon {
    Running(Handle),
    Exited { pid: i32, how: String },
}

/// Counts a client for as long as it is connected.
struct Connected(Arc<AtomicUsize>);

/// Runs a supervisor on this run directory until it is idle or told to end by SIGTERM.
///
/// Ending leaves the daemons running.
pub async fn run(run: RunDir) -> anyhow::Result<()> {
    _ = rustix::process::setsid(); // already so where a service manager started it
    umask(Mode::from_raw_mode(UMASK));
    let _lock = lock(&run).await?;
    let socket = run.supervisor_socket();
    let (exits, _) = broadcast::channel(EXITS);
    let supervisor = Supervisor {
        run,
        daemons: Arc::default(),
        exits,
        clients: Arc::default(),
        relay_wanted: Arc::default(),
    };
    supervisor.adopt()?;
    tokio::spawn(supervisor.clone().attend_relay());
    let listening = listen(&socket)?;
    info!(run_dir = %supervisor.run.path().display(), "supervising");
    supervisor.serve(listening).await
}

/// Nobody else binds there: we hold the lock.
fn listen(socket: &Path) -> anyhow::Result<(UnixListener, Bound)> {
    let bound = Bound::bind(socket, |socket| UnixListener::bind(socket));
    bound.with_context(|| socket.display().to_string())
}

async fn lock(run: &RunDir) -> anyhow::Result<File> {
    let path = run.supervisor_lock();
    let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
    let deadline = Instant::now() + PREDECESSOR;
    while lock.try_lock().is_err() {
        anyhow::ensure!(Instant::now() < deadline, "{} is taken", path.display());
        sleep(Duration::from_millis(5)).await;
    }
    Ok(lock)
}

impl Supervisor {
    async fn serve(&self, (mut listener, mut bound): (UnixListener, Bound)) -> anyhow::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut round = interval(ROUND);
        let mut idle_since = None;
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        let connected = Connected::new(&self.clients);
                        tokio::spawn(self.clone().client(stream, connected));
                    }
                    Err(error) => warn!(%error, "accepting"),
                },
                _ = round.tick() => {
                    if bound.is_lost() {
                        warn!("the socket was removed; listening anew");
                        (listener, bound) = listen(&self.run.supervisor_socket())?;
                    }
                    self.trim_logs();
                    let since = *idle_since.get_or_insert_with(Instant::now);
                    match self.is_idle() {
                        true if since.elapsed() >= IDLE => break,
                        true => {}
                        false => idle_since = None,
                    }
                }
            }
        }
        info!("ending");
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.clients.load(Ordering::SeqCst) == 0 && self.runs_nothing()
    }

    fn runs_nothing(&self) -> bool {
        let running = |daemon: &Daemon| matches!(daemon, Daemon::Running(_));
        !self.daemons().values().any(running)
    }

    fn trim_logs(&self) {
        let of_daemons = self.daemons().keys().map(|key| self.run.daemon(key).log()).collect();
        let others = vec![self.run.supervisor_log(), self.run.relay().log()];
        let logs: Vec<_> = [of_daemons, others].concat();
        for log in logs {
            if let Err(error) = process::trim_log(&log) {
                warn!(log = %log.display(), %error, "cutting a log");
            }
        }
    }

    async fn client(self, stream: UnixStream, _connected: Connected) {
        let lines = LinesCodec::new_with_max_length(LONGEST_LINE);
        if let Err(error) = self.converse(Framed::new(stream, lines)).await {
            debug!(%error, "a client broke off");
        }
    }

    async fn converse(&self, mut lines: Framed<UnixStream, LinesCodec>) -> anyhow::Result<()> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        send(&mut lines, &Greeting { version: VERSION, pid }).await?;
        while let Some(line) = lines.next().await {
            let reply = match serde_json::from_str(&line?) {
                Ok(Request::Watch) => return self.report(lines).await,
                Ok(Request::Wait(key)) => tokio::select! {
                    ended = self.end_of(&key) => ended,
                    // A client that goes away, or has more to say before it has its answer.
                    _ = lines.next() => return Ok(()),
                },
                Ok(request) => self.answer(request),
                Err(error) => Reply::Refused(format!("no request: {error}")),
            };
            send(&mut lines, &reply).await?;
        }
        Ok(())
    }

    fn answer(&self, request: Request) -> Reply {
        let done = |outcome: io::Result<()>| match outcome {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Refused(error.to_string()),
        };
        match request {
            Request::Spawn(spawn) => match self.spawn(&spawn) {
                Ok(pid) => Reply::Spawned { pid },
                Err(error) => Reply::Refused(error.to_string()),
            },
            Request::List => Reply::List(self.list()),
            Request::Signal { key, signal } => done(self.signal(&key, signal)),
            Request::Forget(key) => done(self.forget(&key)),
            // These two take their time and are answered where the connection is.
            Request::Watch | Request::Wait(_) => Reply::Done,
        }
    }

    /// Waits until the daemon does not run.
    async fn end_of(&self, key: &DaemonKey) -> Reply {
        loop {
            let mut exits = self.exits.subscribe(); // before the look, or the end could slip by
            if !matches!(self.daemons().get(key), Some(Daemon::Running(_))) {
                return Reply::Done;
            }
            _ = exits.recv().await; // whoever ended, or many at once: look again
        }
    }

    /// Sends every exit from now on, until the client goes.
    async fn report(&self, mut lines: Framed<UnixStream, LinesCodec>) -> anyhow::Result<()> {
        let mut exits = self.exits.subscribe();
        send(&mut lines, &Reply::Done).await?;
        loop {
            tokio::select! {
                // One that fell too far behind is let go: it connects again, and lists.
                exit = exits.recv() => send(&mut lines, &exit?).await?,
                line = lines.next() => match line {
                    None => return Ok(()),
                    Some(line) => drop(line?),
                },
            }
        }
    }

    fn spawn(&self, spawn: &Spawn) -> io::Result<i32> {
        if let Some(Daemon::Running(handle)) = self.daemons().get(&spawn.key) {
            let text = format!("daemon {} of {} still runs", handle.pid, spawn.key);
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        let beside = match &spawn.beside {
            Some(other) => match self.daemons().get(other) {
                Some(Daemon::Running(handle)) => Some(handle.clone()),
                Some(Daemon::Exited { .. }) | None => {
                    let text = format!("daemon {other} does not run");
                    return Err(io::Error::new(io::ErrorKind::NotFound, text));
                }
            },
            None => None,
        };
        let dir = self.run.daemon(&spawn.key);
        let (handle, ending) = match process::spawn(spawn, &dir, beside.as_ref()) {
            Ok(spawned) => spawned,
            Err(error) => {
                // A supervisor that died as it started one may have left it at a moment at which its
                // successor could not know it. From now on it can be told to end.
                if error.kind() == io::ErrorKind::AlreadyExists {
                    self.adopt()?;
                }
                return Err(error);
            }
        };
        let pid = handle.pid;
        info!(key = %spawn.key, pid, "daemon started");
        self.watch(spawn.key.clone(), handle, ending);
        self.relay_wanted.notify_one();
        Ok(pid)
    }

    /// Sees to it that a relay runs for as long as a daemon does. One that ends leaves its worker,
    /// which the next one takes over; one that has nothing to do ends by itself.
    async fn attend_relay(self) {
        loop {
            if self.runs_nothing() {
                self.relay_wanted.notified().await;
                continue;
            }
            let begin = Instant::now();
            match self.relay() {
                Ok((handle, ending)) => {
                    let how = Handle::ended(ending, &self.run.relay().log()).await;
                    info!(pid = handle.pid, reason = how, "relay ended");
                }
                Err(error) => warn!(%error, "no relay"),
            }
            if begin.elapsed() < STEADY {
                sleep(RELAY_PAUSE).await;
            }
        }
    }

    /// The relay that runs, or a new one.
    fn relay(&self) -> io::Result<(Handle, Ending)> {
        let dir = self.run.relay();
        if let Some((handle, ending)) = process::find_relay(&dir)? {
            info!(pid = handle.pid, "relay adopted");
            return Ok((handle, ending));
        }
        let (handle, ending) = process::spawn_relay(&self.run, &dir)?;
        info!(pid = handle.pid, "relay started");
        Ok((handle, ending))
    }

    /// Takes over the daemons that nobody has on the books.
    fn adopt(&self) -> io::Result<()> {
        let running = |key: &DaemonKey| matches!(self.daemons().get(key), Some(Daemon::Running(_)));
        for (key, handle, ending) in process::find(&self.run, running)? {
            info!(%key, pid = handle.pid, "daemon adopted");
            self.watch(key, handle, ending);
        }
        Ok(())
    }

    /// Keeps the daemon in the books, and reports its end.
    fn watch(&self, key: DaemonKey, handle: Handle, ending: Ending) {
        let pid = handle.pid;
        self.daemons().insert(key.clone(), Daemon::Running(handle));
        let supervisor = self.clone();
        tokio::spawn(async move {
            let how = Handle::ended(ending, &supervisor.run.daemon(&key).log()).await;
            info!(%key, pid, reason = how, "daemon ended");
            supervisor.note_end(&key, pid, &how);
            _ = supervisor.exits.send(Exit { key, pid, how }); // nobody watching is fine
        });
    }

    fn note_end(&self, key: &DaemonKey, pid: i32, how: &str) {
        let mut daemons = self.daemons();
        // Unless another one runs under this key already.
        if let Some(Daemon::Running(handle)) = daemons.get(key)
            && handle.pid == pid
        {
            daemons.insert(key.clone(), Daemon::Exited { pid, how: how.to_owned() });
        }
    }

    fn list(&self) -> Vec<Process> {
        let tell = |(key, daemon): (&DaemonKey, &Daemon)| {
            let (pid, state) = match daemon {
                Daemon::Running(handle) => (handle.pid, State::Running),
                Daemon::Exited { pid, how } => (*pid, State::Exited(how.clone())),
            };
            Process { key: key.clone(), pid, state }
        };
        self.daemons().iter().map(tell).collect()
    }

    fn signal(&self, key: &DaemonKey, signal: Signal) -> io::Result<()> {
        match self.daemons().get(key) {
            Some(Daemon::Running(handle)) => handle.signal(signal),
            Some(Daemon::Exited { .. }) | None => Ok(()),
        }
    }

    fn forget(&self, key: &DaemonKey) -> io::Result<()> {
        let mut daemons = self.daemons();
        if let Some(Daemon::Running(handle)) = daemons.get(key) {
            let text = format!("daemon {key} still runs as {}", handle.pid);
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        daemons.remove(key);
        Ok(())
    }

    fn daemons(&self) -> MutexGuard<'_, BTreeMap<DaemonKey, Daemon>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn send<T: serde::Serialize>(
    lines: &mut Framed<UnixStream, LinesCodec>,
    message: &T,
) -> anyhow::Result<()> {
    Ok(lines.send(serde_json::to_string(message)?).await?)
}

impl Connected {
    fn new(clients: &Arc<AtomicUsize>) -> Self {
        clients.fetch_add(1, Ordering::SeqCst);
        Self(clients.clone())
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
