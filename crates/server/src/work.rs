//! The pool for costly requests.
//!
//! An I/O thread serves many connections, so a request may take little time there. A read starts on the I/O thread with a small
//! budget of work ([`INLINE_WORK`]), which is enough for nearly all. If it does not suffice, the read starts again here, over the
//! same snapshot, and goes on until it is done or nobody waits for it any more. Large messages are parsed here as well. The work of
//! a connection is done one piece at a time, and the threads have a low priority, so that a costly request delays others of its
//! kind and not the cheap ones.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use tidewire_pool::{BuildError, Context, Key, Message, Pool};
use tokio::sync::oneshot;

use crate::{Code, RequestError};

/// The work that a read may take on an I/O thread: about a tenth of a millisecond.
pub(crate) const INLINE_WORK: u64 = 100_000;
/// Messages that are longer are parsed on the pool. A connection has one such message in flight, so it is longer than the batches
/// of most bulk loads.
pub(crate) const INLINE_MESSAGE: usize = 64 << 10;
/// Requests that may wait for a thread, of all connections.
const MAX_WAITING: usize = 4096;
/// Requests of one connection that may wait for a thread. A socket has one, a client in this process may have several.
const MAX_WAITING_PER_CONNECTION: usize = 64;
/// How much lower than usual the priority of the threads is, on the scale of `nice`.
const NICENESS: u8 = 10;

/// Work that is done once. Taken out of the message, so that none is left among the dead letters of the pool after a panic.
type Job = Option<Box<dyn FnOnce() + Send>>;

/// Threads for costly requests.
#[derive(Debug)]
pub(crate) struct WorkPool {
    pool: Pool<Job>,
    /// The number of requests that wait or are worked on. That of the pool may include some that have just ended.
    depth: Arc<AtomicUsize>,
    /// The number of requests that were not run because of the memory limit.
    refused: AtomicU64,
}

/// A request that waits or is worked on.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(depth: &Arc<AtomicUsize>) -> Self {
        depth.fetch_add(1, Relaxed);
        Self(Arc::clone(depth))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Whether the result of some work is still wanted.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// Cancels work when it is dropped.
struct CancelOnDrop(Cancelled);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Relaxed);
    }
}

impl WorkPool {
    pub(crate) fn start() -> Result<Self, BuildError> {
        // More threads than cores, so that a few long requests leave some for others.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let handle = |message: &mut Message<Job>, _: &mut Context<'_, Job>| {
            if let Some(job) = message.payload.take() {
                job();
            }
            Ok::<(), Infallible>(())
        };
        let pool = Pool::builder()
            .name("tidewire-work")
            .workers((2 * cores).clamp(4, 32))
            .messages(MAX_WAITING)
            .key_messages(MAX_WAITING_PER_CONNECTION)
            .niceness(NICENESS)
            .start(handle)?;
        Ok(Self { pool, depth: Arc::default(), refused: AtomicU64::new(0) })
    }

    /// Does work for a connection when its earlier work is done. Dropping the future cancels it.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        connection: u64,
        work: impl FnOnce(&Cancelled) -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, RequestError>> + Send + 'static {
        let (reply, result) = oneshot::channel();
        let cancelled = Cancelled::default();
        let guard = CancelOnDrop(cancelled.clone());
        let counted = Counted::new(&self.depth);
        let job = move || {
            let _counted = counted;
            if !cancelled.is_cancelled() {
                // The caller may have gone away meanwhile.
                let _ = reply.send(work(&cancelled));
            }
        };
        let submitted = self.pool.try_submit(Message::new(Key::of(&connection), Some(Box::new(job))));
        let submitted = submitted.map(drop).map_err(|_| busy());
        async move {
            let _guard = guard;
            submitted?;
            result.await.map_err(|_| RequestError::internal(&Lost))
        }
    }

    /// The number of requests that wait or are worked on.
    pub(crate) fn depth(&self) -> usize {
        self.depth.load(Relaxed)
    }

    /// The number of requests that were begun here.
    pub(crate) fn submitted(&self) -> u64 {
        self.pool.stats().submitted
    }

    /// Refuses a request because the connections hold more memory than they may.
    pub(crate) fn refuse(&self) -> RequestError {
        self.refused.fetch_add(1, Relaxed);
        let message = "the connections of the server hold too much memory: try again later; this request was not run";
        RequestError::new(Code::Backpressure, message)
    }

    /// The number of requests that were refused because too many waited, or because of the memory limit.
    pub(crate) fn rejected(&self) -> u64 {
        self.pool.stats().rejected + self.refused.load(Relaxed)
    }
}

fn busy() -> RequestError {
    let message = "too many costly requests wait for a thread: try again later; this one was not run";
    RequestError::new(Code::Backpressure, message)
}

/// The work panicked.
#[derive(Debug, thiserror::Error)]
#[error("the request panicked on the pool")]
struct Lost;
