//! What the keeper keeps for the worker, and what the two say to each other.
//!
//! The keeper knows nothing of vhost-user. It keeps named things of volumes, each some bytes and
//! some descriptors, and carries out commits: take a request from a front-end's socket, change
//! what is kept, send the answer. A commit is one datagram, so it happens whole or not at all,
//! whenever the worker dies: a request is answered exactly once.
//!
//! JSON, in datagrams on a `SOCK_SEQPACKET` socket; unknown fields are ignored, so that keeper and
//! worker may be of different versions.

use super::wire;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::BTreeMap,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
};

/// The version of this protocol; a worker ends at once where the keeper speaks another.
pub(super) const VERSION: u32 = 1;

/// The longest datagram: a commit with the longest bodies, as JSON.
const LONGEST: usize = 128 << 10;

/// Descriptors of one datagram: those of a request, and of an answer.
const MOST: usize = 32;

/// The thing of a volume whose first descriptor is the socket of its front-end.
pub(super) const FRONT: &str = "front";

/// Something that is kept.
#[derive(Clone, Debug)]
pub(super) struct Thing {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<Arc<OwnedFd>>,
}

/// Everything that is kept: by volume, by name.
#[derive(Debug, Default)]
pub(super) struct Kept(pub(super) BTreeMap<String, BTreeMap<String, Thing>>);

/// Descriptors to close where nobody waits for it.
pub(super) type Dropped = Vec<Arc<OwnedFd>>;

/// A step of one volume, with everything that must happen together.
#[derive(Clone, Debug, Default)]
pub(super) struct Commit {
    pub(super) volume: String,
    /// Names beginning with these are forgotten, before the rest.
    pub(super) forget: Vec<String>,
    pub(super) set: Vec<(String, Thing)>,
    /// Bytes of the front-end's request that are done with.
    pub(super) take: usize,
    /// What the front-end is to be answered.
    pub(super) answer: Option<Thing>,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Word {
    /// The first word: who it is. All that is kept is the answer, or the worker has it all.
    Hello {
        pid: u32,
        /// Whether the worker has everything: the keeper is new, and keeps nothing.
        has_all: bool,
    },
    Commit(Parts),
    /// Run this program from now on, and if it does not last, the one that runs now.
    Upgrade {
        program: PathBuf,
    },
}

/// A commit as JSON; its descriptors come beside it, in the order of the things.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Parts {
    volume: String,
    forget: Vec<String>,
    set: Vec<(String, Part)>,
    take: usize,
    answer: Option<Part>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    bytes: Vec<u8>,
    descriptors: usize,
}

/// What the keeper says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    Hello {
        version: u32,
    },
    /// One thing, after a `Hello` from a worker that has nothing; its descriptors come beside it.
    Kept {
        volume: String,
        name: String,
        bytes: Vec<u8>,
    },
    /// That was all.
    All,
    Done,
    /// The front-end could not be answered: it is gone, or does not read.
    Lost(String),
}

impl Kept {
    /// Carries out a commit. What is kept changes in any case; a front-end that cannot be answered
    /// is an error. What is not needed any more goes to `dropped`, and not further: a descriptor
    /// may be closed as slowly as the one who made it likes (a socket that lingers).
    pub(super) fn apply(
        &mut self,
        commit: &Commit,
        dropped: &mut Dropped,
    ) -> Result<(), wire::Error> {
        let things = self.0.entry(commit.volume.clone()).or_default();
        let front = things.get(FRONT).and_then(|front| front.descriptors.first()).cloned();
        let is_forgotten = |name: &str| commit.forget.iter().any(|begin| name.starts_with(begin));
        let forgotten = things.extract_if(.., |name, _| is_forgotten(name));
        dropped.extend(forgotten.flat_map(|(_, thing)| thing.descriptors));
        for (name, thing) in commit.set.iter().cloned() {
            let replaced = things.insert(name, thing);
            dropped.extend(replaced.into_iter().flat_map(|thing| thing.descriptors));
        }
        if things.is_empty() {
            self.0.remove(&commit.volume);
        }
        if commit.take == 0 && commit.answer.is_none() {
            return Ok(());
        }
        let front = front.ok_or(wire::Error::Gone)?;
        let taken = wire::take(front.as_fd(), commit.take)?;
        dropped.extend(taken.into_iter().map(Arc::new));
        match &commit.answer {
            Some(Thing { bytes, descriptors }) => wire::send_now(front.as_fd(), bytes, descriptors),
            None => Ok(()),
        }
    }
}

impl Commit {
    pub(super) fn of(volume: &str) -> Self {
        Self { volume: volume.to_owned(), ..Self::default() }
    }

    pub(super) fn parts(&self) -> (Parts, Vec<Arc<OwnedFd>>) {
        let mut all = Vec::new();
        let mut part = |thing: &Thing| {
            all.extend(thing.descriptors.iter().cloned());
            Part { bytes: thing.bytes.clone(), descriptors: thing.descriptors.len() }
        };
        let set = self.set.iter().map(|(name, thing)| (name.clone(), part(thing))).collect();
        let answer = self.answer.as_ref().map(&mut part);
        let (volume, forget, take) = (self.volume.clone(), self.forget.clone(), self.take);
        (Parts { volume, forget, set, take, answer }, all)
    }

    pub(super) fn from_parts(parts: Parts, descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut rest = descriptors.into_iter().map(Arc::new);
        let mut thing = |Part { bytes, descriptors }: Part| {
            let own: Vec<_> = rest.by_ref().take(descriptors).collect();
            (own.len() == descriptors).then_some(Thing { bytes, descriptors: own })
        };
        let mut set = Vec::new();
        for (name, part) in parts.set {
            set.push((name, thing(part)?));
        }
        let answer = match parts.answer {
            Some(part) => Some(thing(part)?),
            None => None,
        };
        let Parts { volume, forget, take, .. } = Parts { set: Vec::new(), answer: None, ..parts };
        Some(Self { volume, forget, set, take, answer })
    }
}

/// Sends one datagram.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    word: &impl Serialize,
    descriptors: &[Arc<OwnedFd>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(word)?;
    let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other(format!("{} descriptors at once", descriptors.len())));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one datagram; none once the other side has gone.
pub(super) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        return Err(io::Error::other("a datagram was cut off"));
    }
    let word = serde_json::from_slice(&bytes[..received.bytes])?;
    Ok(Some((word, descriptors)))
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::{collection::vec, option, prelude::*};
    use rustix::{
        fs::{MemfdFlags, fstat, memfd_create},
        net::{AddressFamily, SocketFlags, SocketType, socketpair},
    };

    fn thing() -> impl Strategy<Value = Thing> {
        (vec(any::<u8>(), 0..100), 0_usize..5).prop_map(|(bytes, count)| {
            let open = |_| Arc::new(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
            Thing { bytes, descriptors: (0..count).map(open).collect() }
        })
    }

    fn content(thing: &Thing) -> (Vec<u8>, Vec<u64>) {
        let inode = |fd: &Arc<OwnedFd>| fstat(fd).unwrap().st_ino;
        (thing.bytes.clone(), thing.descriptors.iter().map(inode).collect())
    }

    proptest! {
        #[test]
        fn a_commit_arrives_as_it_was_sent(
            volume in ".{0,20}", forget in vec(".{0,20}", 0..4), set in vec((".{0,20}", thing()), 0..6),
            take in any::<usize>(), answer in option::of(thing()),
        ) {
            let sent = Commit { volume, forget, set, take, answer };
            let kind = SocketType::SEQPACKET;
            let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            let (parts, descriptors) = sent.parts();
            send(a.as_fd(), &Word::Commit(parts), &descriptors).unwrap();
            let Some((Word::Commit(parts), descriptors)) = receive(b.as_fd()).unwrap() else {
                panic!("no commit");
            };
            let got = Commit::from_parts(parts, descriptors).unwrap();
            prop_assert_eq!((&got.volume, &got.forget, got.take), (&sent.volume, &sent.forget, sent.take));
            let all = |commit: &Commit| -> Vec<_> {
                commit.set.iter().map(|(name, thing)| (name.clone(), content(thing))).collect()
            };
            prop_assert_eq!(all(&got), all(&sent));
            prop_assert_eq!(got.answer.as_ref().map(content), sent.answer.as_ref().map(content));
        }
    }

    #[test]
    fn the_longest_commit_fits_into_a_datagram() {
        // A longest body, recorded as JSON, and answered with as much.
        let message =
            super::super::message::Message { request: 24, flags: 1, body: vec![255; 4096] };
        let bytes = serde_json::to_vec(&message).unwrap();
        let thing = Thing { bytes, descriptors: Vec::new() };
        let set = vec![("config".to_owned(), thing)];
        let answer = Some(Thing { bytes: vec![255; 4108], descriptors: Vec::new() });
        let commit = Commit { set, answer, take: 4108, ..Commit::of(&"f".repeat(32)) };
        assert!(serde_json::to_vec(&Word::Commit(commit.parts().0)).unwrap().len() < LONGEST);
    }

    #[test]
    fn descriptors_that_are_missing_are_not_made_up() {
        let thing = Thing {
            bytes: Vec::new(),
            descriptors: vec![Arc::new(memfd_create("test", MemfdFlags::CLOEXEC).unwrap())],
        };
        let commit = Commit { set: vec![("a".to_owned(), thing)], ..Commit::default() };
        assert!(Commit::from_parts(commit.parts().0, Vec::new()).is_none());
    }
}
