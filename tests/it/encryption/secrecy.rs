//! Nothing of what was written to an encrypted volume, nor its passphrase, is seen anywhere.

use super::{ENCRYPTED, KEY, PASSPHRASE, SIZE, Source, Wish};
use crate::{
    harness::{Driver, create_request, mount, processes},
    remote::create,
};
use qsd_csi::csi::pb::csi::{
    self as pb,
    volume_capability::{AccessType, BlockVolume, access_mode::Mode},
};
use qsd_csi_vhost::Disk;
use std::{
    collections::HashMap,
    fs,
    io::Write as _,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::PathBuf,
    process::Command,
};

/// A way to use a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    VhostUser,
    Block,
    Filesystem,
}

impl Use {
    fn capability(self) -> pb::VolumeCapability {
        match self {
            Self::VhostUser | Self::Filesystem => mount(Mode::SingleNodeWriter),
            Self::Block => pb::VolumeCapability {
                access_type: Some(AccessType::Block(BlockVolume {})),
                ..mount(Mode::SingleNodeWriter)
            },
        }
    }
}

/// What is written: 4 KiB that are found by any line of them.
const LINE: &str = "the treasure lies below the old oak tree, three feet north of it";

fn pattern() -> Vec<u8> {
    let mut pattern = LINE.repeat(4096 / LINE.len() + 1).into_bytes();
    pattern.truncate(4096);
    pattern
}

/// The secrets of a request.
fn secrets() -> HashMap<String, String> {
    HashMap::from([(KEY.to_owned(), PASSPHRASE.to_owned())])
}

async fn create_as(driver: &Driver, way: Use, parameters: &[(&'static str, &'static str)]) {
    let of = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    let publish = if way == Use::Filesystem { "filesystem" } else { "vhost-user" };
    let more = [("publish", publish)];
    let parameters = parameters.iter().chain(&more);
    let request = pb::CreateVolumeRequest {
        volume_capabilities: vec![way.capability()],
        parameters: parameters.map(of).collect(),
        secrets: secrets(),
        ..create_request("pvc-1", SIZE.try_into().unwrap())
    };
    create(driver, request).await.unwrap();
}

async fn open(driver: &Driver, way: Use) {
    let mut request = driver.stage_request("pvc-1");
    fs::create_dir_all(&request.staging_target_path).unwrap();
    request.volume_capability = Some(way.capability());
    request.secrets = secrets();
    driver.node().node_stage_volume(request).await.unwrap();
    let mut request = driver.publish_request("pvc-1");
    request.volume_capability = Some(way.capability());
    driver.node().node_publish_volume(request).await.unwrap();
}

/// Expands the volume with all secrets that CSI has for that; they are not needed.
async fn expand(driver: &Driver, way: Use, size: u64) {
    let range = pb::CapacityRange { required_bytes: size.try_into().unwrap(), limit_bytes: 0 };
    let request = pb::ControllerExpandVolumeRequest {
        volume_id: "pvc-1".into(),
        capacity_range: Some(range),
        secrets: secrets(),
        ..Default::default()
    };
    driver.controller().controller_expand_volume(request).await.unwrap();
    if way == Use::Filesystem {
        return; // ext4 grows under a pod only with a capability that not every machine gives
    }
    let request = pb::NodeExpandVolumeRequest {
        volume_id: "pvc-1".into(),
        volume_path: driver.text("target-pvc-1"),
        capacity_range: Some(range),
        secrets: secrets(),
        ..Default::default()
    };
    driver.node().node_expand_volume(request).await.unwrap();
}

/// Writes the pattern as a VM or a pod does, and reads it again.
fn put(driver: &Driver, way: Use, offset: u64) {
    let pattern = pattern();
    match way {
        Use::VhostUser => {
            let mut disk = Disk::connect(&driver.socket("pvc-1"), 1 << 20).unwrap();
            disk.write(offset, &pattern).unwrap();
            assert!(disk.read(offset, pattern.len()).unwrap() == pattern);
        }
        Use::Block | Use::Filesystem => {
            let target = driver.path("target-pvc-1");
            let (path, is_file) = match way {
                Use::Filesystem => (target.join("file"), true),
                Use::Block | Use::VhostUser => (target, false),
            };
            let mut options = fs::File::options();
            options.read(true).write(true).create(is_file).custom_flags(libc::O_SYNC);
            let device = options.open(path).unwrap();
            device.write_all_at(&pattern, offset).unwrap();
            let mut found = vec![0; pattern.len()];
            device.read_exact_at(&mut found, offset).unwrap();
            assert!(found == pattern);
        }
    }
}

/// Where a text stands: files of the driver, and what all processes of the machine were started
/// with. Only the volume as its user has it is not looked at: a file served by the daemon, and what
/// is mounted.
fn seen(driver: &Driver, text: &str) -> Vec<String> {
    let mut needle = tempfile::NamedTempFile::new().unwrap(); // or it would be seen in `grep` itself
    needle.write_all(text.as_bytes()).unwrap();
    let mut grep = Command::new("grep");
    grep.args(["-rlaF", "--exclude=disk.*", "--exclude-dir=target-*", "--exclude-dir=staging-*"]);
    grep.arg("-f").arg(needle.path()).arg(driver.scratch());
    let output = grep.env("LC_ALL", "C").output().unwrap();
    let files = String::from_utf8(output.stdout).unwrap();
    let mut places: Vec<_> = files.lines().map(str::to_owned).collect();
    for pid in processes(|_| true) {
        for name in ["cmdline", "environ"] {
            let path = format!("/proc/{pid}/{name}");
            let bytes = fs::read(&path).unwrap_or_default();
            if bytes.windows(text.len()).any(|window| window == text.as_bytes()) {
                places.push(path);
            }
        }
    }
    places
}

/// How many files a search looks into, and how many bytes they have.
fn extent(driver: &Driver) -> (usize, u64) {
    let mut dirs = vec![driver.scratch().to_owned()];
    let (mut count, mut bytes) = (0, 0);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            let data = path.symlink_metadata().unwrap();
            if data.is_dir() {
                dirs.push(path);
            } else if data.is_file() {
                (count, bytes) = (count + 1, bytes + data.len());
            }
        }
    }
    (count, bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_what_is_written_nor_the_passphrase_is_seen_anywhere() {
    let mut driver = Driver::start().await;
    driver.log_everything();
    driver.restart().await;
    for way in [Use::VhostUser, Use::Block, Use::Filesystem] {
        for parameters in [&[][..], &ENCRYPTED] {
            let is_encrypted = !parameters.is_empty();
            create_as(&driver, way, parameters).await;
            assert_eq!(seen(&driver, PASSPHRASE), [""; 0], "after CreateVolume");
            open(&driver, way).await;
            put(&driver, way, 1 << 20);
            driver.snapshot("snap-1", "pvc-1").await.unwrap();
            put(&driver, way, 2 << 20);
            let copy = Source::Snapshot("snap-1".into());
            let copy =
                Wish { name: "pvc-2".into(), size: SIZE, source: Some(copy), parameters: vec![] };
            driver.fulfil(&copy).await.unwrap();
            driver.restart().await;
            put(&driver, way, 3 << 20);
            expand(&driver, way, 2 * SIZE).await;
            put(&driver, way, 2 * SIZE - 4096);
            let (files, bytes) = extent(&driver);
            let (plain, secret) = (seen(&driver, LINE), seen(&driver, PASSPHRASE));
            eprintln!(
                "{way:?}, encrypted: {is_encrypted}: {files} files with {bytes} bytes and all of \
                 /proc/*/{{cmdline,environ}}: the pattern in {} places, the passphrase in {}",
                plain.len(),
                secret.len()
            );
            let kept = driver.part().join("secrets.json").display().to_string();
            if is_encrypted {
                assert_eq!(plain, [""; 0], "{way:?}");
                assert_eq!(secret, [kept], "{way:?}");
            } else {
                assert_eq!(plain.len(), 2, "{way:?}: {plain:?}"); // a layer each
                assert!(plain.iter().all(|place| place.contains("/pool/layers/")), "{plain:?}");
                assert_eq!(secret, [""; 0], "{way:?}");
            }
            driver.unpublish("pvc-1").await.unwrap();
            driver.unstage("pvc-1").await.unwrap();
            let found = seen(&driver, LINE).len();
            assert_eq!(found, if is_encrypted { 0 } else { 2 }, "{way:?}, at rest");
            assert_eq!(seen(&driver, PASSPHRASE), [""; 0], "after NodeUnstageVolume");
            for volume in ["pvc-1", "pvc-2"] {
                driver.delete(volume).await.unwrap();
            }
            driver.delete_snapshot("snap-1").await.unwrap();
            driver.assert_empty().await;
        }
    }
}
