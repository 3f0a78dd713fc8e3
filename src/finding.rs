//! What a look at everything finds: something that is not as it should be, in words for people.
//!
//! Whoever knows a thing says what is wrong with it (`volume`, `node`); `doctor` collects that.

use crate::{
    node::{Mounted, device::LoopDevice},
    volume::RunKey,
};
use serde::Serialize;
use std::path::PathBuf;

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub weight: Weight,
    /// What kind of thing it is, for scripts: always the same word for the same kind.
    pub code: &'static str,
    /// What it is about, such as `volume pvc-1`.
    pub about: String,
    /// Where it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// What is wrong.
    pub what: String,
    /// What that means for the data.
    pub means: String,
    /// What to do.
    pub next: String,
    /// What removes it, where it is provably worth nothing.
    #[serde(skip)]
    pub cure: Option<Cure>,
}

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weight {
    /// Data cannot be used, or is about to be lost.
    Damage,
    /// Data is safe, and somebody is not served as he should be.
    Trouble,
    /// It only takes room.
    Garbage,
}

/// What removes something that is worth nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cure {
    /// A file is removed, if nobody has it open.
    RemoveFile(PathBuf),
    /// A mount is taken away, if nobody uses it.
    Unmount(Mounted),
    /// A loop device is taken from a file that is gone or of nobody.
    Detach(LoopDevice),
    /// A part of the run directory is removed.
    RemovePart(RunKey),
}

impl Weight {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Damage => "damage",
            Self::Trouble => "trouble",
            Self::Garbage => "garbage",
        }
    }
}

impl Finding {
    /// A finding that only a person can do something about.
    pub fn new(weight: Weight, code: &'static str, about: String, what: String) -> Self {
        let (means, next) = (String::new(), String::new());
        Self { weight, code, about, path: None, what, means, next, cure: None }
    }

    /// Says where it is.
    #[must_use]
    pub fn at(self, path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), ..self }
    }

    /// Says what it means for the data.
    #[must_use]
    pub fn means(self, means: impl Into<String>) -> Self {
        Self { means: means.into(), ..self }
    }

    /// Says what to do.
    #[must_use]
    pub fn next(self, next: impl Into<String>) -> Self {
        Self { next: next.into(), ..self }
    }

    /// Says what removes it.
    #[must_use]
    pub fn cured_by(self, cure: Cure) -> Self {
        Self { cure: Some(cure), ..self }
    }

    /// Whether another look found the same.
    pub fn is(&self, other: &Self) -> bool {
        (self.code, &self.about, &self.path) == (other.code, &other.about, &other.path)
    }
}
