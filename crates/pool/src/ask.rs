//! Asks: messages whose caller awaits a typed reply.
//!
//! The caller, the [`Reply`] inside the payload and the pool share a cell. The payload of a dead letter retains its `Reply`, so a caller
//! could wait for a long time if the ask ended only when the `Reply` is dropped. So the pool ends the ask when the message has ended.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, lock};
use crate::{DeadLetterReason, SubmitError};

/// Sends the reply to a caller of [`Pool::ask`](crate::Pool::ask). It is part of the payload of the message.
///
/// If it is dropped before a value was sent, the caller gets [`AskError::Unanswered`].
#[derive(Debug)]
pub struct Reply<R> {
    cell: Arc<AskCell<R>>,
}

/// Why a caller of [`Pool::ask`](crate::Pool::ask) gets no reply.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AskError<P> {
    /// The pool did not accept the message.
    #[error("not submitted: {0}")]
    NotSubmitted(#[source] SubmitError<P>),
    /// The message became a dead letter.
    #[error("dead-lettered: {0}")]
    DeadLettered(DeadLetterReason),
    /// The pool was shut down before the message was handled.
    #[error("the pool was shut down before the message was handled")]
    Returned,
    /// The handler dropped the [`Reply`] before it sent a value.
    #[error("the handler dropped the reply before it sent a value")]
    Unanswered,
}

impl<P> fmt::Debug for AskError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSubmitted(error) => f.debug_tuple("NotSubmitted").field(error).finish(),
            Self::DeadLettered(reason) => f.debug_tuple("DeadLettered").field(reason).finish(),
            Self::Returned => f.write_str("Returned"),
            Self::Unanswered => f.write_str("Unanswered"),
        }
    }
}

/// Why an ask ends without a reply.
#[derive(Debug, Clone)]
pub(crate) enum AskFailure {
    DeadLettered(DeadLetterReason),
    Returned,
    Unanswered,
}

/// The pool's handle of an ask.
pub(crate) trait AskHandle: Send + Sync {
    /// Records that a message of this ask ended without being handled.
    fn fail(&self, reason: AskFailure);

    fn is_open(&self) -> bool;

    /// Adds another ask. Returns it if this handle is of a single ask.
    fn join(&mut self, other: Arc<dyn AskHandle>) -> Option<Arc<dyn AskHandle>> {
        Some(other)
    }
}

#[derive(Debug)]
struct AskCell<R> {
    state: Mutex<AskState<R>>,
}

#[derive(Debug)]
enum AskState<R> {
    Open(Option<Waker>),
    Ended(Result<R, AskFailure>),
    /// The caller has received the result or has dropped its future.
    Closed,
}

/// Creates an ask: the [`Reply`] for the payload, the handle for the pool, and the future for the caller.
pub(crate) fn new_ask<R: Send + 'static>() -> (Reply<R>, Arc<dyn AskHandle>, ReplyFuture<R>) {
    let cell = Arc::new(AskCell { state: Mutex::new(AskState::Open(None)) });
    let ask = SingleAsk { cell: Arc::clone(&cell), failure: Mutex::new(None) };
    (Reply { cell: Arc::clone(&cell) }, Arc::new(ask), ReplyFuture { cell })
}

impl<R> Reply<R> {
    /// Sends the reply. Returns the value if the caller no longer waits: it has dropped its future, for example after a timeout, or has
    /// already received a reply or an error.
    ///
    /// It takes `&mut self` because the handler gets the message by reference, so that the message can be retried.
    pub fn send(&mut self, value: R) -> Result<(), R> {
        match self.cell.end(Ok(value)) {
            None => Ok(()),
            Some(Ok(value)) => Err(value),
            Some(Err(_)) => unreachable!("`end` returns its argument"),
        }
    }

    /// Returns whether the caller still waits. A handler can check it before an expensive computation. Once false, it stays false.
    pub fn is_wanted(&self) -> bool {
        self.cell.is_open()
    }
}

impl<R> Drop for Reply<R> {
    fn drop(&mut self) {
        self.cell.end(Err(AskFailure::Unanswered));
    }
}

impl<R> AskCell<R> {
    fn is_open(&self) -> bool {
        matches!(*lock(&self.state), AskState::Open(_))
    }

    /// Ends the ask. Returns `result` if it has already ended.
    fn end(&self, result: Result<R, AskFailure>) -> Option<Result<R, AskFailure>> {
        let mut state = lock(&self.state);
        let AskState::Open(waker) = &mut *state else { return Some(result) };
        let waker = waker.take();
        *state = AskState::Ended(result);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        None
    }
}

/// The handle of one ask. The message and its follow-ups share it, because any of them may carry the [`Reply`]. If one of them is not
/// handled, the ask ends when the last of them has ended.
struct SingleAsk<R> {
    cell: Arc<AskCell<R>>,
    failure: Mutex<Option<AskFailure>>,
}

impl<R: Send> AskHandle for SingleAsk<R> {
    fn fail(&self, reason: AskFailure) {
        *lock(&self.failure) = Some(reason);
    }

    fn is_open(&self) -> bool {
        self.cell.is_open()
    }
}

impl<R> Drop for SingleAsk<R> {
    fn drop(&mut self) {
        if let Some(failure) = lock(&self.failure).take() {
            self.cell.end(Err(failure));
        }
    }
}

/// The asks of messages that were merged into one. Their number has no bound, so those that have ended are removed.
struct MergedAsks(Vec<Arc<dyn AskHandle>>);

impl AskHandle for MergedAsks {
    fn fail(&self, reason: AskFailure) {
        self.0.iter().for_each(|ask| ask.fail(reason.clone()));
    }

    fn is_open(&self) -> bool {
        self.0.iter().any(|ask| ask.is_open())
    }

    fn join(&mut self, other: Arc<dyn AskHandle>) -> Option<Arc<dyn AskHandle>> {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|ask| ask.is_open());
        }
        self.0.push(other);
        None
    }
}

/// Combines the asks of two messages that were merged.
pub(crate) fn merge_asks(mut first: Arc<dyn AskHandle>, second: Arc<dyn AskHandle>) -> Arc<dyn AskHandle> {
    let rest = match Arc::get_mut(&mut first) {
        Some(first) => first.join(second),
        None => Some(second),
    };
    match rest {
        Some(second) => Arc::new(MergedAsks(vec![first, second])),
        None => first,
    }
}

/// The future of a caller that waits for a reply.
pub(crate) struct ReplyFuture<R> {
    cell: Arc<AskCell<R>>,
}

impl<R> Future for ReplyFuture<R> {
    type Output = Result<R, AskFailure>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.cell.state);
        if let AskState::Open(waker) = &mut *state {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, AskState::Closed) {
            AskState::Ended(result) => Poll::Ready(result),
            AskState::Open(_) | AskState::Closed => unreachable!("a completed future is not polled again"),
        }
    }
}

impl<R> Drop for ReplyFuture<R> {
    fn drop(&mut self) {
        // A reply that was not received is dropped after the lock is released, because its destructor is application code.
        let state = std::mem::replace(&mut *lock(&self.cell.state), AskState::Closed);
        drop(state);
    }
}

impl<P> From<AskFailure> for AskError<P> {
    fn from(failure: AskFailure) -> Self {
        match failure {
            AskFailure::DeadLettered(reason) => Self::DeadLettered(reason),
            AskFailure::Returned => Self::Returned,
            AskFailure::Unanswered => Self::Unanswered,
        }
    }
}
