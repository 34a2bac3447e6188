//! Messages, and the envelopes in which the pool stores them.

use std::sync::Arc;
use std::time::Instant;

use crate::ask::AskHandle;
use crate::{Key, TraceContext};

/// A payload for the handler, with its key, trace context and deadline.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Message<P> {
    /// Messages with the same key are handled one at a time, in order.
    pub key: Key,
    /// The trace of the message, and the span that caused it.
    pub trace: TraceContext,
    /// A message that has not been handled by this time becomes a dead letter.
    pub deadline: Option<Instant>,
    /// The application's data, which the pool does not interpret.
    pub payload: P,
}

impl<P> Message<P> {
    /// Creates a message without a deadline, in the [current](TraceContext::current) trace context of this thread.
    pub fn new(key: impl Into<Key>, payload: P) -> Self {
        Self { key: key.into(), trace: TraceContext::current(), deadline: None, payload }
    }

    /// Sets the deadline.
    #[must_use]
    pub fn deadline(self, deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// Sets the trace context.
    #[must_use]
    pub fn trace(self, trace: TraceContext) -> Self {
        Self { trace, ..self }
    }
}

/// A message that the pool has accepted.
///
/// Most of the cost of a message is to move its envelope between cores. So the envelope is small: fields that most messages do not use
/// are in a box.
pub(crate) struct Envelope<P> {
    pub(crate) key: Key,
    pub(crate) payload: P,
    /// The size of the payload, which counts against the budget.
    pub(crate) bytes: usize,
    /// The time of the submission by [`Clock::nanos`](crate::clock::Clock::nanos), or 0 if the handler is not timed.
    pub(crate) submitted: u64,
    extras: Option<Box<EnvelopeExtras>>,
}

/// Fields of an envelope that most messages do not use.
#[derive(Default)]
struct EnvelopeExtras {
    trace: TraceContext,
    deadline: Option<Instant>,
    attempts: u32,
    ask: Option<Arc<dyn AskHandle>>,
}

/// A message outside its envelope.
pub(crate) struct Delivery<P> {
    pub(crate) message: Message<P>,
    /// The number of attempts to handle it.
    pub(crate) attempts: u32,
    pub(crate) ask: Option<Arc<dyn AskHandle>>,
}

impl<P> Envelope<P> {
    #[inline]
    pub(crate) fn new(delivery: Delivery<P>, bytes: usize, submitted: u64) -> Self {
        let Delivery { message: Message { key, trace, deadline, payload }, attempts, ask } = delivery;
        let is_plain = trace.is_none() && deadline.is_none() && attempts == 0 && ask.is_none();
        let extras = if is_plain { None } else { Some(Box::new(EnvelopeExtras { trace, deadline, attempts, ask })) };
        Self { key, payload, bytes, submitted, extras }
    }

    #[inline]
    pub(crate) fn into_delivery(self) -> Delivery<P> {
        let EnvelopeExtras { trace, deadline, attempts, ask } = self.extras.map(|extras| *extras).unwrap_or_default();
        Delivery { message: Message { key: self.key, trace, deadline, payload: self.payload }, attempts, ask }
    }

    pub(crate) fn ask(&mut self) -> &mut Option<Arc<dyn AskHandle>> {
        &mut self.extras.get_or_insert_default().ask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn envelope_adds_four_words_to_a_payload() {
        assert_eq!(size_of::<Envelope<u64>>(), 8 + 4 * 8);
    }
}
