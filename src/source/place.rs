//! Which master a text names: the protocols, and what each needs to know.

use super::{
    Access,
    uri::{Rule, Uri},
};
use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use std::{fmt::Write as _, str::FromStr};

/// A master, by its protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nbd { server: Server, export: String, tls: Tls },
    Http { scheme: Scheme, url: String, user: Option<String> },
    Iscsi { portal: String, target: String, lun: u32, user: Option<String> },
    Ssh { host: String, port: u16, path: String, host_key: HostKey, user: Option<String> },
    Nfs { host: String, path: String, uid: Option<u32>, gid: Option<u32> },
    Rbd(Rbd),
    Gluster { host: String, port: u16, volume: String, path: String },
}

/// Where an NBD server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Inet { host: String, port: u16 },
    Unix { path: String },
}

/// Whether the connection is encrypted, with a key that both sides have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tls {
    Psk,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

/// How an SSH server proves that it is the right one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HostKey {
    /// It need not.
    Any,
    /// It is in the `known_hosts` of the daemon's user.
    Known,
    /// Its key has this SHA-256, in hex digits.
    Sha256(String),
}

/// An image in a Ceph cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rbd {
    pub(super) pool: String,
    pub(super) namespace: Option<String>,
    pub(super) image: String,
    pub(super) snapshot: Option<String>,
    pub(super) user: Option<String>,
    pub(super) conf: Option<String>,
    /// Host and port of each monitor.
    pub(super) monitors: Vec<(String, u16)>,
}

impl Place {
    pub(super) fn protocol(&self) -> &'static str {
        match self {
            Self::Nbd { server: Server::Inet { .. }, tls: Tls::Psk, .. } => "nbds",
            Self::Nbd { server: Server::Inet { .. }, tls: Tls::None, .. } => "nbd",
            Self::Nbd { server: Server::Unix { .. }, .. } => "nbd+unix",
            Self::Http { scheme: Scheme::Http, .. } => "http",
            Self::Http { scheme: Scheme::Https, .. } => "https",
            Self::Iscsi { .. } => "iscsi",
            Self::Ssh { .. } => "ssh",
            Self::Nfs { .. } => "nfs",
            Self::Rbd(_) => "rbd",
            Self::Gluster { .. } => "gluster",
        }
    }

    pub(super) fn names_a_file(&self) -> bool {
        match self {
            Self::Nbd { server: Server::Unix { .. }, .. }
            | Self::Rbd(Rbd { conf: Some(_), .. }) => true,
            Self::Nbd { server: Server::Inet { .. }, .. }
            | Self::Http { .. }
            | Self::Iscsi { .. }
            | Self::Ssh { .. }
            | Self::Nfs { .. }
            | Self::Rbd(Rbd { conf: None, .. })
            | Self::Gluster { .. } => false,
        }
    }

    pub(super) fn access(&self) -> Access {
        match self {
            Self::Http { .. } | Self::Rbd(Rbd { snapshot: Some(_), .. }) => Access::Read,
            Self::Nbd { .. }
            | Self::Iscsi { .. }
            | Self::Ssh { .. }
            | Self::Nfs { .. }
            | Self::Rbd(Rbd { snapshot: None, .. })
            | Self::Gluster { .. } => Access::Write,
        }
    }

    /// The user in the text, if there is one.
    pub(super) fn user(&self) -> Option<&str> {
        match self {
            Self::Http { user, .. }
            | Self::Iscsi { user, .. }
            | Self::Ssh { user, .. }
            | Self::Rbd(Rbd { user, .. }) => user.as_deref(),
            Self::Nbd { .. } | Self::Nfs { .. } | Self::Gluster { .. } => None,
        }
    }
}

impl FromStr for Place {
    type Err = Rule;

    fn from_str(text: &str) -> Result<Self, Rule> {
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("percent-encode all that is no plain ASCII character".to_owned());
        }
        if let Some(image) = text.strip_prefix("rbd:") {
            return rbd(image);
        }
        let uri = Uri::parse(text)?;
        match uri.scheme {
            "nbd" => nbd(uri, Tls::None),
            "nbds" => nbd(uri, Tls::Psk),
            "nbd+unix" => nbd_unix(uri),
            "http" => http(uri, Scheme::Http),
            "https" => http(uri, Scheme::Https),
            "iscsi" => iscsi(uri),
            "ssh" => ssh(uri),
            "nfs" => nfs(uri),
            "gluster" => gluster(uri),
            other => Err(format!(
                "its protocol is {other:?}; known are nbd, nbds, nbd+unix, http, https, iscsi, \
                 ssh, nfs, rbd and gluster"
            )),
        }
    }
}

fn nbd(uri: Uri<'_>, tls: Tls) -> Result<Place, Rule> {
    uri.no_user()?;
    let server = Server::Inet { host: uri.some_host()?, port: uri.port.unwrap_or(10809) };
    uri.query.end("none")?;
    Ok(Place::Nbd { server, export: without_slash(&uri.path), tls })
}

fn nbd_unix(mut uri: Uri<'_>) -> Result<Place, Rule> {
    uri.no_user()?;
    if !uri.host.is_empty() || uri.port.is_some() {
        return Err("a Unix socket has no host; write nbd+unix:///export?socket=/path".to_owned());
    }
    let path = uri.query.take("socket").filter(|path| path.starts_with('/'));
    let path = path.ok_or("it has no absolute path to a socket, as in ?socket=/path")?;
    uri.query.end("socket")?;
    let (server, export) = (Server::Unix { path }, without_slash(&uri.path));
    Ok(Place::Nbd { server, export, tls: Tls::None })
}

/// The address goes to the server as it was written, but for the user.
fn http(uri: Uri<'_>, scheme: Scheme) -> Result<Place, Rule> {
    uri.some_host()?;
    let url = format!("{}://{}{}", uri.scheme, uri.authority(uri.port), uri.tail);
    Ok(Place::Http { scheme, url, user: uri.user })
}

fn iscsi(uri: Uri<'_>) -> Result<Place, Rule> {
    uri.some_host()?;
    let rule = "it names no target and unit, as in iscsi://host/iqn.2026-01.org.example:disk/1";
    let parts = without_slash(&uri.path);
    let (target, lun) =
        parts.split_once('/').filter(|(target, _)| !target.is_empty()).ok_or(rule)?;
    let lun = lun.parse().map_err(|_| rule)?;
    let (portal, target) = (uri.authority(Some(uri.port.unwrap_or(3260))), target.to_owned());
    uri.query.end("none")?;
    Ok(Place::Iscsi { portal, target, lun, user: uri.user })
}

fn ssh(mut uri: Uri<'_>) -> Result<Place, Rule> {
    let (host, path, port) = (uri.some_host()?, uri.some_path()?, uri.port.unwrap_or(22));
    let host_key = match uri.query.take("host_key_check") {
        Some(check) => check.parse()?,
        None => HostKey::Known,
    };
    uri.query.end("host_key_check")?;
    Ok(Place::Ssh { host, port, path, host_key, user: uri.user })
}

impl FromStr for HostKey {
    type Err = Rule;

    fn from_str(text: &str) -> Result<Self, Rule> {
        let bad = || {
            "its host_key_check is none of no, yes, SHA256:<base64> (ssh-keygen -l) and \
             sha256:<64 hex digits>"
                .to_owned()
        };
        match text.split_once(':') {
            None if text == "no" => Ok(Self::Any),
            None if text == "yes" => Ok(Self::Known),
            Some(("SHA256", digest)) => {
                let bytes = BASE64_STANDARD_NO_PAD.decode(digest).map_err(|_| bad())?;
                if bytes.len() == 32 { Ok(Self::Sha256(hex(&bytes))) } else { Err(bad()) }
            }
            Some(("sha256", digest)) => {
                let is_hex = digest.bytes().all(|byte| byte.is_ascii_hexdigit());
                let is_digest = is_hex && digest.len() == 64;
                if is_digest { Ok(Self::Sha256(digest.to_lowercase())) } else { Err(bad()) }
            }
            None | Some(_) => Err(bad()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        _ = write!(text, "{byte:02x}"); // a String takes all
        text
    })
}

fn nfs(mut uri: Uri<'_>) -> Result<Place, Rule> {
    uri.no_user()?;
    if uri.port.is_some() {
        return Err("its port cannot be chosen; the server's portmapper tells it".to_owned());
    }
    let (host, path) = (uri.some_host()?, uri.some_path()?);
    let mut number = |key: &str| {
        let number = |value: String| value.parse().map_err(|_| format!("its {key} is no number"));
        uri.query.take(key).map(number).transpose()
    };
    let (uid, gid) = (number("uid")?, number("gid")?);
    uri.query.end("uid and gid")?;
    Ok(Place::Nfs { host, path, uid, gid })
}

fn gluster(uri: Uri<'_>) -> Result<Place, Rule> {
    uri.no_user()?;
    let (host, path) = (uri.some_host()?, without_slash(&uri.some_path()?));
    let (volume, path) = path.split_once('/').ok_or("it names no volume and path in it")?;
    let (volume, path) = (volume.to_owned(), path.to_owned());
    uri.query.end("none")?;
    Ok(Place::Gluster { host, port: uri.port.unwrap_or(24007), volume, path })
}

/// QEMU's own form: `pool[/namespace]/image[@snapshot][:key=value...]`, with a backslash before what
/// is meant literally.
fn rbd(text: &str) -> Result<Place, Rule> {
    let mut parts = split_unescaped(text, ':').into_iter();
    let image = parts.next().unwrap_or_default();
    let (image, snapshot) = match image.rsplit_once('@') {
        Some((image, snapshot)) => (image.to_owned(), Some(snapshot.to_owned())),
        None => (image, None),
    };
    let names: Vec<_> = image.split('/').map(str::to_owned).collect();
    let is_named = names.iter().chain(&snapshot).all(|name| !name.is_empty());
    let (pool, namespace, image) = match &names[..] {
        [pool, image] if is_named => (pool, None, image),
        [pool, namespace, image] if is_named => (pool, Some(namespace.clone()), image),
        _ => return Err("it names no image, as in rbd:pool/image".to_owned()),
    };
    let mut rbd = Rbd {
        pool: pool.clone(),
        namespace,
        image: image.clone(),
        snapshot,
        user: None,
        conf: None,
        monitors: Vec::new(),
    };
    for option in parts {
        rbd.set(&option)?;
    }
    Ok(Place::Rbd(rbd))
}

impl Rbd {
    fn set(&mut self, option: &str) -> Result<(), Rule> {
        let (key, value) = option.split_once('=').ok_or("one of its options has no value")?;
        match key {
            "id" => self.user = Some(value.to_owned()),
            "conf" if value.starts_with('/') => self.conf = Some(value.to_owned()),
            "conf" => return Err("its conf is no absolute path".to_owned()),
            "mon_host" => {
                let monitors = value.split([';', ',']).map(monitor);
                self.monitors = monitors.collect::<Result<_, Rule>>()?;
            }
            "key" | "keyring" => {
                return Err(format!("it has a {key} in it; give that as a secret"));
            }
            _ => return Err(format!("its option {key:?} is none of id, conf and mon_host")),
        }
        Ok(())
    }
}

fn monitor(text: &str) -> Result<(String, u16), Rule> {
    let uri = format!("rbd://{text}/");
    let uri = Uri::parse(&uri)?;
    Ok((uri.some_host()?, uri.port.unwrap_or(6789)))
}

/// The parts between separators that have no backslash before them; the backslashes go.
fn split_unescaped(text: &str, separator: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        let literal = if letter == '\\' { letters.next() } else { None };
        match (literal, parts.last_mut()) {
            (None, _) if letter == separator => parts.push(String::new()),
            (literal, Some(part)) => part.push(literal.unwrap_or(letter)),
            (_, None) => {}
        }
    }
    parts
}

fn without_slash(path: &str) -> String {
    path.strip_prefix('/').unwrap_or(path).to_owned()
}

#[cfg(test)]
mod test {
    use super::*;

    fn place(text: &str) -> Place {
        text.parse().unwrap()
    }

    #[test]
    fn every_protocol_is_understood() {
        let inet = |host: &str, port| Server::Inet { host: host.into(), port };
        for (text, server, export, tls) in [
            ("nbd://host", inet("host", 10809), "", Tls::None),
            ("nbds://host:7/a%2Fb/c", inet("host", 7), "a/b/c", Tls::Psk),
            ("nbd+unix:///e?socket=/s", Server::Unix { path: "/s".into() }, "e", Tls::None),
        ] {
            assert_eq!(place(text), Place::Nbd { server, export: export.into(), tls });
        }
        assert_eq!(
            place("https://bob@[::1]:8443/a%20b?x=1&y"),
            Place::Http {
                scheme: Scheme::Https,
                url: "https://[::1]:8443/a%20b?x=1&y".into(),
                user: Some("bob".into()),
            }
        );
        assert_eq!(
            place("iscsi://bob@host/iqn.2026-01.org.example:disk/12"),
            Place::Iscsi {
                portal: "host:3260".into(),
                target: "iqn.2026-01.org.example:disk".into(),
                lun: 12,
                user: Some("bob".into()),
            }
        );
        assert_eq!(
            place("nfs://host/export/d.raw?gid=7"),
            Place::Nfs {
                host: "host".into(),
                path: "/export/d.raw".into(),
                uid: None,
                gid: Some(7)
            }
        );
        assert_eq!(
            place("gluster://host/vol/a/d.raw"),
            Place::Gluster {
                host: "host".into(),
                port: 24007,
                volume: "vol".into(),
                path: "a/d.raw".into(),
            }
        );
    }

    #[test]
    fn an_image_in_ceph_is_named_as_qemu_does() {
        let rbd = Rbd {
            pool: "p".into(),
            namespace: None,
            image: "i".into(),
            snapshot: None,
            user: None,
            conf: None,
            monitors: Vec::new(),
        };
        assert_eq!(place("rbd:p/i"), Place::Rbd(rbd.clone()));
        let full = Rbd {
            namespace: Some("n".into()),
            snapshot: Some("s".into()),
            user: Some("admin".into()),
            conf: Some("/c".into()),
            monitors: vec![("a".into(), 1), ("b".into(), 6789), ("::1".into(), 2)],
            ..rbd
        };
        let text = "rbd:p/n/i@s:id=admin:conf=/c:mon_host=a\\:1;b;[\\:\\:1]\\:2";
        assert_eq!(place(text), Place::Rbd(full));
    }

    #[test]
    fn a_host_key_is_written_as_openssh_or_qemu_does() {
        let key = |text: &str| match place(&format!("ssh://h/d{text}")) {
            Place::Ssh { host_key, .. } => host_key,
            other => panic!("{other:?}"),
        };
        assert_eq!(key(""), HostKey::Known);
        assert_eq!(key("?host_key_check=no"), HostKey::Any);
        let hex = HostKey::Sha256("00".repeat(31) + "ff");
        let base64 = format!("{}AP8", "A".repeat(40));
        assert_eq!(key(&format!("?host_key_check=SHA256:{base64}")), hex);
        assert_eq!(key(&format!("?host_key_check=sha256:{}fF", "00".repeat(31))), hex);
    }

    #[test]
    fn what_names_no_master_says_why() {
        for (text, rule) in [
            ("", "no protocol"),
            ("ftp://h/d", "\"ftp\""),
            ("nbd:///e", "no host"),
            ("nbd://bob@h", "no users"),
            ("nbd://h?x", "\"x\""),
            ("nbd+unix:///e", "socket"),
            ("nbd+unix://h/e?socket=/s", "no host"),
            ("nbd+unix:///e?socket=s", "absolute"),
            ("http:///d", "no host"),
            ("http://h/a b", "percent-encode"),
            ("http://h/é", "percent-encode"),
            ("iscsi://h", "target"),
            ("iscsi://h/iqn", "target"),
            ("iscsi://h/iqn/x", "target"),
            ("ssh://h", "no path"),
            ("ssh://h/dir/", "no path"),
            ("ssh://h/d?host_key_check=md5:x", "host_key_check"),
            ("ssh://h/d?host_key_check=SHA256:AAAA", "host_key_check"),
            ("nfs://h:1/d", "port"),
            ("nfs://h/d?uid=x", "uid"),
            ("nfs://h/d?version=4", "\"version\""),
            ("gluster://h/vol", "volume"),
            ("rbd:image", "no image"),
            ("rbd:p/", "no image"),
            ("rbd:p/i@", "no image"),
            ("rbd:p/i:conf", "no value"),
            ("rbd:p/i:conf=c", "absolute"),
            ("rbd:p/i:x=1", "\"x\""),
            ("rbd:p/i:mon_host=", "no host"),
        ] {
            let error = text.parse::<Place>().unwrap_err();
            assert!(error.contains(rule), "{text}: {error}");
        }
    }
}
