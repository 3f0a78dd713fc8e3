//! A `qsd-csi standalone` of this run's own, and the calls that are timed.

use anyhow::{Context as _, ensure};
use pb::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
use qsd_csi::csi::pb::{
    csi::{
        self as pb, controller_client::ControllerClient, identity_client::IdentityClient,
        node_client::NodeClient,
    },
    inspect::{self, inspect_client::InspectClient},
};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::{
    process::{Child, Command},
    time::sleep,
};
use tonic::transport::{Channel, Endpoint};

/// What takes longer will never happen.
const LIMIT: Duration = Duration::from_mins(1);

/// A driver, its pool on the disk below `target/`, and its run directory on tmpfs.
pub(crate) struct Driver {
    program: PathBuf,
    process: Option<Child>,
    channel: Channel,
    disk: tempfile::TempDir,
    volatile: tempfile::TempDir,
}

impl Driver {
    /// Starts a driver on an empty pool below `target`.
    pub(crate) async fn start(target: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe()?.with_file_name("qsd-csi");
        ensure!(program.exists(), "{} is not built; run `make bench`", program.display());
        fs::create_dir_all(target)?;
        let disk = tempfile::Builder::new().prefix("run-").tempdir_in(target)?;
        // A tmpfs with a short path: socket paths have 107 bytes.
        let short = ["/dev/shm", "/tmp"].map(Path::new);
        let short = short.into_iter().find(|dir| dir.is_dir()).context("no place for sockets")?;
        let volatile = tempfile::Builder::new().prefix("qb-").tempdir_in(short)?;
        let address = format!("unix://{}", volatile.path().join("csi.sock").display());
        let channel = Endpoint::try_from(address)?.connect_lazy();
        let mut driver = Self { program, process: None, channel, disk, volatile };
        driver.launch().await?;
        Ok(driver)
    }

    /// Starts the process and waits until it answers; how long that took.
    pub(crate) async fn launch(&mut self) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let log = fs::File::options().create(true).append(true).open(self.path("log"))?;
        let process = Command::new(&self.program)
            .args(["standalone", "--node-id", "bench"])
            .arg("--endpoint")
            .arg(format!("unix://{}", self.volatile.path().join("csi.sock").display()))
            .arg("--run-dir")
            .arg(self.volatile.path().join("run"))
            .arg("--pool")
            .arg(format!("bench={}", self.pool().display()))
            .stdin(std::process::Stdio::null())
            .stderr(log)
            .env("QSD_CSI_LOG", "warn")
            .kill_on_drop(true)
            .spawn()
            .with_context(|| self.program.display().to_string())?;
        self.process = Some(process);
        while IdentityClient::new(self.channel.clone()).probe(pb::ProbeRequest {}).await.is_err() {
            ensure!(begin.elapsed() < LIMIT, "the driver does not answer; see its log");
            let ended = self.process.as_mut().and_then(|process| process.try_wait().ok().flatten());
            ensure!(ended.is_none(), "the driver ended: {}", fs::read_to_string(self.path("log"))?);
            sleep(Duration::from_millis(2)).await;
        }
        Ok(begin.elapsed())
    }

    /// Ends the process by a signal; daemons go on.
    pub(crate) async fn end(&mut self, signal: Signal) -> anyhow::Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        kill_process(pid_of(&process)?, signal)?;
        process.wait().await?;
        Ok(())
    }

    /// The process id of the driver.
    pub(crate) fn pid(&self) -> anyhow::Result<i32> {
        let process = self.process.as_ref().context("the driver runs")?;
        Ok(pid_of(process)?.as_raw_nonzero().get())
    }

    /// The process id of the supervisor, which is not our child.
    pub(crate) fn supervisor(&self) -> anyhow::Result<i32> {
        let run = self.volatile.path().join("run").display().to_string();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            let words: Vec<_> = line.split('\0').collect();
            if words.contains(&"supervisor") && words.contains(&run.as_str()) {
                return Ok(entry.file_name().to_string_lossy().parse()?);
            }
        }
        anyhow::bail!("no supervisor runs")
    }

    /// The process ids of all daemons.
    pub(crate) async fn daemons(&self) -> anyhow::Result<Vec<i32>> {
        let request = inspect::ListVolumesRequest::default();
        let mut inspect = InspectClient::new(self.channel.clone());
        let mut stream = inspect.list_volumes(request).await?.into_inner();
        let mut pids = Vec::new();
        while let Some(volume) = stream.message().await? {
            pids.extend(volume.attachment.and_then(|one| one.daemon).map(|daemon| daemon.pid));
        }
        Ok(pids)
    }

    /// The directory of the pool.
    pub(crate) fn pool(&self) -> PathBuf {
        self.path("pool")
    }

    /// The published socket of a volume.
    pub(crate) fn socket(&self, volume: &str) -> PathBuf {
        self.volatile.path().join(volume).join("vhost.sock")
    }

    pub(crate) async fn create(&self, volume: &str, size: i64) -> anyhow::Result<()> {
        let request = pb::CreateVolumeRequest {
            name: volume.to_owned(),
            capacity_range: Some(pb::CapacityRange { required_bytes: size, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            ..Default::default()
        };
        ControllerClient::new(self.channel.clone()).create_volume(request).await?;
        Ok(())
    }

    pub(crate) async fn delete(&self, volume: &str) -> anyhow::Result<()> {
        let request =
            pb::DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
        ControllerClient::new(self.channel.clone()).delete_volume(request).await?;
        Ok(())
    }

    /// Stages and publishes.
    pub(crate) async fn attach(&self, volume: &str) -> anyhow::Result<()> {
        let mut node = NodeClient::new(self.channel.clone());
        let stage = pb::NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.staging(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        node.node_stage_volume(stage).await?;
        let publish = pb::NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.staging(),
            target_path: self.target(volume),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        node.node_publish_volume(publish).await?;
        Ok(())
    }

    /// Unpublishes and unstages.
    pub(crate) async fn detach(&self, volume: &str) -> anyhow::Result<()> {
        let mut node = NodeClient::new(self.channel.clone());
        let unpublish = pb::NodeUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            target_path: self.target(volume),
        };
        node.node_unpublish_volume(unpublish).await?;
        let unstage = pb::NodeUnstageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.staging(),
        };
        node.node_unstage_volume(unstage).await?;
        Ok(())
    }

    /// Takes all volumes away, and waits until nothing of this driver runs.
    pub(crate) async fn finish(mut self, volumes: &[String]) -> anyhow::Result<()> {
        for volume in volumes {
            self.detach(volume).await?;
            self.delete(volume).await?;
        }
        self.end(Signal::TERM).await?;
        let begin = Instant::now();
        while self.supervisor().is_ok() {
            ensure!(begin.elapsed() < LIMIT, "the supervisor does not end");
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    fn staging(&self) -> String {
        self.volatile.path().display().to_string()
    }

    fn target(&self, volume: &str) -> String {
        self.volatile.path().join(volume).display().to_string()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }
}

/// What a run that broke off leaves is ended here: daemons, the supervisor, mounts.
impl Drop for Driver {
    fn drop(&mut self) {
        let volatile = self.volatile.path();
        let is_ours = |pid: i32| {
            let input = fs::read_link(format!("/proc/{pid}/fd/0"));
            input.is_ok_and(|input| input.starts_with(volatile))
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let daemons = pids.filter(|pid| is_ours(*pid)).collect::<Vec<_>>();
        for pid in self.supervisor().into_iter().chain(daemons) {
            if let Some(pid) = Pid::from_raw(pid) {
                _ = kill_process(pid, Signal::KILL);
            }
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        for point in points.filter(|point| Path::new(point).starts_with(volatile)) {
            _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

fn pid_of(process: &Child) -> anyhow::Result<Pid> {
    let pid = process.id().context("the driver has ended")?;
    Pid::from_raw(pid.try_into()?).context("a process id is not 0")
}

fn capability() -> pb::VolumeCapability {
    pb::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}
