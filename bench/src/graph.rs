//! The graph of a bare daemon: as the driver builds it (src/qsd/graph.rs), said here again, with
//! what may be varied.

use crate::qsd::Bare;
use serde_json::{Value, json};
use std::path::Path;

/// One way to build the graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) queues: u16,
    pub(crate) aio: &'static str,
    /// Whether requests have a thread of their own, and how long it polls, in nanoseconds.
    pub(crate) iothread: Option<u64>,
    pub(crate) throttle: Throttle,
    pub(crate) cache: Cache,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Throttle {
    Present,
    Absent,
}

/// When a write is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    /// When it is durable.
    Writethrough,
    /// When the disk has it; durable after the client's flush. What `cache: auto` is.
    Writeback,
}

impl Settings {
    /// As the driver does it.
    pub(crate) fn of_driver(cache: Cache) -> Self {
        Self { queues: 64, aio: "io_uring", iothread: None, throttle: Throttle::Present, cache }
    }

    /// Has a daemon export `image` at `socket`. It takes no lock: others share the file.
    pub(crate) fn export(
        self,
        daemon: &mut Bare,
        image: &Path,
        socket: &Path,
    ) -> anyhow::Result<()> {
        for (command, arguments) in self.commands(image, socket) {
            daemon.execute(command, &arguments)?;
        }
        Ok(())
    }

    fn commands(self, image: &Path, socket: &Path) -> Vec<(&'static str, Value)> {
        let file = json!({
            "driver": "file", "filename": image, "aio": self.aio, "discard": "unmap",
            "cache": { "direct": true }, "locking": "off",
        });
        let layer = json!({
            "driver": "raw", "node-name": "L0", "discard": "unmap", "cache": { "direct": true },
            "file": file,
        });
        let mut commands = vec![("blockdev-add", layer)];
        if let Some(poll) = self.iothread {
            let iothread = json!({ "qom-type": "iothread", "id": "io0", "poll-max-ns": poll });
            commands.push(("object-add", iothread));
        }
        let mut top = "L0";
        if self.throttle == Throttle::Present {
            top = "top";
            let group = json!({ "qom-type": "throttle-group", "id": "tg", "limits": {} });
            commands.push(("object-add", group));
            let filter = json!({
                "driver": "throttle", "node-name": top, "throttle-group": "tg",
                "discard": "unmap", "file": "L0",
            });
            commands.push(("blockdev-add", filter));
        }
        let mut export = json!({
            "type": "vhost-user-blk", "id": "vu", "node-name": top, "writable": true,
            "writethrough": self.cache == Cache::Writethrough, "num-queues": self.queues,
            "addr": { "type": "unix", "path": socket },
        });
        if self.iothread.is_some() {
            export["iothread"] = "io0".into();
            export["fixed-iothread"] = true.into();
        }
        commands.push(("block-export-add", export));
        commands
    }
}
