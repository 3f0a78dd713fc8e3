//! Bad input: each with its code, the field and the value in the message, and nothing left behind.

use crate::harness::{Driver, GIB, create_request, mount, names};
use pb::{
    volume_capability::{AccessType, MountVolume, access_mode::Mode},
    volume_content_source,
};
use qsd_csi::csi::pb::csi as pb;
use std::{collections::HashMap, fs, os::unix::fs::symlink};
use tonic::{Code, Status};
use volume_content_source::{SnapshotSource, Type as ContentType, VolumeSource};

fn assert_refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, words: &[&str]) {
    let error = outcome.unwrap_err();
    assert_eq!(error.code(), code, "{error:?}");
    for word in words {
        assert!(error.message().contains(word), "{word:?} is not in {:?}", error.message());
    }
    assert!(error.details().is_empty(), "the spec wants no details");
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one table")]
async fn create_volume() {
    use Code::{AlreadyExists, InvalidArgument, OutOfRange, ResourceExhausted};
    let driver = Driver::start().await;
    driver.create("there").await;
    let before = names(&driver.path("pool/records/volumes"));
    let good = || create_request("new", GIB);
    let range = |required_bytes, limit_bytes| {
        let capacity_range = Some(pb::CapacityRange { required_bytes, limit_bytes });
        pb::CreateVolumeRequest { capacity_range, ..good() }
    };
    let capability = |one| pb::CreateVolumeRequest { volume_capabilities: vec![one], ..good() };
    let parameter = |key: &str, value: &str| pb::CreateVolumeRequest {
        parameters: HashMap::from([(key.into(), value.into())]),
        ..good()
    };
    let flags = MountVolume { mount_flags: vec!["noatime".into()], ..Default::default() };
    let group = MountVolume { volume_mount_group: "qemu".into(), ..Default::default() };
    let of_type = |access_type| pb::VolumeCapability {
        access_type: Some(access_type),
        ..mount(Mode::SingleNodeWriter)
    };
    let of_no_type = pb::VolumeCapability { access_type: None, ..mount(Mode::SingleNodeWriter) };
    let with_file_system = |fs_type: &str, flag: &str| {
        let mut request = parameter("publish", "filesystem");
        request.volume_capabilities = vec![of_type(AccessType::Mount(MountVolume {
            fs_type: fs_type.into(),
            mount_flags: vec![flag.into()],
            ..Default::default()
        }))];
        request
    };
    let mut shared_file_system = parameter("publish", "filesystem");
    shared_file_system.volume_capabilities = vec![mount(Mode::MultiNodeMultiWriter)];
    let elsewhere = pb::TopologyRequirement {
        requisite: vec![pb::Topology {
            segments: HashMap::from([(qsd_csi::csi::TOPOLOGY.into(), "node-2".into())]),
        }],
        preferred: vec![],
    };
    let free = driver.controller().get_capacity(pb::GetCapacityRequest::default()).await;
    let more_than_free = free.unwrap().into_inner().available_capacity + GIB;
    let more_text = more_than_free.to_string();
    let full = ["main", more_text.as_str()];
    let longer = "n".repeat(129);
    let cases: Vec<(pb::CreateVolumeRequest, Code, &[&str])> = vec![
        (create_request("", GIB), InvalidArgument, &["name", "empty"]),
        (create_request(&longer, GIB), InvalidArgument, &["name", "129 bytes", "nnn"]),
        (create_request("a\0b", GIB), InvalidArgument, &["name", r"a\0b"]),
        (
            pb::CreateVolumeRequest { volume_capabilities: vec![], ..good() },
            InvalidArgument,
            &["volume_capabilities"],
        ),
        (parameter("size", "big"), InvalidArgument, &["parameters", "\"size\""]),
        (parameter("pool", "other"), InvalidArgument, &["parameters", "pool", "\"other\""]),
        (parameter("pool", "../x"), InvalidArgument, &["parameters", "pool", "\"../x\""]),
        (parameter("publish", "nfs"), InvalidArgument, &["parameters", "publish", "\"nfs\""]),
        (parameter("format", "vmdk"), InvalidArgument, &["parameters", "format", "\"vmdk\""]),
        (parameter("copyMode", "full"), InvalidArgument, &["copyMode", "\"full\"", "clone"]),
        (parameter("encryption", "aes"), InvalidArgument, &["encryption", "\"aes\"", "luks"]),
        (
            pb::CreateVolumeRequest {
                secrets: HashMap::from([("encryptionPassphrase".into(), String::new())]),
                ..parameter("encryption", "luks")
            },
            InvalidArgument,
            &["secrets", "encryptionPassphrase", "empty"],
        ),
        (parameter("iopsMax", "9"), InvalidArgument, &["iopsMax", "9", "iops"]),
        (range(0, 0), InvalidArgument, &["capacity_range", "required_bytes"]),
        (range(-1, 0), InvalidArgument, &["required_bytes", "-1"]),
        (range(0, -1), InvalidArgument, &["limit_bytes", "-1"]),
        (range(2 * GIB, GIB), InvalidArgument, &["2147483648", "1073741824"]),
        (range(4097, 4098), OutOfRange, &["4097", "4098"]),
        (range(i64::MAX, 0), OutOfRange, &["9223372036854775807"]),
        (range(1 << 60, 0), OutOfRange, &["1152921504606846976"]),
        (range(more_than_free, 0), ResourceExhausted, &full),
        (capability(mount(Mode::MultiNodeSingleWriter)), InvalidArgument, &["MULTI_NODE_SINGLE"]),
        (shared_file_system, InvalidArgument, &["volume_capabilities", "MULTI_NODE_MULTI_WRITER"]),
        (capability(mount(Mode::Unknown)), InvalidArgument, &["volume_capabilities", "UNKNOWN"]),
        (capability(of_no_type), InvalidArgument, &["volume_capabilities", "no access type"]),
        (capability(of_type(AccessType::Mount(flags))), InvalidArgument, &["noatime"]),
        (with_file_system("ntfs", ""), InvalidArgument, &["fs_type", "\"ntfs\""]),
        (with_file_system("xfs", "remount"), InvalidArgument, &["mount_flags", "\"remount\""]),
        (capability(of_type(AccessType::Mount(group))), InvalidArgument, &["group \"qemu\""]),
        (
            pb::CreateVolumeRequest { accessibility_requirements: Some(elsewhere), ..good() },
            ResourceExhausted,
            &["accessibility_requirements", "node-2", "node-1"],
        ),
        (
            pb::CreateVolumeRequest {
                volume_content_source: Some(pb::VolumeContentSource::default()),
                ..good()
            },
            InvalidArgument,
            &["volume_content_source"],
        ),
        (
            pb::CreateVolumeRequest {
                mutable_parameters: HashMap::from([("pool".into(), "main".into())]),
                ..good()
            },
            InvalidArgument,
            &["mutable_parameters", "\"pool\""],
        ),
        (create_request("there", 2 * GIB), AlreadyExists, &["there", "1073741824", "2147483648"]),
        (
            pb::CreateVolumeRequest { name: "there".into(), ..range(1, GIB / 2) },
            AlreadyExists,
            &["there", "1073741824"],
        ),
        (
            pb::CreateVolumeRequest { name: "there".into(), ..parameter("pool", "main") },
            AlreadyExists,
            &["there", "parameters", "main"],
        ),
        (
            pb::CreateVolumeRequest {
                name: "there".into(),
                ..capability(mount(Mode::SingleNodeMultiWriter))
            },
            AlreadyExists,
            &["there", "volume_capabilities"],
        ),
    ];
    for (request, code, words) in cases {
        let outcome = driver.controller().create_volume(request).await;
        assert_refused(outcome, code, words);
        assert_eq!(names(&driver.path("pool/records/volumes")), before);
        assert_eq!(names(&driver.path("pool/layers")).len(), 1);
    }
    driver.delete("there").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn what_a_volume_is_made_from() {
    use Code::{AlreadyExists, InvalidArgument, NotFound, OutOfRange};
    let second = tempfile::tempdir().unwrap();
    let pool = format!("second={}", second.path().display());
    let driver = Driver::start_with(&["--pool", &pool]).await;
    let mut source = create_request("there", GIB);
    source.parameters = HashMap::from([("pool".into(), "main".into())]);
    driver.controller().create_volume(source).await.unwrap();
    driver.snapshot("snap", "there").await.unwrap();
    let before = names(&driver.path("pool/layers"));
    let of_volume = |id: &str| ContentType::Volume(VolumeSource { volume_id: id.into() });
    let of_snapshot = |id: &str| ContentType::Snapshot(SnapshotSource { snapshot_id: id.into() });
    let from = |content| pb::CreateVolumeRequest {
        volume_content_source: Some(pb::VolumeContentSource { r#type: Some(content) }),
        ..create_request("new", GIB)
    };
    let sized = |required_bytes, limit_bytes| pb::CreateVolumeRequest {
        capacity_range: Some(pb::CapacityRange { required_bytes, limit_bytes }),
        ..from(of_snapshot("snap"))
    };
    let with = |key: &str, value: &str| pb::CreateVolumeRequest {
        parameters: HashMap::from([(key.into(), value.into())]),
        ..from(of_volume("there"))
    };
    let cases: Vec<(pb::CreateVolumeRequest, Code, &[&str])> = vec![
        (from(of_volume("")), InvalidArgument, &["volume_id"]),
        (from(of_snapshot("")), InvalidArgument, &["snapshot_id"]),
        (from(of_volume("nobody")), NotFound, &["nobody"]),
        (from(of_snapshot("nothing")), NotFound, &["nothing"]),
        (from(of_volume("../x")), NotFound, &["volume_content_source", "../x"]),
        (from(of_snapshot("../x")), NotFound, &["volume_content_source", "../x"]),
        (sized(GIB / 2, 0), OutOfRange, &["snap", "1073741824"]),
        (sized(0, GIB / 2), OutOfRange, &["snap", "1073741824"]),
        (with("copyMode", "none"), InvalidArgument, &["copyMode", "none", "there"]),
        (with("pool", "second"), InvalidArgument, &["there", "main"]),
        (
            pb::CreateVolumeRequest { name: "there".into(), ..from(of_snapshot("snap")) },
            AlreadyExists,
            &["there", "volume_content_source", "snap"],
        ),
    ];
    for (request, code, words) in cases {
        assert_refused(driver.controller().create_volume(request).await, code, words);
        assert_eq!(names(&driver.path("pool/records/volumes")), ["there.json"]);
        assert_eq!(names(&driver.path("pool/layers")), before);
    }
    driver.delete_snapshot("snap").await.unwrap();
    driver.delete("there").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn snapshots() {
    use Code::{Aborted, AlreadyExists, InvalidArgument, NotFound};
    let driver = Driver::start().await;
    driver.create("one").await;
    driver.create("two").await;
    driver.snapshot("snap", "one").await.unwrap();
    let longer = "n".repeat(129);
    for (name, volume, code, words) in [
        ("", "one", InvalidArgument, &["name"][..]),
        (&longer, "one", InvalidArgument, &["name", "129 bytes"]),
        ("new", "", InvalidArgument, &["source_volume_id"]),
        ("new", "nobody", NotFound, &["nobody"]),
        ("new", "../x", NotFound, &["../x"]),
        ("snap", "two", AlreadyExists, &["snap", "one", "two"]),
    ] {
        assert_refused(driver.snapshot(name, volume).await, code, words);
    }
    let parameters = HashMap::from([("fast".into(), "yes".into())]);
    let request = pb::CreateSnapshotRequest {
        name: "new".into(),
        source_volume_id: "one".into(),
        parameters,
        ..Default::default()
    };
    let outcome = driver.controller().create_snapshot(request).await;
    assert_refused(outcome, InvalidArgument, &["parameters", "fast"]);
    assert_refused(driver.delete_snapshot("").await, InvalidArgument, &["snapshot_id"]);
    driver.delete_snapshot("../x").await.unwrap();
    let get = |id: &str| pb::GetSnapshotRequest { snapshot_id: id.into(), ..Default::default() };
    for (id, code) in [("", InvalidArgument), ("../x", NotFound), ("nothing", NotFound)] {
        let outcome = driver.controller().get_snapshot(get(id)).await;
        assert_refused(outcome, code, &["snapshot"]);
    }
    let list = |max_entries, token: &str| pb::ListSnapshotsRequest {
        max_entries,
        starting_token: token.into(),
        ..Default::default()
    };
    for (request, code) in [(list(-1, ""), InvalidArgument), (list(0, "x"), Aborted)] {
        assert_refused(driver.controller().list_snapshots(request).await, code, &[]);
    }
    assert_eq!(names(&driver.path("pool/records/snapshots")), ["snap.json"]);
    driver.delete_snapshot("snap").await.unwrap();
    driver.delete("one").await.unwrap();
    driver.delete("two").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn expansion_and_limits() {
    use Code::{InvalidArgument, NotFound, OutOfRange, ResourceExhausted};
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    let expand = |id: &str, required_bytes, limit_bytes| pb::ControllerExpandVolumeRequest {
        volume_id: id.into(),
        capacity_range: Some(pb::CapacityRange { required_bytes, limit_bytes }),
        ..Default::default()
    };
    let without =
        pb::ControllerExpandVolumeRequest { capacity_range: None, ..expand("pvc-1", 0, 0) };
    let cases: Vec<(_, Code, &[&str])> = vec![
        (expand("", GIB, 0), InvalidArgument, &["volume_id"]),
        (without, InvalidArgument, &["capacity_range"]),
        (expand("nobody", GIB, 0), NotFound, &["nobody"]),
        (expand("pvc-1", 0, 0), InvalidArgument, &["capacity_range"]),
        (expand("pvc-1", GIB / 4, GIB / 2), OutOfRange, &["pvc-1", "1073741824", "never shrinks"]),
        (expand("pvc-1", 1 << 60, 0), ResourceExhausted, &["main"]),
    ];
    for (request, code, words) in cases {
        let outcome = driver.controller().controller_expand_volume(request).await;
        assert_refused(outcome, code, words);
    }
    let modify = |id: &str, pairs: &[(&str, &str)]| pb::ControllerModifyVolumeRequest {
        volume_id: id.into(),
        mutable_parameters: pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        ..Default::default()
    };
    let cases: Vec<(_, Code, &[&str])> = vec![
        (modify("", &[]), InvalidArgument, &["volume_id"]),
        (modify("nobody", &[("iops", "1")]), NotFound, &["nobody"]),
        (modify("pvc-1", &[("pool", "x")]), InvalidArgument, &["\"pool\""]),
        (modify("pvc-1", &[("iops", "9"), ("bytesPerSecond", "x")]), InvalidArgument, &["\"x\""]),
        (modify("pvc-1", &[("iops", "9"), ("iopsRead", "9")]), InvalidArgument, &["iopsRead"]),
    ];
    for (request, code, words) in cases {
        let outcome = driver.controller().controller_modify_volume(request).await;
        assert_refused(outcome, code, words);
    }
    let record = fs::read_to_string(driver.path("pool/records/volumes/pvc-1.json")).unwrap();
    assert!(!record.contains("throttle"), "nothing of a refused change is kept: {record}");
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn names_of_every_kind_make_volumes_and_never_leave_the_pool() {
    let driver = Driver::start().await;
    let longest = "é".repeat(64);
    for name in ["../../etc/passwd", "a/b", "..", ".", "-", "PVC 1", &longest, "x-1", "tab\t"] {
        let id = driver.create(name).await;
        assert_eq!(driver.create(name).await, id, "{name}");
        assert!(!id.contains('/') && id.len() <= 63, "{name}: {id}");
        driver.stage(&id).await.unwrap();
        driver.publish(&id).await.unwrap();
        driver.remove(&id).await;
    }
    driver.assert_empty().await;
    assert_eq!(names(driver.path("pool").as_path()), ["layers", "locks", "pool.json", "records"]);
}

#[tokio::test]
async fn an_id_that_is_not_ours_is_unknown_not_invalid() {
    let driver = Driver::start().await;
    let long = "n".repeat(128);
    for id in ["../x", "a/b", "..", "UPPER", "not-there", &long] {
        driver.delete(id).await.unwrap();
        let staging = driver.text("staging");
        fs::create_dir_all(&staging).unwrap();
        let stage = pb::NodeStageVolumeRequest {
            staging_target_path: staging.clone(),
            ..driver.stage_request(id)
        };
        assert_refused(driver.node().node_stage_volume(stage).await, Code::NotFound, &[id]);
        let publish = pb::NodePublishVolumeRequest {
            staging_target_path: staging.clone(),
            target_path: driver.text("target"),
            ..driver.publish_request(id)
        };
        assert_refused(driver.node().node_publish_volume(publish).await, Code::NotFound, &[id]);
        let get = pb::ControllerGetVolumeRequest { volume_id: id.into() };
        let got = driver.controller().controller_get_volume(get).await;
        assert_refused(got, Code::NotFound, &[id]);
        let unstage =
            pb::NodeUnstageVolumeRequest { volume_id: id.into(), staging_target_path: staging };
        driver.node().node_unstage_volume(unstage).await.unwrap();
        let unpublish = pb::NodeUnpublishVolumeRequest {
            volume_id: id.into(),
            target_path: driver.text("target"),
        };
        driver.node().node_unpublish_volume(unpublish).await.unwrap();
    }
    assert!(!driver.path("target").exists());
    driver.assert_empty().await;
}

#[tokio::test]
async fn empty_fields_are_named() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let (mut node, mut controller) = (driver.node(), driver.controller());
    let invalid = Code::InvalidArgument;
    let stage = || driver.stage_request("pvc-1");
    let publish = || driver.publish_request("pvc-1");
    let request = pb::NodeStageVolumeRequest { volume_id: String::new(), ..stage() };
    assert_refused(node.node_stage_volume(request).await, invalid, &["volume_id"]);
    let request = pb::NodeStageVolumeRequest { staging_target_path: String::new(), ..stage() };
    assert_refused(node.node_stage_volume(request).await, invalid, &["staging_target_path"]);
    let request = pb::NodeStageVolumeRequest { volume_capability: None, ..stage() };
    assert_refused(node.node_stage_volume(request).await, invalid, &["volume_capability"]);
    let request = pb::NodePublishVolumeRequest { volume_id: String::new(), ..publish() };
    assert_refused(node.node_publish_volume(request).await, invalid, &["volume_id"]);
    let request = pb::NodePublishVolumeRequest { target_path: String::new(), ..publish() };
    assert_refused(node.node_publish_volume(request).await, invalid, &["target_path"]);
    let request = pb::NodePublishVolumeRequest { volume_capability: None, ..publish() };
    assert_refused(node.node_publish_volume(request).await, invalid, &["volume_capability"]);
    let request = pb::NodePublishVolumeRequest { readonly: true, ..publish() };
    let outcome = node.node_publish_volume(request).await;
    assert_refused(outcome, Code::AlreadyExists, &["readonly", "pvc-1", "false", "true"]);
    let request = pb::NodeUnpublishVolumeRequest::default();
    assert_refused(node.node_unpublish_volume(request).await, invalid, &["volume_id"]);
    let request = pb::NodeUnstageVolumeRequest::default();
    assert_refused(node.node_unstage_volume(request).await, invalid, &["volume_id"]);
    let request = pb::NodeGetVolumeStatsRequest::default();
    assert_refused(node.node_get_volume_stats(request).await, invalid, &["volume_id"]);
    let request = pb::DeleteVolumeRequest::default();
    assert_refused(controller.delete_volume(request).await, invalid, &["volume_id"]);
    let request = pb::ControllerGetVolumeRequest::default();
    assert_refused(controller.controller_get_volume(request).await, invalid, &["volume_id"]);
    driver.remove("pvc-1").await;
}

#[tokio::test]
async fn staging_wants_a_directory_that_is_there() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    touch(&driver.path("file"));
    symlink(driver.path("pool"), driver.path("link")).unwrap();
    let (invalid, failed) = (Code::InvalidArgument, Code::FailedPrecondition);
    for (path, code, words) in [
        ("relative".to_owned(), invalid, "not absolute"),
        (format!("{}/../x", driver.text("pool")), invalid, ".."),
        (driver.text("link"), invalid, "symbolic link"),
        (driver.text("link/"), invalid, "symbolic link"),
        (driver.text("file"), failed, "not a directory"),
        (driver.text("missing"), failed, "does not exist"),
    ] {
        let stage = pb::NodeStageVolumeRequest {
            staging_target_path: path,
            ..driver.stage_request("pvc-1")
        };
        let outcome = driver.node().node_stage_volume(stage).await;
        assert_refused(outcome, code, &["staging_target_path", words]);
    }
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test]
async fn publishing_wants_a_target_that_is_free_or_its_own() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.stage("pvc-1").await.unwrap();
    let other = driver.published("pvc-2").await;
    touch(&driver.path("file"));
    fs::create_dir(driver.path("full")).unwrap();
    touch(&driver.path("full/file"));
    symlink(driver.path("pool"), driver.path("link")).unwrap();
    let (invalid, failed) = (Code::InvalidArgument, Code::FailedPrecondition);
    for (path, code, words) in [
        ("relative/path".to_owned(), invalid, "not absolute"),
        (format!("{}/../x", driver.text("pool")), invalid, ".."),
        (driver.text("link"), invalid, "symbolic link"),
        (driver.text("file"), failed, "not a directory"),
        (driver.text("full"), failed, "something in it"),
        (driver.text("no/parent"), failed, "parent"),
        (driver.text(&format!("target-{other}")), failed, "something else"),
        ("/proc".to_owned(), failed, "something else"),
    ] {
        let publish = pb::NodePublishVolumeRequest {
            target_path: path.clone(),
            ..driver.publish_request("pvc-1")
        };
        let outcome = driver.node().node_publish_volume(publish).await;
        assert_refused(outcome, code, &["target_path", words]);
        let request =
            pb::NodeUnpublishVolumeRequest { volume_id: "pvc-1".into(), target_path: path.clone() };
        if path != driver.text("no/parent") {
            let outcome = driver.node().node_unpublish_volume(request).await;
            assert_refused(outcome, code, &["target_path", words]);
        }
    }
    assert!(driver.path("full/file").exists() && driver.path("link").is_symlink());
    assert!(driver.socket(&other).exists());
    driver.publish("pvc-1").await.unwrap();
    driver.remove("pvc-1").await;
    driver.remove(&other).await;
    driver.assert_empty().await;
}

#[tokio::test]
async fn calls_out_of_order_change_nothing() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    let failed = Code::FailedPrecondition;
    assert_refused(driver.publish("pvc-1").await, failed, &["staging_target_path", "pvc-1"]);
    assert!(!driver.path("target-pvc-1").exists());
    driver.stage("pvc-1").await.unwrap();
    let publish = pb::NodePublishVolumeRequest {
        staging_target_path: String::new(),
        ..driver.publish_request("pvc-1")
    };
    let outcome = driver.node().node_publish_volume(publish).await;
    assert_refused(outcome, failed, &["staging_target_path", "empty"]);
    let publish = pb::NodePublishVolumeRequest {
        staging_target_path: driver.text("elsewhere"),
        ..driver.publish_request("pvc-1")
    };
    let outcome = driver.node().node_publish_volume(publish).await;
    assert_refused(outcome, failed, &["staging_target_path", "elsewhere"]);
    let mut stage = driver.stage_request("pvc-1");
    stage.volume_capability = Some(mount(Mode::SingleNodeMultiWriter));
    let outcome = driver.node().node_stage_volume(stage).await;
    assert_refused(outcome, Code::AlreadyExists, &["SINGLE_NODE_WRITER", "MULTI_WRITER"]);
    fs::create_dir(driver.path("elsewhere")).unwrap();
    let stage = pb::NodeStageVolumeRequest {
        staging_target_path: driver.text("elsewhere"),
        ..driver.stage_request("pvc-1")
    };
    let outcome = driver.node().node_stage_volume(stage).await;
    assert_refused(outcome, failed, &["staging-pvc-1"]);
    driver.publish("pvc-1").await.unwrap();
    assert_refused(driver.unstage("pvc-1").await, failed, &["target-pvc-1"]);
    assert_refused(driver.delete("pvc-1").await, failed, &["staging-pvc-1"]);
    assert_eq!(driver.daemons().await.len(), 1);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

fn touch(path: &std::path::Path) {
    fs::File::create(path).unwrap();
}
