//! The table of mounts: what is mounted at a path, without asking what is mounted there.
//!
//! A file system whose disk is gone answers nothing any more, and still must be unmounted.

use super::{Error, HostPath, unescape};
use crate::run::IMAGE;
use rustix::{
    io::Errno,
    mount::{UnmountFlags, unmount},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// One line of the table (proc(5), `/proc/pid/mountinfo`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// Its number, which another mount may get once this one is gone.
    id: u32,
    /// The device that the file system is on.
    pub(in crate::node) device: (u32, u32),
    /// What of the file system is shown.
    pub(in crate::node) root: PathBuf,
    /// The kind of the file system.
    pub(in crate::node) kind: String,
    /// Whether nothing can be written through it.
    pub(in crate::node) read_only: bool,
    /// Whether the kernel has stopped writing to it after an error.
    pub(in crate::node) is_given_up: bool,
    /// Where it is mounted.
    pub(in crate::node) point: PathBuf,
}

impl Mounted {
    /// Takes it away, if nobody uses it, and if it is still what is seen at its place: by the time
    /// that something is done about a mount, another one may be there.
    pub fn unmount(&self) -> io::Result<()> {
        if topmost(&table()?, &self.point).as_ref() != Some(self) {
            let text = format!("something else is mounted at {} by now", self.point.display());
            return Err(io::Error::other(text));
        }
        let plain = UnmountFlags::NOFOLLOW;
        match unmount(&self.point, plain) {
            // `disk.img` is mounted on it, and is of as little use.
            Err(Errno::BUSY) if self.bears_image()? => {
                Ok(unmount(&self.point, plain | UnmountFlags::DETACH)?)
            }
            outcome => Ok(outcome?),
        }
    }

    fn bears_image(&self) -> io::Result<bool> {
        Ok(topmost(&table()?, &self.point.join(IMAGE)).is_some())
    }
}

impl HostPath {
    /// The topmost mount here, if any.
    pub(in crate::node) fn mounted(&self) -> Result<Option<Mounted>, Error> {
        let path = match resolved(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            path => path.map_err(self.io("resolving"))?,
        };
        let mounts = table().map_err(self.io("listing the mounts of"))?;
        Ok(topmost(&mounts, &path))
    }

    /// An error unless an empty directory is here.
    pub(in crate::node) fn require_empty(&self) -> Result<(), Error> {
        self.require_directory()?;
        if self.is_empty()? {
            Ok(())
        } else {
            Err(self.unsuitable("is a directory with something in it"))
        }
    }
}

/// Whether the file system on this device is mounted anywhere that we see.
pub(in crate::node) fn is_mounted(device: (u32, u32)) -> io::Result<bool> {
    Ok(lines(&table()?).any(|mounted| mounted.device == device))
}

/// What the kernel calls a path: all but its last part is resolved, and that is not touched.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Ok(path.to_owned()),
    }
}

/// All there are, in the order in which they hide each other.
pub(in crate::node) fn mounts() -> io::Result<Vec<Mounted>> {
    Ok(lines(&table()?).collect())
}

fn table() -> io::Result<Vec<u8>> {
    fs::read("/proc/self/mountinfo")
}

pub(in crate::node) fn lines(table: &[u8]) -> impl DoubleEndedIterator<Item = Mounted> {
    table.split(|byte| *byte == b'\n').filter_map(parse)
}

/// The last mount at a path hides those before it.
fn topmost(table: &[u8], path: &Path) -> Option<Mounted> {
    lines(table).rev().find(|mounted| mounted.point == path)
}

fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let mut fields = fields.skip(1);
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
    let options = fields.next()?;
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = String::from_utf8_lossy(rest.next()?).into_owned();
    let of_all = rest.nth(1)?;
    let has =
        |options: &[u8], option: &[u8]| options.split(|byte| *byte == b',').any(|it| it == option);
    // Of ext4: read-only by itself up to Linux 6.14, and in words of its own since.
    let is_given_up = has(of_all, b"emergency_ro") || has(of_all, b"shutdown");
    let is_given_up = is_given_up || (has(of_all, b"ro") && !has(options, b"ro"));
    Some(Mounted {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root,
        kind,
        read_only: has(options, b"ro") || has(of_all, b"ro") || is_given_up,
        is_given_up,
        point,
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_topmost_mount_at_a_path_counts() {
        let mountinfo = b"22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            90 22 0:24 /q/0123456789abcdef0123456789abcdef/export /t/a\\040b rw - tmpfs tmpfs rw\n\
            91 90 254:0 /home /t/a\\040b rw - ext4 /dev/vda rw\n";
        let root = |path: &str| Some(topmost(mountinfo, Path::new(path))?.root);
        assert_eq!(root("/t/a b"), Some("/home".into()));
        assert_eq!(root("/"), Some("/".into()));
        assert_eq!(root("/t"), None);
        assert_eq!(topmost(b"1 2 3\n\n \n", Path::new("/")), None);
    }

    #[test]
    fn a_mount_is_taken_away_only_where_nothing_else_is_by_now() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().canonicalize().unwrap();
        let at = HostPath::noted(dir.clone());
        let bind = || rustix::mount::mount_bind("/usr/bin", &dir).unwrap();
        let seen = || at.mounted().unwrap().unwrap();
        bind();
        let first = seen();
        bind();
        let second = seen();
        assert!(first.unmount().unwrap_err().to_string().contains("something else"));
        assert_eq!(seen(), second);
        second.unmount().unwrap();
        first.unmount().unwrap();
        assert_eq!(at.mounted().unwrap(), None);
        bind();
        // It is the same but for its number.
        let third = seen();
        let other = Mounted { id: third.id + 1, ..third.clone() };
        other.unmount().unwrap_err();
        third.unmount().unwrap();
    }

    #[test]
    fn a_line_of_the_table_tells_all_that_is_asked_of_it() {
        let line = b"90 22 7:3 / /t/a\\040b rw,noatime shared:5 master:1 - ext4 /dev/loop3 rw,errors=continue";
        let mounted = parse(line).unwrap();
        assert_eq!((mounted.device, mounted.kind.as_str()), ((7, 3), "ext4"));
        assert_eq!((mounted.root, mounted.point), ("/".into(), "/t/a b".into()));
        assert!(!mounted.read_only);
        let read_only = [
            &b"90 22 7:3 / /t ro,noatime - xfs /dev/loop3 rw"[..],
            b"90 22 7:3 / /t rw - xfs /dev/loop3 ro,x",
            b"90 22 7:3 / /t rw - ext4 /dev/loop3 rw,emergency_ro",
        ];
        for line in read_only {
            assert!(parse(line).unwrap().read_only);
        }
        let given_up = read_only.map(|line| parse(line).unwrap().is_given_up);
        assert_eq!(given_up, [false, true, true]);
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"1 2 3:4 / /t rw shared:1"), None);
    }
}
