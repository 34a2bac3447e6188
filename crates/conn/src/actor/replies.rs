//! The replies of a connection that are not complete, in the order of their requests.
//!
//! Futures are polled whatever their place, so that requests in flight go on together; a frame that is there before its turn
//! waits here. Streams are polled only in their turn: what they would give before it would have to be kept.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll};

use crate::protocol::{ReplyFuture, ReplyStream};
use crate::{Protocol, Reply};

pub(super) struct Replies<P: Protocol> {
    queue: VecDeque<Pending<P>>,
}

enum Pending<P: Protocol> {
    Frames(VecDeque<P::Frame>),
    Future(ReplyFuture<P::Frame, P::ProtocolError>),
    Stream(ReplyStream<P::Frame, P::ProtocolError>),
    /// A future that is done before its turn.
    Done(Outcome<P>),
    Close(Option<P::Frame>),
    /// Nothing is left of it but its end.
    Over,
}

enum Outcome<P: Protocol> {
    Frame(P::Frame),
    Failed(P::ProtocolError),
    Panicked,
}

/// What comes next of the replies.
pub(super) enum Step<P: Protocol> {
    Frame(P::Frame),
    /// The reply is complete.
    End,
    Failed(P::ProtocolError),
    /// The reply panicked, and nothing more comes of it but an [`End`](Self::End).
    Panicked,
    /// The connection is to be closed.
    Close(Option<P::Frame>),
}

impl<P: Protocol> Replies<P> {
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the last of them closes the connection, and nothing can follow it.
    pub(super) fn is_last(&self) -> bool {
        matches!(self.queue.back(), Some(Pending::Close(_)))
    }

    /// Appends a reply. It is begun at once.
    pub(super) fn push(&mut self, reply: Reply<P::Frame, P::ProtocolError>, context: &mut Context<'_>) {
        let mut pending = match reply {
            Reply::None => Pending::Over,
            Reply::Frame(frame) => Pending::Done(Outcome::Frame(frame)),
            Reply::Frames(frames) => Pending::Frames(frames.into()),
            Reply::Future(future) => Pending::Future(future),
            Reply::Stream(stream) => Pending::Stream(stream),
            Reply::Close(frame) => Pending::Close(frame),
        };
        if !self.queue.is_empty() {
            pending.poll_ahead(context);
        }
        self.queue.push_back(pending);
    }

    /// Appends the end of a request whose handler panicked.
    pub(super) fn push_panicked(&mut self) {
        self.queue.push_back(Pending::Done(Outcome::Panicked));
    }

    /// Polls those whose turn it is not.
    pub(super) fn poll_ahead(&mut self, context: &mut Context<'_>) {
        for pending in self.queue.iter_mut().skip(1) {
            pending.poll_ahead(context);
        }
    }

    /// The next step of the reply whose turn it is, or nothing if there is none.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Step<P>>> {
        let Some(first) = self.queue.front_mut() else { return Poll::Ready(None) };
        let step = match first {
            Pending::Over => None,
            Pending::Frames(frames) => frames.pop_front().map(Step::Frame),
            Pending::Stream(stream) => match catch_unwind(AssertUnwindSafe(|| stream.as_mut().poll_next(context))) {
                Ok(Poll::Pending) => return Poll::Pending,
                Ok(Poll::Ready(next)) => next.map(|next| next.map_or_else(Step::Failed, Step::Frame)),
                Err(_) => {
                    *first = Pending::Over;
                    Some(Step::Panicked)
                }
            },
            Pending::Future(_) | Pending::Done(_) | Pending::Close(_) => {
                first.poll_ahead(context);
                match std::mem::replace(first, Pending::Over) {
                    Pending::Done(Outcome::Frame(frame)) => Some(Step::Frame(frame)),
                    Pending::Done(Outcome::Failed(error)) => Some(Step::Failed(error)),
                    Pending::Done(Outcome::Panicked) => Some(Step::Panicked),
                    Pending::Close(frame) => Some(Step::Close(frame)),
                    unfinished => {
                        *first = unfinished;
                        return Poll::Pending;
                    }
                }
            }
        };
        Poll::Ready(Some(step.unwrap_or_else(|| {
            self.queue.pop_front();
            Step::End
        })))
    }

    /// Gives back memory when there are none.
    pub(super) fn rest(&mut self) {
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }
}

impl<P: Protocol> Pending<P> {
    fn poll_ahead(&mut self, context: &mut Context<'_>) {
        let Self::Future(future) = self else { return };
        let outcome = match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(Ok(frame))) => Outcome::Frame(frame),
            Ok(Poll::Ready(Err(error))) => Outcome::Failed(error),
            Err(_) => Outcome::Panicked,
        };
        *self = Self::Done(outcome);
    }
}
