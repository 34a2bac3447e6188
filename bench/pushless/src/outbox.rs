//! An outbox that takes nothing, in place of the real one. What time-outs and shutdowns need of it is as it is there.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use crate::push::PushOptions;
use crate::session::Facts;
use crate::{FrameLike, PushError, PushPolicy, PushPriority, ReplyTicket, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    facts: Option<Arc<Facts>>,
    rung: AtomicBool,
    actor: Mutex<Option<Waker>>,
    pub(crate) handles: AtomicUsize,
}

impl<F: FrameLike> Outbox<F> {
    pub(crate) fn new(options: Arc<PushOptions<F>>, facts: Option<Arc<Facts>>) -> Self {
        Self { options, facts, rung: AtomicBool::new(false), actor: Mutex::default(), handles: AtomicUsize::new(0) }
    }

    pub(crate) fn facts(&self) -> Option<&Facts> {
        self.facts.as_deref()
    }

    pub(crate) async fn push(&self, _: F, _: PushPriority) -> Result<(), PushError> {
        Err(PushError::Closed)
    }

    pub(crate) fn push_or_drop(
        &self,
        _: F,
        _: PushPriority,
        _: PushPolicy,
        _: Option<ReplyTicket>,
    ) -> Result<(), PushError> {
        Err(PushError::Closed)
    }

    pub(crate) fn push_latest(&self, _: Slot, _: F, _: Option<ReplyTicket>) -> Result<(), PushError> {
        Err(PushError::Closed)
    }

    pub(crate) fn push_next(&self, _: Slot, _: F, _: Option<ReplyTicket>) -> Result<(), PushError> {
        Err(PushError::Closed)
    }

    pub(crate) fn push_ahead(&self, _: F) {}

    pub(crate) fn wake(&self) {
        if let Some(waker) = &*self.actor.lock().expect("nobody panics here") {
            waker.wake_by_ref();
        }
    }

    pub(crate) fn request_wake(&self) {}

    pub(crate) fn shared_facts(&self) -> Option<Arc<Facts>> {
        self.facts.clone()
    }

    pub(crate) fn take_over_limit(&self) -> bool {
        false
    }

    pub(crate) fn has_signals(&self) -> bool {
        false
    }

    pub(crate) fn take_woken(&self) -> bool {
        false
    }

    pub(crate) fn ring(&self) {
        self.rung.store(true, SeqCst);
        self.wake();
    }

    pub(crate) fn is_rung(&self) -> bool {
        self.rung.load(SeqCst) && self.rung.swap(false, SeqCst)
    }

    pub(crate) fn register(&self, waker: Option<Waker>) {
        *self.actor.lock().expect("nobody panics here") = waker;
    }

    pub(crate) fn is_ready(&self) -> bool {
        false
    }

    pub(crate) fn lower(&self) -> bool {
        false
    }

    pub(crate) fn raise(&self) {}

    pub(crate) fn is_tied(&self) -> bool {
        false
    }

    pub(crate) fn release(&self, _: u64) {}

    pub(crate) fn take(&self, _: &[PushPriority], _: &mut bool, _: u64) -> Option<(PushPriority, F)> {
        None
    }

    pub(crate) fn queued(&self) -> (usize, usize) {
        (0, 0)
    }

    pub(crate) fn queued_bytes(&self) -> usize {
        0
    }

    pub(crate) fn queued_bytes_besides(&self, _: Slot) -> usize {
        0
    }

    pub(crate) fn drained(&self) -> bool {
        false
    }

    pub(crate) fn take_back(&self, _: Slot) -> bool {
        false
    }

    pub(crate) fn is_closed(&self) -> bool {
        false
    }

    pub(crate) fn refuse(&self) {}

    pub(crate) fn shrink(&self) {}

    pub(crate) fn leave(&self, _: Option<F>) {}

    pub(crate) fn is_leaving(&self) -> bool {
        false
    }

    pub(crate) fn last(&self) -> Option<F> {
        None
    }

    pub(crate) fn close(&self) {}

    pub(crate) fn lose(&self, _: F) {}
}

/// Without a limit of memory, none is ever closed.
impl<F: FrameLike> crate::memory::Holder for Outbox<F> {
    fn account(&self) -> Option<(crate::ConnectionId, &crate::memory::Account)> {
        None
    }

    fn close_for_memory(&self) {}
}
