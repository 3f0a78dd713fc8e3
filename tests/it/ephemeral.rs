//! Ephemeral inline volumes: what kubelet asks for with one call, and takes away with another.

use crate::{
    crash::{crash_at, relaunch},
    disk::{SmallDisk, fill},
    harness::{Driver, all_of, is_alive, mount, mounts_below, names, qsd_csi, signal, until},
    local::Use,
};
use qsd_csi::csi::pb::csi::{self as pb, volume_capability::access_mode::Mode};
use std::{fs, io::Write as _, path::PathBuf, process::Command};
use tonic::{Code, Status};

/// As kubelet calls one.
const ID: &str = "csi-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Where the driver dies while it publishes one.
const PUBLISHING: [&str; 10] = [
    "volume-create-intent",
    "volume-create-layer",
    "volume-create-done",
    "ephemeral-created",
    "node-stage-intent",
    "node-stage-formatting",
    "node-stage-done",
    "ephemeral-staged",
    "node-publish-intent",
    "node-publish-done",
];

/// Where the driver dies while it takes one away.
const LEAVING: [&str; 9] = [
    "node-unpublish-removed",
    "ephemeral-unpublished",
    "node-unstage-intent",
    "node-unstage-stopped",
    "ephemeral-unstaged",
    "volume-delete-intent",
    "layer-remove-file",
    "layer-remove-done",
    "volume-delete-reclaimed",
];

/// The points that only these volumes come past.
pub(crate) const POINTS: [&str; 4] =
    ["ephemeral-created", "ephemeral-staged", "ephemeral-unpublished", "ephemeral-unstaged"];

fn request(driver: &Driver, attributes: &[(&str, &str)]) -> pb::NodePublishVolumeRequest {
    let of_kubelet = [
        ("csi.storage.k8s.io/ephemeral", "true"),
        ("csi.storage.k8s.io/pod.name", "web-0"),
        ("csi.storage.k8s.io/serviceAccount.tokens", "a token that is nobody's business"),
    ];
    let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    pb::NodePublishVolumeRequest {
        volume_id: ID.into(),
        target_path: target(driver).display().to_string(),
        volume_capability: Some(mount(Mode::SingleNodeWriter)),
        volume_context: attributes.iter().chain(&of_kubelet).map(text).collect(),
        ..Default::default()
    }
}

fn target(driver: &Driver) -> PathBuf {
    driver.path("target-of-pod")
}

async fn publish(driver: &Driver, attributes: &[(&str, &str)]) -> Result<(), Status> {
    driver.node().node_publish_volume(request(driver, attributes)).await.map(drop)
}

async fn unpublish(driver: &Driver) -> Result<(), Status> {
    let request = pb::NodeUnpublishVolumeRequest {
        volume_id: ID.into(),
        target_path: target(driver).display().to_string(),
    };
    driver.node().node_unpublish_volume(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_of_a_pod_comes_and_goes_with_it() {
    let mut driver = Driver::start().await;
    for attributes in
        [&[][..], &[("size", "400Mi"), ("pool", "main")], &[("publish", "vhost-user")]]
    {
        publish(&driver, attributes).await.unwrap();
        let is_socket = attributes.contains(&("publish", "vhost-user"));
        let file = target(&driver).join(if is_socket { "vhost.sock" } else { "file" });
        if !is_socket {
            fs::File::create(&file).unwrap().write_all(b"kept").unwrap();
        }
        for round in 0..6 {
            if round == 3 {
                driver.restart().await;
            }
            publish(&driver, attributes).await.unwrap();
            // With the socket comes a file.
            assert_eq!(mounts_below(&target(&driver)).len(), 1 + usize::from(is_socket));
            assert!(file.exists());
        }
        let volume = driver.inspect().await.remove(0);
        let size = if attributes.contains(&("size", "400Mi")) { 400 << 20 } else { 1 << 30 };
        assert_eq!((volume.name.as_str(), volume.capacity_bytes), (ID, size));
        assert!(volume.ephemeral);
        assert!(!format!("{volume:?}").contains("a token"), "{volume:?}");
        let stats = pb::NodeGetVolumeStatsRequest {
            volume_id: ID.into(),
            volume_path: target(&driver).display().to_string(),
            ..Default::default()
        };
        let stats = driver.node().node_get_volume_stats(stats).await.unwrap().into_inner();
        assert_eq!(stats.usage.len(), if is_socket { 1 } else { 2 });
        let endpoint = driver.endpoint();
        let mut list = qsd_csi();
        list.args(["volume", "list", "--endpoint", &endpoint]);
        let told = tokio::task::block_in_place(|| list.output().unwrap()).stdout;
        assert!(String::from_utf8_lossy(&told).contains("published, ephemeral"));
        for _ in 0..3 {
            unpublish(&driver).await.unwrap();
            assert!(!target(&driver).exists());
            driver.assert_empty().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_leaves_nothing_of_a_volume_of_a_pod() {
    let mut driver = Driver::start().await;
    for (point, comes_back) in PUBLISHING.iter().flat_map(|point| [(point, true), (point, false)]) {
        crash_at(&mut driver, point).await;
        publish(&driver, &[]).await.unwrap_err();
        assert!(!driver.ended().success(), "{point}");
        relaunch(&mut driver).await;
        if comes_back {
            publish(&driver, &[]).await.unwrap();
            assert_eq!(mounts_below(&target(&driver)).len(), 1, "{point}");
        }
        unpublish(&driver).await.unwrap();
        driver.assert_empty().await;
    }
    for point in LEAVING {
        publish(&driver, &[]).await.unwrap();
        crash_at(&mut driver, point).await;
        unpublish(&driver).await.unwrap_err();
        assert!(!driver.ended().success(), "{point}");
        relaunch(&mut driver).await;
        unpublish(&driver).await.unwrap();
        driver.assert_empty().await;
    }
}

/// Kubelet takes away what the node had when it went down, or starts the pod again.
#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_leaves_nothing_of_a_pod_that_does_not_come_back() {
    let mut driver = Driver::start().await;
    for comes_back in [false, true] {
        publish(&driver, &[]).await.unwrap();
        let mut file = fs::File::create(target(&driver).join("file")).unwrap();
        file.write_all(b"kept").and_then(|()| file.sync_all()).unwrap();
        drop(file);
        reboot(&mut driver).await;
        assert_eq!(driver.inspect().await.len(), 1, "nobody knows yet whether the pod comes back");
        if comes_back {
            publish(&driver, &[]).await.unwrap();
            assert_eq!(fs::read(target(&driver).join("file")).unwrap(), b"kept");
        }
        unpublish(&driver).await.unwrap();
        driver.assert_empty().await;
    }
}

/// No process and no mount is left, and the run directory is empty.
async fn reboot(driver: &mut Driver) {
    driver.kill();
    for pid in all_of(driver) {
        signal(pid, "KILL");
        until("it is gone", async || !is_alive(pid)).await;
    }
    // Without the mount of its file a device has no name by which it is found.
    for device in crate::harness::loops_below(driver.scratch()) {
        _ = Command::new("losetup").arg("--detach").arg(format!("/dev/{device}")).status();
    }
    for point in mounts_below(driver.scratch()).into_iter().rev() {
        assert!(Command::new("umount").arg("--lazy").arg(point).status().unwrap().success());
    }
    fs::remove_dir_all(driver.path("run")).unwrap();
    relaunch(driver).await;
}

#[tokio::test]
async fn what_a_pod_cannot_have_leaves_nothing_behind() {
    let driver = Driver::start().await;
    for (attributes, said) in [
        (&[("size", "-1")][..], "volume_context: size is \"-1\""),
        (&[("snapshot", "gold")], "unknown key \"snapshot\""),
        (&[("pool", "none")], "pool is \"none\""),
        (&[("copyMode", "twice")], "copyMode is \"twice\""),
        (&[("source", "nbd+unix:///e?socket=/run/x")], "a pod cannot name a file of its node"),
    ] {
        let refused = publish(&driver, attributes).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(said), "{refused}");
    }
    let staged = pb::NodePublishVolumeRequest {
        staging_target_path: driver.text("staging"),
        ..request(&driver, &[])
    };
    let refused = driver.node().node_publish_volume(staged).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let no_kubelet = pb::NodePublishVolumeRequest {
        volume_context: [("ephemeral".to_owned(), "true".to_owned())].into(),
        ..request(&driver, &[])
    };
    let refused = driver.node().node_publish_volume(no_kubelet).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused}");
    // Somebody's files are where it should appear.
    fs::create_dir(target(&driver)).unwrap();
    fs::File::create(target(&driver).join("file")).unwrap();
    let refused = publish(&driver, &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    fs::remove_dir_all(target(&driver)).unwrap();
    driver.assert_empty().await;
    // A volume that is no pod's own is not taken for one.
    driver.create(ID).await;
    let refused = publish(&driver, &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
    unpublish(&driver).await.unwrap();
    let volume = driver.inspect().await.remove(0);
    assert!(!volume.ephemeral);
    driver.delete(&volume.volume_id).await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_pool_without_room_has_none_for_a_pod() {
    let disk = SmallDisk::new();
    let pool = format!("small={}", disk.path().join("pool").display());
    let driver = Driver::start_with(&["--pool", &pool]).await;
    let attributes = [("pool", "small"), ("size", "16Mi")];
    let filler = fill(&disk.path());
    let refused = publish(&driver, &attributes).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    fs::remove_file(filler).unwrap();
    publish(&driver, &attributes).await.unwrap();
    unpublish(&driver).await.unwrap();
    assert_eq!(names(&disk.path().join("pool/layers")), [""; 0]);
    driver.assert_empty().await;
}

/// Beside a pod's own volume others go their ways.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_no_pods_own_stays_when_it_is_unpublished() {
    let driver = Driver::start().await;
    publish(&driver, &[]).await.unwrap();
    driver.made("pvc-1", Use::Ext4).await;
    driver.opened("pvc-1", Use::Ext4).await;
    driver.unpublish("pvc-1").await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    unpublish(&driver).await.unwrap();
    assert_eq!(driver.inspect().await.len(), 1);
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}
