//! Observes a request. All of it runs on the task that sends the request.

use std::pin::Pin;

use tokio::time::Instant;
use tracing::Instrument as _;

use super::slow_hook::{self, SlowCommand};
use crate::{Error, Options};

impl Options {
    /// Whether requests have spans or a hook.
    pub(crate) fn is_observed(&self) -> bool {
        self.trace || self.slow_hook.is_some()
    }
}

/// Awaits the exchange in a span, if they are on, and calls the hook if it was slow. Boxed, so that the future of a request that is
/// not observed stays small.
pub(crate) fn observed<'a, T: Send + 'a>(
    options: &'a Options,
    commands: &'a [u8],
    count: usize,
    exchange: impl Future<Output = Result<T, Error>> + Send + 'a,
) -> Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>> {
    Box::pin(async move {
        let since = Instant::now();
        let ended = traced(options, commands, count, exchange).await;
        if let Some(hook) = &options.slow_hook {
            let (name, bytes, elapsed) = (slow_hook::name(commands), commands.len(), since.elapsed());
            hook.observe(SlowCommand { name, commands: count, bytes, elapsed, error: ended.as_ref().err() });
        }
        ended
    })
}

/// Awaits the exchange in a span, if they are on.
pub(crate) async fn traced<T>(
    options: &Options,
    commands: &[u8],
    count: usize,
    exchange: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    if !options.trace {
        return exchange.await;
    }
    let span = tracing::debug_span!(
        "redis",
        command = slow_hook::name(commands),
        commands = count,
        bytes = commands.len(),
        error = tracing::field::Empty,
    );
    let ended = exchange.instrument(span.clone()).await;
    if let Err(error) = &ended {
        span.record("error", tracing::field::display(error));
    }
    ended
}
