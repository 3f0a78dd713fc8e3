//! The real csi-sanity against the driver, in each form a volume is published in.

use crate::harness::{Driver, part};
use std::{collections::BTreeMap, io::Write as _, process::Command};

/// What csi-sanity skips: the reason it gives, and the capability that would make it run.
///
/// The health calls and the place of a snapshot are of CSI 1.13, which this csi-sanity knows and our CSI 1.12 does not have.
const SKIPPED: [(&str, &str); 9] = [
    ("Controller Publish, UnpublishVolume not supported", "PUBLISH_UNPUBLISH_VOLUME"),
    ("ControllerPublishVolume not supported", "PUBLISH_UNPUBLISH_VOLUME"),
    ("ControllerUnpublishVolume not supported", "PUBLISH_UNPUBLISH_VOLUME"),
    ("GroupControllerService not supported", "GROUP_CONTROLLER_SERVICE"),
    ("ControllerGetVolumeHealth not supported", "CSI 1.13"),
    ("ControllerListVolumeHealth not supported", "CSI 1.13"),
    ("NodeGetStorageHealth not supported", "CSI 1.13"),
    ("NodeGetVolumeHealth not supported", "CSI 1.13"),
    ("SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported", "CSI 1.13"),
];

#[tokio::test]
async fn csi_sanity_fails_nothing_with_sockets() {
    run("mount", "publish: vhost-user\n").await;
}

#[tokio::test]
async fn csi_sanity_fails_nothing_with_block_devices() {
    run("block", "publish: vhost-user\n").await;
}

#[tokio::test]
async fn csi_sanity_fails_nothing_with_file_systems() {
    run("mount", "publish: filesystem\n").await;
}

/// Skipped is only what is not advertised.
async fn run(access_type: &str, parameters: &str) {
    let driver = Driver::start().await;
    let report = driver.path("sanity.json");
    let limits = driver.path("limits.yaml");
    std::fs::File::create(&limits).unwrap().write_all(b"iops: \"1000\"\n").unwrap();
    let class = driver.path("class.yaml");
    std::fs::File::create(&class).unwrap().write_all(parameters.as_bytes()).unwrap();
    let mut sanity = Command::new(part("bin/csi-sanity"));
    sanity
        .args(["--csi.endpoint", &driver.endpoint()])
        .args(["--csi.mountdir", &driver.text("mount")])
        .args(["--csi.stagingdir", &driver.text("stage")])
        .args(["--csi.testvolumesize", "1073741824"])
        .args(["--csi.testvolumeaccesstype", access_type])
        .arg("--csi.testvolumeparameters")
        .arg(class)
        .arg("--csi.testvolumemutableparameters")
        .arg(limits)
        .arg(format!("--ginkgo.json-report={}", report.display()));
    let run = tokio::task::spawn_blocking(move || sanity.output().unwrap()).await.unwrap();
    let output = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success(), "{output}");
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    let specs = report[0]["SpecReports"].as_array().unwrap();
    let count = |state: &str| specs.iter().filter(|spec| spec["State"] == state).count();
    let (passed, failed, skipped) = (count("passed"), count("failed"), count("skipped"));
    let mut by_capability = BTreeMap::<_, usize>::new();
    for spec in specs.iter().filter(|spec| spec["State"] == "skipped") {
        let reason = spec["Failure"]["Message"].as_str().unwrap();
        let known = SKIPPED.iter().find(|(known, _)| *known == reason);
        let (_, capability) = known.unwrap_or_else(|| panic!("skipped without need: {reason}"));
        *by_capability.entry(capability).or_default() += 1;
    }
    eprintln!(
        "csi-sanity, {access_type}, {}: {passed} passed, {failed} failed, {skipped} skipped for want of:",
        parameters.trim()
    );
    for (capability, count) in by_capability {
        eprintln!("{count:5}  {capability}");
    }
    assert!(passed >= 79, "{passed}");
    assert_eq!(failed, 0);
    driver.assert_empty().await;
}
