//! The driver's side of the supervisor: asks it, and starts one where none answers.

use super::protocol::{
    Exit, Greeting, LONGEST_LINE, Process, Reply, Request, Signal, Spawn, VERSION,
};
use crate::run::{DaemonKey, RunDir};
use futures_util::SinkExt as _;
use serde::de::DeserializeOwned;
use std::{
    fs::OpenOptions,
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{
    net::UnixStream,
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};
use tokio_stream::StreamExt as _;
use tokio_util::codec::{Framed, LinesCodec, LinesCodecError};
use tracing::info;

/// Why the supervisor did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be reached, and none could be started.
    #[error("reaching the supervisor at {}", socket.display())]
    Unreachable {
        /// Where it should listen.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It closed the connection, or what it sent makes no sense.
    #[error("the supervisor broke off: {0}")]
    Broken(String),
    /// It says nothing.
    #[error("the supervisor did not answer within {} s", .0.as_secs())]
    Deadline(Duration),
    /// It is of another version.
    #[error(
        "the supervisor speaks version {0} of its protocol, and this driver version {VERSION}; \
         restart it"
    )]
    Version(u32),
    /// It said no.
    #[error("the supervisor refused: {0}")]
    Refused(String),
}

/// How long a supervisor that was just started has until it answers: it only locks and listens,
/// and may have to wait for its predecessor (`server::PREDECESSOR`).
const START: Duration = Duration::from_secs(8);

/// How long it may take to answer: a spawn takes some milliseconds, some hundred at once a second.
const ANSWER: Duration = Duration::from_secs(10);

/// How often a place where nobody listens yet is tried.
const RETRY: Duration = Duration::from_millis(2);

/// Reaches the supervisor of one run directory; clones do too.
#[derive(Clone, Debug)]
pub struct Client {
    run: RunDir,
    /// This program, whose subcommand `supervisor` it is.
    program: PathBuf,
}

/// A connection that only carries exits.
pub struct Exits(Framed<UnixStream, LinesCodec>);

impl Client {
    /// A client of the supervisor on `run`; `program` is started as one where none answers.
    pub fn new(run: RunDir, program: PathBuf) -> Self {
        Self { run, program }
    }

    /// Starts a daemon; its process id.
    pub async fn spawn(&self, spawn: Spawn) -> Result<i32, Error> {
        match self.ask(Request::Spawn(spawn)).await? {
            Reply::Spawned { pid } => Ok(pid),
            other => Err(unexpected(other)),
        }
    }

    /// All daemons.
    pub async fn list(&self) -> Result<Vec<Process>, Error> {
        match self.ask(Request::List).await? {
            Reply::List(all) => Ok(all),
            other => Err(unexpected(other)),
        }
    }

    /// Ends a daemon at once, and waits until it is gone. None by this key is fine.
    pub async fn kill(&self, key: &DaemonKey) -> Result<(), Error> {
        self.done(Request::Signal { key: key.clone(), signal: Signal::Kill }).await?;
        self.wait(key).await?;
        self.done(Request::Forget(key.clone())).await
    }

    /// Lets a daemon flush and end, and waits until it is gone; one that does not end in time is
    /// killed.
    pub async fn terminate(&self, key: &DaemonKey, limit: Duration) -> Result<(), Error> {
        self.done(Request::Signal { key: key.clone(), signal: Signal::Terminate }).await?;
        _ = timeout(limit, self.wait(key)).await;
        self.kill(key).await
    }

    /// Waits until the daemon is gone.
    pub async fn wait(&self, key: &DaemonKey) -> Result<(), Error> {
        self.done(Request::Wait(key.clone())).await
    }

    /// The exits from now on. Starts a supervisor if none answers.
    pub async fn watch(&self) -> Result<Exits, Error> {
        let deadline = Instant::now() + START;
        let mut lines = loop {
            match self.connect().await {
                // None, or one that is just ending.
                Err(Error::Unreachable { .. } | Error::Broken(_)) if Instant::now() < deadline => {}
                outcome => break outcome?,
            }
            let mut child = self.start()?;
            tokio::select! {
                connected = self.connect_until(deadline) => {
                    tokio::spawn(async move { child.wait().await }); // or it would stay as a zombie
                    break connected?;
                }
                _ = child.wait() => sleep(RETRY).await, // it died at its start
            }
        };
        match exchange(&mut lines, Request::Watch).await? {
            Reply::Done => Ok(Exits(lines)),
            other => Err(unexpected(other)),
        }
    }

    async fn done(&self, request: Request) -> Result<(), Error> {
        match self.ask(request).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Asks on a connection of its own. Whoever watches restarts a supervisor that is gone, so it
    /// is waited for.
    async fn ask(&self, request: Request) -> Result<Reply, Error> {
        let mut lines = self.connect_until(Instant::now() + START).await?;
        exchange(&mut lines, request).await
    }

    async fn connect_until(
        &self,
        deadline: Instant,
    ) -> Result<Framed<UnixStream, LinesCodec>, Error> {
        loop {
            match self.connect().await {
                Err(Error::Unreachable { .. } | Error::Broken(_)) if Instant::now() < deadline => {
                    sleep(RETRY).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn connect(&self) -> Result<Framed<UnixStream, LinesCodec>, Error> {
        let socket = self.run.supervisor_socket();
        let stream = UnixStream::connect(&socket).await;
        let stream = stream.map_err(|source| Error::Unreachable { socket, source })?;
        let mut lines = Framed::new(stream, LinesCodec::new_with_max_length(LONGEST_LINE));
        let greeting: Greeting = within(ANSWER, receive(&mut lines)).await?;
        if greeting.version != VERSION {
            return Err(Error::Version(greeting.version));
        }
        Ok(lines)
    }

    /// Starts a supervisor that belongs to nobody: it goes on when this process ends.
    fn start(&self) -> Result<Child, Error> {
        let start = || {
            let mut log = OpenOptions::new();
            let log = log.create(true).append(true).mode(0o600).open(self.run.supervisor_log())?;
            // A program that was replaced by an upgrade can still be started as what runs here.
            let own = Path::new("/proc/self/exe");
            let program = if self.program.exists() { &self.program } else { own };
            let child = Command::new(program)
                .arg("supervisor")
                .arg("--run-dir")
                .arg(self.run.path())
                .current_dir("/")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::from(log))
                .kill_on_drop(false)
                .spawn()?;
            info!(pid = child.id(), "supervisor started");
            Ok(child)
        };
        let socket = self.run.supervisor_socket();
        start().map_err(|source| Error::Unreachable { socket, source })
    }
}

impl Exits {
    /// The next exit; an error once the supervisor is gone.
    pub async fn next(&mut self) -> Result<Exit, Error> {
        receive(&mut self.0).await
    }
}

async fn exchange(
    lines: &mut Framed<UnixStream, LinesCodec>,
    request: Request,
) -> Result<Reply, Error> {
    let text = serde_json::to_string(&request).expect("a request is plain data");
    let limit = ANSWER;
    within(limit, async {
        lines.send(text).await.map_err(|error| broken(&error))?;
        receive(lines).await
    })
    .await
}

async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    timeout(limit, work).await.unwrap_or(Err(Error::Deadline(limit)))
}

async fn receive<T: DeserializeOwned>(
    lines: &mut Framed<UnixStream, LinesCodec>,
) -> Result<T, Error> {
    let line = lines.next().await.ok_or_else(|| Error::Broken("no more input".to_owned()))?;
    serde_json::from_str(&line.map_err(|error| broken(&error))?)
        .map_err(|error| Error::Broken(error.to_string()))
}

fn broken(error: &LinesCodecError) -> Error {
    Error::Broken(error.to_string())
}

fn unexpected(reply: Reply) -> Error {
    match reply {
        Reply::Refused(reason) => Error::Refused(reason),
        reply @ (Reply::Spawned { .. } | Reply::List(_) | Reply::Done) => {
            Error::Broken(format!("unexpected {reply:?}"))
        }
    }
}
