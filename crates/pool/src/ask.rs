//! Questions: messages whose sender, the asker, awaits a typed reply.
//!
//! The asker, the [`Reply`] inside the payload and the pool share a cell. The payload of a dead letter keeps its `Reply`, so the asker
//! would wait too long if the question ended only when the `Reply` is dropped. The pool ends the question instead.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, lock};
use crate::{DeadLetterReason, SubmitError};

/// The sending half of a question: part of the payload, for the handler to answer. See [`Pool::ask`](crate::Pool::ask).
///
/// If it is dropped without an answer, the asker gets [`AskError::Unanswered`].
#[derive(Debug)]
pub struct Reply<R> {
    cell: Arc<AskCell<R>>,
}

/// Why a question was not answered.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AskError<P> {
    /// The pool did not accept it.
    #[error("not submitted: {0}")]
    NotSubmitted(#[source] SubmitError<P>),
    /// It became a dead letter.
    #[error("dead-lettered: {0}")]
    DeadLettered(DeadLetterReason),
    /// The pool was shut down before the message was handled.
    #[error("the pool was shut down before the question was handled")]
    Returned,
    /// The handler ended without answering.
    #[error("the handler dropped the reply without answering")]
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

/// The reason why a question ends without an answer.
#[derive(Debug, Clone)]
pub(crate) enum AskFailure {
    DeadLettered(DeadLetterReason),
    Returned,
    Unanswered,
}

/// The pool's side of a question.
pub(crate) trait AskHandle: Send + Sync {
    /// Records that a message of this question ended without being handled.
    fn fail(&self, reason: AskFailure);

    fn is_open(&self) -> bool;

    /// Adds another question. Returns it if this is a single question.
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
    /// The asker has received its answer or has dropped its future.
    Closed,
}

/// Creates a question: the reply for the payload, the pool's side, and the future of the answer.
pub(crate) fn question<R: Send + 'static>() -> (Reply<R>, Arc<dyn AskHandle>, Answer<R>) {
    let cell = Arc::new(AskCell { state: Mutex::new(AskState::Open(None)) });
    let question = Question { cell: Arc::clone(&cell), failure: Mutex::new(None) };
    (Reply { cell: Arc::clone(&cell) }, Arc::new(question), Answer { cell })
}

impl<R> Reply<R> {
    /// Answers the question. Returns the value if the asker no longer waits: it has dropped its future, for example after a timeout, or
    /// the question has already ended, with an answer or without.
    ///
    /// It takes `&mut self` because the handler gets the message by reference, so that it can be retried.
    pub fn send(&mut self, value: R) -> Result<(), R> {
        match self.cell.end(Ok(value)) {
            None => Ok(()),
            Some(Ok(value)) => Err(value),
            Some(Err(_)) => unreachable!("`end` returns the value that it was given"),
        }
    }

    /// Returns whether the asker still waits. A handler checks it before an expensive computation; once false, it stays false.
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

    /// Ends the question. Returns `result` if the question has already ended.
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

/// The pool's side of one question. The message and its follow-ups share it, because any of them may carry the reply. If one of them
/// is not handled, the question ends when the last of them has ended.
struct Question<R> {
    cell: Arc<AskCell<R>>,
    failure: Mutex<Option<AskFailure>>,
}

impl<R: Send> AskHandle for Question<R> {
    fn fail(&self, reason: AskFailure) {
        *lock(&self.failure) = Some(reason);
    }

    fn is_open(&self) -> bool {
        self.cell.is_open()
    }
}

impl<R> Drop for Question<R> {
    fn drop(&mut self) {
        if let Some(failure) = lock(&self.failure).take() {
            self.cell.end(Err(failure));
        }
    }
}

/// Questions that were merged into one message. Their number has no bound, so those that have ended are removed.
struct MergedQuestions(Vec<Arc<dyn AskHandle>>);

impl AskHandle for MergedQuestions {
    fn fail(&self, reason: AskFailure) {
        self.0.iter().for_each(|asked| asked.fail(reason.clone()));
    }

    fn is_open(&self) -> bool {
        self.0.iter().any(|asked| asked.is_open())
    }

    fn join(&mut self, other: Arc<dyn AskHandle>) -> Option<Arc<dyn AskHandle>> {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|asked| asked.is_open());
        }
        self.0.push(other);
        None
    }
}

/// Combines the questions of two messages that were merged.
pub(crate) fn merge_questions(mut first: Arc<dyn AskHandle>, second: Arc<dyn AskHandle>) -> Arc<dyn AskHandle> {
    let rest = match Arc::get_mut(&mut first) {
        Some(first) => first.join(second),
        None => Some(second),
    };
    match rest {
        Some(second) => Arc::new(MergedQuestions(vec![first, second])),
        None => first,
    }
}

/// The future of an answer.
pub(crate) struct Answer<R> {
    cell: Arc<AskCell<R>>,
}

impl<R> Future for Answer<R> {
    type Output = Result<R, AskFailure>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.cell.state);
        if let AskState::Open(waker) = &mut *state {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, AskState::Closed) {
            AskState::Ended(result) => Poll::Ready(result),
            AskState::Open(_) | AskState::Closed => unreachable!("an answer is awaited once"),
        }
    }
}

impl<R> Drop for Answer<R> {
    fn drop(&mut self) {
        // Drop a late answer after the lock is released, because its destructor is application code.
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
