//! A back-end that misbehaves at a chosen step: a fake, at our own seam.

use super::{
    front::{
        Front, GET_CONFIG, GET_FEATURES, GET_INFLIGHT, GET_MAX_MEM_SLOTS, GET_PROTOCOL,
        GET_QUEUE_NUM, GET_VRING_BASE, NEED_REPLY, PLAIN, REPLY, SET_BACKEND_REQ_FD, body, message,
        sealed, shape,
    },
    process::until,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::{
    fs,
    io::{IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{JoinHandle, sleep},
    time::Duration,
};

/// What it does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// It answers as it should.
    Good,
    /// It closes the connection.
    Close,
    /// It answers what was not asked.
    Garbage,
    /// It says nothing.
    Silent,
    /// It answers so slowly that every single wait is short.
    Dribble,
    /// It begins a message on the channel for changes and does not end it.
    HalfWord,
}

/// A back-end that answers well until a request with this number, and then in this manner.
pub(crate) struct Fake {
    path: PathBuf,
    ended: Arc<AtomicBool>,
    pub(crate) connections: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    pub(crate) fn start(path: &Path, request: u32, manner: Manner) -> Self {
        _ = fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(AtomicU32::new(0));
        let (over, count) = (ended.clone(), connections.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                count.fetch_add(1, Ordering::SeqCst);
                _ = converse(stream.unwrap(), request, manner, &over);
            }
        });
        Self { path: path.to_owned(), ended, connections, thread: Some(thread) }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        _ = UnixStream::connect(&self.path);
        let thread = self.thread.take().unwrap();
        until("the fake ends", || thread.is_finished());
        _ = fs::remove_file(&self.path);
    }
}

fn converse(
    stream: UnixStream,
    bad: u32,
    manner: Manner,
    over: &AtomicBool,
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_millis(20)))?;
    let front = Front { socket: stream };
    let mut channel = None;
    while !over.load(Ordering::SeqCst) {
        let Some((request, flags, asked, descriptors)) = next(&front.socket, over)? else {
            return Ok(());
        };
        if request == SET_BACKEND_REQ_FD {
            channel = descriptors.into_iter().next().map(UnixStream::from);
        }
        let manner = if request == bad { manner } else { Manner::Good };
        let mut socket = &front.socket;
        match manner {
            Manner::Good => {}
            Manner::Close => return Ok(()),
            Manner::Garbage => {
                front.say(99, PLAIN | REPLY, &[7; 40], &[]);
                continue;
            }
            Manner::Silent => continue,
            Manner::Dribble => {
                let answer = message(request, PLAIN | REPLY, &[0; 4000]);
                for byte in answer {
                    if over.load(Ordering::SeqCst) {
                        return Ok(());
                    }
                    socket.write_all(&[byte])?;
                    sleep(Duration::from_millis(500));
                }
                continue;
            }
            Manner::HalfWord => {
                if let Some(mut channel) = channel.as_ref() {
                    channel.write_all(&[2, 0, 0, 0, 1])?;
                }
            }
        }
        let answer = match request {
            GET_FEATURES => body(&[1 << 32 | 1 << 30]),
            GET_PROTOCOL => body(&[0x8f2b]),
            GET_QUEUE_NUM => body(&[64]),
            GET_MAX_MEM_SLOTS => body(&[32]),
            GET_CONFIG | GET_VRING_BASE => asked,
            GET_INFLIGHT => {
                let size = 64 * (16448);
                let file = sealed(size);
                front.say(request, PLAIN | REPLY, &shape(size, 64, 1024), &[&file]);
                continue;
            }
            _ if flags & NEED_REPLY != 0 => vec![0; 8],
            _ => continue,
        };
        front.say(request, PLAIN | REPLY, &answer, &[]);
    }
    Ok(())
}

type Message = (u32, u32, Vec<u8>, Vec<OwnedFd>);

fn next(mut socket: &UnixStream, over: &AtomicBool) -> std::io::Result<Option<Message>> {
    let mut header = [0; 12];
    let mut descriptors = Vec::new();
    let received = loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut header)];
        match recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::AGAIN) if !over.load(Ordering::SeqCst) => {}
            Err(error) => return Err(error.into()),
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = message {
                        descriptors.extend(rights);
                    }
                }
                break received.bytes;
            }
        }
    };
    if received < header.len() {
        return Ok(None); // the relay sends a message at once
    }
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; word(8).try_into().unwrap()];
    socket.read_exact(&mut body)?;
    Ok(Some((word(0), word(4), body, descriptors)))
}
