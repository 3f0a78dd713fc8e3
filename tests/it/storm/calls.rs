//! Calls at random: of every kind, on any of the volumes, with the codes that each may end with.

use crate::{
    copies::Source,
    harness::{Dice, Driver, create_request, mount},
    local::Use,
};
use qsd_csi::csi::pb::{
    csi::{self as pb, volume_capability::access_mode::Mode},
    inspect::{self, inspect_client::InspectClient},
};
use std::{fs, pin::Pin};
use tonic::{Code, Status};

/// How many volumes there are at most; each has its form for all of its lives.
pub(super) const VOLUMES: u64 = 50;

/// How many snapshots there are at most.
const SNAPSHOTS: u64 = 20;

/// The size of most volumes; xfs takes no less than 300 MiB.
const SIZE: i64 = 64 << 20;
const SIZE_OF_XFS: i64 = 320 << 20;

/// How a volume is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Socket,
    /// A socket of somebody who only reads.
    Reader,
    Kernel(Use),
    /// It goes with its pod.
    Inline,
}

impl Form {
    pub(super) fn of(slot: u64) -> Self {
        match slot % 10 {
            0..=3 => Self::Socket,
            4 => Self::Reader,
            5 | 6 => Self::Kernel(Use::Block),
            7 | 8 => Self::Kernel(Use::Ext4),
            _ if slot > 30 => Self::Kernel(Use::Xfs),
            _ => Self::Inline,
        }
    }

    fn capability(self) -> pb::VolumeCapability {
        match self {
            Self::Socket | Self::Inline => mount(Mode::SingleNodeWriter),
            Self::Reader => mount(Mode::SingleNodeReaderOnly),
            Self::Kernel(way) => way.capability(),
        }
    }
}

/// The name of a volume.
pub(super) fn volume(slot: u64) -> String {
    match Form::of(slot) {
        Form::Inline => format!("csi-{slot:064x}"),
        Form::Socket | Form::Reader | Form::Kernel(_) => format!("pvc-{slot}"),
    }
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<(), Status>> + Send + 'a>>;

/// A call that is to be made.
pub(super) struct Call<'a> {
    pub(super) method: &'static str,
    /// What it may answer, beside that all went well, when others are at work on the same things.
    pub(super) expected: &'static [Code],
    pub(super) answer: Answer<'a>,
}

use Code::{Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, OutOfRange};

const BUSY: &[Code] = &[Aborted, NotFound];
const IN_USE: &[Code] = &[Aborted, NotFound, FailedPrecondition];
const OTHERWISE: &[Code] = &[Aborted, NotFound, FailedPrecondition, AlreadyExists];

/// Draws a call. Those that change something are drawn most.
pub(super) fn draw<'a>(driver: &'a Driver, dice: &mut Dice) -> Call<'a> {
    let slot = dice.roll(VOLUMES);
    let (name, snapshot) = (volume(slot), format!("snap-{}", dice.roll(SNAPSHOTS)));
    let other = format!("snap-{}", dice.roll(SNAPSHOTS));
    let call = |method, expected, answer: Answer<'a>| Call { method, expected, answer };
    match dice.roll(100) {
        0..16 => {
            let from = source(dice, &snapshot);
            let request = creation(slot, from.as_ref());
            let expected = &[Aborted, NotFound, AlreadyExists, OutOfRange, FailedPrecondition];
            let answer = async { driver.controller().create_volume(request).await.map(drop) };
            call("CreateVolume", expected, Box::pin(answer))
        }
        16..20 => {
            let answer = async move { driver.delete(&name).await };
            call("DeleteVolume", &[Aborted, FailedPrecondition], Box::pin(answer))
        }
        20..28 => {
            let answer = async move { driver.snapshot(&snapshot, &name).await };
            call("CreateSnapshot", OTHERWISE, Box::pin(answer))
        }
        28..33 => {
            let answer = async move { driver.delete_snapshot(&snapshot).await };
            call("DeleteSnapshot", &[Aborted], Box::pin(answer))
        }
        33..48 => call("NodeStageVolume", OTHERWISE, Box::pin(stage(driver, slot))),
        48..63 => call("NodePublishVolume", OTHERWISE, Box::pin(publish(driver, slot))),
        63..69 => {
            let answer = async move { driver.unpublish(&name).await };
            call("NodeUnpublishVolume", BUSY, Box::pin(answer))
        }
        69..74 => {
            let answer = async move { driver.unstage(&name).await };
            call("NodeUnstageVolume", IN_USE, Box::pin(answer))
        }
        74..83 => change(driver, dice, slot, name),
        83..91 => tell(driver, dice, slot, name),
        _ => look(driver, dice, snapshot, other),
    }
}

/// The calls of the life of one volume, in order.
pub(super) fn life(driver: &Driver, slot: u64) -> Vec<(&'static str, Answer<'_>)> {
    let name = move || volume(slot);
    let create =
        async move { driver.controller().create_volume(creation(slot, None)).await.map(drop) };
    let unpublish = async move { driver.unpublish(&name()).await };
    let unstage = async move { driver.unstage(&name()).await };
    let delete = async move { driver.delete(&name()).await };
    let mut life: Vec<(_, Answer<'_>)> = vec![
        ("CreateVolume", Box::pin(create)),
        ("NodeStageVolume", Box::pin(stage(driver, slot))),
        ("NodePublishVolume", Box::pin(publish(driver, slot))),
        ("NodeUnpublishVolume", Box::pin(unpublish)),
        ("NodeUnstageVolume", Box::pin(unstage)),
        ("DeleteVolume", Box::pin(delete)),
    ];
    if Form::of(slot) == Form::Inline {
        life.retain(|(step, _)| ["NodePublishVolume", "NodeUnpublishVolume"].contains(step));
    }
    life
}

fn source(dice: &mut Dice, snapshot: &str) -> Option<Source> {
    match dice.roll(5) {
        0 => Some(Source::Snapshot(snapshot.to_owned())),
        1 => Some(Source::Volume(volume(dice.roll(VOLUMES)))),
        _ => None,
    }
}

fn creation(slot: u64, source: Option<&Source>) -> pb::CreateVolumeRequest {
    match Form::of(slot) {
        Form::Kernel(way) => {
            let size = if way == Use::Xfs { SIZE_OF_XFS } else { SIZE };
            way.create(&volume(slot), source, size)
        }
        form @ (Form::Socket | Form::Reader | Form::Inline) => pb::CreateVolumeRequest {
            volume_capabilities: vec![form.capability()],
            volume_content_source: source.map(Source::message),
            ..create_request(&volume(slot), SIZE)
        },
    }
}

async fn stage(driver: &Driver, slot: u64) -> Result<(), Status> {
    let mut request = driver.stage_request(&volume(slot));
    request.volume_capability = Some(Form::of(slot).capability());
    fs::create_dir_all(&request.staging_target_path).unwrap();
    driver.node().node_stage_volume(request).await.map(drop)
}

async fn publish(driver: &Driver, slot: u64) -> Result<(), Status> {
    let mut request = driver.publish_request(&volume(slot));
    request.volume_capability = Some(Form::of(slot).capability());
    if Form::of(slot) == Form::Inline {
        let context = [("csi.storage.k8s.io/ephemeral", "true"), ("size", "64Mi")];
        request.volume_context =
            context.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        request.staging_target_path = String::new();
    }
    driver.node().node_publish_volume(request).await.map(drop)
}

fn change<'a>(driver: &'a Driver, dice: &mut Dice, slot: u64, volume_id: String) -> Call<'a> {
    let expected = &[Aborted, NotFound, FailedPrecondition, OutOfRange];
    let more = i64::try_from(dice.roll(4)).unwrap() << 20;
    let range = Some(pb::CapacityRange { required_bytes: SIZE + more, limit_bytes: 0 });
    match dice.roll(7) {
        0 | 1 => {
            let request = pb::ControllerExpandVolumeRequest {
                volume_id,
                capacity_range: range,
                ..Default::default()
            };
            let answer =
                async { driver.controller().controller_expand_volume(request).await.map(drop) };
            Call { method: "ControllerExpandVolume", expected, answer: Box::pin(answer) }
        }
        2 | 3 => {
            let request = pb::NodeExpandVolumeRequest {
                volume_path: driver.text(&format!("target-{volume_id}")),
                volume_id,
                capacity_range: range,
                volume_capability: Some(Form::of(slot).capability()),
                ..Default::default()
            };
            let answer = async { driver.node().node_expand_volume(request).await.map(drop) };
            Call { method: "NodeExpandVolume", expected, answer: Box::pin(answer) }
        }
        4 | 5 => {
            let iops = (1000 + dice.roll(9) * 1000).to_string();
            let answer = async move { driver.modify(&volume_id, &[("iops", &iops)]).await };
            Call { method: "ControllerModifyVolume", expected: BUSY, answer: Box::pin(answer) }
        }
        _ => {
            let answer = async move { driver.upgrade(&volume_id).await };
            Call { method: "UpgradeDaemon", expected: IN_USE, answer: Box::pin(answer) }
        }
    }
}

/// What asks for one volume.
fn tell<'a>(driver: &'a Driver, dice: &mut Dice, slot: u64, volume_id: String) -> Call<'a> {
    match dice.roll(4) {
        0 | 1 => {
            let request = pb::NodeGetVolumeStatsRequest {
                volume_path: driver.text(&format!("target-{volume_id}")),
                volume_id,
                ..Default::default()
            };
            let answer = async { driver.node().node_get_volume_stats(request).await.map(drop) };
            Call { method: "NodeGetVolumeStats", expected: &[NotFound], answer: Box::pin(answer) }
        }
        2 => {
            let request = pb::ControllerGetVolumeRequest { volume_id };
            let answer =
                async { driver.controller().controller_get_volume(request).await.map(drop) };
            Call { method: "ControllerGetVolume", expected: &[NotFound], answer: Box::pin(answer) }
        }
        _ => {
            let request = pb::ValidateVolumeCapabilitiesRequest {
                volume_id,
                volume_capabilities: vec![Form::of(slot).capability()],
                ..Default::default()
            };
            let answer =
                async { driver.controller().validate_volume_capabilities(request).await.map(drop) };
            let method = "ValidateVolumeCapabilities";
            Call { method, expected: &[NotFound], answer: Box::pin(answer) }
        }
    }
}

/// What asks for snapshots, or for all there is.
fn look<'a>(driver: &'a Driver, dice: &mut Dice, snapshot: String, other: String) -> Call<'a> {
    let gone = &[NotFound, FailedPrecondition];
    let unrelated = &[NotFound, FailedPrecondition, InvalidArgument];
    match dice.roll(9) {
        0 => {
            let answer = async move { allocated(driver, snapshot).await };
            Call { method: "GetMetadataAllocated", expected: gone, answer: Box::pin(answer) }
        }
        1 => {
            let answer = async move { delta(driver, snapshot, other).await };
            Call { method: "GetMetadataDelta", expected: unrelated, answer: Box::pin(answer) }
        }
        2 | 3 => {
            let answer = async { list_volumes(driver).await };
            Call { method: "ListVolumes", expected: &[], answer: Box::pin(answer) }
        }
        4 => {
            let request = pb::ListSnapshotsRequest::default();
            let answer = async { driver.controller().list_snapshots(request).await.map(drop) };
            Call { method: "ListSnapshots", expected: &[], answer: Box::pin(answer) }
        }
        5 => {
            let request = pb::GetSnapshotRequest { snapshot_id: snapshot, ..Default::default() };
            let answer = async { driver.controller().get_snapshot(request).await.map(drop) };
            Call { method: "GetSnapshot", expected: &[NotFound], answer: Box::pin(answer) }
        }
        6 => {
            let request = pb::GetCapacityRequest::default();
            let answer = async { driver.controller().get_capacity(request).await.map(drop) };
            Call { method: "GetCapacity", expected: &[], answer: Box::pin(answer) }
        }
        7 => {
            let answer = async { introduce(driver).await };
            Call { method: "Probe and the like", expected: &[], answer: Box::pin(answer) }
        }
        _ => {
            let answer = async { look_around(driver).await };
            Call { method: "Look", expected: &[], answer: Box::pin(answer) }
        }
    }
}

async fn allocated(driver: &Driver, snapshot_id: String) -> Result<(), Status> {
    let request = pb::GetMetadataAllocatedRequest { snapshot_id, ..Default::default() };
    let mut stream = driver.metadata().get_metadata_allocated(request).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

async fn delta(driver: &Driver, base: String, target: String) -> Result<(), Status> {
    let request = pb::GetMetadataDeltaRequest {
        base_snapshot_id: base,
        target_snapshot_id: target,
        ..Default::default()
    };
    let mut stream = driver.metadata().get_metadata_delta(request).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

/// All pages.
async fn list_volumes(driver: &Driver) -> Result<(), Status> {
    let mut starting_token = String::new();
    loop {
        let request = pb::ListVolumesRequest { max_entries: 7, starting_token };
        let page = driver.controller().list_volumes(request).await?.into_inner();
        starting_token = page.next_token;
        if starting_token.is_empty() {
            return Ok(());
        }
    }
}

/// What every caller asks at its start.
async fn introduce(driver: &Driver) -> Result<(), Status> {
    driver.identity().probe(pb::ProbeRequest {}).await?;
    driver.identity().get_plugin_info(pb::GetPluginInfoRequest {}).await?;
    driver.identity().get_plugin_capabilities(pb::GetPluginCapabilitiesRequest {}).await?;
    let capabilities = pb::ControllerGetCapabilitiesRequest {};
    driver.controller().controller_get_capabilities(capabilities).await?;
    driver.node().node_get_capabilities(pb::NodeGetCapabilitiesRequest {}).await?;
    driver.node().node_get_info(pb::NodeGetInfoRequest {}).await.map(drop)
}

async fn look_around(driver: &Driver) -> Result<(), Status> {
    let mut client = InspectClient::new(driver.channel());
    let mut all = client.look(inspect::LookRequest {}).await?.into_inner();
    while all.message().await?.is_some() {}
    let request = inspect::ListVolumesRequest::default();
    let mut volumes = client.list_volumes(request).await?.into_inner();
    while volumes.message().await?.is_some() {}
    Ok(())
}
