//! Spans and metrics, as decorators around handlers and as an observer of the pool.

use metrics::{Counter, Gauge, Histogram};
use tracing::field::Empty;

use crate::{Context, DeadLetterReason, Handler, Message};

/// A handler with a span and metrics around each message; see the [table](crate#metrics-and-spans).
///
/// The span is a child of the message's [trace context](crate::TraceContext). It has its own id, which
/// [`TraceContext::current`](crate::TraceContext::current) returns in the handler and which follow-up messages inherit as their
/// parent. A message without a trace begins one.
#[derive(Debug)]
pub struct Observed<H> {
    inner: H,
    handled: Counter,
    failed: Counter,
    wait: Histogram,
    service: Histogram,
}

impl<H> Observed<H> {
    /// Observes a handler. The metrics use the recorder that is installed now.
    pub fn new(inner: H) -> Self {
        Self {
            inner,
            handled: metrics::counter!("message.handled"),
            failed: metrics::counter!("message.failed"),
            wait: metrics::histogram!("message.wait"),
            service: metrics::histogram!("message.service"),
        }
    }
}

impl<P: Send + 'static, H: Handler<P>> Handler<P> for Observed<H> {
    type Error = H::Error;
    const TIMED: bool = true;

    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), Self::Error> {
        let parent = context.trace();
        let own = if parent.is_none() { crate::TraceContext::root() } else { parent.child() };
        let span = tracing::info_span!(
            "message.handle",
            key = message.key.0,
            attempt = context.attempt(),
            trace_id = format_args!("{:032x}", own.trace_id()),
            span_id = format_args!("{:016x}", own.span_id()),
            parent_id = Empty,
            status = Empty,
            error = Empty,
        );
        if !parent.is_none() {
            span.record("parent_id", format_args!("{:016x}", parent.span_id()));
        }
        if let Some(waited) = context.waited() {
            self.wait.record(waited);
        }
        context.set_trace(own);
        let start = context.now();
        // The attempt is counted as failed unless it succeeds, so that a panic is counted.
        let mut attempt = AttemptRecorder { observed: self, span: &span, ok: false };
        let result = {
            let _current = own.enter();
            span.in_scope(|| self.inner.handle(message, context))
        };
        match &result {
            Ok(()) => attempt.ok = true,
            Err(error) => _ = span.record("error", tracing::field::display(error)),
        }
        self.service.record(context.now().saturating_duration_since(start));
        result
    }

    fn reason(error: Self::Error) -> DeadLetterReason {
        H::reason(error)
    }
}

/// Records the result of an attempt when dropped.
struct AttemptRecorder<'a, H> {
    observed: &'a Observed<H>,
    span: &'a tracing::Span,
    ok: bool,
}

impl<H> Drop for AttemptRecorder<'_, H> {
    fn drop(&mut self) {
        let (counter, status) = if self.ok { (&self.observed.handled, "ok") } else { (&self.observed.failed, "error") };
        counter.increment(1);
        self.span.record("status", status);
    }
}

/// Observes the messages of a pool. It is called on the thread that causes the event, so it must be quick.
pub trait Observer: Send + Sync + 'static {
    /// Records an event of one message.
    fn observe(&self, event: Event);
}

/// An event of a message, for an [`Observer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Accepted and queued.
    Submitted,
    /// Accepted by merging into a queued message.
    Merged,
    /// Not accepted.
    Rejected,
    /// Failed and will be retried.
    Retried,
    /// Became a dead letter, because its deadline passed before it was handled.
    Expired,
    /// Became a dead letter, because it was the oldest message of a full queue.
    Displaced,
    /// Became a dead letter, for any reason.
    DeadLettered,
    /// A dead letter was dropped because of the bound on dead letters.
    Forgotten,
    /// Returned by a shutdown.
    Returned,
    /// Ended: handled, dead-lettered or returned. Occurs once for every queued message.
    Ended,
}

/// An [`Observer`] that records metrics; see the [table](crate#metrics-and-spans). Pass it to
/// [`Builder::observer`](crate::Builder::observer).
#[derive(Debug)]
pub struct PoolMetrics {
    submitted: Counter,
    rejected: Counter,
    retried: Counter,
    expired: Counter,
    dropped: Counter,
    dead_lettered: Counter,
    forgotten: Counter,
    returned: Counter,
    depth: Gauge,
}

impl PoolMetrics {
    /// Creates metrics with this label. They use the recorder that is installed now.
    pub fn new(pool: impl Into<metrics::SharedString>) -> Self {
        let pool = pool.into();
        Self {
            submitted: metrics::counter!("message_pool.submitted", "pool" => pool.clone()),
            rejected: metrics::counter!("message_pool.rejected", "pool" => pool.clone()),
            retried: metrics::counter!("message_pool.retried", "pool" => pool.clone()),
            expired: metrics::counter!("message_pool.expired", "pool" => pool.clone()),
            dropped: metrics::counter!("message_pool.dropped", "pool" => pool.clone()),
            dead_lettered: metrics::counter!("message_pool.dead_lettered", "pool" => pool.clone()),
            forgotten: metrics::counter!("message_pool.forgotten", "pool" => pool.clone()),
            returned: metrics::counter!("message_pool.returned", "pool" => pool.clone()),
            depth: metrics::gauge!("message_pool.depth", "pool" => pool),
        }
    }
}

impl Observer for PoolMetrics {
    fn observe(&self, event: Event) {
        match event {
            Event::Submitted => {
                self.submitted.increment(1);
                // Not set to the depth of the pool, because two threads could set it in the wrong order.
                self.depth.increment(1);
            }
            Event::Merged => self.submitted.increment(1),
            Event::Rejected => self.rejected.increment(1),
            Event::Retried => self.retried.increment(1),
            Event::Expired => self.expired.increment(1),
            Event::Displaced => self.dropped.increment(1),
            Event::DeadLettered => self.dead_lettered.increment(1),
            Event::Forgotten => self.forgotten.increment(1),
            Event::Returned => self.returned.increment(1),
            Event::Ended => self.depth.decrement(1),
        }
    }
}
