//! What waits to be written to one connection: two lanes by priority, and slots that hold the newest of their kind.
//!
//! The outbox is shared by the actor, which takes from it, and by all who push. It costs a few words until it is first used.
//! Room in a lane is a semaphore, so that whoever waits does so in order, may give up, and learns at once when the connection
//! has gone.
//!
//! **Waking.** A pusher queues under the lock, then raises `ready`, and wakes the actor if it was down. The actor lowers it
//! *before* it takes the lock, so what was queued after it looked raises it again.
//!
//! **Tied frames.** A frame that must not be written before a certain reply waits aside until the actor has handed that reply
//! to the codec, and then takes its place at the end of its lane. It has its room in the lane from the beginning.
//!
//! **Closing.** `closed` is set before the queues are emptied for the last time, under their lock; whoever queues looks at it
//! under the same lock. So nothing is queued after that, and everything that was is written or counted as lost.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use tokio::sync::Semaphore;

use crate::push::{Lost, PushOptions};
use crate::session::Facts;
use crate::{FrameLike, PushError, PushPolicy, PushPriority, ReplyTicket, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    /// The connection that it is the outbox of, if there is one.
    facts: Option<Arc<Facts>>,
    lanes: OnceLock<Box<Lanes<F>>>,
    ready: AtomicBool,
    closed: AtomicBool,
    /// Frames wait for a reply. Changed under the lock of the queues.
    tied: AtomicBool,
    /// The alarm of the connection went off.
    rung: AtomicBool,
    /// Who is woken when it becomes ready.
    actor: Mutex<Option<Waker>>,
    /// How many can push.
    pub(crate) handles: AtomicUsize,
}

struct Lanes<F> {
    high: Semaphore,
    low: Semaphore,
    /// Of each lane its own, so that an urgent frame does not wait for others to be read.
    high_bytes: Semaphore,
    low_bytes: Semaphore,
    queues: Mutex<Queues<F>>,
    /// With which frame the connection is to end, when it is.
    last: Mutex<Option<F>>,
}

struct Queues<F> {
    high: VecDeque<Queued<F>>,
    low: VecDeque<Queued<F>>,
    slots: HashMap<Slot, Latest<F>>,
    slot_bytes: usize,
    /// The slots in the order in which they were filled. Each is either here or among the tied, once.
    filled: VecDeque<Slot>,
    /// What waits for a reply: by the request, and in the order in which it came.
    tied: BTreeMap<(u64, u64), Tied<F>>,
    tied_so_far: u64,
}

/// A frame in a lane, and what it weighs there.
struct Queued<F> {
    frame: F,
    weight: u32,
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

    /// Takes in a newer frame, and gives the one that it replaces. It waits for whatever that one waited for.
    fn replace(&mut self, mut newer: Unsent<F>) -> Option<Unsent<F>> {
        newer.after = newer.after.max(self.newest.after);
        let before = std::mem::replace(&mut self.newest, newer);
        if self.earlier.is_none() && before.after < self.newest.after {
            self.earlier = Some(before);
            return None;
        }
        Some(before)
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
            lanes: OnceLock::new(),
            ready: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            tied: AtomicBool::new(false),
            rung: AtomicBool::new(false),
            actor: Mutex::new(None),
            handles: AtomicUsize::new(0),
        }
    }

    pub(crate) fn facts(&self) -> Option<&Facts> {
        self.facts.as_deref()
    }

    fn lanes(&self) -> &Lanes<F> {
        let lanes = self.lanes.get_or_init(|| {
            Box::new(Lanes {
                high: Semaphore::new(self.options.high),
                low: Semaphore::new(self.options.low),
                high_bytes: Semaphore::new(self.options.bytes),
                low_bytes: Semaphore::new(self.options.bytes),
                queues: Mutex::new(Queues::new()),
                last: Mutex::new(None),
            })
        });
        // The other half of the fence in `refuse`.
        fence(SeqCst);
        lanes
    }

    /// The request that a ticket names, or zero if it is another connection's.
    fn request(&self, ticket: ReplyTicket) -> u64 {
        self.facts().filter(|facts| facts.id == ticket.connection).map_or(0, |_| ticket.request)
    }

    /// Queues a frame when there is room for it.
    pub(crate) async fn push(&self, frame: F, priority: PushPriority) -> Result<(), PushError> {
        let lanes = self.lanes();
        if self.is_closed() {
            return Err(PushError::Closed);
        }
        let weight = self.weight(&frame);
        let lane = lanes.lane(priority).acquire().await.map_err(|_| PushError::Closed)?;
        let bytes = lanes.bytes(priority).acquire_many(weight).await.map_err(|_| PushError::Closed)?;
        self.queue(lanes, Queued { frame, weight }, priority, 0).map_err(|_| PushError::Closed)?;
        lane.forget();
        bytes.forget();
        Ok(())
    }

    /// Queues a frame if there is room for it now; otherwise it comes back.
    fn try_push(&self, frame: F, priority: PushPriority, after: Option<ReplyTicket>) -> Result<(), (PushError, F)> {
        let lanes = self.lanes();
        let Ok(lane) = lanes.lane(priority).try_acquire() else { return Err((self.why_not(), frame)) };
        let weight = self.weight(&frame);
        let Ok(bytes) = lanes.bytes(priority).try_acquire_many(weight) else { return Err((self.why_not(), frame)) };
        let after = after.map_or(0, |ticket| self.request(ticket));
        match self.queue(lanes, Queued { frame, weight }, priority, after) {
            Ok(()) => {
                lane.forget();
                bytes.forget();
                Ok(())
            }
            Err(frame) => Err((PushError::Closed, frame)),
        }
    }

    /// Queues a frame without waiting; if there is no room, the policy decides.
    pub(crate) fn push_or_drop(
        &self,
        frame: F,
        priority: PushPriority,
        policy: PushPolicy,
        after: Option<ReplyTicket>,
    ) -> Result<(), PushError> {
        match self.try_push(frame, priority, after) {
            Err((PushError::QueueFull, frame)) if policy != PushPolicy::ReturnErrorIfFull => {
                self.options.lose(frame, Lost::Dropped { warn: policy == PushPolicy::WarnAndDropIfFull });
                Ok(())
            }
            ended => ended.map_err(|(error, _)| error),
        }
    }

    fn why_not(&self) -> PushError {
        if self.is_closed() { PushError::Closed } else { PushError::QueueFull }
    }

    fn queue(&self, lanes: &Lanes<F>, queued: Queued<F>, priority: PushPriority, after: u64) -> Result<(), F> {
        let mut queues = lanes.lock();
        if self.is_closed() {
            return Err(queued.frame);
        }
        if after > 0 {
            queues.tie(after, Tied::Frame(priority, queued));
            self.tied.store(true, SeqCst);
        } else {
            queues.lane(priority).push_back(queued);
        }
        drop(queues);
        self.announce();
        Ok(())
    }

    /// Puts a frame into a slot, in place of the one that may be there.
    pub(crate) fn push_latest(&self, slot: Slot, frame: F, after: Option<ReplyTicket>) -> Result<(), PushError> {
        let size = frame.size();
        let after = after.map_or(0, |ticket| self.request(ticket));
        let mut queues = self.lanes().lock();
        if self.is_closed() {
            return Err(PushError::Closed);
        }
        let Queues { slots, slot_bytes, filled, .. } = &mut *queues;
        let newer = Unsent { frame, size, after };
        // One that is larger than all the room has it to itself.
        if *slot_bytes > 0
            && slot_bytes.saturating_add(size)
                > self.options.slot_bytes.saturating_add(slots.get(&slot).map_or(0, Latest::size))
        {
            return Err(PushError::QueueFull);
        }
        let count = slots.len();
        let replaced = match slots.entry(slot) {
            Entry::Occupied(mut unsent) => {
                // It stays where it is. If that is too early for it, it is put aside when its turn comes.
                *slot_bytes -= unsent.get().size();
                let replaced = unsent.get_mut().replace(newer);
                *slot_bytes += unsent.get().size();
                replaced
            }
            Entry::Vacant(_) if count >= self.options.slots => return Err(PushError::QueueFull),
            Entry::Vacant(vacant) => {
                *slot_bytes += size;
                vacant.insert(Latest { earlier: None, newest: newer });
                filled.push_back(slot);
                None
            }
        };
        drop(queues);
        if replaced.is_some() {
            self.options.note_replaced();
        }
        self.announce();
        Ok(())
    }

    fn announce(&self) {
        if !self.ready.swap(true, SeqCst) {
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

    /// So many requests have been answered: what waited for that has its turn.
    pub(crate) fn release(&self, answered: u64) {
        let Some(lanes) = self.lanes.get() else { return };
        let mut queues = lanes.lock();
        queues.release(answered);
        self.tied.store(!queues.tied.is_empty(), SeqCst);
    }

    /// Takes the next frame of that priority. Slots are low, by turns with the lane; those that wait for a reply which is not
    /// among the first `answered` are put aside.
    pub(crate) fn take(&self, priority: PushPriority, turn: bool, answered: u64) -> Option<F> {
        let lanes = self.lanes.get()?;
        let mut queues = lanes.lock();
        let slot_first = priority == PushPriority::Low && (turn || queues.low.is_empty());
        if slot_first && let Some((frame, outdated)) = queues.next_slot(answered, &self.tied) {
            drop(queues);
            if outdated.is_some() {
                self.options.note_replaced();
            }
            return Some(frame);
        }
        let Queued { frame, weight } = queues.lane(priority).pop_front()?;
        drop(queues);
        lanes.lane(priority).add_permits(1);
        lanes.bytes(priority).add_permits(weight as usize);
        Some(frame)
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
        self.closed.store(true, SeqCst);
        // Either this sees the lanes, or whoever makes them sees that it is closed.
        fence(SeqCst);
        let Some(lanes) = self.lanes.get() else { return };
        lanes.high.close();
        lanes.low.close();
        lanes.high_bytes.close();
        lanes.low_bytes.close();
    }

    /// The connection falls idle.
    pub(crate) fn shrink(&self) {
        if let Some(lanes) = self.lanes.get() {
            lanes.lock().shrink();
        }
    }

    /// Nothing is queued any more, and when what was queued is written the connection ends with this frame. Told to the actor
    /// once.
    pub(crate) fn leave(&self, last: Option<F>) {
        let mut place = lock(&self.lanes().last);
        if self.is_closed() {
            return;
        }
        *place = last;
        // The actor sees that it is closed only now, and finds the frame.
        self.refuse();
        drop(place);
        self.wake();
    }

    /// The frame with which the connection is to end, if there is one.
    pub(crate) fn last(&self) -> Option<F> {
        lock(&self.lanes.get()?.last).take()
    }

    /// The connection has gone. What was queued goes where lost frames go.
    pub(crate) fn close(&self) {
        self.refuse();
        let Some(lanes) = self.lanes.get() else { return };
        let mut queues = lanes.lock();
        queues.release(u64::MAX);
        let Queues { high, low, slots, filled, .. } = &mut *queues;
        let mut left: Vec<F> = high.drain(..).chain(low.drain(..)).map(|queued| queued.frame).collect();
        for Latest { earlier, newest } in filled.drain(..).filter_map(|slot| slots.remove(&slot)) {
            left.extend(earlier.into_iter().chain([newest]).map(|unsent| unsent.frame));
        }
        drop(queues);
        for frame in left {
            self.lose(frame);
        }
    }

    /// A frame was not written, or not all of it, when the connection ended.
    pub(crate) fn lose(&self, frame: F) {
        self.options.lose(frame, Lost::Unsent);
    }
}

impl<F> Lanes<F> {
    fn lane(&self, priority: PushPriority) -> &Semaphore {
        match priority {
            PushPriority::High => &self.high,
            PushPriority::Low => &self.low,
        }
    }

    fn bytes(&self, priority: PushPriority) -> &Semaphore {
        match priority {
            PushPriority::High => &self.high_bytes,
            PushPriority::Low => &self.low_bytes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queues<F>> {
        lock(&self.queues)
    }
}

impl<F> Queues<F> {
    fn new() -> Self {
        Self {
            high: VecDeque::new(),
            low: VecDeque::new(),
            slots: HashMap::new(),
            slot_bytes: 0,
            filled: VecDeque::new(),
            tied: BTreeMap::new(),
            tied_so_far: 0,
        }
    }

    fn lane(&mut self, priority: PushPriority) -> &mut VecDeque<Queued<F>> {
        match priority {
            PushPriority::High => &mut self.high,
            PushPriority::Low => &mut self.low,
        }
    }

    fn tie(&mut self, after: u64, tied: Tied<F>) {
        self.tied_so_far += 1;
        self.tied.insert((after, self.tied_so_far), tied);
    }

    fn release(&mut self, answered: u64) {
        while let Some(first) = self.tied.first_entry().filter(|first| first.key().0 <= answered) {
            match first.remove() {
                Tied::Frame(priority, queued) => self.lane(priority).push_back(queued),
                Tied::Slot(slot) => self.filled.push_back(slot),
            }
        }
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
        fn idle<T>(queue: &mut VecDeque<T>) {
            if queue.is_empty() && queue.capacity() > IDLE {
                *queue = VecDeque::new();
            }
        }
        idle(&mut self.high);
        idle(&mut self.low);
        idle(&mut self.filled);
        if self.slots.is_empty() && self.slots.capacity() > IDLE {
            self.slots = HashMap::new();
        }
    }
}

/// So many places an empty queue may keep.
const IDLE: usize = 8;

/// Nothing of ours panics with a lock held; a frame's own code is not run under one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
