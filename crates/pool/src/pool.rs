//! The pool: threads around an [`Engine`].

use std::sync::Arc;
use std::time::Duration;

use crate::ask::new_ask;
use crate::clock::Clock;
use crate::engine::Engine;
use crate::sync::{Mutex, lock, thread};
use crate::{AskError, BuildError, Builder, DeadLetters, Handler, Message, Placement, Reply, worker};

/// A thread pool that handles messages in order per key, with bounded queues, deadlines, retries and dead letters.
///
/// See the [crate](crate) for an example. Share it in an [`Arc`]. Dropping it [aborts](Self::abort) it and waits for the
/// handlers that are running.
pub struct Pool<P: Send + 'static> {
    engine: Arc<Engine<P>>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

/// How a message was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Submitted {
    /// It is queued.
    Queued,
    /// It is queued, and this number of older messages was dropped for it.
    Displacing(usize),
    /// It was merged into a queued message.
    Merged,
}

/// Why a message was not accepted. Each variant contains the message.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError<P> {
    /// The pool is full.
    #[error("the pool is full: try again later, or choose another overflow policy")]
    Full(Message<P>),
    /// The message is larger than the bound on bytes, so it can never be accepted.
    #[error("the message is larger than the pool's bound on bytes")]
    TooLarge(Message<P>),
    /// The pool is draining or closed.
    #[error("the pool is shutting down")]
    Closed(Message<P>),
}

impl<P> SubmitError<P> {
    /// Returns the message.
    pub fn into_message(self) -> Message<P> {
        match self {
            Self::Full(message) | Self::TooLarge(message) | Self::Closed(message) => message,
        }
    }
}

impl<P> std::fmt::Debug for SubmitError<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, message) = match self {
            Self::Full(message) => ("Full", message),
            Self::TooLarge(message) => ("TooLarge", message),
            Self::Closed(message) => ("Closed", message),
        };
        write!(f, "{name}({:?})", message.key)
    }
}

/// Counters of a pool since its start. Each accepted message ends in exactly one of `handled`, `dead_lettered` and `returned`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Accepted and queued, follow-ups included.
    pub submitted: u64,
    /// Accepted by merging into a queued message.
    pub merged: u64,
    /// Not accepted.
    pub rejected: u64,
    /// Handled with success.
    pub handled: u64,
    /// Attempts that returned an error.
    pub failed: u64,
    /// Attempts that panicked.
    pub panicked: u64,
    /// Failed attempts that were followed by another one.
    pub retried: u64,
    /// Dead letters whose deadline had passed.
    pub expired: u64,
    /// Dead letters that were the oldest message of a full queue.
    pub displaced: u64,
    /// Dead letters, for any reason.
    pub dead_lettered: u64,
    /// Dead letters that were dropped because of the bound on dead letters.
    pub forgotten: u64,
    /// Returned by a shutdown.
    pub returned: u64,
}

/// The result of a shutdown.
#[derive(Debug)]
#[non_exhaustive]
pub struct Shutdown<P> {
    /// The messages that were accepted and that no worker has taken.
    pub returned: Vec<Message<P>>,
    /// The number of workers that were still in a handler. Their threads end when the handlers return.
    pub running: usize,
}

/// Lowers the priority of this thread.
#[cfg(target_os = "linux")]
fn lower_priority(niceness: u8) {
    if niceness > 0 {
        // On Linux this changes only the calling thread.
        let lowered = rustix::process::nice(niceness.into());
        if let Err(error) = lowered {
            tracing::debug!(%error, niceness, "cannot lower the priority of a worker thread");
        }
    }
}

/// Other systems have no priority per thread.
#[cfg(not(target_os = "linux"))]
fn lower_priority(_: u8) {}

impl<P: Send + 'static> Pool<P> {
    /// Returns a builder with default settings.
    pub fn builder() -> Builder<P> {
        Builder::default()
    }

    pub(crate) fn start<H: Handler<P>>(options: Builder<P>, handler: H) -> Result<Self, BuildError> {
        let (name, niceness) = (options.name.clone(), options.niceness);
        let engine = Arc::new(Engine::new(options, handler, Clock::system()));
        let pool = Self { engine: Arc::clone(&engine), threads: Mutex::default() };
        for worker in 0..engine.workers() {
            let engine = Arc::clone(&engine);
            let thread = thread::Builder::new().name(format!("{name}-{worker}"));
            // On an error the pool is dropped, which stops the threads that were started.
            let thread = thread.spawn(move || {
                lower_priority(niceness);
                worker::run(&engine, worker);
            });
            lock(&pool.threads).push(thread.map_err(|source| BuildError::Thread { worker, source })?);
        }
        Ok(pool)
    }

    /// Submits a message. If the pool is full, the [overflow policy](crate::Overflow) applies; under
    /// [`Overflow::Wait`](crate::Overflow::Wait) this blocks the thread.
    ///
    /// A handler submits through its [`Context`](crate::Context) instead, which never blocks.
    pub fn submit(&self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        self.engine.submit_blocking(message)
    }

    /// As [`submit`](Self::submit), but under [`Overflow::Wait`](crate::Overflow::Wait) it waits without blocking the thread. If the
    /// future is dropped while it waits, the message is not submitted.
    pub async fn submit_async(&self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        self.engine.submit(message, None).await
    }

    /// As [`submit`](Self::submit), but never waits.
    pub fn try_submit(&self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        self.engine.try_submit(message, None)
    }

    /// Submits a message that carries a [`Reply`], and awaits the reply.
    ///
    /// It fails if the message is not accepted, becomes a dead letter or is returned by a shutdown, or if the handler drops the
    /// [`Reply`] before it sent a value. A handler may move the `Reply` into a follow-up message. If a follow-up is not handled, the call
    /// fails when the last follow-up has ended.
    ///
    /// Cancellation: if the future is dropped, for example after a timeout, a message that is queued is still handled.
    /// [`Reply::is_wanted`] is then false, and [`Reply::send`] returns the value to the handler.
    ///
    /// ```
    /// use tidewire_pool::{Context, Message, Pool, Reply};
    ///
    /// struct Double(u32, Reply<u32>);
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// let handler = |message: &mut Message<Double>, _: &mut Context<'_, Double>| {
    ///     let Double(number, reply) = &mut message.payload;
    ///     if reply.is_wanted() {
    ///         // Fails if the caller drops its future meanwhile, which is not an error.
    ///         _ = reply.send(*number * 2);
    ///     }
    ///     Ok::<(), std::convert::Infallible>(())
    /// };
    /// let pool = Pool::builder().workers(1).start(handler).unwrap();
    /// let doubled = pool.ask(|reply| Message::new(7, Double(21, reply))).await;
    /// assert_eq!(doubled.unwrap(), 42);
    /// # }
    /// ```
    pub async fn ask<R: Send + 'static>(&self, message: impl FnOnce(Reply<R>) -> Message<P>) -> Result<R, AskError<P>> {
        let (reply, ask, future) = new_ask();
        self.engine.submit(message(reply), Some(ask)).await.map_err(AskError::NotSubmitted)?;
        future.await.map_err(Into::into)
    }

    /// Returns the dead letters.
    pub fn dead_letters(&self) -> &DeadLetters<P> {
        &self.engine.dead_letters
    }

    /// Returns the number of messages in the pool, including those being handled. It may include messages that have ended, up to a 64th
    /// of the bound, because busy workers return budget in batches.
    pub fn depth(&self) -> usize {
        self.engine.depth().messages()
    }

    /// Returns the number of bytes in the pool, as [`Builder::size`] counts them; see [`depth`](Self::depth).
    pub fn bytes(&self) -> usize {
        self.engine.depth().bytes()
    }

    /// Returns the counters of the pool.
    pub fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// Returns the number of threads.
    pub fn workers(&self) -> usize {
        self.engine.workers()
    }

    /// Returns where the messages of a key are handled.
    pub fn placement(&self) -> Placement {
        self.engine.placement
    }

    /// Shuts down gracefully: accepts only follow-up messages, and waits until all messages are handled or the timeout has passed. Then
    /// the pool is closed, and messages that were not started are returned.
    ///
    /// It does not wait longer than the timeout, even if a handler does not return. A handler must not call it, because it would wait
    /// for itself.
    pub fn drain(&self, timeout: Duration) -> Shutdown<P> {
        self.engine.drain(timeout);
        self.abort()
    }

    /// Shuts down immediately: closes the pool, and returns the messages that were not started. It does not wait for running handlers.
    pub fn abort(&self) -> Shutdown<P> {
        let returned = self.engine.close();
        let running = self.engine.running();
        if running == 0 {
            self.join();
        }
        Shutdown { returned, running }
    }

    /// Waits for all threads to end, except for the calling thread.
    fn join(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            if thread.thread().id() != thread::current().id() {
                // A worker does not panic: panics of application code are caught.
                let _ = thread.join();
            }
        }
    }
}

impl<P: Send + 'static> Drop for Pool<P> {
    fn drop(&mut self) {
        drop(self.engine.close());
        self.join();
    }
}

impl<P: Send + 'static> std::fmt::Debug for Pool<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("workers", &self.workers()).field("depth", &self.depth()).finish_non_exhaustive()
    }
}
