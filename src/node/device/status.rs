//! What the kernel says of loop devices: by `/sys`, which never waits for a file below, and by
//! `losetup`, which has to ask the file who it is.

use super::super::tool::{self, Tool};
use serde::Deserialize;
use std::{
    ffi::OsString,
    fs, io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// A daemon that serves the file below answers within this time, or is stuck.
const QUERY: Duration = Duration::from_secs(1);

/// Which file: its device and its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub(super) fn of(data: &fs::Metadata) -> Self {
        Self { device: data.dev(), inode: data.ino() }
    }
}

/// What `losetup` says of a device.
#[derive(Debug, Deserialize)]
pub(super) struct Status {
    #[serde(rename = "back-maj:min")]
    device: Option<String>,
    #[serde(rename = "back-ino")]
    inode: Option<u64>,
    autoclear: bool,
    #[serde(rename = "ro")]
    pub(super) read_only: bool,
    offset: u64,
    sizelimit: u64,
}

#[derive(Deserialize)]
struct Listing {
    loopdevices: Vec<Status>,
}

impl Status {
    /// Whether it shows all of this file, and will stay.
    pub(super) fn is_over(&self, identity: Identity) -> bool {
        let whole = self.offset == 0 && self.sizelimit == 0;
        whole && !self.autoclear && self.identity() == Some(identity)
    }

    fn identity(&self) -> Option<Identity> {
        let (major, minor) = self.device.as_ref()?.trim().split_once(':')?;
        let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
        Some(Identity { device, inode: self.inode? })
    }
}

/// Asks for one device; one that is not attached has no status.
pub(super) async fn query(number: u32) -> Result<Option<Status>, tool::Error> {
    let columns = "BACK-MAJ:MIN,BACK-INO,AUTOCLEAR,RO,OFFSET,SIZELIMIT";
    let tool = Tool::new("losetup", QUERY).args(&["--list", "--json", "--output", columns]);
    let ended = tool.arg(super::device_path(number)).end().await?;
    let listing: Option<Listing> = serde_json::from_str(&ended.text()).ok();
    Ok(listing.and_then(|listing| listing.loopdevices.into_iter().next()))
}

/// The devices whose file has a name that will do.
pub(super) fn attached(is_it: impl Fn(&Path) -> bool) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/sys/block")? {
        let number = number_of(Path::new(&entry?.file_name()));
        numbers
            .extend(number.filter(|number| backing_file(*number).is_some_and(|name| is_it(&name))));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Which of all disks that this machine has had a device is: the kernel counts them, and each time
/// that a device is attached it is another one. `None` of one that is gone, and before Linux 5.15.
pub(super) fn sequence(number: u32) -> Option<u64> {
    fs::read_to_string(attribute(number, "diskseq")).ok()?.trim().parse().ok()
}

/// Whether the device is over what is called `file`.
pub(super) fn is_over(number: u32, file: &Path) -> bool {
    backing_file(number).is_some_and(|name| is_named(&name, file))
}

/// Whether this is what the kernel calls `file`, also once it was removed.
pub(super) fn is_named(name: &Path, file: &Path) -> bool {
    let name = name.as_os_str().as_bytes();
    let file = file.as_os_str().as_bytes();
    name == file || name.strip_suffix(b" (deleted)") == Some(file)
}

/// What the kernel calls the file below a device, if that is attached.
pub(super) fn backing_file(number: u32) -> Option<PathBuf> {
    let mut name = fs::read(attribute(number, "loop/backing_file")).ok()?;
    name.pop_if(|last| *last == b'\n');
    Some(OsString::from_vec(name).into())
}

/// Where the kernel says something of a device.
pub(super) fn attribute(number: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/block/loop{number}/{name}"))
}

/// The number in a device's name.
pub(super) fn number_of(device: &Path) -> Option<u32> {
    device.file_name()?.to_str()?.strip_prefix("loop")?.parse().ok()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_name_also_once_it_is_removed() {
        let file = Path::new("/run/a");
        for (name, same) in [
            ("/run/a", true),
            ("/run/a (deleted)", true),
            ("/run/a (deleted) (deleted)", false),
            ("/run/ab", false),
            ("/run", false),
            ("/", false),
        ] {
            assert_eq!(is_named(Path::new(name), file), same, "{name}");
        }
    }

    #[test]
    fn only_a_device_over_the_whole_file_that_will_stay_counts() {
        let identity = Identity { device: rustix::fs::makedev(254, 3), inode: 9 };
        let parse = |text: &str| serde_json::from_str::<Status>(text).unwrap();
        let whole = r#"{"back-maj:min":" 254:3  ","back-ino":9,"autoclear":false,"ro":true,"offset":0,"sizelimit":0}"#;
        assert!(parse(whole).is_over(identity) && parse(whole).read_only);
        for (from, to) in [
            ("254:3", "254:4"),
            (":9,", ":8,"),
            (":9,", ":null,"),
            ("\"autoclear\":false", "\"autoclear\":true"),
            ("\"offset\":0", "\"offset\":512"),
            ("\"sizelimit\":0", "\"sizelimit\":512"),
        ] {
            assert!(!parse(&whole.replace(from, to)).is_over(identity), "{from} {to}");
        }
        assert_eq!(number_of(Path::new("/dev/loop12")), Some(12));
        assert_eq!(number_of(Path::new("/dev/loop-control")), None);
    }
}
