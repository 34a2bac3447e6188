//! The outbox of a connection: frames that other tasks push. It has two lanes by priority, and slots that hold the newest frame
//! of their kind.
//!
//! The outbox is shared by the actor, which takes from it, and by all pushers. Its queues are allocated by the first push; until
//! then it has a few words.
//!
//! **Waking.** A pusher queues its frame under the lock, then raises `ready`, and wakes the actor if the flag was down. The actor
//! lowers it *before* it takes the lock, so a frame that is queued after the actor looked raises it again. A pusher that finds
//! the flag raised leaves it: a look that came before the push had lowered the flag first, so the flag was raised since, and
//! another look follows. A connection without pushes pays one load per turn.
//!
//! **Tied frames.** A frame that must not be written before a certain reply waits aside, not in its lane, where it would hold up
//! other pushes until a slow reply is ready. When the actor has handed that reply to the codec, the frame moves to the end of its
//! lane. Its capacity in the lane is reserved from the beginning. A slot keeps an older frame that may go earlier beside the
//! newest one.
//!
//! **Closing.** `closed` is set before the queues are emptied for the last time, under their lock, and every push checks it under
//! the same lock. So nothing is queued after that, and every frame that was queued is written or counted as lost.

mod lane;

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use self::lane::{Lane, Line, Queued};
use crate::memory::{Account, Holder, STEP_BYTES};
use crate::push::{Lost, PushOptions};
use crate::session::Facts;
use crate::sync::lock;
use crate::{ConnectionId, FrameLike, PushError, PushPolicy, PushPriority, ReplyTicket, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    /// The connection that it is the outbox of, if there is one.
    facts: Option<Arc<Facts>>,
    /// Made when they are first used.
    queues: Mutex<Option<Box<Queues<F>>>>,
    ready: AtomicBool,
    /// Set under the lock of the queues.
    closed: AtomicBool,
    /// [`LEAVING`], [`WOKEN`] and [`OVER_LIMIT`], in one word so that the actor looks at all with one load per turn.
    signals: AtomicU8,
    /// Frames wait for a reply. Changed under the lock of the queues.
    tied: AtomicBool,
    /// How many requests have been answered.
    answered: AtomicU64,
    /// The alarm of the connection went off.
    rung: AtomicBool,
    /// Who is woken when it becomes ready.
    actor: Mutex<Option<Waker>>,
    /// How many can push.
    pub(crate) handles: AtomicUsize,
}

/// A handle has closed the connection. Set under the lock of the queues, and never cleared.
const LEAVING: u8 = 1;
/// A handle asks for [`Protocol::on_wake`](crate::Protocol::on_wake). The actor clears it before it runs the hook, so a request
/// that comes later sets it again and leads to another run.
const WOKEN: u8 = 2;
/// The memory limit is exceeded, and the connection is to be closed. The actor clears it.
const OVER_LIMIT: u8 = 4;

struct Queues<F> {
    /// The connection's own, before all else.
    ahead: Option<Box<F>>,
    high: Lane<F>,
    low: Lane<F>,
    slots: HashMap<Slot, Latest<F>>,
    slot_bytes: usize,
    /// The slots in the order in which they were filled. Each is either here or among the tied, once.
    filled: VecDeque<Slot>,
    /// What waits for a reply: by the request, and in the order in which it came.
    tied: BTreeMap<(u64, u64), Tied<F>>,
    tied_so_far: u64,
    /// What the tied frames weigh that are in no slot.
    tied_bytes: usize,
    /// The memory of the frames, as recorded in the account of the connection, in multiples of [`STEP_BYTES`].
    recorded_steps: u32,
    /// Something was pushed since it was last seen that nothing waits.
    undrained: bool,
    /// With which frame the connection is to end, when it is.
    last: Option<F>,
}

/// What a slot holds: the newest frame, and if that has to wait for a later reply than the one before it, that one too. Otherwise
/// a connection that always has a request open, and causes what it is pushed, would hear nothing.
struct Latest<F> {
    earlier: Option<Unsent<F>>,
    newest: Unsent<F>,
}

struct Unsent<F> {
    frame: F,
    size: usize,
    /// The request whose reply comes first, if it is not zero.
    after: u64,
}

impl<F> Latest<F> {
    fn size(&self) -> usize {
        self.newest.size + self.earlier.as_ref().map_or(0, |earlier| earlier.size)
    }

    /// Takes in a newer frame, and gives those that it replaces. It waits for whatever they waited for. One of them is kept beside
    /// it, if it need not wait as long and there is room for it.
    fn replace(&mut self, mut newer: Unsent<F>, room: usize) -> [Option<Unsent<F>>; 2] {
        newer.after = newer.after.max(self.newest.after);
        let (after, before) = (newer.after, std::mem::replace(&mut self.newest, newer));
        if self.earlier.is_none() && before.after < after && before.size <= room {
            self.earlier = Some(before);
            return [None, None];
        }
        [Some(before), self.earlier.take_if(|earlier| earlier.size > room)]
    }
}

enum Tied<F> {
    Frame(PushPriority, Queued<F>),
    Slot(Slot),
}

impl<F: FrameLike> Outbox<F> {
    pub(crate) fn new(options: Arc<PushOptions<F>>, facts: Option<Arc<Facts>>) -> Self {
        Self {
            options,
            facts,
            queues: Mutex::new(None),
            ready: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            signals: AtomicU8::new(0),
            tied: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            rung: AtomicBool::new(false),
            actor: Mutex::new(None),
            handles: AtomicUsize::new(0),
        }
    }

    pub(crate) fn facts(&self) -> Option<&Facts> {
        self.facts.as_deref()
    }

    pub(crate) fn shared_facts(&self) -> Option<Arc<Facts>> {
        self.facts.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Queues<F>>>> {
        lock(&self.queues)
    }

    /// Records in the account of the connection what the queues hold. If it returns true, the memory limit is to be enforced when the
    /// lock has been released.
    fn record(&self, queues: &mut Queues<F>) -> bool {
        let steps = u32::try_from(queues.held_bytes() / STEP_BYTES).unwrap_or(u32::MAX);
        if steps == queues.recorded_steps {
            return false;
        }
        let before = std::mem::replace(&mut queues.recorded_steps, steps);
        let bytes = |steps: u32| (steps as usize * STEP_BYTES).cast_signed();
        self.facts().is_some_and(|facts| facts.account.change(bytes(steps) - bytes(before)))
    }

    /// A frame has been queued, and the lock is released.
    fn queued_frame(&self, has_grown: bool) {
        self.announce();
        if has_grown && let Some(facts) = self.facts() {
            facts.account.enforce();
        }
    }

    /// The queues of an outbox that is not closed.
    fn open<'a>(&self, queues: &'a mut Option<Box<Queues<F>>>) -> Option<&'a mut Queues<F>> {
        (!self.is_closed()).then(|| &mut **queues.get_or_insert_with(|| Box::new(Queues::new(&self.options))))
    }

    /// The request that a ticket names, or zero if it is another connection's.
    fn request(&self, ticket: ReplyTicket) -> u64 {
        self.facts().filter(|facts| facts.id == ticket.connection).map_or(0, |_| ticket.request)
    }

    /// Queues a frame when there is room for it.
    pub(crate) async fn push(&self, frame: F, priority: PushPriority) -> Result<(), PushError> {
        let frame = match self.try_push(frame, priority, None, None) {
            Ok(()) => return Ok(()),
            Err((PushError::QueueFull, frame)) => frame,
            Err((error, _)) => return Err(error),
        };
        let weight = self.weight(&frame);
        let waiting = self.wait(priority)?;
        waiting.line.reserve(weight).await.map_err(|_| PushError::Closed)?;
        let mut guard = self.lock();
        let queues = self.open(&mut guard).ok_or(PushError::Closed)?;
        queues.undrained = true;
        queues.lane(priority).push(Queued { frame, weight, slot: None });
        let has_grown = self.record(queues);
        drop(guard);
        self.queued_frame(has_grown);
        Ok(())
    }

    /// Queues a frame if there is room for it now; otherwise it comes back.
    fn try_push(
        &self,
        frame: F,
        priority: PushPriority,
        slot: Option<Slot>,
        after: Option<ReplyTicket>,
    ) -> Result<(), (PushError, F)> {
        let weight = self.weight(&frame);
        let after = after.map_or(0, |ticket| self.request(ticket));
        let mut guard = self.lock();
        let Some(queues) = self.open(&mut guard) else { return Err((PushError::Closed, frame)) };
        if !queues.lane(priority).try_reserve(weight) {
            return Err((PushError::QueueFull, frame));
        }
        queues.undrained = true;
        let queued = Queued { frame, weight, slot };
        if after > 0 {
            queues.tie(after, Tied::Frame(priority, queued));
            self.tied.store(true, SeqCst);
            // If it is answered already, what is pushed next must not come before it. Whoever answers looks at the flag after that.
            queues.release(self.answered.load(SeqCst));
            self.tied.store(!queues.tied.is_empty(), SeqCst);
        } else {
            queues.lane(priority).push(queued);
        }
        let has_grown = self.record(queues);
        drop(guard);
        self.queued_frame(has_grown);
        Ok(())
    }

    /// Joins those who wait for room.
    fn wait(&self, priority: PushPriority) -> Result<Waiting<'_, F>, PushError> {
        let mut queues = self.lock();
        let line = self.open(&mut queues).ok_or(PushError::Closed)?.lane(priority).join();
        Ok(Waiting { outbox: self, priority, line })
    }

    /// Queues a frame without waiting; if there is no room, the policy decides.
    pub(crate) fn push_or_drop(
        &self,
        frame: F,
        priority: PushPriority,
        policy: PushPolicy,
        after: Option<ReplyTicket>,
    ) -> Result<(), PushError> {
        match self.try_push(frame, priority, None, after) {
            Err((PushError::QueueFull, frame)) if policy != PushPolicy::ReturnErrorIfFull => {
                self.options.lose(frame, Lost::Dropped { warn: policy == PushPolicy::WarnAndDropIfFull });
                Ok(())
            }
            ended => ended.map_err(|(error, _)| error),
        }
    }

    /// Queues a frame of a slot behind the others that are low, if there is room for it now.
    pub(crate) fn push_next(&self, slot: Slot, frame: F, after: Option<ReplyTicket>) -> Result<(), PushError> {
        self.try_push(frame, PushPriority::Low, Some(slot), after).map_err(|(error, _)| error)
    }

    /// Puts a frame into a slot, in place of the one that may be there.
    pub(crate) fn push_latest(&self, slot: Slot, frame: F, after: Option<ReplyTicket>) -> Result<(), PushError> {
        let size = frame.size();
        let after = after.map_or(0, |ticket| self.request(ticket));
        let mut queues = self.lock();
        let open = self.open(&mut queues).ok_or(PushError::Closed)?;
        let Queues { slots, slot_bytes, filled, undrained, .. } = open;
        let newer = Unsent { frame, size, after };
        let unsent = slots.get(&slot);
        let others = *slot_bytes - unsent.map_or(0, Latest::size);
        // One that is larger than all the room has it to itself.
        let is_too_large = others > 0 && others.saturating_add(size) > self.options.slot_bytes;
        if is_too_large || unsent.is_none() && slots.len() >= self.options.slots {
            // The frame is not dropped under the lock.
            drop(queues);
            return Err(PushError::QueueFull);
        }
        let replaced = match slots.entry(slot) {
            Entry::Occupied(mut unsent) => {
                // It stays where it is. If that is too early for it, it is put aside when its turn comes.
                *slot_bytes -= unsent.get().size();
                let room = self.options.slot_bytes.saturating_sub(others.saturating_add(size));
                let replaced = unsent.get_mut().replace(newer, room);
                *slot_bytes += unsent.get().size();
                replaced
            }
            Entry::Vacant(vacant) => {
                *slot_bytes += size;
                *undrained = true;
                vacant.insert(Latest { earlier: None, newest: newer });
                filled.push_back(slot);
                [None, None]
            }
        };
        let has_grown = self.record(open);
        drop(queues);
        for _ in replaced.into_iter().flatten() {
            self.options.note_replaced();
        }
        self.queued_frame(has_grown);
        Ok(())
    }

    /// Queues a frame of the connection's own before all else, in place of the one that may wait there. The actor calls it, and need
    /// not be woken.
    pub(crate) fn push_ahead(&self, frame: F) {
        let mut guard = self.lock();
        let queues = guard.get_or_insert_with(|| Box::new(Queues::new(&self.options)));
        let before = queues.ahead.replace(Box::new(frame));
        drop(guard);
        drop(before);
        self.raise();
    }

    fn announce(&self) {
        if !self.is_ready() && !self.ready.swap(true, SeqCst) {
            self.wake();
        }
    }

    pub(crate) fn wake(&self) {
        // Not under the lock: whoever is woken may run at once.
        let actor = lock(&self.actor).clone();
        if let Some(waker) = actor {
            waker.wake();
        }
    }

    /// Asks the actor to run [`Protocol::on_wake`](crate::Protocol::on_wake). Requests that it has not yet taken are one.
    pub(crate) fn request_wake(&self) {
        // Always a write, so that the hook sees all that was written before the request.
        if self.signals.fetch_or(WOKEN, SeqCst) & WOKEN == 0 {
            self.wake();
        }
    }

    /// Whether the connection is to leave, or to run its hook.
    pub(crate) fn has_signals(&self) -> bool {
        self.signals.load(SeqCst) != 0
    }

    /// Whether the hook is to run. Returns true once for all requests so far.
    pub(crate) fn take_woken(&self) -> bool {
        self.signals.load(SeqCst) & WOKEN != 0 && self.signals.fetch_and(!WOKEN, SeqCst) & WOKEN != 0
    }

    /// Whether the memory limit closes the connection. Returns true once.
    pub(crate) fn take_over_limit(&self) -> bool {
        self.signals.load(SeqCst) & OVER_LIMIT != 0 && self.signals.fetch_and(!OVER_LIMIT, SeqCst) & OVER_LIMIT != 0
    }

    /// The alarm goes off.
    pub(crate) fn ring(&self) {
        self.rung.store(true, SeqCst);
        self.wake();
    }

    /// Whether the alarm went off.
    pub(crate) fn is_rung(&self) -> bool {
        self.rung.load(SeqCst) && self.rung.swap(false, SeqCst)
    }

    /// Whom to wake from now on, if anyone.
    pub(crate) fn register(&self, waker: Option<Waker>) {
        let before = std::mem::replace(&mut *lock(&self.actor), waker);
        drop(before);
    }

    /// Whether something may be queued.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst)
    }

    /// Whether something may be queued. Lowers the flag: to be followed by [`take`](Self::take) until that finds nothing.
    pub(crate) fn lower(&self) -> bool {
        self.is_ready() && self.ready.swap(false, SeqCst)
    }

    /// Not everything was taken.
    pub(crate) fn raise(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Whether frames wait for a reply.
    pub(crate) fn is_tied(&self) -> bool {
        self.tied.load(SeqCst)
    }

    /// So many requests have been answered: what waited for that has its turn, before all that is pushed from now on.
    pub(crate) fn release(&self, answered: u64) {
        self.answered.store(answered, SeqCst);
        if !self.is_tied() {
            return;
        }
        if let Some(queues) = &mut *self.lock() {
            queues.release(answered);
            self.tied.store(!queues.tied.is_empty(), SeqCst);
        }
        self.raise();
    }

    /// Takes the next frame of these priorities, in that order. Slots are low, by turns with the lane; those that wait for a reply
    /// which is not among the first `answered` are put aside.
    pub(crate) fn take(
        &self,
        order: &[PushPriority],
        slots_next: &mut bool,
        answered: u64,
    ) -> Option<(PushPriority, F)> {
        let mut guard = self.lock();
        let queues = guard.as_deref_mut()?;
        if let Some(&first) = order.first()
            && let Some(frame) = queues.ahead.take()
        {
            return Some((first, *frame));
        }
        for &priority in order {
            if priority == PushPriority::Low {
                *slots_next = !*slots_next;
                if (*slots_next || queues.low.is_empty())
                    && let Some((frame, outdated)) = queues.next_slot(answered, &self.tied)
                {
                    self.record(queues);
                    drop(guard);
                    if outdated.is_some() {
                        self.options.note_replaced();
                    }
                    return Some((priority, frame));
                }
            }
            if let Some(Queued { frame, weight, .. }) = queues.lane(priority).pop() {
                let line = queues.lane(priority).give_back(1, weight as usize);
                self.record(queues);
                drop(guard);
                self.add_room(priority, line, 1, weight as usize);
                return Some((priority, frame));
            }
        }
        None
    }

    /// How many frames are in the lanes, and what they weigh.
    pub(crate) fn queued(&self) -> (usize, usize) {
        let Some(queues) = &*self.lock() else { return (0, 0) };
        let ((high, high_bytes), (low, low_bytes)) = (queues.high.queued(), queues.low.queued());
        (high + low, high_bytes + low_bytes)
    }

    /// What all frames weigh that wait, those in slots and those that are tied included.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.lock().as_ref().map_or(0, |queues| queues.bytes())
    }

    /// The size of all frames that wait, but for the one in this slot.
    pub(crate) fn queued_bytes_besides(&self, slot: Slot) -> usize {
        let Some(queues) = &*self.lock() else { return 0 };
        queues.bytes() - queues.slots.get(&slot).map_or(0, Latest::size)
    }

    /// Gives room to those who wait for it. The lock is released.
    fn add_room(&self, priority: PushPriority, line: Option<Arc<Line>>, frames: usize, bytes: usize) {
        if let Some(line) = line {
            let user = Waiting { outbox: self, priority, line };
            user.line.add(frames, bytes);
        }
    }

    /// Takes out all frames of a slot. Returns whether there were any.
    pub(crate) fn take_back(&self, slot: Slot) -> bool {
        let mut guard = self.lock();
        let Some(queues) = guard.as_deref_mut() else { return false };
        let (latest, queued) = (queues.take_back(slot), queues.take_back_queued(slot));
        let has_taken = latest.is_some() || !queued.is_empty();
        if has_taken {
            self.tied.store(!queues.tied.is_empty(), SeqCst);
        }
        let (frames, bytes) = (queued.len(), queued.iter().map(|queued| queued.weight as usize).sum());
        let line = queues.low.give_back(frames, bytes);
        self.record(queues);
        let is_last = has_taken && queues.is_empty();
        // The frames are not dropped under the lock.
        drop(guard);
        self.add_room(PushPriority::Low, line, frames, bytes);
        if is_last {
            // So that the actor sees that nothing waits any more.
            self.announce();
        }
        has_taken
    }

    /// Whether nothing waits any more, after something did. Told once.
    pub(crate) fn drained(&self) -> bool {
        let mut guard = self.lock();
        let Some(queues) = guard.as_deref_mut() else { return false };
        queues.is_empty() && std::mem::take(&mut queues.undrained)
    }

    /// A frame larger than all the room waits until it is empty, rather than for ever.
    fn weight(&self, frame: &F) -> u32 {
        u32::try_from(frame.size().min(self.options.bytes)).unwrap_or(u32::MAX)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Nothing is queued any more, and whoever waits is told. What was queued can still be taken.
    pub(crate) fn refuse(&self) {
        self.refuse_under(self.lock());
    }

    fn refuse_under(&self, queues: MutexGuard<'_, Option<Box<Queues<F>>>>) {
        self.closed.store(true, SeqCst);
        let lines = queues.as_ref().map(|queues| [queues.high.line(), queues.low.line()]);
        // Not under the lock: whoever is woken may run at once.
        drop(queues);
        for line in lines.into_iter().flatten().flatten() {
            line.close();
        }
    }

    /// The connection falls idle.
    pub(crate) fn shrink(&self) {
        if let Some(queues) = &mut *self.lock() {
            queues.shrink();
        }
    }

    /// Nothing is queued any more, and when what was queued is written the connection ends with this frame. Told to the actor
    /// once.
    pub(crate) fn leave(&self, last: Option<F>) {
        let mut queues = self.lock();
        if self.is_leaving() {
            return;
        }
        queues.get_or_insert_with(|| Box::new(Queues::new(&self.options))).last = last;
        self.signals.fetch_or(LEAVING, SeqCst);
        self.refuse_under(queues);
        self.wake();
    }

    /// Whether a handle has closed the connection.
    pub(crate) fn is_leaving(&self) -> bool {
        self.signals.load(SeqCst) & LEAVING != 0
    }

    /// The frame with which the connection is to end, if there is one.
    pub(crate) fn last(&self) -> Option<F> {
        self.lock().as_mut()?.last.take()
    }

    /// The connection has gone. What was queued goes where lost frames go.
    pub(crate) fn close(&self) {
        self.refuse();
        let mut guard = self.lock();
        self.signals.fetch_or(LEAVING, SeqCst);
        let Some(queues) = guard.as_deref_mut() else { return };
        queues.release(u64::MAX);
        let Queues { ahead, high, low, slots, slot_bytes, filled, last, .. } = queues;
        // Nobody pushed it, so it is not counted.
        let ahead = ahead.take();
        *slot_bytes = 0;
        let mut left: Vec<F> = high.drain().chain(low.drain()).chain(last.take()).collect();
        for Latest { earlier, newest } in filled.drain(..).filter_map(|slot| slots.remove(&slot)) {
            left.extend(earlier.into_iter().chain([newest]).map(|unsent| unsent.frame));
        }
        self.record(queues);
        drop(guard);
        drop(ahead);
        for frame in left {
            self.lose(frame);
        }
    }

    /// A frame was not written, or not all of it, when the connection ended.
    pub(crate) fn lose(&self, frame: F) {
        self.options.lose(frame, Lost::Unsent);
    }
}

impl<F: FrameLike> Holder for Outbox<F> {
    fn account(&self) -> Option<(ConnectionId, &Account)> {
        self.facts().map(|facts| (facts.id, &facts.account))
    }

    fn close_for_memory(&self) {
        self.signals.fetch_or(OVER_LIMIT, SeqCst);
        self.wake();
    }
}

/// Uses the line of a lane.
struct Waiting<'a, F: FrameLike> {
    outbox: &'a Outbox<F>,
    priority: PushPriority,
    line: Arc<Line>,
}

impl<F: FrameLike> Drop for Waiting<'_, F> {
    fn drop(&mut self) {
        if let Some(queues) = &mut *self.outbox.lock() {
            queues.lane(self.priority).leave();
        }
    }
}

impl<F> Queues<F> {
    fn new(options: &PushOptions<F>) -> Self {
        Self {
            ahead: None,
            high: Lane::new(options.high, options.bytes),
            low: Lane::new(options.low, options.bytes),
            slots: HashMap::new(),
            slot_bytes: 0,
            filled: VecDeque::new(),
            tied: BTreeMap::new(),
            tied_so_far: 0,
            tied_bytes: 0,
            recorded_steps: 0,
            undrained: false,
            last: None,
        }
    }

    fn lane(&mut self, priority: PushPriority) -> &mut Lane<F> {
        match priority {
            PushPriority::High => &mut self.high,
            PushPriority::Low => &mut self.low,
        }
    }

    /// The size of all frames that wait, those that are tied to a reply included.
    fn bytes(&self) -> usize {
        self.high.queued().1 + self.low.queued().1 + self.slot_bytes + self.tied_bytes
    }

    /// The memory of the frames that wait, with their places in the queues.
    fn held_bytes(&self) -> usize {
        let frames = self.high.queued().0 + self.low.queued().0 + self.slots.len() + self.tied.len();
        self.bytes() + frames * size_of::<Latest<F>>()
    }

    /// Whether nothing waits, for a reply neither.
    fn is_empty(&self) -> bool {
        self.high.is_empty() && self.low.is_empty() && self.slots.is_empty() && self.tied.is_empty()
    }

    fn tie(&mut self, after: u64, tied: Tied<F>) {
        self.tied_so_far += 1;
        if let Tied::Frame(_, queued) = &tied {
            self.tied_bytes += queued.weight as usize;
        }
        self.tied.insert((after, self.tied_so_far), tied);
    }

    fn release(&mut self, answered: u64) {
        while let Some(first) = self.tied.first_entry().filter(|first| first.key().0 <= answered) {
            match first.remove() {
                Tied::Frame(priority, queued) => {
                    self.tied_bytes -= queued.weight as usize;
                    self.lane(priority).push(queued);
                }
                Tied::Slot(slot) => self.filled.push_back(slot),
            }
        }
    }

    /// Empties a slot, and takes it out of its line: when it is filled again, it has its turn once.
    fn take_back(&mut self, slot: Slot) -> Option<Latest<F>> {
        let latest = self.slots.remove(&slot)?;
        self.slot_bytes -= latest.size();
        if let Some(place) = self.filled.iter().position(|filled| *filled == slot) {
            self.filled.remove(place);
        } else {
            self.tied.retain(|_, tied| !matches!(tied, Tied::Slot(tied) if *tied == slot));
        }
        Some(latest)
    }

    /// Takes the frames of a slot out of the lane, and out of those that wait for a reply. Their room is still taken.
    fn take_back_queued(&mut self, slot: Slot) -> Vec<Queued<F>> {
        let mut taken = self.low.take_back(slot);
        let is_taken = |tied: &Tied<F>| matches!(tied, Tied::Frame(_, queued) if queued.slot == Some(slot));
        for (_, tied) in self.tied.extract_if(.., |_, tied| is_taken(tied)) {
            if let Tied::Frame(_, queued) = tied {
                self.tied_bytes -= queued.weight as usize;
                taken.push(queued);
            }
        }
        taken
    }

    /// The next frame of a slot, and the one that is outdated by it.
    fn next_slot(&mut self, answered: u64, tied: &AtomicBool) -> Option<(F, Option<Unsent<F>>)> {
        loop {
            let slot = self.filled.pop_front()?;
            let Entry::Occupied(mut latest) = self.slots.entry(slot) else { continue };
            let Latest { earlier, newest } = latest.get_mut();
            if newest.after <= answered {
                let latest = latest.remove();
                self.slot_bytes -= latest.size();
                return Some((latest.newest.frame, latest.earlier));
            }
            let ready = earlier.take_if(|earlier| earlier.after <= answered);
            let after = earlier.as_ref().map_or(newest.after, |earlier| earlier.after);
            self.tie(after, Tied::Slot(slot));
            tied.store(true, SeqCst);
            if let Some(Unsent { frame, size, .. }) = ready {
                self.slot_bytes -= size;
                return Some((frame, None));
            }
        }
    }

    /// Gives back memory when nothing is queued. What a connection uses all the time is kept.
    fn shrink(&mut self) {
        self.high.shrink();
        self.low.shrink();
        if self.filled.is_empty() && self.filled.capacity() > IDLE {
            self.filled = VecDeque::new();
        }
        if self.slots.is_empty() && self.slots.capacity() > IDLE {
            self.slots = HashMap::new();
        }
    }
}

/// So many places an empty queue may keep.
const IDLE: usize = 8;
