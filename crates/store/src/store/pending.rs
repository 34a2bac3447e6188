//! A write in flight and its errors.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use super::queue::HeldBack;
use super::reply::Reply;
use crate::StoreError;
use crate::engine::EngineError;

/// A write in flight. Await it, or [`wait`](Self::wait) for it on a thread that may block.
///
/// Writes of one owner and origin run in the order of submission. Dropping a `Pending` cancels the write only while it is
/// [held back](Self::is_held_back). A queued write always runs.
#[must_use = "the result is known only after waiting, and dropping a write that is held back cancels it"]
pub struct Pending<T> {
    /// Present if the write was held back. Dropping it cancels the write, unless the write has been queued since.
    held_back: Option<HeldBack>,
    reply: Reply<Result<T, WriteError>>,
}

/// The error of a write that failed, or whose outcome is unknown.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The store rejected the write. It has no effect.
    #[error(transparent)]
    Refused(#[from] StoreError),
    /// The engine did not store the write, for example because the disk is full. It has no effect and can be retried.
    #[error("the write was not stored")]
    NotStored(#[source] Arc<EngineError>),
    /// The disk failed during the write. A restart shows whether the write was stored; until then all writes fail.
    #[error("it is unknown whether the write was stored: repair the disk, then restart")]
    Unknown(#[source] Arc<EngineError>),
    /// The disk failed during an earlier write. This write has no effect. Reads still work.
    #[error("writes are rejected because the disk failed during an earlier write: repair the disk, then restart")]
    Stopped(#[source] Arc<EngineError>),
    /// The commit is too large for the log. The write has no effect.
    #[error("the commit has {len} bytes, more than the limit of {max}; split the write")]
    TooLarge {
        /// The length of the commit in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The closure of the write panicked, or another write of the same group panicked and left the state inconsistent. The write has no
    /// effect.
    #[error("the write panicked and was undone")]
    Panicked,
    /// The store was closed before the write ran. It has no effect.
    #[error("the store is closed")]
    Closed,
}

impl<T> Pending<T> {
    pub(super) fn new(held_back: Option<HeldBack>, reply: Reply<Result<T, WriteError>>) -> Self {
        Self { held_back, reply }
    }

    /// Returns whether the write was held back when it was submitted, because the queue was full or its owner had used its share of
    /// the queue. The caller should submit no further writes until this write is done, because the limits of the queue do not cover
    /// writes that are held back.
    pub fn is_held_back(&self) -> bool {
        self.held_back.is_some()
    }

    /// Blocks this thread until the write is done. Returns its result.
    pub fn wait(self) -> Result<T, WriteError> {
        block_on(self)
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, WriteError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = Pin::new(&mut self.reply).poll(context);
        reply.map(|reply| reply.unwrap_or(Err(WriteError::Closed)))
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("is_held_back", &self.is_held_back()).finish_non_exhaustive()
    }
}

/// Runs a future to completion on this thread, which is parked while the future is pending.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        thread::park();
    }
}
