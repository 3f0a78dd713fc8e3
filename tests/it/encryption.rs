//! Encrypted volumes: what is written to them is read again with the passphrase, and not without.

mod secrecy;
mod story;

use crate::{
    copies::{Source, Wish},
    harness::{Driver, create_request, mount, names, until},
    metadata::{allocated, delta},
    model::{
        guest::{Action, Guest},
        picture::{Picture, SECTOR},
    },
    remote::{
        self, another_daemon, create, layers,
        server::{self, Kind, Server},
        stage_with,
    },
    survival::tell,
};
use qsd_csi::{
    csi::pb::csi::{
        self as pb,
        volume_capability::{AccessType, MountVolume, access_mode::Mode},
    },
    extents::Extents,
};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};
use tonic::{Code, Status};

/// The secret that opens a volume.
const KEY: &str = "encryptionPassphrase";

/// The one that most volumes here have: long, and in no alphabet alone.
const PASSPHRASE: &str = "correct horse, bättery staple 8c1f";

/// The size of most volumes here.
const SIZE: u64 = 16 << 20;

const ENCRYPTED: [(&str, &str); 1] = [("encryption", "luks")];

fn encrypted(name: &str, source: Option<Source>) -> Wish {
    let parameters = if source.is_some() { vec![] } else { ENCRYPTED.into() };
    Wish { name: name.into(), size: SIZE, source, parameters }
}

fn snapshot(name: &str) -> Source {
    Source::Snapshot(name.into())
}

async fn stage(driver: &Driver, volume: &str) -> Result<(), Status> {
    stage_with(driver, volume, vec![(KEY, PASSPHRASE.to_owned())]).await
}

/// Stages and publishes an encrypted volume, and uses it.
async fn open(driver: &Driver, volume: &str) -> Guest {
    stage(driver, volume).await.unwrap();
    driver.publish(volume).await.unwrap();
    Guest::connect(&driver.socket(volume))
}

async fn close(driver: &Driver, volume: &str, guest: Guest) {
    drop(guest);
    driver.detach(volume).await;
}

fn sectors(size: u64) -> usize {
    usize::try_from(size).unwrap() / SECTOR
}

async fn write(guest: &Guest, picture: &mut Picture, first: usize, stamp: u32) {
    let write = Action::Write { sectors: first..first + 8, stamp };
    write.apply(picture);
    guest.act(vec![write, Action::Flush]).await;
}

async fn assert_holds(guest: &Guest, picture: &Picture, what: &str) {
    let found = Picture::of(&guest.read(0..picture.sectors()).await).unwrap();
    picture.assert_is(&found, what);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_passphrase_a_volume_is_not_opened() {
    let driver = Driver::start().await;
    driver.fulfil(&encrypted("pvc-1", None)).await.unwrap();
    let staged = async |given: Vec<(&str, &str)>| {
        let given = given.into_iter().map(|(key, value)| (key, value.to_owned())).collect();
        stage_with(&driver, "pvc-1", given).await
    };
    let refused = async |given, code, words: &[&str]| {
        let error = staged(given).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
        assert!(!error.message().contains("hush"), "{error}");
        assert!(names(&driver.path("run")).iter().all(|name| name.len() != 32), "left behind");
        assert_eq!(driver.daemons().await, [0; 0]);
    };
    let bad = [vec![], vec![("passphrase", "hush")], vec![(KEY, "")], vec![(KEY, "hush\n")]];
    for given in bad.clone() {
        refused(given, Code::InvalidArgument, &[KEY]).await;
    }
    let guest = open(&driver, "pvc-1").await;
    let mut picture = Picture::blank(sectors(SIZE));
    write(&guest, &mut picture, 16, 7).await;
    // A call that is repeated with another passphrase changes nothing.
    for (given, code) in [("hush", Code::Unauthenticated), (PASSPHRASE, Code::Ok)] {
        let repeated = staged(vec![(KEY, given)]).await;
        assert_eq!(repeated.map_or_else(|error| error.code(), |()| Code::Ok), code);
    }
    another_daemon(&driver).await;
    assert_holds(&guest, &picture, "after a call with another passphrase").await;
    close(&driver, "pvc-1", guest).await;
    for given in bad {
        refused(given, Code::InvalidArgument, &[KEY]).await;
    }
    refused(vec![(KEY, "hush hush")], Code::Unauthenticated, &[KEY, "pvc-1"]).await;
    let guest = open(&driver, "pvc-1").await;
    assert_holds(&guest, &picture, "after all that").await;
    close(&driver, "pvc-1", guest).await;
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// How long they take of a volume that is not encrypted, to compare.
async fn take_plain_snapshots(driver: &Driver) {
    let plain = Wish { parameters: vec![("format", "qcow2")], ..encrypted("plain", None) };
    driver.fulfil(&plain).await.unwrap();
    let guest = open(driver, "plain").await;
    let mut times = Vec::new();
    for round in 1..=3 {
        let begin = Instant::now();
        driver.snapshot(&format!("plain-{round}"), "plain").await.unwrap();
        times.push(begin.elapsed());
    }
    tell("a snapshot of a plain volume in use", times);
    close(driver, "plain", guest).await;
    driver.delete("plain").await.unwrap();
    for round in 1..=3 {
        driver.delete_snapshot(&format!("plain-{round}")).await.unwrap();
    }
}

/// Every layer above an encrypted one is encrypted as it is, made attached or not, and they are
/// merged where somebody has them open.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_of_an_encrypted_volume_is_encrypted_as_it_is() {
    let driver = Driver::start().await;
    take_plain_snapshots(&driver).await;
    driver.fulfil(&encrypted("pvc-1", None)).await.unwrap();
    let begin = Instant::now();
    let guest = open(&driver, "pvc-1").await;
    eprintln!("the first stage of an encrypted volume: {:?}", begin.elapsed());
    let mut picture = Picture::blank(sectors(SIZE));
    let (mut pictures, mut times) = (Vec::new(), Vec::new());
    for round in 1..=3_u32 {
        write(&guest, &mut picture, 16, round).await;
        write(&guest, &mut picture, usize::try_from(round).unwrap() * 1000, round).await;
        pictures.push(picture.clone());
        let begin = Instant::now();
        driver.snapshot(&format!("snap-{round}"), "pvc-1").await.unwrap();
        times.push(begin.elapsed());
    }
    tell("a snapshot of an encrypted volume in use", times);
    write(&guest, &mut picture, 5000, 9).await;
    // A restore and a clone, of a volume that is in use.
    driver.fulfil(&encrypted("pvc-2", Some(snapshot("snap-2")))).await.unwrap();
    let clone = Wish {
        parameters: vec![("copyMode", "clone"), ("encryption", "luks")],
        ..encrypted("pvc-3", Some(Source::Volume("pvc-1".into())))
    };
    driver.fulfil(&clone).await.unwrap();
    let wrong = stage_with(&driver, "pvc-3", vec![(KEY, "another".into())]).await.unwrap_err();
    assert_eq!(wrong.code(), Code::Unauthenticated, "{wrong}");
    let [restored, cloned] = [open(&driver, "pvc-2").await, open(&driver, "pvc-3").await];
    assert_holds(&restored, &pictures[1], "what was restored").await;
    assert_holds(&cloned, &picture, "the clone").await;
    let mut theirs = pictures[1].clone();
    write(&restored, &mut theirs, 6000, 10).await;
    // They are merged in the daemons that have them open, once these are one for each layer.
    close(&driver, "pvc-2", restored).await;
    driver.delete("pvc-2").await.unwrap();
    driver.delete_snapshot("snap-2").await.unwrap();
    driver.delete_snapshot("snap-3").await.unwrap();
    close(&driver, "pvc-1", guest).await;
    until("the clone is independent", async || layers(&driver, "pvc-3").await == 1).await;
    assert_holds(&cloned, &picture, "the clone on its own").await;
    // Where nobody is attached, nobody knows the passphrase.
    let before = layers(&driver, "pvc-1").await;
    driver.delete_snapshot("snap-1").await.unwrap();
    tokio::time::sleep(Duration::from_secs(6)).await; // the longest between two looks for work
    assert_eq!(layers(&driver, "pvc-1").await, before);
    close(&driver, "pvc-3", cloned).await;
    let guest = open(&driver, "pvc-1").await;
    until("it is merged", async || layers(&driver, "pvc-1").await == 1).await;
    assert_holds(&guest, &picture, "what was merged").await;
    another_daemon(&driver).await;
    assert_holds(&guest, &picture, "what was merged, in another daemon").await;
    close(&driver, "pvc-1", guest).await;
    for volume in ["pvc-1", "pvc-3"] {
        driver.delete(volume).await.unwrap();
    }
    driver.assert_empty().await;
}

/// Nothing was written to it, so there is nothing to encrypt until somebody does.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_nobody_has_used_has_snapshots_and_copies_too() {
    let driver = Driver::start().await;
    driver.fulfil(&encrypted("pvc-1", None)).await.unwrap();
    driver.expand("pvc-1", 2 * SIZE).await.unwrap();
    driver.snapshot("snap-1", "pvc-1").await.unwrap();
    let larger = |wish| Wish { size: 2 * SIZE, ..wish };
    driver.fulfil(&larger(encrypted("pvc-2", Some(snapshot("snap-1"))))).await.unwrap();
    let clone = Wish {
        parameters: vec![("copyMode", "clone")],
        ..larger(encrypted("pvc-3", Some(Source::Volume("pvc-1".into()))))
    };
    driver.fulfil(&clone).await.unwrap();
    for (stamp, volume) in (1..).zip(["pvc-3", "pvc-1", "pvc-2"]) {
        let guest = open(&driver, volume).await;
        let mut picture = Picture::blank(sectors(2 * SIZE));
        assert_holds(&guest, &picture, volume).await;
        write(&guest, &mut picture, 16, stamp).await;
        another_daemon(&driver).await;
        assert_holds(&guest, &picture, volume).await;
        close(&driver, volume, guest).await;
    }
    driver.delete_snapshot("snap-1").await.unwrap();
    for volume in ["pvc-1", "pvc-2", "pvc-3"] {
        driver.delete(volume).await.unwrap();
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encrypted_volume_outlives_driver_and_daemons_and_grows() {
    let mut driver = Driver::start().await;
    driver.fulfil(&encrypted("pvc-1", None)).await.unwrap();
    let guest = open(&driver, "pvc-1").await;
    let mut picture = Picture::blank(sectors(SIZE));
    write(&guest, &mut picture, 16, 1).await;
    driver.snapshot("snap-1", "pvc-1").await.unwrap();
    let mut wanted = Extents::default();
    for (stamp, first) in [(2, 8), (3, 4096), (4, 16384)] {
        driver.restart().await;
        assert_holds(&guest, &picture, "with another driver").await;
        another_daemon(&driver).await;
        assert_holds(&guest, &picture, "with another daemon").await;
        driver.upgrade("pvc-1").await.unwrap();
        assert_holds(&guest, &picture, "with a daemon that took over").await;
        let size = SIZE * u64::from(stamp);
        driver.expand("pvc-1", size).await.unwrap();
        assert_eq!(guest.capacity().await.unwrap(), size);
        picture.grow(sectors(size));
        write(&guest, &mut picture, first, stamp).await;
        let start = u64::try_from(first * SECTOR).unwrap();
        wanted = wanted.iter().chain(std::iter::once(start..start + 4096)).collect();
    }
    driver.snapshot("snap-2", "pvc-1").await.unwrap();
    assert_eq!(delta(&driver, "snap-1", "snap-2").await.unwrap(), wanted);
    assert_eq!(allocated(&driver, "snap-1").await.unwrap(), Extents::from(8192..12288));
    close(&driver, "pvc-1", guest).await;
    driver.expand("pvc-1", 8 * SIZE).await.unwrap();
    picture.grow(sectors(8 * SIZE));
    driver.restart().await;
    let guest = open(&driver, "pvc-1").await;
    assert_holds(&guest, &picture, "after it grew with nobody attached").await;
    write(&guest, &mut picture, sectors(8 * SIZE) - 8, 5).await;
    assert_holds(&guest, &picture, "to its end").await;
    close(&driver, "pvc-1", guest).await;
    driver.delete("pvc-1").await.unwrap();
    for name in ["snap-1", "snap-2"] {
        driver.delete_snapshot(name).await.unwrap();
    }
    driver.assert_empty().await;
}

/// The points that the first stage of an encrypted volume comes past.
pub(crate) const POINTS: [&str; 7] = [
    "node-stage-intent",
    "encrypt-header",
    "encrypt-layer",
    "encrypt-recorded",
    "node-stage-daemon",
    "node-stage-served",
    "node-stage-done",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_while_a_volume_is_encrypted_heals_by_itself() {
    let mut driver = Driver::start().await;
    for point in POINTS {
        let before = encrypted("pvc-1", None);
        driver.fulfil(&before).await.unwrap();
        let copy = Source::Volume("pvc-1".into());
        let clone = Wish {
            parameters: vec![("copyMode", "clone")],
            ..encrypted("pvc-2", Some(copy)) // two layers are to be encrypted
        };
        driver.fulfil(&clone).await.unwrap();
        driver.kill();
        driver.launch(&[], Some(point));
        driver.answers().await;
        stage(&driver, "pvc-2").await.unwrap_err();
        assert!(!driver.ended().success(), "{point}");
        driver.launch(&[], None);
        driver.answers().await;
        assert!(driver.inspect().await.iter().all(|one| one.damage.is_empty()), "{point}");
        let guest = open(&driver, "pvc-2").await;
        let mut picture = Picture::blank(sectors(SIZE));
        write(&guest, &mut picture, 16, 1).await;
        another_daemon(&driver).await;
        assert_holds(&guest, &picture, point).await;
        close(&driver, "pvc-2", guest).await;
        let guest = open(&driver, "pvc-2").await;
        assert_holds(&guest, &picture, point).await;
        close(&driver, "pvc-2", guest).await;
        for volume in ["pvc-1", "pvc-2"] {
            driver.delete(volume).await.unwrap();
        }
        driver.assert_empty().await;
    }
}

/// Of a master that is not encrypted, what is kept here is.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_of_a_remote_master_is_encrypted() {
    let driver = Driver::start().await;
    let server = Server::start(Kind::HttpAuth).await;
    for (mode, left) in [("copy-on-read", 2), ("clone", 1)] {
        let mut request = remote::on(&server, "pvc-1", &[("copyMode", mode), ENCRYPTED[0]]);
        request.secrets.insert(KEY.into(), PASSPHRASE.into());
        create(&driver, request).await.unwrap();
        let mut secrets = server.secrets();
        let without = stage_with(&driver, "pvc-1", secrets.clone()).await.unwrap_err();
        assert!(without.message().contains(KEY), "{without}");
        secrets.push((KEY, PASSPHRASE.to_owned()));
        stage_with(&driver, "pvc-1", secrets).await.unwrap();
        driver.publish("pvc-1").await.unwrap();
        let guest = Guest::connect(&driver.socket("pvc-1"));
        let all = async |what: &str| {
            let found = guest.read(0..sectors(server::SIZE)).await;
            let is_master = (0..)
                .zip(found.chunks(SECTOR))
                .all(|(number, bytes)| bytes == server::sector(number));
            assert!(is_master, "{mode}: {what}");
        };
        all("at first").await;
        until("what is to be copied is", async || layers(&driver, "pvc-1").await == left).await;
        all("later").await;
        let kept: Vec<_> = names(&driver.path("pool/layers"))
            .into_iter()
            .flat_map(|name| std::fs::read(driver.path("pool/layers").join(name)).unwrap())
            .collect();
        assert!(u64::try_from(kept.len()).unwrap() > server::SIZE, "it was read, and kept");
        // Every sector of the master is one byte, again and again.
        let is_plain = kept.chunks_exact(64).any(|part| part[0] != 0 && part == [part[0]; 64]);
        assert!(!is_plain, "{mode}: plain text");
        drop(guest);
        driver.remove("pvc-1").await;
        driver.assert_empty().await;
    }
}

#[tokio::test]
async fn what_cannot_be_encrypted_is_refused_by_its_reason() {
    let driver = Driver::start().await;
    driver.create("plain").await;
    driver.snapshot("snap-1", "plain").await.unwrap();
    let asked = |given: &[(&str, &str)], source: Option<Source>| pb::CreateVolumeRequest {
        parameters: given
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect::<HashMap<_, _>>(),
        volume_content_source: source.as_ref().map(Source::message),
        ..create_request("pvc-1", 1 << 30)
    };
    let [raw, none] = [("format", "raw"), ("copyMode", "none")];
    let luks = ENCRYPTED[0];
    for (request, words) in [
        (asked(&[("encryption", "none")], None), ["encryption", "\"none\"", "luks"]),
        (asked(&[luks, raw], None), ["encryption", "format", "\"raw\""]),
        (asked(&[luks, none, ("source", "nbd://host")], None), ["encryption", "copyMode", "nbd"]),
        (
            asked(&[luks], Some(snapshot("snap-1"))),
            ["encryption", "snapshot snap-1", "not encrypted"],
        ),
        (
            asked(&[luks], Some(Source::Volume("plain".into()))),
            ["encryption", "volume plain", "not encrypted"],
        ),
    ] {
        let error = create(&driver, request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    }
    let mut request = asked(&[luks], None);
    request.secrets.insert(KEY.into(), "hush\n".into());
    let error = create(&driver, request).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    assert!(error.message().contains(KEY) && !error.message().contains("hush"), "{error}");
    // What is replayed of its log would lie there unencrypted.
    let readers = pb::VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        ..mount(Mode::MultiNodeReaderOnly)
    };
    let mut request = asked(&[luks, ("publish", "filesystem")], None);
    request.volume_capabilities = vec![readers.clone()];
    create(&driver, request).await.unwrap();
    let mut request = driver.stage_request("pvc-1");
    request.volume_capability = Some(readers);
    request.secrets.insert(KEY.into(), PASSPHRASE.into());
    std::fs::create_dir_all(&request.staging_target_path).unwrap();
    let error = driver.node().node_stage_volume(request).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.message().contains("MULTI_NODE_READER_ONLY"), "{error}");
    driver.delete("pvc-1").await.unwrap();
    // Of a volume that is not encrypted a passphrase means nothing.
    stage(&driver, "plain").await.unwrap();
    driver.unstage("plain").await.unwrap();
    driver.delete_snapshot("snap-1").await.unwrap();
    driver.delete("plain").await.unwrap();
    driver.assert_empty().await;
}
