//! Access modes: who may have a volume at the same time, and who only reads it.

use crate::{
    copies::Source,
    harness::{Driver, create_request, loops_below, mount, mounts_below, names, signal, until},
    remote::{
        self,
        server::{Kind, Server, sector},
    },
    vm::Vm,
};
use qsd_csi::csi::pb::csi::{
    self as pb, VolumeCapability,
    volume_capability::{AccessType, BlockVolume, MountVolume, access_mode::Mode},
};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::fs::{FileExt as _, FileTypeExt as _},
    path::{Path, PathBuf},
    process::Command,
};
use tonic::{Code, Status};

/// xfs takes no less than 300 MiB.
const SIZE: i64 = 512 << 20;

/// What is written to what is to be read.
const TEXT: &[u8] = b"to be read";

/// The forms in which a volume is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Socket,
    Block,
    Ext4,
    Xfs,
}

use Form::{Block, Ext4, Socket, Xfs};

impl Form {
    fn capability(self, mode: Mode) -> VolumeCapability {
        let filesystem = |name: &str| {
            AccessType::Mount(MountVolume { fs_type: name.into(), ..MountVolume::default() })
        };
        let access_type = Some(match self {
            Socket => return mount(mode),
            Block => AccessType::Block(BlockVolume {}),
            Ext4 => filesystem("ext4"),
            Xfs => filesystem("xfs"),
        });
        VolumeCapability { access_type, ..mount(mode) }
    }

    fn publish(self) -> (String, String) {
        let form = if self.is_filesystem() { "filesystem" } else { "vhost-user" };
        ("publish".to_owned(), form.to_owned())
    }

    fn is_filesystem(self) -> bool {
        matches!(self, Ext4 | Xfs)
    }
}

/// How a volume is published.
#[derive(Clone, Copy, Debug)]
struct Wish {
    form: Form,
    mode: Mode,
    target: &'static str,
    readonly: bool,
}

fn wish(form: Form, mode: Mode) -> Wish {
    Wish { form, mode, target: "first", readonly: false }
}

impl Wish {
    fn at(self, target: &'static str) -> Self {
        Self { target, ..self }
    }

    fn readonly(self) -> Self {
        Self { readonly: true, ..self }
    }
}

impl Driver {
    async fn make(
        &self,
        name: &str,
        form: Form,
        modes: &[Mode],
        source: Option<&str>,
    ) -> Result<(), Status> {
        let request = pb::CreateVolumeRequest {
            volume_capabilities: modes.iter().map(|mode| form.capability(*mode)).collect(),
            parameters: [form.publish()].into(),
            volume_content_source: source.map(|id| Source::Snapshot(id.to_owned()).message()),
            ..create_request(name, SIZE)
        };
        self.controller().create_volume(request).await.map(drop)
    }

    async fn stage_for(&self, name: &str, form: Form, mode: Mode) -> Result<(), Status> {
        let mut request = self.stage_request(name);
        request.volume_capability = Some(form.capability(mode));
        fs::create_dir_all(&request.staging_target_path).unwrap();
        self.node().node_stage_volume(request).await.map(drop)
    }

    async fn publish_for(&self, name: &str, wish: Wish) -> Result<PathBuf, Status> {
        let target = self.path(&format!("{name}-{}", wish.target));
        let request = pb::NodePublishVolumeRequest {
            target_path: target.display().to_string(),
            volume_capability: Some(wish.form.capability(wish.mode)),
            readonly: wish.readonly,
            ..self.publish_request(name)
        };
        self.node().node_publish_volume(request).await?;
        Ok(target)
    }

    async fn unpublish_from(&self, name: &str, target: &str) -> Result<(), Status> {
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: name.into(),
            target_path: self.text(&format!("{name}-{target}")),
        };
        self.node().node_unpublish_volume(request).await.map(drop)
    }

    /// Every byte of every layer, by the name of its file, as a digest.
    fn layers(&self) -> BTreeMap<String, String> {
        let dir = self.path("pool/layers");
        let digest = |name: String| {
            let output = Command::new("sha256sum").arg(dir.join(&name)).output().unwrap();
            (name, String::from_utf8(output.stdout).unwrap())
        };
        names(&dir).into_iter().map(digest).collect()
    }

    /// A snapshot of a volume with something on it, taken while it is in use: the log of a file
    /// system is not replayed.
    async fn original(&self, form: Form) {
        self.make("original", form, &[Mode::SingleNodeWriter], None).await.unwrap();
        let form = if form == Socket { Block } else { form };
        self.stage_for("original", form, Mode::SingleNodeWriter).await.unwrap();
        let target = self.publish_for("original", wish(form, Mode::SingleNodeWriter)).await;
        let target = target.unwrap();
        let file = if form.is_filesystem() {
            fs::create_dir(target.join("dir")).unwrap();
            fs::File::create(target.join("dir/file"))
        } else {
            fs::File::options().write(true).open(&target)
        };
        let mut file = file.unwrap();
        file.write_all(TEXT).unwrap();
        file.sync_all().unwrap();
        self.snapshot("snap", "original").await.unwrap();
        drop(file);
        self.unpublish_from("original", "first").await.unwrap();
        self.unstage("original").await.unwrap();
    }

    async fn forget_original(&self) {
        self.delete("original").await.unwrap();
        self.delete_snapshot("snap").await.unwrap();
        self.assert_empty().await;
    }
}

fn code(outcome: Result<PathBuf, Status>) -> Code {
    outcome.map_or_else(|error| error.code(), |_| Code::Ok)
}

fn read_from(target: &Path, form: Form) -> Vec<u8> {
    let path = if form.is_filesystem() { target.join("dir/file") } else { target.to_owned() };
    let mut text = vec![0; TEXT.len()];
    fs::File::open(path).unwrap().read_exact(&mut text).unwrap();
    text
}

/// What it says to a write, and to all that would have the kernel write.
fn write_to(target: &Path, form: Form) -> io::Error {
    if form.is_filesystem() {
        let outcomes = [
            fs::File::create(target.join("new")).map(drop),
            fs::File::options().append(true).open(target.join("dir/file")).map(drop),
            fs::remove_file(target.join("dir/file")),
            fs::set_permissions(target, std::os::unix::fs::PermissionsExt::from_mode(0o777)),
        ];
        let errors: Vec<_> = outcomes.into_iter().map(Result::unwrap_err).collect();
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::ReadOnlyFilesystem));
        return errors.into_iter().next().unwrap();
    }
    let written = fs::File::options().write(true).open(target);
    written.and_then(|file| file.write_all_at(b"x", 0).and_then(|()| file.sync_all())).unwrap_err()
}

const MODES: [Mode; 8] = [
    Mode::Unknown,
    Mode::SingleNodeWriter,
    Mode::SingleNodeReaderOnly,
    Mode::MultiNodeReaderOnly,
    Mode::MultiNodeSingleWriter,
    Mode::MultiNodeMultiWriter,
    Mode::SingleNodeSingleWriter,
    Mode::SingleNodeMultiWriter,
];

/// The table of the spec (`NodePublishVolume`), and what there is besides, for every mode and form.
#[tokio::test(flavor = "multi_thread")]
async fn every_mode_in_every_form_is_served_or_refused_with_its_name() {
    let driver = Driver::start().await;
    for form in [Socket, Block, Ext4, Xfs] {
        driver.original(form).await;
        for mode in MODES {
            let shared_file_system = form.is_filesystem() && mode == Mode::MultiNodeMultiWriter;
            let is_served =
                !matches!(mode, Mode::Unknown | Mode::MultiNodeSingleWriter) && !shared_file_system;
            assert_told_alike(&driver, form, mode, is_served).await;
            let made = driver.make("pvc-1", form, &[mode], Some("snap")).await;
            if !is_served {
                let refused = made.unwrap_err();
                assert_eq!(refused.code(), Code::InvalidArgument, "{form:?} {refused}");
                assert!(refused.message().contains(mode.as_str_name()), "{refused}");
                continue;
            }
            made.unwrap();
            assert_published(&driver, form, mode).await;
            driver.delete("pvc-1").await.unwrap();
        }
        driver.forget_original().await;
    }
}

async fn assert_told_alike(driver: &Driver, form: Form, mode: Mode, is_served: bool) {
    let volume_capabilities = vec![form.capability(mode)];
    let request = pb::ValidateVolumeCapabilitiesRequest {
        volume_id: "original".into(),
        volume_capabilities: volume_capabilities.clone(),
        ..Default::default()
    };
    let told = driver.controller().validate_volume_capabilities(request).await;
    let told = told.unwrap().into_inner();
    assert_eq!(told.confirmed.is_some(), is_served, "{form:?} {mode:?}");
    assert_eq!(told.message.contains(mode.as_str_name()), !is_served, "{}", told.message);
    let request = pb::GetCapacityRequest {
        volume_capabilities,
        parameters: [form.publish()].into(),
        ..Default::default()
    };
    let room = driver.controller().get_capacity(request).await.unwrap().into_inner();
    assert_eq!(room.available_capacity > 0, is_served, "{form:?} {mode:?}");
}

async fn assert_published(driver: &Driver, form: Form, mode: Mode) {
    let what = format!("{form:?} {mode:?}");
    let wish = wish(form, mode);
    driver.stage_for("pvc-1", form, mode).await.unwrap();
    driver.stage_for("pvc-1", form, mode).await.unwrap();
    let other = if mode == Mode::SingleNodeWriter {
        Mode::MultiNodeReaderOnly
    } else {
        Mode::SingleNodeWriter
    };
    let otherwise = driver.stage_for("pvc-1", form, other).await.unwrap_err();
    assert_eq!(otherwise.code(), Code::AlreadyExists, "{what}: {otherwise}");
    for name in [mode.as_str_name(), other.as_str_name()] {
        assert!(otherwise.message().contains(name), "{otherwise}");
    }
    let publish = async |wish| code(driver.publish_for("pvc-1", wish).await);
    let not_staged_so = publish(Wish { mode: other, ..wish }).await;
    assert_eq!(not_staged_so, Code::FailedPrecondition, "{what}");
    for _ in 0..2 {
        assert_eq!(publish(wish).await, Code::Ok, "{what}");
    }
    assert_eq!(publish(wish.readonly()).await, Code::AlreadyExists, "{what}");
    assert_eq!(publish(Wish { mode: other, ..wish }).await, Code::AlreadyExists, "{what}");
    let several =
        [Mode::SingleNodeMultiWriter, Mode::MultiNodeReaderOnly, Mode::MultiNodeMultiWriter];
    let second = if several.contains(&mode) { Code::Ok } else { Code::FailedPrecondition };
    assert_eq!(publish(wish.at("second")).await, second, "{what}");
    let reads = matches!(mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly);
    let targets = ["first", "second"].map(|name| driver.path(&format!("pvc-1-{name}")));
    for target in targets.iter().filter(|target| target.exists()) {
        match form {
            Socket => {
                let socket = target.join("vhost.sock");
                assert!(fs::metadata(socket).unwrap().file_type().is_socket(), "{what}");
            }
            Block | Ext4 | Xfs => {
                assert_eq!(read_from(target, form), TEXT, "{what}");
                if reads {
                    write_to(target, form);
                }
            }
        }
    }
    for name in ["second", "first", "first"] {
        driver.unpublish_from("pvc-1", name).await.unwrap();
    }
    driver.unstage("pvc-1").await.unwrap();
    assert_eq!(mounts_below(driver.scratch()), Vec::<PathBuf>::new(), "{what}");
    assert_eq!(loops_below(driver.scratch()), [""; 0], "{what}");
    assert_eq!(names(&driver.path("run")).iter().filter(|name| name.len() == 32).count(), 0);
}

/// What a guest says to a write to its disk, and to reading what is on it.
async fn assert_reads_only(vm: &mut Vm) {
    assert_eq!(vm.run("cat /sys/block/vda/ro").await.trim(), "1");
    let text = format!("dd if=/dev/vda bs=1 count={} 2>/dev/null; echo", TEXT.len());
    assert_eq!(vm.run(&text).await.trim_end().as_bytes(), TEXT);
    let (status, said) = vm.try_run("dd if=/dev/zero of=/dev/vda bs=4k count=1 2>&1").await;
    assert!(status != 0 && said.contains("Operation not permitted"), "{said}");
}

/// Reads the begin of a disk again and again, as long as all is as it was.
const READER: &str = "sum() { dd if=/dev/vda bs=1M count=16 2>/dev/null | md5sum; }; was=$(sum); \
    echo READS; while [ ! -e /tmp/end ]; do echo 3 > /proc/sys/vm/drop_caches; \
    [ \"$(sum)\" = \"$was\" ] || exit 1; done";

#[tokio::test(flavor = "multi_thread")]
async fn several_vms_read_a_volume_at_once_whatever_dies() {
    let mut driver = Driver::start().await;
    let mode = Mode::MultiNodeReaderOnly;
    driver.original(Socket).await;
    let request = pb::CreateVolumeRequest {
        volume_capabilities: vec![mount(mode)],
        volume_content_source: Some(Source::Snapshot("snap".into()).message()),
        capacity_range: None,
        ..create_request("pvc-1", 0)
    };
    driver.controller().create_volume(request).await.unwrap();
    let before = driver.layers();
    driver.stage_for("pvc-1", Socket, mode).await.unwrap();
    let mut sockets = Vec::new();
    for target in ["first", "second", "third"] {
        let target = driver.publish_for("pvc-1", wish(Socket, mode).at(target)).await.unwrap();
        sockets.push(target.join("vhost.sock"));
    }
    let (mut first, mut second) = tokio::join!(Vm::boot(&sockets[0]), Vm::boot(&sockets[1]));
    for vm in [&mut first, &mut second] {
        assert_reads_only(vm).await;
    }
    let jobs = [first.start(READER).await, second.start(READER).await];
    first.wait_for(&jobs[0], "READS").await;
    second.wait_for(&jobs[1], "READS").await;
    for round in 0..4 {
        let pid = driver.daemons().await[0];
        match round {
            0 | 3 => signal(pid, "KILL"),
            1 => driver.upgrade("pvc-1").await.unwrap(),
            _ => driver.restart().await,
        }
        until("it is served", async || match driver.daemons().await[..] {
            [now] => (now != pid) == (round != 2),
            _ => false,
        })
        .await;
        // One more comes, and one goes, beside those that are there.
        let target = driver.publish_for("pvc-1", wish(Socket, mode).at("fourth")).await.unwrap();
        let mut other = Vm::boot(&target.join("vhost.sock")).await;
        assert_reads_only(&mut other).await;
        other.power_off().await;
        driver.unpublish_from("pvc-1", "fourth").await.unwrap();
    }
    for (vm, job) in [&mut first, &mut second].into_iter().zip(jobs) {
        vm.run("touch /tmp/end").await;
        let (status, said) = vm.collect(job).await;
        assert_eq!(status, 0, "{said}");
        vm.assert_no_errors().await;
        assert_reads_only(vm).await;
    }
    first.power_off().await;
    driver.unpublish_from("pvc-1", "first").await.unwrap();
    assert_reads_only(&mut second).await;
    second.power_off().await;
    for target in ["second", "third"] {
        driver.unpublish_from("pvc-1", target).await.unwrap();
    }
    driver.unstage("pvc-1").await.unwrap();
    assert_eq!(driver.layers(), before);
    driver.delete("pvc-1").await.unwrap();
    driver.forget_original().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_only_read_is_not_written_by_anybody() {
    let mut driver = Driver::start().await;
    let mode = Mode::MultiNodeReaderOnly;
    for form in [Block, Ext4, Xfs] {
        driver.original(form).await;
        driver.make("pvc-1", form, &[mode], Some("snap")).await.unwrap();
        let before = driver.layers();
        driver.stage_for("pvc-1", form, mode).await.unwrap();
        let mut targets = Vec::new();
        for target in ["first", "second"] {
            targets.push(driver.publish_for("pvc-1", wish(form, mode).at(target)).await.unwrap());
        }
        let assert_reads_only = || {
            for target in &targets {
                assert_eq!(read_from(target, form), TEXT, "{form:?}");
                let error = write_to(target, form);
                let expected = [ErrorKind::ReadOnlyFilesystem, ErrorKind::PermissionDenied];
                assert!(expected.contains(&error.kind()), "{form:?} {error}");
            }
        };
        assert_reads_only();
        if form == Block {
            let told = Command::new("blockdev").arg("--getro").arg(&targets[1]).output().unwrap();
            assert_eq!(String::from_utf8(told.stdout).unwrap().trim(), "1");
        }
        if form == Ext4 {
            let layers = driver.path("pool/layers");
            let has_log = names(&layers).into_iter().any(|name| {
                let told = Command::new("dumpe2fs").arg("-h").arg(layers.join(name)).output();
                String::from_utf8_lossy(&told.unwrap().stdout).contains("needs_recovery")
            });
            assert!(has_log, "there is something to replay");
        }
        let [device] = &loops_below(driver.scratch())[..] else { panic!("one device") };
        let told = fs::read_to_string(format!("/sys/block/{device}/ro")).unwrap();
        assert_eq!(told.trim() == "1", form == Block, "a file system may replay its log");
        driver.restart().await;
        assert_reads_only();
        let request = pb::NodeExpandVolumeRequest {
            volume_id: "pvc-1".into(),
            volume_path: targets[0].display().to_string(),
            capacity_range: Some(pb::CapacityRange { required_bytes: SIZE, limit_bytes: 0 }),
            ..Default::default()
        };
        driver.node().node_expand_volume(request).await.unwrap();
        let pid = driver.daemons().await[0];
        signal(pid, "KILL");
        until(
            "it is served again",
            async || matches!(driver.daemons().await[..], [now] if now != pid),
        )
        .await;
        until("it is published again", async || {
            let mut outcomes = vec![driver.stage_for("pvc-1", form, mode).await];
            for target in ["first", "second"] {
                let published = driver.publish_for("pvc-1", wish(form, mode).at(target)).await;
                outcomes.push(published.map(drop));
            }
            outcomes.iter().all(Result::is_ok)
        })
        .await;
        assert_reads_only();
        for target in ["first", "second"] {
            driver.unpublish_from("pvc-1", target).await.unwrap();
        }
        driver.unstage("pvc-1").await.unwrap();
        assert_eq!(driver.layers(), before, "{form:?}");
        driver.delete("pvc-1").await.unwrap();
        driver.forget_original().await;
    }
}

#[tokio::test]
async fn nothing_is_made_for_readers_of_a_blank_volume() {
    let driver = Driver::start().await;
    for form in [Ext4, Xfs] {
        for mode in [Mode::SingleNodeReaderOnly, Mode::MultiNodeReaderOnly] {
            driver.make("pvc-1", form, &[mode], None).await.unwrap();
            let before = driver.layers();
            let refused = driver.stage_for("pvc-1", form, mode).await.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
            for word in ["volume_capability", "pvc-1", mode.as_str_name(), "file system"] {
                assert!(refused.message().contains(word), "{refused}");
            }
            assert_eq!(driver.layers(), before);
            driver.delete("pvc-1").await.unwrap();
            driver.assert_empty().await;
        }
    }
    driver.original(Ext4).await;
    driver.make("pvc-1", Ext4, &[Mode::MultiNodeReaderOnly], Some("snap")).await.unwrap();
    let refused = driver.stage_for("pvc-1", Xfs, Mode::MultiNodeReaderOnly).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("ext4"), "{refused}");
    driver.delete("pvc-1").await.unwrap();
    driver.forget_original().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn some_only_read_what_others_write() {
    let driver = Driver::start().await;
    let mode = Mode::SingleNodeMultiWriter;
    for form in [Ext4, Xfs] {
        driver.make("pvc-1", form, &[mode], None).await.unwrap();
        driver.stage_for("pvc-1", form, mode).await.unwrap();
        let writes = driver.publish_for("pvc-1", wish(form, mode)).await.unwrap();
        fs::create_dir(writes.join("dir")).unwrap();
        fs::File::create(writes.join("dir/file")).unwrap().write_all(TEXT).unwrap();
        for _ in 0..2 {
            let reads = wish(form, mode).at("second").readonly();
            let reads = driver.publish_for("pvc-1", reads).await.unwrap();
            assert_eq!(read_from(&reads, form), TEXT);
            write_to(&reads, form);
        }
        let again = code(driver.publish_for("pvc-1", wish(form, mode).at("second")).await);
        assert_eq!(again, Code::AlreadyExists);
        fs::File::create(writes.join("more")).unwrap();
        for target in ["second", "first"] {
            driver.unpublish_from("pvc-1", target).await.unwrap();
        }
        driver.unstage("pvc-1").await.unwrap();
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
    driver.make("pvc-1", Block, &[mode], None).await.unwrap();
    driver.stage_for("pvc-1", Block, mode).await.unwrap();
    let refused = driver.publish_for("pvc-1", wish(Block, mode).readonly()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    for word in ["readonly", "pvc-1", "SINGLE_NODE_MULTI_WRITER", "MULTI_NODE_READER_ONLY"] {
        assert!(refused.message().contains(word), "{refused}");
    }
    assert!(!driver.path("pvc-1-first").exists());
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// Each has a disk of its own, over the same daemon; the volume changes under both.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_reads_what_another_writes() {
    let mut driver = Driver::start().await;
    let mode = Mode::MultiNodeMultiWriter;
    driver.make("pvc-1", Socket, &[mode], None).await.unwrap();
    driver.stage_for("pvc-1", Socket, mode).await.unwrap();
    let mut sockets = Vec::new();
    for wish in [
        wish(Socket, mode),
        wish(Socket, mode).at("second").readonly(),
        wish(Socket, mode).at("third").readonly(),
    ] {
        let target = driver.publish_for("pvc-1", wish).await.unwrap();
        sockets.push(target.join("vhost.sock"));
    }
    let (mut writer, mut reader) = tokio::join!(Vm::boot(&sockets[0]), Vm::boot(&sockets[1]));
    assert_eq!(reader.run("cat /sys/block/vda/ro").await.trim(), "1");
    let mut size = SIZE;
    for round in 0..6 {
        match round {
            0 => driver.snapshot("snap", "pvc-1").await.unwrap(),
            1 => driver.upgrade("pvc-1").await.unwrap(),
            2 => {
                size = 2 * SIZE;
                driver.expand("pvc-1", size.try_into().unwrap()).await.unwrap();
            }
            3 => driver.restart().await,
            4 => driver.modify("pvc-1", &[("iops", "5000")]).await.unwrap(),
            _ => {
                driver.delete_snapshot("snap").await.unwrap();
                signal(driver.daemons().await[0], "KILL");
            }
        }
        let write = format!("echo round {round} | dd of=/dev/vda bs=4k seek={round} 2>&1; sync");
        writer.run(&write).await;
        for vm in [&mut writer, &mut reader] {
            let read = format!(
                "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=4k skip={round} count=1 \
                 2>/dev/null | head -n 1"
            );
            assert_eq!(vm.run(&read).await.trim(), format!("round {round}"));
            let sectors = vm.run("cat /sys/block/vda/size").await;
            assert_eq!(sectors.trim().parse::<i64>().unwrap(), size / 512, "{round}");
        }
    }
    let (status, _) = reader.try_run("dd if=/dev/zero of=/dev/vda bs=4k count=1").await;
    assert_ne!(status, 0);
    for mut vm in [reader, writer] {
        vm.assert_no_errors().await;
        vm.power_off().await;
    }
    for target in ["first", "second", "third"] {
        driver.unpublish_from("pvc-1", target).await.unwrap();
    }
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// Both have the same device, or the same socket, where the relay lets one VM in at a time.
#[tokio::test(flavor = "multi_thread")]
async fn what_several_may_write_is_published_to_all_of_them() {
    let driver = Driver::start().await;
    let mode = Mode::MultiNodeMultiWriter;
    driver.make("pvc-1", Block, &[mode], None).await.unwrap();
    driver.stage_for("pvc-1", Block, mode).await.unwrap();
    let first = driver.publish_for("pvc-1", wish(Block, mode)).await.unwrap();
    let second = driver.publish_for("pvc-1", wish(Block, mode).at("second")).await.unwrap();
    fs::File::options().write(true).open(&first).unwrap().write_all(TEXT).unwrap();
    assert_eq!(read_from(&second, Block), TEXT, "one device, with one cache");
    for target in ["first", "second"] {
        driver.unpublish_from("pvc-1", target).await.unwrap();
    }
    driver.unstage("pvc-1").await.unwrap();
    driver.stage_for("pvc-1", Socket, mode).await.unwrap();
    let first = driver.publish_for("pvc-1", wish(Socket, mode)).await.unwrap();
    let second = driver.publish_for("pvc-1", wish(Socket, mode).at("second")).await.unwrap();
    let vm = Vm::boot(&first.join("vhost.sock")).await;
    let mut other = std::os::unix::net::UnixStream::connect(second.join("vhost.sock")).unwrap();
    assert_eq!(other.read(&mut [0]).unwrap(), 0, "the second one is let go");
    vm.power_off().await;
    let vm = Vm::boot(&second.join("vhost.sock")).await;
    vm.power_off().await;
    for target in ["first", "second"] {
        driver.unpublish_from("pvc-1", target).await.unwrap();
    }
    driver.unstage("pvc-1").await.unwrap();
    driver.delete("pvc-1").await.unwrap();
    driver.assert_empty().await;
}

/// Names and limits may change; what would write is refused until it is unstaged.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_only_read_can_be_copied_and_not_grown() {
    let mut driver = Driver::start().await;
    let mode = Mode::MultiNodeReaderOnly;
    for form in [Socket, Block, Ext4] {
        driver.original(form).await;
        driver.make("pvc-1", form, &[mode], Some("snap")).await.unwrap();
        driver.stage_for("pvc-1", form, mode).await.unwrap();
        let target = driver.publish_for("pvc-1", wish(form, mode)).await.unwrap();
        let before = driver.layers();
        let pids = driver.daemons().await;
        driver.snapshot("snap-2", "pvc-1").await.unwrap();
        driver.modify("pvc-1", &[("iops", "5000")]).await.unwrap();
        driver.make("pvc-2", form, &[mode], Some("snap-2")).await.unwrap();
        driver.expand("pvc-1", SIZE.try_into().unwrap()).await.unwrap();
        let refused = driver.expand("pvc-1", (2 * SIZE).try_into().unwrap()).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        for word in ["pvc-1", "MULTI_NODE_READER_ONLY", "unstage"] {
            assert!(refused.message().contains(word), "{refused}");
        }
        let refused = driver.delete("pvc-1").await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert_eq!(driver.daemons().await, pids, "{form:?}: whoever reads goes on");
        driver.restart().await;
        assert_eq!(driver.daemons().await, pids, "{form:?}: it is as the records say");
        for (name, digest) in before {
            assert_eq!(driver.layers()[&name], digest, "{form:?}");
        }
        if form != Socket {
            assert_eq!(read_from(&target, form), TEXT, "{form:?}");
        }
        driver.stage_for("pvc-2", form, mode).await.unwrap();
        let copy = driver.publish_for("pvc-2", wish(form, mode)).await.unwrap();
        if form != Socket {
            assert_eq!(read_from(&copy, form), TEXT, "{form:?}");
        }
        for name in ["pvc-1", "pvc-2"] {
            driver.unpublish_from(name, "first").await.unwrap();
            driver.unstage(name).await.unwrap();
        }
        driver.expand("pvc-1", (2 * SIZE).try_into().unwrap()).await.unwrap();
        for name in ["pvc-1", "pvc-2"] {
            driver.delete(name).await.unwrap();
        }
        driver.delete_snapshot("snap-2").await.unwrap();
        driver.forget_original().await;
    }
}

/// Merges go on below the layer that is read.
#[tokio::test(flavor = "multi_thread")]
async fn layers_are_merged_below_readers() {
    let driver = Driver::start().await;
    let mode = Mode::MultiNodeReaderOnly;
    for form in [Socket, Block, Ext4] {
        driver.original(form).await;
        driver.make("pvc-1", form, &[mode], Some("snap")).await.unwrap();
        let snapshots = ["one", "two", "three"];
        for (round, name) in (1_u8..).zip(snapshots) {
            if form == Block {
                // So that some are merged upwards, and some downwards.
                driver.stage_for("pvc-1", form, Mode::SingleNodeWriter).await.unwrap();
                let writes = wish(form, Mode::SingleNodeWriter);
                let target = driver.publish_for("pvc-1", writes).await.unwrap();
                let file = fs::File::options().write(true).open(target).unwrap();
                let length = usize::from(4 - round) << 20;
                file.write_all_at(&vec![round; length], u64::from(round) << 24).unwrap();
                file.sync_all().unwrap();
                drop(file);
                driver.unpublish_from("pvc-1", "first").await.unwrap();
                driver.unstage("pvc-1").await.unwrap();
            }
            driver.snapshot(name, "pvc-1").await.unwrap();
        }
        driver.stage_for("pvc-1", form, mode).await.unwrap();
        let target = driver.publish_for("pvc-1", wish(form, mode)).await.unwrap();
        let (before, pids) = (names(&driver.path("pool/layers")).len(), driver.daemons().await);
        for name in snapshots {
            driver.delete_snapshot(name).await.unwrap();
        }
        let layers = driver.path("pool/layers");
        until("all below is merged", async || names(&layers).len() + 2 == before).await;
        assert_eq!(driver.daemons().await, pids, "{form:?}");
        if form != Socket {
            assert_eq!(read_from(&target, form), TEXT, "{form:?}");
        }
        if form == Block {
            let file = fs::File::open(&target).unwrap();
            for round in 1_u8..=3 {
                let mut byte = [0];
                file.read_exact_at(&mut byte, u64::from(round) << 24).unwrap();
                assert_eq!(byte, [round]);
            }
        }
        driver.unpublish_from("pvc-1", "first").await.unwrap();
        driver.unstage("pvc-1").await.unwrap();
        driver.delete("pvc-1").await.unwrap();
        driver.forget_original().await;
    }
}

/// Neither where the volume is the master, nor where what was read would be kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_is_read_and_nothing_of_it_kept() {
    let driver = Driver::start().await;
    let server = Server::start(Kind::NbdUnix).await;
    let mode = Mode::MultiNodeReaderOnly;
    for copy_mode in ["none", "copy-on-read"] {
        let mut request = remote::on(&server, "pvc-1", &[("copyMode", copy_mode)]);
        request.volume_capabilities = vec![Block.capability(mode)];
        remote::create(&driver, request).await.unwrap();
        let before = driver.layers();
        driver.stage_for("pvc-1", Block, mode).await.unwrap();
        let target = driver.publish_for("pvc-1", wish(Block, mode)).await.unwrap();
        let mut read = vec![0; 512];
        let file = fs::File::open(&target).unwrap();
        for number in [0, 1, 4096] {
            file.read_exact_at(&mut read, number * 512).unwrap();
            assert_eq!(read, sector(number), "{copy_mode}");
        }
        drop(file);
        assert_eq!(write_to(&target, Block).kind(), ErrorKind::PermissionDenied);
        assert_eq!(server.sector(0), sector(0));
        driver.unpublish_from("pvc-1", "first").await.unwrap();
        driver.unstage("pvc-1").await.unwrap();
        assert_eq!(driver.layers(), before, "{copy_mode}");
        driver.delete("pvc-1").await.unwrap();
        driver.assert_empty().await;
    }
}

/// The points that publishing to readers comes past.
pub(crate) const POINTS: [&str; 3] =
    ["node-publish-reader", "node-unpublish-reader", "node-publish-mounted"];

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_while_readers_come_and_go_heals_by_itself() {
    let mut driver = Driver::start().await;
    for (form, mode, points) in [
        (
            Socket,
            Mode::MultiNodeReaderOnly,
            &[
                "node-publish-intent",
                "node-publish-reader",
                "node-publish-directory",
                "node-publish-bound",
                "node-publish-done",
                "node-unpublish-unmounted",
                "node-unpublish-removed",
                "node-unpublish-reader",
            ][..],
        ),
        (Ext4, Mode::SingleNodeMultiWriter, &["node-publish-mounted"]),
    ] {
        for point in points {
            driver.make("pvc-1", form, &[mode], None).await.unwrap();
            driver.stage_for("pvc-1", form, mode).await.unwrap();
            driver.publish_for("pvc-1", wish(form, mode).readonly()).await.unwrap();
            let pids = driver.daemons().await;
            driver.kill();
            driver.launch(&[], Some(point));
            driver.answers().await;
            let second = wish(form, mode).at("second").readonly();
            let published = driver.publish_for("pvc-1", second).await;
            if published.is_ok() {
                driver.unpublish_from("pvc-1", "second").await.unwrap_err();
            }
            assert!(!driver.ended().success(), "{point}");
            driver.launch(&[], None);
            driver.answers().await;
            assert_eq!(driver.daemons().await, pids, "{point}: whoever reads goes on");
            for _ in 0..2 {
                let target = driver.publish_for("pvc-1", second).await.unwrap();
                if form == Socket {
                    let socket = target.join("vhost.sock");
                    std::os::unix::net::UnixStream::connect(socket).unwrap();
                } else {
                    let error = fs::File::create(target.join("new")).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
                }
                driver.unpublish_from("pvc-1", "second").await.unwrap();
            }
            driver.unpublish_from("pvc-1", "first").await.unwrap();
            driver.unstage("pvc-1").await.unwrap();
            driver.delete("pvc-1").await.unwrap();
            driver.assert_empty().await;
        }
    }
}
