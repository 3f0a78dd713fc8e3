//! What a front-end has said that a new back-end must be told: the recorded state of a session.
//!
//! One entry a thing that can be set, in the order in which it is replayed. Descriptors are kept
//! with it.

use super::{
    message::{Addresses, Code, Message, Refused, Region, Request, Shape, check_apart},
    wire::Received,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    sync::Arc,
};

/// A thing that can be set. The order is that of the replay: what concerns the device, its memory,
/// the inflight buffer, and then ring by ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Item {
    Features,
    Config,
    LogBase,
    LogFd,
    Memory,
    /// A region that was added by itself, by its guest address.
    Region(u64),
    Inflight,
    Ring(u32, RingItem),
}

/// A thing that can be set of a ring, in the order of the replay: the interrupt before the kick,
/// which starts the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum RingItem {
    Size,
    Base,
    Addresses,
    Error,
    Call,
    Kick,
    Enable,
}

/// A message that was said, and its descriptors.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub(super) message: Message,
    pub(super) descriptors: Vec<Arc<OwnedFd>>,
}

/// All that was said and still holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Said(BTreeMap<Item, Word>);

impl Word {
    pub(super) fn new((message, descriptors): Received) -> Self {
        Self { message, descriptors: descriptors.into_iter().map(Arc::new).collect() }
    }
}

impl Item {
    /// What a request sets, if it sets something that is to be replayed.
    pub(super) fn of(request: &Request) -> Option<Self> {
        Some(match request {
            Request::SetFeatures(_) => Self::Features,
            Request::SetConfig => Self::Config,
            Request::SetLogBase => Self::LogBase,
            Request::SetLogFd => Self::LogFd,
            Request::SetMemTable(_) => Self::Memory,
            Request::AddMemReg(region) => Self::Region(region.guest),
            Request::SetInflightFd(_) => Self::Inflight,
            Request::SetVringNum { ring, .. } => Self::Ring(*ring, RingItem::Size),
            Request::SetVringBase { ring } => Self::Ring(*ring, RingItem::Base),
            Request::SetVringAddr(addresses) => Self::Ring(addresses.ring, RingItem::Addresses),
            Request::SetVringErr { ring } => Self::Ring(*ring, RingItem::Error),
            Request::SetVringCall { ring } => Self::Ring(*ring, RingItem::Call),
            Request::SetVringKick { ring } => Self::Ring(*ring, RingItem::Kick),
            Request::SetVringEnable { ring } => Self::Ring(*ring, RingItem::Enable),
            Request::GetFeatures
            | Request::SetOwner
            | Request::GetVringBase { .. }
            | Request::GetProtocolFeatures
            | Request::SetProtocolFeatures(_)
            | Request::GetQueueNum
            | Request::SetBackendReqFd
            | Request::GetConfig
            | Request::GetInflightFd(_)
            | Request::GetMaxMemSlots
            | Request::RemMemReg(_) => return None,
        })
    }

    /// Whether it concerns a ring, or the buffer in which the requests of rings are noted.
    pub(super) fn is_of_rings(self) -> bool {
        self >= Self::Inflight
    }
}

impl Said {
    pub(super) fn get(&self, item: Item) -> Option<&Word> {
        self.0.get(&item)
    }

    pub(super) fn set(&mut self, item: Item, word: Word) {
        self.0.insert(item, word);
    }

    pub(super) fn forget(&mut self, item: Item) -> bool {
        self.0.remove(&item).is_some()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Item, &Word)> {
        self.0.iter().map(|(item, word)| (*item, word))
    }

    /// The items that a request makes void beside the one it sets.
    pub(super) fn replaced_by(&self, request: &Request) -> Vec<Item> {
        let regions = || self.0.keys().copied().filter(|item| matches!(item, Item::Region(_)));
        match request {
            Request::SetMemTable(_) => regions().collect(),
            Request::RemMemReg(region) => vec![Item::Region(region.guest)],
            _ => Vec::new(),
        }
    }

    /// The features that the front-end took, if it has come so far.
    pub(super) fn features(&self) -> Option<u64> {
        self.get(Item::Features)?.message.as_number()
    }

    /// The rings that anything was said of.
    pub(super) fn rings(&self) -> BTreeSet<u32> {
        let ring = |item: &Item| match item {
            Item::Ring(ring, _) => Some(*ring),
            _ => None,
        };
        self.0.keys().filter_map(ring).collect()
    }

    /// The rings that are to run: those with a kick.
    pub(super) fn started(&self) -> Vec<u32> {
        let is_started = |ring: &u32| self.0.contains_key(&Item::Ring(*ring, RingItem::Kick));
        self.rings().into_iter().filter(is_started).collect()
    }

    /// Of one ring, all that was said, in order.
    pub(super) fn of_ring(&self, ring: u32) -> impl Iterator<Item = (RingItem, &Word)> {
        let items = Item::Ring(ring, RingItem::Size)..=Item::Ring(ring, RingItem::Enable);
        self.0.range(items).filter_map(|(item, word)| match item {
            Item::Ring(_, item) => Some((*item, word)),
            _ => None,
        })
    }

    /// The shape of the inflight buffer, if there is one.
    pub(super) fn inflight(&self) -> Option<(Shape, &Arc<OwnedFd>)> {
        let word = self.get(Item::Inflight)?;
        Some((word.message.as_shape()?, word.descriptors.first()?))
    }

    /// The guest's memory.
    pub(super) fn regions(&self) -> Vec<Region> {
        self.regions_beside(None)
    }

    /// The guest's memory, without what one item says of it.
    fn regions_beside(&self, own: Option<Item>) -> Vec<Region> {
        let mut regions = Vec::new();
        for (_, word) in self.iter().filter(|(item, _)| Some(*item) != own) {
            match word.message.parse(word.descriptors.len()) {
                Ok(Request::SetMemTable(table)) => regions.extend(table),
                Ok(Request::AddMemReg(region)) => regions.push(region),
                Ok(_) | Err(_) => {}
            }
        }
        regions
    }

    /// The region in which an address of the front-end lies, and its file.
    pub(super) fn region_of(&self, user: u64) -> Option<(Region, &Arc<OwnedFd>)> {
        self.iter().find_map(|(_, word)| {
            let regions = match word.message.parse(word.descriptors.len()) {
                Ok(Request::SetMemTable(table)) => table,
                Ok(Request::AddMemReg(region)) => vec![region],
                Ok(_) | Err(_) => return None,
            };
            let mut files = regions.into_iter().zip(&word.descriptors);
            files.find(|(one, _)| (one.user..one.user + one.size).contains(&user))
        })
    }

    fn ring_size(&self, ring: u32) -> Option<u32> {
        let word = self.get(Item::Ring(ring, RingItem::Size))?;
        match word.message.parse(0) {
            Ok(Request::SetVringNum { size, .. }) => Some(size),
            Ok(_) | Err(_) => None,
        }
    }

    /// The entries of each ring that is to run.
    pub(super) fn started_sizes(&self) -> Vec<(u32, u32)> {
        let size = |ring: u32| Some((ring, self.ring_size(ring)?));
        self.started().into_iter().filter_map(size).collect()
    }

    /// Where the used ring of a ring is, in the front-end's addresses.
    pub(super) fn addresses(&self, ring: u32) -> Option<Addresses> {
        let word = self.get(Item::Ring(ring, RingItem::Addresses))?;
        match word.message.parse(0) {
            Ok(Request::SetVringAddr(addresses)) => Some(addresses),
            Ok(_) | Err(_) => None,
        }
    }

    /// That a request makes sense after all that was said before it.
    pub(super) fn check(&self, request: &Request) -> Result<(), Refused> {
        match request {
            Request::AddMemReg(region) => {
                // It takes the place of one that was added there, and of none of a table.
                let others = self.regions_beside(Some(Item::Region(region.guest)));
                check_apart(Code::AddMemReg, region, &others)
            }
            Request::SetVringAddr(addresses) => {
                let missing = |missing| Refused::TooSoon { code: Code::SetVringAddr, missing };
                let size = self.ring_size(addresses.ring).ok_or(missing("SetVringNum"))?;
                addresses.check_within(size, &self.regions())
            }
            // libvhost-user would run on with the new size, and look at no address again.
            Request::SetVringNum { ring, size } if self.started().contains(ring) => {
                let (code, value) = (Code::SetVringNum, u64::from(*size));
                Err(Refused::Value { code, field: "size", value, rule: "is of a ring that runs" })
            }
            Request::SetVringKick { ring } => {
                let missing = |missing| Refused::TooSoon { code: Code::SetVringKick, missing };
                self.features().ok_or(missing("SetFeatures"))?;
                let size = self.ring_size(*ring).ok_or(missing("SetVringNum"))?;
                let addresses = self.addresses(*ring).ok_or(missing("SetVringAddr"))?;
                addresses.check_within(size, &self.regions())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn a_region_takes_the_place_of_one_that_was_added_and_of_none_of_a_table() {
        let memory = Arc::new(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        let message = |code, first: u64, guest: u64, user: u64| {
            let numbers = [first, guest, 4096, user, 0];
            Message::new(code, numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
        };
        let word = |message| Word { message, descriptors: vec![memory.clone()] };
        let added = |guest, user| message(Code::AddMemReg, 0, guest, user);
        let mut said = Said::default();
        said.set(Item::Memory, word(message(Code::SetMemTable, 1, 0, 8192)));
        said.set(Item::Region(8192), word(added(8192, 4096)));
        for (guest, user, fits) in
            [(0, 1 << 20, false), (0, 8192, false), (8192, 1 << 20, true), (4096, 4096, false)]
        {
            let request = added(guest, user).parse(1).unwrap();
            assert_eq!(said.check(&request).is_ok(), fits, "{guest} {user}");
        }
    }
}
