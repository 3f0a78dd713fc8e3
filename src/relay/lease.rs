//! Whether anybody has the file of a volume open (`disk.img`), in whatever mount namespace: the
//! kernel gives a write lease only to whoever is alone with a file (fcntl(2), "Leases"). FUSE files
//! have them, too (measured).

use rustix::io::Errno;
use std::{
    fs, io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{Once, mpsc},
    thread::{self, sleep},
    time::Duration,
};

/// How long a look at a file takes at most; one whose daemon hangs is not answered for.
const LOOK: Duration = Duration::from_secs(1);

/// How long another look may take, such as the driver's, which has the file open for that.
const ANOTHER: Duration = Duration::from_millis(10);

/// The same, for whoever must not wait: nobody can use a file whose daemon hangs.
pub(super) fn is_open_now(path: PathBuf) -> bool {
    let (told, answer) = mpsc::channel();
    let look = move || {
        let is_open = is_open(&path)? && {
            sleep(ANOTHER);
            is_open(&path)?
        };
        told.send(is_open).map_err(io::Error::other)
    };
    let look = thread::Builder::new().spawn(look);
    look.is_ok() && answer.recv_timeout(LOOK) == Ok(true)
}

/// Whether somebody has the file open. While it is asked, which takes microseconds, who opens it
/// waits. An empty one is only the place for it.
pub fn is_open(path: &Path) -> io::Result<bool> {
    let file = match fs::File::options().read(true).write(true).open(path) {
        // What a daemon left that is gone, or goes in this moment.
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::NOTCONN | Errno::CONNABORTED)
            ) =>
        {
            return Ok(false);
        }
        file => file?,
    };
    if file.metadata()?.len() == 0 {
        return Ok(false);
    }
    endure_breaks();
    match lease(&file, libc::F_WRLCK) {
        Ok(()) => lease(&file, libc::F_UNLCK).map(|()| false),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(error),
    }
}

/// Whoever opens the file while we have the lease has the kernel send us SIGIO, which would end us.
#[expect(unsafe_code, reason = "no crate of ours ignores a signal")]
fn endure_breaks() {
    static ENDURED: Once = Once::new();
    // SAFETY: no handler is set that could run at a bad moment; the signal is only ignored.
    ENDURED.call_once(|| unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
    });
}

#[expect(unsafe_code, reason = "no crate of ours has F_SETLEASE")]
fn lease(file: &fs::File, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is; the command takes a number and gives none
    // back.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_file_is_open_while_somebody_has_it_open_for_whatever() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1).unwrap();
        let path = file.into_temp_path();
        assert!(!is_open(&path).unwrap());
        for (read, write) in [(true, false), (false, true), (true, true)] {
            let other = fs::File::options().read(read).write(write).open(&path).unwrap();
            assert!(is_open(&path).unwrap() && is_open_now(path.to_path_buf()));
            drop(other);
            assert!(!is_open(&path).unwrap());
        }
    }

    #[test]
    fn whoever_opens_a_file_that_is_looked_at_ends_nobody() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1).unwrap();
        let path = file.into_temp_path();
        let met = thread::scope(|scope| {
            let opener = scope.spawn(|| {
                for _ in 0..20_000 {
                    drop(fs::File::open(&path).unwrap());
                }
            });
            let mut met = 0;
            while !opener.is_finished() {
                met += u32::from(is_open(&path).unwrap());
            }
            met
        });
        assert!(met > 0, "they never met");
    }
}
