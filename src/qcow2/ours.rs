//! Whether an image is one of ours, as its header says.
//!
//! The format has no checksums, and QEMU opens an image whose header leads to another table without
//! a word: it reads as zeroes then, or as what lies elsewhere. But ours have nearly all in common,
//! and keep it: no table of theirs moves, for each has room for 16 TiB from the beginning. QEMU puts
//! the name of a backing file into some, at the end of a job, which nobody goes by.

use super::{
    Error, Header, Map,
    create::{CLUSTER, HEADER_LENGTH, L1_ROOM},
    field,
    header::header,
    incompatible::EXTENDED_L2,
    index, long, word,
};
use crate::units::Bytes;
use std::{fs::File, os::unix::fs::FileExt as _};

/// Whether the data of an image is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// It is not.
    Plain,
    /// It is, with LUKS.
    Encrypted,
    /// It is to be, and may be already.
    Either,
}

/// A field of the header, of 4 or 8 bytes, and the values that it has in images of ours.
struct Fixed(&'static str, usize, usize, &'static [u64]);

/// The longest name that QEMU takes.
const LONGEST_NAME: u32 = 1023;

/// Those that are the same in all of them (`create`).
const FIXED: [Fixed; 12] = [
    Fixed("version", field::VERSION, 4, &[3]),
    Fixed("cluster_bits", field::CLUSTER_BITS, 4, &[17]),
    Fixed("refcount_table_offset", field::REFCOUNT_TABLE, 8, &[CLUSTER]),
    Fixed("refcount_table_clusters", field::REFCOUNT_TABLE_CLUSTERS, 4, &[1]),
    Fixed("nb_snapshots", field::SNAPSHOTS, 4, &[0]),
    Fixed("snapshots_offset", field::SNAPSHOTS_TABLE, 8, &[0]),
    Fixed("incompatible_features", field::INCOMPATIBLE, 8, &[EXTENDED_L2]),
    Fixed("compatible_features", field::COMPATIBLE, 8, &[0]),
    Fixed("autoclear_features", field::AUTOCLEAR, 8, &[0]),
    Fixed("refcount_order", field::REFCOUNT_ORDER, 4, &[4]),
    Fixed("header_length", field::HEADER_LENGTH, 4, &[112]),
    Fixed("compression_type", field::COMPRESSION, 8, &[0]),
];

/// Reads the header of an image that `create` made, and that QEMU may have written to, and refuses
/// one that says what ours do not.
pub fn header_of_ours(file: &File, expected: Expected) -> Result<Header, Error> {
    let header = header(file)?;
    let mut bytes = [0; HEADER_LENGTH];
    file.read_exact_at(&mut bytes, 0).map_err(Error::io("reading the header of"))?;
    let methods: &[u64] = match expected {
        Expected::Plain => &[0],
        Expected::Encrypted => &[2],
        Expected::Either => &[0, 2],
    };
    let crypt_method = Fixed("crypt_method", field::CRYPT_METHOD, 4, methods);
    FIXED.iter().chain([&crypt_method]).try_for_each(|fixed| fixed.check(&bytes))?;
    check_name(&bytes)?;
    check_l1_table(&header)?;
    // What lies beyond the end of a file reads as zeroes: the table, and those that it leads to.
    Ok(Map::of(file, header)?.header().clone())
}

/// The backing file that the header of an image names. Nobody goes by it.
pub fn named_backing(file: &File) -> Result<Option<String>, Error> {
    let mut bytes = [0; HEADER_LENGTH];
    file.read_exact_at(&mut bytes, 0).map_err(Error::io("reading the header of"))?;
    let place = long(&bytes, field::BACKING_FILE);
    let length = word(&bytes, field::BACKING_FILE_LENGTH).min(LONGEST_NAME);
    if place == 0 || length == 0 {
        return Ok(None);
    }
    let mut name = vec![0; index(length.into())];
    file.read_exact_at(&mut name, place).map_err(Error::io("reading the header of"))?;
    Ok(Some(String::from_utf8_lossy(&name).into_owned()))
}

impl Fixed {
    fn check(&self, bytes: &[u8; HEADER_LENGTH]) -> Result<(), Error> {
        let Self(field, at, length, values) = *self;
        let value =
            bytes[at..at + length].iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        if values.contains(&value) {
            return Ok(());
        }
        Err(Error::Field { field, value, why: "is not what our images have" })
    }
}

/// A name is where QEMU takes one from.
fn check_name(bytes: &[u8; HEADER_LENGTH]) -> Result<(), Error> {
    let place = long(bytes, field::BACKING_FILE);
    let length = word(bytes, field::BACKING_FILE_LENGTH);
    let why = "cannot be";
    if place > CLUSTER {
        return Err(Error::Field { field: "backing_file_offset", value: place, why });
    }
    if u64::from(length) > u64::from(LONGEST_NAME).min(CLUSTER - place) {
        return Err(Error::Field { field: "backing_file_size", value: length.into(), why });
    }
    Ok(())
}

/// The L1 table is where it was made, unless QEMU had to make a longer one: beyond 16 TiB, or where
/// an image was made before all got room for that.
fn check_l1_table(header: &Header) -> Result<(), Error> {
    let why = "is not what our images have";
    let refuse = |field, value| Err(Error::Field { field, value, why });
    let has_room = header.size <= Bytes::new(L1_ROOM * header.reach());
    match (has_room, header.l1_entries) {
        (true, L1_ROOM) if header.l1_table == 3 * CLUSTER => Ok(()),
        (true, L1_ROOM) => refuse("l1_table_offset", header.l1_table),
        // A daemon that dies as it makes the table longer has moved it, and not set the size yet.
        (true, more) if more > L1_ROOM && header.l1_table == 3 * CLUSTER => refuse("l1_size", more),
        (true | false, _) => Ok(()),
    }
}

#[cfg(test)]
mod test {
    use super::{
        super::{grow, sample::Image},
        *,
    };

    const SIZE: u64 = 3 << 30;

    fn plain(image: &Image) -> Result<Header, Error> {
        header_of_ours(&image.file(), Expected::Plain)
    }

    #[test]
    fn an_image_stays_ours_whatever_is_done_with_it() {
        let image = Image::ours(Bytes::new(SIZE));
        plain(&image).unwrap();
        image.io(&["write -P 5 0 4k".into(), "write -P 6 2G 64k".into(), "discard 0 1M".into()]);
        plain(&image).unwrap();
        grow(&image.file(), Bytes::new(2 * SIZE)).unwrap();
        plain(&image).unwrap();
        image.io(&["truncate 9T".into(), "write -P 7 8T 64k".into(), "read -P 6 2G 64k".into()]);
        assert_eq!(plain(&image).unwrap().size(), Bytes::new(9 << 40));
        image.check();
        let large = Image::ours(Bytes::new(17 << 40));
        large.io(&["truncate 40T".into(), "write -P 7 39T 64k".into()]);
        plain(&large).unwrap();
    }

    #[test]
    fn an_image_that_lost_its_tables_is_refused() {
        let image = Image::ours(Bytes::new(SIZE));
        image.io(&["write -P 5 0 4k".into(), "write -P 6 2G 4k".into()]);
        let length = image.file().metadata().unwrap().len();
        for cut in [0, 50, 112, 200, 4096, 3 * CLUSTER, 4 * CLUSTER, 5 * CLUSTER] {
            assert!(cut < length);
            image.file().set_len(cut).unwrap();
            assert!(plain(&image).is_err(), "{cut}");
        }
    }

    #[test]
    fn a_backing_file_that_is_named_is_told() {
        let image = Image::ours(Bytes::new(SIZE));
        assert_eq!(named_backing(&image.file()).unwrap(), None);
        image.file().write_all_at(&[0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 5], 8).unwrap();
        image.file().write_all_at(b"/file", 512).unwrap();
        assert_eq!(named_backing(&image.file()).unwrap().as_deref(), Some("/file"));
        plain(&image).unwrap();
    }

    /// A size that is too large is seen by whoever knows it from a record.
    #[test]
    fn no_bit_of_the_header_can_be_flipped_but_in_the_size() {
        let image = Image::ours(Bytes::new(SIZE));
        image.io(&["write -P 5 0 4k".into()]);
        let mut whole = [0; HEADER_LENGTH];
        image.file().read_exact_at(&mut whole, 0).unwrap();
        for bit in 0..HEADER_LENGTH * 8 {
            let (at, mask) = (bit / 8, 1 << (bit % 8));
            image.file().write_all_at(&[whole[at] ^ mask], at.try_into().unwrap()).unwrap();
            let size = plain(&image).map(|header| header.size().count());
            let is_larger = matches!(size, Ok(size) if size > SIZE);
            let is_smaller = matches!(size, Ok(size) if size < SIZE);
            let in_size = (field::SIZE..field::SIZE + 8).contains(&at);
            let in_name = (field::BACKING_FILE..field::BACKING_FILE + 12).contains(&at);
            let is_told = size.is_err() || in_size && (is_larger || is_smaller);
            assert!(is_told || in_name, "byte {at}, {mask:#x}");
            image.file().write_all_at(&[whole[at]], at.try_into().unwrap()).unwrap();
        }
        plain(&image).unwrap();
    }

    #[test]
    fn an_image_of_others_is_refused() {
        for form in ["compat=1.1", "compat=0.10", "extended_l2=on,cluster_size=64k"] {
            assert!(plain(&Image::theirs(form, Bytes::new(SIZE))).is_err(), "{form}");
        }
        let encrypted = Image::encrypted(Bytes::new(SIZE));
        let error = plain(&encrypted).unwrap_err().to_string();
        assert!(error.contains("image with "), "{error}");
    }
}
