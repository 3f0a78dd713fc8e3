//! Mount flags of a CSI request: judged here, and otherwise left to mount(8).

use super::Error;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Flags that change what is mounted, or where, rather than how; and those that cost data or the host.
/// By their names, or with the value that matters.
const REFUSED: [(&str, &[&str]); 7] = [
    (
        "mounts something else",
        &["bind", "rbind", "move", "remount", "loop", "offset", "sizelimit", "sb"],
    ),
    (
        "changes where the mount is seen",
        &[
            "shared",
            "rshared",
            "slave",
            "rslave",
            "private",
            "rprivate",
            "unbindable",
            "runbindable",
        ],
    ),
    ("uses another device", &["journal_dev", "journal_path", "logdev", "rtdev"]),
    ("reads a file system whose log was not replayed", &["noload", "norecovery"]),
    ("runs another program", &["helper", "uhelper"]),
    ("lets others unmount it", &["user", "users", "owner", "group"]),
    (
        "costs data, or the host",
        &["abort", "barrier=0", "nobarrier", "journal_async_commit", "errors=panic"],
    ),
];

/// Flags that may be given to mount(8).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountFlags(Vec<String>);

impl fmt::Display for MountFlags {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(out, ", mounted with {}", self.0.join(",")) }
    }
}

impl MountFlags {
    /// From CSI's `mount_flags`, each of which may be several with commas.
    pub fn parse<'a>(flags: impl IntoIterator<Item = &'a str>) -> Result<Self, Error> {
        let flags = flags.into_iter().flat_map(|flags| flags.split(','));
        let flags = flags.map(str::trim).filter(|flag| !flag.is_empty());
        flags.map(judge).collect::<Result<_, _>>().map(Self)
    }

    /// Whether nothing is to be written.
    pub(super) fn are_read_only(&self) -> bool {
        let mut switches = self.0.iter().rev().filter(|flag| ["ro", "rw"].contains(&flag.as_str()));
        switches.next().is_some_and(|flag| flag == "ro")
    }

    /// As one argument of mount(8), after those that the driver itself gives.
    pub(super) fn after(&self, own: &[&str]) -> String {
        let all = self.0.iter().map(String::as_str).filter(|flag| !["ro", "rw"].contains(flag));
        own.iter().copied().chain(all).collect::<Vec<_>>().join(",")
    }
}

fn judge(flag: &str) -> Result<String, Error> {
    let refuse = |why| Err(Error::Flag { flag: flag.to_owned(), why });
    // The kernel and mount(8) tell flags apart by case, but nobody means these otherwise.
    let lower = flag.to_ascii_lowercase();
    let name = lower.split_once('=').map_or(lower.as_str(), |(name, _)| name);
    if flag.chars().any(|char| char.is_control() || "\"\\'".contains(char)) {
        return refuse("has a quote or a control character in it");
    }
    if name.starts_with("x-") {
        return refuse("is for mount(8) itself");
    }
    for (why, flags) in REFUSED {
        if flags.contains(&name) || flags.contains(&lower.as_str()) {
            return refuse(why);
        }
    }
    Ok(flag.to_owned())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_flag_that_does_more_than_mount_this_is_refused_by_name() {
        for flag in [
            "bind",
            "rbind",
            "remount",
            "loop",
            "loop=/dev/loop7",
            "offset=512",
            "sizelimit=1",
            "sb=32768",
            "journal_path=/dev/vda",
            "logdev=/dev/vda",
            "noload",
            "norecovery",
            "helper=sh",
            "user",
            "rshared",
            "errors=panic",
            "x-mount.mkdir",
            "X-mount.subdir=a",
            "LOOP",
            "a\nb",
            "context=\"a",
            "nobarrier",
            "barrier=0",
        ] {
            for flags in [vec!["noatime", flag], vec![&format!("noatime,{flag}")]] {
                let error = MountFlags::parse(flags).unwrap_err().to_string();
                assert!(error.starts_with(&format!("mount_flags: {flag:?} ")), "{error}");
            }
        }
    }

    #[test]
    fn other_flags_are_left_to_mount() {
        let flags = MountFlags::parse(["noatime, discard", "", "errors=remount-ro,ro"]).unwrap();
        assert!(flags.are_read_only());
        assert_eq!(flags.after(&["ro", "nouuid"]), "ro,nouuid,noatime,discard,errors=remount-ro");
        assert!(!MountFlags::parse(["ro,rw"]).unwrap().are_read_only());
        assert_eq!(MountFlags::default().after(&["rw"]), "rw");
    }
}
