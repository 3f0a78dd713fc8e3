//! A private key for SSH, and the little of the agent's protocol that a login needs.
//!
//! QEMU knows no private keys: its SSH library takes those of the daemon's user, or asks an agent.
//! So the driver is the agent of a daemon that opens a master (`qsd::Agent`), and the key never
//! leaves it. Formats: OpenSSH's `PROTOCOL.key`, and draft-ietf-sshm-ssh-agent.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use ed25519_dalek::{Signer as _, SigningKey};
use std::fmt;

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

/// A private key of the kind Ed25519.
#[derive(Clone)]
pub struct SshKey(SigningKey);

/// What a private key is wrapped in.
const BEGIN: &str = "-----BEGIN OPENSSH PRIVATE KEY-----";
const END: &str = "-----END OPENSSH PRIVATE KEY-----";

/// What the wrapped bytes begin with.
const MAGIC: &[u8] = b"openssh-key-v1\0";

/// The name of the kind of key, and of its signatures.
const KIND: &[u8] = b"ssh-ed25519";

/// Messages of the agent's protocol.
mod message {
    pub(super) const FAILURE: u8 = 5;
    pub(super) const REQUEST_IDENTITIES: u8 = 11;
    pub(super) const IDENTITIES: u8 = 12;
    pub(super) const REQUEST_SIGNATURE: u8 = 13;
    pub(super) const SIGNATURE: u8 = 14;
}

impl SshKey {
    /// The key in the form in which `ssh-keygen` writes it.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let body = text.trim().strip_prefix(BEGIN).and_then(|text| text.strip_suffix(END));
        let body = body.ok_or("is no private key as ssh-keygen -t ed25519 writes it")?;
        let base64: String = body.split_ascii_whitespace().collect();
        let bytes = BASE64_STANDARD.decode(base64).map_err(|_| "is no private key: bad base64")?;
        let broken = "is a private key that makes no sense";
        let rest = bytes.strip_prefix(MAGIC).ok_or(broken)?;
        let (cipher, rest) = take(rest).ok_or(broken)?;
        if cipher != b"none" {
            return Err("is protected by a passphrase; give it without: ssh-keygen -p");
        }
        Self::of_file(rest).ok_or(broken)?
    }

    /// The one key behind the name of the cipher; `None` where the file makes no sense.
    fn of_file(rest: &[u8]) -> Option<Result<Self, &'static str>> {
        let (_kdf, rest) = take(rest)?;
        let (_options, rest) = take(rest)?;
        let (count, rest) = rest.split_first_chunk()?;
        let (_public, rest) = take(rest)?;
        let (private, _) = take(rest)?;
        if u32::from_be_bytes(*count) != 1 {
            return None;
        }
        let (checks, rest) = private.split_first_chunk::<8>()?;
        let (kind, rest) = take(rest)?;
        if kind != KIND {
            return Some(Err("is a key of another kind than Ed25519; ssh-keygen -t ed25519"));
        }
        let (_public, rest) = take(rest)?;
        let (pair, _comment) = take(rest)?;
        let key = SigningKey::from_keypair_bytes(pair.try_into().ok()?).ok()?;
        (checks[..4] == checks[4..]).then_some(Ok(Self(key)))
    }

    /// What the agent answers to a message, both without their lengths.
    pub fn answer(&self, request: &[u8]) -> Vec<u8> {
        let answer = match request.split_first() {
            Some((&message::REQUEST_IDENTITIES, _)) => Some(self.identities()),
            Some((&message::REQUEST_SIGNATURE, rest)) => self.signature(rest),
            Some(_) | None => None,
        };
        answer.unwrap_or_else(|| vec![message::FAILURE])
    }

    fn identities(&self) -> Vec<u8> {
        let mut answer = vec![message::IDENTITIES];
        answer.extend(1_u32.to_be_bytes());
        answer.extend(string(&self.public()));
        answer.extend(string(b"")); // the comment
        answer
    }

    /// `None` where another key is meant.
    fn signature(&self, request: &[u8]) -> Option<Vec<u8>> {
        let (key, rest) = take(request)?;
        let (data, _flags) = take(rest)?;
        if key != self.public() {
            return None;
        }
        let signature = self.0.sign(data).to_bytes();
        let signature = [string(KIND), string(&signature)].concat();
        Some([vec![message::SIGNATURE], string(&signature)].concat())
    }

    fn public(&self) -> Vec<u8> {
        [string(KIND), string(self.0.verifying_key().as_bytes())].concat()
    }
}

impl fmt::Debug for SshKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("(secret)")
    }
}

/// Bytes with their length before them.
fn string(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("what we say to an SSH library is short");
    [&length.to_be_bytes(), bytes].concat()
}

/// The string that some bytes begin with, and what is behind it.
fn take(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)
}

#[cfg(test)]
mod test {
    use super::*;
    use ed25519_dalek::{Signature, Verifier as _};
    use proptest::prelude::*;
    use std::{fs, process::Command};

    /// A new key as `ssh-keygen` makes it.
    fn keygen(kind: &str, passphrase: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let made = Command::new("ssh-keygen")
            .args(["-q", "-C", "a comment", "-t", kind, "-N", passphrase, "-f"])
            .arg(&path)
            .status();
        assert!(made.unwrap().success());
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_key_of_ssh_keygen_signs() {
        let key = SshKey::parse(&keygen("ed25519", "")).unwrap();
        let identities = key.answer(&[message::REQUEST_IDENTITIES]);
        let public = key.public();
        assert_eq!(identities[..5], [message::IDENTITIES, 0, 0, 0, 1]);
        assert_eq!(take(&identities[5..]).unwrap().0, public);
        let request = [vec![message::REQUEST_SIGNATURE], string(&public), string(b"data")].concat();
        let answer = key.answer(&[&request[..], &[0; 4]].concat());
        assert_eq!(answer[0], message::SIGNATURE);
        let (signature, _) = take(&answer[1..]).unwrap();
        let (kind, signature) = take(signature).unwrap();
        assert_eq!(kind, KIND);
        let signature = Signature::from_slice(take(signature).unwrap().0).unwrap();
        key.0.verifying_key().verify(b"data", &signature).unwrap();
    }

    #[test]
    fn a_key_that_cannot_be_used_says_why() {
        for (text, rule) in [
            (keygen("ed25519", "hush hush"), "passphrase"),
            (keygen("ecdsa", ""), "another kind"),
            (String::from("-----BEGIN RSA PRIVATE KEY-----"), "no private key"),
            (format!("{BEGIN}\n!\n{END}\n"), "base64"),
            (format!("{BEGIN}\nAAAA\n{END}\n"), "no sense"),
        ] {
            assert!(SshKey::parse(&text).unwrap_err().contains(rule), "{rule}");
        }
    }

    #[test]
    fn what_is_no_request_fails() {
        let key = SshKey::parse(&keygen("ed25519", "")).unwrap();
        let other = [vec![message::REQUEST_SIGNATURE], string(b"other"), string(b"data")].concat();
        for request in [&[][..], &[1], &[message::REQUEST_SIGNATURE, 0], &other] {
            assert_eq!(key.answer(request), [message::FAILURE]);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let wrapped = format!("{BEGIN}{}{END}", BASE64_STANDARD.encode([MAGIC, &bytes].concat()));
            _ = SshKey::parse(&wrapped);
            _ = SshKey(SigningKey::from_bytes(&[7; 32])).answer(&bytes);
        }
    }
}
