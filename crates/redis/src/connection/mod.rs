//! The actor of a connection: it owns the socket, reconnects when it is lost, and ends every request exactly once.
//!
//! # The path of a command
//!
//! 1. A command is encoded while it is built (`command.rs`, `commands/`), inline while it is small (`buffer.rs`). `sharing.rs`
//!    finds commands that would harm other tasks on the connection.
//! 2. The client submits it (`exchange`). One critical section (`queue`) checks the `gate` and appends its bytes to the pending ones (`batch`).
//!    The first submission after the actor found the queue empty wakes it.
//! 3. While the connection is open (`serving`), the actor takes all pending bytes and requests by a swap, writes the bytes at
//!    once (`output`), and records the requests in flight in order, with their deadlines.
//! 4. Input goes through the decoder (`resp/`). Pushes about changed keys go to the cache. Each reply belongs to the oldest request in
//!    flight. Its permit is returned before its caller is woken.
//! 5. The caller converts the reply to the requested type (`request.rs`, `convert/`).
//! 6. When the connection is lost, every request in flight ends with an error that says whether a byte of it was written. The
//!    actor then reconnects (`transport`) and publishes every state (`status`).

mod backoff;
mod batch;
mod clock;
mod exchange;
mod gate;
#[cfg(all(test, shuttle))]
mod model;
mod output;
mod queue;
mod request;
mod serving;
mod shared;
mod status;
mod tracking;
pub(crate) mod transport;

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

pub(crate) use self::backoff::Backoff;
pub(crate) use self::clock::{after, later};
pub(crate) use self::request::{PipelineReplies, ReplySender};
use self::serving::{Serving, ServingEnd};
pub(crate) use self::shared::{ConnectionShared, Hold};
pub use self::status::{ConnectionState, States, Status};
use self::transport::{ConnectError, Established};
use crate::{ConnectionError, Error, RequestOutcome, RequestPhase, WhileDown};

/// The actor of a connection. It does nothing until it is [run](Self::run).
///
/// Dropping it closes the connection: requests in flight end with [`Error::Closed`].
pub(crate) struct Actor {
    shared: Arc<ConnectionShared>,
    backoff: Backoff,
    /// The error for the final status, if it is not there yet.
    last_error: Option<Arc<ConnectionError>>,
}

/// Why an attempt to connect or an open connection has ended.
enum AttemptEnd {
    /// The client was closed, or its last handle was dropped.
    Closed,
    /// Another attempt may succeed.
    Failed(ConnectionError),
    /// Another attempt would fail in the same way.
    Refused(ConnectionError),
}

impl Actor {
    pub(crate) fn new(shared: Arc<ConnectionShared>) -> Self {
        Self { shared, backoff: Backoff::default(), last_error: None }
    }

    /// Connects, sends, receives and reconnects. Returns when the connection has been closed, or the server has refused the login.
    /// All requests have ended then. The status becomes [`ConnectionState::Closed`] when the actor is dropped.
    pub(crate) async fn run(&mut self) {
        self.run_until_closed().await;
        self.end_requests();
    }

    async fn run_until_closed(&mut self) {
        let shared = Arc::clone(&self.shared);
        match shared.options.rotation.clone() {
            None => self.stay_connected().await,
            Some(mut rotation) => {
                rotation.start();
                tokio::select! {
                    biased;
                    () = self.stay_connected() => {}
                    never = rotation.follow(&shared) => match never {},
                }
            }
        }
    }

    async fn stay_connected(&mut self) {
        let mut state = ConnectionState::Connecting;
        loop {
            // The gate before the state: see `status`.
            if self.shared.options.while_down != WhileDown::Fail || state == ConnectionState::Connecting {
                self.shared.queue.open();
            }
            self.shared.status.set_state(state);
            let (failure, is_final) = match self.connect_and_serve().await {
                AttemptEnd::Closed => return,
                AttemptEnd::Failed(failure) => (failure, !self.shared.options.reconnect),
                AttemptEnd::Refused(failure) => (failure, true),
            };
            self.log(&failure, is_final);
            if is_final || self.shared.options.while_down != WhileDown::Queue {
                self.fail_pending(&failure);
            }
            if is_final {
                self.last_error = Some(Arc::new(failure));
                return;
            }
            self.shared.status.update(|status| {
                status.state = ConnectionState::Failed;
                status.last_error = Some(Arc::new(failure));
            });
            if self.back_off().await.is_none() {
                return;
            }
            state = ConnectionState::Reconnecting;
        }
    }

    async fn connect_and_serve(&mut self) -> AttemptEnd {
        let established = match self.connect().await {
            Ok(established) => established,
            Err(ended) => return ended,
        };
        self.shared.set_client_id(established.client_id);
        if let (Some(cache), Some(tracked)) = (&self.shared.cache, &established.tracked) {
            cache.open(tracked.as_ref());
        }
        self.shared.queue.open();
        self.shared.status.update(|status| {
            status.state = ConnectionState::Open;
            status.generation += 1;
        });
        let since = Instant::now();
        let end = Serving::new(established, Arc::clone(&self.shared)).run().await;
        self.backoff.record_open(since.elapsed(), &self.shared.options);
        match end {
            ServingEnd::Closed => AttemptEnd::Closed,
            ServingEnd::Lost(error) => {
                self.shared.counters.count(|stats| stats.connections_lost += 1);
                if self.shared.queue.is_closing() {
                    self.last_error = Some(Arc::new(error));
                    return AttemptEnd::Closed;
                }
                AttemptEnd::Failed(error)
            }
        }
    }

    /// Rejects all requests from now on, and ends the pending ones, none of which was sent.
    fn end_requests(&self) {
        for request in self.shared.queue.end().requests {
            self.shared.fail(request, Error::Closed { outcome: RequestOutcome::NeverSent });
        }
    }

    /// Rejects new requests, and ends the pending ones, none of which was sent.
    fn fail_pending(&self, failure: &ConnectionError) {
        let error = Error::Lost { outcome: RequestOutcome::NeverSent, source: failure.clone() };
        for request in self.shared.queue.fail(error.clone()).requests {
            self.shared.fail(request, error.clone());
        }
    }

    fn log(&self, failure: &ConnectionError, is_final: bool) {
        let (address, error) = (&self.shared.options.address, failure as &dyn std::error::Error);
        if is_final && !self.shared.is_exclusive {
            tracing::warn!(?address, error, "connection to Redis failed, client closed");
        } else {
            tracing::debug!(?address, error, "connection to Redis failed");
        }
    }

    /// Connects and does the handshake, within the connect timeout.
    async fn connect(&self) -> Result<Established, AttemptEnd> {
        self.shared.counters.count(|stats| stats.connect_attempts += 1);
        let options = &self.shared.options;
        let connecting = async {
            let mut established = transport::connect(options).await?;
            if self.shared.cache.is_some() {
                established.track().await?;
            }
            Ok(established)
        };
        let connecting = tokio::time::timeout(options.connect_timeout, connecting);
        match self.unless_closed(connecting).await {
            None => Err(AttemptEnd::Closed),
            Some(Ok(connected)) => connected.map_err(|error| match error {
                ConnectError::Failed(error) => AttemptEnd::Failed(error),
                ConnectError::Refused(error) => AttemptEnd::Refused(error),
            }),
            Some(Err(_)) => Err(AttemptEnd::Failed(ConnectionError::ConnectTimedOut)),
        }
    }

    /// Waits before the next attempt. Returns `None` as soon as the client is closed.
    async fn back_off(&mut self) -> Option<()> {
        let delay = self.backoff.next_delay(&self.shared.options);
        self.unless_closed(tokio::time::sleep(delay)).await
    }

    /// Waits for `work` while there is no connection. Meanwhile pending requests end at their deadlines. Returns `None` as soon as
    /// the client is closed.
    async fn unless_closed<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        loop {
            if self.shared.queue.is_closing() {
                return None;
            }
            self.shared.queue.reclaim();
            let (expired, next) = self.shared.queue.take_expired(Instant::now());
            for request in expired {
                self.shared.time_out(request, RequestPhase::Connecting);
            }
            let expiry = async {
                match next {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                done = &mut work => return Some(done),
                () = expiry => {}
                () = self.shared.queue.changed(next) => {}
            }
        }
    }
}

/// Ends all requests, even if the connection was never run or its task was aborted.
impl Drop for Actor {
    fn drop(&mut self) {
        self.shared.queue.close(Instant::now());
        self.end_requests();
        self.shared.status.update(|status| {
            status.state = ConnectionState::Closed;
            status.last_error = self.last_error.take().or(status.last_error.take());
        });
    }
}
