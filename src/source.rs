//! Remote masters: disks on other machines that volumes start from (parameter `source`).
//!
//! Owns what may stand in such a text, which secrets go with it, and what QEMU is told of both:
//! nothing else reads them. Pure; a daemon does the rest (`qsd::Master`).
//!
//! ```text
//!  nbd://host[:port][/export]         nbds:// the same with TLS     nbd+unix:///[export]?socket=/path
//!  http://host/path                   https://host/path             read-only
//!  iscsi://[user@]host[:port]/target/lun
//!  ssh://[user@]host[:port]/path[?host_key_check=no|yes|SHA256:<base64>|sha256:<hex>]
//!  nfs://host/path[?uid=N&gid=N]
//!  rbd:pool[/namespace]/image[@snapshot][:id=USER][:conf=PATH][:mon_host=HOST[;HOST...]]
//!  gluster://host[:port]/volume/path
//! ```
//!
//! The texts are those that QEMU's own tools take. A password has no place in them: it would be
//! recorded and shown wherever the text is. A user name may be in it, and is not shown.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod node;
mod place;
mod secrets;
mod ssh_key;
mod uri;

pub use node::{Context, Opening};
pub use secrets::{Secret, SecretError, Secrets};
pub use ssh_key::SshKey;

use place::Place;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A text that names no master.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{shown:?} is no source: {rule}")]
pub struct InvalidSource {
    /// The text, without what may be a password.
    shown: String,
    /// What is wrong with it.
    rule: String,
}

/// Where a master is, and how it is reached.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Source {
    text: String,
    place: Place,
}

/// What is done with a disk, or can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read.
    Read,
    /// It is written, too.
    Write,
}

impl Source {
    /// What the protocol lets one do; the server may be stricter.
    pub fn access(&self) -> Access {
        self.place.access()
    }

    /// Whether it leads through a file of this machine that its text names.
    pub fn names_a_file(&self) -> bool {
        self.place.names_a_file()
    }

    /// The name of the protocol, as its text begins.
    pub fn protocol(&self) -> &'static str {
        self.place.protocol()
    }
}

impl FromStr for Source {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<Self, InvalidSource> {
        let place = text
            .parse::<Place>()
            .map_err(|rule| InvalidSource { shown: shown_in_error(text), rule })?;
        Ok(Self { text: text.to_owned(), place })
    }
}

impl TryFrom<String> for Source {
    type Error = InvalidSource;
    fn try_from(text: String) -> Result<Self, InvalidSource> {
        text.parse()
    }
}

/// All of the text, for a record. People are shown less.
impl From<Source> for String {
    fn from(source: Source) -> Self {
        source.text
    }
}

/// The text without user information, and without the query of a web address, which may hold a
/// signature.
impl fmt::Display for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Http { .. } => out.write_str(&without_user(&without_query(&self.text))),
            Place::Nbd { .. }
            | Place::Iscsi { .. }
            | Place::Ssh { .. }
            | Place::Nfs { .. }
            | Place::Rbd { .. }
            | Place::Gluster { .. } => out.write_str(&without_user(&self.text)),
        }
    }
}

/// As it is shown: records are the only place for all of the text.
impl fmt::Debug for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Source({self})")
    }
}

fn without_user(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

fn without_query(text: &str) -> String {
    text.split_once('?').map_or_else(|| text.to_owned(), |(head, _)| format!("{head}?..."))
}

/// Of a text that makes no sense nobody knows where a password would end.
fn shown_in_error(text: &str) -> String {
    match text.split_once(':') {
        Some((before, _)) if before.contains('@') => "...".to_owned(),
        Some((scheme, rest)) if rest.contains('@') || scheme == "rbd" => format!("{scheme}:..."),
        None if text.contains('@') => "...".to_owned(),
        Some(_) | None => without_query(text),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_source_is_shown_without_who_uses_it() {
        for (text, shown) in [
            ("ssh://bob@host/d.raw", "ssh://host/d.raw"),
            ("iscsi://bob@host/iqn.x:a/1", "iscsi://host/iqn.x:a/1"),
            ("https://bob@host/a@b?sig=abc", "https://host/a@b?..."),
            ("nbd+unix:///e?socket=/a@b", "nbd+unix:///e?socket=/a@b"),
            ("rbd:pool/image@snap", "rbd:pool/image@snap"),
        ] {
            let source: Source = text.parse().unwrap();
            assert_eq!(source.to_string(), shown);
            assert_eq!(format!("{source:?}"), format!("Source({shown})"));
            assert_eq!(String::from(source), text);
        }
    }

    #[test]
    fn a_password_is_refused_and_not_shown() {
        for text in [
            "https://bob:hush@host/d",
            "https://bob:hu/hush@host/d",
            "https://bob:hush/hu@host/d",
            "hush@host:80/d",
            "bob%hush@host://d",
            "bob:hush://d@host",
            "iscsi://bob%hush@host/iqn.x:a/1",
            "iscsi://bob:hush@host/iqn.x:a/1",
            "ssh://bob:hush@host/d",
            "nbd://:hush@host/d",
            "rbd:pool/image:key=hush@",
            "bob:hush@host",
        ] {
            let error = text.parse::<Source>().unwrap_err().to_string();
            assert!(!error.contains("hush"), "{error}");
        }
        let error = "https://bob:hush@host/d".parse::<Source>().unwrap_err().to_string();
        assert!(error.contains("secret"), "{error}");
        let error = "rbd:pool/image:key=abc".parse::<Source>().unwrap_err().to_string();
        assert!(error.contains("secret") && !error.contains("abc"), "{error}");
    }

    #[test]
    fn what_can_be_written_depends_on_the_protocol() {
        for (text, access) in [
            ("nbd://host", Access::Write),
            ("http://host/d", Access::Read),
            ("https://host/d", Access::Read),
            ("ssh://host/d", Access::Write),
            ("rbd:pool/image", Access::Write),
            ("rbd:pool/image@snap", Access::Read),
        ] {
            assert_eq!(text.parse::<Source>().unwrap().access(), access, "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,60}") {
            _ = text.parse::<Source>();
        }

        #[test]
        fn what_looks_like_a_source_is_read_back(
            scheme in "nbd|https|iscsi|ssh|nfs|gluster",
            rest in "[a-z@:/?%=.\\[\\]0-9]{0,40}",
        ) {
            let text = format!("{scheme}://{rest}");
            if let Ok(source) = text.parse::<Source>() {
                prop_assert_eq!(String::from(source), text);
            }
        }
    }
}
