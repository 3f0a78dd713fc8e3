//! The worker's side of the keeper: everything a volume does is committed here.
//!
//! The worker keeps a copy of all of it, so that the keeper may die, too: until there is another
//! one, commits are carried out by the worker itself, and the next keeper is given everything.

use super::kept::{self, Commit, Dropped, Kept, Reply, Thing, VERSION, Word};
use super::wire;
use crate::run::RunDir;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt},
    process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::Duration,
};
use tracing::{info, warn};

/// The keeper does nothing that takes time; one that is silent for so long is stopped or dead.
const ANSWER: Duration = Duration::from_secs(2);

/// How often a keeper that is not there is tried.
const RETRY: Duration = Duration::from_millis(10);

/// The worker's keep; clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Keep {
    socket: PathBuf,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    keeper: Option<Keeper>,
    kept: Kept,
}

/// The keeper, as long as it answers.
#[derive(Debug)]
struct Keeper {
    socket: OwnedFd,
    process: OwnedFd,
}

impl Keep {
    /// Reaches the keeper and takes over what it keeps.
    pub(super) fn open(run: &RunDir) -> anyhow::Result<Self> {
        let socket = run.relay().keeper_socket();
        let (keeper, kept) = greet(reach(&socket)?)?;
        let inner = Arc::new(Mutex::new(Inner { keeper: Some(keeper), kept }));
        Ok(Self { socket, inner })
    }

    /// What was kept of each volume.
    pub(super) fn volumes(&self) -> BTreeMap<String, BTreeMap<String, Thing>> {
        self.lock().kept.0.clone()
    }

    /// What was kept of one volume.
    pub(super) fn things(&self, volume: &str) -> BTreeMap<String, Thing> {
        self.lock().kept.0.get(volume).cloned().unwrap_or_default()
    }

    /// Carries out a commit; an error if the front-end could not be answered.
    pub(super) fn commit(&self, commit: &Commit) -> Result<(), wire::Error> {
        let mut dropped = Dropped::new(); // beyond the lock
        let mut inner = self.lock();
        let before = looked(&inner.kept, commit);
        let asked = inner.keeper.as_ref().map(|keeper| ask(&keeper.socket, commit));
        let mut own = commit.clone();
        match asked {
            Some(Ok(outcome)) => {
                // The keeper has done what can be done only once.
                (own.take, own.answer) = (0, None);
                _ = inner.kept.apply(&own, &mut dropped);
                outcome
            }
            Some(Err(error)) => {
                warn!(%error, "the keeper is gone; going on without");
                if let Some(keeper) = inner.keeper.take() {
                    keeper.end();
                }
                let taken = before.saturating_sub(looked(&inner.kept, &own));
                if own.take > 0 && taken >= own.take {
                    (own.take, own.answer) = (0, None); // its last deed
                }
                own.take = own.take.saturating_sub(taken);
                inner.kept.apply(&own, &mut dropped)
            }
            None => inner.kept.apply(&own, &mut dropped),
        }
    }

    /// Has the keeper run another program as the worker, once this one ends.
    pub(super) fn upgrade(&self, program: &Path) -> io::Result<()> {
        let inner = self.lock();
        let keeper = inner.keeper.as_ref().ok_or_else(|| io::Error::other("there is no keeper"))?;
        let socket = keeper.socket.as_fd();
        kept::send(socket, &Word::Upgrade { program: program.to_owned() }, &[])?;
        match kept::receive::<Reply>(socket)? {
            Some((Reply::Done, _)) => Ok(()),
            other => Err(io::Error::other(format!("unexpected {other:?}"))),
        }
    }

    /// Whether there is no keeper, or none any more after this time.
    pub(super) fn ends_within(&self, time: Duration) -> bool {
        let process = self.lock().keeper.as_ref().map(|keeper| keeper.process.try_clone());
        let ended = match process {
            Some(Ok(process)) => await_end(&process, time),
            Some(Err(_)) | None => true,
        };
        if ended {
            self.lock().keeper = None;
        }
        ended
    }

    /// Looks for another keeper, and gives it everything.
    pub(super) fn renew(&self) {
        match self.hand_over() {
            Ok(()) => info!("handed everything to another keeper"),
            Err(error) => {
                warn!(error = format!("{error:#}"), "no keeper");
                sleep(RETRY);
            }
        }
    }

    /// No commit happens meanwhile.
    fn hand_over(&self) -> anyhow::Result<()> {
        let socket = reach(&self.socket)?;
        let mut inner = self.lock();
        let keeper = hello(socket, true)?;
        for (volume, things) in &inner.kept.0 {
            // The front-end comes last: without it, the rest means nothing to the next worker, if
            // this one ends before that has everything.
            let (front, rest): (Vec<_>, Vec<_>) =
                things.iter().partition(|(name, _)| *name == kept::FRONT);
            for (name, thing) in rest.into_iter().chain(front) {
                let set = vec![(name.clone(), thing.clone())];
                ask(&keeper.socket, &Commit { set, ..Commit::of(volume) })??;
            }
        }
        inner.keeper = Some(keeper);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper {
    /// Ends a keeper that does not answer, before anybody does what it was asked to: it must not
    /// come to it later.
    fn end(&self) {
        _ = pidfd_send_signal(&self.process, Signal::KILL); // it may have ended
        await_end(&self.process, ANSWER);
    }
}

/// Whether a process ends within this time.
fn await_end(process: &OwnedFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).expect("seconds");
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&limit)) {
            Err(Errno::INTR) => {}
            outcome => return !matches!(outcome, Ok(0)),
        }
    }
}

/// How far the front-end's socket was looked at; less by what the keeper has taken since.
fn looked(kept: &Kept, commit: &Commit) -> usize {
    let things = kept.0.get(&commit.volume);
    let front = things.and_then(|things| things.get(kept::FRONT));
    let front = front.and_then(|front| front.descriptors.first());
    front.and_then(|front| wire::looked(front.as_fd()).ok()).unwrap_or_default()
}

fn reach(path: &Path) -> anyhow::Result<OwnedFd> {
    let mut attempts = 0;
    loop {
        match connect_to(path) {
            Ok(keeper) => return Ok(keeper),
            Err(error) if attempts >= 500 => return Err(error.into()),
            Err(_) => attempts += 1,
        }
        sleep(RETRY);
    }
}

fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(ANSWER))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn hello(socket: OwnedFd, has_all: bool) -> anyhow::Result<Keeper> {
    kept::send(socket.as_fd(), &Word::Hello { pid: std::process::id(), has_all }, &[])?;
    match kept::receive::<Reply>(socket.as_fd())? {
        Some((Reply::Hello { version: VERSION }, _)) => {
            let credentials = sockopt::socket_peercred(&socket)?;
            let process = pidfd_open(credentials.pid, PidfdFlags::empty())?;
            Ok(Keeper { socket, process })
        }
        other => anyhow::bail!("the keeper said {other:?}"),
    }
}

fn greet(socket: OwnedFd) -> anyhow::Result<(Keeper, Kept)> {
    let keeper = hello(socket, false)?;
    let mut kept = Kept::default();
    loop {
        match kept::receive::<Reply>(keeper.socket.as_fd())? {
            Some((Reply::Kept { volume, name, bytes }, descriptors)) => {
                let descriptors = descriptors.into_iter().map(Arc::new).collect();
                kept.0.entry(volume).or_default().insert(name, Thing { bytes, descriptors });
            }
            Some((Reply::All, _)) => return Ok((keeper, kept)),
            other => anyhow::bail!("the keeper said {other:?}"),
        }
    }
}

/// Has a commit carried out; the outer error is the keeper's end, the inner one the front-end's.
fn ask(keeper: &OwnedFd, commit: &Commit) -> io::Result<Result<(), wire::Error>> {
    let (parts, descriptors) = commit.parts();
    kept::send(keeper.as_fd(), &Word::Commit(parts), &descriptors)?;
    match kept::receive::<Reply>(keeper.as_fd())? {
        Some((Reply::Done, _)) => Ok(Ok(())),
        Some((Reply::Lost(why), _)) => Ok(Err(wire::Error::Io(io::Error::other(why)))),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
        Some((other, _)) => Err(io::Error::other(format!("unexpected {other:?}"))),
    }
}

#[cfg(test)]
mod test {
    use super::super::{
        backend::NOTHING,
        message::{Code, Message},
    };
    use super::*;
    use rustix::net::socketpair;
    use std::{os::unix::net::UnixStream, process::Command};

    /// A keep whose keeper does `deed` with the socket of a front-end, and dies.
    fn keep_with(front: &UnixStream, deed: impl FnOnce(&UnixStream) + Send + 'static) -> Keep {
        let kind = SocketType::SEQPACKET;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (socket, theirs) = pair.unwrap();
        let own = front.try_clone().unwrap();
        std::thread::spawn(move || {
            kept::receive::<Word>(theirs.as_fd()).unwrap().unwrap();
            deed(&own);
        });
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = pidfd_open(rustix::process::Pid::from_child(&child), PidfdFlags::empty());
        std::thread::spawn(move || child.wait());
        let keeper = Some(Keeper { socket, process: process.unwrap() });
        let mut kept = Kept::default();
        let descriptors = vec![Arc::new(OwnedFd::from(front.try_clone().unwrap()))];
        let thing = Thing { bytes: Vec::new(), descriptors };
        kept.0.entry("v".to_owned()).or_default().insert(kept::FRONT.to_owned(), thing);
        Keep { socket: PathBuf::new(), inner: Arc::new(Mutex::new(Inner { keeper, kept })) }
    }

    /// Two requests that are equally long come at once, and the keeper dies over the first.
    fn second_after(deed: impl FnOnce(&UnixStream) + Send + 'static) -> Message {
        let (vm, front) = UnixStream::pair().unwrap();
        let requests = [7, 8].map(|number| Message::number(Code::SetFeatures, number));
        for request in &requests {
            wire::send(vm.as_fd(), request, NOTHING).unwrap();
        }
        let keep = keep_with(&front, deed);
        let (first, _) = wire::peek(front.as_fd()).unwrap().unwrap();
        let commit = Commit { take: first.bytes().len(), ..Commit::of("v") };
        keep.commit(&commit).unwrap();
        wire::peek(front.as_fd()).unwrap().unwrap().0
    }

    #[test]
    fn no_request_is_lost_or_done_twice_whenever_the_keeper_dies() {
        for taken in [0, 1, 12, 20] {
            let deed = move |front: &UnixStream| _ = wire::take(front.as_fd(), taken);
            assert_eq!(second_after(deed).as_number(), Some(8), "{taken} bytes were taken");
        }
    }
}
