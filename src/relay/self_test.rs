//! The self-test: whether this qemu-storage-daemon behaves as the relay relies on.
//!
//! Nothing of it is promised by QSD: its libvhost-user notes requests in an inflight buffer only
//! because the relay sets a protocol feature that was not offered, and lets itself be parked
//! (facts/relay.md sections 4, 5, 7a). So the relay plays the front-end of a disk that nobody needs, with
//! the very code it serves VMs with, and looks what happens:
//!
//! ```text
//!  connect    the feature is taken, and there is a buffer
//!  park       requests in flight are noted; with the ring parked they go on to their end, once,
//!             and interrupt; what is asked meanwhile is not fetched
//!  resume     it is then
//!  take_up    on another connection, with ring and buffer as a daemon leaves them that dies after
//!             it did a later request first: the one in flight is done, the one just ended is not
//!             done again, and a new one is fetched
//! ```
//!
//! Called once a version of QSD, with a daemon of its own.

mod ring;
#[cfg(test)]
mod test;

use super::{
    backend::{Backend, Kick, Tracking},
    inflight::{self, Inflight},
    message::{Code, Message, feature, protocol},
    requests::OWN_RING_SIZE,
    said::{Item, RingItem, Said, Word},
};
use crate::chain::Chain;
use ring::{RING, Ring, SIZE};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    collections::BTreeSet,
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, mpsc},
    thread::sleep,
    time::{Duration, Instant},
};

/// What the disk must be limited to (`iops-total` of its throttle group, nothing else), so that
/// requests stay in flight for a while: QEMU lets a tenth pass at once, and then one each 10 ms.
pub const REQUESTS_PER_SECOND: u32 = 100;

/// How many requests are made at once: a few more than pass at once. Where we slept while all of
/// them ended, another time with more.
const BATCHES: [usize; 3] = [14, 28, 56];

/// And how many while the ring is parked.
const LATER: usize = 2;

/// How long an answer, or a thing waited for, may take: it takes at most 0.6 s by the limit.
const STEP: Duration = Duration::from_secs(2);

/// How long all of it may take; on a good one it takes 0.1 s.
const LIMIT: Duration = Duration::from_secs(5);

/// How often it is looked.
const LOOK: Duration = Duration::from_micros(100);

/// Finds out whether the daemon behind `socket` behaves as the relay relies on; the error says what
/// does not, in plain words. Blocks, for 5 s at most.
///
/// `socket` is a vhost-user-blk export that listens, is set up as those of volumes are, and is used
/// by nobody else. Its disk has at least 1 MiB, reads as zeros, and is limited to
/// [`REQUESTS_PER_SECOND`]; it is only read. A throttle node over
/// `{"driver": "null-co", "size": 1048576, "read-zeroes": true}` will do. The daemon is to be ended afterwards, whatever came of it.
pub fn self_test(socket: &Path) -> Result<(), String> {
    let (reply, outcome) = mpsc::channel();
    let socket = socket.to_owned();
    // Every step has its deadline; a thread, so that their sum has one, too.
    let thread = std::thread::Builder::new().name("self-test".to_owned());
    let thread = thread.spawn(move || _ = reply.send(prove(&socket)));
    thread.map_err(|error| format!("the self-test does not start: {error}"))?;
    let late = |_| Err(format!("the self-test did not end within {LIMIT:?}"));
    outcome.recv_timeout(LIMIT).unwrap_or_else(late)
}

fn prove(socket: &Path) -> Result<(), String> {
    let backend = connect(socket)?;
    let mut trial = Trial::new(&backend)?;
    trial.said_to(&backend, None)?;
    trial.park(&backend)?;
    trial.resume(&backend)?;
    drop(backend); // it serves one at a time
    trial.take_up(socket)
}

/// What a VM would have: memory with a ring, and two events; and what the relay has of it.
struct Trial {
    ring: Ring,
    said: Said,
    inflight: Inflight,
    kick: Arc<OwnedFd>,
    call: Arc<OwnedFd>,
}

impl Trial {
    fn new(backend: &Backend) -> Result<Self, String> {
        let own = |error: io::Error| format!("the self-test lacks memory or descriptors: {error}");
        let ring = Ring::new().map_err(own)?;
        let event = || Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let (kick, call) = (event().map_err(own)?, event().map_err(own)?);
        let mut said = Said::default();
        let features = Message::number(Code::SetFeatures, FEATURES);
        said.set(Item::Features, Word { message: features, descriptors: Vec::new() });
        ring.describe(&mut said);
        for (item, code, event) in [
            (RingItem::Kick, Code::SetVringKick, &kick),
            (RingItem::Call, Code::SetVringCall, &call),
        ] {
            let message = Message::number(code, RING.into());
            said.set(Item::Ring(RING, item), Word { message, descriptors: vec![event.clone()] });
        }
        said.set(Item::Inflight, ask_for_buffer(backend)?);
        let (shape, descriptor) = said.inflight().ok_or("there is no inflight buffer")?;
        let inflight = Inflight::map(shape, descriptor)
            .map_err(|error| format!("the inflight buffer cannot be mapped: {error}"))?;
        Ok(Self { ring, said, inflight, kick, call })
    }

    /// Says everything, as to a new back-end: without a buffer to take up, or with one.
    fn said_to(&self, backend: &Backend, take_up: Option<&Inflight>) -> Result<(), String> {
        let tracking = Tracking::Works;
        backend
            .check(&self.said, Some(0), tracking)
            .and_then(|()| backend.replay_device(&self.said))
            .and_then(|()| backend.start_rings(&self.said, take_up))
            .map_err(|error| format!("the ring does not start: {}", Chain(&error)))
    }

    /// Parks the ring while requests are in flight on it, and waits for their end.
    fn park(&mut self, backend: &Backend) -> Result<(), String> {
        for batch in BATCHES {
            self.ring.ask(batch);
            notify(&self.kick);
            if self.is_any_noted()? {
                self.swap_kick(backend, Kick::Silent)?;
                let noted = self.noted();
                take(&self.call);
                self.ring.collect()?;
                // What has not ended by now was in flight before.
                if !self.ring.open().is_subset(&noted) {
                    return Err(
                        "some requests in flight are not noted in the inflight buffer".into()
                    );
                }
                if !self.ring.open().is_empty() {
                    return self.drain();
                }
                self.swap_kick(backend, Kick::FrontEnd)?;
            }
        }
        Err("requests in flight are not noted in the inflight buffer".to_owned())
    }

    /// Whether a request is noted before all have ended.
    fn is_any_noted(&mut self) -> Result<bool, String> {
        let mut noted = false;
        self.wait(|trial| {
            noted = !trial.noted().is_empty();
            let ended = trial.ring.open().is_empty();
            Ok(if noted || ended { None } else { Some("requests do not end") })
        })?;
        Ok(noted)
    }

    /// Waits until what was in flight has ended, and puts new requests into the parked ring.
    fn drain(&mut self) -> Result<(), String> {
        let later = self.ring.ask(LATER);
        notify(&self.kick); // as a guest would, who knows nothing
        let mut interrupted = false;
        self.wait(|trial| {
            let noted = trial.noted();
            if !later.is_subset(trial.ring.open()) || !later.is_disjoint(&noted) {
                return Err("requests are fetched from a parked ring".to_owned());
            }
            interrupted |= take(&trial.call);
            Ok(if *trial.ring.open() != later {
                Some("requests in flight do not end while their ring is parked")
            } else if !noted.is_empty() {
                Some("requests stay noted in the inflight buffer after their end")
            } else {
                (!interrupted).then_some("requests end without an interrupt while parked")
            })
        })
    }

    /// Ends the parking.
    fn resume(&mut self, backend: &Backend) -> Result<(), String> {
        self.swap_kick(backend, Kick::FrontEnd)?;
        self.wait_for_all("requests are not fetched after their ring was parked")
    }

    /// Has a new connection take up what a daemon leaves that died.
    fn take_up(&mut self, socket: &Path) -> Result<(), String> {
        // It answers once the connection before is gone: nobody but us writes to the ring now.
        let backend = connect(socket)?;
        let three: Vec<_> = self.ring.ask(3).into_iter().collect();
        let [running, ended, _new] = three[..] else { return Err("three are not three".into()) };
        self.ring.end(ended);
        self.inflight.note_death(RING, running, ended);
        self.said_to(&backend, Some(&self.inflight))?;
        self.wait_for_all("requests noted in the inflight buffer are not taken up")?;
        if self.ring.is_touched(ended) {
            return Err("a request that had ended is done again from the inflight buffer".into());
        }
        Ok(())
    }

    fn wait_for_all(&mut self, else_: &'static str) -> Result<(), String> {
        self.wait(|trial| {
            Ok(if trial.ring.open().is_empty() {
                let noted = !trial.noted().is_empty();
                noted.then_some("requests stay noted in the inflight buffer after their end")
            } else {
                Some(else_)
            })
        })
    }

    /// Waits until nothing is amiss any more; no request may end twice meanwhile.
    fn wait(
        &mut self,
        mut amiss: impl FnMut(&mut Self) -> Result<Option<&'static str>, String>,
    ) -> Result<(), String> {
        let begin = Instant::now();
        loop {
            self.ring.collect()?;
            match amiss(self)? {
                None => return Ok(()),
                Some(amiss) if begin.elapsed() > STEP => return Err(amiss.to_owned()),
                Some(_) => sleep(LOOK),
            }
        }
    }

    fn swap_kick(&self, backend: &Backend, kick: Kick) -> Result<(), String> {
        let swapped = backend.swap_kicks(&self.said, &[RING], &self.inflight, kick);
        swapped.map_err(|error| format!("the ring cannot be parked: {}", Chain(&error)))
    }

    /// The first descriptors of the requests that are noted.
    fn noted(&self) -> BTreeSet<u16> {
        let held = self.inflight.held(&[(RING, SIZE.into())]).into_iter();
        held.filter_map(|held| u16::try_from(held.entry).ok()).collect()
    }
}

/// What a driver needs: `VIRTIO_F_VERSION_1`, and protocol features.
const FEATURES: u64 = 1 << 32 | feature::PROTOCOL;

/// Connects, and settles the feature that the relay is about, offered or not.
fn connect(socket: &Path) -> Result<Backend, String> {
    let mut backend = Backend::connect_within(socket, STEP)
        .map_err(|error| format!("the export does not answer: {}", Chain(&error)))?;
    if backend.abilities.protocol & protocol::REPLY_ACK == 0 {
        return Err("the export does not acknowledge what it is told".to_owned());
    }
    let settled = backend.negotiate(Some(0), Tracking::Works);
    settled.map_err(|error| refused(&Chain(&error).to_string()))?;
    Ok(backend)
}

fn ask_for_buffer(backend: &Backend) -> Result<Word, String> {
    let queues = u16::try_from(backend.abilities.queues).unwrap_or(u16::MAX);
    let (reply, descriptors) = backend
        .ask(&Message::inflight(queues, OWN_RING_SIZE))
        .map_err(|error| refused(&Chain(&error).to_string()))?;
    let word = Word::new((Message::new(Code::SetInflightFd, reply.body), descriptors));
    let parsed = word.message.parse(word.descriptors.len());
    parsed.map_err(|error| refused(&error.to_string()))?;
    // The relay makes the buffers of VMs itself, laid out as this one is.
    let own = inflight::create(queues, OWN_RING_SIZE).map_err(|error| error.to_string())?;
    match word.message.as_shape() {
        Some(shape) if shape.size == own.0.size => Ok(word),
        shape => Err(format!("the inflight buffer is laid out in another way: {shape:?}")),
    }
}

fn refused(why: &str) -> String {
    format!("the protocol feature INFLIGHT_SHMFD is not accepted: {why}")
}

/// Takes an event, if there was one.
fn take(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

fn notify(event: &OwnedFd) {
    _ = rustix::io::write(event, &1_u64.to_ne_bytes()); // one that is full is there
}
