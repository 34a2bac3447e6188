//! The handler, which an application implements, and its context.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ask::AskHandle;
use crate::budget::Amount;
use crate::engine::Engine;
use crate::{DeadLetterReason, Key, Message, SubmitError, TraceContext};

/// Handles messages, on the threads of a pool.
///
/// All workers share the handler. It gets the message by reference, because the message may be retried or kept as a dead letter. Use
/// `std::mem::take` or an `Option` to move data out of the payload.
pub trait Handler<P>: Send + Sync + 'static {
    /// The error of a failed attempt. It is logged, and a dead letter has its [`reason`](Self::reason).
    type Error: Display;

    /// Whether the handler uses [`Context::waited`]. The clock is read at each submission only if this is set. A decorator sets it if
    /// the decorator or its inner handler needs the time.
    const TIMED: bool = false;

    /// Handles one message. Follow-up messages are submitted through the context.
    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), Self::Error>;

    /// Returns the reason of a dead letter for this error. Default: [`DeadLetterReason::Failed`] with the text of the error. A decorator
    /// returns the reason of its inner handler for an error of that handler.
    fn reason(error: Self::Error) -> DeadLetterReason {
        DeadLetterReason::Failed(error.to_string())
    }
}

/// A function is a handler.
impl<P, E: Display, F> Handler<P> for F
where
    F: Fn(&mut Message<P>, &mut Context<'_, P>) -> Result<(), E> + Send + Sync + 'static,
{
    type Error = E;

    fn handle(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), E> {
        self(message, context)
    }
}

/// The context of a message that is being handled: its attempt, its trace, and the submission of follow-ups.
pub struct Context<'a, P> {
    pub(crate) engine: &'a Engine<P>,
    pub(crate) key: Key,
    /// The budget of the message being handled, until a follow-up takes it over.
    pub(crate) budget: Option<Amount>,
    pub(crate) trace: TraceContext,
    pub(crate) attempt: u32,
    pub(crate) submitted: u64,
    pub(crate) is_final_attempt: bool,
    /// The ask of the message being handled, which follow-ups share.
    pub(crate) ask: Option<Arc<dyn AskHandle>>,
}

impl<P: Send + 'static> Context<'_, P> {
    /// Submits a follow-up message. It belongs to the trace of the message being handled, unless it has one of its own.
    ///
    /// It never waits, and no overflow policy applies. The first follow-up takes over the budget of the message being handled, so that
    /// a chain of messages makes progress even if the pool is full. Further follow-ups need unused budget. If there is none, the error
    /// contains the message. While the pool drains, follow-ups are still accepted.
    pub fn submit(&mut self, mut message: Message<P>) -> Result<(), SubmitError<P>> {
        if message.trace.is_none() {
            message.trace = self.trace;
        }
        self.engine.follow_up(message, self.key, &mut self.budget, self.ask.clone())
    }

    /// Returns the trace context that follow-ups inherit: that of the message, or of the span around this handler.
    pub fn trace(&self) -> TraceContext {
        self.trace
    }

    /// Sets the trace context that follow-ups inherit. For decorators that open a span.
    pub fn set_trace(&mut self, trace: TraceContext) {
        self.trace = trace;
    }

    /// Returns the number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Makes this attempt the last one. If it fails, the message becomes a dead letter and is not retried.
    pub fn do_not_retry(&mut self) {
        self.is_final_attempt = true;
    }

    /// Returns the time since the message was submitted, if the handler is [timed](Handler::TIMED).
    pub fn waited(&self) -> Option<Duration> {
        let waited = || Duration::from_nanos(self.engine.clock.nanos().saturating_sub(self.submitted));
        self.engine.timed.then(waited)
    }

    /// Returns the time of the pool, which is virtual in a [`Simulation`](crate::Simulation).
    pub fn now(&self) -> Instant {
        self.engine.clock.now()
    }
}

/// A [`Handler`] with its error type erased.
pub(crate) trait Deliver<P>: Send + Sync {
    fn deliver(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), DeadLetterReason>;
}

impl<P, H: Handler<P>> Deliver<P> for H {
    fn deliver(&self, message: &mut Message<P>, context: &mut Context<'_, P>) -> Result<(), DeadLetterReason> {
        self.handle(message, context).map_err(H::reason)
    }
}
