//! The self-test against a real daemon, as it is and with one thing spoiled on the way to it, and
//! against back-ends that are none.

use super::*;
use crate::relay::{
    backend::NOTHING,
    wire::{self, Received},
};
use std::{
    fs::File,
    os::{
        fd::AsFd as _,
        unix::{
            fs::FileExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
};

/// A storage daemon with the disk that the self-test wants; it ends with the value.
struct Daemon {
    process: Child,
    scratch: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let scratch = tempfile::Builder::new().prefix("qsd-").tempdir().unwrap();
        let socket = scratch.path().join("vhost.sock");
        let limits = format!(r#""limits": {{"iops-total": {REQUESTS_PER_SECOND}}}"#);
        let process = Command::new(program())
            .arg("--object")
            .arg(format!(r#"{{"qom-type": "throttle-group", "id": "tg", {limits}}}"#))
            .arg("--blockdev")
            .arg(
                r#"{"driver": "throttle", "node-name": "top", "throttle-group": "tg",
                    "file": {"driver": "null-co", "size": 1048576, "read-zeroes": true}}"#,
            )
            .arg("--export")
            .arg(format!(
                r#"{{"type": "vhost-user-blk", "id": "vu", "node-name": "top", "writable": true,
                    "num-queues": 64,
                    "addr": {{"type": "unix", "path": "{}"}}}}"#,
                socket.display()
            ))
            .arg("--pidfile") // written once it listens
            .arg(scratch.path().join("pid"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while !scratch.path().join("pid").exists() {
            assert!(begin.elapsed() < Duration::from_secs(20), "the daemon does not start");
            sleep(Duration::from_millis(2));
        }
        Self { process, scratch }
    }

    fn socket(&self) -> PathBuf {
        self.scratch.path().join("vhost.sock")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// `QSD_CSI_TEST_QSD` names one of another version.
fn program() -> PathBuf {
    let own = std::env::var_os("QSD_CSI_TEST_QSD").map(PathBuf::from);
    let deps = || {
        let deps = std::env::var_os("QSD_CSI_DEPS").map(PathBuf::from);
        deps.unwrap_or_else(|| std::env::home_dir().unwrap().join(".cache/qsd-csi"))
    };
    let program = own.unwrap_or_else(|| deps().join("bin/qemu-storage-daemon"));
    assert!(program.exists(), "{} is missing; run `make setup`", program.display());
    program
}

/// What becomes of a message on its way to the daemon.
enum Fate {
    Pass,
    /// It is acknowledged, and does not arrive.
    Swallow,
    /// These bits are added to the answer.
    Offer(u64),
}

/// A back-end in front of another one, which sees every message of every connection, counted from
/// 1 by kind, before the daemon does.
fn spoiled(
    backend: PathBuf,
    mut spoil: impl FnMut(u32, (Code, u32), &mut Received) -> Fate + Send + 'static,
) -> (tempfile::TempDir, PathBuf) {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("spoiled.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for (connection, front) in (1..).zip(listener.incoming()) {
            let (front, back) = (front.unwrap(), UnixStream::connect(&backend).unwrap());
            let mut seen = Vec::new();
            while let Ok(mut received) = wire::receive(front.as_fd(), LIMIT) {
                let number = received.0.request;
                seen.push(number);
                let count = seen.iter().filter(|one| **one == number).count();
                let is_get = |code: &Code| code.number() == number;
                let kind = (code_of(number), u32::try_from(count).unwrap());
                let question = received.0.clone();
                let fate = spoil(connection, kind, &mut received);
                if let Fate::Swallow = fate {
                    let reply = question.reply(vec![0; 8]);
                    wire::send_now(front.as_fd(), &reply.bytes(), NOTHING).unwrap();
                    continue;
                }
                wire::send(back.as_fd(), &received.0, &received.1).unwrap();
                if question.needs_reply() || GETTERS.iter().any(is_get) {
                    let Ok((mut reply, descriptors)) = wire::receive(back.as_fd(), LIMIT) else {
                        break;
                    };
                    if let Fate::Offer(bits) = fate {
                        let all = reply.as_number().unwrap() | bits;
                        reply = reply.reply(all.to_le_bytes().to_vec());
                    }
                    if wire::send(front.as_fd(), &reply, &descriptors).is_err() {
                        break;
                    }
                }
            }
        }
    });
    (scratch, path)
}

const GETTERS: [Code; 5] = [
    Code::GetFeatures,
    Code::GetProtocolFeatures,
    Code::GetQueueNum,
    Code::GetMaxMemSlots,
    Code::GetInflightFd,
];

fn code_of(number: u32) -> Code {
    let setters = [
        Code::SetOwner,
        Code::SetProtocolFeatures,
        Code::SetBackendReqFd,
        Code::SetFeatures,
        Code::SetMemTable,
        Code::SetInflightFd,
        Code::SetVringNum,
        Code::SetVringBase,
        Code::SetVringAddr,
        Code::SetVringCall,
        Code::SetVringKick,
        Code::SetVringEnable,
    ];
    let mut all = GETTERS.into_iter().chain(setters);
    all.find(|code| code.number() == number).unwrap()
}

/// What the self-test says of a daemon whose messages are spoiled.
fn verdict(
    spoil: impl FnMut(u32, (Code, u32), &mut Received) -> Fate + Send + 'static,
) -> Result<(), String> {
    let daemon = Daemon::start();
    let (_scratch, socket) = spoiled(daemon.socket(), spoil);
    let begin = Instant::now();
    let outcome = self_test(&socket);
    assert!(begin.elapsed() < LIMIT + Duration::from_secs(1), "{outcome:?}");
    outcome
}

fn silent() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Overwrites the version of the first ring in an inflight buffer.
fn set_version(buffer: Option<&File>, version: u16) {
    buffer.unwrap().write_all_at(&version.to_le_bytes(), 8).unwrap();
}

#[test]
fn the_daemon_we_install_passes() {
    let daemon = Daemon::start();
    for _ in 0..3 {
        assert_eq!(self_test(&daemon.socket()), Ok(()));
    }
}

#[test]
fn it_passes_with_every_message_passed_on() {
    assert_eq!(verdict(|_, _, _| Fate::Pass), Ok(()));
}

#[test]
fn it_passes_where_the_feature_is_offered() {
    let outcome = verdict(|_, (code, _), _| match code {
        Code::GetProtocolFeatures => Fate::Offer(protocol::INFLIGHT_SHMFD),
        _ => Fate::Pass,
    });
    assert_eq!(outcome, Ok(()));
}

#[test]
fn a_feature_that_is_ignored_is_seen() {
    let outcome = verdict(|_, (code, _), (message, _)| {
        if code == Code::SetProtocolFeatures {
            let taken = message.as_number().unwrap() & !protocol::INFLIGHT_SHMFD;
            *message = Message::number(code, taken);
        }
        Fate::Pass
    });
    assert_eq!(outcome.unwrap_err(), "requests in flight are not noted in the inflight buffer");
}

#[test]
fn a_ring_that_cannot_be_parked_is_seen() {
    let outcome = verdict(|_, kind, _| match kind {
        (Code::SetVringKick, 2) => Fate::Swallow,
        _ => Fate::Pass,
    });
    assert_eq!(outcome.unwrap_err(), "requests are fetched from a parked ring");
}

#[test]
fn a_request_that_parking_repeats_is_seen() {
    let mut buffer = None;
    let outcome = verdict(move |_, kind, (_, descriptors)| {
        match kind {
            (Code::SetInflightFd, _) => {
                buffer = Some(File::from(descriptors[0].try_clone().unwrap()));
            }
            (Code::SetVringKick, 2) => set_version(buffer.as_ref(), 1),
            _ => {}
        }
        Fate::Pass
    });
    let why = outcome.unwrap_err();
    assert!(why.contains("done twice") || why.contains("parked"), "{why}");
}

#[test]
fn a_lost_interrupt_is_seen() {
    let outcome = verdict(|_, (code, _), (_, descriptors)| {
        if code == Code::SetVringCall {
            descriptors[0] = silent();
        }
        Fate::Pass
    });
    assert_eq!(outcome.unwrap_err(), "requests end without an interrupt while parked");
}

#[test]
fn a_ring_that_stays_parked_is_seen() {
    let outcome = verdict(|_, kind, _| match kind {
        (Code::SetVringKick, 3) => Fate::Swallow,
        _ => Fate::Pass,
    });
    assert_eq!(outcome.unwrap_err(), "requests are not fetched after their ring was parked");
}

#[test]
fn a_buffer_that_is_not_taken_up_is_seen() {
    let mut buffer = None;
    let outcome = verdict(move |connection, kind, (_, descriptors)| {
        match kind {
            (Code::SetInflightFd, _) => {
                buffer = Some(File::from(descriptors[0].try_clone().unwrap()));
            }
            (Code::SetVringKick, _) if connection == 2 => set_version(buffer.as_ref(), 0),
            _ => {}
        }
        Fate::Pass
    });
    let why = outcome.unwrap_err();
    assert!(why.contains("done twice"), "{why}");
}

#[test]
fn a_beginning_where_the_used_ring_ends_is_seen() {
    let outcome = verdict(|connection, (code, _), (_, descriptors)| {
        if connection == 2 && code == Code::SetInflightFd {
            let buffer = File::from(descriptors[0].try_clone().unwrap());
            buffer.write_all_at(&[0; 16 * 256], 16).unwrap(); // nothing is noted
        }
        Fate::Pass
    });
    assert!(outcome.unwrap_err().contains("done twice"));
}

#[test]
fn a_back_end_that_refuses_the_feature_is_told_from_a_dead_one() {
    let refusing = |stream: UnixStream| {
        while let Ok((message, _)) = wire::receive(stream.as_fd(), LIMIT) {
            let number = match code_of(message.request) {
                Code::SetProtocolFeatures => {
                    let taken = message.as_number().unwrap();
                    if taken & protocol::INFLIGHT_SHMFD != 0 {
                        return; // as libvhost-user does with what it does not like
                    }
                    continue;
                }
                Code::GetFeatures => FEATURES,
                Code::GetProtocolFeatures => protocol::REPLY_ACK | protocol::BACKEND_REQ,
                _ => continue,
            };
            let reply = message.reply(number.to_le_bytes().to_vec());
            wire::send_now(stream.as_fd(), &reply.bytes(), NOTHING).unwrap();
        }
    };
    let (outcome, _) = against(refusing);
    let why = outcome.unwrap_err();
    assert!(why.starts_with("the protocol feature INFLIGHT_SHMFD is not accepted"), "{why}");
}

#[test]
fn a_back_end_that_never_answers_is_given_up() {
    let (outcome, time) = against(|stream| {
        sleep(Duration::from_secs(10));
        drop(stream);
    });
    assert!(outcome.unwrap_err().starts_with("the export does not answer"));
    assert!(time < LIMIT + Duration::from_secs(1), "{time:?}");
}

#[test]
fn a_back_end_that_dawdles_is_given_up() {
    let (outcome, time) = against(|stream| {
        while let Ok((message, _)) = wire::receive(stream.as_fd(), LIMIT) {
            if GETTERS.contains(&code_of(message.request)) {
                sleep(STEP * 4 / 5);
                let reply = message.reply(u64::MAX.to_le_bytes().to_vec());
                _ = wire::send_now(stream.as_fd(), &reply.bytes(), NOTHING);
            }
        }
    });
    assert_eq!(outcome.unwrap_err(), "the self-test did not end within 5s");
    assert!(time < LIMIT + Duration::from_secs(1), "{time:?}");
}

#[test]
fn a_back_end_that_closes_is_given_up_at_once() {
    let (outcome, time) = against(drop);
    assert!(outcome.unwrap_err().starts_with("the export does not answer"));
    assert!(time < Duration::from_secs(1), "{time:?}");
}

#[test]
fn no_back_end_at_all_is_an_error() {
    let outcome = self_test(Path::new("/nonexistent/vhost.sock"));
    assert!(outcome.unwrap_err().starts_with("the export does not answer"));
}

/// The self-test against a back-end that treats connections so, and how long it took.
fn against(serve: impl Fn(UnixStream) + Send + 'static) -> (Result<(), String>, Duration) {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("fake.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(|stream| serve(stream.unwrap())));
    let begin = Instant::now();
    (self_test(&path), begin.elapsed())
}
