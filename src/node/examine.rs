//! What is wrong with what is staged on this machine: attachments, daemons, mounts, loop devices,
//! and the relay. Nothing is changed and nobody is asked who could hang, so it can be looked at with
//! the driver at work, dead or stuck.

use super::{
    HostPath,
    attachment::{Attachment, Phase},
    condition::ended_below,
    device::LoopDevice,
    host::{self, Mounted},
    readers::Note,
    serving_slot,
};
use crate::{
    chain::Chain,
    finding::{Cure, Finding, Weight},
    run::{DaemonKey, RunDir, Slot},
    store::{self, Locks},
    supervisor,
    volume::{RunKey, VolumeId},
};
use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

/// What to look at, and what is known already.
#[derive(Debug)]
pub struct Surroundings<'a> {
    /// The run directory.
    pub run: &'a RunDir,
    /// Who holds which lock.
    pub locks: &'a Locks,
    /// The volumes that the pools have.
    pub volumes: &'a BTreeSet<VolumeId>,
    /// The driver of the run directory, where it runs.
    pub driver: Option<i32>,
}

/// What a look at a run directory found.
#[derive(Debug, Default)]
pub struct Examined {
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// What broke off, and the driver settles by itself when it starts.
    pub pending: Vec<String>,
    /// The daemons that belong to what is staged.
    pub daemons: HashMap<DaemonKey, i32>,
    /// How many volumes are staged.
    pub staged: usize,
    /// The parts that some record explains, or that may be explained by one that cannot be read.
    explained: BTreeSet<RunKey>,
}

const SAFE: &str = "the data is safe";

impl Surroundings<'_> {
    /// Looks at all there is.
    pub fn examine(&self) -> io::Result<Examined> {
        let daemons = supervisor::daemons(self.run)?;
        let mut found = Examined { daemons, ..Examined::default() };
        let mounts = host::mounts()?;
        let keys = self.run.keys()?;
        if !keys.is_empty() && found.daemons.is_empty() && self.is_of_earlier_boot() {
            found.pending.push(format!("{} parts of an earlier boot", keys.len()));
            return Ok(found);
        }
        for key in &keys {
            self.examine_part(key, &mut found);
        }
        self.examine_relay(&mut found);
        self.examine_mounts(&mounts, &mut found);
        self.examine_devices(&mut found)?;
        Ok(found)
    }

    fn is_of_earlier_boot(&self) -> bool {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let noted = store::load::<String>(&self.run.boot()).ok().flatten();
        noted.is_some_and(|noted| noted != boot.trim())
    }

    fn examine_part(&self, key: &RunKey, found: &mut Examined) {
        let dir = self.run.volume(key);
        match store::load::<Note>(&dir.reader()) {
            Ok(None) => {}
            Ok(Some(note)) => return self.examine_reader(key, &note, found),
            Err(error) => {
                found.explained.insert(key.clone());
                let (about, what) = (format!("reader {key}"), Chain(&error).to_string());
                found.findings.push(
                    Finding::new(Weight::Trouble, "reader-unreadable", about, what)
                        .at(dir.reader())
                        .means("nobody knows who reads there. Who does goes on; the data is safe")
                        .next("have what reads it unpublished and published anew"),
                );
                return;
            }
        }
        match store::load::<Attachment>(&dir.attachment()) {
            Ok(Some(attachment)) => {
                found.explained.insert(key.clone());
                self.examine_attachment(&attachment, found);
            }
            Ok(None) => self.examine_unexplained(key, found),
            Err(error) => {
                found.explained.insert(key.clone());
                let volume = self.volumes.iter().find(|id| id.run_key() == *key);
                let about = volume.map_or_else(|| format!("attachment {key}"), about);
                let what = Chain(&error).to_string();
                found.findings.push(
                    Finding::new(Weight::Trouble, "attachment-unreadable", about, what)
                        .at(dir.attachment())
                        .means(
                            "nobody knows where the volume is published. Who uses it goes on, and \
                             it cannot be deleted; the data is safe",
                        )
                        .next("have the volume unstaged, or staged anew by a restart of kubelet"),
                );
            }
        }
    }

    fn examine_reader(&self, key: &RunKey, note: &Note, found: &mut Examined) {
        let id = &note.volume;
        let attachment = self.run.volume(&id.run_key()).attachment();
        match store::load::<Attachment>(&attachment) {
            Ok(Some(attachment)) if note.is_wanted(&attachment) => {
                found.explained.insert(key.clone());
            }
            Ok(_) => found.pending.push(format!("end of a reader of volume {id}")),
            Err(error) => {
                found.explained.insert(key.clone());
                let what = format!(
                    "nobody knows whether it is published at {}, to be read: {}",
                    note.target.display(),
                    Chain(&error)
                );
                found.findings.push(
                    Finding::new(Weight::Trouble, "reader-unclear", about(id), what)
                        .at(self.run.volume(key).path())
                        .means("who reads there goes on; the data is safe")
                        .next("see what is said of the attachment of the volume"),
                );
            }
        }
    }

    fn examine_unexplained(&self, key: &RunKey, found: &mut Examined) {
        let daemon = Slot::ALL
            .into_iter()
            .find_map(|slot| found.daemons.get(&DaemonKey { volume: key.clone(), slot }).copied());
        match (daemon, self.driver) {
            // It works on layers, or has just been started to.
            (_, Some(_)) => {
                found.explained.insert(key.clone());
            }
            (Some(pid), None) => {
                found.explained.insert(key.clone());
                found.pending.push(format!("end of a daemon of no volume, process {pid}"));
            }
            (None, None) => {
                let what = "no record says of which volume this is, and no daemon runs in it";
                let about = format!("run directory {key}");
                let finding = Finding::new(Weight::Garbage, "part-unexplained", about, what.into());
                found.findings.push(
                    finding
                        .at(self.run.volume(key).path())
                        .means("nothing: what lies there does not outlive a daemon")
                        .next("qsd-csi doctor --fix, or start the driver")
                        .cured_by(Cure::RemovePart(key.clone())),
                );
            }
        }
    }

    fn examine_attachment(&self, attachment: &Attachment, found: &mut Examined) {
        let id = &attachment.volume;
        if attachment.phase != Phase::Staged {
            if self.driver.is_none() {
                found.pending.push(format!("{:?} of volume {id}", attachment.phase));
            }
            return;
        }
        found.staged += 1;
        let dir = self.run.volume(&id.run_key());
        if !self.volumes.contains(id) {
            found.findings.push(
                Finding::new(
                    Weight::Damage,
                    "volume-unknown",
                    about(id),
                    "it is staged here, and none of the pools that were looked at has it".into(),
                )
                .at(dir.attachment())
                .means("if its record is lost, its daemon is all that still knows its layers")
                .next(
                    "name all pools with --pool. If these are all: keep the daemon running, copy \
                     what is on the volume, and bring its record back",
                ),
            );
        }
        self.examine_daemons(id, found);
        for target in &attachment.targets {
            let is_there = HostPath::noted(target.clone()).mounted().is_ok_and(|at| at.is_some());
            if !is_there {
                let what =
                    format!("nothing is mounted at {}, where it is published", target.display());
                found.findings.push(
                    Finding::new(Weight::Trouble, "target-unmounted", about(id), what)
                        .at(target)
                        .means(format!("the pod there does not have its volume; {SAFE}"))
                        .next("start the pod anew"),
                );
            }
        }
        if let Some(what) = ended_below(&dir, attachment) {
            found.findings.push(
                Finding::new(Weight::Trouble, "ended-below", about(id), what)
                    .at(&attachment.staging_path)
                    .means(
                        "what was not synced is lost, as after a power failure; the rest is safe",
                    )
                    .next("start its pods anew"),
            );
        }
    }

    fn examine_daemons(&self, id: &VolumeId, found: &mut Examined) {
        let key = id.run_key();
        let slot = serving_slot(&self.run.volume(&key));
        let place = |slot| DaemonKey { volume: key.clone(), slot };
        let pid_in = |slot: Slot, found: &Examined| found.daemons.get(&place(slot)).copied();
        let at = self.run.daemon(&place(slot)).path().to_owned();
        if let Some(other) = pid_in(slot.other(), found) {
            found.findings.push(
                Finding::new(
                    Weight::Trouble,
                    "daemon-second",
                    about(id),
                    format!("a second daemon, process {other}, runs beside the one that serves it"),
                )
                .at(self.run.daemon(&place(slot.other())).path())
                .means(format!("nobody uses that one; {SAFE}"))
                .next("start the driver anew, which ends it"),
            );
        }
        match pid_in(slot, found) {
            None => {
                let means = "whoever has it waits, or sees errors where it is a block device or \
                             file system; what was acknowledged is safe";
                let next = match self.driver {
                    Some(_) => "see `qsd-csi volume show`, which says why; it is tried again",
                    None => "start the driver, which starts it again",
                };
                let what = "it is staged, and no daemon serves it".to_owned();
                let finding = Finding::new(Weight::Trouble, "daemon-gone", about(id), what);
                found.findings.push(finding.at(at).means(means).next(next));
            }
            Some(pid) if is_stopped(pid) => {
                let what =
                    format!("its daemon, process {pid}, is stopped (SIGSTOP, or a debugger)");
                found.findings.push(
                    Finding::new(Weight::Trouble, "daemon-stopped", about(id), what)
                        .at(at)
                        .means(format!("whoever has it waits; {SAFE}"))
                        .next(format!("kill -CONT {pid}")),
                );
            }
            Some(_) => {}
        }
    }

    /// One finding for all: without a relay, no VM has its disk.
    fn examine_relay(&self, found: &mut Examined) {
        let keys = found.explained.iter();
        let relayed = keys.filter(|key| self.run.volume(key).relay().exists()).count();
        let relay = self.run.relay();
        for (lock, what, means) in [
            (
                relay.lock(),
                "the relay's keeper does not run",
                "VMs of sockets go on while the worker lives; where it does not, they have lost \
                 their disk, or wait with `reconnect`",
            ),
            (
                relay.worker_lock(),
                "the relay's worker does not run",
                "VMs go on, and those that start wait",
            ),
        ] {
            if relayed == 0 || self.locks.holder(&lock).is_some() {
                continue;
            }
            let next = "the supervisor starts it while a daemon runs; start the driver, which \
                        starts the supervisor. What it has to say is in relay.log beside";
            let about = format!("relay of {relayed} volumes");
            let finding = Finding::new(Weight::Trouble, "relay-gone", about, what.to_owned());
            found.findings.push(finding.at(lock).means(format!("{means}; {SAFE}")).next(next));
        }
        let lock = self.run.supervisor_lock();
        if !found.daemons.is_empty() && self.locks.holder(&lock).is_none() {
            let what = "daemons run, and no supervisor".to_owned();
            let about = "supervisor".to_owned();
            let finding = Finding::new(Weight::Trouble, "supervisor-gone", about, what);
            found.findings.push(
                finding
                    .at(lock)
                    .means(format!("daemons go on, and none is started again; {SAFE}"))
                    .next("start the driver, which starts it"),
            );
        }
    }

    /// What shows directories or files of ours that no record explains.
    fn examine_mounts(&self, mounts: &[Mounted], found: &mut Examined) {
        let Some((device, base)) = place_of(self.run.path(), mounts) else { return };
        // What is on top of another goes first.
        for mounted in mounts.iter().rev() {
            let root = mounted.root.to_string_lossy();
            let root = Path::new(root.strip_suffix("//deleted").unwrap_or(&root));
            let shown = root.strip_prefix(&base).ok().filter(|_| mounted.device == device);
            let below = mounted.point.strip_prefix(self.run.path()).ok();
            let key = match (shown, below) {
                (Some(shown), _) if shown.ends_with("export") => key_of(shown),
                (_, Some(below)) if mounted.kind.starts_with("fuse") => key_of(below),
                _ => None,
            };
            // Of what is explained, others may have mounts of their own: kubelet, for a `subPath`.
            let Some(key) = key.filter(|key| !found.explained.contains(key)) else { continue };
            let what = format!("something of {key} is mounted here, and no record says why");
            let about = format!("mount {}", mounted.point.display());
            found.findings.push(
                Finding::new(Weight::Garbage, "mount-stale", about, what)
                    .at(&mounted.point)
                    .means(format!("what is seen there is served by nobody; {SAFE}"))
                    .next("end the pod that has it, or qsd-csi doctor --fix")
                    .cured_by(Cure::Unmount(mounted.clone())),
            );
        }
    }

    fn examine_devices(&self, found: &mut Examined) -> io::Result<()> {
        for device in LoopDevice::below(self.run.path())? {
            let (path, file) = (device.path(), device.file());
            let key = file.strip_prefix(self.run.path()).ok().and_then(key_of);
            if key.is_some_and(|key| found.explained.contains(&key)) {
                continue;
            }
            let what = format!("it is over {}, which no record explains", file.display());
            found.findings.push(
                Finding::new(Weight::Garbage, "device-stale", path.display().to_string(), what)
                    .at(path)
                    .means(format!("whoever has it open sees errors; {SAFE}"))
                    .next("end the pod that has it, or qsd-csi doctor --fix")
                    .cured_by(Cure::Detach(device)),
            );
        }
        Ok(())
    }
}

fn about(id: &VolumeId) -> String {
    format!("volume {id}")
}

/// Whether a process was stopped (proc(5): the letter behind its name).
fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

/// On which device a directory lies, and where in its file system: as mounts that show a part of it
/// name it.
fn place_of(dir: &Path, mounts: &[Mounted]) -> Option<((u32, u32), PathBuf)> {
    let above = mounts.iter().filter(|mounted| dir.starts_with(&mounted.point));
    // Of several at the same point, the last one hides the others.
    let holds = above.max_by_key(|mounted| mounted.point.components().count())?;
    Some((holds.device, holds.root.join(dir.strip_prefix(&holds.point).ok()?)))
}

/// Whose part of the run directory a path in that is in.
fn key_of(path: &Path) -> Option<RunKey> {
    path.components().next()?.as_os_str().to_str()?.parse().ok()
}

impl Note {
    /// Whether its volume is staged and published there still.
    pub(super) fn is_wanted(&self, attachment: &Attachment) -> bool {
        attachment.phase == Phase::Staged
            && attachment.targets.contains(&self.target)
            && attachment.has_reader_at(&self.target)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_directory_is_found_by_what_its_file_system_calls_it() {
        let table = b"22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            90 22 0:24 / /run rw - tmpfs tmpfs rw\n\
            91 22 0:24 /q/0123456789abcdef0123456789abcdef/export//deleted /t rw - tmpfs tmpfs rw\n";
        let mounts: Vec<_> = host::lines(table).collect();
        let (device, base) = place_of(Path::new("/run/q"), &mounts).unwrap();
        assert_eq!((device, base.as_path()), ((0, 24), Path::new("/q")));
        let key = key_of(mounts[2].root.strip_prefix(base).unwrap()).unwrap();
        assert_eq!(key.as_str(), "0123456789abcdef0123456789abcdef");
        assert_eq!(key_of(Path::new("relay/lock")), None);
    }
}
