//! The tower layer that times every call.

use super::Metrics;
use crate::code;
use http::{Request, Response};
use std::{
    pin::Pin,
    task::{Context, Poll},
};
use tonic::{Code, Status};
use tower::{Layer, Service};

/// Wraps the services of a server.
#[derive(Clone, Debug)]
pub struct Timed(pub Metrics);

/// A service whose calls are timed.
#[derive(Clone, Debug)]
pub struct TimedService<S> {
    inner: S,
    metrics: Metrics,
}

impl<S> Layer<S> for Timed {
    type Service = TimedService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        TimedService { inner, metrics: self.0.clone() }
    }
}

impl<S, In, Out> Service<Request<In>> for TimedService<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let call = self.metrics.calls.begin(request.uri().path());
        let work = self.inner.call(request);
        Box::pin(async move {
            let response = work.await?;
            // A unary call that fails says so in its headers; one without a word went well.
            let status = Status::from_header_map(response.headers());
            let code = status.map_or(Code::Ok, |status| status.code());
            call.answered(code::name(code));
            Ok(response)
        })
    }
}
