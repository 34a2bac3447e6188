//! The handle to a connection.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::connection::{
    ClientShared, Connection, ConnectionState, PendingRequest, PipelineReplies, ReplySender, SubmitRejection, after,
    later,
};
use crate::observe::{ClientStats, observed};
use crate::request::read_reply;
use crate::{
    Error, FromValue, Invocation, Options, Pipeline, ReplyTypes, Request, RequestOutcome, States, Status, WhenFull,
};

/// A handle to the connection to one server. Clones share the connection, and dropping the last one closes it.
///
/// Any number of tasks can use it at the same time. Requests are written in the order of their submission.
#[derive(Debug)]
pub struct Client {
    shared: Arc<ClientShared>,
    /// The timeout of requests made with this handle.
    timeout: Duration,
}

impl Client {
    /// Creates a client and the driver of its connection, which must be [run](Connection::run).
    ///
    /// Nothing is sent, and no deadline is kept, until the connection runs: requests and [`close`](Self::close) wait.
    pub fn new(options: Options) -> (Self, Connection) {
        let shared = Arc::new(ClientShared::new(options));
        let timeout = shared.options.timeout;
        (Self { shared: Arc::clone(&shared), timeout }, Connection::new(shared))
    }

    /// Creates a client whose connection runs on a new task of the current tokio runtime.
    ///
    /// It connects in the background: the first requests wait for the connection. The client can be used on other runtimes as
    /// well, as long as this one runs; when this one shuts down, the client is closed.
    ///
    /// # Panics
    ///
    /// If it is called outside of a tokio runtime.
    pub fn start(options: Options) -> Self {
        let (client, connection) = Self::new(options);
        tokio::spawn(connection.run());
        client
    }

    /// Returns a handle to the same connection whose requests have this timeout, from their submission.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let mut client = self.clone();
        client.timeout = timeout;
        client
    }

    /// Sends a request and returns its reply, converted to `T`.
    ///
    /// Functions in [`commands`](crate::commands) choose a type; [`returning`](Request::returning) chooses another. A
    /// [`Command`](crate::Command) takes the type that the result is assigned to.
    ///
    /// # Errors
    ///
    /// [`Error::outcome`] says whether the server may have executed the command.
    ///
    /// # Cancellation
    ///
    /// Dropping the future does not affect other requests. A request that is not written yet may still be sent; its reply is then
    /// dropped.
    pub async fn send<T: FromValue>(&self, request: impl Into<Request<T>>) -> Result<T, Error> {
        let command = request.into().into_command();
        command.check()?;
        let bytes = command.as_bytes();
        let exchange = self.exchange(bytes, 1, ReplySender::one());
        let reply = if self.shared.options.is_observed() {
            observed(&self.shared.options, bytes, 1, async { exchange.await? }).await
        } else {
            exchange.await?
        };
        read_reply(reply?)
    }

    /// Sends the commands of a pipeline together and returns a result for each.
    ///
    /// No request of this client comes between them, but requests of other clients may: it is not a transaction. An error of one
    /// command does not affect the others. If the connection is lost, the commands without a reply have the error.
    ///
    /// # Errors
    ///
    /// If a command cannot be sent. Then none is.
    pub async fn pipeline<S: ReplyTypes>(&self, pipeline: Pipeline<S>) -> Result<S::Results, Error> {
        pipeline.check()?;
        let (bytes, len) = (pipeline.as_bytes(), pipeline.len());
        let exchanged = if len == 0 {
            Ok(PipelineReplies { values: Vec::new(), error: None })
        } else if self.shared.options.is_observed() {
            let exchange = self.exchange(bytes, len, ReplySender::pipeline(len));
            observed(&self.shared.options, bytes, len, exchange).await
        } else {
            self.exchange(bytes, len, ReplySender::pipeline(len)).await
        };
        let PipelineReplies { values, error } =
            exchanged.unwrap_or_else(|error| PipelineReplies { values: Vec::new(), error: Some(error) });
        // There are as many values as commands, unless there is an error.
        let missing = || error.clone().unwrap_or(Error::Closed { outcome: RequestOutcome::MaybeExecuted });
        let mut values = values.into_iter();
        Ok(S::read(len, || values.next().ok_or_else(missing)))
    }

    /// Runs a script by its digest, and sends its source if the server does not have it. Both have one deadline.
    pub async fn invoke<T: FromValue>(&self, invocation: &Invocation<T>) -> Result<T, Error> {
        let deadline = after(self.timeout);
        match self.send(invocation.by_digest().returning::<T>()).await {
            Err(error) => match invocation.fallback(&error) {
                Some(command) => {
                    let rest = self.with_timeout(deadline.saturating_duration_since(Instant::now()));
                    rest.send(command.returning::<T>()).await
                }
                None => Err(error),
            },
            done => done,
        }
    }

    /// Submits encoded commands and waits for their replies.
    async fn exchange<T>(
        &self,
        bytes: &[u8],
        commands: usize,
        (reply, receiver): (ReplySender, oneshot::Receiver<T>),
    ) -> Result<T, Error> {
        match self.submit(bytes, commands, reply) {
            Ok(None) => {}
            Ok(Some(request)) => self.shared.submit_in_turn(bytes, request).await?,
            Err(error) => {
                // A task that retries in a loop must not starve the actor, on which its success depends.
                tokio::task::coop::consume_budget().await;
                return Err(error);
            }
        }
        let mut guard = AbandonGuard { shared: &self.shared, has_ended: false };
        let replied = receiver.await;
        guard.has_ended = true;
        // The actor sends a reply or an error to every request, unless the runtime has dropped it.
        replied.map_err(|_| Error::Closed { outcome: RequestOutcome::MaybeExecuted })
    }

    /// Queues a request. Returns it if it has to wait for a permit.
    fn submit(&self, bytes: &[u8], commands: usize, reply: ReplySender) -> Result<Option<PendingRequest>, Error> {
        let submitted = Instant::now();
        let request = PendingRequest::new(bytes.len(), commands, submitted, later(submitted, self.timeout), reply);
        match self.shared.queue.submit(bytes, request) {
            Ok(()) => Ok(None),
            Err(SubmitRejection::Error(error)) => Err(error),
            Err(SubmitRejection::Full(_)) if self.shared.options.when_full == WhenFull::Fail => {
                self.shared.counters.count(|stats| stats.rejected += 1);
                Err(Error::QueueFull)
            }
            Err(SubmitRejection::Full(request)) => Ok(Some(request)),
        }
    }

    /// Returns a receiver of the newest status of the connection.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.status.subscribe()
    }

    /// Returns a stream of all states of the connection, starting with the current one.
    pub fn states(&self) -> States {
        self.shared.status.states()
    }

    /// Returns the statistics of the client.
    pub fn stats(&self) -> ClientStats {
        self.shared.stats()
    }

    /// Closes the client: rejects new requests, waits for the replies to those in flight, and closes the connection.
    ///
    /// After `grace`, requests still in flight end with [`Error::Closed`]. Attempts to connect are interrupted. If the client is
    /// closed several times, the shortest time counts.
    pub async fn close(&self, grace: Duration) {
        self.shared.queue.close(after(grace));
        let mut status = self.status();
        // Cannot fail, because `shared` owns the sender.
        let _ = status.wait_for(|status| status.state == ConnectionState::Closed).await;
    }
}

/// Notifies the queue if the caller drops its future before the reply: a request that was not sent no longer needs its permit.
///
/// It is dropped after the receiver of the reply, so that the queue finds the request without a caller.
struct AbandonGuard<'a> {
    shared: &'a ClientShared,
    has_ended: bool,
}

impl Drop for AbandonGuard<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.queue.abandon();
        }
    }
}

impl Clone for Client {
    fn clone(&self) -> Self {
        self.shared.handles.fetch_add(1, SeqCst);
        Self { shared: Arc::clone(&self.shared), timeout: self.timeout }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.shared.handles.fetch_sub(1, SeqCst) == 1 {
            self.shared.queue.close(after(self.shared.options.timeout));
        }
    }
}
