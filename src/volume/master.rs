//! Volumes on remote masters: the layers that one is the bottom of.
//!
//! ```text
//!  none:                         master, which takes the writes
//!  copy-on-write, copy-on-read:  active -> master
//!  clone:                        active -> master, or, where the volume is larger:
//!                                active -> copy, of the size of the master -> master
//! ```
//!
//! While a layer is streamed into, QEMU fills no buffer that a guest reads from beyond the end of
//! the layer below (`work`). A copy that is no larger than its master is made under a guest all the
//! same, and then merged with the active layer like any other.

use super::{
    CopyMode, Error, Format, LayerId, Master, NewVolume, Volumes,
    create::{Base, Place},
    record::{LayerRecord, VolumeRecord},
};
use crate::{
    crash,
    pool::{self, Pool},
    units::Bytes,
};
use std::sync::Arc;

/// A remote master that was looked at.
#[derive(Clone, Debug)]
pub struct FoundMaster {
    /// Where it is.
    pub master: Master,
    /// How its bytes lie there.
    pub format: Format,
    /// What it has.
    pub size: Bytes,
}

/// A remote master of which a record is to be made, and what is to be made of it.
#[derive(Debug)]
pub(super) struct Bottom {
    pub(super) layer: LayerId,
    record: LayerRecord,
    pub(super) role: Role,
}

/// What a master is to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The volume itself.
    Active,
    /// What its active layer stands on.
    Base,
    /// What this layer is a copy of, on which the active layer stands.
    Copied { copy: LayerId },
}

impl Bottom {
    /// The layer that the active one stands on.
    pub(super) fn layer(&self) -> LayerId {
        match self.role {
            Role::Active | Role::Base => self.layer,
            Role::Copied { copy } => copy,
        }
    }
}

impl Volumes {
    /// Where a volume on a master goes. One that is its master has the size of it, and takes no
    /// space here.
    pub(super) fn place_on_master(
        &self,
        pools: &[Arc<Pool>],
        new: &NewVolume,
    ) -> Result<Place, Error> {
        let found = new.master.as_ref().expect("a master is looked at before it is built on");
        let (master, size) = (found.master.source.clone(), found.size);
        let (size, space, role) = match new.parameters.copy_mode() {
            CopyMode::None if !new.size.accepts(size) => {
                return Err(Error::NotSizeOfMaster { master, size });
            }
            CopyMode::None => (size, Bytes::ZERO, Role::Active),
            mode @ (CopyMode::CopyOnWrite | CopyMode::CopyOnRead | CopyMode::Clone) => {
                let chosen = new.size.chosen_for(size);
                let chosen = chosen.ok_or(Error::SmallerThanMaster { master, size })?;
                let is_copied = mode == CopyMode::Clone && chosen > size;
                let copied = Role::Copied { copy: LayerId::draw() };
                (chosen, chosen, if is_copied { copied } else { Role::Base })
            }
        };
        let pool = self.roomiest(pools, space)?;
        let bottom = Bottom { layer: LayerId::draw(), record: found.record(), role };
        Ok(Place { pool, size, base: Some(Base::Master(Box::new(bottom))) })
    }

    /// Makes what lies below the active layer. The intent that names it is recorded.
    pub(super) fn make_bottom(
        &self,
        pool: &Arc<Pool>,
        intent: &VolumeRecord,
        bottom: &Bottom,
    ) -> Result<(), pool::Error> {
        let Bottom { layer, record, role } = bottom;
        self.add_layer(pool, *layer, record.clone())?;
        crash::point("volume-create-master");
        let Role::Copied { copy } = *role else { return Ok(()) };
        pool.create_layer(copy, Format::Qcow2, record.size)?;
        crash::point("volume-create-copy");
        let detach = intent.detach();
        let above = LayerRecord { detach, ..LayerRecord::overlay(*layer, record.size) };
        self.add_layer(pool, copy, above)?;
        crash::point("volume-create-copy-record");
        Ok(())
    }
}

impl FoundMaster {
    fn record(&self) -> LayerRecord {
        let master = Some(self.master.clone());
        LayerRecord { master, ..LayerRecord::bottom(self.format, self.size) }
    }
}
