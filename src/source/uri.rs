//! The parts of a URI, each decoded once.

use std::net::Ipv6Addr;

/// `scheme://[user@][host][:port]/path[?query]`, taken apart.
#[derive(Debug)]
pub(super) struct Uri<'a> {
    pub(super) scheme: &'a str,
    pub(super) user: Option<String>,
    /// Without brackets; empty where there is none.
    pub(super) host: String,
    pub(super) port: Option<u16>,
    /// With its leading slash, decoded; empty where there is none.
    pub(super) path: String,
    pub(super) query: Query,
    /// All behind the host and port, as it was written.
    pub(super) tail: &'a str,
}

/// The pairs behind the question mark; each is taken out by whoever knows it.
#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

/// What is wrong, for a person.
pub(super) type Rule = String;

impl<'a> Uri<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, Rule> {
        let is_scheme =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+');
        // What is not one may be a password, and is not to be told of.
        let parts = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme));
        let (scheme, rest) = parts.ok_or("it has no protocol, as in nbd://host")?;
        if rest.contains('#') {
            return Err("it has a fragment, which means nothing here".to_owned());
        }
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at(end);
        let (user, place) = match authority.rsplit_once('@') {
            Some((user, place)) => (Some(user_of(user)?), place),
            None => (None, authority),
        };
        let (host, port) = host_and_port(place)?;
        let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
        let (path, query) = (decoded(path)?, Query::parse(query)?);
        Ok(Self { scheme, user, host, port, path, query, tail })
    }

    /// The host, which must be there.
    pub(super) fn some_host(&self) -> Result<String, Rule> {
        if self.host.is_empty() {
            Err("it names no host".to_owned())
        } else {
            Ok(self.host.clone())
        }
    }

    /// The path, which must lead somewhere.
    pub(super) fn some_path(&self) -> Result<String, Rule> {
        let leads_nowhere = self.path.is_empty() || self.path.ends_with('/');
        if leads_nowhere {
            Err("it has no path to a disk".to_owned())
        } else {
            Ok(self.path.clone())
        }
    }

    /// The host and port as one text, an IPv6 address in brackets.
    pub(super) fn authority(&self, port: Option<u16>) -> String {
        let host =
            if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"))
    }

    pub(super) fn no_user(&self) -> Result<(), Rule> {
        match self.user {
            Some(_) => Err("this protocol has no users".to_owned()),
            None => Ok(()),
        }
    }
}

impl Query {
    fn parse(text: &str) -> Result<Self, Rule> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decoded(key)?, decoded(value)?))
        };
        pairs.map(pair).collect::<Result<_, Rule>>().map(Self)
    }

    /// Takes the value of a key that is known.
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let at = self.0.iter().position(|(name, _)| name == key)?;
        Some(self.0.swap_remove(at).1)
    }

    /// An error for whatever nobody took.
    pub(super) fn end(self, known: &str) -> Result<(), Rule> {
        match self.0.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("its query has {key:?}; known are {known}")),
        }
    }
}

fn user_of(text: &str) -> Result<String, Rule> {
    // `user%password` is how QEMU's iSCSI has it.
    if text.contains([':', '%']) {
        return Err("it has a password in it, or a user with : or % in the name; give these as a \
                    secret"
            .to_owned());
    }
    if text.is_empty() { Err("its user is empty".to_owned()) } else { Ok(text.to_owned()) }
}

fn host_and_port(text: &str) -> Result<(String, Option<u16>), Rule> {
    // It may be the beginning of a password, and is not to be told of.
    let bad_port = || "its port is no number from 1 to 65535".to_owned();
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or("its [ has no ]")?;
            address.parse::<Ipv6Addr>().map_err(|_| format!("{address:?} is no IPv6 address"))?;
            (
                address,
                if rest.is_empty() { None } else { Some(rest.strip_prefix(':').unwrap_or("")) },
            )
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
    if !host.bytes().all(plain) {
        return Err("its host has a character that no host has".to_owned());
    }
    let number = |port: &str| port.parse::<u16>().ok().filter(|number| *number > 0);
    let port = port.map(|port| number(port).ok_or_else(bad_port)).transpose()?;
    Ok((host.to_owned(), port))
}

/// Without percent-encoding. What comes out is text without control characters.
pub(super) fn decoded(text: &str) -> Result<String, Rule> {
    let bad = || "its percent-encoding makes no sense".to_owned();
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = rest.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| str::from_utf8(digits).ok()).ok_or_else(bad)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| bad())?);
        rest = &rest[2..];
    }
    let text = String::from_utf8(bytes).map_err(|_| bad())?;
    if text.chars().any(char::is_control) {
        return Err("it has a control character".to_owned());
    }
    Ok(text)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_parts_are_found_and_decoded() {
        let mut uri = Uri::parse("ssh://bob@[::1]:22/a%20b/c%25?x=1&y=%2f").unwrap();
        assert_eq!((uri.scheme, uri.user.as_deref()), ("ssh", Some("bob")));
        assert_eq!((uri.host.as_str(), uri.port), ("::1", Some(22)));
        assert_eq!(uri.path, "/a b/c%");
        assert_eq!(uri.authority(Some(7)), "[::1]:7");
        assert_eq!(uri.query.take("y").as_deref(), Some("/"));
        assert_eq!(uri.query.take("y"), None);
        assert!(uri.query.end("z").unwrap_err().contains("\"x\""));
    }

    #[test]
    fn what_makes_no_sense_says_what() {
        for (text, rule) in [
            ("host/path", "no protocol"),
            ("nbd://h/a#b", "fragment"),
            ("nbd://h:0", "its port is no number"),
            ("nbd://h:70000", "its port is no number"),
            ("nbd://h:", "its port is no number"),
            ("nbd://[::1", "no ]"),
            ("nbd://[x]", "IPv6"),
            ("nbd://[::1]x", "port"),
            ("nbd://a,b", "host"),
            ("nbd://@h", "user is empty"),
            ("nbd://h/%zz", "percent"),
            ("nbd://h/%2", "percent"),
            ("nbd://h/%00", "control"),
            ("nbd://h/%ff", "percent"),
        ] {
            let error = Uri::parse(text).unwrap_err();
            assert!(error.contains(rule), "{text}: {error}");
        }
    }
}
