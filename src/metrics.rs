//! What a monitoring system sees: `/metrics` in the text format of Prometheus, `/healthz` and
//! `/readyz`.
//!
//! Calls are timed by one tower layer around all services; everything else is looked at when it is
//! asked for, in bounded time (`node::View`), and written afresh: what is gone leaves no series.

mod calls;
mod layer;
mod process;
mod state;
mod text;

pub use layer::Timed;

use crate::node::Node;
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use calls::Calls;
use std::{
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};
use text::{Kind, Text};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// All metrics of a driver. Clones are the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    calls: Calls,
    begun: SystemTime,
    serving: Arc<OnceLock<Serving>>,
}

/// The node, and how long it took until it served.
#[derive(Debug)]
struct Serving {
    node: Node,
    startup: Duration,
}

/// What the text format is called.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

impl Default for Metrics {
    fn default() -> Self {
        Self { calls: Calls::default(), begun: crate::clock::now(), serving: Arc::default() }
    }
}

impl Metrics {
    /// From now on the node serves, which took so long since the process started.
    pub fn serving(&self, node: Node, startup: Duration) {
        _ = self.serving.set(Serving { node, startup }); // there is one
    }

    /// The text of all metrics, with everything as it is now.
    async fn render(&self) -> String {
        let mut text = Text::default();
        let help = "The version of the driver";
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        text.family("qsd_csi_build_info", Kind::Gauge, help).value(&version, 1);
        let serving = self.serving.get();
        let help = "Whether the driver serves; 0 while it still puts its records to rest";
        text.gauge("qsd_csi_serving", help, u8::from(serving.is_some()));
        process::write(&mut text, self.begun);
        self.calls.write(&mut text);
        if let Some(Serving { node, startup }) = serving {
            let help = "Time of the last start-up, until the first call could be served";
            text.gauge("qsd_csi_startup_seconds", help, startup.as_secs_f64());
            state::write(&mut text, node).await;
        }
        text.into_string()
    }

    /// Serves `/metrics`, `/healthz` and `/readyz` until told to stop.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) -> anyhow::Result<()> {
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .with_state(self);
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
        Ok(served.await?)
    }
}

async fn metrics(State(metrics): State<Metrics>) -> impl IntoResponse {
    ([(CONTENT_TYPE, FORMAT)], metrics.render().await)
}

/// Alive: whoever gets no answer may end the process, and nothing that it could not mend by that
/// keeps it from answering.
async fn healthz() -> &'static str {
    "ok\n"
}

/// Ready to do its work, or all that keeps it from it, by name.
async fn readyz(State(metrics): State<Metrics>) -> impl IntoResponse {
    let Some(serving) = metrics.serving.get() else {
        let text = "starting: records and daemons are still put in order\n";
        return (StatusCode::SERVICE_UNAVAILABLE, text.to_owned());
    };
    match serving.node.readiness().await {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}
