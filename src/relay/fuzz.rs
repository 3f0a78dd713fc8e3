//! Fuzzing of what front-ends say and give, and of what the relay's parts and the driver say.

use super::{
    inflight::Inflight,
    kept::{self, Commit, Word as KeptWord},
    memory,
    message::{Code, HEADER, MOST_DESCRIPTORS, MOST_RINGS, Message, Request, Shape, check_apart},
    protocol::{self, Attach},
    said::{Item, RingItem, Said, Word},
    session::FrontNote,
    wire,
};
use crate::fuzz::read_back;
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair},
};
use std::{
    collections::BTreeSet,
    fs::File,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
    sync::Arc,
};

/// Any bytes, taken for each kind of record, of the run directory and of the keeper.
pub(crate) fn records(bytes: &[u8]) {
    read_back::<Attach>(bytes);
    read_back::<FrontNote>(bytes);
    read_back::<Item>(bytes);
    read_back::<Message>(bytes);
}

/// Any line, taken for whatever may come in one, and for a datagram between keeper and worker.
pub(crate) fn line(line: &[u8]) {
    read_back::<protocol::Request>(line);
    read_back::<protocol::Reply>(line);
    read_back::<kept::Reply>(line);
    if let Some(KeptWord::Commit(parts)) = read_back::<KeptWord>(line) {
        let written = serde_json::to_vec(&parts).expect("it was read");
        // Without a descriptor it is the same commit, or none.
        if let Some(commit) = Commit::from_parts(parts, Vec::new()) {
            let (parts, descriptors) = commit.parts();
            assert!(descriptors.is_empty());
            assert_eq!(serde_json::to_vec(&parts).expect("it was read"), written);
        }
    }
}

/// Any bytes, taken for what a front-end sends. Each message gets the descriptors it should have.
pub fn vhost_user(bytes: &[u8]) {
    let kind = SocketType::STREAM;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (front, ours) =
        socketpair(AddressFamily::UNIX, kind, flags, None).expect("there are sockets");
    let Ok(sent) = send(&front, bytes, SendFlags::NOSIGNAL) else { return };
    let mut rest = &bytes[..sent];
    let (mut said, memory) = (Said::default(), Arc::new(memory(4096)));
    while let Ok(Some((message, descriptors))) = wire::peek(ours.as_fd()) {
        assert!(descriptors.is_empty() && rest.starts_with(&message.bytes()));
        let length = HEADER + message.body.len();
        wire::take(ours.as_fd(), length).expect("it was looked at");
        rest = &rest[length..];
        if !hear(&mut said, message, &memory) {
            return;
        }
        require_sound(&said);
    }
}

/// What a session does with a message, but for the back-end; whether it takes it.
fn hear(said: &mut Said, mut message: Message, memory: &Arc<OwnedFd>) -> bool {
    let parsed = (0..=MOST_DESCRIPTORS).find_map(|count| Some((message.parse(count).ok()?, count)));
    let Some((request, count)) = parsed else { return false };
    assert!(request.rings() <= MOST_RINGS);
    if said.check(&request).is_err() {
        return false;
    }
    if matches!(request, Request::SetInflightFd(_)) {
        message.pad_shape();
    }
    for item in said.replaced_by(&request) {
        said.forget(item);
    }
    if let Request::GetVringBase { ring } = request {
        said.forget(Item::Ring(ring, RingItem::Kick));
    }
    if let Some(item) = Item::of(&request) {
        said.set(item, Word { message, descriptors: vec![memory.clone(); count] });
    }
    true
}

/// That all of it can be told to the next back-end, and nothing leads out of the memory.
fn require_sound(said: &Said) {
    for (item, word) in said.iter() {
        let request = word.message.parse(word.descriptors.len()).expect("it was taken");
        assert_eq!(Item::of(&request), Some(item));
        let kept = serde_json::to_vec(&item).expect("an item can be kept");
        assert_eq!(read_back(&kept), Some(item));
        let kept = serde_json::to_vec(&word.message).expect("a message can be kept");
        assert_eq!(read_back(&kept).as_ref(), Some(&word.message));
    }
    let regions = said.regions();
    for (index, region) in regions.iter().enumerate() {
        check_apart(Code::AddMemReg, region, &regions[..index]).expect("regions lie apart");
        let (found, _) = said.region_of(region.user).expect("a region is found by its address");
        assert_eq!(found, *region);
    }
    for ring in said.started() {
        assert!(said.features().is_some() && said.addresses(ring).is_some());
        _ = memory::progress(said, ring);
    }
    if let Some((shape, buffer)) = said.inflight() {
        _ = Inflight::map(shape, buffer);
    }
}

/// How long the memory of a front-end is: more than the largest inflight buffer.
const MEMORY: u64 = 4 << 20;

/// Any bytes: how a front-end describes its inflight buffer, and what the buffer begins with.
pub fn inflight(bytes: &[u8]) {
    let Some((body, content)) = bytes.split_at_checked(24) else { return };
    let message = Message::new(Code::SetInflightFd, body.to_vec());
    let Ok(Request::SetInflightFd(shape)) = message.parse(1) else { return };
    assert_eq!(message.as_shape(), Some(shape));
    let memory = File::from(memory(MEMORY));
    if shape.offset < MEMORY / 2 {
        memory.write_all_at(content, shape.offset).expect("there is memory");
    }
    let Ok(buffer) = Inflight::map(shape, &memory.into()) else { return };
    assert!(shape.offset + shape.size <= MEMORY);
    let all = held(&buffer, shape, u32::MAX);
    assert!(held(&buffer, shape, 1).is_subset(&all));
    // Which requests are held is not changed by what is to become of them.
    for ring in 0..=MOST_RINGS {
        if content.len() % 2 == 0 { buffer.keep(ring) } else { buffer.forget(ring) }
    }
    assert_eq!(held(&buffer, shape, u32::MAX), all);
}

/// What a back-end holds of rings that are said to have so many entries.
fn held(buffer: &Inflight, shape: Shape, size: u32) -> BTreeSet<(u32, u32, u64)> {
    let rings: Vec<_> = (0..=shape.rings).map(|ring| (ring.into(), size)).collect();
    let held = buffer.held(&rings);
    let is_within = |ring: u32, entry: u32| {
        ring < shape.rings.into() && entry < size.min(shape.ring_size.into())
    };
    assert!(held.iter().all(|one| is_within(one.ring, one.entry)));
    held.into_iter().map(|one| (one.ring, one.entry, one.counter)).collect()
}

/// Memory as a front-end shares it.
fn memory(size: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("fuzz", flags).expect("there is memory"));
    file.set_len(size).expect("there is memory");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("it may be sealed");
    file.into()
}
