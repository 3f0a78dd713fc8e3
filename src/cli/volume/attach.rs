//! `attach` and `detach`: what kubelet does with a volume, done by hand.

use crate::cli::client::Client;
use anyhow::Context as _;
use serde::Serialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The longest path a Unix socket can have, in bytes.
const LONGEST_SOCKET: usize = 107;

/// An attached volume, and how a VM gets it.
#[derive(Serialize)]
pub(super) struct Attached {
    volume_id: String,
    pub(super) socket: String,
    pub(super) qemu: Vec<String>,
}

/// Where an attached volume has its staging and target paths.
struct Paths {
    dir: PathBuf,
    staging: String,
    target: String,
}

impl Paths {
    fn new(dir: &Path, volume_id: &str) -> anyhow::Result<Self> {
        let dir = std::path::absolute(dir)?.join(volume_id);
        let text = |name: &str| {
            let path = dir.join(name);
            path.to_str()
                .map(str::to_owned)
                .with_context(|| format!("{} is not UTF-8", path.display()))
        };
        Ok(Self { staging: text("staging")?, target: text("disk")?, dir })
    }

    fn remove(&self) -> anyhow::Result<()> {
        for path in [Path::new(&self.staging), &self.dir] {
            match fs::remove_dir(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("removing {}", path.display()));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}

pub(super) async fn attach(
    client: &mut Client,
    volume_id: String,
    dir: &Path,
) -> anyhow::Result<Attached> {
    let volume = client.show(volume_id).await?;
    let volume_id = volume.volume_id;
    let paths = Paths::new(dir, &volume_id)?;
    fs::create_dir_all(&paths.staging).with_context(|| format!("creating {}", paths.staging))?;
    let served = async {
        client.stage(&volume_id, &paths.staging).await?;
        client.publish(&volume_id, &paths.staging, &paths.target).await
    };
    if let Err(error) = served.await {
        _ = client.unstage(&volume_id, &paths.staging).await; // unless it is published there
        _ = paths.remove();
        return Err(error);
    }
    let published = format!("{}/vhost.sock", paths.target);
    let attachment = client.show(volume_id.clone()).await?.attachment;
    let own = attachment.context("the driver does not know of the attachment")?.socket;
    let socket = if published.len() > LONGEST_SOCKET { own } else { published };
    Ok(Attached { volume_id, qemu: qemu(&socket), socket })
}

/// The command line of a VM with this disk.
///
/// vhost-user needs the guest's memory shared. The disk outlives its daemon by itself;
/// `reconnect-ms` lets it also outlive a relay of which nothing is left.
fn qemu(socket: &str) -> Vec<String> {
    let chardev = format!("socket,id=disk0,path={},reconnect-ms=200", socket.replace(',', ",,"));
    let device = "vhost-user-blk-pci,chardev=disk0";
    [
        "qemu-system-x86_64",
        "-machine",
        "q35,memory-backend=mem,accel=kvm:tcg",
        "-object",
        "memory-backend-memfd,id=mem,size=1G,share=on",
        "-m",
        "1G",
        "-chardev",
        &chardev,
        "-device",
        device,
        "-nographic",
    ]
    .map(str::to_owned)
    .into()
}

pub(super) async fn detach(client: &mut Client, volume_id: &str, dir: &Path) -> anyhow::Result<()> {
    let volume = client.show(volume_id.to_owned()).await?;
    let paths = Paths::new(dir, volume_id)?;
    if let Some(attachment) = volume.attachment
        && attachment.staging_path != paths.staging
    {
        anyhow::bail!(
            "volume {volume_id} is staged at {}, not by `attach` below {}\nnext: give the --dir it \
             was attached with, or let whoever staged it unstage it",
            attachment.staging_path,
            dir.display()
        );
    }
    client.unpublish(volume_id, &paths.target).await?;
    client.unstage(volume_id, &paths.staging).await?;
    paths.remove()
}
