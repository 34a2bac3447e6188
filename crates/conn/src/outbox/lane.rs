//! A lane of an outbox: frames of one priority, bounded by their number and their bytes.
//!
//! The free capacity is counted under the lock of the outbox, which a push takes anyway. While a pusher waits for capacity, all
//! of it is in semaphores instead: waiters are served in order, may be cancelled, and learn at once that the connection has
//! closed. When the last waiter has left, the rest returns to the plain counters.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::{AcquireError, Semaphore};

use crate::Slot;

/// The first allocation of a lane, in frames. An idle lane keeps it.
const INITIAL_CAPACITY: usize = 8;

pub(super) struct Lane<F> {
    frames: VecDeque<Queued<F>>,
    /// The sum of their weights.
    bytes: usize,
    /// Zero while there are waiters: then they have it.
    free: Capacity,
    waiters: Option<Arc<Waiters>>,
    /// The number of users of `waiters`, which exists while there are any.
    users: usize,
}

/// A frame in a lane, with the bytes that it takes up there.
pub(super) struct Queued<F> {
    pub(super) frame: F,
    pub(super) weight: u32,
    /// The slot that it belongs to, if any.
    pub(super) slot: Option<Slot>,
}

#[derive(Clone, Copy)]
struct Capacity {
    frames: usize,
    bytes: usize,
}

/// Pushers that wait for capacity, with all of the lane's free capacity.
pub(super) struct Waiters {
    frames: Semaphore,
    bytes: Semaphore,
}

impl<F> Lane<F> {
    pub(super) fn new(frames: usize, bytes: usize) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, free: Capacity { frames, bytes }, waiters: None, users: 0 }
    }

    /// Reserves capacity for a frame of that weight, unless the lane is full or pushers wait.
    pub(super) fn try_reserve(&mut self, weight: u32) -> bool {
        let bytes = weight as usize;
        if let Some(waiters) = &self.waiters {
            return waiters.try_reserve(weight);
        }
        let fits = self.free.frames > 0 && self.free.bytes >= bytes;
        if fits {
            self.free.frames -= 1;
            self.free.bytes -= bytes;
        }
        fits
    }

    /// Appends a frame whose capacity is reserved.
    pub(super) fn push(&mut self, queued: Queued<F>) {
        if self.frames.capacity() == 0 {
            self.frames.reserve_exact(INITIAL_CAPACITY);
        }
        self.bytes += queued.weight as usize;
        self.frames.push_back(queued);
    }

    /// Takes the first frame. The caller must [give back](Self::give_back) its capacity.
    pub(super) fn pop(&mut self) -> Option<Queued<F>> {
        let queued = self.frames.pop_front()?;
        self.bytes -= queued.weight as usize;
        Some(queued)
    }

    /// Removes the frames of a slot. The caller must [give back](Self::give_back) their capacity.
    pub(super) fn clear_slot(&mut self, slot: Slot) -> Vec<Queued<F>> {
        let mut taken = Vec::new();
        if self.frames.iter().any(|queued| queued.slot == Some(slot)) {
            for queued in std::mem::take(&mut self.frames) {
                if queued.slot == Some(slot) {
                    self.bytes -= queued.weight as usize;
                    taken.push(queued);
                } else {
                    self.frames.push_back(queued);
                }
            }
        }
        taken
    }

    /// Gives back the capacity of frames that were taken. If pushers wait for it, returns them instead: the caller must
    /// [add](Waiters::add) the capacity without the lock, and then call [`leave`](Self::leave).
    pub(super) fn give_back(&mut self, frames: usize, bytes: usize) -> Option<Arc<Waiters>> {
        if self.waiters.is_some() {
            return Some(self.join());
        }
        self.free.frames += frames;
        self.free.bytes += bytes;
        None
    }

    /// Moves the free capacity to the waiters until the last user has [left](Self::leave).
    pub(super) fn join(&mut self) -> Arc<Waiters> {
        self.users += 1;
        let Capacity { frames, bytes } = &mut self.free;
        let waiters = self.waiters.get_or_insert_with(|| {
            let (frames, bytes) = (std::mem::take(frames), std::mem::take(bytes));
            Arc::new(Waiters { frames: Semaphore::new(frames), bytes: Semaphore::new(bytes) })
        });
        Arc::clone(waiters)
    }

    pub(super) fn leave(&mut self) {
        self.users -= 1;
        if self.users == 0
            && let Some(waiters) = self.waiters.take()
        {
            self.free.frames += waiters.frames.forget_permits(usize::MAX);
            self.free.bytes += waiters.bytes.forget_permits(usize::MAX);
        }
    }

    pub(super) fn waiters(&self) -> Option<Arc<Waiters>> {
        self.waiters.clone()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the number of frames, and their weight.
    pub(super) fn queued(&self) -> (usize, usize) {
        (self.frames.len(), self.bytes)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = F> {
        self.bytes = 0;
        self.frames.drain(..).map(|queued| queued.frame)
    }

    /// Releases the memory of an empty lane, except for the first allocation.
    pub(super) fn shrink(&mut self) {
        if self.frames.is_empty() && self.frames.capacity() > INITIAL_CAPACITY {
            self.frames = VecDeque::new();
        }
    }
}

impl Waiters {
    /// Waits for capacity for a frame of that weight, and reserves it.
    pub(super) async fn reserve(&self, weight: u32) -> Result<(), AcquireError> {
        let frame = self.frames.acquire().await?;
        let bytes = self.bytes.acquire_many(weight).await?;
        frame.forget();
        bytes.forget();
        Ok(())
    }

    fn try_reserve(&self, weight: u32) -> bool {
        let Ok(frame) = self.frames.try_acquire() else { return false };
        let Ok(bytes) = self.bytes.try_acquire_many(weight) else { return false };
        frame.forget();
        bytes.forget();
        true
    }

    /// Gives back the capacity of frames. Pushers that are woken may run at once.
    pub(super) fn add(&self, frames: usize, bytes: usize) {
        self.frames.add_permits(frames);
        self.bytes.add_permits(bytes);
    }

    /// Fails all pushers that wait.
    pub(super) fn close(&self) {
        self.frames.close();
        self.bytes.close();
    }
}
