//! Which qemu-storage-daemon to run: the newest of those that are installed.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
};

/// The programs that may be run, as they were given.
#[derive(Clone, Debug)]
pub struct Programs {
    paths: Vec<PathBuf>,
    known: Arc<Mutex<Vec<(Identity, Version)>>>,
}

/// The file that a program is: another one of the same name, after an upgrade, differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    device: u64,
    inode: u64,
    modified: i64,
}

/// Major, minor, micro.
pub type Version = [u32; 3];

/// The identity of the file at `path`; of a process, at `/proc/<pid>/exe`.
pub fn identity(path: &Path) -> io::Result<Identity> {
    let data = fs::metadata(path)?;
    Ok(Identity { device: data.dev(), inode: data.ino(), modified: data.mtime() })
}

impl Programs {
    /// These programs; there is at least one.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, known: Arc::default() }
    }

    /// The newest of them now; the first where several are. One alone is not asked.
    pub fn newest(&self) -> PathBuf {
        let mut best: Option<(Version, &PathBuf)> = None;
        for path in self.paths.iter().filter(|_| self.paths.len() > 1) {
            let Ok(version) = self.version(path) else { continue };
            if best.is_none_or(|(other, _)| version > other) {
                best = Some((version, path));
            }
        }
        best.map_or_else(|| self.paths[0].clone(), |(_, path)| path.clone())
    }

    fn version(&self, path: &Path) -> io::Result<Version> {
        let identity = identity(path)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, version)) = known.iter().find(|(other, _)| *other == identity) {
            return Ok(*version);
        }
        let output = Command::new(path).arg("--version").stdin(Stdio::null()).output()?;
        let version = parse(&String::from_utf8_lossy(&output.stdout));
        let version = version.ok_or_else(|| io::Error::other("it tells no version"))?;
        known.push((identity, version));
        Ok(version)
    }
}

/// From such as `qemu-storage-daemon version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)`.
fn parse(text: &str) -> Option<Version> {
    let numbers = text.split_once(" version ")?.1.split_whitespace().next()?;
    let mut parts = numbers.split('.').map(str::parse);
    let mut next = || parts.next()?.ok();
    Some([next()?, next()?, next().unwrap_or_default()])
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_version_is_read_as_numbers() {
        let debian = "qemu-storage-daemon version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)\nCopy";
        assert_eq!(parse(debian), Some([10, 0, 13]));
        assert_eq!(parse("qemu-storage-daemon version 11.1"), Some([11, 1, 0]));
        assert!([9, 2, 4] < [10, 0, 2]);
        assert_eq!(parse("busybox"), None);
    }
}
