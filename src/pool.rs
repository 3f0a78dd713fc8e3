//! A pool: a directory on this node that holds layers and the records about them.
//!
//! Owns the places (which file is where), the lock that keeps a second driver out, and the count
//! of bytes. What the records mean is the domain's (`volume`). A pool explains itself, so it can
//! be carried to another machine:
//!
//! ```text
//! POOL/pool.json                    format version, pool id
//! POOL/layers/<uuid>.raw .qcow2             data
//! POOL/locks/<id>                           held by the daemon of a volume while it lives
//! POOL/records/layers/<uuid>.json           parent, format, virtual size
//! POOL/records/volumes/<id>.json            phase, active layer, size, parameters, access modes
//! POOL/records/snapshots/<id>.json          layer, source volume, size, time
//! POOL/records/deleting/<id>.json           a volume, once its end is decided
//! POOL/records/deleting-snapshots/<id>.json a snapshot, once its end is decided
//! POOL/records/deleting-layers/<uuid>.json  a layer, once its end is decided
//! ```

mod encrypted;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod health;

use crate::{
    chain::Chain,
    qcow2,
    store::{self, Version},
    units::Bytes,
    volume::{Format, LayerId, PoolName, VolumeId},
};
use rustix::fs::{OFlags, StatVfsMountFlags};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};
use tracing::error;

/// What keeps a pool from being used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else holds the lock.
    #[error("pool {pool}: {} is in use by another driver; stop that one first", dir.display())]
    Locked {
        /// The pool.
        pool: PoolName,
        /// Its directory.
        dir: PathBuf,
    },
    /// Direct I/O is what makes an acknowledged write durable.
    #[error(
        "pool {pool}: the file system of {} has no direct I/O (O_DIRECT); use ext4 or xfs",
        dir.display()
    )]
    NoDirectIo {
        /// The pool.
        pool: PoolName,
        /// Its directory.
        dir: PathBuf,
    },
    /// It is not where it was opened, or cannot be asked.
    #[error(
        "pool {pool} is gone: {} is not what it was when the driver started; bring it back",
        dir.display()
    )]
    Gone {
        /// The pool.
        pool: PoolName,
        /// Its directory.
        dir: PathBuf,
        /// What is there instead.
        source: io::Error,
    },
    /// What it is cannot be read, so nobody looks at what is in it.
    #[error("pool {pool} is not used: {reason}; put the file back")]
    Unidentified {
        /// The pool.
        pool: PoolName,
        /// What is wrong with its `pool.json`.
        reason: String,
    },
    /// Nothing can be written to it.
    #[error("pool {pool} is read-only: {} takes no writes", dir.display())]
    ReadOnly {
        /// The pool.
        pool: PoolName,
        /// Its directory.
        dir: PathBuf,
    },
    /// The file system refused.
    #[error("pool {pool}: {action} {}", path.display())]
    Io {
        /// The pool.
        pool: PoolName,
        /// What was tried, as a gerund.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A record of the pool cannot be used.
    #[error("pool {pool}")]
    Store {
        /// The pool.
        pool: PoolName,
        /// Which record, and why.
        source: store::Error,
    },
}

/// An open pool. While it lives, no other driver can open it, unless it was opened for a look.
#[derive(Debug)]
pub struct Pool {
    name: PoolName,
    dir: PathBuf,
    /// The directory as it was opened, locked but for a look.
    place: File,
    /// Why it waits, and is not used: what it is could not be read.
    waits: Mutex<Option<String>>,
}

/// How many bytes a pool has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Space {
    /// Of the whole file system.
    pub total: Bytes,
    /// Of them, free for us.
    pub free: Bytes,
}

/// What makes a directory a pool: `POOL/pool.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    version: Version<1>,
    id: uuid::Uuid,
}

const LAYERS: &str = "layers";
const LOCKS: &str = "locks";

/// The kinds of records, each with a directory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Volumes.
    Volume,
    /// Snapshots.
    Snapshot,
    /// Layers.
    Layer,
    /// Volumes whose end is decided.
    DeletingVolume,
    /// Snapshots whose end is decided.
    DeletingSnapshot,
    /// Layers whose end is decided.
    DeletingLayer,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::Volume,
        Self::Snapshot,
        Self::Layer,
        Self::DeletingVolume,
        Self::DeletingSnapshot,
        Self::DeletingLayer,
    ];

    fn dir(self) -> &'static str {
        match self {
            Self::Volume => "records/volumes",
            Self::Snapshot => "records/snapshots",
            Self::Layer => "records/layers",
            Self::DeletingVolume => "records/deleting",
            Self::DeletingSnapshot => "records/deleting-snapshots",
            Self::DeletingLayer => "records/deleting-layers",
        }
    }
}

impl Pool {
    /// Opens the pool in `dir`, making one of it if it is none yet, and locks it.
    pub fn open(name: PoolName, dir: &Path) -> Result<Self, Error> {
        let fail = |action, path: &Path| {
            let (pool, path) = (name.clone(), path.to_owned());
            move |source| Error::Io { pool, action, path, source }
        };
        create_dir(dir).map_err(fail("creating", dir))?;
        let dir = dir.canonicalize().map_err(fail("resolving", dir))?;
        let lock = File::open(&dir).map_err(fail("opening", &dir))?;
        if store::lock(&lock).is_err() {
            return Err(Error::Locked { pool: name, dir });
        }
        let records = dir.join("records");
        let parts = Kind::ALL.iter().map(|kind| kind.dir());
        for part in parts.chain([LAYERS, LOCKS]) {
            create_dir(&dir.join(part)).map_err(fail("creating", &dir))?;
        }
        // What is durable in a directory is not, while the directory itself is not.
        for made in [&records, &dir, dir.parent().unwrap_or(&dir)] {
            store::sync(made).map_err(fail("syncing", made))?;
        }
        let pool = Self { name, dir, place: lock, waits: Mutex::default() };
        match pool.identify() {
            Err(Error::Store { source: error @ store::Error::Damaged { .. }, .. }) => {
                let reason = Chain(&error).to_string();
                error!(pool = %pool.name, reason, "pool waits");
                *pool.waiting() = Some(reason);
                return Ok(pool);
            }
            outcome => outcome?,
        }
        pool.prepare()?;
        Ok(pool)
    }

    /// Sees to it that it can be worked with.
    fn prepare(&self) -> Result<(), Error> {
        self.sweep()?;
        self.try_direct_io()
    }

    /// Why it is not used until what it is can be read, if so.
    pub fn waits(&self) -> Option<String> {
        self.waiting().clone()
    }

    /// The same pool as one that does not wait, once what it is can be read.
    pub fn again(&self) -> Result<Option<Self>, Error> {
        let place = self.place.try_clone().map_err(self.io("opening", &self.dir))?;
        let (name, dir) = (self.name.clone(), self.dir.clone());
        let again = Self { name, dir, place, waits: Mutex::default() };
        if again.require().is_err() {
            return Ok(None); // what is at its place now, nobody has locked
        }
        match again.is_one() {
            Ok(true) => {}
            Ok(false) | Err(Error::Store { source: store::Error::Damaged { .. }, .. }) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        again.prepare()?;
        Ok(Some(again))
    }

    /// It is used from now on.
    pub fn end_wait(&self) {
        *self.waiting() = None;
    }

    fn waiting(&self) -> MutexGuard<'_, Option<String>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the pool in `dir` for a look: nothing is made, locked or changed, and whoever works on
    /// it goes on.
    pub fn look(name: PoolName, dir: &Path) -> Result<Self, Error> {
        let fail = |action| {
            let (pool, path) = (name.clone(), dir.to_owned());
            move |source| Error::Io { pool, action, path, source }
        };
        let dir = dir.canonicalize().map_err(fail("resolving"))?;
        let place = File::open(&dir).map_err(fail("opening"))?;
        Ok(Self { name, dir, place, waits: Mutex::default() })
    }

    /// Whether there is anything of a pool in its directory.
    pub fn is_one(&self) -> Result<bool, Error> {
        let identity = store::load::<Identity>(&self.identity());
        Ok(identity.map_err(|source| self.store(source))?.is_some())
    }

    /// Keeps everybody else out of a pool that was opened for a look.
    pub fn lock(&self) -> Result<(), Error> {
        let (pool, dir) = (self.name.clone(), self.dir.clone());
        store::lock(&self.place).map_err(|_| Error::Locked { pool, dir })
    }

    /// What interrupted writes left, or are just writing.
    pub fn temporary(&self) -> Result<Vec<PathBuf>, Error> {
        let dirs = [self.dir.clone()].into_iter().chain(self.parts()).filter(|dir| dir.exists());
        let mut found = Vec::new();
        for dir in dirs {
            found.extend(store::temporary(&dir).map_err(self.io("listing", &dir))?);
        }
        Ok(found)
    }

    /// The locks of volumes, by name.
    pub fn locks(&self) -> Result<Vec<(String, PathBuf)>, Error> {
        let dir = self.dir.join(LOCKS);
        let named =
            |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
        let list = || fs::read_dir(&dir)?.collect::<io::Result<Vec<_>>>();
        Ok(list().map_err(self.io("listing", &dir))?.into_iter().filter_map(named).collect())
    }

    /// The directories in it, of which nobody else should see anything.
    pub fn parts(&self) -> impl Iterator<Item = PathBuf> {
        let parts = Kind::ALL.iter().map(|kind| kind.dir());
        parts.chain([LAYERS, LOCKS]).map(|part| self.dir.join(part))
    }

    /// Where it lies.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What makes its directory a pool.
    pub fn identity(&self) -> PathBuf {
        self.dir.join("pool.json")
    }

    /// The directory in which all its layers lie.
    pub fn layers_dir(&self) -> PathBuf {
        self.dir.join(LAYERS)
    }

    /// An error unless it is used, and still where it was opened: it may have been moved, or
    /// unmounted.
    pub fn require(&self) -> Result<(), Error> {
        if let Some(reason) = self.waits() {
            return Err(Error::Unidentified { pool: self.name.clone(), reason });
        }
        let identity = |data: fs::Metadata| (data.dev(), data.ino());
        let same = || {
            let opened = identity(self.place.metadata()?);
            if identity(fs::metadata(&self.dir)?) == opened {
                return Ok(());
            }
            Err(io::Error::other("another directory is there"))
        };
        same().map_err(|source| {
            let (pool, dir) = (self.name.clone(), self.dir.clone());
            Error::Gone { pool, dir, source }
        })
    }

    /// An error where nothing can be written to it.
    pub fn require_writable(&self) -> Result<(), Error> {
        self.require()?;
        let fs = rustix::fs::fstatvfs(&self.place)
            .map_err(|error| self.io("measuring", &self.dir)(error.into()))?;
        if fs.f_flag.contains(StatVfsMountFlags::RDONLY) {
            let (pool, dir) = (self.name.clone(), self.dir.clone());
            return Err(Error::ReadOnly { pool, dir });
        }
        Ok(())
    }

    /// The name it was opened under.
    pub fn name(&self) -> &PoolName {
        &self.name
    }

    /// How full it is.
    pub fn space(&self) -> Result<Space, Error> {
        self.require()?;
        let fs = rustix::fs::statvfs(&self.dir)
            .map_err(|error| self.io("measuring", &self.dir)(error.into()))?;
        let bytes = |blocks: u64| Bytes::new(blocks.saturating_mul(fs.f_frsize));
        Ok(Space { total: bytes(fs.f_blocks), free: bytes(fs.f_bavail) })
    }

    /// Where the bytes of a layer lie.
    pub fn layer(&self, id: LayerId, format: Format) -> PathBuf {
        self.layers_dir().join(format!("{id}.{}", format.as_str()))
    }

    /// Makes an empty layer of `size`, durably. It takes next to no space until written.
    pub fn create_layer(&self, id: LayerId, format: Format, size: Bytes) -> Result<(), Error> {
        self.require()?;
        let path = self.layer(id, format);
        let create = || {
            let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            match format {
                Format::Raw => file.set_len(size.count())?,
                Format::Qcow2 => qcow2::create(&file, size)?,
            }
            file.sync_all()?;
            store::sync(&self.layers_dir())
        };
        create().map_err(self.io("creating layer", &path))
    }

    /// Removes the bytes of a layer, durably; one that is gone is fine.
    pub fn remove_layer(&self, id: LayerId, format: Format) -> Result<(), Error> {
        self.remove_record(&self.layer(id, format))
    }

    /// Removes a record, durably; one that is gone is fine, but not with its pool.
    pub fn remove_record(&self, path: &Path) -> Result<(), Error> {
        self.require()?;
        store::remove(path).map_err(|source| self.store(source))
    }

    /// Writes a record, durably.
    pub fn write_record<T: Serialize>(&self, path: &Path, record: &T) -> Result<(), Error> {
        self.require()?;
        store::replace(path, record).map_err(|source| self.store(source))
    }

    /// The files among the layers, each with the id its name holds. Others are not ours.
    pub fn layers(&self) -> Result<Vec<(LayerId, PathBuf)>, Error> {
        let dir = self.layers_dir();
        let list = || fs::read_dir(&dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>();
        let paths: Vec<PathBuf> = list().map_err(self.io("listing", &dir))?;
        let id_of = |path: &Path| path.file_stem()?.to_str()?.parse().ok();
        Ok(paths.into_iter().filter_map(|path| Some((id_of(&path)?, path))).collect())
    }

    /// The file that whoever serves a volume holds, so that nobody else does; made if it is not
    /// there. Its content means nothing, so it need not be durable.
    pub fn lock_of(&self, volume: &VolumeId) -> Result<PathBuf, Error> {
        self.require()?;
        let path = self.dir.join(LOCKS).join(volume.as_str());
        let mut options = OpenOptions::new();
        let made = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
        made.map_err(self.io("creating", &path))?;
        Ok(path)
    }

    /// Removes the lock of a volume that is gone.
    pub fn remove_lock(&self, volume: &VolumeId) -> Result<(), Error> {
        let path = self.dir.join(LOCKS).join(volume.as_str());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.io("removing", &path)(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Where the record of this kind and name lies.
    pub fn record(&self, kind: Kind, name: impl fmt::Display) -> PathBuf {
        self.dir.join(kind.dir()).join(format!("{name}.json"))
    }

    /// The records of a kind, each with its name.
    pub fn records(&self, kind: Kind) -> Result<Vec<(PathBuf, String)>, Error> {
        store::names(&self.dir.join(kind.dir())).map_err(|source| self.store(source))
    }

    /// Says which pool a record was in, or that there is none any more.
    pub fn store(&self, source: store::Error) -> Error {
        self.require().err().unwrap_or_else(|| Error::Store { pool: self.name.clone(), source })
    }

    fn sweep(&self) -> Result<(), Error> {
        let parts = Kind::ALL.iter().map(|kind| kind.dir());
        for part in parts.chain(["", LAYERS]) {
            store::sweep(&self.dir.join(part)).map_err(|source| self.store(source))?;
        }
        Ok(())
    }

    fn identify(&self) -> Result<(), Error> {
        if self.is_one()? {
            return Ok(());
        }
        let identity = Identity { version: Version, id: uuid::Uuid::new_v4() };
        store::replace(&self.identity(), &identity).map_err(|source| self.store(source))
    }

    /// Opens a file as the daemons will, so that a pool that cannot work says so at once.
    fn try_direct_io(&self) -> Result<(), Error> {
        let file = self.identity();
        match open_direct(&file) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(Error::NoDirectIo { pool: self.name.clone(), dir: self.dir.clone() })
            }
            Err(error) => Err(self.io("probing", &file)(error)),
        }
    }

    /// Says what was tried in which pool, or that there is none any more.
    pub(crate) fn io(
        &self,
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(io::Error) -> Error + use<'_> {
        let path = path.to_owned();
        move |source| {
            let pool = self.name.clone();
            self.require().err().unwrap_or(Error::Io { pool, action, path, source })
        }
    }
}

impl Error {
    /// The kind of the input or output error behind this one, if it is one.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            Self::Store { source, .. } => source.io_kind(),
            Self::ReadOnly { .. } => Some(io::ErrorKind::ReadOnlyFilesystem),
            Self::Gone { .. }
            | Self::Unidentified { .. }
            | Self::Locked { .. }
            | Self::NoDirectIo { .. } => None,
        }
    }
}

/// Opens a file to be read past what the kernel has in memory.
fn open_direct(file: &Path) -> io::Result<File> {
    let direct = i32::try_from(OFlags::DIRECT.bits()).expect("a flag of open(2) is an int");
    OpenOptions::new().read(true).custom_flags(direct).open(file)
}

/// A directory, and those above it, that only we may enter.
fn create_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

#[cfg(test)]
mod test {
    use super::*;

    fn name() -> PoolName {
        "fast".parse().unwrap()
    }

    #[test]
    fn a_second_driver_is_kept_out() {
        let dir = tempfile::tempdir().unwrap();
        let first = Pool::open(name(), dir.path()).unwrap();
        assert!(matches!(Pool::open(name(), dir.path()), Err(Error::Locked { .. })));
        drop(first);
        assert!(Pool::open(name(), dir.path()).is_ok());
    }

    #[test]
    fn a_new_layer_has_its_size_and_takes_no_space() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::open(name(), dir.path()).unwrap();
        let id = LayerId::draw();
        pool.create_layer(id, Format::Raw, Bytes::gib(10)).unwrap();
        let data = fs::metadata(pool.layer(id, Format::Raw)).unwrap();
        assert_eq!((data.len(), data.blocks()), (10 << 30, 0));
        assert_eq!(pool.layers().unwrap().len(), 1);
        pool.remove_layer(id, Format::Raw).unwrap();
        pool.remove_layer(id, Format::Raw).unwrap();
        assert!(pool.layers().unwrap().is_empty());
    }

    #[test]
    fn a_pool_that_was_moved_away_is_gone_until_it_is_back() {
        let scratch = tempfile::tempdir().unwrap();
        let [dir, away] = ["pool", "away"].map(|name| scratch.path().join(name));
        let pool = Pool::open(name(), &dir).unwrap();
        store::relocate(&dir, &away).unwrap();
        let is_gone = |outcome| matches!(outcome, Err(Error::Gone { .. }));
        let create = || pool.create_layer(LayerId::draw(), Format::Raw, Bytes::gib(1));
        assert!(is_gone(create()) && is_gone(pool.space().map(drop)));
        // What is mounted below comes to light, or something else is mounted there.
        fs::create_dir_all(dir.join(LAYERS)).unwrap();
        assert!(is_gone(pool.require_writable()) && is_gone(pool.space().map(drop)));
        fs::remove_dir_all(&dir).unwrap();
        store::relocate(&away, &dir).unwrap();
        create().unwrap();
        pool.require_writable().unwrap();
    }

    #[test]
    fn a_pool_of_another_format_is_not_used_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let identity = dir.path().join("pool.json");
        store::replace(&identity, &serde_json::json!({ "version": 2, "id": "x" })).unwrap();
        let before = fs::read(&identity).unwrap();
        let pool = Pool::open(name(), dir.path()).unwrap();
        assert!(matches!(pool.require(), Err(Error::Unidentified { .. })));
        pool.create_layer(LayerId::draw(), Format::Raw, Bytes::gib(1)).unwrap_err();
        assert!(pool.again().unwrap().is_none());
        assert_eq!(fs::read(&identity).unwrap(), before);
        let id = uuid::Uuid::new_v4();
        store::replace(&identity, &Identity { version: Version, id }).unwrap();
        pool.require().unwrap_err();
        let again = pool.again().unwrap().unwrap();
        again.create_layer(LayerId::draw(), Format::Raw, Bytes::gib(1)).unwrap();
        pool.end_wait();
        pool.require_writable().unwrap();
        drop(again);
        assert!(matches!(Pool::open(name(), dir.path()), Err(Error::Locked { .. })));
    }
}
