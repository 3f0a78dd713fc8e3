//! Fuzzing of the records in a pool.

use super::record::{Cut, LayerRecord, SnapshotRecord, VolumeRecord};
use crate::fuzz::read_back;
use prost_types::Timestamp;

/// Any bytes, taken for each kind of record.
pub(crate) fn records(bytes: &[u8]) {
    if let Some(volume) = read_back::<VolumeRecord>(bytes) {
        assert_eq!(read_back(&serde_json::to_vec(&volume).expect("it was read")), Some(volume));
    }
    if let Some(layer) = read_back::<LayerRecord>(bytes) {
        assert_eq!(read_back(&serde_json::to_vec(&layer).expect("it was read")), Some(layer));
    }
    if let Some(snapshot) = read_back::<SnapshotRecord>(bytes) {
        // CSI tells of every snapshot when it was taken.
        if let Cut::Ready { created } = snapshot.phase {
            let told = Timestamp::from(created);
            assert!(!told.to_string().is_empty());
        }
    }
}
