//! A pool that is full: calls say so, and deletion is the way out.

use crate::harness::{Driver, names};
use std::{
    fs,
    io::{ErrorKind, Write as _},
    path::PathBuf,
    process::Command,
};
use tonic::Code;

/// A small file system of its own, on a loop device that goes with it.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("small-").tempdir().unwrap();
        let image = dir.path().join("image");
        fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        fs::create_dir(dir.path().join("mount")).unwrap();
        let disk = Self { dir };
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(disk.path()));
        disk
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("mount")
    }

    /// Writes until nothing more fits.
    fn fill(&self) -> PathBuf {
        let path = self.path().join("filler");
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
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        _ = Command::new("umount").arg(self.path()).status();
    }
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

#[tokio::test]
async fn a_full_pool_creates_nothing_and_deletes_all_the_same() {
    let disk = SmallDisk::new();
    {
        let pool = format!("small={}", disk.path().join("pool").display());
        let driver = Driver::start_with(&["--pool", &pool]).await;
        let create = async |name: &str| {
            let mut request = crate::harness::create_request(name, 4 << 20);
            request.parameters = [("pool".to_owned(), "small".to_owned())].into();
            driver.controller().create_volume(request).await
        };
        create("pvc-1").await.unwrap();
        create("pvc-2").await.unwrap();
        let filler = disk.fill();
        let error = create("pvc-3").await.unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        driver.stage("pvc-1").await.unwrap();
        driver.unstage("pvc-1").await.unwrap();
        driver.delete("pvc-1").await.unwrap();
        fs::remove_file(filler).unwrap();
        driver.delete("pvc-2").await.unwrap();
        for part in ["layers", "records/layers", "records/volumes"] {
            assert_eq!(names(&disk.path().join("pool").join(part)), [""; 0], "{part}");
        }
        driver.assert_empty().await;
    }
}
