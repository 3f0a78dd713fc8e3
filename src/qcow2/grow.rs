//! Enlarges images that nobody has open.

use super::{
    Error, Header, MOST_L1_ENTRIES, Map, field,
    header::{check_size, header},
    index,
};
use crate::units::Bytes;
use std::{fs::File, io, ops::Range, os::unix::fs::FileExt as _};

/// The fields that grow, which lie in one sector: they change together or not at all.
const CHANGED: Range<usize> = field::SIZE..field::L1_TABLE;
const _: () = assert!(CHANGED.end <= 512);

/// Enlarges the disk of an image that nobody has open; durable when it returns.
///
/// At any instant the image has the old size or the new one. The L1 table grows within its clusters
/// and stays where it is: an image made with clusters of 128 KiB for less than 16 TiB grows up to
/// that, a larger one by the rest of its last 16 TiB. What the new part reads as is, as ever where
/// nothing was written, up to the layer below.
pub fn grow(file: &File, size: Bytes) -> Result<(), Error> {
    let header = header(file)?;
    if size < header.size {
        return Err(Error::Shrink { from: header.size, to: size });
    }
    check_size(size)?;
    check_alone(&header)?;
    let limit = limit(&header);
    if size > limit {
        return Err(Error::Limit { limit, to: size });
    }
    if size == header.size {
        return Ok(());
    }
    let entries = header.l1_entries.max(header.l1_needed(size));
    check_unused(file, &header)?;
    clear(file, &header, entries)?;
    let entries = u32::try_from(entries).expect("an L1 table is no longer than its limit");
    write_size(file, size, entries)
}

/// The largest disk that the L1 table can describe without leaving its clusters.
fn limit(header: &Header) -> Bytes {
    let room = (header.l1_entries * 8).next_multiple_of(header.cluster) / 8;
    Bytes::new(room.min(MOST_L1_ENTRIES) * header.reach())
}

/// That nothing else in the image goes by the size of the disk. What we make has none of it.
fn check_alone(header: &Header) -> Result<(), Error> {
    let refuse = |field, value, why| Err(Error::Field { field, value, why });
    if header.snapshots != 0 {
        return refuse("nb_snapshots", header.snapshots.into(), "cannot grow with the image");
    }
    if header.autoclear != 0 {
        return refuse("autoclear_features", header.autoclear, "cannot grow with the image");
    }
    Ok(())
}

/// That the tables say nothing of what lies beyond the end yet: it would come to light.
fn check_unused(file: &File, header: &Header) -> Result<(), Error> {
    let described = Bytes::new(header.l1_entries * header.reach());
    let end = header.size.count().next_multiple_of(header.cluster);
    let map = Map::of(file, Header { size: described, ..header.clone() })?;
    if map.within(file, end..described.count())?.is_empty() {
        return Ok(());
    }
    Err(Error::Field {
        field: "size",
        value: header.size.count(),
        why: "is not all that its tables describe",
    })
}

/// Clears what will be the entries of the L1 table beyond those it has, durably.
fn clear(file: &File, header: &Header, entries: u64) -> Result<(), Error> {
    let clear = || {
        let start = header.l1_table + header.l1_entries * 8;
        let end = header.l1_table + entries * 8;
        let mut bytes = vec![0; index(end - start)];
        let length = file.metadata()?.len();
        if length >= end {
            file.read_exact_at(&mut bytes, start)?;
            if bytes.iter().all(|byte| *byte == 0) {
                return Ok(());
            }
        }
        bytes.fill(0);
        file.write_all_at(&bytes, start)?;
        file.sync_all()
    };
    clear().map_err(Error::io("clearing the rest of the L1 table of"))
}

/// Changes the size, and with it the length of the L1 table, durably.
fn write_size(file: &File, size: Bytes, entries: u32) -> Result<(), Error> {
    let write = || {
        let mut fields = [0; CHANGED.end - CHANGED.start];
        let at = u64::try_from(CHANGED.start).map_err(io::Error::other)?;
        file.read_exact_at(&mut fields, at)?;
        let place = |field: usize, length| field - CHANGED.start..field - CHANGED.start + length;
        fields[place(field::SIZE, 8)].copy_from_slice(&size.count().to_be_bytes());
        fields[place(field::L1_ENTRIES, 4)].copy_from_slice(&entries.to_be_bytes());
        file.write_all_at(&fields, at)?;
        file.sync_all()
    };
    write().map_err(Error::io("writing the size into the header of"))
}

#[cfg(test)]
mod test {
    use super::{
        super::{allocation, sample::Image},
        *,
    };

    const TIB: u64 = 1 << 40;

    /// Grows it, and has QEMU look at it, write to the end and read what was there before.
    fn grown(image: &Image, size: u64) {
        let before = allocation(&image.file()).unwrap();
        grow(&image.file(), Bytes::new(size)).unwrap();
        image.check();
        assert_eq!(image.info()["virtual-size"], size);
        assert_eq!(allocation(&image.file()).unwrap(), before);
        let last = size - 4096;
        image.io(&[
            "read -P 5 0 4k".into(),
            format!("read -P 0 {last} 4k"),
            format!("write -P 7 {last} 4k"),
            format!("read -P 7 {last} 4k"),
        ]);
        image.check();
    }

    #[test]
    fn an_image_grows_in_steps_and_keeps_what_it_has() {
        let image = Image::ours(Bytes::new(1 << 20));
        image.io(&["write -P 5 0 4k".into()]);
        for size in [(1 << 20) + 4096, 1 << 30, (1 << 30) + 4096, 100 << 30, TIB, 16 * TIB] {
            grown(&image, size);
        }
    }

    #[test]
    fn an_image_beyond_one_cluster_of_table_grows_to_the_next() {
        let image = Image::ours(Bytes::new(20 * TIB));
        image.io(&["write -P 5 0 4k".into()]);
        grown(&image, 32 * TIB);
        let error = grow(&image.file(), Bytes::new(32 * TIB + 4096)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "image can grow to 32Ti in place, and not to 35184372092928 bytes"
        );
    }

    #[test]
    fn images_that_qemu_made_and_enlarged_grow() {
        for form in ["compat=0.10", "compat=1.1", "cluster_size=128k,extended_l2=on"] {
            let image = Image::theirs(form, Bytes::new(1 << 20));
            image.io(&["write -P 5 0 4k".into(), "truncate 3G".into(), "write 2G 1M".into()]);
            grown(&image, 5 << 30);
            grown(&image, TIB);
        }
    }

    #[test]
    fn a_table_that_qemu_moved_grows_where_it_lies() {
        let image = Image::theirs("cluster_size=64k", Bytes::new(1 << 30));
        let table = header(&image.file()).unwrap().l1_table;
        image.io(&["write -P 5 0 4k".into(), "truncate 5T".into()]);
        assert_ne!(header(&image.file()).unwrap().l1_table, table);
        grown(&image, 7 * TIB);
    }

    #[test]
    fn what_lies_behind_the_table_does_not_come_to_light() {
        let image = Image::theirs("cluster_size=128k,extended_l2=on", Bytes::gib(1));
        image.io(&["write -P 5 0 4k".into()]);
        let table = header(&image.file()).unwrap().l1_table;
        image.file().write_all_at(&[0xff; 4096], table + 8).unwrap();
        grown(&image, TIB);
    }

    #[test]
    fn nothing_is_taken_away_and_nothing_odd_is_made() {
        let image = Image::ours(Bytes::gib(2));
        image.io(&["write -P 5 0 4k".into()]);
        let grow = |size| grow(&image.file(), size).map_err(|error| error.to_string());
        let shrunk = grow(Bytes::gib(1)).unwrap_err();
        assert_eq!(shrunk, "image has 2147483648 bytes and cannot shrink to 1073741824");
        let odd = Bytes::new((2 << 30) + 1);
        assert!(grow(odd).unwrap_err().contains("size 2147483649, which is no multiple of 512"));
        let limit = grow(Bytes::new(16 * TIB + 512)).unwrap_err();
        assert_eq!(limit, "image can grow to 16Ti in place, and not to 17592186044928 bytes");
        assert_eq!(grow(Bytes::gib(2)), Ok(()));
        assert_eq!(header(&image.file()).unwrap().size, Bytes::gib(2));
    }

    #[test]
    fn what_goes_by_the_size_of_the_disk_is_not_left_behind() {
        let image = Image::ours(Bytes::gib(1));
        for (at, field) in [(field::SNAPSHOTS, "nb_snapshots"), (field::AUTOCLEAR + 4, "autocl")] {
            let at = u64::try_from(at).unwrap();
            image.file().write_all_at(&1_u32.to_be_bytes(), at).unwrap();
            let error = grow(&image.file(), Bytes::gib(2)).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
            image.file().write_all_at(&0_u32.to_be_bytes(), at).unwrap();
        }
        // Tables that describe more than the size does.
        image.io(&["write 1M 4k".into()]);
        let at = u64::try_from(field::SIZE).unwrap();
        image.file().write_all_at(&(1_u64 << 20).to_be_bytes(), at).unwrap();
        let error = grow(&image.file(), Bytes::gib(2)).unwrap_err().to_string();
        assert!(error.contains("not all that its tables describe"), "{error}");
    }
}
