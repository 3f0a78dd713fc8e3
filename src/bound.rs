//! A socket file that is listened at, as long as it is ours: an operator may remove it, and a process
//! that nobody knows of any more must not remove that of another.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// What is at the place of a socket that was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The socket itself.
    Ours,
    /// Nothing, in the directory in which it was bound: nobody reaches us any more.
    Nothing,
    /// The socket of another, or another directory: ours is not to be seen from there.
    Foreign,
}

/// The place of a socket, bound by whoever has this.
#[derive(Debug)]
pub(crate) struct Bound {
    path: PathBuf,
    /// Open, so that no other directory gets its number. The socket keeps its own.
    dir: File,
    socket: Identity,
}

type Identity = (u64, u64);

fn identity(data: &fs::Metadata) -> Identity {
    (data.dev(), data.ino())
}

impl Bound {
    /// Binds a socket to this path, where nobody else does, in place of one that a predecessor left.
    pub(crate) fn bind<Socket>(
        path: &Path,
        bind: impl FnOnce(&Path) -> io::Result<Socket>,
    ) -> io::Result<(Socket, Self)> {
        _ = fs::remove_file(path);
        let listener = bind(path)?;
        let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let socket = identity(&fs::symlink_metadata(path)?);
        Ok((listener, Self { path: path.to_owned(), dir: File::open(dir)?, socket }))
    }

    /// What is there now.
    pub(crate) fn look(&self) -> io::Result<Found> {
        let dir = self.path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let is_same_dir = match fs::metadata(dir) {
            Ok(data) => identity(&data) == identity(&self.dir.metadata()?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        if !is_same_dir {
            return Ok(Found::Foreign);
        }
        match fs::symlink_metadata(&self.path) {
            Ok(data) if identity(&data) == self.socket => Ok(Found::Ours),
            Ok(_) => Ok(Found::Foreign),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
            Err(error) => Err(error),
        }
    }

    /// Whether nobody reaches us any more who could.
    pub(crate) fn is_lost(&self) -> bool {
        self.look().is_ok_and(|found| found == Found::Nothing)
    }
}

impl Drop for Bound {
    /// What is ours goes; who removes it just now has done that.
    fn drop(&mut self) {
        if self.look().is_ok_and(|found| found == Found::Ours) {
            _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_what_is_ours_is_removed_and_only_what_is_gone_is_lost() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("dir/socket");
        fs::create_dir(scratch.path().join("dir")).unwrap();
        let bind = || Bound::bind(&path, |path| UnixListener::bind(path)).unwrap();
        let (_listener, first) = bind();
        assert_eq!(first.look().unwrap(), Found::Ours);
        fs::remove_file(&path).unwrap();
        assert!(first.is_lost());
        let (_other, second) = bind();
        assert_eq!(first.look().unwrap(), Found::Foreign);
        drop(first);
        assert_eq!(second.look().unwrap(), Found::Ours);
        let (dir, old) = (scratch.path().join("dir"), scratch.path().join("old"));
        rustix::fs::rename(&dir, &old).unwrap();
        assert_eq!(second.look().unwrap(), Found::Foreign);
        fs::create_dir(scratch.path().join("dir")).unwrap();
        assert!(!second.is_lost(), "another driver's directory");
        let (_third, third) = bind();
        drop(second);
        assert_eq!(third.look().unwrap(), Found::Ours);
        drop(third);
        assert!(!path.exists());
    }
}
