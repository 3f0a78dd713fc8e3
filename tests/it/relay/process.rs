//! A relay in a scratch directory, with storage daemons behind it. `Drop` ends every process of it.

use crate::harness::{LIMIT, is_alive, part, processes, qsd_csi, signal};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// The size of every disk here.
pub(crate) const DISK: u64 = 64 << 20;

/// A relay and all that is its own.
pub(crate) struct Relay {
    scratch: tempfile::TempDir,
    keeper: Option<Child>,
    daemons: BTreeMap<String, Child>,
}

/// Waits until `done` says so.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LIMIT, "waited too long: {what}");
        sleep(Duration::from_millis(2));
    }
}

/// The key of the volume with this number.
pub(crate) fn key(number: u32) -> String {
    format!("{number:032x}")
}

impl Relay {
    /// A relay that serves nothing yet.
    pub(crate) fn start() -> Self {
        let scratch = tempfile::Builder::new().prefix("qsd-").tempdir().unwrap();
        let mut relay = Self { scratch, keeper: None, daemons: BTreeMap::new() };
        fs::create_dir_all(relay.run().join("relay")).unwrap();
        relay.start_keeper();
        relay
    }

    pub(crate) fn start_keeper(&mut self) {
        let lock = File::create(self.run().join("relay/lock")).unwrap();
        let log = File::options().append(true).create(true).open(self.path("log")).unwrap();
        let mut command = qsd_csi();
        command.arg("relay").arg("--run-dir").arg(self.run());
        command.stdin(lock).stdout(Stdio::null()).stderr(log);
        self.keeper = Some(command.spawn().unwrap());
    }

    /// Another keeper in another run directory at the same place, as after one was wiped; the first.
    pub(crate) fn begin_anew(&mut self) -> Child {
        let keeper = self.keeper.take().unwrap();
        rustix::fs::rename(self.run(), self.path("old")).unwrap();
        fs::create_dir_all(self.run().join("relay")).unwrap();
        self.start_keeper();
        keeper
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.path("run")
    }

    /// What both processes said so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Asks the relay, which may have to start first.
    pub(crate) fn ask(&self, request: &Value) -> Value {
        let mut answer = None;
        until("the relay answers", || {
            answer = self.try_ask(request);
            answer.is_some()
        });
        answer.unwrap()
    }

    fn try_ask(&self, request: &Value) -> Option<Value> {
        let mut stream = UnixStream::connect(self.run().join("relay/relay.sock")).ok()?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(format!("{request}\n").as_bytes()).ok()?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok()
    }

    pub(crate) fn list(&self) -> Value {
        self.ask(&json!("list"))["list"].take()
    }

    /// What the relay tells of a volume.
    pub(crate) fn status(&self, key: &str) -> Value {
        let list = self.list();
        let volumes = list["volumes"].as_array().unwrap();
        volumes.iter().find(|one| one["key"] == key).cloned().unwrap_or_default()
    }

    pub(crate) fn worker(&self) -> i32 {
        self.list()["pid"].as_i64().unwrap().try_into().unwrap()
    }

    pub(crate) fn keeper(&self) -> i32 {
        self.keeper.as_ref().unwrap().id().try_into().unwrap()
    }

    pub(crate) fn kill_keeper(&mut self) {
        let mut keeper = self.keeper.take().unwrap();
        keeper.kill().unwrap();
        keeper.wait().unwrap();
    }

    /// Has a volume served, whoever stands behind it.
    pub(crate) fn attach(&self, key: &str) {
        fs::create_dir_all(self.run().join(key).join("export")).unwrap();
        let attach = json!({"key": key, "backend": self.backend(key), "tracking": "works"});
        assert_eq!(self.ask(&json!({ "attach": attach })), "done");
    }

    /// Has a volume served with a storage daemon behind it; its key.
    pub(crate) fn serve(&mut self, number: u32) -> String {
        let key = key(number);
        self.attach(&key);
        self.start_daemon(&key);
        key
    }

    pub(crate) fn socket(&self, key: &str) -> PathBuf {
        self.run().join(key).join("export/vhost.sock")
    }

    pub(crate) fn backend(&self, key: &str) -> PathBuf {
        self.run().join(key).join("back.sock")
    }

    pub(crate) fn image(&self, key: &str) -> PathBuf {
        self.path(&format!("{key}.raw"))
    }

    pub(crate) fn start_daemon(&mut self, key: &str) {
        let image = self.image(key);
        let file = File::options().create(true).append(true).open(&image).unwrap();
        file.set_len(DISK).unwrap();
        let socket = self.backend(key);
        _ = fs::remove_file(&socket);
        let daemon = Command::new(part("bin/qemu-storage-daemon"))
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=top,locking=off,filename={}", image.display()))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=vu,node-name=top,writable=on,num-queues=64,\
                 addr.type=unix,addr.path={}",
                socket.display()
            ))
            .spawn()
            .unwrap();
        self.daemons.insert(key.to_owned(), daemon);
        until("the daemon listens", || listens(&socket));
    }

    pub(crate) fn kill_daemon(&mut self, key: &str) {
        let mut daemon = self.daemons.remove(key).unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub(crate) fn daemon(&self, key: &str) -> i32 {
        self.daemons[key].id().try_into().unwrap()
    }
}

/// Whether somebody accepts connections at a socket, whose file is there before that.
fn listens(socket: &Path) -> bool {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.display().to_string();
    sockets.lines().any(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.last() == Some(&path.as_str()) && words.get(3) == Some(&"00010000") // __SO_ACCEPTCON
    })
}

impl Drop for Relay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let begin = log.len().saturating_sub(6000);
            eprintln!("relay:\n{}", log.get(begin..).unwrap_or_default());
        }
        if let Some(mut keeper) = self.keeper.take() {
            _ = keeper.kill();
            _ = keeper.wait();
        }
        for pid in workers_of(&self.run()) {
            signal(pid, "KILL");
            until("the worker ends", || !is_alive(pid));
        }
        for daemon in self.daemons.values_mut() {
            _ = daemon.kill();
            _ = daemon.wait();
        }
    }
}

fn workers_of(run: &Path) -> Vec<i32> {
    let run = run.display().to_string();
    processes(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let words: Vec<_> = line.split('\0').collect();
        words.contains(&"relay") && words.contains(&run.as_str())
    })
}

/// Descriptors that a process has open.
pub(crate) fn descriptors(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// CPU time that a process has used, in seconds.
pub(crate) fn cpu_time(pid: i32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u32 = fields[11].parse::<u32>().unwrap() + fields[12].parse::<u32>().unwrap();
    f64::from(ticks) / 100.0 // USER_HZ
}

/// Kibibytes of memory that a process uses.
pub(crate) fn memory(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}
