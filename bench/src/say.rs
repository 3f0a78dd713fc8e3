//! What the run says while it works.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

/// Writes one line to standard output. A reader that has gone is no reason to stop halfway.
pub(crate) fn say(text: impl Display) {
    let mut out = io::stdout().lock();
    _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
