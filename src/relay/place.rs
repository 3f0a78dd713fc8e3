//! What a session needs of its volume: its names, its keep, its socket, and what happened to it.

use super::{
    backend::{Abilities, Tracking},
    keep::Keep,
    kept::Commit,
    link::Link,
    protocol::Relayed,
    quiet::Quiet,
    session::End,
    wire,
};
use crate::durations::Durations;
use rustix::{io::Errno, net::SocketFlags};
use serde::{Deserialize, Serialize};
use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::sleep,
    time::Duration,
};
use tracing::warn;

/// Connections that the kernel holds for us: a start of a VM is one.
pub(super) const QUEUE: usize = 16;

/// What a session needs of its volume.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) name: String,
    pub(super) keep: Keep,
    pub(super) listener: Arc<OwnedFd>,
    pub(super) backend: PathBuf,
    pub(super) tracking: Tracking,
    /// What the export can do, once that was seen: it is told also while there is no back-end.
    pub(super) abilities: Option<Abilities>,
    pub(super) counters: Counters,
    pub(super) quiet: Quiet,
    /// What others are told of the volume.
    pub(super) status: Arc<Mutex<Relayed>>,
    /// Set when the volume is to be detached, whatever is waited for.
    pub(super) detached: Arc<AtomicBool>,
    /// Set when nobody waits for the end of its thread any more: it changes nothing from then on,
    /// as the volume may be served by another one.
    pub(super) abandoned: Arc<AtomicBool>,
}

/// What happened to a volume so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counters {
    /// Daemons lost and replaced while a VM was connected.
    pub(super) losses: u64,
    /// Moves to another daemon while a VM was connected.
    pub(super) handovers: u64,
    /// Connections refused because there was one, or the volume was in use as a file.
    pub(super) refused: u64,
    /// How long requests were held up last time, in microseconds.
    pub(super) last_stall: u64,
    /// And at worst.
    pub(super) longest_stall: u64,
    /// All of them.
    #[serde(default)]
    pub(super) stalls: Durations,
}

impl Counters {
    /// Notes how long requests were held up.
    pub(super) fn note_stall(&mut self, stall: Duration) {
        self.last_stall = u64::try_from(stall.as_micros()).unwrap_or(u64::MAX);
        self.longest_stall = self.longest_stall.max(self.last_stall);
        self.stalls.note(stall);
    }
}

/// The process behind a socket; 0 where it is in a namespace we cannot see.
pub(super) fn pid_of(socket: &OwnedFd) -> i32 {
    let credentials = rustix::net::sockopt::socket_peercred(socket);
    credentials.map_or(0, |one| one.pid.as_raw_nonzero().get())
}

impl Place {
    /// Carries out a commit; an error if the front-end could not be answered.
    pub(super) fn commit(&self, commit: &Commit) -> Result<(), wire::Error> {
        if self.abandoned.load(Ordering::SeqCst) {
            return Err(wire::Error::Gone);
        }
        self.keep.commit(commit)
    }

    /// Has others know why there is no back-end, also while a front-end waits for one.
    pub(super) fn tell_trouble(&self, link: &Link) {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(front) = &mut status.front_end {
            (front.trouble, front.deaf) = (link.reason(), link.is_deaf());
        }
    }

    /// Waits a little, refuses who else wants to connect, and ends when the volume is detached.
    pub(super) fn pass_time(&mut self, time: Duration) -> Result<(), End> {
        if self.detached.load(Ordering::SeqCst) {
            return Err(End::Detached);
        }
        self.refuse_others();
        sleep(time);
        Ok(())
    }

    /// One front-end at a time: two would be two writers who know nothing of each other.
    pub(super) fn refuse_others(&mut self) {
        // As many as can wait at once: a crowd that never ends must not keep us from the first.
        for other in std::iter::from_fn(|| self.accept()).take(QUEUE).collect::<Vec<_>>() {
            self.refuse(&other, "there is one");
        }
    }

    /// Notes that somebody is let go who wanted to connect.
    pub(super) fn refuse(&mut self, other: &OwnedFd, why: &str) {
        self.counters.refused += 1;
        let pid = pid_of(other);
        if self.quiet.allows(&self.name) {
            warn!(key = self.name, pid, why, "a front-end refused");
        }
    }

    pub(super) fn accept(&self) -> Option<OwnedFd> {
        match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => Some(socket),
            Err(Errno::AGAIN) => None,
            Err(_) => {
                sleep(Duration::from_millis(10)); // out of descriptors, say: it is still there then
                None
            }
        }
    }
}
