//! QMP over a Unix socket, safe to cancel.
//!
//! One task owns the socket. A caller that goes away drops only its half of a oneshot: its command
//! still runs, its reply is discarded, and the next command is not disturbed. Every exchange has a
//! deadline, and a line has a bound: a daemon that hangs or babbles costs an error, never a hang.

use serde_json::{Value, json};
use std::{collections::HashMap, io, path::Path, pin::pin, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWriteExt as _},
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};
use tokio_stream::StreamExt as _;
use tokio_util::codec::{FramedRead, LinesCodec};

/// Why a command has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be reached.
    #[error("connecting to the monitor")]
    Connect(#[source] io::Error),
    /// The daemon ended, or what it sent was not QMP.
    #[error("the monitor closed the connection")]
    Closed,
    /// The daemon lives, perhaps, and says nothing.
    #[error("no answer to {command} within {} s", limit.as_secs())]
    Deadline {
        /// The command.
        command: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The daemon said no.
    #[error("{command} refused: {desc}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's own words.
        desc: String,
    },
}

impl Error {
    /// Whether a file could not be shown where something that died has left its own, or died as it
    /// was to be mounted.
    pub fn is_of_mount(&self) -> bool {
        let Self::Refused { desc, .. } = self else { return false };
        desc.starts_with("Failed to mount FUSE session")
            || desc.starts_with("Failed to stat ") && desc.contains("not connected")
    }
}

/// One QMP command.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    /// Its name in the QMP reference.
    pub name: &'static str,
    /// Its arguments, a JSON object.
    pub arguments: Value,
}

impl Command {
    /// A command with these arguments.
    pub fn new(name: &'static str, arguments: Value) -> Self {
        Self { name, arguments }
    }
}

/// The handshake of a daemon that starts well takes some 10 ms; one that lost the start-up race
/// never answers (facts/qsd.md section 1).
pub(super) const HANDSHAKE: Duration = Duration::from_secs(3);

/// The longest command measured on local disks: opening a LUKS layer, half a second (facts/qsd.md
/// section 13). One that changes the graph also waits for requests to a remote master, 5 s and more.
const ANSWER: Duration = Duration::from_secs(10);

/// More than the longest line of QMP we ask for, a list of nodes, could ever have.
pub(super) const LONGEST_LINE: usize = 4 << 20;

/// Commands wait here for the socket; callers are few, as each holds a claim.
const WAITING: usize = 16;

struct Call {
    command: Command,
    reply: oneshot::Sender<Result<Value, String>>,
}

/// A handle to one monitor; clones share it.
#[derive(Clone, Debug)]
pub struct Monitor {
    calls: mpsc::Sender<Call>,
}

impl Monitor {
    /// Connects and negotiates, within `HANDSHAKE`.
    pub async fn connect(socket: &Path) -> Result<Self, Error> {
        let stream = UnixStream::connect(socket).await.map_err(Error::Connect)?;
        let (calls, inbox) = mpsc::channel(WAITING);
        let (read, write) = stream.into_split();
        tokio::spawn(serve(read, write, inbox));
        let monitor = Self { calls };
        let negotiate = Command::new("qmp_capabilities", json!({}));
        monitor.exchange(negotiate, HANDSHAKE).await?;
        Ok(monitor)
    }

    /// Sends a command and waits for its answer, within `ANSWER`.
    pub async fn execute(&self, command: Command) -> Result<Value, Error> {
        self.exchange(command, ANSWER).await
    }

    /// The same with a deadline of its own: an open of a remote disk takes what the server takes.
    pub(super) async fn execute_within(
        &self,
        command: Command,
        limit: Duration,
    ) -> Result<Value, Error> {
        self.exchange(command, limit).await
    }

    /// Sends a command whose answer nobody waits for. What is sent later is answered later.
    pub(super) async fn send(&self, command: Command) -> Result<(), Error> {
        let (reply, _) = oneshot::channel();
        self.calls.send(Call { command, reply }).await.map_err(|_| Error::Closed)
    }

    /// Ends when the connection does.
    pub async fn closed(&self) {
        self.calls.closed().await;
    }

    async fn exchange(&self, command: Command, limit: Duration) -> Result<Value, Error> {
        let (name, begin) = (command.name, Instant::now());
        let exchange = async {
            let (reply, answer) = oneshot::channel();
            self.calls.send(Call { command, reply }).await.map_err(|_| Error::Closed)?;
            let outcome = answer.await.map_err(|_| Error::Closed)?;
            tracing::debug!(command = name, elapsed = ?begin.elapsed(), "answered");
            outcome.map_err(|desc| Error::Refused { command: name, desc })
        };
        let expired = Error::Deadline { command: name, limit };
        timeout(limit, exchange).await.unwrap_or(Err(expired))
    }
}

pub(super) type Waiting = HashMap<u64, oneshot::Sender<Result<Value, String>>>;

/// Owns the socket until the last handle or the daemon is gone.
async fn serve(read: impl AsyncRead, mut write: OwnedWriteHalf, mut inbox: mpsc::Receiver<Call>) {
    let mut lines = pin!(FramedRead::new(read, LinesCodec::new_with_max_length(LONGEST_LINE)));
    let mut waiting = Waiting::new();
    let mut next_id = 0_u64;
    loop {
        tokio::select! {
            call = inbox.recv() => {
                let Some(Call { command: Command { name, arguments }, reply }) = call else { break };
                next_id += 1;
                waiting.retain(|_, reply| !reply.is_closed());
                waiting.insert(next_id, reply);
                let line = json!({ "execute": name, "arguments": arguments, "id": next_id });
                tracing::debug!(command = name, id = next_id, "sent");
                if write.write_all(format!("{line}\n").as_bytes()).await.is_err() { break }
            }
            line = lines.next() => {
                let Some(Ok(line)) = line else { break };
                if hand_out(&line, &mut waiting).is_none() { break }
            }
        }
    }
}

/// Gives one line to who waits for it; `None` where it is no QMP.
pub(super) fn hand_out(line: &str, waiting: &mut Waiting) -> Option<()> {
    let mut message: Value = serde_json::from_str(line).ok()?;
    let message = message.as_object_mut()?;
    let reply = message.get("id").and_then(Value::as_u64).and_then(|id| waiting.remove(&id));
    // The greeting and events have no id; nothing here waits for an event yet.
    let Some(reply) = reply else { return Some(()) };
    let outcome = match message.get("error").map(|error| &error["desc"]) {
        Some(desc) => Err(desc.as_str().unwrap_or("no reason given").to_owned()),
        None => Ok(message.remove("return")?),
    };
    _ = reply.send(outcome); // the caller may have gone
    Some(())
}

#[cfg(test)]
mod test {
    use super::*;

    fn waiting() -> (Waiting, oneshot::Receiver<Result<Value, String>>) {
        let (reply, answer) = oneshot::channel();
        (Waiting::from([(7, reply)]), answer)
    }

    #[test]
    fn an_answer_reaches_who_asked() {
        let (mut all, mut answer) = waiting();
        assert!(hand_out(r#"{"return":{"a":1},"id":7}"#, &mut all).is_some());
        assert_eq!(answer.try_recv().unwrap(), Ok(json!({ "a": 1 })));
        let (mut all, mut answer) = waiting();
        let line = r#"{"id":7,"error":{"class":"GenericError","desc":"busy"}}"#;
        assert!(hand_out(line, &mut all).is_some());
        assert_eq!(answer.try_recv().unwrap(), Err("busy".to_owned()));
    }

    #[test]
    fn what_nobody_waits_for_is_passed_over() {
        let (mut all, _answer) = waiting();
        for line in [r#"{"QMP":{}}"#, r#"{"event":"X","data":{}}"#, r#"{"return":{},"id":9}"#] {
            assert!(hand_out(line, &mut all).is_some());
        }
        assert_eq!(all.len(), 1);
    }

    #[test]
    fn what_is_no_qmp_ends_the_connection() {
        let (mut all, _answer) = waiting();
        for line in ["", "{", "[]", "7", r#"{"id":7}"#] {
            assert!(hand_out(line, &mut all).is_none(), "{line}");
        }
    }
}
