//! The queues of an outbox, without a lock: two lanes, slots, and frames that are tied to a reply.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::lane::{Lane, Queued};
use crate::push::PushOptions;
use crate::{PushPriority, Slot};

/// An empty queue keeps memory for this many entries.
const IDLE_CAPACITY: usize = 8;

pub(super) struct Queues<F> {
    /// A frame of the connection itself, which is taken before all others.
    pub(super) own: Option<Box<F>>,
    pub(super) high: Lane<F>,
    pub(super) low: Lane<F>,
    slots: HashMap<Slot, Latest<F>>,
    slot_bytes: usize,
    /// The slots that hold a frame, in the order in which they were filled. Each of them is either here or in `tied`, once.
    filled: VecDeque<Slot>,
    /// Frames and slots that wait for a reply, by the number of the request and the order in which they were tied.
    tied: BTreeMap<(u64, u64), Tied<F>>,
    tied_so_far: u64,
    /// The weight of the tied frames that are not in a slot.
    tied_bytes: usize,
    /// The memory of the frames as recorded in the account of the connection, in multiples of
    /// [`STEP_BYTES`](crate::memory::STEP_BYTES).
    pub(super) recorded_steps: u32,
    /// A frame was pushed since the queues were last reported as drained.
    pub(super) undrained: bool,
    /// The frame that a handle closed the connection with.
    pub(super) last: Option<F>,
}

/// The frames of a slot: the newest, and the one before it if that one waits for an earlier reply. Without the earlier frame, the
/// slot of a connection that always has a request in flight, and causes its own pushes, would never be sent.
pub(super) struct Latest<F> {
    earlier: Option<Unsent<F>>,
    newest: Unsent<F>,
}

pub(super) struct Unsent<F> {
    pub(super) frame: F,
    pub(super) size: usize,
    /// The number of the request whose reply comes first. Zero for none.
    pub(super) after: u64,
}

impl<F> Latest<F> {
    fn size(&self) -> usize {
        self.newest.size + self.earlier.as_ref().map_or(0, |earlier| earlier.size)
    }

    /// Puts a newer frame into the slot, and returns the frames that it replaces. The newer frame waits for the replies that they
    /// waited for. One of them is kept as the earlier frame if it waits for an earlier reply and has at most `free_bytes`.
    fn replace(&mut self, mut newer: Unsent<F>, free_bytes: usize) -> [Option<Unsent<F>>; 2] {
        newer.after = newer.after.max(self.newest.after);
        let (after, before) = (newer.after, std::mem::replace(&mut self.newest, newer));
        if self.earlier.is_none() && before.after < after && before.size <= free_bytes {
            self.earlier = Some(before);
            return [None, None];
        }
        [Some(before), self.earlier.take_if(|earlier| earlier.size > free_bytes)]
    }
}

pub(super) enum Tied<F> {
    Frame(PushPriority, Queued<F>),
    Slot(Slot),
}

impl<F> Queues<F> {
    pub(super) fn new(options: &PushOptions<F>) -> Self {
        Self {
            own: None,
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

    pub(super) fn lane(&mut self, priority: PushPriority) -> &mut Lane<F> {
        match priority {
            PushPriority::High => &mut self.high,
            PushPriority::Low => &mut self.low,
        }
    }

    /// Returns the number of frames in the lanes, and their weight.
    pub(super) fn in_lanes(&self) -> (usize, usize) {
        let ((high, high_bytes), (low, low_bytes)) = (self.high.queued(), self.low.queued());
        (high + low, high_bytes + low_bytes)
    }

    /// Returns the size of all queued frames, tied ones included.
    pub(super) fn bytes(&self) -> usize {
        self.in_lanes().1 + self.slot_bytes + self.tied_bytes
    }

    /// Returns the size of all queued frames except those of a slot.
    pub(super) fn bytes_except(&self, slot: Slot) -> usize {
        self.bytes() - self.slots.get(&slot).map_or(0, Latest::size)
    }

    /// Returns the memory of all queued frames, with their entries in the queues.
    pub(super) fn held_bytes(&self) -> usize {
        let frames = self.in_lanes().0 + self.slots.len() + self.tied.len();
        self.bytes() + frames * size_of::<Latest<F>>()
    }

    /// Whether no frame is queued, tied ones included.
    pub(super) fn is_empty(&self) -> bool {
        self.high.is_empty() && self.low.is_empty() && self.slots.is_empty() && self.tied.is_empty()
    }

    pub(super) fn has_tied(&self) -> bool {
        !self.tied.is_empty()
    }

    /// Holds a frame or slot back until this request has been answered.
    pub(super) fn tie(&mut self, after: u64, tied: Tied<F>) {
        self.tied_so_far += 1;
        if let Tied::Frame(_, queued) = &tied {
            self.tied_bytes += queued.weight as usize;
        }
        self.tied.insert((after, self.tied_so_far), tied);
    }

    /// Moves frames and slots that were tied to the first `answered` requests to the end of their queues.
    pub(super) fn release(&mut self, answered: u64) {
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

    /// Puts a frame into a slot, and returns the frames that it replaces. If it does not fit, it is returned as the error.
    pub(super) fn push_latest(
        &mut self,
        slot: Slot,
        newer: Unsent<F>,
        options: &PushOptions<F>,
    ) -> Result<[Option<Unsent<F>>; 2], Unsent<F>> {
        let unsent = self.slots.get(&slot);
        let others = self.slot_bytes - unsent.map_or(0, Latest::size);
        let bytes = others.saturating_add(newer.size);
        // A frame that is larger than the limit is accepted if no other slot holds any.
        let is_too_large = others > 0 && bytes > options.slot_bytes;
        if is_too_large || unsent.is_none() && self.slots.len() >= options.slots {
            return Err(newer);
        }
        match self.slots.entry(slot) {
            Entry::Occupied(mut unsent) => {
                // The slot keeps its position. If it is too early for the frame, the slot is tied when its turn comes.
                let replaced = unsent.get_mut().replace(newer, options.slot_bytes.saturating_sub(bytes));
                self.slot_bytes = others + unsent.get().size();
                Ok(replaced)
            }
            Entry::Vacant(vacant) => {
                self.slot_bytes = bytes;
                self.undrained = true;
                vacant.insert(Latest { earlier: None, newest: newer });
                self.filled.push_back(slot);
                Ok([None, None])
            }
        }
    }

    /// Takes the next frame of a slot, and the older frame of the same slot that it makes obsolete. Slots that wait for a reply
    /// which is not among the first `answered` are tied, and `has_tied` is set.
    pub(super) fn next_slot(&mut self, answered: u64, has_tied: &AtomicBool) -> Option<(F, Option<Unsent<F>>)> {
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
            has_tied.store(true, SeqCst);
            if let Some(Unsent { frame, size, .. }) = ready {
                self.slot_bytes -= size;
                return Some((frame, None));
            }
        }
    }

    /// Empties a slot and removes its position, so that it has only one when it is filled again. Returns its frames.
    pub(super) fn clear_latest(&mut self, slot: Slot) -> Option<Latest<F>> {
        let latest = self.slots.remove(&slot)?;
        self.slot_bytes -= latest.size();
        if let Some(position) = self.filled.iter().position(|filled| *filled == slot) {
            self.filled.remove(position);
        } else {
            self.tied.retain(|_, tied| !matches!(tied, Tied::Slot(tied) if *tied == slot));
        }
        Some(latest)
    }

    /// Removes the frames of a slot from the low lane and from the tied frames. The caller must give back their capacity.
    pub(super) fn remove_queued(&mut self, slot: Slot) -> Vec<Queued<F>> {
        let mut taken = self.low.clear_slot(slot);
        let is_taken = |tied: &Tied<F>| matches!(tied, Tied::Frame(_, queued) if queued.slot == Some(slot));
        for (_, tied) in self.tied.extract_if(.., |_, tied| is_taken(tied)) {
            if let Tied::Frame(_, queued) = tied {
                self.tied_bytes -= queued.weight as usize;
                taken.push(queued);
            }
        }
        taken
    }

    /// Takes all pushed frames, and the last frame.
    pub(super) fn drain(&mut self) -> Vec<F> {
        self.release(u64::MAX);
        let mut frames: Vec<F> = self.high.drain().chain(self.low.drain()).chain(self.last.take()).collect();
        self.slot_bytes = 0;
        for Latest { earlier, newest } in self.filled.drain(..).filter_map(|slot| self.slots.remove(&slot)) {
            frames.extend(earlier.into_iter().chain([newest]).map(|unsent| unsent.frame));
        }
        frames
    }

    /// Releases the memory of queues that are empty, except for a few entries.
    pub(super) fn shrink(&mut self) {
        self.high.shrink();
        self.low.shrink();
        if self.filled.is_empty() && self.filled.capacity() > IDLE_CAPACITY {
            self.filled = VecDeque::new();
        }
        if self.slots.is_empty() && self.slots.capacity() > IDLE_CAPACITY {
            self.slots = HashMap::new();
        }
    }
}
