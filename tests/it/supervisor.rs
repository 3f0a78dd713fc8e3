//! Supervisors that die at any moment: their daemons go on, the next one knows them, and none is left
//! that nobody knows.

use crate::{
    harness::{Dice, Driver, daemons_below, signal, supervisors_of, until},
    model::guest::{Action, Guest},
    survival::rounds,
};
use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::time::sleep;
use tonic::{Code, Status};

/// Makes a call until it succeeds, and says how often it did not.
async fn persist(call: impl AsyncFn() -> Result<(), Status>) -> u32 {
    let (begin, mut failures) = (Instant::now(), 0);
    while let Err(error) = call().await {
        assert!([Code::Unavailable, Code::Aborted].contains(&error.code()), "{error:?}");
        assert!(begin.elapsed() < Duration::from_mins(1), "{error:?}");
        failures += 1;
        sleep(Duration::from_millis(5)).await;
    }
    failures
}

/// Kills the supervisor after so long.
async fn kill_supervisor(driver: &Driver, after: Duration) {
    sleep(after).await;
    for pid in supervisors_of(&driver.path("run")) {
        signal(pid, "KILL");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supervisor_that_dies_as_it_starts_a_daemon_leaves_none_that_nobody_knows() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    let mut dice = Dice::new(41);
    let mut failures = 0;
    for _ in 0..rounds(8) {
        let moment = Duration::from_micros(dice.roll(60_000));
        let stage = persist(async || driver.stage("pvc-1").await);
        failures += tokio::join!(stage, kill_supervisor(&driver, moment)).0;
        until("one daemon serves, and no other is there", async || {
            let serving = driver.daemons().await;
            serving.len() == 1 && daemons_below(driver.scratch()) == serving
        })
        .await;
        // The end of one is noticed, also of one that was adopted.
        let before = driver.daemons().await;
        let moment = Duration::from_micros(dice.roll(20_000));
        signal(before[0], "KILL");
        kill_supervisor(&driver, moment).await;
        until("another one serves, and no other is there", async || {
            let serving = driver.daemons().await;
            serving.len() == 1 && serving != before && daemons_below(driver.scratch()) == serving
        })
        .await;
        let moment = Duration::from_micros(dice.roll(20_000));
        let unstage = persist(async || driver.unstage("pvc-1").await);
        failures += tokio::join!(unstage, kill_supervisor(&driver, moment)).0;
        assert_eq!(daemons_below(driver.scratch()), [0; 0]);
    }
    eprintln!("{failures} calls had to be repeated");
    driver.delete("pvc-1").await.unwrap();
    until("a supervisor is there", async || {
        supervisors_of(&driver.path("run")).len() == 1
            && driver.path("run/supervisor.sock").exists()
    })
    .await;
    driver.assert_empty().await;
}

/// What a supervisor leaves that died between two steps of a start, and its successor did not see.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_holds_the_place_of_a_daemon_makes_way() {
    let driver = Driver::start().await;
    driver.published("pvc-1").await;
    let guest = Guest::connect(&driver.socket("pvc-1"));
    let daemon = driver.daemons().await[0];
    signal(driver.pid(), "STOP");
    signal(daemon, "KILL");
    until("it is gone", async || daemons_below(driver.scratch()).is_empty()).await;
    let lock = fs::File::open(driver.part().join("a/lock")).unwrap();
    until("its lock is free", async || lock.try_lock().is_ok()).await;
    let mut stray = Command::new("sleep").arg("600").stdin(Stdio::from(lock)).spawn().unwrap();
    signal(driver.pid(), "CONT");
    until("it is served", async || {
        let serving = driver.daemons().await;
        serving.len() == 1 && serving != [daemon]
    })
    .await;
    guest.act(vec![Action::Write { sectors: 0..8, stamp: 1 }]).await;
    stray.wait().unwrap();
    assert_ne!(driver.daemons().await, [i32::try_from(stray.id()).unwrap()]);
    drop(guest);
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}

/// By an operator who clears what looks old, say.
#[tokio::test(flavor = "multi_thread")]
async fn a_supervisor_whose_socket_was_removed_is_reached_again() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    driver.create("pvc-2").await;
    driver.attach("pvc-1").await;
    let guest = Guest::connect(&driver.socket("pvc-1"));
    let (supervisors, daemons) = (supervisors_of(&driver.path("run")), driver.daemons().await);
    fs::remove_file(driver.path("run/supervisor.sock")).unwrap();
    persist(async || driver.stage("pvc-2").await).await;
    driver.publish("pvc-2").await.unwrap();
    guest.act(vec![Action::Write { sectors: 0..8, stamp: 1 }]).await;
    assert_eq!(supervisors_of(&driver.path("run")), supervisors);
    assert!(driver.daemons().await.contains(&daemons[0]));
    drop(guest);
    driver.detach("pvc-2").await;
    driver.detach("pvc-1").await;
}
