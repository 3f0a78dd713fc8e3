//! The run directory: what must outlive the driver but not a reboot.
//!
//! Owns the paths in it and nothing else; who writes which file is said here.
//!
//! ```text
//! RUN/boot                    the boot it belongs to; after a reboot all else is stale   (node)
//! RUN/supervisor.sock .lock .log                                                   (supervisor)
//! RUN/<key>/attachment.json   what is staged and published where                         (node)
//! RUN/<key>/secrets.json      what lets us in where its master is                        (node)
//! RUN/<key>/a/ b/             places of daemons: a volume moves from one to the other
//!   lock                      locked by the daemon for as long as it lives         (supervisor)
//!   daemon.log                its standard error, the last of it                   (supervisor)
//!   qmp.sock dbg.sock         monitors: the driver's own, and one for people           (daemon)
//!   agent.sock keys.psk       keys, while a daemon opens a remote master                 (node)
//!   back.sock back2.sock      the export, for the relay, at one or the other           (daemon)
//!   scratch.qcow2             what is written to a volume whose layers are only read   (daemon)
//! RUN/<key>/relay.json        which of them the relay leads to                          (relay)
//! RUN/<key>/export/           the directory that is published
//!   vhost.sock                where VMs connect                                       (relay)
//!   disk.img                  the volume as a file, while no VM is connected         (daemon)
//! RUN/<key>/disk.<n>          the export as a file, where no VM is served; the last one  (daemon)
//!   .device                   where the block device over it is                          (node)
//!   .shown                    noted where a pod was shown that device                    (node)
//! RUN/<key>/reader.json       makes it the part of one of several readers: which of the above
//!                             are there beside it are relay.json, export/ and a/back.sock  (node)
//! RUN/relay/                  lock, log, and the sockets of the relay       (supervisor, relay)
//! ```

use crate::{store, volume::RunKey};
use rustix::{
    io::Errno,
    mount::{UnmountFlags, unmount},
};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs, io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    str::FromStr,
};

/// The longest path a Unix socket can have, in bytes (facts/qsd.md section 1).
const LONGEST_SOCKET: usize = 107;

/// What the names of files begin with that daemons export.
const DISK: &str = "disk.";

/// The name of the file in a published directory, `KubeVirt`'s.
pub const IMAGE: &str = "disk.img";

/// What keeps a directory from being a run directory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Sockets below it would have paths that are too long.
    #[error(
        "run-dir {} is {} bytes too long: a socket path has at most {LONGEST_SOCKET} bytes",
        dir.display(),
        excess
    )]
    TooLong {
        /// The directory.
        dir: PathBuf,
        /// By how much.
        excess: usize,
    },
    /// The file system refused.
    #[error("run-dir {}", dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// One of the two places for a daemon of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Slot {
    /// Where its first daemon is.
    #[default]
    A,
    /// Where it moves to from there.
    B,
}

/// Which daemon: `<run key>.<slot>`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DaemonKey {
    /// Of which volume.
    pub volume: RunKey,
    /// In which place.
    pub slot: Slot,
}

impl Slot {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
        }
    }
}

impl fmt::Display for DaemonKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.volume, self.slot.as_str())
    }
}

impl FromStr for DaemonKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('.');
        let slot = |name: &str| Slot::ALL.into_iter().find(|slot| slot.as_str() == name);
        let key = parts.and_then(|(volume, name)| {
            Some(Self { volume: volume.parse().ok()?, slot: slot(name)? })
        });
        key.ok_or_else(|| format!("{text:?} is no daemon key"))
    }
}

impl TryFrom<String> for DaemonKey {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DaemonKey> for String {
    fn from(key: DaemonKey) -> Self {
        key.to_string()
    }
}

/// A run directory that exists and whose paths are short enough.
#[derive(Clone, Debug)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Makes the directory if need be, and checks that sockets fit below it.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let fail = |source| Error::Io { dir: dir.to_owned(), source };
        make_dir(dir).map_err(fail)?;
        let run = Self(dir.canonicalize().map_err(fail)?);
        let longest =
            run.0.join("0".repeat(RunKey::LENGTH)).join("export/vhost.sock").as_os_str().len();
        match longest.checked_sub(LONGEST_SOCKET) {
            None | Some(0) => Ok(run),
            Some(excess) => Err(Error::TooLong { dir: dir.to_owned(), excess }),
        }
    }

    /// The directory as it is, if it is there: nothing is made.
    pub fn look(dir: &Path) -> io::Result<Option<Self>> {
        match dir.canonicalize() {
            Ok(dir) => Ok(Some(Self(dir))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the boot is noted that this directory belongs to.
    pub fn boot(&self) -> PathBuf {
        self.0.join("boot")
    }

    /// Where the supervisor listens.
    pub fn supervisor_socket(&self) -> PathBuf {
        self.0.join("supervisor.sock")
    }

    /// What a supervisor locks while it lives.
    pub fn supervisor_lock(&self) -> PathBuf {
        self.0.join("supervisor.lock")
    }

    /// What a supervisor has to say.
    pub fn supervisor_log(&self) -> PathBuf {
        self.0.join("supervisor.log")
    }

    /// The part of the relay.
    pub fn relay(&self) -> RelayDir {
        RelayDir(self.0.join("relay"))
    }

    /// The part of one volume.
    pub fn volume(&self, key: &RunKey) -> VolumeDir {
        VolumeDir(self.0.join(key.as_str()))
    }

    /// The place of one daemon.
    pub fn daemon(&self, key: &DaemonKey) -> DaemonDir {
        self.volume(&key.volume).daemon(key.slot)
    }

    /// Where a volume is staged that goes with its pod.
    pub fn staging(&self, key: &RunKey) -> PathBuf {
        self.0.join(format!("{key}.pod"))
    }

    /// The parts that exist.
    pub fn keys(&self) -> io::Result<Vec<RunKey>> {
        let mut keys = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            let name = entry?.file_name();
            keys.extend(name.to_str().and_then(|name| name.parse::<RunKey>().ok()));
        }
        Ok(keys)
    }
}

/// The part of the run directory that belongs to the relay.
#[derive(Clone, Debug)]
pub struct RelayDir(PathBuf);

impl RelayDir {
    /// Makes the directory.
    pub fn create(&self) -> io::Result<()> {
        make_dir(&self.0)
    }

    /// Where it listens for the driver.
    pub fn socket(&self) -> PathBuf {
        self.0.join("relay.sock")
    }

    /// Where the keeper listens for the worker.
    pub fn keeper_socket(&self) -> PathBuf {
        self.0.join("keeper.sock")
    }

    /// The keeper's standard input, locked while it lives.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// What a worker locks while it lives.
    pub fn worker_lock(&self) -> PathBuf {
        self.0.join("worker.lock")
    }

    /// What both have to say.
    pub fn log(&self) -> PathBuf {
        self.0.join("relay.log")
    }
}

/// The part of the run directory that belongs to one volume.
#[derive(Clone, Debug)]
pub struct VolumeDir(PathBuf);

impl VolumeDir {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether there is one.
    pub fn exists(&self) -> bool {
        self.0.exists()
    }

    /// What is staged and published.
    pub fn attachment(&self) -> PathBuf {
        self.0.join("attachment.json")
    }

    /// What lets us in where the master of the volume is.
    pub fn secrets(&self) -> PathBuf {
        self.0.join("secrets.json")
    }

    /// How the last daemon died.
    pub fn death(&self) -> PathBuf {
        self.0.join("death.json")
    }

    /// Who reads which volume through this part, beside others: then it is no volume's own.
    pub fn reader(&self) -> PathBuf {
        self.0.join("reader.json")
    }

    /// The place of a daemon.
    pub fn daemon(&self, slot: Slot) -> DaemonDir {
        DaemonDir(self.0.join(slot.as_str()))
    }

    /// Whose export this socket is.
    pub fn slot_of(&self, backend: &Path) -> Option<Slot> {
        let is_its = |slot: &Slot| {
            self.daemon(*slot).backend_sockets().iter().any(|socket| socket == backend)
        };
        Slot::ALL.into_iter().find(is_its)
    }

    /// The directory that is published.
    pub fn export(&self) -> PathBuf {
        self.0.join("export")
    }

    /// Which daemon the relay leads to.
    pub fn relay(&self) -> PathBuf {
        self.0.join("relay.json")
    }

    /// The vhost-user-blk socket for the VM.
    pub fn vhost_socket(&self) -> PathBuf {
        self.export().join("vhost.sock")
    }

    /// The volume as a file, for whoever cannot use the socket.
    pub fn image(&self) -> PathBuf {
        self.export().join(IMAGE)
    }

    /// Makes the place for that file, or clears it of what a daemon left there.
    pub fn clear_image(&self) -> io::Result<()> {
        let image = self.image();
        unmount_all(&image)?;
        match make_mount_point(&image) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    /// The volume as a file, below a block device: one for each daemon that it had, the last one
    /// last. A file ends with its daemon, but what stands on it may be there for longer.
    pub fn disks(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut numbers: Vec<u32> =
            entries.filter_map(|entry| disk_number(entry.file_name().to_str()?)).collect();
        numbers.sort_unstable();
        numbers.into_iter().map(|number| self.disk(number)).collect()
    }

    /// Where the next daemon puts its file.
    pub fn next_disk(&self) -> PathBuf {
        let last = self.disks().pop();
        let number = last.and_then(|last| disk_number(last.file_name()?.to_str()?));
        self.disk(number.map_or(0, |number| number.saturating_add(1)))
    }

    /// Noted where a pod was shown what stands on such a file.
    pub fn shown(disk: &Path) -> PathBuf {
        let mut name = disk.as_os_str().to_owned();
        name.push(".shown");
        name.into()
    }

    /// Where the device over such a file is noted.
    pub fn device(disk: &Path) -> PathBuf {
        let mut name = disk.as_os_str().to_owned();
        name.push(".device");
        name.into()
    }

    fn disk(&self, number: u32) -> PathBuf {
        self.0.join(format!("{DISK}{number}"))
    }

    /// Makes the directory, those of its daemons, and the one to publish.
    ///
    /// Only the published one can be entered by others: a VM does not run as root.
    pub fn create(&self) -> io::Result<()> {
        make_dir(&self.0)?;
        Slot::ALL.into_iter().try_for_each(|slot| make_dir(&self.daemon(slot).0))?;
        fs::DirBuilder::new().recursive(true).mode(0o755).create(self.export())
    }

    /// Removes a file that a daemon exported, whatever became of the daemon.
    pub fn remove_disk(&self, disk: &PathBuf) -> io::Result<()> {
        remove_mount_point(disk)?;
        remove(&Self::shown(disk))?;
        remove(&Self::device(disk))
    }

    /// Removes what the relay would find, and where VMs would find the relay.
    pub fn forget_relay(&self) -> io::Result<()> {
        remove(&self.relay())?;
        remove(&self.vhost_socket())
    }

    /// Removes all of it, the record first. The published directory goes with whatever somebody
    /// left in it; beside it, what is not ours stays, and is an error.
    pub fn remove(&self) -> io::Result<()> {
        for record in [self.attachment(), self.relay(), self.secrets(), self.death(), self.reader()]
        {
            remove(&record)?;
            remove(&store::draft_of(&record))?;
        }
        Slot::ALL.into_iter().try_for_each(|slot| self.daemon(slot).remove())?;
        self.disks().iter().try_for_each(|disk| self.remove_disk(disk))?;
        unmount_all(&self.image())?;
        fs::remove_dir_all(self.export()).or_else(gone)?;
        fs::remove_dir(&self.0).or_else(gone)
    }
}

/// The place of one daemon.
#[derive(Clone, Debug)]
pub struct DaemonDir(PathBuf);

impl DaemonDir {
    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Locked by the daemon while it lives.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// The last of what the daemon said on its standard error.
    pub fn log(&self) -> PathBuf {
        self.0.join("daemon.log")
    }

    /// The monitor of the driver.
    pub fn monitor(&self) -> PathBuf {
        self.0.join("qmp.sock")
    }

    /// The monitor for people.
    pub fn debug_monitor(&self) -> PathBuf {
        self.0.join("dbg.sock")
    }

    /// Where the daemon looks for an SSH agent.
    pub fn agent_socket(&self) -> PathBuf {
        self.0.join("agent.sock")
    }

    /// Where QEMU looks for keys that both sides of a TLS connection have; the name is QEMU's.
    pub fn key_file(&self) -> PathBuf {
        self.0.join("keys.psk")
    }

    /// The places for the socket of the daemon's vhost-user-blk export. A VM moves from one to the
    /// other when an export takes the place of another.
    pub fn backend_sockets(&self) -> [PathBuf; 2] {
        ["back.sock", "back2.sock"].map(|name| self.0.join(name))
    }

    /// Where the first export is.
    pub fn backend_socket(&self) -> PathBuf {
        let [first, _] = self.backend_sockets();
        first
    }

    /// The place that is not this one.
    pub fn other_backend_socket(&self, socket: &Path) -> PathBuf {
        let [first, second] = self.backend_sockets();
        if socket == first { second } else { first }
    }

    /// Takes what is written to a volume whose layers are only read.
    pub fn scratch(&self) -> PathBuf {
        self.0.join("scratch.qcow2")
    }

    /// Removes the sockets of a daemon that is gone, so that nobody connects to nothing.
    pub fn remove_sockets(&self) -> io::Result<()> {
        let [first, second] = self.backend_sockets();
        [self.monitor(), self.debug_monitor(), first, second].iter().try_for_each(remove)
    }

    fn remove(&self) -> io::Result<()> {
        self.remove_sockets()?;
        remove(&self.agent_socket())?;
        remove(&self.key_file())?;
        remove(&self.scratch())?;
        remove(&self.log())?;
        remove(&self.lock())?;
        fs::remove_dir(&self.0).or_else(gone)
    }
}

fn disk_number(name: &str) -> Option<u32> {
    name.strip_prefix(DISK)?.parse().ok()
}

/// Makes an empty file for a file system to be mounted on. What is written to it while nothing is
/// mounted must go nowhere, so nobody may.
pub fn make_mount_point(file: &Path) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o400).open(file).map(drop)
}

/// Takes away what is mounted on such a file, also where its server is dead.
pub fn clear_mount_point(file: &Path) -> io::Result<()> {
    unmount_all(file)
}

/// Removes such a file, and all that is mounted on it, also where its server is dead, or somebody
/// has it open.
fn remove_mount_point(file: &PathBuf) -> io::Result<()> {
    unmount_all(file)?;
    remove(file)
}

/// Takes away all that is mounted on a file.
fn unmount_all(file: &Path) -> io::Result<()> {
    loop {
        match unmount(file, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Nothing is mounted there, or there is nothing.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn make_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn remove(path: &PathBuf) -> io::Result<()> {
    fs::remove_file(path).or_else(gone)
}

/// What is gone is as removed as can be.
fn gone(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_directory_too_deep_for_sockets_is_refused_by_how_much() {
        let scratch = tempfile::tempdir().unwrap();
        // A slash, the key, and what follows it.
        let room = 107 - (1 + RunKey::LENGTH + "/export/vhost.sock".len());
        let name = |more: usize| "d".repeat(room - 1 - scratch.path().as_os_str().len() + more);
        let deep = scratch.path().join(name(1));
        assert!(matches!(RunDir::open(&deep), Err(Error::TooLong { excess: 1, .. })));
        let deep = scratch.path().join(name(0));
        assert!(RunDir::open(&deep).is_ok());
    }

    #[test]
    fn the_part_of_a_volume_goes_whole_and_a_foreign_file_stays() {
        let scratch = tempfile::tempdir().unwrap();
        let run = RunDir::open(scratch.path()).unwrap();
        let volume = run.volume(&"0123456789abcdef0123456789abcdef".parse().unwrap());
        volume.create().unwrap();
        fs::File::create(volume.vhost_socket()).unwrap();
        fs::create_dir_all(volume.export().join("left/behind")).unwrap();
        fs::File::create(volume.path().join("foreign")).unwrap();
        assert_eq!(run.keys().unwrap().len(), 1);
        volume.remove().unwrap_err();
        fs::remove_file(volume.path().join("foreign")).unwrap();
        volume.remove().unwrap();
        volume.remove().unwrap();
        assert!(run.keys().unwrap().is_empty());
    }
}
