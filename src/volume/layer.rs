//! One layer, as a daemon or a person wants to know it.

use super::{Encryption, Format, LayerId};
use crate::{chain::Chain, qcow2, source::Source, units::Bytes};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// One layer of a volume or snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its id, which stays the same whatever it is merged with.
    pub id: LayerId,
    /// The id under which its file lies, which names its node in a block graph.
    pub file: LayerId,
    /// Where its bytes lie.
    pub place: Place,
    /// How they lie there.
    pub format: Format,
    /// Whether they are encrypted, or are to be.
    pub encryption: Option<Encryption>,
    /// Size it presents.
    pub size: Bytes,
}

/// Where the bytes of a layer lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file of the pool.
    File(PathBuf),
    /// On another machine: it is always the bottom.
    Master(Master),
}

/// A remote master, as the record of a layer has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Master {
    /// Where it is, and how it is reached.
    pub source: Source,
    /// What it took to be let in when it was looked at first.
    pub login: Login,
}

/// Whether a server was given secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Login {
    /// None, so it can be opened at any time.
    Open,
    /// Some, which are not kept: it can be opened while it is staged.
    Secrets,
}

impl Layer {
    /// What the pool really spends on it; nothing for one that is not there.
    pub fn allocated(&self) -> Bytes {
        // POSIX: st_blocks counts units of 512 bytes whatever the block size.
        let data = self.path().and_then(|path| fs::metadata(path).ok());
        data.map_or(Bytes::ZERO, |data| Bytes::new(data.blocks().saturating_mul(512)))
    }

    /// The size that its image presents, if it has one, or why it cannot be told.
    pub(super) fn image_size(&self) -> Option<Result<Bytes, String>> {
        let path = self.path()?;
        let size = || match self.format {
            Format::Raw => {
                let data = fs::metadata(path).map_err(|error| error.to_string())?;
                Ok(Bytes::new(data.len()))
            }
            Format::Qcow2 => {
                let file = File::open(path).map_err(|error| error.to_string())?;
                let header = qcow2::header_of_ours(&file, self.expected());
                Ok(header.map_err(|error| Chain(&error).to_string())?.size())
            }
        };
        Some(size())
    }

    fn expected(&self) -> qcow2::Expected {
        match self.encryption {
            None => qcow2::Expected::Plain,
            Some(Encryption::Luks) => qcow2::Expected::Encrypted,
            Some(Encryption::Pending) => qcow2::Expected::Either,
        }
    }

    /// Its file, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::File(path) => Some(path),
            Place::Master(_) => None,
        }
    }

    /// The master that it is, if it is one.
    pub fn master(&self) -> Option<&Master> {
        match &self.place {
            Place::File(_) => None,
            Place::Master(master) => Some(master),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(out),
            Self::Master(master) => master.source.fmt(out),
        }
    }
}
