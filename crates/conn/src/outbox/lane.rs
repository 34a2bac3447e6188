//! A lane of an outbox: frames of one priority, bounded by their number and their bytes.
//!
//! The free capacity is counted under the lock of the outbox, which a push takes anyway. While a pusher waits for capacity, all
//! of it is in semaphores instead: waiters are served in order, may be cancelled, and learn at once that the connection has
//! closed. When the last waiter has left, the rest returns to the plain counters.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::{AcquireError, Semaphore};

use crate::Slot;

/// With so many places a lane begins; an idle one keeps them.
const FIRST: usize = 8;

pub(super) struct Lane<F> {
    frames: VecDeque<Queued<F>>,
    /// What they weigh.
    bytes: usize,
    /// None of it, while there is a line.
    room: Room,
    line: Option<Arc<Line>>,
    /// How many use the line. It is there while there are any.
    users: usize,
}

/// A frame in a lane, and what it weighs there.
pub(super) struct Queued<F> {
    pub(super) frame: F,
    pub(super) weight: u32,
    /// The slot that it belongs to, if it does.
    pub(super) slot: Option<Slot>,
}

#[derive(Clone, Copy)]
struct Room {
    frames: usize,
    bytes: usize,
}

/// Those who wait for room.
pub(super) struct Line {
    frames: Semaphore,
    bytes: Semaphore,
}

impl<F> Lane<F> {
    pub(super) fn new(frames: usize, bytes: usize) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, room: Room { frames, bytes }, line: None, users: 0 }
    }

    /// Takes room for a frame of that weight, if there is room that nobody waits for.
    pub(super) fn try_reserve(&mut self, weight: u32) -> bool {
        let bytes = weight as usize;
        if let Some(line) = &self.line {
            return line.try_reserve(weight);
        }
        let fits = self.room.frames > 0 && self.room.bytes >= bytes;
        if fits {
            self.room.frames -= 1;
            self.room.bytes -= bytes;
        }
        fits
    }

    /// Appends a frame that has its room.
    pub(super) fn push(&mut self, queued: Queued<F>) {
        if self.frames.capacity() == 0 {
            self.frames.reserve_exact(FIRST);
        }
        self.bytes += queued.weight as usize;
        self.frames.push_back(queued);
    }

    /// Takes the first frame. Its room is to be [given back](Self::give_back).
    pub(super) fn pop(&mut self) -> Option<Queued<F>> {
        let queued = self.frames.pop_front()?;
        self.bytes -= queued.weight as usize;
        Some(queued)
    }

    /// Takes out the frames of a slot. Their room is to be [given back](Self::give_back).
    pub(super) fn take_back(&mut self, slot: Slot) -> Vec<Queued<F>> {
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

    /// Gives back the capacity of frames that were taken. If pushers wait for it, returns their line instead: the capacity is to be
    /// [added](Line::add) to it without the lock, and then the line is to be [left](Self::leave).
    pub(super) fn give_back(&mut self, frames: usize, bytes: usize) -> Option<Arc<Line>> {
        if self.line.is_some() {
            return Some(self.join());
        }
        self.room.frames += frames;
        self.room.bytes += bytes;
        None
    }

    /// Uses the line until it is [left](Self::leave).
    pub(super) fn join(&mut self) -> Arc<Line> {
        self.users += 1;
        let Room { frames, bytes } = &mut self.room;
        let line = self.line.get_or_insert_with(|| {
            let (frames, bytes) = (std::mem::take(frames), std::mem::take(bytes));
            Arc::new(Line { frames: Semaphore::new(frames), bytes: Semaphore::new(bytes) })
        });
        Arc::clone(line)
    }

    pub(super) fn leave(&mut self) {
        self.users -= 1;
        if self.users == 0
            && let Some(line) = self.line.take()
        {
            // Whoever waited has left, with the room that it took or without.
            self.room.frames += line.frames.forget_permits(usize::MAX);
            self.room.bytes += line.bytes.forget_permits(usize::MAX);
        }
    }

    pub(super) fn line(&self) -> Option<Arc<Line>> {
        self.line.clone()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// How many frames there are, and what they weigh.
    pub(super) fn queued(&self) -> (usize, usize) {
        (self.frames.len(), self.bytes)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = F> {
        self.bytes = 0;
        self.frames.drain(..).map(|queued| queued.frame)
    }

    /// Gives back memory when nothing is queued, but for a little.
    pub(super) fn shrink(&mut self) {
        if self.frames.is_empty() && self.frames.capacity() > FIRST {
            self.frames = VecDeque::new();
        }
    }
}

impl Line {
    /// Waits for room for a frame of that weight, and takes it.
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

    /// Nobody waits any more.
    pub(super) fn close(&self) {
        self.frames.close();
        self.bytes.close();
    }
}
