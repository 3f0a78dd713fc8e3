//! A real virtual machine on a published socket, and an agent in it that runs commands.
//!
//! The guest is what `scripts/setup` makes; how its agent is spoken to is said in
//! `scripts/guest/init`. The disk under test is `/dev/vda`.

use crate::harness::{LIMIT, part, until};
use qsd_csi::qsd::{Command as Qmp, Monitor};
use serde_json::{Value, json};
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    time::timeout,
};

/// How often QEMU looks whether its disk is back, unless a test says otherwise.
const RECONNECT: Duration = Duration::from_millis(50);

/// How long a guest may say nothing. Beside others that boot, it gets a fraction of a core: one got
/// 2 s of one in a minute.
const SILENCE: Duration = LIMIT.saturating_mul(2);

/// How often a machine is started that QEMU itself ends, and what it says of that.
const BOOTS: usize = 3;
const EMULATOR_FAILED: &str = "iotlb_to_section: Assertion";

/// How long an agent may take to say that it listens, or that it still does.
const MEETING: Duration = Duration::from_secs(15);

/// A VM that is not there yet. Both ends of a migration must be alike.
pub(crate) struct Machine {
    disk: PathBuf,
    is_file: bool,
    reconnect: Option<Duration>,
    cpus: u32,
    queues: Option<u32>,
    journal: Option<PathBuf>,
}

impl Machine {
    /// How often it looks whether its disk is back.
    pub(crate) fn reconnect(self, every: Duration) -> Self {
        Self { reconnect: Some(every), ..self }
    }

    /// It never looks: when the disk goes, it is gone.
    pub(crate) fn without_reconnect(self) -> Self {
        Self { reconnect: None, ..self }
    }

    pub(crate) fn cpus(self, cpus: u32) -> Self {
        Self { cpus, ..self }
    }

    /// The queues of its disk; otherwise one a CPU.
    pub(crate) fn queues(self, queues: u32) -> Self {
        Self { queues: Some(queues), ..self }
    }

    /// Its second disk, `/dev/vdb`: a file for what a guest notes for the host.
    pub(crate) fn journal(self, file: &Path) -> Self {
        Self { journal: Some(file.to_owned()), ..self }
    }

    /// Boots it; once more where QEMU's emulator fails as the firmware maps devices, which it does once
    /// in some hundred times: no guest has said anything by then.
    pub(crate) async fn boot(self) -> Vm {
        for _ in 0..BOOTS {
            let mut vm = self.start(None).await;
            if vm.meets().await {
                return vm;
            }
        }
        panic!("QEMU fails at each boot");
    }

    /// Leaves it waiting for another that migrates to it through the socket `path`.
    pub(crate) async fn incoming(self, path: &Path) -> Vm {
        let vm = self.start(Some(path.to_owned())).await;
        // Its monitor answers only when it listens.
        assert_eq!(vm.qmp("query-status", json!({})).await["status"], "inmigrate");
        vm
    }

    async fn start(&self, incoming: Option<PathBuf>) -> Vm {
        let scratch = tempfile::Builder::new().prefix("vm-").tempdir().unwrap();
        let [console, agent, qmp, log] =
            ["console", "agent", "qmp", "qemu.log"].map(|name| scratch.path().join(name));
        let mut command = self.command(&console, &agent, &qmp);
        if let Some(path) = &incoming {
            command.arg("-incoming").arg(format!("unix:{}", path.display()));
        }
        let mut qemu = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let (mut stream, mut monitor) = (None, None);
        until("the VM starts", async || {
            let ended = qemu.try_wait().unwrap();
            assert!(ended.is_none(), "QEMU ended: {}", fs::read_to_string(&log).unwrap());
            if stream.is_none() {
                stream = UnixStream::connect(&agent).await.ok();
            }
            if monitor.is_none() {
                monitor = Monitor::connect(&qmp).await.ok();
            }
            stream.is_some() && monitor.is_some()
        })
        .await;
        let (agent, monitor) = (BufReader::new(stream.unwrap()), monitor.unwrap());
        Vm { qemu, agent, monitor, console, incoming, jobs: 0, scratch }
    }

    fn command(&self, console: &Path, agent: &Path, qmp: &Path) -> Command {
        let cmdline = fs::read_to_string(part("guest/cmdline")).unwrap();
        let reconnect = self.reconnect.map(|every| format!(",reconnect-ms={}", every.as_millis()));
        let queues = self.queues.map(|queues| format!(",num-queues={queues}"));
        let mut command = Command::new(part("bin/qemu-system-x86_64"));
        command
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-cpu", "max"])
            .args(["-machine", "q35,accel=tcg,memory-backend=mem", "-m", "256M"])
            .args(["-object", "memory-backend-memfd,id=mem,size=256M,share=on"])
            .args(["-smp", &self.cpus.to_string()]);
        let disk = self.disk.display();
        if self.is_file {
            // As `KubeVirt` has it by default (facts/kubevirt.md section 2).
            let drive = format!("if=none,id=disk,file={disk},format=raw,cache=none,discard=unmap");
            command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
        } else {
            let chardev = format!("socket,id=disk,path={disk}{}", reconnect.unwrap_or_default());
            let device = format!("vhost-user-blk-pci,chardev=disk{}", queues.unwrap_or_default());
            command.args(["-chardev", &chardev, "-device", &device]);
        }
        if let Some(file) = &self.journal {
            let drive = format!("if=none,id=journal,file={},format=raw", file.display());
            command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=journal"]);
        }
        command
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-chardev")
            .arg(format!("socket,id=agent,path={},server=on,wait=off", agent.display()))
            .args(["-serial", "chardev:agent"])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", qmp.display()))
            .arg("-kernel")
            .arg(part("guest/vmlinuz"))
            .arg("-initrd")
            .arg(part("guest/initrd"))
            .args(["-append", cmdline.trim()])
            .stdin(Stdio::null());
        command
    }
}

pub(crate) struct Vm {
    qemu: Child,
    agent: BufReader<UnixStream>,
    monitor: Monitor,
    console: PathBuf,
    /// Where it waits for the VM that it is to become.
    incoming: Option<PathBuf>,
    jobs: u32,
    scratch: tempfile::TempDir,
}

/// Something that runs in a guest beside what the agent is told; moves with the guest.
pub(crate) struct Job {
    output: String,
}

impl Vm {
    /// A VM whose disk is the vhost-user-blk socket.
    pub(crate) fn on(socket: &Path) -> Machine {
        let (disk, reconnect) = (socket.to_owned(), Some(RECONNECT));
        Machine { disk, is_file: false, reconnect, cpus: 1, queues: None, journal: None }
    }

    /// A VM whose disk is a raw file.
    pub(crate) fn on_file(file: &Path) -> Machine {
        Machine { is_file: true, ..Self::on(file) }
    }

    /// Boots a VM whose disk is the vhost-user-blk socket.
    pub(crate) async fn boot(socket: &Path) -> Self {
        Self::on(socket).boot().await
    }

    /// Tells QEMU to do something: its answer.
    pub(crate) async fn qmp(&self, command: &'static str, arguments: Value) -> Value {
        self.monitor.execute(Qmp::new(command, arguments)).await.unwrap()
    }

    /// Stops the guest, and the queues of its disk.
    pub(crate) async fn stop(&self) {
        self.qmp("stop", json!({})).await;
    }

    /// Lets the guest go on.
    pub(crate) async fn cont(&self) {
        self.qmp("cont", json!({})).await;
    }

    /// Moves the guest to a VM that waits for it, and ends this one.
    pub(crate) async fn migrate_to(self, other: &mut Self) {
        let path = other.incoming.take().expect("the other one waits");
        self.qmp("migrate", json!({ "uri": format!("unix:{}", path.display()) })).await;
        until("the guest has moved", async || {
            let migration = self.qmp("query-migrate", json!({})).await;
            assert_ne!(migration["status"], "failed", "{migration}");
            migration["status"] == "completed"
        })
        .await;
        until("the guest runs again", async || {
            other.qmp("query-status", json!({})).await["status"] == "running"
        })
        .await;
    }

    /// Starts one line of shell in the guest and leaves it running.
    pub(crate) async fn start(&mut self, line: &str) -> Job {
        self.jobs += 1;
        let output = format!("/tmp/job-{}", self.jobs);
        self.run(&format!("({line}; echo \"EXIT $?\") > {output} 2>&1 &")).await;
        Job { output }
    }

    /// Waits for a job to say a line that begins with `mark`: all that it said.
    pub(crate) async fn wait_for(&mut self, job: &Job, mark: &str) -> String {
        let Job { output } = job;
        let wait = format!("until grep -qE '^({mark}|EXIT )' {output}; do sleep 0.05; done");
        // Indented, so that the end of the job is not taken for the end of this.
        let said = self.run(&format!("{wait}; sed 's/^/ /' {output}")).await;
        let lines = said.lines().filter_map(|line| line.strip_prefix(' '));
        let said: String = lines.flat_map(|line| [line, "\n"]).collect();
        assert!(said.lines().any(|line| line.starts_with(mark)), "no {mark}: {said}");
        said
    }

    /// Waits for a job to end: its status and all that it said.
    pub(crate) async fn collect(&mut self, job: Job) -> (i32, String) {
        let mut said = self.wait_for(&job, "EXIT ").await;
        let end = said.rfind("EXIT ").unwrap();
        let status = said.split_off(end);
        (status.trim_start_matches("EXIT ").trim().parse().unwrap(), said)
    }

    /// The reads and writes that the guest's disk has not answered.
    pub(crate) async fn in_flight(&mut self) -> (u64, u64) {
        let line = self.run("cat /sys/block/vda/inflight").await;
        let mut numbers = line.split_whitespace().map(|number| number.parse().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    }

    /// Runs one line of shell in the guest: its status and output.
    pub(crate) async fn try_run(&mut self, line: &str) -> (i32, String) {
        self.agent.get_mut().write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let (output, last) = self.read_to("EXIT ").await;
        (last.trim_start_matches("EXIT ").parse().unwrap(), output)
    }

    /// Runs one line of shell that must succeed: its output.
    pub(crate) async fn run(&mut self, line: &str) -> String {
        let (status, output) = self.try_run(line).await;
        assert_eq!(status, 0, "{line}: {output}\n{}", self.console());
        output
    }

    /// Syncs and powers off.
    pub(crate) async fn power_off(mut self) {
        self.run("poweroff").await;
        until("the VM is off", async || self.qemu.try_wait().unwrap().is_some()).await;
    }

    /// What the kernel said.
    pub(crate) fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Asserts that the kernel of the guest saw no error of the disk.
    pub(crate) async fn assert_no_errors(&mut self) {
        let errors =
            "dmesg | grep -E 'I/O error|EXT4-fs (error|warning)|blocked for|not a head' || true";
        assert_eq!(self.run(errors).await, "", "errors in the guest");
    }

    /// Waits for the agent. What a guest says before QEMU has taken our connection is lost, and QEMU
    /// may be slower than the guest: then it is asked. False where the emulator failed.
    async fn meets(&mut self) -> bool {
        let begin = Instant::now();
        loop {
            match timeout(MEETING, self.try_hear("AGENT READY")).await {
                Ok(Some(_)) => break,
                Ok(None) if self.words().contains(EMULATOR_FAILED) => return false,
                Ok(None) => panic!("the VM is gone: {}", self.words()),
                Err(_) => assert!(begin.elapsed() < SILENCE, "it is silent: {}", self.words()),
            }
            self.agent.get_mut().write_all(b"\n").await.unwrap();
            if timeout(MEETING, self.hear("EXIT 0")).await.is_ok() {
                break;
            }
        }
        // Whatever it still has to say of that.
        self.agent.get_mut().write_all(b"echo in step\n").await.unwrap();
        self.read_to("in step").await;
        self.read_to("EXIT 0").await;
        true
    }

    /// Reads lines up to one that begins with `mark`: those before it, and it.
    async fn read_to(&mut self, mark: &str) -> (String, String) {
        let heard = timeout(SILENCE, self.hear(mark)).await;
        heard.unwrap_or_else(|_| panic!("the guest is silent: {}", self.words()))
    }

    async fn hear(&mut self, mark: &str) -> (String, String) {
        let heard = self.try_hear(mark).await;
        heard.unwrap_or_else(|| panic!("the VM is gone: {}", self.words()))
    }

    /// `None`: the VM is gone.
    async fn try_hear(&mut self, mark: &str) -> Option<(String, String)> {
        let mut output = String::new();
        loop {
            let mut line = String::new();
            if self.agent.read_line(&mut line).await.unwrap() == 0 {
                return None;
            }
            if line.starts_with(mark) {
                return Some((output, line.trim().to_owned()));
            }
            output.push_str(&line);
        }
    }

    /// What the guest's kernel and QEMU said last, and where QEMU's threads are.
    fn words(&self) -> String {
        let log = fs::read_to_string(self.scratch.path().join("qemu.log")).unwrap_or_default();
        let console = self.console();
        let last = console.lines().rev().take(20).collect::<Vec<_>>();
        let last: Vec<_> = last.into_iter().rev().collect();
        let mut threads = String::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.qemu.id())).into_iter().flatten() {
            let path = task.unwrap().path();
            for what in ["comm", "stat", "wchan", "syscall", "stack"] {
                let text = fs::read_to_string(path.join(what)).unwrap_or_default();
                writeln!(threads, "{what}: {}", text.trim()).unwrap();
            }
        }
        format!("{}\nQEMU: {log}\n{threads}", last.join("\n"))
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        _ = self.qemu.kill();
        _ = self.qemu.wait();
    }
}
