//! A remote master in a daemon: opened within a deadline, and looked at before anybody relies on
//! it.
//!
//! ```text
//!  L...: raw, of the size that is recorded  ->  master: raw or qcow2  ->  nbd, https, iscsi, ...
//! ```
//!
//! An open blocks the daemon, which serves nobody yet: one that takes too long is killed, and
//! nobody else notices. Secrets are in the daemon as objects, and keys in files, for as long as the
//! open takes. A qcow2 header can name files of this machine, which QEMU opens: what does is
//! refused before anything is exported.

use super::{Command, Monitor, agent::Agent, graph, monitor};
use crate::{
    run::DaemonDir,
    source::{Access, Context, Opening, Secrets, Source},
    units::Bytes,
    volume::{Format, Layer, NodeName},
};
use serde_json::{Value, json};
use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// The node of the format.
pub(super) const FORMAT_NODE: &str = "master";

/// How long an open may take. The SSH library waits 10 s for a silent server, and says so; for one
/// that cannot be reached the kernel waits two minutes (measured).
const OPEN: Duration = Duration::from_secs(12);

/// Why a master cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server, or QEMU, says no.
    #[error("source {master} cannot be opened: {reason}")]
    Refused {
        /// The master.
        master: Source,
        /// In QEMU's own words.
        reason: String,
    },
    /// The server says nothing.
    #[error("source {master} did not answer within {} s", OPEN.as_secs())]
    Silent {
        /// The master.
        master: Source,
    },
    /// It answers, and is not what it should be.
    #[error("source {master} {what}")]
    Unusable {
        /// The master.
        master: Source,
        /// What is wrong with it.
        what: String,
    },
    /// It has less than was seen of it.
    #[error("source {master} has {} bytes, and {} are recorded of it", found.count(), recorded.count())]
    Shrunk {
        /// The master.
        master: Source,
        /// What it has now.
        found: Bytes,
        /// What it had.
        recorded: Bytes,
    },
    /// QEMU does not take the secrets. What it says of them is not repeated.
    #[error("secrets: qemu-storage-daemon does not take those for source {master}")]
    Secrets {
        /// The master.
        master: Source,
    },
    /// A key cannot be put where QEMU looks for it.
    #[error("keys for source {master}: {}", path.display())]
    Keys {
        /// The master.
        master: Source,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Who we are to the server of a master.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The node, for servers that ask for a name.
    pub node: NodeName,
    /// What lets us in.
    pub secrets: Secrets,
}

/// A master that is to be opened.
#[derive(Clone, Debug)]
pub struct Master {
    /// Where it is.
    pub source: Source,
    /// How its bytes lie there.
    pub format: Format,
    /// What is to be done with it.
    pub access: Access,
    /// Who we are.
    pub credentials: Credentials,
}

/// The layer that a master is to be in a graph.
#[derive(Clone, Debug)]
pub(super) struct Bottom {
    pub(super) master: Master,
    name: String,
    size: Bytes,
}

/// What lies in the directory of a daemon while it opens a master.
struct Keys {
    file: Option<PathBuf>,
    agent: Option<Agent>,
}

impl Bottom {
    /// The master at the bottom of these layers, if there is one. Where it is the active layer, too,
    /// that is done with it which is done with that.
    pub(super) fn of(layers: &[Layer], credentials: &Credentials, active: Access) -> Option<Self> {
        let layer = layers.last()?;
        let master = Master {
            source: layer.master()?.source.clone(),
            format: layer.format,
            access: if layers.len() == 1 { active } else { Access::Read },
            credentials: credentials.clone(),
        };
        Some(Self { master, name: layer.file.node_name(), size: layer.size })
    }

    /// Opens it, as the layer that was recorded: no byte less, and none more is seen.
    pub(super) async fn open(
        &self,
        monitor: &Monitor,
        dir: &DaemonDir,
    ) -> Result<(), super::daemon::Error> {
        let (found, recorded) = (self.master.open(monitor, dir).await?, self.size);
        if found < recorded {
            let master = self.master.source.clone();
            return Err(Error::Shrunk { master, found, recorded }.into());
        }
        let node = json!({
            "driver": "raw",
            "node-name": self.name,
            "read-only": self.master.access == Access::Read,
            "discard": "unmap",
            "size": recorded.count(),
            "file": FORMAT_NODE,
        });
        monitor.execute(Command::new("blockdev-add", node)).await?;
        Ok(())
    }
}

impl Master {
    /// Opens it, and says what it has.
    pub(super) async fn open(
        &self,
        monitor: &Monitor,
        dir: &DaemonDir,
    ) -> Result<Bytes, super::daemon::Error> {
        let context = Context {
            name: FORMAT_NODE,
            format: self.format,
            access: self.access,
            node: &self.credentials.node,
            keys: dir.path(),
        };
        let opening = self.source.opening(&self.credentials.secrets, context);
        let keys = Keys::lay_out(&opening, dir).map_err(|(path, source)| Error::Keys {
            master: self.source.clone(),
            path,
            source,
        })?;
        for object in &opening.objects {
            let added = monitor.execute(Command::new("object-add", object.clone())).await;
            added.map_err(|error| self.without_secrets(error))?;
        }
        let added = monitor.execute_within(Command::new("blockdev-add", opening.node), OPEN).await;
        added.map_err(|error| self.closed(error))?;
        drop(keys);
        // Those that are made of others first.
        for object in opening.objects.iter().rev() {
            let gone = json!({ "id": object["id"] });
            monitor.execute(Command::new("object-del", gone)).await?;
        }
        Ok(self.judge(&monitor.execute(graph::query_nodes()).await?)?)
    }

    /// What a master has that is as it should be.
    fn judge(&self, nodes: &Value) -> Result<Bytes, Error> {
        let nodes = nodes.as_array().into_iter().flatten();
        let node = nodes.into_iter().find(|node| node["node-name"] == FORMAT_NODE);
        let image = node.map_or(&Value::Null, |node| &node["image"]);
        let details = &image["format-specific"]["data"];
        let unusable = |what: String| Err(Error::Unusable { master: self.source.clone(), what });
        if let Some(file) = image["backing-filename"].as_str() {
            return unusable(format!(
                "stands on another image, {file:?}; merge them: qemu-img convert"
            ));
        }
        if let Some(file) = details["data-file"].as_str() {
            return unusable(format!(
                "has its data in another file, {file:?}, which is not opened"
            ));
        }
        if details["corrupt"] == true {
            return unusable("is marked as corrupt; look at it with qemu-img check".to_owned());
        }
        match image["virtual-size"].as_u64() {
            None | Some(0) => unusable("is empty".to_owned()),
            Some(size) => Ok(Bytes::new(size)),
        }
    }

    fn closed(&self, error: monitor::Error) -> super::daemon::Error {
        let master = self.source.clone();
        match error {
            monitor::Error::Refused { desc, .. } if has_no_driver(&desc) => {
                let what =
                    format!("needs a block driver that this qemu-storage-daemon has not: {desc}");
                Error::Unusable { master, what }.into()
            }
            monitor::Error::Refused { desc, .. } => {
                Error::Refused { master, reason: desc.trim().to_owned() }.into()
            }
            monitor::Error::Deadline { .. } => Error::Silent { master }.into(),
            error @ (monitor::Error::Connect(_) | monitor::Error::Closed) => error.into(),
        }
    }

    fn without_secrets(&self, error: monitor::Error) -> super::daemon::Error {
        match error {
            monitor::Error::Refused { .. } => Error::Secrets { master: self.source.clone() }.into(),
            error @ (monitor::Error::Connect(_)
            | monitor::Error::Closed
            | monitor::Error::Deadline { .. }) => error.into(),
        }
    }
}

/// QEMU's words for a driver whose module is missing, and for one that it never had.
fn has_no_driver(desc: &str) -> bool {
    desc.starts_with("Unknown driver") || desc.starts_with("Parameter 'driver' does not accept")
}

impl Keys {
    fn lay_out(opening: &Opening, dir: &DaemonDir) -> Result<Self, (PathBuf, io::Error)> {
        let mut keys = Self { file: None, agent: None };
        if let Some(text) = &opening.key_file {
            let path = dir.key_file();
            keys.file = Some(path.clone());
            write_private(&path, text).map_err(|error| (path, error))?;
        }
        if let Some(key) = &opening.ssh_key {
            let socket = dir.agent_socket();
            let agent = Agent::listen(key.clone(), &socket).map_err(|error| (socket, error))?;
            keys.agent = Some(agent);
        }
        Ok(keys)
    }
}

/// Writes a file that only root may read.
fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options.create(true).write(true).truncate(true).mode(0o600);
    options.open(path)?.write_all(text.as_bytes())
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.agent = None;
        if let Some(path) = &self.file {
            _ = fs::remove_file(path); // it goes with its directory at the latest
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn judged(image: &Value) -> Result<Bytes, Error> {
        let source: Source = "https://host/d.qcow2".parse().unwrap();
        let (node, secrets) = ("node-1".parse().unwrap(), Secrets::default());
        let credentials = Credentials { node, secrets };
        let (format, access) = (Format::Qcow2, Access::Read);
        let master = Master { source, format, access, credentials };
        let other = json!({ "node-name": "#block1", "image": { "virtual-size": 7 } });
        master.judge(&json!([other, { "node-name": "master", "image": image }]))
    }

    #[test]
    fn a_master_that_is_nothing_but_itself_will_do() {
        let details = json!({ "data": { "corrupt": false } });
        let image = json!({ "virtual-size": 4096, "format-specific": details });
        assert_eq!(judged(&image).unwrap().count(), 4096);
    }

    #[test]
    fn a_header_opens_no_files_of_this_machine() {
        let inside = |key: &str, value: Value| json!({ "virtual-size": 4096, "format-specific": { "data": { key: value } } });
        for (image, text) in [
            (json!({ "virtual-size": 4096, "backing-filename": "/etc/shadow" }), "another image"),
            (inside("data-file", "/etc/shadow".into()), "another file"),
            (inside("corrupt", true.into()), "corrupt"),
            (json!({ "virtual-size": 0 }), "empty"),
            (json!({}), "empty"),
        ] {
            let error = judged(&image).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("https://host/d.qcow2"), "{error}");
        }
    }
}
