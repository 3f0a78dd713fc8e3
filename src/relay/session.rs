//! A front-end and what it has said: its requests are checked, recorded, passed on and answered.
//!
//! ```text
//!            accept                     (Link, see link.rs)
//! (vacant) ---------> Session { link: Down <--> Up { rings: Flowing <--> Parked } }
//!     ^                  |
//!     +------------------+ front-end gone, refused, or the volume detached
//! ```
//!
//! Setters are recorded and answered also while there is no back-end; what only a back-end can
//! answer waits for one. A request is taken from the front-end's socket by the commit that records
//! what came of it.

use super::{
    backend::{self, Abilities, Tracking},
    inflight::Inflight,
    kept::{Commit, FRONT, Thing},
    link::{Link, Lost, has_ended},
    message::{Message, Refused, Request, protocol},
    place::{Place, pid_of},
    said::{Item, Said, Word},
    wire::{self, Received},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
    thread::sleep,
    time::{Duration, Instant, UNIX_EPOCH},
};
use tracing::{info, warn};

/// How long a front-end waits for what only a back-end can answer: QEMU's main loop, and with it
/// the whole VM, stands still meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// How long a front-end may take to send the rest of a message.
const REST: Duration = Duration::from_secs(5);

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the front-end is gone")]
    Gone,
    #[error("front-end")]
    Wire(#[source] wire::Error),
    #[error("the front-end was refused")]
    Refused(#[from] Refused),
    #[error("no back-end in time: {0}")]
    NoBackend(String),
    #[error("back-end")]
    Backend(#[from] backend::Error),
    #[error("the volume is detached")]
    Detached,
}

/// A front-end that is connected.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) front: Front,
    pub(super) said: Said,
    pub(super) inflight: Option<Inflight>,
    /// The configuration space as the front-end was told last.
    pub(super) config: Option<Message>,
    pub(super) link: Link,
    /// What this step changes, committed at its end.
    pub(super) step: Commit,
}

#[derive(Debug)]
pub(super) struct Front {
    pub(super) socket: Arc<OwnedFd>,
    /// Its channel for changes of the configuration space.
    pub(super) channel: Option<Arc<OwnedFd>>,
    pub(super) note: FrontNote,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FrontNote {
    pub(super) pid: i32,
    /// Seconds since 1970.
    pub(super) since: u64,
    /// The protocol features it took.
    pub(super) protocol: Option<u64>,
    /// Whether the inflight buffer is the relay's own, not the front-end's.
    pub(super) own_inflight: bool,
    /// Whether requests are noted, as was settled when it came. Not known of one that an earlier
    /// version let in.
    #[serde(default)]
    pub(super) tracking: Option<Tracking>,
}

pub(super) const CONFIG: &str = "config";
const SAID: &str = "said ";

impl Session {
    /// A session with a front-end that has just connected.
    pub(super) fn new(socket: OwnedFd, place: &Place) -> Self {
        let pid = pid_of(&socket);
        let since = crate::clock::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let tracking = Some(place.tracking);
        let note = FrontNote { pid, since, protocol: None, own_inflight: false, tracking };
        let mut session = Self {
            front: Front { socket: Arc::new(socket), channel: None, note },
            said: Said::default(),
            inflight: None,
            config: None,
            link: Link::begin(),
            step: Commit { forget: everything(), ..Commit::of(&place.name) },
        };
        session.keep_front();
        session
    }

    /// The session that a worker before this one had.
    pub(super) fn restore(things: &BTreeMap<String, Thing>, place: &Place) -> Option<Self> {
        let front = things.get(FRONT)?;
        let note: FrontNote = serde_json::from_slice(&front.bytes).ok()?;
        let mut said = Said::default();
        for (name, thing) in things {
            let Some(item) = name.strip_prefix(SAID) else { continue };
            let item: Item = serde_json::from_str(item).ok()?;
            let message = serde_json::from_slice(&thing.bytes).ok()?;
            said.set(item, Word { message, descriptors: thing.descriptors.clone() });
        }
        let config = things.get(CONFIG);
        let mut session = Self {
            front: Front {
                socket: front.descriptors.first()?.clone(),
                channel: front.descriptors.get(1).cloned(),
                note,
            },
            said,
            inflight: None,
            config: config.and_then(|thing| serde_json::from_slice(&thing.bytes).ok()),
            link: Link::restore(things),
            step: Commit::of(&place.name),
        };
        if let Err(error) = session.map_inflight() {
            warn!(key = place.name, %error, "inflight buffer");
            session.link.close();
            session.link = Link::begin();
        }
        Some(session)
    }

    /// Whether its requests are noted, which stays as it was when the front-end came.
    pub(super) fn tracking(&self) -> Option<Tracking> {
        self.front.note.tracking.or(match (&self.inflight, self.said.started().is_empty()) {
            (Some(_), _) => Some(Tracking::Works),
            (None, false) => Some(Tracking::Unavailable),
            (None, true) => None,
        })
    }

    /// Ends what is kept of a session that cannot be restored: its front-end connects again, and
    /// the daemon serves another.
    pub(super) fn forget_remains(things: &BTreeMap<String, Thing>, place: &Place) {
        for thing in [FRONT, Link::NAME].iter().filter_map(|name| things.get(*name)) {
            warn!(key = place.name, "what is left of a session is of no use");
            thing.descriptors.iter().for_each(|socket| super::link::hang_up(socket));
        }
        forget_all(place);
    }

    /// Serves the next request, if it is there whole.
    pub(super) fn serve(&mut self, place: &mut Place) -> Result<(), End> {
        let Some((mut message, descriptors)) = self.next()? else { return Ok(()) };
        let request = message.parse(descriptors.len())?;
        let taken = message.bytes().len();
        if matches!(request, Request::SetInflightFd(_)) {
            message.pad_shape();
        }
        let answer = self.handle(place, &request, Word::new((message.clone(), descriptors)))?;
        if let Some((body, descriptors)) = answer {
            self.step.answer = Some(Thing { bytes: message.reply(body).bytes(), descriptors });
        } else if message.needs_reply() && self.acknowledges() {
            let bytes = message.reply(vec![0; 8]).bytes();
            self.step.answer = Some(Thing { bytes, descriptors: Vec::new() });
        }
        self.step.take = taken;
        self.commit(place)
    }

    /// Commits what this step changed.
    pub(super) fn commit(&mut self, place: &Place) -> Result<(), End> {
        self.link.settle(&mut self.step);
        let step = std::mem::replace(&mut self.step, Commit::of(&place.name));
        place.commit(&step).map_err(End::Wire)
    }

    fn next(&self) -> Result<Option<Received>, End> {
        let begin = Instant::now();
        let mut seen = false;
        loop {
            match wire::peek(self.front.socket.as_fd()) {
                Ok(Some(received)) => return Ok(Some(received)),
                Ok(None) if seen && begin.elapsed() > REST => {
                    return Err(End::Wire(wire::Error::Deadline));
                }
                // A part of it is there, and the rest may be on its way.
                Ok(None) => seen = true,
                Err(wire::Error::Gone) => return Err(End::Gone),
                Err(error) => return Err(End::Wire(error)),
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// What the export can do; waits for a back-end if none was ever seen.
    pub(super) fn abilities(&mut self, place: &mut Place) -> Result<Abilities, End> {
        loop {
            if let Some(abilities) = place.abilities {
                return Ok(abilities);
            }
            self.reach(place, Instant::now())?;
        }
    }

    /// Asks the back-end, and the next one if it is lost over it.
    pub(super) fn ask(&mut self, place: &mut Place, message: &Message) -> Result<Received, End> {
        let begin = Instant::now();
        loop {
            self.reach(place, begin)?;
            self.begin_exchange(place);
            match self.link.backend().map(|backend| backend.ask(message)) {
                Some(Ok(received)) => return Ok(received),
                Some(Err(error)) => self.lose(place, Lost::from(error)),
                None => {}
            }
        }
    }

    /// Tells the back-end something, if there is one.
    pub(super) fn pass_on(
        &mut self,
        place: &Place,
        tell: impl FnOnce(&mut backend::Backend) -> Result<(), backend::Error>,
    ) {
        self.begin_exchange(place);
        if let Some(backend) = self.link.backend_mut()
            && let Err(error) = tell(backend)
        {
            self.lose(place, Lost::from(error));
        }
    }

    /// Waits for a back-end, for something that began some time ago.
    pub(super) fn reach(&mut self, place: &mut Place, begin: Instant) -> Result<(), End> {
        while !self.link.is_up() {
            // The VM must not wait for who holds its requests back, and who is told so in the end.
            self.resume(place);
            self.try_connect(place);
            if self.link.is_up() && begin.elapsed() <= PATIENCE {
                break; // one that connects and then fails, again and again, is no back-end
            }
            place.tell_trouble(&self.link);
            if begin.elapsed() > PATIENCE {
                return Err(End::NoBackend(self.link.reason()));
            }
            if has_ended(&self.front.socket) {
                return Err(End::Gone); // before the next one is refused
            }
            place.pass_time(Duration::from_millis(2))?;
        }
        Ok(())
    }

    fn acknowledges(&self) -> bool {
        self.front.note.protocol.unwrap_or_default() & protocol::REPLY_ACK != 0
    }

    pub(super) fn record(&mut self, item: Item, word: Word) {
        let bytes = serde_json::to_vec(&word.message).expect("a message is plain data");
        let thing = Thing { bytes, descriptors: word.descriptors.clone() };
        self.step.set.push((name_of(item), thing));
        self.said.set(item, word);
    }

    pub(super) fn forget(&mut self, item: Item) {
        if self.said.forget(item) {
            let name = name_of(item);
            self.step.set.retain(|(other, _)| *other != name);
            self.step.forget.push(name);
        }
    }

    pub(super) fn keep_front(&mut self) {
        let bytes = serde_json::to_vec(&self.front.note).expect("a note is plain data");
        let descriptors = [Some(self.front.socket.clone()), self.front.channel.clone()];
        let descriptors = descriptors.into_iter().flatten().collect();
        self.step.set.retain(|(name, _)| name != FRONT);
        self.step.set.push((FRONT.to_owned(), Thing { bytes, descriptors }));
    }

    /// Lets the front-end go, and forgets all it said.
    pub(super) fn end(self, place: &Place, end: &End) {
        let chain = crate::chain::Chain(end);
        match end {
            _ if !place.quiet.allows(&place.name) => {}
            End::Gone | End::Detached => info!(key = place.name, end = %chain, "disconnected"),
            _ => warn!(key = place.name, end = %chain, "front-end dropped"),
        }
        super::link::hang_up(&self.front.socket);
        self.link.close();
        forget_all(place);
    }
}

/// Forgets all that is kept of a session.
fn forget_all(place: &Place) {
    let commit = Commit { forget: everything(), ..Commit::of(&place.name) };
    if let Err(error) = place.commit(&commit) {
        warn!(key = place.name, %error, "forgetting a session");
    }
}

/// The beginnings of the names of all that is kept of a session.
fn everything() -> Vec<String> {
    [FRONT, SAID, CONFIG, Link::NAME].map(str::to_owned).to_vec()
}

/// The body of an answer, and its descriptors.
pub(super) type Answer = (Vec<u8>, Vec<Arc<OwnedFd>>);

fn name_of(item: Item) -> String {
    format!("{SAID}{}", serde_json::to_string(&item).expect("an item is plain data"))
}
