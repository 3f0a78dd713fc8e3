//! Volumes that are used through the kernel of this machine: block devices, and file systems on them.
//!
//! ```text
//! Block:       daemon -- RUN/<key>/disk (FUSE) -- /dev/loopN -- bound onto the targets
//! Filesystem:  daemon -- RUN/<key>/disk (FUSE) -- /dev/loopN -- mounted at the staging path -- bound onto the targets
//! ```
//!
//! Nothing of it is recorded: the kernel knows which device is over which file, and what is mounted
//! where. A file ends with its daemon, and so does what stands on it (facts/qsd.md section 9): the
//! next daemon has another file, which gets another device; whoever used the old one sees errors
//! until it is published again.

use super::{
    Error, Form, HostError, HostPath, Node, Service,
    attachment::Attachment,
    device::{Access, Detached, LoopDevice, Sectors},
    filesystem::{self, Contents, Kind, MountFlags, Overwrite, Stats},
    host::{Bound, Target},
};
use crate::{
    blocking::blocking,
    crash,
    qsd::{Daemon, Outlet, Writes},
    run::{Slot, VolumeDir},
    units::Bytes,
    volume::{Claim, VolumeId},
};
use std::{
    ffi::OsStr, fs, io::Write as _, os::unix::ffi::OsStrExt as _, path::Path, time::Duration,
};
use tokio::time::timeout;
use tracing::{info, warn};

/// How long after the first error of its device the end of a daemon is seen at most.
const END: Duration = Duration::from_millis(200);

impl Node {
    /// Has whoever uses the volume led to this daemon: VMs by the relay, the kernel by a device.
    pub(super) async fn lead_to(&self, id: &VolumeId, daemon: &Daemon) -> Result<(), Error> {
        let led = self.try_lead_to(id, daemon).await;
        self.blame(Some(daemon), id, led).await
    }

    async fn try_lead_to(&self, id: &VolumeId, daemon: &Daemon) -> Result<(), Error> {
        match daemon.outlet() {
            Outlet::Socket(_) => {
                self.relay_to(id, daemon).await?;
                self.relay_readers(id, daemon).await
            }
            Outlet::File(file) => self.open_device(id, file).await,
        }
    }

    /// Has nobody led to the volume any more.
    pub(super) async fn lead_no_more(&self, id: &VolumeId) -> Result<(), Error> {
        self.close_devices(id).await?;
        self.relay_no_more(id).await
    }

    /// What fails on a device or a file system while the daemon below it ends fails because of that,
    /// whatever the kernel says.
    pub(super) async fn blame<T>(
        &self,
        daemon: Option<&Daemon>,
        id: &VolumeId,
        outcome: Result<T, Error>,
    ) -> Result<T, Error> {
        let Err(error) = outcome else { return outcome };
        let is_of_kernel = matches!(
            error,
            Error::Device { .. }
                | Error::Filesystem { .. }
                | Error::Host(HostError::Io { .. })
                | Error::Run { .. }
        );
        let has_ended = async {
            match daemon {
                Some(daemon) => timeout(END, daemon.closed()).await.is_ok(),
                None => self.find(id).is_some(),
            }
        };
        if is_of_kernel && has_ended.await {
            return Err(Error::Ended { volume: id.clone(), source: Box::new(error) });
        }
        Err(error)
    }

    /// The daemon that serves a volume, if one does.
    pub(super) fn serving_daemon(&self, id: &VolumeId) -> Option<Daemon> {
        match self.find(id)?.service {
            Service::Up(daemon) => Some(daemon),
            Service::Down { .. } => None,
        }
    }

    async fn open_device(&self, id: &VolumeId, file: &Path) -> Result<(), Error> {
        // A pod may have a partition table on its device; a file system that is ours needs none.
        let sectors = match self.form(id) {
            Form::VhostUser | Form::Block => Sectors::Of512,
            Form::Filesystem { .. } => Sectors::Of4096,
        };
        // What is written into a file system that is only read goes nowhere but its log needs it.
        let access = match self.writes(id, Slot::A) {
            Writes::Refused => Access::Read,
            Writes::Active | Writes::Scratch(_) => Access::Write,
        };
        let attached = LoopDevice::attach(file, access, sectors).await;
        let device = attached.map_err(|source| Error::Device { volume: id.clone(), source })?;
        // Nobody else knows it once its daemon has ended well, and taken the file away with it.
        let note = VolumeDir::device(file);
        fs::File::create(&note)
            .and_then(|mut note| note.write_all(device.path().as_os_str().as_bytes()))
            .map_err(Error::run(&note))?;
        self.close_forgotten(id, file).await
    }

    /// Detaches what ended with a daemon before, and was shown to nobody. What was shown stays until
    /// the volume is unstaged: a number is used again for another volume, and a pod may still have
    /// the node.
    async fn close_forgotten(&self, id: &VolumeId, current: &Path) -> Result<(), Error> {
        let dir = self.dir(id);
        for disk in dir.disks() {
            if disk == current || VolumeDir::shown(&disk).exists() {
                continue;
            }
            if self.close_device(id, &disk).await? == Detached::Now {
                dir.remove_disk(&disk).map_err(Error::run(dir.path()))?;
            }
        }
        Ok(())
    }

    /// Nobody has the volume any more, also by way of a daemon that ended.
    async fn close_devices(&self, id: &VolumeId) -> Result<(), Error> {
        for disk in self.dir(id).disks() {
            self.close_device(id, &disk).await?;
        }
        Ok(())
    }

    async fn close_device(&self, id: &VolumeId, disk: &Path) -> Result<Detached, Error> {
        let failed = |source| Error::Device { volume: id.clone(), source };
        let mut detached = Detached::Now;
        let noted = fs::read(VolumeDir::device(disk)).ok();
        let unnamed =
            noted.and_then(|path| LoopDevice::unnamed(Path::new(OsStr::from_bytes(&path))));
        let named = LoopDevice::all(disk).await.map_err(failed)?;
        for old in named.into_iter().chain(unnamed) {
            if old.detach().await.map_err(failed)? == Detached::Later {
                detached = Detached::Later;
            }
        }
        Ok(detached)
    }

    /// The device of a volume that is served as a file.
    async fn device(&self, id: &VolumeId) -> Result<LoopDevice, Error> {
        let Some(disk) = self.dir(id).disks().pop() else {
            return Err(Error::NotServed(id.clone()));
        };
        let found = LoopDevice::find(&disk).await;
        let found = found.map_err(|source| Error::Device { volume: id.clone(), source })?;
        found.ok_or_else(|| Error::NotServed(id.clone()))
    }

    /// Sees to it that the file system of a volume is mounted where it is staged, if it is to have
    /// one. What was mounted there by way of a daemon that ended makes way.
    ///
    /// Before anything is made on a volume that holds nothing, that is recorded: what a crash leaves
    /// is worth nothing, and is made anew.
    pub(super) async fn mount_staged(
        &self,
        claim: &Claim,
        attachment: &Attachment,
    ) -> Result<(), Error> {
        let Form::Filesystem { kind, flags } = &attachment.form else { return Ok(()) };
        let id = claim.volume();
        let device = self.device(id).await?;
        let at = HostPath::noted(attachment.staging_path.clone());
        let place = at.clone();
        let mounted = blocking(move || place.mounted()).await?;
        if mounted.is_some_and(|mounted| mounted.device != device.device_number()) {
            warn!(volume = %id, at = %at.as_path().display(), "mounting it anew");
            filesystem::unmount(&at).await.map_err(Error::filesystem(id))?;
        }
        if attachment.access.access() == Access::Read {
            return self.mount_to_read(attachment, &device, &at, *kind, flags).await;
        }
        self.make_filesystem(claim, &device, *kind).await?;
        crash::point("node-stage-made");
        self.mount(id, &device, &at, *kind, flags).await?;
        if let Some(group) = attachment.group {
            filesystem::own_by(&at, group.number()).await.map_err(Error::filesystem(id))?;
        }
        crash::point("node-stage-mounted");
        Ok(())
    }

    /// Mounts what is there, and nothing is made of it, grown, or written to the volume: its log is
    /// replayed into what ends with the daemon.
    async fn mount_to_read(
        &self,
        attachment: &Attachment,
        device: &LoopDevice,
        at: &HostPath,
        kind: Kind,
        flags: &MountFlags,
    ) -> Result<(), Error> {
        let id = &attachment.volume;
        let failed = || Error::filesystem(id);
        let contents = filesystem::probe(device).await.map_err(failed())?;
        match contents {
            _ if self.volumes.find(id)?.is_being_formatted() => {}
            Contents::FileSystem(found) if found == kind => {
                filesystem::check(device, kind).await.map_err(failed())?;
                let mounted = filesystem::mount(device, at, kind, flags, Access::Read).await;
                return mounted.map(drop).map_err(failed());
            }
            Contents::Nothing => {}
            Contents::FileSystem(_) | Contents::Foreign(_) => {
                let occupied = filesystem::Error::Occupied { device: device.path(), contents };
                return Err(failed()(occupied));
            }
        }
        let (volume, mode) = (id.clone(), attachment.access.as_str());
        Err(Error::NothingToRead { volume, kind, mode })
    }

    async fn make_filesystem(
        &self,
        claim: &Claim,
        device: &LoopDevice,
        kind: Kind,
    ) -> Result<(), Error> {
        let id = claim.volume();
        let failed = || Error::filesystem(id);
        let overwrite = if self.volumes.find(id)?.is_being_formatted() {
            Overwrite::BrokenOff
        } else {
            match filesystem::probe(device).await.map_err(failed())? {
                Contents::FileSystem(found) if found == kind => return Ok(()),
                Contents::Nothing => {}
                contents => {
                    let occupied = filesystem::Error::Occupied { device: device.path(), contents };
                    return Err(failed()(occupied));
                }
            }
            self.volumes.set_formatting(claim, true)?;
            Overwrite::Never
        };
        crash::point("node-stage-formatting");
        filesystem::make(device, kind, overwrite).await.map_err(failed())?;
        self.volumes.set_formatting(claim, false)?;
        info!(volume = %id, %kind, "file system made");
        Ok(())
    }

    /// A volume that was made larger than what it was made from, or while it was unattached, has a
    /// file system that does not fill it yet.
    async fn mount(
        &self,
        id: &VolumeId,
        device: &LoopDevice,
        at: &HostPath,
        kind: Kind,
        flags: &MountFlags,
    ) -> Result<(), Error> {
        let mount = async {
            filesystem::check(device, kind).await?;
            filesystem::mount(device, at, kind, flags, Access::Write).await?;
            if filesystem::is_grown(at, device, kind).await? {
                return Ok(());
            }
            match filesystem::grow(at, device, kind).await {
                Err(filesystem::Error::NotPermitted { .. }) => {
                    filesystem::unmount(at).await?;
                    filesystem::grow_unmounted(device, kind).await?;
                    filesystem::mount(device, at, kind, flags, Access::Write).await.map(drop)
                }
                outcome => outcome,
            }
        };
        mount.await.map_err(Error::filesystem(id))
    }

    /// Takes away what is mounted where a volume is staged.
    pub(super) async fn unmount_staged(&self, attachment: &Attachment) -> Result<(), Error> {
        if matches!(attachment.form, Form::Filesystem { .. }) {
            let at = HostPath::noted(attachment.staging_path.clone());
            let unmounted = filesystem::unmount(&at).await;
            unmounted.map(drop).map_err(Error::filesystem(&attachment.volume))?;
        }
        Ok(())
    }

    /// Has the device of a volume grow with its file, which the daemon has resized.
    pub(super) async fn grow_device(&self, id: &VolumeId, size: Bytes) -> Result<(), Error> {
        let grown = self.device(id).await?.grow(size).await;
        grown.map_err(|source| Error::Device { volume: id.clone(), source })
    }

    /// Has the file system of a volume fill its device, if it has one.
    pub(super) async fn grow_filesystem(&self, id: &VolumeId) -> Result<(), Error> {
        let Some(attachment) = self.find(id).map(|one| one.attachment) else { return Ok(()) };
        let Form::Filesystem { kind, .. } = attachment.form else { return Ok(()) };
        if attachment.access.access() == Access::Read {
            return Ok(());
        }
        let device = self.device(id).await?;
        let at = HostPath::noted(attachment.staging_path);
        filesystem::grow(&at, &device, kind).await.map_err(Error::filesystem(id))
    }

    /// How full the file system of a volume is, if it has one here.
    pub async fn filesystem_stats(&self, id: &VolumeId) -> Result<Option<Stats>, Error> {
        let attachment = self.find(id).map(|one| one.attachment);
        let staged = attachment.filter(|one| matches!(one.form, Form::Filesystem { .. }));
        let Some(staged) = staged else { return Ok(None) };
        let told = filesystem::stats(&HostPath::noted(staged.staging_path)).await;
        let told = told.map(Some).map_err(Error::filesystem(id));
        self.blame(self.serving_daemon(id).as_ref(), id, told).await
    }

    /// Binds what is staged onto a target.
    pub(super) async fn bind(
        &self,
        attachment: &Attachment,
        target: &HostPath,
        whose: Target,
    ) -> Result<Bound, Error> {
        let id = attachment.volume.clone();
        let target = target.clone();
        match attachment.form {
            Form::VhostUser => {
                if attachment.has_reader_at(target.as_path()) {
                    self.open_readers(attachment).await?;
                }
                let (source, key) = self.shared_at(attachment, target.as_path());
                Ok(blocking(move || target.bind(&source, &key)).await?)
            }
            Form::Block => {
                let device = self.device(&id).await?;
                let shown = VolumeDir::shown(device.file());
                fs::File::create(&shown).map(drop).map_err(Error::run(&shown))?;
                let (path, number) = (device.path(), device.device_number());
                Ok(blocking(move || target.bind_device(&path, number, whose)).await?)
            }
            Form::Filesystem { .. } => {
                let number = self.device(&id).await?.device_number();
                let (staged, access) =
                    (attachment.staging_path.clone(), attachment.access_at(target.as_path()));
                let bind = move || target.bind_filesystem(&staged, number, whose, access);
                Ok(blocking(bind).await?)
            }
        }
    }

    /// Takes away what is bound onto a target.
    pub(super) async fn unbind(
        &self,
        id: &VolumeId,
        form: &Form,
        target: &HostPath,
    ) -> Result<(), Error> {
        let (target, key) = (target.clone(), id.run_key());
        match form {
            Form::VhostUser => {
                let key = self.shown_at(id, &target).await?;
                Ok(blocking(move || target.unbind(&key)).await?)
            }
            Form::Block => Ok(blocking(move || target.unbind_device()).await?),
            Form::Filesystem { .. } => {
                filesystem::unmount(&target).await.map_err(Error::filesystem(id))?;
                Ok(blocking(move || target.unbind(&key)).await?)
            }
        }
    }

    /// Whether the volume is really there at a target.
    pub(super) async fn is_bound(
        &self,
        attachment: &Attachment,
        target: HostPath,
    ) -> Result<bool, Error> {
        let (_, key) = self.shared_at(attachment, target.as_path());
        match attachment.form {
            Form::VhostUser => Ok(blocking(move || target.shows(&key)).await?),
            Form::Block | Form::Filesystem { .. } => {
                Ok(blocking(move || target.mounted()).await?.is_some())
            }
        }
    }
}
