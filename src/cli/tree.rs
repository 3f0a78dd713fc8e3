//! `qsd-csi tree`: what there is on a node and what stands on what, drawn.

mod forest;
#[cfg(test)]
mod sample;
mod svg;
mod text;

use super::{
    client::{Driver, Things},
    json,
    output::{Output, say, say_json},
};
use anyhow::Context as _;
use serde::Serialize;
use std::{
    fs::File,
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
};
use text::{ASCII, Colours, DRAWN, Manner};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Draw with plain letters
    #[arg(long)]
    ascii: bool,
    /// Write a picture to this file instead
    #[arg(long, value_name = "FILE", conflicts_with = "ascii")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    driver: Driver,
}

/// What it says to scripts.
#[derive(Serialize)]
struct Node {
    pools: Vec<json::Pool>,
    layers: Vec<json::Layer>,
    volumes: Vec<json::Volume>,
    snapshots: Vec<json::Snapshot>,
}

pub(super) async fn run(args: Args) -> anyhow::Result<()> {
    let things = args.driver.connect().await?.look().await?;
    match (&args.svg, args.driver.output) {
        (Some(file), output) => picture(file, output, &things),
        (None, Output::Json) => say_json(&Node::from(things)),
        (None, Output::Table) => {
            let letters = if args.ascii { &ASCII } else { &DRAWN };
            let (colours, width) = (colours(), width());
            say(&text::draw(&forest::grow(&things), Manner { letters, colours, width }))
        }
    }
}

fn picture(file: &Path, output: Output, things: &Things) -> anyhow::Result<()> {
    let picture = svg::draw(&forest::grow(things), &json::time(crate::clock::now().into()));
    let write = || File::create(file)?.write_all(picture.as_bytes());
    write().with_context(|| format!("svg: writing {}", file.display()))?;
    let (file, layers) = (file.display().to_string(), things.layers.len());
    match output {
        Output::Json => say_json(&serde_json::json!({ "file": file, "layers": layers })),
        Output::Table => say(&format!("{file} shows {layers} layers")),
    }
}

/// Colours are for people who want them (<https://no-color.org>).
fn colours() -> Colours {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if io::stdout().is_terminal() && !refused { Colours::On } else { Colours::Off }
}

/// How wide the terminal is, if that is where it goes.
fn width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then(|| usize::from(size.ws_col))
}

impl From<Things> for Node {
    fn from(things: Things) -> Self {
        Self {
            pools: things.pools.into_iter().map(json::Pool::from).collect(),
            layers: things.layers.into_iter().map(json::Layer::from).collect(),
            volumes: things.volumes.into_iter().map(json::Volume::from).collect(),
            snapshots: things.snapshots.into_iter().map(json::Snapshot::from).collect(),
        }
    }
}
