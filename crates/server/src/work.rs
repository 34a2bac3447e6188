//! The worker pool for expensive requests.
//!
//! An I/O thread serves many connections, so a request must not occupy it for long. A read starts on the I/O thread with a small
//! work budget ([`MAX_INLINE_WORK`]), which suffices for most reads. If the budget is exceeded, the read is restarted on the pool
//! over the same snapshot, and runs until it is done or cancelled. Large messages are parsed on the pool as well. Each connection
//! runs one job at a time, and the threads have a low priority, so that expensive requests delay each other but not cheap ones.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use tidewire_pool::{BuildError, Context, Key, Message, Pool};
use tokio::sync::oneshot;

use crate::{Code, RequestError};

/// Work budget of a read on an I/O thread: about 0.1 ms.
pub(crate) const MAX_INLINE_WORK: u64 = 100_000;
/// Longer messages are parsed on the pool. A connection has only one of them in flight, so this is larger than the batches of most
/// bulk loads.
pub(crate) const MAX_INLINE_MESSAGE_BYTES: usize = 64 << 10;
/// Limit of the queued jobs of all connections.
const MAX_QUEUED_JOBS: usize = 4096;
/// Limit of the queued jobs of one connection. A socket has at most one, an in-process client may have several.
const MAX_QUEUED_JOBS_PER_CONNECTION: usize = 64;
/// Niceness of the threads relative to the process.
const NICENESS: u8 = 10;

/// A job. The worker takes it out of its message before it runs, so that a panic leaves no job in the dead letters of the pool.
type Job = Option<Box<dyn FnOnce() + Send>>;

/// The worker pool for expensive requests.
#[derive(Debug)]
pub(crate) struct WorkPool {
    pool: Pool<Job>,
    /// The number of queued and running jobs. Counted here because the pool may still count jobs that have just finished.
    depth: Arc<AtomicUsize>,
    /// The number of requests rejected because of the memory limit.
    memory_rejected: AtomicU64,
}

/// Counts a queued or running job until it is dropped.
struct DepthGuard(Arc<AtomicUsize>);

impl DepthGuard {
    fn new(depth: &Arc<AtomicUsize>) -> Self {
        depth.fetch_add(1, Relaxed);
        Self(Arc::clone(depth))
    }
}

impl Drop for DepthGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Tells a job whether its caller has cancelled it.
#[derive(Debug, Clone, Default)]
pub(crate) struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// Cancels a job when it is dropped.
struct CancelOnDrop(CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Relaxed);
    }
}

impl WorkPool {
    pub(crate) fn start() -> Result<Self, BuildError> {
        // More threads than cores, so that a few long requests do not occupy all of them.
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
            .messages(MAX_QUEUED_JOBS)
            .key_messages(MAX_QUEUED_JOBS_PER_CONNECTION)
            .niceness(NICENESS)
            .start(handle)?;
        Ok(Self { pool, depth: Arc::default(), memory_rejected: AtomicU64::new(0) })
    }

    /// Runs a job after the earlier jobs of its connection. Dropping the future cancels it.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        connection: u64,
        work: impl FnOnce(&CancelToken) -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, RequestError>> + Send + 'static {
        let (reply, result) = oneshot::channel();
        let cancelled = CancelToken::default();
        let guard = CancelOnDrop(cancelled.clone());
        let depth_guard = DepthGuard::new(&self.depth);
        let job = move || {
            let _depth_guard = depth_guard;
            if !cancelled.is_cancelled() {
                // The caller may have cancelled the job.
                let _ = reply.send(work(&cancelled));
            }
        };
        let submitted = self.pool.try_submit(Message::new(Key::of(&connection), Some(Box::new(job))));
        let submitted = submitted.map(drop).map_err(|_| queue_full());
        async move {
            let _guard = guard;
            submitted?;
            result.await.map_err(|_| RequestError::internal(&JobPanicked))
        }
    }

    /// Returns the number of queued and running jobs.
    pub(crate) fn depth(&self) -> usize {
        self.depth.load(Relaxed)
    }

    /// Returns the number of jobs that were submitted.
    pub(crate) fn submitted(&self) -> u64 {
        self.pool.stats().submitted
    }

    /// Counts a request that is rejected because the memory limit of the connections is exceeded. Returns its error.
    pub(crate) fn reject_for_memory(&self) -> RequestError {
        self.memory_rejected.fetch_add(1, Relaxed);
        let message = "the memory limit of the server is exceeded; the request was not run, try again later";
        RequestError::new(Code::Backpressure, message)
    }

    /// Returns the number of requests rejected because the queue was full or the memory limit was exceeded.
    pub(crate) fn rejected(&self) -> u64 {
        self.pool.stats().rejected + self.memory_rejected.load(Relaxed)
    }
}

fn queue_full() -> RequestError {
    let message = "too many expensive requests are queued; the request was not run, try again later";
    RequestError::new(Code::Backpressure, message)
}

#[derive(Debug, thiserror::Error)]
#[error("a job panicked on the worker pool")]
struct JobPanicked;
