//! The block graph of one daemon, as the list of QMP commands that builds it.
//!
//! ```text
//! vhost-user-blk export  ->  top: throttle  ->  L0: raw  ->  file
//! ```
//!
//! The export is the relay's: VMs connect to that, not to the daemon.
//!
//! Pure: from the layers alone, bottom-up, every node named, nothing probed. Rebuilding a graph
//! after a crash is building it. The settings rest on facts/qsd.md: what is acknowledged when (D1,
//! D2), one fixed iothread (D4), direct I/O with `io_uring` (section 14), the export above a throttle that
//! never changes (section 4).

use super::Command;
use crate::volume::{Format, Layer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The node that every export stands on.
const TOP: &str = "top";

/// The iothread of all exports of the graph.
const IOTHREAD: &str = "io0";

/// The throttle group that `TOP` obeys.
const THROTTLE: &str = "tg";

/// The id of the vhost-user-blk export.
pub(super) const VHOST_USER: &str = "vu";

/// The virtqueues an export offers. QEMU asks for one a virtual CPU and refuses to start where the
/// export has fewer; an unused queue costs next to nothing (measured: bench).
pub const QUEUES: u16 = 64;

/// What a graph is built from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    /// The layers of the volume, from the active one down.
    pub(super) layers: &'a [Layer],
    /// Where to export it as a vhost-user-blk socket.
    pub(super) socket: &'a Path,
    /// When a write is acknowledged.
    pub(super) durability: Durability,
    /// Who else may have the layers open.
    pub(super) sharing: Sharing,
}

/// When a write is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When it is durable.
    EachWrite,
    /// When the kernel or the disk has it, so the end of the daemon loses nothing; it is durable
    /// after the guest's next flush. Behind the relay guests do flush (facts/relay.md section 2).
    OnFlush,
}

/// Who else may have the layers open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Nobody; QEMU's own locks see to it, too.
    Alone,
    /// The daemon that it is to take over from, which writes until it does: both have an image
    /// lock of their own, so this one takes none. The supervisor's lock keeps all others out.
    Handover,
}

/// The commands that build the graph.
pub(super) fn commands(plan: Plan<'_>) -> Vec<Command> {
    let Plan { layers, socket, durability, sharing } = plan;
    let object = |arguments| Command::new("object-add", arguments);
    let node = |arguments| Command::new("blockdev-add", arguments);
    let mut commands = vec![
        object(json!({ "qom-type": "iothread", "id": IOTHREAD })),
        object(json!({ "qom-type": "throttle-group", "id": THROTTLE, "limits": {} })),
    ];
    let bottom_up = layers.iter().rev().enumerate();
    commands.extend(bottom_up.map(|(depth, layer)| node(layer_node(depth, layer, sharing))));
    commands.push(node(json!({
        "driver": "throttle",
        "node-name": TOP,
        "throttle-group": THROTTLE,
        "discard": "unmap", // or the filter would swallow it
        "file": layer_name(layers.len().saturating_sub(1)),
    })));
    commands.push(Command::new("block-export-add", vhost_user(socket, durability)));
    commands
}

/// The commands that build a disk of nothing, that lets so many requests pass a second, and export
/// it at `socket`.
pub(super) fn trial(requests_per_second: u32, socket: &Path) -> Vec<Command> {
    let limits = json!({ "iops-total": requests_per_second });
    let object = |arguments| Command::new("object-add", arguments);
    let node = |arguments| Command::new("blockdev-add", arguments);
    vec![
        object(json!({ "qom-type": "iothread", "id": IOTHREAD })),
        object(json!({ "qom-type": "throttle-group", "id": THROTTLE, "limits": limits })),
        node(json!({
            "driver": "throttle",
            "node-name": TOP,
            "throttle-group": THROTTLE,
            "file": { "driver": "null-co", "size": 1 << 20, "read-zeroes": true },
        })),
        Command::new("block-export-add", vhost_user(socket, Durability::OnFlush)),
    ]
}

/// The files of the layers among a daemon's nodes, from the active one down.
pub(super) fn files_of_layers(nodes: &Value) -> Vec<PathBuf> {
    let file_of = |depth: usize| {
        let mut nodes = nodes.as_array()?.iter();
        let node = nodes.find(|node| node["node-name"] == layer_name(depth).as_str())?;
        Some(PathBuf::from(node["file"].as_str()?))
    };
    let mut files: Vec<_> = (0..).map_while(file_of).collect();
    files.reverse();
    files
}

fn layer_name(depth: usize) -> String {
    format!("L{depth}")
}

/// `cache` and `discard` must be said both of the format node and of the file below it
/// (facts/qsd.md section 14). The file is inline, so it goes when the layer goes (section 4).
fn layer_node(depth: usize, layer: &Layer, sharing: Sharing) -> Value {
    let Layer { path, format: Format::Raw, .. } = layer;
    json!({
        "driver": "raw",
        "node-name": layer_name(depth),
        "discard": "unmap",
        "cache": { "direct": true },
        "file": {
            "driver": "file",
            "filename": path,
            "aio": "io_uring",
            "discard": "unmap",
            "cache": { "direct": true },
            "locking": match sharing {
                Sharing::Alone => "auto",
                Sharing::Handover => "off",
            },
        },
    })
}

fn vhost_user(socket: &Path, durability: Durability) -> Value {
    json!({
        "type": "vhost-user-blk",
        "id": VHOST_USER,
        "node-name": TOP,
        "writable": true,
        "writethrough": durability == Durability::EachWrite,
        "iothread": IOTHREAD,
        "fixed-iothread": true,
        "num-queues": QUEUES,
        "addr": { "type": "unix", "path": socket },
    })
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::units::Bytes;

    fn built(durability: Durability) -> Vec<Command> {
        let layer = Layer {
            path: "/pool/layers/a.raw".into(),
            format: Format::Raw,
            size: Bytes::gib(1),
            allocated: Bytes::ZERO,
        };
        let (sharing, socket) = (Sharing::Alone, Path::new("/run/back.sock"));
        commands(Plan { layers: &[layer], socket, durability, sharing })
    }

    #[test]
    fn a_graph_is_built_bottom_up_from_named_nodes() {
        let commands = built(Durability::OnFlush);
        let nodes = commands.iter().filter(|command| command.name == "blockdev-add");
        let names: Vec<_> = nodes.map(|node| node.arguments["node-name"].clone()).collect();
        assert_eq!(names, ["L0", "top"]);
        assert_eq!(commands.last().unwrap().name, "block-export-add");
    }

    #[test]
    fn the_layers_of_a_daemon_are_found_by_their_names() {
        let nodes = json!([
            { "node-name": "top", "file": "/b" },
            { "node-name": "#block123", "file": "/b" },
            { "node-name": "L1", "file": "/b" },
            { "node-name": "L0", "file": "/a" },
            { "node-name": "L3", "file": "/x" },
        ]);
        assert_eq!(files_of_layers(&nodes), [Path::new("/b"), Path::new("/a")]);
        assert!(files_of_layers(&json!({})).is_empty());
    }

    #[test]
    fn every_export_is_on_one_fixed_iothread_and_as_durable_as_asked_for() {
        for (durability, writethrough) in
            [(Durability::EachWrite, true), (Durability::OnFlush, false)]
        {
            let commands = built(durability);
            let export = commands.iter().find(|command| command.name == "block-export-add");
            let export = export.unwrap();
            assert_eq!(export.arguments["writethrough"], writethrough);
            assert_eq!(export.arguments["fixed-iothread"], true);
            assert_eq!(export.arguments["iothread"], IOTHREAD);
            assert_eq!(export.arguments["node-name"], TOP);
        }
    }
}
