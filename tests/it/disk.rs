//! Small file systems of their own, that can be filled and watched.

use std::{
    fs,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
    process::Command,
};

/// A small file system of its own, on a loop device that goes with it.
pub(crate) struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    pub(crate) fn new() -> Self {
        Self::of(64 << 20)
    }

    /// One of so many bytes, in which no file can have more than 4 TiB.
    pub(crate) fn of(size: u64) -> Self {
        let dir = tempfile::Builder::new().prefix("small-").tempdir().unwrap();
        let image = dir.path().join("image");
        fs::File::create(&image).unwrap().set_len(size).unwrap();
        fs::create_dir(dir.path().join("mount")).unwrap();
        let disk = Self { dir };
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0", "-b", "1024"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(disk.path()));
        disk
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("mount")
    }

    /// How many times its device was told to make what it has durable.
    pub(crate) fn flushes(&self) -> u64 {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = self.path().display().to_string();
        let own = mounts.lines().find(|line| line.split(' ').nth(4) == Some(&mount)).unwrap();
        let device = own.split(' ').nth(2).unwrap();
        let stat = fs::read_to_string(format!("/sys/dev/block/{device}/stat")).unwrap();
        // Field 16 of Documentation/block/stat.rst: flush I/Os.
        stat.split_whitespace().nth(15).unwrap().parse().unwrap()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// Writes into a directory until nothing more fits.
pub(crate) fn fill(dir: &Path) -> PathBuf {
    let path = dir.join("filler");
    let mut file = fs::File::create(&path).unwrap();
    for size in [1 << 20, 4096, 1] {
        let block = vec![1; size];
        loop {
            match file.write_all(&block).and_then(|()| file.sync_all()) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    path
}
