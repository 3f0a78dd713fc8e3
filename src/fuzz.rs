//! What fuzzing calls: every parser of foreign bytes, as a function that takes any bytes at all.
//!
//! Not part of a normal build. An entry hands the bytes to the parsers and panics where a promise of
//! theirs is broken: what is read is written so that it reads the same, numbers are within their
//! bounds, what is refused is refused by name, secrets are not shown. Entries live beside what they
//! try. `make fuzz` has libFuzzer look for bytes that break one (`fuzz/`); the test here goes through
//! what it has found so far, and some changes to that.

mod text;

pub use crate::{
    csi::fuzz::requests as csi,
    qcow2::fuzz::image as qcow2,
    qsd::fuzz::monitor as qmp,
    relay::fuzz::{inflight, vhost_user},
    source::fuzz::{source, ssh_key},
};
pub use text::text;

use serde::{Serialize, de::DeserializeOwned};

/// An entry: it panics where something is wrong.
pub type Entry = fn(&[u8]);

/// All entries by their names, which are those of the programs in `fuzz/`.
pub const ENTRIES: [(&str, Entry); 10] = [
    ("csi", csi),
    ("inflight", inflight),
    ("lines", lines),
    ("qcow2", qcow2),
    ("qmp", qmp),
    ("records", records),
    ("source", source),
    ("ssh_key", ssh_key),
    ("text", text),
    ("vhost_user", vhost_user),
];

/// A password that entries plant, to look whether it is shown anywhere.
pub(crate) const PASSWORD: &str = "hunter2";

/// The records of pools and of the run directory.
pub fn records(bytes: &[u8]) {
    crate::volume::fuzz::records(bytes);
    crate::node::fuzz::records(bytes);
    crate::relay::fuzz::records(bytes);
    crate::pool::fuzz::records(bytes);
}

/// What driver, supervisor and relay say to each other, one message a line.
pub fn lines(bytes: &[u8]) {
    for line in bytes.split(|byte| *byte == b'\n') {
        crate::supervisor::fuzz::line(line);
        crate::relay::fuzz::line(line);
    }
}

/// That what these bytes say, if they do, is written so that it reads the same.
pub(crate) fn read_back<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let read: T = serde_json::from_slice(bytes).ok()?;
    let written = serde_json::to_vec(&read).expect("what was read can be written");
    let again: T = match serde_json::from_slice(&written) {
        Ok(again) => again,
        Err(error) => panic!("{error}: {}", String::from_utf8_lossy(&written)),
    };
    assert_eq!(serde_json::to_vec(&again).expect("it was written before"), written);
    Some(read)
}

#[cfg(test)]
mod test;
