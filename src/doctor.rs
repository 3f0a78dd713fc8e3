//! `qsd-csi doctor`: looks at pools, records, layers, daemons, mounts, loop devices, run directory,
//! relay and locks, and says what is wrong.
//!
//! It works with the driver at work, dead or stuck, and on a pool that was carried here. It only
//! reads, and takes no lock; with a driver at work, what it finds counts if another look finds it,
//! too. What is provably worth nothing can be removed (`cure`), by whoever holds all the locks that a
//! driver would.

use crate::{
    chain::Chain,
    finding::{Cure, Finding, Weight},
    node::{Examined, Surroundings, device::Detached},
    pool::{self, Pool},
    run::{DaemonKey, RunDir, Slot},
    store::{self, Locks},
    volume::{Examination, PoolName, RunKey, VolumeId, Volumes},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    thread::sleep,
    time::Duration,
};

/// Why there was no look, or no cure.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pool cannot be read.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// The run directory, or what the kernel tells, cannot be read.
    #[error("{what}")]
    Io {
        /// What was looked at.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// A driver is at work, or may be.
    #[error("{} is in use by another process{}; --fix is for when no driver runs", dir.display(), pid_text(*.pid))]
    InUse {
        /// The run directory, or a pool.
        dir: PathBuf,
        /// Who uses it.
        pid: Option<i32>,
    },
}

/// What to look at.
#[derive(Clone, Debug)]
pub struct Config {
    /// The pools, by name.
    pub pools: Vec<(PoolName, PathBuf)>,
    /// The run directory of the driver, which need not be there.
    pub run_dir: PathBuf,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Report {
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// What broke off, and the driver settles by itself when it starts.
    pub pending: Vec<String>,
    /// The driver, where it runs.
    pub driver: Option<i32>,
    /// How many pools could be looked at.
    pub pools: usize,
    /// How many volumes there are, also those that cannot be used.
    pub volumes: usize,
    /// How many snapshots.
    pub snapshots: usize,
    /// How many layers.
    pub layers: usize,
    /// How many of the volumes are staged.
    pub staged: usize,
}

/// What became of a finding that could be cured.
#[derive(Debug)]
pub struct Cured {
    /// The finding.
    pub finding: Finding,
    /// What kept it from being cured, if anything.
    pub trouble: Option<io::Error>,
}

/// How long after a first look the next ones are: what a call is doing is over by then.
const LOOKS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];

/// What others may do with a directory or a file.
const OTHERS: u32 = 0o007;
const GROUP: u32 = 0o070;

impl Config {
    /// Looks at everything. With a driver at work, what is told was seen each time.
    pub fn examine(&self) -> Result<Report, Error> {
        let mut report = self.look()?;
        for pause in LOOKS {
            if report.driver.is_none() || report.findings.is_empty() {
                break;
            }
            sleep(pause);
            let again = self.look()?;
            let was_seen = |one: &Finding| report.findings.iter().any(|other| other.is(one));
            let findings = again.findings.iter().filter(|one| was_seen(one)).cloned().collect();
            report = Report { findings, ..again };
        }
        report.findings.sort_by(|a, b| (a.weight, &a.about).cmp(&(b.weight, &b.about)));
        Ok(report)
    }

    /// Removes what is provably worth nothing, once it has locked everything that a driver would,
    /// and looked again under these locks.
    pub async fn cure(&self) -> Result<(Report, Vec<Cured>), Error> {
        let locks = Locks::read().map_err(failed("/proc/locks"))?;
        let _run = self.run()?.map(|run| hold(run.path(), &locks)).transpose()?;
        let mut pools = Vec::new();
        for (name, dir) in self.pools.iter().filter(|(_, dir)| dir.exists()) {
            let pool = Pool::look(name.clone(), dir)?;
            let pid = locks.holder(dir);
            pool.lock().map_err(|_| Error::InUse { dir: dir.clone(), pid })?;
            pools.push(pool);
        }
        let mut report = self.look()?;
        let (curable, rest) = report.findings.drain(..).partition(|one| one.cure.is_some());
        report.findings = rest;
        let mut curable = Vec::from_iter::<Vec<Finding>>(curable);
        // What is mounted or attached goes before what it shows: it is known by that.
        curable.sort_by_key(|one| matches!(one.cure, Some(Cure::RemovePart(_))));
        let mut cured = Vec::new();
        for finding in curable {
            let trouble = match &finding.cure {
                Some(cure) => self.apply(cure).await.err(),
                None => None,
            };
            cured.push(Cured { finding, trouble });
        }
        // What else was wrong with what is gone is not wrong any more.
        let is_gone = |one: &Finding| {
            let removed = cured.iter().filter(|cured| cured.trouble.is_none());
            one.path.is_some() && removed.into_iter().any(|cured| cured.finding.path == one.path)
        };
        report.findings.retain(|one| !is_gone(one));
        Ok((report, cured))
    }

    /// A mount or a device is taken away the way the driver does it, if it is still the one that was
    /// looked at.
    async fn apply(&self, cure: &Cure) -> io::Result<()> {
        match cure {
            Cure::RemoveFile(path) => {
                if let Some((pid, _)) = openers(|open| open == path)?.pop_first() {
                    return Err(io::Error::other(format!("process {pid} has it open")));
                }
                store::remove(path).map_err(io::Error::other)
            }
            Cure::Unmount(mounted) => mounted.unmount(),
            Cure::Detach(device) => match device.detach().await {
                Ok(Detached::Now) => Ok(()),
                Ok(Detached::Later) => Err(io::Error::other("somebody has it open")),
                Err(error) => Err(io::Error::other(Chain(&error).to_string())),
            },
            Cure::RemovePart(key) => match self.run().map_err(io::Error::other)? {
                Some(run) => remove_part(&run, key),
                None => Ok(()),
            },
        }
    }

    fn run(&self) -> Result<Option<RunDir>, Error> {
        RunDir::look(&self.run_dir).map_err(failed(self.run_dir.display()))
    }

    /// One look at everything.
    fn look(&self) -> Result<Report, Error> {
        let locks = Locks::read().map_err(failed("/proc/locks"))?;
        let run = self.run()?;
        let driver = run.as_ref().and_then(|run| another(&locks, run.path()));
        let mut report = Report { driver, ..Report::default() };
        let mut pools = Vec::new();
        for (name, dir) in &self.pools {
            pools.extend(open(name, dir, &mut report)?.map(Arc::new));
        }
        report.pools = pools.len();
        let Examination { findings, pending, volumes, snapshots, layers } =
            Volumes::examine(pools.clone())?;
        (report.volumes, report.snapshots, report.layers) = (volumes.len(), snapshots, layers);
        report.findings.extend(findings);
        report.pending.extend(pending);
        for pool in &pools {
            examine_pool(pool, &volumes, &locks, &mut report)?;
        }
        let mut daemons = BTreeSet::new();
        if let Some(run) = &run {
            let around = Surroundings { run, locks: &locks, volumes: &volumes, driver };
            let staged = around.examine().map_err(failed(run.path().display()))?;
            let Examined { findings, pending, daemons: own, staged, .. } = staged;
            report.staged = staged;
            report.findings.extend(findings);
            report.pending.extend(pending);
            daemons.extend(own.into_values());
        }
        daemons.extend(driver);
        daemons.extend(i32::try_from(std::process::id()));
        examine_openers(&pools, &daemons, &mut report)?;
        if driver.is_some() {
            report.pending.clear(); // it is at work on that
        }
        Ok(report)
    }
}

/// Opens a pool for a look; what is not there is a finding.
fn open(name: &PoolName, dir: &Path, report: &mut Report) -> Result<Option<Pool>, Error> {
    let gone = |what: &str| {
        Finding::new(Weight::Damage, "pool-gone", format!("pool {name}"), what.to_owned())
            .at(dir)
            .means(
                "nothing of it can be used until it is back. Volumes that run go on as long as \
                 their daemons have their layers open",
            )
            .next("mount the file system that holds it, or say where it is by now")
    };
    let pool = match Pool::look(name.clone(), dir) {
        Err(error) if error.io_kind() == Some(io::ErrorKind::NotFound) => {
            report.findings.push(gone("there is no such directory"));
            return Ok(None);
        }
        pool => pool?,
    };
    let missing = pool.parts().find(|part| !part.is_dir());
    match (pool.is_one(), missing) {
        (Ok(true), None) => return Ok(Some(pool)),
        (Ok(true), Some(part)) => {
            let what = format!("{} is missing in it", part.display());
            report.findings.push(gone(&what));
        }
        (Ok(false), _) => {
            report.findings.push(gone("there is no pool in this directory (no pool.json)"));
        }
        (Err(error), _) => {
            let what = Chain(&error).to_string();
            let about = format!("pool {name}");
            report.findings.push(
                Finding::new(Weight::Damage, "pool-unreadable", about, what)
                    .at(pool.identity())
                    .means(
                        "nothing of the pool can be used; its data is safe, and so are other pools",
                    )
                    .next("bring the file back from a backup, or use the driver that wrote it"),
            );
        }
    }
    Ok(None)
}

/// What is wrong with a pool besides its records and layers.
fn examine_pool(
    pool: &Pool,
    volumes: &BTreeSet<VolumeId>,
    locks: &Locks,
    report: &mut Report,
) -> Result<(), Error> {
    let about = || format!("pool {}", pool.name());
    let is_clear = report.findings.iter().all(|one| one.weight == Weight::Garbage);
    if let Err(error) = pool.require_writable() {
        report.findings.push(
            Finding::new(Weight::Trouble, "pool-read-only", about(), Chain(&error).to_string())
                .at(pool.dir())
                .means("what is there can be read; whoever writes sees errors")
                .next(
                    "see the kernel's log (dmesg): a file system becomes read-only by itself when \
                     its disk fails. Then check it, and mount it anew",
                ),
        );
    }
    if let Some(pid) = another(locks, pool.dir()).filter(|pid| Some(*pid) != report.driver) {
        let what = format!("process {pid} has it locked, which is no driver of this run directory");
        report.findings.push(
            Finding::new(Weight::Trouble, "pool-locked", about(), what)
                .at(pool.dir())
                .means("a driver that is to use it does not start; the data is safe")
                .next(format!(
                    "name its run directory with --run-dir, or see who it is: ps -p {pid}"
                )),
        );
    }
    examine_rights(pool, report)?;
    if report.driver.is_some() {
        return Ok(()); // it may be writing, creating and deleting
    }
    for path in pool.temporary()? {
        report.findings.push(
            Finding::new(
                Weight::Garbage,
                "file-temporary",
                format!("file {}", path.file_name().unwrap_or_default().display()),
                "it was being written when the driver died, and never became a record".to_owned(),
            )
            .at(&path)
            .means("nothing: who wanted it was told of no success")
            .next("qsd-csi doctor --fix, or start the driver")
            .cured_by(Cure::RemoveFile(path.clone())),
        );
    }
    let known: BTreeSet<_> = volumes.iter().map(VolumeId::as_str).collect();
    let deleted = pool.records(pool::Kind::DeletingVolume)?;
    for (name, path) in pool.locks()? {
        // While something is missing, its lock may be what tells of it.
        let is_known = !is_clear
            || known.contains(name.as_str())
            || deleted.iter().any(|(_, stem)| *stem == name);
        if is_known || locks.holder(&path).is_some() {
            continue;
        }
        report.findings.push(
            Finding::new(
                Weight::Garbage,
                "lock-unnamed",
                format!("lock {name}"),
                "there is no volume of this name, and nobody holds the lock".to_owned(),
            )
            .at(&path)
            .means("nothing: there is never anything in it")
            .next("qsd-csi doctor --fix")
            .cured_by(Cure::RemoveFile(path.clone())),
        );
    }
    Ok(())
}

/// Nobody else may enter a pool, or read what is in it.
fn examine_rights(pool: &Pool, report: &mut Report) -> Result<(), Error> {
    let layers = pool.layers()?.into_iter().map(|(_, path)| path);
    for path in pool.parts().chain(layers) {
        let Ok(data) = fs::metadata(&path) else { continue }; // it may have just been removed
        let is_open = data.mode() & OTHERS != 0 || data.gid() != 0 && data.mode() & GROUP != 0;
        if data.uid() == 0 && !is_open {
            continue;
        }
        let (mode, uid, gid) = (data.mode() & 0o7777, data.uid(), data.gid());
        let what = format!("others can get at it: mode {mode:04o} of user {uid}, group {gid}");
        let name = path.file_name().unwrap_or_default().display();
        report.findings.push(
            Finding::new(Weight::Trouble, "rights-wide", format!("file {name}"), what)
                .at(&path)
                .means("who is no root on this machine may read, or change, what tenants have")
                .next(format!("chown root:root {0} && chmod go= {0}", path.display())),
        );
    }
    Ok(())
}

/// Processes that have layers open and are not known to serve them.
fn examine_openers(
    pools: &[Arc<Pool>],
    known: &BTreeSet<i32>,
    report: &mut Report,
) -> Result<(), Error> {
    let dirs: Vec<_> = pools.iter().map(|pool| pool.layers_dir()).collect();
    let is_layer = |path: &Path| dirs.iter().any(|dir| path.starts_with(dir));
    for (pid, files) in openers(is_layer).map_err(failed("/proc"))? {
        if known.contains(&pid) {
            continue;
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let what = format!(
            "it ({}) has {} open, and is no daemon of what is staged here",
            name.trim(),
            files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", "),
        );
        report.findings.push(
            Finding::new(Weight::Trouble, "opener-unknown", format!("process {pid}"), what)
                .at(&files[0])
                .means(
                    "a daemon may have lost its run directory, and still serve a VM. Two that \
                     write to a layer destroy it, so its volume is not served by another",
                )
                .next(format!(
                    "find out whom it serves. If nobody needs it any more: kill {pid}, and stage \
                     the volume again"
                )),
        );
    }
    Ok(())
}

/// The processes that have such files open, by their names: nobody is asked who could hang.
fn openers(is_meant: impl Fn(&Path) -> bool) -> io::Result<BTreeMap<i32, Vec<PathBuf>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let files = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let names = files.filter_map(|file| fs::read_link(file.path()).ok());
        let names: BTreeSet<_> = names.filter(|name| is_meant(name)).collect();
        if !names.is_empty() {
            found.insert(pid, names.into_iter().collect());
        }
    }
    Ok(found)
}

/// Who else has locked something.
fn another(locks: &Locks, path: &Path) -> Option<i32> {
    locks.holder(path).filter(|pid| i32::try_from(std::process::id()) != Ok(*pid))
}

/// Locks the run directory as a driver does.
fn hold(dir: &Path, locks: &Locks) -> Result<File, Error> {
    let file = File::open(dir).map_err(failed(dir.display()))?;
    let pid = locks.holder(dir);
    store::lock(&file).map_err(|_| Error::InUse { dir: dir.to_owned(), pid })?;
    Ok(file)
}

fn failed(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> Error {
    let what = what.to_string();
    move |source| Error::Io { what, source }
}

fn pid_text(pid: Option<i32>) -> String {
    pid.map_or_else(String::new, |pid| format!(", {pid}"))
}

/// Removes a part of the run directory that no daemon has: one that is not seen from here, in
/// another namespace, holds its lock all the same.
fn remove_part(run: &RunDir, key: &RunKey) -> io::Result<()> {
    let mut held = Vec::new();
    for slot in Slot::ALL {
        let lock = run.daemon(&DaemonKey { volume: key.clone(), slot }).lock();
        match File::open(&lock) {
            Ok(file) => {
                let taken = store::lock(&file);
                taken.map_err(|_| io::Error::other(format!("{} is held", lock.display())))?;
                held.push(file);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    run.volume(key).remove()
}
