//! Daemons that die or hang in other ways than by SIGKILL: the next one serves, others do not notice,
//! and people learn why.

use crate::{
    harness::{Driver, daemons_below, part, qsd_csi, signal, until},
    local::Use,
    model::guest::{Action, Guest},
};
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};
use tonic::Code;

/// A qemu-storage-daemon that does what a file tells it, and notes each of its starts.
///
/// | word | it |
/// |---|---|
/// | well | is the real one |
/// | dies | says so and ends, before it serves |
/// | short | is the real one, and aborts a moment after it serves |
/// | hangs | never listens |
/// | deaf N | is the real one, and stops for ever N hundredths of a second after it listens |
const PROGRAM: &str = r#"#!/bin/sh
real=REAL dir=DIR
case "$*" in *--version*) exec "$real" "$@" ;; esac
echo started >>"$dir/starts"
all=$* place=${all#*id=qmp,path=} place=${place%%/qmp.sock,*}
read -r word number <"$dir/mode"
case $word in
    dies) echo "no such luck" >&2; exit 7 ;;
    short)
        (until [ -S "$place/back.sock" ] || [ -S "$place/back2.sock" ]; do sleep 0.001; done
        sleep 0.03; kill -ABRT $$) </dev/null &
        exec "$real" "$@" ;;
    hangs) exec sleep 600 ;;
    deaf)
        (until [ -S "$place/qmp.sock" ]; do sleep 0.001; done; sleep "0.0$number"; kill -STOP $$) </dev/null &
        exec "$real" "$@" ;;
esac
exec "$real" "$@"
"#;

/// The program in a directory of its own.
struct Program {
    dir: tempfile::TempDir,
}

impl Program {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let real = part("bin/qemu-storage-daemon").display().to_string();
        let text = PROGRAM.replace("REAL", &real);
        let text = text.replace("DIR", &dir.path().display().to_string());
        let program = Self { dir };
        fs::copy("/bin/true", program.path()).unwrap(); // executable
        put(&program.path(), &text);
        fs::set_permissions(program.path(), fs::Permissions::from_mode(0o755)).unwrap();
        program.is("well");
        program
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("qemu-storage-daemon")
    }

    fn is(&self, mode: &str) {
        put(&self.dir.path().join("mode"), &format!("{mode}\n"));
    }

    /// How often it was started, so far.
    fn starts(&self) -> usize {
        let text = fs::read_to_string(self.dir.path().join("starts")).unwrap_or_default();
        text.lines().count()
    }
}

fn put(path: &Path, text: &str) {
    use std::io::Write as _;
    fs::File::create(path).unwrap().write_all(text.as_bytes()).unwrap();
}

/// Two volumes with a guest each; one of them has no trouble.
struct Pair {
    program: Program,
    driver: Driver,
    ill: Guest,
    well: Guest,
}

impl Pair {
    async fn start() -> Self {
        let program = Program::new();
        let driver = Driver::start_on(program.path(), &[]).await;
        for name in ["ill", "well"] {
            driver.published(name).await;
        }
        let [ill, well] = ["ill", "well"].map(|name| Guest::connect(&driver.socket(name)));
        for guest in [&ill, &well] {
            write(guest).await;
        }
        Self { program, driver, ill, well }
    }

    async fn daemon(&self) -> Option<i32> {
        let volumes = self.driver.inspect().await;
        let ill = volumes.into_iter().find(|one| one.volume_id == "ill").unwrap();
        ill.attachment.unwrap().daemon.map(|daemon| daemon.pid)
    }

    /// Kills the daemon of one while the program does this, until it was started so many times more:
    /// how often the other volume, which is asked all the time, answered from each start to the next.
    /// That is the clock here: of a machine that is busy both are slow.
    async fn kill_until(&self, mode: &str, starts: usize) -> Vec<usize> {
        let before = self.program.starts();
        let mut answers = vec![0; starts];
        self.program.is(mode);
        signal(self.daemon().await.unwrap(), "KILL");
        until("it is started again", async || {
            self.well.read(0..8).await;
            let started = self.program.starts() - before;
            if let Some(answers) = answers.get_mut(started) {
                *answers += 1;
            }
            started >= starts
        })
        .await;
        eprintln!(
            "a program that is {mode}: answers of the other from start to start: {answers:?}"
        );
        answers.split_off(1)
    }

    /// All is well again, and what was acknowledged is there.
    async fn recover(&self) {
        self.program.is("well");
        until("it is served again", async || self.daemon().await.is_some()).await;
        write(&self.ill).await;
    }

    async fn end(self) {
        drop((self.ill, self.well));
        for name in ["ill", "well"] {
            self.driver.remove(name).await;
        }
        self.driver.assert_empty().await;
    }
}

async fn write(guest: &Guest) {
    guest.act(vec![Action::Write { sectors: 0..8, stamp: 1 }, Action::Flush]).await;
}

/// What people are told by the command line.
fn show(driver: &Driver, volume: &str) -> String {
    let endpoint = driver.endpoint();
    let output = qsd_csi().args(["volume", "show", volume, "--endpoint", &endpoint]).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn people_learn_by_which_signal_daemons_died_also_from_the_next_driver() {
    let mut driver = Driver::start().await;
    driver.published("pvc-1").await;
    let guest = Guest::connect(&driver.socket("pvc-1"));
    assert!(!show(&driver, "pvc-1").contains("last death"));
    for (number, (name, signal_number)) in [("SEGV", 11), ("ABRT", 6)].into_iter().enumerate() {
        write(&guest).await;
        let pid = driver.daemons().await[0];
        signal(pid, name);
        until("another one serves", async || {
            let now = driver.daemons().await;
            now.len() == 1 && now != [pid]
        })
        .await;
        write(&guest).await;
        let times = number + 1;
        let words = format!("pid {pid}, killed by signal {signal_number}; {times} since");
        until("it is told", async || show(&driver, "pvc-1").contains(&words)).await;
    }
    driver.restart().await;
    let told = show(&driver, "pvc-1");
    assert!(told.contains("killed by signal 6") && told.contains("2 since"), "{told}");
    // One that dies while no driver is there.
    driver.kill();
    let pid = daemons_below(driver.scratch())[0];
    signal(pid, "SEGV");
    until("the supervisor saw it", async || {
        let seen = fs::read_to_string(driver.path("run/supervisor.log")).unwrap();
        seen.contains(&format!("\"pid\":{pid},\"reason\":\"killed by signal 11"))
    })
    .await;
    driver.launch(&[], None);
    driver.answers().await;
    let words = format!("pid {pid}, while there was no driver: killed by signal 11; 3 since");
    until("it is told", async || show(&driver, "pvc-1").contains(&words)).await;
    write(&guest).await;
    drop(guest);
    driver.unpublish("pvc-1").await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    driver.stage("pvc-1").await.unwrap();
    assert!(!show(&driver, "pvc-1").contains("last death"), "that was another life");
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// What is kept of a death goes with the directory of the volume, and must not come back to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_daemon_has_just_died_is_unstaged_by_the_first_call() {
    let driver = Driver::start().await;
    driver.create("pvc-1").await;
    for round in 0..30_u64 {
        driver.stage("pvc-1").await.unwrap();
        signal(driver.daemons().await[0], "KILL");
        tokio::time::sleep(std::time::Duration::from_millis(round)).await; // chance finds the moment
        driver.unstage("pvc-1").await.unwrap();
    }
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// Programs that look at its device would each wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_staging_that_is_repeated_asks_the_daemon_before_the_kernel_does() {
    let driver = Driver::start().await;
    driver.made("pvc-1", Use::Ext4).await;
    driver.opened("pvc-1", Use::Ext4).await;
    let pid = driver.daemons().await[0];
    signal(pid, "STOP");
    let error = driver.stage_as("pvc-1", Use::Ext4).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.message().contains("storage daemon of volume pvc-1"), "{error}");
    assert!(error.message().contains("no answer to query-version"), "{error}");
    // One that is only slow has its time.
    let resumed = async {
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        signal(pid, "CONT");
    };
    let (staged, ()) = tokio::join!(driver.stage_as("pvc-1", Use::Ext4), resumed);
    staged.unwrap();
    assert_eq!(driver.daemons().await, [pid]);
    driver.close("pvc-1").await;
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_cannot_start_any_more_is_tried_ever_more_patiently() {
    let pair = Pair::start().await;
    let answers = pair.kill_until("dies", 6).await;
    assert!(answers.last() > answers.first(), "{answers:?}");
    let volumes = pair.driver.inspect().await;
    let ill = volumes.into_iter().find(|one| one.volume_id == "ill").unwrap();
    let trouble = ill.attachment.unwrap().trouble;
    assert!(trouble.contains("exit code 7; it said: no such luck"), "{trouble}");
    let told = show(&pair.driver, "ill");
    assert!(told.contains("no such luck") && told.contains("killed by signal 9"), "{told}");
    pair.recover().await;
    pair.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_soon_after_each_start_is_started_ever_more_patiently() {
    let pair = Pair::start().await;
    let answers = pair.kill_until("short", 6).await;
    assert!(answers.last() > answers.first(), "{answers:?}");
    pair.recover().await;
    until("it is told", async || show(&pair.driver, "ill").contains("killed by signal 6")).await;
    pair.end().await;
}

/// As facts/qsd.md section 1 has it: one in some thousands of starts is deaf.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_hangs_at_its_start_holds_up_nobody_else() {
    let pair = Pair::start().await;
    for mode in ["hangs", "deaf 0"] {
        // Also one that was held up for as long as the start took would have answered once then.
        let answers = pair.kill_until(mode, 2).await;
        assert!(answers[0] > 2, "{answers:?}");
        pair.recover().await;
    }
    pair.end().await;
}

/// It stops in the handshake, or while it is told its layers.
#[tokio::test(flavor = "multi_thread")]
async fn a_staging_whose_daemon_stops_half_way_is_given_up_and_leaves_nothing() {
    let program = Program::new();
    let driver = Driver::start_on(program.path(), &[]).await;
    driver.create("pvc-1").await;
    let before = program.starts();
    program.is("deaf 1");
    let staged = driver.stage("pvc-1").await;
    let starts = program.starts() - before;
    eprintln!("staging with a program that is deaf: {staged:?} after {starts} starts");
    assert!(starts <= 3, "{starts}");
    // One that stops late has served before.
    if let Err(error) = staged {
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert_eq!(daemons_below(driver.scratch()), [0; 0]);
    }
    program.is("well");
    driver.unstage("pvc-1").await.unwrap();
    driver.stage("pvc-1").await.unwrap();
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}
