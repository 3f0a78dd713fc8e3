//! The driver's log: one line a change, with the same names everywhere.

use crate::harness::{Driver, GIB, signal, until};
use qsd_csi::csi::pb::csi as pb;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::Stdio,
};

/// The lines of a log, each an object.
pub(super) fn lines(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap();
    // The last line may just be written.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What became of a volume and of a snapshot of it, in order, each with its reason. What comes and
/// goes with a VM is left out, and background work, which begins when it can.
fn changes(lines: &[Value], volume: &str, snapshot: &str) -> Vec<String> {
    let is_its = |line: &&Value| line["volume"] == volume || line["snapshot"] == snapshot;
    let change = |line: &Value| {
        let message = line["message"].as_str().unwrap();
        match line["reason"].as_str() {
            _ if message.starts_with("job ") || message.starts_with("disk.img ") => None,
            _ if message == "export replaced" => None,
            Some(reason) => Some(format!("{message}: {reason}")),
            None => Some(message.to_owned()),
        }
    };
    lines.iter().filter(is_its).filter_map(change).collect()
}

/// Has a volume live its life, every call made twice.
async fn live(driver: &Driver) {
    let twice = [(), ()];
    for () in twice {
        driver.create("pvc-1").await;
    }
    for () in twice {
        driver.stage("pvc-1").await.unwrap();
    }
    for () in twice {
        driver.publish("pvc-1").await.unwrap();
    }
    let before = driver.daemons().await;
    signal(before[0], "KILL");
    until("another daemon", async || {
        let now = driver.daemons().await;
        now.len() == 1 && now != before
    })
    .await;
    let snapshot = pb::CreateSnapshotRequest {
        name: "monday".to_owned(),
        source_volume_id: "pvc-1".to_owned(),
        ..Default::default()
    };
    for () in twice {
        driver.controller().create_snapshot(snapshot.clone()).await.unwrap();
    }
    let range = pb::CapacityRange { required_bytes: 2 * GIB, limit_bytes: 0 };
    let expand = pb::ControllerExpandVolumeRequest {
        volume_id: "pvc-1".to_owned(),
        capacity_range: Some(range),
        ..Default::default()
    };
    for () in twice {
        driver.controller().controller_expand_volume(expand.clone()).await.unwrap();
    }
    let modify = pb::ControllerModifyVolumeRequest {
        volume_id: "pvc-1".to_owned(),
        mutable_parameters: [("iops".to_owned(), "5000".to_owned())].into(),
        ..Default::default()
    };
    for () in twice {
        driver.controller().controller_modify_volume(modify.clone()).await.unwrap();
    }
    driver.upgrade("pvc-1").await.unwrap();
    let delete =
        pb::DeleteSnapshotRequest { snapshot_id: "monday".to_owned(), ..Default::default() };
    for () in twice {
        driver.controller().delete_snapshot(delete.clone()).await.unwrap();
    }
    for () in twice {
        driver.unpublish("pvc-1").await.unwrap();
    }
    // Nobody has it as a file any more.
    until("the layers are merged", async || {
        driver.look().await.layers.len() == 1 && driver.daemons().await.len() == 1
    })
    .await;
    for () in twice {
        driver.unstage("pvc-1").await.unwrap();
    }
    for () in twice {
        driver.delete("pvc-1").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_life_of_a_volume_is_told_once() {
    let driver = Driver::start().await;
    live(&driver).await;
    let lines = lines(&driver.path("log"));
    let told = changes(&lines, "pvc-1", "monday");
    let died = told.iter().find(|line| line.starts_with("daemon died: "));
    // The supervisor's report may come later than the end of the monitor.
    let is_known = |reason: &&String| reason.contains("signal 9") || reason.contains("monitor");
    let died = died.filter(is_known).map_or("", String::as_str);
    assert_eq!(
        told,
        [
            "volume created",
            "daemon started: staged",
            "volume staged",
            "volume published",
            died,
            "daemon started: died",
            "snapshot created",
            "daemon replaced: resized",
            "volume expanded",
            "volume modified",
            "daemon replaced: upgraded",
            "snapshot deleted",
            "volume unpublished",
            "daemon replaced: merged",
            "daemon ended: unstaged",
            "volume unstaged",
            "volume deleted",
        ],
        "{lines:#?}"
    );
    jobs_are_told_from_begin_to_end(&lines);
    let daemons =
        lines.iter().filter(|line| line["message"].as_str().unwrap().starts_with("daemon "));
    let mut serving = None;
    for line in daemons {
        let pid = line["pid"].as_i64().unwrap();
        match line["message"].as_str().unwrap() {
            "daemon started" => serving = Some(pid),
            "daemon replaced" => {
                assert_eq!(line["replaces"].as_i64(), serving, "{line}");
                serving = Some(pid);
            }
            "daemon died" | "daemon ended" => assert_eq!(Some(pid), serving, "{line}"),
            other => panic!("{other}"),
        }
    }
}

/// Each job of a layer begins, and ends before the next begins; the last of all is done.
fn jobs_are_told_from_begin_to_end(lines: &[Value]) {
    let mut running = BTreeMap::new();
    let mut last = "";
    for line in lines {
        let Some(layer) = line["layer"].as_str() else { continue };
        let way = line["way"].as_str().unwrap();
        last = line["message"].as_str().unwrap();
        if last == "job started" {
            assert_eq!(running.insert(layer, way), None, "{line}");
        } else {
            assert!(["job finished", "job interrupted"].contains(&last), "{line}");
            assert!(line["seconds"].as_f64().is_some_and(|seconds| seconds >= 0.0), "{line}");
            assert_eq!(running.remove(layer), Some(way), "{line}");
        }
    }
    assert_eq!((running.len(), last), (0, "job finished"));
}

/// A new driver finds things as they are, and says so once; what died meanwhile did so once.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_driver_finds_is_told_once() {
    let mut driver = Driver::start().await;
    driver.published("runs").await;
    driver.published("dies").await;
    driver.kill();
    let begun = lines(&driver.path("log")).len();
    let volumes = crate::harness::daemons_below(driver.scratch());
    let is_of_dies = |pid: &&i32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let mut files = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok());
        files.any(|file| file.ends_with("locks/dies"))
    };
    signal(**volumes.iter().filter(is_of_dies).collect::<Vec<_>>().first().unwrap(), "KILL");
    driver.launch(&[], None);
    driver.answers().await;
    let lines = lines(&driver.path("log")).split_off(begun);
    assert_eq!(changes(&lines, "runs", ""), ["daemon taken over"], "{lines:#?}");
    let died = "daemon died: while there was no driver: killed by signal 9";
    assert_eq!(changes(&lines, "dies", ""), [died, "daemon started: died"], "{lines:#?}");
    driver.remove("runs").await;
    driver.remove("dies").await;
}

#[test]
fn the_form_of_the_log_can_be_chosen() {
    for (format, is_json) in [(None, true), (Some("json"), true), (Some("text"), false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut command = crate::harness::qsd_csi();
        command.arg("supervisor").arg("--run-dir").arg(dir.path()).stderr(Stdio::piped());
        command.env_remove("QSD_CSI_LOG").env_remove("QSD_CSI_LOG_FORMAT");
        command.envs(format.map(|format| ("QSD_CSI_LOG_FORMAT", format)));
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        let said = BufReader::new(process.stderr.take().unwrap()).read_line(&mut line);
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(said.is_ok() && line.contains("supervising"), "{line}");
        assert_eq!(serde_json::from_str::<Value>(&line).is_ok(), is_json, "{line}");
    }
}
