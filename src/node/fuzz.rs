//! Fuzzing of the node's records, and of what the kernel and the host's tools say.

use super::{
    attachment::Attachment,
    filesystem::{Contents, known},
    host::lines,
    readers::Note,
};
use crate::{fuzz::read_back, source::Access};

/// Any bytes, taken for each kind of record in the run directory.
pub(crate) fn records(bytes: &[u8]) {
    read_back::<Note>(bytes);
    // The boot that a run directory is of.
    read_back::<String>(bytes);
    let Some(attachment) = read_back::<Attachment>(bytes) else { return };
    // Publishing once more and taking it back changes nothing else.
    let target = "/not among them".as_ref();
    if !attachment.targets.iter().any(|other| other == target) {
        for access in [Access::Read, Access::Write] {
            let more = attachment.with_target(target, access);
            assert_eq!(more.access_at(target), access);
            assert_eq!(more.without_target(target), attachment.without_target(target));
        }
    }
}

/// Any bytes, taken for the table of mounts and for what `blkid` says of a disk.
pub(crate) fn tables(bytes: &[u8]) {
    let most = bytes.split(|byte| *byte == b'\n').count();
    assert!(lines(bytes).count() <= most);
    let text = String::from_utf8_lossy(bytes);
    if let Contents::FileSystem(kind) = known(&text) {
        // What is mounted must have been named, and nothing beside it.
        assert!(text.lines().any(|line| line == format!("TYPE={kind}")), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("PTTYPE=")), "{text:?}");
    }
}
