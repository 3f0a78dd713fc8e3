//! Masters that die, hang, or lie: a clear error, in bounded time, and nobody else notices.

use super::{create, from, layers, on, open, published, server, stage, stage_with};
use crate::{
    harness::{Driver, GIB, create_request, is_alive, part, signal, until},
    relay::front::Disk,
};
use futures_util::future::join_all;
use server::{Kind, SIZE, Server, free_port, sector};
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};
use tonic::Code;

/// Longer than the driver waits for any master.
const PATIENCE: Duration = Duration::from_secs(16);

/// What is not slow though something else is.
const SWIFT: Duration = Duration::from_secs(5);

/// Servers that are asked in ways of their own.
const KINDS: [Kind; 4] = [Kind::NbdUnix, Kind::HttpAuth, Kind::IscsiChap, Kind::Ssh];

/// A place that takes connections and says nothing.
fn silent() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A place that does not even take connections: its queue is full.
fn full() -> (TcpListener, Vec<TcpStream>, u16) {
    let (listener, port) = silent();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let brief = Duration::from_millis(200);
    // Until one that waits shows that there is no more room; std asks for room for many.
    let waiting = std::iter::from_fn(|| TcpStream::connect_timeout(&address, brief).ok());
    let waiting = waiting.collect();
    (listener, waiting, port)
}

/// The life of a plain volume, which takes no longer than ever.
async fn others_are_swift(driver: &Driver, name: &str) {
    let begin = Instant::now();
    driver.published(name).await;
    Disk::open(&driver.socket(name)).works(1, 1);
    driver.remove(name).await;
    assert!(begin.elapsed() < SWIFT, "{:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_cannot_be_had_is_unavailable_in_bounded_time() {
    let driver = Driver::start().await;
    let (_silent, quiet) = silent();
    let (_full, _waiting, stuck) = full();
    let gone = free_port();
    let target = "iqn.2026-11.io.qsd-csi:disk/1";
    let sources = [
        "nbd+unix:///disk?socket=/nowhere".to_owned(),
        format!("nbd://127.0.0.1:{gone}/disk"),
        format!("http://127.0.0.1:{gone}/disk"),
        format!("iscsi://127.0.0.1:{gone}/{target}"),
        format!("ssh://127.0.0.1:{gone}/disk"),
        format!("rbd:pool/image:mon_host=127.0.0.1\\:{gone}:conf=/dev/null"),
        "nfs://127.0.0.1/export/disk".to_owned(),
        "https://qsd-csi.invalid/disk".to_owned(),
        format!("nbd://127.0.0.1:{quiet}/disk"),
        format!("https://127.0.0.1:{quiet}/disk"),
        format!("iscsi://127.0.0.1:{quiet}/{target}"),
        format!("ssh://127.0.0.1:{quiet}/disk"),
        format!("nbd://127.0.0.1:{stuck}/disk"),
        format!("http://127.0.0.1:{stuck}/disk"),
        format!("iscsi://127.0.0.1:{stuck}/{target}"),
        format!("ssh://127.0.0.1:{stuck}/disk"),
    ];
    let attempts = sources.into_iter().enumerate().map(|(number, source)| {
        let mut controller = driver.controller();
        tokio::spawn(async move {
            let begin = Instant::now();
            let request = from(&source, &format!("pvc-{number}"), &[]);
            let error = controller.create_volume(request).await.unwrap_err();
            eprintln!("{:6.2} s  {}", begin.elapsed().as_secs_f64(), error.message());
            assert_eq!(error.code(), Code::Unavailable, "{error}");
            let shown = source.split(['?', '\\']).next().unwrap();
            assert!(error.message().contains(shown), "{source}: {error}");
            assert!(begin.elapsed() < PATIENCE, "{source}");
        })
    });
    let attempts: Vec<_> = attempts.collect();
    others_are_swift(&driver, "plain").await;
    for attempt in attempts {
        attempt.await.unwrap();
    }
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_master_hangs_holds_up_nobody_else() {
    join_all(KINDS.map(hang)).await;
}

async fn hang(kind: Kind) {
    let driver = Driver::start().await;
    let server = Server::start(kind).await;
    let mut disk = published(&driver, &server, "pvc-1", &[]).await;
    assert_eq!(disk.read(0), sector(0));
    server.stop();
    disk.begin_read(4096);
    others_are_swift(&driver, "plain").await;
    let begin = Instant::now();
    let error = create(&driver, on(&server, "pvc-2", &[])).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(begin.elapsed() < PATIENCE, "{kind:?}: {:?}", begin.elapsed());
    drop(disk);
    let begin = Instant::now();
    // A daemon that is stuck is just being replaced, and a call may come in between.
    until("it is closed", async || {
        let closed = [driver.unpublish("pvc-1").await, driver.unstage("pvc-1").await];
        let refused = closed.iter().filter_map(|one| one.as_ref().err());
        refused.inspect(|error| assert_eq!(error.code(), Code::Aborted, "{error}")).count() == 0
    })
    .await;
    eprintln!("{:6.2} s  {kind:?} unstaged", begin.elapsed().as_secs_f64());
    assert!(begin.elapsed() < 2 * PATIENCE, "{kind:?}: {:?}", begin.elapsed());
    let begin = Instant::now();
    let error = stage(&driver, "pvc-1", &server).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(begin.elapsed() < PATIENCE, "{kind:?}: {:?}", begin.elapsed());
    server.go_on();
    let mut disk = open(&driver, &server, "pvc-1").await;
    assert_eq!(disk.read(4096), sector(4096));
    drop(disk);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// Longer than the relay waits for a daemon that is stuck. Only that of an SSH server is: QEMU's
/// client does not come back from a read. It is replaced, and does the request again.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_server_that_is_away_for_a_moment() {
    join_all(KINDS.map(wait)).await;
}

async fn wait(kind: Kind) {
    let driver = Driver::start().await;
    let server = Server::start(kind).await;
    let mut disk = published(&driver, &server, "pvc-1", &[]).await;
    let daemons = driver.daemons().await;
    server.stop();
    disk.begin_read(4096);
    tokio::time::sleep(Duration::from_secs(16)).await;
    server.go_on();
    assert_eq!(disk.outcome(), 0, "{kind:?}");
    if kind != Kind::Ssh {
        assert_eq!(driver.daemons().await, daemons, "{kind:?}: nothing was wrong with it");
    }
    drop(disk);
    driver.remove("pvc-1").await;
}

/// Those that connect again by themselves. SSH does not (measured), but another daemon does.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_started_again_is_found_again() {
    for kind in KINDS {
        let driver = Driver::start().await;
        let mut server = Server::start(kind).await;
        let mut disk = published(&driver, &server, "pvc-1", &[]).await;
        assert_eq!(disk.read(0), sector(0));
        server.kill();
        server.launch().await;
        if kind == Kind::Ssh {
            assert_eq!(disk.try_read(1), Err(1));
            driver.upgrade("pvc-1").await.unwrap();
        }
        until("it is found", async || disk.try_read(2) == Ok(sector(2))).await;
        drop(disk);
        driver.remove("pvc-1").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_master_does_not_hold_up_the_driver_and_is_waited_for() {
    let mut driver = Driver::start().await;
    let mut server = Server::start(Kind::Ssh).await;
    let mut disk = published(&driver, &server, "pvc-1", &[]).await;
    disk.works(1, 255);
    drop(disk);
    let daemon = driver.daemons().await[0];
    driver.published("plain").await;
    let daemons = driver.daemons().await;
    server.stop();
    driver.kill();
    signal(daemon, "KILL");
    until("its daemon ends", async || !is_alive(daemon)).await;
    let begin = Instant::now();
    driver.launch(&[], None);
    driver.answers().await;
    assert!(begin.elapsed() < SWIFT, "{:?}", begin.elapsed());
    assert!(daemons.iter().any(|pid| is_alive(*pid)), "the other daemon goes on");
    Disk::open(&driver.socket("plain")).works(1, 1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(driver.daemons().await.len(), 1);
    server.go_on();
    server.kill();
    server.launch().await;
    until("it is served again", async || driver.daemons().await.len() == 2).await;
    let mut disk = Disk::open(&driver.socket("pvc-1"));
    assert_eq!([disk.read(1), disk.read(2)], [vec![255; 512], sector(2)]);
    drop(disk);
    driver.remove("pvc-1").await;
    driver.remove("plain").await;
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_whose_master_dies_waits_for_it_and_is_whole_in_the_end() {
    let driver = Driver::start().await;
    let mut server = Server::start(Kind::HttpAuth).await;
    let slowly = [("copyMode", "clone"), ("cloneBytesPerSecond", "2Mi")];
    let mut disk = published(&driver, &server, "pvc-1", &slowly).await;
    disk.works(1, 255);
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.kill();
    disk.works(2, 254);
    others_are_swift(&driver, "plain").await;
    assert_eq!(layers(&driver, "pvc-1").await, 3);
    tokio::time::sleep(Duration::from_secs(3)).await;
    server.launch().await;
    until("it is independent", async || layers(&driver, "pvc-1").await == 1).await;
    server.kill();
    for (number, found) in [(0, sector(0)), (1, vec![255; 512]), (2, vec![254; 512])] {
        assert_eq!(disk.read(number), found);
    }
    for number in (3..SIZE / 512).step_by(77) {
        assert_eq!(disk.read(number), sector(number), "sector {number}");
    }
    drop(disk);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_shrank_is_refused_with_both_sizes() {
    let driver = Driver::start().await;
    for kind in KINDS {
        let mut server = Server::start(kind).await;
        create(&driver, on(&server, "pvc-1", &[])).await.unwrap();
        server.resize(SIZE / 2).await;
        let error = stage(&driver, "pvc-1", &server).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        for size in [SIZE / 2, SIZE] {
            assert!(error.message().contains(&format!(" {size} ")), "{error}");
        }
        assert!(driver.inspect().await[0].attachment.is_none(), "nothing is left staged");
        server.resize(SIZE).await;
        let mut disk = open(&driver, &server, "pvc-1").await;
        assert_eq!(disk.read(1), sector(1));
        drop(disk);
        driver.remove("pvc-1").await;
    }
    driver.assert_empty().await;
}

/// A web server that says it has twice what it has, and breaks off where it has no more.
fn liar() -> u16 {
    let (listener, port) = silent();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || lie(&stream));
        }
    });
    port
}

/// One answer; then the connection ends, as was asked for.
fn lie(mut stream: &TcpStream) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let (mut from, mut to) = (0, 2 * SIZE - 1);
    for line in lines.take_while(|line| !line.is_empty()) {
        if let Some(range) = line.to_lowercase().strip_prefix("range: bytes=") {
            let (first, last) = range.split_once('-')?;
            (from, to) = (first.parse().ok()?, last.parse().ok()?);
        }
    }
    let head = format!(
        "HTTP/1.1 206 x\r\nAccept-Ranges: bytes\r\nConnection: close\r\nContent-Length: {}\r\n\
         Content-Range: bytes {from}-{to}/{}\r\n\r\n",
        to - from + 1,
        2 * SIZE
    );
    stream.write_all(head.as_bytes()).ok()?;
    let has = if first.starts_with("HEAD") { 0 } else { SIZE.min(to + 1).saturating_sub(from) };
    stream.write_all(&vec![7; usize::try_from(has).ok()?]).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_has_less_than_it_says_is_an_error_where_it_has_nothing() {
    let driver = Driver::start().await;
    let source = format!("http://127.0.0.1:{}/disk", liar());
    let volume = create(&driver, from(&source, "pvc-1", &[])).await.unwrap();
    assert_eq!(volume.capacity_bytes, i64::try_from(2 * SIZE).unwrap());
    stage_with(&driver, "pvc-1", Vec::new()).await.unwrap();
    driver.publish("pvc-1").await.unwrap();
    let mut disk = Disk::open(&driver.socket("pvc-1"));
    assert_eq!(disk.read(9), [7; 512]);
    assert_eq!(disk.try_read(SIZE / 512 + 1024), Err(1), "an error, and no zeros");
    assert_eq!(disk.read(10), [7; 512]);
    disk.begin_write(SIZE / 512 + 1024, 8);
    assert_eq!(disk.outcome(), 1, "what lies around it cannot be had, and is not made up");
    drop(disk);
    driver.remove("pvc-1").await;
    // A clone of it never claims to be whole.
    let clone = [("copyMode", "clone")];
    create(&driver, from(&source, "pvc-2", &clone)).await.unwrap();
    let log = driver.path("log");
    until("the copy fails", async || {
        fs::read_to_string(&log).unwrap().contains("job failed")
            && driver.daemons().await.is_empty()
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(layers(&driver, "pvc-2").await, 3);
    driver.delete("pvc-2").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_is_none_is_refused_for_what_it_is() {
    let driver = Driver::start().await;
    let server = Server::start(Kind::Http).await;
    let dir = server.disk().parent().unwrap().to_owned();
    fs::File::create(dir.join("empty")).unwrap();
    fs::File::create(dir.join("host.raw")).unwrap().set_len(1 << 20).unwrap();
    let image = |words: &[&str]| {
        let command = Command::new(part("bin/qemu-img")).current_dir(&dir).args(words).status();
        assert!(command.unwrap().success());
    };
    image(&["create", "-q", "-f", "qcow2", "-b", "disk", "-F", "raw", "backed"]);
    // What a header names is opened on this machine, by whoever opens the header.
    let host = format!("data_file={}", dir.join("host.raw").display());
    image(&["create", "-q", "-f", "qcow2", "-o", &host, "elsewhere", "1M"]);
    let base = server.source();
    let base = base.strip_suffix("disk").unwrap();
    let qcow2 = [("sourceFormat", "qcow2")];
    for (name, more, code, text) in [
        ("empty", &[][..], Code::FailedPrecondition, "empty"),
        ("backed", &qcow2, Code::FailedPrecondition, "another image, \"disk\""),
        ("elsewhere", &qcow2, Code::FailedPrecondition, "another file"),
        ("disk", &qcow2, Code::Unavailable, "not in qcow2 format"),
        ("whole/disk", &[], Code::Unavailable, "range"),
        ("nothing", &[], Code::Unavailable, "404"),
    ] {
        let error = create(&driver, from(&format!("{base}{name}"), "pvc-1", more)).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), code, "{name}: {error}");
        assert!(error.message().contains(text), "{name}: {error}");
    }
    driver.assert_empty().await;
}

#[tokio::test]
async fn a_driver_that_this_daemon_has_not_is_named() {
    let driver = Driver::start_on(part("bin/qemu-storage-daemon-newer"), &[]).await;
    let error = create(&driver, from("gluster://127.0.0.1/volume/disk", "pvc-1", &[])).await;
    let error = error.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.message().contains("gluster"), "{error}");
    driver.assert_empty().await;
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_with_its_reason() {
    let driver = Driver::start().await;
    for (source, more, text) in [
        ("floppy://host/disk", &[][..], "\"floppy\""),
        ("http://host/disk", &[("copyMode", "none")], "can only be read"),
        ("nbd://host", &[("sourceFormat", "vmdk")], "sourceFormat is \"vmdk\""),
        ("ssh://host/disk?key=x", &[], "host_key_check"),
    ] {
        let error = create(&driver, from(source, "pvc-1", more)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(text), "{error}");
    }
    let mut request = create_request("pvc-1", GIB);
    request.parameters = [("sourceFormat".to_owned(), "raw".to_owned())].into();
    let error = create(&driver, request).await.unwrap_err();
    assert!(error.message().contains("there is no source"), "{error}");
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_volume_of_the_same_name_is_another_volume() {
    let driver = Driver::start().await;
    let mut server = Server::start(Kind::Http).await;
    let request = on(&server, "pvc-1", &[]);
    create(&driver, request.clone()).await.unwrap();
    server.kill();
    create(&driver, request.clone()).await.unwrap();
    let other = from("http://bob@127.0.0.1:1/disk?signature=hush", "pvc-1", &[]);
    let error = create(&driver, other).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    assert!(error.message().contains("http://127.0.0.1:1/disk"), "{error}");
    assert!(!error.message().contains("hush"), "{error}");
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// The points that a creation on a master comes past, where it is to be copied into less than all
/// of the volume.
pub(crate) const POINTS: [&str; 6] = [
    "volume-create-intent",
    "volume-create-master",
    "volume-create-copy",
    "volume-create-copy-record",
    "volume-create-layer",
    "volume-create-layer-record",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_leaves_nothing_of_a_volume_on_a_master() {
    let mut driver = Driver::start().await;
    let server = Server::start(Kind::HttpAuth).await;
    let iscsi = Server::start(Kind::IscsiChap).await;
    for (server, mode, size, points) in [
        (&server, "copy-on-write", SIZE, &POINTS[4..]),
        (&server, "clone", 2 * SIZE, &POINTS[..]),
        (&iscsi, "none", SIZE, &POINTS[..2]),
    ] {
        for point in points {
            driver.kill();
            driver.launch(&[], Some(point));
            driver.answers().await;
            let mut request = on(server, "pvc-1", &[("copyMode", mode)]);
            request.capacity_range.as_mut().unwrap().required_bytes = size.try_into().unwrap();
            create(&driver, request).await.unwrap_err();
            assert!(!driver.ended().success(), "{point}");
            driver.launch(&[], None);
            driver.answers().await;
            driver.assert_empty().await;
        }
    }
    for point in ["node-stage-intent", "node-stage-daemon"] {
        create(&driver, on(&server, "pvc-1", &[])).await.unwrap();
        driver.kill();
        driver.launch(&[], Some(point));
        driver.answers().await;
        stage(&driver, "pvc-1", &server).await.unwrap_err();
        assert!(!driver.ended().success(), "{point}");
        driver.launch(&[], None);
        driver.answers().await;
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_becomes_independent_whatever_crashes() {
    let mut driver = Driver::start().await;
    for point in ["work-begun", "work-moved", "merge-recorded", "merge-done"] {
        let mut server = Server::start(Kind::HttpAuth).await;
        create(&driver, on(&server, "pvc-1", &[("copyMode", "clone")])).await.unwrap();
        driver.kill();
        driver.launch(&[], Some(point));
        driver.answers().await;
        _ = stage(&driver, "pvc-1", &server).await; // the answer may come too late
        until("the driver dies", async || driver.has_ended()).await;
        driver.launch(&[], None);
        driver.answers().await;
        stage(&driver, "pvc-1", &server).await.unwrap();
        until("it is independent", async || layers(&driver, "pvc-1").await == 1).await;
        server.kill();
        driver.publish("pvc-1").await.unwrap();
        let mut disk = Disk::open(&driver.socket("pvc-1"));
        for number in (0..SIZE / 512).step_by(111) {
            assert_eq!(disk.read(number), sector(number), "{point}: sector {number}");
        }
        drop(disk);
        driver.remove("pvc-1").await;
        driver.assert_empty().await;
    }
}
