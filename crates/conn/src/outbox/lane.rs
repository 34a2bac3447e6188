//! A lane of an outbox: frames of one priority, bounded by their number and their bytes.
//!
//! The free capacity is a pair of counters under the lock of the outbox, which a push takes anyway. While pushers wait for capacity,
//! it is moved to a pair of semaphores, so that waiters are served in order, may be cancelled, and get an error at once when the
//! connection closes. When the semaphores are no longer used, the free capacity is moved back to the counters.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::{AcquireError, Semaphore};

use crate::Slot;

/// The first allocation of a lane, in frames. An idle lane keeps it.
const INITIAL_CAPACITY: usize = 8;

pub(super) struct Lane<F> {
    frames: VecDeque<Queued<F>>,
    /// The sum of the weights of the frames.
    bytes: usize,
    /// The free capacity. Zero while there are `waiters`, which hold it then.
    free: Capacity,
    /// `None` if `waiter_refs` is zero.
    waiters: Option<Arc<Waiters>>,
    /// The number of calls of `acquire_waiters` without a `release_waiters`.
    waiter_refs: usize,
}

/// A frame in a lane.
pub(super) struct Queued<F> {
    pub(super) frame: F,
    /// The number of bytes that the frame takes up in the lane.
    pub(super) weight: u32,
    /// The slot that the frame belongs to, if any.
    pub(super) slot: Option<Slot>,
}

#[derive(Clone, Copy)]
struct Capacity {
    frames: usize,
    bytes: usize,
}

/// The free capacity of a lane while pushers wait for it.
pub(super) struct Waiters {
    frames: Semaphore,
    bytes: Semaphore,
}

impl<F> Lane<F> {
    pub(super) fn new(frames: usize, bytes: usize) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, free: Capacity { frames, bytes }, waiters: None, waiter_refs: 0 }
    }

    /// Reserves capacity for a frame of this weight, unless the lane is full or pushers wait.
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

    /// Gives back the capacity of frames that were taken. If pushers wait, does nothing but return the waiters: the caller must
    /// [add](Waiters::add) the capacity to them without the lock, and then call [`release_waiters`](Self::release_waiters).
    pub(super) fn give_back(&mut self, frames: usize, bytes: usize) -> Option<Arc<Waiters>> {
        if self.waiters.is_some() {
            return Some(self.acquire_waiters());
        }
        self.free.frames += frames;
        self.free.bytes += bytes;
        None
    }

    /// Returns the waiters. Creates them if there are none, and moves the free capacity to them.
    pub(super) fn acquire_waiters(&mut self) -> Arc<Waiters> {
        self.waiter_refs += 1;
        let Capacity { frames, bytes } = &mut self.free;
        let waiters = self.waiters.get_or_insert_with(|| {
            let (frames, bytes) = (std::mem::take(frames), std::mem::take(bytes));
            Arc::new(Waiters { frames: Semaphore::new(frames), bytes: Semaphore::new(bytes) })
        });
        Arc::clone(waiters)
    }

    /// Ends the use of the waiters. The last use moves the free capacity back to the lane.
    pub(super) fn release_waiters(&mut self) {
        self.waiter_refs -= 1;
        if self.waiter_refs == 0
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

    /// Returns the number and the total weight of the frames.
    pub(super) fn totals(&self) -> (usize, usize) {
        (self.frames.len(), self.bytes)
    }

    /// Removes all frames. Their capacity is not given back.
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
    /// Waits for the capacity of a frame of this weight, and reserves it.
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
