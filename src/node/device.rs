//! Loop devices: block devices of the host over the files that daemons serve.
//!
//! ```text
//! /dev/loopN -> RUN/<key>/... (FUSE, served by a daemon) -> layers of the volume
//! ```
//!
//! Promises one device a file, however often and by however many it is asked for: who attaches
//! holds a lock on the file. A file is known by device and inode, not by its name: a daemon that
//! was started again serves another file at the same path. Devices over what is gone are found by
//! the path that the kernel still names (`all`), so that they can be detached. The work is done by
//! `losetup`, since its ioctls take `unsafe`. Called by staging and publishing.
//!
//! A file that is unmounted under its device, as by a daemon that ends well, leaves that with the name
//! `/`: it is found by the path of the device (`unnamed`). A number is used again for another volume,
//! so whatever shows a device to somebody must be gone before it is detached.

mod below;
mod error;
mod status;

pub use crate::source::Access;
pub use error::Error;

use super::{host::LOOP_MAJOR, tool::Tool};
use crate::{blocking::blocking, units::Bytes};
use below::{lock, look};
use error::{io_error, losetup_error};
use status::{Identity, Status};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// `losetup` takes milliseconds; where 64 others want the same number, it tries again for 13 s.
const LOSETUP: Duration = Duration::from_secs(20);

/// A device that nobody has open is gone at once; udev and `blkid` have it open for a moment.
const RELEASE: Duration = Duration::from_secs(2);

/// QEMU tells the new size of a file within a second (facts/qsd.md section 7).
const GROWTH: Duration = Duration::from_secs(5);

/// How often what is waited for is looked at.
const PAUSE: Duration = Duration::from_millis(10);

/// The longest discard that is passed on. QEMU cuts one of 2 GiB or more where no block ends, and then
/// refuses it, whereupon the kernel discards nothing any more.
const DISCARD: u64 = 1 << 30;

/// In which units a device is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sectors {
    /// 512 bytes, which partition tables and disk images count on. The kernel cuts a discard of more
    /// than 4 GiB at 4 GiB less 512 bytes, which QEMU 10 refuses over a file with direct I/O; programs
    /// that make file systems discard less at a time.
    Of512,
    /// 4 KiB, for file systems that are made for it: discards of any length reach the layer.
    Of4096,
}

/// Whether a device is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// It is.
    Now,
    /// Somebody has it open; it goes when they close it.
    Later,
}

/// A loop device over a whole file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    number: u32,
    /// Tells it from another one that gets the number, and a file of the same name, later.
    sequence: Option<u64>,
    file: PathBuf,
    access: Access,
}

impl LoopDevice {
    /// The device over `file`, with direct I/O. One that is there is taken, if it is what is asked for.
    ///
    /// Sectors may be larger than asked for, where the file has them.
    pub async fn attach(file: &Path, access: Access, sectors: Sectors) -> Result<Self, Error> {
        let (file, lock, identity) = lock(file).await?;
        if let Some(device) = Self::live(&file, identity).await? {
            device.require(access, sectors)?;
            device.settle(identity).await?;
            return Ok(device);
        }
        let device = Self::make(&file, access, sectors, &lock).await?;
        if let Err(error) = device.settle(identity).await {
            _ = device.detach().await;
            return Err(error);
        }
        Ok(device)
    }

    /// The device over the very file that is at this path now.
    pub async fn find(file: &Path) -> Result<Option<Self>, Error> {
        let (file, identity) = look(file).await?;
        Self::live(&file, identity).await
    }

    /// Whether the device of this number is over what is called `file`. Nothing is asked that could
    /// hang.
    pub fn is_over(number: u32, file: &Path) -> bool {
        status::is_over(number, file)
    }

    /// The devices over files below a directory, be they alive or dead. Nothing is asked that could
    /// hang.
    pub fn below(dir: &Path) -> io::Result<Vec<Self>> {
        let numbers = status::attached(|name| name.starts_with(dir))?.into_iter();
        let device = |number| Some(Self::dead(number, &status::backing_file(number)?));
        Ok(numbers.filter_map(device).collect())
    }

    /// Every device over what is at this path, or was: removed since, or with a daemon that is gone.
    /// Nothing is asked that could hang.
    pub async fn all(file: &Path) -> Result<Vec<Self>, Error> {
        let path = file.to_owned();
        let is_it = move |name: &Path| status::is_named(name, &path);
        Ok(attached(is_it, file)
            .await?
            .into_iter()
            .map(|number| Self::dead(number, file))
            .collect())
    }

    /// The device at this path, if its file was unmounted under it.
    pub fn unnamed(device: &Path) -> Option<Self> {
        let (number, root) = (status::number_of(device)?, Path::new("/"));
        status::is_over(number, root).then(|| Self::dead(number, root))
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        device_path(self.number)
    }

    /// The file below.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its major and minor number.
    pub fn device_number(&self) -> (u32, u32) {
        // The kernel may be told to leave room for partitions between minors; then it says so here.
        let told = fs::read_to_string(self.attribute("dev")).unwrap_or_default();
        let parts = told.trim().split_once(':');
        let numbers =
            parts.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        numbers.unwrap_or((LOOP_MAJOR, self.number))
    }

    /// How large it is.
    pub fn size(&self) -> Result<Bytes, Error> {
        let path = self.attribute("size");
        let read = || fs::read_to_string(&path)?.trim().parse::<u64>().map_err(io::Error::other);
        let sectors = read().map_err(io_error("reading", &path))?;
        Ok(Bytes::new(sectors.saturating_mul(512)))
    }

    /// Has it grow with its file, to at least `size`.
    pub async fn grow(&self, size: Bytes) -> Result<(), Error> {
        let deadline = Instant::now() + GROWTH;
        loop {
            self.losetup("--set-capacity").await?;
            let is = self.size()?;
            if is >= size {
                return Ok(());
            }
            // A file that has nothing any more ended with its daemon, and grows no more.
            if Instant::now() >= deadline || is == Bytes::ZERO {
                return Err(Error::Small { device: self.path(), is, expected: size });
            }
            sleep(10 * PAUSE).await;
        }
    }

    /// Takes it from its file. One that was taken already is fine, and one whose file is dead.
    pub async fn detach(&self) -> Result<Detached, Error> {
        if !self.is_attached() {
            return Ok(Detached::Now);
        }
        if let Err(error) = self.losetup("--detach").await {
            // Somebody else was faster.
            return if self.is_attached() { Err(error) } else { Ok(Detached::Now) };
        }
        let deadline = Instant::now() + RELEASE;
        while self.is_attached() {
            if Instant::now() >= deadline {
                return Ok(Detached::Later);
            }
            sleep(PAUSE).await;
        }
        Ok(Detached::Now)
    }

    /// The device that is over the file with this identity, whatever it is called there.
    async fn live(file: &Path, identity: Identity) -> Result<Option<Self>, Error> {
        let mut numbers = attached(|_| true, file).await?;
        // Most likely it is called the same. A device that does not answer is another one's, for
        // this file has just answered; so no other volume's daemon keeps this one waiting for long.
        numbers.sort_by_key(|number| !status::is_over(*number, file));
        for number in numbers {
            let Ok(Some(status)) = status::query(number).await else { continue };
            if status.is_over(identity) {
                return Ok(Some(Self::seen(number, file, status.access())));
            }
        }
        Ok(None)
    }

    async fn make(
        file: &Path,
        access: Access,
        sectors: Sectors,
        lock: &File,
    ) -> Result<Self, Error> {
        let device = Self::configure(file, access, sectors, lock).await?;
        if device.is_direct() || sectors == Sectors::Of4096 {
            return Ok(device);
        }
        // A file on a disk with larger sectors takes direct I/O in units of those only.
        device.detach().await?;
        Self::configure(file, access, Sectors::Of4096, lock).await
    }

    /// `losetup` itself tries again where another one takes the number that it found free.
    async fn configure(
        file: &Path,
        access: Access,
        sectors: Sectors,
        lock: &File,
    ) -> Result<Self, Error> {
        // A driver that dies here leaves the next one to wait until the device is there.
        let lock = lock.try_clone().map_err(io_error("locking", file))?;
        let mut tool =
            Tool::new("losetup", LOSETUP).holding(lock).args(&["--sector-size", sectors.as_str()]);
        if access == Access::Read {
            tool = tool.arg("--read-only");
        }
        let tool = tool.args(&["--find", "--show", "--direct-io=on", "--"]).arg(file);
        let said = tool.run().await.map_err(losetup_error(file))?;
        let number = status::number_of(Path::new(said.trim()));
        let number = number.ok_or_else(|| {
            io_error("attaching", file)(io::Error::other(format!("losetup says {said:?}")))
        })?;
        Ok(Self::seen(number, file, access))
    }

    /// Sees to all that a crash may have left undone.
    async fn settle(&self, identity: Identity) -> Result<(), Error> {
        let status = status::query(self.number).await.map_err(losetup_error(&self.file))?;
        if !status.is_some_and(|status| status.is_over(identity)) {
            return Err(Error::Replaced { file: self.file.clone() });
        }
        if !self.is_direct() {
            self.losetup("--direct-io=on").await?;
        }
        if !self.is_direct() {
            return Err(Error::NotDirect { file: self.file.clone() });
        }
        self.limit_discard()
    }

    /// A device that cannot discard, or was refused a discard, has no limit to set.
    fn limit_discard(&self) -> Result<(), Error> {
        let path = self.attribute("queue/discard_max_bytes");
        let told = |name: &str| {
            let text = fs::read_to_string(self.attribute(name))?;
            text.trim().parse::<u64>().map_err(io::Error::other)
        };
        let limit = || {
            let most = told("queue/discard_max_hw_bytes")?.min(DISCARD);
            if told("queue/discard_max_bytes")? == most {
                return Ok(());
            }
            File::options().write(true).open(&path)?.write_all(most.to_string().as_bytes())
        };
        limit().map_err(io_error("setting", &path))
    }

    fn is_direct(&self) -> bool {
        fs::read(self.attribute("loop/dio")).is_ok_and(|told| told.starts_with(b"1"))
    }

    /// Whether it is still there: this one, and not another that has its number by now.
    fn is_attached(&self) -> bool {
        let is_same = |(now, then)| now == then; // what cannot be read says nothing
        let both = status::sequence(self.number).zip(self.sequence);
        status::is_over(self.number, &self.file) && both.is_none_or(is_same)
    }

    async fn losetup(&self, option: &str) -> Result<(), Error> {
        let run = Tool::new("losetup", LOSETUP).arg(option).arg(self.path()).run();
        run.await.map(drop).map_err(losetup_error(&self.file))
    }

    fn attribute(&self, name: &str) -> PathBuf {
        status::attribute(self.number, name)
    }

    /// What is over something dead is good for detaching alone.
    fn dead(number: u32, file: &Path) -> Self {
        let read_only = fs::read(status::attribute(number, "ro"));
        let writes = read_only.is_ok_and(|told| told.starts_with(b"0"));
        let access = if writes { Access::Write } else { Access::Read };
        Self::seen(number, file, access)
    }

    fn seen(number: u32, file: &Path, access: Access) -> Self {
        Self { number, sequence: status::sequence(number), file: file.to_owned(), access }
    }

    fn require(&self, access: Access, sectors: Sectors) -> Result<(), Error> {
        let told = fs::read_to_string(self.attribute("queue/logical_block_size"));
        let has_small = told.is_ok_and(|told| told.trim() == Sectors::Of512.as_str());
        let what = match self.access {
            _ if has_small && sectors == Sectors::Of4096 => "with sectors of 512 bytes",
            same if same == access => return Ok(()),
            Access::Read => "read-only",
            Access::Write => "writable",
        };
        Err(Error::Other { device: self.path(), file: self.file.clone(), what })
    }
}

impl Sectors {
    fn as_str(self) -> &'static str {
        match self {
            Self::Of512 => "512",
            Self::Of4096 => "4096",
        }
    }
}

impl Status {
    fn access(&self) -> Access {
        if self.read_only { Access::Read } else { Access::Write }
    }
}

/// The numbers of the devices whose file the kernel calls so.
async fn attached(
    is_it: impl Fn(&Path) -> bool + Send + 'static,
    file: &Path,
) -> Result<Vec<u32>, Error> {
    let listed = blocking(move || status::attached(is_it)).await;
    listed.map_err(io_error("listing the loop devices over", file))
}

fn device_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

#[cfg(test)]
mod test;
