//! Messages, and the envelopes in which the pool keeps them.

use std::sync::Arc;
use std::time::Instant;

use crate::ask::Asked;
use crate::{Key, TraceContext};

/// Something to be handled, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Message<P> {
    /// Messages with the same key are handled one at a time, in order.
    pub key: Key,
    /// What caused it.
    pub trace: TraceContext,
    /// When its turn comes after this, it is not handled but becomes a dead letter.
    pub deadline: Option<Instant>,
    /// The application's part, which the pool does not look at.
    pub payload: P,
}

impl<P> Message<P> {
    /// A message without a deadline, caused by whatever this thread is [handling](TraceContext::current).
    pub fn new(key: impl Into<Key>, payload: P) -> Self {
        Self { key: key.into(), trace: TraceContext::current(), deadline: None, payload }
    }

    /// Sets the deadline.
    #[must_use]
    pub fn deadline(self, deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// Sets what caused it.
    #[must_use]
    pub fn trace(self, trace: TraceContext) -> Self {
        Self { trace, ..self }
    }
}

/// A message that the pool has accepted.
pub(crate) struct Envelope<P> {
    pub(crate) message: Message<P>,
    /// What it takes of the room for bytes.
    pub(crate) bytes: usize,
    /// How often it was handed to the handler.
    pub(crate) attempts: u32,
    /// Set only where the handler wants to know how long it waited.
    pub(crate) submitted: Option<Instant>,
    pub(crate) asker: Option<Arc<dyn Asked>>,
}
