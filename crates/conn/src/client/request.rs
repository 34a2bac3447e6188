//! The result of a request: its reply, or an error that says whether the server may have executed it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::drive::Outgoing;
use crate::FrameLike;

/// Whether the server may have executed a request that has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// No byte of the request was sent, and none will be. It is safe to retry.
    NeverSent,
    /// The request may have reached the server, and may have been executed.
    MaybeExecuted,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverSent => "it was not sent and can be retried",
            Self::MaybeExecuted => "it may have been executed",
        })
    }
}

/// Why a request has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The request timed out.
    #[error("the request timed out; {outcome}")]
    TimedOut {
        /// Whether the server may have executed the request.
        outcome: Outcome,
    },
    /// The connection broke.
    #[error("the connection was lost; {outcome}")]
    Lost {
        /// Whether the server may have executed the request.
        outcome: Outcome,
    },
    /// The queue of the connection was full, and the request did not wait for capacity, because its
    /// [`policy`](super::RequestOptions::policy) is set. It was not sent.
    #[error("the send queue is full; the request was not sent")]
    QueueFull,
    /// The codec could not encode the request. It was not sent.
    #[error("the request could not be encoded and was not sent")]
    Unsendable,
    /// The [`Connection`](super::Connection) of the client has been dropped, or its `run` has ended. The request was not sent.
    #[error("the client is closed")]
    Closed,
}

impl RequestError {
    /// Returns whether the server may have executed the request.
    pub fn outcome(&self) -> Outcome {
        match *self {
            Self::TimedOut { outcome } | Self::Lost { outcome } => outcome,
            Self::QueueFull | Self::Unsendable | Self::Closed => Outcome::NeverSent,
        }
    }
}

const QUEUED: u8 = 0;
const SENT: u8 = 1;
const CANCELLED: u8 = 2;

/// The progress of a request: `QUEUED`, then either `SENT` or `CANCELLED`.
#[derive(Debug, Clone, Default)]
struct RequestProgress(Arc<AtomicU8>);

impl RequestProgress {
    /// Changes `QUEUED` to `to`. Returns false if the request was already sent or cancelled.
    fn advance(&self, to: u8) -> bool {
        self.0.compare_exchange(QUEUED, to, SeqCst, SeqCst).is_ok()
    }

    fn outcome(&self) -> Outcome {
        if self.0.load(SeqCst) == SENT { Outcome::MaybeExecuted } else { Outcome::NeverSent }
    }
}

/// A request whose caller waits for the reply. Dropping it cancels the request.
#[derive(Debug, Default)]
pub(super) struct PendingRequest(RequestProgress);

impl PendingRequest {
    /// Returns the frame to send, which contains the responder, and a future of the reply.
    pub(super) fn begin<F: FrameLike>(
        &self,
        request: F,
        permit: OwnedSemaphorePermit,
    ) -> (Outgoing<F>, impl Future<Output = Result<F, RequestError>> + use<F>) {
        let (reply, receiver) = oneshot::channel();
        let progress = self.0.clone();
        let responder = Responder { reply, progress: progress.clone(), _permit: permit };
        let lost = move |_| Err(RequestError::Lost { outcome: progress.outcome() });
        let result = async move { receiver.await.unwrap_or_else(lost) };
        (Outgoing::with_reply(request, responder), result)
    }

    /// Cancels the request if it has not been sent. Returns whether the server may have executed it.
    pub(super) fn cancel(&self) -> Outcome {
        self.0.advance(CANCELLED);
        self.0.outcome()
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Sends a reply to the caller of a request. If it is dropped without a reply, the caller gets [`RequestError::Lost`].
#[derive(Debug)]
pub(super) struct Responder<F> {
    reply: oneshot::Sender<Result<F, RequestError>>,
    progress: RequestProgress,
    /// Held while the request is in flight.
    _permit: OwnedSemaphorePermit,
}

impl<F> Responder<F> {
    /// Marks the request as sent. Returns false if it is cancelled.
    pub(super) fn mark_sent(&self) -> bool {
        self.progress.advance(SENT)
    }

    /// Sends the reply. Returns whether the caller was still waiting.
    pub(super) fn deliver(self, reply: F) -> bool {
        self.reply.send(Ok(reply)).is_ok()
    }

    /// Ends the request, which was not sent, with an error.
    pub(super) fn fail(self, error: RequestError) {
        // Fails if the caller has cancelled the request.
        let _ = self.reply.send(Err(error));
    }
}
