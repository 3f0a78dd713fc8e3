//! How full a volume is and how it fares, as CSI tells it.

use crate::{
    disk::{SmallDisk, fill},
    harness::{Driver, GIB, signal, until},
    local::Use,
};
use qsd_csi::csi::pb::csi::{self as pb, VolumeCondition, volume_usage::Unit};
use std::{fs, io::Write as _, os::unix::fs::FileExt as _, process::Command};

/// What is written of each volume.
const WRITTEN: i64 = 8 << 20;

impl Driver {
    async fn stats(&self, volume: &str) -> pb::NodeGetVolumeStatsResponse {
        let request = pb::NodeGetVolumeStatsRequest {
            volume_id: volume.into(),
            volume_path: self.text(&format!("target-{volume}")),
            ..Default::default()
        };
        self.node().node_get_volume_stats(request).await.unwrap().into_inner()
    }

    /// The condition of a volume.
    async fn condition(&self, volume: &str) -> VolumeCondition {
        let request = pb::ControllerGetVolumeRequest { volume_id: volume.into() };
        let got = self.controller().controller_get_volume(request).await.unwrap().into_inner();
        got.status.unwrap().volume_condition.unwrap()
    }

    /// The same by the list of all volumes.
    async fn listed(&self, volume: &str) -> VolumeCondition {
        let request = pb::ListVolumesRequest::default();
        let listed = self.controller().list_volumes(request).await.unwrap().into_inner().entries;
        let is_it = |entry: &&pb::list_volumes_response::Entry| {
            entry.volume.as_ref().unwrap().volume_id == volume
        };
        let listed = listed.iter().find(is_it).unwrap().status.clone().unwrap();
        listed.volume_condition.unwrap()
    }

    async fn assert_well(&self, volume: &str) {
        for told in [self.condition(volume).await, self.listed(volume).await] {
            assert_eq!((told.abnormal, told.message.as_str()), (false, "all is well"));
        }
    }

    /// Waits until the volume is told to be ill, for this reason.
    async fn is_ill(&self, volume: &str, reason: &str) {
        until(&format!("{volume}: {reason}"), async || {
            // It may change between the two.
            [self.condition(volume).await, self.listed(volume).await]
                .iter()
                .all(|told| told.abnormal && told.message.contains(reason))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_tells_how_full_it_is_in_every_form() {
    let driver = Driver::start().await;
    driver.published("vm").await;
    driver.made("block", Use::Block).await;
    driver.made("ext4", Use::Ext4).await;
    let block = driver.opened("block", Use::Block).await;
    let ext4 = driver.opened("ext4", Use::Ext4).await;
    let before = driver.stats("ext4").await.usage;
    for file in [block, ext4.join("file")] {
        let written = vec![7; usize::try_from(WRITTEN).unwrap()];
        let mut options = fs::File::options();
        let mut file = options.write(true).create(true).truncate(false).open(file).unwrap();
        file.write_all(&written).unwrap();
        file.sync_all().unwrap();
    }
    let stats = driver.stats("vm").await;
    assert_eq!(stats.usage.len(), 1);
    assert_eq!((stats.usage[0].total, stats.usage[0].used), (GIB, 0));
    let stats = driver.stats("block").await;
    assert_eq!((stats.usage[0].used, stats.usage[0].unit), (WRITTEN, Unit::Bytes.into()));
    let stats = driver.stats("ext4").await.usage;
    let units: Vec<_> = stats.iter().map(|usage| usage.unit).collect();
    assert_eq!(units, [Unit::Bytes, Unit::Inodes].map(i32::from));
    assert_eq!(stats[0].used - before[0].used, WRITTEN);
    assert_eq!(stats[1].used - before[1].used, 1);
    for volume in ["vm", "block", "ext4"] {
        let told = driver.stats(volume).await.volume_condition.unwrap();
        assert_eq!((told.abnormal, told.message.as_str()), (false, "all is well"));
        driver.assert_well(volume).await;
    }
}

/// What a pod has ended with its daemon; a VM only waits.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_to_be_started_anew_is_told_so() {
    let driver = Driver::start().await;
    for (way, reason) in
        [(Use::Block, "its block device ended"), (Use::Ext4, "its file system ended")]
    {
        driver.made("pvc-1", way).await;
        driver.opened("pvc-1", way).await;
        driver.assert_well("pvc-1").await;
        signal(driver.daemons().await[0], "KILL");
        driver.is_ill("pvc-1", reason).await;
        let stats = driver.stats("pvc-1").await.volume_condition.unwrap();
        assert!(stats.abnormal && stats.message.contains("start its pods anew"), "{stats:?}");
        let warning = driver.inspect().await[0].attachment.clone().unwrap().warning;
        assert!(warning.contains(reason), "people are told the same: {warning}");
        driver.close("pvc-1").await;
        driver.opened("pvc-1", way).await;
        driver.assert_well("pvc-1").await;
        driver.close("pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
    }
    driver.published("vm").await;
    signal(driver.daemons().await[0], "KILL");
    let restarts = async || driver.inspect().await[0].attachment.clone().unwrap().daemon;
    until("another daemon", async || restarts().await.is_some_and(|one| one.restarts == 1)).await;
    driver.assert_well("vm").await;
}

/// As the kernel does after an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_that_takes_no_writes_is_told_of() {
    let driver = Driver::start().await;
    driver.made("pvc-1", Use::Ext4).await;
    let target = driver.opened("pvc-1", Use::Ext4).await;
    let abort = Command::new("mount").args(["-o", "remount,abort"]).arg(&target).status().unwrap();
    assert!(abort.success());
    driver.is_ill("pvc-1", "takes no more writes").await;
    driver.close("pvc-1").await;
    driver.opened("pvc-1", Use::Ext4).await;
    driver.assert_well("pvc-1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_without_a_daemon_says_why() {
    let driver = Driver::start().await;
    driver.published("vm").await;
    driver.assert_well("vm").await;
    let (layers, away) = (driver.path("pool/layers"), driver.path("pool/away"));
    let run = |from, to| assert!(Command::new("mv").arg(from).arg(to).status().unwrap().success());
    run(&layers, &away);
    signal(driver.daemons().await[0], "KILL");
    driver.is_ill("vm", "no daemon serves it, which is tried again").await;
    driver.is_ill("vm", "No such file or directory").await;
    run(&away, &layers);
    until("it is served again", async || !driver.condition("vm").await.abnormal).await;
}

#[tokio::test]
async fn a_damaged_volume_says_what_is_wrong() {
    let mut driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.assert_well("pvc-1").await;
    driver.kill();
    let record = driver.path("pool/records/volumes/pvc-1.json");
    let file = fs::File::options().write(true).open(&record).unwrap();
    file.write_all_at(b"no record", 0).unwrap();
    driver.launch(&[], None);
    driver.answers().await;
    driver.is_ill("pvc-1", "it is damaged: ").await;
}

#[tokio::test]
async fn a_full_pool_is_told_of() {
    let disk = SmallDisk::new();
    let pool = format!("small={}", disk.path().join("pool").display());
    let driver = Driver::start_with(&["--pool", &pool]).await;
    let mut request = crate::harness::create_request("pvc-1", 4 << 20);
    request.parameters = [("pool".to_owned(), "small".to_owned())].into();
    driver.controller().create_volume(request).await.unwrap();
    driver.assert_well("pvc-1").await;
    let filler = fill(&disk.path());
    driver.is_ill("pvc-1", "pool small is full").await;
    fs::remove_file(filler).unwrap();
    driver.assert_well("pvc-1").await;
}
