//! A circuit breaker.
//!
//! ```text
//!           enough failures            pause over             probes succeed
//!  Closed ──────────────────▶ Open ──────────────▶ HalfOpen ────────────────▶ Closed
//!                              ▲                       │
//!                              └───────────────────────┘ a probe fails
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::later;
use crate::sync::{Mutex, lock};
use crate::{Context, Handler, Message, Reason};

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
    /// The number of consecutive successes that close the breaker after the pause, and the number of messages that are tried
    /// at once until then. Default: 3, because one success may be luck. 0 counts as 1.
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
    /// Messages are refused.
    Open,
    /// A few messages are handled as probes, the others are refused.
    HalfOpen,
}

/// A circuit breaker around a handler. After several consecutive failures it refuses messages without calling the handler.
///
/// A refused message fails like any other. Under a [`Retry`](crate::Retry) policy it is tried again later, in order; without,
/// it becomes a dead letter with [`Reason::BreakerOpen`]. Clones share the state, so an application can keep one and check the
/// [`state`](Self::state) before it submits.
///
/// ```
/// use tidewire_pool::{Breaker, BreakerOptions, BreakerState, Context, Message, Pool, Reason};
///
/// let broken = |_: &mut Message<()>, _: &mut Context<'_, ()>| Err::<(), _>("no answer from the database");
/// let breaker = Breaker::new(BreakerOptions::default());
/// let mut pool = Pool::builder().workers(1).simulate(0, breaker.guard(broken)).unwrap();
/// for key in 0..6 {
///     pool.submit(Message::new(key, ())).unwrap();
/// }
/// while pool.step() {}
/// assert_eq!(breaker.state(pool.now()), BreakerState::Open);
/// let last = pool.dead_letters().take(6).pop().unwrap();
/// assert_eq!(last.reason, Reason::BreakerOpen);
/// ```
#[derive(Debug, Clone)]
pub struct Breaker {
    options: BreakerOptions,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant },
    HalfOpen { successes: u32, running: u32 },
}

impl Breaker {
    /// Creates a closed breaker.
    pub fn new(options: BreakerOptions) -> Self {
        Self { options, state: Arc::new(Mutex::new(State::Closed { failures: 0 })) }
    }

    /// Puts the breaker around a handler.
    pub fn guard<H>(&self, inner: H) -> BreakerHandler<H> {
        BreakerHandler { inner, breaker: self.clone() }
    }

    /// Returns the state at this time.
    pub fn state(&self, now: Instant) -> BreakerState {
        match &*lock(&self.state) {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { until } if now < *until => BreakerState::Open,
            State::Open { .. } | State::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    fn admit(&self, now: Instant) -> bool {
        let mut state = lock(&self.state);
        if let State::Open { until } = *state
            && now >= until
        {
            *state = State::HalfOpen { successes: 0, running: 0 };
        }
        match &mut *state {
            State::Closed { .. } => true,
            State::Open { .. } => false,
            State::HalfOpen { successes, running } => {
                let admitted = *successes + *running < self.options.probes.max(1);
                *running += u32::from(admitted);
                admitted
            }
        }
    }

    fn ended(&self, ok: bool, now: Instant) {
        let mut state = lock(&self.state);
        let opened = State::Open { until: later(now, self.options.pause) };
        match &mut *state {
            State::Closed { failures } if ok => *failures = 0,
            State::Closed { failures } => {
                *failures += 1;
                if *failures >= self.options.failures {
                    tracing::warn!(failures = *failures, "circuit breaker opened");
                    *state = opened;
                }
            }
            State::HalfOpen { successes, running } if ok => {
                *running = running.saturating_sub(1);
                *successes += 1;
                if *successes >= self.options.probes {
                    tracing::info!("circuit breaker closed");
                    *state = State::Closed { failures: 0 };
                }
            }
            State::HalfOpen { .. } => *state = opened,
            // This attempt began before the breaker opened.
            State::Open { .. } => {}
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

impl<E: std::error::Error + 'static> std::error::Error for BreakerError<E> {}

impl<P: Send + 'static, H: Handler<P>> Handler<P> for BreakerHandler<H> {
    type Error = BreakerError<H::Error>;
    const TIMED: bool = H::TIMED;

    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), Self::Error> {
        if !self.breaker.admit(context.now()) {
            return Err(BreakerError::Open);
        }
        // A panic counts as a failure.
        let mut attempt = Attempt { breaker: &self.breaker, failed_at: Some(context.now()) };
        let result = self.inner.handle(message, context);
        attempt.failed_at = None;
        drop(attempt);
        self.breaker.ended(result.is_ok(), context.now());
        result.map_err(BreakerError::Failed)
    }

    fn reason(error: Self::Error) -> Reason {
        match error {
            BreakerError::Open => Reason::BreakerOpen,
            BreakerError::Failed(error) => H::reason(error),
        }
    }
}

struct Attempt<'a> {
    breaker: &'a Breaker,
    failed_at: Option<Instant>,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.failed_at {
            self.breaker.ended(false, at);
        }
    }
}
