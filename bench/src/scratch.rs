//! Where a driver under test keeps its things, and the promise that nothing of it stays.

use crate::{process, say::say};
use anyhow::Context as _;
use rustix::{
    fs::statfs,
    mount::{UnmountFlags, unmount},
    process::Signal,
};
use std::{
    fs,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// From statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The directories of one driver. Dropping it ends every process that works there, undoes the
/// mounts and removes the directories.
pub(crate) struct Scratch {
    /// On the disk that is measured: the pool, and files of references.
    disk: TempDir,
    /// On tmpfs where there is one, and with a short path: sockets, and what is published.
    run: TempDir,
}

/// Where one volume is staged and published.
pub(crate) struct Paths {
    pub(crate) staging: PathBuf,
    pub(crate) target: PathBuf,
}

impl Scratch {
    /// New directories, the one for the disk below `dir`.
    pub(crate) fn new(dir: &Path) -> anyhow::Result<Self> {
        let named = |dir: &Path| {
            let made = tempfile::Builder::new().prefix("qsd-bench-").tempdir_in(dir);
            made.with_context(|| format!("a directory in {}", dir.display()))
        };
        Ok(Self { disk: named(dir)?, run: named(&volatile())? })
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.disk.path().join("pool")
    }

    /// A directory of the same file system as the pool.
    pub(crate) fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// The run directory of the driver.
    pub(crate) fn run(&self) -> PathBuf {
        self.run.path().join("run")
    }

    /// A directory for sockets that are not the driver's.
    pub(crate) fn sockets(&self) -> &Path {
        self.run.path()
    }

    pub(crate) fn endpoint(&self) -> PathBuf {
        self.run.path().join("csi.sock")
    }

    /// The paths of a volume, with the directories that kubelet would make.
    pub(crate) fn paths(&self, volume: &str) -> anyhow::Result<Paths> {
        let dir = self.run.path().join("pods").join(volume);
        let paths = Paths { staging: dir.join("staging"), target: dir.join("disk") };
        fs::create_dir_all(&paths.staging)?;
        Ok(paths)
    }

    /// The supervisor on the run directory, if one runs: it greets with its pid.
    pub(crate) fn supervisor(&self) -> Option<i32> {
        use std::io::BufRead as _;
        let socket = self.run().join("supervisor.sock");
        let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        let mut greeting = String::new();
        std::io::BufReader::new(stream).read_line(&mut greeting).ok()?;
        let greeting: serde_json::Value = serde_json::from_str(&greeting).ok()?;
        greeting["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok())
    }

    /// Ends all that works there, and loses the run directory, as the end of the machine would.
    pub(crate) fn lose_run(&self) -> anyhow::Result<()> {
        self.clear();
        let run = self.run();
        fs::remove_dir_all(&run).with_context(|| run.display().to_string())
    }

    fn clear(&self) {
        let supervisor = self.supervisor();
        let begin = Instant::now();
        // Again and again: what ends last starts nothing any more.
        while begin.elapsed() < Duration::from_secs(5) {
            let left = [process::reading_below(&self.run()), process::relaying(&self.run())];
            let left = left.concat();
            if left.is_empty() {
                break;
            }
            for pid in left {
                process::signal(pid, Signal::KILL);
            }
            sleep(Duration::from_millis(5));
        }
        if let Some(pid) = supervisor {
            process::signal(pid, Signal::TERM);
            let begin = Instant::now();
            while process::runs(pid) && begin.elapsed() < Duration::from_secs(5) {
                sleep(Duration::from_millis(10));
            }
            process::signal(pid, Signal::KILL);
        }
        // What is mounted within another goes first.
        for mount in mounts_below(self.run.path()).into_iter().rev() {
            if let Err(error) = unmount(&mount, UnmountFlags::DETACH) {
                say(format!("unmounting {}: {error}", mount.display()));
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A tmpfs that may be written to, else the directory for temporary files.
fn volatile() -> PathBuf {
    let usable = |dir: &str| {
        let writable = tempfile::tempfile_in(dir).is_ok();
        writable && statfs(dir).is_ok_and(|fs| u64::try_from(fs.f_type) == Ok(TMPFS_MAGIC))
    };
    ["/dev/shm", "/run"]
        .into_iter()
        .find(|dir| usable(dir))
        .map_or_else(std::env::temp_dir, PathBuf::from)
}

fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(dir)).collect()
}
