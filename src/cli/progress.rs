//! How far the copying of a volume has come, as a bar on standard error where that is a terminal.

use super::{client::Client, output::bytes};
use crate::{csi::pb::inspect, units::Bytes};
use anyhow::anyhow;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use std::{
    error::Error as _,
    fmt::Write,
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};
use tonic::{Code, Status};

/// How often the driver is asked.
const ROUND: Duration = Duration::from_millis(200);

/// How long a driver may be away, as when it is upgraded; the copying goes on when it is back.
const PATIENCE: Duration = Duration::from_mins(1);

/// Whether there is somebody who can watch.
pub(super) fn is_watched() -> bool {
    io::stderr().is_terminal()
}

/// Waits until a volume needs nothing of its source any more, and shows how far it has come.
pub(super) async fn until_independent(client: &mut Client, volume_id: &str) -> anyhow::Result<()> {
    let bar = bar();
    let mut trouble = String::new();
    loop {
        let volume = shown(client, volume_id).await?;
        let Some(layer) = volume.layers.into_iter().find(|layer| layer.detaching) else {
            bar.finish_and_clear();
            return Ok(());
        };
        show(&bar, &layer);
        if bar.is_hidden() && !layer.trouble.is_empty() && layer.trouble != trouble {
            _ = writeln!(io::stderr(), "{}; it is tried again", layer.trouble);
        }
        trouble = layer.trouble;
        tokio::time::sleep(ROUND).await;
    }
}

async fn shown(client: &mut Client, volume_id: &str) -> anyhow::Result<inspect::Volume> {
    let begin = Instant::now();
    loop {
        match client.try_show(volume_id.to_owned()).await {
            Ok(volume) => return Ok(volume),
            Err(status) if is_away(&status) && begin.elapsed() < PATIENCE => {
                tokio::time::sleep(ROUND).await;
            }
            Err(status) => {
                return Err(anyhow!(
                    "{}\nnext: see how far the copying is: qsd-csi tree",
                    status.message()
                ));
            }
        }
    }
}

/// Whether the driver did not answer, or broke off.
fn is_away(status: &Status) -> bool {
    // What the driver itself says comes without a source.
    status.code() == Code::Unavailable || status.source().is_some()
}

fn show(bar: &ProgressBar, layer: &inspect::Layer) {
    match &layer.job {
        Some(job) => {
            bar.set_message("copying");
            bar.set_length(bytes(job.total_bytes).count());
            bar.set_position(bytes(job.done_bytes).count());
        }
        None if layer.trouble.is_empty() => bar.set_message("waiting for its turn"),
        None => bar.set_message(format!("tried again soon: {}", layer.trouble)),
    }
}

fn bar() -> ProgressBar {
    let template = "{msg} ▕{bar:30}▏ {percent} %, {done} of {all}, {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is well-formed");
    let done = |state: &ProgressState, out: &mut dyn Write| tell(out, Some(state.pos()));
    let all = |state: &ProgressState, out: &mut dyn Write| tell(out, state.len());
    let style = style.with_key("done", done).with_key("all", all).progress_chars("█▉▊▋▌▍▎▏ ");
    // One that is not drawn where standard error is no terminal.
    ProgressBar::new(0).with_style(style)
}

fn tell(out: &mut dyn Write, bytes: Option<u64>) {
    _ = write!(out, "{}", Bytes::new(bytes.unwrap_or_default()));
}
