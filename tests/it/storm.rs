//! Many callers at once, on few volumes, some of whom hang up half way.

use crate::harness::{Dice, Driver, until};
use std::{sync::Arc, time::Duration};
use tonic::Code;

/// What a call may answer when others are at work on the same volume.
const EXPECTED: [Code; 3] = [Code::Aborted, Code::FailedPrecondition, Code::NotFound];

const CALLERS: u64 = 12;
const ROUNDS: u64 = 40;
const VOLUMES: u64 = 5;

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_collide_and_hang_up_leave_all_in_order() {
    let driver = Arc::new(Driver::start().await);
    let callers = (0..CALLERS).map(|seed| {
        let driver = driver.clone();
        tokio::spawn(async move {
            let mut dice = Dice::new(seed);
            for _ in 0..ROUNDS {
                let volume = format!("pvc-{}", dice.roll(VOLUMES));
                let (step, patience) = (dice.roll(6), Duration::from_millis(dice.roll(30)));
                let call = async {
                    match step {
                        0 => driver.try_create(&volume).await.map(drop),
                        1 => driver.stage(&volume).await,
                        2 => driver.publish(&volume).await,
                        3 => driver.unpublish(&volume).await,
                        4 => driver.unstage(&volume).await,
                        _ => driver.delete(&volume).await,
                    }
                };
                if let Ok(Err(error)) = tokio::time::timeout(patience, call).await {
                    assert!(EXPECTED.contains(&error.code()), "{volume} {step}: {error:?}");
                }
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    for volume in (0..VOLUMES).map(|number| format!("pvc-{number}")) {
        until("the last abandoned call ends", async || {
            let order = [
                driver.unpublish(&volume).await,
                driver.unstage(&volume).await,
                driver.delete(&volume).await,
            ];
            order.iter().all(Result::is_ok)
        })
        .await;
    }
    driver.assert_empty().await;
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
