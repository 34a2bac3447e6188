//! The queue of one stripe: messages in a slab, linked per key, and the keys that are ready.
//!
//! It has no lock, thread or clock. Messages arrive in batches, in the order of their submission. A message whose key is free is
//! dequeued directly from the batch; a message whose key is busy is *sorted in* and waits in the slab. So the slab holds only messages
//! that wait for their key, and stays small. A key exists here only while it has a message that is sorted in or being handled. It is
//! in one of three states, and only messages of a `Ready` or absent key are dequeued, so no two messages of a key are handled at the
//! same time:
//!
//! ```text
//!             next, from the arrivals
//!     ┌───────────────────────────────────┐
//!     │       sorted in             next  ▼  done, nothing queued
//!  (absent) ──────▶ Ready ──────────────▶ Running ─────────────────────▶ (absent)
//!                     ▲                    │   │
//!                     │ done, more queued  │   │ retry: the message goes back to the front
//!                     ├────────────────────┘   ▼
//!                     └────────────────────── Held, until it is due
//!                        due
//! ```
//!
//! [`Tracking`] decides what is stored for a key that is being handled and has nothing queued. Usually that is less than a queue,
//! because creating and removing a queue would be most of the cost of a message here.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::BuildHasher;
use std::time::Instant;

use hashbrown::{DefaultHashBuilder, HashTable};
use slab::Slab;

use crate::Key;
use crate::message::Envelope;

/// A token for the key of a dequeued message, until [`Stripe::done`] or [`Stripe::retry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn(u32);

impl Turn {
    /// The turn of a key that is not tracked.
    pub(crate) const UNTRACKED: Self = Self(NIL);
}

const NIL: u32 = u32::MAX;
/// Set in a turn that is an index of `running` and not of `queues`.
const RUNNING: u32 = 1 << 31;

/// What a stripe stores for a key that is being handled and has no queued messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Nothing: only one worker takes messages from the stripe.
    Nothing,
    /// The key, in a list with at most one entry per worker.
    Key,
    /// A queue with the number of messages and bytes of the key.
    Load,
}

pub(crate) struct Stripe<P> {
    messages: Slab<Node<P>>,
    queues: Slab<KeyQueue>,
    /// Finds the queue of a key.
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// Contains every queue in state `Ready`. Queues that are no longer in that state are skipped.
    ready: VecDeque<u32>,
    /// Queues in state `Held`, each once.
    held: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Messages that have not been sorted in, in order. They are behind all messages that have.
    arrivals: VecDeque<Envelope<P>>,
    /// Whether [`next`](Self::next) tries the arrivals before the ready keys. Alternates.
    arrivals_first: bool,
    tracking: Tracking,
    /// Keys being handled that had no queued messages when their turn began. Free slots are reused.
    running: Vec<Option<RunningKey>>,
}

/// The maximum number of arrivals that are sorted in before a ready key has its turn.
const MAX_SORT_IN: usize = 32;

struct Node<P> {
    envelope: Envelope<P>,
    next: u32,
}

struct KeyQueue {
    key: Key,
    head: u32,
    tail: u32,
    state: KeyState,
    /// The number of messages of the key, including the one being handled.
    count: usize,
    /// The bytes of these messages.
    bytes: usize,
}

struct RunningKey {
    key: Key,
    bytes: usize,
    /// The queue of the key, or [`NIL`].
    queue: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyState {
    Ready,
    Running,
    Held,
}

impl<P> Stripe<P> {
    pub(crate) fn new(tracking: Tracking) -> Self {
        Self {
            messages: Slab::new(),
            queues: Slab::new(),
            index: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            ready: VecDeque::new(),
            held: BinaryHeap::new(),
            arrivals: VecDeque::new(),
            arrivals_first: false,
            tracking,
            running: Vec::new(),
        }
    }

    /// Queues a message behind the others of its key.
    fn push(&mut self, envelope: Envelope<P>) {
        let key = envelope.key;
        let number = self.busy_queue(key).unwrap_or_else(|| {
            let number =
                self.insert(KeyQueue { key, head: NIL, tail: NIL, state: KeyState::Ready, count: 0, bytes: 0 });
            self.ready.push_back(number);
            number
        });
        self.link(number, envelope);
    }

    fn link(&mut self, number: u32, envelope: Envelope<P>) {
        let queue = &mut self.queues[number as usize];
        queue.count += 1;
        queue.bytes += envelope.bytes;
        let node = id(self.messages.insert(Node { envelope, next: NIL }));
        match std::mem::replace(&mut queue.tail, node) {
            NIL => queue.head = node,
            tail => self.messages[tail as usize].next = node,
        }
    }

    fn insert(&mut self, queue: KeyQueue) -> u32 {
        let Self { index, queues, hasher, .. } = self;
        let number = id(queues.insert(queue));
        let hash = |&number: &u32| hasher.hash_one(queues[number as usize].key.0);
        index.insert_unique(hash(&number), number, hash);
        number
    }

    /// Returns the buffer of arrivals, to append to.
    pub(crate) fn arrivals(&mut self) -> &mut VecDeque<Envelope<P>> {
        &mut self.arrivals
    }

    /// Sorts in all arrivals.
    pub(crate) fn sort_in(&mut self) {
        while let Some(envelope) = self.arrivals.pop_front() {
            self.push(envelope);
        }
    }

    /// Dequeues the next message: alternately from the arrivals and from the key that has been ready longest. `now` is called only if
    /// keys are held. The turn is returned in `turn`, because a tuple would copy the message once more.
    #[inline(always)]
    pub(crate) fn next(&mut self, now: impl FnOnce() -> Instant, turn: &mut Turn) -> Option<Envelope<P>> {
        self.release_due(now);
        self.arrivals_first = !self.arrivals_first;
        if self.arrivals_first || self.ready.is_empty() {
            // Sorting in is limited only if a ready key is waiting.
            let limit = if self.ready.is_empty() { usize::MAX } else { MAX_SORT_IN };
            let next = self.next_arrival(limit, turn);
            if next.is_some() {
                return next;
            }
        }
        self.next_ready(turn)
    }

    #[inline(always)]
    fn next_arrival(&mut self, limit: usize, turn: &mut Turn) -> Option<Envelope<P>> {
        for _ in 0..limit {
            let first = self.arrivals.front()?;
            let (key, bytes) = (first.key, first.bytes);
            if let Some(number) = self.busy_queue(key) {
                let envelope = self.arrivals.pop_front()?;
                self.link(number, envelope);
                continue;
            }
            *turn = match self.tracking {
                Tracking::Nothing => Turn::UNTRACKED,
                Tracking::Key => Turn(self.run(RunningKey { key, bytes, queue: NIL })),
                Tracking::Load => {
                    Turn(self.insert(KeyQueue { key, head: NIL, tail: NIL, state: KeyState::Running, count: 1, bytes }))
                }
            };
            return self.arrivals.pop_front();
        }
        None
    }

    fn run(&mut self, running: RunningKey) -> u32 {
        let vacant = self.running.iter().position(Option::is_none).unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        self.running[vacant] = Some(running);
        id(vacant) | RUNNING
    }

    /// Returns the queue of a key that has a message queued or being handled. Creates it if necessary.
    #[inline(always)]
    fn busy_queue(&mut self, key: Key) -> Option<u32> {
        if let Some(slot) = self.running.iter().position(|running| running.as_ref().is_some_and(|it| it.key == key)) {
            return Some(self.queue_of_running(slot));
        }
        self.find(key)
    }

    #[cold]
    fn queue_of_running(&mut self, slot: usize) -> u32 {
        let Some(RunningKey { key, bytes, queue: NIL }) = self.running[slot] else {
            return self.running[slot].as_ref().map_or(NIL, |running| running.queue);
        };
        let queue = self.insert(KeyQueue { key, head: NIL, tail: NIL, state: KeyState::Running, count: 1, bytes });
        self.running[slot] = Some(RunningKey { key, bytes, queue });
        queue
    }

    /// Ends a turn. Returns the queue of its key, or [`NIL`].
    #[inline(always)]
    fn end(&mut self, turn: Turn) -> u32 {
        match turn.0 {
            NIL => NIL,
            slot if slot & RUNNING != 0 => {
                self.running[(slot & !RUNNING) as usize].take().map_or(NIL, |running| running.queue)
            }
            number => number,
        }
    }

    fn next_ready(&mut self, turn: &mut Turn) -> Option<Envelope<P>> {
        loop {
            *turn = Turn(self.ready.pop_front()?);
            let first = self.start(*turn);
            if first.is_some() {
                return first;
            }
        }
    }

    /// Dequeues a message of the `choice`th ready key, modulo their number. For a simulation, which sorts in all arrivals before.
    pub(crate) fn next_of(&mut self, choice: usize, now: Instant, turn: &mut Turn) -> Option<Envelope<P>> {
        self.release_due(|| now);
        loop {
            let position = choice.checked_rem(self.ready.len())?;
            *turn = Turn(self.ready.remove(position)?);
            let first = self.start(*turn);
            if first.is_some() {
                return first;
            }
        }
    }

    fn release_due(&mut self, now: impl FnOnce() -> Instant) {
        if self.held.is_empty() {
            return;
        }
        let now = now();
        while let Some(&Reverse((due, number))) = self.held.peek()
            && due <= now
        {
            self.held.pop();
            self.queues[number as usize].state = KeyState::Ready;
            self.ready.push_back(number);
        }
    }

    /// Dequeues the first message of a ready queue, or removes the queue if it is empty.
    fn start(&mut self, Turn(number): Turn) -> Option<Envelope<P>> {
        self.queues.get(number as usize).filter(|queue| queue.state == KeyState::Ready)?;
        let first = self.unlink_first(number);
        if first.is_some() {
            self.queues[number as usize].state = KeyState::Running;
        } else {
            self.remove(number);
        }
        first
    }

    /// Ends a turn whose message has ended.
    #[inline]
    pub(crate) fn done(&mut self, turn: Turn, bytes: usize) {
        let number = self.end(turn);
        if number == NIL {
            return;
        }
        let queue = &mut self.queues[number as usize];
        queue.count -= 1;
        queue.bytes -= bytes;
        if queue.head == NIL {
            self.remove(number);
        } else {
            queue.state = KeyState::Ready;
            self.ready.push_back(number);
        }
    }

    /// Ends a turn whose message will be retried when it is `due`. The other messages of the key wait for it.
    pub(crate) fn retry(&mut self, turn: Turn, envelope: Envelope<P>, due: Instant) {
        let (key, bytes) = (envelope.key, envelope.bytes);
        let own = self.end(turn);
        let number = if own == NIL {
            let queue = KeyQueue { key, head: NIL, tail: NIL, state: KeyState::Held, count: 0, bytes: 0 };
            let number = self.find(key).unwrap_or_else(|| self.insert(queue));
            let queue = &mut self.queues[number as usize];
            queue.count += 1;
            queue.bytes += bytes;
            number
        } else {
            own
        };
        let next = self.queues[number as usize].head;
        let node = id(self.messages.insert(Node { envelope, next }));
        let queue = &mut self.queues[number as usize];
        queue.head = node;
        if queue.tail == NIL {
            queue.tail = node;
        }
        queue.state = KeyState::Held;
        self.held.push(Reverse((due, number)));
    }

    /// Returns whether a key is ready.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Returns whether a key is ready, or may be after the arrivals have been sorted in.
    pub(crate) fn has_work(&self) -> bool {
        self.has_ready() || !self.arrivals.is_empty()
    }

    /// Returns when the first held key is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.held.peek().map(|Reverse((due, _))| *due)
    }

    /// Returns the messages and bytes of a key, including the message being handled.
    pub(crate) fn load(&self, key: Key) -> (usize, usize) {
        self.find(key).map_or((0, 0), |number| {
            let queue = &self.queues[number as usize];
            (queue.count, queue.bytes)
        })
    }

    /// Removes the oldest queued message of the key.
    pub(crate) fn pop_oldest(&mut self, key: Key) -> Option<Envelope<P>> {
        let number = self.find(key)?;
        self.pop_from(number)
    }

    /// Removes the oldest queued message of the key that has been ready longest.
    pub(crate) fn pop_oldest_of_any(&mut self) -> Option<Envelope<P>> {
        loop {
            let number = *self.ready.front()?;
            match self.queues.get(number as usize).filter(|queue| queue.state == KeyState::Ready) {
                Some(queue) if queue.head != NIL => return self.pop_from(number),
                // Remove an empty queue here, because workers may be stuck, and empty queues would accumulate.
                Some(_) => self.remove(number),
                None => {}
            }
            self.ready.pop_front();
        }
    }

    /// Removes the first message of a queue. The queue stays, even if it is empty, until its next turn.
    fn pop_from(&mut self, number: u32) -> Option<Envelope<P>> {
        // The first message of a held key waits for its retry and is not dropped.
        if self.queues[number as usize].state == KeyState::Held {
            return None;
        }
        let envelope = self.unlink_first(number)?;
        let queue = &mut self.queues[number as usize];
        queue.count -= 1;
        queue.bytes -= envelope.bytes;
        Some(envelope)
    }

    /// Returns the newest queued message of the key.
    pub(crate) fn newest(&mut self, key: Key) -> Option<&mut Envelope<P>> {
        let number = self.find(key)?;
        let tail = self.queues[number as usize].tail;
        self.messages.get_mut(tail as usize).map(|node| &mut node.envelope)
    }

    /// Updates the bytes of a key after a queued message has changed its size.
    pub(crate) fn resize(&mut self, key: Key, from: usize, to: usize) {
        if let Some(number) = self.find(key) {
            let queue = &mut self.queues[number as usize];
            queue.bytes = queue.bytes - from + to;
        }
    }

    /// Removes all messages that are sorted in, key by key. Keys being handled stay.
    pub(crate) fn clear(&mut self) -> Vec<Envelope<P>> {
        let mut all = Vec::with_capacity(self.messages.len());
        let numbers: Vec<u32> = self.queues.iter().map(|(number, _)| id(number)).collect();
        for number in numbers {
            while let Some(envelope) = self.unlink_first(number) {
                let queue = &mut self.queues[number as usize];
                queue.count -= 1;
                queue.bytes -= envelope.bytes;
                all.push(envelope);
            }
            if self.queues[number as usize].state != KeyState::Running {
                self.remove(number);
            }
        }
        self.ready.clear();
        self.held.clear();
        all
    }

    fn unlink_first(&mut self, number: u32) -> Option<Envelope<P>> {
        let queue = &mut self.queues[number as usize];
        let node = self.messages.try_remove(queue.head as usize)?;
        queue.head = node.next;
        if node.next == NIL {
            queue.tail = NIL;
        }
        Some(node.envelope)
    }

    #[inline]
    fn find(&self, key: Key) -> Option<u32> {
        if self.index.is_empty() {
            return None;
        }
        let hash = self.hasher.hash_one(key.0);
        self.index.find(hash, |&number| self.queues[number as usize].key == key).copied()
    }

    fn remove(&mut self, number: u32) {
        let key = self.queues.remove(number as usize).key;
        let hash = self.hasher.hash_one(key.0);
        if let Ok(entry) = self.index.find_entry(hash, |&other| other == number) {
            entry.remove();
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.messages.is_empty()
            && self.queues.is_empty()
            && self.index.is_empty()
            && self.running.iter().all(Option::is_none)
    }
}

fn id(index: usize) -> u32 {
    // The number of messages is limited to far less than 2^31.
    u32::try_from(index).expect("a stripe holds fewer than 2^32 messages")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::{BTreeMap, VecDeque};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::Message;
    use crate::message::Delivery;

    fn envelope(key: u64, payload: u32) -> Envelope<u32> {
        let delivery = Delivery { message: Message::new(key, payload), attempts: 0, asker: None };
        Envelope::seal(delivery, payload as usize % 7, 0)
    }

    #[derive(Debug, Clone)]
    enum Operation {
        Push(u64),
        Next,
        NextOf(usize),
        Done(usize),
        Again(usize, u64),
        PopOldest(u64),
        PopAny,
        Newest(u64),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            4 => (0..5_u64).prop_map(Operation::Push),
            3 => Just(Operation::Next),
            1 => any::<usize>().prop_map(Operation::NextOf),
            3 => any::<usize>().prop_map(Operation::Done),
            1 => (any::<usize>(), 0..9_u64).prop_map(|(which, due)| Operation::Again(which, due)),
            1 => (0..5_u64).prop_map(Operation::PopOldest),
            1 => Just(Operation::PopAny),
            1 => (0..5_u64).prop_map(Operation::Newest),
        ]
    }

    #[test]
    fn empty_queues_do_not_accumulate() {
        let mut stripe = Stripe::new(Tracking::Key);
        for key in 0..100 {
            stripe.push(envelope(key, 1));
            assert_eq!(stripe.pop_oldest_of_any().unwrap().key, Key(key));
            assert!(stripe.queues.len() == 1 && stripe.ready.len() == 1, "only the last queue exists");
        }
        assert!(stripe.pop_oldest_of_any().is_none() && stripe.is_empty());
    }

    proptest! {
        /// Compares the stripe with a list per key: every message is dequeued once, in the order of its key, one at a time per key.
        #[test]
        fn messages_are_dequeued_once_in_order_per_key(
            operations in prop::collection::vec(operation(), 0..200),
            tracking in prop_oneof![Just(Tracking::Nothing), Just(Tracking::Key), Just(Tracking::Load)],
        ) {
            let mut stripe = Stripe::new(tracking);
            let mut model: BTreeMap<u64, VecDeque<u32>> = BTreeMap::new();
            let mut running: Vec<(Turn, Envelope<u32>)> = Vec::new();
            let base = Instant::now();
            let (mut pushed, mut time) = (0, base);
            for operation in operations {
                time += Duration::from_millis(1);
                if matches!(operation, Operation::PopOldest(_) | Operation::PopAny | Operation::Newest(_)) {
                    stripe.sort_in();
                }
                match operation {
                    Operation::Push(key) => {
                        pushed += 1;
                        model.entry(key).or_default().push_back(pushed);
                        stripe.arrivals().push_back(envelope(key, pushed));
                    }
                    // Without tracking there is only one worker.
                    Operation::Next | Operation::NextOf(_) if tracking == Tracking::Nothing && !running.is_empty() => {}
                    Operation::Next | Operation::NextOf(_) => {
                        let mut turn = Turn::UNTRACKED;
                        let next = if let Operation::NextOf(choice) = operation {
                            stripe.sort_in();
                            stripe.next_of(choice, time, &mut turn)
                        } else {
                            stripe.next(|| time, &mut turn)
                        };
                        if let Some(envelope) = next {
                            let key = envelope.key;
                            prop_assert!(running.iter().all(|(_, other)| other.key != key), "one at a time");
                            prop_assert_eq!(model.get_mut(&key.0).unwrap().pop_front(), Some(envelope.payload));
                            running.push((turn, envelope));
                        }
                    }
                    Operation::Done(which) => if !running.is_empty() {
                        let (turn, envelope) = running.swap_remove(which % running.len());
                        stripe.done(turn, envelope.bytes);
                    },
                    Operation::Again(which, due) => if !running.is_empty() {
                        let (turn, envelope) = running.swap_remove(which % running.len());
                        model.get_mut(&envelope.key.0).unwrap().push_front(envelope.payload);
                        stripe.retry(turn, envelope, time + Duration::from_millis(due));
                    },
                    Operation::PopOldest(key) => if let Some(envelope) = stripe.pop_oldest(Key(key)) {
                        prop_assert_eq!(model.get_mut(&key).unwrap().pop_front(), Some(envelope.payload));
                    },
                    Operation::PopAny => if let Some(envelope) = stripe.pop_oldest_of_any() {
                        let key = envelope.key.0;
                        prop_assert_eq!(model.get_mut(&key).unwrap().pop_front(), Some(envelope.payload));
                    },
                    Operation::Newest(key) => {
                        let newest = stripe.newest(Key(key)).map(|envelope| envelope.payload);
                        prop_assert_eq!(newest, model.get(&key).and_then(|queue| queue.back().copied()));
                    }
                }
                for key in 0..5 {
                    if tracking != Tracking::Load || !stripe.arrivals().is_empty() {
                        break;
                    }
                    let held = |running: &Vec<(Turn, Envelope<u32>)>| {
                        running.iter().filter(|(_, other)| other.key.0 == key).map(|(_, other)| other.bytes)
                            .chain(model.get(&key).into_iter().flatten().map(|payload| *payload as usize % 7))
                            .fold((0, 0), |(count, bytes), size| (count + 1, bytes + size))
                    };
                    prop_assert_eq!(stripe.load(Key(key)), held(&running));
                }
            }
            for (turn, envelope) in running {
                stripe.done(turn, envelope.bytes);
            }
            stripe.sort_in();
            let rest: usize = model.values().map(VecDeque::len).sum();
            prop_assert_eq!(stripe.clear().len(), rest);
            prop_assert!(stripe.is_empty(), "an idle key uses no memory");
        }
    }
}
