//! The queues of an outbox, without a lock: two lanes, slots, and frames that are tied to a reply.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::lane::{Lane, Queued};
use crate::push::PushOptions;
use crate::{PushPriority, Slot};

/// The capacity that an empty queue keeps, in entries.
const IDLE_CAPACITY: usize = 8;

pub(super) struct Queues<F> {
    /// The frame of a tick, which is taken before all others.
    pub(super) tick_frame: Option<Box<F>>,
    pub(super) high: Lane<F>,
    pub(super) low: Lane<F>,
    slots: HashMap<Slot, SlotFrames<F>>,
    slot_bytes: usize,
    /// The slots that hold a frame, in the order in which they were filled. A slot is listed once, either here or in `tied`.
    filled: VecDeque<Slot>,
    /// Frames and slots that are tied to a reply, by the number of the request and the value of `tie_count`.
    tied: BTreeMap<(u64, u64), Tied<F>>,
    /// The number of calls of [`tie`](Self::tie).
    tie_count: u64,
    /// The weight of the frames in `tied`, without those of slots.
    tied_bytes: usize,
    /// The memory of the frames as recorded in the account of the connection, in multiples of
    /// [`STEP_BYTES`](crate::memory::STEP_BYTES).
    pub(super) recorded_steps: u32,
    /// The protocol must be notified when the queues are empty, because a frame was pushed since the last notification.
    pub(super) must_report_drained: bool,
    /// The last frame of the connection, set by the handle that closed it.
    pub(super) last: Option<F>,
}

/// The frames of a slot: the newest, and an earlier one if it is tied to an earlier reply. Without the earlier frame, a slot whose
/// frames are tied to the requests of its own connection would never be sent while a request is always in flight.
pub(super) struct SlotFrames<F> {
    earlier: Option<SlotFrame<F>>,
    newest: SlotFrame<F>,
}

pub(super) struct SlotFrame<F> {
    pub(super) frame: F,
    pub(super) size: usize,
    /// The number of the request that the frame is tied to. Zero if it is not tied.
    pub(super) after: u64,
}

impl<F> SlotFrames<F> {
    fn size(&self) -> usize {
        self.newest.size + self.earlier.as_ref().map_or(0, |earlier| earlier.size)
    }

    /// Puts a newer frame into the slot, and returns the frames that are dropped for it. The newer frame is also tied to the reply that
    /// the newest frame was tied to. The replaced frame is kept as the earlier frame if there is none yet, its reply comes before that
    /// of the newer frame, and it has at most `free_bytes`. An existing earlier frame of more than `free_bytes` is dropped.
    fn replace(&mut self, mut newer: SlotFrame<F>, free_bytes: usize) -> [Option<SlotFrame<F>>; 2] {
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
            tick_frame: None,
            high: Lane::new(options.high_capacity, options.lane_bytes),
            low: Lane::new(options.low_capacity, options.lane_bytes),
            slots: HashMap::new(),
            slot_bytes: 0,
            filled: VecDeque::new(),
            tied: BTreeMap::new(),
            tie_count: 0,
            tied_bytes: 0,
            recorded_steps: 0,
            must_report_drained: false,
            last: None,
        }
    }

    pub(super) fn lane(&mut self, priority: PushPriority) -> &mut Lane<F> {
        match priority {
            PushPriority::High => &mut self.high,
            PushPriority::Low => &mut self.low,
        }
    }

    /// Returns the number and the total weight of the frames in the lanes.
    pub(super) fn lane_totals(&self) -> (usize, usize) {
        let ((high, high_bytes), (low, low_bytes)) = (self.high.totals(), self.low.totals());
        (high + low, high_bytes + low_bytes)
    }

    /// Returns the size of all queued frames, including tied ones.
    pub(super) fn bytes(&self) -> usize {
        self.lane_totals().1 + self.slot_bytes + self.tied_bytes
    }

    /// Returns the size of all queued frames except those of a slot.
    pub(super) fn bytes_except(&self, slot: Slot) -> usize {
        self.bytes() - self.slots.get(&slot).map_or(0, SlotFrames::size)
    }

    /// Returns the memory of all queued frames, with their entries in the queues.
    pub(super) fn held_bytes(&self) -> usize {
        let frames = self.lane_totals().0 + self.slots.len() + self.tied.len();
        self.bytes() + frames * size_of::<SlotFrames<F>>()
    }

    /// Whether no frame is queued or tied.
    pub(super) fn is_empty(&self) -> bool {
        self.high.is_empty() && self.low.is_empty() && self.slots.is_empty() && self.tied.is_empty()
    }

    pub(super) fn has_tied(&self) -> bool {
        !self.tied.is_empty()
    }

    /// Ties a frame or slot to the reply to the request with this number.
    pub(super) fn tie(&mut self, after: u64, tied: Tied<F>) {
        self.tie_count += 1;
        if let Tied::Frame(_, queued) = &tied {
            self.tied_bytes += queued.weight as usize;
        }
        self.tied.insert((after, self.tie_count), tied);
    }

    /// Moves the frames and slots that are tied to the first `answered` requests to the end of their queues.
    pub(super) fn release_tied(&mut self, answered: u64) {
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
        newer: SlotFrame<F>,
        options: &PushOptions<F>,
    ) -> Result<[Option<SlotFrame<F>>; 2], SlotFrame<F>> {
        let unsent = self.slots.get(&slot);
        let others = self.slot_bytes - unsent.map_or(0, SlotFrames::size);
        let bytes = others.saturating_add(newer.size);
        // A frame that is larger than the limit is accepted if all other slots are empty.
        let is_too_large = others > 0 && bytes > options.slot_bytes;
        if is_too_large || unsent.is_none() && self.slots.len() >= options.max_slots {
            return Err(newer);
        }
        match self.slots.entry(slot) {
            Entry::Occupied(mut unsent) => {
                // The slot keeps its position. If the frame is still tied when the position is reached, `pop_slot` ties the slot.
                let replaced = unsent.get_mut().replace(newer, options.slot_bytes.saturating_sub(bytes));
                self.slot_bytes = others + unsent.get().size();
                Ok(replaced)
            }
            Entry::Vacant(vacant) => {
                self.slot_bytes = bytes;
                self.must_report_drained = true;
                vacant.insert(SlotFrames { earlier: None, newest: newer });
                self.filled.push_back(slot);
                Ok([None, None])
            }
        }
    }

    /// Takes the frame of the next slot, and the earlier frame of the slot that it makes obsolete. If the newest frame is tied to a
    /// request after the first `answered` ones, the slot is tied and `has_tied` is set; its earlier frame may be taken.
    pub(super) fn pop_slot(&mut self, answered: u64, has_tied: &AtomicBool) -> Option<(F, Option<SlotFrame<F>>)> {
        loop {
            let slot = self.filled.pop_front()?;
            let Entry::Occupied(mut latest) = self.slots.entry(slot) else { continue };
            let SlotFrames { earlier, newest } = latest.get_mut();
            if newest.after <= answered {
                let latest = latest.remove();
                self.slot_bytes -= latest.size();
                return Some((latest.newest.frame, latest.earlier));
            }
            let ready = earlier.take_if(|earlier| earlier.after <= answered);
            let after = earlier.as_ref().map_or(newest.after, |earlier| earlier.after);
            self.tie(after, Tied::Slot(slot));
            has_tied.store(true, SeqCst);
            if let Some(SlotFrame { frame, size, .. }) = ready {
                self.slot_bytes -= size;
                return Some((frame, None));
            }
        }
    }

    /// Removes a slot and its position, so that it has only one position when it is filled again. Returns its frames.
    pub(super) fn take_slot(&mut self, slot: Slot) -> Option<SlotFrames<F>> {
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
        self.release_tied(u64::MAX);
        let mut frames: Vec<F> = self.high.drain().chain(self.low.drain()).chain(self.last.take()).collect();
        self.slot_bytes = 0;
        for SlotFrames { earlier, newest } in self.filled.drain(..).filter_map(|slot| self.slots.remove(&slot)) {
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
