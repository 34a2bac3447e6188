//! A write in flight, and its errors.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use super::queue::Outside;
use super::reply::Reply;
use crate::StoreError;
use crate::engine::EngineError;

/// A write in flight. Await it, or [`wait`](Self::wait) for it on a thread that may block.
///
/// Its place among the writes of its owner and origin is fixed from the beginning. Dropping it cancels the write only while the queue has
/// no capacity for it; afterwards the write is done anyway.
#[must_use = "the result is known only by waiting for it, and a write outside a full queue is canceled when this is dropped"]
pub struct Pending<T> {
    /// Present if the queue was full. Canceling after the write has entered does nothing.
    outside: Option<Outside>,
    reply: Reply<Result<T, WriteError>>,
}

/// Why a write was not done, or is not known to be.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// It was refused. Nothing of it has happened.
    #[error(transparent)]
    Refused(#[from] StoreError),
    /// It could not be kept. Nothing of it has happened, and it may be tried again.
    #[error("the write was not kept")]
    NotKept(#[source] Arc<EngineError>),
    /// The disk failed midway. It is known after a restart whether it has happened; until then nothing more is written.
    #[error("it is unknown whether the write was kept: restart when the disk has been seen to")]
    Unknown(#[source] Arc<EngineError>),
    /// An earlier write failed midway. Nothing of this one has happened; reads go on.
    #[error("nothing is written since the disk failed: see to it, then restart")]
    Stopped(#[source] Arc<EngineError>),
    /// It is larger than what can be kept as a whole. Nothing of it has happened.
    #[error("a commit of {len} bytes: at most {max} are kept as a whole")]
    TooLarge {
        /// The bytes it has.
        len: usize,
        /// The bytes it may have.
        max: usize,
    },
    /// What it does has panicked. Nothing of it has happened.
    #[error("the write panicked, and nothing of it has happened")]
    Panicked,
    /// The store was closed before it was its turn. Nothing of it has happened.
    #[error("the store is closed")]
    Closed,
}

impl<T> Pending<T> {
    pub(super) fn new(outside: Option<Outside>, reply: Reply<Result<T, WriteError>>) -> Self {
        Self { outside, reply }
    }

    /// Whether the queue had no capacity for the write when it was submitted. A caller that holds such a write should submit no
    /// more: each of them occupies memory that the queue does not bound.
    pub fn is_held_back(&self) -> bool {
        self.outside.is_some()
    }

    /// Waits on this thread until the write is done.
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

/// Runs a future to its end on this thread, which sleeps while the future is pending.
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
