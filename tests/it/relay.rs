//! The relay by itself.

pub(crate) mod process;
