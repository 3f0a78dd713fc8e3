//! Volumes on remote masters.
//!
//! ```text
//!  none:                                master, which takes the writes
//!  copy-on-write, copy-on-read, clone:  active -> master (`create`)
//! ```

use super::{
    CopyMode, Error, Format, LayerId, Master, NewVolume, Volumes,
    create::{Base, Place},
    record::LayerRecord,
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
    /// What it stands on.
    Base,
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
            CopyMode::CopyOnWrite | CopyMode::CopyOnRead | CopyMode::Clone => {
                let chosen = new.size.chosen_for(size);
                let chosen = chosen.ok_or(Error::SmallerThanMaster { master, size })?;
                (chosen, chosen, Role::Base)
            }
        };
        let pool = self.roomiest(pools, space)?;
        let bottom = Bottom { layer: LayerId::draw(), record: found.record(), role };
        Ok(Place { pool, size, least: found.size, base: Some(Base::Master(Box::new(bottom))) })
    }

    /// Records the master. The intent that names it is recorded.
    pub(super) fn make_bottom(&self, pool: &Arc<Pool>, bottom: &Bottom) -> Result<(), pool::Error> {
        self.add_layer(pool, bottom.layer, bottom.record.clone())?;
        crash::point("volume-create-master");
        Ok(())
    }
}

impl FoundMaster {
    fn record(&self) -> LayerRecord {
        let master = Some(self.master.clone());
        LayerRecord { master, ..LayerRecord::bottom(self.format, self.size) }
    }
}
