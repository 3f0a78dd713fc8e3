//! The worker: the process that speaks for all volumes, and may end at any time.
//!
//! What it serves is noted in `RUN/<key>/relay.json`, so that a relay of which nothing is left
//! listens again where the last one did.

use super::{
    keep::Keep,
    kept::Commit,
    protocol::{Attach, LONGEST_LINE, Reply, Request, Status},
    volume::{Order, Volume},
};
use crate::{bound::Bound, chain::Chain, run::RunDir, store, volume::RunKey};
use anyhow::Context as _;
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, OpenOptionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::sleep,
    time::{Duration, Instant},
};
use tracing::{error, info, warn};

/// How long it waits for its predecessor, which lets go within milliseconds of its end.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// How often it looks whether its run directory is still there.
const ROUND: Duration = Duration::from_secs(1);

/// How long an order may take: parking waits for requests in flight.
const ORDER: Duration = Duration::from_secs(50);

/// How long a client may be silent, or not read.
const CLIENT: Duration = Duration::from_mins(1);

#[derive(Clone)]
struct Worker {
    run: RunDir,
    keep: Keep,
    volumes: Arc<Mutex<BTreeMap<RunKey, Volume>>>,
    lock: Arc<File>,
}

/// Runs the worker until nothing is left to serve and no keeper is there.
pub(super) fn run(run: RunDir) -> anyhow::Result<()> {
    abort_on_panic();
    let lock = Arc::new(lock(&run)?);
    let keep = Keep::open(&run).context("the keeper")?;
    let worker = Worker { run, keep, volumes: Arc::default(), lock };
    let begin = Instant::now();
    worker.restore()?;
    let path = worker.run.relay().socket();
    // Nobody else binds there: we hold the lock.
    let bound = Bound::bind(&path, |path| UnixListener::bind(path));
    let (listener, bound) = bound.with_context(|| path.display().to_string())?;
    let volumes = worker.volumes().len();
    info!(volumes, seconds = begin.elapsed().as_secs_f64(), "relaying");
    let other = worker.clone();
    std::thread::spawn(move || other.listen(&listener));
    loop {
        if !worker.keep.ends_within(ROUND) {
            worker.leave_if_orphaned();
            if bound.is_lost() {
                // It is given everything, and listens anew.
                warn!(socket = %path.display(), "the socket was removed; leaving to the next worker");
                return Ok(());
            }
        } else if worker.volumes().is_empty() {
            info!("nothing to relay; ending");
            return Ok(());
        } else {
            worker.keep.renew();
        }
    }
}

/// A volume whose thread is gone would stay without service; the next worker serves it again.
fn abort_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}

fn lock(run: &RunDir) -> anyhow::Result<File> {
    let path = run.relay().worker_lock();
    let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
    let deadline = Instant::now() + PREDECESSOR;
    while lock.try_lock().is_err() {
        anyhow::ensure!(Instant::now() < deadline, "{} is taken", path.display());
        sleep(Duration::from_millis(1));
    }
    Ok(lock)
}

impl Worker {
    /// Serves again what was served before.
    fn restore(&self) -> anyhow::Result<()> {
        let mut kept = self.keep.volumes();
        for key in self.run.keys()? {
            let things = kept.remove(key.as_str()).unwrap_or_default();
            let noted = store::load::<Attach>(&self.run.volume(&key).relay());
            match noted {
                Ok(Some(attach)) if attach.key == key => {
                    match Volume::serve(&self.run, &self.keep, attach, &things) {
                        Ok(volume) => drop(self.volumes().insert(key, volume)),
                        Err(error) => error!(%key, %error, "not relayed"),
                    }
                }
                Ok(Some(_)) => error!(%key, "its note is of another volume"),
                Ok(None) => self.forget(key.as_str()),
                Err(error) => error!(%key, error = %Chain(&error), "not relayed"),
            }
        }
        for name in kept.keys() {
            self.forget(name);
        }
        Ok(())
    }

    fn forget(&self, name: &str) {
        let commit = Commit { forget: vec![String::new()], ..Commit::of(name) };
        if let Err(error) = self.keep.commit(&commit) {
            warn!(name, %error, "forgetting a volume");
        }
    }

    /// Lets go of volumes that nobody can reach any more: the run directory is another one by now.
    /// A VM that is connected goes on.
    fn leave_if_orphaned(&self) {
        let path = self.run.relay().worker_lock();
        let identity = |data: &fs::Metadata| (data.dev(), data.ino());
        let (own, there) = (self.lock.metadata(), fs::metadata(path));
        if matches!((own, there), (Ok(a), Ok(b)) if identity(&a) == identity(&b)) {
            return;
        }
        let mut volumes = self.volumes();
        let is_idle = |volume: &Volume| volume.status().front_end.is_none();
        let idle = volumes.extract_if(.., |_, volume| is_idle(volume));
        let idle: Vec<_> = idle.map(|(key, _)| key).collect();
        for key in idle {
            warn!(%key, "the run directory is gone, and with it the volume");
            self.forget(key.as_str());
        }
    }

    fn listen(&self, listener: &UnixListener) {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => {
                    let worker = self.clone();
                    std::thread::spawn(move || {
                        if let Err(error) = worker.converse(&stream) {
                            tracing::debug!(%error, "a client broke off");
                        }
                    });
                }
                Err(error) => {
                    warn!(%error, "accepting");
                    sleep(Duration::from_millis(10)); // out of descriptors, say
                }
            }
        }
    }

    fn converse(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(CLIENT))?;
        stream.set_write_timeout(Some(CLIENT))?;
        let mut lines = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if lines.by_ref().take(LONGEST_LINE).read_line(&mut line)? == 0 {
                return Ok(());
            }
            let request = serde_json::from_str(&line);
            let is_upgrade = matches!(request, Ok(Request::Upgrade(_)));
            let reply = match request {
                Ok(request) => self.answer(request),
                Err(error) => Reply::Refused(format!("no request: {error}")),
            };
            let mut text = serde_json::to_vec(&reply)?;
            text.push(b'\n');
            (&mut &*stream).write_all(&text)?;
            if is_upgrade && matches!(reply, Reply::Done) {
                // What is half done is done again by the next one: this is what it is made for.
                let own = rustix::process::getpid();
                rustix::process::kill_process(own, rustix::process::Signal::KILL)?;
            }
        }
    }

    fn answer(&self, request: Request) -> Reply {
        let outcome = match request {
            Request::Attach(attach) => self.attach(attach).map(|()| Reply::Done),
            Request::Detach(key) => self.detach(&key).map(|()| Reply::Done),
            Request::List => Ok(Reply::List(self.status())),
            Request::Look(key) => {
                let volume = self.volumes().get(&key).map(|volume| Box::new(volume.status()));
                Ok(Reply::Volume(volume))
            }
            Request::Pause { key, most_ms } => {
                let most = Duration::from_millis(most_ms);
                self.ordered(&key, |reply| Order::Pause(most, reply))
                    .and_then(|paused| paused.map(|()| Reply::Done))
            }
            Request::Resume(key) => self.ordered(&key, Order::Resume).map(Reply::Resumed),
            Request::Switch { key, backend } => {
                let switched = self.ordered(&key, |reply| Order::Switch(backend, reply));
                let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
                switched.and_then(|outcome| outcome.map(|time| Reply::Switched(micros(time))))
            }
            Request::Upgrade(program) => self.upgrade(&program).map(|()| Reply::Done),
        };
        outcome.unwrap_or_else(Reply::Refused)
    }

    /// Noted first: a relay that starts anew serves it, too.
    fn attach(&self, attach: Attach) -> Result<(), String> {
        let key = attach.key.clone();
        let text = |error: &dyn std::error::Error| Chain(error).to_string();
        let place = self.run.volume(&key);
        let mut volumes = self.volumes();
        let known = volumes.get(&key).map(Volume::status);
        if let Some(known) = &known
            && known.backend != attach.backend
        {
            let backend = known.backend.display();
            return Err(format!("volume {key} is attached to {backend}; switch it"));
        }
        store::replace_volatile(&place.relay(), &attach).map_err(|error| text(&error))?;
        if let Some(volume) = volumes.get(&key)
            && place.vhost_socket().exists()
        {
            volume.order(Order::Attach(Box::new(attach)));
            return Ok(());
        }
        drop(volumes.remove(&key)); // first: it forgets what it has of its session
        let things = self.keep.things(key.as_str());
        let volume = Volume::serve(&self.run, &self.keep, attach, &things);
        volumes.insert(key, volume.map_err(|error| text(&error))?);
        Ok(())
    }

    /// The note goes first: a relay that starts anew does not serve it.
    fn detach(&self, key: &RunKey) -> Result<(), String> {
        let place = self.run.volume(key);
        for path in [place.relay(), place.vhost_socket()] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(format!("{}: {error}", path.display()));
                }
                Ok(()) | Err(_) => {}
            }
        }
        let volume = self.volumes().remove(key);
        drop(volume); // waits until its front-end is let go
        self.forget(key.as_str());
        Ok(())
    }

    fn ordered<T>(
        &self,
        key: &RunKey,
        order: impl FnOnce(mpsc::Sender<T>) -> Order,
    ) -> Result<T, String> {
        let (reply, outcome) = mpsc::channel();
        match self.volumes().get(key) {
            Some(volume) => volume.order(order(reply)),
            None => return Err(format!("volume {key} is not attached")),
        }
        outcome.recv_timeout(ORDER).map_err(|error| format!("volume {key}: {error}"))
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            program: fs::read_link("/proc/self/exe").unwrap_or_default(),
            volumes: self.volumes().values().map(Volume::status).collect(),
        }
    }

    fn upgrade(&self, program: &Path) -> Result<(), String> {
        let text = |error: io::Error| format!("{}: {error}", program.display());
        let program = program.canonicalize().map_err(text)?;
        // A program that does not even start would cost everybody a second.
        let version = std::process::Command::new(&program).arg("--version").output();
        let version = version.map_err(text)?;
        if !version.status.success() || !version.stdout.starts_with(b"qsd-csi ") {
            return Err(format!("{} is no qsd-csi", program.display()));
        }
        self.keep.upgrade(&program).map_err(text)
    }

    fn volumes(&self) -> MutexGuard<'_, BTreeMap<RunKey, Volume>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
