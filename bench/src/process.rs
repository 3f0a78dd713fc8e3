//! Processes by their pid: their memory, their end.

use anyhow::Context as _;
use rustix::{
    param::clock_ticks_per_second,
    process::{Pid, Signal, kill_process},
};
use std::{
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// The proportional set size of a process in KiB: its private pages, and its share of others.
pub(crate) fn pss(pid: i32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    pss_of(&text).with_context(|| format!("{path} has no Pss"))
}

fn pss_of(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Whether it runs. One that has ended and that nobody waits for has no program any more.
pub(crate) fn runs(pid: i32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

/// Sends a signal; to one that has ended is fine.
pub(crate) fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        _ = kill_process(pid, signal);
    }
}

/// The processes whose standard input is a file below `dir`, as that of the driver's daemons is,
/// and that of a relay's keeper.
pub(crate) fn reading_below(dir: &Path) -> Vec<i32> {
    let reads = |pid: &i32| {
        fs::read_link(format!("/proc/{pid}/fd/0")).is_ok_and(|input| input.starts_with(dir))
    };
    all().into_iter().filter(reads).collect()
}

/// The processes of the relay on the run directory `run`.
pub(crate) fn relaying(run: &Path) -> Vec<i32> {
    let start = [b"relay", &b"--run-dir"[..], run.as_os_str().as_bytes()];
    let relays = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments: Vec<_> = line.split(|byte| *byte == 0).skip(1).take(3).collect();
        arguments == start
    };
    all().into_iter().filter(relays).collect()
}

fn all() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pid_of = |path: PathBuf| path.file_name()?.to_str()?.parse().ok();
    entries.flatten().filter_map(|entry| pid_of(entry.path())).collect()
}

/// The processor time that a process has taken so far, to a hundredth of a second.
pub(crate) fn cpu_time(pid: i32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let ticks = ticks_of(&text).with_context(|| format!("{path} tells no time"))?;
    Ok(Duration::from_secs(ticks) / u32::try_from(clock_ticks_per_second())?)
}

/// In user and in system mode: fields 14 and 15; the second one may hold anything, in brackets.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ').skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_proportional_set_size_is_read_and_no_other_line() {
        let rollup = "55d0-7ffd ---p 0 00:00 0 [rollup]\nRss: 9514 kB\nPss:    1408 kB\n\
                      Pss_Dirty: 1322 kB\n";
        assert_eq!(pss_of(rollup), Some(1408));
        assert_eq!(pss_of("Rss: 1 kB\n"), None);
    }

    #[test]
    fn processor_time_is_read_behind_a_name_that_looks_like_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 120 0 0 0 15 27 0 0 20 0 3 0 99 1000 2";
        assert_eq!(ticks_of(stat), Some(42));
        assert_eq!(ticks_of("7 (a) S 1"), None);
    }

    #[test]
    fn this_process_runs_and_has_a_size() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        assert!(runs(own));
        assert!(pss(own).unwrap() > 0);
    }
}
