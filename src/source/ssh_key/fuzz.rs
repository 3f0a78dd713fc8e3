//! Fuzzing of private keys, and of what an agent is asked.

use super::{BEGIN, END, KIND, MAGIC, SshKey, message, string, take};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use ed25519_dalek::{Signature, SigningKey, Verifier as _};

/// Any bytes, taken for a private key, for what is wrapped in one, and for what an agent is asked.
pub fn ssh_key(bytes: &[u8]) {
    let wrapped = BASE64_STANDARD.encode([MAGIC, bytes].concat());
    let text = String::from_utf8_lossy(bytes).into_owned();
    for text in [text, format!("{BEGIN}\n{wrapped}\n{END}\n")] {
        if let Ok(key) = SshKey::parse(&text) {
            let ours = [string(&key.public()), string(b"data"), vec![0; 4]].concat();
            assert!(signs(&key, &[&[message::REQUEST_SIGNATURE], &ours[..]].concat()));
        }
    }
    signs(&SshKey(SigningKey::from_bytes(&[7; 32])), bytes);
}

/// Whether a key answers with a signature, which then is one of what it was asked to sign.
fn signs(key: &SshKey, request: &[u8]) -> bool {
    let answer = key.answer(request);
    match answer.split_first().expect("there is an answer to everything") {
        (&message::FAILURE, rest) => assert!(rest.is_empty()),
        (&message::IDENTITIES, rest) => {
            assert_eq!(take(&rest[4..]).expect("it has one").0, key.public());
        }
        (&message::SIGNATURE, rest) => {
            let (signature, _) = take(rest).expect("it is a string");
            let (kind, signature) = take(signature).expect("it has a kind");
            let signature = take(signature).expect("it has a signature").0;
            let signature = Signature::from_slice(signature).expect("it has the length of one");
            let (_, asked) = take(&request[1..]).expect("the key was found in it");
            let (data, _) = take(asked).expect("the data was found in it");
            assert_eq!(kind, KIND);
            key.0.verifying_key().verify(data, &signature).expect("it is of the data");
            return true;
        }
        (other, _) => panic!("answer {other}"),
    }
    false
}
