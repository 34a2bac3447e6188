//! Load shedding by queue delay: `CoDel` (RFC 8289), adapted to requests.
//!
//! A long queue is harmless if it drains, and a short queue is harmful if it never drains. So the signal is the *smallest* delay in an
//! interval: the handler is overloaded only while this minimum stays above the target, as in the RFC.
//!
//! The reaction differs from the RFC, which drops packets one at a time, because each loss slows the sender down. Senders of messages
//! may not slow down: in a simulation of this algorithm with twice the load, the delay was still five seconds after twenty seconds. So
//! every message that waited for more than twice the target is shed, until the smallest delay of an interval is below the target
//! again. The other messages are handled in time.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::instant_after;
use crate::sync::{Mutex, lock};
use crate::{Context, DeadLetterReason, Handler, Message};

/// Settings of [`Shedding`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SheddingOptions {
    /// The queue delay below which no message is shed. Default: 5 ms, as in the RFC.
    pub target: Duration,
    /// The time for which the queue delay may stay above the target. Default: 100 ms, as in the RFC: a burst that drains within
    /// a round trip is harmless.
    pub interval: Duration,
}

impl SheddingOptions {
    /// Sets [`target`](#structfield.target).
    #[must_use]
    pub fn target(mut self, target: Duration) -> Self {
        self.target = target;
        self
    }

    /// Sets [`interval`](#structfield.interval).
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }
}

impl Default for SheddingOptions {
    fn default() -> Self {
        Self { target: Duration::from_millis(5), interval: Duration::from_millis(100) }
    }
}

/// Load shedding around a handler. While the queue does not drain, messages that waited too long are rejected without calling the
/// handler.
///
/// A shed message is not retried. It becomes a dead letter with [`DeadLetterReason::Shed`], and a caller of
/// [`Pool::ask`](crate::Pool::ask) gets that reason. Clones share the state, so an application can hold one and reject requests before
/// it submits them:
///
/// ```
/// use std::time::Instant;
/// use tidewire_pool::{Context, Message, Pool, Shedding, SheddingOptions};
///
/// let shedding = Shedding::new(SheddingOptions::default());
/// let handler = |_: &mut Message<()>, _: &mut Context<'_, ()>| Ok::<(), String>(());
/// let pool = Pool::builder().start(shedding.guard(handler)).unwrap();
///
/// // In an HTTP layer: 503 with a `Retry-After` in whole seconds, rounded up.
/// let retry_after = shedding.retry_after(Instant::now()).map(|delay| delay.as_millis().div_ceil(1000));
/// assert_eq!(retry_after, None, "the queue is empty");
/// ```
#[derive(Debug, Clone)]
pub struct Shedding {
    options: SheddingOptions,
    state: Arc<Mutex<DelayState>>,
}

#[derive(Debug, Default)]
struct DelayState {
    /// The end of the current interval, and the smallest delay in it.
    interval: Option<(Instant, Duration)>,
    /// Whether the smallest delay of the last complete interval was above the target.
    is_overloaded: bool,
    /// The delay of the last message, and when it was measured.
    last: Option<(Instant, Duration)>,
}

impl Shedding {
    /// Creates load shedding without measurements.
    pub fn new(options: SheddingOptions) -> Self {
        Self { options, state: Arc::default() }
    }

    /// Wraps a handler with load shedding.
    pub fn guard<H>(&self, inner: H) -> SheddingHandler<H> {
        SheddingHandler { inner, shedding: self.clone() }
    }

    /// Returns the queue delay: how long the last message waited before a worker took it. Shed messages count.
    ///
    /// It is zero if more time has passed since then than this delay and the [`interval`](SheddingOptions#structfield.interval): the
    /// messages behind the last one should have been handled by then.
    pub fn queue_delay(&self, now: Instant) -> Duration {
        self.delay(&lock(&self.state), now)
    }

    /// Returns how long a client should wait before its next attempt, or `None` if there is no overload.
    ///
    /// This is the [queue delay](Self::queue_delay), or the rest of the current interval if that is longer. At the end of an interval,
    /// the overload is determined again.
    pub fn retry_after(&self, now: Instant) -> Option<Duration> {
        let state = lock(&self.state);
        let delay = self.delay(&state, now);
        let (end, _) = state.interval.filter(|_| state.is_overloaded && delay > self.options.target)?;
        Some(delay.max(end.saturating_duration_since(now)))
    }

    fn delay(&self, state: &DelayState, now: Instant) -> Duration {
        let current = |&(at, delay): &(Instant, Duration)| now < instant_after(at, delay.max(self.options.interval));
        state.last.filter(current).map_or(Duration::ZERO, |(_, delay)| delay)
    }

    /// Records the delay of a message. Returns whether to shed the message.
    fn should_shed(&self, waited: Duration, now: Instant) -> bool {
        let SheddingOptions { target, interval } = self.options;
        let mut state = lock(&self.state);
        state.last = Some((now, waited));
        match &mut state.interval {
            Some((end, smallest)) if now < *end => *smallest = waited.min(*smallest),
            ended => {
                let is_overloaded = ended.is_some_and(|(_, smallest)| smallest > target);
                *ended = Some((instant_after(now, interval), waited));
                state.is_overloaded = is_overloaded;
            }
        }
        state.is_overloaded && waited > target.saturating_mul(2)
    }
}

/// A handler with [`Shedding`] around it, returned by [`Shedding::guard`].
#[derive(Debug)]
pub struct SheddingHandler<H> {
    inner: H,
    shedding: Shedding,
}

/// The error of a [`SheddingHandler`].
#[derive(Debug)]
#[non_exhaustive]
pub enum SheddingError<E> {
    /// The message waited for too long while the queue did not drain; the handler was not called.
    Shed {
        /// The time from its submission to its rejection.
        waited: Duration,
    },
    /// The handler failed.
    Failed(E),
}

impl<E: fmt::Display> fmt::Display for SheddingError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shed { waited } => DeadLetterReason::Shed { waited: *waited }.fmt(f),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for SheddingError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // The text of the inner error is shown, so its source follows.
            Self::Failed(error) => error.source(),
            _ => None,
        }
    }
}

impl<P: Send + 'static, H: Handler<P>> Handler<P> for SheddingHandler<H> {
    type Error = SheddingError<H::Error>;
    const TIMED: bool = true;

    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), Self::Error> {
        // The delay of a retry includes its pause, so only the first attempt counts.
        if context.attempt() == 1
            && let Some(waited) = context.waited()
            && self.shedding.should_shed(waited, context.now())
        {
            context.do_not_retry();
            return Err(SheddingError::Shed { waited });
        }
        self.inner.handle(message, context).map_err(SheddingError::Failed)
    }

    fn reason(error: Self::Error) -> DeadLetterReason {
        match error {
            SheddingError::Shed { waited } => DeadLetterReason::Shed { waited },
            SheddingError::Failed(error) => H::reason(error),
        }
    }
}
