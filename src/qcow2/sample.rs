//! Images for the tests, and what QEMU's own tools say of them.

use crate::{extents::Extents, units::Bytes};
use std::{
    fs::{File, OpenOptions},
    path::{Path, PathBuf},
    process::Command,
};

/// What encrypted ones are opened with.
const PASSPHRASE: &str = "correct horse";

/// An image in a directory of its own, which goes with it.
pub(super) struct Image {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Image {
    /// One that `create` made.
    pub(super) fn ours(size: Bytes) -> Self {
        let image = Self::none();
        super::create(&File::create_new(&image.path).unwrap(), size).unwrap();
        image
    }

    /// One that qemu-img made, with options such as `cluster_size=64k`.
    pub(super) fn theirs(options: &str, size: Bytes) -> Self {
        let (image, size) = (Self::none(), size.count().to_string());
        let arguments = ["create", "-q", "-f", "qcow2", "-o", options];
        run("qemu-img", &arguments, &image.path, &[&size]);
        image
    }

    /// One that this made.
    pub(super) fn ours_with(make: impl FnOnce(&File)) -> Self {
        let image = Self::none();
        make(&File::create_new(&image.path).unwrap());
        image
    }

    /// One that qemu-img made, encrypted with `PASSPHRASE`.
    pub(super) fn encrypted(size: Bytes) -> Self {
        let (image, size) = (Self::none(), size.count().to_string());
        let secret = format!("secret,id=key,data={PASSPHRASE}");
        let options = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
        let arguments = ["create", "-q", "-f", "qcow2", "--object", &secret, "-o", options];
        run("qemu-img", &arguments, &image.path, &[&size]);
        image
    }

    /// Has qemu-io do this in an encrypted image, in one go; whether every command succeeds.
    pub(super) fn unlocked(&self, commands: &[String]) -> bool {
        let (secret, image) = self.unlocking();
        let mut tool = Command::new("qemu-io");
        tool.args(["--object", &secret, "--image-opts", "-t", "unsafe"]);
        for command in commands {
            tool.args(["-c", command]);
        }
        let run = tool.arg(image).output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout).into_owned();
        run.status.success() && !said.contains("failed")
    }

    /// The same as `check`, of an encrypted image.
    pub(super) fn check_unlocked(&self) {
        let (secret, image) = self.unlocking();
        let arguments = ["check", "--object", &secret, "--image-opts"];
        let said = run("qemu-img", &arguments, Path::new(&image), &[]);
        assert!(said.contains("No errors were found"), "{said}");
    }

    fn unlocking(&self) -> (String, String) {
        let file = self.path.display();
        let image = format!("driver=qcow2,encrypt.key-secret=key,file.filename={file}");
        (format!("secret,id=key,data={PASSPHRASE}"), image)
    }

    fn none() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.qcow2");
        Self { _dir: dir, path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, to read and to write.
    pub(super) fn file(&self) -> File {
        OpenOptions::new().read(true).write(true).open(&self.path).unwrap()
    }

    /// Has qemu-io do this, in one go; every command must succeed.
    pub(super) fn io(&self, commands: &[String]) {
        let mut arguments = vec!["-f", "qcow2", "-d", "unmap", "-t", "unsafe"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        let said = run("qemu-io", &arguments, &self.path, &[]);
        assert!(!said.contains("failed"), "{commands:?}: {said}");
    }

    /// Has qemu-img look for errors and leaks; there must be none.
    pub(super) fn check(&self) {
        let said = run("qemu-img", &["check", "-f", "qcow2"], &self.path, &[]);
        assert!(said.contains("No errors were found"), "{said}");
    }

    pub(super) fn info(&self) -> serde_json::Value {
        let said = run("qemu-img", &["info", "--output=json", "-f", "qcow2"], &self.path, &[]);
        serde_json::from_str(&said).unwrap()
    }

    /// What the image provides, as qemu-img sees it.
    pub(super) fn map(&self) -> Extents {
        let alone = serde_json::json!({
            "driver": "qcow2", "backing": null,
            "file": { "driver": "file", "filename": self.path },
        });
        let image = PathBuf::from(format!("json:{alone}"));
        let said = run("qemu-img", &["map", "--output=json"], &image, &[]);
        let map: Vec<serde_json::Value> = serde_json::from_str(&said).unwrap();
        let present = map.iter().filter(|part| part["present"] == true);
        present
            .map(|part| {
                let start = part["start"].as_u64().unwrap();
                start..start + part["length"].as_u64().unwrap()
            })
            .collect()
    }
}

/// What a tool prints; it must succeed.
fn run(tool: &str, before: &[&str], image: &Path, after: &[&str]) -> String {
    let run = Command::new(tool).args(before).arg(image).args(after).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success(), "{tool} {before:?} {}: {run:?}", image.display());
    said
}
