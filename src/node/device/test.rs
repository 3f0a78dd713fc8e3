//! Against real devices, over plain files and over files that a real daemon serves.

use super::*;
use crate::node::host::Target;
use crate::node::{
    Bound, HostPath,
    testbed::{Testbed, attach, attach_large, eventually, noise, run, write},
};
use std::{
    collections::BTreeSet,
    os::unix::fs::{FileTypeExt as _, symlink},
    slice,
};

const MIB: u64 = 1 << 20;

async fn attached_at_once(files: Vec<PathBuf>) -> Vec<LoopDevice> {
    let tasks: Vec<_> = files
        .into_iter()
        .map(|file| {
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime
                    .unwrap()
                    .block_on(LoopDevice::attach(&file, Access::Write, Sectors::Of512))
                    .unwrap()
            })
        })
        .collect();
    blocking(move || tasks.into_iter().map(|task| task.join().unwrap()).collect()).await
}

#[tokio::test]
async fn twenty_who_attach_a_file_at_once_get_one_device() {
    let bed = Testbed::new();
    let file = bed.file("a", 8 * MIB);
    let devices = attached_at_once(vec![file; 20]).await;
    assert!(devices.iter().all(|device| *device == devices[0]), "{devices:?}");
    assert_eq!(bed.devices(), 1);
    assert_eq!(devices[0].detach().await.unwrap(), Detached::Now);
    assert_eq!(devices[0].detach().await.unwrap(), Detached::Now);
    assert_eq!(bed.devices(), 0);
}

#[tokio::test]
async fn a_device_that_has_the_number_and_the_file_of_an_earlier_one_is_another() {
    let bed = Testbed::new();
    let file = bed.file("a", MIB);
    let earlier = attach(&file).await;
    assert_eq!(LoopDevice::below(file.parent().unwrap()).unwrap(), slice::from_ref(&earlier));
    earlier.detach().await.unwrap();
    let device = attach(&file).await;
    let earlier = LoopDevice { number: device.number, ..earlier };
    assert_eq!(earlier.detach().await.unwrap(), Detached::Now);
    assert_eq!(LoopDevice::below(file.parent().unwrap()).unwrap(), slice::from_ref(&device));
    device.detach().await.unwrap();
}

#[tokio::test]
async fn twelve_files_get_twelve_devices() {
    let bed = Testbed::new();
    let files: Vec<_> = (0..12).map(|n| bed.file(&n.to_string(), MIB)).collect();
    let devices = attached_at_once(files).await;
    let paths: BTreeSet<_> = devices.iter().map(LoopDevice::path).collect();
    assert_eq!((paths.len(), bed.devices()), (12, 12));
    for device in devices {
        assert!(device.is_direct());
        device.detach().await.unwrap();
    }
    assert_eq!(bed.devices(), 0);
}

#[tokio::test]
async fn a_file_is_known_whatever_path_leads_to_it_and_another_at_its_path_is_not() {
    let bed = Testbed::new();
    let file = bed.file("a", MIB);
    let device = attach(&file).await;
    symlink(&file, bed.path("link")).unwrap();
    fs::hard_link(&file, bed.path("hard")).unwrap();
    assert_eq!(attach(&bed.path("link")).await, device);
    assert_eq!(attach(&bed.path("hard")).await.path(), device.path());
    assert_eq!(LoopDevice::find(&file).await.unwrap(), Some(device.clone()));

    fs::remove_file(bed.path("hard")).unwrap();
    fs::remove_file(&file).unwrap();
    bed.file("a", MIB);
    assert_eq!(LoopDevice::find(&file).await.unwrap(), None);
    let second = attach(&file).await;
    assert_ne!(second.path(), device.path());
    let all = LoopDevice::all(&file).await.unwrap();
    assert_eq!(all.len(), 2, "{all:?}");
    for device in all {
        assert_eq!(device.detach().await.unwrap(), Detached::Now);
    }
    assert_eq!(bed.devices(), 0);
}

#[tokio::test]
async fn access_is_what_was_asked_for_or_an_error() {
    let bed = Testbed::new();
    let file = bed.file("a", MIB);
    let device = LoopDevice::attach(&file, Access::Read, Sectors::Of512).await.unwrap();
    let writes = File::options().write(true).open(device.path());
    assert!(writes.and_then(|mut it| it.write_all(b"x").and_then(|()| it.sync_all())).is_err());
    let error = LoopDevice::attach(&file, Access::Write, Sectors::Of512).await.unwrap_err();
    assert!(matches!(&error, Error::Other { what: "read-only", .. }), "{error}");
    assert_eq!(LoopDevice::all(&file).await.unwrap(), slice::from_ref(&device));
    device.detach().await.unwrap();
    assert_eq!(attach(&file).await.access(), Access::Write);
}

#[tokio::test]
async fn a_device_over_a_part_of_the_file_is_another_one() {
    let bed = Testbed::new();
    let file = bed.file("a", 2 * MIB);
    assert!(run("losetup", &["--find", "--offset", "1048576", file.to_str().unwrap()]));
    assert_eq!(LoopDevice::find(&file).await.unwrap(), None);
    assert_eq!(attach(&file).await.size().unwrap(), Bytes::new(2 * MIB));
    assert_eq!(bed.devices(), 2);
}

#[tokio::test]
async fn a_device_grows_with_its_file_and_says_when_it_does_not() {
    let bed = Testbed::new();
    let file = bed.file("a", MIB);
    let device = attach(&file).await;
    File::options().write(true).open(&file).unwrap().set_len(3 * MIB).unwrap();
    device.grow(Bytes::new(3 * MIB)).await.unwrap();
    assert_eq!(device.size().unwrap(), Bytes::new(3 * MIB));
    let error = device.grow(Bytes::new(4 * MIB)).await.unwrap_err();
    assert!(error.to_string().ends_with("has 3Mi, not 4Mi"), "{error}");
}

#[tokio::test]
async fn a_device_that_somebody_has_open_goes_when_they_close_it() {
    let bed = Testbed::new();
    let file = bed.file("a", MIB);
    let device = attach(&file).await;
    let open = File::open(device.path()).unwrap();
    assert_eq!(device.detach().await.unwrap(), Detached::Later);
    assert_eq!(LoopDevice::find(&file).await.unwrap(), None, "it will not stay");
    drop(open);
    eventually("it is gone", || bed.devices() == 0);
}

#[tokio::test]
async fn a_large_discard_over_fuse_gives_all_space_back() {
    let bed = Testbed::new();
    let fuse = bed.serve("f", 20 << 30);
    let device = attach_large(&fuse.file).await;
    for offset in [0, 5 << 30, (20 << 30) - 4 * MIB] {
        write(&device.path(), offset, &noise(4 << 20));
    }
    assert_eq!(fuse.allocated(), 12 * MIB);
    assert!(run("blkdiscard", &["--force", device.path().to_str().unwrap()]));
    assert_eq!(fuse.allocated(), 0);
}

#[tokio::test]
async fn a_discard_with_small_sectors_works_in_steps_and_after_one_was_refused_on_the_next_device()
{
    let bed = Testbed::new();
    let fuse = bed.serve("f", 10 << 30);
    let device = attach(&fuse.file).await;
    write(&device.path(), 3 << 30, &noise(4 << 20));
    let discard = |device: &LoopDevice, offset: &str, length: &str| {
        let range = ["--force", "--offset", offset, "--length", length];
        run("blkdiscard", &[&range[..], &[device.path().to_str().unwrap()]].concat())
    };
    assert!(discard(&device, "2GiB", "2GiB"));
    assert_eq!(fuse.allocated(), 0);
    // QEMU 10 refuses a part of a block, and the kernel then asks for no more; a later one does it.
    discard(&device, "0", "512");
    assert_eq!(attach(&fuse.file).await, device);
    device.detach().await.unwrap();
    let device = attach(&fuse.file).await;
    write(&device.path(), 0, &noise(4 << 20));
    assert!(discard(&device, "0", "2GiB"));
    assert_eq!(fuse.allocated(), 0);
}

#[tokio::test]
async fn sectors_are_what_was_asked_for_or_larger() {
    let bed = Testbed::new();
    let large = attach_large(&bed.file("large", MIB)).await;
    let size = fs::read_to_string(large.attribute("queue/logical_block_size")).unwrap();
    assert_eq!(size.trim(), "4096");
    assert_eq!(attach(large.file()).await, large);
    let small = attach(&bed.file("small", MIB)).await;
    let again = LoopDevice::attach(small.file(), Access::Write, Sectors::Of4096).await;
    assert!(matches!(again, Err(Error::Other { what: "with sectors of 512 bytes", .. })));
}

#[tokio::test]
async fn a_device_whose_daemon_died_is_found_and_goes_in_time() {
    let bed = Testbed::new();
    let mut fuse = bed.serve("f", 64 * MIB);
    let device = attach(&fuse.file).await;
    fuse.kill();
    let begun = Instant::now();
    let error = LoopDevice::attach(&fuse.file, Access::Write, Sectors::Of512).await.unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert_eq!(LoopDevice::all(&fuse.file).await.unwrap(), slice::from_ref(&device));
    assert_eq!(device.detach().await.unwrap(), Detached::Now);
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert_eq!(bed.devices(), 0);
}

#[tokio::test]
async fn the_device_of_a_dead_daemon_is_not_taken_for_that_of_the_next() {
    let bed = Testbed::new();
    let mut fuse = bed.serve("f", 64 * MIB);
    let dead = attach(&fuse.file).await;
    fuse.kill();
    assert!(run("umount", &["--lazy", fuse.file.to_str().unwrap()]));
    let next = bed.serve("f", 64 * MIB);
    let device = attach(&next.file).await;
    assert_ne!(device.path(), dead.path());
    assert_eq!(LoopDevice::all(&next.file).await.unwrap(), slice::from_ref(&device));
    // The kernel names no path any more for the other one.
    let unnamed = || LoopDevice::unnamed(&dead.path());
    assert_eq!(LoopDevice::unnamed(&device.path()), None);
    assert_eq!(unnamed().expect("it is there").detach().await.unwrap(), Detached::Now);
    assert!(device.is_attached() && unnamed().is_none());
}

#[tokio::test]
async fn a_daemon_that_is_stuck_holds_up_its_own_volume_alone() {
    let bed = Testbed::new();
    let stuck = bed.serve("stuck", MIB);
    let device = attach(&stuck.file).await;
    stuck.pause();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let begun = Instant::now();
    let file = bed.file("a", MIB);
    attach(&file).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let error = LoopDevice::attach(&stuck.file, Access::Write, Sectors::Of512).await.unwrap_err();
    assert!(matches!(error, Error::Silent { .. }), "{error}");
    // Whoever else looks at all devices of the machine waits at this one, too, and has it open.
    device.detach().await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_device_is_bound_once_however_often_and_unbound_whole() {
    let bed = Testbed::new();
    let file = bed.file("a", MIB);
    let device = attach(&file).await;
    let number = device.device_number();
    let target = bed.place("target");
    assert_eq!(target.bind_device(&device.path(), number, Target::New).unwrap(), Bound::Now);
    for _ in 0..3 {
        assert_eq!(
            target.bind_device(&device.path(), number, Target::New).unwrap(),
            Bound::Already
        );
    }
    assert_eq!(bed.mounts("target"), 1);
    assert!(fs::metadata(target.as_path()).unwrap().file_type().is_block_device());
    assert!(target.shows_device(number).unwrap());
    write(target.as_path(), 0, b"through the target");
    assert!(fs::read(&file).unwrap().starts_with(b"through the target"));

    // Somebody holds it open, and another mounted it once more.
    let open = File::open(target.as_path()).unwrap();
    rustix::mount::mount_bind(device.path(), target.as_path()).unwrap();
    assert_eq!(bed.mounts("target"), 2);
    target.unbind_device().unwrap();
    target.unbind_device().unwrap();
    assert!(!target.as_path().exists());
    drop(open);
    assert_eq!(device.detach().await.unwrap(), Detached::Now);
}

#[tokio::test]
async fn what_shows_a_detached_device_makes_way_and_what_shows_another_does_not() {
    let bed = Testbed::new();
    let older = attach(&bed.file("older", MIB)).await;
    let device = attach(&bed.file("a", MIB)).await;
    let target = bed.place("target");
    target.bind_device(&older.path(), older.device_number(), Target::New).unwrap();
    let bind = || target.bind_device(&device.path(), device.device_number(), Target::New);
    assert!(bind().unwrap_err().to_string().ends_with("shows another device"));
    older.detach().await.unwrap();
    // A detached number may be taken at once by another test; then the refusal is right.
    match bind() {
        Ok(bound) => {
            assert_eq!((bound, bed.mounts("target")), (Bound::Now, 1));
            assert!(target.shows_device(device.device_number()).unwrap());
        }
        Err(error) => assert!(error.to_string().ends_with("shows another device"), "{error}"),
    }
    target.unbind_device().unwrap();
}

#[tokio::test]
async fn only_a_free_place_or_our_own_is_taken_or_left() {
    let bed = Testbed::new();
    let device = attach(&bed.file("a", MIB)).await;
    bed.directory("directory");
    bed.file("full", 1);
    symlink("/dev/null", bed.path("link")).unwrap();
    bed.file("mounted", 0);
    let other = bed.file("other", 0);
    rustix::mount::mount_bind(&other, bed.path("mounted")).unwrap();
    let bind =
        |place: &HostPath| place.bind_device(&device.path(), device.device_number(), Target::New);
    for (name, what) in [
        ("directory", "is there already, and is not an empty file"),
        ("full", "is there already, and is not an empty file"),
        ("link", "is a symbolic link"),
        ("mounted", "is a mount point of something else"),
        ("none/target", "has no parent directory"),
    ] {
        let error = bind(&bed.place(name)).unwrap_err().to_string();
        assert!(error.ends_with(what), "{name}: {error}");
    }
    for (name, what) in [
        ("directory", "is not a device that is mounted"),
        ("full", "is not a device that is mounted"),
        ("link", "is a symbolic link"),
        ("mounted", "is a mount point of something else"),
    ] {
        let error = bed.place(name).unbind_device().unwrap_err().to_string();
        assert!(error.ends_with(what), "{name}: {error}");
        assert!(bed.path(name).symlink_metadata().is_ok(), "{name} is gone");
    }
    // What a crash leaves before the device is mounted.
    bed.file("empty", 0);
    assert_eq!(bind(&bed.place("empty")).unwrap(), Bound::Now);
}
