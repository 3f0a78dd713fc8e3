//! The LUKS header of an encrypted image: what it takes, with the passphrase, to read the rest.
//!
//! ```text
//!  an encrypted image of ours, in clusters of 128 KiB
//!  | 0 header | 1 refcount table | 2 refcount block | 3.. L1 table | LUKS header |
//! ```
//!
//! QEMU makes one; overlays take it over byte for byte. So they have the same key and open with the
//! same passphrase, and nobody need know it to make one.

use super::{
    Error, field,
    header::{check_encrypted, header},
    long, word,
};
use std::{fmt, fs::File, os::unix::fs::FileExt as _};

/// The extension of a qcow2 header that says where the LUKS header lies: its offset and length.
pub(super) const EXTENSION: u32 = 0x0537_be77;

/// The `crypt_method` of LUKS.
pub(super) const METHOD: u32 = 2;

/// That of QEMU has 2,068,480 bytes: eight slots for AES-256 in XTS mode.
const LONGEST: u64 = 16 << 20;

/// What a LUKS header is written in: most of it is empty.
const BLOCK: usize = 4096;

/// The LUKS header of an image. What is secret in it is encrypted with the passphrase.
#[derive(Clone, PartialEq, Eq)]
pub struct LuksHeader(Vec<u8>);

impl LuksHeader {
    /// How many bytes it has.
    pub(super) fn length(&self) -> u64 {
        u64::try_from(self.0.len()).expect("it was bounded as it was read")
    }

    /// Writes it to where nothing but a hole is.
    pub(super) fn write(&self, file: &File, offset: u64) -> std::io::Result<()> {
        let mut at = offset;
        for block in self.0.chunks(BLOCK) {
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(block, at)?;
            }
            at += u64::try_from(block.len()).expect("a block is short");
        }
        Ok(())
    }
}

impl fmt::Debug for LuksHeader {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "LuksHeader({} bytes)", self.0.len())
    }
}

/// Reads the LUKS header of an image; one without is refused.
pub fn luks_header(file: &File) -> Result<LuksHeader, Error> {
    let cluster = header(file)?.cluster;
    let mut first = vec![0; super::index(cluster)];
    let io = Error::io("reading the LUKS header of");
    if let Err(error) = file.read_exact_at(&mut first, 0) {
        return Err(io(error));
    }
    check_encrypted(&first)?;
    let (offset, length) = place(&first)?;
    if !offset.is_multiple_of(cluster) || offset == 0 || offset > super::OFFSET {
        return refuse("crypto header offset", offset, "is not the offset of a cluster");
    }
    if length == 0 || length > LONGEST {
        return refuse("crypto header length", length, "is not supported");
    }
    let mut bytes = vec![0; super::index(length)];
    file.read_exact_at(&mut bytes, offset).map_err(io)?;
    Ok(LuksHeader(bytes))
}

/// Where the header extensions in the first cluster say that it lies.
fn place(first: &[u8]) -> Result<(u64, u64), Error> {
    let missing = || refuse("crypt_method", METHOD.into(), "has no LUKS header");
    let mut at = super::index(word(first, field::HEADER_LENGTH).into());
    loop {
        let Some(head) = first.get(at..at + 8) else { return missing() };
        let (kind, length) = (word(head, 0), super::index(word(head, 4).into()));
        let Some(data) = first.get(at + 8..at + 8 + length) else { return missing() };
        match kind {
            0 => return missing(),
            EXTENSION if length == 16 => return Ok((long(data, 0), long(data, 8))),
            _ => at += 8 + length.next_multiple_of(8),
        }
    }
}

fn refuse<T>(field: &'static str, value: u64, why: &'static str) -> Result<T, Error> {
    Err(Error::Field { field, value, why })
}

#[cfg(test)]
mod test {
    use super::{
        super::{allocation, create, create_encrypted, grow, sample::Image},
        *,
    };
    use crate::units::Bytes;
    use proptest::{collection::vec, prelude::*};
    use std::os::unix::fs::MetadataExt as _;

    const SIZE: Bytes = Bytes::gib(1);

    /// One that QEMU made, and its header.
    fn theirs() -> (Image, LuksHeader) {
        let image = Image::encrypted(SIZE);
        let header = luks_header(&image.file()).unwrap();
        (image, header)
    }

    #[test]
    fn qemu_opens_an_image_that_took_a_header_over() {
        let (theirs, luks) = theirs();
        for size in [1 << 20, 1 << 40, 20 << 40].map(Bytes::new) {
            let ours = Image::ours_with(|file| create_encrypted(file, size, &luks).unwrap());
            ours.check_unlocked();
            assert_eq!(luks_header(&ours.file()).unwrap(), luks);
            let spent = ours.path().metadata().unwrap().blocks() * 512;
            assert!(spent <= 384 << 10, "an empty image of {size} takes {spent}");
            let last = size.count() - 4096;
            let write = ["write -P 5 0 4k".into(), format!("write -P 7 {last} 4k")];
            let read = ["read -P 5 0 4k".into(), format!("read -P 7 {last} 4k")];
            assert!(ours.unlocked(&[&write[..], &read].concat()));
            ours.check_unlocked();
            assert!(!allocation(&ours.file()).unwrap().is_empty());
            let bytes = std::fs::read(ours.path());
            let is_plain = |bytes: Vec<u8>| bytes.windows(64).any(|part| part == [5; 64]);
            assert!(size.count() > 1 << 20 || !is_plain(bytes.unwrap()), "plain text");
        }
        assert!(theirs.unlocked(&["read -P 0 0 4k".into()]));
    }

    #[test]
    fn an_encrypted_image_grows_without_its_passphrase() {
        let (theirs, luks) = theirs();
        let ours = Image::ours_with(|file| create_encrypted(file, SIZE, &luks).unwrap());
        for image in [ours, theirs] {
            assert!(image.unlocked(&["write -P 5 0 4k".into()]));
            grow(&image.file(), Bytes::new(1 << 40)).unwrap();
            image.check_unlocked();
            let ends = ["read -P 5 0 4k".into(), "write -P 7 1023G 4k".into()];
            assert!(image.unlocked(&ends));
        }
    }

    proptest! {
        #[test]
        fn reading_a_header_never_panics(changes in vec((0_u64..512, any::<u8>()), 1..20)) {
            let file = tempfile::tempfile().unwrap();
            create_encrypted(&file, SIZE, &LuksHeader(vec![7; 5000])).unwrap();
            for (at, byte) in changes {
                file.write_all_at(&[byte], at).unwrap();
            }
            _ = luks_header(&file);
        }
    }

    #[test]
    fn what_has_no_sound_header_is_refused() {
        let plain = Image::ours_with(|file| create(file, SIZE).unwrap());
        let error = luks_header(&plain.file()).unwrap_err().to_string();
        assert!(error.contains("crypt_method 0"), "{error}");
        let (_, luks) = theirs();
        let broken = |at: u64, value: &[u8]| {
            let image = Image::ours_with(|file| create_encrypted(file, SIZE, &luks).unwrap());
            image.file().write_all_at(value, at).unwrap();
            luks_header(&image.file()).unwrap_err().to_string()
        };
        // Behind the header and the names of features.
        let extension = 112 + 8 + 48;
        for (at, value, text) in [
            (extension, &[0; 8][..], "no LUKS header"),
            (extension + 4, &[0xff; 4], "no LUKS header"),
            (extension + 8, &[1; 8], "offset of a cluster"),
            (extension + 16, &[1; 8], "not supported"),
            (extension + 16, &[0; 8], "not supported"),
            (112 + 4, &[0xff; 4], "no LUKS header"),
        ] {
            let error = broken(at, value);
            assert!(error.contains(text), "{at}: {error}");
        }
    }
}
