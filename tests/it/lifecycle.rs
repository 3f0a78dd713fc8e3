//! A volume's life, each step repeated, and its bytes seen from a real VM.

use crate::{
    harness::{Driver, GIB, NODE, create_request, mount, mounts_below, names},
    vm::Vm,
};
use pb::volume_capability::access_mode::Mode;
use qsd_csi::csi::{TOPOLOGY, pb::csi as pb};
use std::{fs, os::unix::fs::PermissionsExt as _};
use tonic::Code;

#[tokio::test]
async fn every_step_may_be_repeated_and_the_last_leaves_nothing() {
    let driver = Driver::start().await;
    for _ in 0..3 {
        assert_eq!(driver.create("pvc-1").await, "pvc-1");
    }
    for _ in 0..3 {
        driver.stage("pvc-1").await.unwrap();
    }
    let daemons = driver.daemons().await;
    for _ in 0..3 {
        driver.publish("pvc-1").await.unwrap();
    }
    assert_eq!(driver.daemons().await, daemons, "one daemon, the same all the time");
    let target = driver.path("target-pvc-1");
    assert_eq!(names(&target), ["disk.img", "vhost.sock"], "a pod sees these and nothing else");
    assert_eq!(mounts_below(&target).len(), 2, "one mount each");
    let mode = fs::metadata(driver.socket("pvc-1")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    for _ in 0..3 {
        driver.unpublish("pvc-1").await.unwrap();
    }
    assert!(!target.exists(), "NodeUnpublishVolume removes the target");
    for _ in 0..3 {
        driver.unstage("pvc-1").await.unwrap();
    }
    for _ in 0..3 {
        driver.delete("pvc-1").await.unwrap();
    }
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_volume_says_what_it_is_and_where() {
    let driver = Driver::start().await;
    let request = create_request("pvc-1", GIB + 1);
    let volume = driver.controller().create_volume(request).await.unwrap().into_inner().volume;
    let volume = volume.unwrap();
    assert_eq!(volume.capacity_bytes, GIB + 4096, "rounded up to whole sectors");
    assert_eq!(volume.accessible_topology[0].segments[TOPOLOGY], NODE);
    assert_eq!(volume.volume_context["publish"], "vhost-user");
    let request = pb::ControllerGetVolumeRequest { volume_id: "pvc-1".into() };
    let got = driver.controller().controller_get_volume(request).await.unwrap().into_inner();
    assert_eq!(got.volume.unwrap(), volume);
    assert!(got.status.is_some());
}

#[tokio::test]
async fn a_vm_writes_and_another_reads_what_it_wrote() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
    assert_eq!(vm.run("cat /sys/block/vda/size").await.trim(), (GIB / 512).to_string());
    vm.run("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt").await;
    vm.run("head -c 5000000 /dev/urandom > /mnt/file").await;
    let sum = vm.run("sha256sum /mnt/file").await;
    vm.run("umount /mnt").await;
    vm.assert_no_errors().await;
    vm.power_off().await;
    // Through a new daemon, too: what was acknowledged lies in the pool and nowhere else.
    driver.unpublish("pvc-1").await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    driver.stage("pvc-1").await.unwrap();
    driver.publish("pvc-1").await.unwrap();
    let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
    vm.run("e2fsck -fn /dev/vda && mount /dev/vda /mnt").await;
    assert_eq!(vm.run("sha256sum /mnt/file").await, sum);
    vm.power_off().await;
    let used = stats(&driver, "pvc-1", &driver.text("target-pvc-1")).await.unwrap().usage[0].used;
    assert!((5_000_000..GIB).contains(&used), "{used}");
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn no_tenant_reads_what_another_wrote() {
    let driver = Driver::start().await;
    driver.published("first").await;
    driver.published("second").await;
    let mut vm = Vm::boot(&driver.socket("first")).await;
    vm.run("yes secret | dd of=/dev/vda bs=1M count=64 iflag=fullblock").await;
    vm.power_off().await;
    assert_blank(&driver, "second").await;
    driver.remove("first").await;
    // The same name is a new volume, on space that may be the old one's.
    driver.published("first").await;
    assert_blank(&driver, "first").await;
    driver.remove("first").await;
    driver.remove("second").await;
    driver.assert_empty().await;
}

async fn assert_blank(driver: &Driver, volume: &str) {
    let mut vm = Vm::boot(&driver.socket(volume)).await;
    let zeroes = "dd if=/dev/vda bs=1M count=128 | cmp -n 134217728 - /dev/zero";
    vm.run(zeroes).await;
    vm.power_off().await;
}

#[tokio::test]
async fn a_discard_gives_space_back_to_the_pool() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let target = driver.text("target-pvc-1");
    let mut vm = Vm::boot(&driver.socket("pvc-1")).await;
    vm.run("yes | dd of=/dev/vda bs=1M count=64 iflag=fullblock && sync").await;
    let full = stats(&driver, "pvc-1", &target).await.unwrap().usage[0].used;
    vm.run("blkdiscard /dev/vda").await;
    let empty = stats(&driver, "pvc-1", &target).await.unwrap().usage[0].used;
    assert!(full >= 64 << 20 && empty < 1 << 20, "{full} {empty}");
    vm.power_off().await;
    driver.remove("pvc-1").await;
}

async fn stats(
    driver: &Driver,
    volume_id: &str,
    path: &str,
) -> Result<pb::NodeGetVolumeStatsResponse, tonic::Status> {
    let request = pb::NodeGetVolumeStatsRequest {
        volume_id: volume_id.into(),
        volume_path: path.into(),
        ..Default::default()
    };
    driver.node().node_get_volume_stats(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn stats_are_told_where_the_volume_is() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    for path in ["staging-pvc-1", "target-pvc-1"] {
        let usage = stats(&driver, "pvc-1", &driver.text(path)).await.unwrap().usage;
        assert_eq!((usage[0].total, usage[0].used, usage[0].available), (GIB, 0, GIB));
    }
    let error = stats(&driver, "pvc-1", &driver.text("elsewhere")).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().contains("elsewhere"), "{error}");
    driver.remove("pvc-1").await;
}

/// The second-publish table of the CSI spec (`NodePublishVolume`).
#[tokio::test]
async fn only_a_multi_writer_is_published_twice() {
    let driver = Driver::start().await;
    for (name, mode, second) in [
        ("snw", Mode::SingleNodeWriter, Some(Code::FailedPrecondition)),
        ("snsw", Mode::SingleNodeSingleWriter, Some(Code::FailedPrecondition)),
        ("snmw", Mode::SingleNodeMultiWriter, None),
    ] {
        let mut create = create_request(name, GIB);
        create.volume_capabilities = vec![mount(mode)];
        driver.controller().create_volume(create).await.unwrap();
        let mut stage = driver.stage_request(name);
        fs::create_dir(&stage.staging_target_path).unwrap();
        stage.volume_capability = Some(mount(mode));
        driver.node().node_stage_volume(stage).await.unwrap();
        let mut publish = driver.publish_request(name);
        publish.volume_capability = Some(mount(mode));
        driver.node().node_publish_volume(publish.clone()).await.unwrap();
        let mut other = publish.clone();
        other.target_path = driver.text(&format!("other-{name}"));
        let outcome = driver.node().node_publish_volume(other.clone()).await;
        assert_eq!(outcome.err().map(|error| error.code()), second, "{name}");
        assert_eq!(driver.path(&format!("other-{name}")).exists(), second.is_none());
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: name.into(),
            target_path: other.target_path,
        };
        driver.node().node_unpublish_volume(request).await.unwrap();
        assert!(driver.socket(name).exists(), "the first target is untouched");
        driver.remove(name).await;
    }
    driver.assert_empty().await;
}
