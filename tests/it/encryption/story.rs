//! Whatever is done to encrypted volumes, they hold what a model of them does.

use super::{ENCRYPTED, SIZE, another_daemon, assert_holds, close, open, sectors};
use crate::{
    copies::{Source, Wish},
    harness::{Dice, Driver, part},
    model::{
        guest::{Action, Guest, some_sectors},
        picture::Picture,
    },
};
use qsd_csi_vhost::Space;
use std::time::Instant;

/// What is done in all.
const STEPS: u32 = 120;

/// Snapshots there are at most.
const SNAPSHOTS: u64 = 5;

/// A volume that is written to, and snapshots of it.
struct Story {
    driver: Driver,
    dice: Dice,
    guest: Option<Guest>,
    picture: Picture,
    snapshots: Vec<Option<Picture>>,
    stamp: u32,
    said: Vec<&'static str>,
}

impl Story {
    async fn begin(seed: u64, program: &str) -> Self {
        let driver = Driver::start_on(part(program), &[]).await;
        let parameters = ENCRYPTED.into();
        let wish = Wish { name: "pvc-1".into(), size: SIZE, source: None, parameters };
        driver.fulfil(&wish).await.unwrap();
        let guest = Some(open(&driver, "pvc-1").await);
        let (snapshots, picture) = (vec![const { None }; 5], Picture::blank(sectors(SIZE)));
        let (dice, stamp, said) = (Dice::new(seed), 1, Vec::new());
        Self { driver, dice, guest, picture, snapshots, stamp, said }
    }

    fn guest(&self) -> &Guest {
        self.guest.as_ref().unwrap()
    }

    async fn step(&mut self) {
        let which = usize::try_from(self.dice.roll(SNAPSHOTS)).unwrap();
        let name = format!("snap-{which}");
        let what = match self.dice.roll(12) {
            0..5 => self.write().await,
            5 | 6 if self.snapshots[which].is_none() => {
                self.driver.snapshot(&name, "pvc-1").await.unwrap();
                self.snapshots[which] = Some(self.picture.clone());
                "snapshot"
            }
            5..8 if self.snapshots[which].is_some() => {
                self.driver.delete_snapshot(&name).await.unwrap();
                self.snapshots[which] = None;
                "delete snapshot"
            }
            8 if self.snapshots[which].is_some() => self.restore(which).await,
            9 => {
                another_daemon(&self.driver).await;
                "kill daemon"
            }
            10 => {
                self.driver.restart().await;
                "kill driver"
            }
            11 => {
                close(&self.driver, "pvc-1", self.guest.take().unwrap()).await;
                self.guest = Some(open(&self.driver, "pvc-1").await);
                "stage again"
            }
            _ => "nothing",
        };
        self.said.push(what);
        if self.dice.roll(4) == 0 {
            assert_holds(self.guest(), &self.picture, &format!("{:?}", self.said)).await;
        }
    }

    async fn write(&mut self) -> &'static str {
        let mut actions = Vec::new();
        for _ in 0..8 {
            let sectors = some_sectors(&mut self.dice, self.picture.sectors());
            self.stamp += 1;
            let stamp = self.stamp;
            actions.push(match self.dice.roll(4) {
                0 => Action::Zero { sectors, space: Space::Free },
                _ => Action::Write { sectors, stamp },
            });
        }
        actions.push(Action::Flush);
        for action in &actions {
            action.apply(&mut self.picture);
        }
        self.guest().act(actions).await;
        "write"
    }

    /// A volume of a snapshot holds what that does, and is its own.
    async fn restore(&mut self, which: usize) -> &'static str {
        let source = Some(Source::Snapshot(format!("snap-{which}")));
        let parameters = if self.dice.roll(2) == 0 { vec![] } else { vec![("copyMode", "clone")] };
        let wish = Wish { name: "copy".into(), size: SIZE, source, parameters };
        self.driver.fulfil(&wish).await.unwrap();
        let guest = open(&self.driver, "copy").await;
        let mut picture = self.snapshots[which].clone().unwrap();
        assert_holds(&guest, &picture, "a copy").await;
        super::write(&guest, &mut picture, 64, 1).await;
        assert_holds(&guest, &picture, "a copy that was written to").await;
        close(&self.driver, "copy", guest).await;
        self.driver.delete("copy").await.unwrap();
        "restore"
    }

    async fn end(mut self) {
        assert_holds(self.guest(), &self.picture, "at the end").await;
        for which in 0..self.snapshots.len() {
            if self.snapshots[which].is_some() {
                self.restore(which).await;
                self.driver.delete_snapshot(&format!("snap-{which}")).await.unwrap();
            }
        }
        close(&self.driver, "pvc-1", self.guest.take().unwrap()).await;
        self.driver.delete("pvc-1").await.unwrap();
        self.driver.assert_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_story_of_an_encrypted_volume_ends_where_its_model_does() {
    for (seed, program) in (1..).zip(["bin/qemu-storage-daemon", "bin/qemu-storage-daemon-newer"]) {
        let begin = Instant::now();
        let mut story = Story::begin(seed, program).await;
        for _ in 0..STEPS {
            story.step().await;
        }
        let count = |what: &str| story.said.iter().filter(|said| **said == what).count();
        let counts = ["write", "snapshot", "delete snapshot", "restore", "kill daemon"]
            .map(|what| format!("{} {what}", count(what)));
        eprintln!("seed {seed}: {}; {:?}", counts.join(", "), begin.elapsed());
        story.end().await;
    }
}
