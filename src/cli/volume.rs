//! `qsd-csi volume`: a client of the driver's socket, for people.

mod attach;
pub(super) mod client;

use super::{
    Endpoint,
    output::{Output, quoted, say, say_json, table},
};
use crate::{csi::pb::inspect, units::Bytes, volume::PoolName};
use attach::Attached;
use clap::Subcommand;
use client::Client;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    driver: Driver,
}

/// Which driver to ask, and how to answer.
#[derive(Debug, clap::Args)]
pub(super) struct Driver {
    /// Socket of the driver
    #[arg(
        long,
        global = true,
        value_name = "unix://PATH",
        env = "CSI_ENDPOINT",
        default_value = "unix:///run/qsd-csi/csi.sock"
    )]
    pub(super) endpoint: Endpoint,
    /// How to answer
    #[arg(long, short, global = true, value_enum, default_value = "table")]
    pub(super) output: Output,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create a blank volume
    Create {
        /// Its name; also its id, where that is possible
        name: String,
        /// Its size, such as 10Gi
        #[arg(long)]
        size: Bytes,
        /// The pool to put it in; the one with most room by default
        #[arg(long)]
        pool: Option<PoolName>,
        /// Another parameter of a storage class; may be given several times
        #[arg(long = "parameter", value_name = "KEY=VALUE", value_parser = key_value)]
        parameters: Vec<(String, String)>,
    },
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
    let mut client = Client::connect(&args.driver.endpoint).await?;
    let output = args.driver.output;
    match args.command {
        Command::Create { name, size, pool, parameters } => {
            let mut parameters: BTreeMap<_, _> = parameters.into_iter().collect();
            parameters.extend(pool.map(|pool| ("pool".to_owned(), pool.to_string())));
            let volume = client.create(name, size, parameters).await?;
            let pool = volume.volume_context.get("pool").cloned().unwrap_or_default();
            created(output, volume.volume_id, volume.capacity_bytes, pool)
        }
        Command::List => list(output, client.list().await?),
        Command::Show { volume_id } => show(output, client.show(volume_id).await?),
        Command::Delete { volume_id } => {
            // CSI calls a volume that is not there deleted; a person may have mistyped.
            client.show(volume_id.clone()).await?;
            client.delete(volume_id.clone()).await?;
            done(output, &volume_id, "deleted")
        }
        Command::Attach { volume_id, place } => {
            let attached = attach::attach(&mut client, volume_id, &place.dir).await?;
            tell_attached(output, &attached)
        }
        Command::Detach { volume_id, place } => {
            attach::detach(&mut client, &volume_id, &place.dir).await?;
            done(output, &volume_id, "detached")
        }
    }
}

fn created(output: Output, volume_id: String, size: i64, pool: String) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Created {
        volume_id: String,
        capacity_bytes: i64,
        pool: String,
    }
    match output {
        Output::Json => say_json(&Created { volume_id, capacity_bytes: size, pool }),
        Output::Table => {
            let size = Bytes::try_from(size)?;
            say(&format!("volume {volume_id} of {size} is in pool {pool}"))?;
            say(&format!("next: qsd-csi volume attach {}", quoted(&volume_id)))
        }
    }
}

fn done(output: Output, volume_id: &str, what: &str) -> anyhow::Result<()> {
    match output {
        Output::Json => say_json(&serde_json::json!({ "volume_id": volume_id, "outcome": what })),
        Output::Table => say(&format!("volume {volume_id} is {what}")),
    }
}

fn list(output: Output, volumes: Vec<inspect::Volume>) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(&volumes.into_iter().map(Volume::from).collect::<Vec<_>>());
    }
    if volumes.is_empty() {
        return say("no volumes; create one: qsd-csi volume create NAME --size 10Gi");
    }
    let header = ["VOLUME", "SIZE", "ALLOCATED", "POOL", "STATE"];
    let row = |volume: inspect::Volume| {
        let state = state(&volume);
        vec![
            volume.volume_id,
            size(volume.capacity_bytes),
            size(volume.allocated_bytes),
            volume.pool,
            state,
        ]
    };
    say(&table(&header, volumes.into_iter().map(row)))
}

fn state(volume: &inspect::Volume) -> String {
    let state = match &volume.attachment {
        _ if !volume.damage.is_empty() => "damaged",
        None => "detached",
        Some(attachment) if attachment.daemon.is_none() => "no daemon",
        Some(attachment) if attachment.target_paths.is_empty() => "staged",
        Some(_) => "published",
    };
    state.to_owned()
}

fn size(bytes: i64) -> String {
    Bytes::try_from(bytes).unwrap_or_default().to_string()
}

fn show(output: Output, volume: inspect::Volume) -> anyhow::Result<()> {
    if output == Output::Json {
        return say_json(&Volume::from(volume));
    }
    let mut rows = vec![
        ("volume", volume.volume_id.clone()),
        ("name", volume.name.clone()),
        ("pool", volume.pool.clone()),
        ("size", size(volume.capacity_bytes)),
        ("allocated", size(volume.allocated_bytes)),
        ("state", state(&volume)),
    ];
    if !volume.damage.is_empty() {
        rows.push(("damage", volume.damage));
    }
    let parameters: BTreeMap<_, _> = volume.parameters.into_iter().collect();
    rows.extend(parameters.into_iter().map(|(key, value)| ("parameter", format!("{key}={value}"))));
    rows.extend(volume.layers.into_iter().map(|layer| ("layer", layer.path)));
    if let Some(attachment) = volume.attachment {
        rows.push(("staged at", attachment.staging_path));
        rows.extend(attachment.target_paths.into_iter().map(|path| ("published at", path)));
        rows.push(("socket", attachment.socket));
        if let Some(daemon) = attachment.daemon {
            rows.push(("daemon", format!("pid {}, QEMU {}", daemon.pid, daemon.version)));
            rows.push(("restarts", daemon.restarts.to_string()));
            rows.push(("monitor", daemon.monitor));
        } else {
            rows.push(("trouble", attachment.trouble));
        }
        if !attachment.warning.is_empty() {
            rows.push(("warning", attachment.warning));
        }
        rows.extend(attachment.relay.map(|relay| tell_relay(&relay)).into_iter().flatten());
    }
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let line = |(name, value): &(&str, String)| format!("{name:width$}  {value}");
    say(&rows.iter().map(line).collect::<Vec<_>>().join("\n"))
}

fn tell_relay(relay: &inspect::Relay) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    match &relay.front_end {
        None => rows.push(("VM", "none is connected".to_owned())),
        Some(front) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let since = now.saturating_sub(Duration::from_secs(front.connected_since));
            rows.push(("VM", format!("pid {}, connected for {} s", front.pid, since.as_secs())));
            let requests = match front.in_flight {
                0 => "none".to_owned(),
                count => format!("{count}, the oldest for at least {} ms", front.oldest_ms),
            };
            rows.push(("in flight", requests));
            if front.paused {
                rows.push(("paused", "requests are held back".to_owned()));
            }
        }
    }
    rows.push(("survived", format!("{} ends of daemons", relay.losses)));
    rows.push(("moved", format!("{} times", relay.handovers)));
    if relay.refused > 0 {
        rows.push(("refused", format!("{} second connections", relay.refused)));
    }
    if relay.longest_stall_us > 0 {
        let (last, worst) = (relay.last_stall_us, relay.longest_stall_us);
        rows.push(("stalls", format!("last {last} us, longest {worst} us")));
    }
    rows
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

/// What `list` and `show` say to scripts.
#[expect(clippy::struct_field_names, reason = "CSI's own name, as in every answer")]
#[derive(Serialize)]
struct Volume {
    volume_id: String,
    name: String,
    pool: String,
    capacity_bytes: i64,
    allocated_bytes: i64,
    state: String,
    parameters: BTreeMap<String, String>,
    layers: Vec<Layer>,
    attachment: Option<Attachment>,
    damage: Option<String>,
}

#[derive(Serialize)]
struct Layer {
    path: String,
    format: String,
    capacity_bytes: i64,
    allocated_bytes: i64,
}

#[derive(Serialize)]
struct Attachment {
    staging_path: String,
    target_paths: Vec<String>,
    socket: String,
    daemon: Option<Daemon>,
    trouble: Option<String>,
    warning: Option<String>,
    relay: Option<Relay>,
}

#[derive(Serialize)]
struct Relay {
    front_end: Option<FrontEnd>,
    losses: u64,
    handovers: u64,
    refused: u64,
    last_stall_us: u64,
    longest_stall_us: u64,
}

#[derive(Serialize)]
struct FrontEnd {
    pid: i32,
    connected_since: u64,
    in_flight: u64,
    oldest_ms: u64,
    paused: bool,
}

#[derive(Serialize)]
struct Daemon {
    pid: i32,
    version: String,
    monitor: String,
    restarts: u64,
}

impl From<inspect::Volume> for Volume {
    fn from(volume: inspect::Volume) -> Self {
        let layer = |layer: inspect::Layer| Layer {
            path: layer.path,
            format: layer.format,
            capacity_bytes: layer.capacity_bytes,
            allocated_bytes: layer.allocated_bytes,
        };
        let daemon = |daemon: inspect::Daemon| Daemon {
            pid: daemon.pid,
            version: daemon.version,
            monitor: daemon.monitor,
            restarts: daemon.restarts,
        };
        let front_end = |front: inspect::FrontEnd| FrontEnd {
            pid: front.pid,
            connected_since: front.connected_since,
            in_flight: front.in_flight,
            oldest_ms: front.oldest_ms,
            paused: front.paused,
        };
        let relay = |relay: inspect::Relay| Relay {
            front_end: relay.front_end.map(front_end),
            losses: relay.losses,
            handovers: relay.handovers,
            refused: relay.refused,
            last_stall_us: relay.last_stall_us,
            longest_stall_us: relay.longest_stall_us,
        };
        let some = |text: String| (!text.is_empty()).then_some(text);
        Self {
            state: state(&volume),
            volume_id: volume.volume_id,
            name: volume.name,
            pool: volume.pool,
            capacity_bytes: volume.capacity_bytes,
            allocated_bytes: volume.allocated_bytes,
            parameters: volume.parameters.into_iter().collect(),
            layers: volume.layers.into_iter().map(layer).collect(),
            attachment: volume.attachment.map(|attachment| Attachment {
                staging_path: attachment.staging_path,
                target_paths: attachment.target_paths,
                socket: attachment.socket,
                daemon: attachment.daemon.map(daemon),
                trouble: some(attachment.trouble),
                warning: some(attachment.warning),
                relay: attachment.relay.map(relay),
            }),
            damage: some(volume.damage),
        }
    }
}
