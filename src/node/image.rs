//! `disk.img`: the volume as a file beside its socket, for whoever knows only files: `KubeVirt`
//! without our hook, exporters, people.
//!
//! ```text
//!  closed -- published --> shown <-- it left, a VM connects --> closed -- work that it forbids --> hidden
//!    ^                       |                                    |                                 |
//!  staged        unstaged <--+------------------------------------+               VM left: shown <--+
//! ```
//!
//! To mount it takes some milliseconds, most of them in the mount program that libfuse starts. So that
//! begins as the volume is staged, and publishing waits for what is left of it.
//!
//! Whoever has the file open would not survive a change of the graph or another daemon, nor would a
//! pod that has it mounted: it sees the file that was there when its container started, or none
//! (facts/kubernetes.md). So while it is shown, nothing is done to a volume that can wait; what a
//! call asks for is refused while the file is open. The kernel tells whether it is.
//!
//! Two writers would know nothing of each other: a VM at the socket closes the file to all but root,
//! and while somebody has it open, the relay lets no VM in.

use super::{Error, Form, Group, HostPath, Node, Service, attachment::Attachment};
use crate::{
    blocking::blocking,
    chain::Chain,
    crash,
    qsd::{self, Daemon},
    relay,
    run::IMAGE,
    volume::VolumeId,
};
use rustix::fs::{Gid, Mode, chmod, chown};
use std::{io, path::PathBuf, time::Duration};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// What is to be seen of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Image {
    /// It is not there.
    #[default]
    Hidden,
    /// Anybody may use it who may use the volume.
    Shown,
    /// It is there, but nobody is to use it any more.
    Closed,
    /// Somebody had it open when it was to be closed.
    Contested,
}

/// How long the file of a daemon that answers takes at most to be looked at.
const LOOK: Duration = Duration::from_secs(5);

/// How often it is tried to have it shown, and how long after an attempt that failed.
const ATTEMPTS: u32 = 3;
const AGAIN: Duration = Duration::from_millis(100);

/// What a person should know of one that is contested.
pub(super) const CONTESTED: &str = "somebody opened disk.img as a VM connected to vhost.sock: each \
                                    of both may overwrite what the other wrote";

impl Node {
    /// Begins to have the file there, in a daemon that was just started for an attachment that
    /// nobody has yet: what is to be said of the file from then on.
    ///
    /// It is root's alone until the volume is published. What came of it the daemon says then, and
    /// what did not succeed is done in the usual way. A crash leaves what unstaging removes, or what
    /// the next driver finds.
    pub(super) async fn begin_image(&self, intent: &Attachment, daemon: &Daemon) -> Image {
        let id = &intent.volume;
        let begun = async {
            let volume = self.volumes.find(id)?;
            let size = volume.size();
            // Other sizes are possible while a volume grows; the usual way asks for the right one.
            let is_exact = volume.layers().first().is_some_and(|active| active.size == size);
            if !intent.may_share_socket() || !is_exact || daemon.require_files().is_err() {
                return Ok(Image::Hidden);
            }
            let dir = self.dir(id);
            let place = dir.clone();
            blocking(move || place.clear_image()).await.map_err(Error::run(dir.path()))?;
            crash::point("image-place");
            let begun = daemon.begin_image(&dir.image(), size).await;
            begun.map_err(|error| Error::daemon(id)(error.into()))?;
            crash::point("image-begun");
            Ok(Image::Closed)
        };
        begun.await.unwrap_or_else(|error: Error| {
            warn!(volume = %id, error = %Chain(&error), "disk.img");
            Image::Hidden
        })
    }

    /// Sees to it that the file is there if it is to be, and closed if it is to be.
    ///
    /// A crash at any point leaves what the next driver finds and does the rest of.
    pub(super) async fn settle_image(&self, id: &VolumeId) -> Result<(), Error> {
        let Some(one) = self.find(id) else { return Ok(()) };
        let Service::Up(daemon) = one.service else { return Ok(()) };
        if one.attachment.form != Form::VhostUser {
            return Ok(());
        }
        let (is_shown, has_guest) = tokio::join!(daemon.shows_image(), self.has_guest(id));
        let is_shown = is_shown.map_err(|error| Error::daemon(id)(error.into()))?;
        let is_published = one.attachment.shares_socket();
        let is_free = is_published && !has_guest;
        match (is_free, is_shown) {
            (true, false) => self.show_image(id, &daemon).await,
            (true, true) => self.open_image(id).await,
            (false, true) if is_published => self.close_image(id).await,
            (false, true) => {
                self.note_image(id, Image::Closed);
                Ok(())
            }
            (false, false) => {
                self.note_image(id, Image::Hidden);
                // Also what a crash left of it.
                let hidden = daemon.hide_image().await;
                hidden.map_err(|error| Error::daemon(id)(error.into()))
            }
        }
    }

    /// The same where nobody waits for it.
    pub(super) async fn settle_image_if_can_be(&self, id: &VolumeId) {
        if let Err(error) = self.settle_image(id).await {
            warn!(volume = %id, error = %Chain(&error), "disk.img");
        }
    }

    /// Takes the file away before a change that whoever has it open would not survive; an error if
    /// somebody has.
    ///
    /// The daemon waits for all requests before it does so, which are a guest's, too.
    pub(super) async fn make_way(&self, id: &VolumeId, daemon: &Daemon) -> Result<(), Error> {
        if self.image(id) == Image::Hidden {
            return Ok(());
        }
        if self.is_image_open(id).await? {
            return Err(Error::ImageOpen(id.clone()));
        }
        let hidden = daemon.hide_image().await;
        hidden.map_err(|error| Error::daemon(id)(error.into()))?;
        crash::point("image-hidden");
        self.note_image(id, Image::Hidden);
        let dir = self.dir(id);
        let place = dir.clone();
        let cleared = blocking(move || place.clear_image()).await;
        cleared.map_err(Error::run(dir.path()))?;
        self.mount_image(id).await
    }

    /// What is to be seen of the file.
    pub(super) fn image(&self, id: &VolumeId) -> Image {
        self.find(id).map(|one| one.image).unwrap_or_default()
    }

    async fn show_image(&self, id: &VolumeId, daemon: &Daemon) -> Result<(), Error> {
        if let Err(error) = daemon.require_files() {
            warn!(volume = %id, error = %Chain(&error), "no disk.img");
            return Ok(());
        }
        self.interrupt(id).await;
        let dir = self.dir(id);
        let mut attempt = 1;
        loop {
            let place = dir.clone();
            let cleared = blocking(move || place.clear_image()).await;
            cleared.map_err(Error::run(dir.path()))?;
            crash::point("image-place");
            match daemon.show_image(&dir.image()).await {
                Ok(()) => break,
                // What mounts it is a program of its own, which may die, or come too late for an
                // earlier daemon that died, and mount what is dead.
                Err(error) if attempt < ATTEMPTS && error.is_of_mount() => {
                    warn!(volume = %id, attempt, error = %Chain(&error), "disk.img");
                    attempt += 1;
                    sleep(AGAIN).await;
                }
                Err(error) => return Err(Error::daemon(id)(error.into())),
            }
        }
        crash::point("image-shown");
        self.open_image(id).await
    }

    /// Gives the file to those who may use it, and mounts it where the volume is published already.
    async fn open_image(&self, id: &VolumeId) -> Result<(), Error> {
        match self.find(id).and_then(|one| one.attachment.group) {
            Some(group) => self.give_image(id, Some(group), 0o660).await?,
            None => self.give_image(id, None, 0o600).await?,
        }
        self.mount_image(id).await?;
        self.note_image(id, Image::Shown);
        info!(volume = %id, "disk.img shown");
        Ok(())
    }

    /// Lets nobody in any more: root only, who does not ask for permission.
    async fn close_image(&self, id: &VolumeId) -> Result<(), Error> {
        self.give_image(id, None, 0).await?;
        let is_open = self.is_image_open(id).await?;
        if is_open && self.image(id) != Image::Contested {
            warn!(volume = %id, "{CONTESTED}");
        }
        self.note_image(id, if is_open { Image::Contested } else { Image::Closed });
        self.nudge(); // what may be done with the layers now
        Ok(())
    }

    /// A volume that is published nowhere any more is nobody's.
    pub(super) fn leave_image(&self, id: &VolumeId) {
        let mut attached = self.attached();
        let left = attached.get_mut(id).filter(|one| one.attachment.targets.is_empty());
        if let Some(one) = left
            && one.image != Image::Hidden
        {
            one.image = Image::Closed;
        }
        drop(attached);
        self.nudge();
    }

    async fn give_image(
        &self,
        id: &VolumeId,
        group: Option<Group>,
        mode: u32,
    ) -> Result<(), Error> {
        let image = self.dir(id).image();
        self.on_image(id, move || {
            let root = Group::new(0);
            chown(&image, None, Some(Gid::from_raw(group.unwrap_or(root).number())))?;
            Ok(chmod(&image, Mode::from_raw_mode(mode))?)
        })
        .await
    }

    /// Has each target show what the published directory shows.
    async fn mount_image(&self, id: &VolumeId) -> Result<(), Error> {
        let Some(one) = self.find(id) else { return Ok(()) };
        for target in one.attachment.targets.into_iter().map(HostPath::noted) {
            let dir = self.dir(id).export();
            blocking(move || target.show_file(&dir, IMAGE)).await?;
        }
        Ok(())
    }

    async fn is_image_open(&self, id: &VolumeId) -> Result<bool, Error> {
        let image = self.dir(id).image();
        self.on_image(id, move || relay::is_open(&image)).await
    }

    /// Does what waits for ever where the daemon hangs.
    async fn on_image<T: Send + 'static>(
        &self,
        id: &VolumeId,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let image: PathBuf = self.dir(id).image();
        let done = timeout(LOOK, blocking(work)).await;
        let done = done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        done.map_err(|error| match error.kind() {
            // Its daemon hangs, or has just died.
            io::ErrorKind::TimedOut
            | io::ErrorKind::NotConnected
            | io::ErrorKind::ConnectionAborted => {
                Error::daemon(id)(qsd::MonitorError::Closed.into())
            }
            _ => Error::run(&image)(error),
        })
    }

    fn note_image(&self, id: &VolumeId, image: Image) {
        if let Some(one) = self.attached().get_mut(id) {
            one.image = image;
        }
    }
}
