//! Encrypted layers, as files: made with a LUKS header, and put in the place of empty ones.

use super::{Error, Pool};
use crate::{
    qcow2::{self, LuksHeader},
    store,
    units::Bytes,
    volume::{Format, LayerId},
};
use std::{fs::File, path::Path};
use tempfile::{NamedTempFile, PersistError};

impl Pool {
    /// Makes an empty encrypted layer of `size`, durably. It takes some 300 KiB, of key material.
    pub fn create_encrypted_layer(
        &self,
        id: LayerId,
        size: Bytes,
        luks: &LuksHeader,
    ) -> Result<(), Error> {
        let put = |file: NamedTempFile, path: &Path| file.persist_noclobber(path);
        self.put_encrypted(id, size, luks, put, "creating encrypted layer")
    }

    /// Puts an empty encrypted layer in the place of one that holds nothing and that nobody has
    /// open: whole or not at all, and durably.
    pub fn replace_by_encrypted(
        &self,
        id: LayerId,
        size: Bytes,
        luks: &LuksHeader,
    ) -> Result<(), Error> {
        let put = |file: NamedTempFile, path: &Path| file.persist(path);
        self.put_encrypted(id, size, luks, put, "encrypting layer")
    }

    /// A crash leaves a temporary file to `sweep`.
    fn put_encrypted(
        &self,
        id: LayerId,
        size: Bytes,
        luks: &LuksHeader,
        put: fn(NamedTempFile, &Path) -> Result<File, PersistError>,
        action: &'static str,
    ) -> Result<(), Error> {
        self.require()?;
        let path = self.layer(id, Format::Qcow2);
        let write = || {
            let file = NamedTempFile::new_in(self.layers_dir())?;
            qcow2::create_encrypted(file.as_file(), size, luks)?;
            file.as_file().sync_all()?;
            put(file, &path)?;
            store::sync(&self.layers_dir())
        };
        write().map_err(self.io(action, &path))
    }

    /// The LUKS header of an encrypted layer.
    pub fn luks_header(&self, path: &Path) -> Result<LuksHeader, Error> {
        let read = || qcow2::luks_header(&File::open(path)?).map_err(qcow2::Error::into_io);
        read().map_err(self.io("reading layer", path))
    }
}
