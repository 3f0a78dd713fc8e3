//! Remote masters, as the node sees them: looked at before a volume stands on one, and the secrets
//! that it takes while it is staged.
//!
//! A master is opened by a daemon of nobody first: one that does not answer costs that daemon, and
//! nobody else anything. What it takes to be let in is kept while the volume is staged, so that a
//! daemon that dies can be started again, and nowhere but in the run directory.

use super::{Error, Node, Stage};
use crate::{
    chain::Chain,
    qsd::{Credentials, Master, Workshop},
    run::{DaemonKey, Slot},
    source::{Access, Secrets, Source},
    store,
    volume::{
        self, CopyMode, FoundMaster, Login, Parameters, Passphrase, RunKey, Volume, VolumeId,
    },
};
use tracing::warn;

impl Node {
    /// Opens the master that a volume is to start from, to see whether it can be used and what it
    /// has. It is tried to be written only where it is to be written.
    pub(super) async fn look_at(
        &self,
        source: &Source,
        parameters: &Parameters,
        secrets: Secrets,
    ) -> Result<FoundMaster, Error> {
        let login = if secrets.is_empty() { Login::Open } else { Login::Secrets };
        let access = match parameters.copy_mode() {
            CopyMode::None => Access::Write,
            CopyMode::CopyOnWrite | CopyMode::CopyOnRead | CopyMode::Clone => Access::Read,
        };
        let (format, node) = (parameters.source_format(), self.config.name.clone());
        let credentials = Credentials { node, secrets };
        let master = Master { source: source.clone(), format, access, credentials };
        let workshop = self.workshop(RunKey::draw())?;
        let size = workshop.measure(&master, &self.supervisor).await;
        self.clear_workshop(&workshop).await?;
        let size = size.map_err(|source| Error::Source { source })?;
        let master = volume::Master { source: source.clone(), login };
        Ok(FoundMaster { master, format, size })
    }

    /// A place for a daemon of no volume. A crash leaves it, and start-up clears it.
    pub(super) fn workshop(&self, volume: RunKey) -> Result<Workshop, Error> {
        let dir = self.config.run.volume(&volume);
        dir.create().map_err(Error::run(dir.path()))?;
        let key = DaemonKey { volume, slot: Slot::A };
        let (program, dir) = (self.config.qsd.newest(), dir.daemon(key.slot));
        Ok(Workshop { key, program, dir })
    }

    /// Ends the daemon of a workshop, and removes what is left of it.
    pub(super) async fn clear_workshop(&self, workshop: &Workshop) -> Result<(), Error> {
        self.supervisor.kill(&workshop.key).await?;
        if let Err(error) = self.config.run.volume(&workshop.key.volume).remove() {
            warn!(error = %Chain(&error), "what is left of a workshop stays");
        }
        Ok(())
    }

    /// Keeps what lets us in where the master of a volume is, and what opens its layers.
    pub(super) fn keep_secrets(&self, id: &VolumeId, stage: &Stage) -> Result<(), Error> {
        let path = self.dir(id).secrets();
        let mut secrets = stage.secrets.expose();
        secrets.extend(stage.passphrase.as_ref().map(|one| (Passphrase::KEY, one.expose())));
        let kept = if secrets.is_empty() {
            store::remove(&path)
        } else {
            store::replace_volatile(&path, &secrets)
        };
        kept.map_err(|source| Error::Store { volume: id.clone(), source })
    }

    /// Who we are to the server of the master of a volume, if it has one.
    pub(super) fn credentials(&self, volume: &Volume) -> Result<Credentials, Error> {
        let secrets = match volume.master() {
            None => Secrets::default(),
            Some(master) => self.kept_secrets(volume.id(), &master.source)?,
        };
        Ok(Credentials { node: self.config.name.clone(), secrets })
    }

    fn kept_secrets(&self, id: &VolumeId, source: &Source) -> Result<Secrets, Error> {
        let mut kept = self.kept(id)?;
        Passphrase::kept(&mut kept)?;
        Ok(Secrets::new(source, kept)?)
    }
}
