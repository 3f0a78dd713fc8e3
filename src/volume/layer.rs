//! One layer, as a daemon or a person wants to know it.

use super::{Format, LayerId};
use crate::units::Bytes;
use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf};

/// One layer of a volume or snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its id, which stays the same whatever it is merged with.
    pub id: LayerId,
    /// The id under which its file lies, which names its node in a block graph.
    pub file: LayerId,
    /// Where its bytes lie.
    pub path: PathBuf,
    /// How they lie there.
    pub format: Format,
    /// Size it presents.
    pub size: Bytes,
}

impl Layer {
    /// What the pool really spends on it; nothing for one that is not there.
    pub fn allocated(&self) -> Bytes {
        // POSIX: st_blocks counts units of 512 bytes whatever the block size.
        let data = fs::metadata(&self.path);
        data.map_or(Bytes::ZERO, |data| Bytes::new(data.blocks().saturating_mul(512)))
    }
}
