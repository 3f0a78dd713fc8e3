//! Makes empty images, as overlays are: 4 KiB subclusters, 16-bit refcounts, no backing file in the
//! header. What stands below an image is said by records alone.

use super::{LuksHeader, MAGIC, MOST_L1_ENTRIES, field, incompatible::EXTENDED_L2, luks};
use crate::units::Bytes;
use std::{fs::File, io, os::unix::fs::FileExt as _};

/// Clusters of 128 KiB, which the extended L2 entries divide into 32 subclusters of 4 KiB.
const CLUSTER_BITS: u32 = 17;
pub(super) const CLUSTER: u64 = 1 << CLUSTER_BITS;

/// What one entry of the L1 table stands for: a cluster of L2 entries of 16 bytes, 1 GiB.
const L1_REACH: u64 = CLUSTER / 16 * CLUSTER;

/// An L1 table fills its clusters from the beginning, so that it stays where it is up to 16 TiB: QEMU
/// makes another one to enlarge it.
pub(super) const L1_ROOM: u64 = CLUSTER / 8;

/// Refcounts of 16 bits.
const REFCOUNT_ORDER: u32 = 4;

/// QEMU's own: up to the compression type, which is left at 0, and padded.
pub(super) const HEADER_LENGTH: usize = 112;

/// Where the parts lie, in clusters.
const REFCOUNT_TABLE: u64 = 1;
const REFCOUNT_BLOCK: u64 = 2;
const L1_TABLE: u64 = 3;

/// Header extension: names for features, shown by programs that do not know them.
const FEATURE_NAMES: u32 = 0x6803_f857;
const FEATURE_NAME_LENGTH: usize = 46;

/// Writes an empty image of `size`, a multiple of 512, into a new and empty file.
///
/// The header is written last, so what a crash leaves is an image or none. The caller syncs.
pub fn create(file: &File, size: Bytes) -> io::Result<()> {
    make(file, size, None)
}

/// The same, encrypted: with the LUKS header of another image, and so its key and passphrase.
pub fn create_encrypted(file: &File, size: Bytes, luks: &LuksHeader) -> io::Result<()> {
    make(file, size, Some(luks))
}

fn make(file: &File, size: Bytes, luks: Option<&LuksHeader>) -> io::Result<()> {
    let l1_entries = l1_entries(size)?;
    if file.metadata()?.len() != 0 {
        let text = "an image is created in an empty file, and this one is not";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    let luks_header = L1_TABLE + (u64::from(l1_entries) * 8).div_ceil(CLUSTER);
    let luks_length = luks.map_or(0, LuksHeader::length);
    let clusters = luks_header + luks_length.div_ceil(CLUSTER);
    // A hole reads as zeroes: an L1 table and refcounts without entries.
    file.set_len(clusters * CLUSTER)?;
    let references = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect::<Vec<_>>();
    file.write_all_at(&references, REFCOUNT_BLOCK * CLUSTER)?;
    let block = REFCOUNT_BLOCK * CLUSTER;
    file.write_all_at(&block.to_be_bytes(), REFCOUNT_TABLE * CLUSTER)?;
    let mut place = None;
    if let Some(luks) = luks {
        luks.write(file, luks_header * CLUSTER)?;
        place = Some([luks_header * CLUSTER, luks_length]);
    }
    file.write_all_at(&header(size, l1_entries, place), 0)
}

/// How many entries the L1 table of an image of `size` has.
fn l1_entries(size: Bytes) -> io::Result<u32> {
    let refuse = |text| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    if !size.count().is_multiple_of(512) {
        return refuse(format!("size {} is no multiple of 512", size.count()));
    }
    // One cluster at least.
    let entries = size.count().div_ceil(L1_REACH).max(1).next_multiple_of(L1_ROOM);
    match u32::try_from(entries) {
        Ok(fitting) if entries <= MOST_L1_ENTRIES => Ok(fitting),
        _ => refuse(format!(
            "size {size} is beyond {}, the largest of an image with clusters of {}",
            Bytes::new(MOST_L1_ENTRIES * L1_REACH),
            Bytes::new(CLUSTER)
        )),
    }
}

/// The header and its extensions; fields that are not set here are rightly zero. A LUKS header has
/// an offset and a length.
fn header(size: Bytes, l1_entries: u32, luks: Option<[u64; 2]>) -> Vec<u8> {
    let mut header = vec![0; HEADER_LENGTH];
    let mut set = |at: usize, value: &[u8]| header[at..at + value.len()].copy_from_slice(value);
    set(0, &MAGIC);
    set(field::VERSION, &3_u32.to_be_bytes());
    set(field::CLUSTER_BITS, &CLUSTER_BITS.to_be_bytes());
    set(field::SIZE, &size.count().to_be_bytes());
    set(field::L1_ENTRIES, &l1_entries.to_be_bytes());
    set(field::L1_TABLE, &(L1_TABLE * CLUSTER).to_be_bytes());
    set(field::REFCOUNT_TABLE, &(REFCOUNT_TABLE * CLUSTER).to_be_bytes());
    set(field::REFCOUNT_TABLE_CLUSTERS, &1_u32.to_be_bytes());
    set(field::INCOMPATIBLE, &EXTENDED_L2.to_be_bytes());
    set(field::REFCOUNT_ORDER, &REFCOUNT_ORDER.to_be_bytes());
    let length = u32::try_from(HEADER_LENGTH).expect("a header is short");
    set(field::HEADER_LENGTH, &length.to_be_bytes());
    header.extend(feature_name(EXTENDED_L2, "extended L2 entries"));
    if let Some(place) = luks {
        header[field::CRYPT_METHOD..][..4].copy_from_slice(&luks::METHOD.to_be_bytes());
        header.extend([luks::EXTENSION, 16].iter().flat_map(|word| word.to_be_bytes()));
        header.extend(place.iter().flat_map(|word| word.to_be_bytes()));
    }
    header.extend([0; 8]); // the end of the extensions
    header
}

/// The extension that names one incompatible feature.
fn feature_name(feature: u64, name: &str) -> Vec<u8> {
    let bit = u8::try_from(feature.trailing_zeros()).expect("a feature is a bit of 64");
    let mut entry = vec![0, bit]; // type 0: incompatible
    entry.extend(name.bytes());
    entry.resize(2 + FEATURE_NAME_LENGTH, 0);
    let length = u32::try_from(entry.len()).expect("an entry is short");
    [&FEATURE_NAMES.to_be_bytes()[..], &length.to_be_bytes(), &entry].concat()
}

#[cfg(test)]
mod test {
    use super::{super::sample::Image, *};
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn qemu_finds_nothing_wrong_with_an_image_of_any_size() {
        let small = [0, 512, 1 << 20, (1 << 30) - 512, 1 << 30, (1 << 30) + 512];
        let large = [1 << 40, 16 << 40, (16 << 40) + 512, 20 << 40, 1 << 52];
        for size in small.into_iter().chain(large) {
            let image = Image::ours(Bytes::new(size));
            image.check();
            let info = image.info();
            assert_eq!(info["virtual-size"], size, "{info}");
            assert_eq!(info["cluster-size"], 128 << 10, "{info}");
            assert!(info.get("backing-filename").is_none(), "{info}");
            let data = &info["format-specific"]["data"];
            assert_eq!(data["extended-l2"], true, "{info}");
            assert_eq!(data["lazy-refcounts"], false, "{info}");
            assert_eq!(data["refcount-bits"], 16, "{info}");
            assert_eq!(data["corrupt"], false, "{info}");
            let spent = image.path().metadata().unwrap().blocks() * 512;
            assert!(spent <= 64 << 10, "an empty image of {size} takes {spent}");
        }
    }

    #[test]
    fn qemu_writes_to_both_ends_of_an_image_and_it_stays_sound() {
        for size in [1_u64 << 20, 1 << 40, 20 << 40] {
            let image = Image::ours(Bytes::new(size));
            let last = size - 4096;
            let filled = ["write -P 5 0 4k".into(), format!("write -P 7 {last} 4k")];
            let found = ["read -P 5 0 4k".into(), format!("read -P 7 {last} 4k")];
            let zeroed = [format!("write -z {last} 4k"), format!("read -P 0 {last} 4k")];
            image.io(&[&filled[..], &found, &zeroed].concat());
            image.check();
        }
    }

    #[test]
    fn a_size_that_no_image_can_have_is_refused_by_value() {
        let file = tempfile::tempfile().unwrap();
        for (size, told) in [(513, "513"), ((1 << 52) + 512, "4Pi"), (u64::MAX - 511, "4Pi")] {
            let error = create(&file, Bytes::new(size)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains(told), "{error}");
        }
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_file_that_holds_something_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"all they have", 0).unwrap();
        let error = create(&file, Bytes::gib(1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(file.metadata().unwrap().len(), 13);
    }
}
