//! A write in flight, and its errors.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tokio::sync::oneshot;

use crate::{EngineError, StoreError};

/// A write that is under way. Await it, or [`wait`](Self::wait) for it on a thread that may block.
///
/// It has its place in the order of writes from the beginning if the queue of writes had room, else when it is first polled or
/// waited for. Dropping it does not take back a write that has its place.
#[must_use = "whether it is done, and whether there was room for it, is known only by waiting for it"]
pub struct Pending<T> {
    /// Waits for room, and then enters the queue.
    entering: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    reply: oneshot::Receiver<Result<T, WriteError>>,
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
    pub(super) fn new(
        entering: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
        reply: oneshot::Receiver<Result<T, WriteError>>,
    ) -> Self {
        Self { entering, reply }
    }

    /// Waits on this thread until it is done.
    pub fn wait(self) -> Result<T, WriteError> {
        block_on(self)
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, WriteError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(entering) = &mut self.entering {
            std::task::ready!(entering.as_mut().poll(context));
            self.entering = None;
        }
        Pin::new(&mut self.reply).poll(context).map(|reply| reply.unwrap_or(Err(WriteError::Closed)))
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("is_entering", &self.entering.is_some()).finish_non_exhaustive()
    }
}

/// Runs a future on this thread, which sleeps whenever it waits.
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
