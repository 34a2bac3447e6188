//! Replies that are not complete, in the order of their requests.
//!
//! All futures are polled, so that requests in flight make progress together. A reply that is ready before its turn is kept here.
//! Streams are polled only in their turn, because their frames would have to be stored until then. The closure of a
//! [`Reply::InTurn`] is called by the actor, with the context of the connection.
//!
//! A future that is polled before its turn has its own waker, which records that the future was woken. So when one of a thousand
//! requests in flight is ready, the others are not polled.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};

use crate::protocol::{ReplyFuture, ReplyInTurn, ReplyStream};
use crate::{FrameLike, Protocol, Reply};

pub(super) struct Replies<P: Protocol> {
    queue: VecDeque<PendingReply<P>>,
    /// The size of the frames in the queue.
    ready_bytes: usize,
}

enum PendingReply<P: Protocol> {
    /// The remaining frames. If there are none, the reply is complete.
    Frames(VecDeque<P::Frame>),
    Future(ReplyFuture<P::Frame, P::ProtocolError>, Option<Arc<ReplyWaker>>),
    Stream(ReplyStream<P::Frame, P::ProtocolError>),
    InTurn(ReplyInTurn<P::Frame, P::ProtocolError>),
    Panicked,
    Close(Option<P::Frame>),
    Failed(P::ProtocolError),
}

/// The next step of the replies.
pub(super) enum ReplyStep<P: Protocol> {
    Frame(P::Frame),
    /// The closure must be called now, and its result passed to [`Replies::resolve_in_turn`].
    InTurn(ReplyInTurn<P::Frame, P::ProtocolError>),
    /// The reply is complete.
    End,
    /// The reply panicked. An [`End`](Self::End) follows.
    Panicked,
    /// The connection must be closed, with this last frame if there is one.
    Close(Option<P::Frame>),
    /// The reply failed.
    Failed(P::ProtocolError),
}

/// The waker of a future that is polled before its turn.
struct ReplyWaker {
    /// The future has been woken since it was last polled.
    is_set: AtomicBool,
    actor: Waker,
}

impl Wake for ReplyWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_set.store(true, SeqCst);
        self.actor.wake_by_ref();
    }
}

impl<P: Protocol> Replies<P> {
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::new(), ready_bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the size of the replies that are ready and wait for their turn.
    pub(super) fn ready_bytes(&self) -> usize {
        self.ready_bytes
    }

    /// Whether the last reply blocks further requests, because it ends the connection or its closure must be called first.
    pub(super) fn blocks_requests(&self) -> bool {
        matches!(self.queue.back(), Some(PendingReply::Close(_) | PendingReply::Failed(_) | PendingReply::InTurn(_)))
    }

    /// Appends a reply. Polls it at once if it is not the first.
    pub(super) fn push(&mut self, reply: Reply<P::Frame, P::ProtocolError>, context: &mut Context<'_>) {
        let mut pending = PendingReply::from(reply);
        if !self.queue.is_empty() {
            pending.poll_ahead(context);
        }
        self.ready_bytes += pending.ready_bytes();
        self.queue.push_back(pending);
    }

    /// Appends the end of a request whose handler panicked.
    pub(super) fn push_panicked(&mut self) {
        self.queue.push_back(PendingReply::Panicked);
    }

    /// Sets the first reply to the result of its closure, or to a panic.
    pub(super) fn resolve_in_turn(&mut self, reply: Option<Reply<P::Frame, P::ProtocolError>>) {
        if let Some(first) = self.queue.front_mut() {
            *first = reply.map_or(PendingReply::Panicked, PendingReply::from);
            self.ready_bytes += first.ready_bytes();
        }
    }

    /// Polls the futures that are not first and have been woken.
    pub(super) fn poll_ahead(&mut self, context: &mut Context<'_>) {
        for pending in self.queue.iter_mut().skip(1).filter(|pending| matches!(pending, PendingReply::Future(..))) {
            pending.poll_ahead(context);
            self.ready_bytes += pending.ready_bytes();
        }
    }

    /// Returns the next step of the first reply, or `None` if there is no reply. If `peer_is_closing`, streams are cut off, because they
    /// may be endless.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>, peer_is_closing: bool) -> Poll<Option<ReplyStep<P>>> {
        let Some(first) = self.queue.front_mut() else { return Poll::Ready(None) };
        let complete = || PendingReply::Frames(VecDeque::new());
        let step = loop {
            break match first {
                PendingReply::Frames(frames) => frames.pop_front().map(|frame| {
                    self.ready_bytes -= frame.size();
                    ReplyStep::Frame(frame)
                }),
                PendingReply::Future(future, _) => {
                    match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
                        Ok(Poll::Pending) => return Poll::Pending,
                        Ok(Poll::Ready(reply)) => *first = PendingReply::from_result(reply),
                        Err(_) => *first = PendingReply::Panicked,
                    }
                    self.ready_bytes += first.ready_bytes();
                    continue;
                }
                PendingReply::Stream(_) if peer_is_closing => None,
                PendingReply::Stream(stream) => {
                    match catch_unwind(AssertUnwindSafe(|| stream.as_mut().poll_next(context))) {
                        Ok(Poll::Pending) => return Poll::Pending,
                        Ok(Poll::Ready(None)) => None,
                        Ok(Poll::Ready(Some(Ok(frame)))) => Some(ReplyStep::Frame(frame)),
                        Ok(Poll::Ready(Some(Err(error)))) => Some(ReplyStep::Failed(error)),
                        Err(_) => {
                            *first = PendingReply::Panicked;
                            continue;
                        }
                    }
                }
                PendingReply::InTurn(_) => match std::mem::replace(first, complete()) {
                    PendingReply::InTurn(closure) => Some(ReplyStep::InTurn(closure)),
                    _ => None,
                },
                PendingReply::Panicked => {
                    *first = complete();
                    Some(ReplyStep::Panicked)
                }
                PendingReply::Close(frame) => {
                    let frame = frame.take();
                    self.ready_bytes -= frame.as_ref().map_or(0, FrameLike::size);
                    *first = complete();
                    Some(ReplyStep::Close(frame))
                }
                PendingReply::Failed(_) => match std::mem::replace(first, complete()) {
                    PendingReply::Failed(error) => Some(ReplyStep::Failed(error)),
                    _ => None,
                },
            };
        };
        Poll::Ready(Some(step.unwrap_or_else(|| {
            self.queue.pop_front();
            ReplyStep::End
        })))
    }

    /// Releases the memory of an empty queue.
    pub(super) fn shrink(&mut self) {
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
    }

    pub(super) fn clear(&mut self) {
        self.ready_bytes = 0;
        self.queue.clear();
    }
}

impl<P: Protocol> PendingReply<P> {
    /// Returns the size of the frames that are ready.
    fn ready_bytes(&self) -> usize {
        match self {
            Self::Frames(frames) => frames.iter().map(FrameLike::size).sum(),
            Self::Close(Some(frame)) => frame.size(),
            _ => 0,
        }
    }

    fn from_result(reply: Result<Reply<P::Frame, P::ProtocolError>, P::ProtocolError>) -> Self {
        reply.map_or_else(Self::Failed, Self::from)
    }

    /// Polls a future that is not first, if it has been woken or was never polled.
    fn poll_ahead(&mut self, context: &mut Context<'_>) {
        let Self::Future(future, reply_waker) = self else { return };
        let known = reply_waker.take().filter(|waker| waker.actor.will_wake(context.waker()));
        if known.as_ref().is_some_and(|waker| !waker.is_set.swap(false, SeqCst)) {
            *reply_waker = known;
            return;
        }
        let current = known
            .unwrap_or_else(|| Arc::new(ReplyWaker { is_set: AtomicBool::new(false), actor: context.waker().clone() }));
        let waker = Waker::from(Arc::clone(&current));
        let mut context = Context::from_waker(&waker);
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context))) {
            Ok(Poll::Pending) => *reply_waker = Some(current),
            Ok(Poll::Ready(reply)) => *self = Self::from_result(reply),
            Err(_) => *self = Self::Panicked,
        }
    }
}

impl<P: Protocol> From<Reply<P::Frame, P::ProtocolError>> for PendingReply<P> {
    fn from(reply: Reply<P::Frame, P::ProtocolError>) -> Self {
        match reply {
            Reply::None => Self::Frames(VecDeque::new()),
            Reply::Frame(frame) => Self::Frames(VecDeque::from([frame])),
            Reply::Frames(frames) => Self::Frames(frames.into()),
            Reply::Future(future) => Self::Future(future, None),
            Reply::Stream(stream) => Self::Stream(stream),
            Reply::InTurn(closure) => Self::InTurn(closure),
            Reply::Close(frame) => Self::Close(frame),
        }
    }
}
