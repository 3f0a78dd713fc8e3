//! What a monitoring system sees, also of a node that is in trouble.

mod log;
mod rules;

use crate::{
    copies::Source,
    disk::SmallDisk,
    harness::{Driver, GIB, create_request, part, signal, until},
    local::Use,
    relay::front::Disk,
};
use qsd_csi::csi::pb::csi as pb;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::Code;

/// How long an answer may take, whatever hangs: Prometheus waits for 10 s by default.
const IN_TIME: Duration = Duration::from_secs(4);

/// A driver whose metrics are served.
pub(crate) struct Watched {
    pub(crate) driver: Driver,
    address: String,
}

impl Watched {
    pub(crate) async fn start_with(arguments: &[&str]) -> Self {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let driver = Driver::start_with(&[&["--metrics", &address], arguments].concat()).await;
        Self { driver, address }
    }

    /// The status and the text of a page, which is there in time.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let begin = Instant::now();
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(begin.elapsed() < IN_TIME, "{path} took {:?}", begin.elapsed());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    pub(crate) async fn metrics(&self) -> Samples {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200, "{text}");
        Samples::parse(&text)
    }

    async fn probe(&self) -> Result<(), tonic::Status> {
        let begin = Instant::now();
        let answer = self.driver.identity().probe(pb::ProbeRequest {}).await;
        assert!(begin.elapsed() < IN_TIME, "Probe took {:?}", begin.elapsed());
        answer.map(drop)
    }
}

/// Metrics as the text format has them.
pub(crate) struct Samples {
    pub(crate) text: String,
    /// Kinds, by name.
    pub(crate) kinds: BTreeMap<String, String>,
    values: BTreeMap<String, f64>,
}

impl Samples {
    /// Each value is of a metric that said before what it is, and none is there twice.
    fn parse(text: &str) -> Self {
        let (mut kinds, mut helps) = (BTreeMap::new(), BTreeSet::new());
        let mut values = BTreeMap::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, words) = help.split_once(' ').unwrap();
                assert!(!words.is_empty() && helps.insert(name.to_owned()), "{line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(helps.contains(name), "{line}");
                assert_eq!(kinds.insert(name.to_owned(), kind.to_owned()), None, "{line}");
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                assert!(kinds.contains_key(family_of(&kinds, name)), "{line}");
                let before = values.insert(series.to_owned(), value.parse().unwrap());
                assert_eq!(before, None, "{line}");
            }
        }
        Self { text: text.to_owned(), kinds, values }
    }

    pub(crate) fn value(&self, series: &str) -> f64 {
        let value = self.values.get(series);
        *value.unwrap_or_else(|| panic!("{series} is not in\n{}", self.text))
    }

    /// The names of all series, without labels.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.values.keys().map(|one| one.split('{').next().unwrap().to_owned()).collect()
    }
}

/// The metric that a series belongs to.
pub(crate) fn family_of<'a>(kinds: &BTreeMap<String, String>, name: &'a str) -> &'a str {
    let is_histogram = |name: &&str| kinds.get(*name).is_some_and(|kind| kind == "histogram");
    let suffixes = ["_bucket", "_sum", "_count"].into_iter();
    let mut bare = suffixes.filter_map(|suffix| name.strip_suffix(suffix));
    bare.find(is_histogram).unwrap_or(name)
}

/// What `promtool` says of its input, if anything.
fn promtool(arguments: &[&str], input: &str) -> String {
    let mut promtool = Command::new(part("bin/promtool"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_of_calls_volumes_daemons_and_pools() {
    let watched = Watched::start_with(&[]).await;
    let driver = &watched.driver;
    driver.published("pvc-1").await;
    _ = driver.stage("not-there").await;
    let request = pb::CreateSnapshotRequest {
        name: "monday".to_owned(),
        source_volume_id: "pvc-1".to_owned(),
        ..Default::default()
    };
    driver.controller().create_snapshot(request).await.unwrap();
    signal(driver.daemons().await[0], "KILL");
    until("another daemon is counted", async || {
        watched.metrics().await.value("qsd_csi_volume_daemon_restarts_total{volume=\"pvc-1\"}")
            > 0.0
    })
    .await;
    let all = watched.metrics().await;
    for (series, value) in [
        ("qsd_csi_build_info{version=\"0.1.0\"}", 1.0),
        ("qsd_csi_serving", 1.0),
        ("qsd_csi_supervisor_up", 1.0),
        ("qsd_csi_relay_up", 1.0),
        ("qsd_csi_rpc_seconds_count{rpc=\"NodeStageVolume\",code=\"OK\"}", 1.0),
        ("qsd_csi_rpc_seconds_count{rpc=\"NodeStageVolume\",code=\"NOT_FOUND\"}", 1.0),
        ("qsd_csi_rpcs_in_flight{rpc=\"NodeStageVolume\"}", 0.0),
        ("qsd_csi_daemons", 1.0),
        ("qsd_csi_daemons_down", 0.0),
        ("qsd_csi_daemon_restarts_total{reason=\"died\"}", 1.0),
        ("qsd_csi_daemon_restarts_total{reason=\"upgraded\"}", 0.0),
        ("qsd_csi_volumes", 1.0),
        ("qsd_csi_volumes_damaged", 0.0),
        ("qsd_csi_volumes_staged", 1.0),
        ("qsd_csi_volumes_published", 1.0),
        ("qsd_csi_snapshots", 1.0),
        ("qsd_csi_layers{pool=\"main\"}", 2.0),
        ("qsd_csi_volume_layers{volume=\"pvc-1\",pool=\"main\"}", 2.0),
        ("qsd_csi_volume_size_bytes{volume=\"pvc-1\",pool=\"main\"}", 1_073_741_824.0),
        ("qsd_csi_volume_abnormal{volume=\"pvc-1\"}", 0.0),
        ("qsd_csi_pool_up{pool=\"main\"}", 1.0),
        ("qsd_csi_pool_promised_bytes{pool=\"main\"}", 1_073_741_824.0),
        ("qsd_csi_jobs{way=\"stream\"}", 0.0),
        ("qsd_csi_jobs_failing", 0.0),
        ("qsd_csi_relay_requests_in_flight{volume=\"pvc-1\"}", 0.0),
        ("qsd_csi_relay_connected_timestamp_seconds{volume=\"pvc-1\"}", 0.0),
        ("qsd_csi_relay_handovers_total{volume=\"pvc-1\"}", 0.0),
        ("qsd_csi_metrics_late{part=\"relay\"}", 0.0),
    ] {
        assert!((all.value(series) - value).abs() < 1e-9, "{series} is {}", all.value(series));
    }
    assert!(all.value("qsd_csi_startup_seconds") > 0.0);
    assert!(all.value("qsd_csi_volume_allocated_bytes{volume=\"pvc-1\",pool=\"main\"}") > 0.0);
    assert!(
        all.value("qsd_csi_pool_free_bytes{pool=\"main\"}")
            <= all.value("qsd_csi_pool_size_bytes{pool=\"main\"}")
    );
    // The naming rules of Prometheus, by its own tool.
    assert_eq!(promtool(&["check", "metrics"], &all.text), "");
    assert_eq!(watched.get("/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(watched.get("/readyz").await, (200, "ok\n".to_owned()));
    driver.remove("pvc-1").await;
    let text = watched.metrics().await.text;
    assert!(!text.contains("pvc-1"), "a volume that is gone leaves no series:\n{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_tells_how_far_it_has_come() {
    let watched = Watched::start_with(&[]).await;
    let driver = &watched.driver;
    driver.create("base").await;
    crate::look::fill(&driver.inspect().await[0].layers[0].path, 8 << 20);
    let request = pb::CreateVolumeRequest {
        volume_content_source: Some(Source::Volume("base".into()).message()),
        parameters: [("copyMode", "clone"), ("cloneBytesPerSecond", "1Mi")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        ..create_request("copy", GIB)
    };
    driver.controller().create_volume(request).await.unwrap();
    let progress = async || {
        let all = watched.metrics().await;
        let value = |name: &str| {
            let is_its = |series: &str| {
                let labels = series.strip_prefix(name)?.strip_prefix('{')?;
                Some(labels.contains("volume=\"copy\"") && labels.contains("way=\"stream\""))
            };
            let mut found = all.values.iter().filter(|(series, _)| is_its(series) == Some(true));
            found.next().map(|(_, value)| *value)
        };
        (
            all.value("qsd_csi_jobs{way=\"stream\"}"),
            value("qsd_csi_job_processed_bytes"),
            value("qsd_csi_job_size_bytes"),
        )
    };
    until("it is half way", async || {
        let (jobs, done, size) = progress().await;
        let is_under_way = done.zip(size).is_some_and(|(done, size)| 0.0 < done && done < size);
        is_under_way && jobs > 0.5
    })
    .await;
    driver.delete("copy").await.unwrap();
    until("nothing is left of it", async || progress().await == (0.0, None, None)).await;
    driver.delete("base").await.unwrap();
    driver.assert_empty().await;
}

/// The sum of how long VMs waited outlives them, and the volume.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_vm_waited_for_is_counted_once() {
    const KILLS: u8 = 3;
    let watched = Watched::start_with(&[]).await;
    let driver = &watched.driver;
    driver.published("pvc-1").await;
    let mut disk = Disk::open(&driver.socket("pvc-1"));
    let count = "qsd_csi_relay_stall_seconds_count";
    assert!(watched.metrics().await.value(count) < 0.5);
    for kill in 1..=KILLS {
        let before = driver.daemons().await;
        signal(before[0], "KILL");
        disk.works(u64::from(kill), kill);
        until("another daemon serves", async || {
            let now = driver.daemons().await;
            now.len() == 1 && now != before
        })
        .await;
    }
    until("all are counted", async || {
        watched.metrics().await.value(count) > f64::from(KILLS) - 0.5
    })
    .await;
    let all = watched.metrics().await;
    for (series, value) in [
        (count, f64::from(KILLS)),
        ("qsd_csi_relay_stall_seconds_bucket{le=\"+Inf\"}", f64::from(KILLS)),
        ("qsd_csi_relay_daemons_lost_total{volume=\"pvc-1\"}", f64::from(KILLS)),
        ("qsd_csi_daemon_restarts_total{reason=\"died\"}", f64::from(KILLS)),
    ] {
        assert!((all.value(series) - value).abs() < 1e-9, "{series} is {}", all.value(series));
    }
    let longest = all.value("qsd_csi_relay_longest_stall_seconds{volume=\"pvc-1\"}");
    let sum = all.value("qsd_csi_relay_stall_seconds_sum");
    assert!(longest > 0.0 && longest <= sum && sum <= longest * f64::from(KILLS) + 1e-3);
    assert!(all.value("qsd_csi_relay_connected_timestamp_seconds{volume=\"pvc-1\"}") > 1.7e9);
    drop(disk);
    driver.remove("pvc-1").await;
    assert!((watched.metrics().await.value(count) - f64::from(KILLS)).abs() < 1e-9);
}

/// A disk that hangs when it is told to: a volume of another driver, whose daemon is stopped.
struct Hanging {
    below: Driver,
    daemon: i32,
    mount: PathBuf,
}

impl Hanging {
    async fn new() -> Self {
        let below = Driver::start().await;
        below.made("disk", Use::Block).await;
        let device = below.opened("disk", Use::Block).await;
        let mount = below.path("mount");
        fs::create_dir(&mount).unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success());
        run(Command::new("mkfs.ext4").args(["-q", "-E", "nodiscard"]).arg(&device));
        run(Command::new("mount").arg(&device).arg(&mount));
        let daemon = below.daemons().await[0];
        Self { below, daemon, mount }
    }

    /// It does, until what is returned is dropped.
    fn hang(&self) -> Hung {
        signal(self.daemon, "STOP");
        Hung(self.daemon)
    }
}

/// While this lives, the disk hangs. It goes on before who uses it is ended, which would not end.
struct Hung(i32);

impl Drop for Hung {
    fn drop(&mut self) {
        signal(self.0, "CONT");
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        _ = Command::new("umount").arg("--lazy").arg(&self.mount).status();
        assert!(self.below.scratch().exists());
    }
}

/// Whether a line of the driver's log says this of a pool.
fn tells(driver: &Driver, message: &str, pool: &str) -> usize {
    let lines = log::lines(&driver.path("log")).into_iter();
    lines.filter(|line| line["message"] == message && line["pool"] == pool).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_whose_disk_hangs_is_named_and_holds_up_nobody() {
    let disk = Hanging::new().await;
    let pool = disk.mount.join("pool");
    let pool = format!("slow={}", pool.display());
    let mut watched = Watched::start_with(&["--pool", &pool]).await;
    let driver = &watched.driver;
    driver.published("pvc-1").await;
    let mut request = create_request("on-slow", 1 << 20);
    request.parameters = [("pool".to_owned(), "slow".to_owned())].into();
    driver.controller().create_volume(request).await.unwrap();
    assert_eq!(watched.get("/readyz").await.0, 200);
    let hung = disk.hang();
    until("the pool is lost", async || watched.get("/readyz").await.0 == 503).await;
    let before = fs::read_dir(format!("/proc/{}/task", driver.pid())).unwrap().count();
    for _ in 0..5 {
        let all = watched.metrics().await;
        assert!(all.value("qsd_csi_pool_up{pool=\"slow\"}") < 0.5);
        assert!(all.value("qsd_csi_pool_up{pool=\"main\"}") > 0.5);
        assert!(all.value("qsd_csi_volume_abnormal{volume=\"on-slow\"}") > 0.5);
        assert!(all.value("qsd_csi_volume_abnormal{volume=\"pvc-1\"}") < 0.5);
        assert!(all.value("qsd_csi_daemons") > 0.5);
        assert!(!all.text.contains("qsd_csi_pool_free_bytes{pool=\"slow\"}"));
    }
    let after = fs::read_dir(format!("/proc/{}/task", driver.pid())).unwrap().count();
    assert!(after <= before + 16, "{before} threads before, {after} after");
    assert_eq!(watched.get("/healthz").await.0, 200, "to end the process would mend nothing");
    let (status, text) = watched.get("/readyz").await;
    assert!(status == 503 && text.contains("pool slow: its disk does not answer"), "{text}");
    assert!(!text.contains("pool main"), "{text}");
    let error = watched.probe().await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(error.message(), text.trim_end(), "the same story");
    assert_eq!((tells(driver, "pool lost", "slow"), tells(driver, "pool back", "slow")), (1, 0));
    drop(hung);
    until("the pool is back", async || watched.get("/readyz").await.0 == 200).await;
    watched.probe().await.unwrap();
    assert_eq!((tells(driver, "pool lost", "slow"), tells(driver, "pool back", "slow")), (1, 1));
    assert_eq!(tells(driver, "pool lost", "main"), 0);
    driver.delete("on-slow").await.unwrap();
    driver.remove("pvc-1").await;
    // A driver that cannot even start for it says so, and is not ended for it.
    watched.driver.kill();
    let hung = disk.hang();
    watched.driver.launch(&["--metrics", &watched.address, "--pool", &pool], None);
    until("it listens", async || TcpStream::connect(&watched.address).await.is_ok()).await;
    assert_eq!(watched.get("/healthz").await.0, 200);
    let (status, text) = watched.get("/readyz").await;
    assert!(status == 503 && text.starts_with("starting"), "{text}");
    assert!(watched.metrics().await.value("qsd_csi_serving") < 0.5);
    drop(hung);
    until("it serves", async || watched.get("/readyz").await.0 == 200).await;
    assert!(watched.metrics().await.value("qsd_csi_serving") > 0.5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_away_or_read_only_is_named() {
    let disk = SmallDisk::new();
    let pool = format!("small={}", disk.path().join("pool").display());
    let watched = Watched::start_with(&["--pool", &pool]).await;
    let ready = async |words: &str| {
        let (status, text) = watched.get("/readyz").await;
        let told = watched.probe().await.map_err(|error| error.message().to_owned());
        assert_eq!(told.is_ok(), status == 200, "{text}");
        (status == 200) == words.is_empty() && text.contains(words)
    };
    assert!(ready("").await);
    let remount = |how: &str| {
        let mut mount = Command::new("mount");
        assert!(mount.args(["-o", how]).arg(disk.path()).status().unwrap().success());
    };
    remount("remount,ro");
    assert!(ready("is read-only").await);
    remount("remount,rw");
    assert!(ready("").await);
    let carry = |from: &Path, to: &Path| {
        assert!(Command::new("mv").arg(from).arg(to).status().unwrap().success());
    };
    let (here, away) = (disk.path().join("pool"), disk.path().join("away"));
    carry(&here, &away);
    assert!(ready("No such file or directory").await);
    let all = watched.metrics().await;
    assert!(all.value("qsd_csi_pool_up{pool=\"small\"}") < 0.5);
    carry(&away, &here);
    assert!(ready("").await);
    for message in ["pool lost", "pool back"] {
        assert_eq!(tells(&watched.driver, message, "small"), 2, "{message}");
    }
}

/// Nothing that is stuck keeps the metrics, and nothing is told as if it were known.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_and_a_daemon_that_are_stuck_hold_up_nobody() {
    let watched = Watched::start_with(&[]).await;
    let driver = &watched.driver;
    driver.published("pvc-1").await;
    let daemon = driver.daemons().await[0];
    let relay = crate::harness::all_of(driver).into_iter().filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).split('\0').nth(1) == Some("relay")
    });
    let stuck: Vec<_> = relay.chain([daemon]).collect();
    assert!(stuck.len() >= 3, "keeper, worker and daemon: {stuck:?}");
    for pid in &stuck {
        signal(*pid, "STOP");
    }
    for _ in 0..3 {
        let all = watched.metrics().await;
        assert!(all.value("qsd_csi_metrics_late{part=\"relay\"}") > 0.5);
        assert!(all.value("qsd_csi_relay_up") < 0.5);
        assert!(all.value("qsd_csi_daemons") > 0.5);
        assert!(!all.text.contains("qsd_csi_relay_requests_in_flight"));
        assert_eq!(watched.get("/readyz").await.0, 200);
    }
    for pid in &stuck {
        signal(*pid, "CONT");
    }
    until("the relay tells", async || {
        watched.metrics().await.value("qsd_csi_metrics_late{part=\"relay\"}") < 0.5
    })
    .await;
    driver.remove("pvc-1").await;
}
