//! The queue of frames that were decoded and wait until their requests may be handled.

use std::collections::VecDeque;

use crate::FrameLike;

/// Decoded frames that wait for their turn. An empty queue has no allocation.
///
/// A frame is a slice of the input buffer and keeps the whole buffer in memory. Input that is consumed after a frame without adding
/// another one therefore counts as part of the frame, so that a few small frames cannot keep much memory.
pub(super) struct Parked<F>(Option<Box<ParkedFrames<F>>>);

struct ParkedFrames<F> {
    /// Each frame with the number of bytes that it counts as.
    frames: VecDeque<(F, usize)>,
    bytes: usize,
}

impl<F: FrameLike> Parked<F> {
    /// Appends a frame. The size of its queue entry counts too, so that empty frames are limited.
    pub(super) fn push(&mut self, frame: F) {
        let parked = self.0.get_or_insert_with(|| Box::new(ParkedFrames { frames: VecDeque::new(), bytes: 0 }));
        let bytes = frame.size().saturating_add(size_of::<(F, usize)>());
        parked.bytes += bytes;
        parked.frames.push_back((frame, bytes));
    }

    /// Counts input that was consumed after the last frame as part of that frame.
    pub(super) fn add_consumed(&mut self, bytes: usize) {
        if let Some(parked) = &mut self.0
            && let Some(last) = parked.frames.back_mut()
        {
            last.1 += bytes;
            parked.bytes += bytes;
        }
    }

    pub(super) fn pop(&mut self) -> Option<F> {
        let parked = self.0.as_mut()?;
        let (frame, bytes) = parked.frames.pop_front()?;
        parked.bytes -= bytes;
        if parked.frames.is_empty() {
            self.0 = None;
        }
        Some(frame)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |parked| parked.bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn clear(&mut self) {
        self.0 = None;
    }
}

impl<F> Default for Parked<F> {
    fn default() -> Self {
        Self(None)
    }
}
