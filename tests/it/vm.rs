//! A real virtual machine on a published socket, and an agent in it that runs commands.
//!
//! The guest is what `scripts/setup` makes; how its agent is spoken to is said in
//! `scripts/guest/init`. The disk under test is `/dev/vda`.

use crate::harness::{LIMIT, part, until};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    time::timeout,
};

pub(crate) struct Vm {
    qemu: Child,
    agent: BufReader<UnixStream>,
    console: PathBuf,
    _scratch: tempfile::TempDir,
}

impl Vm {
    /// Boots a VM whose disk is the vhost-user-blk socket.
    pub(crate) async fn boot(socket: &Path) -> Self {
        let scratch = tempfile::Builder::new().prefix("vm-").tempdir().unwrap();
        let (console, agent) = (scratch.path().join("console"), scratch.path().join("agent"));
        let cmdline = fs::read_to_string(part("guest/cmdline")).unwrap();
        let mut qemu = Command::new(part("bin/qemu-system-x86_64"))
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-cpu", "max"])
            .args(["-machine", "q35,accel=tcg,memory-backend=mem", "-m", "256M"])
            .args(["-object", "memory-backend-memfd,id=mem,size=256M,share=on"])
            .arg("-chardev")
            .arg(format!("socket,id=disk,path={},reconnect-ms=50", socket.display()))
            .args(["-device", "vhost-user-blk-pci,chardev=disk"])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-chardev")
            .arg(format!("socket,id=agent,path={},server=on,wait=off", agent.display()))
            .args(["-serial", "chardev:agent"])
            .arg("-kernel")
            .arg(part("guest/vmlinuz"))
            .arg("-initrd")
            .arg(part("guest/initrd"))
            .args(["-append", cmdline.trim()])
            .stdin(Stdio::null())
            .stderr(fs::File::create(scratch.path().join("qemu.log")).unwrap())
            .spawn()
            .unwrap();
        until("the VM starts", async || {
            let ended = qemu.try_wait().unwrap();
            let log = || fs::read_to_string(scratch.path().join("qemu.log")).unwrap();
            assert!(ended.is_none(), "QEMU ended: {}", log());
            agent.exists()
        })
        .await;
        let agent = BufReader::new(UnixStream::connect(&agent).await.unwrap());
        let mut vm = Self { qemu, agent, console, _scratch: scratch };
        vm.read_to("AGENT READY").await;
        vm
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
        let errors = "dmesg | grep -E 'I/O error|EXT4-fs (error|warning)|blocked for' || true";
        assert_eq!(self.run(errors).await, "", "errors in the guest");
    }

    /// Reads lines up to one that begins with `mark`: those before it, and it.
    async fn read_to(&mut self, mark: &str) -> (String, String) {
        let mut output = String::new();
        let read = async {
            loop {
                let mut line = String::new();
                let length = self.agent.read_line(&mut line).await.unwrap();
                assert_ne!(length, 0, "the VM is gone");
                if line.starts_with(mark) {
                    return line.trim().to_owned();
                }
                output.push_str(&line);
            }
        };
        let last = timeout(LIMIT, read).await;
        let last = last.unwrap_or_else(|_| panic!("the guest is silent: {}", self.console()));
        (output, last)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        _ = self.qemu.kill();
        _ = self.qemu.wait();
    }
}
