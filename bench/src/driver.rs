//! The driver under test: `qsd-csi standalone` in directories of its own.

use crate::{client::Client, process, scratch::Scratch};
use anyhow::{Context as _, bail, ensure};
use rustix::process::Signal;
use std::{
    fs::{File, OpenOptions},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// A driver that takes longer will never be there, or never end.
const LIMIT: Duration = Duration::from_mins(1);

/// How often it is asked whether it is there.
const RETRY: Duration = Duration::from_millis(1);

/// What the drivers under test have to say, in the directory of the report.
pub(crate) const LOG: &str = "driver.log";

/// A running driver. Dropping it kills it, and all it started.
pub(crate) struct Driver {
    process: Child,
    program: PathBuf,
    log: File,
    pub(crate) client: Client,
    /// Last: it ends what the driver leaves running.
    pub(crate) scratch: Scratch,
}

impl Driver {
    /// Starts the driver that lies beside this program; its pool lies below `dir`.
    pub(crate) async fn start(dir: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe()?.with_file_name("qsd-csi");
        ensure!(program.exists(), "{} is not there; build it first", program.display());
        let scratch = Scratch::new(dir)?;
        let log = OpenOptions::new().create(true).append(true).open(dir.join(LOG))?;
        let mut process = spawn(&program, &log, &scratch)?;
        match ready(&mut process, &scratch.endpoint()).await {
            Ok(client) => Ok(Self { process, program, log, client, scratch }),
            Err(error) => {
                end(&mut process);
                Err(error).with_context(|| format!("see {}", dir.join(LOG).display()))
            }
        }
    }

    pub(crate) fn pid(&self) -> anyhow::Result<i32> {
        Ok(i32::try_from(self.process.id())?)
    }

    /// Ends the driver by `signal`; what is published stays.
    pub(crate) async fn stop(&mut self, signal: Signal) -> anyhow::Result<()> {
        process::signal(self.pid()?, signal);
        let begin = Instant::now();
        while self.process.try_wait()?.is_none() {
            ensure!(begin.elapsed() < LIMIT, "the driver does not end");
            sleep(RETRY).await;
        }
        Ok(())
    }

    /// Starts it again after `stop`; how long it took until it answered that it is ready.
    pub(crate) async fn start_again(&mut self) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        self.process = spawn(&self.program, &self.log, &self.scratch)?;
        self.client = ready(&mut self.process, &self.scratch.endpoint()).await?;
        Ok(begin.elapsed())
    }

    /// Ends a driver that has nothing published any more, and awaits the end of its supervisor.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        let supervisor = self.scratch.supervisor();
        self.stop(Signal::TERM).await?;
        let Some(supervisor) = supervisor else { return Ok(()) };
        let begin = Instant::now();
        while process::runs(supervisor) {
            ensure!(begin.elapsed() < LIMIT, "supervisor {supervisor} does not end by itself");
            sleep(RETRY * 10).await;
        }
        Ok(())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

fn end(process: &mut Child) {
    _ = process.kill();
    _ = process.wait();
}

/// In a process group of its own, so that Ctrl-C ends it in our order.
fn spawn(program: &Path, log: &File, scratch: &Scratch) -> anyhow::Result<Child> {
    let mut command = Command::new(program);
    command
        .arg("standalone")
        .arg(format!("--endpoint=unix://{}", scratch.endpoint().display()))
        .arg("--node-id=bench")
        .arg("--overcommit=1000") // volumes here are larger than the disk
        .arg(format!("--run-dir={}", scratch.run().display()))
        .arg(format!("--pool=bench={}", scratch.pool().display()))
        .stdin(Stdio::null())
        .stderr(log.try_clone()?)
        .process_group(0);
    command.spawn().with_context(|| program.display().to_string())
}

async fn ready(process: &mut Child, endpoint: &Path) -> anyhow::Result<Client> {
    let begin = Instant::now();
    loop {
        if let Ok(mut client) = Client::connect(endpoint).await
            && client.probe().await.is_ok()
        {
            return Ok(client);
        }
        if let Some(status) = process.try_wait()? {
            bail!("the driver ended at its start: {status}");
        }
        ensure!(begin.elapsed() < LIMIT, "the driver does not answer");
        sleep(RETRY).await;
    }
}
