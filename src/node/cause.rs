//! Why a volume gets another daemon: the reason that a person is told, and that is counted.

/// Why the daemon before was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It ended by itself, or somebody killed it.
    Died,
    /// It did not answer the relay.
    Deaf,
    /// It is not known what it did with an order, or it could not be taken over.
    Doubtful,
    /// It served layers or exports that are not those of the records any more.
    Outdated,
    /// There is a newer program, or somebody asked for another daemon.
    Upgraded,
    /// Its active layer was merged into the one below.
    Merged,
    /// The volume was given another size while nobody was connected.
    Resized,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Died,
        Self::Deaf,
        Self::Doubtful,
        Self::Outdated,
        Self::Upgraded,
        Self::Merged,
        Self::Resized,
    ];

    /// As logs and metrics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Died => "died",
            Self::Deaf => "deaf",
            Self::Doubtful => "doubtful",
            Self::Outdated => "outdated",
            Self::Upgraded => "upgraded",
            Self::Merged => "merged",
            Self::Resized => "resized",
        }
    }
}

/// How a daemon comes to serve a volume.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entrance {
    /// The volume is being staged.
    Staged,
    /// It ran already.
    TakenOver,
    /// The one before is given up.
    Again,
    /// The relay moved the VM to it, whose rings stood still for so long.
    Moved(std::time::Duration),
}

/// A daemon that is given up, and why.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    /// Which; none where it was gone before anybody looked.
    pub(super) pid: Option<i32>,
    pub(super) cause: Cause,
    /// The reason in words.
    pub(super) error: String,
}
