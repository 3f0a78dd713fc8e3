//! Many callers at once, on few volumes, some of whom hang up half way.
//!
//! Seconds here; `make storm` has it go on for minutes.

mod calls;
mod traces;

use crate::harness::{Dice, Driver, daemons_below, signal, until};
use calls::{Call, Form, VOLUMES, draw, volume};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};
use tonic::{Code, Status};
use traces::{Traces, memory};

const CALLERS: u64 = 32;

/// What nobody abandons ends by then, on a machine of two cores that has all of this to do.
const BOUND: Duration = Duration::from_mins(1);

/// How patient those are who hang up, in milliseconds.
const IMPATIENCE: u64 = 60;

/// What the driver may take more of memory after it than before, in KiB: what it spends on the most
/// calls it ever had at once is not given back to the kernel.
const GROWTH: usize = 64 << 10;

/// How long it goes on: a few seconds, or as long as `make storm` says.
fn length() -> Duration {
    let given = std::env::var("QSD_CSI_SECONDS").ok();
    Duration::from_secs(given.map_or(8, |it| it.parse().expect("QSD_CSI_SECONDS is a number")))
}

/// How the calls ended, by method and outcome, and how long the longest took that was not abandoned.
#[derive(Default)]
struct Tally {
    outcomes: BTreeMap<(&'static str, String), u32>,
    longest: BTreeMap<&'static str, Duration>,
}

impl Tally {
    fn count(&mut self, method: &'static str, outcome: &str) {
        *self.outcomes.entry((method, outcome.to_owned())).or_default() += 1;
    }

    fn tell(&self) {
        for (method, longest) in &self.longest {
            let own = self.outcomes.iter().filter(|((of, _), _)| of == method);
            let own: Vec<_> =
                own.map(|((_, outcome), count)| format!("{count} {outcome}")).collect();
            eprintln!("{method}: {}; the longest took {longest:?}", own.join(", "));
        }
    }
}

/// What dies during a storm.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deaths {
    None,
    /// Daemons, at random moments.
    Daemons,
}

/// Somebody who makes call after call.
async fn call_on(driver: Arc<Driver>, seed: u64, deaths: Deaths, tally: Arc<Mutex<Tally>>) {
    let mut dice = Dice::new(seed);
    let begin = Instant::now();
    while begin.elapsed() < length() {
        let hangs_up = dice.roll(3) == 0;
        let patience = Duration::from_millis(dice.roll(IMPATIENCE));
        let Call { method, expected, answer } = draw(&driver, &mut dice);
        let called = Instant::now();
        let answer = timeout(if hangs_up { patience } else { BOUND }, answer).await;
        let took = called.elapsed();
        let mut tally = tally.lock().unwrap();
        let Ok(answer) = answer else {
            assert!(hangs_up, "{method} has no answer after {took:?}");
            tally.count(method, "abandoned");
            continue;
        };
        let longest = tally.longest.entry(method).or_default();
        *longest = took.max(*longest);
        match answer {
            Ok(()) => tally.count(method, "Ok"),
            Err(error) => {
                tally.count(method, &format!("{:?}", error.code()));
                drop(tally);
                assert_expected(method, expected, deaths, &error);
            }
        }
    }
}

fn assert_expected(method: &str, expected: &[Code], deaths: Deaths, error: &Status) {
    let is_of_death = deaths == Deaths::Daemons && error.code() == Code::Unavailable;
    assert!(is_of_death || expected.contains(&error.code()), "{method}: {error:?}");
}

/// Kills daemons one after the other: how many.
async fn kill_daemons(driver: Arc<Driver>, seed: u64) -> u32 {
    let mut dice = Dice::new(seed);
    let (begin, mut killed) = (Instant::now(), 0);
    while begin.elapsed() < length() {
        sleep(Duration::from_millis(dice.roll(300))).await;
        let daemons = daemons_below(driver.scratch());
        if !daemons.is_empty() {
            let count = u64::try_from(daemons.len()).unwrap();
            signal(daemons[usize::try_from(dice.roll(count)).unwrap()], "KILL");
            killed += 1;
        }
    }
    killed
}

/// Takes all away that the storm has left.
async fn clear(driver: &Driver) {
    for slot in 0..VOLUMES {
        let name = volume(slot);
        until("the last abandoned call ends", async || {
            let is_unpublished = driver.unpublish(&name).await.is_ok();
            // Nobody stages or deletes what goes with its pod.
            Form::of(slot) == Form::Inline && is_unpublished
                || driver.unstage(&name).await.is_ok() && driver.delete(&name).await.is_ok()
        })
        .await;
    }
    for snapshot in driver.snapshots("", "").await.unwrap() {
        driver.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    }
    for volume in driver.inspect().await {
        driver.delete(&volume.volume_id).await.unwrap(); // inline ones that somebody created by name
    }
    driver.assert_empty().await;
}

/// One volume of each form comes and goes, so that all is there that stays.
async fn warm_up(driver: &Arc<Driver>) {
    for slot in [0, 4, 5, 7, 9, 39] {
        for (step, call) in calls::life(driver, slot) {
            call.await.unwrap_or_else(|error| panic!("{step} of {}: {error:?}", volume(slot)));
        }
    }
}

async fn storm(deaths: Deaths) {
    let driver = Arc::new(Driver::start_with(&["--overcommit", "1000"]).await);
    warm_up(&driver).await;
    driver.assert_empty().await;
    until("the relay ends", async || Traces::of(&driver).is_at_rest()).await;
    let (before, spent) = (Traces::of(&driver), memory(&driver));
    let tally = Arc::<Mutex<Tally>>::default();
    let callers = (0..CALLERS)
        .map(|seed| tokio::spawn(call_on(driver.clone(), seed, deaths, tally.clone())))
        .collect::<Vec<_>>();
    if deaths == Deaths::Daemons {
        let killed = kill_daemons(driver.clone(), CALLERS).await;
        eprintln!("{killed} daemons were killed");
    }
    for caller in callers {
        caller.await.unwrap();
    }
    tally.lock().unwrap().tell();
    clear(&driver).await;
    let begin = Instant::now();
    until("what was taken is given back", async || {
        let now = Traces::of(&driver);
        let is_late = begin.elapsed() > Duration::from_secs(30);
        assert!(!is_late, "before: {before:#?}, after: {now:#?}");
        now.is_within(&before)
    })
    .await;
    let grown = memory(&driver).saturating_sub(spent);
    eprintln!("the driver had {spent} KiB before, and {grown} KiB more after; {before:?}");
    assert!(grown < GROWTH, "{grown} KiB");
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_collide_and_hang_up_leave_all_in_order() {
    storm(Deaths::None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_collide_while_daemons_die_leave_all_in_order() {
    storm(Deaths::Daemons).await;
}

#[tokio::test]
async fn a_call_whose_client_hangs_up_is_finished_all_the_same() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    let hang_up = tokio::time::timeout(Duration::from_millis(2), driver.stage("pvc-1")).await;
    assert!(hang_up.is_err(), "a staging takes longer than this");
    until("the staging is finished", async || driver.daemons().await.len() == 1).await;
    driver.stage("pvc-1").await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}
