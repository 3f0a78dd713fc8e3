//! The side of a session that faces the daemon: connected, lost, parked, moved to another.
//!
//! ```text
//!             connect, replay                 park: silent kicks, drained
//!  Down ---------------------------> Up Flowing <-------------------> Up Parked
//!   ^ ^                               |    resume: the front-end's kicks  |
//!   | +------------- lost ------------+                                   |
//!   +-- resume -- Down Parked <------ lost, moved to another -------------+
//! ```
//!
//! A lost back-end's requests are in the inflight buffer, and the next one does them again. A
//! back-end that closed its socket writes no more: the kernel closes it after the last I/O of a
//! process that dies (facts/relay.md section 4).

use super::{
    backend::{Abilities, Backend, Error, NOTHING},
    inflight::Held,
    kept::{Commit, Thing},
    message::{CONFIG_CHANGE, Code, Message},
    place::Place,
    session::Session,
    wire,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};
use tracing::{debug, info, warn};

/// How soon a lost back-end is looked for, at first and in the end: a daemon is back within 20 ms.
pub(super) const FIRST_RETRY: Duration = Duration::from_millis(1);
const LAST_RETRY: Duration = Duration::from_millis(100);

/// A daemon is back within this time; nothing is said of one that is.
const USUAL: Duration = Duration::from_millis(500);

/// A back-end that served this long is followed by another at once, one that did not more and more
/// patiently.
const STEADY: Duration = Duration::from_millis(50);

/// The connection to the daemon.
#[derive(Debug)]
pub(super) enum Link {
    Down(Down),
    Up(Up),
}

#[derive(Debug)]
pub(super) struct Down {
    /// Since when requests are held up, if they are.
    since: Option<Instant>,
    begun: Instant,
    next: Instant,
    pause: Duration,
    reason: String,
    /// The reason that was logged last.
    told: String,
    /// Whether no back-end may come yet: it would start with the requests that are held back.
    pub(super) parked: bool,
    /// A daemon that did not answer; whoever owns it should replace it.
    deaf: bool,
}

#[derive(Debug)]
pub(super) struct Up {
    pub(super) backend: Backend,
    pub(super) rings: Rings,
    /// As the keeper has it: whether a worker that dies now leaves an exchange half done.
    pub(super) busy: Option<bool>,
    begun: Instant,
    /// How long to wait before the next attempt, if this one does not last.
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rings {
    Flowing,
    Parked,
}

/// Why a back-end is not talked to any more.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) why: String,
    pub(super) deaf: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct LinkNote {
    abilities: Abilities,
    protocol: u64,
    busy: bool,
}

impl From<Error> for Lost {
    fn from(error: Error) -> Self {
        let deaf = matches!(error, Error::Wire { source: wire::Error::Deadline, .. });
        Self { why: crate::chain::Chain(&error).to_string(), deaf }
    }
}

impl Lost {
    pub(super) fn because(why: &str) -> Self {
        Self { why: why.to_owned(), deaf: false }
    }
}

impl Link {
    /// The name of what is kept of it.
    pub(super) const NAME: &str = "link";

    /// A link that is to be made at once.
    pub(super) fn begin() -> Self {
        Self::down(None, String::new(), false, false)
    }

    /// One that is to be made as soon as requests may flow, which are held up since then.
    pub(super) fn parked(since: Instant) -> Self {
        Self::down(Some(since), "requests are held back".to_owned(), true, false)
    }

    fn down(since: Option<Instant>, reason: String, parked: bool, deaf: bool) -> Self {
        let (begun, told) = (Instant::now(), String::new());
        let next = begun;
        Self::Down(Down { since, begun, next, pause: FIRST_RETRY, reason, told, parked, deaf })
    }

    /// The link of the worker before this one, unless that died over an exchange: then the daemon
    /// is connected to anew.
    pub(super) fn restore(things: &BTreeMap<String, Thing>) -> Self {
        let restored = || {
            let thing = things.get(Self::NAME)?;
            let note: LinkNote = serde_json::from_slice(&thing.bytes).ok()?;
            let backend = Backend {
                socket: thing.descriptors.first()?.clone(),
                channel: thing.descriptors.get(1).cloned(),
                abilities: note.abilities,
                protocol: note.protocol,
            };
            let up = Up::new(backend, FIRST_RETRY);
            (!note.busy).then_some(Self::Up(Up { busy: Some(false), ..up }))
        };
        restored().unwrap_or_else(|| {
            if let Some(socket) = things.get(Self::NAME).and_then(|one| one.descriptors.first()) {
                hang_up(socket);
            }
            Self::begin()
        })
    }

    /// Closes the connection, whoever else holds its descriptors: a daemon serves one at a time.
    pub(super) fn close(&self) {
        if let Self::Up(up) = self {
            hang_up(&up.backend.socket);
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self, Self::Up(_))
    }

    pub(super) fn is_parked(&self) -> bool {
        match self {
            Self::Up(up) => up.rings == Rings::Parked,
            Self::Down(down) => down.parked,
        }
    }

    /// Whether a daemon did not answer, and none has since.
    pub(super) fn is_deaf(&self) -> bool {
        matches!(self, Self::Down(Down { deaf: true, .. }))
    }

    /// Whether the protocol features are settled.
    pub(super) fn is_negotiated(&self) -> bool {
        self.backend().is_some_and(|backend| backend.protocol != 0)
    }

    pub(super) fn backend(&self) -> Option<&Backend> {
        match self {
            Self::Up(up) => Some(&up.backend),
            Self::Down(_) => None,
        }
    }

    pub(super) fn backend_mut(&mut self) -> Option<&mut Backend> {
        match self {
            Self::Up(up) => Some(&mut up.backend),
            Self::Down(_) => None,
        }
    }

    /// Why there is no back-end.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Up(_) => String::new(),
            Self::Down(down) => down.reason.clone(),
        }
    }

    /// When to look for a back-end again.
    pub(super) fn next_attempt(&self) -> Option<Instant> {
        match self {
            Self::Up(_) => None,
            Self::Down(down) => (!down.parked).then_some(down.next),
        }
    }

    /// Has the keeper know the link as it is at the end of a step.
    pub(super) fn settle(&mut self, step: &mut Commit) {
        step.set.retain(|(name, _)| name != Self::NAME);
        match self {
            Self::Up(up) if up.rings == Rings::Flowing => {
                if up.busy != Some(false) {
                    up.busy = Some(false);
                    step.set.push((Self::NAME.to_owned(), up.thing()));
                }
            }
            // A worker that takes over rings that are parked, or no link, begins with a new one.
            Self::Up(_) | Self::Down(_) => step.forget.push(Self::NAME.to_owned()),
        }
    }
}

impl Up {
    pub(super) fn new(backend: Backend, pause: Duration) -> Self {
        Self { backend, rings: Rings::Flowing, busy: None, begun: Instant::now(), pause }
    }

    fn thing(&self) -> Thing {
        let note = LinkNote {
            abilities: self.backend.abilities,
            protocol: self.backend.protocol,
            busy: self.busy.unwrap_or_default(),
        };
        let bytes = serde_json::to_vec(&note).expect("a note is plain data");
        let descriptors = [Some(self.backend.socket.clone()), self.backend.channel.clone()];
        Thing { bytes, descriptors: descriptors.into_iter().flatten().collect() }
    }
}

impl Session {
    /// Notes that an exchange begins: a worker that dies before the step is committed leaves a
    /// connection on which an answer may be due, and the next one makes a new one.
    pub(super) fn begin_exchange(&mut self, place: &Place) {
        let Link::Up(up) = &mut self.link else { return };
        if up.busy == Some(false) {
            up.busy = Some(true);
            let set = vec![(Link::NAME.to_owned(), up.thing())];
            let commit = Commit { set, ..Commit::of(&place.name) };
            if let Err(error) = place.commit(&commit) {
                warn!(key = place.name, %error, "noting an exchange");
            }
        }
    }

    /// Looks for a back-end if it is time to, and brings it to where the last one was.
    pub(super) fn try_connect(&mut self, place: &mut Place) {
        let Link::Down(down) = &self.link else { return };
        if down.parked || Instant::now() < down.next {
            return;
        }
        let (since, pause) = (down.since, down.pause);
        let connected = self.connect(place, &place.backend.clone()).and_then(|backend| {
            backend.start_rings(&self.said, self.inflight.as_ref())?;
            Ok(backend)
        });
        match connected {
            Ok(backend) => {
                if let Some(since) = since {
                    place.counters.note_stall(since.elapsed());
                    place.counters.losses += 1;
                    let stall = since.elapsed();
                    let is_news = pause == FIRST_RETRY || stall > USUAL;
                    if is_news && place.quiet.allows(&place.name) {
                        info!(key = place.name, ?stall, "another back-end took over");
                    }
                }
                self.take_up(place, Up::new(backend, pause));
            }
            Err(error) => self.note_failure(place, &error),
        }
    }

    fn note_failure(&mut self, place: &Place, error: &Error) {
        let Link::Down(down) = &mut self.link else { return };
        down.reason = crate::chain::Chain(error).to_string();
        if down.begun.elapsed() > USUAL && down.told != down.reason {
            warn!(key = place.name, reason = down.reason, "no back-end");
            down.told.clone_from(&down.reason);
        }
        down.deaf |= matches!(error, Error::Wire { source: wire::Error::Deadline, .. });
        self.wait_longer();
    }

    fn wait_longer(&mut self) {
        let Link::Down(down) = &mut self.link else { return };
        down.next = Instant::now() + down.pause;
        down.pause = (down.pause * 5 / 4 + Duration::from_micros(250)).min(LAST_RETRY);
    }

    /// Connects, and tells everything but the rings.
    pub(super) fn connect(&self, place: &Place, path: &Path) -> Result<Backend, Error> {
        let mut backend = Backend::connect(path)?;
        let front = self.front.note.protocol;
        backend.check(&self.said, front, place.tracking)?;
        if front.is_some() || self.said.features().is_some() {
            backend.negotiate(front, place.tracking)?;
        }
        backend.replay_device(&self.said)?;
        Ok(backend)
    }

    fn take_up(&mut self, place: &mut Place, up: Up) {
        place.abilities = Some(up.backend.abilities);
        self.link = Link::Up(up);
        self.compare_config(place);
    }

    /// Tells the front-end if the configuration space is not what it was: a volume may have grown
    /// while there was no back-end.
    pub(super) fn compare_config(&mut self, place: &Place) {
        let Some(known) = self.config.clone() else { return };
        let mut differs = false;
        self.pass_on(place, |backend| {
            differs = backend.ask(&known)?.0.body != known.body;
            Ok(())
        });
        if differs {
            self.tell_config_change(place);
        }
    }

    /// Passes on that the configuration space has changed, if the back-end said so.
    pub(super) fn hear(&mut self, place: &Place) {
        let Some(backend) = self.link.backend() else { return };
        let heard = backend.heard().and_then(|heard| {
            let Some(message) = heard else { return Ok(()) };
            if message.request == CONFIG_CHANGE {
                self.tell_config_change(place); // first: a worker that ends here tells it twice
            }
            backend.heeded(&message)
        });
        if let Err(error) = heard {
            debug!(key = place.name, error = %crate::chain::Chain(&error), "channel");
            if let Some(backend) = self.link.backend_mut() {
                backend.channel = None;
            }
        }
    }

    fn tell_config_change(&self, place: &Place) {
        let Some(channel) = &self.front.channel else { return };
        let message = Message::config_change().bytes();
        match wire::send_now(channel.as_fd(), &message, NOTHING) {
            Ok(()) => info!(key = place.name, "told the VM of a changed configuration"),
            Err(error) => warn!(key = place.name, %error, "telling of a changed configuration"),
        }
    }

    /// The back-end is gone, or given up.
    pub(super) fn lose(&mut self, place: &Place, lost: Lost) {
        let Lost { why, deaf } = lost;
        let Link::Up(up) = &self.link else { return };
        let (steady, pause) = (up.begun.elapsed() > STEADY, up.pause);
        if (steady || pause == FIRST_RETRY) && place.quiet.allows(&place.name) {
            warn!(key = place.name, why, deaf, "back-end lost");
        }
        let parked = self.link.is_parked();
        self.link.close();
        self.link = Link::down(Some(Instant::now()), why, parked, deaf);
        if let Link::Down(down) = &mut self.link
            && !steady
        {
            down.pause = pause;
            self.wait_longer();
        }
    }

    /// Asks the back-end whether it lives; one that does not answer is lost, and told of as deaf.
    pub(super) fn probe(&mut self, place: &Place) {
        let question = Message::new(Code::GetFeatures, Vec::new());
        self.pass_on(place, |backend| backend.ask(&question).map(drop));
    }

    /// The requests that the back-end holds.
    pub(super) fn held(&self) -> Vec<Held> {
        let rings = self.said.started_sizes();
        self.inflight.as_ref().map_or_else(Vec::new, |inflight| inflight.held(&rings))
    }
}

/// Ends a connection for both sides and all who share it.
pub(super) fn hang_up(socket: &OwnedFd) {
    _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both); // else it has ended already
}

/// Whether the other side has closed the connection.
pub(super) fn has_ended(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(ended)
}
