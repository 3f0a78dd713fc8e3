//! What an image provides itself: data, and zeroes that hide what lies below.

use super::{
    Error, Header, OFFSET,
    header::{Entries, header},
    index, long,
};
use crate::extents::Extents;
use std::{fs::File, ops::Range, os::unix::fs::FileExt as _};

/// L2 entry: the cluster is compressed.
const COMPRESSED: u64 = 1 << 62;

/// L2 entry without a bitmap: the cluster reads as zeroes, wherever its offset leads.
const ZERO: u64 = 1;

/// How many subclusters the bitmap of an extended entry has.
const SUBCLUSTERS: u64 = 32;

/// Where an image says what it provides; for images too large to be looked at as a whole.
///
/// The memory that extents take is bounded by the range that is asked for: of an image of ours,
/// 16 bytes for each 8 KiB at the very worst.
#[derive(Debug)]
pub struct Map {
    header: Header,
    /// The entries of the L1 table that the size needs.
    l1: Vec<u64>,
}

/// The ranges that this image provides: data or zeroes, at the grain of subclusters.
pub fn allocation(file: &File) -> Result<Extents, Error> {
    let map = Map::read(file)?;
    map.within(file, 0..map.header.size.count())
}

impl Map {
    /// Reads and checks the header and the L1 table.
    pub fn read(file: &File) -> Result<Self, Error> {
        Self::of(file, header(file)?)
    }

    /// The same for a header that was read, and perhaps changed for a look beyond the size.
    pub(super) fn of(file: &File, header: Header) -> Result<Self, Error> {
        let l1 = read_l1(file, &header)?;
        let end = file.metadata().map_err(Error::io("measuring"))?.len();
        check_l1(&l1, &header, end)?;
        Ok(Self { header, l1 })
    }

    /// What the header says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What the image provides of a range of its disk; `file` is the one that was read.
    pub fn within(&self, file: &File, range: Range<u64>) -> Result<Extents, Error> {
        let range = range.start..range.end.min(self.header.size.count());
        let mut extents = Extents::default();
        if range.is_empty() {
            return Ok(extents);
        }
        let clusters = range.start / self.header.cluster..range.end.div_ceil(self.header.cluster);
        let tables = clusters.start / self.header.l2_entries()
            ..clusters.end.div_ceil(self.header.l2_entries());
        for table in tables {
            let own = table * self.header.l2_entries()..(table + 1) * self.header.l2_entries();
            let wanted = clusters.start.max(own.start)..clusters.end.min(own.end);
            self.add_table(file, table, wanted, &mut extents)?;
        }
        Ok(extents.within(range))
    }

    /// Adds what one L2 table says of so many clusters, all of them its own.
    fn add_table(
        &self,
        file: &File,
        table: u64,
        clusters: Range<u64>,
        extents: &mut Extents,
    ) -> Result<(), Error> {
        let offset = self.l1[index(table)] & OFFSET;
        if offset == 0 {
            return Ok(());
        }
        let length = self.header.entries.length();
        let first = clusters.start % self.header.l2_entries();
        let mut bytes = vec![0; index((clusters.end - clusters.start) * length)];
        file.read_exact_at(&mut bytes, offset + first * length)
            .map_err(Error::io("reading an L2 table of"))?;
        for (cluster, entry) in clusters.zip(bytes.chunks_exact(index(length))) {
            self.add_cluster(cluster, entry, extents)?;
        }
        Ok(())
    }

    fn add_cluster(&self, cluster: u64, entry: &[u8], extents: &mut Extents) -> Result<(), Error> {
        let size = self.header.cluster;
        let provided = match self.header.entries {
            Entries::Plain => plain(long(entry, 0), size),
            Entries::Extended => extended(long(entry, 0), long(entry, 8), size),
        };
        let mut mask = provided.map_err(|why| {
            let entry = long(entry, 0);
            Error::Damaged { table: "L2", index: cluster, entry, why }
        })?;
        let mut at = 0;
        while mask != 0 {
            let skipped = mask.trailing_zeros();
            let run = (mask >> skipped).trailing_ones();
            let start = cluster * size + (at + u64::from(skipped)) * (size / SUBCLUSTERS);
            extents.push(start..start + u64::from(run) * (size / SUBCLUSTERS));
            at += u64::from(skipped + run);
            mask = mask.checked_shr(skipped + run).unwrap_or(0);
        }
        Ok(())
    }
}

/// The part of the L1 table that the size needs.
fn read_l1(file: &File, header: &Header) -> Result<Vec<u64>, Error> {
    let mut bytes = vec![0; index(header.l1_needed(header.size) * 8)];
    file.read_exact_at(&mut bytes, header.l1_table)
        .map_err(Error::io("reading the L1 table of"))?;
    Ok(bytes.as_chunks().0.iter().copied().map(u64::from_be_bytes).collect())
}

/// No two L2 tables in one place: reading all of them reads no more than the file has. None in that
/// of the L1 table, which `grow` writes to.
fn check_l1(l1: &[u64], header: &Header, end: u64) -> Result<(), Error> {
    let cluster = header.cluster;
    let own = header.l1_table..header.l1_table + header.l1_entries * 8;
    let mut seen = std::collections::HashSet::new();
    for (index, entry) in (0..).zip(l1.iter().copied()) {
        let offset = entry & OFFSET;
        let why = if !offset.is_multiple_of(cluster) {
            "leads into the middle of a cluster"
        } else if offset != 0 && offset + cluster > end {
            "leads beyond the file"
        } else if offset + cluster > own.start && offset < own.end {
            "leads into the L1 table"
        } else if offset != 0 && !seen.insert(offset) {
            "leads where another one does"
        } else {
            continue;
        };
        return Err(Error::Damaged { table: "L1", index, entry, why });
    }
    Ok(())
}

/// The subclusters that a plain entry provides: all or none.
fn plain(entry: u64, cluster: u64) -> Result<u32, &'static str> {
    let provides = entry & (COMPRESSED | ZERO | OFFSET) != 0;
    if entry & COMPRESSED == 0 && !(entry & OFFSET).is_multiple_of(cluster) {
        return Err("leads into the middle of a cluster");
    }
    Ok(if provides { u32::MAX } else { 0 })
}

/// The subclusters that an extended entry provides: as data, or as zeroes.
fn extended(entry: u64, bitmap: u64, cluster: u64) -> Result<u32, &'static str> {
    if entry & COMPRESSED != 0 {
        return Ok(u32::MAX);
    }
    let offset = entry & OFFSET;
    let low = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).expect("32 bits are");
    let (data, zeroes) = (low(bitmap), low(bitmap >> SUBCLUSTERS));
    if !offset.is_multiple_of(cluster) {
        Err("leads into the middle of a cluster")
    } else if data & zeroes != 0 {
        Err("says of a subcluster both that it has data and that it is zero")
    } else if offset == 0 && data != 0 {
        Err("has data nowhere")
    } else {
        Ok(data | zeroes)
    }
}

#[cfg(test)]
mod test {
    use super::{
        super::{grow, sample::Image},
        *,
    };
    use crate::units::Bytes;
    use proptest::{
        collection::{btree_set, vec},
        prelude::*,
    };
    use std::time::Instant;

    const SIZE: u64 = 64 << 20;

    /// Forms of images; the first is ours.
    const FORMS: [&str; 6] = [
        "",
        "compat=1.1,cluster_size=64k,extended_l2=on",
        "compat=1.1,cluster_size=64k",
        "compat=1.1,cluster_size=512",
        "compat=1.1,cluster_size=2M",
        "compat=0.10,cluster_size=4k",
    ];

    fn image(form: &str, size: u64) -> Image {
        match form {
            "" => Image::ours(Bytes::new(size)),
            options => Image::theirs(options, Bytes::new(size)),
        }
    }

    /// What a guest may do to a disk, as qemu-io says it.
    fn command() -> impl Strategy<Value = String> {
        let place = (0..SIZE / 512 - 1, 1..600_u64);
        let verbs = prop::sample::select(vec!["write -P 7", "write -z", "write -z -u", "discard"]);
        (place, verbs).prop_map(|((sector, length), verb)| {
            let length = length.min(SIZE / 512 - sector);
            format!("{verb} {} {}", sector * 512, length * 512)
        })
    }

    /// Clusters that are compressed before all else; QEMU compresses none twice.
    fn compressed() -> impl Strategy<Value = Vec<String>> {
        let write = |cluster| format!("write -c -P 3 {} 2M", cluster << 21);
        btree_set(0..SIZE >> 21, 0..3)
            .prop_map(move |places| places.into_iter().map(write).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn what_an_image_provides_is_what_qemu_says(
            form in prop::sample::select(FORMS.to_vec()),
            compressed in compressed(),
            commands in vec(command(), 0..40),
            window in (0..SIZE, 0..SIZE),
        ) {
            let image = image(form, SIZE);
            image.io(&[compressed, commands].concat());
            let found = allocation(&image.file()).unwrap();
            prop_assert_eq!(&found, &image.map(), "{}", form);
            let window = window.0..window.1;
            let map = Map::read(&image.file()).unwrap();
            let seen = map.within(&image.file(), window.clone()).unwrap();
            prop_assert_eq!(seen, found.within(window), "{}", form);
        }

        #[test]
        fn flipped_bits_never_end_in_a_panic_or_more_than_the_disk(
            form in prop::sample::select(FORMS.to_vec()),
            commands in vec(command(), 0..20),
            flips in vec((0..4_usize, any::<prop::sample::Index>(), 0..8_u8), 1..12),
        ) {
            let image = image(form, SIZE);
            image.io(&commands);
            let (file, parts) = (image.file(), parts(&image));
            for (part, byte, bit) in flips {
                let (start, length) = parts[part.min(parts.len() - 1)];
                let at = start + u64::try_from(byte.index(index(length))).unwrap();
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 1 << bit], at).unwrap();
                let begun = Instant::now();
                if let Ok(found) = allocation(&file) {
                    let size = header(&file).unwrap().size;
                    prop_assert!(found.starting_at(size.count()).is_empty());
                }
                _ = grow(&file, Bytes::gib(1));
                prop_assert!(begun.elapsed().as_secs() < 2, "{:?}", begun.elapsed());
            }
        }
    }

    /// Where header, L1 table and L2 tables lie, each with its length; 4 of them at most.
    fn parts(image: &Image) -> Vec<(u64, u64)> {
        let map = Map::read(&image.file()).unwrap();
        let tables = map.l1.iter().map(|entry| (entry & OFFSET, map.header.cluster));
        let all = [(0, 104), (map.header.l1_table, map.header.l1_entries * 8)];
        all.into_iter().chain(tables.filter(|table| table.0 != 0).take(2)).collect()
    }

    /// A disk on which 20,000 places were written, by far.
    #[test]
    fn many_scattered_extents_are_found_in_no_time() {
        const COUNT: u64 = 20_000;
        let size = Bytes::gib(100);
        let image = Image::ours(size);
        let step = (size.count() / COUNT).next_multiple_of(4096);
        let places = (0..size.count()).step_by(index(step));
        let commands: Vec<_> = places.clone().map(|at| format!("write -q {at} 4k")).collect();
        for part in commands.chunks(2000) {
            image.io(part);
        }
        let begun = Instant::now();
        let found = allocation(&image.file()).unwrap();
        let spent = begun.elapsed();
        assert!(found.iter().eq(places.map(|at| at..at + 4096)));
        assert!(spent.as_millis() < 500, "{} extents of {size} took {spent:?}", found.len());
    }

    #[test]
    fn a_disk_of_many_terabytes_is_read_to_its_end() {
        for size in [1_u64 << 40, 20 << 40] {
            let image = Image::ours(Bytes::new(size));
            let last = size - 8192;
            image.io(&[format!("write -z {last} 4k"), "write 0 4k".into()]);
            let found = allocation(&image.file()).unwrap();
            assert_eq!(found, [0..4096, last..last + 4096].into_iter().collect());
            assert_eq!(found, image.map());
        }
    }

    #[test]
    fn tables_that_lie_in_one_place_or_nowhere_are_refused() {
        let damaged = |first: u64, second: u64| {
            let image = Image::ours(Bytes::gib(2));
            image.io(&["write 0 4k".into()]);
            let (file, table) = (image.file(), header(&image.file()).unwrap().l1_table);
            let entries = [first.to_be_bytes(), second.to_be_bytes()].concat();
            file.write_all_at(&entries, table).unwrap();
            allocation(&file).unwrap_err().to_string()
        };
        let cluster = 4 << 17;
        assert!(damaged(cluster, cluster).contains("where another one does"));
        assert!(damaged(cluster, 3 << 17).contains("leads into the L1 table"));
        assert!(damaged(cluster, 1 << 40).contains("L1 entry 1 is 0x10000000000, which leads bey"));
        assert!(damaged(cluster + 512, 0).contains("middle of a cluster"));
    }

    #[test]
    fn entries_that_contradict_themselves_are_refused() {
        let (size, at) = (1 << 17, 8 << 17);
        assert_eq!(extended(at, 1 << 32 | 2, size), Ok(3));
        assert_eq!(extended(0, 1 << 63, size), Ok(1 << 31));
        assert_eq!(extended(COMPRESSED | 0x77, 0, size), Ok(u32::MAX));
        for (entry, bitmap) in [(at, 1 << 32 | 1), (0, 1), (at + 512, 1)] {
            assert!(extended(entry, bitmap, size).is_err(), "{entry:#x} {bitmap:#x}");
        }
        assert!(plain(at + 512, size).is_err());
        assert_eq!(plain(ZERO, size), Ok(u32::MAX));
    }
}
