//! A short run of the fuzzers: over what they found so far, and over changes to that.

use super::{ENTRIES, Entry};
use std::{
    collections::BTreeSet,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

/// How many changed inputs each entry gets.
const CHANGED: usize = 2000;

/// More than any seed has.
const LONGEST: usize = 16 << 10;

/// Bytes at which something turns over.
const EDGES: [u8; 10] = [0, 1, 7, 0x10, b'0', b'"', 0x7f, 0x80, 0xfe, 0xff];

/// Numbers at which something turns over.
const NUMBERS: [&str; 8] = [
    "0",
    "-1",
    "65536",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "1e999",
    "0.5",
];

fn dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(name)
}

/// What is kept for one entry, in order of name: what reaches all of it, and what broke it once.
fn seeds(name: &str) -> Vec<(String, Vec<u8>)> {
    let corpus = fs::read_dir(dir("corpus").join(name)).expect("every entry has a corpus");
    let broke = fs::read_dir(dir("regressions").join(name)).into_iter().flatten();
    let mut seeds: Vec<_> = corpus
        .chain(broke)
        .map(|file| {
            let path = file.unwrap().path();
            (path.display().to_string(), fs::read(&path).unwrap())
        })
        .collect();
    seeds.sort();
    assert!(!seeds.is_empty(), "the corpus of {name} is empty");
    seeds
}

fn run(name: &str) {
    let entry = ENTRIES.iter().find(|(own, _)| *own == name).expect("it is one of them").1;
    let seeds = seeds(name);
    for (path, seed) in &seeds {
        try_one(entry, seed, path);
    }
    let mut draw = Draw(0x5eed);
    for round in 0..CHANGED {
        let (path, seed) = draw.one_of(&seeds);
        let changed = draw.changed(seed, &seeds);
        try_one(entry, &changed, &format!("change {round} of {path}"));
    }
}

fn try_one(entry: Entry, input: &[u8], origin: &str) {
    let outcome = catch_unwind(AssertUnwindSafe(|| entry(input)));
    assert!(outcome.is_ok(), "{origin}: {}", input.escape_ascii());
}

/// Numbers that look drawn by lot, and are the same every time (`SplitMix64`).
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) >> 1).unwrap() % bound.max(1)
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A part of some bytes.
    fn part<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let start = self.below(bytes.len() + 1);
        let length = self.below((bytes.len() - start).min(64) + 1);
        &bytes[start..start + length]
    }

    /// The seed with one to four changes.
    fn changed(&mut self, seed: &[u8], seeds: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(16)).min(bytes.len());
            match self.below(7) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = *self.one_of(&EDGES),
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..end)),
                4 => drop(bytes.splice(at..end, self.one_of(&NUMBERS).bytes())),
                5 => {
                    let own = self.part(seed);
                    bytes.splice(at..at, own.iter().copied());
                }
                _ => {
                    let (_, other) = self.one_of(seeds);
                    let other = self.part(other);
                    bytes.splice(at..end, other.iter().copied());
                }
            }
        }
        bytes.truncate(LONGEST);
        bytes
    }
}

#[test]
fn every_entry_has_a_program_and_a_corpus() {
    let names: BTreeSet<_> = ENTRIES.map(|(name, _)| name.to_owned()).into();
    let in_dir = |dir: &Path| -> BTreeSet<_> {
        let stem = |file: fs::DirEntry| file.path().file_stem()?.to_str().map(str::to_owned);
        fs::read_dir(dir).unwrap().filter_map(|file| stem(file.unwrap())).collect()
    };
    assert_eq!(in_dir(&dir("corpus")), names);
    assert_eq!(in_dir(&dir("fuzz_targets")), names);
    assert!(in_dir(&dir("regressions")).is_subset(&names));
}

macro_rules! entries {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*
    };
}

entries!(csi inflight lines qcow2 qmp records source ssh_key text vhost_user);
