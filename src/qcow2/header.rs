//! The header of an image, checked.

use super::{Error, MAGIC, MOST_L1_ENTRIES, OFFSET, field, incompatible, long, luks, word};
use crate::units::Bytes;
use std::{fs::File, os::unix::fs::FileExt as _};

/// Up to and with the length of the header itself, which ends the required part.
const LENGTH: usize = 104;

/// The cluster sizes that QEMU opens: 512 bytes to 2 MiB; extended L2 entries need 16 KiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
const EXTENDED_CLUSTER_BITS: std::ops::RangeInclusive<u32> = 14..=21;

/// The largest refcount table that QEMU opens.
const LARGEST_REFCOUNT_TABLE: u64 = 8 << 20;

/// What the header of a sound image says. Numbers in it are within their bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub(super) size: Bytes,
    pub(super) cluster: u64,
    pub(super) entries: Entries,
    pub(super) l1_entries: u64,
    pub(super) l1_table: u64,
    /// Snapshots inside the image, none of them ours.
    pub(super) snapshots: u32,
    /// What a program that writes must keep up, or switch off: bitmaps.
    pub(super) autoclear: u64,
}

/// The form of L2 entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entries {
    /// 8 bytes, a cluster each.
    Plain,
    /// 16 bytes, a cluster and its 32 subclusters.
    Extended,
}

impl Entries {
    /// How many bytes an entry has.
    pub(super) fn length(self) -> u64 {
        match self {
            Self::Plain => 8,
            Self::Extended => 16,
        }
    }
}

impl Header {
    /// The size of the disk that the image describes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// How many entries an L2 table has; it is one cluster.
    pub(super) fn l2_entries(&self) -> u64 {
        self.cluster / self.entries.length()
    }

    /// How much of the disk one entry of the L1 table stands for.
    pub(super) fn reach(&self) -> u64 {
        self.l2_entries() * self.cluster
    }

    /// How many entries of the L1 table a disk of `size` needs.
    pub(super) fn l1_needed(&self, size: Bytes) -> u64 {
        size.count().div_ceil(self.reach())
    }
}

/// Reads the header of an image, and refuses one that is damaged or not for us.
pub fn header(file: &File) -> Result<Header, Error> {
    let mut bytes = [0; LENGTH];
    file.read_exact_at(&mut bytes, 0).map_err(Error::io("reading the header of"))?;
    parse(&bytes)
}

fn parse(bytes: &[u8; LENGTH]) -> Result<Header, Error> {
    let magic = *bytes.first_chunk().expect("a header is longer");
    if magic != MAGIC {
        return Err(Error::Magic(magic));
    }
    let entries = features(bytes)?;
    let cluster = cluster(word(bytes, field::CLUSTER_BITS), entries)?;
    check_length(bytes, cluster)?;
    check_refcounts(bytes, cluster)?;
    let header = Header {
        size: Bytes::new(long(bytes, field::SIZE)),
        cluster,
        entries,
        l1_entries: word(bytes, field::L1_ENTRIES).into(),
        l1_table: long(bytes, field::L1_TABLE),
        snapshots: word(bytes, field::SNAPSHOTS),
        autoclear: if version(bytes) == 2 { 0 } else { long(bytes, field::AUTOCLEAR) },
    };
    check_size(header.size)?;
    check_l1_table(&header)?;
    Ok(header)
}

fn version(bytes: &[u8; LENGTH]) -> u32 {
    word(bytes, field::VERSION)
}

/// The form of the L2 entries, where nothing forbids to read them.
fn features(bytes: &[u8; LENGTH]) -> Result<Entries, Error> {
    match version(bytes) {
        2 => return Ok(Entries::Plain),
        3 => {}
        other => return refuse("version", other.into(), "is not supported"),
    }
    let features = long(bytes, field::INCOMPATIBLE);
    let unknown = features & !incompatible::KNOWN;
    if features & incompatible::CORRUPT != 0 {
        return Err(Error::Corrupt);
    }
    if features & incompatible::DIRTY != 0 {
        return Err(Error::Dirty);
    }
    if unknown != 0 {
        return Err(Error::Features(unknown));
    }
    let extended = features & incompatible::EXTENDED_L2 != 0;
    Ok(if extended { Entries::Extended } else { Entries::Plain })
}

/// That the image is encrypted with LUKS, as its first cluster says.
pub(super) fn check_encrypted(first: &[u8]) -> Result<(), Error> {
    match (word(first, field::VERSION), word(first, field::CRYPT_METHOD)) {
        (2, _) => refuse("version", 2, "has no LUKS header"),
        (_, luks::METHOD) => Ok(()),
        (_, other) => refuse("crypt_method", other.into(), "is not LUKS"),
    }
}

fn cluster(bits: u32, entries: Entries) -> Result<u64, Error> {
    let allowed = match entries {
        Entries::Plain => CLUSTER_BITS,
        Entries::Extended => EXTENDED_CLUSTER_BITS,
    };
    if allowed.contains(&bits) {
        return Ok(1 << bits);
    }
    refuse("cluster_bits", bits.into(), "is not supported")
}

fn check_length(bytes: &[u8; LENGTH], cluster: u64) -> Result<(), Error> {
    let length = u64::from(word(bytes, field::HEADER_LENGTH));
    if version(bytes) == 2 || (104..=cluster).contains(&length) && length.is_multiple_of(8) {
        return Ok(());
    }
    refuse("header_length", length, "cannot be")
}

/// Refcounts are not read here; what is wrong with them is a sign that all else may be.
fn check_refcounts(bytes: &[u8; LENGTH], cluster: u64) -> Result<(), Error> {
    let order = word(bytes, field::REFCOUNT_ORDER);
    if version(bytes) > 2 && order > 6 {
        return refuse("refcount_order", order.into(), "is above 6");
    }
    let table = long(bytes, field::REFCOUNT_TABLE);
    if table == 0 || !table.is_multiple_of(cluster) {
        return refuse("refcount_table_offset", table, "is not the offset of a cluster");
    }
    let clusters = u64::from(word(bytes, field::REFCOUNT_TABLE_CLUSTERS));
    if clusters == 0 || clusters > LARGEST_REFCOUNT_TABLE / cluster {
        return refuse("refcount_table_clusters", clusters, "is not supported");
    }
    Ok(())
}

/// That a disk can have that size, sectors having 512 bytes.
pub(super) fn check_size(size: Bytes) -> Result<(), Error> {
    if size.count().is_multiple_of(512) {
        return Ok(());
    }
    refuse("size", size.count(), "is no multiple of 512")
}

fn check_l1_table(header: &Header) -> Result<(), Error> {
    let (entries, table) = (header.l1_entries, header.l1_table);
    if entries > MOST_L1_ENTRIES {
        return refuse("l1_size", entries, "is above 4194304");
    }
    if entries < header.l1_needed(header.size) {
        return refuse("l1_size", entries, "is too small for the size");
    }
    // Below 2^56, so that no sum with a length that is within bounds overflows.
    if entries > 0 && (table == 0 || !table.is_multiple_of(header.cluster) || table > OFFSET) {
        return refuse("l1_table_offset", table, "is not the offset of a cluster");
    }
    Ok(())
}

fn refuse<T>(field: &'static str, value: u64, why: &'static str) -> Result<T, Error> {
    Err(Error::Field { field, value, why })
}

#[cfg(test)]
mod test {
    use super::{super::sample::Image, *};

    const FORMS: [&str; 5] = [
        "compat=0.10",
        "compat=1.1",
        "compat=1.1,cluster_size=512",
        "compat=1.1,cluster_size=2M,extended_l2=on,refcount_bits=1",
        "compat=1.1,compression_type=zstd",
    ];

    fn changed(at: usize, value: &[u8]) -> Result<Header, Error> {
        let image = Image::ours(Bytes::gib(3));
        let at = u64::try_from(at).unwrap();
        image.file().write_all_at(value, at).unwrap();
        header(&image.file())
    }

    #[test]
    fn all_forms_that_qemu_makes_are_read() {
        for form in FORMS {
            let image = Image::theirs(form, Bytes::gib(3));
            let header = header(&image.file()).unwrap();
            let info = image.info();
            assert_eq!(header.size(), Bytes::gib(3), "{form}");
            assert_eq!(info["cluster-size"], header.cluster, "{form}");
        }
    }

    #[test]
    fn images_that_are_not_sound_or_not_for_us_are_refused() {
        let feature = |bit: u32| changed(field::INCOMPATIBLE, &(1_u64 << bit).to_be_bytes());
        assert!(matches!(feature(0), Err(Error::Dirty)));
        assert!(matches!(feature(1), Err(Error::Corrupt)));
        for bit in [2, 5, 63] {
            assert!(matches!(feature(bit), Err(Error::Features(found)) if found == 1 << bit));
        }
        assert!(matches!(changed(0, b"RAW!"), Err(Error::Magic(_))));
        let text = changed(field::VERSION, &[0, 0, 0, 4]).unwrap_err().to_string();
        assert_eq!(text, "image with version 4, which is not supported");
    }

    #[test]
    fn numbers_out_of_bounds_are_refused_by_name_and_value() {
        for (at, value, field) in [
            (field::CLUSTER_BITS, 13, "cluster_bits"),
            (field::CLUSTER_BITS, 22, "cluster_bits"),
            (field::SIZE, 1 << 12, "l1_size"),
            (field::SIZE + 4, 513, "size"),
            (field::L1_ENTRIES, 2, "l1_size"),
            (field::L1_ENTRIES, 4 << 20 | 1, "l1_size"),
            (field::L1_TABLE, 1 << 24, "l1_table_offset"),
            (field::L1_TABLE + 4, 512, "l1_table_offset"),
            (field::L1_TABLE + 4, 0, "l1_table_offset"),
            (field::REFCOUNT_TABLE + 4, 0, "refcount_table_offset"),
            (field::REFCOUNT_TABLE_CLUSTERS, 65, "refcount_table_clusters"),
            (field::REFCOUNT_ORDER, 7, "refcount_order"),
            (field::HEADER_LENGTH, 105, "header_length"),
            (field::HEADER_LENGTH, u32::MAX, "header_length"),
        ] {
            let error = changed(at, &value.to_be_bytes()).unwrap_err();
            let named = matches!(&error, Error::Field { field: named, .. } if *named == field);
            assert!(named, "{field} {value}: {error}");
        }
    }

    #[test]
    fn a_file_without_a_header_is_no_image() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(header(&file), Err(Error::Io { .. })));
        file.set_len(1 << 20).unwrap();
        assert!(matches!(header(&file), Err(Error::Magic([0, 0, 0, 0]))));
    }
}
