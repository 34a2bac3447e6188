//! The end of a request: its reply, or an error that says whether it may have been executed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::drive::Outgoing;
use crate::FrameLike;

/// What is known of a request that has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Nothing of it has left this process, and nothing will. It is safe to try again.
    NeverSent,
    /// It may have reached the server, and may have been executed.
    MaybeExecuted,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverSent => "it was never sent, and may be tried again",
            Self::MaybeExecuted => "it may have been executed",
        })
    }
}

/// Why a request has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Its time was over.
    #[error("the request took too long: {outcome}")]
    TimedOut {
        /// What is known of it.
        outcome: Outcome,
    },
    /// The connection broke.
    #[error("the connection was lost: {outcome}")]
    Lost {
        /// What is known of it.
        outcome: Outcome,
    },
    /// The queue of the connection was full, and its [policy](super::RequestOptions::policy) was not to wait. It was never sent.
    #[error("the queue of the connection is full; the request was not sent")]
    QueueFull,
    /// It cannot be encoded. It was never sent.
    #[error("the request cannot be sent: it is not what the protocol can say")]
    Unsendable,
    /// The connection of the client is not run any more. It was never sent.
    #[error("the client is closed")]
    Closed,
}

impl RequestError {
    /// What is known of the request.
    pub fn outcome(&self) -> Outcome {
        match *self {
            Self::TimedOut { outcome } | Self::Lost { outcome } => outcome,
            Self::QueueFull | Self::Unsendable | Self::Closed => Outcome::NeverSent,
        }
    }
}

const QUEUED: u8 = 0;
const SENT: u8 = 1;
const GIVEN_UP: u8 = 2;

/// How far a request is. It is either sent or given up first, and whoever comes second knows it.
#[derive(Debug, Clone, Default)]
struct RequestProgress(Arc<AtomicU8>);

impl RequestProgress {
    fn advance(&self, to: u8) -> bool {
        self.0.compare_exchange(QUEUED, to, SeqCst, SeqCst).is_ok()
    }

    fn outcome(&self) -> Outcome {
        if self.0.load(SeqCst) == SENT { Outcome::MaybeExecuted } else { Outcome::NeverSent }
    }
}

/// Who waits for a reply. When it is dropped, the request is given up.
#[derive(Debug, Default)]
pub(super) struct PendingRequest(RequestProgress);

impl PendingRequest {
    /// The request with its responder, and what comes of it.
    pub(super) fn ask<F: FrameLike>(
        &self,
        request: F,
        permit: OwnedSemaphorePermit,
    ) -> (Outgoing<F>, impl Future<Output = Result<F, RequestError>> + use<F>) {
        let (reply, receiver) = oneshot::channel();
        let progress = self.0.clone();
        let responder = Responder { reply, progress: progress.clone(), _permit: permit };
        let lost = move |_| Err(RequestError::Lost { outcome: progress.outcome() });
        let end = async move { receiver.await.unwrap_or_else(lost) };
        (Outgoing::with_reply(request, responder), end)
    }

    pub(super) fn give_up(&self) -> Outcome {
        self.0.advance(GIVEN_UP);
        self.0.outcome()
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Whom a reply goes to. Dropped without one, it tells that the connection was lost.
#[derive(Debug)]
pub(super) struct Responder<F> {
    reply: oneshot::Sender<Result<F, RequestError>>,
    progress: RequestProgress,
    /// Until here it is in flight.
    _permit: OwnedSemaphorePermit,
}

impl<F> Responder<F> {
    /// Whether it may be sent: it has not been given up, and cannot be taken back any more.
    pub(super) fn begin(&self) -> bool {
        self.progress.advance(SENT)
    }

    /// Whether somebody was there to take it.
    pub(super) fn answer(self, reply: F) -> bool {
        self.reply.send(Ok(reply)).is_ok()
    }

    /// Ends a request of which nothing has been sent. Its caller may have given it up.
    pub(super) fn refuse(self, error: RequestError) {
        let _ = self.reply.send(Err(error));
    }
}
