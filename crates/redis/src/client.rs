//! The handle of a client.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::connection::{Connection, Replies, Reply, Shared, Submission, after, later};
use crate::observe;
use crate::{
    ClientStats, Error, FromValue, Invocation, Options, Outcome, Phase, Pipeline, Request, Slots, States, Status,
    Value, WhenFull, read_reply,
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
    /// A client, and its connection, which has to be [run](Connection::run).
    pub fn new(options: Options) -> (Self, Connection) {
        let shared = Arc::new(Shared::new(options));
        shared.handles.fetch_add(1, SeqCst);
        let timeout = shared.options.timeout;
        (Self { shared: Arc::clone(&shared), timeout }, Connection::new(shared))
    }

    /// A client whose connection runs on a task of its own.
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
        read_reply(self.send_raw(command.into_bytes()).await?)
    }

    /// Sends several requests in one go, and gives a result for each. Others' requests do not come in between; the server may still
    /// execute some of them and not others.
    pub async fn pipeline<S: Slots>(&self, pipeline: Pipeline<S>) -> Result<S::Results, Error> {
        pipeline.check()?;
        let len = pipeline.len();
        let Replies { values, fault } = self.exchange(pipeline.into_bytes().into(), len).await;
        let fault = || fault.clone().unwrap_or(Error::Closed { outcome: Outcome::MaybeExecuted });
        let mut values = values.into_iter();
        Ok(S::read(len, || values.next().ok_or_else(fault)))
    }

    /// Runs a script: by its digest, and as a whole if the server does not have it.
    pub async fn invoke<T: FromValue>(&self, invocation: &Invocation<T>) -> Result<T, Error> {
        match self.send(invocation.by_digest().returning::<T>()).await {
            Err(error) => match invocation.after(&error) {
                Some(whole) => self.send(whole.returning::<T>()).await,
                None => Err(error),
            },
            done => done,
        }
    }

    /// Sends an encoded command, and gives its reply as it is, which may be an error of the server.
    pub async fn send_raw(&self, command: Bytes) -> Result<Value, Error> {
        if self.shared.options.is_observed() {
            return observe::observed(&self.shared.options, command, 1, |command| self.send_quietly(command)).await;
        }
        self.send_quietly(command).await
    }

    async fn send_quietly(&self, command: Bytes) -> Result<Value, Error> {
        let (sender, reply) = oneshot::channel();
        self.submit(command, 1, Reply::One(sender)).await?;
        // Whoever drops a request without a word has ended, and so has it.
        reply.await.unwrap_or(Err(Error::Closed { outcome: Outcome::MaybeExecuted }))
    }

    /// Sends several encoded commands in one go, and gives their replies as they are, in order.
    pub async fn send_raw_many(&self, commands: Bytes, count: usize) -> Result<Vec<Value>, Error> {
        let Replies { values, fault } = self.exchange(commands, count).await;
        fault.map_or(Ok(values), Err)
    }

    async fn exchange(&self, commands: Bytes, count: usize) -> Replies {
        if count == 0 {
            return Replies { values: Vec::new(), fault: None };
        }
        let exchanged = if self.shared.options.is_observed() {
            let send = |commands| self.exchange_quietly(commands, count);
            observe::observed(&self.shared.options, commands, count, send).await
        } else {
            self.exchange_quietly(commands, count).await
        };
        exchanged.unwrap_or_else(|fault| Replies { values: Vec::new(), fault: Some(fault) })
    }

    async fn exchange_quietly(&self, commands: Bytes, count: usize) -> Result<Replies, Error> {
        let (sender, reply) = oneshot::channel();
        let values = Vec::with_capacity(count.min(1024));
        self.submit(commands, count, Reply::Many { left: count, values, sender }).await?;
        reply.await.map_err(|_| Error::Closed { outcome: Outcome::MaybeExecuted })
    }

    async fn submit(&self, bytes: Bytes, count: usize, reply: Reply) -> Result<(), Error> {
        let Shared { options, budget, .. } = &*self.shared;
        let submitted = Instant::now();
        let deadline = later(submitted, self.timeout);
        let charge = match budget.try_charge(count, bytes.len()) {
            Some(charge) => charge,
            None if options.when_full == WhenFull::Fail => {
                self.shared.count(|stats| stats.refused += 1);
                return Err(Error::QueueFull);
            }
            None => {
                if let Some(error) = self.shared.refuses() {
                    return Err(error);
                }
                let charged = tokio::time::timeout_at(deadline, budget.charge(count, bytes.len())).await;
                let charged = charged.map_err(|_| {
                    self.shared.count(|stats| stats.timeouts.count(Phase::Queued));
                    Error::TimedOut { phase: Phase::Queued }
                })?;
                charged.ok_or(Error::Closed { outcome: Outcome::NeverSent })?
            }
        };
        self.shared.submit(Submission::new(bytes, submitted, deadline, reply, charge));
        Ok(())
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
