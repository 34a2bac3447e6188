//! The queue of writes between any number of threads and the writer.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Semaphore, oneshot};

use super::pending::{Pending, WriteError};
use crate::{Backup, Cause, Checkpoint, Draft, EngineError, State, StoreError};

/// What the writer is asked for.
pub(super) enum Message {
    Write(Box<dyn Job>),
    Checkpoint(oneshot::Sender<Result<(Checkpoint, State), EngineError>>),
    Backup(PathBuf, oneshot::Sender<Result<Backup, EngineError>>),
    /// The writer's own checkpoint is done, and its thread about to end.
    CheckpointEnded,
    /// Runs the duties: another thread has changed a counter.
    Duties,
}

/// A write, run once and ended once, in this order.
pub(super) trait Job: Send {
    /// Changes the draft, and says whether it has succeeded.
    fn run(&mut self, draft: &mut Draft) -> bool;

    /// Gives it an error in place of its result.
    fn refuse(&mut self, error: WriteError);

    fn cause(&self) -> Cause;

    /// Answers the caller with the result, or with the reason why the write was not stored.
    fn end(self: Box<Self>, kept: Result<(), WriteError>);
}

struct Once<F, T> {
    work: Option<F>,
    result: Option<Result<T, WriteError>>,
    reply: oneshot::Sender<Result<T, WriteError>>,
    cause: Cause,
}

impl<F, T> Job for Once<F, T>
where
    F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send,
    T: Send,
{
    fn run(&mut self, draft: &mut Draft) -> bool {
        let Some(work) = self.work.take() else { return false };
        // The draft of a write that fails is not looked at again.
        let result = catch_unwind(AssertUnwindSafe(|| work(draft)));
        let result = result.map_err(|_| WriteError::Panicked).and_then(|result| result.map_err(WriteError::from));
        let is_ok = result.is_ok();
        self.result = Some(result);
        is_ok
    }

    fn refuse(&mut self, error: WriteError) {
        self.result = Some(Err(error));
    }

    fn cause(&self) -> Cause {
        self.cause
    }

    fn end(self: Box<Self>, kept: Result<(), WriteError>) {
        let Self { result, reply, .. } = *self;
        // The caller may have gone away.
        let _ = reply.send(kept.and_then(|()| result.unwrap_or(Err(WriteError::Closed))));
    }
}

/// Messages to the writer: bounded, in order.
pub(super) struct Queue {
    /// One permit per write that may wait, given in the order of asking.
    room: Semaphore,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    abandoned: AtomicU64,
}

/// A write for which there is no room yet.
struct Outside<Q: AsRef<Queue>> {
    queue: Arc<Q>,
    job: Option<Message>,
}

impl<Q: AsRef<Queue>> Drop for Outside<Q> {
    fn drop(&mut self) {
        if self.job.is_some() {
            (*self.queue).as_ref().abandoned.fetch_add(1, Relaxed);
        }
    }
}

#[derive(Default)]
struct Waiting {
    messages: VecDeque<Message>,
    is_closed: bool,
    /// Whether the writer sleeps, and has to be woken.
    is_idle: bool,
}

/// What the writer finds.
pub(super) enum Taken {
    /// These, or none by the time that it wanted to be woken.
    Messages(VecDeque<Message>),
    /// There will be no more.
    Closed,
}

impl Queue {
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            room: Semaphore::new(capacity),
            waiting: Mutex::default(),
            arrived: Condvar::new(),
            abandoned: AtomicU64::new(0),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a write into the queue, now or when there is room. `queue` leads to the queue.
    pub(super) fn write<Q, F, T>(queue: &Arc<Q>, cause: Cause, work: F) -> Pending<T>
    where
        Q: AsRef<Self> + Send + Sync + 'static,
        F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let (reply, receiver) = oneshot::channel();
        let job = Message::Write(Box::new(Once { work: Some(work), result: None, reply, cause }));
        let this: &Self = (**queue).as_ref();
        if let Ok(permit) = this.room.try_acquire() {
            permit.forget();
            this.push(job);
            return Pending::new(None, receiver);
        }
        let mut outside = Outside { queue: Arc::clone(queue), job: Some(job) };
        let entering = async move {
            let this: &Self = (*outside.queue).as_ref();
            // If the queue is closed, the job is dropped, and its caller is told.
            if let (Ok(permit), Some(job)) = (this.room.acquire().await, outside.job.take()) {
                permit.forget();
                this.push(job);
            }
        };
        Pending::new(Some(Box::pin(entering)), receiver)
    }

    /// How many writes were dropped before there was room for them.
    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Relaxed)
    }

    /// Puts a message into the queue without a permit. There is at most one per blocked thread.
    pub(super) fn push(&self, message: Message) {
        let mut waiting = self.waiting();
        if waiting.is_closed {
            // Dropping the message tells its caller.
            return;
        }
        waiting.messages.push_back(message);
        if std::mem::take(&mut waiting.is_idle) {
            drop(waiting);
            self.arrived.notify_one();
        }
    }

    /// All that waits by now.
    pub(super) fn take_more(&self) -> VecDeque<Message> {
        let messages = std::mem::take(&mut self.waiting().messages);
        self.make_room(&messages);
        messages
    }

    /// What has been taken out no longer takes room.
    fn make_room(&self, taken: &VecDeque<Message>) {
        let writes = taken.iter().filter(|message| matches!(message, Message::Write(_))).count();
        self.room.add_permits(writes);
    }

    /// All that waits; sleeps until there is something, or until then.
    pub(super) fn take(&self, until: Option<Instant>) -> Taken {
        let mut waiting = self.waiting();
        loop {
            if !waiting.messages.is_empty() {
                let messages = std::mem::take(&mut waiting.messages);
                drop(waiting);
                self.make_room(&messages);
                return Taken::Messages(messages);
            }
            if waiting.is_closed {
                return Taken::Closed;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Taken::Messages(VecDeque::new());
            }
            waiting.is_idle = true;
            waiting = match left {
                None => self.arrived.wait(waiting).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.arrived.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0,
            };
            waiting.is_idle = false;
        }
    }

    /// Nothing more enters. What is in it is still handled.
    pub(super) fn close(&self) {
        self.room.close();
        self.waiting().is_closed = true;
        self.arrived.notify_one();
    }

    /// How many messages wait.
    pub(super) fn len(&self) -> usize {
        self.waiting().messages.len()
    }

    /// Closes it and drops what is in it: the writer is gone.
    pub(super) fn abandon(&self) {
        self.close();
        let messages = std::mem::take(&mut self.waiting().messages);
        drop(messages);
    }
}
