//! One daemon as a process: started or found, watched, signalled, its log kept short.

use super::protocol::{Signal, Spawn};
use crate::{
    run::{DaemonDir, DaemonKey, RelayDir, RunDir, Slot},
    store,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open, pidfd_send_signal},
};
use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
        unix::process::ExitStatusExt as _,
    },
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
};
use tokio::{
    process::{Child, Command},
    sync::oneshot,
};

/// A log longer than this is cut to half of it.
const LONGEST_LOG: u64 = 64 << 10;

/// How much of a log a report quotes at most.
const QUOTE: u64 = 400;

/// A running daemon. A pidfd stands for it, so that no signal meets a stranger with its pid.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub(super) pid: i32,
    pidfd: Arc<OwnedFd>,
}

/// The end of a daemon that is our child has a status; that of an adopted one has none.
pub(super) enum Ending {
    Child(Child),
    Adopted(oneshot::Receiver<()>),
}

/// Starts a daemon that holds two locks until it ends: of its directory, and of the file that no
/// other daemon may have.
///
/// `flock` belongs to the open file, and the daemon has both files open, as its standard input and
/// output; it uses neither.
///
/// A daemon that is to take over from another shares its lock of that file: it outlives the one
/// that took it.
pub(super) fn spawn(
    spawn: &Spawn,
    dir: &DaemonDir,
    beside: Option<&Handle>,
) -> io::Result<(Handle, Ending)> {
    let own = locked(open_lock(&dir.lock())?, &dir.lock())?;
    let exclusive = match beside {
        Some(other) => File::from(pidfd_getfd(&other.pidfd, 1, PidfdGetfdFlags::empty())?),
        None => locked(File::open(&spawn.exclusive)?, &spawn.exclusive)?,
    };
    dir.remove_sockets()?;
    let log = open_log(&dir.log())?;
    let mut child = Command::new(&spawn.program)
        .args(&spawn.arguments)
        // That of whoever started us is none of its business.
        .env("SSH_AUTH_SOCK", dir.agent_socket())
        .stdin(Stdio::from(own))
        .stdout(Stdio::from(exclusive))
        .stderr(Stdio::from(log))
        .process_group(0)
        .kill_on_drop(false)
        .spawn()
        .map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", spawn.program.display()))
        })?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.expect("a child that nobody waited for has a pid");
    match Handle::open(pid) {
        Ok(handle) => Ok((handle, Ending::Child(child))),
        Err(error) => {
            _ = child.start_kill(); // nobody could signal it later
            Err(error)
        }
    }
}

/// Starts a relay, which holds its lock as its standard input until it ends.
pub(super) fn spawn_relay(run: &RunDir, dir: &RelayDir) -> io::Result<(Handle, Ending)> {
    dir.create()?;
    let own = locked(open_lock(&dir.lock())?, &dir.lock())?;
    let log = open_log(&dir.log())?;
    let child = Command::new("/proc/self/exe")
        .arg0("qsd-csi")
        .arg("relay")
        .arg("--run-dir")
        .arg(run.path())
        .current_dir("/")
        .stdin(Stdio::from(own))
        .stdout(Stdio::null())
        .stderr(Stdio::from(log))
        .process_group(0)
        .kill_on_drop(false)
        .spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.expect("a child that nobody waited for has a pid");
    Ok((Handle::open(pid)?, Ending::Child(child)))
}

fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn locked(file: File, path: &Path) -> io::Result<File> {
    if store::lock(&file).is_ok() {
        return Ok(file);
    }
    let path = path.display();
    let text = format!("{path}: another daemon has it; see who: fuser {path}");
    Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
}

/// The daemons that an earlier supervisor of this run directory left running: the processes whose
/// standard input is the lock of one of its parts; the file itself, not one of the same name. Those
/// that are known already are left out.
pub(super) fn find(
    run: &RunDir,
    is_known: impl Fn(&DaemonKey) -> bool,
) -> io::Result<Vec<(DaemonKey, Handle, Ending)>> {
    let mut found = daemon_holders(run)?;
    found.retain(|(key, _)| !is_known(key));
    Ok(await_ends(found))
}

/// The same for who only looks: their process ids.
pub(crate) fn daemons(run: &RunDir) -> io::Result<HashMap<DaemonKey, i32>> {
    Ok(daemon_holders(run)?.into_iter().map(|(key, handle)| (key, handle.pid)).collect())
}

fn daemon_holders(run: &RunDir) -> io::Result<Vec<(DaemonKey, Handle)>> {
    let both = |volume: crate::volume::RunKey| {
        Slot::ALL.map(|slot| DaemonKey { volume: volume.clone(), slot })
    };
    let keys = run.keys()?.into_iter().flat_map(both);
    holders(keys.map(|key| (run.daemon(&key).lock(), key)).collect())
}

/// The relay that an earlier supervisor of this run directory left running.
pub(super) fn find_relay(dir: &RelayDir) -> io::Result<Option<(Handle, Ending)>> {
    let found = await_ends(holders(vec![(dir.lock(), ())])?);
    Ok(found.into_iter().next().map(|((), handle, ending)| (handle, ending)))
}

/// The processes that have these files as their standard input.
fn holders<K: Clone + PartialEq>(files: Vec<(PathBuf, K)>) -> io::Result<Vec<(K, Handle)>> {
    let identity = |path: &Path| fs::metadata(path).map(|data| (data.dev(), data.ino())).ok();
    let file = |(path, key): (PathBuf, K)| Some((identity(&path)?, key));
    let files: HashMap<_, _> = files.into_iter().filter_map(file).collect();
    let key_of = |pid: i32| {
        let input = identity(Path::new(&format!("/proc/{pid}/fd/0")))?;
        files.get(&input).cloned()
    };
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let Some(key) = key_of(pid) else { continue };
        // Looked at again once the pidfd holds the process: it may have ended in between.
        if let Ok(handle) = Handle::open(pid)
            && key_of(pid).as_ref() == Some(&key)
        {
            found.push((key, handle));
        }
    }
    Ok(found)
}

/// Has the ends of processes that are not our children awaited, by one thread for all of them.
fn await_ends<K>(found: Vec<(K, Handle)>) -> Vec<(K, Handle, Ending)> {
    let mut waited_for = Vec::new();
    let mut adopted = Vec::new();
    for (key, handle) in found {
        let (ended, end) = oneshot::channel();
        waited_for.push((handle.pidfd.clone(), ended));
        adopted.push((key, handle, Ending::Adopted(end)));
    }
    std::thread::spawn(move || {
        while !waited_for.is_empty() {
            let mut fds: Vec<_> =
                waited_for.iter().map(|(pidfd, _)| PollFd::new(pidfd, PollFlags::IN)).collect();
            if let Err(error) = poll(&mut fds, None)
                && error != Errno::INTR
            {
                tracing::error!(%error, "waiting for adopted daemons");
                return; // dropping the senders tells of an end, and the driver looks for itself
            }
            let ended: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let mut ended = ended.into_iter();
            // Dropping the sender is the message.
            waited_for.retain(|_| ended.next() != Some(true));
        }
    });
    adopted
}

impl Handle {
    fn open(pid: i32) -> io::Result<Self> {
        let raw = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = Arc::new(pidfd_open(raw, PidfdFlags::empty())?);
        Ok(Self { pid, pidfd })
    }

    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let signal = match signal {
            Signal::Terminate => rustix::process::Signal::TERM,
            Signal::Kill => rustix::process::Signal::KILL,
        };
        match pidfd_send_signal(self.pidfd.as_fd(), signal) {
            Err(Errno::SRCH) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the end, and says how it was.
    pub(super) async fn ended(ending: Ending, log: &Path) -> String {
        let how = match ending {
            Ending::Child(mut child) => match child.wait().await {
                Ok(status) => describe(status),
                Err(error) => format!("ended, and nobody can tell how: {error}"),
            },
            Ending::Adopted(end) => {
                _ = end.await;
                "ended".to_owned()
            }
        };
        match last_line(log) {
            Some(line) => format!("{how}; it said: {line}"),
            None => how,
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    trim_log(path)?;
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Cuts a log that has grown too long to its last part. The daemon appends, so it goes on behind.
pub(super) fn trim_log(path: &Path) -> io::Result<()> {
    let mut log = match OpenOptions::new().read(true).append(true).open(path) {
        Ok(log) => log,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let length = log.metadata()?.len();
    if length <= LONGEST_LOG {
        return Ok(());
    }
    let tail = read_from(&mut log, length - LONGEST_LOG / 2, LONGEST_LOG / 2)?;
    log.set_len(0)?;
    log.write_all(&tail)
}

fn read_from(log: &mut File, start: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    log.seek(SeekFrom::Start(start))?;
    log.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn last_line(path: &Path) -> Option<String> {
    let mut log = File::open(path).ok()?;
    let start = log.metadata().ok()?.len().saturating_sub(QUOTE);
    let tail = read_from(&mut log, start, QUOTE).ok()?;
    let text = String::from_utf8_lossy(&tail);
    text.lines().next_back().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_log_stays_short_and_keeps_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("daemon.log");
        trim_log(&path).unwrap();
        let mut log = open_log(&path).unwrap();
        for line in 0..20_000 {
            writeln!(log, "line {line}").unwrap();
        }
        trim_log(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), LONGEST_LOG / 2);
        writeln!(log, "the end").unwrap();
        assert_eq!(last_line(&path).as_deref(), Some("the end"));
        assert_eq!(fs::metadata(&path).unwrap().len(), LONGEST_LOG / 2 + 8);
    }
}
