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
use crate::{Context, Handler, Message};

/// When a [`Breaker`] opens and closes.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct BreakerOptions {
    /// So many failures in a row open it. Default: 5, since a single one may be the message's fault.
    pub failures: u32,
    /// How long it stays open. Default: 1 s: long enough to relieve what is behind, short enough to notice that it is back.
    pub pause: Duration,
    /// So many successes in a row close it after the pause; no more than that are tried at once. Default: 3. At least one
    /// is tried.
    pub probes: u32,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self { failures: 5, pause: Duration::from_secs(1), probes: 3 }
    }
}

/// What a [`Breaker`] does with the next message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BreakerState {
    /// Lets it through.
    Closed,
    /// Refuses it.
    Open,
    /// Lets a few through, to see.
    HalfOpen,
}

/// A circuit breaker around a handler: after a row of failures it fails messages at once, without bothering what is behind.
///
/// Refused messages fail like any other, so under a [`Retry`](crate::Retry) policy they are tried again later, in order.
/// Clones share the state: keep one beside the pool and ask it before submitting, to refuse early.
///
/// ```
/// use tidewire_pool::{Breaker, BreakerOptions, BreakerState, Context, Message, Pool};
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
/// assert_eq!(last.reason.to_string(), "the handler failed: not tried: the circuit breaker is open");
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
    /// A closed breaker.
    pub fn new(options: BreakerOptions) -> Self {
        Self { options, state: Arc::new(Mutex::new(State::Closed { failures: 0 })) }
    }

    /// Puts it around a handler.
    pub fn guard<H>(&self, inner: H) -> Guarded<H> {
        Guarded { inner, breaker: self.clone() }
    }

    /// What it would do with a message at that time.
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
                    tracing::warn!(failures = *failures, "the circuit breaker opens");
                    *state = opened;
                }
            }
            State::HalfOpen { successes, running } if ok => {
                *running = running.saturating_sub(1);
                *successes += 1;
                if *successes >= self.options.probes {
                    tracing::info!("the circuit breaker closes");
                    *state = State::Closed { failures: 0 };
                }
            }
            State::HalfOpen { .. } => *state = opened,
            // It was let through before the breaker opened.
            State::Open { .. } => {}
        }
    }
}

/// A handler behind a [`Breaker`].
#[derive(Debug)]
pub struct Guarded<H> {
    inner: H,
    breaker: Breaker,
}

/// Why a guarded handler failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum BreakerError<E> {
    /// The breaker is open: the handler was not called.
    Open,
    /// The handler failed.
    Failed(E),
}

impl<E: fmt::Display> fmt::Display for BreakerError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("not tried: the circuit breaker is open"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for BreakerError<E> {}

impl<P: Send + 'static, H: Handler<P>> Handler<P> for Guarded<H> {
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
