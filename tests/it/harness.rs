//! A driver in a scratch directory, and the calls that tests make. `Drop` ends every process and
//! mount of it, whatever a test did.

use qsd_csi::csi::pb::{
    csi::{
        self as pb, controller_client::ControllerClient, identity_client::IdentityClient,
        node_client::NodeClient, snapshot_metadata_client::SnapshotMetadataClient,
        volume_capability,
    },
    inspect::{self, inspect_client::InspectClient, thing},
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use tonic::{Response, Status, transport::Channel};
use volume_capability::{AccessType, MountVolume, access_mode::Mode};

/// How long anything may take before a test gives up on it: far longer than it ever does.
pub(crate) const LIMIT: Duration = Duration::from_mins(2);

/// The node every driver here is.
pub(crate) const NODE: &str = "node-1";

/// The pool every driver here has.
pub(crate) const POOL: &str = "main";

/// One GiB, the size of most volumes here.
pub(crate) const GIB: i64 = 1 << 30;

/// A driver and all that is its own.
pub(crate) struct Driver {
    scratch: tempfile::TempDir,
    process: Option<Child>,
    channel: Channel,
    qsd: PathBuf,
    log_level: &'static str,
    clock: Option<PathBuf>,
}

/// A part that `make setup` installs.
pub(crate) fn part(path: &str) -> PathBuf {
    let deps = std::env::var_os("QSD_CSI_DEPS").map_or_else(
        || {
            let home = std::env::var_os("HOME").expect("HOME is set");
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            cache.unwrap_or_else(|| Path::new(&home).join(".cache")).join("qsd-csi")
        },
        PathBuf::from,
    );
    let part = deps.join(path);
    assert!(part.exists(), "{} is missing; run `make setup`", part.display());
    part
}

/// The command that every test runs: the built driver.
pub(crate) fn qsd_csi() -> Command {
    Command::new(env!("CARGO_BIN_EXE_qsd-csi"))
}

/// Waits until `done` says so.
pub(crate) async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !done().await {
        assert!(begin.elapsed() < LIMIT, "waited too long: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// All there is on a node.
#[derive(Debug, Default)]
pub(crate) struct Things {
    pub(crate) pools: Vec<inspect::Pool>,
    pub(crate) layers: Vec<inspect::Layer>,
    pub(crate) volumes: Vec<inspect::Volume>,
    pub(crate) snapshots: Vec<inspect::Snapshot>,
}

impl Driver {
    /// A driver on an empty pool.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// A driver on an empty pool, with more arguments.
    pub(crate) async fn start_with(arguments: &[&str]) -> Self {
        Self::start_on(part("bin/qemu-storage-daemon"), arguments).await
    }

    /// A driver on an empty pool, with a storage daemon of one's own.
    pub(crate) async fn start_on(qsd: PathBuf, arguments: &[&str]) -> Self {
        let scratch = tempfile::Builder::new().prefix("qsd-").tempdir().unwrap();
        let address = format!("unix://{}", scratch.path().join("csi.sock").display());
        let channel = tonic::transport::Endpoint::try_from(address).unwrap().connect_lazy();
        let mut driver =
            Self { scratch, process: None, channel, qsd, log_level: "info", clock: None };
        driver.launch(arguments, None);
        driver.answers().await;
        driver
    }

    /// Starts the process, with a crash point armed if one is named.
    pub(crate) fn launch(&mut self, arguments: &[&str], crash_at: Option<&str>) {
        assert!(self.process.is_none(), "one at a time");
        let log = fs::File::options().append(true).create(true).open(self.path("log")).unwrap();
        let mut command = qsd_csi();
        command
            .arg("standalone")
            .args(["--endpoint", &self.endpoint()])
            .args(["--node-id", NODE])
            .arg("--run-dir")
            .arg(self.path("run"))
            .arg("--pool")
            .arg(format!("{POOL}={}", self.path("pool").display()))
            .arg("--qsd")
            .arg(&self.qsd)
            .args(arguments)
            .env_remove("CSI_ENDPOINT")
            .env("QSD_CSI_LOG", self.log_level)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        command.envs(self.clock.iter().map(|clock| ("QSD_CSI_CLOCK", clock)));
        if let Some(point) = crash_at {
            command.env("QSD_CSI_CRASH_AT", point);
        }
        self.process = Some(command.spawn().unwrap());
    }

    /// Waits until the driver answers.
    pub(crate) async fn answers(&self) {
        until("the driver answers", async || {
            self.identity().probe(pb::ProbeRequest {}).await.is_ok()
        })
        .await;
    }

    /// The process id of the driver.
    pub(crate) fn pid(&self) -> i32 {
        self.process.as_ref().unwrap().id().try_into().unwrap()
    }

    /// Whether the driver is not there, or has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        let ended = self.process.as_mut().is_none_or(|one| one.try_wait().unwrap().is_some());
        if ended {
            self.process = None;
        }
        ended
    }

    /// Waits for the driver to end by itself.
    pub(crate) fn ended(&mut self) -> std::process::ExitStatus {
        let (mut process, begin) = (self.process.take().unwrap(), Instant::now());
        loop {
            if let Some(status) = process.try_wait().unwrap() {
                return status;
            }
            if begin.elapsed() > LIMIT {
                self.process = Some(process); // so that it is ended with the test
                panic!("the driver does not end by itself");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the driver as the loss of the process would.
    pub(crate) fn kill(&mut self) {
        self.process.as_mut().unwrap().kill().unwrap();
        self.ended();
    }

    /// Ends the driver as an upgrade would.
    pub(crate) async fn terminate(&mut self) -> std::process::ExitStatus {
        let mut process = self.process.take().unwrap();
        signal(process.id().try_into().unwrap(), "TERM");
        // Our own connection must live on to say farewell.
        tokio::task::spawn_blocking(move || process.wait().unwrap()).await.unwrap()
    }

    /// Has all of it that is started from now on log all it can.
    pub(crate) fn log_everything(&mut self) {
        self.log_level = "trace";
    }

    /// Has all of it that is started from now on tell the time by a file in the scratch directory.
    pub(crate) fn set_clock(&mut self, name: &str) {
        self.clock = Some(self.path(name));
    }

    /// Kills the driver and starts it again.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        self.launch(&[], None);
        self.answers().await;
    }

    /// Loses the run directory.
    pub(crate) fn wipe_run(&self) {
        // Or the places of files would not go.
        let mounts = mounts_below(self.scratch());
        mounts.iter().filter(|one| one.ends_with("disk.img")).for_each(|file| unmount(file));
        fs::remove_dir_all(self.path("run")).unwrap();
    }

    /// A path in the scratch directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// The scratch directory, with everything of this driver below it.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// The part of the run directory of the one volume that is staged.
    pub(crate) fn part(&self) -> PathBuf {
        let run = self.path("run");
        let mut keys = names(&run).into_iter().filter(|name| name.len() == 32);
        let key = keys.next().unwrap();
        assert_eq!(keys.next(), None, "one volume is staged");
        run.join(key)
    }

    /// The same as text, for messages.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Where it serves.
    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.text("csi.sock"))
    }

    /// The connection that all its clients share.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(crate) fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    pub(crate) fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    pub(crate) fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    pub(crate) fn metadata(&self) -> SnapshotMetadataClient<Channel> {
        SnapshotMetadataClient::new(self.channel.clone())
    }

    /// What the driver tells people of all volumes.
    pub(crate) async fn inspect(&self) -> Vec<inspect::Volume> {
        let mut client = InspectClient::new(self.channel.clone());
        let request = inspect::ListVolumesRequest::default();
        let mut stream = client.list_volumes(request).await.unwrap().into_inner();
        let mut volumes = Vec::new();
        while let Some(volume) = stream.message().await.unwrap() {
            volumes.push(volume);
        }
        volumes
    }

    /// What the driver tells people of snapshots.
    pub(crate) async fn snapshots(
        &self,
        snapshot_id: &str,
        source_volume_id: &str,
    ) -> Result<Vec<inspect::Snapshot>, Status> {
        let mut client = InspectClient::new(self.channel.clone());
        let request = inspect::ListSnapshotsRequest {
            snapshot_id: snapshot_id.into(),
            source_volume_id: source_volume_id.into(),
        };
        let mut stream = client.list_snapshots(request).await?.into_inner();
        let mut snapshots = Vec::new();
        while let Some(snapshot) = stream.message().await? {
            snapshots.push(snapshot);
        }
        Ok(snapshots)
    }

    /// What the driver tells people of all there is.
    pub(crate) async fn look(&self) -> Things {
        let mut client = InspectClient::new(self.channel.clone());
        let mut stream = client.look(inspect::LookRequest {}).await.unwrap().into_inner();
        let mut things = Things::default();
        while let Some(inspect::Thing { thing }) = stream.message().await.unwrap() {
            match thing.unwrap() {
                thing::Thing::Pool(pool) => things.pools.push(pool),
                thing::Thing::Layer(layer) => things.layers.push(layer),
                thing::Thing::Volume(volume) => things.volumes.push(volume),
                thing::Thing::Snapshot(snapshot) => things.snapshots.push(snapshot),
                thing::Thing::Driver(_) => {}
            }
        }
        things
    }

    /// Moves a volume to another daemon, whatever it has.
    pub(crate) async fn upgrade(&self, volume_id: &str) -> Result<(), Status> {
        self.move_daemon(volume_id, true).await.map(drop)
    }

    /// Moves a volume to the newest daemon.
    pub(crate) async fn try_upgrade(
        &self,
        volume_id: &str,
    ) -> Result<inspect::UpgradeDaemonResponse, Status> {
        self.move_daemon(volume_id, false).await
    }

    async fn move_daemon(
        &self,
        volume_id: &str,
        force: bool,
    ) -> Result<inspect::UpgradeDaemonResponse, Status> {
        let mut client = InspectClient::new(self.channel.clone());
        let request = inspect::UpgradeDaemonRequest { volume_id: volume_id.into(), force };
        client.upgrade_daemon(request).await.map(Response::into_inner)
    }

    /// The process ids of all daemons that serve.
    pub(crate) async fn daemons(&self) -> Vec<i32> {
        let volumes = self.inspect().await.into_iter();
        volumes.filter_map(|volume| Some(volume.attachment?.daemon?.pid)).collect()
    }

    /// Creates a volume of 1 GiB; its id.
    pub(crate) async fn create(&self, name: &str) -> String {
        self.try_create(name).await.unwrap()
    }

    pub(crate) async fn try_create(&self, name: &str) -> Result<String, Status> {
        let response = self.controller().create_volume(create_request(name, GIB)).await?;
        Ok(response.into_inner().volume.unwrap().volume_id)
    }

    pub(crate) async fn delete(&self, volume_id: &str) -> Result<(), Status> {
        let request = pb::DeleteVolumeRequest { volume_id: volume_id.into(), ..Default::default() };
        self.controller().delete_volume(request).await.map(Response::into_inner).map(drop)
    }

    /// Stages a volume at its own place in the scratch directory.
    pub(crate) async fn stage(&self, volume_id: &str) -> Result<(), Status> {
        let request = self.stage_request(volume_id);
        fs::create_dir_all(&request.staging_target_path).unwrap();
        self.node().node_stage_volume(request).await.map(drop)
    }

    pub(crate) fn stage_request(&self, volume_id: &str) -> pb::NodeStageVolumeRequest {
        pb::NodeStageVolumeRequest {
            volume_id: volume_id.into(),
            staging_target_path: self.text(&format!("staging-{volume_id}")),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        }
    }

    /// Publishes a staged volume at its own place in the scratch directory.
    pub(crate) async fn publish(&self, volume_id: &str) -> Result<(), Status> {
        let request = self.publish_request(volume_id);
        self.node().node_publish_volume(request).await.map(drop)
    }

    pub(crate) fn publish_request(&self, volume_id: &str) -> pb::NodePublishVolumeRequest {
        pb::NodePublishVolumeRequest {
            volume_id: volume_id.into(),
            staging_target_path: self.text(&format!("staging-{volume_id}")),
            target_path: self.text(&format!("target-{volume_id}")),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        }
    }

    pub(crate) async fn unpublish(&self, volume_id: &str) -> Result<(), Status> {
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: volume_id.into(),
            target_path: self.text(&format!("target-{volume_id}")),
        };
        self.node().node_unpublish_volume(request).await.map(drop)
    }

    pub(crate) async fn unstage(&self, volume_id: &str) -> Result<(), Status> {
        let request = pb::NodeUnstageVolumeRequest {
            volume_id: volume_id.into(),
            staging_target_path: self.text(&format!("staging-{volume_id}")),
        };
        self.node().node_unstage_volume(request).await.map(drop)
    }

    /// Creates, stages and publishes a volume; its id.
    pub(crate) async fn published(&self, name: &str) -> String {
        let volume = self.create(name).await;
        self.stage(&volume).await.unwrap();
        self.publish(&volume).await.unwrap();
        volume
    }

    /// The published socket of a volume.
    pub(crate) fn socket(&self, volume_id: &str) -> PathBuf {
        self.path(&format!("target-{volume_id}")).join("vhost.sock")
    }

    /// Unpublishes, unstages and deletes a volume.
    pub(crate) async fn remove(&self, volume_id: &str) {
        self.unpublish(volume_id).await.unwrap();
        self.unstage(volume_id).await.unwrap();
        self.delete(volume_id).await.unwrap();
    }

    /// Asserts that no volume left anything: no record, layer, run directory, mount or daemon.
    pub(crate) async fn assert_empty(&self) {
        assert_eq!(self.inspect().await, [], "volumes");
        for dir in names(&self.path("pool/records")) {
            let dir = format!("pool/records/{dir}");
            assert_eq!(names(&self.path(&dir)), [""; 0], "{dir}");
        }
        for dir in ["pool/layers", "pool/locks"] {
            assert_eq!(names(&self.path(dir)), [""; 0], "{dir}");
        }
        let mut run = names(&self.path("run"));
        run.retain(|name| name != "relay"); // from the first daemon on
        let own = ["boot", "supervisor.lock", "supervisor.log", "supervisor.sock"];
        assert_eq!(run, own, "the run directory");
        assert_eq!(mounts_below(self.scratch.path()), Vec::<PathBuf>::new(), "mounts");
        assert_eq!(daemons_below(self.scratch.path()), [0; 0], "daemons");
        assert_eq!(loops_below(self.scratch.path()), [""; 0], "loop devices");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if std::thread::panicking() || std::env::var_os("QSD_CSI_TELL").is_some() {
            let log = fs::read_to_string(self.path("log")).unwrap_or_default();
            let [supervisor, relay] = ["run/supervisor.log", "run/relay/relay.log"]
                .map(|name| fs::read_to_string(self.path(name)).unwrap_or_default());
            eprintln!("driver:\n{log}\nsupervisor:\n{supervisor}\nrelay:\n{relay}");
        }
        if let Some(mut process) = self.process.take() {
            _ = process.kill();
            _ = process.wait();
        }
        let scratch = self.scratch.path();
        // In the order in which they would start each other again.
        for pids in [supervisors_of, relays_of, |run: &Path| daemons_below(run)] {
            for pid in pids(&self.path("run")) {
                signal(pid, "KILL");
                let begin = Instant::now();
                while is_alive(pid) && begin.elapsed() < LIMIT {
                    sleep(Duration::from_millis(2));
                }
            }
        }
        // One that is in use goes with its last mount. Without that of its file it has no name.
        for device in loops_below(scratch) {
            _ = Command::new("losetup").arg("--detach").arg(format!("/dev/{device}")).status();
        }
        for mount in mounts_below(scratch).into_iter().rev() {
            _ = Command::new("umount").arg("--lazy").arg(mount).status();
        }
    }
}

/// A request for a blank volume.
pub(crate) fn create_request(name: &str, size: i64) -> pb::CreateVolumeRequest {
    pb::CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(pb::CapacityRange { required_bytes: size, limit_bytes: 0 }),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

/// The capability of the vhost-user form with this access mode.
pub(crate) fn mount(mode: Mode) -> pb::VolumeCapability {
    pb::VolumeCapability {
        access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// Sends a signal to a process of ours.
pub(crate) fn signal(pid: i32, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status();
    assert!(sent.is_ok());
}

/// Whether a process is there and is not only waiting to be reaped.
pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// The supervisors of a run directory.
pub(crate) fn supervisors_of(run: &Path) -> Vec<i32> {
    processes_with(run, "supervisor")
}

/// The relays of a run directory: keepers, then workers.
pub(crate) fn relays_of(run: &Path) -> Vec<i32> {
    let mut pids = processes_with(run, "relay");
    pids.sort_by_key(|pid| words_of(*pid).contains(&"work".to_owned()));
    pids
}

/// All that runs for a driver, as it would be gone after a reboot, in the order in which they would
/// start each other again.
pub(crate) fn all_of(driver: &Driver) -> Vec<i32> {
    let run = driver.path("run");
    [supervisors_of(&run), relays_of(&run), daemons_below(driver.scratch())].concat()
}

/// The storage daemons whose lock lies below a directory.
pub(crate) fn daemons_below(dir: &Path) -> Vec<i32> {
    processes(|pid| {
        let lock = fs::read_link(format!("/proc/{pid}/fd/0"));
        lock.is_ok_and(|lock| {
            let place = lock.parent().and_then(Path::file_name);
            lock.starts_with(dir) && place.is_some_and(|place| place != "relay")
        })
    })
}

fn processes_with(run: &Path, word: &str) -> Vec<i32> {
    let (run, word) = (run.display().to_string(), word.to_owned());
    processes(|pid| {
        let words = words_of(pid);
        words.contains(&word) && words.contains(&run)
    })
}

fn words_of(pid: i32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).split('\0').map(str::to_owned).collect()
}

pub(crate) fn processes(is_meant: impl Fn(i32) -> bool) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_meant(*pid)).collect()
}

/// The mount points below a directory.
pub(crate) fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(dir)).collect()
}

/// Takes away a mount, whoever uses it.
pub(crate) fn unmount(mount: &Path) {
    let unmounted = Command::new("umount").arg("--lazy").arg(mount).status();
    assert!(unmounted.unwrap().success(), "{}", mount.display());
}

/// The loop devices over files below a directory.
pub(crate) fn loops_below(dir: &Path) -> Vec<String> {
    let devices = names(Path::new("/sys/block")).into_iter();
    let is_below = |device: &String| {
        let file = fs::read_to_string(format!("/sys/block/{device}/loop/backing_file"));
        file.is_ok_and(|file| Path::new(file.trim_end()).starts_with(dir))
    };
    devices.filter(is_below).collect()
}

/// The names in a directory, in order.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Numbers that look random and are the same for the same seed.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `sides`; the constants are Knuth's for MMIX.
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}
