//! The secrets that go with a source, and what keeps them from being seen.
//!
//! They are those of Kubernetes' own kinds of secrets, and Ceph's:
//!
//! ```text
//!  http https   username password cookie     nbds   username psk
//!  iscsi        username password            rbd    userID userKey
//!  ssh          username ssh-privatekey      nbd nbd+unix nfs gluster   (none)
//! ```
//!
//! An unknown key is refused: it is a known one misspelt, or meant for another protocol, and the
//! server would only say that it lets nobody in.

use super::{Source, SshKey, place::Place, place::Tls};
use std::{collections::BTreeMap, fmt};

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// What it takes to be let in, checked against the source that it is for.
///
/// Not `Serialize`: it is only written where `expose` is called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets {
    given: BTreeMap<String, Secret>,
}

/// Secrets that do not go with the source. The values are not in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// No such key.
    #[error("secrets: unknown key {key:?}; known for {protocol} are {}", known(expected))]
    Unknown {
        /// The key.
        key: String,
        /// The protocol.
        protocol: &'static str,
        /// The keys it has.
        expected: &'static [&'static str],
    },
    /// The key is missing.
    #[error("secrets: {key} is missing; {why}")]
    Missing {
        /// The key.
        key: &'static str,
        /// What it is needed for.
        why: &'static str,
    },
    /// The value cannot be used.
    #[error("secrets: {key} {rule}")]
    Value {
        /// The key.
        key: String,
        /// What is wrong with it.
        rule: &'static str,
    },
}

/// The keys that Kubernetes has for the parts of a login.
pub(super) const USERNAME: &str = "username";
pub(super) const PASSWORD: &str = "password";
pub(super) const COOKIE: &str = "cookie";
pub(super) const SSH_KEY: &str = "ssh-privatekey";
pub(super) const PSK: &str = "psk";
pub(super) const CEPH_USER: &str = "userID";
pub(super) const CEPH_KEY: &str = "userKey";

impl Secret {
    /// A text that is to be shown nowhere from now on.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text itself, for whoever it is meant for.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("(secret)")
    }
}

impl Secrets {
    /// The secrets of a CSI request, checked against the source they are for.
    pub fn new(
        source: &Source,
        given: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, SecretError> {
        let expected = keys(&source.place);
        let mut secrets = Self::default();
        for (key, value) in given {
            if !expected.contains(&key.as_str()) {
                return Err(SecretError::Unknown { key, protocol: source.protocol(), expected });
            }
            if value.is_empty() {
                return Err(SecretError::Value { key, rule: "is empty" });
            }
            if key != SSH_KEY && value.chars().any(char::is_control) {
                return Err(SecretError::Value { key, rule: "has a control character in it" });
            }
            secrets.given.insert(key, Secret(value));
        }
        secrets.check(&source.place)?;
        Ok(secrets)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.given.is_empty()
    }

    /// All of them, for the one file that keeps them.
    pub fn expose(&self) -> BTreeMap<&str, &str> {
        self.given.iter().map(|(key, value)| (key.as_str(), value.expose())).collect()
    }

    pub(super) fn get(&self, key: &str) -> Option<&Secret> {
        self.given.get(key)
    }

    /// The user to be: of the secrets, or of the source.
    pub(super) fn user<'a>(&'a self, place: &'a Place) -> Option<&'a str> {
        let user = self.get(USERNAME).or_else(|| self.get(CEPH_USER)).map(Secret::expose);
        user.or_else(|| place.user())
    }

    /// The key to log in with by SSH; it was checked.
    pub(super) fn ssh_key(&self) -> Option<SshKey> {
        self.get(SSH_KEY).and_then(|key| SshKey::parse(key.expose()).ok())
    }

    fn check(&self, place: &Place) -> Result<(), SecretError> {
        if let (Some(user), Some(other)) = (self.user(place), place.user())
            && user != other
        {
            let rule = "is another user than that of the source";
            return Err(SecretError::Value { key: USERNAME.to_owned(), rule });
        }
        if self.get(PASSWORD).is_some() && self.user(place).is_none() {
            return Err(SecretError::Missing { key: USERNAME, why: "there is a password" });
        }
        if let Some(key) = self.get(SSH_KEY) {
            let bad = |rule| SecretError::Value { key: SSH_KEY.to_owned(), rule };
            SshKey::parse(key.expose()).map_err(bad)?;
        }
        match place {
            Place::Nbd { tls: Tls::Psk, .. } => self.check_psk(),
            Place::Nbd { tls: Tls::None, .. }
            | Place::Http { .. }
            | Place::Iscsi { .. }
            | Place::Ssh { .. }
            | Place::Nfs { .. }
            | Place::Rbd(_)
            | Place::Gluster { .. } => Ok(()),
        }
    }

    /// Both stand in one line of a file, with a colon between them.
    fn check_psk(&self) -> Result<(), SecretError> {
        let why = "nbds needs it";
        let user = self.get(USERNAME).ok_or(SecretError::Missing { key: USERNAME, why })?;
        let key = self.get(PSK).ok_or(SecretError::Missing { key: PSK, why })?;
        if user.expose().contains(':') {
            let rule = "has a colon in it";
            return Err(SecretError::Value { key: USERNAME.to_owned(), rule });
        }
        let is_hex = key.expose().bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_hex || key.expose().len() < 32 || !key.expose().len().is_multiple_of(2) {
            let rule = "is no key of 32 or more hex digits";
            return Err(SecretError::Value { key: PSK.to_owned(), rule });
        }
        Ok(())
    }
}

/// The keys that a protocol has.
fn keys(place: &Place) -> &'static [&'static str] {
    match place {
        Place::Nbd { tls: Tls::Psk, .. } => &[USERNAME, PSK],
        Place::Nbd { tls: Tls::None, .. } | Place::Nfs { .. } | Place::Gluster { .. } => &[],
        Place::Http { .. } => &[USERNAME, PASSWORD, COOKIE],
        Place::Iscsi { .. } => &[USERNAME, PASSWORD],
        Place::Ssh { .. } => &[USERNAME, SSH_KEY],
        Place::Rbd(_) => &[CEPH_USER, CEPH_KEY],
    }
}

fn known(keys: &[&str]) -> String {
    if keys.is_empty() { "none".to_owned() } else { keys.join(", ") }
}

#[cfg(test)]
mod test {
    use super::*;

    fn secrets(source: &str, given: &[(&str, &str)]) -> Result<Secrets, SecretError> {
        let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Secrets::new(&source.parse().unwrap(), given)
    }

    #[test]
    fn no_secret_is_shown() {
        let kept = secrets("https://h/d", &[("username", "bob"), ("password", "hush")]).unwrap();
        assert!(!format!("{kept:?}").contains("hush"));
        assert_eq!(kept.expose(), [("password", "hush"), ("username", "bob")].into());
    }

    #[test]
    fn what_does_not_go_with_the_source_is_refused_without_its_value() {
        let psk = "0".repeat(32);
        for (source, given, text) in [
            ("https://h/d", &[("passphrase", "hush")][..], "unknown key \"passphrase\""),
            ("nfs://h/d", &[("username", "hush")], "known for nfs are none"),
            ("https://h/d", &[("password", "hush")], "username is missing"),
            ("https://bob@h/d", &[("username", "hush")], "another user"),
            ("https://h/d", &[("username", "hu\nsh")], "control character"),
            ("https://h/d", &[("username", "")], "empty"),
            ("ssh://h/d", &[("ssh-privatekey", "hush")], "ssh-privatekey"),
            ("nbds://h", &[("username", "hush")], "psk is missing"),
            ("nbds://h", &[("psk", &psk)], "username is missing"),
            ("nbds://h", &[("username", "a:b"), ("psk", &psk)], "colon"),
            ("nbds://h", &[("username", "a"), ("psk", "hush")], "hex digits"),
        ] {
            let error = secrets(source, given).unwrap_err().to_string();
            assert!(error.contains(text) && !error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_user_in_the_source_will_do() {
        assert!(secrets("iscsi://bob@h/iqn.x:a/1", &[("password", "hush")]).is_ok());
        let same = [("password", "hush"), ("username", "bob")];
        assert!(secrets("iscsi://bob@h/iqn.x:a/1", &same).is_ok());
    }
}
