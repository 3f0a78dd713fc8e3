//! What a monitoring system sees: `/metrics` in the Prometheus text format, and `/healthz`.
//!
//! Calls are timed by one tower layer around all services; gauges are read when asked for.

mod layer;

pub use layer::Timed;

use crate::node::{Node, Relayed};
use axum::{Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The labels of one timed call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Call {
    /// The method, such as `CreateVolume`.
    pub rpc: String,
    /// The gRPC code, such as `OK` or `NOT_FOUND`.
    pub code: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPool {
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfVolume {
    volume: String,
}

/// What the relay tells of each volume.
#[derive(Clone, Debug)]
struct RelayMetrics {
    connected: Family<OfVolume, Gauge>,
    in_flight: Family<OfVolume, Gauge>,
    oldest: Family<OfVolume, Gauge<f64, AtomicU64>>,
    losses: Family<OfVolume, Counter>,
    handovers: Family<OfVolume, Counter>,
    refused: Family<OfVolume, Counter>,
    longest_stall: Family<OfVolume, Gauge<f64, AtomicU64>>,
}

type Seconds = Family<Call, Histogram, fn() -> Histogram>;

/// All metrics of a driver. Clones are the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    seconds: Seconds,
    volumes: Gauge,
    damaged: Gauge,
    daemons: Gauge,
    daemons_down: Gauge,
    pool_total: Family<InPool, Gauge>,
    pool_free: Family<InPool, Gauge>,
    pool_promised: Family<InPool, Gauge>,
    pool_allocated: Family<InPool, Gauge>,
    relay: RelayMetrics,
}

impl RelayMetrics {
    fn register(registry: &mut Registry) -> Self {
        let all = Self {
            connected: Family::default(),
            in_flight: Family::default(),
            oldest: Family::default(),
            losses: Family::default(),
            handovers: Family::default(),
            refused: Family::default(),
            longest_stall: Family::default(),
        };
        let connected = "Since when a VM is connected, in seconds since 1970; 0 if none is";
        registry.register("relay_connected_since", connected, all.connected.clone());
        let in_flight = "Requests of a VM without an answer";
        registry.register("relay_requests_in_flight", in_flight, all.in_flight.clone());
        let oldest = "How long the oldest of them has been waiting at least";
        registry.register_with_unit(
            "relay_oldest_request",
            oldest,
            Unit::Seconds,
            all.oldest.clone(),
        );
        let losses = "Daemons that were lost and replaced under a VM";
        registry.register("relay_daemons_lost", losses, all.losses.clone());
        let handovers = "Moves to another daemon under a VM";
        registry.register("relay_handovers", handovers, all.handovers.clone());
        let refused = "Connections refused because there was one";
        registry.register("relay_refused", refused, all.refused.clone());
        let stall = "The longest time requests were held up by a loss or a move";
        registry.register_with_unit(
            "relay_longest_stall",
            stall,
            Unit::Seconds,
            all.longest_stall.clone(),
        );
        all
    }

    /// Takes the values of now; volumes that are not relayed any more have none.
    fn read(&self, node: &Node, relayed: &Relayed) {
        self.connected.clear();
        self.in_flight.clear();
        self.oldest.clear();
        self.losses.clear();
        self.handovers.clear();
        self.refused.clear();
        self.longest_stall.clear();
        for (id, _) in node.volumes().list(None, usize::MAX) {
            let Some(one) = relayed.get(&id.run_key()) else { continue };
            let of = OfVolume { volume: id.to_string() };
            let front = one.front_end.as_ref();
            let whole = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
            let since = front.map_or(0, |front| front.since);
            let in_flight = front.map_or(0, |front| front.in_flight);
            let oldest = Duration::from_millis(front.map_or(0, |front| front.oldest_ms));
            let stall = Duration::from_micros(one.longest_stall_us);
            self.connected.get_or_create(&of).set(whole(since));
            self.in_flight.get_or_create(&of).set(whole(in_flight));
            self.oldest.get_or_create(&of).set(oldest.as_secs_f64());
            self.longest_stall.get_or_create(&of).set(stall.as_secs_f64());
            for (family, count) in [
                (&self.losses, one.losses),
                (&self.handovers, one.handovers),
                (&self.refused, one.refused),
            ] {
                family.get_or_create(&of).inner().store(count, Ordering::Relaxed);
            }
        }
    }
}

/// From half a millisecond, a call that finds all done, to half a minute.
fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.000_5, 2.0, 16))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("qsd_csi");
        let seconds = Seconds::new_with_constructor(buckets);
        let time = "Time of a CSI call, by method and gRPC code";
        registry.register_with_unit("rpc", time, Unit::Seconds, seconds.clone());
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let volumes = gauge("volumes", "Volumes that can be used");
        let damaged = gauge("volumes_damaged", "Volumes whose record or layer is damaged");
        let daemons = gauge("daemons", "Staged volumes that a daemon serves");
        let daemons_down = gauge("daemons_down", "Staged volumes that no daemon serves");
        let mut bytes = |name: &str, help: &str| {
            let family = Family::<InPool, Gauge>::default();
            registry.register_with_unit(name, help, Unit::Bytes, family.clone());
            family
        };
        let pool_total = bytes("pool_total", "Size of the file system of the pool");
        let pool_free = bytes("pool_free", "Free bytes of the file system of the pool");
        let pool_promised = bytes("pool_promised", "Sum of the sizes of the volumes of the pool");
        let pool_allocated = bytes("pool_allocated", "What the pool spends on its volumes");
        let relay = RelayMetrics::register(&mut registry);
        Self {
            registry: Arc::new(registry),
            seconds,
            volumes,
            damaged,
            daemons,
            daemons_down,
            pool_total,
            pool_free,
            pool_promised,
            pool_allocated,
            relay,
        }
    }
}

impl Metrics {
    /// The text of all metrics, with the gauges as they are now.
    fn render(&self, node: &Node, relayed: &Relayed) -> anyhow::Result<String> {
        self.read(node)?;
        self.relay.read(node, relayed);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    fn read(&self, node: &Node) -> anyhow::Result<()> {
        use crate::{units::Bytes, volume::Entry};
        let set = |gauge: &Gauge, value: usize| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        let (up, down) = node.daemons();
        set(&self.daemons, up);
        set(&self.daemons_down, down);
        let entries = node.volumes().list(None, usize::MAX);
        let volume = |(_, entry)| match entry {
            Entry::Volume(volume) => Some(volume),
            Entry::Damaged { .. } => None,
        };
        let count = entries.len();
        let usable: Vec<_> = entries.into_iter().filter_map(volume).collect();
        set(&self.volumes, usable.len());
        set(&self.damaged, count - usable.len());
        for (pool, space) in node.volumes().space(None)? {
            let label = InPool { pool: pool.to_string() };
            let own = || usable.iter().filter(|volume| *volume.pool() == pool);
            let gauges = [
                (&self.pool_total, space.total),
                (&self.pool_free, space.free),
                (&self.pool_promised, own().map(|volume| volume.size()).sum::<Bytes>()),
                (&self.pool_allocated, node.volumes().allocated(&pool)),
            ];
            for (family, bytes) in gauges {
                family.get_or_create(&label).set(bytes.into());
            }
        }
        Ok(())
    }

    /// Serves `/metrics` and `/healthz` until told to stop.
    pub async fn serve(
        self,
        listener: TcpListener,
        node: Node,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .with_state((self, node));
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
        Ok(served.await?)
    }
}

async fn metrics(State((metrics, node)): State<(Metrics, Node)>) -> impl IntoResponse {
    let relayed = node.relayed().await;
    let text = tokio::task::spawn_blocking(move || metrics.render(&node, &relayed)).await;
    match text {
        Ok(Ok(text)) => (StatusCode::OK, text),
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

/// Healthy while every pool answers.
async fn healthz(State((_, node)): State<(Metrics, Node)>) -> impl IntoResponse {
    match tokio::task::spawn_blocking(move || node.volumes().space(None)).await {
        Ok(Ok(_)) => (StatusCode::OK, "ok\n".to_owned()),
        Ok(Err(error)) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", crate::chain::Chain(&error)))
        }
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
    }
}
