//! The machine the figures come from.

use crate::{blocking, fio, qsd::Bare};
use std::{fs, path::Path, thread::available_parallelism};

/// Processor, kernel, disk and programs, in one sentence.
pub(crate) async fn describe(dir: &Path) -> anyhow::Result<String> {
    let qsd = blocking(|| {
        let sockets = tempfile::tempdir()?;
        let mut bare = Bare::start(sockets.path())?;
        let version = bare.version()?;
        bare.quit()?;
        Ok(version)
    });
    let (qsd, fio) = (qsd.await?, fio::version().await?);
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("an unknown processor", |(_, model)| model);
    let cores = available_parallelism().map_or(1, usize::from);
    let system = rustix::system::uname();
    let kernel = system.release().to_string_lossy().into_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let disk = file_system(&mounts, dir).unwrap_or("an unknown file system");
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let busy = load.split(' ').next().and_then(|load| load.parse::<f64>().ok()).unwrap_or_default();
    Ok(format!(
        "{cores} cores of {model}, Linux {kernel}, pool on {disk}, qemu-storage-daemon {qsd}, \
         {fio}. Nothing is pinned to a core. Before the run, {busy:.1} processes wanted a core \
         (load average of 1 minute)."
    ))
}

/// The type of the file system that `dir` lies on, by a table in the format of proc(5).
fn file_system<'a>(mountinfo: &'a str, dir: &Path) -> Option<&'a str> {
    let mut best = None;
    for line in mountinfo.lines() {
        let Some((mount, source)) = line.split_once(" - ") else { continue };
        let (Some(point), Some(kind)) = (mount.split(' ').nth(4), source.split(' ').next()) else {
            continue;
        };
        // A later mount hides an earlier one.
        let longest = best.is_none_or(|(length, _)| point.len() >= length);
        if dir.starts_with(point) && longest {
            best = Some((point.len(), kind));
        }
    }
    best.map(|(_, kind)| kind)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_innermost_mount_tells_the_file_system() {
        let table = "1 0 254:0 / / rw - ext4 /dev/vda rw\n2 1 0:5 / /dev/shm rw - tmpfs tmpfs rw\n\
                     3 1 0:6 / /data rw shared:1 - xfs /dev/vdb rw\n";
        assert_eq!(file_system(table, Path::new("/data/target")), Some("xfs"));
        assert_eq!(file_system(table, Path::new("/datashop")), Some("ext4"));
        assert_eq!(file_system("", Path::new("/")), None);
    }
}
