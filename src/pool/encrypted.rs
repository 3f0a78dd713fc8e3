//! Encrypted layers, as files: made with a LUKS header, and put in the place of empty ones.

use super::{Error, LAYERS, Pool};
use crate::{
    qcow2::{self, LuksHeader},
    store,
    units::Bytes,
    volume::{Format, LayerId},
};
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

impl Pool {
    /// Makes an empty encrypted layer of `size`, durably. It takes some 300 KiB, of key material.
    pub fn create_encrypted_layer(
        &self,
        id: LayerId,
        size: Bytes,
        luks: &LuksHeader,
    ) -> Result<(), Error> {
        self.require()?;
        let path = self.layer(id, Format::Qcow2);
        let create = || {
            let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            qcow2::create_encrypted(&file, size, luks)?;
            file.sync_all()?;
            store::sync(&self.dir.join(LAYERS))
        };
        create().map_err(self.io("creating encrypted layer", &path))
    }

    /// Puts an empty encrypted layer in the place of one that holds nothing and that nobody has
    /// open: whole or not at all, and durably.
    pub fn replace_by_encrypted(
        &self,
        id: LayerId,
        size: Bytes,
        luks: &LuksHeader,
    ) -> Result<(), Error> {
        self.require()?;
        let path = self.layer(id, Format::Qcow2);
        let replace = || {
            let dir = self.dir.join(LAYERS);
            let file = tempfile::NamedTempFile::new_in(&dir)?; // a crash leaves it to `sweep`
            qcow2::create_encrypted(file.as_file(), size, luks)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            store::sync(&dir)
        };
        replace().map_err(self.io("encrypting layer", &path))
    }

    /// The LUKS header of an encrypted layer.
    pub fn luks_header(&self, path: &Path) -> Result<LuksHeader, Error> {
        let read = || qcow2::luks_header(&File::open(path)?).map_err(qcow2::Error::into_io);
        read().map_err(self.io("reading layer", path))
    }
}
