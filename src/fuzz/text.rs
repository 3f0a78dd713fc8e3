//! Short texts: sizes, names, and lines of the kernel's tables.

use super::read_back;
use crate::{
    run::DaemonKey,
    units::Bytes,
    volume::{LayerId, NodeName, PoolName, RunKey, SnapshotId, VolumeId},
};
use serde::{Serialize, de::DeserializeOwned};
use std::{fmt::Display, str::FromStr};

/// Any text, taken for each of them.
pub fn text(bytes: &[u8]) {
    crate::node::fuzz::tables(bytes);
    let Ok(text) = str::from_utf8(bytes) else { return };
    size(text);
    names(text);
}

fn size(text: &str) {
    let size = text.parse::<Bytes>().ok();
    assert_eq!(size.map(Bytes::count), quantity(text), "{text:?}");
    let Some(size) = size else { return };
    let shown: Result<Bytes, _> = size.to_string().parse();
    // The very largest are shown rounded up to what is no size.
    if i64::try_from(size.count()).is_ok() {
        let shown = shown.expect("a size is shown as one");
        assert!(shown.count().abs_diff(size.count()) <= size.count() / 150, "{size} is {shown:?}");
    }
}

/// A Kubernetes quantity by the book, with twelve digits behind the point.
fn quantity(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
    let factor = match (suffix, suffix.strip_suffix('i')) {
        ("", _) => 1,
        (_, Some(prefix)) => 1024_u128.pow(power(prefix, ["K", "M", "G", "T", "P", "E"])?),
        (prefix, None) => 1000_u128.pow(power(prefix, ["k", "M", "G", "T", "P", "E"])?),
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((_, fraction)) if fraction.is_empty() || fraction.contains('.') => return None,
        Some(parts) => parts,
        None => (number, "0"),
    };
    let digits = |digits: &str| {
        digits.bytes().try_fold(0_u128, |number, digit| {
            number.checked_mul(10)?.checked_add(u128::from(digit - b'0'))
        })
    };
    let whole = if whole.is_empty() { None } else { digits(whole.trim_start_matches('0')) };
    let whole = whole.filter(|whole| u64::try_from(*whole).is_ok())?;
    let twelve = format!("{fraction:0<12}");
    let part = digits(&twelve[..12])? * factor / 1_000_000_000_000;
    u64::try_from(whole * factor + part).ok()
}

fn power(prefix: &str, prefixes: [&str; 6]) -> Option<u32> {
    (1..).zip(prefixes).find_map(|(power, one)| (one == prefix).then_some(power))
}

fn names(text: &str) {
    same::<VolumeId>(text);
    same::<SnapshotId>(text);
    same::<PoolName>(text);
    same::<NodeName>(text);
    same::<RunKey>(text);
    same::<DaemonKey>(text);
    if let Ok(layer) = text.parse::<LayerId>() {
        // A UUID can be written in several ways.
        assert_eq!(layer.to_string().parse(), Ok(layer));
        same::<RunKey>(layer.run_key().as_str()).expect("a layer has a run directory");
        assert!(layer.node_name().len() < 32, "longer than QEMU's names");
    }
    let id = VolumeId::of_name(text);
    same::<VolumeId>(id.as_str()).expect("every name leads to an id");
    same::<SnapshotId>(SnapshotId::of_name(text).as_str()).expect("every name leads to an id");
    same::<RunKey>(id.run_key().as_str()).expect("every volume has a run directory");
    // The id is the name of a file.
    let is_hidden = id.as_str().starts_with(['.', '-']);
    assert!(!id.as_str().contains('/') && !is_hidden && id.as_str().len() <= 63, "{id}");
}

/// What is a name is printed, and recorded, as it was written.
fn same<T>(text: &str) -> Option<T>
where
    T: FromStr + Display + Serialize + DeserializeOwned,
{
    let quoted = serde_json::to_vec(text).expect("a text can be written");
    let Ok(name) = text.parse::<T>() else {
        assert!(serde_json::from_slice::<T>(&quoted).is_err(), "{text:?} only in a record");
        return None;
    };
    assert_eq!(name.to_string(), text);
    read_back::<T>(&quoted).expect("a name can be recorded");
    Some(name)
}
