//! The handle of a client.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::connection::{Asked, Connection, Refused, Replies, Reply, Shared, after, later};
use crate::observe;
use crate::{
    ClientStats, Error, FromValue, Invocation, Options, Outcome, Pipeline, Request, Slots, States, Status, WhenFull,
    read_reply,
};

/// A client of one server. Clones share its connection; when the last one is dropped, it closes.
///
/// Whatever is asked from any number of tasks goes over one connection, in the order of asking, and is written together.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    /// How long its requests may take.
    timeout: Duration,
}

impl Client {
    /// A client, and its connection, which has to be [run](Connection::run). It is the connection that sends, receives and keeps
    /// deadlines: as long as it is not run, requests wait, and so does [`close`](Self::close).
    pub fn new(options: Options) -> (Self, Connection) {
        let shared = Arc::new(Shared::new(options));
        shared.handles.fetch_add(1, SeqCst);
        let timeout = shared.options.timeout;
        (Self { shared: Arc::clone(&shared), timeout }, Connection::new(shared))
    }

    /// A client whose connection runs on a task of its own, on the runtime of tokio that this is called on.
    ///
    /// The client can be used on other runtimes as well, while that one runs; when it is shut down, the client is closed.
    ///
    /// # Panics
    ///
    /// Outside of a runtime.
    pub fn start(options: Options) -> Self {
        let (client, connection) = Self::new(options);
        tokio::spawn(connection.run());
        client
    }

    /// The same client, for requests that may take so long, from their submission.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let mut client = self.clone();
        client.timeout = timeout;
        client
    }

    /// Sends a request, and gives what its reply means. What is built with a [`Command`](crate::Command) says of what type that is:
    /// `command.returning::<T>()`.
    pub async fn send<T: FromValue>(&self, request: impl Into<Request<T>>) -> Result<T, Error> {
        let command = request.into().into_command();
        command.check()?;
        let bytes = command.as_bytes();
        let exchange = self.exchange(bytes, 1, Reply::one());
        let reply = if self.shared.options.is_observed() {
            observe::observed(&self.shared.options, bytes, 1, async { exchange.await? }).await
        } else {
            exchange.await?
        };
        read_reply(reply?)
    }

    /// Sends several requests in one go, and gives a result for each. Others' requests do not come in between; the server may still
    /// execute some of them and not others.
    pub async fn pipeline<S: Slots>(&self, pipeline: Pipeline<S>) -> Result<S::Results, Error> {
        pipeline.check()?;
        let (bytes, len) = (pipeline.as_bytes(), pipeline.len());
        let exchanged = if len == 0 {
            Ok(Replies { values: Vec::new(), fault: None })
        } else if self.shared.options.is_observed() {
            let exchange = self.exchange(bytes, len, Reply::many(len));
            observe::observed(&self.shared.options, bytes, len, exchange).await
        } else {
            self.exchange(bytes, len, Reply::many(len)).await
        };
        let Replies { values, fault } =
            exchanged.unwrap_or_else(|fault| Replies { values: Vec::new(), fault: Some(fault) });
        // There are as many values as commands, unless there is a fault.
        let fault = || fault.clone().unwrap_or(Error::Closed { outcome: Outcome::MaybeExecuted });
        let mut values = values.into_iter();
        Ok(S::read(len, || values.next().ok_or_else(fault)))
    }

    /// Runs a script: by its digest, and as a whole if the server does not have it. Both have one deadline.
    pub async fn invoke<T: FromValue>(&self, invocation: &Invocation<T>) -> Result<T, Error> {
        let deadline = after(self.timeout);
        match self.send(invocation.by_digest().returning::<T>()).await {
            Err(error) => match invocation.after(&error) {
                Some(whole) => {
                    let rest = self.with_timeout(deadline.saturating_duration_since(Instant::now()));
                    rest.send(whole.returning::<T>()).await
                }
                None => Err(error),
            },
            done => done,
        }
    }

    /// Sends encoded commands, and gives what has become of them.
    async fn exchange<T>(
        &self,
        bytes: &[u8],
        count: usize,
        (reply, receiver): (Reply, oneshot::Receiver<T>),
    ) -> Result<T, Error> {
        match self.submit(bytes, count, reply) {
            Ok(None) => {}
            Ok(Some((asked, reply))) => self.shared.submit_in_turn(asked, reply).await?,
            Err(refused) => {
                // Whoever asks again at once is not to keep those from running who would make it possible.
                tokio::task::coop::consume_budget().await;
                return Err(refused);
            }
        }
        let mut asking = Asking { shared: &self.shared, is_over: false };
        let replied = receiver.await;
        asking.is_over = true;
        // Whoever drops a request without a word has ended, and so has it.
        replied.map_err(|_| Error::Closed { outcome: Outcome::MaybeExecuted })
    }

    /// Queues a request. Gives it back if it has to wait for room.
    fn submit<'a>(&self, bytes: &'a [u8], count: usize, reply: Reply) -> Result<Option<(Asked<'a>, Reply)>, Error> {
        let submitted = Instant::now();
        let asked = Asked { bytes, count, submitted, deadline: later(submitted, self.timeout) };
        match self.shared.submit(asked, reply) {
            Ok(()) => Ok(None),
            Err(Refused::Because(error)) => Err(error),
            Err(Refused::Full(_)) if self.shared.options.when_full == WhenFull::Fail => {
                self.shared.count(|stats| stats.refused += 1);
                Err(Error::QueueFull)
            }
            Err(Refused::Full(reply)) => Ok(Some((asked, reply))),
        }
    }

    /// What the connection is doing, now and from now on.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.status.subscribe()
    }

    /// What it has done so far, and has in hand.
    pub fn stats(&self) -> ClientStats {
        self.shared.stats()
    }

    /// Every state from now on, the present one first.
    pub fn states(&self) -> States {
        States::new(self.shared.states())
    }

    /// Takes nothing more, waits until what was asked is answered, or for so long, and ends the connection.
    pub async fn close(&self, within: Duration) {
        self.shared.close(after(within));
        let mut status = self.status();
        // The sender is in our hands, so that it cannot end before.
        let _ = status.wait_for(|status| status.state == crate::State::Closed).await;
    }
}

/// Somebody who waits for a reply. Whoever goes away meanwhile says so: what was not sent has no claim to its room any more. It is
/// dropped after the way by which the reply would come.
struct Asking<'a> {
    shared: &'a Shared,
    is_over: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.shared.leave();
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
            self.shared.close(after(self.shared.options.timeout));
        }
    }
}
