//! Layers under a guest that never pauses: frozen, merged and removed while it writes and reads.

use crate::{
    copies::{Source, Wish},
    harness::{Dice, Driver, until},
    model::{
        guest::{Action, Guest},
        picture::{Picture, SECTOR},
        records::Records,
    },
};
use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::AtomicU32},
    time::{Duration, Instant},
};

fn sectors(size: u64) -> usize {
    usize::try_from(size).unwrap() / SECTOR
}

/// Snapshots come and go under a client with several requests in flight, every byte of which is
/// checked.
#[tokio::test(flavor = "multi_thread")]
async fn snapshots_come_and_go_under_a_guest() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let sectors = (8 << 20) / SECTOR;
    let guest = Guest::connect(&driver.socket("pvc-1"));
    let mut picture = Picture::blank(sectors);
    let stamps = Arc::new(AtomicU32::new(1));
    for round in 0..30_u32 {
        let load = guest.load(Dice::new(round.into()), sectors, stamps.clone());
        let name = format!("snap-{round}");
        driver.snapshot(&name, "pvc-1").await.unwrap();
        driver.delete_snapshot(&name).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        for action in load.end().await.iter().flatten() {
            action.apply(&mut picture);
        }
        for look in 0..10 {
            let found = Picture::of(&guest.read(0..sectors).await).unwrap();
            picture.assert_is(&found, &format!("round {round}, look {look}"));
        }
    }
    drop(guest);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// A clone is larger than its source, and read while it is copied: what lies beyond the end of the
/// source is zero.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reads_a_larger_clone_while_it_is_copied() {
    let driver = Driver::start().await;
    let size = 2 << 20;
    let wish =
        |name: &str, size, source, parameters| Wish { name: name.into(), size, source, parameters };
    driver.fulfil(&wish("pvc-1", size, None, vec![])).await.unwrap();
    let mut picture = Picture::blank(2 * sectors(size));
    {
        driver.attach("pvc-1").await;
        let guest = Guest::connect(&driver.socket("pvc-1"));
        let write = Action::Write { sectors: 0..512, stamp: 1 };
        write.apply(&mut picture);
        guest.act(vec![write]).await;
    }
    let slowly = vec![("copyMode", "clone"), ("cloneBytesPerSecond", "256Ki")];
    let source = Some(Source::Volume("pvc-1".to_owned()));
    driver.fulfil(&wish("pvc-2", 2 * size, source, slowly)).await.unwrap();
    driver.attach("pvc-2").await;
    let guest = Guest::connect(&driver.socket("pvc-2"));
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(1) {
        let found = Picture::of(&guest.read(0..picture.sectors()).await).unwrap();
        picture.assert_is(&found, "the clone");
    }
    drop(guest);
    driver.detach("pvc-2").await;
    driver.detach("pvc-1").await;
    until("the clone is independent", async || {
        Records::of(&driver.path("pool")).unmerged(&BTreeSet::new()).is_empty()
    })
    .await;
    for volume in ["pvc-1", "pvc-2"] {
        driver.delete(volume).await.unwrap();
    }
    driver.assert_empty().await;
}
