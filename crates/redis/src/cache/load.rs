//! Reads through the cache, and loads that several callers wait for.
//!
//! The callers of a command share a [`Load`], which is in the cache from before the command is submitted until its reply has come. One of
//! them submits the command and waits for the reply. If it goes away, another one continues where it has stopped: it waits for the
//! same reply, or submits the command if that was not done. If the last one goes away, the request is abandoned like any other.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use tokio::sync::{OnceCell, oneshot};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, timeout_at};

use super::read::find_key;
use super::shard::Read;
use super::tracked::{Cache, Joined};
use crate::connection::{PipelineReplies, ReplySender, after};
use crate::observe::observed;
use crate::request::read_reply;
use crate::sync::{Mutex, lock};
use crate::{Client, Error, FromValue, Request, RequestOutcome, RequestPhase, Value};

/// Makes the server track the keys of the next command.
const CACHING: &[u8] = b"*3\r\n$6\r\nCLIENT\r\n$7\r\nCACHING\r\n$3\r\nYES\r\n";

/// A command whose reply is being loaded.
#[derive(Default)]
pub(crate) struct Load {
    ended: OnceCell<Result<Arc<Value>, Error>>,
    /// The request, once it is submitted.
    request: Mutex<Option<Submitted>>,
    /// The callers that wait. It changes while the shard is locked.
    waiting: AtomicUsize,
}

/// A request that is queued or sent.
struct Submitted {
    replies: oneshot::Receiver<PipelineReplies>,
    at: Instant,
}

impl Load {
    pub(super) fn add_waiter(&self) {
        self.waiting.fetch_add(1, Relaxed);
    }

    /// Returns whether it was the last one.
    pub(super) fn remove_waiter(&self) -> bool {
        self.waiting.fetch_sub(1, Relaxed) == 1
    }
}

impl Client {
    /// Sends a request that reads one key through the [cache](crate::cache), and returns its reply, converted to `T`.
    ///
    /// If the reply is in memory, nothing is sent. Otherwise the command is sent as by [`send`](Self::send), and its reply is kept until the
    /// server reports that the key has changed. Callers that request the same command at the same time wait for one reply, and each
    /// converts it to its own type.
    ///
    /// If [`Options::cache`](crate::Options::cache) is not set, or the server does not track keys
    /// ([`CacheStats::is_tracking`](crate::cache::CacheStats::is_tracking)), every request is sent.
    ///
    /// # Errors
    ///
    /// Those of [`send`](Self::send), and [`CommandError::NotCacheable`](crate::CommandError::NotCacheable) if the command does not read
    /// exactly one key.
    ///
    /// # Cancellation
    ///
    /// Dropping the future does not affect other callers, also not those that wait for the same reply.
    pub async fn cached<T: FromValue>(&self, request: impl Into<Request<T>>) -> Result<T, Error> {
        let command = request.into().into_command();
        let key = find_key(&command)?;
        // A task that reads in a loop must not starve the connection, which receives the invalidations.
        consume_budget().await;
        let cache = self.shared.connection.cache.as_ref();
        let Some((cache, read)) = cache.and_then(|cache| Some((cache, cache.read(command.as_bytes(), key)?))) else {
            return Box::pin(self.send(command.returning::<T>())).await;
        };
        let reply = match cache.hit(&read, Instant::now()) {
            Some(reply) => reply,
            // Boxed, so that the future of a hit stays small.
            None => Box::pin(self.load(cache, read)).await?,
        };
        read_reply(Value::clone(&reply))
    }

    async fn load(&self, cache: &Cache, read: Read<'_>) -> Result<Arc<Value>, Error> {
        let deadline = after(self.timeout);
        loop {
            let load = match cache.join(&read, Instant::now()) {
                Joined::Reply(value) => return Ok(value),
                Joined::Load(load) => load,
            };
            let waiter =
                Waiter { client: self, cache, read: read.clone(), load, has_submitted: AtomicBool::new(false) };
            let mut waiting = std::pin::pin!(waiter.wait(deadline));
            return match timeout_at(deadline, &mut waiting).await {
                // The caller that has submitted the command had an earlier deadline.
                Ok(Err(Error::TimedOut { .. })) if !waiter.has_submitted() && Instant::now() < deadline => continue,
                Ok(ended) => ended,
                // The connection ends the request at the same deadline, and knows its phase.
                Err(_) if waiter.has_submitted() => waiting.await,
                Err(_) => {
                    self.shared.connection.counters.count_timeout(RequestPhase::Waiting);
                    Err(Error::TimedOut { phase: RequestPhase::Waiting })
                }
            };
        }
    }
}

/// A caller that waits for a load.
struct Waiter<'a> {
    client: &'a Client,
    cache: &'a Cache,
    read: Read<'a>,
    load: Arc<Load>,
    has_submitted: AtomicBool,
}

impl Waiter<'_> {
    fn has_submitted(&self) -> bool {
        self.has_submitted.load(Relaxed)
    }

    async fn wait(&self, deadline: Instant) -> Result<Arc<Value>, Error> {
        // Only one caller runs it at a time, and the next one if it goes away.
        self.load.ended.get_or_init(|| self.run(deadline)).await.clone()
    }

    /// Runs the load to its end, from wherever another caller has stopped.
    async fn run(&self, deadline: Instant) -> Result<Arc<Value>, Error> {
        let options = self.client.options();
        let exchange = self.exchange(deadline);
        let ended = if options.is_observed() {
            observed(options, self.read.command, 1, exchange).await
        } else {
            exchange.await
        };
        match ended {
            Ok((reply, Some(submitted))) => Ok(self.cache.complete(&self.read, &self.load, reply, submitted)),
            Ok((reply, None)) => {
                self.cache.fail(&self.read, &self.load);
                Ok(Arc::new(reply))
            }
            Err(error) => {
                self.cache.fail(&self.read, &self.load);
                Err(error)
            }
        }
    }

    /// Returns the reply, and when the command was submitted if the server has tracked its key.
    async fn exchange(&self, deadline: Instant) -> Result<(Value, Option<Instant>), Error> {
        if lock(&self.load.request).is_none() {
            self.submit(deadline).await?;
        }
        let replied = std::future::poll_fn(|context| {
            let mut state = lock(&self.load.request);
            let Some(request) = &mut *state else { return std::task::Poll::Ready((None, deadline)) };
            let replied = Pin::new(&mut request.replies).poll(context).map(|replied| (replied.ok(), request.at));
            if replied.is_ready() {
                // If a hook of the caller panics, the next caller sends the command again.
                *state = None;
            }
            replied
        });
        // The connection sends replies or an error to every request, unless the runtime has dropped it.
        let (Some(PipelineReplies { values, error }), submitted) = replied.await else {
            return Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted });
        };
        if let Some(error) = error {
            return Err(error);
        }
        let mut values = values.into_iter();
        // As many replies as commands, because there is no error.
        let (Some(caching), Some(reply)) = (values.next(), values.next()) else {
            return Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted });
        };
        Ok((reply, caching.as_error().is_none().then_some(submitted)))
    }

    /// Submits the command together with the one that makes the server track its key, so that nothing comes between them.
    async fn submit(&self, deadline: Instant) -> Result<(), Error> {
        let (reply, replies) = ReplySender::pipeline(2);
        let at = Instant::now();
        let bytes = [CACHING, self.read.command].concat();
        self.has_submitted.store(true, Relaxed);
        let timeout = deadline.saturating_duration_since(at);
        self.client.shared.connection.submit_or_wait(&bytes, 2, timeout, reply).await?;
        *lock(&self.load.request) = Some(Submitted { replies, at });
        Ok(())
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.cache.leave(&self.read, &self.load) && !self.load.ended.initialized() {
            // The receiver before the notice, so that the queue finds the request without a caller.
            let request = lock(&self.load.request).take();
            if request.is_some() {
                drop(request);
                self.client.shared.connection.queue.abandon();
            }
        }
    }
}
