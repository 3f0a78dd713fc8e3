//! The driver's side of the relay. The supervisor starts it; where it does not answer, it is waited
//! for a little.

use super::protocol::{Attach, LONGEST_LINE, Relayed, Reply, Request, Status};
use crate::{blocking::blocking, run::RunDir, volume::RunKey};
use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

/// Why the relay did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not answer.
    #[error("reaching the relay at {}", socket.display())]
    Unreachable {
        /// Where it should listen.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It said no.
    #[error("the relay refused: {0}")]
    Refused(String),
}

/// How long a relay that is just starting has until it answers.
const START: Duration = Duration::from_secs(8);

/// How long it may take to answer: what waits for requests in flight takes longest.
const ANSWER: Duration = Duration::from_mins(1);

/// How long one is looked for that may not be there at all.
const MISSING: Duration = Duration::from_secs(1);

/// How often it is tried.
const RETRY: Duration = Duration::from_millis(2);

/// Reaches the relay of one run directory; clones do too.
#[derive(Clone, Debug)]
pub struct Client {
    run: RunDir,
}

impl Client {
    /// A client of the relay on `run`.
    pub fn new(run: RunDir) -> Self {
        Self { run }
    }

    /// Has a volume served, from now on and after every restart.
    pub async fn attach(&self, attach: Attach) -> Result<(), Error> {
        match self.ask(Request::Attach(attach), START).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Has a volume served no more; its front-end is let go.
    pub async fn detach(&self, key: &RunKey) -> Result<(), Error> {
        match self.ask(Request::Detach(key.clone()), MISSING).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Everything it serves.
    pub async fn list(&self) -> Result<Status, Error> {
        match self.ask(Request::List, START).await? {
            Reply::List(status) => Ok(status),
            other => Err(unexpected(other)),
        }
    }

    /// The same, or nothing where no relay answers at once.
    pub async fn look(&self) -> Option<Status> {
        match self.ask(Request::List, Duration::ZERO).await {
            Ok(Reply::List(status)) => Some(status),
            Ok(_) | Err(_) => None,
        }
    }

    /// What a relay that answers at once knows of one volume.
    pub async fn look_at(&self, key: &RunKey) -> Option<Relayed> {
        match self.ask(Request::Look(key.clone()), Duration::ZERO).await {
            Ok(Reply::Volume(volume)) => volume.map(|volume| *volume),
            // It does not know the question yet.
            Ok(Reply::Refused(_)) => {
                self.look().await?.volumes.into_iter().find(|volume| volume.key == *key)
            }
            Ok(_) | Err(_) => None,
        }
    }

    /// All it serves, and blocking.
    pub fn look_now(&self) -> Option<Status> {
        match exchange(&self.run.relay().socket(), &Request::List) {
            Ok(Reply::List(status)) => Some(status),
            Ok(_) | Err(_) => None,
        }
    }

    /// Holds the requests of a volume back, at most so long; returns once none is in flight.
    pub async fn pause(&self, key: &RunKey, most: Duration) -> Result<(), Error> {
        let most_ms = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        match self.ask(Request::Pause { key: key.clone(), most_ms }, START).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Lets them flow again; whether they had been held back until now.
    pub async fn resume(&self, key: &RunKey) -> Result<bool, Error> {
        match self.ask(Request::Resume(key.clone()), START).await? {
            Reply::Resumed(held) => Ok(held),
            other => Err(unexpected(other)),
        }
    }

    /// Moves a volume to another back-end; how long its rings stood still.
    pub async fn switch(&self, key: &RunKey, backend: &Path) -> Result<Duration, Error> {
        let request = Request::Switch { key: key.clone(), backend: backend.to_owned() };
        match self.ask(request, START).await? {
            Reply::Switched(micros) => Ok(Duration::from_micros(micros)),
            other => Err(unexpected(other)),
        }
    }

    /// Replaces the program of the relay under everything that is connected.
    pub async fn upgrade(&self, program: &Path) -> Result<(), Error> {
        match self.ask(Request::Upgrade(program.to_owned()), START).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Every request may be repeated, so one that a dying worker cut off is.
    async fn ask(&self, request: Request, patience: Duration) -> Result<Reply, Error> {
        let socket = self.run.relay().socket();
        blocking(move || {
            let deadline = Instant::now() + patience;
            loop {
                match exchange(&socket, &request) {
                    Ok(reply) => return Ok(reply),
                    Err(source) if Instant::now() >= deadline => {
                        return Err(Error::Unreachable { socket, source });
                    }
                    Err(_) => sleep(RETRY),
                }
            }
        })
        .await
    }
}

fn exchange(socket: &Path, request: &Request) -> io::Result<Reply> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let mut text = serde_json::to_vec(request)?;
    text.push(b'\n');
    (&mut &stream).write_all(&text)?;
    let mut line = String::new();
    BufReader::new(&stream).take(LONGEST_LINE).read_line(&mut line)?;
    if line.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

fn unexpected(reply: Reply) -> Error {
    match reply {
        Reply::Refused(reason) => Error::Refused(reason),
        other => Error::Refused(format!("unexpected {other:?}")),
    }
}
