//! The file below a device: which one it is, and whose turn it is to attach it.

use super::{Error, PAUSE, error::io_error, status::Identity};
use crate::blocking::blocking;
use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// A daemon that does not answer for this long is taken for stuck.
const LOOK: Duration = Duration::from_secs(5);

/// How long one caller waits for others that attach the same file.
const TURN: Duration = Duration::from_secs(30);

/// The path that the kernel knows, and which file is there.
pub(super) async fn look(file: &Path) -> Result<(PathBuf, Identity), Error> {
    let path = file.to_owned();
    let looked = blocking(move || {
        let path = path.canonicalize()?;
        let identity = Identity::of(&fs::metadata(&path)?);
        io::Result::Ok((path, identity))
    });
    let looked =
        timeout(LOOK, looked).await.map_err(|_| Error::Silent { file: file.to_owned() })?;
    looked.map_err(io_error("looking at", file))
}

/// The file, locked for who attaches it.
pub(super) async fn lock(file: &Path) -> Result<(PathBuf, File, Identity), Error> {
    let silent = |_| Error::Silent { file: file.to_owned() };
    let (path, _) = look(file).await?;
    let opened = path.clone();
    let open = blocking(move || {
        let file = File::open(&opened)?;
        let identity = Identity::of(&file.metadata()?);
        io::Result::Ok((file, identity))
    });
    let (lock, identity) =
        timeout(LOOK, open).await.map_err(silent)?.map_err(io_error("opening", file))?;
    let deadline = Instant::now() + TURN;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok((path, lock, identity)),
            Err(TryLockError::Error(error)) => return Err(io_error("locking", file)(error)),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                return Err(Error::Contended { file: file.to_owned() });
            }
            Err(TryLockError::WouldBlock) => sleep(PAUSE).await,
        }
    }
}
