//! A bare qemu-storage-daemon, without any driver: the reference, and the object of tuning.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::{net::UnixStream, process::CommandExt as _},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// The program; found in `PATH`, where the driver looks for it too.
const PROGRAM: &str = "qemu-storage-daemon";

/// What takes longer will never happen.
const LIMIT: Duration = Duration::from_secs(5);

/// A running daemon with one monitor. Dropping it ends it.
pub(crate) struct Bare {
    process: Child,
    monitor: BufReader<UnixStream>,
}

impl Bare {
    /// Starts a daemon and shakes hands with it as the driver does; its socket lies in `dir`.
    pub(crate) fn start(dir: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new(PROGRAM);
        command.process_group(0);
        Self::run(command, dir)
    }

    /// The same in a session of its own, as the driver's daemons are in another than this program.
    /// Linux shares processor time out between sessions (`sched_autogroup_enabled`), so a client
    /// and a daemon in one session are at an advantage where the machine is busy.
    pub(crate) fn start_apart(dir: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new("setsid");
        command.arg(PROGRAM);
        Self::run(command, dir)
    }

    fn run(mut command: Command, dir: &Path) -> anyhow::Result<Self> {
        let socket = dir.join("bare.sock");
        let chardev = format!("socket,id=qmp,path={},server=on,wait=off", socket.display());
        let mut process = command
            .args(["--chardev", &chardev, "--monitor", "chardev=qmp"])
            .stdin(Stdio::null())
            .spawn()
            .context(PROGRAM)?;
        match connect(&socket) {
            Ok(monitor) => {
                let mut bare = Self { process, monitor: BufReader::new(monitor) };
                bare.line()?;
                bare.execute("qmp_capabilities", &json!({}))?;
                Ok(bare)
            }
            Err(error) => {
                end(&mut process);
                Err(error)
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Runs one QMP command.
    pub(crate) fn execute(&mut self, name: &str, arguments: &Value) -> anyhow::Result<Value> {
        let command = json!({ "execute": name, "arguments": arguments, "id": 1 });
        self.monitor.get_mut().write_all(format!("{command}\n").as_bytes())?;
        loop {
            let answer: Value = serde_json::from_str(&self.line()?)?;
            if answer["id"] != 1 {
                continue; // an event
            }
            ensure!(answer.get("error").is_none(), "{name}: {}", answer["error"]["desc"]);
            return Ok(answer["return"].clone());
        }
    }

    /// Lets it end by itself.
    pub(crate) fn quit(mut self) -> anyhow::Result<()> {
        _ = self.execute("quit", &json!({})); // the end may cut its answer off
        self.process.wait()?;
        Ok(())
    }

    /// What it calls itself, such as `10.0.13`.
    pub(crate) fn version(&mut self) -> anyhow::Result<String> {
        let answer = self.execute("query-version", &json!({}))?;
        let [major, minor, micro] = ["major", "minor", "micro"].map(|part| &answer["qemu"][part]);
        Ok(format!("{major}.{minor}.{micro}"))
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        let length = self.monitor.read_line(&mut line).context("the monitor of a bare daemon")?;
        ensure!(length > 0, "a bare daemon closed its monitor");
        Ok(line)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

fn connect(socket: &Path) -> anyhow::Result<UnixStream> {
    let begin = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => {
                stream.set_read_timeout(Some(LIMIT))?;
                return Ok(stream);
            }
            Err(error) if begin.elapsed() > LIMIT => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn end(process: &mut Child) {
    _ = process.kill();
    _ = process.wait();
}
