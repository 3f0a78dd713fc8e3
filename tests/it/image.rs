//! `disk.img` beside the socket: for whoever knows only files, as `KubeVirt` without a hook does.

use crate::{
    copies::Source,
    harness::{Driver, GIB, LIMIT, is_alive, mounts_below, part, signal, until},
    local::verify,
    vm::Vm,
};
use qsd_csi::csi::pb::csi::{
    VolumeCapability,
    volume_capability::{AccessType, MountVolume},
};
use std::{
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};
use tonic::Code;

/// The group of `KubeVirt`'s QEMU.
const GROUP: u32 = 107;

impl Driver {
    fn image(&self, volume_id: &str) -> PathBuf {
        self.path(&format!("target-{volume_id}")).join("disk.img")
    }

    /// Stages and publishes a volume for a group.
    async fn attach_for(&self, volume_id: &str, group: &str) -> Result<(), tonic::Status> {
        let give = |capability: Option<VolumeCapability>| {
            let mount = MountVolume { volume_mount_group: group.into(), ..MountVolume::default() };
            let access_type = Some(AccessType::Mount(mount));
            Some(VolumeCapability { access_type, ..capability.unwrap() })
        };
        let mut stage = self.stage_request(volume_id);
        stage.volume_capability = give(stage.volume_capability);
        fs::create_dir_all(&stage.staging_target_path).unwrap();
        self.node().node_stage_volume(stage).await?;
        let mut publish = self.publish_request(volume_id);
        publish.volume_capability = give(publish.volume_capability);
        self.node().node_publish_volume(publish).await.map(drop)
    }

    fn layer(&self) -> PathBuf {
        fs::read_dir(self.path("pool/layers")).unwrap().next().unwrap().unwrap().path()
    }
}

fn size_of(file: &Path) -> u64 {
    fs::metadata(file).unwrap().len()
}

/// Whether a QEMU that has the socket as its disk gets so far as to wait for its monitor.
fn is_let_in(socket: &Path) -> bool {
    let qemu = Command::new(part("bin/qemu-system-x86_64"))
        .args(["-nodefaults", "-display", "none", "-S", "-machine", "q35,accel=tcg"])
        .args(["-machine", "memory-backend=mem", "-m", "64M"])
        .args(["-object", "memory-backend-memfd,id=mem,size=64M,share=on"])
        .args(["-chardev", &format!("socket,id=disk,path={}", socket.display())])
        .args(["-device", "vhost-user-blk-pci,chardev=disk"])
        .args(["-monitor", "stdio"])
        .output() // its monitor ends with its empty standard input, and so does it
        .unwrap();
    qemu.status.success()
}

/// What somebody else may do with a file: a dd that runs as this user and group.
fn may(user: u32, group: u32, words: &[&str]) -> bool {
    let who = [format!("--reuid={user}"), format!("--regid={group}")];
    let mut command = Command::new("setpriv");
    command.args(who).args(["--clear-groups", "dd", "bs=4096", "count=1", "conv=notrunc"]);
    command.args(words).output().unwrap().status.success()
}

#[tokio::test]
async fn a_volume_is_a_file_as_well() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let image = driver.image("pvc-1");
    let data = fs::metadata(&image).unwrap();
    assert!(data.is_file());
    assert_eq!(data.len(), u64::try_from(GIB).unwrap());
    verify(&image);
    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
    file.write_all_at(b"a page", 12345).unwrap();
    file.sync_all().unwrap();
    let mut read = [0; 6];
    fs::File::open(driver.layer()).unwrap().read_exact_at(&mut read, 12345).unwrap();
    assert_eq!(&read, b"a page");
    // Its size is the volume's, whatever a pod does.
    for size in [0, 1 << 20, 2 << 30] {
        assert!(file.set_len(size).is_err());
    }
    assert!(file.write_at(b"x", u64::try_from(GIB).unwrap()).is_err());
    assert_eq!(size_of(&driver.layer()), u64::try_from(GIB).unwrap());
    assert!(fs::remove_file(&image).is_err());
    drop(file);
    driver.unpublish("pvc-1").await.unwrap();
    assert_eq!(mounts_below(&driver.path("target-pvc-1")), Vec::<PathBuf>::new());
    driver.publish("pvc-1").await.unwrap();
    assert_eq!(size_of(&image), data.len());
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_group_may_use_file_and_socket_and_nobody_else() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    for group in ["qemu", "-1", "4294967296", "107 "] {
        let error = driver.attach_for("pvc-1", group).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(&format!("volume_mount_group {group:?}")), "{error}");
    }
    driver.attach_for("pvc-1", &GROUP.to_string()).await.unwrap();
    let other = driver.attach_for("pvc-1", "108").await.unwrap_err();
    assert_eq!(other.code(), Code::AlreadyExists);
    let (image, socket) = (driver.image("pvc-1"), driver.socket("pvc-1"));
    for file in [&image, &socket] {
        let data = fs::metadata(file).unwrap();
        assert_eq!((data.mode() & 0o7777, data.uid(), data.gid()), (0o660, 0, GROUP));
    }
    // The scratch directory is ours alone; a pod has the target as its own.
    fs::set_permissions(driver.scratch(), fs::Permissions::from_mode(0o755)).unwrap();
    let text = image.display();
    for (user, group, is_let_in) in [(GROUP, GROUP, true), (GROUP, 108, false), (1000, 1000, false)]
    {
        assert_eq!(may(user, group, &[&format!("if={text}"), "of=/dev/null"]), is_let_in);
        assert_eq!(may(user, group, &["if=/dev/zero", &format!("of={text}")]), is_let_in);
    }
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_vm_that_knows_no_socket_has_its_disk_in_the_file() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let mut vm = Vm::on_file(&driver.image("pvc-1")).boot().await;
    vm.run("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt").await;
    vm.run("dd if=/dev/urandom of=/mnt/one bs=1M count=16 && sync").await;
    driver.snapshot("monday", "pvc-1").await.unwrap();
    driver.restart().await;
    vm.run("cp /mnt/one /mnt/two && sync && rm /mnt/one && fstrim /mnt").await;
    let sum = vm.run("md5sum < /mnt/two").await;
    // While it is in use, nothing is done that it would not survive.
    for refused in [driver.expand("pvc-1", 2 << 30).await, driver.upgrade("pvc-1").await] {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("in use as disk.img"), "{error}");
    }
    // Nor does anybody write beside it.
    assert!(!is_let_in(&driver.socket("pvc-1")), "a second writer was let in");
    vm.assert_no_errors().await;
    vm.run("umount /mnt").await;
    vm.power_off().await;
    driver.expand("pvc-1", 2 << 30).await.unwrap();
    assert_eq!(size_of(&driver.image("pvc-1")), 2 << 30);
    driver.upgrade("pvc-1").await.unwrap();
    assert_eq!(size_of(&driver.image("pvc-1")), 2 << 30);
    let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
    vm.run("mount /dev/vda /mnt").await;
    assert_eq!(vm.run("md5sum < /mnt/two").await, sum);
    vm.power_off().await;
    driver.create_from("copy", Source::Snapshot("monday".into())).await.unwrap();
    driver.attach("copy").await;
    let mut vm = Vm::on_file(&driver.image("copy")).boot().await;
    vm.run("mount /dev/vda /mnt").await;
    assert_eq!(vm.run("md5sum < /mnt/one").await, sum);
    vm.power_off().await;
}

#[tokio::test]
async fn a_vm_at_the_socket_closes_the_file() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.attach_for("pvc-1", &GROUP.to_string()).await.unwrap();
    let image = driver.image("pvc-1");
    let mode = || fs::metadata(&image).unwrap().mode() & 0o777;
    assert_eq!(mode(), 0o660);
    let vm = Vm::boot(&driver.socket("pvc-1")).await;
    until("the file is closed", async || mode() == 0).await;
    fs::set_permissions(driver.scratch(), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(!may(GROUP, GROUP, &["if=/dev/zero", &format!("of={}", image.display())]));
    // What the file would forbid.
    driver.expand("pvc-1", 2 << 30).await.unwrap();
    driver.upgrade("pvc-1").await.unwrap();
    assert_eq!(size_of(&image), 0);
    vm.power_off().await;
    until("the file is back", async || size_of(&image) == 2 << 30 && mode() == 0o660).await;
    verify(&image);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn the_file_ends_with_its_daemon_and_the_next_has_another() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let image = driver.image("pvc-1");
    let open = fs::File::options().read(true).write(true).open(&image).unwrap();
    open.write_all_at(b"kept", 0).unwrap();
    open.sync_all().unwrap();
    let [daemon] = driver.daemons().await[..] else { panic!("one daemon") };
    signal(daemon, "KILL");
    let mut read = [0; 4];
    until("the old file is dead", async || open.read_exact_at(&mut read, 0).is_err()).await;
    until("there is another", async || fs::metadata(&image).is_ok_and(|data| data.len() > 0)).await;
    assert!(open.write_at(b"late", 0).is_err());
    fs::File::open(&image).unwrap().read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"kept");
    // A daemon that hangs keeps nobody from leaving.
    let [daemon] = driver.daemons().await[..] else { panic!("one daemon") };
    signal(daemon, "STOP");
    let begin = Instant::now();
    driver.remove("pvc-1").await;
    assert!(begin.elapsed() < LIMIT, "{:?}", begin.elapsed());
    assert!(!is_alive(daemon));
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_chain_stays_short_while_the_file_is_in_use() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let image = driver.image("pvc-1");
    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
    for round in 0..14_u8 {
        file.write_all_at(&[round + 1; 4096], u64::from(round) << 20).unwrap();
        driver.snapshot(&format!("s{round}"), "pvc-1").await.unwrap();
        driver.delete_snapshot(&format!("s{round}")).await.unwrap();
    }
    // The layer that the file writes to, and eight below it.
    let layers = async || fs::read_dir(driver.path("pool/layers")).unwrap().count();
    until("the chain is short", async || layers().await <= 9).await;
    for round in 0..14_u8 {
        let mut read = [0; 4096];
        file.read_exact_at(&mut read, u64::from(round) << 20).unwrap();
        assert_eq!(read, [round + 1; 4096]);
    }
    drop(file);
    driver.unpublish("pvc-1").await.unwrap();
    until("it is one layer", async || layers().await == 1).await;
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// As kubelet does after its restart.
#[tokio::test]
async fn calls_that_are_repeated_show_the_file_once() {
    let mut driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.attach_for("pvc-1", "107").await.unwrap();
    let daemons = driver.daemons().await;
    let file = fs::File::open(driver.image("pvc-1")).unwrap();
    for round in 0..50 {
        driver.attach_for("pvc-1", "107").await.unwrap();
        if round == 25 {
            driver.restart().await;
        }
    }
    assert_eq!(driver.daemons().await, daemons);
    let image = driver.image("pvc-1");
    let target = driver.path("target-pvc-1");
    assert_eq!(mounts_below(&target), [target, image.clone()]);
    assert_eq!(mounts_below(driver.scratch()).len(), 3, "the file itself, and what is published");
    let mut read = [0; 4096];
    file.read_exact_at(&mut read, 0).unwrap();
    drop(file);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}
