//! The process itself, under the names that every exporter has for it.

use super::text::{Kind, Text};
use rustix::process::{Resource, getrlimit};
use std::{fs, time::SystemTime};

/// Writes what the kernel tells of this process.
pub(super) fn write(text: &mut Text, begun: SystemTime) {
    let begun = begun.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let help = "When the process started, in seconds since 1970";
    text.gauge("process_start_time_seconds", help, begun);
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        text.gauge("process_open_fds", "Files that the process has open", open.count());
    }
    if let Some(most) = getrlimit(Resource::Nofile).current {
        text.gauge("process_max_fds", "Files that it may have open", most);
    }
    if let Some(bytes) = resident() {
        text.gauge("process_resident_memory_bytes", "Memory that the process takes", bytes);
    }
    if let Some(seconds) = busy() {
        let help = "Time that the process was busy";
        text.family("process_cpu_seconds_total", Kind::Counter, help).value(&[], seconds);
    }
}

/// proc(5): `VmRSS` of `/proc/self/status`, in kB, which are 1024 bytes.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// proc(5): `utime` and `stime` of `/proc/self/stat`, in ticks of 10 ms (`USER_HZ`, which user space
/// on Linux sees as 100 whatever the kernel counts by).
fn busy() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the name, in parentheses, which may hold anything; the third follows.
    let rest: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = rest.get(11)?.parse::<u32>().ok()?.checked_add(rest.get(12)?.parse().ok()?)?;
    Some(f64::from(ticks) / 100.0)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_kernel_tells_of_this_process() {
        let mut text = Text::default();
        write(&mut text, crate::clock::now());
        let text = text.into_string();
        let value = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().parse().unwrap()
        };
        assert!(value("process_open_fds ") >= 3.0);
        assert!(value("process_max_fds ") > value("process_open_fds "));
        assert!(value("process_resident_memory_bytes ") > 1e5);
        assert!(value("process_cpu_seconds_total ") < 1e5);
        assert!(value("process_start_time_seconds ") > 1.7e9);
    }
}
