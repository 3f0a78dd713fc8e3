//! Records: small JSON files that are replaced whole or not at all.
//!
//! Owns the one way a file of ours is written. A durable record (`replace`) survives the loss of
//! power at any instant: a reader, or a reboot, sees the old record or the new one. A volatile
//! record (`replace_volatile`) promises the same against the death of any process, and is not
//! meant to survive a reboot.
//!
//! A durable record ends with a checksum of itself, its last member: disks flip bits, and a digit
//! of a size or of an id that was flipped still makes sense. One without it was written by hand.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// What went wrong with a record, and with which.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("{action} {}", path.display())]
    Io {
        /// What was tried, as a gerund.
        action: &'static str,
        /// The record.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The record is there and says nothing we understand. It is left alone.
    #[error("record {} is damaged", path.display())]
    Damaged {
        /// The record.
        path: PathBuf,
        /// Where it stops making sense.
        source: serde_json::Error,
    },
}

impl Error {
    /// The kind of the input or output error behind this one, if it is one.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            Self::Damaged { .. } => None,
        }
    }
}

/// The format version of a record: written as the number `N`, and any other number is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Version<const N: u32>;

impl<const N: u32> Serialize for Version<N> {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_u32(N)
    }
}

impl<'de, const N: u32> Deserialize<'de> for Version<N> {
    fn deserialize<D: serde::Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let found = u32::deserialize(input)?;
        if found == N {
            return Ok(Self);
        }
        let text = format!("format version {found}, and this program reads version {N}");
        Err(serde::de::Error::custom(text))
    }
}

/// Replaces `path` whole or not at all, and durably.
///
/// A crash before the rename leaves a temporary file, which `sweep` removes; after it, the new
/// record.
pub fn replace<T: Serialize>(path: &Path, record: &T) -> Result<(), Error> {
    let dir = directory_of(path);
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        file.write_all(&sealed(serde_json::to_vec_pretty(record)?))?;
        file.flush()?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        sync(dir) // the rename itself
    };
    write().map_err(|source| Error::Io { action: "writing", path: path.to_owned(), source })
}

/// Replaces `path` whole or not at all, for a record that need not outlive a reboot.
///
/// Only root may read it. One writer at a time. A crash before the rename leaves a draft, which the next write takes and
/// whoever removes the record removes too.
pub fn replace_volatile<T: Serialize>(path: &Path, record: &T) -> Result<(), Error> {
    let draft = draft_of(path);
    let write = || {
        let mut options = OpenOptions::new();
        let options = options.create(true).write(true).truncate(true).mode(0o600);
        let mut text = serde_json::to_vec_pretty(record)?;
        text.push(b'\n');
        options.open(&draft)?.write_all(&text)?; // at once: to write each part of it takes longer
        move_to(&draft, path)
    };
    write().map_err(|source| {
        _ = fs::remove_file(&draft); // or a full file system would stay full of it
        Error::Io { action: "writing", path: path.to_owned(), source }
    })
}

/// The name under which `replace_volatile` writes what will be `path`.
pub fn draft_of(path: &Path) -> PathBuf {
    path.with_extension("draft")
}

/// Moves a record to another directory of its pool, durably. Needs no space, so it works where
/// nothing can be written any more.
pub fn relocate(from: &Path, to: &Path) -> Result<(), Error> {
    let relocate = || {
        move_to(from, to)?;
        sync(directory_of(to))?;
        sync(directory_of(from))
    };
    relocate().map_err(|source| Error::Io { action: "moving", path: from.to_owned(), source })
}

#[expect(clippy::disallowed_methods, reason = "this is what the ban refers people to")]
fn move_to(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)
}

/// Reads one record; `None` where there is none.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Io { action: "reading", path: path.to_owned(), source }),
    };
    unsealed(text)
        .and_then(|text| serde_json::from_slice(&text))
        .map(Some)
        .map_err(|source| Error::Damaged { path: path.to_owned(), source })
}

/// What stands before the digits of a checksum, and behind them.
const SEAL: [&[u8]; 2] = [b",\n  \"checksum\": \"", b"\"\n}\n"];

/// How many digits it has.
const DIGITS: usize = 16;

/// Puts its checksum into a record, which is an object with members.
fn sealed(mut text: Vec<u8>) -> Vec<u8> {
    let sum = checksum(&text);
    if text.ends_with(b"\n}") {
        text.truncate(text.len() - 2);
        text.extend([SEAL[0], sum.as_bytes(), SEAL[1]].concat());
    } else {
        text.push(b'\n');
    }
    text
}

/// The record alone, if its checksum is right. What is no checksum stays, and is refused as a member
/// that no record has.
fn unsealed(text: Vec<u8>) -> Result<Vec<u8>, serde_json::Error> {
    let digits = text.strip_suffix(SEAL[1]).and_then(|rest| rest.split_last_chunk::<DIGITS>());
    let parts = digits.and_then(|(rest, sum)| Some((rest.strip_suffix(SEAL[0])?, *sum)));
    let Some((body, sum)) = parts else { return Ok(text) };
    let text = [body, b"\n}"].concat();
    if checksum(&text).as_bytes() == sum {
        return Ok(text);
    }
    let text = "its checksum does not fit: it was changed by something else than this program";
    Err(serde::de::Error::custom(text))
}

fn checksum(text: &[u8]) -> String {
    let digest = Sha256::digest(text);
    let first = digest.first_chunk().expect("a digest is longer");
    format!("{:016x}", u64::from_be_bytes(*first))
}

/// Removes one record durably; one that is already gone is fine. Where its directory is gone, too,
/// nobody knows, and that is an error.
pub fn remove(path: &Path) -> Result<(), Error> {
    let remove = || match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => sync(directory_of(path)),
    };
    remove().map_err(|source| Error::Io { action: "removing", path: path.to_owned(), source })
}

/// The records of a directory, each as its path and its name without `.json`, in order of name.
pub fn names(dir: &Path) -> Result<Vec<(PathBuf, String)>, Error> {
    let list = || {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            if let Some(stem) = name.and_then(|name| name.strip_suffix(".json")) {
                found.push((path.clone(), stem.to_owned()));
            }
        }
        found.sort();
        Ok(found)
    };
    list().map_err(|source| Error::Io { action: "listing", path: dir.to_owned(), source })
}

/// Removes what an interrupted `replace` left in `dir`. Only for who holds the lock on it.
pub fn sweep(dir: &Path) -> Result<(), Error> {
    let sweep = || temporary(dir)?.iter().try_for_each(fs::remove_file);
    sweep().map_err(|source| Error::Io { action: "sweeping", path: dir.to_owned(), source })
}

/// What a `replace` that was interrupted, or is at work, has in `dir`.
pub fn temporary(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".tmp") {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Who holds which lock, as the kernel tells without one being taken.
#[derive(Debug, Default)]
pub struct Locks(Vec<(String, i32)>);

impl Locks {
    /// Reads the kernel's table (proc(5), `/proc/locks`).
    pub fn read() -> io::Result<Self> {
        let table = fs::read_to_string("/proc/locks")?;
        // Who waits for a lock has an arrow in front.
        let parse = |line: &str| {
            let mut fields = line.split_ascii_whitespace().skip(1);
            let is_held = fields.next() == Some("FLOCK");
            let (pid, file) = (fields.nth(2)?.parse().ok()?, fields.next()?.to_owned());
            is_held.then_some((file, pid))
        };
        Ok(Self(table.lines().filter_map(parse).collect()))
    }

    /// Who took the lock of this file or directory, if somebody has it. It is held by whoever has
    /// the same open file: a child of that process, too.
    pub fn holder(&self, path: &Path) -> Option<i32> {
        let data = fs::metadata(path).ok()?;
        let (major, minor) = (rustix::fs::major(data.dev()), rustix::fs::minor(data.dev()));
        let file = format!("{major:02x}:{minor:02x}:{}", data.ino());
        self.0.iter().find_map(|(held, pid)| (*held == file).then_some(*pid))
    }
}

/// How long a lock may still be held for one who died: a process that he was just starting holds
/// it until it runs its own program.
const LAST_HOLD: Duration = Duration::from_secs(2);

/// Locks a file or directory, or says that somebody else has it.
pub fn lock(file: &File) -> Result<(), TryLockError> {
    let deadline = Instant::now() + LAST_HOLD;
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            outcome => return outcome,
        }
    }
}

/// Makes what was created, renamed or removed in `dir` durable.
pub fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn directory_of(path: &Path) -> &Path {
    path.parent().expect("a record lives in a directory")
}

#[cfg(test)]
mod test {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        version: Version<1>,
        size: u64,
    }

    fn scratch() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.json");
        (dir, path)
    }

    #[test]
    fn replaces_and_leaves_nothing_behind() {
        let (dir, path) = scratch();
        for size in [1, 2] {
            replace(&path, &Sample { version: Version, size }).unwrap();
        }
        let record = load::<Sample>(&path).unwrap();
        assert_eq!(record, Some(Sample { version: Version, size: 2 }));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_record_that_is_not_there_is_no_error() {
        let (_dir, path) = scratch();
        assert_eq!(load::<Sample>(&path).unwrap(), None);
        remove(&path).unwrap();
    }

    #[test]
    fn a_damaged_record_is_named_and_left_alone() {
        let (_dir, path) = scratch();
        for text in [
            "",
            "{",
            r#"{"version":1}"#,
            r#"{"version":2,"size":1}"#,
            r#"{"version":1,"size":1,"more":1}"#,
            r#"{"version":1,"size":-1}"#,
        ] {
            File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
            let error = load::<Sample>(&path).unwrap_err();
            assert!(matches!(error, Error::Damaged { .. }), "{text}");
            assert!(error.to_string().contains("v.json"));
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_flipped_bit_or_a_lost_end_is_found_wherever_it_is() {
        let (_dir, path) = scratch();
        replace(&path, &Sample { version: Version, size: 1 << 30 }).unwrap();
        let whole = fs::read(&path).unwrap();
        let spoilt = |text: &[u8]| {
            File::create(&path).unwrap().write_all(text).unwrap();
            let error = load::<Sample>(&path).unwrap_err();
            assert!(matches!(error, Error::Damaged { .. }), "{}", String::from_utf8_lossy(text));
            assert_eq!(fs::read(&path).unwrap(), text);
        };
        for at in 0..whole.len() * 8 {
            let mut text = whole.clone();
            text[at / 8] ^= 1 << (at % 8);
            spoilt(&text);
        }
        (0..whole.len()).for_each(|length| spoilt(&whole[..length]));
        let by_hand = "{ \"version\": 1, \"size\": 7 }";
        File::create(&path).unwrap().write_all(by_hand.as_bytes()).unwrap();
        assert_eq!(load(&path).unwrap(), Some(Sample { version: Version, size: 7 }));
    }

    #[test]
    fn who_holds_a_lock_is_told_by_the_kernel() {
        let (dir, _) = scratch();
        assert_eq!(Locks::read().unwrap().holder(dir.path()), None);
        let held = File::open(dir.path()).unwrap();
        lock(&held).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Locks::read().unwrap().holder(dir.path()), Some(own));
    }

    #[test]
    fn a_record_whose_directory_is_gone_cannot_be_said_to_be_removed() {
        let (dir, _) = scratch();
        assert!(remove(&dir.path().join("gone/v.json")).is_err());
    }

    #[test]
    fn a_sweep_takes_only_what_a_broken_replace_left() {
        let (dir, path) = scratch();
        replace(&path, &Sample { version: Version, size: 1 }).unwrap();
        let broken = tempfile::NamedTempFile::new_in(dir.path()).unwrap().keep().unwrap().1;
        sweep(dir.path()).unwrap();
        assert!(!broken.exists());
        assert_eq!(names(dir.path()).unwrap(), [(path, "v".to_owned())]);
    }
}
