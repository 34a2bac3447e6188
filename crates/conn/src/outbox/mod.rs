//! The outbox of a connection: the queue of frames that other tasks push. It has a lane for each priority, and slots that hold the
//! newest frame of their kind.
//!
//! The outbox is shared by the actor, which takes frames from it, and by all pushers. Its queues are allocated by the first push.
//!
//! **Waking.** A pusher queues its frame under the lock, then sets the flag `ready`, and wakes the actor if the flag was clear. The
//! actor clears the flag *before* it takes the lock, so a frame that is queued after the actor has read the queues sets the flag
//! again. A pusher that finds the flag set need not wake the actor: the flag was set after the actor last cleared it, so the actor
//! will read the queues again. A connection without pushes pays one load per turn. The outbox has no reference to its actor: methods
//! that queue a frame return whether the actor must be woken.
//!
//! **Tied frames.** A frame that is tied to a reply must not be written before it. The frame is kept outside its lane, because in the
//! lane it would block other pushes until the reply is ready. When the actor has passed the reply to the codec, the frame moves to
//! the end of its lane. Its capacity in the lane is reserved when it is pushed. In addition to the newest frame, a slot keeps an
//! older one that is tied to an earlier reply.
//!
//! **Closing.** `closed` is set under the lock of the queues before they are emptied for the last time, and every push checks it under
//! the same lock. So nothing is queued afterwards, and every frame that was queued is written or counted as unsent.

mod lane;
mod queues;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use self::lane::{Queued, Waiters};
use self::queues::{Queues, SlotFrame, Tied};
use crate::memory::STEP_BYTES;
use crate::push::{LossReason, PushOptions};
use crate::sync::lock;
use crate::{FrameLike, MemoryAccount, PushError, PushPolicy, PushPriority, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    /// The account that queued frames are charged to.
    account: Option<MemoryAccount>,
    /// Allocated by the first push.
    queues: Mutex<Option<Box<Queues<F>>>>,
    /// The actor must read the queues: a frame was queued since it last did.
    ready: AtomicBool,
    /// Frames are rejected. Set under the lock of the queues.
    closed: AtomicBool,
    /// [`finish`](Self::finish) was called, or the connection has ended. Changed under the lock of the queues.
    finished: AtomicBool,
    /// Frames are tied to a reply. Changed under the lock of the queues.
    has_tied: AtomicBool,
    /// The number of requests that have been answered.
    answered: AtomicU64,
}

impl<F: FrameLike> Outbox<F> {
    pub(crate) fn new(options: Arc<PushOptions<F>>, account: Option<MemoryAccount>) -> Self {
        Self {
            options,
            account,
            queues: Mutex::new(None),
            ready: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            has_tied: AtomicBool::new(false),
            answered: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Queues<F>>>> {
        lock(&self.queues)
    }

    /// Returns the queues, allocated if necessary.
    fn allocate<'a>(&self, queues: &'a mut Option<Box<Queues<F>>>) -> &'a mut Queues<F> {
        queues.get_or_insert_with(|| Box::new(Queues::new(&self.options)))
    }

    /// Returns the queues, or an error if the outbox is closed.
    fn open_queues<'a>(&self, queues: &'a mut Option<Box<Queues<F>>>) -> Result<&'a mut Queues<F>, PushError> {
        if self.is_closed() { Err(PushError::Closed) } else { Ok(self.allocate(queues)) }
    }

    /// Records the memory of the queues in the account. If it returns true, the caller must enforce the memory limit after it has
    /// released the lock.
    fn record(&self, queues: &mut Queues<F>) -> bool {
        let steps = u32::try_from(queues.held_bytes() / STEP_BYTES).unwrap_or(u32::MAX);
        if steps == queues.recorded_steps {
            return false;
        }
        let before = std::mem::replace(&mut queues.recorded_steps, steps);
        let bytes = |steps: u32| (steps as usize * STEP_BYTES).cast_signed();
        self.account.as_ref().is_some_and(|account| account.0.account.change(bytes(steps) - bytes(before)))
    }

    /// Completes a push: records the memory, releases the lock, and sets `ready`. Returns whether the actor must be woken.
    fn finish_push(&self, mut guard: MutexGuard<'_, Option<Box<Queues<F>>>>) -> bool {
        let has_grown = guard.as_deref_mut().is_some_and(|queues| self.record(queues));
        drop(guard);
        if has_grown && let Some(account) = &self.account {
            account.0.account.enforce();
        }
        self.try_set_ready()
    }

    /// Sets `ready`. Returns whether it was clear.
    fn try_set_ready(&self) -> bool {
        !self.is_ready() && !self.ready.swap(true, SeqCst)
    }

    /// Waits for capacity and queues a frame. Returns whether the actor must be woken.
    pub(crate) async fn push(&self, frame: F, priority: PushPriority) -> Result<bool, PushError> {
        let frame = match self.try_push(frame, priority, None, 0) {
            Ok(must_wake) => return Ok(must_wake),
            Err((PushError::QueueFull, frame)) => frame,
            Err((error, _)) => return Err(error),
        };
        let weight = self.weight(&frame);
        let waiters_ref = self.waiters(priority)?;
        waiters_ref.waiters.reserve(weight).await.map_err(|_| PushError::Closed)?;
        let mut guard = self.lock();
        let queues = self.open_queues(&mut guard)?;
        queues.must_report_drained = true;
        queues.lane(priority).push(Queued { frame, weight, slot: None });
        Ok(self.finish_push(guard))
    }

    /// Queues a frame if there is capacity for it now, and returns whether the actor must be woken. Otherwise returns the frame. If
    /// `after` is not zero, the frame is tied to the reply to the request with this number.
    fn try_push(
        &self,
        frame: F,
        priority: PushPriority,
        slot: Option<Slot>,
        after: u64,
    ) -> Result<bool, (PushError, F)> {
        let weight = self.weight(&frame);
        let mut guard = self.lock();
        let queues = match self.open_queues(&mut guard) {
            Ok(queues) => queues,
            Err(closed) => return Err((closed, frame)),
        };
        if !queues.lane(priority).try_reserve(weight) {
            return Err((PushError::QueueFull, frame));
        }
        queues.must_report_drained = true;
        let queued = Queued { frame, weight, slot };
        if after > 0 {
            queues.tie(after, Tied::Frame(priority, queued));
            self.has_tied.store(true, SeqCst);
            // If the request is answered already, the next push must not overtake this one. The actor publishes `answered` before
            // it looks at the flag.
            queues.release_tied(self.answered.load(SeqCst));
            self.has_tied.store(queues.has_tied(), SeqCst);
        } else {
            queues.lane(priority).push(queued);
        }
        Ok(self.finish_push(guard))
    }

    /// Returns the waiters of a lane.
    fn waiters(&self, priority: PushPriority) -> Result<WaitersRef<'_, F>, PushError> {
        let mut queues = self.lock();
        let waiters = self.open_queues(&mut queues)?.lane(priority).acquire_waiters();
        Ok(WaitersRef { outbox: self, priority, waiters })
    }

    /// Queues a frame without waiting. If there is no capacity, applies the policy. Returns whether the actor must be woken.
    pub(crate) fn push_or_drop(
        &self,
        frame: F,
        priority: PushPriority,
        policy: PushPolicy,
        after: u64,
    ) -> Result<bool, PushError> {
        match self.try_push(frame, priority, None, after) {
            Err((PushError::QueueFull, frame)) if policy != PushPolicy::ReturnErrorIfFull => {
                self.options.count_lost(frame, LossReason::Dropped { warn: policy == PushPolicy::WarnAndDropIfFull });
                Ok(false)
            }
            result => result.map_err(|(error, _)| error),
        }
    }

    /// Queues a frame of a slot at the end of the low lane, if there is capacity for it now. Returns whether the actor must be woken.
    pub(crate) fn push_next(&self, slot: Slot, frame: F, after: u64) -> Result<bool, PushError> {
        self.try_push(frame, PushPriority::Low, Some(slot), after).map_err(|(error, _)| error)
    }

    /// Puts a frame into a slot, replacing an unsent one. Returns whether the actor must be woken.
    pub(crate) fn push_latest(&self, slot: Slot, frame: F, after: u64) -> Result<bool, PushError> {
        let size = frame.size();
        let mut guard = self.lock();
        let pushed = self.open_queues(&mut guard)?.push_latest(slot, SlotFrame { frame, size, after }, &self.options);
        let Ok(replaced) = pushed else {
            // The frame is dropped after the lock has been released.
            drop(guard);
            return Err(PushError::QueueFull);
        };
        let must_wake = self.finish_push(guard);
        for _ in replaced.into_iter().flatten() {
            self.options.count_replaced();
        }
        Ok(must_wake)
    }

    /// Queues the frame of a tick before all others, replacing that of an earlier tick. Called by the actor, which need not be woken.
    pub(crate) fn push_tick_frame(&self, frame: F) {
        let mut guard = self.lock();
        let before = self.allocate(&mut guard).tick_frame.replace(Box::new(frame));
        drop(guard);
        drop(before);
        self.set_ready();
    }

    /// Whether the actor must read the queues.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst)
    }

    /// Clears the flag `ready`, and returns whether it was set. The caller must then [take](Self::take) frames until there are none, or
    /// [set the flag](Self::set_ready) again.
    pub(crate) fn take_ready(&self) -> bool {
        self.is_ready() && self.ready.swap(false, SeqCst)
    }

    /// Sets the flag `ready`, because frames may remain after [`take_ready`](Self::take_ready).
    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Records the number of requests that have been answered. Frames that were tied to them are queued, before any frame that is pushed
    /// from now on.
    pub(crate) fn release_tied(&self, answered: u64) {
        self.answered.store(answered, SeqCst);
        if !self.has_tied.load(SeqCst) {
            return;
        }
        if let Some(queues) = &mut *self.lock() {
            queues.release_tied(answered);
            self.has_tied.store(queues.has_tied(), SeqCst);
        }
        self.set_ready();
    }

    /// Takes the next frame, of these priorities in this order. Slots have low priority and alternate with the low lane. A slot whose
    /// frame is tied to a request after the first `answered` ones is skipped.
    pub(crate) fn take(
        &self,
        order: &[PushPriority],
        slots_first: &mut bool,
        answered: u64,
    ) -> Option<(PushPriority, F)> {
        let mut guard = self.lock();
        let queues = guard.as_deref_mut()?;
        if let Some(&first) = order.first()
            && let Some(frame) = queues.tick_frame.take()
        {
            return Some((first, *frame));
        }
        for &priority in order {
            if priority == PushPriority::Low {
                *slots_first = !*slots_first;
                if (*slots_first || queues.low.is_empty())
                    && let Some((frame, obsolete)) = queues.pop_slot(answered, &self.has_tied)
                {
                    self.record(queues);
                    drop(guard);
                    if obsolete.is_some() {
                        self.options.count_replaced();
                    }
                    return Some((priority, frame));
                }
            }
            if let Some(Queued { frame, weight, .. }) = queues.lane(priority).pop() {
                let waiters = queues.lane(priority).give_back(1, weight as usize);
                self.record(queues);
                drop(guard);
                self.add_capacity(priority, waiters, 1, weight as usize);
                return Some((priority, frame));
            }
        }
        None
    }

    /// Returns the number of frames in the lanes, and their weight.
    pub(crate) fn lane_totals(&self) -> (usize, usize) {
        self.lock().as_ref().map_or((0, 0), |queues| queues.lane_totals())
    }

    /// Returns the size of all queued frames.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.lock().as_ref().map_or(0, |queues| queues.bytes())
    }

    /// Returns the size of all queued frames except those of a slot.
    pub(crate) fn queued_bytes_except(&self, slot: Slot) -> usize {
        self.lock().as_ref().map_or(0, |queues| queues.bytes_except(slot))
    }

    /// Gives capacity to waiting pushers. Called without the lock, because a pusher that is woken may run immediately.
    fn add_capacity(&self, priority: PushPriority, waiters: Option<Arc<Waiters>>, frames: usize, bytes: usize) {
        if let Some(waiters) = waiters {
            let waiters_ref = WaitersRef { outbox: self, priority, waiters };
            waiters_ref.waiters.add(frames, bytes);
        }
    }

    /// Removes all frames of a slot. Returns whether there were any, and whether the actor must be woken.
    pub(crate) fn clear_slot(&self, slot: Slot) -> (bool, bool) {
        let mut guard = self.lock();
        let Some(queues) = guard.as_deref_mut() else { return (false, false) };
        let (latest, queued) = (queues.take_slot(slot), queues.remove_queued(slot));
        let has_removed = latest.is_some() || !queued.is_empty();
        if has_removed {
            self.has_tied.store(queues.has_tied(), SeqCst);
        }
        let (frames, bytes) = (queued.len(), queued.iter().map(|queued| queued.weight as usize).sum());
        let waiters = queues.low.give_back(frames, bytes);
        self.record(queues);
        let is_drained = has_removed && queues.is_empty();
        // The frames are dropped after the lock has been released.
        drop(guard);
        self.add_capacity(PushPriority::Low, waiters, frames, bytes);
        // Wakes the actor, which reports to the protocol that the outbox is drained.
        (has_removed, is_drained && self.try_set_ready())
    }

    /// Whether the outbox has become empty since the last call that returned true.
    pub(crate) fn take_drained(&self) -> bool {
        let mut guard = self.lock();
        let Some(queues) = guard.as_deref_mut() else { return false };
        queues.is_empty() && std::mem::take(&mut queues.must_report_drained)
    }

    /// Returns the number of bytes that a frame takes up in its lane: its size, but at most the capacity of the lane, so that a larger
    /// frame can be pushed when the lane is empty.
    fn weight(&self, frame: &F) -> u32 {
        u32::try_from(frame.size().min(self.options.lane_bytes)).unwrap_or(u32::MAX)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Rejects frames from now on. Waiting pushers get an error. Queued frames can still be taken.
    pub(crate) fn stop_accepting(&self) {
        self.stop_accepting_locked(self.lock());
    }

    fn stop_accepting_locked(&self, queues: MutexGuard<'_, Option<Box<Queues<F>>>>) {
        self.closed.store(true, SeqCst);
        let waiters = queues.as_ref().map(|queues| [queues.high.waiters(), queues.low.waiters()]);
        // Not under the lock, because a pusher that is woken may run immediately.
        drop(queues);
        for waiters in waiters.into_iter().flatten().flatten() {
            waiters.close();
        }
    }

    /// Rejects frames from now on, and stores the last frame of the connection. Returns false and does nothing if it was called before
    /// or the connection has ended.
    pub(crate) fn finish(&self, last: Option<F>) -> bool {
        let mut queues = self.lock();
        if self.finished.swap(true, SeqCst) {
            return false;
        }
        if last.is_some() {
            self.allocate(&mut queues).last = last;
        }
        self.stop_accepting_locked(queues);
        true
    }

    /// Takes the last frame of the connection, if there is one.
    pub(crate) fn take_last(&self) -> Option<F> {
        self.lock().as_mut()?.last.take()
    }

    /// Releases memory that an idle connection does not need.
    pub(crate) fn shrink(&self) {
        if let Some(queues) = &mut *self.lock() {
            queues.shrink();
        }
    }

    /// Rejects frames from now on, and drops queued frames, which are counted as unsent.
    pub(crate) fn close(&self) {
        self.stop_accepting();
        let mut guard = self.lock();
        self.finished.store(true, SeqCst);
        let Some(queues) = guard.as_deref_mut() else { return };
        // Not counted, because it was not pushed.
        let tick_frame = queues.tick_frame.take();
        let unsent = queues.drain();
        self.record(queues);
        drop(guard);
        drop(tick_frame);
        for frame in unsent {
            self.count_unsent(frame);
        }
    }

    /// Counts a pushed frame that was not completely written when the connection ended.
    pub(crate) fn count_unsent(&self, frame: F) {
        self.options.count_lost(frame, LossReason::Unsent);
    }
}

/// A counted reference to the [`Waiters`] of a lane, held by a pusher that waits for capacity or gives some back. Releases the waiters
/// when it is dropped.
struct WaitersRef<'a, F: FrameLike> {
    outbox: &'a Outbox<F>,
    priority: PushPriority,
    waiters: Arc<Waiters>,
}

impl<F: FrameLike> Drop for WaitersRef<'_, F> {
    fn drop(&mut self) {
        if let Some(queues) = &mut *self.outbox.lock() {
            queues.lane(self.priority).release_waiters();
        }
    }
}
