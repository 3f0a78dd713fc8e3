//! Volumes that are used through the kernel: block devices, and file systems on them.

use crate::{
    copies::Source,
    harness::{
        Driver, GIB, LIMIT, create_request, daemons_below, loops_below, mount, mounts_below,
        relays_of, signal, until,
    },
};
use qsd_csi::csi::pb::csi::{
    self as pb, VolumeCapability,
    volume_capability::{AccessType, BlockVolume, MountVolume, access_mode::Mode},
};
use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};
use tonic::{Code, Status};

/// xfs takes no less than 300 MiB.
const SIZE: i64 = 512 << 20;

/// The ways to use a volume through the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Block,
    Ext4,
    Xfs,
}

const USES: [Use; 3] = [Use::Block, Use::Ext4, Use::Xfs];

impl Use {
    pub(crate) fn capability(self) -> VolumeCapability {
        let filesystem = |name: &str| {
            AccessType::Mount(MountVolume { fs_type: name.into(), ..MountVolume::default() })
        };
        let access_type = Some(match self {
            Self::Block => AccessType::Block(BlockVolume {}),
            Self::Ext4 => filesystem(""),
            Self::Xfs => filesystem("xfs"),
        });
        VolumeCapability { access_type, ..mount(Mode::SingleNodeWriter) }
    }

    pub(crate) fn create(
        self,
        name: &str,
        source: Option<&Source>,
        size: i64,
    ) -> pb::CreateVolumeRequest {
        let publish = if self == Self::Block { "vhost-user" } else { "filesystem" };
        pb::CreateVolumeRequest {
            volume_capabilities: vec![self.capability()],
            volume_content_source: source.map(Source::message),
            parameters: [("publish".to_owned(), publish.to_owned())].into(),
            ..create_request(name, size)
        }
    }
}

impl Driver {
    pub(crate) async fn made(&self, name: &str, way: Use) {
        self.controller().create_volume(way.create(name, None, SIZE)).await.unwrap();
    }

    pub(crate) async fn stage_as(&self, name: &str, way: Use) -> Result<(), Status> {
        let mut request = self.stage_request(name);
        request.volume_capability = Some(way.capability());
        fs::create_dir_all(&request.staging_target_path).unwrap();
        self.node().node_stage_volume(request).await.map(drop)
    }

    pub(crate) async fn publish_as(&self, name: &str, way: Use) -> Result<(), Status> {
        let mut request = self.publish_request(name);
        request.volume_capability = Some(way.capability());
        self.node().node_publish_volume(request).await.map(drop)
    }

    pub(crate) async fn opened(&self, name: &str, way: Use) -> PathBuf {
        self.stage_as(name, way).await.unwrap();
        self.publish_as(name, way).await.unwrap();
        self.path(&format!("target-{name}"))
    }

    pub(crate) async fn close(&self, name: &str) {
        let begin = Instant::now();
        self.unpublish(name).await.unwrap();
        self.unstage(name).await.unwrap();
        assert!(begin.elapsed() < LIMIT / 2, "{:?}", begin.elapsed());
        assert_eq!(loops_below(self.scratch()), Vec::<String>::new());
    }

    /// What the layers of all volumes take of the disk, in bytes.
    pub(crate) fn spent(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        let layers = fs::read_dir(self.path("pool/layers")).unwrap();
        layers.map(|layer| layer.unwrap().metadata().unwrap().blocks() * 512).sum()
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let (out, error) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {out}{error}");
    out.into_owned()
}

/// Random writes that fio checks afterwards, several at a time and past the page cache.
pub(crate) fn verify(file: &Path) {
    let file = format!("--filename={}", file.display());
    let load = ["--name=verify", "--direct=1", "--rw=randrw", "--ioengine=libaio", "--iodepth=16"];
    let check = ["--verify=crc32c", "--verify_fatal=1", "--bs=4k-64k", "--bs_unaligned=0"];
    // Or fio leaves a note for a later run where it was started.
    let size = ["--size=64m", "--io_size=64m", "--verify_state_save=0"];
    let arguments = [&load[..], &check[..], &size[..], &[&file]].concat();
    run("fio", &arguments);
}

/// Writes durably, and reads back past the page cache.
fn put(target: &Path, way: Use, text: &[u8]) {
    let mut file = open(target, way);
    file.write_all(text).unwrap();
    file.sync_all().unwrap();
}

fn get(target: &Path, way: Use, length: usize) -> Vec<u8> {
    let mut file = open(target, way);
    let mut bytes = vec![0; length];
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_exact(&mut bytes).unwrap();
    bytes
}

fn open(target: &Path, way: Use) -> fs::File {
    let mut options = fs::File::options();
    options.read(true).write(true);
    match way {
        Use::Block => options.open(target),
        Use::Ext4 | Use::Xfs => options.create(true).open(target.join("file")),
    }
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_is_there_whenever_it_is_published() {
    let driver = Driver::start().await;
    for way in USES {
        driver.made("pvc-1", way).await;
        let target = driver.opened("pvc-1", way).await;
        match way {
            Use::Block => {
                assert!(fs::metadata(&target).unwrap().file_type().is_block_device());
                verify(&target);
            }
            Use::Ext4 | Use::Xfs => verify(&target.join("load")),
        }
        put(&target, way, b"kept");
        driver.close("pvc-1").await;
        let target = driver.opened("pvc-1", way).await;
        assert_eq!(get(&target, way, 4), b"kept", "{way:?}");
        driver.close("pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
}

/// As kubelet does after it was started anew (facts/kubernetes.md section 2h).
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_repeated_change_nothing() {
    let mut driver = Driver::start().await;
    for way in USES {
        driver.made("pvc-1", way).await;
        driver.opened("pvc-1", way).await;
        let seen = |driver: &Driver| {
            (
                mounts_below(&driver.path("target-pvc-1")),
                mounts_below(&driver.path("staging-pvc-1")),
                loops_below(driver.scratch()),
                daemons_below(driver.scratch()),
            )
        };
        let before = seen(&driver);
        assert_eq!((before.0.len(), before.2.len(), before.3.len()), (1, 1, 1), "{way:?}");
        for round in 0..50 {
            if round == 25 {
                driver.restart().await;
            }
            driver.opened("pvc-1", way).await;
        }
        assert_eq!(seen(&driver), before, "{way:?}");
        driver.close("pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_grows_where_it_is_used() {
    let driver = Driver::start().await;
    for way in USES {
        driver.made("pvc-1", way).await;
        let target = driver.opened("pvc-1", way).await;
        put(&target, way, b"kept");
        let request = pb::ControllerExpandVolumeRequest {
            volume_id: "pvc-1".into(),
            capacity_range: Some(pb::CapacityRange { required_bytes: 2 * SIZE, limit_bytes: 0 }),
            volume_capability: Some(way.capability()),
            ..Default::default()
        };
        let grown = driver.controller().controller_expand_volume(request).await.unwrap();
        assert_eq!(grown.into_inner().node_expansion_required, way != Use::Block);
        let request = pb::NodeExpandVolumeRequest {
            volume_id: "pvc-1".into(),
            volume_path: target.display().to_string(),
            capacity_range: Some(pb::CapacityRange { required_bytes: 2 * SIZE, limit_bytes: 0 }),
            ..Default::default()
        };
        for _ in 0..2 {
            let expanded = driver.node().node_expand_volume(request.clone()).await;
            if let (Use::Ext4, Err(refused)) = (way, &expanded) {
                // The kernel asks for more than root has in some places.
                assert!(refused.message().contains("CAP_SYS_RESOURCE"), "{refused}");
                assert_eq!(refused.code(), Code::FailedPrecondition);
                driver.close("pvc-1").await;
                driver.opened("pvc-1", way).await;
                continue;
            }
            expanded.unwrap();
        }
        let size = match way {
            Use::Block => open(&target, way).seek(SeekFrom::End(0)).unwrap(),
            Use::Ext4 | Use::Xfs => total(&driver, &target).await,
        };
        let whole = u64::try_from(2 * SIZE).unwrap();
        assert!(size > whole / 10 * 8, "{way:?}: {size}");
        assert_eq!(get(&target, way, 4), b"kept");
        driver.close("pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
    }
    driver.assert_empty().await;
}

async fn total(driver: &Driver, target: &Path) -> u64 {
    let request = pb::NodeGetVolumeStatsRequest {
        volume_id: "pvc-1".into(),
        volume_path: target.display().to_string(),
        ..Default::default()
    };
    let stats = driver.node().node_get_volume_stats(request).await.unwrap().into_inner();
    assert_eq!(stats.usage.len(), 2, "bytes and inodes");
    stats.usage[0].total.try_into().unwrap()
}

/// Whoever uses it sees errors, and all that stands on it can be taken down and put up again.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_dies_and_the_volume_can_be_published_again() {
    let driver = Driver::start().await;
    for way in USES {
        driver.made("pvc-1", way).await;
        let target = driver.opened("pvc-1", way).await;
        put(&target, way, b"kept");
        let mut used = open(&target, way);
        signal(driver.daemons().await[0], "KILL");
        until("writing fails", async || {
            used.write_all(&[7; 4096]).and_then(|()| used.sync_all()).is_err()
        })
        .await;
        drop(used);
        until("it is served again", async || driver.daemons().await.len() == 1).await;
        driver.close("pvc-1").await;
        let target = driver.opened("pvc-1", way).await;
        assert_eq!(get(&target, way, 4), b"kept", "{way:?}");
        // A pod that is not told, and kubelet that repeats its calls. A daemon that ends well takes
        // its file away, and with it the name of the device.
        for end in ["KILL", "TERM"] {
            let devices = loops_below(driver.scratch());
            let before = driver.daemons().await;
            signal(before[0], end);
            until("it is served again", async || {
                let now = driver.daemons().await;
                now.len() == 1 && now != before
            })
            .await;
            until("it is published again", async || {
                let opened =
                    [driver.stage_as("pvc-1", way).await, driver.publish_as("pvc-1", way).await];
                opened.iter().all(Result::is_ok)
            })
            .await;
            assert_eq!(get(&target, way, 4), b"kept", "{way:?}");
            driver.close("pvc-1").await;
            for device in devices {
                let file = format!("/sys/block/{device}/loop/backing_file");
                let is_left = async || fs::read(&file).is_ok_and(|name| name == b"/\n");
                until("the device goes", async || !is_left().await).await;
            }
            driver.opened("pvc-1", way).await;
        }
        driver.close("pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_is_never_overwritten_by_a_file_system() {
    let driver = Driver::start().await;
    let signature = |offset: u64, bytes: &'static [u8]| (offset, bytes);
    for (offset, bytes) in [
        signature(0, b"LUKS\xba\xbe\x00\x01"),
        signature(510, b"\x55\xaa"),
        signature(100 << 20, b"something"),
    ] {
        driver.made("pvc-1", Use::Ext4).await;
        let layer = fs::read_dir(driver.path("pool/layers")).unwrap().next().unwrap().unwrap();
        let file = fs::File::options().write(true).open(layer.path()).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        let refused = driver.stage_as("pvc-1", Use::Ext4).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        let mut read = vec![0; bytes.len()];
        fs::File::open(layer.path()).unwrap().read_exact_at(&mut read, offset).unwrap();
        assert_eq!(read, bytes);
        driver.delete("pvc-1").await.unwrap();
    }
    driver.made("pvc-1", Use::Ext4).await;
    driver.opened("pvc-1", Use::Ext4).await;
    driver.close("pvc-1").await;
    let refused = driver.stage_as("pvc-1", Use::Xfs).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("ext4"), "{refused}");
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// Also in the middle of making the file system.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_any_point_of_staging_a_file_system_heals_by_itself() {
    let mut driver = Driver::start().await;
    for way in [Use::Ext4, Use::Xfs] {
        for point in POINTS {
            driver.made("pvc-1", way).await;
            driver.kill();
            driver.launch(&[], Some(point));
            driver.answers().await;
            driver.stage_as("pvc-1", way).await.unwrap_err();
            assert!(!driver.ended().success(), "{point}");
            if point == "node-stage-formatting" {
                let layer = fs::read_dir(driver.path("pool/layers")).unwrap().next().unwrap();
                let mut options = fs::File::options();
                let file =
                    options.write(true).custom_flags(libc::O_SYNC).open(layer.unwrap().path());
                file.unwrap().write_all_at(&vec![7; 1 << 16], 1 << 16).unwrap();
            }
            driver.launch(&[], None);
            driver.answers().await;
            let staged = usize::from(point == "node-stage-done");
            assert_eq!(loops_below(driver.scratch()).len(), staged, "{point}");
            let target = driver.opened("pvc-1", way).await;
            put(&target, way, b"kept");
            driver.close("pvc-1").await;
            driver.delete("pvc-1").await.unwrap();
            driver.assert_empty().await;
        }
    }
}

/// What was not synced is written as it is unmounted, which takes the daemon.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_wrote_is_there_though_its_unstaging_broke_off() {
    let mut driver = Driver::start().await;
    for way in [Use::Ext4, Use::Xfs] {
        driver.made("pvc-1", way).await;
        let target = driver.opened("pvc-1", way).await;
        open(&target, way).write_all(b"kept").unwrap();
        driver.unpublish("pvc-1").await.unwrap();
        driver.kill();
        driver.launch(&[], Some("node-unstage-intent"));
        driver.answers().await;
        driver.unstage("pvc-1").await.unwrap_err();
        assert!(!driver.ended().success());
        driver.launch(&[], None);
        driver.answers().await;
        let target = driver.opened("pvc-1", way).await;
        assert_eq!(get(&target, way, 4), b"kept");
        driver.close("pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
}

/// The points that staging a file system comes past.
pub(crate) const POINTS: [&str; 6] = [
    "node-stage-daemon",
    "node-stage-served",
    "node-stage-formatting",
    "node-stage-made",
    "node-stage-mounted",
    "node-stage-done",
];

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_file_systems_are_mounted_beside_their_origin() {
    let driver = Driver::start().await;
    for way in [Use::Ext4, Use::Xfs] {
        driver.made("pvc-1", way).await;
        let target = driver.opened("pvc-1", way).await;
        put(&target, way, b"first");
        driver.snapshot("snap-1", "pvc-1").await.unwrap();
        put(&target, way, b"later");
        let source = Source::Snapshot("snap-1".into());
        let request = way.create("pvc-2", Some(&source), 2 * SIZE);
        driver.controller().create_volume(request).await.unwrap();
        let copy = driver.opened("pvc-2", way).await;
        assert_eq!(get(&copy, way, 5), b"first", "{way:?}");
        assert_eq!(get(&target, way, 5), b"later", "{way:?}");
        let sizes = [&target, &copy].map(|at| rustix::fs::statvfs(at).unwrap().f_blocks);
        assert!(sizes[1] > sizes[0] / 10 * 17, "the copy fills its volume: {sizes:?}");
        for name in ["pvc-1", "pvc-2"] {
            driver.remove(name).await;
        }
        driver.delete_snapshot("snap-1").await.unwrap();
        driver.assert_empty().await;
    }
}

/// It is not started again and again where there is nothing to relay.
#[tokio::test(flavor = "multi_thread")]
async fn one_relay_stays_for_as_long_as_daemons_run() {
    let driver = Driver::start().await;
    driver.made("pvc-1", Use::Block).await;
    driver.stage_as("pvc-1", Use::Block).await.unwrap();
    let run = driver.path("run");
    until("it runs", async || relays_of(&run).len() == 2).await;
    let relays = relays_of(&run);
    // Twice as long as it stays without anything to do.
    tokio::time::sleep(std::time::Duration::from_secs(12)).await;
    assert_eq!(relays_of(&run), relays);
    driver.unstage("pvc-1").await.unwrap();
    until("it ends", async || relays_of(&run).is_empty()).await;
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_in_a_file_system_is_given_back_to_the_pool() {
    let driver = Driver::start().await;
    driver.made("pvc-1", Use::Ext4).await;
    let target = driver.opened("pvc-1", Use::Ext4).await;
    driver.snapshot("snap-1", "pvc-1").await.unwrap();
    let before = driver.spent();
    fs::File::create(target.join("large")).unwrap().write_all(&vec![7; 64 << 20]).unwrap();
    run("sync", &["-f", target.to_str().unwrap()]);
    let full = driver.spent();
    fs::remove_file(target.join("large")).unwrap();
    run("sync", &["-f", target.to_str().unwrap()]);
    run("fstrim", &[target.to_str().unwrap()]);
    let after = driver.spent();
    eprintln!("{} MiB before, {} full, {} trimmed", before >> 20, full >> 20, after >> 20);
    assert!(full > before + (60 << 20), "{before} {full}");
    assert!(after < before + (8 << 20), "{before} {after}");
    driver.close("pvc-1").await;
    driver.delete_snapshot("snap-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_use_that_cannot_be_is_refused_with_its_reason() {
    let driver = Driver::start().await;
    driver.made("pvc-1", Use::Block).await;
    driver.opened("pvc-1", Use::Block).await;
    let as_socket = driver.stage("pvc-1").await.unwrap_err();
    assert_eq!(as_socket.code(), Code::AlreadyExists, "{as_socket}");
    assert!(as_socket.message().contains("block device"), "{as_socket}");
    let moved = driver.upgrade("pvc-1").await.unwrap_err();
    assert_eq!(moved.code(), Code::FailedPrecondition, "{moved}");
    driver.close("pvc-1").await;
    driver.delete("pvc-1").await.unwrap();
    let mut ntfs = Use::Ext4.create("pvc-1", None, GIB);
    let filesystem = MountVolume { fs_type: "ntfs".into(), ..MountVolume::default() };
    ntfs.volume_capabilities[0].access_type = Some(AccessType::Mount(filesystem));
    let refused = driver.controller().create_volume(ntfs).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("ntfs"), "{refused}");
    driver.assert_empty().await;
}
