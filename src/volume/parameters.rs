//! What a caller may say of a volume: `StorageClass` parameters, sizes and access modes.

use super::{Format, InvalidName, PoolName, Throttle};
use crate::{
    source::{Access, InvalidSource, Source},
    units::Bytes,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The grain of every size: no disk has larger sectors, and QEMU wants multiples of 512.
pub const GRAIN: Bytes = Bytes::new(4096);

/// The size of a volume when a caller names none.
pub(super) const DEFAULT_SIZE: Bytes = Bytes::gib(1);

/// The key of a remote master.
const SOURCE: &str = "source";

/// Keys that the external-provisioner adds for its own use.
const RESERVED: &str = "csi.storage.k8s.io/";

/// The parameters of a volume, as they were given and checked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Parameters {
    given: BTreeMap<String, String>,
    pool: Option<PoolName>,
    publish: PublishAs,
    cache: Cache,
    format: Option<Format>,
    source: Option<Source>,
    source_format: Option<Format>,
    copy_mode: CopyMode,
    clone_speed: Bytes,
    encrypted: bool,
    throttle: Throttle,
}

/// How a volume stands to what it was made from: parameter `copyMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// It is the source.
    None,
    /// It keeps what is written; all else is read from the source.
    #[default]
    CopyOnWrite,
    /// It also keeps what was read once.
    CopyOnRead,
    /// It is copied in the background until nothing of the source is needed.
    Clone,
}

/// What a pod that mounts a volume finds: parameter `publish`. Who asks for a block device gets one
/// in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PublishAs {
    /// A directory with a vhost-user-blk socket, for a VM.
    #[default]
    VhostUser,
    /// A file system.
    Filesystem,
}

/// When a write of a guest is acknowledged: parameter `cache`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// As fast as can be with nothing lost when a daemon dies: write-back where the active layer
    /// is raw, else write-through.
    #[default]
    Auto,
    /// When it is durable, whatever the guest does.
    Writethrough,
    /// When the kernel or the disk has it; durable after the guest's flush. With a qcow2 layer the
    /// end of the daemon loses what was not flushed (facts/qsd.md, D2).
    Writeback,
}

/// A parameter that says nothing we understand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// No such key.
    #[error(
        "parameters: unknown key {0:?}; known are pool, publish, format, cache, source, \
         sourceFormat, copyMode, cloneBytesPerSecond, encryption and the limits (iops, bytesPerSecond, ...)"
    )]
    Unknown(String),
    /// The key cannot be changed, or there is no such key.
    #[error(
        "mutable_parameters: {0:?} is no limit; there are iops, iopsRead, iopsWrite, \
         bytesPerSecond, bytesPerSecondRead, bytesPerSecondWrite, and each with Max for a burst"
    )]
    NotMutable(String),
    /// Two limits that QEMU does not take together.
    #[error("{total} and {part} cannot both be set; set {total} to 0, or not {part}")]
    Exclusive {
        /// The limit of both directions.
        total: &'static str,
        /// The limit of one.
        part: &'static str,
    },
    /// A burst below what it may exceed, or without that.
    #[error("{key} is {value}, and {base} must be set and no more than that")]
    Burst {
        /// The key of the burst.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The key of the limit.
        base: &'static str,
    },
    /// The key is ours, its value is not.
    #[error("parameters: {key} is {value:?}, and must be {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// The key is ours, its value is none of those there are.
    #[error("parameters: {key} is {value:?}, and must be one of {}", expected.join(", "))]
    OneOf {
        /// The key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        expected: Vec<&'static str>,
    },
    /// The pool cannot be one.
    #[error("parameters: pool")]
    Pool(#[from] InvalidName),
    /// The source cannot be one.
    #[error("parameters: source")]
    Source(#[from] InvalidSource),
    /// The format of a source that is not there.
    #[error("parameters: sourceFormat is {0:?}, and there is no source")]
    NoSource(&'static str),
    /// The volume is to be encrypted in a format that is not.
    #[error(
        "parameters: encryption is \"luks\", and format is \"raw\"; an encrypted volume is qcow2"
    )]
    EncryptedRaw,
    /// The volume is to be its source, and encrypted.
    #[error(
        "parameters: encryption is \"luks\", and copyMode is \"none\": the volume would be source \
         {0}, which is as it is"
    )]
    EncryptedSource(Source),
    /// The volume is to be a source that cannot be written.
    #[error(
        "parameters: copyMode is \"none\", and source {0} can only be read; use copy-on-write, \
         copy-on-read or clone"
    )]
    ReadOnlySource(Source),
}

impl Parameters {
    /// The pool that was asked for, if any.
    pub fn pool(&self) -> Option<&PoolName> {
        self.pool.as_ref()
    }

    /// What a pod that mounts it finds.
    pub fn publish(&self) -> PublishAs {
        self.publish
    }

    /// When a write is acknowledged.
    pub fn cache(&self) -> Cache {
        self.cache
    }

    /// The format of a blank volume. Only qcow2 is encrypted so that a discard still frees space.
    pub fn blank_format(&self) -> Format {
        let default = if self.encrypted { Format::Qcow2 } else { Format::Raw };
        self.format.unwrap_or(default)
    }

    /// Whether it is to be encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.encrypted
    }

    /// The remote master it starts from where it is made from nothing else.
    pub fn source(&self) -> Option<&Source> {
        self.source.as_ref()
    }

    /// How the bytes of the master lie there: it is never probed.
    pub fn source_format(&self) -> Format {
        self.source_format.unwrap_or(Format::Raw)
    }

    /// How it stands to its source.
    pub fn copy_mode(&self) -> CopyMode {
        self.copy_mode
    }

    /// Bytes a second that a clone is copied with at most; 0: as fast as can be.
    pub fn clone_speed(&self) -> Bytes {
        self.clone_speed
    }

    /// The limits it begins with.
    pub fn throttle(&self) -> &Throttle {
        &self.throttle
    }

    /// The parameters as they were given, without those that are not ours; of a source, what may be
    /// seen.
    pub fn shown(&self) -> BTreeMap<String, String> {
        let mut shown = self.given.clone();
        if let (Some(text), Some(source)) = (shown.get_mut(SOURCE), &self.source) {
            *text = source.to_string();
        }
        shown
    }

    /// What cannot be encrypted.
    fn check_encryption(&self) -> Result<(), ParameterError> {
        if self.encrypted && self.format == Some(Format::Raw) {
            return Err(ParameterError::EncryptedRaw);
        }
        match &self.source {
            Some(source) if self.encrypted && self.copy_mode == CopyMode::None => {
                Err(ParameterError::EncryptedSource(source.clone()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// What goes with a source, and not without.
    fn check_source(&self) -> Result<(), ParameterError> {
        match (&self.source, self.source_format) {
            (None, Some(format)) => Err(ParameterError::NoSource(format.as_str())),
            (Some(source), _)
                if self.copy_mode == CopyMode::None && source.access() == Access::Read =>
            {
                Err(ParameterError::ReadOnlySource(source.clone()))
            }
            (Some(_) | None, _) => Ok(()),
        }
    }
}

impl TryFrom<BTreeMap<String, String>> for Parameters {
    type Error = ParameterError;

    fn try_from(given: BTreeMap<String, String>) -> Result<Self, ParameterError> {
        let mut parameters = Self::default();
        let mut limits = BTreeMap::new();
        for (key, value) in given {
            match key.as_str() {
                "pool" => parameters.pool = Some(value.parse()?),
                "publish" => parameters.publish = one_of("publish", &value, &PUBLISH)?,
                "cache" => parameters.cache = one_of("cache", &value, &CACHES)?,
                "format" => parameters.format = Some(one_of("format", &value, &FORMATS)?),
                SOURCE => parameters.source = Some(value.parse()?),
                "sourceFormat" => {
                    parameters.source_format = Some(one_of("sourceFormat", &value, &FORMATS)?);
                }
                "copyMode" => parameters.copy_mode = one_of("copyMode", &value, &COPY_MODES)?,
                "cloneBytesPerSecond" => parameters.clone_speed = clone_speed(&value)?,
                "encryption" => {
                    one_of("encryption", &value, &[("luks", ())])?;
                    parameters.encrypted = true;
                }
                _ if Throttle::is_key(&key) => _ = limits.insert(key.clone(), value.clone()),
                _ if key.starts_with(RESERVED) => continue,
                _ => return Err(ParameterError::Unknown(key)),
            }
            parameters.given.insert(key, value);
        }
        parameters.throttle = Throttle::default().with(&limits)?;
        parameters.check_source()?;
        parameters.check_encryption()?;
        Ok(parameters)
    }
}

impl From<Parameters> for BTreeMap<String, String> {
    fn from(parameters: Parameters) -> Self {
        parameters.given
    }
}

const PUBLISH: [(&str, PublishAs); 2] =
    [("vhost-user", PublishAs::VhostUser), ("filesystem", PublishAs::Filesystem)];

const CACHES: [(&str, Cache); 3] =
    [("auto", Cache::Auto), ("writethrough", Cache::Writethrough), ("writeback", Cache::Writeback)];

const FORMATS: [(&str, Format); 2] = [("raw", Format::Raw), ("qcow2", Format::Qcow2)];

impl CopyMode {
    /// The value of the parameter.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::CopyOnWrite => "copy-on-write",
            Self::CopyOnRead => "copy-on-read",
            Self::Clone => "clone",
        }
    }
}

const COPY_MODES: [(&str, CopyMode); 4] = [
    ("none", CopyMode::None),
    ("copy-on-write", CopyMode::CopyOnWrite),
    ("copy-on-read", CopyMode::CopyOnRead),
    ("clone", CopyMode::Clone),
];

fn one_of<T: Copy>(
    key: &'static str,
    value: &str,
    known: &[(&'static str, T)],
) -> Result<T, ParameterError> {
    let found = known.iter().find(|(name, _)| *name == value);
    found.map(|(_, meaning)| *meaning).ok_or_else(|| ParameterError::OneOf {
        key,
        value: value.to_owned(),
        expected: known.iter().map(|(name, _)| *name).collect(),
    })
}

fn clone_speed(value: &str) -> Result<Bytes, ParameterError> {
    value.parse().map_err(|_| ParameterError::Value {
        key: "cloneBytesPerSecond",
        value: value.to_owned(),
        expected: "bytes a second such as 100Mi; 0 for no limit",
    })
}

/// Who may use a volume at the same time, in CSI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum AccessMode {
    /// One node, writable; published at one target.
    SingleNodeWriter,
    /// One node, one workload, writable; published at one target.
    SingleNodeSingleWriter,
    /// One node, several workloads: published at several targets, as hot-plugging needs
    /// (facts/csi.md section 1).
    SingleNodeMultiWriter,
    /// One node, read-only; published at one target.
    SingleNodeReaderOnly,
    /// Read-only, at any number of targets.
    MultiNodeReaderOnly,
    /// Writable, at any number of targets, whose users keep apart among themselves.
    MultiNodeMultiWriter,
}

impl AccessMode {
    /// CSI's name for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SingleNodeWriter => "SINGLE_NODE_WRITER",
            Self::SingleNodeSingleWriter => "SINGLE_NODE_SINGLE_WRITER",
            Self::SingleNodeMultiWriter => "SINGLE_NODE_MULTI_WRITER",
            Self::SingleNodeReaderOnly => "SINGLE_NODE_READER_ONLY",
            Self::MultiNodeReaderOnly => "MULTI_NODE_READER_ONLY",
            Self::MultiNodeMultiWriter => "MULTI_NODE_MULTI_WRITER",
        }
    }

    /// What is done with a volume.
    pub fn access(self) -> Access {
        match self {
            Self::SingleNodeWriter
            | Self::SingleNodeSingleWriter
            | Self::SingleNodeMultiWriter
            | Self::MultiNodeMultiWriter => Access::Write,
            Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly => Access::Read,
        }
    }

    /// Whether a node may publish it at several targets (CSI spec, `NodePublishVolume`).
    pub fn is_for_several(self) -> bool {
        match self {
            Self::SingleNodeMultiWriter
            | Self::MultiNodeReaderOnly
            | Self::MultiNodeMultiWriter => true,
            Self::SingleNodeWriter | Self::SingleNodeSingleWriter | Self::SingleNodeReaderOnly => {
                false
            }
        }
    }
}

/// How much more than what is free a pool may promise: volumes take no space until written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overcommit {
    hundredths: u64,
}

impl Overcommit {
    /// No more than what is free.
    pub const NONE: Self = Self { hundredths: 100 };

    /// What may be promised of so much.
    pub(super) fn of(self, space: Bytes) -> Bytes {
        let promised = u128::from(space.count()) * u128::from(self.hundredths) / 100;
        let most = u64::MAX >> 1; // CSI's sizes are signed
        Bytes::new(u64::try_from(promised).unwrap_or(most).min(most))
    }
}

/// A factor such as `1.5` or `20`.
impl std::str::FromStr for Overcommit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let plain =
            !fraction.is_empty() && fraction.len() <= 2 && digits(whole) && digits(fraction);
        let hundredths = || {
            let fraction: u64 = format!("{fraction:0<2}").parse().ok()?;
            whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(fraction)
        };
        let found = if plain { hundredths() } else { None };
        let found = found.filter(|found| (100..=1_000_000).contains(found));
        let found = found.ok_or("write a factor from 1 to 10000, such as 1.5 or 20")?;
        Ok(Self { hundredths: found })
    }
}

/// The sizes a caller accepts (CSI `CapacityRange`), and the one we choose among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeRange {
    required: Bytes,
    limit: Option<Bytes>,
    chosen: Bytes,
}

/// A range of sizes that no volume can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// Neither bound is set.
    #[error("capacity_range: required_bytes and limit_bytes are both 0; set at least one")]
    Empty,
    /// A bound is below zero.
    #[error("capacity_range: {field} is {value}, below 0")]
    Negative {
        /// Which bound.
        field: &'static str,
        /// What was given.
        value: i64,
    },
    /// The bounds are the wrong way round.
    #[error("capacity_range: required_bytes {required} is more than limit_bytes {limit}")]
    Reversed {
        /// The lower bound.
        required: i64,
        /// The upper bound.
        limit: i64,
    },
    /// No multiple of the grain lies within the bounds.
    #[error(
        "capacity_range: no multiple of 4096 lies from required_bytes {required} to limit_bytes {limit}"
    )]
    NoneFits {
        /// The lower bound.
        required: i64,
        /// The upper bound.
        limit: i64,
    },
}

impl SizeRange {
    /// Any size will do.
    pub const ANY: Self = Self { required: Bytes::ZERO, limit: None, chosen: DEFAULT_SIZE };

    /// This size, or any that is larger.
    pub fn at_least(size: Bytes) -> Self {
        Self { required: size, limit: None, chosen: size }
    }

    /// The range with these bounds, 0 meaning unset, and the smallest size within it (the default
    /// size where only an upper bound is set).
    pub fn new(required: i64, limit: i64) -> Result<Self, RangeError> {
        let negative = |field| move |value| RangeError::Negative { field, value };
        let floor = Bytes::try_from(required).map_err(|_| negative("required_bytes")(required))?;
        let ceiling = Bytes::try_from(limit).map_err(|_| negative("limit_bytes")(limit))?;
        let limited = (limit > 0).then_some(ceiling);
        let none_fits = || RangeError::NoneFits { required, limit };
        let chosen = match limited {
            None if required == 0 => return Err(RangeError::Empty),
            Some(_) if required > limit => return Err(RangeError::Reversed { required, limit }),
            Some(most) if required == 0 => DEFAULT_SIZE.min(most.round_down(GRAIN)),
            _ => floor.round_up(GRAIN).ok_or_else(none_fits)?,
        };
        if chosen == Bytes::ZERO || i64::try_from(chosen.count()).is_err() {
            return Err(none_fits());
        }
        if limited.is_some_and(|most| chosen > most) {
            return Err(none_fits());
        }
        Ok(Self { required: floor, limit: limited, chosen })
    }

    /// The size that a new volume gets.
    pub fn chosen(&self) -> Bytes {
        self.chosen
    }

    /// The size for a volume made from a source of `size`, where there is one: no smaller than
    /// that, and as large where nothing was required.
    pub fn chosen_for(&self, source: Bytes) -> Option<Bytes> {
        let asked = if self.required == Bytes::ZERO { source } else { self.chosen };
        let fits = asked >= source && self.accepts(asked);
        fits.then(|| asked.round_up(GRAIN)).flatten()
    }

    /// Whether a volume of `size` would do.
    pub fn accepts(&self, size: Bytes) -> bool {
        size >= self.required && self.limit.is_none_or(|limit| size <= limit)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    fn parameters(given: &[(&str, &str)]) -> Result<Parameters, ParameterError> {
        let given: BTreeMap<_, _> =
            given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        given.try_into()
    }

    #[test]
    fn what_the_provisioner_adds_is_no_parameter_of_ours() {
        let plain = parameters(&[("pool", "fast"), ("publish", "vhost-user")]).unwrap();
        let with_more = parameters(&[
            ("pool", "fast"),
            ("publish", "vhost-user"),
            ("csi.storage.k8s.io/pvc/name", "db-0"),
        ]);
        assert_eq!(plain.pool().map(PoolName::as_str), Some("fast"));
        assert_eq!(Ok(plain), with_more);
    }

    #[test]
    fn a_parameter_that_is_not_served_is_named_with_its_value() {
        for (key, value, text) in [
            ("Pool", "a", "unknown key \"Pool\""),
            ("publish", "floppy", "publish is \"floppy\""),
            ("format", "vmdk", "format is \"vmdk\""),
            ("copyMode", "full", "copyMode is \"full\""),
            ("cloneBytesPerSecond", "fast", "cloneBytesPerSecond is \"fast\""),
            ("iops", "many", "iops is \"many\""),
            ("cache", "none", "cache is \"none\""),
            ("encryption", "aes", "encryption is \"aes\""),
        ] {
            let error = parameters(&[(key, value)]).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(matches!(parameters(&[("pool", "../x")]), Err(ParameterError::Pool(_))));
    }

    #[test]
    fn the_smallest_size_that_will_do_is_chosen() {
        for (required, limit, size) in [
            (1, 0, 4096),
            (1 << 30, 0, 1 << 30),
            ((1 << 30) + 1, 0, (1 << 30) + 4096),
            (0, 8192, 8192),
            (0, 1 << 40, 1 << 30),
            (4096, 4096, 4096),
        ] {
            let range = SizeRange::new(required, limit).unwrap();
            assert_eq!(range.chosen().count(), size, "{required} {limit}");
        }
    }

    #[test]
    fn a_range_without_a_size_in_it_is_refused_with_its_bounds() {
        for (required, limit, text) in [
            (0, 0, "both 0"),
            (-1, 0, "required_bytes is -1"),
            (0, -5, "limit_bytes is -5"),
            (2, 1, "required_bytes 2 is more than limit_bytes 1"),
            (1, 4095, "no multiple"),
            (0, 100, "no multiple"),
            (i64::MAX, 0, "no multiple"),
        ] {
            let error = SizeRange::new(required, limit).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_chosen_size_lies_in_its_range(required: i64, limit: i64) {
            if let Ok(range) = SizeRange::new(required, limit) {
                prop_assert!(range.accepts(range.chosen()));
                prop_assert_eq!(range.chosen().count() % 4096, 0);
            }
        }
    }
}
