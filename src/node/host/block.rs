//! Block devices, published: the device's node is bound onto a file at the target.

use super::{Bound, Error, HostPath, Target};
use rustix::{
    fs::{major, minor},
    mount::mount_bind,
};
use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

/// The major number of loop devices (Linux, Documentation/admin-guide/devices.txt).
pub(in crate::node) const LOOP_MAJOR: u32 = 7;

/// What is where a device is to be.
enum Found {
    Nothing,
    /// A file that could be ours.
    Empty,
    /// A device, mounted here.
    Device(u32, u32),
    Mount,
    Link,
    Other,
}

impl HostPath {
    /// The number of the device that is here, if there is one.
    pub(in crate::node) fn shown_device(&self) -> Option<(u32, u32)> {
        match self.found() {
            Ok(Found::Device(major, minor)) => Some((major, minor)),
            Ok(_) | Err(_) => None,
        }
    }

    /// Binds the node of `device`, with this number, onto a file here. Already bound is fine; what
    /// shows a loop device that is detached makes way.
    ///
    /// A crash after the file was made leaves an empty one, which the repeat takes.
    pub(in crate::node) fn bind_device(
        &self,
        device: &Path,
        number: (u32, u32),
        target: Target,
    ) -> Result<Bound, Error> {
        loop {
            match self.found()? {
                Found::Nothing => self.make_file()?,
                Found::Empty => break,
                Found::Device(major, minor) if (major, minor) == number => {
                    return Ok(Bound::Already);
                }
                // What was ours ended with its daemon, and keeps its number until it is unstaged.
                Found::Device(..) if target == Target::Noted => self.unmount()?,
                Found::Device(LOOP_MAJOR, minor) if is_detached(minor) => self.unmount()?,
                Found::Device(..) => return Err(self.unsuitable("shows another device")),
                Found::Mount => return Err(self.unsuitable("is a mount point of something else")),
                Found::Link => return Err(self.malformed("is a symbolic link")),
                Found::Other => {
                    return Err(self.unsuitable("is there already, and is not an empty file"));
                }
            }
        }
        mount_bind(device, &self.path).map_err(|error| self.io("mounting on")(error.into()))?;
        Ok(Bound::Now)
    }

    /// Whether the device with this number is bound here.
    pub fn shows_device(&self, number: (u32, u32)) -> Result<bool, Error> {
        Ok(matches!(self.found()?, Found::Device(major, minor) if (major, minor) == number))
    }

    /// Unmounts every device that is bound here, and removes the file. Gone is fine; what is not a
    /// device stays, and is an error.
    pub fn unbind_device(&self) -> Result<(), Error> {
        loop {
            match self.found()? {
                Found::Nothing => return Ok(()),
                // A repeat that came in between may have mounted twice.
                Found::Device(..) => self.unmount()?,
                Found::Empty => break,
                Found::Mount => return Err(self.unsuitable("is a mount point of something else")),
                Found::Link => return Err(self.malformed("is a symbolic link")),
                Found::Other => return Err(self.unsuitable("is not a device that is mounted")),
            }
        }
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.io("removing")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn found(&self) -> Result<Found, Error> {
        let data = match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            data => data.map_err(self.io("looking at"))?,
        };
        if data.is_symlink() {
            return Ok(Found::Link);
        }
        let mounted = self.is_mount_root()?;
        Ok(match data.file_type() {
            kind if kind.is_block_device() && mounted => {
                Found::Device(major(data.rdev()), minor(data.rdev()))
            }
            _ if mounted => Found::Mount,
            kind if kind.is_file() && data.len() == 0 => Found::Empty,
            _ => Found::Other,
        })
    }

    fn make_file(&self) -> Result<(), Error> {
        let made = fs::File::options().write(true).create_new(true).mode(0o600).open(&self.path);
        match made {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(self.unsuitable("has no parent directory"))
            }
            outcome => outcome.map(drop).map_err(self.io("creating")),
        }
    }
}

/// Whether this loop device shows nothing.
fn is_detached(minor: u32) -> bool {
    !Path::new(&format!("/sys/dev/block/{LOOP_MAJOR}:{minor}/loop")).exists()
}
