//! The keeper: the process that owns what must not be lost, and does nothing else.
//!
//! ```text
//! supervisor -- parent of --> keeper -- parent of --> worker -- serves --> volumes
//!                               ^                       |
//!                               +------ commits --------+
//! ```
//!
//! Either may die alone: the next worker is given everything by the keeper, the next keeper by the
//! worker. Both dying at once is the one case left to QEMU's `reconnect`.

use super::kept::{self, Commit, Dropped, Kept, Reply, VERSION, Word};
use crate::{
    bound::{Bound, Found},
    run::{RunDir, Slot},
    store::Locks,
};
use anyhow::Context as _;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::Mode,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
        socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
    process::umask,
};
use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};
use tracing::{error, info, warn};

/// How long it stays without a volume and a daemon: the supervisor starts it again with the next one.
const IDLE: Duration = Duration::from_secs(5);

/// How often it looks whether its socket is still there.
const LOOK: Duration = Duration::from_secs(1);

/// How often it looks whether a worker is needed.
const ROUND: Duration = Duration::from_millis(5);

/// How long one that was started may take to come, before its lock is looked at.
const ARRIVAL: Duration = Duration::from_millis(200);

/// A worker that served this long is followed by another at once; after several that did not, ever
/// more patiently. Short: while there is no worker, the end of the keeper is the end of it all.
const STEADY: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// It only closes.
const CLOSER_STACK: usize = 64 << 10;

struct Keeper {
    run: RunDir,
    kept: Kept,
    listener: OwnedFd,
    bound: Bound,
    /// When it was looked at last.
    looked: Instant,
    worker: Option<OwnedFd>,
    children: Vec<Child>,
    /// Where the descriptors of each volume are closed: a thread of its own, so that one whose end
    /// takes long holds up nobody else.
    closers: BTreeMap<String, mpsc::Sender<Dropped>>,
    /// What to run as the worker, beside the program of the keeper itself.
    upgrade: Option<PathBuf>,
    started: Option<Instant>,
    hasty_ends: u32,
    idle_since: Instant,
}

/// Runs the keeper until it has kept nothing for a while, and no daemon runs: where one does, what it
/// serves may be relayed any time, and the supervisor would start another keeper.
pub(super) fn run(run: RunDir) -> anyhow::Result<()> {
    _ = rustix::process::setsid();
    umask(Mode::from_raw_mode(0o117));
    let path = run.relay().keeper_socket();
    let (listener, bound) = listen_at(&path).with_context(|| path.display().to_string())?;
    info!(run_dir = %run.path().display(), "keeping");
    let mut keeper = Keeper {
        run,
        kept: Kept::default(),
        listener,
        bound,
        looked: Instant::now(),
        worker: None,
        children: Vec::new(),
        closers: BTreeMap::new(),
        upgrade: None,
        started: None,
        hasty_ends: 0,
        idle_since: Instant::now(),
    };
    while keeper.idle_since.elapsed() < IDLE || keeper.is_wanted() {
        keeper.round()?;
    }
    info!("nothing to keep; ending");
    Ok(())
}

fn closer() -> mpsc::Sender<Dropped> {
    let (sender, receiver) = mpsc::channel::<Dropped>();
    let thread = std::thread::Builder::new().stack_size(CLOSER_STACK);
    let spawned = thread.spawn(move || receiver.into_iter().for_each(drop));
    if let Err(error) = spawned {
        warn!(%error, "a thread to close descriptors"); // the sender closes them
    }
    sender
}

/// Nobody else binds there: the supervisor runs one at a time.
fn listen_at(path: &Path) -> io::Result<(OwnedFd, Bound)> {
    Bound::bind(path, |path| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, 4)?;
        Ok(socket)
    })
}

impl Keeper {
    /// Whether a daemon runs in the run directory, if that is still ours; looked at now and then.
    fn is_wanted(&mut self) -> bool {
        self.idle_since = Instant::now();
        if !self.bound.look().is_ok_and(|found| found == Found::Ours) {
            return false;
        }
        let Ok(locks) = Locks::read() else { return false };
        let keys = self.run.keys().unwrap_or_default();
        keys.iter().any(|key| {
            let dir = self.run.volume(key);
            Slot::ALL.into_iter().any(|slot| locks.holder(&dir.daemon(slot).lock()).is_some())
        })
    }

    /// Waits for something to do, and does it.
    fn round(&mut self) -> anyhow::Result<()> {
        self.keep_listening();
        self.children.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
        if !self.kept.0.is_empty() {
            self.idle_since = Instant::now();
        }
        if self.worker.is_none() {
            self.provide_worker();
        }
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.worker.as_ref().map(|worker| PollFd::new(worker, PollFlags::IN)));
        let patience = if self.worker.is_some() { Duration::from_secs(1) } else { ROUND };
        let limit = Timespec::try_from(patience)?;
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready.get(1) == Some(&true) {
            self.serve_worker();
        }
        if ready[0] {
            self.accept();
        }
        Ok(())
    }

    /// Where its socket was removed, no other worker would find it.
    fn keep_listening(&mut self) {
        if self.looked.elapsed() < LOOK {
            return;
        }
        self.looked = Instant::now();
        if !self.bound.is_lost() {
            return;
        }
        let path = self.run.relay().keeper_socket();
        warn!(socket = %path.display(), "the socket was removed; listening anew");
        match listen_at(&path) {
            Ok((listener, bound)) => (self.listener, self.bound) = (listener, bound),
            Err(error) => error!(%error, socket = %path.display(), "listening"),
        }
    }

    /// Starts a worker, unless one runs that has not come to us yet: it holds its lock.
    fn provide_worker(&mut self) {
        if let Some(started) = self.started
            && started.elapsed() < self.pause()
        {
            return;
        }
        let lock = self.run.relay().worker_lock();
        let free = OpenOptions::new().create(true).append(true).mode(0o600).open(&lock);
        match free.map(|file| file.try_lock().is_ok()) {
            Ok(true) => self.start_worker(),
            Ok(false) => {}
            Err(error) => error!(%error, "{}", lock.display()),
        }
    }

    fn start_worker(&mut self) {
        let own = PathBuf::from("/proc/self/exe");
        let program = self.upgrade.clone().unwrap_or(own);
        let child = Command::new(&program)
            .arg("relay")
            .arg("--run-dir")
            .arg(self.run.path())
            .arg("work")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        self.started = Some(Instant::now());
        match child {
            Ok(child) => {
                info!(pid = child.id(), program = %program.display(), "started a worker");
                self.children.push(child);
            }
            Err(error) => {
                error!(%error, program = %program.display(), "no worker");
                self.note_end();
            }
        }
    }

    /// A worker that keeps ending is started ever more patiently, and is no longer the upgraded one.
    fn note_end(&mut self) {
        let hasty = self.started.is_some_and(|started| started.elapsed() < STEADY);
        self.hasty_ends = if hasty { self.hasty_ends.saturating_add(1) } else { 0 };
        if self.hasty_ends > 2
            && let Some(program) = self.upgrade.take()
        {
            error!(program = %program.display(), "it does not last; back to the one before");
        }
    }

    /// Since when the last one was started another may be.
    fn pause(&self) -> Duration {
        match self.hasty_ends {
            0..=3 => ARRIVAL,
            more => ARRIVAL.saturating_mul(more).min(LONGEST_PAUSE),
        }
    }

    fn accept(&mut self) {
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                if let Err(error) = self.greet(&socket) {
                    warn!(error = format!("{error:#}"), "a worker broke off");
                    return;
                }
                self.worker = Some(socket);
            }
            Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => warn!(%error, "accepting"),
        }
    }

    fn greet(&mut self, socket: &OwnedFd) -> anyhow::Result<()> {
        let limit = Some(Duration::from_secs(2));
        set_socket_timeout(socket, Timeout::Recv, limit)?;
        set_socket_timeout(socket, Timeout::Send, limit)?;
        let socket = socket.as_fd();
        let Some((Word::Hello { pid, has_all }, _)) = kept::receive(socket)? else {
            anyhow::bail!("it did not say who it is");
        };
        info!(pid, has_all, "a worker");
        kept::send(socket, &Reply::Hello { version: VERSION }, &[])?;
        if has_all {
            self.kept = Kept::default();
            return Ok(());
        }
        for (volume, things) in &self.kept.0 {
            for (name, thing) in things {
                let (volume, name, bytes) = (volume.clone(), name.clone(), thing.bytes.clone());
                let kept = Reply::Kept { volume, name, bytes };
                kept::send(socket, &kept, &thing.descriptors)?;
            }
        }
        Ok(kept::send(socket, &Reply::All, &[])?)
    }

    fn serve_worker(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        let served = match kept::receive(worker.as_fd()) {
            Ok(Some((word, descriptors))) => self.obey(&worker, word, descriptors),
            Ok(None) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => Err(error),
        };
        match served {
            Ok(()) => self.worker = Some(worker),
            Err(error) => {
                warn!(%error, "the worker is gone");
                self.note_end();
                if self.hasty_ends == 0 {
                    self.started = None; // another one at once
                }
            }
        }
    }

    fn close(&mut self, volume: &str, dropped: Dropped) {
        if !dropped.is_empty() {
            let closer = self.closers.entry(volume.to_owned()).or_insert_with(closer);
            _ = closer.send(dropped); // its thread ends after the sender
        }
        if !self.kept.0.contains_key(volume) {
            self.closers.remove(volume);
        }
    }

    fn obey(&mut self, worker: &OwnedFd, word: Word, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let reply = match word {
            Word::Commit(parts) => {
                let commit = Commit::from_parts(parts, descriptors);
                let commit = commit.ok_or_else(|| io::Error::other("descriptors are missing"))?;
                let mut dropped = Dropped::new();
                let reply = match self.kept.apply(&commit, &mut dropped) {
                    Ok(()) => Reply::Done,
                    Err(error) => Reply::Lost(error.to_string()),
                };
                self.close(&commit.volume, dropped);
                reply
            }
            Word::Upgrade { program } => {
                info!(program = %program.display(), "the next worker");
                (self.upgrade, self.hasty_ends) = (Some(program), 0);
                Reply::Done
            }
            Word::Hello { .. } => return Err(io::Error::other("it said hello twice")),
        };
        kept::send(worker.as_fd(), &reply, &[])
    }
}
