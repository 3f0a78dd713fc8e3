//! The SSH agent of one daemon, while it opens a master: QEMU takes private keys from nowhere else.

use crate::source::SshKey;
use futures_util::SinkExt as _;
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};
use tokio_stream::StreamExt as _;
use tokio_util::{
    bytes::Bytes,
    codec::{Framed, LengthDelimitedCodec},
};

/// More than any message of the protocol has.
const LONGEST: usize = 256 << 10;

/// An agent that answers until it is dropped.
pub(super) struct Agent {
    socket: PathBuf,
    task: JoinHandle<()>,
}

impl Agent {
    /// Listens at `socket`, where only root gets to.
    pub(super) fn listen(key: SshKey, socket: &Path) -> io::Result<Self> {
        _ = fs::remove_file(socket); // what a driver left that died
        let listener = UnixListener::bind(socket)?;
        Ok(Self { socket: socket.to_owned(), task: tokio::spawn(serve(listener, key)) })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
        _ = fs::remove_file(&self.socket);
    }
}

/// One client after the other: there is only one.
async fn serve(listener: UnixListener, key: SshKey) {
    while let Ok((stream, _)) = listener.accept().await {
        if let Err(error) = converse(stream, &key).await {
            tracing::debug!(%error, "a client of the agent broke off");
        }
    }
}

async fn converse(stream: UnixStream, key: &SshKey) -> io::Result<()> {
    let codec = LengthDelimitedCodec::builder().max_frame_length(LONGEST).new_codec();
    let mut messages = Framed::new(stream, codec);
    while let Some(request) = messages.next().await {
        messages.send(Bytes::from(key.answer(&request?))).await?;
    }
    Ok(())
}
