//! What a daemon is told to open a master.
//!
//! Pure. Every driver has the deadlines it takes (measured, in the notes of each): an open that
//! the driver cannot bound is bounded by whoever waits for it (`qsd::Master`).
//!
//! ```text
//!  <name>: raw, of the size that is known  ->  master: raw or qcow2  ->  nbd, https, iscsi, ...
//! ```

use super::{
    Access, Secrets, Source, SshKey,
    place::{HostKey, Place, Rbd, Server, Tls},
    secrets::{CEPH_KEY, COOKIE, PASSWORD, PSK},
};
use crate::{
    units::Bytes,
    volume::{Format, NodeName},
};
use serde_json::{Value, json};
use std::{fmt, path::Path};

/// How long a server has to answer before it counts as gone, in seconds. A command that opens
/// blocks the daemon for as long.
const PATIENCE: u64 = 5;

/// How long a request waits for an NBD server that went away, in seconds. Below the deadline of
/// every QMP command, since one that changes the graph waits for requests (measured).
const RECONNECT: u64 = 5;

/// The node of the format, below the one that the volume stands on.
pub(crate) const FORMAT_NODE: &str = "master";

/// What else has to be known to open a master.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The name of the node to make.
    pub name: &'a str,
    /// How its bytes lie there.
    pub format: Format,
    /// What is to be done with it.
    pub access: Access,
    /// The size that is known of it; `None` where it is to be found out.
    pub size: Option<Bytes>,
    /// Who we are to an iSCSI target.
    pub node: &'a NodeName,
    /// A directory of the daemon that only root can enter, for keys that QEMU takes from files.
    pub keys: &'a Path,
}

/// What it takes to open a master in a daemon. Holds secrets, and does not show them.
#[derive(Clone)]
pub struct Opening {
    /// Objects to add first, and to remove once the node is open.
    pub objects: Vec<Value>,
    /// The node.
    pub node: Value,
    /// The one file to be there meanwhile, by its name in the directory for keys.
    pub key_file: Option<(&'static str, String)>,
    /// The key that an agent has meanwhile.
    pub ssh_key: Option<SshKey>,
}

impl fmt::Debug for Opening {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Opening(...)")
    }
}

/// What one protocol adds to the objects.
#[derive(Default)]
struct Objects {
    added: Vec<Value>,
    key_file: Option<(&'static str, String)>,
}

impl Source {
    /// What it takes to open it.
    pub fn opening(&self, secrets: &Secrets, context: Context<'_>) -> Opening {
        let mut objects = Objects::default();
        let protocol = self.place.node(secrets, context, &mut objects);
        let read_only = context.access == Access::ReadOnly;
        let mut format = json!({
            "driver": context.format.as_str(),
            "node-name": FORMAT_NODE,
            "read-only": read_only,
            "discard": "unmap",
            "file": protocol,
        });
        format["file"]["read-only"] = read_only.into();
        format["file"]["discard"] = "unmap".into();
        if context.format == Format::Qcow2 {
            format["backing"] = Value::Null; // never what a header says
        }
        let mut node = json!({
            "driver": "raw",
            "node-name": context.name,
            "read-only": read_only,
            "discard": "unmap",
            "file": format,
        });
        if let Some(size) = context.size {
            node["size"] = size.count().into();
        }
        let Objects { added, key_file } = objects;
        Opening { objects: added, node, key_file, ssh_key: secrets.ssh_key() }
    }
}

impl Objects {
    /// Adds a secret, whose id is that of the key it was given under.
    fn secret(&mut self, secrets: &Secrets, key: &'static str, format: &str) -> Option<String> {
        let data = secrets.get(key)?.expose();
        let id = format!("secret-{key}");
        self.added.push(json!({ "qom-type": "secret", "id": id, "data": data, "format": format }));
        Some(id)
    }
}

impl Place {
    /// The node of the protocol.
    fn node(&self, secrets: &Secrets, context: Context<'_>, objects: &mut Objects) -> Value {
        let user = secrets.user(self);
        let mut node = match self {
            Self::Nbd { server, export, tls } => {
                let mut node = nbd(server, export);
                if *tls == Tls::Psk {
                    node["tls-creds"] = tls_psk(secrets, context.keys, objects).into();
                }
                node
            }
            Self::Http { scheme, url, .. } => {
                let mut node =
                    json!({ "driver": scheme.driver(), "url": url, "timeout": PATIENCE });
                set(&mut node, "username", user);
                set(&mut node, "password-secret", objects.secret(secrets, PASSWORD, "raw"));
                set(&mut node, "cookie-secret", objects.secret(secrets, COOKIE, "raw"));
                node
            }
            Self::Iscsi { portal, target, lun, .. } => {
                let mut node = json!({
                    "driver": "iscsi",
                    "transport": "tcp",
                    "portal": portal,
                    "target": target,
                    "lun": lun,
                    "initiator-name": initiator(context.node),
                    "timeout": PATIENCE,
                });
                set(&mut node, "user", user);
                set(&mut node, "password-secret", objects.secret(secrets, PASSWORD, "raw"));
                node
            }
            Self::Ssh { host, port, path, host_key, .. } => {
                let mut node = json!({
                    "driver": "ssh",
                    "server": { "host": host, "port": port.to_string() },
                    "path": path,
                    "host-key-check": host_key.check(),
                });
                set(&mut node, "user", user);
                node
            }
            Self::Nfs { host, path, uid, gid } => {
                let server = json!({ "type": "inet", "host": host });
                let mut node = json!({ "driver": "nfs", "server": server, "path": path });
                set(&mut node, "user", *uid);
                set(&mut node, "group", *gid);
                node
            }
            Self::Rbd(rbd) => rbd.node(user, objects.secret(secrets, CEPH_KEY, "base64")),
            Self::Gluster { host, port, volume, path } => json!({
                "driver": "gluster",
                "volume": volume,
                "path": path,
                "server": [{ "type": "inet", "host": host, "port": port.to_string() }],
            }),
        };
        if node["driver"] == "https" {
            node["sslverify"] = true.into();
        }
        node
    }
}

/// Sets what is there.
fn set<T: Into<Value>>(node: &mut Value, key: &str, value: Option<T>) {
    if let Some(value) = value {
        node[key] = value.into();
    }
}

/// `open-timeout` is spent also where the server says no: it is asked again and again until then.
fn nbd(server: &Server, export: &str) -> Value {
    let server = match server {
        Server::Inet { host, port } => {
            json!({ "type": "inet", "host": host, "port": port.to_string() })
        }
        Server::Unix { path } => json!({ "type": "unix", "path": path }),
    };
    json!({
        "driver": "nbd",
        "server": server,
        "export": export,
        "open-timeout": PATIENCE,
        "reconnect-delay": RECONNECT,
    })
}

/// QEMU reads these from a file of a given name.
fn tls_psk(secrets: &Secrets, keys: &Path, objects: &mut Objects) -> &'static str {
    let text = |key| secrets.get(key).map(|secret| secret.expose().to_owned()).unwrap_or_default();
    let (user, id) = (text(super::secrets::USERNAME), "tls");
    objects.key_file = Some(("keys.psk", format!("{user}:{}\n", text(PSK))));
    objects.added.push(json!({
        "qom-type": "tls-creds-psk",
        "id": id,
        "endpoint": "client",
        "dir": keys,
        "username": user,
    }));
    id
}

/// The name of this node as an iSCSI initiator (RFC 3720 section 3.2.6.3).
fn initiator(node: &NodeName) -> String {
    format!("iqn.2026-11.io.qsd-csi:{}", node.as_str().to_lowercase().replace('_', "-"))
}

impl super::place::Scheme {
    fn driver(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

impl HostKey {
    fn check(&self) -> Value {
        match self {
            Self::Any => json!({ "mode": "none" }),
            Self::Known => json!({ "mode": "known_hosts" }),
            Self::Sha256(digest) => json!({ "mode": "hash", "type": "sha256", "hash": digest }),
        }
    }
}

impl Rbd {
    fn node(&self, user: Option<&str>, key: Option<String>) -> Value {
        let mut node = json!({ "driver": "rbd", "pool": self.pool, "image": self.image });
        set(&mut node, "namespace", self.namespace.as_deref());
        set(&mut node, "snapshot", self.snapshot.as_deref());
        set(&mut node, "conf", self.conf.as_deref());
        set(&mut node, "user", user);
        set(&mut node, "key-secret", key);
        if !self.monitors.is_empty() {
            let monitor =
                |(host, port): &(String, u16)| json!({ "host": host, "port": port.to_string() });
            node["server"] = self.monitors.iter().map(monitor).collect();
        }
        node
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn opening(source: &str, given: &[(&str, &str)], context: Context<'_>) -> Opening {
        let source: Source = source.parse().unwrap();
        let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        source.opening(&Secrets::new(&source, given).unwrap(), context)
    }

    fn opened(source: &str, given: &[(&str, &str)]) -> Opening {
        let node = "Node_1".parse().unwrap();
        let context = Context {
            name: "L1",
            format: Format::Raw,
            access: Access::ReadOnly,
            size: None,
            node: &node,
            keys: Path::new("/run/a"),
        };
        opening(source, given, context)
    }

    #[test]
    fn a_master_is_the_bottom_of_named_nodes_and_its_header_names_nothing() {
        let node = "n".parse().unwrap();
        let context = Context {
            name: "L1",
            format: Format::Qcow2,
            access: Access::ReadWrite,
            size: Some(Bytes::gib(1)),
            node: &node,
            keys: Path::new("/run/a"),
        };
        let top = opening("nbd://h/e", &[], context).node;
        assert_eq!((&top["driver"], &top["node-name"]), (&"raw".into(), &"L1".into()));
        assert_eq!(top["size"], 1 << 30);
        let format = &top["file"];
        assert_eq!((&format["driver"], &format["node-name"]), (&"qcow2".into(), &"master".into()));
        assert_eq!(format.get("backing"), Some(&Value::Null));
        let read_only = [&top, format, &format["file"]].map(|node| node["read-only"].clone());
        assert_eq!(read_only, [false, false, false]);
        assert_eq!(format["file"]["export"], "e");
    }

    #[test]
    fn a_secret_is_an_object_and_in_no_node() {
        let opening =
            opened("https://h/d", &[("username", "bob"), ("password", "hush"), ("cookie", "hush")]);
        assert!(!opening.node.to_string().contains("hush"));
        assert!(!format!("{opening:?}").contains("hush"));
        let file = &opening.node["file"]["file"];
        assert_eq!(file["username"], "bob");
        assert_eq!(file["password-secret"], opening.objects[0]["id"]);
        assert_eq!(file["cookie-secret"], opening.objects[1]["id"]);
        assert_eq!(file["sslverify"], true);
        assert_eq!(opening.objects[0]["data"], "hush");
    }

    #[test]
    fn every_driver_that_knows_a_deadline_has_one() {
        for (source, key) in [
            ("nbd://h", "open-timeout"),
            ("http://h/d", "timeout"),
            ("iscsi://h/iqn.x:a/1", "timeout"),
        ] {
            assert_eq!(opened(source, &[]).node["file"]["file"][key], PATIENCE, "{source}");
        }
    }

    #[test]
    fn keys_for_tls_stand_in_a_file() {
        let key = "0f".repeat(16);
        let opening = opened("nbds://h/e", &[("username", "bob"), ("psk", &key)]);
        assert_eq!(opening.node["file"]["file"]["tls-creds"], "tls");
        assert_eq!(opening.objects[0]["dir"], "/run/a");
        assert_eq!(opening.key_file, Some(("keys.psk", format!("bob:{key}\n"))));
    }

    #[test]
    fn every_other_driver_is_told_what_it_needs() {
        let file = |source: &str| opened(source, &[]).node["file"]["file"].clone();
        let iscsi = file("iscsi://bob@h/iqn.x:a/1");
        assert_eq!(iscsi["initiator-name"], "iqn.2026-11.io.qsd-csi:node-1");
        assert_eq!(iscsi["user"], "bob");
        let ssh = file("ssh://bob@h/d?host_key_check=no");
        assert_eq!((&ssh["user"], &ssh["host-key-check"]["mode"]), (&"bob".into(), &"none".into()));
        let nfs = file("nfs://h/d?uid=0");
        assert_eq!((&nfs["user"], nfs.get("group")), (&0.into(), None));
        let rbd = opened("rbd:p/i:mon_host=a\\:1", &[("userID", "bob"), ("userKey", "aGk=")]);
        let node = &rbd.node["file"]["file"];
        assert_eq!((&node["user"], &node["server"][0]["port"]), (&"bob".into(), &"1".into()));
        assert_eq!(rbd.objects[0]["format"], "base64");
        assert_eq!(file("gluster://h/v/d")["server"][0]["port"], "24007");
    }
}
