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
    inflight::{self, Inflight},
    keep::Keep,
    kept::{Commit, FRONT, Thing},
    link::{Link, Lost, has_ended},
    message::{Code, Message, Refused, Region, Request, protocol},
    protocol::Relayed,
    quiet::Quiet,
    said::{Item, RingItem, Said, Word},
    wire::{self, Received},
};
use rustix::{io::Errno, net::SocketFlags};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tracing::{info, warn};

/// How long a front-end waits for what only a back-end can answer: QEMU's main loop, and with it
/// the whole VM, stands still meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// How long a front-end may take to send the rest of a message.
const REST: Duration = Duration::from_secs(5);

/// Connections that the kernel holds for us: a start of a VM is one.
pub(super) const QUEUE: usize = 16;

/// Entries of a ring in an inflight buffer of our own: the most a ring can have.
pub(super) const OWN_RING_SIZE: u16 = 1024;

/// Regions of memory that a front-end may add: as many as the back-end takes, but no fewer than
/// fit into a table, and no more than libvhost-user ever took.
const LEAST_SLOTS: u64 = 8;
const MOST_SLOTS: u64 = 512;

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
    /// Connections refused because there was one.
    pub(super) refused: u64,
    /// How long requests were held up last time, in microseconds.
    pub(super) last_stall: u64,
    /// And at worst.
    pub(super) longest_stall: u64,
}

/// A front-end that is connected.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) front: Front,
    pub(super) said: Said,
    /// Whether the inflight buffer is the relay's own, not the front-end's.
    own_inflight: bool,
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
    own_inflight: bool,
}

const CONFIG: &str = "config";
const SAID: &str = "said ";

impl Session {
    /// A session with a front-end that has just connected.
    pub(super) fn new(socket: OwnedFd, place: &Place) -> Self {
        let credentials = rustix::net::sockopt::socket_peercred(&socket);
        let pid = credentials.map_or(0, |one| one.pid.as_raw_nonzero().get());
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let note = FrontNote { pid, since, protocol: None, own_inflight: false };
        let mut session = Self {
            front: Front { socket: Arc::new(socket), channel: None, note },
            said: Said::default(),
            own_inflight: false,
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
            own_inflight: note.own_inflight,
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
            warn!(volume = place.name, %error, "inflight buffer");
            session.link.close();
            session.link = Link::begin();
        }
        Some(session)
    }

    /// Ends what is kept of a session that cannot be restored: its front-end connects again, and
    /// the daemon serves another.
    pub(super) fn forget_remains(things: &BTreeMap<String, Thing>, place: &Place) {
        for thing in [FRONT, Link::NAME].iter().filter_map(|name| things.get(*name)) {
            warn!(volume = place.name, "what is left of a session is of no use");
            thing.descriptors.iter().for_each(|socket| super::link::hang_up(socket));
        }
        let commit = Commit { forget: everything(), ..Commit::of(&place.name) };
        if let Err(error) = place.commit(&commit) {
            warn!(volume = place.name, %error, "forgetting a session");
        }
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

    fn handle(
        &mut self,
        place: &mut Place,
        request: &Request,
        word: Word,
    ) -> Result<Option<Answer>, End> {
        self.said.check(request)?;
        if let Some(Abilities { queues, .. }) = place.abilities
            && u64::from(request.rings()) > queues
        {
            return Err(Refused::Rings { used: request.rings(), queues }.into());
        }
        let numbered = |number: u64| Some((number.to_le_bytes().to_vec(), Vec::new()));
        match request {
            Request::GetFeatures => Ok(numbered(self.abilities(place)?.offered_features())),
            Request::GetProtocolFeatures => {
                let offered = self.abilities(place)?.offered_protocol(place.tracking);
                Ok(numbered(offered))
            }
            Request::GetQueueNum => Ok(numbered(self.abilities(place)?.queues)),
            Request::GetMaxMemSlots => Ok(numbered(self.abilities(place)?.memory_slots)),
            Request::SetOwner => Ok(None),
            Request::SetProtocolFeatures(taken) => {
                self.take_protocol(place, *taken)?;
                Ok(None)
            }
            Request::SetBackendReqFd => {
                self.front.channel = word.descriptors.into_iter().next();
                self.keep_front();
                Ok(None)
            }
            Request::GetConfig => self.tell_config(place, &word.message).map(Some),
            Request::GetInflightFd(shape) => {
                let (shape, buffer) = inflight::create(shape.rings, shape.ring_size)
                    .map_err(backend::Error::Inflight)?;
                Ok(Some((Message::inflight_buffer(shape).body, vec![Arc::new(buffer)])))
            }
            Request::GetVringBase { ring } => self.stop_ring(place, *ring, &word.message).map(Some),
            Request::SetFeatures(taken) => {
                let code = Code::SetFeatures;
                check_offered(code, *taken, self.abilities(place)?.offered_features())?;
                self.set(place, request, &word)
            }
            Request::SetVringKick { ring } => {
                require_eventfd(Code::SetVringKick, &word)?;
                self.provide_inflight(place, *ring)?;
                self.set(place, request, &word)
            }
            Request::SetVringCall { .. } => {
                require_eventfd(Code::SetVringCall, &word)?;
                self.set(place, request, &word)
            }
            Request::SetMemTable(_)
            | Request::SetLogBase
            | Request::SetLogFd
            | Request::SetVringNum { .. }
            | Request::SetVringAddr(_)
            | Request::SetVringBase { .. }
            | Request::SetVringErr { .. }
            | Request::SetVringEnable { .. }
            | Request::SetConfig
            | Request::SetInflightFd(_)
            | Request::RemMemReg(_) => self.set(place, request, &word),
            Request::AddMemReg(region) => {
                self.require_slot(place, region)?;
                self.set(place, request, &word)
            }
        }
    }

    /// Each region is a descriptor in the worker and in the keeper, where all volumes share them.
    fn require_slot(&mut self, place: &mut Place, region: &Region) -> Result<(), End> {
        let slots = self.abilities(place)?.memory_slots.clamp(LEAST_SLOTS, MOST_SLOTS);
        let others = self.said.regions().into_iter().filter(|other| other.guest != region.guest);
        if u64::try_from(others.count()).unwrap_or(u64::MAX) < slots {
            return Ok(());
        }
        let (code, rule) = (Code::AddMemReg, "is one region too many");
        Err(Refused::Value { code, field: "guest address", value: region.guest, rule }.into())
    }

    /// Records what was set, and passes it on if there is a back-end that is to know now.
    ///
    /// A back-end that fails here is lost; the next one is told by the replay.
    fn set(
        &mut self,
        place: &Place,
        request: &Request,
        word: &Word,
    ) -> Result<Option<Answer>, End> {
        for item in self.said.replaced_by(request) {
            self.forget(item);
        }
        let item = Item::of(request);
        if let Some(item) = item {
            self.record(item, word.clone());
        }
        if item == Some(Item::Inflight) {
            self.own_inflight = false;
            self.map_inflight().map_err(backend::Error::Inflight)?;
            self.keep_front();
        }
        let negotiate = item == Some(Item::Features) && !self.link.is_negotiated();
        if negotiate {
            self.negotiate(place);
        }
        let is_kick = matches!(request, Request::SetVringKick { .. });
        let is_parked = self.link.is_parked();
        self.pass_on(place, |backend| {
            if is_kick && is_parked {
                backend.set_silent(word)
            } else {
                backend.set("request", word)
            }
        });
        // The standard has it answered in any case where its memory came along.
        let is_log = matches!(request, Request::SetLogBase);
        let has_log = self.front.note.protocol.unwrap_or_default() & protocol::LOG_SHMFD != 0;
        Ok((is_log && has_log).then(|| (vec![0; 8], Vec::new())))
    }

    fn take_protocol(&mut self, place: &mut Place, taken: u64) -> Result<(), End> {
        let offered = self.abilities(place)?.offered_protocol(place.tracking);
        check_offered(Code::SetProtocolFeatures, taken, offered)?;
        self.front.note.protocol = Some(taken);
        self.keep_front();
        self.negotiate(place);
        Ok(())
    }

    fn negotiate(&mut self, place: &Place) {
        let (front, tracking) = (self.front.note.protocol, place.tracking);
        self.pass_on(place, |backend| backend.negotiate(front, tracking));
    }

    /// From the back-end, or while there is none, what it said last.
    fn tell_config(&mut self, place: &mut Place, message: &Message) -> Result<Answer, End> {
        let same = |known: &Message| known.body.len() == message.body.len();
        let known = self.config.clone().filter(same);
        let reply = match known {
            Some(known) if !self.link.is_up() => known,
            Some(_) | None => self.ask(place, message)?.0,
        };
        let bytes = serde_json::to_vec(&reply).expect("a message is plain data");
        self.step.set.push((CONFIG.to_owned(), Thing { bytes, descriptors: Vec::new() }));
        self.config = Some(reply.clone());
        Ok((reply.body, Vec::new()))
    }

    /// Stops a ring once nothing is in flight on it: libvhost-user closes the interrupt at once, and
    /// would lose what ends later (facts/relay.md, D7).
    fn stop_ring(
        &mut self,
        place: &mut Place,
        ring: u32,
        message: &Message,
    ) -> Result<Answer, End> {
        let begin = Instant::now();
        let body = loop {
            self.reach(place, begin)?;
            if let Err(lost) = self.drain_ring(place, ring) {
                self.lose(place, lost);
                continue;
            }
            match self.link.backend().map(|backend| backend.ask(message)) {
                Some(Ok((reply, _))) => break reply.body,
                Some(Err(error)) => self.lose(place, Lost::from(error)),
                None => {}
            }
        };
        self.forget(Item::Ring(ring, RingItem::Kick));
        let base = Message::new(Code::SetVringBase, body.clone());
        self.record(Item::Ring(ring, RingItem::Base), Word { message: base, descriptors: vec![] });
        if self.own_inflight && self.said.started().is_empty() {
            // What runs next has nothing to do with what ran before.
            self.forget(Item::Inflight);
            self.inflight = None;
        }
        Ok((body, Vec::new()))
    }

    /// Sees to it that there is an inflight buffer when a ring starts: the back-end wants one.
    fn provide_inflight(&mut self, place: &mut Place, ring: u32) -> Result<(), End> {
        if place.tracking == Tracking::Unavailable {
            return Ok(());
        }
        if self.said.inflight().is_none() {
            let queues = self.abilities(place)?.queues;
            let queues = u16::try_from(queues).unwrap_or(u16::MAX);
            let (shape, buffer) =
                inflight::create(queues, OWN_RING_SIZE).map_err(backend::Error::Inflight)?;
            let word = Word::new((Message::inflight_buffer(shape), vec![buffer]));
            self.record(Item::Inflight, word.clone());
            self.own_inflight = true;
            self.map_inflight().map_err(backend::Error::Inflight)?;
            self.keep_front();
            self.pass_on(place, |backend| backend.set("inflight buffer", &word));
        }
        if self.own_inflight
            && let Some(inflight) = &self.inflight
        {
            inflight.forget(ring); // it starts where the front-end says
        }
        Ok(())
    }

    fn map_inflight(&mut self) -> std::io::Result<()> {
        let mapped = self.said.inflight().map(|(shape, fd)| Inflight::map(shape, fd));
        self.inflight = mapped.transpose()?;
        Ok(())
    }

    /// What the export can do; waits for a back-end if none was ever seen.
    fn abilities(&mut self, place: &mut Place) -> Result<Abilities, End> {
        loop {
            if let Some(abilities) = place.abilities {
                return Ok(abilities);
            }
            self.reach(place, Instant::now())?;
        }
    }

    /// Asks the back-end, and the next one if it is lost over it.
    fn ask(&mut self, place: &mut Place, message: &Message) -> Result<Received, End> {
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
    fn reach(&mut self, place: &mut Place, begin: Instant) -> Result<(), End> {
        while !self.link.is_up() {
            self.try_connect(place);
            if self.link.is_up() && begin.elapsed() <= PATIENCE {
                break; // one that connects and then fails, again and again, is no back-end
            }
            place.tell_trouble(&self.link);
            if self.link.is_parked() && !self.held().is_empty() {
                // No back-end may come before its requests may flow, and the VM must not wait for
                // that; who holds them back is told so when it ends that.
                self.resume(place);
            }
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

    fn record(&mut self, item: Item, word: Word) {
        let bytes = serde_json::to_vec(&word.message).expect("a message is plain data");
        let thing = Thing { bytes, descriptors: word.descriptors.clone() };
        self.step.set.push((name_of(item), thing));
        self.said.set(item, word);
    }

    fn forget(&mut self, item: Item) {
        if self.said.forget(item) {
            let name = name_of(item);
            self.step.set.retain(|(other, _)| *other != name);
            self.step.forget.push(name);
        }
    }

    fn keep_front(&mut self) {
        self.front.note.own_inflight = self.own_inflight;
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
            End::Gone | End::Detached => info!(volume = place.name, end = %chain, "disconnected"),
            _ => warn!(volume = place.name, end = %chain, "front-end dropped"),
        }
        super::link::hang_up(&self.front.socket);
        self.link.close();
        let commit = Commit { forget: everything(), ..Commit::of(&place.name) };
        if let Err(error) = place.commit(&commit) {
            warn!(volume = place.name, %error, "forgetting a front-end");
        }
    }
}

/// The beginnings of the names of all that is kept of a session.
fn everything() -> Vec<String> {
    [FRONT, SAID, CONFIG, Link::NAME].map(str::to_owned).to_vec()
}

/// The body of an answer, and its descriptors.
type Answer = (Vec<u8>, Vec<Arc<OwnedFd>>);

impl Place {
    /// Carries out a commit; an error if the front-end could not be answered.
    pub(super) fn commit(&self, commit: &Commit) -> Result<(), wire::Error> {
        if self.abandoned.load(Ordering::SeqCst) {
            return Err(wire::Error::Gone);
        }
        self.keep.commit(commit)
    }

    /// Has others know why there is no back-end, also while a front-end waits for one.
    fn tell_trouble(&self, link: &Link) {
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
            self.counters.refused += 1;
            let credentials = rustix::net::sockopt::socket_peercred(&other);
            let pid = credentials.map_or(0, |one| one.pid.as_raw_nonzero().get());
            if self.quiet.allows(&self.name) {
                warn!(volume = self.name, pid, "a second front-end refused");
            }
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

fn check_offered(code: Code, taken: u64, offered: u64) -> Result<(), Refused> {
    match taken & !offered {
        0 => Ok(()),
        value => Err(Refused::Value { code, field: "bits", value, rule: "were not offered" }),
    }
}

/// We write to it, so it must be what it should be: a write to a pipe, say, could block.
fn require_eventfd(code: Code, word: &Word) -> Result<(), Refused> {
    for descriptor in &word.descriptors {
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let is_eventfd = std::fs::read_link(path)
            .is_ok_and(|target| target.as_os_str().as_encoded_bytes() == b"anon_inode:[eventfd]");
        if !is_eventfd {
            let rule = "is no eventfd";
            return Err(Refused::Value { code, field: "descriptor", value: 0, rule });
        }
    }
    Ok(())
}

fn name_of(item: Item) -> String {
    format!("{SAID}{}", serde_json::to_string(&item).expect("an item is plain data"))
}
