//! Spans and the hook for slow commands. All of it runs on the task that sends the request.

use std::pin::Pin;

use tokio::time::Instant;
use tracing::Instrument as _;

use crate::{Error, Options, SlowCommand, slow};

impl Options {
    /// Whether somebody looks at requests.
    pub(crate) fn is_observed(&self) -> bool {
        self.trace || self.slow.is_some()
    }
}

/// Sends, in a span if so, and tells if it was slow. In a box, so that those at whom nobody looks do not have to make room for it.
pub(crate) fn observed<'a, T: Send + 'a>(
    options: &'a Options,
    commands: &'a [u8],
    count: usize,
    exchange: impl Future<Output = Result<T, Error>> + Send + 'a,
) -> Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>> {
    Box::pin(async move {
        let since = Instant::now();
        let span = if options.trace {
            tracing::debug_span!(
                "redis",
                command = slow::name(commands),
                commands = count,
                bytes = commands.len(),
                error = tracing::field::Empty,
            )
        } else {
            tracing::Span::none()
        };
        let ended = exchange.instrument(span.clone()).await;
        let error = ended.as_ref().err();
        if let Some(error) = error {
            span.record("error", tracing::field::display(error));
        }
        if let Some(slow) = &options.slow {
            let (name, bytes, elapsed) = (slow::name(commands), commands.len(), since.elapsed());
            slow.tell(SlowCommand { name, commands: count, bytes, elapsed, error });
        }
        ended
    })
}
