//! vhost-user messages as bytes and as meaning. Pure: no socket, no descriptor, only their number.
//!
//! Names and numbers are those of QEMU's `docs/interop/vhost-user.rst`. All numbers are little
//! endian, as the hosts are that QEMU shares memory on.

use serde::{Deserialize, Serialize};

/// Bytes of a header: request, flags, size of the body.
pub(super) const HEADER: usize = 12;

/// No body that we know is longer: the table of 8 memory regions has 264 bytes, a configuration
/// space at most 268.
pub(super) const LONGEST_BODY: usize = 4096;

/// Descriptors of one message: a memory table has at most this many regions.
pub(super) const MOST_DESCRIPTORS: usize = 8;

/// Rings of one device: what our exports offer (`qsd::QUEUES`).
pub(super) const MOST_RINGS: u32 = 64;

/// Entries of one ring, as libvhost-user has it.
const LARGEST_RING: u32 = 1024;

/// The version of the protocol, in the low bits of every header's flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
pub(super) const NEED_REPLY: u32 = 1 << 3;

/// In a kick, call or error message: there is no descriptor.
const NO_DESCRIPTOR: u64 = 1 << 8;
const RING_MASK: u64 = 0xff;

/// The largest part of a configuration space that one message carries.
const LARGEST_CONFIG: u32 = 256;

/// Bits of device features that mean something here.
pub(super) mod feature {
    /// `VIRTIO_BLK_F_SIZE_MAX`: QSD 10 has it, QSD 11 does not (facts/relay.md section 6).
    pub(in crate::relay) const SIZE_MAX: u64 = 1 << 1;
    /// `VIRTIO_BLK_F_CONFIG_WCE`: without it a guest flushes (facts/relay.md section 2).
    pub(in crate::relay) const CONFIG_WCE: u64 = 1 << 11;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`.
    pub(in crate::relay) const PROTOCOL: u64 = 1 << 30;
}

/// Bits of protocol features that the relay can record and replay. All others are masked:
/// PAGEFAULT, `HOST_NOTIFIER`, `BACKEND_SEND_FD`, `INBAND_NOTIFICATIONS`, `DEVICE_STATE` and what
/// is to come (facts/relay.md section 6).
pub(super) mod protocol {
    pub(in crate::relay) const MQ: u64 = 1 << 0;
    pub(in crate::relay) const LOG_SHMFD: u64 = 1 << 1;
    pub(in crate::relay) const REPLY_ACK: u64 = 1 << 3;
    pub(in crate::relay) const BACKEND_REQ: u64 = 1 << 5;
    pub(in crate::relay) const CONFIG: u64 = 1 << 9;
    pub(in crate::relay) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(in crate::relay) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(in crate::relay) const KNOWN: u64 =
        MQ | LOG_SHMFD | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}

/// What a message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Code {
    GetFeatures,
    SetFeatures,
    SetOwner,
    SetMemTable,
    SetLogBase,
    SetLogFd,
    SetVringNum,
    SetVringAddr,
    SetVringBase,
    GetVringBase,
    SetVringKick,
    SetVringCall,
    SetVringErr,
    GetProtocolFeatures,
    SetProtocolFeatures,
    GetQueueNum,
    SetVringEnable,
    SetBackendReqFd,
    GetConfig,
    SetConfig,
    GetInflightFd,
    SetInflightFd,
    GetMaxMemSlots,
    AddMemReg,
    RemMemReg,
}

/// Every code and its number.
const NUMBERS: [(Code, u32); 25] = [
    (Code::GetFeatures, 1),
    (Code::SetFeatures, 2),
    (Code::SetOwner, 3),
    (Code::SetMemTable, 5),
    (Code::SetLogBase, 6),
    (Code::SetLogFd, 7),
    (Code::SetVringNum, 8),
    (Code::SetVringAddr, 9),
    (Code::SetVringBase, 10),
    (Code::GetVringBase, 11),
    (Code::SetVringKick, 12),
    (Code::SetVringCall, 13),
    (Code::SetVringErr, 14),
    (Code::GetProtocolFeatures, 15),
    (Code::SetProtocolFeatures, 16),
    (Code::GetQueueNum, 17),
    (Code::SetVringEnable, 18),
    (Code::SetBackendReqFd, 21),
    (Code::GetConfig, 24),
    (Code::SetConfig, 25),
    (Code::GetInflightFd, 31),
    (Code::SetInflightFd, 32),
    (Code::GetMaxMemSlots, 36),
    (Code::AddMemReg, 37),
    (Code::RemMemReg, 38),
];

/// On the channel of the back-end: its configuration space has changed.
pub(super) const CONFIG_CHANGE: u32 = 2;

/// Why a message is not taken. The peer that sent it is not talked to any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("unknown request {0}")]
    Unknown(u32),
    #[error("request {request}: flags {flags:#x}")]
    Flags { request: u32, flags: u32 },
    #[error("request {request}: a body of {size} bytes, the longest has {LONGEST_BODY}")]
    TooLong { request: u32, size: usize },
    #[error("{code:?}: a body of {size} bytes")]
    Size { code: Code, size: usize },
    #[error("{code:?}: {count} descriptors, {expected} are due")]
    Descriptors { code: Code, count: usize, expected: usize },
    #[error("{code:?}: {field} {value:#x} {rule}")]
    Value { code: Code, field: &'static str, value: u64, rule: &'static str },
    #[error("{used} rings, the back-end has {queues}")]
    Rings { used: u32, queues: u64 },
    #[error("{code:?} before {missing}")]
    TooSoon { code: Code, missing: &'static str },
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) request: u32,
    pub(super) flags: u32,
    pub(super) size: usize,
}

/// A message without its descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) request: u32,
    pub(super) flags: u32,
    pub(super) body: Vec<u8>,
}

/// A part of a guest's memory: where the guest has it, where the front-end has it, and where it
/// lies in its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) guest: u64,
    pub(super) size: u64,
    pub(super) user: u64,
    pub(super) offset: u64,
}

/// Where a ring lies, in the front-end's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) ring: u32,
    pub(super) descriptors: u64,
    pub(super) used: u64,
    pub(super) available: u64,
}

/// The shape of an inflight buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) size: u64,
    pub(super) offset: u64,
    pub(super) rings: u16,
    pub(super) ring_size: u16,
}

/// A request of a front-end, checked as far as it can be by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    SetMemTable(Vec<Region>),
    SetLogBase,
    SetLogFd,
    SetVringNum { ring: u32, size: u32 },
    SetVringAddr(Addresses),
    SetVringBase { ring: u32 },
    GetVringBase { ring: u32 },
    SetVringKick { ring: u32 },
    SetVringCall { ring: u32 },
    SetVringErr { ring: u32 },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { ring: u32 },
    SetBackendReqFd,
    GetConfig,
    SetConfig,
    GetInflightFd(Shape),
    SetInflightFd(Shape),
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(Region),
}

impl Request {
    /// How many rings a device must have for this.
    pub(super) fn rings(&self) -> u32 {
        match self {
            Self::SetVringNum { ring, .. }
            | Self::SetVringBase { ring }
            | Self::GetVringBase { ring }
            | Self::SetVringKick { ring }
            | Self::SetVringCall { ring }
            | Self::SetVringErr { ring }
            | Self::SetVringEnable { ring } => ring + 1,
            Self::SetVringAddr(addresses) => addresses.ring + 1,
            Self::GetInflightFd(shape) | Self::SetInflightFd(shape) => shape.rings.into(),
            Self::GetFeatures
            | Self::SetFeatures(_)
            | Self::SetOwner
            | Self::SetMemTable(_)
            | Self::SetLogBase
            | Self::SetLogFd
            | Self::GetProtocolFeatures
            | Self::SetProtocolFeatures(_)
            | Self::GetQueueNum
            | Self::SetBackendReqFd
            | Self::GetConfig
            | Self::SetConfig
            | Self::GetMaxMemSlots
            | Self::AddMemReg(_)
            | Self::RemMemReg(_) => 0,
        }
    }
}

impl Code {
    pub(super) fn number(self) -> u32 {
        let own = NUMBERS.iter().find(|(code, _)| *code == self);
        own.expect("every code has a number").1
    }

    fn of(number: u32) -> Result<Self, Refused> {
        let known = NUMBERS.iter().find(|(_, own)| *own == number);
        known.map(|(code, _)| *code).ok_or(Refused::Unknown(number))
    }
}

impl Header {
    /// The header in these bytes, if a body may follow it.
    pub(super) fn parse(bytes: &[u8; HEADER]) -> Result<Self, Refused> {
        let (request, flags) = (u32_at(bytes, 0), u32_at(bytes, 4));
        let size = usize::try_from(u32_at(bytes, 8)).unwrap_or(usize::MAX);
        if flags & VERSION_MASK != VERSION || flags & !(VERSION_MASK | REPLY | NEED_REPLY) != 0 {
            return Err(Refused::Flags { request, flags });
        }
        if size > LONGEST_BODY {
            return Err(Refused::TooLong { request, size });
        }
        Ok(Self { request, flags, size })
    }
}

impl Message {
    /// A message that asks for no reply.
    pub(super) fn new(code: Code, body: Vec<u8>) -> Self {
        Self { request: code.number(), flags: VERSION, body }
    }

    /// A message whose body is one number.
    pub(super) fn number(code: Code, number: u64) -> Self {
        Self::new(code, number.to_le_bytes().to_vec())
    }

    /// A message that sets a number of a ring.
    pub(super) fn ring(code: Code, ring: u32, number: u32) -> Self {
        Self::new(code, [ring.to_le_bytes(), number.to_le_bytes()].concat())
    }

    /// A request for an inflight buffer for so many rings of so many entries.
    pub(super) fn inflight(rings: u16, ring_size: u16) -> Self {
        let shape = Shape { size: 0, offset: 0, rings, ring_size };
        Self { request: Code::GetInflightFd.number(), ..Self::inflight_buffer(shape) }
    }

    /// What hands over an inflight buffer of this shape.
    pub(super) fn inflight_buffer(shape: Shape) -> Self {
        let mut body = Vec::new();
        body.extend(shape.size.to_le_bytes());
        body.extend(shape.offset.to_le_bytes());
        body.extend(shape.rings.to_le_bytes());
        body.extend(shape.ring_size.to_le_bytes());
        body.extend([0; 4]); // libvhost-user wants the padding, too
        Self::new(Code::SetInflightFd, body)
    }

    /// The word of a back-end that its configuration space has changed.
    pub(super) fn config_change() -> Self {
        Self { request: CONFIG_CHANGE, flags: VERSION, body: Vec::new() }
    }

    /// The reply to `self` with this body.
    pub(super) fn reply(&self, body: Vec<u8>) -> Self {
        Self { request: self.request, flags: VERSION | REPLY, body }
    }

    /// The same request, asking for a reply or not.
    pub(super) fn asking(&self, need_reply: bool) -> Self {
        let flags = VERSION | if need_reply { NEED_REPLY } else { 0 };
        Self { request: self.request, flags, body: self.body.clone() }
    }

    pub(super) fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    pub(super) fn is_reply_to(&self, request: u32) -> bool {
        self.request == request && self.flags & REPLY != 0
    }

    /// The number that the body is, if it is one.
    pub(super) fn as_number(&self) -> Option<u64> {
        Some(u64::from_le_bytes(self.body.as_slice().try_into().ok()?))
    }

    /// The shape of the inflight buffer that the body tells of.
    pub(super) fn as_shape(&self) -> Option<Shape> {
        (self.body.len() >= 20).then(|| shape(&self.body))
    }

    /// Makes the shape of an inflight buffer as long as libvhost-user has it.
    pub(super) fn pad_shape(&mut self) {
        self.body.resize(24, 0);
    }

    /// The bytes that go over a socket.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let size = u32::try_from(self.body.len()).expect("a body is short");
        let mut bytes = Vec::with_capacity(HEADER + self.body.len());
        for word in [self.request, self.flags, size] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(&self.body);
        bytes
    }

    /// What the message asks for, sent by a front-end with so many descriptors.
    pub(super) fn parse(&self, descriptors: usize) -> Result<Request, Refused> {
        let code = Code::of(self.request)?;
        if self.flags & REPLY != 0 {
            return Err(Refused::Flags { request: self.request, flags: self.flags });
        }
        let request = Parser { code, body: &self.body }.parse()?;
        self.check_descriptors(code, &request, descriptors)?;
        Ok(request)
    }

    fn check_descriptors(
        &self,
        code: Code,
        request: &Request,
        count: usize,
    ) -> Result<(), Refused> {
        let expected = match request {
            Request::SetMemTable(regions) => regions.len(),
            Request::SetVringKick { .. }
            | Request::SetVringCall { .. }
            | Request::SetVringErr { .. } => {
                usize::from(u64_at(&self.body, 0) & NO_DESCRIPTOR == 0)
            }
            Request::SetBackendReqFd
            | Request::SetInflightFd(_)
            | Request::AddMemReg(_)
            | Request::SetLogFd => 1,
            // With or without, as the front-end has it (LOG_SHMFD; what it takes back).
            Request::SetLogBase | Request::RemMemReg(_) => count.min(1),
            Request::GetFeatures
            | Request::SetFeatures(_)
            | Request::SetOwner
            | Request::SetVringNum { .. }
            | Request::SetVringAddr(_)
            | Request::SetVringBase { .. }
            | Request::GetVringBase { .. }
            | Request::GetProtocolFeatures
            | Request::SetProtocolFeatures(_)
            | Request::GetQueueNum
            | Request::SetVringEnable { .. }
            | Request::GetConfig
            | Request::SetConfig
            | Request::GetInflightFd(_)
            | Request::GetMaxMemSlots => 0,
        };
        if count == expected {
            return Ok(());
        }
        Err(Refused::Descriptors { code, count, expected })
    }
}

struct Parser<'a> {
    code: Code,
    body: &'a [u8],
}

impl Parser<'_> {
    fn parse(&self) -> Result<Request, Refused> {
        Ok(match self.code {
            Code::GetFeatures => self.empty(Request::GetFeatures)?,
            Code::SetFeatures => Request::SetFeatures(self.number()?),
            Code::SetOwner => self.empty(Request::SetOwner)?,
            Code::SetMemTable => Request::SetMemTable(self.regions()?),
            Code::SetLogBase => self.sized(16, Request::SetLogBase)?,
            Code::SetLogFd => Request::SetLogFd,
            Code::SetVringNum => self.ring_size()?,
            Code::SetVringAddr => Request::SetVringAddr(self.addresses()?),
            Code::SetVringBase => Request::SetVringBase { ring: self.state()?.0 },
            Code::GetVringBase => Request::GetVringBase { ring: self.state()?.0 },
            Code::SetVringKick => Request::SetVringKick { ring: self.notified()? },
            Code::SetVringCall => Request::SetVringCall { ring: self.notified()? },
            Code::SetVringErr => Request::SetVringErr { ring: self.notified()? },
            Code::GetProtocolFeatures => self.empty(Request::GetProtocolFeatures)?,
            Code::SetProtocolFeatures => Request::SetProtocolFeatures(self.number()?),
            Code::GetQueueNum => self.empty(Request::GetQueueNum)?,
            Code::SetVringEnable => Request::SetVringEnable { ring: self.state()?.0 },
            Code::SetBackendReqFd => self.empty(Request::SetBackendReqFd)?,
            Code::GetConfig => self.config(Request::GetConfig)?,
            Code::SetConfig => self.config(Request::SetConfig)?,
            Code::GetInflightFd => Request::GetInflightFd(self.queues()?),
            Code::SetInflightFd => Request::SetInflightFd(self.buffer()?),
            Code::GetMaxMemSlots => self.empty(Request::GetMaxMemSlots)?,
            Code::AddMemReg => Request::AddMemReg(self.one_region()?),
            Code::RemMemReg => Request::RemMemReg(self.one_region()?),
        })
    }

    fn sized<T>(&self, size: usize, parsed: T) -> Result<T, Refused> {
        if self.body.len() == size {
            return Ok(parsed);
        }
        Err(Refused::Size { code: self.code, size: self.body.len() })
    }

    /// Some front-ends send a number with what only asks for one.
    fn empty(&self, request: Request) -> Result<Request, Refused> {
        if self.body.len() == 8 { Ok(request) } else { self.sized(0, request) }
    }

    fn number(&self) -> Result<u64, Refused> {
        self.sized(8, ())?;
        Ok(u64_at(self.body, 0))
    }

    fn value<T>(&self, field: &'static str, value: u64, rule: &'static str) -> Result<T, Refused> {
        Err(Refused::Value { code: self.code, field, value, rule })
    }

    fn ring(&self, ring: u32) -> Result<u32, Refused> {
        if ring < MOST_RINGS {
            return Ok(ring);
        }
        self.value("ring", ring.into(), "is not there")
    }

    fn state(&self) -> Result<(u32, u32), Refused> {
        self.sized(8, ())?;
        Ok((self.ring(u32_at(self.body, 0))?, u32_at(self.body, 4)))
    }

    fn ring_size(&self) -> Result<Request, Refused> {
        let (ring, size) = self.state()?;
        if size > LARGEST_RING || !size.is_power_of_two() {
            return self.value("size", size.into(), "is no power of two up to 1024");
        }
        Ok(Request::SetVringNum { ring, size })
    }

    fn notified(&self) -> Result<u32, Refused> {
        let number = self.number()?;
        if number & !(RING_MASK | NO_DESCRIPTOR) != 0 {
            return self.value("ring and flags", number, "have unknown bits");
        }
        self.ring(u32::try_from(number & RING_MASK).expect("eight bits"))
    }

    fn addresses(&self) -> Result<Addresses, Refused> {
        self.sized(40, ())?;
        Ok(Addresses {
            ring: self.ring(u32_at(self.body, 0))?,
            descriptors: u64_at(self.body, 8),
            used: u64_at(self.body, 16),
            available: u64_at(self.body, 24),
        })
    }

    fn regions(&self) -> Result<Vec<Region>, Refused> {
        let size = self.body.len();
        if size < 8 {
            return Err(Refused::Size { code: self.code, size });
        }
        let count = usize::try_from(u32_at(self.body, 0)).unwrap_or(usize::MAX);
        if count > MOST_DESCRIPTORS {
            let count = u64::from(u32_at(self.body, 0));
            return self.value("regions", count, "are more than 8");
        }
        self.sized(8 + 32 * count, ())?;
        let regions: Vec<_> = (0..count).map(|at| region(&self.body[8 + 32 * at..])).collect();
        for (index, region) in regions.iter().enumerate() {
            self.check_region(region)?;
            check_apart(self.code, region, &regions[..index])?;
        }
        Ok(regions)
    }

    fn one_region(&self) -> Result<Region, Refused> {
        self.sized(40, ())?;
        let region = region(&self.body[8..]);
        self.check_region(&region)?;
        Ok(region)
    }

    fn check_region(&self, region: &Region) -> Result<(), Refused> {
        if region.size == 0 {
            return self.value("region size", 0, "is nothing");
        }
        for (field, start) in [
            ("guest address", region.guest),
            ("user address", region.user),
            ("mmap offset", region.offset),
        ] {
            if start.checked_add(region.size).is_none() {
                return self.value(field, start, "wraps around");
            }
        }
        Ok(())
    }

    fn config(&self, request: Request) -> Result<Request, Refused> {
        let size = self.body.len();
        if size < 12 {
            return Err(Refused::Size { code: self.code, size });
        }
        let (offset, length) = (u32_at(self.body, 0), u32_at(self.body, 4));
        if length > LARGEST_CONFIG || offset > LARGEST_CONFIG - length {
            return self.value("size", length.into(), "is beyond the configuration space");
        }
        self.sized(12 + usize::try_from(length).expect("at most 256"), request)
    }

    /// 20 bytes by the standard, 24 as QEMU has it.
    fn shape(&self) -> Result<Shape, Refused> {
        if self.body.len() != 20 {
            self.sized(24, ())?;
        }
        Ok(shape(self.body))
    }

    fn queues(&self) -> Result<Shape, Refused> {
        let shape = self.shape()?;
        if shape.rings == 0 || u32::from(shape.rings) > MOST_RINGS {
            return self.value("queues", shape.rings.into(), "cannot be");
        }
        if shape.ring_size == 0 || u32::from(shape.ring_size) > LARGEST_RING {
            return self.value("queue size", shape.ring_size.into(), "cannot be");
        }
        Ok(shape)
    }

    fn buffer(&self) -> Result<Shape, Refused> {
        let shape = self.queues()?;
        let least = u64::from(shape.rings) * (16 + 16 * u64::from(shape.ring_size));
        if shape.size < least || shape.size > least * 2 + 4096 * u64::from(shape.rings) {
            return self.value("mmap size", shape.size, "does not fit the queues");
        }
        if shape.offset.checked_add(shape.size).is_none() {
            return self.value("mmap offset", shape.offset, "wraps around");
        }
        Ok(shape)
    }
}

/// That a region shares no address with others, neither the guest's nor the front-end's.
pub(super) fn check_apart<'a>(
    code: Code,
    region: &Region,
    others: impl IntoIterator<Item = &'a Region>,
) -> Result<(), Refused> {
    let meet = |a: u64, a_size: u64, b: u64, b_size: u64| a < b + b_size && b < a + a_size;
    for other in others {
        if meet(region.guest, region.size, other.guest, other.size)
            || meet(region.user, region.size, other.user, other.size)
        {
            let rule = "overlaps another region";
            return Err(Refused::Value { code, field: "region", value: region.guest, rule });
        }
    }
    Ok(())
}

impl Addresses {
    /// That the whole ring of `size` entries lies in the memory there is.
    pub(super) fn check_within(&self, size: u32, regions: &[Region]) -> Result<(), Refused> {
        let size = u64::from(size);
        // Virtio 1.2, section 2.7: split virtqueues.
        for (field, start, length) in [
            ("descriptor table", self.descriptors, 16 * size),
            ("available ring", self.available, 6 + 2 * size),
            ("used ring", self.used, 6 + 8 * size),
        ] {
            let within = |region: &Region| {
                start >= region.user
                    && start.checked_add(length).is_some_and(|end| end <= region.user + region.size)
            };
            if !regions.iter().any(within) {
                let (code, rule) = (Code::SetVringAddr, "is outside the memory");
                return Err(Refused::Value { code, field, value: start, rule });
            }
        }
        Ok(())
    }
}

fn region(bytes: &[u8]) -> Region {
    Region {
        guest: u64_at(bytes, 0),
        size: u64_at(bytes, 8),
        user: u64_at(bytes, 16),
        offset: u64_at(bytes, 24),
    }
}

fn shape(bytes: &[u8]) -> Shape {
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    Shape { size: u64_at(bytes, 0), offset: u64_at(bytes, 8), rings: word(16), ring_size: word(18) }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    /// Numbers at which arithmetic goes wrong, if it does anywhere.
    fn edge() -> impl Strategy<Value = u64> {
        prop_oneof![
            Just(0),
            Just(1),
            Just(u64::MAX),
            Just(u64::MAX - 4095),
            Just(1 << 63),
            Just(u64::from(u32::MAX)),
            0_u64..2048,
            any::<u64>(),
        ]
    }

    /// Whole words more often than not.
    fn body() -> impl Strategy<Value = Vec<u8>> {
        (vec(edge(), 0..36), 0_usize..14).prop_map(|(words, less)| {
            let mut bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.truncate(bytes.len().saturating_sub(less.saturating_sub(6)));
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn any_message_is_a_request_or_refused(
            request in 0_u32..45,
            flags in prop_oneof![Just(1_u32), any::<u32>()],
            body in body(),
            descriptors in 0_usize..12,
        ) {
            let message = Message { request, flags, body };
            if let Ok(request) = message.parse(descriptors) {
                prop_assert_eq!(Code::of(message.request).unwrap().number(), message.request);
                if let Request::SetMemTable(regions) = &request {
                    prop_assert_eq!(regions.len(), descriptors);
                    for one in regions {
                        prop_assert!(check_apart(Code::AddMemReg, one, regions).is_err());
                    }
                }
                if let Request::SetInflightFd(shape) = request {
                    prop_assert_eq!(message.as_shape(), Some(shape));
                }
            }
        }

        #[test]
        fn a_ring_that_passes_lies_in_one_region(
            descriptors in edge(), used in edge(), available in edge(),
            user in edge(), size in edge(), guest in edge(), exponent in 0_u32..11,
        ) {
            let mut bytes = vec![0; 8];
            for word in [guest, size, user, 0] {
                bytes.extend(word.to_le_bytes());
            }
            let Ok(Request::AddMemReg(region)) = Message::new(Code::AddMemReg, bytes).parse(1)
            else { return Ok(()) };
            let addresses = Addresses { ring: 0, descriptors, used, available };
            let entries = 1_u32 << exponent;
            if addresses.check_within(entries, &[region]).is_ok() {
                for start in [descriptors, used, available] {
                    prop_assert!(start >= user && start - user < size);
                }
            }
        }

        #[test]
        fn a_header_is_read_as_it_was_written(bytes in any::<[u8; HEADER]>()) {
            if let Ok(header) = Header::parse(&bytes) {
                let body = vec![0; header.size];
                let message = Message { request: header.request, flags: header.flags, body };
                prop_assert!(message.bytes().starts_with(&bytes));
            }
        }
    }
}
