//! `qsd-csi standalone`: Identity, Controller and Node of one machine on one socket.

use super::Endpoint;
use crate::{
    csi::{
        self, Edge, Identity,
        pb::{
            csi::{
                controller_server::ControllerServer, identity_server::IdentityServer,
                node_server::NodeServer, snapshot_metadata_server::SnapshotMetadataServer,
            },
            inspect::inspect_server::InspectServer,
        },
    },
    metrics::{Metrics, Timed},
    node::{Config, Node},
    pool::Pool,
    qsd::Programs,
    run::RunDir,
    store,
    volume::{NodeName, Overcommit, PoolName, Volumes},
};
use anyhow::Context as _;
use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    signal::unix::{SignalKind, signal},
    time::{Instant, timeout},
};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{info, warn};

/// Where a driver has its sockets, where nobody says otherwise.
pub(super) const RUN_DIR: &str = "/run/qsd-csi";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Socket to serve CSI on
    #[arg(long, value_name = "unix://PATH", env = "CSI_ENDPOINT")]
    endpoint: Endpoint,
    /// Name of this node, as CSI's node id and topology
    #[arg(long, value_name = "NAME")]
    node_id: NodeName,
    /// Directory for sockets and for what need not outlive a reboot; on tmpfs, with a short path
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    /// A pool and the directory that holds its volumes; may be given several times
    #[arg(long = "pool", value_name = "NAME=DIR", required = true)]
    pools: Vec<PoolAt>,
    /// How much more than what is free a pool may promise to volumes, as a factor; they take no
    /// space until written
    #[arg(long, value_name = "FACTOR", default_value = "1")]
    overcommit: Overcommit,
    /// The qemu-storage-daemon to run; of several, the newest
    #[arg(long, value_name = "PATH", default_value = "qemu-storage-daemon")]
    qsd: Vec<PathBuf>,
    /// Address to serve /metrics, /healthz (alive) and /readyz (ready) on
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
}

/// A pool and where it is.
#[derive(Clone, Debug)]
pub(super) struct PoolAt {
    pub(super) name: PoolName,
    pub(super) dir: PathBuf,
}

impl FromStr for PoolAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, dir) = text.split_once('=').ok_or("write NAME=DIR, such as fast=/srv/fast")?;
        let name = name.parse().map_err(|error| format!("{error}"))?;
        let dir = PathBuf::from(dir);
        if dir.is_relative() {
            return Err(format!("{} is not absolute", dir.display()));
        }
        Ok(Self { name, dir })
    }
}

/// How long a client may keep a connection open after the last call in flight has ended.
///
/// Kubernetes kills a container 30 s after it told it to end.
const LAST_CALLS: Duration = Duration::from_secs(20);

/// How many calls that were given up may wait to be noticed, before the connection is taken for an
/// attack and closed. Callers are sidecars and people on this machine, and a busy machine is no
/// attack.
const ABANDONED: usize = 1000;

pub(super) async fn run(args: Args) -> anyhow::Result<()> {
    let begin = Instant::now();
    let stop = stop_on_signal()?;
    let run = RunDir::open(&args.run_dir)?;
    let _lock = lock(&run)?;
    let listener = listen(args.endpoint.path()).await?;
    let metrics_listener = match args.metrics {
        Some(address) => {
            let text = || format!("metrics: listening at {address}");
            Some(TcpListener::bind(address).await.with_context(text)?)
        }
        None => None,
    };
    let metrics = Metrics::default();
    if let Some(listener) = metrics_listener {
        let served = metrics.clone().serve(listener, stop.clone());
        tokio::spawn(async move {
            if let Err(error) = served.await {
                warn!(error = format!("{error:#}"), "metrics");
            }
        });
    }
    let qsd = args.qsd.iter().map(|program| find_program(program)).collect::<Result<_, _>>()?;
    let qsd = Programs::new(qsd);
    let volumes = Arc::new(Volumes::recover(open_pools(args.pools)?, args.overcommit)?);
    let program = std::env::current_exe().context("finding this program")?;
    let config = Config { name: args.node_id, run, qsd, program };
    let node = Node::start(config, volumes).await?;
    metrics.serving(node.clone(), begin.elapsed());
    info!(endpoint = %args.endpoint, seconds = begin.elapsed().as_secs_f64(), "serving");
    serve(listener, &node, metrics, stop).await?;
    node.shut_down().await;
    _ = fs::remove_file(args.endpoint.path());
    info!("ended; what is published stays");
    Ok(())
}

/// Serves until told to stop, and then until every call in flight has ended.
async fn serve(
    listener: UnixListener,
    node: &Node,
    metrics: Metrics,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let edge = Edge::new(node.clone());
    let services = Server::builder()
        .http2_max_pending_accept_reset_streams(Some(ABANDONED))
        .layer(Timed(metrics))
        .add_service(IdentityServer::new(Identity(edge.clone())))
        .add_service(ControllerServer::new(csi::Controller(edge.clone())))
        .add_service(NodeServer::new(csi::NodeService(edge.clone())))
        .add_service(SnapshotMetadataServer::new(csi::SnapshotMetadata(edge.clone())))
        .add_service(InspectServer::new(csi::Inspect(edge.clone())));
    let connections = UnixListenerStream::new(listener);
    let served = services.serve_with_incoming_shutdown(connections, stop.clone().cancelled_owned());
    let patience = async {
        stop.cancelled().await;
        tokio::time::sleep(LAST_CALLS).await;
    };
    tokio::select! {
        served = served => served?,
        () = patience => warn!("clients do not let go"),
    }
    edge.drain().await;
    Ok(())
}

/// A token that SIGTERM or SIGINT cancels.
fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        token.cancel();
    });
    Ok(stop)
}

/// Keeps a second driver out of the run directory.
fn lock(run: &RunDir) -> anyhow::Result<File> {
    let lock = File::open(run.path())?;
    let text = || format!("run-dir {} is in use by another driver", run.path().display());
    store::lock(&lock).with_context(text)?;
    Ok(lock)
}

/// Listens at `path`, in place of a socket that a driver which died has left there.
async fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let text = || format!("endpoint {}", path.display());
    match fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            anyhow::bail!("{} is there already, and is no socket", text());
        }
        Ok(_) => {
            let answer = timeout(Duration::from_secs(1), UnixStream::connect(path)).await;
            anyhow::ensure!(!matches!(answer, Ok(Ok(_))), "{} is served by another", text());
            fs::remove_file(path).with_context(text)?;
        }
        Err(_) => {}
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(text)?;
    }
    let listener = UnixListener::bind(path).with_context(text)?;
    fs::set_permissions(path, Permissions::from_mode(0o660)).with_context(text)?;
    Ok(listener)
}

/// The program as an absolute path, found in `PATH` where it is a plain name.
fn find_program(program: &Path) -> anyhow::Result<PathBuf> {
    let candidates: Vec<PathBuf> = if program.components().count() > 1 {
        vec![program.to_owned()]
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|dir| dir.join(program)).collect()
    };
    let is_program = |path: &&PathBuf| {
        fs::metadata(path)
            .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    let found = candidates.iter().find(is_program).with_context(|| {
        let program = program.display();
        format!("qsd: {program} is not there; install qemu-storage-daemon or say where with --qsd")
    })?;
    std::path::absolute(found).context("qsd")
}

fn open_pools(pools: Vec<PoolAt>) -> anyhow::Result<Vec<Arc<Pool>>> {
    let (mut names, mut dirs) = (BTreeSet::new(), BTreeSet::new());
    let open = |PoolAt { name, dir }: PoolAt| {
        anyhow::ensure!(names.insert(name.clone()), "pool {name} is given twice");
        let place = fs::canonicalize(&dir).unwrap_or_else(|_| dir.clone());
        anyhow::ensure!(dirs.insert(place), "pool {name}: {} is given twice", dir.display());
        Ok(Arc::new(Pool::open(name, &dir)?))
    };
    pools.into_iter().map(open).collect()
}
