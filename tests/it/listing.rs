//! What is listed, measured and confirmed.

use crate::harness::{Driver, GIB, NODE, POOL, create_request, mount};
use pb::volume_capability::access_mode::Mode;
use qsd_csi::csi::{TOPOLOGY, pb::csi as pb};
use std::collections::HashMap;
use tonic::Code;

async fn list(
    driver: &Driver,
    max_entries: i32,
    starting_token: &str,
) -> Result<(Vec<String>, String), tonic::Status> {
    let starting_token = starting_token.to_owned();
    let request = pb::ListVolumesRequest { max_entries, starting_token };
    let response = driver.controller().list_volumes(request).await?.into_inner();
    let ids = response.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id);
    Ok((ids.collect(), response.next_token))
}

#[tokio::test]
async fn pages_hold_every_volume_once_also_when_volumes_come_and_go() {
    let driver = Driver::start().await;
    for name in ["e", "a", "c", "b", "d"] {
        driver.create(name).await;
    }
    assert_eq!(list(&driver, 0, "").await.unwrap(), (all("abcde"), String::new()));
    assert_eq!(list(&driver, 5, "").await.unwrap(), (all("abcde"), String::new()));
    let (page, token) = list(&driver, 2, "").await.unwrap();
    assert_eq!(page, all("ab"));
    driver.delete("b").await.unwrap();
    driver.create("aa").await;
    let (page, token) = list(&driver, 2, &token).await.unwrap();
    assert_eq!(page, all("cd"));
    assert_eq!(list(&driver, 2, &token).await.unwrap(), (all("e"), String::new()));
    for (max_entries, token, code) in [
        (0, "foreign", Code::Aborted),
        (0, "after:", Code::Aborted),
        (-1, "", Code::InvalidArgument),
    ] {
        assert_eq!(list(&driver, max_entries, token).await.unwrap_err().code(), code);
    }
}

fn all(letters: &str) -> Vec<String> {
    letters.chars().map(String::from).collect()
}

#[tokio::test]
async fn capacity_is_told_for_the_pools_that_would_do() {
    let driver = Driver::start_with(&[]).await;
    let ask = async |request: pb::GetCapacityRequest| {
        driver.controller().get_capacity(request).await.map(tonic::Response::into_inner)
    };
    let plain = ask(pb::GetCapacityRequest::default()).await.unwrap();
    assert!(plain.available_capacity > 0);
    assert_eq!(plain.maximum_volume_size, Some(plain.available_capacity));
    assert_eq!(plain.minimum_volume_size, Some(4096));
    let elsewhere = pb::GetCapacityRequest {
        accessible_topology: Some(pb::Topology {
            segments: HashMap::from([(TOPOLOGY.to_owned(), "node-2".to_owned())]),
        }),
        ..Default::default()
    };
    assert_eq!(ask(elsewhere).await.unwrap().available_capacity, 0);
    let unserved = pb::GetCapacityRequest {
        volume_capabilities: vec![mount(Mode::MultiNodeSingleWriter)],
        ..Default::default()
    };
    assert_eq!(ask(unserved).await.unwrap().available_capacity, 0);
    let pool = |name: &str| pb::GetCapacityRequest {
        parameters: HashMap::from([("pool".to_owned(), name.to_owned())]),
        ..Default::default()
    };
    assert!(ask(pool(POOL)).await.unwrap().available_capacity > 0);
    let error = ask(pool("other")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("\"other\""), "{error}");
}

#[tokio::test]
async fn capabilities_are_confirmed_or_the_reason_is_told() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    let ask = async |mode, context: &[(&str, &str)]| {
        let context = context.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        let request = pb::ValidateVolumeCapabilitiesRequest {
            volume_id: "pvc-1".into(),
            volume_capabilities: vec![mount(mode)],
            volume_context: context.collect(),
            ..Default::default()
        };
        let response = driver.controller().validate_volume_capabilities(request).await;
        let response = response.unwrap().into_inner();
        (response.confirmed.is_some(), response.message)
    };
    assert_eq!(ask(Mode::SingleNodeWriter, &[("pool", POOL)]).await, (true, String::new()));
    let (confirmed, message) = ask(Mode::MultiNodeSingleWriter, &[]).await;
    assert!(!confirmed && message.contains("MULTI_NODE_SINGLE_WRITER"), "{message}");
    let (confirmed, message) = ask(Mode::SingleNodeWriter, &[("pool", "other")]).await;
    assert!(!confirmed && message.contains("\"other\""), "{message}");
}

#[tokio::test]
async fn the_node_says_who_it_is() {
    let driver = Driver::start().await;
    let info = driver.node().node_get_info(pb::NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.node_id, NODE);
    assert_eq!(info.accessible_topology.unwrap().segments[TOPOLOGY], NODE);
}

#[tokio::test]
async fn what_is_not_advertised_is_unimplemented() {
    let driver = Driver::start().await;
    let mut controller = driver.controller();
    let codes = [controller
        .controller_publish_volume(pb::ControllerPublishVolumeRequest::default())
        .await
        .err()];
    for status in codes {
        assert_eq!(status.unwrap().code(), Code::Unimplemented);
    }
}

#[tokio::test]
async fn two_pools_share_the_volumes_and_a_volume_stays_in_its_own() {
    let second = tempfile::tempdir().unwrap();
    let pool = format!("second={}", second.path().display());
    let driver = Driver::start_with(&["--pool", &pool]).await;
    let mut request = create_request("pvc-1", GIB);
    request.parameters = HashMap::from([("pool".to_owned(), "second".to_owned())]);
    driver.controller().create_volume(request.clone()).await.unwrap();
    assert!(second.path().join("records/volumes/pvc-1.json").exists());
    request.parameters = HashMap::from([("pool".to_owned(), POOL.to_owned())]);
    let error = driver.controller().create_volume(request).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    assert!(error.message().contains("second") && error.message().contains(POOL), "{error}");
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// Once a damaged snapshot in a page that was full with it was taken for the end of the list.
#[tokio::test]
async fn a_list_does_not_end_at_a_damaged_snapshot() {
    let mut driver = Driver::start().await;
    driver.create("pvc-1").await;
    for name in ["a", "b", "c", "d", "e"] {
        driver.snapshot(name, "pvc-1").await.unwrap();
    }
    driver.kill();
    for name in ["b", "c"] {
        let record = driver.path(&format!("pool/records/snapshots/{name}.json"));
        std::fs::File::create(record).unwrap().set_len(1).unwrap();
    }
    driver.launch(&[], None);
    driver.answers().await;
    for max_entries in 1..4 {
        let (mut found, mut starting_token) = (Vec::new(), String::new());
        loop {
            let request =
                pb::ListSnapshotsRequest { max_entries, starting_token, ..Default::default() };
            let page = driver.controller().list_snapshots(request).await.unwrap().into_inner();
            assert!(page.entries.len() <= usize::try_from(max_entries).unwrap());
            let ids = page.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id);
            found.extend(ids);
            starting_token = page.next_token;
            if starting_token.is_empty() {
                break;
            }
        }
        assert_eq!(found, ["a", "d", "e"], "{max_entries} a page");
    }
}
