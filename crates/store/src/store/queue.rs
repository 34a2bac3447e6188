//! The queue of writes between any number of threads and the writer.
//!
//! A write that finds no capacity is *outside*: it keeps its place in the line of its owner, enters by itself when there is
//! capacity, and is canceled if its [`Pending`] is dropped before.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Instant;

use tokio::sync::oneshot;

use super::WriteOptions;
use super::lines::{Bounds, Lines, Owner, Ticket, Usage};
use super::pending::{Pending, WriteError};
use super::reply::{ReplySender, reply};
use super::turns::Flow;
use crate::engine::{Backup, Checkpoint, EngineError};
use crate::lock::lock;
use crate::{Cause, Draft, State, StoreError};

/// A message to the writer.
pub(super) enum Message {
    Write(Box<dyn Job>),
    Checkpoint(oneshot::Sender<Result<(Checkpoint, State), EngineError>>),
    Backup(PathBuf, oneshot::Sender<Result<Backup, EngineError>>),
    /// The checkpoint that the writer started is done, and its thread is about to end.
    CheckpointEnded,
    /// Runs the duties, because another thread has changed a counter.
    Duties,
}

/// A write. It is run once, and then ended once.
pub(super) trait Job: Send {
    /// Changes the draft. Returns whether it succeeded.
    fn run(&mut self, draft: &mut Draft) -> bool;

    /// Replaces the result by an error.
    fn refuse(&mut self, error: WriteError);

    fn cause(&self) -> Cause;

    /// Answers the caller with the result, or with the reason why the write was not stored. Returns its waker, which must be woken.
    #[must_use]
    fn end(self: Box<Self>, kept: Result<(), WriteError>) -> Option<Waker>;
}

struct Once<F, T> {
    work: Option<F>,
    result: Option<Result<T, WriteError>>,
    reply: ReplySender<Result<T, WriteError>>,
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

    fn end(self: Box<Self>, kept: Result<(), WriteError>) -> Option<Waker> {
        let Self { result, reply, .. } = *self;
        reply.send(kept.and_then(|()| result.unwrap_or(Err(WriteError::Closed))))
    }
}

/// Messages to the writer: bounded, and taken by turns between owners.
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    abandoned: AtomicU64,
}

struct Waiting {
    /// Writes, checkpoints and backups.
    lines: Lines<Message>,
    /// Signals, which are handled first. There is at most one per checkpoint.
    signals: VecDeque<Message>,
    is_closed: bool,
    /// Whether the writer sleeps, and has to be woken.
    is_idle: bool,
}

impl Waiting {
    fn take(&mut self, cost: u64) -> Option<Message> {
        self.lines.finish(cost);
        self.signals.pop_front().or_else(|| self.lines.take())
    }
}

/// Cancels a write when dropped, unless it has entered the queue.
pub(super) struct Outside {
    queue: Arc<Queue>,
    owner: Owner,
    ticket: Ticket,
}

impl Drop for Outside {
    fn drop(&mut self) {
        let canceled = self.queue.waiting().lines.cancel(self.owner, self.ticket);
        if canceled.is_some() {
            self.queue.abandoned.fetch_add(1, Relaxed);
        }
    }
}

/// The result of waiting for a message.
pub(super) enum Taken {
    Message(Message),
    /// None arrived in time.
    Nothing,
    /// The queue is closed and empty.
    Closed,
}

impl Queue {
    /// The flow of the requests that the embedding program makes.
    const PROGRAM: Flow = Flow { owner: 0, origin: 0 };

    pub(super) fn new(bounds: Bounds) -> Self {
        let waiting = Waiting { lines: Lines::new(bounds), signals: VecDeque::new(), is_closed: false, is_idle: false };
        Self { waiting: Mutex::new(waiting), arrived: Condvar::new(), abandoned: AtomicU64::new(0) }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }

    /// Submits a write.
    pub(super) fn write<F, T>(self: &Arc<Self>, options: WriteOptions, work: F) -> Pending<T>
    where
        F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let WriteOptions { cause, owner, bytes } = options;
        let (reply, receiver) = reply();
        let job = Message::Write(Box::new(Once { work: Some(work), result: None, reply, cause }));
        let ticket = self.submit(Flow { owner, origin: cause.origin }, bytes, job);
        let outside = ticket.map(|ticket| Outside { queue: Arc::clone(self), owner, ticket });
        Pending::new(outside, receiver)
    }

    /// Submits a request of the embedding program, which has its place after the writes of the program. There is at most one per
    /// blocked thread.
    pub(super) fn request(&self, message: Message) {
        self.submit(Self::PROGRAM, 0, message);
    }

    fn submit(&self, flow: Flow, bytes: usize, message: Message) -> Option<Ticket> {
        self.add(|waiting| waiting.lines.push(flow, bytes, message))?
    }

    /// Sends a signal, which is handled before all other messages.
    pub(super) fn signal(&self, message: Message) {
        self.add(|waiting| waiting.signals.push_back(message));
    }

    /// Adds a message and wakes the writer. In a closed queue the message is dropped, which tells its caller.
    fn add<T>(&self, add: impl FnOnce(&mut Waiting) -> T) -> Option<T> {
        let mut waiting = self.waiting();
        if waiting.is_closed {
            // A closure may hold the last handle of the store, so it is dropped without the lock.
            drop(waiting);
            return None;
        }
        let added = add(&mut waiting);
        if std::mem::take(&mut waiting.is_idle) {
            drop(waiting);
            self.arrived.notify_one();
        }
        Some(added)
    }

    /// Returns the number of writes that were dropped before they entered the queue.
    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Relaxed)
    }

    /// Takes the next message, if there is one. `cost` is the work of the last one, in nanoseconds.
    pub(super) fn next(&self, cost: u64) -> Option<Message> {
        self.waiting().take(cost)
    }

    /// Takes the next message. Sleeps until there is one, or until the given time.
    pub(super) fn wait(&self, mut cost: u64, until: Option<Instant>) -> Taken {
        let mut waiting = self.waiting();
        loop {
            if let Some(message) = waiting.take(std::mem::take(&mut cost)) {
                return Taken::Message(message);
            }
            if waiting.is_closed {
                return Taken::Closed;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Taken::Nothing;
            }
            waiting.is_idle = true;
            waiting = match left {
                None => self.arrived.wait(waiting).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.arrived.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0,
            };
            waiting.is_idle = false;
        }
    }

    /// Closes the queue. Queued messages are still handled. Writes outside are dropped, and their callers are told.
    pub(super) fn close(&self) {
        let mut waiting = self.waiting();
        waiting.is_closed = true;
        let outside = waiting.lines.cancel_all();
        drop(waiting);
        self.arrived.notify_one();
        let writes = outside.iter().filter(|message| matches!(message, Message::Write(_))).count();
        self.abandoned.fetch_add(writes as u64, Relaxed);
    }

    /// Returns the number and the bytes of the queued messages.
    pub(super) fn usage(&self) -> Usage {
        self.waiting().lines.queued()
    }

    /// Closes the queue and drops its messages: the writer has ended.
    pub(super) fn abandon(&self) {
        self.close();
        // Each is dropped without the lock.
        while let Some(message) = self.next(0) {
            drop(message);
        }
    }
}
