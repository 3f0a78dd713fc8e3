//! A pool that is full: calls say so, and deletion is the way out.

use crate::{
    copies::Wish,
    disk::SmallDisk,
    harness::{Driver, names},
    model::guest::Guest,
};
use std::{fs, process::Command};
use tonic::Code;

#[tokio::test]
async fn a_full_pool_creates_nothing_and_deletes_all_the_same() {
    let disk = SmallDisk::new();
    {
        let pool = format!("small={}", disk.path().join("pool").display());
        let driver = Driver::start_with(&["--pool", &pool]).await;
        let create = async |name: &str| {
            let mut request = crate::harness::create_request(name, 4 << 20);
            request.parameters = [("pool".to_owned(), "small".to_owned())].into();
            driver.controller().create_volume(request).await
        };
        create("pvc-1").await.unwrap();
        create("pvc-2").await.unwrap();
        let filler = crate::disk::fill(&disk.path());
        let error = create("pvc-3").await.unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        driver.stage("pvc-1").await.unwrap();
        driver.unstage("pvc-1").await.unwrap();
        driver.delete("pvc-1").await.unwrap();
        fs::remove_file(filler).unwrap();
        driver.delete("pvc-2").await.unwrap();
        for part in ["layers", "records/layers", "records/volumes"] {
            assert_eq!(names(&disk.path().join("pool").join(part)), [""; 0], "{part}");
        }
        driver.assert_empty().await;
    }
}

/// A run directory that is full, here a tmpfs of its own.
#[tokio::test]
async fn a_full_run_directory_keeps_nobody_from_leaving() {
    let mut driver = Driver::start().await;
    driver.kill();
    for pid in crate::harness::supervisors_of(&driver.path("run")) {
        crate::harness::signal(pid, "KILL");
    }
    let run = driver.path("run");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&run);
    assert!(mount.status().unwrap().success());
    driver.launch(&[], None);
    driver.answers().await;
    driver.published("pvc-1").await;
    driver.published("pvc-2").await;
    let filler = crate::disk::fill(&run);
    driver.create("pvc-3").await;
    assert_eq!(driver.stage("pvc-3").await.unwrap_err().code(), Code::ResourceExhausted);
    for volume in ["pvc-1", "pvc-2"] {
        driver.remove(volume).await;
    }
    fs::remove_file(filler).unwrap();
    driver.stage("pvc-3").await.unwrap();
    driver.unstage("pvc-3").await.unwrap();
    driver.delete("pvc-3").await.unwrap();
    assert_eq!(crate::harness::daemons_below(driver.scratch()), [0; 0]);
}

/// A size that the pool promises and no file there can have. Once it was tried, the volume could
/// neither be expanded nor frozen any more.
#[tokio::test(flavor = "multi_thread")]
async fn an_expansion_that_cannot_be_leaves_the_volume_as_it_was() {
    let disk = SmallDisk::of(2 << 30);
    let pool = format!("small={}", disk.path().join("pool").display());
    let driver = Driver::start_with(&["--pool", &pool, "--overcommit", "10000"]).await;
    let in_pool = vec![("pool", "small")];
    let wish = Wish { name: "pvc-1".into(), size: 4 << 20, source: None, parameters: in_pool };
    driver.fulfil(&wish).await.unwrap();
    let too_much = 6 << 40;
    for round in 0..3_u64 {
        match round {
            1 => driver.attach("pvc-1").await,
            2 => drop(Guest::connect(&driver.socket("pvc-1")).read(0..1).await),
            _ => {}
        }
        let error = driver.expand("pvc-1", too_much).await.unwrap_err();
        assert_eq!(error.code(), Code::OutOfRange, "{error}");
        let layers = driver.look().await.layers;
        assert!(layers.iter().all(|layer| layer.capacity_bytes < 8 << 20), "{layers:?}");
        driver.expand("pvc-1", (5 + round) << 20).await.unwrap();
    }
    driver.snapshot("snap-1", "pvc-1").await.unwrap();
    assert_eq!(driver.inspect().await[0].capacity_bytes, 7 << 20);
    driver.delete_snapshot("snap-1").await.unwrap();
    driver.remove("pvc-1").await;
    driver.assert_empty().await;
}
