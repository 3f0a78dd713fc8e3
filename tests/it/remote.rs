//! Remote masters on real servers: what a volume on one reads, writes and keeps.

pub(crate) mod secrecy;
pub(crate) mod server;
pub(crate) mod trouble;

use crate::{
    copies::Source,
    harness::{Driver, create_request, part, signal, until},
    metadata::{allocated, delta},
    relay::front::Disk,
};
use qsd_csi::{csi::pb::csi as pb, extents::Extents};
use server::{Kind, SIZE, Server, sector};
use std::{collections::HashMap, fs, os::unix::fs::FileExt as _, process::Command, time::Duration};
use tonic::{Code, Status};

/// Sectors that are looked at: the ends, and some in between.
const SECTORS: [u64; 5] = [0, 1, 4096, 9999, SIZE / 512 - 1];

/// A volume that starts from what a server has.
pub(crate) fn on(server: &Server, name: &str, more: &[(&str, &str)]) -> pb::CreateVolumeRequest {
    let request = from(&server.source(), name, more);
    pb::CreateVolumeRequest { secrets: secrets(server.secrets()), ..request }
}

/// A volume that starts from this source.
pub(crate) fn from(source: &str, name: &str, more: &[(&str, &str)]) -> pb::CreateVolumeRequest {
    let mut request = create_request(name, 0);
    request.parameters = HashMap::from([("source".to_owned(), source.to_owned())]);
    let more = more.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    request.parameters.extend(more);
    request
}

pub(crate) fn secrets(secrets: Vec<(&str, String)>) -> HashMap<String, String> {
    secrets.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

pub(crate) async fn create(
    driver: &Driver,
    request: pb::CreateVolumeRequest,
) -> Result<pb::Volume, Status> {
    let response = driver.controller().create_volume(request).await?;
    Ok(response.into_inner().volume.unwrap())
}

pub(crate) async fn stage(driver: &Driver, volume: &str, server: &Server) -> Result<(), Status> {
    stage_with(driver, volume, server.secrets()).await
}

pub(crate) async fn stage_with(
    driver: &Driver,
    volume: &str,
    given: Vec<(&str, String)>,
) -> Result<(), Status> {
    let mut request = driver.stage_request(volume);
    fs::create_dir_all(&request.staging_target_path).unwrap();
    request.secrets = secrets(given);
    driver.node().node_stage_volume(request).await.map(drop)
}

/// Creates, stages and publishes a volume on what a server has.
pub(crate) async fn published(
    driver: &Driver,
    server: &Server,
    name: &str,
    more: &[(&str, &str)],
) -> Disk {
    create(driver, on(server, name, more)).await.unwrap();
    open(driver, server, name).await
}

/// Stages and publishes a volume that is there.
pub(crate) async fn open(driver: &Driver, server: &Server, name: &str) -> Disk {
    stage(driver, name, server).await.unwrap();
    driver.publish(name).await.unwrap();
    Disk::open(&driver.socket(name))
}

/// Unpublishes and unstages a volume.
pub(crate) async fn close(driver: &Driver, name: &str) {
    driver.unpublish(name).await.unwrap();
    driver.unstage(name).await.unwrap();
}

/// Kills the one daemon, and waits for the next.
pub(crate) async fn another_daemon(driver: &Driver) {
    let before = driver.daemons().await;
    signal(before[0], "KILL");
    until("another daemon serves", async || {
        let now = driver.daemons().await;
        now.len() == 1 && now != before
    })
    .await;
}

pub(crate) async fn layers(driver: &Driver, volume: &str) -> usize {
    let volumes = driver.inspect().await;
    volumes.into_iter().find(|one| one.volume_id == volume).unwrap().layers.len()
}

fn qemu_img(words: &[&str]) {
    let status = Command::new(part("bin/qemu-img")).args(words).status();
    assert!(status.unwrap().success(), "{words:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_keeps_what_is_written_and_leaves_its_master_alone() {
    for program in ["bin/qemu-storage-daemon", "bin/qemu-storage-daemon-newer"] {
        for kind in [Kind::NbdUnix, Kind::Nbds, Kind::HttpAuth, Kind::IscsiChap, Kind::Ssh] {
            eprintln!("{kind:?}, {program}");
            let driver = Driver::start_on(part(program), &[]).await;
            let server = Server::start(kind).await;
            let mut disk = published(&driver, &server, "pvc-1", &[]).await;
            for number in SECTORS {
                assert_eq!(disk.read(number), sector(number), "sector {number}");
            }
            disk.works(4096, 255);
            another_daemon(&driver).await;
            assert_eq!(disk.read(4096), [255; 512]);
            assert_eq!(disk.read(4097), sector(4097));
            driver.upgrade("pvc-1").await.unwrap();
            assert_eq!(disk.read(4096), [255; 512]);
            assert_eq!(disk.read(1), sector(1));
            assert_eq!(server.sector(4096), sector(4096), "the master is as it was");
            drop(disk);
            driver.remove("pvc-1").await;
            driver.assert_empty().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_read_once_does_not_need_its_master_again() {
    for kind in [Kind::NbdUnix, Kind::HttpAuth, Kind::IscsiChap, Kind::Ssh] {
        eprintln!("{kind:?}");
        let driver = Driver::start().await;
        let mut server = Server::start(kind).await;
        let copy = [("copyMode", "copy-on-read")];
        let mut disk = published(&driver, &server, "pvc-1", &copy).await;
        assert_eq!(disk.read(4096), sector(4096));
        server.kill();
        assert_eq!(disk.read(4096), sector(4096), "from here");
        // The iSCSI library goes on trying for three quarters of a minute.
        if kind != Kind::IscsiChap {
            assert_eq!(disk.try_read(9999), Err(1), "not from here");
        }
        drop(disk);
        close(&driver, "pvc-1").await;
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_lives_on_without_its_master() {
    for kind in [Kind::Nbds, Kind::HttpAuth, Kind::IscsiChap, Kind::Ssh] {
        eprintln!("{kind:?}");
        let driver = Driver::start().await;
        let mut server = Server::start(kind).await;
        create(&driver, on(&server, "pvc-1", &[("copyMode", "clone")])).await.unwrap();
        assert_eq!(layers(&driver, "pvc-1").await, 3, "it waits for its secrets");
        let mut disk = open(&driver, &server, "pvc-1").await;
        disk.works(1, 255);
        until("it is independent", async || layers(&driver, "pvc-1").await == 1).await;
        server.kill();
        for number in [0, 4096, 9999] {
            assert_eq!(disk.read(number), sector(number), "sector {number}");
        }
        drop(disk);
        close(&driver, "pvc-1").await;
        let mut disk = open(&driver, &server, "pvc-1").await;
        assert_eq!(disk.read(1), [255; 512]);
        assert_eq!(disk.read(9999), sector(9999));
        drop(disk);
        driver.remove("pvc-1").await;
        driver.assert_empty().await;
    }
}

/// Most images are smaller than what is made of them, and not all are of whole sectors.
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_is_larger_than_its_master_is_made_under_a_guest() {
    for (more, size) in [(SIZE, 2 * SIZE), (512, SIZE + 4096)] {
        for kind in [Kind::HttpAuth, Kind::NbdUnix] {
            let driver = Driver::start().await;
            let mut server = Server::start(kind).await;
            if more == 512 {
                server.resize(SIZE + more).await;
            }
            let slowly = [("copyMode", "clone"), ("cloneBytesPerSecond", "4Mi")];
            let mut request = on(&server, "pvc-1", &slowly);
            request.capacity_range.as_mut().unwrap().required_bytes = size.try_into().unwrap();
            create(&driver, request).await.unwrap();
            let mut disk = open(&driver, &server, "pvc-1").await;
            let last = size / 512 - 1;
            disk.works(last, 254);
            disk.works(7, 255);
            let mut looks = 0;
            while layers(&driver, "pvc-1").await > 1 {
                looks += 1;
                let number = looks * 97 % (SIZE / 512);
                let found = if number == 7 { vec![255; 512] } else { sector(number) };
                assert_eq!(disk.read(number), found, "sector {number}");
                assert_eq!(disk.read(last - 1), [0; 512], "beyond the master");
                assert_eq!(disk.read(last), [254; 512]);
            }
            assert!(looks > 10, "{looks} looks while it was copied");
            server.kill();
            another_daemon(&driver).await;
            for number in 8..SIZE / 512 {
                assert_eq!(disk.read(number), sector(number), "sector {number}");
            }
            assert_eq!(disk.read(last), [254; 512]);
            drop(disk);
            driver.remove("pvc-1").await;
            driver.assert_empty().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_needs_no_secrets_is_made_while_nobody_uses_it() {
    let driver = Driver::start().await;
    for kind in [Kind::NbdUnix, Kind::Http, Kind::Iscsi] {
        let mut server = Server::start(kind).await;
        create(&driver, on(&server, "pvc-1", &[("copyMode", "clone")])).await.unwrap();
        until("it is independent", async || layers(&driver, "pvc-1").await == 1).await;
        server.kill();
        let mut disk = open(&driver, &server, "pvc-1").await;
        assert_eq!(disk.read(9999), sector(9999));
        drop(disk);
        driver.remove("pvc-1").await;
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_its_master_writes_to_it() {
    for kind in [Kind::NbdUnix, Kind::Nbds, Kind::IscsiChap, Kind::Ssh] {
        eprintln!("{kind:?}");
        let driver = Driver::start().await;
        let server = Server::start(kind).await;
        let mut disk = published(&driver, &server, "pvc-1", &[("copyMode", "none")]).await;
        assert_eq!(disk.read(9999), sector(9999));
        disk.works(4096, 255);
        another_daemon(&driver).await;
        disk.works(4097, 254);
        driver.upgrade("pvc-1").await.unwrap();
        assert_eq!(disk.read(4096), [255; 512]);
        let error = driver.snapshot("snapshot-1", "pvc-1").await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        let error = driver.expand("pvc-1", 16 << 20).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        drop(disk);
        driver.remove("pvc-1").await;
        assert_eq!([server.sector(4096), server.sector(4097)], [[255; 512], [254; 512]]);
        assert_eq!(server.sector(4098), sector(4098));
        driver.assert_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_has_at_least_the_size_of_its_master() {
    let driver = Driver::start().await;
    let odd = SIZE + 512;
    let server = Server::start_with(Kind::NbdUnix, |path| {
        fs::File::create(path).unwrap().set_len(odd).unwrap();
    })
    .await;
    let sized = |required: u64, limit: u64, more: &[(&str, &str)]| {
        let [required_bytes, limit_bytes] = [required, limit].map(|size| size.try_into().unwrap());
        let capacity_range = Some(pb::CapacityRange { required_bytes, limit_bytes });
        pb::CreateVolumeRequest { capacity_range, ..on(&server, "pvc-1", more) }
    };
    let whole = sized(0, 0, &[]);
    let none = pb::CreateVolumeRequest { capacity_range: None, ..whole.clone() };
    for (request, size) in [
        (whole, SIZE + 4096),
        (none, SIZE + 4096),
        (sized(2 * SIZE, 0, &[]), 2 * SIZE),
        (sized(0, 2 * SIZE, &[]), SIZE + 4096),
        (sized(0, 0, &[("copyMode", "none")]), odd),
        (sized(SIZE, odd, &[("copyMode", "none")]), odd),
    ] {
        for _ in 0..2 {
            let volume = create(&driver, request.clone()).await.unwrap();
            assert_eq!(volume.capacity_bytes, i64::try_from(size).unwrap());
        }
        driver.delete("pvc-1").await.unwrap();
    }
    for request in [
        sized(SIZE, 0, &[]),
        sized(0, SIZE, &[]),
        sized(2 * SIZE, 0, &[("copyMode", "none")]),
        sized(0, SIZE, &[("copyMode", "none")]),
    ] {
        let error = create(&driver, request).await.unwrap_err();
        assert_eq!(error.code(), Code::OutOfRange, "{error}");
        assert!(error.message().contains(&odd.to_string()), "{error}");
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_larger_than_its_master_reads_nothing_beyond_it() {
    let driver = Driver::start().await;
    let mut server = Server::start(Kind::NbdUnix).await;
    let mut request = on(&server, "pvc-1", &[]);
    request.capacity_range.as_mut().unwrap().required_bytes = 16 << 20;
    create(&driver, request).await.unwrap();
    let mut disk = open(&driver, &server, "pvc-1").await;
    assert_eq!(disk.read(SIZE / 512), [0; 512]);
    // A master that grows is still the one that was recorded.
    server.resize(2 * SIZE).await;
    let grown = fs::File::options().write(true).open(server.disk()).unwrap();
    grown.write_all_at(&[9; 512], SIZE).unwrap();
    another_daemon(&driver).await;
    assert_eq!(disk.read(SIZE / 512), [0; 512]);
    assert_eq!(disk.read(SIZE / 512 - 1), sector(SIZE / 512 - 1));
    driver.expand("pvc-1", 32 << 20).await.unwrap();
    disk.works((24 << 20) / 512, 7);
    drop(disk);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_is_read_in_the_format_that_was_said() {
    let driver = Driver::start().await;
    for kind in [Kind::Http, Kind::NbdUnix] {
        let server = Server::start_with(kind, |path| {
            let raw = path.with_extension("raw");
            fs::File::create(&raw).unwrap().write_all_at(&[3; 4096], 0).unwrap();
            let [raw, path] = [&raw, path].map(|path| path.to_str().unwrap());
            qemu_img(&["convert", "-q", "-O", "qcow2", raw, path]);
            qemu_img(&["resize", "-q", path, "8M"]);
        })
        .await;
        let mut disk = published(&driver, &server, "pvc-1", &[("sourceFormat", "qcow2")]).await;
        assert_eq!([disk.read(0), disk.read(8)], [[3; 512], [0; 512]]);
        disk.works(8, 4);
        drop(disk);
        driver.remove("pvc-1").await;
        // Nothing is probed: raw is what was not said otherwise.
        let mut disk = published(&driver, &server, "pvc-1", &[]).await;
        assert_eq!(disk.read(0)[..4], *b"QFI\xfb");
        drop(disk);
        driver.remove("pvc-1").await;
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_in_qcow2_can_be_written_in_place() {
    let driver = Driver::start().await;
    let server = Server::start_with(Kind::NbdUnix, |path| {
        qemu_img(&["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "8M"]);
        // A server of bytes does not make them more.
        fs::File::options().write(true).open(path).unwrap().set_len(16 << 20).unwrap();
    })
    .await;
    let none = [("sourceFormat", "qcow2"), ("copyMode", "none")];
    let mut disk = published(&driver, &server, "pvc-1", &none).await;
    disk.works(9, 4);
    another_daemon(&driver).await;
    assert_eq!(disk.read(9), [4; 512]);
    drop(disk);
    driver.remove("pvc-1").await;
    let flat = server.path("flat");
    let [disk, flat] = [server.disk(), flat].map(|path| path.to_str().unwrap().to_owned());
    qemu_img(&["convert", "-U", "-f", "qcow2", "-O", "raw", &disk, &flat]);
    let mut found = [0; 512];
    fs::File::open(flat).unwrap().read_exact_at(&mut found, 9 * 512).unwrap();
    assert_eq!(found, [4; 512]);
    driver.assert_empty().await;
}

/// The way of a golden image: its snapshots and clones stand on the master, too, and merging what
/// lies above it needs nobody's secrets.
#[tokio::test(flavor = "multi_thread")]
async fn snapshots_of_a_volume_on_a_master_are_like_any_others() {
    let driver = Driver::start().await;
    let mut server = Server::start(Kind::HttpAuth).await;
    let mut disk = published(&driver, &server, "pvc-1", &[]).await;
    disk.works(1, 101);
    driver.snapshot("snapshot-1", "pvc-1").await.unwrap();
    disk.works(2, 102);
    driver.snapshot("snapshot-2", "pvc-1").await.unwrap();
    // Nobody knows what a master holds, so it is all there.
    assert_eq!(allocated(&driver, "snapshot-1").await.unwrap(), Extents::from(0..SIZE));
    let changed = delta(&driver, "snapshot-1", "snapshot-2").await.unwrap();
    assert_eq!(changed, Extents::from(0..4096));
    driver.delete_snapshot("snapshot-2").await.unwrap();
    // The class is the same, so its source is named again, and not meant.
    let mut request = on(&server, "pvc-2", &[]);
    request.volume_content_source = Some(Source::Snapshot("snapshot-1".into()).message());
    create(&driver, request).await.unwrap();
    let mut other = open(&driver, &server, "pvc-2").await;
    assert_eq!([other.read(1), other.read(2)], [vec![101; 512], sector(2)]);
    drop((disk, other));
    driver.remove("pvc-2").await;
    close(&driver, "pvc-1").await;
    server.kill();
    driver.delete_snapshot("snapshot-1").await.unwrap();
    until("the layers are merged", async || layers(&driver, "pvc-1").await == 2).await;
    server.launch().await;
    let mut disk = open(&driver, &server, "pvc-1").await;
    assert_eq!([disk.read(1), disk.read(2)], [[101; 512], [102; 512]]);
    assert_eq!(disk.read(9999), sector(9999));
    drop(disk);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_master_is_left_to_whoever_asked_for_one() {
    let driver = Driver::start().await;
    let server = Server::start(Kind::NbdUnix).await;
    let mut disk = published(&driver, &server, "pvc-1", &[]).await;
    disk.works(1, 101);
    drop(disk);
    close(&driver, "pvc-1").await;
    tokio::time::sleep(Duration::from_secs(6)).await; // the longest between two looks for work
    assert_eq!(layers(&driver, "pvc-1").await, 2);
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// A copy that waits for secrets stays a layer of its own. Once it was merged with the larger
/// active layer meanwhile, and could not be made under a guest any more, nor without the secrets.
#[tokio::test(flavor = "multi_thread")]
async fn a_larger_clone_that_waits_for_secrets_is_made_once_they_are_there() {
    let driver = Driver::start().await;
    let server = Server::start(Kind::HttpAuth).await;
    let mut request = on(&server, "pvc-1", &[("copyMode", "clone")]);
    request.capacity_range.as_mut().unwrap().required_bytes = (2 * SIZE).try_into().unwrap();
    create(&driver, request).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await; // long enough for what must not happen
    let mut disk = open(&driver, &server, "pvc-1").await;
    until("it is independent", async || layers(&driver, "pvc-1").await == 1).await;
    for number in [0, 1, SIZE / 512 - 1] {
        assert_eq!(disk.read(number), server.sector(number), "sector {number}");
    }
    drop(disk);
    close(&driver, "pvc-1").await;
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}
