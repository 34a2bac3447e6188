//! What waits to be written to one connection: two lanes by priority, and slots that hold the newest of their kind.
//!
//! The outbox is shared by the actor, which takes from it, and by all who push. It costs a few words until it is first used.
//! Room in a lane is a semaphore, so that whoever waits does so in order, may give up, and learns at once when the connection
//! has gone.
//!
//! **Waking.** A pusher queues under the lock, then raises `ready`, and wakes the actor if it was down. The actor lowers it
//! *before* it takes the lock, so what was queued after it looked raises it again.
//!
//! **Closing.** `closed` is set before the queues are emptied for the last time, under their lock; whoever queues looks at it
//! under the same lock. So nothing is queued after that, and everything that was is handed to whoever closes.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use tokio::sync::Semaphore;

use crate::push::{Lost, PushOptions};
use crate::{FrameLike, PushError, PushPriority, Slot};

pub(crate) struct Outbox<F> {
    options: Arc<PushOptions<F>>,
    lanes: OnceLock<Box<Lanes<F>>>,
    ready: AtomicBool,
    closed: AtomicBool,
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
}

struct Queues<F> {
    high: VecDeque<F>,
    low: VecDeque<F>,
    slots: HashMap<Slot, F>,
    /// The slots in the order in which they were filled, each once.
    filled: VecDeque<Slot>,
}

impl<F: FrameLike> Outbox<F> {
    pub(crate) fn new(options: Arc<PushOptions<F>>) -> Self {
        Self {
            options,
            lanes: OnceLock::new(),
            ready: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            actor: Mutex::new(None),
            handles: AtomicUsize::new(0),
        }
    }

    fn lanes(&self) -> &Lanes<F> {
        let lanes = self.lanes.get_or_init(|| {
            let queues =
                Queues { high: VecDeque::new(), low: VecDeque::new(), slots: HashMap::new(), filled: VecDeque::new() };
            Box::new(Lanes {
                high: Semaphore::new(self.options.high),
                low: Semaphore::new(self.options.low),
                high_bytes: Semaphore::new(self.options.bytes),
                low_bytes: Semaphore::new(self.options.bytes),
                queues: Mutex::new(queues),
            })
        });
        // The other half of the fence in `close`.
        fence(SeqCst);
        lanes
    }

    /// Queues a frame when there is room for it.
    pub(crate) async fn push(&self, frame: F, priority: PushPriority) -> Result<(), PushError> {
        let lanes = self.lanes();
        if self.is_closed() {
            return Err(PushError::Closed);
        }
        let lane = lanes.lane(priority).acquire().await.map_err(|_| PushError::Closed)?;
        let bytes = lanes.bytes(priority).acquire_many(self.weight(&frame)).await.map_err(|_| PushError::Closed)?;
        self.queue(lanes, frame, priority).map_err(|_| PushError::Closed)?;
        lane.forget();
        bytes.forget();
        Ok(())
    }

    /// Queues a frame if there is room for it now; otherwise it comes back.
    pub(crate) fn try_push(&self, frame: F, priority: PushPriority) -> Result<(), (PushError, F)> {
        let lanes = self.lanes();
        let Ok(lane) = lanes.lane(priority).try_acquire() else { return Err((self.why_not(), frame)) };
        let Ok(bytes) = lanes.bytes(priority).try_acquire_many(self.weight(&frame)) else {
            return Err((self.why_not(), frame));
        };
        match self.queue(lanes, frame, priority) {
            Ok(()) => {
                lane.forget();
                bytes.forget();
                Ok(())
            }
            Err(frame) => Err((PushError::Closed, frame)),
        }
    }

    fn why_not(&self) -> PushError {
        if self.is_closed() { PushError::Closed } else { PushError::QueueFull }
    }

    fn queue(&self, lanes: &Lanes<F>, frame: F, priority: PushPriority) -> Result<(), F> {
        let mut queues = lanes.lock();
        if self.is_closed() {
            return Err(frame);
        }
        match priority {
            PushPriority::High => queues.high.push_back(frame),
            PushPriority::Low => queues.low.push_back(frame),
        }
        drop(queues);
        self.announce();
        Ok(())
    }

    /// Puts a frame into a slot. What it replaces comes back.
    pub(crate) fn push_latest(&self, slot: Slot, frame: F) -> Result<Option<F>, PushError> {
        let lanes = self.lanes();
        let mut queues = lanes.lock();
        if self.is_closed() {
            return Err(PushError::Closed);
        }
        let Queues { slots, filled, .. } = &mut *queues;
        let count = slots.len();
        let replaced = match slots.entry(slot) {
            Entry::Occupied(mut unsent) => Some(unsent.insert(frame)),
            Entry::Vacant(_) if count >= self.options.slots => return Err(PushError::QueueFull),
            Entry::Vacant(vacant) => {
                vacant.insert(frame);
                filled.push_back(slot);
                None
            }
        };
        drop(queues);
        self.announce();
        Ok(replaced)
    }

    fn announce(&self) {
        if !self.ready.swap(true, SeqCst) {
            self.wake();
        }
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = &*lock(&self.actor) {
            waker.wake_by_ref();
        }
    }

    /// Whom to wake. Seldom another one than before, so it costs a comparison.
    pub(crate) fn register(&self, waker: &Waker) {
        let mut actor = lock(&self.actor);
        match &mut *actor {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    /// Whether something may be queued. Lowers the flag: to be followed by [`take`](Self::take) until that finds nothing.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst) && self.ready.swap(false, SeqCst)
    }

    /// Not everything was taken.
    pub(crate) fn remain_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Takes the next frame of that priority. Slots are low, by turns with the lane.
    pub(crate) fn take(&self, priority: PushPriority, turn: bool) -> Option<F> {
        let lanes = self.lanes.get()?;
        let mut queues = lanes.lock();
        let (frame, lane) = match priority {
            PushPriority::High => (queues.high.pop_front()?, Some(&lanes.high)),
            PushPriority::Low if turn || queues.low.is_empty() => match queues.next_slot() {
                Some(frame) => (frame, None),
                None => (queues.low.pop_front()?, Some(&lanes.low)),
            },
            PushPriority::Low => (queues.low.pop_front()?, Some(&lanes.low)),
        };
        drop(queues);
        if let Some(lane) = lane {
            lane.add_permits(1);
            lanes.bytes(priority).add_permits(self.weight(&frame) as usize);
        }
        Some(frame)
    }

    /// A frame larger than all the room waits until it is empty, rather than for ever.
    fn weight(&self, frame: &F) -> u32 {
        u32::try_from(frame.size().min(self.options.bytes)).unwrap_or(u32::MAX)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// The connection has gone: nothing is queued any more, and whoever waits is told. What was queued goes where lost
    /// frames go.
    pub(crate) fn close(&self) {
        self.closed.store(true, SeqCst);
        // Either this sees the lanes, or whoever makes them sees that it is closed.
        fence(SeqCst);
        let Some(lanes) = self.lanes.get() else { return };
        lanes.high.close();
        lanes.low.close();
        lanes.high_bytes.close();
        lanes.low_bytes.close();
        let mut queues = lanes.lock();
        let Queues { high, low, slots, filled } = &mut *queues;
        let mut left: Vec<F> = high.drain(..).chain(low.drain(..)).collect();
        left.extend(filled.drain(..).filter_map(|slot| slots.remove(&slot)));
        drop(queues);
        for frame in left {
            self.options.lose(frame, Lost::Unsent);
        }
    }

    pub(crate) fn options(&self) -> &PushOptions<F> {
        &self.options
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
    fn next_slot(&mut self) -> Option<F> {
        let slot = self.filled.pop_front()?;
        self.slots.remove(&slot)
    }
}

/// Nothing of ours panics with a lock held; a frame's own code is not run under one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
