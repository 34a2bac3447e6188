//! Frames that were read and wait until their requests may be handled.

use std::collections::VecDeque;

use crate::FrameLike;

/// Whole frames that wait until their requests may be handled, so that what the codec answers by itself need not. It takes no
/// room while there are none.
pub(super) struct Parked<F>(Option<Box<(VecDeque<F>, usize)>>);

impl<F: FrameLike> Parked<F> {
    /// What a frame counts for, in case it has no bytes more than its place.
    pub(super) fn weight(frame: &F) -> usize {
        frame.size().saturating_add(size_of::<F>())
    }

    pub(super) fn push(&mut self, frame: F) {
        let (frames, bytes) = &mut **self.0.get_or_insert_default();
        *bytes += Self::weight(&frame);
        frames.push_back(frame);
    }

    pub(super) fn pop(&mut self) -> Option<F> {
        let (frames, bytes) = &mut **self.0.as_mut()?;
        let frame = frames.pop_front()?;
        *bytes -= Self::weight(&frame).min(*bytes);
        if frames.is_empty() {
            self.0 = None;
        }
        Some(frame)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |parked| parked.1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

impl<F> Default for Parked<F> {
    fn default() -> Self {
        Self(None)
    }
}
