//! `qsd-csi volume`, as a person or a script uses it.

use crate::{
    harness::{Driver, qsd_csi},
    vm::Vm,
};
use std::path::Path;

/// Runs a command: whether it went well, its standard output, its standard error.
async fn volume(driver: &Driver, arguments: &[&str]) -> (bool, String, String) {
    let mut command = qsd_csi();
    command.arg("volume").args(arguments).args(["--endpoint", &driver.endpoint()]);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

async fn well(driver: &Driver, arguments: &[&str]) -> String {
    let (ok, output, errors) = volume(driver, arguments).await;
    assert!(ok, "{arguments:?}: {errors}");
    output
}

#[tokio::test]
async fn a_person_gets_from_nothing_to_a_vm_with_a_disk() {
    let driver = Driver::start().await;
    let dir = driver.text("attached");
    assert!(well(&driver, &["list"]).await.contains("volume create"));
    let created = well(&driver, &["create", "disk", "--size", "2Gi"]).await;
    assert!(created.contains("2Gi") && created.contains("volume attach disk"), "{created}");
    let attached = well(&driver, &["attach", "disk", "--dir", &dir]).await;
    assert!(attached.contains("qemu-system-x86_64") && attached.contains("vhost-user-blk-pci"));
    let json = well(&driver, &["attach", "disk", "--dir", &dir, "--output", "json"]).await;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let mut vm = Vm::boot(Path::new(json["socket"].as_str().unwrap())).await;
    assert_eq!(vm.run("cat /sys/block/vda/size").await.trim(), (2_u64 << 21).to_string());
    vm.power_off().await;
    let list = well(&driver, &["list"]).await;
    let lines: Vec<_> = list.lines().collect();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(lines[0]), ["VOLUME", "SIZE", "ALLOCATED", "POOL", "STATE"]);
    assert_eq!(words(lines[1])[..2], ["disk", "2Gi"]);
    assert_eq!(words(lines[1])[3..], ["main", "published"]);
    let show = well(&driver, &["show", "disk"]).await;
    assert!(show.contains("QEMU 10.") && show.contains("dbg.sock"), "{show}");
    let (ok, _, errors) = volume(&driver, &["delete", "disk"]).await;
    assert!(!ok && errors.contains("unstage"), "{errors}");
    well(&driver, &["detach", "disk", "--dir", &dir]).await;
    well(&driver, &["delete", "disk"]).await;
    assert_eq!(well(&driver, &["list", "--output", "json"]).await.trim(), "[]");
    assert!(!Path::new(&dir).join("disk").exists());
    driver.assert_empty().await;
}

#[tokio::test]
async fn errors_say_what_to_do_next() {
    let driver = Driver::start().await;
    let cases: [(&[&str], &str); 9] = [
        (&["show", "nothing"], "volume list"),
        (&["delete", "nothing"], "does not exist"),
        (&["create", "a", "--size", "10GB"], "10Gi"),
        (&["create", "a", "--size", "0"], "capacity_range"),
        (&["create", "a", "--size", "1Gi", "--pool", "x"], "\"x\""),
        (&["create", "a", "--size", "900Ti"], "capacity_range"),
        (&["create", "a", "--size", "1Gi", "--parameter", "color=red"], "\"color\""),
        (&["create", "a", "--size", "1Gi", "--parameter", "color"], "KEY=VALUE"),
        (&["attach", "nothing", "--dir", "/nowhere"], "does not exist"),
    ];
    for (arguments, words) in cases {
        let (ok, _, errors) = volume(&driver, arguments).await;
        assert!(!ok && errors.contains(words), "{arguments:?}: {errors}");
    }
    assert!(!Path::new("/nowhere").exists());
    driver.assert_empty().await;
    let nobody = qsd_csi()
        .args(["volume", "list", "--endpoint", "unix:///nonexistent/csi.sock"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&nobody.stderr);
    assert!(!nobody.status.success() && text.contains("qsd-csi standalone"), "{text}");
}

#[tokio::test]
async fn wrong_flags_are_explained() {
    let cases: [(&[&str], &str); 7] = [
        (&["standalone"], "--pool"),
        (&["standalone", "--endpoint", "tcp://1.2.3.4:5"], "unix://"),
        (&["standalone", "--endpoint", "unix://relative"], "absolute path"),
        (&["standalone", "--node-id", "a/b"], "letter or digit"),
        (&["standalone", "--pool", "fast"], "NAME=DIR"),
        (&["standalone", "--pool", "Fast=/x"], "\"Fast\""),
        (&["standalone", "--pool", "fast=x"], "not absolute"),
    ];
    for (arguments, words) in cases {
        let output = qsd_csi().args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(words), "{arguments:?}: {text}");
    }
}
