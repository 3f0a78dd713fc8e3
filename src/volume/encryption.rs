//! Encryption at rest: which layers are encrypted, and from when on.
//!
//! ```text
//!  blank, or on a plain master:  Pending -- first stage: QEMU makes a LUKS header --> Luks
//!  on a layer that is Luks:      Luks, with the LUKS header of that layer
//!  on one that is Pending:       Pending
//! ```
//!
//! The passphrase comes with the first `NodeStageVolume`, so until then a layer is `Pending`: its
//! file is an empty and plain image that nobody may write to. A frozen layer may stay so for ever,
//! as it holds nothing. What stands on an encrypted layer is encrypted with the same key.

use super::{
    Claim, Error, Layer, LayerId, VolumeId, Volumes, record,
    record::LayerRecord,
    state::{KeptLayer, State, layer_record},
};
use crate::{
    crash,
    pool::{self, Pool},
    qcow2::LuksHeader,
    source::{Secret, SecretError},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, PoisonError},
};

/// The encryption of a layer that is not plain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encryption {
    /// It is to be encrypted before anything is written to it, and holds nothing.
    Pending,
    /// LUKS, inside the qcow2 image.
    Luks,
}

/// What an encrypted volume is opened with. Never shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passphrase(Secret);

impl Passphrase {
    /// Its key among the secrets of a request.
    pub const KEY: &str = "encryptionPassphrase";

    /// Takes it out of the secrets of a request, if it is among them.
    pub fn take(secrets: &mut HashMap<String, String>) -> Result<Option<Self>, SecretError> {
        secrets.remove(Self::KEY).map(Self::parse).transpose()
    }

    /// Takes it out of the secrets that were kept.
    pub fn kept(secrets: &mut BTreeMap<String, String>) -> Result<Option<Self>, SecretError> {
        secrets.remove(Self::KEY).map(Self::parse).transpose()
    }

    /// An error that it is missing.
    pub fn missing() -> SecretError {
        SecretError::Missing { key: Self::KEY, why: "the volume is encrypted" }
    }

    /// The text itself, for QEMU and for the one file that keeps it.
    pub fn expose(&self) -> &str {
        self.0.expose()
    }

    /// A line break at its end, as an editor leaves one, would be part of it and is seen nowhere.
    fn parse(text: String) -> Result<Self, SecretError> {
        let refuse = |rule| Err(SecretError::Value { key: Self::KEY.to_owned(), rule });
        if text.is_empty() {
            return refuse("is empty");
        }
        if text.chars().any(char::is_control) {
            return refuse("has a control character in it");
        }
        Ok(Self(Secret::new(text)))
    }
}

impl Volumes {
    /// Makes the file of a new layer, and says with which record. It is encrypted as what it stands
    /// on is; where that is plain or nothing, as is `wished`.
    pub(super) fn make_layer(
        &self,
        pool: &Pool,
        id: LayerId,
        layer: LayerRecord,
        wished: Option<Encryption>,
    ) -> Result<LayerRecord, pool::Error> {
        let below = layer.parent.and_then(|below| self.state.lock().layer(below));
        let encryption = below.as_ref().and_then(|below| below.encryption).or(wished);
        match (encryption, below.as_ref().and_then(Layer::path)) {
            (Some(Encryption::Luks), Some(below)) => {
                pool.create_encrypted_layer(id, layer.size, &pool.luks_header(below)?)?;
            }
            _ => pool.create_layer(id, layer.format, layer.size)?,
        }
        Ok(LayerRecord { encryption, ..layer })
    }

    /// Whether something of a volume is to be encrypted before it can be served.
    pub fn is_unformatted(&self, volume: &VolumeId) -> Result<bool, Error> {
        let active = self.find(volume)?.record.phase.active();
        Ok(!self.state.lock().unformatted(active).is_empty())
    }

    /// The LUKS header that a volume has already, in a layer that is encrypted.
    pub fn luks_header(&self, volume: &VolumeId) -> Result<Option<LuksHeader>, Error> {
        let volume = self.find(volume)?;
        let is_encrypted = |layer: &&Layer| layer.encryption == Some(Encryption::Luks);
        let path = volume.layers.iter().find(is_encrypted).and_then(Layer::path);
        path.map(|path| volume.pool.luks_header(path)).transpose().map_err(Error::pool(&volume.id))
    }

    /// Encrypts what is to be encrypted of a volume before it is served, which holds nothing, with
    /// this LUKS header or the one it has. Nobody has these layers open.
    ///
    /// A crash leaves a layer `Pending`, whatever its file is by then, and it is made anew.
    pub fn encrypt(&self, claim: &Claim, luks: &LuksHeader) -> Result<(), Error> {
        // Volumes may share a layer that is to be encrypted: what one of them has done, stands.
        let _alone = self.encrypting.lock().unwrap_or_else(PoisonError::into_inner);
        let id = claim.volume();
        let luks = self.luks_header(id)?.unwrap_or_else(|| luks.clone());
        let active = self.find(id)?.record.phase.active();
        let pending = self.state.lock().unformatted(active);
        for (layer, kept) in pending.into_iter().rev() {
            self.encrypt_layer(layer, kept, &luks).map_err(Error::pool(id))?;
        }
        Ok(())
    }

    fn encrypt_layer(
        &self,
        id: LayerId,
        kept: KeptLayer,
        luks: &LuksHeader,
    ) -> Result<(), pool::Error> {
        let KeptLayer { pool, record: mut layer } = kept;
        pool.replace_by_encrypted(id, layer.size, luks)?;
        crash::point("encrypt-layer");
        layer.encryption = Some(Encryption::Luks);
        record(&pool, &layer_record(&pool, id), &layer)?;
        let kept = KeptLayer { pool: Arc::clone(&pool), record: layer };
        self.state.lock().layers.insert(id, kept);
        crash::point("encrypt-recorded");
        Ok(())
    }
}

impl State {
    /// What is to be encrypted before a volume on this layer is served, from the top down: what it
    /// writes to, and what is copied into.
    fn unformatted(&self, active: LayerId) -> Vec<(LayerId, KeptLayer)> {
        let chain = self.chain(active).unwrap_or_default().into_iter();
        let kept = chain.filter_map(|id| Some((id, self.layers.get(&id)?.clone())));
        let is_written = |id, layer: &LayerRecord| id == active || layer.detach.is_some();
        kept.filter(|(id, layer)| {
            layer.record.encryption == Some(Encryption::Pending) && is_written(*id, &layer.record)
        })
        .collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn taken(text: &str) -> Result<Option<Passphrase>, SecretError> {
        let mut secrets = [(Passphrase::KEY.to_owned(), text.to_owned())].into();
        let passphrase = Passphrase::take(&mut secrets);
        assert!(secrets.is_empty());
        passphrase
    }

    #[test]
    fn a_passphrase_is_not_shown() {
        let passphrase = taken("hush hush").unwrap().unwrap();
        assert_eq!(passphrase.expose(), "hush hush");
        assert!(!format!("{passphrase:?}").contains("hush"));
        for bad in ["", "hush\n", "hu\0sh"] {
            let error = taken(bad).unwrap_err().to_string();
            assert!(error.contains(Passphrase::KEY) && !error.contains("hush"), "{error}");
        }
        assert_eq!(Passphrase::take(&mut HashMap::new()), Ok(None));
    }
}
