//! Submits requests and waits for their replies, on the task of the caller.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::clock::later;
use super::queue::SubmitRejection;
use super::request::{PendingRequest, PipelineReplies, ReplySender};
use super::shared::ConnectionShared;
use crate::observe::observed;
use crate::{Error, RequestOutcome, Value, WhenFull};

impl ConnectionShared {
    /// Sends an encoded command and returns its reply.
    pub(crate) async fn call(&self, command: &[u8], timeout: Duration) -> Result<Value, Error> {
        let exchange = self.exchange(command, 1, timeout, ReplySender::one());
        if self.options.is_observed() {
            observed(&self.options, command, 1, async { exchange.await? }).await
        } else {
            exchange.await?
        }
    }

    /// Sends an encoded command of the client itself and returns its reply. It needs no permit, and is accepted while the connection
    /// closes if there is a [`Hold`](super::Hold). The future must not be dropped before the deadline if the command may do harm later.
    pub(crate) async fn call_own(&self, command: &[u8], deadline: Instant) -> Result<Value, Error> {
        let (reply, receiver) = ReplySender::one();
        let request = PendingRequest::own(command.len(), Instant::now(), deadline, Some(reply));
        self.queue.submit_own(command, request)?;
        receiver.await.unwrap_or(Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted }))
    }

    /// Sends this number of encoded commands together and returns their replies, or those before the connection was lost.
    pub(crate) async fn call_all(
        &self,
        commands: &[u8],
        len: usize,
        timeout: Duration,
    ) -> Result<PipelineReplies, Error> {
        let exchange = self.exchange(commands, len, timeout, ReplySender::pipeline(len));
        if self.options.is_observed() { observed(&self.options, commands, len, exchange).await } else { exchange.await }
    }

    async fn exchange<T>(
        &self,
        bytes: &[u8],
        commands: usize,
        timeout: Duration,
        (reply, receiver): (ReplySender, oneshot::Receiver<T>),
    ) -> Result<T, Error> {
        // Without another future in the fast path, whose cost would show.
        match self.submit(bytes, commands, timeout, reply) {
            Ok(None) => {}
            submitted => self.wait_for_permit(bytes, submitted).await?,
        }
        let mut guard = AbandonGuard { shared: self, has_ended: false };
        let replied = receiver.await;
        guard.has_ended = true;
        // The actor sends a reply or an error to every request, unless the runtime has dropped it.
        replied.map_err(|_| Error::Closed { outcome: RequestOutcome::MaybeExecuted })
    }

    /// Queues a request, and waits for a permit if it may.
    pub(crate) async fn submit_or_wait(
        &self,
        bytes: &[u8],
        commands: usize,
        timeout: Duration,
        reply: ReplySender,
    ) -> Result<(), Error> {
        let submitted = self.submit(bytes, commands, timeout, reply);
        self.wait_for_permit(bytes, submitted).await
    }

    /// Waits for the permit of a submitted request that has none.
    async fn wait_for_permit(
        &self,
        bytes: &[u8],
        submitted: Result<Option<PendingRequest>, Error>,
    ) -> Result<(), Error> {
        match submitted {
            Ok(None) => Ok(()),
            Ok(Some(request)) => self.submit_in_turn(bytes, request).await,
            Err(error) => {
                // A task that retries in a loop must not starve the actor, on which its success depends.
                tokio::task::coop::consume_budget().await;
                Err(error)
            }
        }
    }

    /// Queues a request. Returns it if it has to wait for a permit.
    pub(crate) fn submit(
        &self,
        bytes: &[u8],
        commands: usize,
        timeout: Duration,
        reply: ReplySender,
    ) -> Result<Option<PendingRequest>, Error> {
        let submitted = Instant::now();
        let request = PendingRequest::new(bytes.len(), commands, submitted, later(submitted, timeout), reply);
        match self.queue.submit(bytes, request) {
            Ok(()) => Ok(None),
            Err(SubmitRejection::Error(error)) => Err(error),
            Err(SubmitRejection::Full(_)) if self.options.when_full == WhenFull::Fail => {
                self.counters.count(|stats| stats.rejected += 1);
                Err(Error::QueueFull)
            }
            Err(SubmitRejection::Full(request)) => Ok(Some(request)),
        }
    }
}

/// Notifies the queue if the caller drops its future before the reply: a request that was not sent no longer needs its permit.
///
/// It is dropped after the receiver of the reply, so that the queue finds the request without a caller.
struct AbandonGuard<'a> {
    shared: &'a ConnectionShared,
    has_ended: bool,
}

impl Drop for AbandonGuard<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.queue.abandon();
        }
    }
}
