//! What a volume holds, and what of it may be gone if its daemon dies.
//!
//! A guest on a socket loses nothing that was acknowledged. One on a block device loses its disk,
//! and what it has not flushed may be as it was before, or as it was made since.

use super::{guest::Action, picture::Picture};
use std::ops::Range;

/// In which form a volume is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Socket,
    Device,
}

/// What a volume holds.
#[derive(Clone)]
pub(super) struct Held {
    /// What is read from it.
    pub(super) picture: Picture,
    /// What is there for sure, whoever dies.
    durable: Picture,
    /// What was done to it since.
    since: Vec<Action>,
    /// Whether each write is made durable before it is acknowledged.
    is_through: bool,
    way: Way,
}

impl Held {
    pub(super) fn new(picture: Picture, is_through: bool) -> Self {
        let (durable, since) = (picture.clone(), Vec::new());
        Self { picture, durable, since, is_through, way: Way::Socket }
    }

    pub(super) fn way(&self) -> Way {
        self.way
    }

    /// It is used in this form from now on.
    pub(super) fn attach(&mut self, way: Way) {
        self.way = way;
        self.settle();
    }

    /// Notes what was done, to its end.
    pub(super) fn apply(&mut self, action: &Action) {
        action.apply(&mut self.picture);
        let is_durable = match action {
            Action::Flush => true,
            Action::Write { .. } | Action::Zero { .. } => self.is_through,
            Action::Discard { .. } => false,
        };
        match self.way {
            Way::Socket => {}
            Way::Device if is_durable => self.settle(),
            Way::Device => self.since.push(action.clone()),
        }
    }

    /// Notes what may have been done, in whole or in part, or not at all.
    pub(super) fn attempt(&mut self, action: &Action) {
        self.since.push(action.clone());
    }

    /// Notes what is found where something was discarded and flushed.
    pub(super) fn discard(&mut self, first: usize, found: &[u32]) {
        self.picture.adopt_discarded(first, found).unwrap();
        self.settle();
    }

    pub(super) fn grow(&mut self, sectors: usize) {
        self.picture.grow(sectors);
        self.durable.grow(sectors);
    }

    /// All that it holds is there for sure.
    fn settle(&mut self) {
        self.durable = self.picture.clone();
        self.since.clear();
    }

    /// After the end of its daemon it holds this.
    pub(super) fn adopt(&mut self, found: &Picture, what: &str) {
        self.assert_allows(found, what);
        self.picture = found.clone();
        self.settle();
    }

    /// Asserts that it may hold this after the end of its daemon: of each sector what was durable,
    /// or anything that was made of it since.
    pub(super) fn assert_allows(&self, found: &Picture, what: &str) {
        let Self { durable, picture, since, .. } = self;
        assert_eq!(found.sectors(), durable.sectors(), "{what}: sectors");
        let all = 0..found.sectors();
        let known = durable.at(all.clone()).iter().zip(picture.at(all.clone()));
        for (sector, (found, (durable, picture))) in (0..).zip(found.at(all).iter().zip(known)) {
            let made = since.iter().any(|action| made(action, sector) == Some(*found));
            assert!(
                found == durable || found == picture || made,
                "{what}: sector {sector} holds {found}; it was durably {durable}, later {picture}, \
                 and meanwhile {since:?}"
            );
        }
    }
}

/// What an action makes of a sector.
fn made(action: &Action, sector: usize) -> Option<u32> {
    let within = |sectors: &Range<usize>| sectors.contains(&sector);
    match action {
        Action::Write { sectors, stamp } => within(sectors).then_some(*stamp),
        Action::Zero { sectors, .. } | Action::Discard { sectors } => within(sectors).then_some(0),
        Action::Flush => None,
    }
}
