//! Expansion, and the other changes to a volume that is there.
//!
//! ```text
//! intent: size in the record of the active layer -- image grown, by the daemon if there is one -- size of the volume
//! ```
//!
//! A crash in between leaves a layer that is to be larger than the volume: start-up has the image
//! grown, by the daemon if there is one, and takes the size over. An image that cannot grow so far
//! stays what it is, and so does the volume. A volume never shrinks.

use super::{
    Claim, Entry, Error, Format, Layer, SizeRange, Throttle, Volume, VolumeId, Volumes, record,
    record::VolumeRecord,
    state::{Kept, layer_record},
};
use crate::{chain::Chain, crash, pool, qcow2, units::Bytes};
use std::{fs::OpenOptions, io, path::Path};
use tracing::{info, warn};

impl Volumes {
    /// Decides on the new size of a volume: what it grows to, or `None` where it is as large
    /// already.
    pub fn intend_expansion(
        &self,
        claim: &Claim,
        range: SizeRange,
    ) -> Result<Option<Bytes>, Error> {
        let volume = self.find(claim.volume())?;
        if range.accepts(volume.size()) {
            return Ok(None);
        }
        volume.refuse_master()?;
        let size = range.chosen();
        if size < volume.size() {
            let (volume, is) = (volume.id.clone(), volume.size());
            return Err(Error::Shrinks { volume, is, asked: size });
        }
        let more = size.saturating_sub(volume.size());
        let free = self.promised(volume.pool.space().map_err(Error::Capacity)?).free;
        if more > free {
            return Err(Error::PoolFull { pool: volume.pool().clone(), size: more, free });
        }
        // Never less than an earlier call decided on that was not carried out.
        let intended = size.max(volume.layers[0].size);
        self.set_layer_size(&volume, intended).map_err(Error::pool(volume.id()))?;
        crash::point("volume-expand-intent");
        Ok(Some(size))
    }

    fn set_layer_size(&self, volume: &Volume, size: Bytes) -> Result<(), pool::Error> {
        let active = volume.record.phase.active();
        let kept = self.state.lock().layers.get(&active).cloned();
        let Some(mut layer) = kept else { return Ok(()) };
        layer.record.size = size;
        record(&layer.pool, &layer_record(&layer.pool, active), &layer.record)?;
        self.state.lock().layers.insert(active, layer);
        Ok(())
    }

    /// The volumes whose expansion broke off. Whether a daemon has the image open, the node knows.
    pub fn broken_off_expansions(&self) -> Vec<VolumeId> {
        let all = self.list(None, usize::MAX);
        let grows = |(id, entry)| match entry {
            Entry::Volume(volume) => volume.grows_to().map(|_| id),
            Entry::Damaged { .. } => None,
        };
        all.into_iter().filter_map(grows).collect()
    }

    /// Grows the image of a volume that no daemon has open. Where that cannot be done, the volume
    /// is as it was before: one that is to grow can be neither frozen nor given another size.
    pub fn grow_image(&self, claim: &Claim) -> Result<(), Error> {
        let volume = self.find(claim.volume())?;
        if let Err(error) = volume.pool_grows(&volume.layers[0]) {
            self.give_up_expansion(&volume);
            return Err(Error::pool(volume.id())(error));
        }
        crash::point("volume-expand-grown");
        Ok(())
    }

    /// Takes back what was intended with an image that did not grow.
    fn give_up_expansion(&self, volume: &Volume) {
        let (id, active) = (volume.id(), &volume.layers[0]);
        match active.image_size() {
            Some(Ok(size)) if size <= volume.size() => {}
            Some(Ok(_) | Err(_)) | None => return, // another attempt may end it
        }
        match self.set_layer_size(volume, volume.size()) {
            Ok(()) => info!(volume = %id, size = %volume.size(), "an expansion was given up"),
            Err(error) => warn!(volume = %id, error = %Chain(&error), "giving up an expansion"),
        }
    }

    /// Takes the size of the active layer over, whose image has it by now.
    pub fn finish_expansion(&self, claim: &Claim) -> Result<Volume, Error> {
        let size = self.find(claim.volume())?.layers[0].size;
        self.change(claim, |record| record.size = size)?;
        crash::point("volume-expand-done");
        self.find(claim.volume())
    }

    /// Records other limits of a volume.
    pub fn set_throttle(&self, claim: &Claim, throttle: Throttle) -> Result<(), Error> {
        self.change(claim, |record| record.throttle = throttle)?;
        crash::point("volume-modify-recorded");
        Ok(())
    }

    /// Notes that a file system is being made on a volume that held nothing, or that it is made.
    pub fn set_formatting(&self, claim: &Claim, formatting: bool) -> Result<(), Error> {
        self.change(claim, |record| record.formatting = formatting)
    }

    /// Changes the record of a volume, on disk first.
    pub(super) fn change(
        &self,
        claim: &Claim,
        change: impl FnOnce(&mut VolumeRecord),
    ) -> Result<(), Error> {
        let id = claim.volume();
        let Volume { pool, record: mut next, .. } = self.find(id)?;
        change(&mut next);
        let path = pool.record(pool::Kind::Volume, id);
        record(&pool, &path, &next).map_err(Error::pool(id))?;
        self.state.lock().volumes.insert(id.clone(), Kept::Usable { pool, record: next });
        Ok(())
    }
}

impl Volume {
    /// Whether a file system was being made on it and not ended: what it holds is worth nothing.
    pub fn is_being_formatted(&self) -> bool {
        self.record.formatting
    }

    /// What it is being expanded to, if it is.
    pub fn grows_to(&self) -> Option<Bytes> {
        let size = self.layers[0].size;
        (size > self.size()).then_some(size)
    }

    /// Gives the image of a layer the size that is recorded of it.
    pub(super) fn pool_grows(&self, layer: &Layer) -> Result<(), pool::Error> {
        let Some(path) = layer.path() else { return Ok(()) };
        grow(path, layer).map_err(self.pool.io("growing layer", path))
    }
}

fn grow(path: &Path, layer: &Layer) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    match layer.format {
        Format::Raw if file.metadata()?.len() < layer.size.count() => {
            file.set_len(layer.size.count())?;
        }
        Format::Raw => {}
        Format::Qcow2 => qcow2::grow(&file, layer.size).map_err(qcow2::Error::into_io)?,
    }
    file.sync_all()
}
