//! A relay in a scratch directory, with storage daemons behind it. `Drop` ends every process of it.

use crate::harness::{LIMIT, is_alive, processes, qsd_csi, signal};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// A relay and all that is its own.
pub(crate) struct Relay {
    scratch: tempfile::TempDir,
    keeper: Option<Child>,
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
        let mut relay = Self { scratch, keeper: None };
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

    pub(crate) fn socket(&self, key: &str) -> PathBuf {
        self.run().join(key).join("export/vhost.sock")
    }
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
