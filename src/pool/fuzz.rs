//! Fuzzing of what a pool says of itself.

use super::Identity;
use crate::fuzz::read_back;

/// Any bytes, taken for `pool.json`.
pub(crate) fn records(bytes: &[u8]) {
    read_back::<Identity>(bytes);
}
