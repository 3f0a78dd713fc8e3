//! One volume: its socket, its session, the orders for it. A thread of its own, so that a daemon
//! that does not answer holds up nobody else.

use super::{
    keep::Keep,
    kept::{Commit, Thing},
    lease,
    link::{Lost, has_ended},
    place::{Counters, Place, QUEUE},
    protocol::{Attach, FrontEnd, Relayed},
    quiet::Quiet,
    session::{End, Session},
    watch::Watch,
};
use crate::{run::RunDir, store};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{PermissionsExt as _, chown},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{JoinHandle, sleep},
    time::{Duration, Instant},
};
use tracing::{info, warn};

/// A request that has been in flight for so long is slow; then the daemon is asked whether it lives.
/// A slow disk's daemon answers, one that is stopped or stuck does not.
const SLOW: Duration = Duration::from_secs(3);

/// How often requests in flight are looked at, for how old they are.
const LOOK: Duration = Duration::from_secs(1);

/// How long its thread may take to let a front-end go: one exchange with a daemon that does not
/// answer. One that takes longer hangs in something that a front-end gave it.
const FAREWELL: Duration = Duration::from_secs(15);

/// Stack of a volume's thread: its deepest call has some buffers of 4 KiB.
const STACK: usize = 256 << 10;

/// An order for a volume, and where its outcome goes.
#[derive(Debug)]
pub(super) enum Order {
    Pause(Duration, mpsc::Sender<Result<(), String>>),
    Resume(mpsc::Sender<bool>),
    Switch(PathBuf, mpsc::Sender<Result<Duration, String>>),
    Attach(Box<Attach>),
}

/// A volume that is served; dropping it lets its front-end go.
#[derive(Debug)]
pub(super) struct Volume {
    orders: mpsc::Sender<Order>,
    wake: Arc<OwnedFd>,
    detached: Arc<AtomicBool>,
    abandoned: Arc<AtomicBool>,
    status: Arc<Mutex<Relayed>>,
    thread: Option<JoinHandle<()>>,
}

/// What is kept of a volume beside its session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    abilities: Option<super::backend::Abilities>,
    counters: Counters,
}

const LISTENER: &str = "listener";
const NOTE: &str = "volume";

struct Served {
    attach: Attach,
    run: RunDir,
    place: Place,
    session: Option<Session>,
    orders: mpsc::Receiver<Order>,
    wake: Arc<OwnedFd>,
    noted: Note,
    /// Requests are held back until then at most.
    fence: Option<Instant>,
    watch: Watch,
    looked: Instant,
    /// Whether one of them has been in flight for long.
    is_slow: bool,
}

impl Volume {
    /// Serves a volume; `things` is what is kept of it.
    pub(super) fn serve(
        run: &RunDir,
        keep: &Keep,
        attach: Attach,
        things: &BTreeMap<String, Thing>,
    ) -> io::Result<Self> {
        let name = attach.key.as_str().to_owned();
        let path = run.volume(&attach.key).vhost_socket();
        let kept = things.get(LISTENER).and_then(|one| one.descriptors.first());
        let listener = match kept {
            Some(listener) if path.exists() => listener.clone(),
            Some(_) | None => listen_at(&path, keep, &name)?,
        };
        chown(&path, None, attach.group)?;
        let noted =
            things.get(NOTE).and_then(|one| serde_json::from_slice::<Note>(&one.bytes).ok());
        let noted = noted.unwrap_or_default();
        let detached = Arc::new(AtomicBool::new(false));
        let abandoned = Arc::new(AtomicBool::new(false));
        let mut place = Place {
            name,
            keep: keep.clone(),
            listener,
            backend: attach.backend.clone(),
            tracking: attach.tracking,
            abilities: noted.abilities,
            counters: noted.counters,
            quiet: Quiet::new(),
            status: Arc::new(Mutex::new(unseen(&attach, noted.counters))),
            detached: detached.clone(),
            abandoned: abandoned.clone(),
        };
        let session = Session::restore(things, &place);
        if session.is_none() {
            Session::forget_remains(things, &place);
        }
        if let Some(tracking) = session.as_ref().and_then(Session::tracking) {
            place.tracking = tracking;
        }
        if let Some(backend) = session.as_ref().and_then(|one| one.link.backend()) {
            place.abilities = Some(backend.abilities);
        }
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (orders, received) = mpsc::channel();
        let status = place.status.clone();
        let served = Served {
            attach,
            run: run.clone(),
            place,
            session,
            orders: received,
            wake: wake.clone(),
            noted,
            fence: None,
            watch: Watch::default(),
            looked: Instant::now(),
            is_slow: false,
        };
        let thread = std::thread::Builder::new().stack_size(STACK);
        let thread = thread.spawn(move || served.run())?;
        Ok(Self { orders, wake, detached, abandoned, status, thread: Some(thread) })
    }

    pub(super) fn order(&self, order: Order) {
        _ = self.orders.send(order); // its thread lives as long as we do
        wake(&self.wake);
    }

    pub(super) fn status(&self) -> Relayed {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.detached.store(true, Ordering::SeqCst);
        wake(&self.wake);
        let begin = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if begin.elapsed() > FAREWELL {
                warn!("a volume's thread does not end; going on without it");
                self.abandoned.store(true, Ordering::SeqCst);
                return;
            }
            sleep(Duration::from_micros(200));
        }
        _ = self.thread.take().map(JoinHandle::join);
    }
}

fn wake(event: &OwnedFd) {
    _ = rustix::io::write(event, &1_u64.to_ne_bytes()); // full is awake
}

fn listen_at(path: &Path, keep: &Keep, name: &str) -> io::Result<Arc<OwnedFd>> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
    listen(&socket, i32::try_from(QUEUE).map_err(io::Error::other)?)?;
    let listener = Arc::new(socket);
    let thing = Thing { bytes: Vec::new(), descriptors: vec![listener.clone()] };
    let commit = Commit { set: vec![(LISTENER.to_owned(), thing)], ..Commit::of(name) };
    keep.commit(&commit).map_err(io::Error::other)?;
    Ok(listener)
}

impl Served {
    fn run(mut self) {
        self.tell();
        while !self.place.detached.load(Ordering::SeqCst) {
            if let Err(end) = self.round() {
                self.end_session(&end);
            }
            self.obey();
            self.tell();
        }
        self.end_session(&End::Detached);
    }

    /// Waits until something is to be done for the front-end or the back-end, and does it.
    fn round(&mut self) -> Result<(), End> {
        let ready = self.wait();
        if ready.has(Source::Listener) && self.accept()? {
            return Ok(()); // what else was ready was of another session
        }
        let (Some(session), place) = (&mut self.session, &mut self.place) else { return Ok(()) };
        if ready.has(Source::BackEnd)
            && session.link.backend().is_some_and(|one| has_ended(&one.socket))
        {
            session.lose(place, Lost::because("it closed the connection"));
        }
        if ready.has(Source::Channel) && session.link.is_up() {
            session.hear(place);
        }
        let was_up = session.link.is_up();
        session.try_connect(place);
        if session.link.is_up() != was_up
            || ready.has(Source::BackEnd)
            || ready.has(Source::Channel)
        {
            session.commit(place)?;
        }
        if std::mem::take(&mut self.is_slow) && session.link.is_up() {
            session.probe(place);
            session.commit(place)?;
        }
        if ready.has(Source::FrontEnd) {
            session.serve(place)?;
        }
        Ok(())
    }

    /// Lets the next front-end in, if there is room; whether one came.
    fn accept(&mut self) -> Result<bool, End> {
        if self.session.as_ref().is_some_and(|session| has_ended(&session.front.socket)) {
            self.end_session(&End::Gone); // whoever comes now may have waited for just that
        }
        if self.session.is_some() {
            self.place.refuse_others();
            return Ok(false);
        }
        let Some(socket) = self.place.accept() else { return Ok(true) };
        // Two writers, too, and neither would see what the other does.
        if lease::is_open_now(self.run.volume(&self.attach.key).image()) {
            self.place.refuse(&socket, "disk.img is open");
            return Ok(false);
        }
        let mut session = Session::new(socket, &self.place);
        if self.place.quiet.allows(&self.place.name) {
            info!(key = self.place.name, pid = session.front.note.pid, "connected");
        }
        let committed = session.commit(&self.place);
        self.session = Some(session);
        committed.map(|()| true)
    }

    fn end_session(&mut self, end: &End) {
        self.fence = None;
        self.watch.clear();
        if let Some(session) = self.session.take() {
            session.end(&self.place, end);
        }
        self.place.tracking = self.attach.tracking; // what was settled with it, it kept
    }

    fn wait(&self) -> Ready {
        let session = self.session.as_ref();
        let back = session.and_then(|one| one.link.backend());
        let all = [
            (Source::Wake, Some(&self.wake), PollFlags::IN),
            (Source::Listener, Some(&self.place.listener), PollFlags::IN),
            (
                Source::FrontEnd,
                session.map(|one| &one.front.socket),
                PollFlags::IN | PollFlags::RDHUP,
            ),
            (Source::BackEnd, back.map(|one| &one.socket), PollFlags::RDHUP),
            (Source::Channel, back.and_then(|one| one.channel.as_ref()), PollFlags::IN),
        ];
        let present: Vec<_> =
            all.into_iter().filter_map(|(source, fd, flags)| Some((source, fd?, flags))).collect();
        let mut fds: Vec<_> =
            present.iter().map(|(_, fd, flags)| PollFd::new(*fd, *flags)).collect();
        let limit = self.patience().map(|time| Timespec::try_from(time).expect("seconds"));
        if poll(&mut fds, limit.as_ref()).is_err() {
            return Ready::default(); // interrupted: all is looked at again
        }
        let ready = fds.iter().zip(&present).filter(|(fd, _)| !fd.revents().is_empty());
        let ready = Ready(ready.map(|(_, (source, ..))| *source).collect());
        if ready.has(Source::Wake) {
            _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        ready
    }

    /// How long there is nothing to do if nobody says anything.
    fn patience(&self) -> Option<Duration> {
        let session = self.session.as_ref()?;
        let now = Instant::now();
        let mut until = self.looked + LOOK;
        for other in [session.link.next_attempt(), self.fence].into_iter().flatten() {
            until = until.min(other);
        }
        Some(until.saturating_duration_since(now))
    }

    fn obey(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Pause(most, reply) => {
                    let outcome = self.pause(most);
                    self.answer(&reply, outcome);
                }
                Order::Resume(reply) => {
                    let outcome = self.resume();
                    self.answer(&reply, outcome);
                }
                Order::Switch(path, reply) => {
                    let outcome = self.switch(&path);
                    self.answer(&reply, outcome);
                }
                Order::Attach(attach) => {
                    self.attach = *attach;
                    if self.session.is_none() {
                        self.place.tracking = self.attach.tracking;
                    }
                }
            }
        }
        if self.fence.is_some_and(|until| Instant::now() >= until) {
            warn!(key = self.place.name, "held back too long; letting requests flow");
            self.resume();
        }
    }

    /// Who has the outcome of an order also finds it in the list.
    fn answer<T>(&mut self, reply: &mpsc::Sender<T>, outcome: T) {
        self.tell();
        _ = reply.send(outcome); // whoever asked may not wait any more
    }

    fn pause(&mut self, most: Duration) -> Result<(), String> {
        let until = Instant::now() + most;
        if let Some(session) = &mut self.session {
            session.pause(&mut self.place)?;
            session.commit(&self.place).map_err(|end| end.to_string())?;
        }
        self.fence = Some(until);
        Ok(())
    }

    fn resume(&mut self) -> bool {
        let fenced = self.fence.take().is_some();
        let Some(session) = &mut self.session else { return fenced };
        let held = session.resume(&mut self.place);
        if let Err(end) = session.commit(&self.place) {
            self.end_session(&end);
        }
        held && fenced
    }

    fn switch(&mut self, path: &Path) -> Result<Duration, String> {
        if path == self.place.backend {
            return Ok(Duration::ZERO); // a repeat: it has moved
        }
        let attach = Attach { backend: path.to_owned(), ..self.attach.clone() };
        let place = self.run.volume(&attach.key).relay();
        let note = || {
            let noted = store::replace_volatile(&place, &attach);
            noted.map_err(|error| crate::chain::Chain(&error).to_string())
        };
        let Some(session) = &mut self.session else {
            note()?;
            path.clone_into(&mut self.place.backend);
            self.attach = attach;
            return Ok(Duration::ZERO);
        };
        let switched = session.switch(&mut self.place, path, note);
        self.attach.backend.clone_from(&self.place.backend);
        if let Err(end) = session.commit(&self.place) {
            self.end_session(&end);
        }
        switched
    }

    /// Brings the status up to date, and what is kept of the volume.
    fn tell(&mut self) {
        let note = Note { abilities: self.place.abilities, counters: self.place.counters };
        if note != self.noted {
            let bytes = serde_json::to_vec(&note).expect("a note is plain data");
            let set = vec![(NOTE.to_owned(), Thing { bytes, descriptors: Vec::new() })];
            _ = self.place.commit(&Commit { set, ..Commit::of(&self.place.name) });
            self.noted = note;
        }
        let mut status = unseen(&self.attach, self.place.counters);
        status.front_end = self.look();
        *self.place.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// The front-end, and how old the requests are that are in flight.
    fn look(&mut self) -> Option<FrontEnd> {
        let session = self.session.as_ref()?;
        let open = self.watch.look(session);
        self.looked = Instant::now();
        self.is_slow = open.oldest > SLOW && !session.link.is_parked();
        Some(FrontEnd {
            pid: session.front.note.pid,
            since: session.front.note.since,
            in_flight: open.count,
            oldest_ms: u64::try_from(open.oldest.as_millis()).unwrap_or(u64::MAX),
            paused: session.link.is_parked(),
            trouble: session.link.reason(),
            deaf: session.link.is_deaf(),
        })
    }
}

/// What something came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Wake,
    Listener,
    FrontEnd,
    BackEnd,
    Channel,
}

#[derive(Debug, Default)]
struct Ready(Vec<Source>);

impl Ready {
    fn has(&self, source: Source) -> bool {
        self.0.contains(&source)
    }
}

/// What is told of a volume with no front-end.
fn unseen(attach: &Attach, counters: Counters) -> Relayed {
    Relayed {
        key: attach.key.clone(),
        backend: attach.backend.clone(),
        tracking: attach.tracking,
        front_end: None,
        losses: counters.losses,
        handovers: counters.handovers,
        refused: counters.refused,
        last_stall_us: counters.last_stall,
        longest_stall_us: counters.longest_stall,
        stalls: counters.stalls,
    }
}
