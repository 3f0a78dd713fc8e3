//! `SnapshotMetadata` against a comparison of the snapshots byte for byte.

use crate::{
    copies::Source,
    harness::{Dice, Driver, GIB, LIMIT, names, part, until},
    relay::front::{DISCARD, Disk, WRITE_ZEROES},
};
use qsd_csi::{
    csi::pb::{
        csi::{
            BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataDeltaRequest,
        },
        inspect::Layer,
    },
    extents::{Extents, raw_allocation},
};
use serde_json::{Value, json};
use std::{fs::File, ops::Range, os::unix::fs::FileExt as _, process::Command, time::Instant};
use tonic::{Code, Status};

const BLOCK: u64 = 4096;

/// What an overlay allocates at most for a byte that was written.
const CLUSTER: u64 = 128 << 10;

/// A volume and its snapshots, with all that is known of them.
struct Story {
    driver: Driver,
    volume: String,
    size: u64,
    dice: Dice,
    disk: Option<Disk>,
    /// What was touched since the last snapshot.
    touched: Extents,
    snapshots: Vec<Chapter>,
}

/// A snapshot, what it held when it was taken, and what was touched since the one before.
struct Chapter {
    id: String,
    size: u64,
    content: File,
    touched: Extents,
}

impl Story {
    /// Of a volume that no one uses.
    async fn at_rest(seed: u64) -> Self {
        let driver = Driver::start().await;
        let volume = driver.create("pvc-1").await;
        Self::of(driver, volume, seed)
    }

    /// Of a volume that is in use all the time.
    async fn live(seed: u64) -> Self {
        let driver = Driver::start().await;
        let volume = driver.published("pvc-1").await;
        let disk = Some(Disk::open(&driver.socket(&volume)));
        Self { disk, ..Self::of(driver, volume, seed) }
    }

    fn of(driver: Driver, volume: String, seed: u64) -> Self {
        let size = u64::try_from(GIB).unwrap();
        let (dice, touched) = (Dice::new(seed), Extents::default());
        Self { driver, volume, size, dice, disk: None, touched, snapshots: vec![] }
    }

    /// Writes, discards and zeroes here and there, and at both ends.
    async fn go_on(&mut self) {
        let sectors = self.size / 512;
        let mut places = vec![(0, 1), (sectors - 9, 9)];
        for _ in 0..14 {
            // Now and then where something is.
            let room = if self.dice.roll(2) == 0 { 8192 } else { sectors - 1000 };
            let length = 1 + u32::try_from(self.dice.roll(900)).unwrap();
            places.push((self.dice.roll(room), length));
        }
        let mut commands = vec![];
        for (sector, length) in places {
            let start = sector * 512;
            self.touched.push(start..start + u64::from(length) * 512);
            let what = self.dice.roll(5);
            let fill = u8::try_from(1 + self.dice.roll(250)).unwrap();
            match (&mut self.disk, what) {
                (Some(disk), 0) => disk.clear(DISCARD, sector, length),
                (Some(disk), 1) => disk.clear(WRITE_ZEROES, sector, length),
                (Some(disk), _) => disk.fill(sector, length, fill),
                (None, 0) => commands.push(format!("discard {start} {}", length * 512)),
                (None, 1) => commands.push(format!("write -z -u {start} {}", length * 512)),
                (None, _) => commands.push(format!("write -P {fill} {start} {}", length * 512)),
            }
        }
        if self.disk.is_none() {
            self.io(&commands).await;
        }
    }

    /// Has qemu-io work on a volume that no one uses.
    async fn io(&self, commands: &[String]) {
        let volumes = self.driver.inspect().await;
        let volume = volumes.into_iter().find(|one| one.volume_id == self.volume).unwrap();
        let mut command = Command::new(part("bin/qemu-io"));
        command.args(["-t", "unsafe"]);
        for one in commands {
            command.args(["-c", one]);
        }
        run(command.arg(graph(volume.layers)));
    }

    async fn take(&mut self, name: &str) {
        // As any caller does: again, if it was not possible.
        until("the snapshot is taken", async || {
            self.driver.snapshot(name, &self.volume).await.is_ok()
        })
        .await;
        let (id, size, touched) = (name.to_owned(), self.size, std::mem::take(&mut self.touched));
        let content = content(&self.driver, &id).await;
        self.snapshots.push(Chapter { id, size, content, touched });
    }

    async fn expand(&mut self, size: u64) {
        self.driver.expand(&self.volume, size).await.unwrap();
        self.size = size;
    }

    /// Deletes a snapshot, and waits until its layer is merged away.
    async fn forget(&mut self, index: usize) {
        let gone = self.snapshots.remove(index);
        match self.snapshots.get_mut(index) {
            Some(next) => next.touched = next.touched.union(&gone.touched),
            None => self.touched = self.touched.union(&gone.touched),
        }
        self.driver.delete_snapshot(&gone.id).await.unwrap();
        let records = self.driver.path("pool/records/layers");
        let layers = self.snapshots.len() + 1;
        until("layers are merged", async || names(&records).len() == layers).await;
    }

    /// Every snapshot holds what it held, also if its daemon died now. Nothing is missing from what
    /// any two differ in, and from what any one holds.
    async fn check(&self) {
        let nothing = tempfile::tempfile().unwrap();
        for (index, target) in self.snapshots.iter().enumerate() {
            let content = content(&self.driver, &target.id).await;
            let damage = difference(&content, &target.content, target.size);
            assert_eq!(damage, Extents::default(), "{}: its content", target.id);
            let told = allocated(&self.driver, &target.id).await.unwrap();
            let held = difference(&nothing, &target.content, target.size);
            assert_eq!(told.union(&held), told, "{}: what it holds", target.id);
            for (from, base) in self.snapshots[..index].iter().enumerate() {
                let told = delta(&self.driver, &base.id, &target.id).await.unwrap();
                let pair = format!("{} {}", base.id, target.id);
                let differing = difference(&base.content, &target.content, target.size);
                assert_eq!(told.union(&differing), told, "{pair}: what changed");
                let between = self.snapshots[from + 1..=index].iter();
                let touched = between.fold(Extents::default(), |all, one| all.union(&one.touched));
                let touched = rounded(&touched, CLUSTER);
                assert_eq!(touched.union(&told), touched, "{pair}: what did not change");
            }
        }
    }

    /// Removes all, and sees that nothing is left.
    async fn end(mut self) {
        for snapshot in &self.snapshots {
            self.driver.delete_snapshot(&snapshot.id).await.unwrap();
        }
        if self.disk.take().is_some() {
            self.driver.unpublish(&self.volume).await.unwrap();
            self.driver.unstage(&self.volume).await.unwrap();
        }
        self.driver.delete(&self.volume).await.unwrap();
        self.driver.assert_empty().await;
    }
}

/// The blocks in which two snapshots differ.
fn difference(base: &File, target: &File, size: u64) -> Extents {
    let part = |file: &File| raw_allocation(file, 0..size).unwrap();
    let block = |file: &File, at: u64| {
        let mut bytes = vec![0; usize::try_from(BLOCK).unwrap()];
        if at < file.metadata().unwrap().len() {
            file.read_exact_at(&mut bytes, at).unwrap();
        }
        bytes
    };
    let written = rounded(&part(base).union(&part(target)), BLOCK);
    let blocks = written.into_iter().flat_map(|range| range.step_by(BLOCK.try_into().unwrap()));
    let differing = blocks.filter(|at| block(base, *at) != block(target, *at));
    differing.map(|at| at..at + BLOCK).collect()
}

fn rounded(extents: &Extents, grain: u64) -> Extents {
    let round = |range: Range<u64>| range.start / grain * grain..range.end.next_multiple_of(grain);
    extents.iter().map(round).collect()
}

/// What a snapshot holds: a sparse file that QEMU makes of its layers, which may be merged meanwhile.
async fn content(driver: &Driver, snapshot: &str) -> File {
    let begin = Instant::now();
    loop {
        let layers = driver.snapshots(snapshot, "").await.unwrap().remove(0).layers;
        let file = tempfile::NamedTempFile::new().unwrap();
        let convert = ["convert", "-U", "-O", "raw", &graph(layers)];
        let convert = Command::new(part("bin/qemu-img")).args(convert).arg(file.path()).output();
        let convert = convert.unwrap();
        if convert.status.success() {
            return file.into_file();
        }
        assert!(begin.elapsed() < LIMIT, "{convert:?}");
    }
}

/// A block graph for QEMU's tools, from its layers, the top one first.
fn graph(layers: Vec<Layer>) -> String {
    let stack = |below: Value, layer: Layer| {
        let file = json!({ "driver": "file", "filename": layer.path, "discard": "unmap" });
        let mut node = json!({ "driver": layer.format, "file": file, "discard": "unmap" });
        if layer.format == "qcow2" {
            node["backing"] = below;
        }
        node
    };
    format!("json:{}", layers.into_iter().rev().fold(Value::Null, stack))
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("failed"), "{command:?}: {output:?}");
}

/// What a snapshot holds, as the driver tells it.
pub(crate) async fn allocated(driver: &Driver, snapshot: &str) -> Result<Extents, Status> {
    let told = allocated_from(driver, snapshot, 0, 0).await?;
    Ok(told.blocks.into_iter().collect())
}

/// What a stream said.
#[derive(Debug, Default, PartialEq)]
struct Told {
    blocks: Vec<Range<u64>>,
    capacity: Option<i64>,
    messages: usize,
    longest: usize,
}

impl Told {
    /// Takes a message, which must go on as the ones before began.
    fn hear(&mut self, kind: BlockMetadataType, capacity: i64, blocks: Vec<BlockMetadata>) {
        assert_eq!(kind, BlockMetadataType::VariableLength);
        assert_eq!(*self.capacity.get_or_insert(capacity), capacity);
        self.messages += 1;
        self.longest = self.longest.max(blocks.len());
        for block in blocks {
            let start = u64::try_from(block.byte_offset).unwrap();
            assert!(block.size_bytes > 0, "{block:?}");
            assert!(self.blocks.last().is_none_or(|last| last.end <= start), "{block:?}");
            let end = start + u64::try_from(block.size_bytes).unwrap();
            assert!(end <= u64::try_from(capacity).unwrap(), "{block:?}");
            self.blocks.push(start..end);
        }
    }
}

async fn allocated_from(
    driver: &Driver,
    snapshot: &str,
    starting_offset: i64,
    max_results: i32,
) -> Result<Told, Status> {
    let request = GetMetadataAllocatedRequest {
        snapshot_id: snapshot.into(),
        starting_offset,
        max_results,
        ..Default::default()
    };
    let mut stream = driver.metadata().get_metadata_allocated(request).await?.into_inner();
    let mut told = Told::default();
    while let Some(message) = stream.message().await? {
        let kind = message.block_metadata_type();
        told.hear(kind, message.volume_capacity_bytes, message.block_metadata);
    }
    Ok(told)
}

/// In what a snapshot differs from an earlier one, as the driver tells it.
pub(crate) async fn delta(driver: &Driver, base: &str, target: &str) -> Result<Extents, Status> {
    let told = delta_from(driver, base, target, 0, 0).await?;
    Ok(told.blocks.into_iter().collect())
}

async fn delta_from(
    driver: &Driver,
    base: &str,
    target: &str,
    starting_offset: i64,
    max_results: i32,
) -> Result<Told, Status> {
    let request = GetMetadataDeltaRequest {
        base_snapshot_id: base.into(),
        target_snapshot_id: target.into(),
        starting_offset,
        max_results,
        ..Default::default()
    };
    let mut stream = driver.metadata().get_metadata_delta(request).await?.into_inner();
    let mut told = Told::default();
    while let Some(message) = stream.message().await? {
        let kind = message.block_metadata_type();
        told.hear(kind, message.volume_capacity_bytes, message.block_metadata);
    }
    Ok(told)
}

/// What changed and what is held is told, of all snapshots and however they are merged.
async fn tell(mut story: Story) {
    for (name, size) in [("s0", 1), ("s1", 1), ("s2", 3), ("s3", 3), ("s4", 3)] {
        if story.size < size << 30 {
            story.expand(size << 30).await;
        }
        story.go_on().await;
        story.take(name).await;
    }
    // Nothing in between.
    story.take("s5").await;
    story.check().await;
    // In the middle, twice in a row, and the first, on which nothing was put.
    for index in [2, 2, 0] {
        story.forget(index).await;
        story.check().await;
    }
    story.go_on().await;
    story.take("s6").await;
    story.check().await;
    story.end().await;
}

#[tokio::test]
async fn what_changed_on_a_volume_in_use_is_told() {
    tell(Story::live(1).await).await;
}

#[tokio::test]
async fn what_changed_on_a_volume_at_rest_is_told() {
    tell(Story::at_rest(2).await).await;
}

/// Snapshots are deleted, and their layers merged, while others are read.
async fn read_while_merging(mut story: Story) {
    for index in 0..8 {
        story.go_on().await;
        story.take(&format!("s{index}")).await;
    }
    while story.snapshots.len() > 2 {
        let (first, last) = (&story.snapshots[0], story.snapshots.last().unwrap());
        let differing = difference(&first.content, &last.content, last.size);
        let read = async {
            for _ in 0..20 {
                let told = delta(&story.driver, &first.id, &last.id).await.unwrap();
                assert_eq!(told.union(&differing), told);
            }
        };
        let (deleted, ()) =
            tokio::join!(story.driver.delete_snapshot(&story.snapshots[1].id), read);
        deleted.unwrap();
        let gone = story.snapshots.remove(1);
        let next = &mut story.snapshots[1];
        next.touched = next.touched.union(&gone.touched);
    }
    story.check().await;
    story.end().await;
}

#[tokio::test]
async fn layers_at_rest_are_merged_away_while_they_are_read() {
    read_while_merging(Story::at_rest(3).await).await;
}

#[tokio::test]
async fn layers_in_use_are_merged_away_while_they_are_read() {
    read_while_merging(Story::live(3).await).await;
}

#[tokio::test]
async fn a_clone_tells_what_changed_since_it_was_made() {
    let mut story = Story::at_rest(4).await;
    story.go_on().await;
    story.take("s0").await;
    story.driver.create_from("clone", Source::Snapshot("s0".into())).await.unwrap();
    let source = std::mem::replace(&mut story.volume, "clone".to_owned());
    story.take("c0").await;
    story.go_on().await;
    story.take("c1").await;
    story.check_clone().await;
    for id in ["s0", "c0", "c1"] {
        story.driver.delete_snapshot(id).await.unwrap();
    }
    story.driver.delete("clone").await.unwrap();
    story.driver.delete(&source).await.unwrap();
    story.driver.assert_empty().await;
}

impl Story {
    /// Of a snapshot of a volume and two of its clone.
    async fn check_clone(&mut self) {
        let [s0, c0, c1] = &self.snapshots[..] else { panic!("three snapshots") };
        for (base, target) in [(s0, c0), (s0, c1)] {
            let error = delta(&self.driver, &base.id, &target.id).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            assert!(error.message().contains("of two volumes, pvc-1 and clone"), "{error}");
        }
        assert!(delta(&self.driver, &c0.id, &c0.id).await.unwrap().is_empty());
        let told = delta(&self.driver, &c0.id, &c1.id).await.unwrap();
        let differing = difference(&c0.content, &c1.content, c1.size);
        assert_eq!(told.union(&differing), told);
        let told = allocated(&self.driver, &c1.id).await.unwrap();
        let held = difference(&tempfile::tempfile().unwrap(), &c1.content, c1.size);
        assert_eq!(told.union(&held), told);
    }
}

#[tokio::test]
async fn a_stream_can_be_taken_up_where_it_broke_off() {
    let mut story = Story::at_rest(5).await;
    for name in ["s0", "s1"] {
        story.go_on().await;
        story.take(name).await;
    }
    let driver = &story.driver;
    let whole = delta_from(driver, "s0", "s1", 0, 0).await.unwrap();
    assert_eq!((whole.messages, whole.capacity), (1, Some(GIB)));
    let single = delta_from(driver, "s0", "s1", 0, 1).await.unwrap();
    assert_eq!((single.longest, single.messages), (1, whole.blocks.len()));
    assert_eq!(single.blocks, whole.blocks);
    assert_eq!(delta_from(driver, "s0", "s1", 0, 3).await.unwrap().longest, 3);
    for (index, range) in whole.blocks.iter().enumerate() {
        // Behind it, and from its middle on.
        let end = range.end.try_into().unwrap();
        let rest = delta_from(driver, "s0", "s1", end, 0).await.unwrap();
        assert_eq!((rest.blocks, rest.capacity), (whole.blocks[index + 1..].into(), Some(GIB)));
        let middle = (range.end - 512).try_into().unwrap();
        let rest = delta_from(driver, "s0", "s1", middle, 0).await.unwrap();
        assert!(rest.blocks[0].end > range.end - 512, "{rest:?}");
        assert_eq!(rest.blocks[1..], whole.blocks[index + 1..]);
        let rest = allocated_from(driver, "s1", middle, 2).await.unwrap();
        assert!(rest.blocks[0].end > range.end - 512, "{rest:?}");
    }
    assert_eq!(delta_from(driver, "s0", "s1", GIB, 0).await.unwrap().blocks, []);
    story.end().await;
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_with_the_codes_of_the_standard() {
    let mut story = Story::at_rest(6).await;
    for name in ["s0", "s1"] {
        story.go_on().await;
        story.take(name).await;
    }
    let other = story.driver.create("other").await;
    story.driver.snapshot("o0", &other).await.unwrap();
    let driver = &story.driver;
    for (base, target, offset, most, code, text) in [
        ("", "s1", 0, 0, Code::InvalidArgument, "base_snapshot_id"),
        ("s0", "", 0, 0, Code::InvalidArgument, "target_snapshot_id"),
        ("s1", "s0", 0, 0, Code::InvalidArgument, "snapshots s1 and s0 the base is the later"),
        ("s0", "o0", 0, 0, Code::InvalidArgument, "snapshots s0 and o0 are of two volumes"),
        ("s0", "s1", 0, -1, Code::InvalidArgument, "max_results: -1"),
        ("s0", "none", 0, 0, Code::NotFound, "none"),
        ("No Id Of Ours", "s1", 0, 0, Code::NotFound, "No Id Of Ours"),
        ("s0", "s1", -1, 0, Code::OutOfRange, "starting_offset: -1"),
        ("s0", "s1", GIB + 1, 0, Code::OutOfRange, "starting_offset: 1073741825"),
    ] {
        let error = delta_from(driver, base, target, offset, most).await.unwrap_err();
        assert_eq!(error.code(), code, "{base} {target}: {error}");
        assert!(error.message().contains(text), "{error}");
        if base == "s0" && target != "o0" {
            let error = allocated_from(driver, target, offset, most).await.unwrap_err();
            assert_eq!(error.code(), code, "{target}: {error}");
        }
    }
    driver.delete_snapshot("o0").await.unwrap();
    driver.delete(&other).await.unwrap();
    story.end().await;
}

/// A new volume took the name of one that is gone.
#[tokio::test]
async fn snapshots_of_which_no_record_was_kept_ask_for_a_full_copy() {
    let mut story = Story::at_rest(7).await;
    story.go_on().await;
    story.take("s0").await;
    story.driver.delete(&story.volume).await.unwrap();
    assert_eq!(story.driver.create("pvc-1").await, story.volume);
    story.go_on().await;
    story.take("s1").await;
    let error = delta(&story.driver, "s0", "s1").await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    story.end().await;
}

#[tokio::test]
async fn a_snapshot_whose_layer_is_damaged_ends_the_stream_with_an_error() {
    let mut story = Story::at_rest(8).await;
    for name in ["s0", "s1"] {
        story.go_on().await;
        story.take(name).await;
    }
    let layers = story.driver.path("pool/layers");
    let overlay = names(&layers).into_iter().filter(|name| name.ends_with("qcow2"));
    for name in overlay {
        let file = File::options().write(true).open(layers.join(name)).unwrap();
        file.write_all_at(&[0xff; 512], 3 << 17).unwrap(); // the L1 table
    }
    let error = delta(&story.driver, "s0", "s1").await.unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{error}");
    assert!(error.message().contains("L1 entry 0 is 0xffff"), "{error}");
    story.end().await;
}

/// 100 GiB, and 20,000 places written between two snapshots.
#[tokio::test]
async fn a_large_volume_tells_its_changes_at_once() {
    const COUNT: u64 = 20_000;
    let driver = Driver::start_with(&["--overcommit", "100"]).await;
    let volume = driver.create("pvc-1").await;
    let mut story = Story::of(driver, volume, 9);
    story.expand(100 << 30).await;
    story.io(&["write 0 1M".to_owned()]).await;
    story.take("s0").await;
    let step = (story.size / COUNT).next_multiple_of(BLOCK);
    let places: Vec<_> = (0..story.size).step_by(step.try_into().unwrap()).collect();
    for some in places.chunks(2000) {
        let commands: Vec<_> = some.iter().map(|at| format!("write -q {at} 4k")).collect();
        story.io(&commands).await;
    }
    story.take("s1").await;
    for run in 0..3 {
        let begun = Instant::now();
        let told = delta_from(&story.driver, "s0", "s1", 0, 0).await.unwrap();
        let spent = begun.elapsed();
        eprintln!("delta of 100 GiB, {} extents: {spent:?} (run {run})", told.blocks.len());
        assert!(told.blocks.iter().map(|range| range.start).eq(places.iter().copied()));
    }
    story.end().await;
}
