//! `qsd-csi daemon`: care for the storage daemons, for people.

use super::{
    client::{Client, Driver},
    output::{Output, say, say_json},
};
use clap::Subcommand;
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    driver: Driver,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Hand volumes over to the newest qemu-storage-daemon, under their VMs, one after another
    Upgrade {
        /// The volume
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        volume_id: Option<String>,
        /// Every volume that is staged
        #[arg(long)]
        all: bool,
        /// Also where the daemon is the newest already
        #[arg(long)]
        force: bool,
    },
}

#[derive(Serialize)]
struct Upgraded {
    volume_id: String,
    replaced: bool,
    pid: i32,
    version: String,
    stopped_us: u64,
}

pub(super) async fn run(args: Args) -> anyhow::Result<()> {
    let mut client = args.driver.connect().await?;
    let Command::Upgrade { volume_id, all: _, force } = args.command;
    let volumes = match volume_id {
        Some(volume) => vec![volume],
        None => staged(&mut client).await?,
    };
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for volume_id in volumes {
        match client.upgrade_daemon(volume_id.clone(), force).await {
            Ok(answer) => {
                let upgraded = Upgraded {
                    volume_id,
                    replaced: answer.replaced,
                    pid: answer.pid,
                    version: answer.version,
                    stopped_us: answer.stopped_us,
                };
                if args.driver.output == Output::Table {
                    tell(&upgraded)?;
                }
                done.push(upgraded);
            }
            // The others go on: each volume is by itself.
            Err(error) => failed.push(format!("{volume_id}: {error:#}")),
        }
    }
    if args.driver.output == Output::Json {
        say_json(&done)?;
    } else if done.is_empty() && failed.is_empty() {
        say("no volume is staged")?;
    }
    anyhow::ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

async fn staged(client: &mut Client) -> anyhow::Result<Vec<String>> {
    let volumes = client.list().await?.into_iter();
    let is_served = |volume: &crate::csi::pb::inspect::Volume| {
        volume.attachment.as_ref().is_some_and(|attachment| attachment.daemon.is_some())
    };
    Ok(volumes.filter(is_served).map(|volume| volume.volume_id).collect())
}

fn tell(upgraded: &Upgraded) -> anyhow::Result<()> {
    let Upgraded { volume_id, pid, version, stopped_us, .. } = upgraded;
    if !upgraded.replaced {
        return say(&format!(
            "volume {volume_id} has the newest daemon: pid {pid}, QEMU {version}"
        ));
    }
    let stopped = match stopped_us {
        0 => "no VM was connected".to_owned(),
        time => format!("its VM waited {time} us"),
    };
    say(&format!("volume {volume_id} moved to pid {pid}, QEMU {version}; {stopped}"))
}
