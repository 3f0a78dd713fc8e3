//! The whole text of an error: its own, and that of every cause behind it.

use std::{error::Error, fmt};

/// Prints an error and its causes in one line, each after a colon.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            write!(out, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}
