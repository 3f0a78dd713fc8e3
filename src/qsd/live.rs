//! What is changed in a daemon while it serves: layers, limits, sizes, exports, and jobs.
//!
//! Everything here may fail half-way. Whoever calls has recorded before what is to be, so a daemon
//! of which nobody knows what it has done is ended, and the next one is built from the records.

use super::{
    Command, Daemon, Durability, encryption,
    graph::{self, IMAGE, TOP},
    monitor::Error,
};
use crate::{
    source::Access,
    units::Bytes,
    volume::{Layer, Passphrase, Throttle, Way},
};
use serde_json::json;
use std::{path::Path, time::Duration};
use tokio::time::{Instant, sleep};

/// The one job of a daemon.
const JOB: &str = "work";

/// How long a job has to end that was told to. It does between two requests.
const CANCELLATION: Duration = Duration::from_secs(10);

/// How long an export has to go.
const FAREWELL: Duration = Duration::from_secs(5);

/// How often something that will be so in a moment is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// What an earlier driver's jobs left of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jobs {
    /// There were none.
    None,
    /// It is as it was built.
    LeftGraph,
    /// A job ended well, and changed it.
    ChangedGraph,
}

/// Where in the graph of a daemon the upper of two layers is that are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Height {
    /// It is the one that takes the writes.
    Active,
    /// Another layer stands on it.
    Below,
}

/// How a job is getting on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// So many bytes of so many.
    Running {
        /// Looked at.
        done: u64,
        /// To look at.
        total: u64,
    },
    /// All was moved; it follows writes until it is told to end.
    Ready,
    /// All was moved; the graph changes when it is told to.
    Pending,
    /// All is where it should be, and flushed.
    Done,
    /// It ended before that.
    Failed(String),
}

impl Daemon {
    /// Opens a layer that is to be put onto the active one, with the passphrase if it takes one.
    pub async fn add_overlay(
        &self,
        overlay: &Layer,
        access: Access,
        passphrase: Option<&Passphrase>,
    ) -> Result<(), Error> {
        let Some(passphrase) = passphrase else {
            return self.execute(graph::add_overlay(overlay, access)).await.map(drop);
        };
        encryption::tell(self.monitor(), passphrase).await?;
        let added = self.execute(graph::add_overlay(overlay, access)).await;
        encryption::forget(self.monitor()).await?;
        added.map(drop)
    }

    /// Puts an open layer onto the active one, which is frozen by that: the export follows.
    pub async fn put_on(&self, active: &Layer, overlay: &Layer) -> Result<(), Error> {
        let arguments =
            json!({ "node": active.file.node_name(), "overlay": overlay.file.node_name() });
        self.execute(Command::new("blockdev-snapshot", arguments)).await.map(drop)
    }

    /// Closes a layer that nothing stands on.
    pub async fn close_layer(&self, layer: &Layer) -> Result<(), Error> {
        for name in graph::nodes_of(layer) {
            let arguments = json!({ "node-name": name });
            self.execute(Command::new("blockdev-del", arguments)).await?;
        }
        Ok(())
    }

    /// Opens a layer again, on what it stands on now. All that was moved into it is durable then:
    /// a job leaves its tables in the daemon's memory, and the layer open for writing.
    pub async fn reopen(
        &self,
        layer: &Layer,
        below: Option<&Layer>,
        access: Access,
    ) -> Result<(), Error> {
        let graph = self.execute(graph::query_graph()).await?;
        let reopen = graph::reopen(layer, below, access, &graph).ok_or_else(|| {
            let desc = format!("{} is not open", layer.place);
            Error::Refused { command: "blockdev-reopen", desc }
        })?;
        self.execute(reopen).await.map(drop)
    }

    /// Opens those of these layers, each on the next, read-only again that are open for writing: a
    /// job that ended early leaves one so, and nobody else could open it.
    pub async fn freeze(&self, layers: &[Layer]) -> Result<(), Error> {
        if layers.is_empty() {
            return Ok(());
        }
        let nodes = self.execute(graph::query_nodes()).await?;
        for (place, layer) in layers.iter().enumerate() {
            if graph::is_writable(layer, &nodes) {
                self.reopen(layer, layers.get(place + 1), Access::Read).await?;
            }
        }
        Ok(())
    }

    /// Sees to it that so much is let pass. What is so already is not said again: QEMU reads each
    /// byte of a command by itself (a wait in its main loop and a `recvmsg`, some 3 µs), and has the
    /// time of hundreds of volumes when a driver starts.
    pub(super) async fn require_throttle(&self, throttle: &Throttle) -> Result<(), Error> {
        let limits = self.execute(graph::query_throttle()).await?;
        if graph::is_throttle(&limits, throttle) {
            return Ok(());
        }
        self.set_throttle(throttle).await
    }

    /// Lets pass so much from now on.
    pub async fn set_throttle(&self, throttle: &Throttle) -> Result<(), Error> {
        self.execute(graph::set_throttle(throttle)).await.map(drop)
    }

    /// Gives the disk another size, which a connected guest is told of.
    ///
    /// Only while or after a client was connected: qemu-storage-daemon crashes otherwise
    /// (facts/kubevirt.md section 0.7).
    pub async fn resize(&self, size: Bytes) -> Result<(), Error> {
        let arguments = json!({ "node-name": TOP, "size": size.count() });
        self.execute(Command::new("block_resize", arguments)).await.map(drop)
    }

    /// Opens a second export, which acknowledges otherwise.
    pub async fn add_export(&self, socket: &Path, durability: Durability) -> Result<Self, Error> {
        let arguments = graph::export(socket, durability);
        self.execute(Command::new("block-export-add", arguments)).await?;
        Ok(self.exporting(socket, durability))
    }

    /// Closes an export that nobody is connected to any more.
    pub async fn remove_export(&self, durability: Durability) -> Result<(), Error> {
        self.end_export(durability.export()).await
    }

    /// Shows the volume as a file, too, at the place of an empty one. While it is shown, no job
    /// touches the active layer, nothing is committed, and the size stays as it is: a writable file
    /// holds the right to resize, and `top` is no root any more (measured with 10.0.13 and 11.1.3).
    pub async fn show_image(&self, file: &Path) -> Result<(), Error> {
        let nodes = self.execute(graph::query_nodes()).await?;
        let size = graph::size_of_top(&nodes).ok_or_else(|| {
            let desc = format!("{TOP} has no size");
            Error::Refused { command: "query-named-block-nodes", desc }
        })?;
        if graph::has_image(&nodes) {
            self.close_image().await?; // its export went when nobody waited for it any more
        }
        let [node, export] = graph::image(file, size, self.durability());
        self.execute(node).await?;
        if let Err(error) = self.execute(export).await {
            self.close_image().await?;
            return Err(error);
        }
        Ok(())
    }

    /// Begins the same in a daemon that was just started, for a volume of this size, and waits for
    /// nothing. The daemon says what came of it when it is asked: it answers in order.
    pub async fn begin_image(&self, file: &Path, size: Bytes) -> Result<(), Error> {
        for command in graph::image(file, size.count(), self.durability()) {
            self.monitor().send(command).await?;
        }
        Ok(())
    }

    /// Takes back the file, or what is left of it; whoever has it open sees errors.
    pub async fn hide_image(&self) -> Result<(), Error> {
        if self.shows_image().await? {
            self.end_export(IMAGE).await?;
        }
        if graph::has_image(&self.execute(graph::query_nodes()).await?) {
            self.close_image().await?;
        }
        Ok(())
    }

    /// Whether the volume is shown as a file, too.
    pub async fn shows_image(&self) -> Result<bool, Error> {
        self.exports(IMAGE).await
    }

    async fn close_image(&self) -> Result<(), Error> {
        let arguments = json!({ "node-name": IMAGE });
        self.execute(Command::new("blockdev-del", arguments)).await.map(drop)
    }

    async fn exports(&self, id: &str) -> Result<bool, Error> {
        let exports = self.execute(Command::new("query-block-exports", json!({}))).await?;
        Ok(exports.as_array().is_some_and(|all| all.iter().any(|export| export["id"] == id)))
    }

    pub(super) async fn end_export(&self, id: &str) -> Result<(), Error> {
        let arguments = json!({ "id": id, "mode": "hard" });
        self.execute(Command::new("block-export-del", arguments)).await?;
        let deadline = Instant::now() + FAREWELL;
        loop {
            if !self.exports(id).await? {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::Deadline { command: "block-export-del", limit: FAREWELL });
            }
            sleep(LOOK).await;
        }
    }

    /// Starts to move data between layers.
    ///
    /// A job's result stays until it is asked for (facts/qsd.md section 5). The names that QEMU
    /// writes into headers mean nothing: a graph is built from records. They must be short, though: a
    /// name made of a deep chain does not fit, and ends qemu-storage-daemon.
    pub async fn start_job(&self, upper: &Layer, way: &Way, height: Height) -> Result<(), Error> {
        let command = match way {
            Way::Stream { base, bytes_per_second } => {
                let mut arguments = json!({
                    "job-id": JOB,
                    "device": upper.file.node_name(),
                    "speed": bytes_per_second.count(),
                    "auto-finalize": false,
                    "auto-dismiss": false,
                });
                if let Some(base) = base {
                    arguments["base-node"] = base.file.node_name().into();
                    arguments["backing-file"] = base.file.to_string().into();
                }
                Command::new("block-stream", arguments)
            }
            Way::Commit { into } => {
                let mut arguments = json!({
                    "job-id": JOB,
                    "device": TOP,
                    "top-node": upper.file.node_name(),
                    "base-node": into.file.node_name(),
                    "auto-finalize": false,
                    "auto-dismiss": false,
                });
                if height == Height::Below {
                    arguments["backing-file"] = into.file.to_string().into();
                }
                Command::new("block-commit", arguments)
            }
        };
        self.execute(command).await.map(drop)
    }

    /// Has the job move so many bytes a second at most from now on.
    pub async fn set_job_speed(&self, bytes_per_second: u64) -> Result<(), Error> {
        let arguments = json!({ "device": JOB, "speed": bytes_per_second });
        self.execute(Command::new("block-job-set-speed", arguments)).await.map(drop)
    }

    /// How the job is getting on.
    pub async fn job(&self) -> Result<JobState, Error> {
        let jobs = self.execute(Command::new("query-jobs", json!({}))).await?;
        let Some(job) = jobs.as_array().and_then(|jobs| jobs.first()) else {
            return Ok(JobState::Failed("it is gone".to_owned()));
        };
        if job["status"] == "ready" {
            return Ok(JobState::Ready);
        }
        if job["status"] == "pending" {
            return Ok(JobState::Pending);
        }
        if job["status"] != "concluded" {
            let count = |key: &str| job[key].as_u64().unwrap_or_default();
            let (done, total) = (count("current-progress"), count("total-progress"));
            return Ok(JobState::Running { done, total });
        }
        Ok(match job["error"].as_str() {
            None => JobState::Done,
            Some(error) => JobState::Failed(error.to_owned()),
        })
    }

    /// Has a job that is ready end, where nobody writes: the layer below takes the place of the one
    /// that was moved.
    pub async fn complete_job(&self) -> Result<(), Error> {
        self.execute(Command::new("job-complete", json!({ "id": JOB }))).await.map(drop)
    }

    /// Has a job that is ready end as soon as nothing is left to follow, and leaves the layers in
    /// their places (facts/qsd.md section 10: consistent, without pivot).
    pub async fn end_ready_job(&self) -> Result<JobState, Error> {
        self.execute(Command::new("block-job-cancel", json!({ "device": JOB }))).await?;
        self.end_of_job("job-finalize").await
    }

    /// Has a job that has moved all change the graph.
    pub async fn finalize_job(&self) -> Result<JobState, Error> {
        self.end_of_job("job-finalize").await
    }

    /// Has the job end early; it may have been done.
    pub async fn cancel_job(&self) -> Result<JobState, Error> {
        // One that has ended in this moment refuses.
        _ = self.execute(Command::new("job-cancel", json!({ "id": JOB }))).await;
        self.end_of_job("job-cancel").await
    }

    /// Waits for the end; a job that could change the graph is told `command`.
    async fn end_of_job(&self, command: &'static str) -> Result<JobState, Error> {
        let deadline = Instant::now() + CANCELLATION;
        loop {
            match self.job().await? {
                ended @ (JobState::Done | JobState::Failed(_)) => return Ok(ended),
                JobState::Pending => {
                    self.execute(Command::new(command, json!({ "id": JOB }))).await?;
                }
                JobState::Running { .. } | JobState::Ready if Instant::now() < deadline => {
                    sleep(LOOK).await;
                }
                JobState::Running { .. } | JobState::Ready => {
                    return Err(Error::Deadline { command, limit: CANCELLATION });
                }
            }
        }
    }

    /// Forgets a job that ended.
    pub async fn dismiss_job(&self) -> Result<(), Error> {
        self.execute(Command::new("job-dismiss", json!({ "id": JOB }))).await.map(drop)
    }

    /// Ends what jobs an earlier driver left.
    pub async fn end_jobs(&self) -> Result<Jobs, Error> {
        let jobs = self.execute(Command::new("query-jobs", json!({}))).await?;
        if jobs.as_array().is_none_or(Vec::is_empty) {
            return Ok(Jobs::None);
        }
        match self.cancel_job().await? {
            JobState::Done => Ok(Jobs::ChangedGraph),
            JobState::Failed(_)
            | JobState::Running { .. }
            | JobState::Ready
            | JobState::Pending => {
                self.dismiss_job().await?;
                Ok(Jobs::LeftGraph)
            }
        }
    }
}
