//! Real servers of remote masters, each with one disk: started, stopped, ended, started again.
//!
//! They are the unpacked programs of `make setup`, run on ports and sockets of their own. `Drop`
//! ends each by its process id.

use crate::harness::{is_alive, part, processes, signal, until};
use std::{
    fs::{self, File},
    io::Write as _,
    net::{TcpListener, TcpStream},
    os::unix::{fs::FileExt as _, net::UnixStream, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The size of a disk here.
pub(crate) const SIZE: u64 = 8 << 20;

/// The user that every server knows.
const USER: &str = "bob";

/// The password of that user, with what would end a word in many a place.
pub(crate) const PASSWORD: &str = "h u%s&h/@12345";

/// What serves a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `qemu-nbd` on a Unix socket.
    NbdUnix,
    /// `qemu-nbd` on TCP, with TLS.
    Nbds,
    /// nginx.
    Http,
    /// The same, for those with a password.
    HttpAuth,
    /// tgtd.
    Iscsi,
    /// The same, with CHAP.
    IscsiChap,
    /// sshd.
    Ssh,
}

/// A server and its disk.
pub(crate) struct Server {
    kind: Kind,
    dir: tempfile::TempDir,
    port: u16,
    process: Option<Child>,
}

/// The byte that every one of a sector's has.
pub(crate) fn fill(sector: u64) -> u8 {
    u8::try_from(sector % 251).unwrap() + 1
}

/// What a sector of a disk here holds.
pub(crate) fn sector(number: u64) -> Vec<u8> {
    vec![fill(number); 512]
}

/// A port that nobody listens at.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Server {
    /// One with a disk whose sectors can be told apart.
    pub(crate) async fn start(kind: Kind) -> Self {
        Self::start_with(kind, |path| {
            let mut disk = File::create(path).unwrap();
            (0..SIZE / 512).for_each(|number| disk.write_all(&sector(number)).unwrap());
        })
        .await
    }

    /// One with a disk that is made by the caller.
    pub(crate) async fn start_with(kind: Kind, make: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::Builder::new().prefix("remote-").tempdir().unwrap();
        make(&dir.path().join("disk"));
        let mut server = Self { kind, dir, port: 0, process: None };
        server.prepare();
        server.launch().await;
        server
    }

    /// The text for the parameter `source`.
    pub(crate) fn source(&self) -> String {
        let (port, disk) = (self.port, self.disk().display().to_string());
        match self.kind {
            Kind::NbdUnix => format!("nbd+unix:///disk?socket={}", self.text("nbd.sock")),
            Kind::Nbds => format!("nbds://127.0.0.1:{port}/disk"),
            Kind::Http => format!("http://127.0.0.1:{port}/disk"),
            Kind::HttpAuth => format!("http://127.0.0.1:{port}/auth/disk"),
            Kind::Iscsi => format!("iscsi://127.0.0.1:{port}/iqn.2026-11.io.qsd-csi:disk/1"),
            Kind::IscsiChap => format!("iscsi://127.0.0.1:{port}/iqn.2026-11.io.qsd-csi:chap/1"),
            Kind::Ssh => {
                let key = run(Command::new(part("bin/ssh-keygen"))
                    .args(["-l", "-f"])
                    .arg(self.path("host.pub")));
                let digest = key.split(' ').nth(1).unwrap().to_owned();
                format!("ssh://root@127.0.0.1:{port}{disk}?host_key_check={digest}")
            }
        }
    }

    /// What lets one in.
    pub(crate) fn secrets(&self) -> Vec<(&'static str, String)> {
        let login = || vec![("username", USER.to_owned()), ("password", PASSWORD.to_owned())];
        match self.kind {
            Kind::NbdUnix | Kind::Http | Kind::Iscsi => Vec::new(),
            Kind::HttpAuth | Kind::IscsiChap => login(),
            Kind::Nbds => {
                let keys = fs::read_to_string(self.path("keys.psk")).unwrap();
                let (user, key) = keys.trim().split_once(':').unwrap();
                vec![("username", user.to_owned()), ("psk", key.to_owned())]
            }
            Kind::Ssh => {
                vec![("ssh-privatekey", fs::read_to_string(self.path("key")).unwrap())]
            }
        }
    }

    /// What lets nobody in, though it looks as if it did.
    pub(crate) fn wrong_secrets(&self) -> Vec<(&'static str, String)> {
        let mut secrets = self.secrets();
        for (key, value) in &mut secrets {
            match *key {
                "password" => "wrong-password".clone_into(value),
                "psk" => *value = "00".repeat(32),
                "ssh-privatekey" => *value = self.new_key("stranger"),
                _ => {}
            }
        }
        secrets
    }

    /// The file of the disk.
    pub(crate) fn disk(&self) -> PathBuf {
        self.path("disk")
    }

    /// What the disk holds at a sector by now.
    pub(crate) fn sector(&self, number: u64) -> Vec<u8> {
        let mut data = vec![0; 512];
        File::open(self.disk()).unwrap().read_exact_at(&mut data, number * 512).unwrap();
        data
    }

    /// Cuts or enlarges the disk, also as the server sees it.
    pub(crate) async fn resize(&mut self, size: u64) {
        File::options().write(true).open(self.disk()).unwrap().set_len(size).unwrap();
        self.kill();
        self.launch().await;
    }

    /// Lets it hang: it is there, and says nothing.
    pub(crate) fn stop(&self) {
        self.all().into_iter().for_each(|pid| signal(pid, "STOP"));
    }

    /// Lets it go on.
    pub(crate) fn go_on(&self) {
        self.all().into_iter().for_each(|pid| signal(pid, "CONT"));
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        let all = self.all();
        for pid in &all {
            signal(*pid, "KILL");
        }
        if let Some(mut process) = self.process.take() {
            process.wait().unwrap();
        }
        while all.iter().any(|pid| is_alive(*pid)) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Starts it again, at the same place.
    pub(crate) async fn launch(&mut self) {
        let is_new = self.port == 0;
        loop {
            if is_new {
                self.port = free_port();
            }
            let log = File::options().append(true).create(true).open(self.path("log")).unwrap();
            let mut command = self.command();
            let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
            self.process = Some(command.process_group(0).spawn().unwrap());
            if self.serves().await {
                return;
            }
            // Somebody else took the port in the meantime.
            assert!(is_new, "{:?}", fs::read_to_string(self.path("log")));
        }
    }

    /// Waits until it serves, or has ended.
    async fn serves(&mut self) -> bool {
        let mut has_ended = false;
        until("a server listens", async || {
            let process = self.process.as_mut().unwrap();
            has_ended = process.try_wait().unwrap().is_some();
            has_ended || self.listens()
        })
        .await;
        if !has_ended && matches!(self.kind, Kind::Iscsi | Kind::IscsiChap) {
            self.make_targets().await;
        }
        !has_ended
    }

    fn listens(&self) -> bool {
        match self.kind {
            Kind::NbdUnix => UnixStream::connect(self.path("nbd.sock")).is_ok(),
            _ => TcpStream::connect(("127.0.0.1", self.port)).is_ok(),
        }
    }

    fn command(&self) -> Command {
        match self.kind {
            Kind::NbdUnix => {
                let mut command = self.nbd();
                command.arg("-k").arg(self.path("nbd.sock"));
                command
            }
            Kind::Nbds => {
                let keys = format!("dir={}", self.dir.path().display());
                let mut command = self.nbd();
                command.args(["-b", "127.0.0.1", "-p", &self.port.to_string()]);
                command.arg("--object").arg(format!("tls-creds-psk,id=tls,endpoint=server,{keys}"));
                command.args(["--tls-creds", "tls"]);
                command
            }
            Kind::Http | Kind::HttpAuth => {
                self.write("nginx.conf", &self.nginx_conf());
                let mut command = Command::new(part("bin/nginx"));
                command.args(["-e", "stderr", "-c"]).arg(self.path("nginx.conf"));
                command
            }
            Kind::Iscsi | Kind::IscsiChap => {
                let mut command = Command::new(part("bin/tgtd"));
                command
                    .args(["-f", "-C", "1", "--iscsi"])
                    .arg(format!("portal=127.0.0.1:{}", self.port));
                command.env("TGT_IPC_SOCKET", self.path("tgt"));
                command
            }
            Kind::Ssh => {
                self.write("sshd.conf", &self.sshd_conf());
                // It wants a user and a directory of its own, which a machine without one has not.
                let script = format!(
                    "mount -t tmpfs none /run && mkdir -m 755 /run/sshd && \
                     mount --bind {} /etc/passwd && exec {} -D -e -f {}",
                    self.text("passwd"),
                    part("bin/sshd").display(),
                    self.text("sshd.conf"),
                );
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-c", &script]);
                command
            }
        }
    }

    fn nbd(&self) -> Command {
        let mut command = Command::new(part("bin/qemu-nbd"));
        command.args(["-f", "raw", "-t", "-e", "16", "-x", "disk"]).arg(self.disk());
        command
    }

    fn nginx_conf(&self) -> String {
        let dir = self.dir.path().display();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {dir}/{name};\n"))
            .concat();
        format!(
            "daemon off; master_process off; pid {dir}/pid; error_log stderr;\n\
             events {{ worker_connections 64; }}\n\
             http {{\n access_log {dir}/access;\n {temporary}\
             server {{ listen 127.0.0.1:{port}; root {dir};\n\
             location /auth/ {{ alias {dir}/; auth_basic x; auth_basic_user_file {dir}/users; }}\n\
             location /whole/ {{ alias {dir}/; max_ranges 0; }} }} }}\n",
            port = self.port
        )
    }

    fn sshd_conf(&self) -> String {
        let dir = self.dir.path().display();
        let [session, auth] =
            ["sshd-session", "sshd-auth"].map(|name| part(&format!("servers/usr/bin/{name}")));
        format!(
            "ListenAddress 127.0.0.1:{}\nHostKey {dir}/host\nPidFile none\n\
             AuthorizedKeysFile {dir}/key.pub\nStrictModes no\nUsePAM no\n\
             PermitRootLogin prohibit-password\nPasswordAuthentication no\n\
             KbdInteractiveAuthentication no\nPerSourcePenalties no\nSubsystem sftp internal-sftp\n\
             SshdSessionPath {}\nSshdAuthPath {}\n",
            self.port,
            session.display(),
            auth.display(),
        )
    }

    /// Makes what lets one in.
    fn prepare(&self) {
        match self.kind {
            Kind::Nbds => self.write("keys.psk", &format!("{USER}:{}\n", "5e".repeat(32))),
            Kind::HttpAuth => self.write("users", &format!("{USER}:{{PLAIN}}{PASSWORD}\n")),
            Kind::Ssh => {
                self.new_key("host");
                self.new_key("key");
                let sshd = "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin";
                self.write("passwd", &format!("root:x:0:0:root:/root:/bin/sh\n{sshd}\n"));
            }
            Kind::NbdUnix | Kind::Http | Kind::Iscsi | Kind::IscsiChap => {}
        }
    }

    fn new_key(&self, name: &str) -> String {
        let path = self.path(name);
        _ = fs::remove_file(&path); // or it would ask
        run(Command::new(part("bin/ssh-keygen"))
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(&path));
        fs::read_to_string(path).unwrap()
    }

    async fn make_targets(&self) {
        let disk = self.text("disk");
        let open = "iqn.2026-11.io.qsd-csi:disk";
        let chap = "iqn.2026-11.io.qsd-csi:chap";
        for words in [
            &["new", "--mode", "target", "--tid", "1", "-T", open][..],
            &["new", "--mode", "logicalunit", "--tid", "1", "--lun", "1", "-b", &disk],
            &["bind", "--mode", "target", "--tid", "1", "-I", "ALL"],
            &["new", "--mode", "target", "--tid", "2", "-T", chap],
            &["new", "--mode", "logicalunit", "--tid", "2", "--lun", "1", "-b", &disk],
            &["bind", "--mode", "target", "--tid", "2", "-I", "ALL"],
            &["new", "--mode", "account", "--user", USER, "--password", PASSWORD],
            &["bind", "--mode", "account", "--tid", "2", "--user", USER],
        ] {
            until("tgtd does as told", async || {
                let mut command = Command::new(part("bin/tgtadm"));
                command.env("TGT_IPC_SOCKET", self.path("tgt"));
                command.args(["-C", "1", "--lld", "iscsi", "--op"]).args(words);
                command.stderr(Stdio::null()).status().unwrap().success()
            })
            .await;
        }
    }

    /// The processes that it is made of, as far as they are there.
    fn all(&self) -> Vec<i32> {
        let Some(process) = &self.process else { return Vec::new() };
        let mut all = vec![i32::try_from(process.id()).unwrap()];
        let parent_of = |pid: i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')').next()?.split(' ').nth(2)?.parse::<i32>().ok()
        };
        let mut next = 0;
        while let Some(parent) = all.get(next).copied() {
            all.extend(processes(|pid| parent_of(pid) == Some(parent)));
            next += 1;
        }
        all
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        File::create(self.path(name)).unwrap().write_all(text.as_bytes()).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.path("log")).unwrap_or_default();
            eprintln!("{:?}:\n{log}", self.kind);
        }
        self.kill();
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}
