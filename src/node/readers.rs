//! Those who read a volume over vhost-user beside others: a socket serves one VM, so each target has
//! one of its own.
//!
//! ```text
//! daemon -+- back.sock -- relay -- RUN/<key>/export/vhost.sock         whoever writes; nobody, where all read
//!         +- RUN/<reader>/a/back.sock -- relay -- RUN/<reader>/export/vhost.sock -- bound onto a target
//!         +- RUN/<reader>/a/back.sock -- relay -- ...
//! ```
//!
//! `<reader>` is a digest of volume and target. To the relay it is one more volume, so all that it
//! does for a VM it does for each of them; the daemon is the volume's own, and refuses what they
//! write. The targets in the attachment say which readers there are. What belongs to one is made
//! again wherever it is missing, and what belongs to none is removed at start-up.

use super::{Error, Group, HostPath, Node, Service, attachment::Attachment};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    qsd::{Daemon, Reader},
    relay::{self, Attach},
    run::{Slot, VolumeDir},
    source::Access,
    store::{self, Version},
    volume::{RunKey, VolumeId},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

/// `RUN/<reader>/reader.json`: whose part of the run directory this is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Note {
    version: Version<1>,
    pub(super) volume: VolumeId,
    pub(super) target: PathBuf,
}

impl Node {
    /// Those who read a volume beside others.
    pub(super) fn readers(&self, attachment: &Attachment) -> Vec<Reader> {
        let targets = attachment.targets.iter();
        let read = targets.filter(|target| attachment.has_reader_at(target));
        read.map(|target| self.reader(&attachment.volume, target)).collect()
    }

    fn reader(&self, id: &VolumeId, target: &Path) -> Reader {
        let key = RunKey::of_reader(id, target);
        let socket = self.reader_dir(&key).daemon(Slot::A).backend_socket();
        Reader { key, socket }
    }

    fn reader_dir(&self, key: &RunKey) -> VolumeDir {
        self.config.run.volume(key)
    }

    /// The attachment of a volume that is staged, or just being staged.
    pub(super) fn noted(&self, id: &VolumeId) -> Option<Attachment> {
        let noted = || store::load::<Attachment>(&self.dir(id).attachment()).ok().flatten();
        self.find(id).map(|one| one.attachment).or_else(noted)
    }

    /// Makes the places that a daemon needs for its readers' exports.
    pub(super) fn make_places(&self, attachment: &Attachment) -> Result<Vec<Reader>, Error> {
        let id = &attachment.volume;
        for target in attachment.targets.iter().filter(|target| attachment.has_reader_at(target)) {
            let dir = self.reader_dir(&RunKey::of_reader(id, target));
            dir.create().map_err(Error::run(dir.path()))?;
            let note = Note { version: Version, volume: id.clone(), target: target.clone() };
            let noted = store::replace_volatile(&dir.reader(), &note);
            noted.map_err(|source| Error::Store { volume: id.clone(), source })?;
        }
        Ok(self.readers(attachment))
    }

    /// Has the relay lead each reader to this daemon, which has an export for each.
    pub(super) async fn relay_readers(&self, id: &VolumeId, daemon: &Daemon) -> Result<(), Error> {
        let readers = self.noted(id).map(|attachment| self.readers(&attachment));
        for Reader { key, socket } in readers.unwrap_or_default() {
            let tracking = self.tracking(daemon).await?;
            let group = self.group(id).map(Group::number);
            let attach = Attach { key, backend: socket, tracking, group };
            let attached = self.relay.attach(attach).await;
            attached.map_err(|source| Error::Relay { volume: id.clone(), source })?;
        }
        Ok(())
    }

    /// Opens what the readers of an attachment need that is not there yet.
    pub(super) async fn open_readers(&self, attachment: &Attachment) -> Result<(), Error> {
        let id = &attachment.volume;
        let Some(daemon) = self.serving_daemon(id) else {
            return Err(Error::NotServed(id.clone()));
        };
        let readers = self.make_places(attachment)?;
        let opened = daemon.set_readers(&readers).await;
        opened.map_err(|error| Error::daemon(id)(error.into()))?;
        crash::point("node-publish-reader");
        self.relay_readers(id, &daemon).await
    }

    /// Closes what the reader at a target had, if there is one: its VM loses the disk.
    pub(super) async fn close_reader(&self, id: &VolumeId, target: &Path) -> Result<(), Error> {
        let key = RunKey::of_reader(id, target);
        if !self.reader_dir(&key).exists() {
            return Ok(());
        }
        self.unrelay_reader(id, &key).await?;
        if let Some(one) = self.find(id)
            && let Service::Up(daemon) = one.service
        {
            let others = self.readers(&one.attachment.without_target(target));
            if let Err(error) = daemon.set_readers(&others).await {
                // Nobody finds it any more, and whoever has the daemon next closes it.
                warn!(volume = %id, error = %Chain(&error), "an export stays open");
            }
        }
        let dir = self.reader_dir(&key);
        crash::point("node-unpublish-reader");
        dir.remove().map_err(Error::run(dir.path()))
    }

    async fn unrelay_reader(&self, id: &VolumeId, key: &RunKey) -> Result<(), Error> {
        let dir = self.reader_dir(key);
        dir.forget_relay().map_err(Error::run(dir.path()))?;
        match self.relay.detach(key).await {
            // It finds no note of it when it is there again.
            Err(error @ relay::Error::Unreachable { .. }) => {
                warn!(volume = %id, error = %Chain(&error), "nobody relays it");
                Ok(())
            }
            outcome => outcome.map_err(|source| Error::Relay { volume: id.clone(), source }),
        }
    }

    /// Removes what belongs to readers of a volume that is to be served no more.
    pub(super) async fn clear_readers(&self, id: &VolumeId) -> Result<(), Error> {
        let run = &self.config.run;
        for key in run.keys().map_err(Error::run(run.path()))? {
            let dir = self.reader_dir(&key);
            let note = store::load::<Note>(&dir.reader()).ok().flatten();
            if note.is_some_and(|note| note.volume == *id) {
                self.unrelay_reader(id, &key).await?;
                dir.remove().map_err(Error::run(dir.path()))?;
            }
        }
        Ok(())
    }

    /// Removes what is left of a reader at start-up, unless its volume is staged and published there
    /// still, or may be. Whether this part of the run directory is a reader's.
    pub(super) async fn settle_reader(&self, key: &RunKey) -> Result<bool, Error> {
        let dir = self.reader_dir(key);
        let note = store::load::<Note>(&dir.reader())
            .map_err(|source| Error::Attachment { key: key.clone(), source })?;
        let Some(Note { volume, target, .. }) = note else { return Ok(false) };
        // One that cannot be read may want it: nobody knows, and a VM may be at work on it.
        let attachment = store::load::<Attachment>(&self.dir(&volume).attachment())
            .map_err(|source| Error::Attachment { key: volume.run_key(), source })?;
        let note = Note { version: Version, volume, target };
        let is_wanted = attachment.is_some_and(|one| note.is_wanted(&one));
        let Note { volume, target, .. } = note;
        if !is_wanted {
            info!(%volume, target_path = %target.display(), "clearing what a reader left");
            self.unrelay_reader(&volume, key).await?;
            dir.remove().map_err(Error::run(dir.path()))?;
        }
        Ok(true)
    }

    /// The directory that is bound onto a target, and whose part it is in.
    pub(super) fn shared_at(&self, attachment: &Attachment, target: &Path) -> (PathBuf, RunKey) {
        let id = &attachment.volume;
        if attachment.has_reader_at(target) {
            let key = RunKey::of_reader(id, target);
            return (self.reader_dir(&key).export(), key);
        }
        (self.dir(id).export(), id.run_key())
    }

    /// Whose directory is bound onto a target: the volume's own, or that of its reader there.
    pub(super) async fn shown_at(&self, id: &VolumeId, target: &HostPath) -> Result<RunKey, Error> {
        let key = RunKey::of_reader(id, target.as_path());
        let (place, reader) = (target.clone(), key.clone());
        let is_reader = blocking(move || place.shows(&reader)).await?;
        Ok(if is_reader { key } else { id.run_key() })
    }

    /// The keys under which the relay serves a volume.
    pub(super) fn relay_keys(&self, attachment: &Attachment) -> Vec<RunKey> {
        let readers = self.readers(attachment).into_iter().map(|reader| reader.key);
        [attachment.volume.run_key()].into_iter().chain(readers).collect()
    }

    /// What is done with a volume where it is staged, or just being staged.
    pub(super) fn access(&self, id: &VolumeId) -> Access {
        self.noted(id).map_or(Access::Write, |attachment| attachment.access.access())
    }
}
