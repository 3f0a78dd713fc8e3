//! The relay as a front-end: one connection to the export of a storage daemon.
//!
//! Every exchange has a deadline, after which the connection is given up. Every setter is confirmed
//! where the back-end can (`REPLY_ACK`), so that "sent" means "done".

use super::{
    inflight::Inflight,
    memory,
    message::{Code, Message, feature, protocol},
    said::{Item, RingItem, Said, Word},
    wire::{self, Received},
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt},
};
use std::{
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread::sleep,
    time::{Duration, Instant},
};

/// How long a back-end may take for one answer. QSD's main loop answers within 0.1 ms; a monitor
/// command that opens an image may keep it for some hundred.
pub(super) const ANSWER: Duration = Duration::from_secs(5);

/// Setters that are sent before the first of them is confirmed: far fewer than fill the buffers of a
/// socket, where both sides would wait for each other.
const BATCH: usize = 32;

/// What the relay never offers (facts/relay.md sections 2 and 6): guests flush, and volumes may
/// move between versions of QSD.
const MASKED: u64 = feature::CONFIG_WCE | feature::SIZE_MAX;

/// Why a back-end cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{}", path.display())]
    Connect { path: PathBuf, source: io::Error },
    #[error("{what}")]
    Wire { what: &'static str, source: wire::Error },
    #[error("{what}: the back-end answered {answer}")]
    Answer { what: &'static str, answer: String },
    #[error("the back-end lacks {what} {missing:#x}, which the VM uses")]
    Lacks { what: &'static str, missing: u64 },
    #[error("the back-end has {has} queues, and the VM uses {used}")]
    Queues { has: u32, used: u32 },
    #[error("inflight buffer")]
    Inflight(#[source] io::Error),
}

/// What an export can do. A front-end is told this also while there is no back-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Abilities {
    pub(super) features: u64,
    pub(super) protocol: u64,
    pub(super) queues: u64,
    pub(super) memory_slots: u64,
}

/// Whether the back-end notes its requests in an inflight buffer though it does not offer to
/// (facts/relay.md section 4). Known from the self-test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tracking {
    /// It does: requests survive the daemon.
    Works,
    /// It does not, or not as expected: plain pass-through.
    Unavailable,
}

/// A connection that is negotiated as far as the front-end has come.
#[derive(Debug)]
pub(super) struct Backend {
    pub(super) socket: Arc<OwnedFd>,
    /// Our end of the channel on which it tells that its configuration space has changed.
    pub(super) channel: Option<Arc<OwnedFd>>,
    pub(super) abilities: Abilities,
    /// The protocol features in force.
    pub(super) protocol: u64,
}

impl Abilities {
    /// What a front-end is offered.
    pub(super) fn offered_features(&self) -> u64 {
        self.features & !MASKED
    }

    /// The relay itself acknowledges, and passes on changes of the configuration space; the
    /// inflight buffer is offered so that QEMU can keep it beyond the end of the relay.
    pub(super) fn offered_protocol(&self, tracking: Tracking) -> u64 {
        let own = protocol::REPLY_ACK | tracking.feature();
        self.protocol & protocol::KNOWN & !protocol::INFLIGHT_SHMFD | own
    }
}

impl Tracking {
    /// The protocol feature that is in force though no back-end offers it.
    fn feature(self) -> u64 {
        match self {
            Self::Works => protocol::INFLIGHT_SHMFD,
            Self::Unavailable => 0,
        }
    }
}

impl Backend {
    /// Connects and asks what the back-end can do.
    pub(super) fn connect(path: &Path) -> Result<Self, Error> {
        Self::connect_within(path, ANSWER)
    }

    /// The same, where every answer has this deadline.
    pub(super) fn connect_within(path: &Path, answer: Duration) -> Result<Self, Error> {
        let socket = open(path, answer)
            .map_err(|source| Error::Connect { path: path.to_owned(), source: source.into() })?;
        let none = Abilities { features: 0, protocol: 0, queues: 1, memory_slots: 0 };
        let socket = Arc::new(socket);
        let mut backend = Self { socket, channel: None, abilities: none, protocol: 0 };
        backend.tell(Code::SetOwner)?;
        let abilities = &mut backend.abilities;
        abilities.features = ask_number(&backend.socket, Code::GetFeatures)?;
        if abilities.features & feature::PROTOCOL != 0 {
            abilities.protocol = ask_number(&backend.socket, Code::GetProtocolFeatures)?;
        }
        if abilities.protocol & protocol::MQ != 0 {
            abilities.queues = ask_number(&backend.socket, Code::GetQueueNum)?;
        }
        if abilities.protocol & protocol::CONFIGURE_MEM_SLOTS != 0 {
            abilities.memory_slots = ask_number(&backend.socket, Code::GetMaxMemSlots)?;
        }
        Ok(backend)
    }

    /// Sees whether all that the front-end relies on is there.
    pub(super) fn check(
        &self,
        said: &Said,
        front_protocol: Option<u64>,
        tracking: Tracking,
    ) -> Result<(), Error> {
        let lacks = |what, missing| match missing {
            0 => Ok(()),
            missing => Err(Error::Lacks { what, missing }),
        };
        let used = said.features().unwrap_or_default();
        lacks("features", used & !(self.abilities.features | feature::PROTOCOL))?;
        let offered = self.abilities.offered_protocol(tracking);
        lacks("protocol features", front_protocol.unwrap_or_default() & !offered)?;
        let used = said.rings().last().map_or(0, |ring| ring + 1);
        let has = u32::try_from(self.abilities.queues).unwrap_or(u32::MAX);
        if used > has { Err(Error::Queues { has, used }) } else { Ok(()) }
    }

    /// Settles the protocol features: what the front-end took and what the relay itself needs.
    pub(super) fn negotiate(
        &mut self,
        front_protocol: Option<u64>,
        tracking: Tracking,
    ) -> Result<(), Error> {
        if self.abilities.features & feature::PROTOCOL == 0 {
            return Ok(());
        }
        let own = protocol::REPLY_ACK | protocol::BACKEND_REQ;
        let wanted = front_protocol.unwrap_or_default() | own;
        let offered = self.abilities.protocol & protocol::KNOWN & !protocol::INFLIGHT_SHMFD;
        self.protocol = wanted & offered | tracking.feature();
        let settle = Message::number(Code::SetProtocolFeatures, self.protocol);
        wire_send("protocol features", &self.socket, &settle, &[])?;
        if self.protocol & protocol::BACKEND_REQ != 0 && self.channel.is_none() {
            let pair = || {
                let (ours, theirs) = UnixStream::pair()?;
                ours.set_nonblocking(true)?;
                Ok((OwnedFd::from(ours), OwnedFd::from(theirs)))
            };
            let (ours, theirs) = pair().map_err(|source: io::Error| Error::Wire {
                what: "channel",
                source: wire::Error::Io(source),
            })?;
            let word = Word::new((Message::new(Code::SetBackendReqFd, Vec::new()), vec![theirs]));
            self.set("channel", &word)?;
            self.channel = Some(Arc::new(ours));
        }
        Ok(())
    }

    /// Tells all that was said of the device and its memory.
    pub(super) fn replay_device(&self, said: &Said) -> Result<(), Error> {
        let device = said.iter().filter(|(item, _)| !item.is_of_rings());
        device.into_iter().try_for_each(|(_, word)| self.set("replay", word))
    }

    /// Hands over the inflight buffer and starts the rings: from here on the back-end works. There is
    /// no way to start a ring that stands still: libvhost-user writes the kick of one that takes up
    /// an inflight buffer, and looks into it.
    ///
    /// What it finds noted in the buffer it does again; a request that it had ended is not noted
    /// any more. Without a buffer it begins where the used ring ends, which is right only if
    /// requests ended in order (facts/relay.md, D6).
    pub(super) fn start_rings(
        &self,
        said: &Said,
        inflight: Option<&Inflight>,
    ) -> Result<(), Error> {
        let rings = said.rings();
        let mut words: Vec<_> = said.get(Item::Inflight).cloned().into_iter().collect();
        for ring in &rings {
            if let Some(inflight) = inflight {
                inflight.keep(*ring);
            }
            for (item, word) in said.of_ring(*ring) {
                words.push(match item {
                    RingItem::Base if inflight.is_none() => reached(said, *ring, word),
                    _ => word.clone(),
                });
            }
        }
        self.set_all("rings", &words)?;
        for ring in said.started() {
            wake(said, ring);
        }
        Ok(())
    }

    /// Swaps the kicks of running rings: for silent ones, and they fetch no more requests; for the
    /// front-end's, and they go on. What they hold goes on meanwhile (facts/relay.md section 5).
    pub(super) fn swap_kicks(
        &self,
        said: &Said,
        rings: &[u32],
        inflight: &Inflight,
        kick: Kick,
    ) -> Result<(), Error> {
        let mut words = Vec::new();
        for ring in rings {
            let Some(word) = said.get(Item::Ring(*ring, RingItem::Kick)) else { continue };
            inflight.forget(*ring); // or it would do again what it is doing
            words.push(match kick {
                Kick::FrontEnd => word.clone(),
                Kick::Silent => silenced(word)?,
            });
        }
        self.set_all("kicks", &words)?;
        match kick {
            Kick::FrontEnd => {
                for ring in rings {
                    wake(said, *ring);
                }
                Ok(())
            }
            Kick::Silent => self.settle(&words),
        }
    }

    /// Waits until the back-end fetches no more. QSD 11 writes a kick once when it gets it, so it
    /// looks into the ring once more, and that may be after its answer; not so QSD 10.
    fn settle(&self, silent: &[Word]) -> Result<(), Error> {
        let begin = Instant::now();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let events = silent.iter().flat_map(|word| &word.descriptors);
        let mut fds: Vec<_> = events.map(|event| PollFd::new(event, PollFlags::IN)).collect();
        while poll(&mut fds, Some(&now)) != Ok(0) {
            if begin.elapsed() > ANSWER {
                let source = wire::Error::Deadline;
                return Err(Error::Wire { what: "parking", source });
            }
            sleep(Duration::from_micros(20));
        }
        // It has taken the kicks; what that leads to it does before it answers anything again.
        ask_number(&self.socket, Code::GetFeatures).map(drop)
    }

    /// Passes on what a front-end set; returns when it is done.
    pub(super) fn set(&self, what: &'static str, word: &Word) -> Result<(), Error> {
        self.say(what, word)?;
        self.confirm(what, word)
    }

    /// The same for many, without waiting for each: a ring that is moved stands still meanwhile.
    fn set_all(&self, what: &'static str, words: &[Word]) -> Result<(), Error> {
        for batch in words.chunks(BATCH) {
            batch.iter().try_for_each(|word| self.say(what, word))?;
            batch.iter().try_for_each(|word| self.confirm(what, word))?;
        }
        Ok(())
    }

    fn say(&self, what: &'static str, word: &Word) -> Result<(), Error> {
        let message = word.message.asking(self.confirms());
        let descriptors: Vec<_> = word.descriptors.iter().map(|fd| fd.as_fd()).collect();
        wire_send(what, &self.socket, &message, &descriptors)
    }

    fn confirm(&self, what: &'static str, word: &Word) -> Result<(), Error> {
        let is_log = word.message.request == Code::SetLogBase.number();
        let has_answer = is_log && self.protocol & protocol::LOG_SHMFD != 0;
        if !(self.confirms() || has_answer) {
            return Ok(());
        }
        let (reply, _) = self.reply_to(what, &word.message)?;
        match reply.as_number() {
            Some(0) => Ok(()),
            _ if is_log => Ok(()), // its answer has no meaning
            answer => Err(Error::Answer { what, answer: format!("{answer:?}") }),
        }
    }

    fn confirms(&self) -> bool {
        self.protocol & protocol::REPLY_ACK != 0
    }

    /// Asks what a front-end asked.
    pub(super) fn ask(&self, message: &Message) -> Result<Received, Error> {
        let message = message.asking(false);
        wire_send("request", &self.socket, &message, &[])?;
        self.reply_to("request", &message)
    }

    /// What came on the back-end's channel; it stays there until it is heeded.
    pub(super) fn heard(&self) -> Result<Option<Message>, Error> {
        let Some(channel) = &self.channel else { return Ok(None) };
        let failed = |source| Error::Wire { what: "channel", source };
        match wire::peek(channel.as_fd()).map_err(failed)? {
            Some((message, _)) => Ok(Some(message)),
            // A message is one send: the rest would never come, and be waited for without rest.
            None => Err(failed(wire::Error::Deadline)),
        }
    }

    /// Done with what was heard.
    pub(super) fn heeded(&self, message: &Message) -> Result<(), Error> {
        let Some(channel) = &self.channel else { return Ok(()) };
        let failed = |source| Error::Wire { what: "channel", source };
        wire::take(channel.as_fd(), message.bytes().len()).map_err(failed)?;
        if message.needs_reply() {
            let reply = message.reply(vec![0; 8]);
            wire::send_now(channel.as_fd(), &reply.bytes(), NOTHING).map_err(failed)?;
        }
        Ok(())
    }

    fn reply_to(&self, what: &'static str, message: &Message) -> Result<Received, Error> {
        reply_to(what, &self.socket, message)
    }

    fn tell(&self, code: Code) -> Result<(), Error> {
        wire_send("owner", &self.socket, &Message::new(code, Vec::new()), &[])
    }
}

/// Which kick a ring is to listen to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    FrontEnd,
    Silent,
}

/// No descriptors.
pub(super) const NOTHING: &[OwnedFd] = &[];

fn open(path: &Path, answer: Duration) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Not blocking: where the queue of a daemon that hangs is full, the next attempt waits.
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(answer))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(answer))?;
    Ok(socket)
}

fn ask_number(socket: &OwnedFd, code: Code) -> Result<u64, Error> {
    let message = Message::new(code, Vec::new());
    wire_send("question", socket, &message, &[])?;
    let (reply, _) = reply_to("question", socket, &message)?;
    let bytes = reply.body.len();
    reply.as_number().ok_or_else(|| Error::Answer {
        what: "question",
        answer: format!("{bytes} bytes to {code:?}"),
    })
}

fn wire_send(
    what: &'static str,
    socket: &OwnedFd,
    message: &Message,
    descriptors: &[std::os::fd::BorrowedFd<'_>],
) -> Result<(), Error> {
    wire::send(socket.as_fd(), message, descriptors).map_err(|source| Error::Wire { what, source })
}

fn reply_to(what: &'static str, socket: &OwnedFd, message: &Message) -> Result<Received, Error> {
    let received =
        wire::receive(socket.as_fd(), ANSWER).map_err(|source| Error::Wire { what, source })?;
    if received.0.is_reply_to(message.request) {
        return Ok(received);
    }
    let answer = format!("with a reply to {}", received.0.request);
    Err(Error::Answer { what, answer })
}

/// The kick of a ring that is parked: an event that nobody writes.
fn silenced(word: &Word) -> Result<Word, Error> {
    let silent = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let silent = silent.map_err(|error| Error::Inflight(error.into()))?;
    Ok(Word { message: word.message.clone(), descriptors: vec![Arc::new(silent)] })
}

/// Where a ring begins that has come further since that was said: where the back-end before ended.
fn reached(said: &Said, ring: u32, word: &Word) -> Word {
    match memory::progress(said, ring) {
        Ok(progress) => Word {
            message: Message::ring(Code::SetVringBase, ring, progress.ended.into()),
            descriptors: Vec::new(),
        },
        Err(_) => word.clone(),
    }
}

/// Whoever waits for an event that the last back-end did not send, or did not see, gets one.
fn wake(said: &Said, ring: u32) {
    for item in [RingItem::Kick, RingItem::Call] {
        if let Some(word) = said.get(Item::Ring(ring, item)) {
            word.descriptors.iter().for_each(notify);
        }
    }
}

/// Writes an eventfd once. One that is full has been written already, and might block.
fn notify(event: &Arc<OwnedFd>) {
    let mut fds = [PollFd::new(event, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut fds, Some(&now)) == Ok(1) && fds[0].revents() == PollFlags::OUT {
        _ = rustix::io::write(event, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_eventfd_is_written_once_and_one_that_is_full_does_not_block() {
        let event = Arc::new(eventfd(0, EventfdFlags::empty()).unwrap());
        let read = |event: &OwnedFd| {
            let mut bytes = [0; 8];
            rustix::io::read(event, &mut bytes).unwrap();
            u64::from_ne_bytes(bytes)
        };
        notify(&event);
        assert_eq!(read(&event), 1);
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        notify(&event);
        assert_eq!(read(&event), u64::MAX - 1);
    }
}
