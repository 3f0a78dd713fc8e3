//! The relay against front-ends and back-ends that mean ill: whoever misbehaves is dropped, and
//! nobody else notices.

mod backend;
pub(crate) mod front;
pub(crate) mod process;

use crate::harness::is_alive;
use backend::{Fake, Manner};
use front::{
    ADD_MEM_REG, Disk, Front, GET_CONFIG, GET_FEATURES, GET_INFLIGHT, GET_PROTOCOL, GET_VRING_BASE,
    MEMORY, NEED_REPLY, PLAIN, REM_MEM_REG, REPLY, SET_BACKEND_REQ_FD, SET_FEATURES, SET_INFLIGHT,
    SET_MEM_TABLE, SET_PROTOCOL, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE,
    SET_VRING_ERR, SET_VRING_KICK, SET_VRING_NUM, USER, addresses, body, event, memfd, message,
    region, ring, sealed, shape,
};
use process::{Relay, cpu_time, descriptors, memory, until};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::json;
use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::Ordering,
    thread::sleep,
    time::{Duration, Instant},
};

/// Every request a front-end may make, with the size of its body.
const REQUESTS: [(u32, usize); 25] = [
    (1, 0),
    (2, 8),
    (3, 0),
    (5, 40),
    (6, 16),
    (7, 0),
    (8, 8),
    (9, 40),
    (10, 8),
    (11, 8),
    (12, 8),
    (13, 8),
    (14, 8),
    (15, 0),
    (16, 8),
    (17, 0),
    (18, 8),
    (21, 0),
    (24, 12),
    (25, 12),
    (31, 24),
    (32, 24),
    (36, 0),
    (37, 40),
    (38, 40),
];

/// One thing that a hostile front-end says, after it came as far as every good one.
struct Attack {
    what: String,
    bytes: Vec<u8>,
    files: Vec<File>,
}

fn attack(what: &str, request: u32, body: &[u8], files: Vec<File>) -> Attack {
    Attack { what: what.to_owned(), bytes: message(request, PLAIN, body), files }
}

fn pipe() -> File {
    File::from(std::os::fd::OwnedFd::from(std::io::pipe().unwrap().1))
}

/// Messages that are wrong by themselves.
fn malformed() -> Vec<Attack> {
    let mut attacks = Vec::new();
    for (request, size) in REQUESTS {
        for wrong in [1, size + 1, size + 2000, 4097, usize::MAX] {
            let bytes = if wrong == usize::MAX {
                [request, PLAIN, u32::MAX].iter().flat_map(|word| word.to_le_bytes()).collect()
            } else {
                message(request, PLAIN, &vec![0; wrong])
            };
            let what = format!("request {request} with {wrong} bytes");
            // It has no body that anybody knows of.
            if request != 7 || wrong > 4096 {
                attacks.push(Attack { what, bytes, files: Vec::new() });
            }
        }
        let many = (0..9).map(|_| memfd(4096)).collect();
        attacks.push(attack("nine descriptors", request, &vec![0; size], many));
        let many = (0..70).map(|_| memfd(4096)).collect();
        attacks.push(attack("seventy descriptors", request, &vec![0; size], many));
        for flags in [PLAIN | REPLY, PLAIN | REPLY | NEED_REPLY, 0, 2, 3, PLAIN | 16] {
            let what = format!("request {request} with flags {flags:#x}");
            let bytes = message(request, flags, &vec![0; size]);
            attacks.push(Attack { what, bytes, files: Vec::new() });
        }
    }
    for unknown in [0, 4, 19, 20, 22, 23, 26, 28, 33, 39, 40, 41, 42, 1000, u32::MAX] {
        attacks.push(attack(&format!("request {unknown}"), unknown, &[], Vec::new()));
    }
    attacks
}

/// Messages that are wrong in what they mean.
fn senseless() -> Vec<Attack> {
    let two = |a: [u64; 4], b: [u64; 4]| [body(&[2]), body(&a), body(&b)].concat();
    let files = |count: usize| (0..count).map(|_| memfd(MEMORY)).collect::<Vec<_>>();
    let top = u64::MAX - 4096;
    let mut attacks = vec![
        attack(
            "overlapping regions",
            SET_MEM_TABLE,
            &two([0, MEMORY, USER, 0], [4096, MEMORY, USER << 1, 0]),
            files(2),
        ),
        attack(
            "regions that overlap for itself",
            SET_MEM_TABLE,
            &two([0, MEMORY, USER, 0], [MEMORY, MEMORY, USER + 1, 0]),
            files(2),
        ),
        attack("nine regions", SET_MEM_TABLE, &[body(&[9]), vec![0; 288]].concat(), files(8)),
        attack("a table without memory", SET_MEM_TABLE, &region(0, MEMORY, USER), files(0)),
        attack("too much for a table", SET_MEM_TABLE, &region(0, MEMORY, USER), files(2)),
        attack("a region of nothing", ADD_MEM_REG, &region(0, 0, USER), files(1)),
        attack("a region that wraps", ADD_MEM_REG, &region(top, 8192, USER), files(1)),
        attack("a region that wraps for itself", ADD_MEM_REG, &region(0, 8192, top), files(1)),
        attack("an offset that wraps", ADD_MEM_REG, &body(&[1, 0, 8192, USER, top]), files(1)),
        attack("a region without memory", ADD_MEM_REG, &region(0, MEMORY, USER), files(0)),
        attack("a ring before its size", SET_VRING_ADDR, &addresses(0, USER), files(0)),
        attack("a kick before all", SET_VRING_KICK, &body(&[0]), files(1)),
        attack("no eventfd to call", SET_VRING_CALL, &body(&[0]), files(1)),
        attack("a pipe to call", SET_VRING_CALL, &body(&[0]), vec![pipe()]),
        attack("unknown bits in a call", SET_VRING_CALL, &body(&[1 << 9]), files(1)),
        attack("a descriptor that is said not to be", SET_VRING_CALL, &body(&[256]), files(1)),
        attack("features that were not offered", SET_FEATURES, &body(&[u64::MAX]), files(0)),
        attack("protocol features not offered", SET_PROTOCOL, &body(&[u64::MAX]), files(0)),
        attack("too much configuration", GET_CONFIG, &ring(0, 257), files(0)),
        attack("a buffer for nothing", SET_INFLIGHT, &shape(1 << 20, 0, 0), files(1)),
        attack("a buffer too small", SET_INFLIGHT, &shape(4096, 64, 1024), files(1)),
        attack("a buffer too large", SET_INFLIGHT, &shape(1 << 40, 64, 1024), files(1)),
        attack("a buffer for too many", GET_INFLIGHT, &shape(0, u16::MAX, u16::MAX), files(0)),
        attack("a buffer with a short file", SET_INFLIGHT, &shape(16448, 1, 1024), {
            vec![sealed(4096)]
        }),
        attack("a buffer that can be cut", SET_INFLIGHT, &shape(16448, 1, 1024), files(1)),
        attack("a buffer that is a pipe", SET_INFLIGHT, &shape(16448, 1, 1024), vec![pipe()]),
    ];
    for size in [0, 3, 1 << 11, u32::MAX] {
        attacks.push(attack("a ring of that size", SET_VRING_NUM, &ring(0, size), files(0)));
    }
    for index in [64, 255, u32::MAX] {
        for request in [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ENABLE, GET_VRING_BASE] {
            attacks.push(attack("a ring out of range", request, &ring(index, 8), files(0)));
        }
        for request in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
            let ring = body(&[u64::from(index)]);
            attacks.push(attack("a ring out of range", request, &ring, files(1)));
        }
    }
    attacks
}

fn send(front: &Front, attack: &Attack) {
    let descriptors: Vec<BorrowedFd<'_>> = attack.files.iter().map(AsFd::as_fd).collect();
    front.raw(&attack.bytes, &descriptors);
}

#[test]
fn a_front_end_that_talks_nonsense_is_dropped_and_nobody_else_notices() {
    let mut relay = Relay::start();
    let (one, other) = (relay.serve(1), relay.serve(2));
    let mut neighbour = Disk::open(&relay.socket(&other));
    let worker = relay.worker();
    let attacks = malformed().into_iter().chain(senseless());
    let mut count = 0_u8;
    for attack in attacks {
        let mut front = Front::connect(&relay.socket(&one));
        front.negotiate();
        send(&front, &attack);
        assert!(front.is_dropped(), "{}", attack.what);
        count = count.wrapping_add(1);
        if count.is_multiple_of(16) {
            neighbour.works(u64::from(count), count);
        }
    }
    eprintln!("{count} attacks");
    assert_eq!(relay.worker(), worker, "the worker lives on");
    neighbour.works(0, 1);
    Disk::open(&relay.socket(&one)).works(0, 2);
}

#[test]
fn a_ring_cannot_grow_beyond_the_memory_it_was_checked_against() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let file = memfd(MEMORY);
    let at_the_end = addresses(0, USER + MEMORY - 0x3046);
    for kicked_first in [false, true] {
        let mut front = Front::connect(&relay.socket(&key));
        front.negotiate();
        front.set(ADD_MEM_REG, &region(0, MEMORY, USER), &[&file]);
        front.set(SET_VRING_NUM, &ring(0, 8), &[]);
        front.set(SET_VRING_ADDR, &at_the_end, &[]);
        if kicked_first {
            front.set(SET_VRING_KICK, &body(&[0]), &[&event()]);
        }
        front.say(SET_VRING_NUM, PLAIN, &ring(0, 1024), &[]);
        front.say(SET_VRING_KICK, PLAIN, &body(&[0]), &[&event()]);
        assert!(front.is_dropped());
    }
    Disk::open(&relay.socket(&key)).works(0, 1);
}

#[test]
fn hundreds_of_bad_front_ends_leave_no_descriptor_behind() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    Disk::open(&relay.socket(&key)).works(0, 1);
    let (worker, keeper) = (relay.worker(), relay.keeper());
    until("nobody is there", || relay.status(&key)["front_end"].is_null());
    let before = (descriptors(worker), descriptors(keeper));
    for round in 0..300_u64 {
        let mut front = Front::connect(&relay.socket(&key));
        front.negotiate();
        let file = memfd(MEMORY);
        for at in 0..round % 8 {
            front.say(
                ADD_MEM_REG,
                PLAIN,
                &region(at * MEMORY, MEMORY, USER + at * MEMORY),
                &[&file],
            );
        }
        front.say(SET_BACKEND_REQ_FD, PLAIN, &[], &[&event()]);
        front.say(SET_VRING_CALL, PLAIN, &body(&[round % 64]), &[&event()]);
        if round % 2 == 0 {
            front.say(99, PLAIN, &[], &[&file]);
            assert!(front.is_dropped());
        }
    }
    until("all is closed", || (descriptors(worker), descriptors(keeper)) <= before);
    assert_eq!(relay.worker(), worker);
    Disk::open(&relay.socket(&key)).works(0, 2);
}

#[test]
fn a_front_end_cannot_have_the_relay_keep_descriptors_without_end() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let worker = relay.worker();
    let before = descriptors(worker);
    let mut front = Front::connect(&relay.socket(&key));
    front.negotiate();
    let file = memfd(MEMORY);
    for at in 0..2000 {
        let region = region(at * MEMORY, MEMORY, USER + at * MEMORY);
        if !front.say(ADD_MEM_REG, PLAIN, &region, &[&file]) {
            break;
        }
    }
    assert!(front.is_dropped(), "two thousand regions");
    until("all is closed", || descriptors(worker) <= before + 2);
    Disk::open(&relay.socket(&key)).works(0, 1);
}

#[test]
fn a_front_end_that_stops_amid_a_message_or_never_reads_is_dropped() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let worker = relay.worker();
    for length in [1, 11, 12, 19] {
        let mut front = Front::connect(&relay.socket(&key));
        front.raw(&message(SET_FEATURES, PLAIN, &body(&[0]))[..length], &[]);
        let used = cpu_time(worker);
        assert!(front.is_dropped(), "{length} bytes");
        let used = cpu_time(worker) - used;
        assert!(used < 2.0, "the relay waited {used} s of CPU time for {length} bytes");
    }
    let mut front = Front::connect(&relay.socket(&key));
    let question = message(GET_FEATURES, PLAIN, &[]);
    let begin = Instant::now();
    let mut asked = 0;
    while front.raw(&question, &[]) && begin.elapsed() < Duration::from_secs(30) {
        asked += 1;
    }
    eprintln!("dropped after {asked} questions whose answers it did not read");
    assert!(front.is_dropped());
    assert_eq!(relay.worker(), worker);
    Disk::open(&relay.socket(&key)).works(0, 1);
}

#[test]
fn a_front_end_that_floods_does_not_hold_up_another_volume() {
    let mut relay = Relay::start();
    let (one, other) = (relay.serve(1), relay.serve(2));
    let worker = relay.worker();
    let socket = relay.socket(&one);
    let daemon = relay.daemon(&one);
    let before = memory(daemon);
    let flood = std::thread::spawn(move || {
        let begin = Instant::now();
        let mut front = Front::connect(&socket);
        front.negotiate();
        let mut count = 0;
        while begin.elapsed() < Duration::from_secs(3) {
            front.ask(GET_CONFIG, &[ring(0, 60), vec![0; 64]].concat());
            front.ask(GET_INFLIGHT, &shape(0, 64, 1024));
            count += 2;
        }
        count
    });
    let mut longest = Duration::ZERO;
    let mut opened = 0;
    while !flood.is_finished() {
        let begin = Instant::now();
        Disk::open(&relay.socket(&other)).works(opened, 7);
        longest = longest.max(begin.elapsed());
        opened += 1;
    }
    let count = flood.join().unwrap();
    eprintln!("{count} questions; {opened} opens elsewhere, the longest {longest:?}");
    let grown = memory(daemon).saturating_sub(before);
    assert!(grown < 64 << 10, "the daemon has grown by {grown} KiB");
    assert_eq!(relay.worker(), worker);
}

#[test]
fn a_crowd_of_second_front_ends_is_refused_and_not_told_of_without_end() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    let begin = Instant::now();
    let mut second = Front::connect(&relay.socket(&key));
    assert!(second.is_dropped());
    eprintln!("a second front-end was refused in {:?}", begin.elapsed());
    for _ in 0..2000 {
        // A full queue of the listener refuses, too.
        _ = Front::try_connect(&relay.socket(&key));
    }
    for _ in 0..50 {
        drop(disk);
        until("the place is free", || relay.status(&key)["front_end"].is_null());
        disk = Disk::open(&relay.socket(&key));
    }
    disk.works(0, 1);
    let lines = relay.log().lines().count();
    assert!(lines < 100, "{lines} lines of log");
}

#[test]
fn the_buffer_of_a_front_end_cannot_be_cut_under_the_relay() {
    let mut relay = Relay::start();
    let (one, other) = (relay.serve(1), relay.serve(2));
    let mut neighbour = Disk::open(&relay.socket(&other));
    let worker = relay.worker();
    let buffer = memfd(16448);
    let mut front = Front::connect(&relay.socket(&one));
    front.negotiate();
    front.set(ADD_MEM_REG, &region(0, MEMORY, USER), &[&memfd(MEMORY)]);
    front.say(SET_INFLIGHT, PLAIN | NEED_REPLY, &shape(16448, 1, 1024), &[&buffer]);
    front.say(SET_VRING_NUM, PLAIN, &ring(0, 8), &[]);
    front.say(SET_VRING_ADDR, PLAIN, &addresses(0, USER), &[]);
    _ = buffer.set_len(0);
    front.say(SET_VRING_KICK, PLAIN, &body(&[0]), &[&event()]);
    sleep(Duration::from_secs(2)); // for long enough that the relay looks at the buffer
    assert!(is_alive(worker), "the worker died of a buffer that was cut");
    assert_eq!(relay.worker(), worker);
    neighbour.works(0, 1);
    drop(front);
    Disk::open(&relay.socket(&one)).works(0, 1);
}

#[test]
fn an_eventfd_that_blocks_holds_up_nobody() {
    let mut relay = Relay::start();
    let (one, other) = (relay.serve(1), relay.serve(2));
    let mut front = Front::connect(&relay.socket(&one));
    front.negotiate();
    front.set(ADD_MEM_REG, &region(0, MEMORY, USER), &[&memfd(MEMORY)]);
    let full = || {
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event
    };
    front.set(SET_VRING_NUM, &ring(0, 8), &[]);
    front.set(SET_VRING_ADDR, &addresses(0, USER), &[]);
    front.set(SET_VRING_CALL, &body(&[0]), &[&full()]);
    front.say(SET_VRING_KICK, PLAIN, &body(&[0]), &[&full()]);
    relay.kill_daemon(&one); // the next one's rings are woken
    relay.start_daemon(&one);
    sleep(Duration::from_millis(500));
    assert_eq!(relay.ask(&json!({ "detach": one })), "done");
    Disk::open(&relay.socket(&other)).works(0, 1);
}

/// Sockets whose end waits for a peer that does not read: as descriptors, closed by the relay.
#[test]
fn descriptors_that_take_long_to_close_hold_up_no_other_volume() {
    let mut relay = Relay::start();
    let (one, other) = (relay.serve(1), relay.serve(2));
    let worker = relay.worker();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let lingering = || {
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(20))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut &socket, &[0; 1 << 12]).is_ok() {}
        socket
    };
    let [a, b, c, d] = [(); 4].map(|()| lingering());
    let mut front = Front::connect(&relay.socket(&one));
    front.negotiate();
    front.say(SET_BACKEND_REQ_FD, PLAIN, &[], &[&a]);
    front.say(REM_MEM_REG, PLAIN, &region(0, MEMORY, USER), &[&b]);
    front.say(SET_BACKEND_REQ_FD, PLAIN, &[], &[&event()]);
    front.say(98, PLAIN, &[], &[&c]);
    front.say(99, PLAIN, &[], &[&d]);
    drop((a, b, c, d));
    drop(front);
    let begin = Instant::now();
    let mut longest = Duration::ZERO;
    while begin.elapsed() < Duration::from_secs(5) {
        let open = Instant::now();
        Disk::open(&relay.socket(&other)).works(0, 1);
        longest = longest.max(open.elapsed());
    }
    eprintln!("the longest open of another volume: {longest:?}");
    assert!(longest < Duration::from_secs(3), "{longest:?}");
    assert_eq!(relay.worker(), worker);
}

#[test]
fn a_front_end_that_leaves_while_it_waits_makes_room_at_once() {
    let mut relay = Relay::start();
    let key = process::key(1);
    relay.attach(&key); // nobody stands behind it
    let front = Front::connect(&relay.socket(&key));
    front.say(GET_FEATURES, PLAIN, &[], &[]);
    until("it is there", || !relay.status(&key)["front_end"].is_null());
    sleep(Duration::from_millis(50));
    let begin = Instant::now();
    drop(front);
    until("the place is free", || relay.status(&key)["front_end"].is_null());
    let waited = begin.elapsed();
    eprintln!("the place was free after {waited:?}");
    assert!(waited < Duration::from_secs(10));
    relay.start_daemon(&key);
    Disk::open(&relay.socket(&key)).works(0, 1);
}

#[test]
fn a_bad_back_end_is_bounded_and_a_good_one_takes_over() {
    let mut relay = Relay::start();
    let key = process::key(1);
    relay.attach(&key);
    let worker = relay.worker();
    let steps = [
        GET_FEATURES,
        GET_PROTOCOL,
        SET_FEATURES,
        SET_BACKEND_REQ_FD,
        ADD_MEM_REG,
        SET_INFLIGHT,
        SET_VRING_KICK,
        GET_CONFIG,
        GET_VRING_BASE,
    ];
    for manner in [Manner::Close, Manner::Garbage, Manner::Silent, Manner::HalfWord] {
        for step in steps {
            // One that says nothing takes its time: two steps stand for all.
            if manner == Manner::Silent && ![GET_FEATURES, SET_VRING_KICK].contains(&step) {
                continue;
            }
            let fake = Fake::start(&relay.backend(&key), step, manner);
            let (used, lines) = (cpu_time(worker), relay.log().lines().count());
            let socket = relay.socket(&key);
            let open = std::thread::spawn(move || {
                let mut disk = Disk::open(&socket);
                disk.front.ask(GET_CONFIG, &[ring(0, 60), vec![0; 64]].concat());
                let base = disk.stop();
                disk.start(base);
                disk
            });
            sleep(Duration::from_millis(1500));
            let used = cpu_time(worker) - used;
            let lines = relay.log().lines().count() - lines;
            let connections = fake.connections.load(Ordering::SeqCst);
            eprintln!(
                "{manner:?} at {step}: {used:.2} s of CPU time, {connections} connections, {lines} lines"
            );
            assert!(used < 0.8, "{manner:?} at {step}: {used} s of CPU time");
            assert!(lines < 100, "{manner:?} at {step}: {lines} lines of log");
            drop(fake);
            relay.start_daemon(&key);
            let mut disk = open.join().unwrap();
            disk.works(u64::from(step), 1);
            relay.kill_daemon(&key);
        }
    }
    assert_eq!(relay.worker(), worker);
}

#[test]
fn a_back_end_that_answers_ever_so_slowly_is_given_up() {
    let relay = Relay::start();
    let key = process::key(1);
    relay.attach(&key);
    let fake = Fake::start(&relay.backend(&key), GET_FEATURES, Manner::Dribble);
    let front = Front::connect(&relay.socket(&key));
    front.say(GET_FEATURES, PLAIN, &[], &[]);
    until("it is given up", || relay.status(&key)["front_end"]["deaf"] == true);
    drop(fake);
}

#[test]
fn a_back_end_that_always_fails_does_not_hold_up_a_detach() {
    let relay = Relay::start();
    let key = process::key(1);
    relay.attach(&key);
    let fake = Fake::start(&relay.backend(&key), GET_CONFIG, Manner::Close);
    let mut front = Front::connect(&relay.socket(&key));
    front.negotiate();
    front.say(GET_CONFIG, PLAIN, &[ring(0, 60), vec![0; 64]].concat(), &[]);
    sleep(Duration::from_millis(200));
    let begin = Instant::now();
    assert_eq!(relay.ask(&json!({ "detach": key })), "done");
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert!(front.is_dropped());
    drop(fake);
}

#[test]
fn a_relay_whose_sockets_were_removed_is_reached_again() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    let (keeper, worker) = (relay.keeper(), relay.worker());
    for socket in ["relay.sock", "keeper.sock"] {
        std::fs::remove_file(relay.run().join("relay").join(socket)).unwrap();
    }
    disk.works(0, 1);
    until("another worker answers", || relay.worker() != worker);
    assert!(is_alive(keeper));
    disk.works(1, 2);
    let other = relay.serve(2);
    Disk::open(&relay.socket(&other)).works(0, 1);
}

#[test]
fn a_relay_that_ends_leaves_the_sockets_of_the_next_one() {
    let mut relay = Relay::start();
    let before = relay.worker();
    let mut first = relay.begin_anew();
    let key = relay.serve(1);
    let worker = relay.worker();
    until("it had nothing to do", || first.try_wait().unwrap().is_some() && !is_alive(before));
    assert_eq!(relay.worker(), worker);
    Disk::open(&relay.socket(&key)).works(0, 1);
    relay.attach(&process::key(2));
    relay.kill_keeper();
    relay.start_keeper();
    Disk::open(&relay.socket(&key)).works(1, 1);
}

fn hold_back(relay: &Relay, key: &str) -> serde_json::Value {
    relay.ask(&json!({"pause": {"key": key, "most_ms": 30_000}}))
}

/// A daemon that dies while its rings are parked: the next one knows nothing of them, and would look
/// into a ring as it starts.
#[test]
fn requests_stay_held_back_when_a_daemon_dies() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    for round in 0..4 {
        disk.works(round, 1);
        let ended = disk.ended();
        assert_eq!(hold_back(&relay, &key), "done");
        relay.kill_daemon(&key);
        let is_first = round % 2 == 0;
        if is_first {
            disk.begin_write(round, 2);
        }
        relay.start_daemon(&key);
        if !is_first {
            disk.begin_write(round, 2);
        }
        sleep(Duration::from_millis(300));
        assert_eq!(disk.ended(), ended, "requests are held back");
        assert_eq!(relay.ask(&json!({ "resume": key })), json!({"resumed": true}));
        disk.finish();
        assert_eq!(disk.read(round), [2; 512]);
    }
}

#[test]
fn nobody_is_told_that_requests_are_held_back_which_are_not() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    // A daemon that nobody is connected to may still have some.
    relay.kill_daemon(&key);
    until("it is gone", || relay.status(&key)["front_end"]["trouble"] != "");
    let refused = hold_back(&relay, &key);
    assert!(refused["refused"].as_str().unwrap().contains("no daemon"), "{refused}");
    assert_eq!(relay.ask(&json!({ "resume": key })), json!({"resumed": false}));
    relay.start_daemon(&key);
    // A front-end that needs a daemon, or starts a ring, does not wait for whoever holds it back.
    for round in 0..4 {
        disk.works(round, 1);
        let ended = disk.ended();
        let is_dead = round % 2 == 0;
        if is_dead {
            assert_eq!(hold_back(&relay, &key), "done");
            relay.kill_daemon(&key);
            relay.start_daemon(&key);
            assert_eq!(disk.stop(), ended, "where the ring ended");
        } else {
            assert_eq!(disk.stop(), ended, "where the ring ended");
            assert_eq!(hold_back(&relay, &key), "done");
        }
        disk.start(ended);
        disk.works(round, 2);
        assert_eq!(relay.ask(&json!({ "resume": key })), json!({"resumed": false}));
    }
}

#[test]
fn a_volume_moves_while_its_requests_are_held_back() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    disk.works(0, 1);
    assert_eq!(relay.ask(&json!({"pause": {"key": key, "most_ms": 30_000}})), "done");
    // The same disk elsewhere, with the old daemon still there.
    let other = process::key(2);
    std::fs::create_dir_all(relay.run().join(&other)).unwrap();
    std::os::unix::fs::symlink(relay.image(&key), relay.image(&other)).unwrap();
    relay.start_daemon(&other);
    let moved = relay.ask(&json!({"switch": {"key": key, "backend": relay.backend(&other)}}));
    assert!(moved["switched"].is_u64(), "{moved}");
    relay.kill_daemon(&key);
    let ended = disk.ended();
    disk.begin_write(1, 2);
    sleep(Duration::from_millis(200));
    assert_eq!(disk.ended(), ended, "requests are held back");
    relay.ask(&json!({ "resume": key }));
    disk.finish();
    disk.works(2, 3);
}

#[test]
fn the_next_front_end_may_come_the_moment_the_last_one_left() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    let worker = relay.worker();
    for round in 0..100 {
        crate::harness::signal(worker, "STOP"); // both happen at once, for the relay
        drop(disk);
        let next = Front::connect(&relay.socket(&key));
        crate::harness::signal(worker, "CONT");
        let mut next = next;
        assert!(next.say(GET_FEATURES, PLAIN, &[], &[]));
        assert!(next.try_answer(GET_FEATURES).is_some(), "round {round}");
        drop(next);
        until("the place is free", || relay.status(&key)["front_end"].is_null());
        disk = Disk::open(&relay.socket(&key));
    }
}

#[test]
fn kills_of_keeper_and_worker_lose_no_request_of_a_front_end_that_does_not_wait() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    for round in 0..12 {
        let base = disk.stop();
        // All at once, unconfirmed, as QEMU does.
        if round % 3 == 0 {
            relay.kill_keeper();
        }
        let starter = std::thread::spawn(move || {
            disk.start(base);
            disk
        });
        if round % 3 == 1 {
            crate::harness::signal(relay.worker(), "KILL");
        }
        if round % 3 == 0 {
            relay.start_keeper();
        }
        disk = starter.join().unwrap();
        disk.works(round, 5);
        relay.worker();
        sleep(Duration::from_millis(300)); // the keeper is given everything
    }
}

/// A VM that came while requests could not be noted has no buffer, whoever relays it by then.
#[test]
fn rings_without_a_buffer_are_never_said_to_be_held_back() {
    let mut relay = Relay::start();
    let key = process::key(1);
    std::fs::create_dir_all(relay.run().join(&key).join("export")).unwrap();
    let attach = json!({"key": key, "backend": relay.backend(&key), "tracking": "unavailable"});
    assert_eq!(relay.ask(&json!({ "attach": attach })), "done");
    relay.start_daemon(&key);
    let mut disk = Disk::open(&relay.socket(&key));
    disk.works(0, 1);
    relay.attach(&key); // the next driver's trial went well
    let refused = hold_back(&relay, &key);
    assert!(refused["refused"].is_string(), "{refused}");
    let worker = relay.worker();
    crate::harness::signal(worker, "KILL");
    until("another worker answers", || relay.worker() != worker);
    disk.works(0, 2);
    let ended = disk.ended();
    let answer = hold_back(&relay, &key);
    disk.begin_write(0, 3);
    sleep(Duration::from_millis(300));
    let has_flown = disk.ended() != ended;
    let resumed = relay.ask(&json!({ "resume": key }));
    eprintln!("pause {answer}, flown {has_flown}, resume {resumed}");
    assert!(!has_flown || resumed == json!({"resumed": false}), "{answer} {resumed}");
}

/// What a VM took while requests were noted, it keeps, whatever the next driver's trial finds.
#[test]
fn a_front_end_with_a_buffer_finds_the_next_daemon_after_a_trial_that_failed() {
    let mut relay = Relay::start();
    let key = relay.serve(1);
    let mut disk = Disk::open(&relay.socket(&key));
    disk.works(0, 1);
    let attach = json!({"key": key, "backend": relay.backend(&key), "tracking": "unavailable"});
    assert_eq!(relay.ask(&json!({ "attach": attach })), "done");
    let worker = relay.worker();
    crate::harness::signal(worker, "KILL");
    until("another worker answers", || relay.worker() != worker);
    disk.works(0, 2);
    relay.kill_daemon(&key);
    relay.start_daemon(&key);
    sleep(Duration::from_secs(2));
    eprintln!("trouble {}", relay.status(&key)["front_end"]["trouble"]);
    disk.works(1, 3);
}
