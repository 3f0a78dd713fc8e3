//! Fuzzing of sources, and of the secrets that go with them.

pub use super::ssh_key::fuzz::ssh_key;

use super::{
    Access, Context, Secrets, Source,
    place::Place,
    secrets::{CEPH_USER, USERNAME},
};
use crate::{
    chain::Chain,
    fuzz::{PASSWORD, read_back},
    volume::{Format, NodeName},
};
use serde_json::Value;
use std::path::Path;

/// Any text: a source, and line by line the secrets that go with it, with tabs for line breaks.
pub fn source(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let mut lines = text.lines();
    let Some(text) = lines.next() else { return };
    refused(text);
    let Ok(source) = text.parse::<Source>() else { return };
    let quoted = serde_json::to_vec(text).expect("a text can be written");
    assert_eq!(read_back::<Source>(&quoted).as_ref(), Some(&source));
    shown(&source);
    let pair = |line: &str| {
        let (key, value) = line.split_once('=')?;
        Some((key.to_owned(), value.replace('\t', "\n")))
    };
    let given: Vec<_> = lines.filter_map(pair).collect();
    let is_shown = |(key, value): &(String, String)| {
        let is_user = [USERNAME, CEPH_USER].contains(&key.as_str());
        key.contains(PASSWORD) || is_user && value.contains(PASSWORD)
    };
    let is_planted = !text.contains(PASSWORD) && !given.iter().any(is_shown);
    let said = match Secrets::new(&source, given.clone()) {
        Ok(secrets) => {
            assert!(
                secrets
                    .expose()
                    .into_iter()
                    .all(|(key, value)| { given.contains(&(key.to_owned(), value.to_owned())) })
            );
            let (opening, node) = opened(&source, &secrets);
            format!("{secrets:?}{opening}{node}")
        }
        Err(error) => format!("{} {error:?}", Chain(&error)),
    };
    assert!(!is_planted || !said.contains(PASSWORD), "{said}");
}

/// Whatever stands before an `@` may be a password, also where nothing else makes sense.
fn refused(text: &str) {
    let before = text.split_once('?').map_or(text, |(before, _)| before);
    let Some((_, behind)) = before.split_once('@') else { return };
    let planted = format!("{PASSWORD}@{behind}");
    for text in [
        planted.clone(),
        format!("ssh://u:{planted}"),
        format!("https://u:{PASSWORD}/{planted}"),
        format!("u:{planted}"),
        format!("u%{planted}"),
    ] {
        if let Err(error) = text.parse::<Source>() {
            let said = format!("{} {error:?}", Chain(&error));
            assert!(!said.contains(PASSWORD), "{said}");
        }
    }
}

/// What people are shown is a source that leads to the same place, without the user.
fn shown(source: &Source) {
    let text = source.to_string();
    let is_whole = match &source.place {
        Place::Http { .. } => !text.contains('?'),
        Place::Rbd(_) => false,
        Place::Nbd { .. }
        | Place::Iscsi { .. }
        | Place::Ssh { .. }
        | Place::Nfs { .. }
        | Place::Gluster { .. } => true,
    };
    if is_whole {
        let again: Source = text.parse().expect("what is shown can be given");
        assert_eq!(again.place.user(), None, "{again}");
        assert_eq!((again.protocol(), again.access()), (source.protocol(), source.access()));
        assert_eq!(again.names_a_file(), source.names_a_file());
        assert_eq!(again.to_string(), text);
    }
}

/// What a daemon is told of it: secrets are objects of their own, which are taken away again.
fn opened(source: &Source, secrets: &Secrets) -> (String, Value) {
    let node: NodeName = "node".parse().expect("a node can have that name");
    let keys = Path::new("/keys");
    let [read, write] = [Access::Read, Access::Write].map(|access| {
        let context = Context { name: "master", format: Format::Qcow2, access, node: &node, keys };
        source.opening(secrets, context)
    });
    assert_eq!(read.objects, write.objects);
    let file = &read.node["file"];
    assert_eq!((&file["read-only"], &read.node["backing"]), (&true.into(), &Value::Null));
    let is_file = file["server"]["type"] == "unix" || !file["conf"].is_null();
    assert_eq!(is_file, source.names_a_file(), "{}", read.node);
    assert_eq!(read.ssh_key.is_some(), secrets.ssh_key().is_some());
    (format!("{read:?}"), read.node)
}
