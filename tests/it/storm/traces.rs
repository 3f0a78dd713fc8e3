//! What a driver takes of its machine, to be compared before and after.

use crate::harness::{
    Driver, daemons_below, loops_below, mounts_below, names, relays_of, supervisors_of,
};
use std::{collections::BTreeMap, fs, path::Path};

/// What there is of each kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Traces(BTreeMap<String, usize>);

impl Traces {
    pub(super) fn of(driver: &Driver) -> Self {
        let run = driver.path("run");
        let mut traces = BTreeMap::new();
        let processes = [
            ("driver", vec![driver.pid()]),
            ("supervisor", supervisors_of(&run)),
            ("relay", relays_of(&run)),
            ("daemon", daemons_below(driver.scratch())),
        ];
        for (name, pids) in processes {
            let files: usize = pids.iter().map(|pid| entries(&format!("/proc/{pid}/fd"))).sum();
            traces.insert(format!("processes: {name}"), pids.len());
            traces.insert(format!("open files: {name}"), files);
        }
        traces.insert("mounts".to_owned(), mounts_below(driver.scratch()).len());
        traces.insert("loop devices".to_owned(), loops_below(driver.scratch()).len());
        for dir in ["pool", "run"] {
            traces.insert(format!("files: {dir}"), files_below(&driver.path(dir)));
        }
        Self(traces)
    }

    /// Whether neither a daemon nor a relay runs.
    pub(super) fn is_at_rest(&self) -> bool {
        ["daemon", "relay"].iter().all(|name| self.0[&format!("processes: {name}")] == 0)
    }

    /// Whether there is no more of anything than there was before.
    pub(super) fn is_within(&self, before: &Self) -> bool {
        self.0.iter().all(|(what, count)| before.0.get(what).is_some_and(|most| count <= most))
    }
}

/// The memory of the driver, in KiB.
pub(super) fn memory(driver: &Driver) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", driver.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn entries(dir: &str) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

fn files_below(dir: &Path) -> usize {
    let below = |name: &String| {
        let path = dir.join(name);
        if path.is_dir() { files_below(&path) } else { 1 }
    };
    names(dir).iter().map(below).sum()
}
