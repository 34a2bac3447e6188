//! Settings of a pool.

use std::sync::Arc;
use std::time::Duration;

use crate::budget::{MAX_BYTES, MAX_MESSAGES};
use crate::{DeadLetter, Handler, Observer, Pool, Simulation};

/// Where the messages of a key are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Placement {
    /// On any worker: an idle worker takes over a waiting key, so a hot or slow key does not delay another. The default.
    #[default]
    Moving,
    /// Always on the same thread, for handlers with state per thread. Keys that share a thread with a slow key wait for it.
    Pinned,
}

/// Merges a new payload into a queued one.
pub type Merge<P> = dyn Fn(&mut P, P) + Send + Sync;

/// What happens to a message that is submitted to a full pool.
///
/// It does not apply to follow-up messages, which are accepted or rejected immediately.
#[non_exhaustive]
pub enum Overflow<P> {
    /// The message is returned in the error. The default, because no message is lost or delayed without the caller's knowledge.
    Reject,
    /// [`submit`](crate::Pool::submit) blocks and [`submit_async`](crate::Pool::submit_async) waits until the pool can accept the
    /// message; [`try_submit`](crate::Pool::try_submit) rejects it. Workers return budget in batches of up to a 64th of the bound,
    /// so a pool that is slightly below its bound may still have waiting submissions.
    Wait,
    /// Older messages become dead letters until the pool can accept the message: the oldest of the same key if it has any queued, or
    /// else the oldest of the key that has waited longest, first among the keys with the same home worker. If nothing is queued, the
    /// message is rejected. A message that waits for its next attempt, and the messages behind it, are not dropped.
    DropOldest,
    /// The function merges the message into the newest queued message of its key. It gets the queued payload and the new one. The
    /// message is rejected if no message of its key is queued, or if the bytes of both together exceed a bound. The function runs
    /// under a lock of the pool: it must be quick, and must not use the pool.
    Coalesce(Arc<Merge<P>>),
}

impl<P> std::fmt::Debug for Overflow<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Reject => "Reject",
            Self::Wait => "Wait",
            Self::DropOldest => "DropOldest",
            Self::Coalesce(_) => "Coalesce",
        })
    }
}

/// The retry policy for messages whose handler returned an error. The other messages of the key wait for the retry.
///
/// A message whose budget was taken over by a follow-up needs new budget for a retry. If the pool is full, it becomes a dead letter.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Retry {
    /// The number of attempts, the first one included.
    pub attempts: u32,
    /// The pause after the first failed attempt. Each further pause is twice as long. Default: 10 ms, long enough for a lock to be
    /// released or a leader to be elected, and short enough for a waiting caller.
    pub first_pause: Duration,
    /// The maximum of a pause. Default: 10 s, so that the end of an outage is noticed within seconds.
    pub longest_pause: Duration,
}

impl Retry {
    /// Creates a policy with this number of attempts, the first one included.
    pub fn new(attempts: u32) -> Self {
        Self { attempts, first_pause: Duration::from_millis(10), longest_pause: Duration::from_secs(10) }
    }

    /// Sets [`first_pause`](#structfield.first_pause).
    #[must_use]
    pub fn first_pause(mut self, pause: Duration) -> Self {
        self.first_pause = pause;
        self
    }

    /// Sets [`longest_pause`](#structfield.longest_pause).
    #[must_use]
    pub fn longest_pause(mut self, pause: Duration) -> Self {
        self.longest_pause = pause;
        self
    }

    pub(crate) fn pause_after(&self, attempts: u32) -> Duration {
        let doublings = attempts.saturating_sub(1).min(31);
        self.first_pause.saturating_mul(1 << doublings).min(self.longest_pause)
    }
}

/// Why a pool cannot be built. Each error names the setting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The number of workers is zero.
    #[error("workers is 0: a pool needs at least one worker")]
    NoWorkers,
    /// The number of workers is above the supported maximum.
    #[error("workers is {0}: at most {max} are supported", max = Builder::<()>::MAX_WORKERS)]
    TooManyWorkers(usize),
    /// A bound is zero, so no message would be accepted.
    #[error("{0} is 0: no message would ever be accepted")]
    ZeroBound(&'static str),
    /// A bound is larger than the counters of the pool support.
    #[error("{field} is {value}: at most {max} is supported")]
    HugeBound {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The largest supported value.
        max: usize,
    },
    /// A bound per key is larger than the bound of the pool.
    #[error("{field} is {value}, which must not exceed the {total} of the whole pool")]
    KeyAboveTotal {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The bound of the whole pool.
        total: usize,
    },
    /// The number of attempts is zero.
    #[error("retry.attempts is 0: a message needs at least one attempt")]
    NoAttempts,
    /// The first pause is longer than the longest.
    #[error("retry.first_pause is {first:?}, which must not exceed retry.longest_pause, {longest:?}")]
    PausesReversed {
        /// The first pause.
        first: Duration,
        /// The longest pause.
        longest: Duration,
    },
    /// The name contains a NUL, which is not allowed in the name of a thread.
    #[error("name contains a NUL: {0:?}")]
    NulInName(String),
    /// The operating system did not start a thread.
    #[error("cannot start worker thread {worker}: {source}")]
    Thread {
        /// The number of the worker.
        worker: usize,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

/// A builder of a [`Pool`] or a [`Simulation`], returned by [`Pool::builder`].
pub struct Builder<P> {
    pub(crate) workers: usize,
    pub(crate) placement: Placement,
    pub(crate) messages: usize,
    pub(crate) bytes: usize,
    pub(crate) key_messages: Option<usize>,
    pub(crate) key_bytes: Option<usize>,
    pub(crate) size: fn(&P) -> usize,
    pub(crate) overflow: Overflow<P>,
    pub(crate) retry: Option<Retry>,
    pub(crate) dead_letters: usize,
    pub(crate) on_dead_letter: Option<Box<OnDeadLetter<P>>>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) name: String,
    pub(crate) niceness: u8,
}

pub(crate) type OnDeadLetter<P> = dyn Fn(&mut DeadLetter<P>) + Send + Sync;

impl<P: Send + 'static> Default for Builder<P> {
    fn default() -> Self {
        Self {
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            placement: Placement::default(),
            messages: 65_536,
            bytes: 64 << 20,
            key_messages: None,
            key_bytes: None,
            size: |_| size_of::<P>(),
            overflow: Overflow::Reject,
            retry: None,
            dead_letters: 1024,
            on_dead_letter: None,
            observer: None,
            name: "pool".into(),
            niceness: 0,
        }
    }
}

impl<P> Builder<P> {
    const MAX_WORKERS: usize = 4096;
}

impl<P: Send + 'static> Builder<P> {
    /// Sets the number of threads that handle messages. Default: one per core, because handlers should compute and not block.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    /// Sets where the messages of a key are handled. Default: [`Placement::Moving`].
    #[must_use]
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// Sets the maximum number of messages in the pool, including those being handled. Default: 65 536, which at a microsecond
    /// each is 65 ms of work; a longer queue would only add latency.
    #[must_use]
    pub fn messages(self, messages: usize) -> Self {
        Self { messages, ..self }
    }

    /// Sets the maximum number of bytes of all payloads in the pool, as [`size`](Self::size) counts them. Default: 64 MiB, so
    /// that a pool with default settings cannot exhaust the memory.
    #[must_use]
    pub fn bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// Sets the maximum number of messages of one key. Default: that of the pool, because counting per key costs a lookup for
    /// each submission. Set it if keys belong to clients that must not starve each other.
    #[must_use]
    pub fn key_messages(self, messages: usize) -> Self {
        Self { key_messages: Some(messages), ..self }
    }

    /// Sets the maximum number of bytes of one key. Default: that of the pool.
    #[must_use]
    pub fn key_bytes(self, bytes: usize) -> Self {
        Self { key_bytes: Some(bytes), ..self }
    }

    /// Sets the function that returns the bytes of a payload. Default: the size of its type, without its data on the heap.
    #[must_use]
    pub fn size(self, size: fn(&P) -> usize) -> Self {
        Self { size, ..self }
    }

    /// Sets what happens to a message that is submitted to a full pool. Default: [`Overflow::Reject`].
    #[must_use]
    pub fn overflow(self, overflow: Overflow<P>) -> Self {
        Self { overflow, ..self }
    }

    /// Sets the retry policy. Default: no retries, because only the application knows which messages may be
    /// handled twice.
    #[must_use]
    pub fn retry(self, retry: Retry) -> Self {
        Self { retry: Some(retry), ..self }
    }

    /// Sets the maximum number of stored dead letters. Default: 1024, enough to diagnose an error. With 0, dead letters are only
    /// counted and passed to [`on_dead_letter`](Self::on_dead_letter).
    #[must_use]
    pub fn dead_letters(self, capacity: usize) -> Self {
        Self { dead_letters: capacity, ..self }
    }

    /// Sets a function that is called with every dead letter before it is stored, for example to send an error to the client that the
    /// payload belongs to. A caller of [`Pool::ask`](crate::Pool::ask) gets an error without it. The function runs on the worker, or on
    /// the thread whose submission displaced the message. Default: none.
    #[must_use]
    pub fn on_dead_letter(self, hook: impl Fn(&mut DeadLetter<P>) + Send + Sync + 'static) -> Self {
        Self { on_dead_letter: Some(Box::new(hook)), ..self }
    }

    /// Sets the observer of messages, for example [`PoolMetrics`](crate::PoolMetrics). Default: none.
    #[must_use]
    pub fn observer(self, observer: Arc<dyn Observer>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Sets the prefix of the names of the threads, which is followed by their number. Default: `pool`.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Sets the niceness of the threads, relative to the thread that starts the pool. A higher value is a lower scheduling priority.
    /// Use it for work that must not delay other threads of the process. It has an effect on Linux only, where each
    /// thread has its own priority. Default: 0, no change.
    #[must_use]
    pub fn niceness(self, niceness: u8) -> Self {
        Self { niceness, ..self }
    }

    /// Starts a pool.
    pub fn start<H: Handler<P>>(self, handler: H) -> Result<Pool<P>, BuildError> {
        Pool::start(self.validated()?, handler)
    }

    /// Creates the same pool without threads, for tests. The caller steps it in virtual time. The seed determines which ready key is
    /// next.
    pub fn simulate<H: Handler<P>>(self, seed: u64, handler: H) -> Result<Simulation<P>, BuildError> {
        Ok(Simulation::new(self.validated()?, seed, handler))
    }

    fn validated(self) -> Result<Self, BuildError> {
        if self.workers == 0 {
            return Err(BuildError::NoWorkers);
        }
        if self.workers > Self::MAX_WORKERS {
            return Err(BuildError::TooManyWorkers(self.workers));
        }
        let bounds = [
            ("messages", self.messages, MAX_MESSAGES, None),
            ("bytes", self.bytes, MAX_BYTES, None),
            ("key_messages", self.key_messages.unwrap_or(1), MAX_MESSAGES, self.key_messages.map(|_| self.messages)),
            ("key_bytes", self.key_bytes.unwrap_or(1), MAX_BYTES, self.key_bytes.map(|_| self.bytes)),
        ];
        for (field, value, max, total) in bounds {
            if value == 0 {
                return Err(BuildError::ZeroBound(field));
            }
            if value > max {
                return Err(BuildError::HugeBound { field, value, max });
            }
            if let Some(total) = total.filter(|&total| value > total) {
                return Err(BuildError::KeyAboveTotal { field, value, total });
            }
        }
        if self.name.contains('\0') {
            return Err(BuildError::NulInName(self.name));
        }
        if let Some(retry) = self.retry {
            if retry.attempts == 0 {
                return Err(BuildError::NoAttempts);
            }
            if retry.first_pause > retry.longest_pause {
                return Err(BuildError::PausesReversed { first: retry.first_pause, longest: retry.longest_pause });
            }
        }
        Ok(self)
    }
}

impl<P> std::fmt::Debug for Builder<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("workers", &self.workers)
            .field("placement", &self.placement)
            .field("messages", &self.messages)
            .field("bytes", &self.bytes)
            .field("overflow", &self.overflow)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}
