//! What a daemon is told to open a master.
//!
//! Pure. Every driver has the deadlines it takes (measured, in the notes of each): an open that
//! the driver cannot bound is bounded by whoever waits for it (`qsd::Master`).

use super::{
    Access, Secrets, Source, SshKey,
    place::{HostKey, Place, Rbd, Server, Tls},
    secrets::{CEPH_KEY, COOKIE, PASSWORD, PSK, USERNAME},
};
use crate::volume::{Format, NodeName};
use serde_json::{Value, json};
use std::{fmt, path::Path};

/// How long an NBD server has to let us in, in seconds. All of it is spent where it says no, too.
const WELCOME: u64 = 5;

/// How long a request may take, in seconds: of HTTP the whole transfer, on however slow a line, of
/// NBD the time until a server that went away is there again. Then the guest sees an error.
const PATIENCE: u64 = 20;

/// How long an iSCSI target has for one attempt at a request, in seconds; there are eight, and two
/// seconds between them (measured).
const ATTEMPT: u64 = 10;

/// Has a web server close the connection after each answer.
///
/// QEMU loses an answer that is there as soon as the request is sent, which only happens on a
/// connection that is open already: the guest's read then never ends. With nginx on the same
/// machine one of some hundred requests did, in 10.0.13 and 11.1.3, and none of 24,000 with this.
/// A cookie is the one header that can be chosen; its line ends in it.
const NO_REUSE: &str = "\r\nConnection: close";

/// What else has to be known to open a master.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The name of the node to make.
    pub name: &'static str,
    /// How its bytes lie there.
    pub format: Format,
    /// What is to be done with it.
    pub access: Access,
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
    /// What is to be in the file for keys meanwhile.
    pub key_file: Option<String>,
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
    key_file: Option<String>,
}

impl Source {
    /// What it takes to open it.
    pub fn opening(&self, secrets: &Secrets, context: Context<'_>) -> Opening {
        let mut objects = Objects::default();
        let protocol = self.place.node(secrets, context, &mut objects);
        let read_only = context.access == Access::Read;
        let mut node = json!({
            "driver": context.format.as_str(),
            "node-name": context.name,
            "read-only": read_only,
            "discard": "unmap",
            "file": protocol,
        });
        node["file"]["read-only"] = read_only.into();
        node["file"]["discard"] = "unmap".into();
        if context.format == Format::Qcow2 {
            node["backing"] = Value::Null; // never what a header says
        }
        let Objects { added, key_file } = objects;
        Opening { objects: added, node, key_file, ssh_key: secrets.ssh_key() }
    }
}

impl Objects {
    /// Adds a secret, whose id is that of the key it was given under.
    fn secret(&mut self, secrets: &Secrets, key: &'static str, format: &str) -> Option<String> {
        let data = secrets.get(key)?.expose();
        Some(self.add(key, data, format))
    }

    fn cookie(&mut self, secrets: &Secrets) -> Option<String> {
        let cookie = secrets.get(COOKIE)?.expose();
        Some(self.add(COOKIE, &format!("{cookie}{NO_REUSE}"), "raw"))
    }

    fn add(&mut self, key: &str, data: &str, format: &str) -> String {
        let id = format!("secret-{key}");
        let secret = json!({ "qom-type": "secret", "id": id, "data": data, "format": format });
        self.added.push(secret);
        id
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
                match objects.cookie(secrets) {
                    Some(id) => node["cookie-secret"] = id.into(),
                    None => node["cookie"] = format!("qsd-csi=1{NO_REUSE}").into(),
                }
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
                    "timeout": ATTEMPT,
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
        "open-timeout": WELCOME,
        "reconnect-delay": PATIENCE,
    })
}

/// QEMU reads these from a file of a given name.
fn tls_psk(secrets: &Secrets, keys: &Path, objects: &mut Objects) -> &'static str {
    let text = |key| secrets.get(key).map(|secret| secret.expose().to_owned()).unwrap_or_default();
    let (user, id) = (text(USERNAME), "tls");
    objects.key_file = Some(format!("{user}:{}\n", text(PSK)));
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
            name: "master",
            format: Format::Raw,
            access: Access::Read,
            node: &node,
            keys: Path::new("/run/a"),
        };
        opening(source, given, context)
    }

    #[test]
    fn a_master_is_what_was_said_and_not_what_its_header_says() {
        let node = "n".parse().unwrap();
        let context = Context {
            name: "master",
            format: Format::Qcow2,
            access: Access::Write,
            node: &node,
            keys: Path::new("/run/a"),
        };
        let node = opening("nbd://h/e", &[], context).node;
        assert_eq!((&node["driver"], &node["node-name"]), (&"qcow2".into(), &"master".into()));
        assert_eq!(node.get("backing"), Some(&Value::Null));
        assert_eq!([&node["read-only"], &node["file"]["read-only"]], [false, false]);
        assert_eq!(node["file"]["export"], "e");
    }

    #[test]
    fn a_secret_is_an_object_and_in_no_node() {
        let opening =
            opened("https://h/d", &[("username", "bob"), ("password", "hush"), ("cookie", "hush")]);
        assert!(!opening.node.to_string().contains("hush"));
        assert!(!format!("{opening:?}").contains("hush"));
        let file = &opening.node["file"];
        assert_eq!(file["username"], "bob");
        assert_eq!(file["password-secret"], opening.objects[0]["id"]);
        assert_eq!(file["cookie-secret"], opening.objects[1]["id"]);
        assert_eq!(file["sslverify"], true);
        assert_eq!(opening.objects[0]["data"], "hush");
        assert_eq!(opening.objects[1]["data"], "hush\r\nConnection: close");
    }

    #[test]
    fn every_driver_that_knows_a_deadline_has_one() {
        for (source, key, seconds) in [
            ("nbd://h", "open-timeout", WELCOME),
            ("nbd://h", "reconnect-delay", PATIENCE),
            ("http://h/d", "timeout", PATIENCE),
            ("iscsi://h/iqn.x:a/1", "timeout", ATTEMPT),
        ] {
            assert_eq!(opened(source, &[]).node["file"][key], seconds, "{source}");
        }
    }

    #[test]
    fn keys_for_tls_stand_in_a_file() {
        let key = "0f".repeat(16);
        let opening = opened("nbds://h/e", &[("username", "bob"), ("psk", &key)]);
        assert_eq!(opening.node["file"]["tls-creds"], "tls");
        assert_eq!(opening.objects[0]["dir"], "/run/a");
        assert_eq!(opening.key_file, Some(format!("bob:{key}\n")));
    }

    #[test]
    fn every_other_driver_is_told_what_it_needs() {
        let file = |source: &str| opened(source, &[]).node["file"].clone();
        let iscsi = file("iscsi://bob@h/iqn.x:a/1");
        assert_eq!(iscsi["initiator-name"], "iqn.2026-11.io.qsd-csi:node-1");
        assert_eq!(iscsi["user"], "bob");
        let ssh = file("ssh://bob@h/d?host_key_check=no");
        assert_eq!((&ssh["user"], &ssh["host-key-check"]["mode"]), (&"bob".into(), &"none".into()));
        let nfs = file("nfs://h/d?uid=0");
        assert_eq!((&nfs["user"], nfs.get("group")), (&0.into(), None));
        let rbd = opened("rbd:p/i:mon_host=a\\:1", &[("userID", "bob"), ("userKey", "aGk=")]);
        let node = &rbd.node["file"];
        assert_eq!((&node["user"], &node["server"][0]["port"]), (&"bob".into(), &"1".into()));
        assert_eq!(rbd.objects[0]["format"], "base64");
        assert_eq!(file("gluster://h/v/d")["server"][0]["port"], "24007");
    }
}
