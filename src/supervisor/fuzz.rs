//! Fuzzing of what driver and supervisor say to each other.

use super::protocol::{Exit, Greeting, Reply, Request};
use crate::fuzz::read_back;

/// Any line, taken for whatever may come in one.
pub(crate) fn line(line: &[u8]) {
    read_back::<Greeting>(line);
    read_back::<Request>(line);
    read_back::<Reply>(line);
    read_back::<Exit>(line);
}
