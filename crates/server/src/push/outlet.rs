//! The way out of a connection, for whoever pushes to it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidewire_conn::{CloseCode, Message, PushError, PushHandle, PushPolicy, PushPriority, ReplyTicket, Slot};

use crate::Backpressure;
use crate::metrics::counters::Counters;
use crate::state::Core;

/// How long a client may take nothing of what it is sent while there is more than there may be.
const STALL: Duration = Duration::from_secs(3);

/// The way out of a connection.
///
/// Whatever is pushed waits for the reply to the last request that could have caused it: the last write or subscription that the
/// connection asked for. That request was handled before what it did could be seen, so a push that shows it finds the ticket here.
#[derive(Debug)]
pub(crate) struct Outlet {
    pub(crate) handle: PushHandle<Message>,
    /// The last request that may cause pushes, until it is answered.
    cause: Mutex<Option<ReplyTicket>>,
    /// How many subscriptions hold something back.
    held_back: AtomicUsize,
    /// Something could not be pushed since all was sent the last time.
    is_full: AtomicBool,
    /// A task sees to it that the client reads.
    is_minded: AtomicBool,
    /// How often all was sent.
    drained: AtomicU64,
    /// Above so many bytes that wait, deltas are held back and requests are not run.
    high_water: usize,
    /// When the session ends to which the subscriptions are owed, in milliseconds; never if it is the greatest number.
    expires_at: AtomicU64,
}

impl Outlet {
    pub(crate) fn new(handle: PushHandle<Message>, backpressure: Backpressure) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of it"
        )]
        let high_water =
            (backpressure.max_buffered_bytes as f64 * backpressure.high_water_mark.clamp(0.0, 1.0)) as usize;
        Self {
            handle,
            cause: Mutex::new(None),
            held_back: AtomicUsize::new(0),
            is_full: AtomicBool::new(false),
            is_minded: AtomicBool::new(false),
            drained: AtomicU64::new(0),
            high_water,
            expires_at: AtomicU64::new(u64::MAX),
        }
    }

    fn cause(&self) -> MutexGuard<'_, Option<ReplyTicket>> {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on pushes come after the reply to this request.
    pub(crate) fn tie(&self, ticket: ReplyTicket) {
        *self.cause() = Some(ticket);
    }

    /// Pushes wait no longer for a request that is answered.
    pub(crate) fn untie(&self, is_answered: impl FnOnce(ReplyTicket) -> bool) {
        let _ = self.cause().take_if(|ticket| is_answered(*ticket));
    }

    /// Whether so much waits that nothing should be added.
    pub(crate) fn is_above_mark(&self) -> bool {
        self.handle.queued_bytes() > self.high_water
    }

    /// Pushes the newest result of a subscription, in place of the one that may wait.
    pub(crate) fn push_latest(&self, slot: u64, message: Message) -> Result<(), PushError> {
        let ticket = *self.cause();
        match ticket {
            Some(ticket) => self.handle.after(ticket).push_latest(Slot(slot), message),
            None => self.handle.push_latest(Slot(slot), message),
        }
    }

    /// Pushes something that comes after all that was pushed this way before.
    pub(crate) fn push_next(&self, message: Message) -> Result<(), PushError> {
        let (priority, policy) = (PushPriority::Low, PushPolicy::ReturnErrorIfFull);
        let ticket = *self.cause();
        match ticket {
            Some(ticket) => self.handle.after(ticket).try_push(message, priority, policy),
            None => self.handle.try_push(message, priority, policy),
        }
    }

    /// Something could not be pushed. From now on it is seen to that the client reads: one that takes nothing for a while is let go.
    pub(crate) fn mind_the_reader(self: &Arc<Self>, core: &Arc<Core>) {
        self.is_full.store(true, SeqCst);
        if self.is_minded.swap(true, SeqCst) {
            return;
        }
        // A server that ends is not held by who minds its clients.
        let (outlet, minded) = (Arc::clone(self), Arc::downgrade(core));
        core.runtime.spawn(async move {
            loop {
                let before = (outlet.drained.load(SeqCst), outlet.handle.counters().bytes_out);
                tokio::time::sleep(STALL).await;
                let is_drained = outlet.drained.load(SeqCst) != before.0;
                if outlet.handle.is_closed() || is_drained && outlet.leave_alone() {
                    return;
                }
                if !is_drained && outlet.handle.counters().bytes_out == before.1 {
                    if let Some(core) = minded.upgrade() {
                        outlet.give_up(&core.counters);
                    }
                    return;
                }
            }
        });
    }

    /// Whether the client need not be minded any longer, as far as anybody knows.
    fn leave_alone(&self) -> bool {
        if self.is_full.load(SeqCst) {
            return false;
        }
        self.is_minded.store(false, SeqCst);
        // Whoever found it minded a moment ago relies on it.
        !self.is_full.load(SeqCst) || self.is_minded.swap(true, SeqCst)
    }

    /// Whoever does not take what it is sent is let go.
    pub(crate) fn give_up(&self, counters: &Counters) {
        if !self.handle.is_closed() {
            counters.slow_consumers.fetch_add(1, Relaxed);
            self.handle.close(Some(Message::close(CloseCode::new(4008), "slow_consumer")));
        }
    }

    /// Forgets the newest result of a subscription that has ended.
    pub(crate) fn take_back(&self, slot: u64) {
        self.handle.take_back(Slot(slot));
    }

    pub(crate) fn hold_back(&self) {
        self.held_back.fetch_add(1, SeqCst);
    }

    /// All that was pushed is sent.
    pub(crate) fn note_drained(&self) {
        self.is_full.store(false, SeqCst);
        self.drained.fetch_add(1, SeqCst);
    }

    /// Whether subscriptions hold something back for which there is room again; they are asked by whoever asks this.
    pub(crate) fn release(&self) -> bool {
        self.held_back.load(SeqCst) > 0 && !self.is_above_mark() && self.held_back.swap(0, SeqCst) > 0
    }

    /// Until when subscriptions may go on.
    pub(crate) fn set_expiry(&self, expires_at: Option<u64>) {
        self.expires_at.store(expires_at.unwrap_or(u64::MAX), Relaxed);
    }

    pub(crate) fn is_expired(&self, now: impl FnOnce() -> u64) -> bool {
        let expires_at = self.expires_at.load(Relaxed);
        expires_at != u64::MAX && expires_at <= now()
    }
}
