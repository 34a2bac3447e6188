//! The queue of writes, from any number of threads to the writer.
//!
//! A write that exceeds the capacity is *held back*: it keeps its order among the writes of its owner, is queued when capacity is
//! free, and is canceled if its [`Pending`] is dropped before that.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Instant;

use tokio::sync::oneshot;

use super::WriteOptions;
use super::admission::{Admission, Bounds, Owner, Ticket, Usage};
use super::fair_queue::Flow;
use super::pending::{Pending, WriteError};
use super::reply::{ReplySender, reply};
use crate::engine::{Backup, Checkpoint, EngineError};
use crate::lock::lock;
use crate::{Cause, Draft, State, StoreError};

/// A message to the writer.
pub(super) enum Message {
    Write(Box<dyn Job>),
    Checkpoint(oneshot::Sender<Result<(Checkpoint, State), EngineError>>),
    Backup(PathBuf, oneshot::Sender<Result<Backup, EngineError>>),
    /// The checkpoint that the writer started has ended.
    CheckpointEnded,
    /// Another thread has changed the counters of the engine.
    RefreshStats,
}

/// A write. The writer calls `run` once, and then `send_result` once.
pub(super) trait Job: Send {
    /// Changes the draft. Returns whether it succeeded.
    fn run(&mut self, draft: &mut Draft) -> bool;

    /// Replaces the result with an error.
    fn reject(&mut self, error: WriteError);

    fn cause(&self) -> Cause;

    /// Sends the result to the caller, or the error if the write was not stored. Returns the waker of the caller, which must be woken.
    #[must_use]
    fn send_result(self: Box<Self>, stored: Result<(), WriteError>) -> Option<Waker>;
}

struct WriteJob<F, T> {
    work: Option<F>,
    result: Option<Result<T, WriteError>>,
    reply: ReplySender<Result<T, WriteError>>,
    cause: Cause,
}

impl<F, T> Job for WriteJob<F, T>
where
    F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send,
    T: Send,
{
    fn run(&mut self, draft: &mut Draft) -> bool {
        let Some(work) = self.work.take() else { return false };
        // After a panic the draft is rolled back or reset.
        let result = catch_unwind(AssertUnwindSafe(|| work(draft)));
        let result = result.map_err(|_| WriteError::Panicked).and_then(|result| result.map_err(WriteError::from));
        let is_ok = result.is_ok();
        self.result = Some(result);
        is_ok
    }

    fn reject(&mut self, error: WriteError) {
        self.result = Some(Err(error));
    }

    fn cause(&self) -> Cause {
        self.cause
    }

    fn send_result(self: Box<Self>, stored: Result<(), WriteError>) -> Option<Waker> {
        let Self { result, reply, .. } = *self;
        reply.send(stored.and_then(|()| result.unwrap_or(Err(WriteError::Closed))))
    }
}

/// A bounded queue of messages to the writer, fair between owners.
pub(super) struct Queue {
    state: Mutex<QueueState>,
    arrived: Condvar,
    canceled_writes: AtomicU64,
}

struct QueueState {
    /// Writes, checkpoints and backups.
    admission: Admission<Message>,
    /// Signals, which are handled first. Each checkpoint sends at most one.
    signals: VecDeque<Message>,
    is_closed: bool,
    /// Whether the writer sleeps and must be woken.
    is_idle: bool,
}

impl QueueState {
    fn pop(&mut self, cost: u64) -> Option<Message> {
        self.admission.finish(cost);
        self.signals.pop_front().or_else(|| self.admission.pop())
    }
}

/// Cancels a held-back write when dropped, unless the write has been queued since.
pub(super) struct HeldBack {
    queue: Arc<Queue>,
    owner: Owner,
    ticket: Ticket,
}

impl Drop for HeldBack {
    fn drop(&mut self) {
        let canceled = self.queue.state().admission.cancel(self.owner, self.ticket);
        if canceled.is_some() {
            self.queue.canceled_writes.fetch_add(1, Relaxed);
        }
    }
}

/// The result of waiting for a message.
pub(super) enum Received {
    Message(Message),
    /// No message arrived in time.
    TimedOut,
    /// The queue is closed and empty.
    Closed,
}

impl Queue {
    /// The flow of requests by the embedding program.
    const PROGRAM: Flow = Flow { owner: 0, origin: 0 };

    pub(super) fn new(bounds: Bounds) -> Self {
        let state = QueueState {
            admission: Admission::new(bounds),
            signals: VecDeque::new(),
            is_closed: false,
            is_idle: false,
        };
        Self { state: Mutex::new(state), arrived: Condvar::new(), canceled_writes: AtomicU64::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// Submits a write.
    pub(super) fn write<F, T>(self: &Arc<Self>, options: WriteOptions, work: F) -> Pending<T>
    where
        F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let WriteOptions { cause, owner, bytes } = options;
        let (reply, receiver) = reply();
        let job = Message::Write(Box::new(WriteJob { work: Some(work), result: None, reply, cause }));
        let ticket = self.submit(Flow { owner, origin: cause.origin }, bytes, job);
        let held_back = ticket.map(|ticket| HeldBack { queue: Arc::clone(self), owner, ticket });
        Pending::new(held_back, receiver)
    }

    /// Submits a request of the embedding program, in order with its writes. Each caller blocks until the reply, so it has at most one
    /// request in the queue.
    pub(super) fn request(&self, message: Message) {
        self.submit(Self::PROGRAM, 0, message);
    }

    fn submit(&self, flow: Flow, bytes: usize, message: Message) -> Option<Ticket> {
        self.add(|state| state.admission.push(flow, bytes, message))?
    }

    /// Sends a signal, which is handled before all other messages.
    pub(super) fn signal(&self, message: Message) {
        self.add(|state| state.signals.push_back(message));
    }

    /// Adds a message and wakes the writer. If the queue is closed, the message is dropped, which notifies its caller.
    fn add<T>(&self, add: impl FnOnce(&mut QueueState) -> T) -> Option<T> {
        let mut state = self.state();
        if state.is_closed {
            // The closure of a write may own the last handle of the store, so it is dropped after the lock is released.
            drop(state);
            return None;
        }
        let added = add(&mut state);
        if std::mem::take(&mut state.is_idle) {
            drop(state);
            self.arrived.notify_one();
        }
        Some(added)
    }

    /// Returns the number of writes that were canceled before they were queued.
    pub(super) fn canceled_writes(&self) -> u64 {
        self.canceled_writes.load(Relaxed)
    }

    /// Removes and returns the next message, if any. `cost` is the work of the last message, in nanoseconds.
    pub(super) fn next(&self, cost: u64) -> Option<Message> {
        self.state().pop(cost)
    }

    /// Waits for the next message until the given time. `cost` is the work of the last message, in nanoseconds.
    pub(super) fn wait(&self, mut cost: u64, until: Option<Instant>) -> Received {
        let mut state = self.state();
        loop {
            if let Some(message) = state.pop(std::mem::take(&mut cost)) {
                return Received::Message(message);
            }
            if state.is_closed {
                return Received::Closed;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Received::TimedOut;
            }
            state.is_idle = true;
            state = match left {
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
            state.is_idle = false;
        }
    }

    /// Closes the queue. Queued messages are still handled. Held-back writes are dropped, which notifies their callers.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        let held_back = state.admission.cancel_all();
        drop(state);
        self.arrived.notify_one();
        let writes = held_back.iter().filter(|message| matches!(message, Message::Write(_))).count();
        self.canceled_writes.fetch_add(writes as u64, Relaxed);
    }

    /// Returns the number and the bytes of the queued messages.
    pub(super) fn usage(&self) -> Usage {
        self.state().admission.queued()
    }

    /// Closes the queue and drops its messages. Called when the writer has ended.
    pub(super) fn close_and_clear(&self) {
        self.close();
        // Each message is dropped after the lock is released.
        while let Some(message) = self.next(0) {
            drop(message);
        }
    }
}
