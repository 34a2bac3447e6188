//! A circuit breaker.
//!
//! ```text
//!           enough failures           pause elapsed           probes succeed
//!  Closed ──────────────────▶ Open ──────────────▶ HalfOpen ────────────────▶ Closed
//!                              ▲                       │
//!                              └───────────────────────┘ a probe fails
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::instant_after;
use crate::sync::{Mutex, lock};
use crate::{Context, DeadLetterReason, Handler, Message};

/// Settings of a [`Breaker`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct BreakerOptions {
    /// The number of consecutive failures that open the breaker. Default: 5, because a single failure may be the fault of its
    /// message.
    pub failures: u32,
    /// The time that the breaker stays open. Default: 1 s, long enough to relieve the failing service and short enough to
    /// notice its recovery.
    pub pause: Duration,
    /// The number of messages that are handled as probes after the pause. If all of them succeed, the breaker closes. Default: 3,
    /// because one success may be a coincidence. 0 counts as 1.
    pub probes: u32,
}

impl BreakerOptions {
    /// Sets [`failures`](#structfield.failures).
    #[must_use]
    pub fn failures(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// Sets [`pause`](#structfield.pause).
    #[must_use]
    pub fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// Sets [`probes`](#structfield.probes).
    #[must_use]
    pub fn probes(mut self, probes: u32) -> Self {
        self.probes = probes;
        self
    }
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self { failures: 5, pause: Duration::from_secs(1), probes: 3 }
    }
}

/// The state of a [`Breaker`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BreakerState {
    /// Messages are handled.
    Closed,
    /// Messages are rejected.
    Open,
    /// A few messages are handled as probes, the others are rejected.
    HalfOpen,
}

/// A circuit breaker around a handler. After several consecutive failures it rejects messages without calling the handler.
///
/// A rejected message fails like any other. With a [`Retry`](crate::Retry) policy it is retried later, in order; without one, it
/// becomes a dead letter with [`DeadLetterReason::BreakerOpen`]. Clones share the state, so an application can hold one and check the
/// [`state`](Self::state) before it submits.
///
/// ```
/// use tidewire_pool::{Breaker, BreakerOptions, BreakerState, Context, Message, Pool, DeadLetterReason};
///
/// let broken = |_: &mut Message<()>, _: &mut Context<'_, ()>| Err::<(), _>("no response from the database");
/// let breaker = Breaker::new(BreakerOptions::default());
/// let mut pool = Pool::builder().workers(1).simulate(0, breaker.guard(broken)).unwrap();
/// for key in 0..6 {
///     pool.submit(Message::new(key, ())).unwrap();
/// }
/// while pool.step() {}
/// assert_eq!(breaker.state(pool.now()), BreakerState::Open);
/// let last = pool.dead_letters().take(6).pop().unwrap();
/// assert_eq!(last.reason, DeadLetterReason::BreakerOpen);
/// ```
#[derive(Debug, Clone)]
pub struct Breaker {
    options: BreakerOptions,
    state: Arc<Mutex<InnerState>>,
}

#[derive(Debug)]
enum InnerState {
    Closed { failures: u32 },
    Open { until: Instant },
    HalfOpen { successes: u32, running: u32 },
}

impl Breaker {
    /// Creates a closed breaker.
    pub fn new(options: BreakerOptions) -> Self {
        Self { options, state: Arc::new(Mutex::new(InnerState::Closed { failures: 0 })) }
    }

    /// Wraps a handler with the breaker.
    pub fn guard<H>(&self, inner: H) -> BreakerHandler<H> {
        BreakerHandler { inner, breaker: self.clone() }
    }

    /// Returns the state at a time.
    pub fn state(&self, now: Instant) -> BreakerState {
        match &*lock(&self.state) {
            InnerState::Closed { .. } => BreakerState::Closed,
            InnerState::Open { until } if now < *until => BreakerState::Open,
            InnerState::Open { .. } | InnerState::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    fn admit(&self, now: Instant) -> bool {
        let mut state = lock(&self.state);
        if let InnerState::Open { until } = *state
            && now >= until
        {
            *state = InnerState::HalfOpen { successes: 0, running: 0 };
        }
        match &mut *state {
            InnerState::Closed { .. } => true,
            InnerState::Open { .. } => false,
            InnerState::HalfOpen { successes, running } => {
                let admitted = *successes + *running < self.options.probes.max(1);
                *running += u32::from(admitted);
                admitted
            }
        }
    }

    fn record(&self, ok: bool, now: Instant) {
        let mut state = lock(&self.state);
        let opened = InnerState::Open { until: instant_after(now, self.options.pause) };
        match &mut *state {
            InnerState::Closed { failures } if ok => *failures = 0,
            InnerState::Closed { failures } => {
                *failures += 1;
                if *failures >= self.options.failures {
                    tracing::warn!(failures = *failures, "circuit breaker opened");
                    *state = opened;
                }
            }
            InnerState::HalfOpen { successes, running } if ok => {
                *running = running.saturating_sub(1);
                *successes += 1;
                if *successes >= self.options.probes {
                    tracing::info!("circuit breaker closed");
                    *state = InnerState::Closed { failures: 0 };
                }
            }
            InnerState::HalfOpen { .. } => *state = opened,
            // The attempt started before the breaker opened.
            InnerState::Open { .. } => {}
        }
    }
}

/// A handler with a [`Breaker`] around it, returned by [`Breaker::guard`].
#[derive(Debug)]
pub struct BreakerHandler<H> {
    inner: H,
    breaker: Breaker,
}

/// The error of a [`BreakerHandler`].
#[derive(Debug)]
#[non_exhaustive]
pub enum BreakerError<E> {
    /// The breaker is open; the handler was not called.
    Open,
    /// The handler failed.
    Failed(E),
}

impl<E: fmt::Display> fmt::Display for BreakerError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("the circuit breaker is open"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for BreakerError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // The text of the inner error is shown, so its source follows.
            Self::Failed(error) => error.source(),
            _ => None,
        }
    }
}

impl<P: Send + 'static, H: Handler<P>> Handler<P> for BreakerHandler<H> {
    type Error = BreakerError<H::Error>;
    const TIMED: bool = H::TIMED;

    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), Self::Error> {
        if !self.breaker.admit(context.now()) {
            return Err(BreakerError::Open);
        }
        // A panic counts as a failure.
        let mut attempt = AttemptGuard { breaker: &self.breaker, failed_at: Some(context.now()) };
        let result = self.inner.handle(message, context);
        attempt.failed_at = None;
        drop(attempt);
        self.breaker.record(result.is_ok(), context.now());
        result.map_err(BreakerError::Failed)
    }

    fn reason(error: Self::Error) -> DeadLetterReason {
        match error {
            BreakerError::Open => DeadLetterReason::BreakerOpen,
            BreakerError::Failed(error) => H::reason(error),
        }
    }
}

/// Records a failure when dropped, unless `failed_at` has been cleared.
struct AttemptGuard<'a> {
    breaker: &'a Breaker,
    failed_at: Option<Instant>,
}

impl Drop for AttemptGuard<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.failed_at {
            self.breaker.record(false, at);
        }
    }
}
