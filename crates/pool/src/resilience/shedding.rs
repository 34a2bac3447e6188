//! Load shedding by queue delay: `CoDel` (RFC 8289), adapted to requests.
//!
//! A long queue is harmless if it drains, and a short one is not if it never does. So the signal is the *smallest* delay over an
//! interval: the handler is overloaded only while that stays above the target, as in the RFC.
//!
//! What happens then differs from the RFC, which drops packets one at a time because each loss slows its sender down. Senders of
//! messages need not react: in the simulation, after twenty seconds of twice the load, the delay was still five seconds. So every
//! message that waited for more than twice the target is shed, until the smallest delay is below the target again. The remaining
//! messages are handled in time.

use std::fmt;
use std::time::{Duration, Instant};

use crate::clock::later;
use crate::sync::{Mutex, lock};
use crate::{Context, Handler, Message};

/// When a [`Shedding`] handler sheds.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SheddingOptions {
    /// A delay that is fine for ever. Default: 5 ms, as in the RFC.
    pub target: Duration,
    /// How long the delay may stay above the target. Default: 100 ms, as in the RFC: a burst that drains within a round
    /// trip harms nobody.
    pub interval: Duration,
}

impl Default for SheddingOptions {
    fn default() -> Self {
        Self { target: Duration::from_millis(5), interval: Duration::from_millis(100) }
    }
}

/// A handler that sheds messages when they wait for too long.
///
/// What is shed fails and is not retried, so it becomes a dead letter, and whoever asked is told.
#[derive(Debug)]
pub struct Shedding<H> {
    inner: H,
    options: SheddingOptions,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The interval being watched: when it ends, and the smallest delay in it.
    interval: Option<(Instant, Duration)>,
    /// What the last whole interval showed.
    overloaded: bool,
}

/// Why a shedding handler failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum SheddingError<E> {
    /// The message had waited too long while too much was waiting; the handler was not called.
    Shed(Duration),
    /// The handler failed.
    Failed(E),
}

impl<E: fmt::Display> fmt::Display for SheddingError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shed(waited) => write!(f, "shed: it waited {waited:?} while the queue did not drain"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for SheddingError<E> {}

impl<H> Shedding<H> {
    /// Puts it around a handler.
    pub fn new(inner: H, options: SheddingOptions) -> Self {
        Self { inner, options, state: Mutex::default() }
    }

    /// Whether to shed a message that waited so long.
    fn sheds(&self, waited: Duration, now: Instant) -> bool {
        let SheddingOptions { target, interval } = self.options;
        let mut state = lock(&self.state);
        match &mut state.interval {
            Some((end, smallest)) if now < *end => *smallest = waited.min(*smallest),
            ended => {
                let over = ended.is_some_and(|(_, smallest)| smallest > target);
                *ended = Some((later(now, interval), waited));
                state.overloaded = over;
            }
        }
        state.overloaded && waited > target.saturating_mul(2)
    }
}

impl<P: Send + 'static, H: Handler<P>> Handler<P> for Shedding<H> {
    type Error = SheddingError<H::Error>;
    const TIMED: bool = true;

    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), Self::Error> {
        // A retry waits by design, so only a first attempt is judged.
        if context.attempt() == 1
            && let Some(waited) = context.waited()
            && self.sheds(waited, context.now())
        {
            context.do_not_retry();
            return Err(SheddingError::Shed(waited));
        }
        self.inner.handle(message, context).map_err(SheddingError::Failed)
    }
}
