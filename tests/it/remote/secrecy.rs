//! Secrets: what lets one in does, what does not is refused, and neither is seen anywhere.

use super::{
    close, create, from, on, open, secrets,
    server::{Kind, PASSWORD, Server, sector},
    stage, stage_with,
};
use crate::{
    harness::{Driver, all_of, names},
    relay::front::Disk,
};
use qsd_csi::csi::pb::csi as pb;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::Path,
};
use tonic::Code;

/// Servers that let nobody in without a secret.
const STRICT: [Kind; 4] = [Kind::Nbds, Kind::HttpAuth, Kind::IscsiChap, Kind::Ssh];

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_let_in_is_told_so() {
    let driver = Driver::start().await;
    for (kind, text) in STRICT.into_iter().zip([
        "TLS handshake failed",
        "401",
        "Authentication failure",
        "failed to authenticate",
    ]) {
        let server = Server::start(kind).await;
        let wrong = server.wrong_secrets();
        let mut request = on(&server, "pvc-1", &[]);
        request.secrets = secrets(wrong.clone());
        let error = create(&driver, request).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(error.message().contains(text), "{error}");
        let without = from(&server.source(), "pvc-1", &[]);
        assert!(create(&driver, without).await.is_err(), "{kind:?}");
        driver.assert_empty().await;
        create(&driver, on(&server, "pvc-1", &[])).await.unwrap();
        let error = stage_with(&driver, "pvc-1", wrong).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(error.message().contains(text), "{error}");
        let mut disk = open(&driver, &server, "pvc-1").await;
        assert_eq!(disk.read(9), sector(9));
        drop(disk);
        driver.remove("pvc-1").await;
        driver.assert_empty().await;
    }
}

#[tokio::test]
async fn secrets_that_do_not_go_with_the_source_are_refused_by_their_keys() {
    let driver = Driver::start().await;
    for (source, given, text) in [
        ("nbd://host", ("username", "hush"), "unknown key \"username\""),
        ("https://bob:hush@host/d", ("username", "bob"), "password"),
        ("https://host/d", ("password", "hush"), "username is missing"),
        ("ssh://host/d", ("ssh-privatekey", "hush"), "no private key"),
    ] {
        let mut request = from(source, "pvc-1", &[]);
        request.secrets = secrets(vec![(given.0, given.1.to_owned())]);
        let error = create(&driver, request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(text), "{error}");
        assert!(!error.message().contains("hush"), "{error}");
    }
    // Of a volume without a master they mean nothing.
    let mut request = crate::harness::create_request("pvc-1", 1 << 20);
    request.secrets = secrets(vec![("any", "hush".to_owned())]);
    create(&driver, request).await.unwrap();
    stage_with(&driver, "pvc-1", vec![("any", "hush".to_owned())]).await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    assert!(!fs::read_to_string(driver.path("log")).unwrap().contains("hush"));
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_seen_nowhere_but_in_the_file_that_keeps_it() {
    let mut driver = Driver::start().await;
    driver.log_everything();
    driver.restart().await;
    for kind in STRICT {
        eprintln!("{kind:?}");
        let server = Server::start(kind).await;
        let needles = needles(&server);
        create(&driver, on(&server, "pvc-1", &[])).await.unwrap();
        assert_eq!(seen(&driver, &needles), [""; 0], "after CreateVolume");
        stage(&driver, "pvc-1", &server).await.unwrap();
        driver.publish("pvc-1").await.unwrap();
        let kept = driver.part().join("secrets.json");
        let place = kept.display().to_string();
        assert_eq!(seen(&driver, &needles), [place.as_str()], "while it is staged");
        assert_eq!(fs::metadata(&kept).unwrap().permissions().mode() & 0o777, 0o600);
        let mut disk = Disk::open(&driver.socket("pvc-1"));
        assert_eq!(disk.read(9), sector(9));
        assert_eq!(objects(&driver), ["tg"], "what the daemon holds");
        assert_eq!(
            names(&driver.part().join("a")),
            ["back.sock", "daemon.log", "dbg.sock", "lock", "qmp.sock"]
        );
        drop(disk);
        // A call that is repeated with other secrets has these kept.
        stage_with(&driver, "pvc-1", server.wrong_secrets()).await.unwrap();
        assert_eq!(seen(&driver, &needles), [""; 0], "what was replaced");
        stage(&driver, "pvc-1", &server).await.unwrap();
        driver.restart().await;
        assert_eq!(seen(&driver, &needles), [place.as_str()], "after a restart");
        close(&driver, "pvc-1").await;
        assert!(!kept.exists());
        assert_eq!(seen(&driver, &needles), [""; 0], "after NodeUnstageVolume");
        let wrong = pb::CreateVolumeRequest {
            secrets: secrets(server.wrong_secrets()),
            ..on(&server, "pvc-2", &[])
        };
        create(&driver, wrong).await.unwrap_err();
        let log = fs::read_to_string(driver.path("log")).unwrap();
        assert!(!log.contains("wrong-password"), "{log}");
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
}

/// What of the secrets must be seen nowhere.
fn needles(server: &Server) -> Vec<String> {
    let of = |(key, value): (&str, String)| match key {
        "username" => None,
        // A line from the middle: the first ones are the same in all keys.
        "ssh-privatekey" => Some(value.lines().nth(3).unwrap().to_owned()),
        _ => Some(value),
    };
    let needles: Vec<_> = server.secrets().into_iter().filter_map(of).collect();
    assert!(!needles.is_empty() && needles.iter().all(|needle| needle.len() > 9));
    needles
}

/// Where any of these stands: files of the driver, and what others see of its processes.
fn seen(driver: &Driver, needles: &[String]) -> Vec<String> {
    let mut places = BTreeMap::new();
    read_below(driver.scratch(), &mut places);
    for pid in all_of(driver).into_iter().chain([driver.pid()]) {
        for name in ["cmdline", "environ"] {
            let path = format!("/proc/{pid}/{name}");
            places.insert(path.clone(), fs::read(path).unwrap_or_default());
        }
    }
    assert!(places.len() > 10);
    let has = |content: &[u8]| {
        needles
            .iter()
            .any(|needle| content.windows(needle.len()).any(|window| window == needle.as_bytes()))
    };
    let found = places.into_iter().filter(|(_, content)| has(content));
    found.map(|(place, _)| place).collect()
}

fn read_below(dir: &Path, places: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let kind = path.symlink_metadata().unwrap().file_type();
        if kind.is_dir() {
            read_below(&path, places);
        } else if kind.is_file() {
            places.insert(path.display().to_string(), fs::read(&path).unwrap());
        }
    }
}

/// The objects of the one daemon.
fn objects(driver: &Driver) -> Vec<String> {
    let stream = UnixStream::connect(driver.part().join("a/dbg.sock")).unwrap();
    let mut lines = BufReader::new(&stream).lines();
    lines.next().unwrap().unwrap();
    let mut ask = |command: Value| {
        (&stream).write_all(format!("{command}\n").as_bytes()).unwrap();
        loop {
            let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            if let Some(answer) = line.get("return") {
                return answer.clone();
            }
            assert!(line.get("error").is_none(), "{line}");
        }
    };
    ask(json!({ "execute": "qmp_capabilities" }));
    let list = json!({ "execute": "qom-list", "arguments": { "path": "/objects" } });
    let objects = ask(list);
    let names = objects.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap());
    let mut names: Vec<_> = names.filter(|name| *name != "type").map(str::to_owned).collect();
    names.sort();
    names
}

#[test]
fn the_password_is_one_that_would_not_pass_unnoticed() {
    assert!(PASSWORD.contains([' ', '%', '&']));
}
