//! The mailbox of a connection: the state that its actor shares with other tasks.
//!
//! Other tasks reach the mailbox through handles. They put frames into its [`Outbox`], send signals to the actor, wake the actor, and
//! read the [`ConnectionInfo`]. Bare [`PushQueues`](crate::PushQueues) have a mailbox without a connection: its outbox works, and
//! signals have no effect.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use crate::memory::{Account, Holder};
use crate::outbox::Outbox;
use crate::session::ConnectionInfo;
use crate::sync::lock;
use crate::{ConnectionId, FrameLike, PushError, PushPolicy, PushPriority, ReplyTicket, Slot};

pub(crate) struct Mailbox<F> {
    pub(crate) outbox: Outbox<F>,
    /// `None` for bare queues.
    info: Option<Arc<ConnectionInfo>>,
    /// The flags [`CLOSE`], [`WAKE`], [`OVER_LIMIT`] and [`ALARM`]. They share a word, so that the actor checks all of them with one
    /// load per turn.
    signals: AtomicU8,
    /// Wakes the actor.
    waker: Mutex<Option<Waker>>,
    /// The number of handles that can push.
    handles: AtomicUsize,
}

/// A handle has closed the connection. Never cleared.
const CLOSE: u8 = 1;
/// A handle has requested [`Protocol::on_wake`](crate::Protocol::on_wake). The actor clears the flag before it runs the hook, so a
/// later request sets it again and leads to another run.
const WAKE: u8 = 2;
/// The memory limit is exceeded, and the connection must be closed. The actor clears the flag.
const OVER_LIMIT: u8 = 4;
/// The alarm of the connection has fired. The actor clears the flag when it has nothing else to do.
const ALARM: u8 = 8;

impl<F: FrameLike> Mailbox<F> {
    pub(crate) fn new(outbox: Outbox<F>, info: Option<Arc<ConnectionInfo>>) -> Self {
        Self { outbox, info, signals: AtomicU8::new(0), waker: Mutex::new(None), handles: AtomicUsize::new(0) }
    }

    pub(crate) fn info(&self) -> Option<&Arc<ConnectionInfo>> {
        self.info.as_ref()
    }

    /// Returns the number of the request that a ticket names. Zero if there is no ticket, or if it belongs to another connection.
    fn request(&self, after: Option<ReplyTicket>) -> u64 {
        let own = after.filter(|ticket| self.info().is_some_and(|info| info.id == ticket.connection));
        own.map_or(0, |ticket| ticket.request)
    }

    /// Queues a frame without waiting. If there is no capacity, applies the policy.
    pub(crate) fn push_or_drop(
        &self,
        frame: F,
        priority: PushPriority,
        policy: PushPolicy,
        after: Option<ReplyTicket>,
    ) -> Result<(), PushError> {
        let pushed = self.outbox.push_or_drop(frame, priority, policy, self.request(after));
        pushed.map(|must_wake| self.wake_if(must_wake))
    }

    /// Queues a frame of a slot at the end of the low lane.
    pub(crate) fn push_next(&self, slot: Slot, frame: F, after: Option<ReplyTicket>) -> Result<(), PushError> {
        self.outbox.push_next(slot, frame, self.request(after)).map(|must_wake| self.wake_if(must_wake))
    }

    /// Puts a frame into a slot, replacing an unsent one.
    pub(crate) fn push_latest(&self, slot: Slot, frame: F, after: Option<ReplyTicket>) -> Result<(), PushError> {
        self.outbox.push_latest(slot, frame, self.request(after)).map(|must_wake| self.wake_if(must_wake))
    }

    /// Removes all frames of a slot. Returns whether there were any.
    pub(crate) fn clear_slot(&self, slot: Slot) -> bool {
        let (has_removed, must_wake) = self.outbox.clear_slot(slot);
        self.wake_if(must_wake);
        has_removed
    }

    /// Wakes the actor if `must_wake` is true.
    pub(crate) fn wake_if(&self, must_wake: bool) {
        if must_wake {
            self.wake();
        }
    }

    /// Wakes the actor.
    pub(crate) fn wake(&self) {
        // Not under the lock, because a woken task may run immediately.
        let waker = lock(&self.waker).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Sets the waker of the actor. The actor removes the waker when it ends, because a waker keeps the whole task alive.
    pub(crate) fn set_waker(&self, waker: Option<Waker>) {
        let before = std::mem::replace(&mut *lock(&self.waker), waker);
        drop(before);
    }

    /// Closes the connection after all queued frames and this last frame have been written. Only the first call has an effect.
    pub(crate) fn close(&self, last: Option<F>) {
        if self.outbox.finish(last) {
            self.signals.fetch_or(CLOSE, SeqCst);
            self.wake();
        }
    }

    /// Requests a run of [`Protocol::on_wake`](crate::Protocol::on_wake). Requests before the next run are coalesced.
    pub(crate) fn request_wake(&self) {
        // Writes even if the flag is set, so that the hook sees everything that was written before the request.
        if self.signals.fetch_or(WAKE, SeqCst) & WAKE == 0 {
            self.wake();
        }
    }

    /// Fires the alarm of the connection.
    pub(crate) fn fire_alarm(&self) {
        self.signals.fetch_or(ALARM, SeqCst);
        self.wake();
    }

    /// Whether there is a signal other than an alarm.
    pub(crate) fn has_signals(&self) -> bool {
        self.signals.load(SeqCst) & !ALARM != 0
    }

    /// Whether a handle has closed the connection.
    pub(crate) fn is_close_requested(&self) -> bool {
        self.signals.load(SeqCst) & CLOSE != 0
    }

    /// Clears the wake request. Returns whether there was one.
    pub(crate) fn take_wake_request(&self) -> bool {
        self.take(WAKE)
    }

    /// Clears the signal of the memory limit. Returns whether it was set.
    pub(crate) fn take_over_limit(&self) -> bool {
        self.take(OVER_LIMIT)
    }

    /// Clears the signal of the alarm. Returns whether it was set.
    pub(crate) fn take_alarm(&self) -> bool {
        self.take(ALARM)
    }

    fn take(&self, signal: u8) -> bool {
        self.signals.load(SeqCst) & signal != 0 && self.signals.fetch_and(!signal, SeqCst) & signal != 0
    }

    pub(crate) fn add_handle(&self) {
        self.handles.fetch_add(1, Relaxed);
    }

    /// Removes a handle. Wakes the receiver of the queues if it was the last one.
    pub(crate) fn remove_handle(&self) {
        if self.handles.fetch_sub(1, SeqCst) == 1 {
            self.wake();
        }
    }

    pub(crate) fn has_handles(&self) -> bool {
        self.handles.load(SeqCst) > 0
    }
}

impl<F: FrameLike> Holder for Mailbox<F> {
    fn account(&self) -> Option<(ConnectionId, &Account)> {
        self.info().map(|info| (info.id, &info.account))
    }

    fn close_for_memory(&self) {
        self.signals.fetch_or(OVER_LIMIT, SeqCst);
        self.wake();
    }
}
