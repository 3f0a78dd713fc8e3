//! Messages on sockets, with their descriptors.
//!
//! A front-end's message is first only looked at (`peek`): it stays in the socket until all that
//! follows from it is safe, so a worker that dies half-way loses nothing. Descriptors come with the
//! first byte of a message.

use super::message::{HEADER, Header, LONGEST_BODY, MOST_DESCRIPTORS, Message, Refused};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

/// Room for as many descriptors as the kernel passes at once (`SCM_MAX_FD`): those that find none
/// would be closed right there, in whoever looks.
const MOST: usize = 253;

/// Why nothing was received.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the other side is gone")]
    Gone,
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("descriptors were cut off")]
    Truncated,
    #[error("{0} descriptors in one message")]
    TooMany(usize),
    #[error("it did not answer in time")]
    Deadline,
    #[error(transparent)]
    Io(io::Error),
}

/// What was received, and the descriptors that came with it.
pub(super) type Received = (Message, Vec<OwnedFd>);

/// Bytes and descriptors of one `recvmsg`.
struct Chunk {
    length: usize,
    descriptors: Vec<OwnedFd>,
}

/// Looks at the next message without taking it; none as long as it is not there whole.
///
/// The kernel ends a look behind the first send that came with descriptors, and does not say which
/// of the sends looked at that was. A message is one send, or its beginning is: so descriptors that
/// come with bytes of the next message are of that one, and will come again with it.
pub(super) fn peek(socket: BorrowedFd<'_>) -> Result<Option<Received>, Error> {
    rewind_peeking(socket)?;
    let mut bytes = vec![0; HEADER + LONGEST_BODY + 1];
    let Some(first) = peek_chunk(socket, &mut bytes)? else { return Ok(None) };
    let mut there = first.length;
    loop {
        if let Some(header) = bytes[..there].first_chunk() {
            let header = Header::parse(header)?;
            let length = HEADER + header.size;
            if there >= length {
                let body = bytes[HEADER..length].to_vec();
                let message = Message { request: header.request, flags: header.flags, body };
                let own = if first.length <= length { first.descriptors } else { Vec::new() };
                return Ok(Some((message, own)));
            }
        }
        let Some(more) = peek_chunk(socket, &mut bytes[there..])? else { return Ok(None) };
        there += more.length;
    }
}

/// Takes so many bytes, and drops them. They must be there. The descriptors with them are for the
/// caller to close.
pub(super) fn take(socket: BorrowedFd<'_>, length: usize) -> Result<Vec<OwnedFd>, Error> {
    let mut rest = vec![0; length];
    let mut taken = 0;
    let mut descriptors = Vec::new();
    while taken < length {
        let chunk = receive_chunk(socket, &mut rest[taken..], RecvFlags::DONTWAIT)?;
        taken += chunk.length;
        descriptors.extend(chunk.descriptors);
    }
    Ok(descriptors)
}

/// Receives one message within so long, or twice that: the socket has a limit of its own for each
/// part that comes.
pub(super) fn receive(socket: BorrowedFd<'_>, limit: Duration) -> Result<Received, Error> {
    let deadline = Instant::now() + limit;
    let mut header = [0; HEADER];
    let descriptors = receive_full(socket, &mut header, deadline)?;
    let header = Header::parse(&header)?;
    let mut body = vec![0; header.size];
    receive_full(socket, &mut body, deadline)?;
    Ok((Message { request: header.request, flags: header.flags, body }, descriptors))
}

/// Sends one message; the socket's own time limit is the deadline.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptors: &[impl AsFd],
) -> Result<(), Error> {
    send_bytes(socket, &message.bytes(), descriptors, SendFlags::empty())
}

/// Sends one message or fails at once: nobody waits for a peer that does not read.
pub(super) fn send_now(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[impl AsFd],
) -> Result<(), Error> {
    send_bytes(socket, bytes, descriptors, SendFlags::DONTWAIT)
}

fn send_bytes(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[impl AsFd],
    flags: SendFlags,
) -> Result<(), Error> {
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Error::TooMany(descriptors.len()));
    }
    let flags = flags | SendFlags::NOSIGNAL;
    let sent = loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    // The peer of a stream that takes only a part has stopped reading.
    if sent == bytes.len() { Ok(()) } else { Err(Error::Deadline) }
}

/// What is there behind the last look, if anything is.
fn peek_chunk(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Option<Chunk>, Error> {
    match receive_chunk(socket, buffer, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok(chunk) => Ok(Some(chunk)),
        Err(Error::Deadline) => Ok(None),
        Err(error) => Err(error),
    }
}

fn receive_full(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    deadline: Instant,
) -> Result<Vec<OwnedFd>, Error> {
    let mut descriptors = Vec::new();
    let mut length = 0;
    while length < buffer.len() {
        if Instant::now() > deadline {
            return Err(Error::Deadline);
        }
        let chunk = receive_chunk(socket, &mut buffer[length..], RecvFlags::empty())?;
        descriptors.extend(chunk.descriptors);
        length += chunk.length;
    }
    Ok(descriptors)
}

fn receive_chunk(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> Result<Chunk, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Err(Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::Truncated);
    }
    if descriptors.len() > MOST_DESCRIPTORS {
        return Err(Error::TooMany(descriptors.len()));
    }
    if received.bytes == 0 {
        return Err(Error::Gone);
    }
    Ok(Chunk { length: received.bytes, descriptors })
}

/// Where the next look would begin. Whoever takes bytes, in whichever process, moves it back by as
/// many: so the difference to an earlier answer, with no look between, is what was taken.
#[expect(unsafe_code, reason = "no crate of ours has SO_PEEK_OFF")]
pub(super) fn looked(socket: BorrowedFd<'_>) -> Result<usize, Error> {
    let mut offset: libc::c_int = 0;
    let mut size = INT_SIZE;
    // SAFETY: the descriptor is open for as long as it is borrowed; the kernel writes one int, of
    // the size we say, to a local variable, and its size to another, and keeps no pointer to them.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw mut offset).cast(),
            &raw mut size,
        )
    };
    if outcome == 0 {
        return Ok(usize::try_from(offset).unwrap_or_default());
    }
    Err(Error::Io(io::Error::last_os_error()))
}

/// The next look begins at the first byte that was not taken, wherever the last one ended.
#[expect(unsafe_code, reason = "no crate of ours has SO_PEEK_OFF")]
fn rewind_peeking(socket: BorrowedFd<'_>) -> Result<(), Error> {
    let offset: libc::c_int = 0;
    // SAFETY: the descriptor is open for as long as it is borrowed; the kernel reads one int, of
    // the size we say, from a local variable, and keeps no pointer to it.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const offset).cast(),
            INT_SIZE,
        )
    };
    if outcome == 0 { Ok(()) } else { Err(Error::Io(io::Error::last_os_error())) }
}

/// The size of a C int, as `setsockopt` wants to be told.
const INT_SIZE: libc::socklen_t = 4;

impl From<Errno> for Error {
    fn from(error: Errno) -> Self {
        match error {
            Errno::AGAIN | Errno::TIMEDOUT => Self::Deadline,
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Self::Gone,
            other => Self::Io(other.into()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::super::{backend::NOTHING, message::Code};
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use rustix::fs::{MemfdFlags, fstat, memfd_create};
    use std::os::unix::net::UnixStream;

    fn inodes(descriptors: &[OwnedFd]) -> Vec<u64> {
        descriptors.iter().map(|fd| fstat(fd).unwrap().st_ino).collect()
    }

    proptest! {
        #[test]
        fn every_message_is_seen_whole_and_with_its_own_descriptors(
            messages in vec((0_usize..80, 0_usize..4, vec(1_usize..30, 0..4)), 1..6),
        ) {
            let (front, back) = UnixStream::pair().unwrap();
            let mut seen = Vec::new();
            let mut sent = Vec::new();
            let mut see = || while let Some((message, descriptors)) = peek(back.as_fd()).unwrap() {
                take(back.as_fd(), message.bytes().len()).unwrap();
                seen.push((message, inodes(&descriptors)));
            };
            for (index, (size, count, cuts)) in messages.into_iter().enumerate() {
                let body = vec![u8::try_from(index).unwrap(); size];
                let message = Message::new(Code::SetMemTable, body);
                let open = |_| memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
                let mut descriptors: Vec<_> = (0..count).map(open).collect();
                let bytes = message.bytes();
                let mut rest = bytes.as_slice();
                sent.push((message, inodes(&descriptors)));
                for cut in cuts {
                    let (part, others) = rest.split_at(cut.min(rest.len()));
                    rest = others;
                    if !part.is_empty() {
                        send_now(front.as_fd(), part, &std::mem::take(&mut descriptors)).unwrap();
                        if index % 2 == 0 {
                            see();
                        }
                    }
                }
                if !rest.is_empty() {
                    send_now(front.as_fd(), rest, &descriptors).unwrap();
                }
            }
            see();
            prop_assert_eq!(seen, sent);
            prop_assert!(peek(back.as_fd()).unwrap().is_none());
        }

        #[test]
        fn whatever_comes_is_a_message_or_an_error(bytes in vec(any::<u8>(), 1..6000)) {
            let (front, back) = UnixStream::pair().unwrap();
            let none: &[OwnedFd] = &[];
            send_now(front.as_fd(), &bytes, none).unwrap();
            if let Ok(Some((message, _))) = peek(back.as_fd()) {
                prop_assert!(bytes.starts_with(&message.bytes()));
            }
        }
    }

    #[test]
    fn what_somebody_else_takes_can_be_told() {
        let (front, back) = UnixStream::pair().unwrap();
        let other = back.try_clone().unwrap();
        let message = Message::number(Code::SetFeatures, 7);
        for _ in 0..3 {
            send(front.as_fd(), &message, NOTHING).unwrap();
        }
        peek(back.as_fd()).unwrap();
        let before = looked(back.as_fd()).unwrap();
        send(front.as_fd(), &message, NOTHING).unwrap();
        assert_eq!(looked(back.as_fd()).unwrap(), before);
        take(other.as_fd(), 7).unwrap();
        assert_eq!(before - looked(back.as_fd()).unwrap(), 7);
        take(other.as_fd(), 13).unwrap();
        assert_eq!(before - looked(back.as_fd()).unwrap(), 20);
    }

    #[test]
    fn the_end_of_the_other_side_shows_behind_its_last_message() {
        let (front, back) = UnixStream::pair().unwrap();
        let message = Message::number(Code::SetFeatures, 7);
        send(front.as_fd(), &message, NOTHING).unwrap();
        drop(front);
        assert_eq!(peek(back.as_fd()).unwrap().unwrap().0, message);
        take(back.as_fd(), message.bytes().len()).unwrap();
        assert!(matches!(peek(back.as_fd()), Err(Error::Gone)));
    }
}
