//! Encrypted layers in a daemon: the passphrase that opens them, and the LUKS header of a new one.
//!
//! The passphrase is an object of the daemon (facts/qsd.md section 13), told over its monitor and
//! there for as long as layers are opened. What was opened needs it no more, nor does opening it
//! again (`blockdev-reopen`).

use super::{Command, Monitor, daemon::Error, daemon::Workshop, monitor};
use crate::{
    qcow2::{self, LuksHeader},
    supervisor,
    volume::Passphrase,
};
use serde_json::{Value, json};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// The object that holds the passphrase.
const SECRET: &str = "key";

/// The image that a LUKS header is made in, and its node.
const SCRATCH: &str = "luks";

/// The job that makes it.
const JOB: &str = "format";

/// How many milliseconds it takes to try a passphrase, on the machine where the header was made.
///
/// Each layer of a chain is tried when it is opened, and a guest waits meanwhile: with this, some 25
/// ms at a snapshot and a quarter of a second for a chain of ten that is opened again, where QEMU's
/// default of two seconds would stop the guest for as long. It is what slows down guessing, by 100
/// times less than that default: 7 bits, which a passphrase that nobody types has to spare.
const TRY: u32 = 20;

/// How long making a header may take. QEMU measures twice, for a second and more of a core each,
/// how fast it is: 3 to 6 s on a busy machine (measured).
const FORMAT: Duration = Duration::from_secs(100);

/// How often it is looked whether it is made. QEMU answers nothing while it measures.
const LOOK: Duration = Duration::from_millis(20);

/// What an encrypted layer is opened with.
pub(super) fn options() -> Value {
    json!({ "format": "luks", "key-secret": SECRET })
}

/// Lets the daemon know the passphrase.
pub(super) async fn tell(monitor: &Monitor, passphrase: &Passphrase) -> Result<(), monitor::Error> {
    let object = json!({ "qom-type": "secret", "id": SECRET, "data": passphrase.expose() });
    match monitor.execute(Command::new("object-add", object)).await {
        // What QEMU says of it is not repeated.
        Err(monitor::Error::Refused { command, .. }) => {
            let desc = format!("it does not take the {}", Passphrase::KEY);
            Err(monitor::Error::Refused { command, desc })
        }
        outcome => outcome.map(drop),
    }
}

/// Has the daemon forget it.
pub(super) async fn forget(monitor: &Monitor) -> Result<(), monitor::Error> {
    let gone = json!({ "id": SECRET });
    monitor.execute(Command::new("object-del", gone)).await.map(drop)
}

/// What a refusal means that may come from a wrong passphrase.
pub(super) fn refused(error: monitor::Error) -> Error {
    match error {
        // QEMU: crypto/block-luks.c
        monitor::Error::Refused { desc, .. } if desc.contains("Invalid password") => Error::Locked,
        error => error.into(),
    }
}

impl Workshop {
    /// Has QEMU make a LUKS header that this passphrase opens, with a new key. The daemon is to be
    /// killed.
    pub async fn luks_header(
        &self,
        passphrase: &Passphrase,
        supervisor: &supervisor::Client,
    ) -> Result<LuksHeader, Error> {
        let path = self.dir.path().join("luks.qcow2");
        let place = |source| Error::Place { path: path.clone(), source };
        let monitor = self.bare(supervisor).await?;
        make_file(&path).map_err(place)?;
        tell(&monitor, passphrase).await?;
        format(&monitor, &path).await?;
        let read = || qcow2::luks_header(&File::open(&path)?).map_err(qcow2::Error::into_io);
        let header = read().map_err(place)?;
        fs::remove_file(&path).map_err(place)?;
        Ok(header)
    }
}

fn make_file(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.create(true).write(true).truncate(true).mode(0o600).open(path).map(drop)
}

/// Has QEMU make an encrypted image that holds nothing.
async fn format(monitor: &Monitor, path: &Path) -> Result<(), Error> {
    let file = json!({ "driver": "file", "node-name": SCRATCH, "filename": path });
    monitor.execute(Command::new("blockdev-add", file)).await?;
    let image = json!({
        "driver": "qcow2",
        "file": SCRATCH,
        "size": 0,
        "encrypt": { "format": "luks", "key-secret": SECRET, "iter-time": TRY },
    });
    let create = json!({ "job-id": JOB, "options": image });
    monitor.execute(Command::new("blockdev-create", create)).await?;
    let deadline = Instant::now() + FORMAT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let jobs = Command::new("query-jobs", json!({}));
        let jobs = monitor.execute_within(jobs, left).await?;
        let job = &jobs[0];
        if job["status"] == "concluded" {
            return match job["error"].as_str() {
                None => Ok(()),
                Some(error) => {
                    let desc = error.to_owned();
                    Err(monitor::Error::Refused { command: "blockdev-create", desc }.into())
                }
            };
        }
        sleep(LOOK).await;
    }
}
