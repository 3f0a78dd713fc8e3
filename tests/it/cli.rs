//! The commands for people, as a person or a script uses them.

use crate::{
    harness::{Driver, qsd_csi, until},
    relay::front::Disk,
    vm::Vm,
};
use serde_json::{Value, json};
use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt as _,
    path::Path,
};

/// 8 MiB, in bytes and as people write it.
const DATA: usize = 8 << 20;
const SHOWN: &str = "8Mi";

/// Creates a volume of 1 GiB with some data.
async fn filled(driver: &Driver, name: &str) {
    did(driver, &["volume", "create", name, "--size", "1Gi"]).await;
    let shown = json(driver, &["volume", "show", name]).await;
    let layer = shown["layers"][0]["path"].as_str().unwrap();
    let file = OpenOptions::new().write(true).open(layer).unwrap();
    file.write_all_at(&vec![7; DATA], 0).unwrap();
    file.sync_all().unwrap();
}

/// Runs a command: whether it went well, its standard output, its standard error.
async fn run(driver: &Driver, arguments: &[&str]) -> (bool, String, String) {
    let mut command = qsd_csi();
    command.args(arguments).args(["--endpoint", &driver.endpoint()]);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

async fn volume(driver: &Driver, arguments: &[&str]) -> (bool, String, String) {
    run(driver, &[&["volume"], arguments].concat()).await
}

async fn well(driver: &Driver, arguments: &[&str]) -> String {
    did(driver, &[&["volume"], arguments].concat()).await
}

/// Runs a command that goes well and has nothing to say on standard error; its standard output.
async fn did(driver: &Driver, arguments: &[&str]) -> String {
    let (ok, output, errors) = run(driver, arguments).await;
    assert!(ok && errors.is_empty(), "{arguments:?}: {errors}");
    output
}

/// The same, as JSON.
async fn json(driver: &Driver, arguments: &[&str]) -> Value {
    let output = did(driver, &[arguments, &["--output", "json"]].concat()).await;
    serde_json::from_str(&output).unwrap()
}

/// The words of a line of a table.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
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
    let attached = json(&driver, &["volume", "attach", "disk", "--dir", &dir]).await;
    let mut vm = Vm::boot(Path::new(attached["socket"].as_str().unwrap())).await;
    assert_eq!(vm.run("cat /sys/block/vda/size").await.trim(), (2_u64 << 21).to_string());
    vm.power_off().await;
    let list = well(&driver, &["list"]).await;
    let lines: Vec<_> = list.lines().collect();
    assert_eq!(words(lines[0]), ["VOLUME", "SIZE", "OWN", "SHARED", "POOL", "STATE"]);
    assert_eq!(words(lines[1])[..2], ["disk", "2Gi"]);
    assert_eq!(words(lines[1])[3..], ["0", "main", "published"]);
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
async fn a_snapshot_is_taken_looked_at_restored_and_deleted() {
    let driver = Driver::start().await;
    assert!(did(&driver, &["snapshot", "list"]).await.contains("snapshot create"));
    filled(&driver, "disk").await;
    let taken = did(&driver, &["snapshot", "create", "monday", "--volume", "disk"]).await;
    assert!(taken.contains("1Gi") && taken.contains("--from-snapshot monday"), "{taken}");
    let list = did(&driver, &["snapshot", "list", "--volume", "disk"]).await;
    let lines: Vec<_> = list.lines().collect();
    assert_eq!(words(lines[0])[..5], ["SNAPSHOT", "VOLUME", "SIZE", "OWN", "SHARED"]);
    assert_eq!(words(lines[1])[..4], ["monday", "disk", "1Gi", "0"]);
    assert!(words(lines[1])[5].ends_with('Z'), "{list}");
    assert_eq!(json(&driver, &["snapshot", "list", "--volume", "other"]).await, json!([]));
    let restored = ["volume", "create", "restored", "--from-snapshot", "monday"];
    assert_eq!(json(&driver, &restored).await["capacity_bytes"], json!(1 << 30));
    let shown = json(&driver, &["volume", "show", "restored"]).await;
    assert_eq!(shown["source"], json!({ "snapshot_id": "monday" }));
    assert_eq!(shown["copy_mode"], json!("copy-on-write"));
    let [own, all] = ["own_bytes", "allocated_bytes"].map(|key| shown[key].as_u64().unwrap());
    assert!(own < all && all >= u64::try_from(DATA).unwrap(), "{own} of {all}");
    for id in ["disk", "restored"] {
        did(&driver, &["volume", "delete", id]).await;
    }
    let shown = did(&driver, &["snapshot", "show", "monday"]).await;
    assert!(shown.contains("allocated  8") && shown.contains("raw, 8"), "{shown}");
    let deleted = json(&driver, &["snapshot", "delete", "monday"]).await;
    assert_eq!(deleted, json!({ "snapshot_id": "monday", "outcome": "deleted" }));
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_clone_is_waited_for_until_it_is_independent() {
    let driver = Driver::start().await;
    filled(&driver, "disk").await;
    let slow = ["--parameter", "cloneBytesPerSecond=64Mi"];
    let cloned = did(&driver, &[&["volume", "clone", "disk", "slow"][..], &slow].concat()).await;
    assert!(cloned.contains("attach slow") && cloned.contains("qsd-csi tree"), "{cloned}");
    let tree = did(&driver, &["tree"]).await;
    let volume = tree.lines().position(|line| line.contains("slow")).unwrap();
    let lines: Vec<_> = tree.lines().collect();
    assert!(lines[volume].contains("detached") && lines[volume - 1].contains("clone"), "{tree}");
    let copied =
        did(&driver, &["volume", "clone", "disk", "copy", "--wait", "--size", "2Gi"]).await;
    assert!(copied.contains("copy of 2Gi") && copied.contains("needs nothing of disk"), "{copied}");
    let again =
        json(&driver, &["volume", "clone", "disk", "copy", "--wait", "--size", "2Gi"]).await;
    assert_eq!(again["independent"], json!(true));
    // What was copied and what was written since are two layers until they are merged.
    let look = async || json(&driver, &["volume", "show", "copy"]).await;
    let is_one = async || look().await["layers"].as_array().unwrap().len() == 1;
    until("the copy is one layer", is_one).await;
    let copy = look().await;
    assert_eq!(copy["own_bytes"], copy["allocated_bytes"]);
    let overlay = ["volume", "clone", "disk", "overlay", "--copy-mode", "copy-on-read"];
    assert_eq!(json(&driver, &overlay).await["independent"], json!(false));
    let (ok, _, errors) = run(&driver, &[&overlay[..], &["--wait"]].concat()).await;
    assert!(!ok && errors.contains("copy-on-read always needs its source"), "{errors}");
}

#[tokio::test]
async fn a_wait_outlives_the_driver() {
    let mut driver = Driver::start().await;
    filled(&driver, "disk").await;
    let mut command = qsd_csi();
    command.args(["volume", "clone", "disk", "copy", "--wait", "--output", "json"]);
    command.args(["--parameter", "cloneBytesPerSecond=512Mi", "--endpoint", &driver.endpoint()]);
    let waiting = tokio::task::spawn_blocking(move || command.output().unwrap());
    until("the copy is there", async || driver.inspect().await.len() == 2).await;
    driver.restart().await;
    let waited = waiting.await.unwrap();
    assert!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
    assert!(String::from_utf8_lossy(&waited.stdout).contains("\"independent\": true"));
}

#[tokio::test]
async fn sizes_and_limits_are_changed_by_hand() {
    let driver = Driver::start().await;
    did(&driver, &["volume", "create", "disk", "--size", "1Gi"]).await;
    assert_eq!(did(&driver, &["volume", "resize", "disk", "2Gi"]).await, "volume disk has 2Gi\n");
    let resized = json(&driver, &["volume", "resize", "disk", "3000000000"]).await;
    assert_eq!(resized, json!({ "volume_id": "disk", "capacity_bytes": 3_000_000_512_u64 }));
    let (ok, _, errors) = volume(&driver, &["resize", "disk", "1Gi"]).await;
    assert!(!ok && errors.contains("never shrinks"), "{errors}");
    assert!(did(&driver, &["volume", "throttle", "disk"]).await.contains("no limits"));
    let limits = ["volume", "throttle", "disk", "iops=500", "bytesPerSecond=100Mi"];
    let told = did(&driver, &limits).await;
    let lines: Vec<_> = told.lines().map(words).collect();
    assert_eq!(lines[1..], [["bytesPerSecond", "100Mi"], ["iops", "500"]]);
    let lifted = json(&driver, &["volume", "throttle", "disk", "bytesPerSecond=0"]).await;
    assert_eq!(lifted, json!({ "volume_id": "disk", "limits": { "iops": 500 } }));
    for (pair, words) in [("iopsRead=1", "iops and iopsRead"), ("pool=x", "\"pool\""), ("x", "KEY")]
    {
        let (ok, _, errors) = volume(&driver, &["throttle", "disk", pair]).await;
        assert!(!ok && errors.contains(words), "{errors}");
    }
    assert!(did(&driver, &["volume", "show", "disk"]).await.contains("iops=500"));
}

#[tokio::test]
async fn what_changed_between_snapshots_is_told_range_by_range() {
    let driver = Driver::start().await;
    filled(&driver, "disk").await;
    for name in ["monday", "tuesday"] {
        did(&driver, &["snapshot", "create", name, "--volume", "disk"]).await;
    }
    let data = did(&driver, &["snapshot", "data", "tuesday"]).await;
    let lines: Vec<_> = data.lines().map(words).collect();
    assert_eq!(lines[..2], [["OFFSET", "BYTES"], ["0", &DATA.to_string()]]);
    assert_eq!(lines[2].join(" "), format!("1 range, {SHOWN} of 1Gi"));
    let same = did(&driver, &["snapshot", "diff", "monday", "tuesday"]).await;
    assert_eq!(same, "0 ranges, 0 of 1Gi\n");
    let data = json(&driver, &["snapshot", "data", "monday"]).await;
    let range = json!({ "byte_offset": 0, "size_bytes": DATA });
    let told = json!({ "capacity_bytes": 1 << 30, "sum_bytes": DATA, "ranges": [range] });
    assert_eq!(data, told);
    for (pair, words) in [(["monday", "nothing"], "snapshot list"), (["tuesday", "monday"], "")] {
        let (ok, _, errors) = run(&driver, &["snapshot", "diff", pair[0], pair[1]]).await;
        assert!(!ok && errors.contains(words), "{errors}");
    }
    driver.stage("disk").await.unwrap();
    driver.publish("disk").await.unwrap();
    let mut disk = Disk::open(&driver.socket("disk"));
    for sector in [8, 16, 1 << 20] {
        disk.fill(sector, 8, 1);
    }
    did(&driver, &["snapshot", "create", "wednesday", "--volume", "disk"]).await;
    let changed = did(&driver, &["snapshot", "diff", "tuesday", "wednesday"]).await;
    let lines: Vec<_> = changed.lines().map(words).collect();
    let offset = (512_u64 << 20).to_string();
    assert_eq!(lines[1..3], [["4096", "8192"], [&offset, "4096"]], "{changed}");
    assert_eq!(lines[3].join(" "), "2 ranges, 12Ki of 1Gi");
}

#[tokio::test]
async fn the_tree_shows_what_stands_on_what() {
    let driver = Driver::start().await;
    filled(&driver, "disk").await;
    did(&driver, &["snapshot", "create", "monday", "--volume", "disk"]).await;
    did(&driver, &["volume", "create", "restored", "--from-snapshot", "monday"]).await;
    let tree = did(&driver, &["tree"]).await;
    let lines: Vec<_> = tree.lines().collect();
    assert!(lines[2].starts_with(&format!("pool main  {}", driver.text("pool"))), "{tree}");
    let stems = ["╰─○ monday ", "  ├─● restored ", "  ● disk "];
    for (line, stem) in lines[3..].iter().zip(stems) {
        assert!(line.starts_with(stem), "{tree}");
    }
    assert!(lines[3].contains(SHOWN) && lines[3].contains("of disk"), "{tree}");
    assert_eq!(lines.len(), 6);
    let ascii = did(&driver, &["tree", "--ascii"]).await;
    assert!(ascii.is_ascii() && ascii.contains("  |-* restored"), "{ascii}");
    let all = json(&driver, &["tree"]).await;
    for (kind, count) in [("pools", 1), ("layers", 3), ("volumes", 2), ("snapshots", 1)] {
        assert_eq!(all[kind].as_array().unwrap().len(), count, "{kind}");
    }
    let file = driver.text("tree.svg");
    assert!(did(&driver, &["tree", "--svg", &file]).await.contains("3 layers"));
    let picture = fs::read_to_string(&file).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains(">restored</text>"), "{picture}");
    let (ok, _, errors) = run(&driver, &["tree", "--svg", "/nonexistent/tree.svg"]).await;
    assert!(!ok && errors.contains("/nonexistent/tree.svg"), "{errors}");
}

#[tokio::test]
async fn errors_say_what_to_do_next() {
    let driver = Driver::start().await;
    let cases: [(&[&str], &str); 11] = [
        (&["show", "nothing"], "volume list"),
        (&["delete", "nothing"], "does not exist"),
        (&["create", "a", "--size", "10GB"], "10Gi"),
        (&["create", "a", "--size", "0"], "capacity_range"),
        (&["create", "a", "--size", "1Gi", "--pool", "x"], "\"x\""),
        (&["create", "a", "--size", "900Ti"], "capacity_range"),
        (&["create", "a", "--size", "1Gi", "--parameter", "color=red"], "\"color\""),
        (&["create", "a", "--size", "1Gi", "--parameter", "color"], "KEY=VALUE"),
        (&["attach", "nothing", "--dir", "/nowhere"], "does not exist"),
        (&["create", "a", "--from-snapshot", "nothing"], "qsd-csi snapshot list"),
        (&["clone", "nothing", "a"], "qsd-csi volume list"),
    ];
    for (arguments, words) in cases {
        let (ok, _, errors) = volume(&driver, arguments).await;
        assert!(!ok && errors.contains(words), "{arguments:?}: {errors}");
    }
    let cases: [(&[&str], &str); 5] = [
        (&["show", "nothing"], "qsd-csi snapshot list"),
        (&["show", ""], "id is empty"),
        (&["delete", "nothing"], "qsd-csi snapshot list"),
        (&["create", "a", "--volume", "nothing"], "qsd-csi volume list"),
        (&["create", "", "--volume", "nothing"], "name"),
    ];
    for (arguments, words) in cases {
        let (ok, _, errors) = run(&driver, &[&["snapshot"], arguments].concat()).await;
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
