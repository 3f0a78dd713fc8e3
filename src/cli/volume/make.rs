//! `create` and `clone`: new volumes, and how far their copying has come.

use super::key_value;
use crate::{
    cli::{
        client::{Client, NewVolume, Source},
        output::{Output, quoted, say, say_json, size},
        progress,
    },
    csi::pb::csi as pb,
    units::Bytes,
    volume::PoolName,
};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Debug, clap::Args)]
pub(super) struct Create {
    /// Its name; also its id, where that is possible
    name: String,
    /// Its size, such as 10Gi; that of its source by default
    #[arg(long, required_unless_present_any = ["from_snapshot", "from_volume"])]
    size: Option<Bytes>,
    /// Make it from this snapshot
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
    from_snapshot: Option<String>,
    /// Make it from this volume, as that is now
    #[arg(long, value_name = "VOLUME")]
    from_volume: Option<String>,
    /// The pool to put it in; that of its source, or the one with most room, by default
    #[arg(long)]
    pool: Option<PoolName>,
    #[command(flatten)]
    more: More,
}

#[derive(Debug, clap::Args)]
pub(super) struct Clone {
    /// The volume to copy
    source: String,
    /// Name of the copy; also its id, where that is possible
    name: String,
    /// How the copy stands to its source
    #[arg(long, value_enum, default_value = "clone")]
    copy_mode: CopyMode,
    /// Size of the copy, if it is to be larger
    #[arg(long)]
    size: Option<Bytes>,
    /// Wait until the copy is independent, also where nobody watches; on a terminal, how far it has
    /// come is shown anyway
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    more: More,
}

#[derive(Debug, clap::Args)]
struct More {
    /// Another parameter of a storage class; may be given several times
    #[arg(long = "parameter", value_name = "KEY=VALUE", value_parser = key_value)]
    parameters: Vec<(String, String)>,
}

/// Those of parameter `copyMode` that make a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum CopyMode {
    /// Copied in the background until nothing of the source is needed
    Clone,
    /// Keeps what is written; all else is read from the source
    CopyOnWrite,
    /// Also keeps what was read once
    CopyOnRead,
}

/// A volume that was made.
#[derive(Serialize)]
struct Made {
    volume_id: String,
    capacity_bytes: i64,
    pool: String,
    /// It needs nothing of another.
    independent: bool,
}

impl CopyMode {
    fn parameter(self) -> (String, String) {
        let value = match self {
            Self::Clone => "clone",
            Self::CopyOnWrite => "copy-on-write",
            Self::CopyOnRead => "copy-on-read",
        };
        ("copyMode".to_owned(), value.to_owned())
    }
}

pub(super) async fn create(
    client: &mut Client,
    output: Output,
    create: Create,
) -> anyhow::Result<()> {
    let Create { name, size, from_snapshot, from_volume, pool, more } = create;
    let mut parameters: BTreeMap<_, _> = more.parameters.into_iter().collect();
    parameters.extend(pool.map(|pool| ("pool".to_owned(), pool.to_string())));
    let source = from_snapshot.map(Source::Snapshot).or(from_volume.map(Source::Volume));
    let independent = source.is_none();
    let volume = client.create(NewVolume { name, size, source, parameters }).await?;
    let made = Made { independent, ..volume.into() };
    match output {
        Output::Json => say_json(&made),
        Output::Table => tell(&made),
    }
}

pub(super) async fn clone(client: &mut Client, output: Output, clone: Clone) -> anyhow::Result<()> {
    let Clone { source, name, copy_mode, size, wait, more } = clone;
    anyhow::ensure!(
        copy_mode == CopyMode::Clone || !wait,
        "a copy of mode {} always needs its source\nnext: leave --wait out, or --copy-mode",
        copy_mode.parameter().1
    );
    let mut parameters: BTreeMap<_, _> = more.parameters.into_iter().collect();
    parameters.extend([copy_mode.parameter()]);
    let from = Some(Source::Volume(source.clone()));
    let volume = client.create(NewVolume { name, size, source: from, parameters }).await?;
    let mut made = Made::from(volume);
    if output == Output::Table {
        tell(&made)?;
    }
    let is_watched = output == Output::Table && progress::is_watched();
    if copy_mode == CopyMode::Clone && (wait || is_watched) {
        progress::until_independent(client, &made.volume_id).await?;
        made.independent = true;
    }
    match output {
        Output::Json => say_json(&made),
        Output::Table if made.independent => {
            say(&format!("volume {} needs nothing of {source} any more", made.volume_id))
        }
        Output::Table if copy_mode == CopyMode::Clone => {
            say("it is copied in the background; see how far that is: qsd-csi tree")
        }
        Output::Table => Ok(()),
    }
}

fn tell(made: &Made) -> anyhow::Result<()> {
    let Made { volume_id, capacity_bytes, pool, .. } = made;
    say(&format!("volume {volume_id} of {} is in pool {pool}", size(*capacity_bytes)))?;
    say(&format!("next: qsd-csi volume attach {}", quoted(volume_id)))
}

impl From<pb::Volume> for Made {
    fn from(volume: pb::Volume) -> Self {
        let pb::Volume { volume_id, capacity_bytes, mut volume_context, .. } = volume;
        let pool = volume_context.remove("pool").unwrap_or_default();
        Self { volume_id, capacity_bytes, pool, independent: false }
    }
}
