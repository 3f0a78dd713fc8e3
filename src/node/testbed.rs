//! What the tests of devices and file systems stand on: files and directories of their own, real
//! daemons, and an end that leaves nothing.

use super::{
    HostPath,
    device::{Access, LoopDevice, Sectors},
};
use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// A directory in which everything is unmounted, detached and removed at the end.
pub(super) struct Testbed {
    dir: tempfile::TempDir,
}

impl Testbed {
    pub(super) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    /// A sparse file.
    pub(super) fn file(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        path
    }

    pub(super) fn place(&self, name: &str) -> HostPath {
        HostPath::parse("target_path", self.path(name).to_str().unwrap().to_owned()).unwrap()
    }

    /// An empty directory.
    pub(super) fn directory(&self, name: &str) -> HostPath {
        fs::create_dir(self.path(name)).unwrap();
        self.place(name)
    }

    /// A daemon that serves the file `name`, whose bytes lie in `<name>.raw`.
    pub(super) fn serve(&self, name: &str, size: u64) -> Fuse {
        let raw = self.path(&format!("{name}.raw"));
        if !raw.exists() {
            File::create(&raw).unwrap().set_len(size).unwrap();
        }
        let file = self.path(name);
        if !file.exists() {
            File::create(&file).unwrap();
        }
        Fuse::start(file, raw)
    }

    /// How many mounts there are at this path.
    pub(super) fn mounts(&self, name: &str) -> usize {
        let path = self.path(name);
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.lines().filter(|line| line.split(' ').nth(4) == path.to_str()).count()
    }

    /// How many devices there are over files in this directory.
    pub(super) fn devices(&self) -> usize {
        devices_in(&self.path("")).len()
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        let dir = self.path("");
        // What a daemon serves was unmounted by `Fuse`, after its device was detached.
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for point in table.lines().rev().filter_map(|line| line.split(' ').nth(4)) {
            if Path::new(point).starts_with(&dir) {
                run("umount", &["--lazy", "--no-canonicalize", point]);
            }
        }
        for device in devices_in(&dir) {
            run("losetup", &["--detach", &device]);
        }
    }
}

/// A daemon that serves a raw file over FUSE.
pub(super) struct Fuse {
    pub(super) file: PathBuf,
    pub(super) raw: PathBuf,
    daemon: Child,
}

impl Fuse {
    fn start(file: PathBuf, raw: PathBuf) -> Self {
        let blockdev = format!(
            "driver=file,node-name=file,filename={},cache.direct=on,discard=unmap",
            raw.display()
        );
        let export = format!(
            "type=fuse,id=f,node-name=top,mountpoint={},writable=on,growable=off,allow-other=on",
            file.display()
        );
        let before = fs::metadata(&file).unwrap().dev();
        let daemon = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &blockdev])
            .args(["--blockdev", "driver=raw,node-name=top,file=file,discard=unmap"])
            .args(["--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let fuse = Self { file, raw, daemon };
        eventually("the daemon serves", || {
            fs::metadata(&fuse.file).is_ok_and(|data| data.dev() != before)
        });
        fuse
    }

    /// The daemon dies at once; what it served stays mounted.
    pub(super) fn kill(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }

    /// The daemon stops to answer.
    pub(super) fn pause(&self) {
        let pid = rustix::process::Pid::from_child(&self.daemon);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    }

    /// What the file below takes of its disk.
    pub(super) fn allocated(&self) -> u64 {
        fs::metadata(&self.raw).unwrap().blocks() * 512
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        _ = self.daemon.kill();
        _ = self.daemon.wait();
        for device in devices_in(&self.file) {
            run("losetup", &["--detach", &device]);
        }
        run("umount", &["--lazy", "--no-canonicalize", self.file.to_str().unwrap()]);
    }
}

/// Writes bytes to a file or a device, durably.
pub(super) fn write(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    file.sync_all().unwrap();
}

/// Bytes that no format explains.
pub(super) fn noise(count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    while bytes.len() < count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

/// Runs a program of the host, whose success is the test's own business.
pub(super) fn run(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    let status = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// A device as a pod gets it.
pub(super) async fn attach(file: &Path) -> LoopDevice {
    LoopDevice::attach(file, Access::Write, Sectors::Of512).await.unwrap()
}

/// A device as a file system gets it.
pub(super) async fn attach_large(file: &Path) -> LoopDevice {
    LoopDevice::attach(file, Access::Write, Sectors::Of4096).await.unwrap()
}

pub(super) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn devices_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap());
    let below = |entry: &fs::DirEntry| {
        let file = fs::read_to_string(entry.path().join("loop/backing_file"));
        file.is_ok_and(|file| {
            let file = file.trim_end().trim_end_matches(" (deleted)");
            Path::new(file).starts_with(dir)
        })
    };
    entries
        .filter(below)
        .map(|entry| format!("/dev/{}", entry.file_name().to_str().unwrap()))
        .collect()
}
