//! An outbox that takes nothing, in place of the real one.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Waker;

use crate::push::PushOptions;
use crate::{FrameLike, PushError, PushPriority, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    pub(crate) handles: AtomicUsize,
}

impl<F: FrameLike> Outbox<F> {
    pub(crate) fn new(options: Arc<PushOptions<F>>) -> Self {
        Self { options, handles: AtomicUsize::new(0) }
    }

    pub(crate) async fn push(&self, _: F, _: PushPriority) -> Result<(), PushError> {
        Err(PushError::Closed)
    }

    pub(crate) fn try_push(&self, frame: F, _: PushPriority) -> Result<(), (PushError, F)> {
        Err((PushError::Closed, frame))
    }

    pub(crate) fn push_latest(&self, _: Slot, _: F) -> Result<Option<F>, PushError> {
        Err(PushError::Closed)
    }

    pub(crate) fn wake(&self) {}

    pub(crate) fn register(&self, _: &Waker) {}

    pub(crate) fn is_ready(&self) -> bool {
        false
    }

    pub(crate) fn remain_ready(&self) {}

    pub(crate) fn take(&self, _: PushPriority, _: bool) -> Option<F> {
        None
    }

    pub(crate) fn is_closed(&self) -> bool {
        false
    }

    pub(crate) fn close(&self) {}

    pub(crate) fn options(&self) -> &PushOptions<F> {
        &self.options
    }
}
