//! `qsd-csi volume`: a client of the driver's socket, for people.

mod attach;
mod make;
mod show;

use super::{
    client::Driver,
    output::{Output, quoted, say, say_done, say_json, table},
};
use crate::{csi::pb::inspect, units::Bytes};
use attach::Attached;
use clap::Subcommand;
use std::{collections::BTreeMap, path::PathBuf};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    driver: Driver,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create a volume: blank, from a snapshot, or from another volume
    Create(make::Create),
    /// Copy a volume as it is now; the copy can be used at once, whatever its size
    Clone(make::Clone),
    /// List all volumes of the node
    List,
    /// Tell all of one volume
    Show {
        /// Its id
        volume_id: String,
    },
    /// Delete a volume and its data
    Delete {
        /// Its id
        volume_id: String,
    },
    /// Make a volume larger, also under its VM
    Resize {
        /// Its id
        volume_id: String,
        /// The size it is to have, such as 20Gi; none shrinks
        size: Bytes,
    },
    /// Change what a volume may do a second, also under its VM
    Throttle {
        /// Its id
        volume_id: String,
        /// Limits such as iops=500 or bytesPerSecond=100Mi, 0 for none; without any, shows them
        #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
        limits: Vec<(String, String)>,
    },
    /// Stage and publish a volume on this machine, and say how a VM gets it
    Attach {
        /// Its id
        volume_id: String,
        #[command(flatten)]
        place: Place,
    },
    /// Take back what `attach` did; the VM must be off
    Detach {
        /// Its id
        volume_id: String,
        #[command(flatten)]
        place: Place,
    },
}

#[derive(Debug, clap::Args)]
struct Place {
    /// Directory below which volumes are attached
    #[arg(long, value_name = "DIR", default_value = "/run/qsd-csi-attached")]
    dir: PathBuf,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

pub(super) async fn run(args: Args) -> anyhow::Result<()> {
    let mut client = args.driver.connect().await?;
    let output = args.driver.output;
    match args.command {
        Command::Create(create) => make::create(&mut client, output, create).await,
        Command::Clone(clone) => make::clone(&mut client, output, clone).await,
        Command::List => show::list(output, client.list().await?),
        Command::Show { volume_id } => show::show(output, client.show(volume_id).await?),
        Command::Delete { volume_id } => {
            // CSI calls a volume that is not there deleted; a person may have mistyped.
            client.show(volume_id.clone()).await?;
            client.delete(volume_id.clone()).await?;
            say_done(output, "volume", &volume_id, "deleted")
        }
        Command::Resize { volume_id, size } => {
            let size = client.resize(volume_id.clone(), size).await?;
            resized(output, &volume_id, size)
        }
        Command::Throttle { volume_id, limits } => {
            if !limits.is_empty() {
                client.modify(volume_id.clone(), limits.into_iter().collect()).await?;
            }
            tell_limits(output, client.show(volume_id).await?)
        }
        Command::Attach { volume_id, place } => {
            let attached = attach::attach(&mut client, volume_id, &place.dir).await?;
            tell_attached(output, &attached)
        }
        Command::Detach { volume_id, place } => {
            attach::detach(&mut client, &volume_id, &place.dir).await?;
            say_done(output, "volume", &volume_id, "detached")
        }
    }
}

fn resized(output: Output, volume_id: &str, size: Bytes) -> anyhow::Result<()> {
    match output {
        Output::Json => {
            say_json(&serde_json::json!({ "volume_id": volume_id, "capacity_bytes": size.count() }))
        }
        Output::Table => say(&format!("volume {volume_id} has {size}")),
    }
}

fn tell_limits(output: Output, volume: inspect::Volume) -> anyhow::Result<()> {
    let inspect::Volume { volume_id, limits, .. } = volume;
    let limits: BTreeMap<_, _> = limits.into_iter().collect();
    if output == Output::Json {
        return say_json(&serde_json::json!({ "volume_id": volume_id, "limits": limits }));
    }
    if limits.is_empty() {
        say(&format!("volume {volume_id} has no limits"))?;
        let volume_id = quoted(&volume_id);
        return say(&format!("next: qsd-csi volume throttle {volume_id} iops=500"));
    }
    let row = |(key, limit): (String, u64)| {
        let is_bytes = key.starts_with("bytes");
        let limit = if is_bytes { Bytes::new(limit).to_string() } else { limit.to_string() };
        vec![key, limit]
    };
    say(&table(&["LIMIT", "A SECOND"], limits.into_iter().map(row)))
}

/// How a volume is used at the moment.
pub(super) fn state(volume: &inspect::Volume) -> &'static str {
    match &volume.attachment {
        _ if !volume.damage.is_empty() => "damaged",
        None => "detached",
        Some(attachment) if attachment.daemon.is_none() => "no daemon",
        Some(attachment) if attachment.target_paths.is_empty() => "staged",
        Some(_) => "published",
    }
}

fn tell_attached(output: Output, attached: &Attached) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(attached);
    }
    let command: Vec<_> = attached.qemu.iter().map(|argument| quoted(argument)).collect();
    say(&format!("socket  {}", attached.socket))?;
    say(&format!(
        "\nBoot a VM with it; add a disk or kernel to boot from:\n\n{}",
        command.join(" ")
    ))
}
