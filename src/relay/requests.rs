//! What a session does with each request of its front-end.

use super::{
    backend::{self, Abilities, Tracking},
    inflight::{self, Inflight},
    kept::Thing,
    link::Lost,
    message::{Code, Message, Refused, Region, Request, protocol},
    place::Place,
    said::{Item, RingItem, Word},
    session::{Answer, CONFIG, End, Session},
};
use std::{os::fd::AsRawFd as _, sync::Arc, time::Instant};

/// Entries of a ring in an inflight buffer of our own: the most a ring can have.
pub(super) const OWN_RING_SIZE: u16 = 1024;

/// Regions of memory that a front-end may add: as many as the back-end takes, but no fewer than
/// fit into a table, and no more than libvhost-user ever took.
const LEAST_SLOTS: u64 = 8;
const MOST_SLOTS: u64 = 512;

impl Session {
    /// Does what a request asks for; the answer, if there is one beside an acknowledgement.
    pub(super) fn handle(
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
                self.resume(place); // no ring starts parked; who holds them back is told in the end
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
            self.front.note.own_inflight = false;
            self.map_inflight().map_err(backend::Error::Inflight)?;
            self.keep_front();
        }
        let negotiate = item == Some(Item::Features) && !self.link.is_negotiated();
        if negotiate {
            self.negotiate(place);
        }
        self.pass_on(place, |backend| backend.set("request", word));
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
        if self.front.note.own_inflight && self.said.started().is_empty() {
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
            self.front.note.own_inflight = true;
            self.map_inflight().map_err(backend::Error::Inflight)?;
            self.keep_front();
            self.pass_on(place, |backend| backend.set("inflight buffer", &word));
        }
        if self.front.note.own_inflight
            && let Some(inflight) = &self.inflight
        {
            inflight.forget(ring); // it starts where the front-end says
        }
        Ok(())
    }

    pub(super) fn map_inflight(&mut self) -> std::io::Result<()> {
        let mapped = self.said.inflight().map(|(shape, fd)| Inflight::map(shape, fd));
        self.inflight = mapped.transpose()?;
        Ok(())
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
