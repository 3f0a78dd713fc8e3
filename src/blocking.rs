//! Where blocking file work is done.

/// Runs blocking file work on a thread of its own, where it holds up nobody.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let span = tracing::Span::current();
    let outcome = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    outcome.unwrap_or_else(|died| std::panic::resume_unwind(died.into_panic()))
}
