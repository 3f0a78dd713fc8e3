//! The node's side: volumes staged on this machine, each served by its daemon, and published.
//!
//! ```text
//!              stage                    publish (any number of targets)
//! (nothing) --------> Staging -> Staged <------------------------------> Staged with targets
//!     ^                             |      unpublish
//!     +---- daemon ends - Unstaging +
//! ```
//!
//! Owns the attachments in the run directory. Promises that the driver may die at any instant: a
//! daemon goes on without it, and the next driver takes over what it finds (`recover`). A daemon
//! that dies is started again on the same paths. Layers are frozen, merged and removed also under a
//! VM (`layers`, `tend`). Called by the gRPC edge; whatever changes an
//! attachment takes the volume's `Claim`.

mod attachment;
mod cause;
mod change;
mod condition;
mod death;
pub mod device;
mod encryption;
mod ephemeral;
mod examine;
pub mod filesystem;
mod form;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod health;
mod host;
mod image;
mod layers;
mod local;
mod master;
mod publish;
mod readers;
mod recover;
mod relayed;
mod stage;
mod tally;
mod tend;
#[cfg(test)]
mod testbed;
mod tool;
mod trial;
mod upgrade;

pub use cause::Cause;
pub use condition::Condition;
pub use death::Death;
pub use ephemeral::Inline;
pub use examine::{Examined, Surroundings};
pub use form::{Capability, Form, Group};
pub use health::{Part, Staged, View};
pub use host::{Bound, Error as HostError, HostPath, Mounted};
pub use publish::Publish;
pub use relayed::Relayed;
pub use stage::Stage;
pub use tally::{Counted, Fate};
pub use upgrade::{Upgrade, When};

use crate::{
    chain::Chain,
    qsd::{self, Daemon, Durability, Launch, Outlet, Programs, Reads, Writes},
    relay,
    run::{DaemonKey, RunDir, Slot, VolumeDir},
    source::{Access, SecretError},
    store, supervisor,
    volume::{
        self, Busy, Cache, Claim, Claimed, CopyMode, Format, InFlight, LayerId, NodeName,
        ParameterError, Passphrase, RunKey, Volume, VolumeId, Volumes,
    },
};
use attachment::Attachment;
use cause::{Entrance, Leaving};
use health::Health;
use image::Image;
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tally::Tally;
use tokio::{sync::Notify, time::sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};
use trial::Trials;

/// Why the node said no.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The volume itself is the trouble.
    #[error(transparent)]
    Volume(#[from] volume::Error),
    /// A path of the request is the trouble.
    #[error(transparent)]
    Host(#[from] host::Error),
    /// Somebody works on what the call needs besides the volume.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// A limit is the trouble.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// The volume is not staged, or not at the path the caller believes.
    #[error("staging_target_path: volume {volume} is not staged at {}", path.display())]
    NotStaged {
        /// The volume.
        volume: VolumeId,
        /// The path of the request.
        path: PathBuf,
    },
    /// The volume is staged at another path.
    #[error("staging_target_path: volume {volume} is staged at {} already", path.display())]
    StagedElsewhere {
        /// The volume.
        volume: VolumeId,
        /// Where it is staged.
        path: PathBuf,
    },
    /// The volume is staged for another use.
    #[error("volume_capability: volume {volume} is staged as {is}, not {asked}")]
    StagedOtherwise {
        /// The volume.
        volume: VolumeId,
        /// How it is staged.
        is: Capability,
        /// How it was asked for.
        asked: Capability,
    },
    /// The volume is published here, for another use.
    #[error("volume_capability: volume {volume} is published as {is}, not {asked}")]
    PublishedOtherwise {
        /// The volume.
        volume: VolumeId,
        /// How it is published.
        is: Capability,
        /// How it was asked for.
        asked: Capability,
    },
    /// The volume is published here, and what is to be done with it there was another thing.
    #[error(
        "readonly: volume {volume} is published at {} with readonly {}, not {}", target.display(),
        *asked != Access::Read, *asked == Access::Read
    )]
    PublishedForOther {
        /// The volume.
        volume: VolumeId,
        /// Where it is published.
        target: PathBuf,
        /// What was asked for.
        asked: Access,
    },
    /// The volume has one device, which is written to.
    #[error(
        "readonly: volume {volume} is staged as {is}, and its device takes writes; stage it as \
         MULTI_NODE_READER_ONLY to have it read alone"
    )]
    WritableDevice {
        /// The volume.
        volume: VolumeId,
        /// How it is staged.
        is: Capability,
    },
    /// The volume is staged to be read, and this call would change it.
    #[error("volume {volume} is staged as {is}, and is not changed meanwhile; unstage it first")]
    OnlyRead {
        /// The volume.
        volume: VolumeId,
        /// How it is staged.
        is: Capability,
    },
    /// There is no file system to be read, and none is made for readers.
    #[error(
        "volume_capability: volume {volume} holds no whole {kind} file system that {mode} could \
         read; stage it as SINGLE_NODE_WRITER once, or make it from a snapshot"
    )]
    NothingToRead {
        /// The volume.
        volume: VolumeId,
        /// Of which kind it was to be.
        kind: filesystem::Kind,
        /// How it was asked for.
        mode: &'static str,
    },
    /// The volume is staged for another use than it is to be published for.
    #[error("volume_capability: volume {volume} is staged as {is}; stage it as {asked}")]
    NotStagedFor {
        /// The volume.
        volume: VolumeId,
        /// How it is staged.
        is: Capability,
        /// How it was asked for.
        asked: Capability,
    },
    /// The volume is published, and this call would pull it away or share it.
    #[error("volume {volume} is published at {}; unpublish it there first", target.display())]
    Published {
        /// The volume.
        volume: VolumeId,
        /// Where it is published.
        target: PathBuf,
    },
    /// The volume is staged, and this call would pull it away.
    #[error("volume {volume} is staged at {}; unstage it first", path.display())]
    Staged {
        /// The volume.
        volume: VolumeId,
        /// Where it is staged.
        path: PathBuf,
    },
    /// The path is not one of the volume's.
    #[error("volume_path: volume {volume} is not at {}", path.display())]
    NotAt {
        /// The volume.
        volume: VolumeId,
        /// The path of the request.
        path: PathBuf,
    },
    /// The daemon of the volume cannot be had.
    #[error("storage daemon of volume {volume}")]
    Daemon {
        /// The volume.
        volume: VolumeId,
        /// Why not.
        source: qsd::Error,
    },
    /// The daemon for work on layers that nobody has open cannot be had.
    #[error("storage daemon for layer {layer}")]
    Workshop {
        /// The layer.
        layer: LayerId,
        /// Why not.
        source: qsd::Error,
    },
    /// The remote master that a volume is to start from cannot be had.
    #[error("parameters: source")]
    Source {
        /// Why not.
        source: qsd::Error,
    },
    /// The secrets are the trouble.
    #[error(transparent)]
    Secrets(#[from] SecretError),
    /// The record of what is staged cannot be kept.
    #[error("attachment of volume {volume}")]
    Store {
        /// The volume.
        volume: VolumeId,
        /// Why not.
        source: store::Error,
    },
    /// The record of something staged makes no sense, so nobody knows of what.
    #[error("attachment {key}")]
    Attachment {
        /// The volume's part of the run directory.
        key: RunKey,
        /// What is wrong with it.
        source: store::Error,
    },
    /// The note of which boot the run directory belongs to cannot be kept.
    #[error("run-dir")]
    Boot {
        /// Why not.
        source: store::Error,
    },
    /// The run directory refuses.
    #[error("run-dir {}", path.display())]
    Run {
        /// The run directory, or the volume's part of it.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No supervisor can be had.
    #[error(transparent)]
    Supervisor(#[from] supervisor::Error),
    /// The daemon that a program is tried with cannot be had.
    #[error("trying {}", program.display())]
    Trial {
        /// The program.
        program: PathBuf,
        /// Why not.
        source: qsd::Error,
    },
    /// The relay does not serve the volume.
    #[error("relay of volume {volume}")]
    Relay {
        /// The volume.
        volume: VolumeId,
        /// Why not.
        source: relay::Error,
    },
    /// The block device of the volume cannot be had.
    #[error("block device of volume {volume}")]
    Device {
        /// The volume.
        volume: VolumeId,
        /// Why not.
        source: device::Error,
    },
    /// The file system of the volume cannot be had.
    #[error("file system of volume {volume}")]
    Filesystem {
        /// The volume.
        volume: VolumeId,
        /// Why not.
        source: filesystem::Error,
    },
    /// The consumers of the volume would not survive another daemon.
    #[error("volume {volume} is staged as {form}, which ends with its daemon; unstage it first")]
    BoundToDaemon {
        /// The volume.
        volume: VolumeId,
        /// In which form.
        form: Form,
    },
    /// Who uses the volume as a file would not survive what is to be done.
    #[error(
        "volume {0} is in use as disk.img, which would end; end the pod that uses it, or attach it \
         by its socket"
    )]
    ImageOpen(VolumeId),
    /// The passphrase is not that of the volume.
    #[error("secrets: {key} does not open volume {volume}", key = Passphrase::KEY)]
    Locked {
        /// The volume.
        volume: VolumeId,
    },
    /// A layer would be written to that is to be encrypted first.
    #[error("volume {0} is to be encrypted before it is served; unstage it, and stage it again")]
    Unformatted(VolumeId),
    /// What the log of its file system holds would lie beside the volume, unencrypted.
    #[error(
        "volume_capability: volume {volume} is encrypted, and its file system cannot be read only \
         ({access}); use a mode that writes, and publish it with readonly"
    )]
    EncryptedForReaders {
        /// The volume.
        volume: VolumeId,
        /// The access mode that was asked for.
        access: &'static str,
    },
    /// The daemon ended while the kernel used what it serves.
    #[error("the daemon of volume {volume} ended meanwhile")]
    Ended {
        /// The volume.
        volume: VolumeId,
        /// What the kernel said.
        source: Box<Error>,
    },
    /// The volume has no daemon that could be replaced.
    #[error("volume {0} is not served by a daemon; stage it first")]
    NotServed(VolumeId),
}

/// How long a call waits for what the driver itself puts in order: starting a daemon, above all.
const ORDER: Duration = Duration::from_secs(5);

/// How often a volume that somebody works on is asked for.
const CLAIM_RETRY: Duration = Duration::from_millis(5);

/// Where a node keeps its things and what it runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name of the node.
    pub name: NodeName,
    /// The run directory.
    pub run: RunDir,
    /// The qemu-storage-daemons that may be run; the newest is.
    pub qsd: Programs,
    /// This program, to be started as supervisor.
    pub program: PathBuf,
}

/// The node. Clones are the same node.
#[derive(Clone, Debug)]
pub struct Node {
    config: Arc<Config>,
    volumes: Arc<Volumes>,
    supervisor: supervisor::Client,
    relay: relay::Client,
    trials: Arc<Trials>,
    tally: Arc<Tally>,
    health: Arc<Health>,
    claims: InFlight,
    attached: Arc<Mutex<HashMap<VolumeId, Attached>>>,
    work: Arc<Notify>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// A staged volume, and what became of its daemon.
#[derive(Clone, Debug)]
struct Attached {
    attachment: Attachment,
    service: Service,
    /// How often its daemon was started again since the driver started.
    restarts: u64,
    /// The last daemon, where the next is to take its place.
    leaving: Option<Leaving>,
    /// How often in a row it died soon after it was started.
    hasty_ends: u32,
    /// Whether its daemon shows it as a file, too.
    image: Image,
}

#[derive(Clone, Debug)]
enum Service {
    Up(Daemon),
    Down { reason: String },
}

/// What a person wants to know of a staged volume.
#[derive(Clone, Debug)]
pub struct Attachments {
    /// Where it is staged.
    pub staging_path: PathBuf,
    /// Where it is published.
    pub targets: Vec<PathBuf>,
    /// How it is used.
    pub capability: Capability,
    /// The vhost-user-blk socket itself, where there is one for whoever comes first.
    pub socket: Option<PathBuf>,
    /// As what the relay serves it: one for each VM that can have it at the same time.
    pub relayed_as: Vec<RunKey>,
    /// The monitor for people.
    pub monitor: PathBuf,
    /// How often its daemon was started again since the driver started.
    pub restarts: u64,
    /// How its daemon died the last time, if one did since it was staged.
    pub last_death: Option<Death>,
    /// What is not as it should be though it is served; empty if nothing.
    pub warning: String,
    /// The daemon, or why there is none.
    pub daemon: Result<Daemon, String>,
}

impl Node {
    /// The name of the node.
    pub fn name(&self) -> &NodeName {
        &self.config.name
    }

    /// The directory with all that need not outlive a reboot.
    pub fn run_dir(&self) -> &Path {
        self.config.run.path()
    }

    /// The volumes of the node.
    pub fn volumes(&self) -> &Arc<Volumes> {
        &self.volumes
    }

    /// Takes a volume or snapshot for a call. What the driver has to put in order itself is waited
    /// for; another call is not.
    pub async fn claim<Id: Clone + Into<Claimed>>(&self, id: &Id) -> Result<Claim<Id>, Busy> {
        let deadline = Instant::now() + ORDER;
        loop {
            match self.claims.claim(id) {
                Err(busy) if busy.is_brief() && Instant::now() < deadline => {
                    sleep(CLAIM_RETRY).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// What happened since the driver started.
    pub fn counted(&self) -> Counted {
        self.tally.counted()
    }

    /// What is known of the attachment of a volume, if it is staged.
    pub fn attachment(&self, volume: &VolumeId) -> Option<Attachments> {
        let attached = self.attached().get(volume).cloned()?;
        let dir = self.dir(volume);
        let warning = self.warnings(&attached);
        let relayed_as = self.relay_keys(&attached.attachment);
        let Capability { access, form, group } = attached.attachment.capability();
        let is_shared = form == Form::VhostUser && access.access() == Access::Write;
        Some(Attachments {
            staging_path: attached.attachment.staging_path,
            targets: attached.attachment.targets,
            socket: is_shared.then(|| dir.vhost_socket()),
            relayed_as,
            capability: Capability { access, form, group },
            monitor: dir.daemon(self.slot(volume)).debug_monitor(),
            restarts: attached.restarts,
            last_death: self.last_death(volume),
            warning,
            daemon: match attached.service {
                Service::Up(daemon) => Ok(daemon),
                Service::Down { reason } => Err(reason),
            },
        })
    }

    /// An error while the volume is staged. Under the volume's claim the answer stays true.
    pub fn refuse_staged(&self, volume: &VolumeId) -> Result<(), Error> {
        let dir = self.dir(volume);
        let path = match self.attached().get(volume) {
            Some(Attached { attachment, .. }) => attachment.staging_path.clone(),
            // Of an attachment whose record cannot be read: a daemon may be at work there.
            None if dir.exists() => dir.path().to_owned(),
            None => return Ok(()),
        };
        Err(Error::Staged { volume: volume.clone(), path })
    }

    /// The volume at a path where it is staged or published.
    pub fn volume_at(&self, id: &VolumeId, path: &Path) -> Result<Volume, Error> {
        let volume = self.volumes.find(id)?;
        let attached = self.attached();
        let known = attached.get(id).is_some_and(|Attached { attachment, .. }| {
            attachment.staging_path == path || attachment.targets.iter().any(|one| one == path)
        });
        if known {
            return Ok(volume);
        }
        Err(Error::NotAt { volume: id.clone(), path: path.to_owned() })
    }

    /// Ends what runs in the background; daemons and published volumes stay.
    pub async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn dir(&self, volume: &VolumeId) -> VolumeDir {
        self.config.run.volume(&volume.run_key())
    }

    /// The place of the daemon that serves the volume: where the relay leads to. It alone knows,
    /// whatever a move from one to the other broke off at.
    fn slot(&self, volume: &VolumeId) -> Slot {
        serving_slot(&self.dir(volume))
    }

    /// Where the relay looks for the export of the daemon in this place, if it looks there.
    fn backend_socket(&self, volume: &VolumeId, slot: Slot) -> PathBuf {
        let dir = self.dir(volume);
        let noted = store::load::<relay::Attach>(&dir.relay()).ok().flatten();
        let noted = noted.map(|noted| noted.backend);
        noted
            .filter(|backend| dir.slot_of(backend) == Some(slot))
            .unwrap_or_else(|| dir.daemon(slot).backend_socket())
    }

    fn serving(&self, volume: &VolumeId) -> DaemonKey {
        DaemonKey { volume: volume.run_key(), slot: self.slot(volume) }
    }

    fn launch(&self, id: &VolumeId, slot: Slot) -> Result<Launch, Error> {
        let volume = self.volumes.find(id)?;
        let layers = volume.layers().to_vec();
        let form = self.form(id);
        let durability = self.durability(id, &form, layers[0].format)?;
        let reads = match volume.parameters().copy_mode() {
            CopyMode::CopyOnRead => Reads::Copy,
            CopyMode::None | CopyMode::CopyOnWrite | CopyMode::Clone => Reads::Pass,
        };
        let attachment = self.noted(id);
        let readers = attachment.as_ref().map(|one| self.make_places(one)).transpose()?;
        Ok(Launch {
            key: DaemonKey { volume: id.run_key(), slot },
            program: self.config.qsd.newest(),
            dir: self.dir(id).daemon(slot),
            exclusive: volume.lock()?,
            outlet: match form {
                Form::VhostUser => Outlet::Socket(self.backend_socket(id, slot)),
                Form::Block | Form::Filesystem { .. } => {
                    let dir = self.dir(id);
                    Outlet::File(dir.disks().pop().unwrap_or_else(|| dir.next_disk()))
                }
            },
            credentials: self.credentials(&volume)?,
            passphrase: self.passphrase(&volume)?,
            layers,
            reads,
            throttle: volume.throttle().clone(),
            durability,
            writes: self.writes(id, slot),
            readers: readers.unwrap_or_default(),
            beside: None,
        })
    }

    /// Where what is written to a volume goes. A file system that was in use when its snapshot was
    /// taken has a log that is to be replayed before it can be read, and the layers of a volume that
    /// is only read stay as they are.
    fn writes(&self, id: &VolumeId, slot: Slot) -> Writes {
        match (self.access(id), self.form(id)) {
            (Access::Write, _) => Writes::Active,
            (Access::Read, Form::Filesystem { .. }) => {
                Writes::Scratch(self.dir(id).daemon(slot).scratch())
            }
            (Access::Read, Form::VhostUser | Form::Block) => Writes::Refused,
        }
    }

    /// The form in which a volume is staged, or just being staged.
    fn form(&self, id: &VolumeId) -> Form {
        self.noted(id).map(|one| one.form).unwrap_or_default()
    }

    /// The group that a volume is given to that is staged, or just being staged.
    fn group(&self, id: &VolumeId) -> Option<Group> {
        self.noted(id).and_then(|one| one.group)
    }

    /// When writes of a volume are acknowledged whose active layer is of this format.
    ///
    /// Who uses it through a file loses it with the daemon, and knows that what was not flushed may
    /// be gone. Where nothing is written, it makes no difference.
    fn durability(&self, id: &VolumeId, form: &Form, active: Format) -> Result<Durability, Error> {
        let cache = self.volumes.find(id)?.parameters().cache();
        if self.access(id) == Access::Read || !form.is_relayed() && cache == Cache::Auto {
            return Ok(Durability::OnFlush);
        }
        Ok(match (cache, active) {
            // Nothing of a raw layer is in the memory of the daemon (facts/qsd.md, D2).
            (Cache::Auto, Format::Raw) | (Cache::Writeback, _) => Durability::OnFlush,
            (Cache::Auto, Format::Qcow2) | (Cache::Writethrough, _) => Durability::EachWrite,
        })
    }

    /// Notes that a daemon serves the volume, and has its end watched from now on, also if it has
    /// ended already.
    fn serves(&self, volume: &VolumeId, daemon: Daemon, entrance: Entrance) {
        let mut attached = self.attached();
        let Some(one) = attached.get_mut(volume) else { return };
        self.note_entrance(one, &daemon, entrance);
        one.service = Service::Up(daemon.clone());
        if !matches!(entrance, Entrance::Staged) {
            one.image = Image::Hidden; // until it is looked at
        }
        self.tasks.spawn(self.clone().watch_monitor(volume.clone(), daemon));
    }

    /// Tells of a daemon that serves from now on, in one line, and counts it.
    fn note_entrance(&self, one: &mut Attached, daemon: &Daemon, entrance: Entrance) {
        let (volume, pid, version) = (&one.attachment.volume, daemon.pid(), daemon.version());
        let leaving = one.leaving.take();
        match entrance {
            Entrance::Staged => info!(%volume, pid, version, reason = "staged", "daemon started"),
            Entrance::TakenOver => info!(%volume, pid, version, "daemon taken over"),
            Entrance::Moved(stopped) => {
                let (reason, seconds) = (Cause::Upgraded.as_str(), stopped.as_secs_f64());
                let replaces = one.pid();
                info!(%volume, pid, version, replaces, reason, seconds, "daemon replaced");
            }
            Entrance::Again => {
                let cause = leaving.as_ref().map_or(Cause::Died, |one| one.cause);
                one.restarts += 1;
                self.tally.note_restart(cause);
                let reason = cause.as_str();
                match leaving {
                    Some(Leaving { pid: replaces, error, .. }) if cause != Cause::Died => {
                        let error = Some(error).filter(|error| !error.is_empty());
                        info!(%volume, pid, version, replaces, reason, error, "daemon replaced");
                    }
                    Some(_) | None => info!(%volume, pid, version, reason, "daemon started"),
                }
            }
        }
    }

    /// Notes that a daemon is given up by the driver itself, and why: nobody is told that it died.
    fn gives_up(&self, volume: &VolumeId, pid: i32, cause: Cause, error: &str) {
        let mut attached = self.attached();
        let Some(one) = attached.get_mut(volume) else { return };
        // What came first is the reason: one that is killed for it also died, and is gone then.
        if one.leaving.as_ref().is_none_or(|known| known.pid != Some(pid)) {
            one.leaving = Some(Leaving { pid: Some(pid), cause, error: error.to_owned() });
        }
    }

    fn find(&self, volume: &VolumeId) -> Option<Attached> {
        self.attached().get(volume).cloned()
    }

    /// Notes what became of an attachment on the way out, on disk first. A run directory that is
    /// full must not keep anybody from leaving it: what the disk still says then is driven on, or
    /// found to be done, after a crash.
    fn note_leaving(&self, next: Attachment) -> Result<(), Error> {
        match self.save(&next) {
            Err(Error::Store { source, volume })
                if source.io_kind() == Some(io::ErrorKind::StorageFull) =>
            {
                warn!(%volume, error = %Chain(&source), "run-dir");
            }
            outcome => outcome?,
        }
        self.remember(next);
        Ok(())
    }

    /// Notes what became of an attachment, on disk first.
    fn note(&self, next: Attachment) -> Result<(), Error> {
        self.save(&next)?;
        self.remember(next);
        Ok(())
    }

    fn remember(&self, next: Attachment) {
        let mut attached = self.attached();
        if let Some(one) = attached.get_mut(&next.volume) {
            one.attachment = next;
        }
    }

    fn save(&self, attachment: &Attachment) -> Result<(), Error> {
        let volume = &attachment.volume;
        let saved = attachment.save(&self.dir(volume).attachment());
        saved.map_err(|source| Error::Store { volume: volume.clone(), source })
    }

    fn attached(&self) -> MutexGuard<'_, HashMap<VolumeId, Attached>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of the daemon that serves the volume of this part of the run directory.
fn serving_slot(dir: &VolumeDir) -> Slot {
    let noted = store::load::<relay::Attach>(&dir.relay()).ok().flatten();
    noted.and_then(|noted| dir.slot_of(&noted.backend)).unwrap_or_default()
}

impl Attached {
    /// An attachment of whose daemon nothing is known yet.
    fn new(attachment: Attachment) -> Self {
        let service = Service::Down { reason: "not looked at yet".to_owned() };
        let (restarts, hasty_ends, image) = (0, 0, Image::Hidden);
        Self { attachment, service, restarts, leaving: None, hasty_ends, image }
    }

    /// The process id of its daemon, if one serves it.
    fn pid(&self) -> Option<i32> {
        match &self.service {
            Service::Up(daemon) => Some(daemon.pid()),
            Service::Down { .. } => None,
        }
    }

    /// Whether this daemon is given up by the driver itself.
    fn is_given_up(&self, pid: i32) -> bool {
        self.leaving.as_ref().is_some_and(|one| one.pid == Some(pid) && one.cause != Cause::Died)
    }
}

impl Error {
    /// Whether a daemon serves the volume, but not as the records have it by now.
    fn is_outdated(&self) -> bool {
        matches!(self, Self::Daemon { source: qsd::Error::Outdated { .. }, .. })
    }

    /// Whether a daemon did not answer.
    fn is_of_deaf_daemon(&self) -> bool {
        let Self::Daemon { source: qsd::Error::Monitor(source), .. } = self else { return false };
        matches!(source, qsd::MonitorError::Deadline { .. })
    }

    /// Whether a daemon ended while it was at something.
    fn is_of_ended_daemon(&self) -> bool {
        let (Self::Daemon { source, .. } | Self::Workshop { source, .. }) = self else {
            return false;
        };
        matches!(source, qsd::Error::Monitor(qsd::MonitorError::Closed))
    }

    fn run(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Run { path, source }
    }

    fn filesystem(volume: &VolumeId) -> impl FnOnce(filesystem::Error) -> Self + use<> {
        let volume = volume.clone();
        move |source| Self::Filesystem { volume, source }
    }

    fn daemon(volume: &VolumeId) -> impl FnOnce(qsd::Error) -> Self + use<> {
        let volume = volume.clone();
        move |source| match source {
            qsd::Error::Locked => Self::Locked { volume },
            source => Self::Daemon { volume, source },
        }
    }
}
