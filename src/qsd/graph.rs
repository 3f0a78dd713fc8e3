//! The block graph of one daemon, as the list of QMP commands that builds it.
//!
//! ```text
//! vhost-user-blk or FUSE export  ->  top: throttle  ->  [cor: copy-on-read]  ->  L<n>: qcow2 or raw  ->  L<n-1>  ->  ...
//!                                                                                 |                       |
//!                                                                                file                    file
//! ```
//!
//! A remote master is the lowest layer, and opened before (`Master`). Where nothing may be written,
//! all is open read-only, and so is the export; or what is written goes into an image above the active
//! layer that ends with the daemon (`Writes`).
//!
//! A vhost-user-blk export is the relay's: VMs connect to that, not to the daemon. Beside it, a
//! `disk.img` can be shown and hidden again:
//!
//! ```text
//! FUSE export  ->  image: raw, of a fixed size  ->  top
//! ```
//!
//! Pure: from the layers alone, bottom-up, every node named, nothing probed and no header asked.
//! Rebuilding a graph after a crash is building it. The settings rest on facts/qsd.md: what is
//! acknowledged when (D1, D2), direct I/O with `io_uring` (section 14), the export above a throttle
//! that never changes (section 4).
//!
//! There is no iothread. With one, each drain under load (a snapshot, the begin and the end of a
//! job, a new size) may hang the daemon for ever: the thread that waits for the last request is not
//! told of its end. Without, it ends the request itself. A daemon has one volume, so its main loop
//! has little else to do.

use super::{Command, encryption, master::FORMAT_NODE};
use crate::{
    source::Access,
    volume::{Encryption, Format, Layer, RunKey, Throttle},
};
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// The node that every export stands on.
pub(super) const TOP: &str = "top";

/// The filter that keeps what was read once.
const COPY_ON_READ: &str = "cor";

/// The image that takes what is written where every layer is to stay as it is.
const SCRATCH: &str = "scratch";

/// All that is below that image: a filter without a limit.
const WHOLE: &str = "whole";

/// What the name of every layer's node begins with.
const LAYER: char = 'L';

/// The id of an export that is a file.
const FILE: &str = "file";

/// The node below a `disk.img`, and the id of its export.
pub(super) const IMAGE: &str = "image";

/// The throttle group that `TOP` obeys.
const THROTTLE: &str = "tg";

/// The virtqueues an export offers. QEMU asks for one a virtual CPU and refuses to start where the
/// export has fewer; an unused queue costs next to nothing (measured: bench).
pub const QUEUES: u16 = 64;

/// What a graph is built from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    /// The layers of the volume, from the active one down.
    pub(super) layers: &'a [Layer],
    /// Whether what was read once is kept.
    pub(super) reads: Reads,
    /// What is let pass.
    pub(super) throttle: &'a Throttle,
    /// How it leaves the daemon.
    pub(super) outlet: &'a Outlet,
    /// When a write is acknowledged.
    pub(super) durability: Durability,
    /// Where it goes.
    pub(super) writes: &'a Writes,
    /// Who reads it through an export of their own.
    pub(super) readers: &'a [Reader],
    /// Who else may have the layers open.
    pub(super) sharing: Sharing,
}

/// How a volume leaves its daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outlet {
    /// As a vhost-user-blk socket.
    Socket(PathBuf),
    /// As a file, over FUSE, of the size that the volume has.
    File(PathBuf),
}

impl Outlet {
    /// The id of the export.
    pub(super) fn export(&self, durability: Durability, writes: &Writes) -> &'static str {
        match (self, writes) {
            (Self::Socket(_), Writes::Active | Writes::Scratch(_)) => durability.export(),
            (Self::Socket(_), Writes::Refused) => "vu-ro",
            (Self::File(_), Writes::Active) => FILE,
            (Self::File(_), Writes::Scratch(_)) => "file-scratch",
            (Self::File(_), Writes::Refused) => "file-ro",
        }
    }
}

/// Where what is written to a volume goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Into its active layer.
    Active,
    /// Into an image at this path that ends with the daemon: every layer stays as it is.
    Scratch(PathBuf),
    /// Nowhere: they are refused.
    Refused,
}

impl Writes {
    /// What is done with the active layer.
    pub(super) fn access(&self) -> Access {
        match self {
            Self::Active => Access::Write,
            Self::Scratch(_) | Self::Refused => Access::Read,
        }
    }
}

/// One of several who read a volume at the same time: a vhost-user-blk socket serves one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Which.
    pub key: RunKey,
    /// The socket of the export for it.
    pub socket: PathBuf,
}

impl Reader {
    /// What the id of every export begins with that is a reader's.
    pub(super) const EXPORT: &str = "reader-";

    /// The id of the export.
    pub(super) fn export(&self) -> String {
        format!("{}{}", Self::EXPORT, self.key)
    }
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

impl Durability {
    /// The id of the export that acknowledges so.
    pub(super) fn export(self) -> &'static str {
        match self {
            Self::OnFlush => "vu",
            Self::EachWrite => "vu-through",
        }
    }
}

/// What becomes of data that is read from a layer below the active one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// It stays where it is.
    Pass,
    /// It is copied into the active layer.
    Copy,
}

/// Who else may have the layers open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Nobody writes them; QEMU's own locks see to it, too.
    Alone,
    /// The daemon that it is to take over from, which writes until it does: both have an image
    /// lock of their own, so this one takes none. The supervisor's lock keeps all others out.
    Handover,
}

/// What becomes of a remote master at the bottom of layers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Remote {
    /// It is open already.
    Open,
    /// A disk of its size takes its place that fails every read, so that nothing can be made of
    /// what is not there.
    Barred,
}

/// The commands that build the graph and export it.
pub(super) fn commands(plan: Plan<'_>) -> Vec<Command> {
    let mut commands = stack(plan.layers, plan.reads, plan.throttle, plan.sharing, plan.writes);
    let mut arguments = match plan.outlet {
        Outlet::Socket(socket) => export(socket, plan.durability),
        Outlet::File(file) => file_export(file, plan.durability),
    };
    arguments["id"] = plan.outlet.export(plan.durability, plan.writes).into();
    arguments["writable"] = (*plan.writes != Writes::Refused).into();
    commands.push(Command::new("block-export-add", arguments));
    commands.extend(plan.readers.iter().map(reader_export));
    commands
}

/// Opens an export that refuses writes (`VIRTIO_BLK_F_RO`), whatever others there are.
pub(super) fn reader_export(reader: &Reader) -> Command {
    let mut arguments = export(&reader.socket, Durability::OnFlush);
    arguments["id"] = reader.export().into();
    arguments["writable"] = false.into();
    Command::new("block-export-add", arguments)
}

/// The commands that build the graph of layers that nobody has open, for work on them.
pub(super) fn workshop(layers: &[Layer], master: Remote) -> Vec<Command> {
    let bottom = layers.last().filter(|layer| layer.master().is_some() && master == Remote::Barred);
    let barred = bottom.map(|layer| node(barred_node(layer)));
    let writes = &Writes::Active;
    let stack = stack(layers, Reads::Pass, &Throttle::default(), Sharing::Alone, writes);
    barred.into_iter().chain(stack).collect()
}

fn stack(
    layers: &[Layer],
    reads: Reads,
    throttle: &Throttle,
    sharing: Sharing,
    writes: &Writes,
) -> Vec<Command> {
    let limits = limits(throttle);
    let mut commands =
        vec![object(json!({ "qom-type": "throttle-group", "id": THROTTLE, "limits": limits }))];
    let mut below: Option<String> = None;
    for (height, layer) in layers.iter().enumerate().rev() {
        let access = if height == 0 { writes.access() } else { Access::Read };
        commands.extend(layer_node(layer, below.as_deref(), access, sharing).map(node));
        below = Some(layer.file.node_name());
    }
    if let Writes::Scratch(file) = writes {
        commands.push(object(json!({ "qom-type": "throttle-group", "id": WHOLE })));
        commands.extend(scratch_nodes(file, below.as_deref()).map(node));
        below = Some(SCRATCH.to_owned());
    }
    // What was read is not kept where nothing may be.
    if reads == Reads::Copy && layers.len() > 1 && writes.access() == Access::Write {
        commands.push(node(json!({
            "driver": "copy-on-read",
            "node-name": COPY_ON_READ,
            "discard": "unmap",
            "file": below,
        })));
        below = Some(COPY_ON_READ.to_owned());
    }
    commands.push(node(json!({
        "driver": "throttle",
        "node-name": TOP,
        "throttle-group": THROTTLE,
        "discard": "unmap", // or the filter would swallow it
        "read-only": *writes == Writes::Refused,
        "file": below,
    })));
    commands
}

fn object(arguments: Value) -> Command {
    Command::new("object-add", arguments)
}

fn node(arguments: Value) -> Command {
    Command::new("blockdev-add", arguments)
}

/// Asks what is let pass.
pub(super) fn query_throttle() -> Command {
    let path = format!("/objects/{THROTTLE}");
    Command::new("qom-get", json!({ "path": path, "property": "limits" }))
}

/// Whether the answer to that says just this.
pub(super) fn is_throttle(answer: &Value, throttle: &Throttle) -> bool {
    throttle.qemu().all(|(name, value)| answer[name] == value)
}

/// The same command as an option of the command line, if there is one.
pub(super) fn option(command: &Command) -> Option<[String; 2]> {
    let option = match command.name {
        "object-add" => "--object",
        "blockdev-add" => "--blockdev",
        "block-export-add" => "--export",
        _ => return None,
    };
    Some([option.to_owned(), command.arguments.to_string()])
}

/// Changes what is let pass.
pub(super) fn set_throttle(throttle: &Throttle) -> Command {
    let path = format!("/objects/{THROTTLE}");
    let arguments = json!({ "path": path, "property": "limits", "value": limits(throttle) });
    Command::new("qom-set", arguments)
}

/// Every limit, each time (facts/qsd.md section 8).
fn limits(throttle: &Throttle) -> Value {
    let limits: Map<_, _> =
        throttle.qemu().map(|(name, value)| (name.to_owned(), value.into())).collect();
    limits.into()
}

/// Adds a layer that is to be put onto another.
pub(super) fn add_overlay(overlay: &Layer, access: Access) -> Command {
    let arguments = layer_node(overlay, None, access, Sharing::Alone);
    let mut arguments = arguments.expect("an overlay is a file of ours");
    // Without this the header would be asked (facts/qsd.md section 4).
    arguments["backing"] = Value::Null;
    node(arguments)
}

/// The nodes that a layer was made of, from the top one down.
pub(super) fn nodes_of(layer: &Layer) -> Vec<String> {
    let below = layer.master().map(|_| FORMAT_NODE.to_owned());
    [layer.file.node_name()].into_iter().chain(below).collect()
}

/// The commands that build a disk of nothing, that lets so many requests pass a second, and export
/// it at `socket`.
pub(super) fn trial(requests_per_second: u32, socket: &Path) -> Vec<Command> {
    let limits = json!({ "iops-total": requests_per_second });
    vec![
        object(json!({ "qom-type": "throttle-group", "id": THROTTLE, "limits": limits })),
        node(json!({
            "driver": "throttle",
            "node-name": TOP,
            "throttle-group": THROTTLE,
            "file": { "driver": "null-co", "size": 1 << 20, "read-zeroes": true },
        })),
        Command::new("block-export-add", export(socket, Durability::OnFlush)),
    ]
}

/// Asks which node stands on which. Nothing is asked of the images, and so no guest waits for an
/// answer of 20 ms, as with `query_nodes` and 40 layers.
pub(super) fn query_graph() -> Command {
    Command::new("x-debug-query-block-graph", json!({}))
}

/// Opens a layer again, on what it stands on now, in this graph; `None` where it is not open.
///
/// The file stays open as it is: some of its options are those of the daemon.
pub(super) fn reopen(
    layer: &Layer,
    below: Option<&Layer>,
    access: Access,
    graph: &Value,
) -> Option<Command> {
    let (nodes, edges) = (graph["nodes"].as_array()?, graph["edges"].as_array()?);
    let name = layer.file.node_name();
    let own = nodes.iter().find(|node| node["name"] == *name)?;
    let is_below = |edge: &&Value| edge["parent"] == own["id"] && edge["name"] == "file";
    let edge = edges.iter().find(is_below)?;
    let file = nodes.iter().find(|node| node["id"] == edge["child"])?["name"].clone();
    let below = below.map(|below| below.file.node_name());
    let mut node = layer_node(layer, below.as_deref(), access, Sharing::Alone)?;
    node["file"] = file;
    Some(Command::new("blockdev-reopen", json!({ "options": [node] })))
}

/// Whether a layer is open for writing, among these nodes.
pub(super) fn is_writable(layer: &Layer, nodes: &Value) -> bool {
    let name = layer.file.node_name();
    let is_it = |node: &Value| node["node-name"] == *name && node["ro"] == false;
    nodes.as_array().is_some_and(|nodes| nodes.iter().any(is_it))
}

/// The layers of a daemon by the names of their nodes: those below the export from the active one
/// down, and those that are open besides, out of `x-debug-query-block-graph`.
///
/// No other command tells which node stands on which in all versions: the `file` of a node that was
/// given its backing is a description of all below it.
pub(super) fn layers_of(graph: &Value) -> (Vec<String>, BTreeSet<String>) {
    let list = |key: &str| graph[key].as_array().into_iter().flatten();
    let names: BTreeMap<_, _> = list("nodes")
        .filter(|node| node["type"] == "block-driver")
        .filter_map(|node| Some((node["id"].as_u64()?, node["name"].as_str()?)))
        .collect();
    let below = |parent: u64| {
        let child = |name: &str| {
            let is_it = |edge: &&Value| edge["parent"] == parent && edge["name"] == name;
            list("edges").find(is_it)?["child"].as_u64().filter(|child| names.contains_key(child))
        };
        // A filter has what it filters as its file, or as its backing where a job put it in; an image
        // for what is written has both.
        let is_filter = !names[&parent].starts_with(LAYER);
        child("backing").or_else(|| child("file").filter(|_| is_filter))
    };
    let top = names.iter().find(|(_, name)| **name == TOP).map(|(id, _)| *id);
    // A chain has no more nodes than there are, whatever is said of what leads where.
    let all = std::iter::successors(top, |node| below(*node)).take(names.len());
    let all = all.map(|node| names[&node].to_owned());
    let stack: Vec<_> = all.filter(|name| name.starts_with(LAYER)).collect();
    let open = names.values().filter(|name| name.starts_with(LAYER)).map(|name| (*name).to_owned());
    let besides = open.filter(|name| !stack.contains(name)).collect();
    (stack, besides)
}

/// `cache` and `discard` must be said both of the format node and of the file below it
/// (facts/qsd.md section 14). The file is inline, so it goes when the layer goes (section 4), and it
/// is read-only or not as the layer is: work on a frozen layer reopens both.
///
/// None for a remote master, which is not opened so.
fn layer_node(
    layer: &Layer,
    below: Option<&str>,
    access: Access,
    sharing: Sharing,
) -> Option<Value> {
    let mut node = json!({
        "driver": layer.format.as_str(),
        "node-name": layer.file.node_name(),
        "discard": "unmap",
        "read-only": access == Access::Read,
        "cache": { "direct": true },
        "file": {
            "driver": "file",
            "filename": layer.path()?,
            "aio": "io_uring",
            "discard": "unmap",
            "cache": { "direct": true },
            "locking": match sharing {
                Sharing::Alone => "auto",
                Sharing::Handover => "off",
            },
        },
    });
    match layer.format {
        Format::Raw => {}
        Format::Qcow2 => node["backing"] = below.into(),
    }
    if layer.encryption == Some(Encryption::Luks) {
        node["encrypt"] = encryption::options();
    }
    Some(node)
}

/// It is worth nothing once the daemon has ended, so nothing of it is made durable.
///
/// Right below an image with a backing no overlay can be put in ("node is used as backing hd"), so a
/// filter that lets all pass is there.
fn scratch_nodes(file: &Path, below: Option<&str>) -> [Value; 2] {
    let whole = json!({
        "driver": "throttle",
        "node-name": WHOLE,
        "throttle-group": WHOLE,
        "read-only": true,
        "file": below,
    });
    let image = json!({
        "driver": "qcow2",
        "node-name": SCRATCH,
        "discard": "unmap",
        "cache": { "no-flush": true },
        "file": {
            "driver": "file",
            "filename": file,
            "discard": "unmap",
            "cache": { "no-flush": true },
        },
        "backing": WHOLE,
    });
    [whole, image]
}

fn barred_node(layer: &Layer) -> Value {
    json!({
        "driver": "blkdebug",
        "node-name": layer.file.node_name(),
        "read-only": true,
        "image": { "driver": "null-co", "size": layer.size.count() },
        "inject-error": [{ "event": "none", "iotype": "read" }],
    })
}

pub(super) fn export(socket: &Path, durability: Durability) -> Value {
    json!({
        "type": "vhost-user-blk",
        "id": durability.export(),
        "node-name": TOP,
        "writable": true,
        "writethrough": durability == Durability::EachWrite,
        "num-queues": QUEUES,
        "addr": { "type": "unix", "path": socket },
    })
}

/// The commands that show the volume as a file of this size, beside its socket.
///
/// Pods have the file, and what they truncate would be the volume's own layer (facts/kubevirt.md
/// section 0.7): the raw node in between has a size that does not change.
pub(super) fn image(file: &Path, size: u64, durability: Durability) -> [Command; 2] {
    let fixed = json!({
        "driver": "raw",
        "node-name": IMAGE,
        "size": size,
        "discard": "unmap",
        "file": TOP,
    });
    let mut export = file_export(file, durability);
    export["id"] = IMAGE.into();
    export["node-name"] = IMAGE.into();
    // Or nobody but root could be let in (facts/qsd.md section 9).
    export["allow-other"] = "on".into();
    [node(fixed), Command::new("block-export-add", export)]
}

/// Asks for all named nodes. Without `flat` each would come with all that is below it: 4 MiB and
/// 0.8 s at 50 layers.
pub(super) fn query_nodes() -> Command {
    Command::new("query-named-block-nodes", json!({ "flat": true }))
}

/// Whether the node below a `disk.img` is among these nodes.
pub(super) fn has_image(nodes: &Value) -> bool {
    let is_it = |node: &Value| node["node-name"] == IMAGE;
    nodes.as_array().is_some_and(|nodes| nodes.iter().any(is_it))
}

/// The size of what is exported, among these nodes.
pub(super) fn size_of_top(nodes: &Value) -> Option<u64> {
    let top = nodes.as_array()?.iter().find(|node| node["node-name"] == TOP)?;
    top["image"]["virtual-size"].as_u64()
}

/// Root alone may open the file, so what may truncate it does not (facts/qsd.md section 9).
fn file_export(file: &Path, durability: Durability) -> Value {
    json!({
        "type": "fuse",
        "id": FILE,
        "node-name": TOP,
        "mountpoint": file,
        "writable": true,
        "growable": false,
        "allow-other": "off",
        "writethrough": durability == Durability::EachWrite,
    })
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::{
        units::Bytes,
        volume::{LayerId, Login, Master, Place},
    };

    fn layer(format: Format) -> Layer {
        let id = LayerId::draw();
        let place = Place::File(format!("/pool/layers/{id}").into());
        Layer { id, file: id, place, format, encryption: None, size: Bytes::gib(1) }
    }

    fn remote() -> Layer {
        let source = "nbd://host/e".parse().unwrap();
        let master = Master { source, login: Login::Open };
        Layer { place: Place::Master(master), ..layer(Format::Raw) }
    }

    fn built(layers: &[Layer], reads: Reads, durability: Durability) -> Vec<Command> {
        let (sharing, outlet) = (Sharing::Alone, &Outlet::Socket("/run/back.sock".into()));
        let throttle = &Throttle::default();
        let (writes, readers) = (&Writes::Active, &[]);
        commands(Plan { layers, reads, throttle, outlet, durability, writes, readers, sharing })
    }

    #[test]
    fn no_layer_is_written_where_nothing_may_be() {
        let layers = [layer(Format::Qcow2), layer(Format::Raw)];
        let active = layers[0].file.node_name();
        let key: RunKey = "0123456789abcdef0123456789abcdef".parse().unwrap();
        let (throttle, outlet) = (&Throttle::default(), &Outlet::File("/run/disk.0".into()));
        for writes in [Writes::Refused, Writes::Scratch("/run/scratch.qcow2".into())] {
            let plan = Plan {
                layers: &layers,
                reads: Reads::Copy,
                throttle,
                outlet,
                durability: Durability::OnFlush,
                writes: &writes,
                readers: &[Reader { key: key.clone(), socket: "/run/back.sock".into() }],
                sharing: Sharing::Alone,
            };
            let commands = commands(plan);
            let added = |name: &str| {
                let all = commands.iter().filter(|command| command.name == name);
                all.map(|command| command.arguments.clone()).collect::<Vec<_>>()
            };
            let (nodes, exports) = (added("blockdev-add"), added("block-export-add"));
            let is_layer = |node: &&Value| node["node-name"].as_str().unwrap().starts_with(LAYER);
            assert!(nodes.iter().filter(is_layer).all(|node| node["read-only"] == true));
            let (below, refuses) = match writes {
                Writes::Refused => (active.as_str(), true),
                Writes::Scratch(_) | Writes::Active => (SCRATCH, false),
            };
            let top = nodes.last().unwrap();
            assert_eq!((&top["file"], &top["read-only"]), (&below.into(), &refuses.into()));
            assert_eq!(exports[0]["writable"], !refuses);
            assert_eq!(exports[1]["writable"], false);
            assert_eq!(exports[1]["id"], format!("reader-{key}"));
        }
    }

    #[test]
    fn a_graph_is_built_bottom_up_from_named_nodes() {
        let layers = [layer(Format::Qcow2), layer(Format::Qcow2), layer(Format::Raw)];
        let [active, middle, bottom] = layers.each_ref().map(|layer| layer.file.node_name());
        let commands = built(&layers, Reads::Copy, Durability::OnFlush);
        let nodes = commands.iter().filter(|command| command.name == "blockdev-add");
        let nodes: Vec<_> = nodes.map(|node| &node.arguments).collect();
        let told = |key: &str| nodes.iter().map(|node| node[key].clone()).collect::<Vec<_>>();
        assert_eq!(told("node-name"), [&*bottom, &*middle, &*active, "cor", "top"]);
        assert_eq!(told("backing")[..3], [Value::Null, bottom.into(), middle.into()]);
        assert_eq!(told("read-only")[..3], [true, true, false]);
        assert_eq!(nodes[3]["file"], active);
        assert_eq!(nodes[4]["file"], "cor");
        assert_eq!(commands.last().unwrap().name, "block-export-add");
    }

    #[test]
    fn nothing_is_copied_on_read_where_there_is_nothing_below() {
        let commands = built(&[layer(Format::Raw)], Reads::Copy, Durability::OnFlush);
        assert!(commands.iter().all(|command| command.arguments["driver"] != "copy-on-read"));
    }

    #[test]
    fn a_master_is_stood_on_as_it_was_opened_or_cannot_be_read() {
        let layers = [layer(Format::Qcow2), remote()];
        let master = layers[1].file.node_name();
        for (remote, bottom) in [(Remote::Open, None), (Remote::Barred, Some("blkdebug"))] {
            let commands = workshop(&layers, remote);
            let node = |name: &str| {
                let nodes = commands.iter().map(|command| &command.arguments);
                nodes.into_iter().find(|node| node["node-name"] == name)
            };
            assert_eq!(node(&layers[0].file.node_name()).unwrap()["backing"], master);
            assert_eq!(node(&master).map(|node| node["driver"].as_str().unwrap()), bottom);
        }
        assert_eq!(nodes_of(&layers[1]), [master, "master".to_owned()]);
    }

    #[test]
    fn an_overlay_is_added_without_asking_its_header() {
        let overlay = add_overlay(&layer(Format::Qcow2), Access::Write);
        assert_eq!(overlay.arguments.get("backing"), Some(&Value::Null));
    }

    #[test]
    fn what_a_command_line_can_say_is_said_there() {
        let commands = built(&[layer(Format::Qcow2)], Reads::Pass, Durability::OnFlush);
        let options: Vec<_> = commands.iter().filter_map(option).collect();
        let names: Vec<_> = options.iter().map(|[name, _]| name.as_str()).collect();
        assert_eq!(names, ["--object", "--blockdev", "--blockdev", "--export"]);
        for (command, [_, text]) in commands.iter().zip(&options) {
            assert_eq!(serde_json::from_str::<Value>(text).unwrap(), command.arguments);
        }
        assert_eq!(option(&set_throttle(&Throttle::default())), None);
    }

    #[test]
    fn a_layer_is_opened_again_with_the_file_that_it_has() {
        let [upper, below] = [Format::Qcow2, Format::Raw].map(layer);
        let [name, lower] = [&upper, &below].map(|layer| layer.file.node_name());
        let graph = json!({
            "nodes": [
                { "id": 1, "name": TOP },
                { "id": 2, "name": name },
                { "id": 3, "name": "#block1" },
                { "id": 4, "name": lower },
            ],
            "edges": [
                { "parent": 1, "child": 2, "name": "file" },
                { "parent": 2, "child": 4, "name": "backing" },
                { "parent": 2, "child": 3, "name": "file" },
            ],
        });
        let command = reopen(&upper, Some(&below), Access::Read, &graph).unwrap();
        let node = &command.arguments["options"][0];
        let is = ["node-name", "file", "backing", "read-only"].map(|key| &node[key]);
        assert_eq!(is, [&json!(name), &json!("#block1"), &json!(lower), &json!(true)]);
        assert_eq!(reopen(&layer(Format::Raw), None, Access::Read, &graph), None);
    }

    #[test]
    fn what_is_encrypted_is_opened_with_the_passphrase() {
        let layer = |encryption| Layer { encryption, ..layer(Format::Qcow2) };
        let layers = [Some(Encryption::Luks), Some(Encryption::Pending), None].map(layer);
        let commands = built(&layers, Reads::Pass, Durability::OnFlush);
        let secret = |layer: &Layer| {
            let name = layer.file.node_name();
            let mut nodes = commands.iter().map(|command| &command.arguments);
            nodes.find(|node| node["node-name"] == name).unwrap()["encrypt"]["key-secret"].clone()
        };
        let none = Value::Null;
        assert_eq!(layers.each_ref().map(secret), [json!("key"), none.clone(), none]);
    }

    #[test]
    fn the_layers_of_a_daemon_are_found_below_its_export() {
        let node = |id: u64, name: &str| json!({ "id": id, "type": "block-driver", "name": name });
        let edge = |parent: u64, name: &str, child: u64| json!({ "parent": parent, "name": name, "child": child });
        let names = ["top", "cor", "#block1", "L1", "L0", "#block2", "L2"];
        let mut nodes: Vec<_> = (1..).zip(names).map(|(id, name)| node(id, name)).collect();
        nodes.push(json!({ "id": 8, "type": "block-backend", "name": "" }));
        let mut edges = vec![
            edge(8, "root", 1),
            edge(1, "file", 2),
            edge(2, "file", 3),
            edge(3, "file", 4),
            edge(4, "file", 6),
        ];
        let layers = |edges: &Vec<Value>| layers_of(&json!({ "nodes": nodes, "edges": edges }));
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(layers(&edges), (vec!["L1".to_owned()], set(&["L0", "L2"])));
        edges.push(edge(4, "backing", 5));
        assert_eq!(layers(&edges), (vec!["L1".to_owned(), "L0".to_owned()], set(&["L2"])));
        assert_eq!(layers_of(&json!({})), (vec![], set(&[])));
        edges[2] = edge(2, "file", 6); // as with an image for what is written
        edges.push(edge(2, "backing", 3));
        assert_eq!(layers(&edges), (vec!["L1".to_owned(), "L0".to_owned()], set(&["L2"])));
        edges.insert(0, edge(4, "backing", 2)); // round and round
        assert_eq!(layers(&edges).1, set(&["L0", "L2"]));
    }

    #[test]
    fn limits_are_known_from_the_answer_of_a_daemon() {
        let limited = |iops: &str| {
            let changes = [("iops".to_owned(), iops.to_owned())].into();
            Throttle::default().with(&changes).unwrap()
        };
        let answer = Value::from(
            Throttle::default()
                .qemu()
                .map(|(name, _)| (name.to_owned(), u64::from(name == "iops-total") * 500))
                .map(|(name, value)| (name, value.into()))
                .collect::<Map<_, _>>(),
        );
        assert!(is_throttle(&answer, &limited("500")));
        assert!(!is_throttle(&answer, &limited("501")));
        assert!(!is_throttle(&answer, &Throttle::default()));
        assert!(!is_throttle(&json!({}), &Throttle::default()));
    }

    #[test]
    fn every_export_is_in_the_main_loop_and_as_durable_as_asked_for() {
        for (durability, writethrough) in
            [(Durability::EachWrite, true), (Durability::OnFlush, false)]
        {
            let commands = built(&[layer(Format::Raw)], Reads::Pass, durability);
            let export = commands.iter().find(|command| command.name == "block-export-add");
            let export = export.unwrap();
            assert_eq!(export.arguments["writethrough"], writethrough);
            assert_eq!(export.arguments.get("iothread"), None);
            assert_eq!(export.arguments["node-name"], TOP);
        }
    }
}
