//! The outbox of a connection: frames that other tasks push. It has two lanes by priority, and slots that hold the newest frame
//! of their kind.
//!
//! The outbox is shared by the actor, which takes from it, and by all pushers. Its queues are allocated by the first push; until
//! then it has a few words.
//!
//! **Waking.** A pusher queues its frame under the lock, then sets `ready`, and wakes the actor if the flag was clear. The actor
//! clears it *before* it takes the lock, so a frame that is queued after the actor has read the queues sets it again. A pusher that
//! finds the flag set need not wake the actor: the flag was set after the actor last cleared it, so the actor will read the queues
//! again. A connection without pushes pays one load per turn. The outbox does not know its actor: methods that queue a frame return
//! whether the actor must be woken.
//!
//! **Tied frames.** A frame that must not be written before a certain reply is kept apart from its lane, where it would hold up
//! other pushes until a slow reply is ready. When the actor has handed that reply to the codec, the frame moves to the end of its
//! lane. Its capacity in the lane is reserved from the beginning. A slot keeps an older frame that may be sent earlier, in addition
//! to the newest one.
//!
//! **Closing.** `closed` is set before the queues are emptied for the last time, under their lock, and every push checks it under
//! the same lock. So nothing is queued after that, and every frame that was queued is written or counted as lost.

mod lane;
mod queues;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use self::lane::{Queued, Waiters};
use self::queues::{Queues, Tied, Unsent};
use crate::memory::STEP_BYTES;
use crate::push::{Lost, PushOptions};
use crate::sync::lock;
use crate::{FrameLike, MemoryAccount, PushError, PushPolicy, PushPriority, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    /// The account that queued frames are charged to.
    account: Option<MemoryAccount>,
    /// Allocated by the first push.
    queues: Mutex<Option<Box<Queues<F>>>>,
    /// Frames may be queued that the actor has not seen.
    ready: AtomicBool,
    /// No frame is accepted. Set under the lock of the queues.
    closed: AtomicBool,
    /// No last frame is accepted: there is one, or the connection has ended. Changed under the lock of the queues.
    finished: AtomicBool,
    /// Frames wait for a reply. Changed under the lock of the queues.
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

    /// Allocates the queues if they are not.
    fn allocate<'a>(&self, queues: &'a mut Option<Box<Queues<F>>>) -> &'a mut Queues<F> {
        queues.get_or_insert_with(|| Box::new(Queues::new(&self.options)))
    }

    /// Returns the queues unless the outbox is closed.
    fn open<'a>(&self, queues: &'a mut Option<Box<Queues<F>>>) -> Result<&'a mut Queues<F>, PushError> {
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

    /// Records that a frame has been queued, and releases the lock. Returns whether the actor must be woken.
    fn queued(&self, mut guard: MutexGuard<'_, Option<Box<Queues<F>>>>) -> bool {
        let has_grown = guard.as_deref_mut().is_some_and(|queues| self.record(queues));
        drop(guard);
        if has_grown && let Some(account) = &self.account {
            account.0.account.enforce();
        }
        self.announce()
    }

    /// Sets `ready`. Returns whether it was clear.
    fn announce(&self) -> bool {
        !self.is_ready() && !self.ready.swap(true, SeqCst)
    }

    /// Queues a frame, and waits for capacity. Returns whether the actor must be woken.
    pub(crate) async fn push(&self, frame: F, priority: PushPriority) -> Result<bool, PushError> {
        let frame = match self.try_push(frame, priority, None, 0) {
            Ok(must_wake) => return Ok(must_wake),
            Err((PushError::QueueFull, frame)) => frame,
            Err((error, _)) => return Err(error),
        };
        let weight = self.weight(&frame);
        let waiting = self.wait(priority)?;
        waiting.waiters.reserve(weight).await.map_err(|_| PushError::Closed)?;
        let mut guard = self.lock();
        let queues = self.open(&mut guard)?;
        queues.undrained = true;
        queues.lane(priority).push(Queued { frame, weight, slot: None });
        Ok(self.queued(guard))
    }

    /// Queues a frame if there is capacity for it now; otherwise it is returned. If `after` is not zero, the frame waits until that
    /// many requests have been answered. Returns whether the actor must be woken.
    fn try_push(
        &self,
        frame: F,
        priority: PushPriority,
        slot: Option<Slot>,
        after: u64,
    ) -> Result<bool, (PushError, F)> {
        let weight = self.weight(&frame);
        let mut guard = self.lock();
        let queues = match self.open(&mut guard) {
            Ok(queues) => queues,
            Err(closed) => return Err((closed, frame)),
        };
        if !queues.lane(priority).try_reserve(weight) {
            return Err((PushError::QueueFull, frame));
        }
        queues.undrained = true;
        let queued = Queued { frame, weight, slot };
        if after > 0 {
            queues.tie(after, Tied::Frame(priority, queued));
            self.has_tied.store(true, SeqCst);
            // If the request is answered already, the next push must not overtake this one. The actor publishes `answered` before
            // it looks at the flag.
            queues.release(self.answered.load(SeqCst));
            self.has_tied.store(queues.has_tied(), SeqCst);
        } else {
            queues.lane(priority).push(queued);
        }
        Ok(self.queued(guard))
    }

    /// Joins the pushers that wait for capacity.
    fn wait(&self, priority: PushPriority) -> Result<CapacityWaiter<'_, F>, PushError> {
        let mut queues = self.lock();
        let waiters = self.open(&mut queues)?.lane(priority).join();
        Ok(CapacityWaiter { outbox: self, priority, waiters })
    }

    /// Queues a frame without waiting; if there is no capacity, the policy decides. Returns whether the actor must be woken.
    pub(crate) fn push_or_drop(
        &self,
        frame: F,
        priority: PushPriority,
        policy: PushPolicy,
        after: u64,
    ) -> Result<bool, PushError> {
        match self.try_push(frame, priority, None, after) {
            Err((PushError::QueueFull, frame)) if policy != PushPolicy::ReturnErrorIfFull => {
                self.options.lose(frame, Lost::Dropped { warn: policy == PushPolicy::WarnAndDropIfFull });
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
        let pushed = self.open(&mut guard)?.push_latest(slot, Unsent { frame, size, after }, &self.options);
        let Ok(replaced) = pushed else {
            // The frame is dropped after the lock has been released.
            drop(guard);
            return Err(PushError::QueueFull);
        };
        let must_wake = self.queued(guard);
        for _ in replaced.into_iter().flatten() {
            self.options.count_replaced();
        }
        Ok(must_wake)
    }

    /// Queues a frame of the connection itself before all others, replacing an earlier one. Called by the actor, which need not be
    /// woken.
    pub(crate) fn push_own(&self, frame: F) {
        let mut guard = self.lock();
        let before = self.allocate(&mut guard).own.replace(Box::new(frame));
        drop(guard);
        drop(before);
        self.set_ready();
    }

    /// Whether frames may be queued.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst)
    }

    /// Whether frames may be queued. Clears the flag: to be followed by [`take`](Self::take) until that finds none.
    pub(crate) fn take_ready(&self) -> bool {
        self.is_ready() && self.ready.swap(false, SeqCst)
    }

    /// Records that frames may be left after [`take_ready`](Self::take_ready).
    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Records that `answered` requests have been answered: the frames that waited for them are queued before all that is pushed
    /// from now on.
    pub(crate) fn release(&self, answered: u64) {
        self.answered.store(answered, SeqCst);
        if !self.has_tied.load(SeqCst) {
            return;
        }
        if let Some(queues) = &mut *self.lock() {
            queues.release(answered);
            self.has_tied.store(queues.has_tied(), SeqCst);
        }
        self.set_ready();
    }

    /// Takes the next frame of these priorities, in that order. Slots have low priority and alternate with the lane. Slots that wait
    /// for a reply which is not among the first `answered` are held back.
    pub(crate) fn take(
        &self,
        order: &[PushPriority],
        slots_next: &mut bool,
        answered: u64,
    ) -> Option<(PushPriority, F)> {
        let mut guard = self.lock();
        let queues = guard.as_deref_mut()?;
        if let Some(&first) = order.first()
            && let Some(frame) = queues.own.take()
        {
            return Some((first, *frame));
        }
        for &priority in order {
            if priority == PushPriority::Low {
                *slots_next = !*slots_next;
                if (*slots_next || queues.low.is_empty())
                    && let Some((frame, obsolete)) = queues.next_slot(answered, &self.has_tied)
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
    pub(crate) fn in_lanes(&self) -> (usize, usize) {
        self.lock().as_ref().map_or((0, 0), |queues| queues.in_lanes())
    }

    /// Returns the size of all queued frames.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.lock().as_ref().map_or(0, |queues| queues.bytes())
    }

    /// Returns the size of all queued frames except those of a slot.
    pub(crate) fn queued_bytes_except(&self, slot: Slot) -> usize {
        self.lock().as_ref().map_or(0, |queues| queues.bytes_except(slot))
    }

    /// Gives capacity to the pushers that wait for it. Called without the lock, since a pusher that is woken may run at once.
    fn add_capacity(&self, priority: PushPriority, waiters: Option<Arc<Waiters>>, frames: usize, bytes: usize) {
        if let Some(waiters) = waiters {
            let waiting = CapacityWaiter { outbox: self, priority, waiters };
            waiting.waiters.add(frames, bytes);
        }
    }

    /// Removes all frames of a slot. Returns whether there were any, and whether the actor must be woken.
    pub(crate) fn clear_slot(&self, slot: Slot) -> (bool, bool) {
        let mut guard = self.lock();
        let Some(queues) = guard.as_deref_mut() else { return (false, false) };
        let (latest, queued) = (queues.clear_latest(slot), queues.remove_queued(slot));
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
        // The actor reports to its protocol that the outbox is drained.
        (has_removed, is_drained && self.announce())
    }

    /// Whether no frame is queued, after some were. Returns true once.
    pub(crate) fn take_drained(&self) -> bool {
        let mut guard = self.lock();
        let Some(queues) = guard.as_deref_mut() else { return false };
        queues.is_empty() && std::mem::take(&mut queues.undrained)
    }

    /// Returns the bytes that a frame takes up in its lane. A frame that is larger than the lane takes up all of it, so that it can be
    /// pushed when the lane is empty.
    fn weight(&self, frame: &F) -> u32 {
        u32::try_from(frame.size().min(self.options.bytes)).unwrap_or(u32::MAX)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Accepts no more frames. Pushers that wait get an error; frames that are queued can still be taken.
    pub(crate) fn refuse(&self) {
        self.refuse_under(self.lock());
    }

    fn refuse_under(&self, queues: MutexGuard<'_, Option<Box<Queues<F>>>>) {
        self.closed.store(true, SeqCst);
        let waiters = queues.as_ref().map(|queues| [queues.high.waiters(), queues.low.waiters()]);
        // Not under the lock, since a pusher that is woken may run at once.
        drop(queues);
        for waiters in waiters.into_iter().flatten().flatten() {
            waiters.close();
        }
    }

    /// Accepts no more frames, and keeps the frame that the connection ends with. Returns false if there was a call before, or the
    /// connection has ended.
    pub(crate) fn finish(&self, last: Option<F>) -> bool {
        let mut queues = self.lock();
        if self.finished.swap(true, SeqCst) {
            return false;
        }
        if last.is_some() {
            self.allocate(&mut queues).last = last;
        }
        self.refuse_under(queues);
        true
    }

    /// Takes the frame that the connection ends with, if there is one.
    pub(crate) fn take_last(&self) -> Option<F> {
        self.lock().as_mut()?.last.take()
    }

    /// Releases memory that an idle connection does not need.
    pub(crate) fn shrink(&self) {
        if let Some(queues) = &mut *self.lock() {
            queues.shrink();
        }
    }

    /// Accepts no more frames, and drops those that are queued. They are counted as unsent.
    pub(crate) fn close(&self) {
        self.refuse();
        let mut guard = self.lock();
        self.finished.store(true, SeqCst);
        let Some(queues) = guard.as_deref_mut() else { return };
        // Not pushed, so it is not counted.
        let own = queues.own.take();
        let unsent = queues.drain();
        self.record(queues);
        drop(guard);
        drop(own);
        for frame in unsent {
            self.lose(frame);
        }
    }

    /// Counts a pushed frame that was not written, or only in part, when the connection ended.
    pub(crate) fn lose(&self, frame: F) {
        self.options.lose(frame, Lost::Unsent);
    }
}

/// A registration as user of a lane's [`Waiters`]: a pusher that waits for capacity, or the actor while it gives some back.
struct CapacityWaiter<'a, F: FrameLike> {
    outbox: &'a Outbox<F>,
    priority: PushPriority,
    waiters: Arc<Waiters>,
}

impl<F: FrameLike> Drop for CapacityWaiter<'_, F> {
    fn drop(&mut self) {
        if let Some(queues) = &mut *self.outbox.lock() {
            queues.lane(self.priority).leave();
        }
    }
}
