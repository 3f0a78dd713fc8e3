//! Against real file systems on real devices, over plain files and over files that a daemon serves.

use super::*;
use crate::{
    node::{
        Bound, HostPath,
        device::{Access, Detached, LoopDevice, Sectors},
        testbed::{Testbed, attach, attach_large, eventually, noise, run, write},
    },
    units::Bytes,
};
use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

const GIB: u64 = 1 << 30;
const KINDS: [Kind; 2] = [Kind::Ext4, Kind::Xfs];

async fn made(bed: &Testbed, kind: Kind, size: u64) -> LoopDevice {
    let device = attach_large(&bed.file(&format!("{kind}.raw"), size)).await;
    make(&device, kind, Overwrite::Never).await.unwrap();
    device
}

async fn mounted(device: &LoopDevice, at: &HostPath, kind: Kind) -> Bound {
    mount(device, at, kind, &MountFlags::default(), device.access()).await.unwrap()
}

#[tokio::test]
async fn a_file_system_is_made_filled_and_found_again() {
    for kind in KINDS {
        let bed = Testbed::new();
        let device = attach_large(&bed.file("a", GIB)).await;
        let at = bed.directory("at");
        assert_eq!(probe(&device).await.unwrap(), Contents::Nothing);
        make(&device, kind, Overwrite::Never).await.unwrap();
        assert_eq!(probe(&device).await.unwrap(), Contents::FileSystem(kind));
        check(&device, kind).await.unwrap();
        assert_eq!(mounted(&device, &at, kind).await, Bound::Now);
        for _ in 0..3 {
            check(&device, kind).await.unwrap();
            assert_eq!(mounted(&device, &at, kind).await, Bound::Already);
        }
        assert_eq!(bed.mounts("at"), 1);
        let other = mount(&device, &at, kind, &MountFlags::default(), Access::Read).await;
        let text = other.unwrap_err().to_string();
        assert!(text.ends_with("is mounted writable already"), "{text}");
        let file = at.as_path().join("file");
        let bytes = noise(8 << 20);
        File::create(&file).unwrap();
        write(&file, 0, &bytes);

        let again = make(&device, kind, Overwrite::BrokenOff).await;
        assert!(matches!(again, Err(Error::InUse { .. })), "{again:?}");
        assert_eq!(unmount(&at).await.unwrap(), Unmounted::Now);
        assert_eq!(unmount(&at).await.unwrap(), Unmounted::Already);
        assert_eq!(device.detach().await.unwrap(), Detached::Now);

        let device = attach_large(device.file()).await;
        let again = make(&device, kind, Overwrite::Never).await;
        assert!(matches!(again, Err(Error::Occupied { .. })), "{again:?}");
        check(&device, kind).await.unwrap();
        mounted(&device, &at, kind).await;
        assert!(fs::read(&file).unwrap() == bytes, "{kind}");
        unmount(&at).await.unwrap();
        let path = device.path();
        let clean = match kind {
            Kind::Ext4 => run("e2fsck", &["-f", "-n", path.to_str().unwrap()]),
            Kind::Xfs => run("xfs_repair", &["-n", path.to_str().unwrap()]),
        };
        assert!(clean, "{kind}");
    }
}

#[tokio::test]
async fn what_is_foreign_is_named_and_never_overwritten() {
    let mut table = [0; 512];
    table[446 + 4] = 0x83;
    table[446 + 9] = 8;
    table[446 + 13] = 8;
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    let mut luks = b"LUKS\xba\xbe\0\x01".to_vec();
    luks.resize(592, 0);
    let mut swap = vec![0; 4096];
    swap[1024] = 1;
    swap[1028] = 100;
    swap[4086..].copy_from_slice(b"SWAPSPACE2");
    for (offset, bytes, what) in [
        (0, table.to_vec(), "a partition table (dos)"),
        (0, luks, "a signature of crypto_LUKS"),
        (0, swap, "a signature of swap"),
        (GIB / 2, noise(4096), "data that no known format explains, at byte 512Mi"),
        (GIB - 1, vec![1], "data that no known format explains"),
        (4095, vec![1], "data that no known format explains"),
    ] {
        let bed = Testbed::new();
        let file = bed.file("a", GIB);
        write(&file, offset, &bytes);
        for sectors in [Sectors::Of512, Sectors::Of4096] {
            let device = LoopDevice::attach(&file, Access::Write, sectors).await.unwrap();
            let found = probe(&device).await.unwrap();
            assert!(matches!(&found, Contents::Foreign(it) if it.starts_with(what)), "{found:?}");
            let before = fs::metadata(&file).unwrap().blocks();
            for kind in KINDS {
                let error = make(&device, kind, Overwrite::Never).await.unwrap_err();
                assert!(error.to_string().contains(what), "{error}");
            }
            assert_eq!(fs::metadata(&file).unwrap().blocks(), before);
            device.detach().await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_was_written_a_moment_ago_is_seen() {
    let bed = Testbed::new();
    let fuse = bed.serve("f", GIB);
    let device = attach(&fuse.file).await;
    assert_eq!(probe(&device).await.unwrap(), Contents::Nothing);
    // Not flushed: it is in the host's memory alone.
    let file = File::options().write(true).open(device.path()).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", 700 << 20).unwrap();
    assert!(matches!(probe(&device).await.unwrap(), Contents::Foreign(_)));
}

#[tokio::test]
async fn an_empty_volume_of_any_size_is_seen_to_be_empty_at_once_and_stays_thin() {
    for (kind, most) in [(Kind::Ext4, 32 << 20), (Kind::Xfs, 600 << 20)] {
        let bed = Testbed::new();
        let fuse = bed.serve("f", 1 << 40);
        let device = attach_large(&fuse.file).await;
        let begun = Instant::now();
        assert_eq!(probe(&device).await.unwrap(), Contents::Nothing);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        make(&device, kind, Overwrite::Never).await.unwrap();
        let at = bed.directory("at");
        mounted(&device, &at, kind).await;
        // The kernel's own laziness would begin within seconds.
        tokio::time::sleep(Duration::from_secs(2)).await;
        unmount(&at).await.unwrap();
        assert!(fuse.allocated() < most, "{kind}: {}", Bytes::new(fuse.allocated()));
    }
}

#[tokio::test]
async fn what_broke_off_is_made_again_when_the_caller_knows() {
    for kind in KINDS {
        let bed = Testbed::new();
        let whole = made(&bed, kind, GIB).await;
        let mut begun = fs::read(whole.file()).unwrap();
        whole.detach().await.unwrap();
        // As far as it came; the superblock is written last, or not even that.
        begun.truncate(1 << 20);
        for skip in [0, 4096] {
            let file = bed.file(&format!("begun-{skip}"), GIB);
            write(&file, skip, &begun[usize::try_from(skip).unwrap()..]);
            let device = attach_large(&file).await;
            let refused = make(&device, kind, Overwrite::Never).await;
            assert!(matches!(refused, Err(Error::Occupied { .. })), "{kind} {skip}: {refused:?}");
            make(&device, kind, Overwrite::BrokenOff).await.unwrap();
            check(&device, kind).await.unwrap();
            let at = bed.directory(&format!("at-{skip}"));
            mounted(&device, &at, kind).await;
            File::create(at.as_path().join("file")).unwrap();
            assert_eq!(unmount(&at).await.unwrap(), Unmounted::Now);
        }
    }
}

#[tokio::test]
async fn a_file_system_grows_while_it_is_mounted() {
    for kind in KINDS {
        let bed = Testbed::new();
        let fuse = bed.file("a", GIB);
        let device = attach_large(&fuse).await;
        make(&device, kind, Overwrite::Never).await.unwrap();
        let at = bed.directory("at");
        let refused = grow(&at, &device, kind).await;
        assert!(matches!(refused, Err(Error::Place(_))), "{refused:?}");
        mounted(&device, &at, kind).await;
        assert!(is_grown(&at, &device, kind).await.unwrap());
        let before = stats(&at).await.unwrap();
        File::options().write(true).open(&fuse).unwrap().set_len(3 * GIB).unwrap();
        device.grow(Bytes::gib(3)).await.unwrap();
        assert!(!is_grown(&at, &device, kind).await.unwrap());
        if kind == Kind::Ext4 && !may_resize() {
            let refused = grow(&at, &device, kind).await;
            assert!(matches!(refused, Err(Error::NotPermitted { .. })), "{refused:?}");
            let refused = grow_unmounted(&device, kind).await;
            assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
            unmount(&at).await.unwrap();
            grow_unmounted(&device, kind).await.unwrap();
            mounted(&device, &at, kind).await;
        }
        for _ in 0..2 {
            grow(&at, &device, kind).await.unwrap();
            assert!(is_grown(&at, &device, kind).await.unwrap(), "{kind}");
        }
        let after = stats(&at).await.unwrap();
        assert!(after.bytes.total > before.bytes.total + GIB * 19 / 10, "{before:?} {after:?}");
        assert!(after.bytes.available > 2 * GIB, "{after:?}");
        assert!(after.bytes.used + after.bytes.available <= after.bytes.total);
        assert!(after.inodes.total > 0 && after.inodes.used > 0 && after.inodes.available > 0);
        unmount(&at).await.unwrap();
    }
}

/// Whether this host has `CAP_SYS_RESOURCE` to give, which ext4 asks for.
fn may_resize() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap() & (1 << 24) != 0
}

#[tokio::test]
async fn a_clone_of_xfs_is_mounted_beside_its_origin() {
    let bed = Testbed::new();
    let origin = made(&bed, Kind::Xfs, GIB).await;
    let at = bed.directory("at");
    mounted(&origin, &at, Kind::Xfs).await;
    File::create(at.as_path().join("file")).unwrap().sync_all().unwrap();
    let copy = bed.path("copy");
    assert!(run(
        "cp",
        &["--sparse=always", origin.file().to_str().unwrap(), copy.to_str().unwrap()]
    ));
    let copy = attach_large(&copy).await;
    let beside = bed.directory("beside");
    assert_eq!(mounted(&copy, &beside, Kind::Xfs).await, Bound::Now);
    assert!(beside.as_path().join("file").exists());
    let refused = mount(&copy, &at, Kind::Xfs, &MountFlags::default(), Access::Write).await;
    assert!(matches!(refused, Err(Error::Place(_))), "{refused:?}");
}

#[tokio::test]
async fn a_read_only_device_is_mounted_as_it_is() {
    for kind in KINDS {
        let bed = Testbed::new();
        let device = made(&bed, kind, GIB).await;
        let at = bed.directory("at");
        mounted(&device, &at, kind).await;
        File::create(at.as_path().join("file")).unwrap().sync_all().unwrap();
        // As a power failure would leave it: with a log that was not replayed.
        let copy = bed.path("copy");
        assert!(run("cp", &[device.file().to_str().unwrap(), copy.to_str().unwrap()]));
        let reader = LoopDevice::attach(&copy, Access::Read, Sectors::Of4096).await.unwrap();
        let beside = bed.directory("beside");
        check(&reader, kind).await.unwrap();
        assert_eq!(mounted(&reader, &beside, kind).await, Bound::Now);
        assert_eq!(mounted(&reader, &beside, kind).await, Bound::Already);
        assert!(File::create(beside.as_path().join("other")).is_err());
        assert_eq!(unmount(&beside).await.unwrap(), Unmounted::Now);
    }
}

#[tokio::test]
async fn trimming_gives_the_space_of_removed_files_back() {
    for kind in KINDS {
        let bed = Testbed::new();
        let fuse = bed.serve("f", 40 * GIB);
        let device = attach_large(&fuse.file).await;
        make(&device, kind, Overwrite::Never).await.unwrap();
        let at = bed.directory("at");
        mounted(&device, &at, kind).await;
        let empty = fuse.allocated();
        let file = at.as_path().join("file");
        File::create(&file).unwrap();
        write(&file, 0, &noise(64 << 20));
        assert!(fuse.allocated() > empty + (60 << 20));
        fs::remove_file(&file).unwrap();
        // xfs frees what was removed a little later.
        eventually("the space is back", || {
            let place = at.as_path().to_str().unwrap();
            assert!(run("sync", &["--file-system", place]) && run("fstrim", &[place]), "{kind}");
            fuse.allocated() < empty + (4 << 20)
        });
        unmount(&at).await.unwrap();
    }
}

#[tokio::test]
async fn all_ends_in_time_when_the_daemon_dies() {
    for kind in KINDS {
        let bed = Testbed::new();
        let mut fuse = bed.serve("f", GIB);
        let device = attach_large(&fuse.file).await;
        make(&device, kind, Overwrite::Never).await.unwrap();
        let at = bed.directory("at");
        mounted(&device, &at, kind).await;
        let file = at.as_path().join("file");
        let open = File::create(&file).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&open, &noise(4 << 20), 0).unwrap();
        fuse.kill();
        open.sync_all().unwrap_err();

        let begun = Instant::now();
        let probed = probe(&device).await;
        assert!(!matches!(probed, Ok(Contents::Nothing)), "{probed:?}");
        _ = stats(&at).await;
        assert_eq!(unmount(&at).await.unwrap(), Unmounted::Later, "somebody has it open");
        assert_eq!(device.detach().await.unwrap(), Detached::Later);
        drop(open);
        eventually("the device is gone", || bed.devices() == 0);
        assert!(begun.elapsed() < Duration::from_secs(20), "{kind}: {:?}", begun.elapsed());
        assert_eq!(bed.mounts("at"), 0);
    }
}

#[tokio::test]
async fn a_dead_device_is_not_taken_for_an_empty_one() {
    let bed = Testbed::new();
    let mut fuse = bed.serve("f", GIB);
    let device = attach_large(&fuse.file).await;
    fuse.kill();
    let error = probe(&device).await.unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    make(&device, Kind::Ext4, Overwrite::BrokenOff).await.unwrap_err();
}

#[tokio::test]
async fn what_a_check_cannot_repair_is_an_error_that_says_so() {
    let bed = Testbed::new();
    let device = made(&bed, Kind::Ext4, GIB).await;
    // The first group's inode table, the root directory's inode with it.
    let path = device.path();
    let clear = ["-w", "-R", "clri <2>", path.to_str().unwrap()];
    assert!(
        run("debugfs", &clear) && run("tune2fs", &["-E", "force_fsck", path.to_str().unwrap()])
    );
    let error = check(&device, Kind::Ext4).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Damaged { .. }), "{text}");
    assert!(text.contains("RUN fsck MANUALLY"), "{text}");
}

#[tokio::test]
async fn a_group_gets_the_root_and_what_is_made_in_it() {
    let bed = Testbed::new();
    let device = made(&bed, Kind::Ext4, GIB).await;
    let at = bed.directory("at");
    mounted(&device, &at, Kind::Ext4).await;
    for _ in 0..2 {
        own_by(&at, 4711).await.unwrap();
        let root = fs::metadata(at.as_path()).unwrap();
        assert_eq!((root.uid(), root.gid(), root.mode() & 0o7777), (0, 4711, 0o2775));
    }
    File::create(at.as_path().join("file")).unwrap();
    assert_eq!(fs::metadata(at.as_path().join("file")).unwrap().gid(), 4711);
}

#[tokio::test]
async fn only_a_free_directory_or_our_own_mount_will_do() {
    let bed = Testbed::new();
    let device = made(&bed, Kind::Ext4, GIB).await;
    let full = bed.directory("full");
    File::create(full.as_path().join("file")).unwrap();
    let other = bed.directory("other");
    rustix::mount::mount_bind(bed.path("full"), other.as_path()).unwrap();
    let none = bed.place("none");
    for (at, what) in [
        (&full, "is a directory with something in it"),
        (&other, "is a mount point of something else"),
        (&none, "does not exist"),
    ] {
        let flags = MountFlags::default();
        let error = mount(&device, at, Kind::Ext4, &flags, Access::Write).await.unwrap_err();
        assert!(error.to_string().ends_with(what), "{error}");
    }
    // That the other mount is of the host's own kind of file system makes it no volume's.
    let error = unmount(&other).await.unwrap_err();
    assert!(error.to_string().ends_with("is a mount point of something else"), "{error}");
    assert_eq!(bed.mounts("other"), 1);
    assert_eq!(unmount(&full).await.unwrap(), Unmounted::Already);
    assert_eq!(unmount(&none).await.unwrap(), Unmounted::Already);
}

#[test]
fn kinds_are_those_of_csi() {
    assert_eq!(Kind::parse("").unwrap(), Kind::Ext4);
    assert_eq!(Kind::parse("ext4").unwrap(), Kind::Ext4);
    assert_eq!(Kind::parse("xfs").unwrap(), Kind::Xfs);
    for text in ["btrfs", "EXT4", "ext4 ", "vfat"] {
        let error = Kind::parse(text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("fs_type: {text:?} ")), "{error}");
    }
}
