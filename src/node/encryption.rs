//! Encrypted volumes, as the node sees them: layers are encrypted when they are first used, and the
//! passphrase is kept while the volume is staged.
//!
//! It is kept where the secrets of remote masters are: in the run directory alone, so that a daemon
//! that dies can be started again.

use super::{Error, Node};
use crate::{
    crash, store,
    volume::{Claim, Passphrase, RunKey, Volume, VolumeId},
};
use std::{collections::BTreeMap, time::Instant};
use tracing::info;

impl Node {
    /// Encrypts what is to be encrypted of a volume before it is served for the first time.
    pub(super) async fn encrypt(
        &self,
        claim: &Claim,
        passphrase: Option<&Passphrase>,
    ) -> Result<(), Error> {
        let id = claim.volume();
        if !self.volumes.is_unformatted(id)? {
            return Ok(());
        }
        let passphrase = passphrase.ok_or_else(Passphrase::missing)?;
        let begin = Instant::now();
        let luks = if let Some(luks) = self.volumes.luks_header(id)? {
            luks // of a layer that it shares with another volume
        } else {
            let workshop = self.workshop(RunKey::draw())?;
            let made = workshop.luks_header(passphrase, &self.supervisor).await;
            self.clear_workshop(&workshop).await?;
            made.map_err(Error::daemon(id))?
        };
        crash::point("encrypt-header");
        tokio::task::block_in_place(|| self.volumes.encrypt(claim, &luks))?;
        info!(volume = %id, seconds = begin.elapsed().as_secs_f64(), "volume encrypted");
        Ok(())
    }

    /// What opens the layers of a volume, if it is encrypted. One that is not ready to be written to
    /// is not opened.
    pub(super) fn passphrase(&self, volume: &Volume) -> Result<Option<Passphrase>, Error> {
        if !volume.is_encrypted() {
            return Ok(None);
        }
        if self.volumes.is_unformatted(volume.id())? {
            return Err(Error::Unformatted(volume.id().clone()));
        }
        let passphrase = self.kept_passphrase(volume.id())?;
        Ok(Some(passphrase.ok_or_else(Passphrase::missing)?))
    }

    /// An error where a volume that is staged was opened with another passphrase.
    pub(super) fn require_same(
        &self,
        id: &VolumeId,
        passphrase: Option<&Passphrase>,
    ) -> Result<(), Error> {
        match self.kept_passphrase(id)? {
            Some(kept) if Some(&kept) != passphrase => Err(Error::Locked { volume: id.clone() }),
            Some(_) | None => Ok(()),
        }
    }

    /// All secrets that are kept of a volume.
    pub(super) fn kept(&self, id: &VolumeId) -> Result<BTreeMap<String, String>, Error> {
        let kept = store::load(&self.dir(id).secrets());
        let kept = kept.map_err(|source| Error::Store { volume: id.clone(), source })?;
        Ok(kept.unwrap_or_default())
    }

    fn kept_passphrase(&self, id: &VolumeId) -> Result<Option<Passphrase>, Error> {
        Ok(Passphrase::kept(&mut self.kept(id)?)?)
    }
}
