//! The host's side of publishing: paths, directories and bind mounts.
//!
//! A path comes from outside, so it is judged before anything is touched: it must be absolute,
//! lead nowhere but where it says, and name a place that is free or already ours.

mod block;
mod staged;
mod table;

use crate::{crash, volume::RunKey};
use rustix::{
    fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx},
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount_bind_recursive, mount_remount, unmount},
};
use std::{
    ffi::OsString,
    fs, io,
    os::unix::{ffi::OsStringExt as _, fs::DirBuilderExt as _, fs::MetadataExt as _},
    path::{Component, Path, PathBuf},
};

pub(super) use block::LOOP_MAJOR;
pub(super) use staged::Target;
pub use table::Mounted;
#[cfg(any(test, fuzzing))]
pub(super) use table::lines;
pub(super) use table::{is_mounted, mounts};

/// Why a path will not do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller wrote it wrong.
    #[error("{field}: {path:?} {what}")]
    Malformed {
        /// The field of the request.
        field: &'static str,
        /// Its value.
        path: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// What is there stands in the way.
    #[error("{field}: {} {what}", path.display())]
    Unsuitable {
        /// The field of the request.
        field: &'static str,
        /// Its value.
        path: PathBuf,
        /// What stands in the way.
        what: &'static str,
    },
    /// The host refused.
    #[error("{action} {}", path.display())]
    Io {
        /// What was tried, as a gerund.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The longest path the kernel takes, with its final NUL.
const PATH_MAX: usize = 4096;

/// A path on the host from a request: absolute, and without `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPath {
    field: &'static str,
    path: PathBuf,
}

impl HostPath {
    /// Judges the text of a request's `field`.
    pub fn parse(field: &'static str, text: String) -> Result<Self, Error> {
        let what = match Path::new(&text) {
            path if path.is_relative() => "is not absolute",
            _ if text.contains('\0') => "has a NUL byte in it",
            _ if text.len() >= PATH_MAX => "is too long for a path",
            path if path.components().any(|part| part == Component::ParentDir) => "has a .. in it",
            // Also drops a slash at the end, behind which a symbolic link would hide.
            path => return Ok(Self { field, path: path.components().collect() }),
        };
        Err(Error::Malformed { field, path: text, what })
    }

    /// A path that was judged when it was noted.
    pub(super) fn noted(path: PathBuf) -> Self {
        Self { field: "target_path", path }
    }

    /// Whether the published directory of the volume `key` is mounted here.
    pub(super) fn shows(&self, key: &RunKey) -> Result<bool, Error> {
        match self.kind()? {
            Kind::Directory => Ok(self.is_mount_root()? && self.is_bound_to(key)?),
            Kind::Nothing | Kind::Link | Kind::Other => Ok(false),
        }
    }

    /// The path.
    pub fn as_path(&self) -> &Path {
        &self.path
    }

    /// Whether a directory is there.
    pub(super) fn is_directory(&self) -> Result<bool, Error> {
        Ok(matches!(self.kind()?, Kind::Directory))
    }

    /// An error unless a directory is there.
    pub(super) fn require_directory(&self) -> Result<(), Error> {
        match self.kind()? {
            Kind::Directory => Ok(()),
            Kind::Nothing => Err(self.unsuitable("does not exist")),
            Kind::Link => Err(self.malformed("is a symbolic link")),
            Kind::Other => Err(self.unsuitable("is not a directory")),
        }
    }

    /// An error where this is the same path as another of the request.
    pub(super) fn require_other_than(&self, other: &Self) -> Result<(), Error> {
        if self.path == other.path {
            return Err(self.malformed("is the staging path"));
        }
        Ok(())
    }

    /// An error where the path lies in `dir`, which is the driver's alone.
    pub(super) fn require_outside(&self, dir: &Path) -> Result<(), Error> {
        if self.path.starts_with(dir) {
            return Err(self.malformed("lies in a directory of the driver"));
        }
        Ok(())
    }

    /// Binds `source`, the published directory of the volume `key`, onto this path. Already bound there is fine.
    ///
    /// A crash after the directory was made leaves an empty one, which the repeat takes.
    pub(super) fn bind(&self, source: &Path, key: &RunKey) -> Result<Bound, Error> {
        match self.kind()? {
            Kind::Directory if self.is_mount_root()? && self.is(source)? => {
                self.protect()?;
                return Ok(Bound::Already);
            }
            // What we published before our run directory was lost shows a directory that is gone.
            Kind::Directory if self.is_mount_root()? && self.is_bound_to(key)? => self.unmount()?,
            Kind::Directory if self.is_mount_root()? => {
                return Err(self.unsuitable("is a mount point of something else"));
            }
            Kind::Nothing | Kind::Directory | Kind::Link | Kind::Other => self.take()?,
        }
        crash::point("node-publish-directory");
        let bound = mount_bind_recursive(source, &self.path);
        bound.map_err(|error| self.io("mounting on")(error.into()))?;
        crash::point("node-publish-bound");
        self.protect()?;
        Ok(Bound::Now)
    }

    /// Makes what is mounted here read-only: a pod connects to the socket, and must not be able to
    /// replace it or to fill the run directory.
    fn protect(&self) -> Result<(), Error> {
        let flags = MountFlags::BIND
            | MountFlags::RDONLY
            | MountFlags::NOSUID
            | MountFlags::NODEV
            | MountFlags::NOEXEC;
        self.remount(flags)
    }

    /// Changes what may be done through what is mounted here.
    fn remount(&self, flags: MountFlags) -> Result<(), Error> {
        let protected = mount_remount(&self.path, flags, "");
        protected.map_err(|error| self.io("protecting")(error.into()))
    }

    /// Unmounts what of the volume `key` is bound here, and removes the directory. Gone is fine;
    /// what is not ours stays, and is an error.
    pub(super) fn unbind(&self, key: &RunKey) -> Result<(), Error> {
        match self.kind()? {
            Kind::Nothing => return Ok(()),
            Kind::Link => return Err(self.malformed("is a symbolic link")),
            Kind::Other => return Err(self.unsuitable("is not a directory")),
            Kind::Directory => {}
        }
        // A repeat that came in between may have mounted twice.
        while self.is_mount_root()? {
            if !self.is_bound_to(key)? {
                return Err(self.unsuitable("is a mount point of something else"));
            }
            self.unmount()?;
            crash::point("node-unpublish-unmounted");
        }
        match fs::remove_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                Err(self.unsuitable("is a directory with something in it"))
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.io("removing")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Sees to it that an empty directory is here.
    fn take(&self) -> Result<(), Error> {
        match self.kind()? {
            Kind::Nothing => self.make(),
            Kind::Directory if self.is_empty()? => Ok(()),
            Kind::Directory => Err(self.unsuitable("is a directory with something in it")),
            Kind::Link => Err(self.malformed("is a symbolic link")),
            Kind::Other => Err(self.unsuitable("is there already, and is not a directory")),
        }
    }

    fn make(&self) -> Result<(), Error> {
        match fs::DirBuilder::new().mode(0o750).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(self.unsuitable("has no parent directory"))
            }
            outcome => outcome.map_err(self.io("creating")),
        }
    }

    /// Someone's working directory inside keeps a mount busy; then it goes as soon as that does.
    fn unmount(&self) -> Result<(), Error> {
        let plain = UnmountFlags::NOFOLLOW;
        match unmount(&self.path, plain) {
            Err(Errno::BUSY) => unmount(&self.path, plain | UnmountFlags::DETACH),
            outcome => outcome,
        }
        .map_err(|error| self.io("unmounting")(error.into()))
    }

    fn kind(&self) -> Result<Kind, Error> {
        match fs::symlink_metadata(&self.path) {
            Ok(data) if data.is_dir() => Ok(Kind::Directory),
            Ok(data) if data.is_symlink() => Ok(Kind::Link),
            Ok(_) => Ok(Kind::Other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kind::Nothing),
            Err(error) => Err(self.io("looking at")(error)),
        }
    }

    /// Whether the directory here is `other` itself, which a bind mount makes it.
    fn is(&self, other: &Path) -> Result<bool, Error> {
        let identity = |path: &Path| fs::metadata(path).map(|data| (data.dev(), data.ino()));
        let same = || Ok(identity(&self.path)? == identity(other)?);
        same().map_err(self.io("comparing"))
    }

    fn is_empty(&self) -> Result<bool, Error> {
        let mut entries = fs::read_dir(&self.path).map_err(self.io("listing"))?;
        Ok(entries.next().is_none())
    }

    fn is_mount_root(&self) -> Result<bool, Error> {
        Ok(self.mounted_device()?.is_some())
    }

    /// The device of the file system whose root is mounted here, if any. What is mounted is not
    /// asked, as it may hang: the kernel tells by itself. It is as fast with a thousand mounts.
    fn mounted_device(&self) -> Result<Option<(u32, u32)>, Error> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let data = match statx(CWD, &self.path, flags, StatxFlags::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            data => data.map_err(|error| self.io("looking at")(error.into()))?,
        };
        let is_root = data.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
        Ok(is_root.then_some((data.stx_dev_major, data.stx_dev_minor)))
    }

    /// Whether the topmost mount here shows the published directory of the volume `key`.
    fn is_bound_to(&self, key: &RunKey) -> Result<bool, Error> {
        Ok(self.mounted()?.is_some_and(|mounted| is_export(&mounted.root, key)))
    }

    fn malformed(&self, what: &'static str) -> Error {
        Error::Malformed { field: self.field, path: self.path.display().to_string(), what }
    }

    /// What stands here stands in the way.
    pub(super) fn unsuitable(&self, what: &'static str) -> Error {
        Error::Unsuitable { field: self.field, path: self.path.clone(), what }
    }

    fn io(&self, action: &'static str) -> impl FnOnce(io::Error) -> Error + use<> {
        let path = self.path.clone();
        move |source| Error::Io { action, path, source }
    }
}

/// Whether a bind mount had to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// It had.
    Now,
    /// It was there.
    Already,
}

enum Kind {
    Nothing,
    Directory,
    Link,
    Other,
}

/// The kernel writes space, tab, newline and backslash as a backslash and three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let digits =
            after.get(..3).filter(|digits| *first == b'\\' && digits.iter().copied().all(is_octal));
        let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            bytes.push(byte);
            rest = &after[3..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    OsString::from_vec(bytes).into()
}

fn is_octal(byte: u8) -> bool {
    (b'0'..=b'7').contains(&byte)
}

/// Whether a mount with this root shows `RUN/<key>/export`, also after that was removed.
fn is_export(root: &Path, key: &RunKey) -> bool {
    let text = root.to_string_lossy();
    let text = text.strip_suffix("//deleted").unwrap_or(&text);
    Path::new(text).ends_with(format!("{key}/export"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_path_is_judged_by_its_text_first() {
        for (text, what) in [
            ("", "not absolute"),
            ("a/b", "not absolute"),
            ("/a/../b", "has a .."),
            ("/a\0b", "NUL"),
            (&format!("/{}", "a".repeat(4096)), "too long"),
        ] {
            let error = HostPath::parse("target_path", text.to_owned()).unwrap_err();
            assert!(error.to_string().starts_with("target_path: "), "{error}");
            assert!(error.to_string().contains(what), "{error}");
        }
        let path = HostPath::parse("target_path", "/a//b/./c/".to_owned()).unwrap();
        assert_eq!(path.as_path(), Path::new("/a/b/c"));
    }

    #[test]
    fn only_our_own_directory_is_ours() {
        let key: RunKey = "0123456789abcdef0123456789abcdef".parse().unwrap();
        for (root, ours) in [
            ("/q/0123456789abcdef0123456789abcdef/export", true),
            ("/q/0123456789abcdef0123456789abcdef/export//deleted", true),
            ("/q/0123456789abcdef0123456789abcdef", false),
            ("/q/0123456789abcdef0123456789abcdee/export", false),
            ("/q/x0123456789abcdef0123456789abcdef/export", false),
            ("/", false),
        ] {
            assert_eq!(is_export(Path::new(root), &key), ours, "{root}");
        }
    }
}
