//! Fuzzing of what a CSI request says.
//!
//! Each line is one thing that it says, by its first letter:
//!
//! ```text
//!  p KEY=VALUE  a parameter            m KEY=VALUE  a mutable one       s KEY=VALUE  a secret
//!  c KEY=VALUE  of the volume context  f FLAG       a mount flag        t KIND       a file system
//!  i ID         of a volume, snapshot  n NAME       of a new one        h PATH       on the host
//!  k TOKEN      of a page              r FROM TO    a range of sizes
//! ```

use super::{
    ephemeral,
    parse::{self, Error},
    pb::csi as pb,
};
use crate::{
    chain::Chain,
    fuzz::{PASSWORD, read_back},
    node::{Form, HostPath},
    volume::{Parameters, PublishAs, SnapshotId, Throttle, VolumeId},
};
use pb::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode};
use std::{
    collections::{BTreeMap, HashMap},
    path::{Component, Path},
};

type Pairs = HashMap<String, String>;

/// What the lines say, together.
#[derive(Default)]
struct Said {
    parameters: Pairs,
    mutable: Pairs,
    secrets: Pairs,
    context: Pairs,
    flags: Vec<String>,
    kind: String,
}

/// Any text, taken for what requests say.
pub fn requests(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let mut said = Said::default();
    for line in text.lines() {
        said.take(line);
    }
    said.judge();
}

impl Said {
    fn take(&mut self, line: &str) {
        let Some((letter, rest)) = line.split_once(' ') else { return };
        let pairs = match letter {
            "p" => &mut self.parameters,
            "m" => &mut self.mutable,
            "s" => &mut self.secrets,
            "c" => &mut self.context,
            "f" => return self.flags.push(rest.to_owned()),
            "t" => return rest.clone_into(&mut self.kind),
            "i" => return id(rest),
            "n" => return name(rest),
            "h" => return path(rest),
            "k" => return page(rest),
            "r" => return range(rest),
            _ => return,
        };
        let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
        pairs.insert(key.to_owned(), value.to_owned());
    }

    fn judge(mut self) {
        let publish = self.parameters();
        self.mutable();
        self.passphrase();
        self.flags(publish);
        self.inline();
    }

    /// What is taken is recorded, and reads back the same; what is not is refused by its name.
    fn parameters(&self) -> PublishAs {
        match parse::parameters(self.parameters.clone()) {
            Ok(parameters) => {
                let text = serde_json::to_vec(&parameters).expect("parameters can be recorded");
                assert_eq!(read_back::<Parameters>(&text).as_ref(), Some(&parameters));
                let given: BTreeMap<_, _> = parameters.clone().into();
                let shown = parameters.shown();
                assert!(given.keys().eq(shown.keys()));
                assert!(given.keys().all(|key| self.parameters.contains_key(key)));
                self.secrets(&parameters);
                parameters.publish()
            }
            Err(error) => {
                require_named(&error, &self.parameters);
                PublishAs::default()
            }
        }
    }

    /// Secrets are never shown, neither where they are taken nor where they are refused.
    fn secrets(&self, parameters: &Parameters) {
        let is_planted = self.secrets.values().any(|value| value.contains(PASSWORD))
            && !self.secrets.keys().any(|key| key.contains(PASSWORD));
        let said = match parse::secrets(parameters.source(), self.secrets.clone()) {
            Ok(secrets) => format!("{secrets:?}"),
            Err(error) => format!("{} {error:?}", Chain(&error)),
        };
        assert!(!is_planted || !said.contains(PASSWORD), "{said}");
    }

    fn passphrase(&mut self) {
        let planted = self.secrets.values().any(|value| value.contains(PASSWORD));
        if let Err(error) = parse::passphrase(true, &mut self.secrets) {
            let said = format!("{} {error:?}", Chain(&error));
            assert!(!planted || !said.contains(PASSWORD), "{said}");
        }
    }

    /// Limits are changed as a whole or not at all, and setting them once more changes nothing.
    fn mutable(&self) {
        let changes = parse::mutable_parameters(self.mutable.clone());
        match Throttle::default().with(&changes) {
            Ok(throttle) => {
                assert_eq!(throttle.with(&changes).as_ref(), Ok(&throttle));
                assert!(
                    throttle
                        .limits()
                        .all(|(_, value)| (1..=1_000_000_000_000_000).contains(&value))
                );
                let text = serde_json::to_vec(&throttle).expect("limits can be recorded");
                assert_eq!(read_back(&text), Some(throttle));
            }
            Err(error) => require_named(&error.into(), &self.mutable),
        }
    }

    fn flags(&self, publish: PublishAs) {
        let mount = MountVolume {
            fs_type: self.kind.clone(),
            mount_flags: self.flags.clone(),
            volume_mount_group: self.kind.clone(),
        };
        for access_type in [AccessType::Mount(mount), AccessType::Block(BlockVolume {})] {
            for mode in 0..9 {
                let capability = capability(access_type.clone(), mode);
                if let Ok(used) = parse::used(&capability, publish)
                    && let Form::Filesystem { .. } = &used.form
                {
                    // It is recorded with whoever is served.
                    let text = serde_json::to_vec(&used.form).expect("a form can be recorded");
                    assert_eq!(read_back(&text), Some(used.form));
                }
            }
        }
    }

    /// A pod names no file of its node.
    fn inline(&self) {
        let request = pb::NodePublishVolumeRequest {
            volume_id: format!("csi-{}", "a1".repeat(32)),
            volume_context: self.context.clone(),
            secrets: self.secrets.clone(),
            ..Default::default()
        };
        let Ok(target) = parse::path("target_path", "/t".to_owned()) else { return };
        let mount = AccessType::Mount(MountVolume::default());
        let used = capability(mount, Mode::SingleNodeWriter.into());
        match ephemeral::inline(request, target, &used) {
            Ok(inline) => {
                assert!(inline.new.content.is_none());
                let source = inline.new.parameters.source();
                assert!(source.is_none_or(|source| !source.names_a_file()), "{source:?}");
            }
            Err(error) => {
                let said = Chain(&error).to_string();
                let is_named = ["volume_context", "secrets", "volume_capability", "fs_type"];
                assert!(is_named.iter().any(|field| said.starts_with(field)), "{said}");
            }
        }
    }
}

fn capability(access_type: AccessType, mode: i32) -> pb::VolumeCapability {
    pb::VolumeCapability { access_type: Some(access_type), access_mode: Some(AccessMode { mode }) }
}

/// That an error names one of the keys that were given.
fn require_named(error: &Error, given: &Pairs) {
    let said = Chain(error).to_string();
    let is_named = |key: &String| said.contains(key) || said.contains(&format!("{key:?}"));
    assert!(given.keys().any(is_named), "{said}: {given:?}");
}

/// An id that is ours is one that we would give, and can be the name of a file.
fn id(text: &str) {
    if let Ok(Ok(id)) = parse::volume_id(text.to_owned()) {
        assert_eq!(id.as_str(), text);
        assert!(!text.contains('/') && !text.starts_with('.') && text.len() <= 63);
    }
    if let Ok(Ok(id)) = parse::snapshot_id("snapshot_id", text.to_owned()) {
        assert_eq!(id.as_str(), text);
    }
    assert_eq!(parse::volume_id(text.to_owned()).is_err(), text.is_empty());
    _ = ephemeral::volume_id(text.to_owned());
}

fn name(text: &str) {
    if let Err(error) = parse::name(text) {
        let said = Error::of_volume_id(error).to_string();
        assert!(said.starts_with("volume_id: ") && said.len() < 2000, "{said}");
    } else {
        assert!((1..=128).contains(&text.len()) && !text.contains('\0'));
    }
}

/// A path is absolute, leads up nowhere, and is taken as it was judged.
fn path(text: &str) {
    match parse::path("target_path", text.to_owned()) {
        Ok(path) => {
            let judged = path.as_path();
            assert!(judged.is_absolute());
            assert!(!judged.components().any(|part| part == Component::ParentDir));
            let again = judged.to_str().map(str::to_owned).expect("it came from a text");
            assert_eq!(HostPath::parse("target_path", again).ok().as_ref(), Some(&path));
        }
        Err(error) => assert!(error.to_string().starts_with("target_path: "), "{error}"),
    }
    assert_eq!(Path::new(text).is_absolute(), text.starts_with('/'));
}

/// A token leads to where it was given out.
fn page(text: &str) {
    if let Ok((Some(id), _)) = parse::page::<VolumeId>(1, text) {
        assert_eq!(parse::token(id), text);
    }
    if let Ok((Some(id), _)) = parse::page::<SnapshotId>(1, text) {
        assert_eq!(parse::token(id), text);
    }
}

/// The size that is chosen lies within the range, and is one that a disk can have.
fn range(text: &str) {
    let Some((from, to)) = text.split_once(' ') else { return };
    let (Ok(required_bytes), Ok(limit_bytes)) = (from.parse(), to.parse()) else { return };
    match parse::new_size(Some(pb::CapacityRange { required_bytes, limit_bytes })) {
        Ok(range) => {
            let chosen = i64::from(range.chosen());
            assert!(chosen >= required_bytes && chosen > 0 && chosen % 4096 == 0, "{chosen}");
            assert!(limit_bytes == 0 || chosen <= limit_bytes, "{chosen}");
        }
        Err(error) => assert!(error.to_string().starts_with("capacity_range: "), "{error}"),
    }
}
