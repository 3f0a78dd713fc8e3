//! A storage daemon without any driver, on an image of its own, to be ended and started again as a
//! test likes. Its graph is that of `src/qsd/graph.rs`, given on the command line: there is no
//! monitor, and a start is as quick as it can be.

use crate::harness::{part, until};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The size of the disk.
const SIZE: u64 = 64 << 20;

/// What the disk is made of.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Image {
    Raw,
    /// A qcow2 layer with small subclusters over a raw one.
    Overlay,
}

/// A daemon that is not there yet.
pub(crate) struct Plan {
    program: PathBuf,
    image: Image,
    exports: usize,
    writethrough: bool,
    limits: Value,
}

impl Plan {
    /// This program instead of the driver's.
    pub(crate) fn program(self, program: PathBuf) -> Self {
        Self { program, ..self }
    }

    /// So many sockets for the one disk.
    pub(crate) fn exports(self, exports: usize) -> Self {
        Self { exports, ..self }
    }

    /// The guest is told that there is a cache, or would be if QSD said so (facts/qsd.md, D1).
    pub(crate) fn write_back(self) -> Self {
        Self { writethrough: false, ..self }
    }

    /// Limits of a throttle group, such as `{"iops-write": 100}`: slow requests stay in flight.
    pub(crate) fn limits(self, limits: Value) -> Self {
        Self { limits, ..self }
    }

    /// Makes the image, starts the daemon, and waits until it serves.
    pub(crate) async fn start(self) -> Qsd {
        // Sockets need a short path, and images a real disk.
        let sockets = tempfile::Builder::new().prefix("bare-").tempdir().unwrap();
        let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut qsd = Qsd { plan: self, sockets, disk, process: None };
        qsd.make_image();
        qsd.launch().await;
        qsd
    }
}

/// A daemon, and a disk that it serves. `Drop` ends and removes both.
pub(crate) struct Qsd {
    plan: Plan,
    sockets: tempfile::TempDir,
    disk: tempfile::TempDir,
    process: Option<Child>,
}

impl Qsd {
    pub(crate) fn on(image: Image) -> Plan {
        let program = part("bin/qemu-storage-daemon");
        Plan { program, image, exports: 1, writethrough: true, limits: json!({}) }
    }

    /// Starts the daemon again, on the same sockets, and waits until it serves.
    pub(crate) async fn launch(&mut self) {
        assert!(self.process.is_none(), "one at a time");
        let pidfile = self.sockets.path().join("pid");
        _ = fs::remove_file(&pidfile); // what a killed one left
        let mut command = Command::new(&self.plan.program);
        command.arg("--pidfile").arg(&pidfile).stdin(Stdio::null());
        for (option, value) in self.graph() {
            command.arg(option).arg(value.to_string());
        }
        let mut process = command.spawn().unwrap();
        // It writes this last, when its exports are there.
        until("the daemon serves", async || {
            assert!(process.try_wait().unwrap().is_none(), "the daemon ended");
            pidfile.exists()
        })
        .await;
        self.process = Some(process);
    }

    /// Ends the daemon as a crash would.
    pub(crate) fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.as_ref().unwrap().id().try_into().unwrap()
    }

    /// The socket of one of its exports.
    pub(crate) fn socket(&self, export: usize) -> PathBuf {
        self.sockets.path().join(format!("vhost-{export}.sock"))
    }

    /// A free path for another socket.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// The disk as a raw image: its layer, or what its layers make together.
    pub(crate) fn flat(&self) -> PathBuf {
        match self.plan.image {
            Image::Raw => self.layer("base.raw"),
            Image::Overlay => {
                let flat = self.layer("flat.raw");
                let convert = ["convert", "--force-share", "-f", "qcow2", "-O", "raw"];
                qemu_img(
                    Command::new(part("bin/qemu-img"))
                        .args(convert)
                        .args([&self.layer("top.qcow2"), &flat]),
                );
                flat
            }
        }
    }

    fn make_image(&self) {
        let base = self.layer("base.raw");
        fs::File::create_new(&base).unwrap().set_len(SIZE).unwrap();
        if self.plan.image == Image::Overlay {
            let create = ["create", "-q", "-f", "qcow2", "-F", "raw"];
            qemu_img(
                Command::new(part("bin/qemu-img"))
                    .args(create)
                    .args(["-o", "extended_l2=on,cluster_size=128k", "-b"])
                    .args([&base, &self.layer("top.qcow2")]),
            );
        }
    }

    fn layer(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    fn graph(&self) -> Vec<(&'static str, Value)> {
        let Plan { image, exports, writethrough, limits, .. } = &self.plan;
        let throttle = json!({ "qom-type": "throttle-group", "id": "tg", "limits": limits });
        let mut graph = vec![
            ("--object", throttle),
            ("--blockdev", layer_node("L0", "raw", &self.layer("base.raw"))),
        ];
        let mut top = "L0";
        if *image == Image::Overlay {
            graph[1].1["read-only"] = true.into();
            graph[1].1["file"]["read-only"] = true.into();
            let mut overlay = layer_node("L1", "qcow2", &self.layer("top.qcow2"));
            overlay["backing"] = "L0".into();
            graph.push(("--blockdev", overlay));
            top = "L1";
        }
        graph.push((
            "--blockdev",
            json!({
                "driver": "throttle", "node-name": "top", "throttle-group": "tg",
                "discard": "unmap", "file": top,
            }),
        ));
        graph.extend((0..*exports).map(|export| {
            let export = json!({
                "type": "vhost-user-blk", "id": format!("vu{export}"), "node-name": "top",
                "writable": true, "writethrough": writethrough,
                "num-queues": qsd_csi::qsd::QUEUES,
                "addr": { "type": "unix", "path": self.socket(export) },
            });
            ("--export", export)
        }));
        graph
    }
}

impl Drop for Qsd {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            _ = process.kill();
            _ = process.wait();
        }
    }
}

/// Not locked: two daemons may have the image open, as in a handover.
fn layer_node(name: &str, driver: &str, path: &Path) -> Value {
    json!({
        "driver": driver, "node-name": name, "discard": "unmap", "cache": { "direct": true },
        "file": {
            "driver": "file", "filename": path, "aio": "io_uring", "discard": "unmap",
            "cache": { "direct": true }, "locking": "off",
        },
    })
}

fn qemu_img(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}
