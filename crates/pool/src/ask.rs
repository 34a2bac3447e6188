//! Questions: messages whose sender awaits a typed reply.
//!
//! The reply is a cell with two holders besides the asker: the [`Reply`] inside the payload, and the pool. The payload of a dead
//! letter still holds its `Reply`, so waiting until that is dropped would answer the asker too late. The pool answers it instead.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, lock};
use crate::{Reason, SubmitError};

/// The sending half of a question: part of the payload, for the handler to answer. See [`Pool::ask`](crate::Pool::ask).
///
/// If it is dropped without an answer, the asker gets [`AskError::Unanswered`].
#[derive(Debug)]
pub struct Reply<R> {
    cell: Arc<Cell<R>>,
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
    DeadLettered(Reason),
    /// The pool was shut down before its turn came.
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

/// How a question ends without an answer.
#[derive(Debug, Clone)]
pub(crate) enum Silence {
    DeadLettered(Reason),
    Returned,
    Unanswered,
}

/// The pool's side of a question.
pub(crate) trait Asked: Send + Sync {
    /// A message that shares in it has ended without being handled.
    fn ended(&self, how: Silence);

    fn is_open(&self) -> bool;

    /// Takes another question in, if it can.
    fn join(&mut self, other: Arc<dyn Asked>) -> Option<Arc<dyn Asked>> {
        Some(other)
    }
}

#[derive(Debug)]
struct Cell<R> {
    state: Mutex<State<R>>,
}

#[derive(Debug)]
enum State<R> {
    Open(Option<Waker>),
    Ended(Result<R, Silence>),
    /// The asker has its answer, or has gone.
    Closed,
}

/// A question and the future of its answer.
pub(crate) fn question<R: Send + 'static>() -> (Reply<R>, Arc<dyn Asked>, Answer<R>) {
    let cell = Arc::new(Cell { state: Mutex::new(State::Open(None)) });
    let question = Question { cell: Arc::clone(&cell), silence: Mutex::new(None) };
    (Reply { cell: Arc::clone(&cell) }, Arc::new(question), Answer { cell })
}

impl<R> Reply<R> {
    /// Answers the question. Returns the value if nobody waits for it: the asker has dropped its future, for example after a
    /// timeout, or the question has already ended, with an answer or without.
    ///
    /// It takes `&mut self` because the handler has the message by reference, so that it can be tried again.
    pub fn send(&mut self, value: R) -> Result<(), R> {
        match self.cell.end(Ok(value)) {
            None => Ok(()),
            Some(Ok(value)) => Err(value),
            Some(Err(_)) => unreachable!("what was put in comes back"),
        }
    }

    /// Returns whether the asker still waits. A handler checks it before an expensive computation; once false, it stays false.
    pub fn is_wanted(&self) -> bool {
        self.cell.is_open()
    }
}

impl<R> Drop for Reply<R> {
    fn drop(&mut self) {
        self.cell.end(Err(Silence::Unanswered));
    }
}

impl<R> Cell<R> {
    fn is_open(&self) -> bool {
        matches!(*lock(&self.state), State::Open(_))
    }

    /// Ends the question, if it has not ended; otherwise `how` comes back.
    fn end(&self, how: Result<R, Silence>) -> Option<Result<R, Silence>> {
        let mut state = lock(&self.state);
        let State::Open(waker) = &mut *state else { return Some(how) };
        let waker = waker.take();
        *state = State::Ended(how);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        None
    }
}

/// Shared by the message that asks and its follow-ups, because any of them may carry the reply. If one of them is not handled, the
/// question ends with the last of them.
struct Question<R> {
    cell: Arc<Cell<R>>,
    silence: Mutex<Option<Silence>>,
}

impl<R: Send> Asked for Question<R> {
    fn ended(&self, how: Silence) {
        *lock(&self.silence) = Some(how);
    }

    fn is_open(&self) -> bool {
        self.cell.is_open()
    }
}

impl<R> Drop for Question<R> {
    fn drop(&mut self) {
        if let Some(silence) = lock(&self.silence).take() {
            self.cell.end(Err(silence));
        }
    }
}

/// Questions that were merged into one message. Their number has no bound, so those that have ended are removed.
struct Merged(Vec<Arc<dyn Asked>>);

impl Asked for Merged {
    fn ended(&self, how: Silence) {
        self.0.iter().for_each(|asked| asked.ended(how.clone()));
    }

    fn is_open(&self) -> bool {
        self.0.iter().any(|asked| asked.is_open())
    }

    fn join(&mut self, other: Arc<dyn Asked>) -> Option<Arc<dyn Asked>> {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|asked| asked.is_open());
        }
        self.0.push(other);
        None
    }
}

/// The question of a message into which another was merged.
pub(crate) fn both(mut first: Arc<dyn Asked>, second: Arc<dyn Asked>) -> Arc<dyn Asked> {
    let rest = match Arc::get_mut(&mut first) {
        Some(first) => first.join(second),
        None => Some(second),
    };
    match rest {
        Some(second) => Arc::new(Merged(vec![first, second])),
        None => first,
    }
}

pub(crate) struct Answer<R> {
    cell: Arc<Cell<R>>,
}

impl<R> Future for Answer<R> {
    type Output = Result<R, Silence>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.cell.state);
        if let State::Open(waker) = &mut *state {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, State::Closed) {
            State::Ended(how) => Poll::Ready(how),
            State::Open(_) | State::Closed => unreachable!("an answer is awaited once"),
        }
    }
}

impl<R> Drop for Answer<R> {
    fn drop(&mut self) {
        // An answer that came too late is dropped after the lock: its drop is the application's code.
        let state = std::mem::replace(&mut *lock(&self.cell.state), State::Closed);
        drop(state);
    }
}

impl<P> From<Silence> for AskError<P> {
    fn from(silence: Silence) -> Self {
        match silence {
            Silence::DeadLettered(reason) => Self::DeadLettered(reason),
            Silence::Returned => Self::Returned,
            Silence::Unanswered => Self::Unanswered,
        }
    }
}
