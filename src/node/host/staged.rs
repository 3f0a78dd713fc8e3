//! File systems, published: what is mounted at the staging path is bound onto a directory at the
//! target.

use super::{Bound, Error, HostPath};
use crate::{crash, source::Access};
use rustix::mount::{MountFlags, mount_bind};
use std::path::Path;

/// Whose a target is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Target {
    /// It was noted before: what is mounted there is ours.
    Noted,
    /// Nothing is known of it.
    New,
}

impl HostPath {
    /// Where `dir` is bound here: has it show what `dir` itself shows as `name`, the file that is
    /// mounted there, or none.
    pub(in crate::node) fn show_file(&self, dir: &Path, name: &str) -> Result<(), Error> {
        if !self.is_directory()? || !self.is(dir)? {
            return Ok(());
        }
        let here = Self { field: self.field, path: self.path.join(name) };
        let source = dir.join(name);
        let is = Self { field: self.field, path: source.clone() }.mounted_device()?;
        while let Some(mounted) = here.mounted_device()? {
            if is == Some(mounted) {
                return Ok(());
            }
            here.unmount()?;
        }
        if is.is_some() {
            let bound = mount_bind(&source, &here.path);
            bound.map_err(|error| here.io("mounting on")(error.into()))?;
        }
        Ok(())
    }

    /// Binds the file system on this device, which is mounted at `staged`, onto a directory here.
    /// Already bound is fine; what ended with an earlier daemon makes way.
    ///
    /// A crash after the directory was made leaves an empty one, which the repeat takes.
    pub(in crate::node) fn bind_filesystem(
        &self,
        staged: &Path,
        device: (u32, u32),
        target: Target,
        access: Access,
    ) -> Result<Bound, Error> {
        while let Some(mounted) = self.mounted()? {
            match target {
                _ if mounted.device == device => {
                    self.limit(access)?;
                    return Ok(Bound::Already);
                }
                Target::Noted => self.unmount()?,
                Target::New => return Err(self.unsuitable("is a mount point of something else")),
            }
        }
        self.take()?;
        let bound = mount_bind(staged, &self.path);
        bound.map_err(|error| self.io("mounting on")(error.into()))?;
        crash::point("node-publish-mounted");
        self.limit(access)?;
        Ok(Bound::Now)
    }

    /// Has nothing written through what is bound here, where it is only to be read; others may write
    /// elsewhere. What else the file system is mounted with is the file system's, and stays.
    fn limit(&self, access: Access) -> Result<(), Error> {
        match access {
            Access::Write => Ok(()),
            Access::Read => self.remount(MountFlags::BIND | MountFlags::RDONLY),
        }
    }
}
