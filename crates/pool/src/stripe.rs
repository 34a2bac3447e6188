//! A stripe: the queues of the keys of one shard.
//!
//! It has no lock, thread or clock. Messages arrive in batches, in the order of their submission. If the key of a message is free, the
//! message is dequeued directly from the batch. If its key is busy, the message is queued: moved to the slab and linked to the queue of
//! its key. So the slab has only messages that wait for their key, and stays small. A key exists here only while it has a message that
//! is queued or being handled. It is in one of three states. Only messages of a `Ready` or absent key are dequeued, so no two messages
//! of a key are handled at the same time:
//!
//! ```text
//!             next, from the arrivals
//!     ┌───────────────────────────────────┐
//!     │         queued              next  ▼  done, nothing queued
//!  (absent) ──────▶ Ready ──────────────▶ Running ─────────────────────▶ (absent)
//!                     ▲                    │   │
//!                     │ done, more queued  │   │ retry: the message goes back to the front
//!                     ├────────────────────┘   ▼
//!                     └───────────────────── Delayed, until it is due
//!                        due
//! ```
//!
//! [`Tracking`] is what is stored for a key that is being handled and has nothing queued. Usually it is less than a queue, because
//! most of the cost of a message would be to create and remove a queue.
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

/// Identifies the key of a dequeued message. The key is busy until the token is passed to [`Stripe::done`] or [`Stripe::retry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyToken(u32);

impl KeyToken {
    /// The token of a key that is not tracked.
    pub(crate) const UNTRACKED: Self = Self(NIL);
}

/// No queue, node or slot.
const NIL: u32 = u32::MAX;
/// A bit that is set in a token that is an index of `running` and not of `queues`.
const RUNNING_BIT: u32 = 1 << 31;

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

/// The queues of the keys of one shard.
pub(crate) struct Stripe<P> {
    messages: Slab<Node<P>>,
    queues: Slab<KeyQueue>,
    /// Finds the queue of a key.
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// Contains every queue in state `Ready`. Queues that are no longer in that state are skipped.
    ready: VecDeque<u32>,
    /// Queues in state `Delayed`, each once.
    delayed: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Messages that are not queued yet, in order. They come after all queued messages.
    arrivals: VecDeque<Envelope<P>>,
    /// Whether [`next`](Self::next) tries the arrivals before the ready keys. Alternates.
    arrivals_first: bool,
    tracking: Tracking,
    /// Keys being handled that had no queued messages when they were dequeued. Free slots are reused.
    running: Vec<Option<RunningKey>>,
}

/// The maximum number of arrivals that are queued before a message of a ready key is dequeued.
const MAX_QUEUED_ARRIVALS: usize = 32;

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
    Delayed,
}

impl<P> Stripe<P> {
    pub(crate) fn new(tracking: Tracking) -> Self {
        Self {
            messages: Slab::new(),
            queues: Slab::new(),
            index: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            ready: VecDeque::new(),
            delayed: BinaryHeap::new(),
            arrivals: VecDeque::new(),
            arrivals_first: false,
            tracking,
            running: Vec::new(),
        }
    }

    /// Queues a message after the others of its key.
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

    /// Appends a message to a queue.
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

    /// Adds the queue of a key.
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

    /// Queues all arrivals.
    pub(crate) fn queue_arrivals(&mut self) {
        while let Some(envelope) = self.arrivals.pop_front() {
            self.push(envelope);
        }
    }

    /// Dequeues the next message: alternately from the arrivals and from the key that has been ready longest. `now` is called only if
    /// keys are delayed. The token is returned in `token`, because a tuple would copy the message once more.
    #[inline(always)]
    pub(crate) fn next(&mut self, now: impl FnOnce() -> Instant, token: &mut KeyToken) -> Option<Envelope<P>> {
        self.release_due(now);
        self.arrivals_first = !self.arrivals_first;
        if self.arrivals_first || self.ready.is_empty() {
            // The number of queued arrivals is limited only if a ready key is waiting.
            let limit = if self.ready.is_empty() { usize::MAX } else { MAX_QUEUED_ARRIVALS };
            let next = self.next_arrival(limit, token);
            if next.is_some() {
                return next;
            }
        }
        self.next_ready(token)
    }

    #[inline(always)]
    fn next_arrival(&mut self, limit: usize, token: &mut KeyToken) -> Option<Envelope<P>> {
        for _ in 0..limit {
            let first = self.arrivals.front()?;
            let (key, bytes) = (first.key, first.bytes);
            if let Some(number) = self.busy_queue(key) {
                let envelope = self.arrivals.pop_front()?;
                self.link(number, envelope);
                continue;
            }
            *token = match self.tracking {
                Tracking::Nothing => KeyToken::UNTRACKED,
                Tracking::Key => KeyToken(self.track(RunningKey { key, bytes, queue: NIL })),
                Tracking::Load => KeyToken(self.insert(KeyQueue {
                    key,
                    head: NIL,
                    tail: NIL,
                    state: KeyState::Running,
                    count: 1,
                    bytes,
                })),
            };
            return self.arrivals.pop_front();
        }
        None
    }

    /// Adds a key that is being handled. Returns its token.
    fn track(&mut self, running: RunningKey) -> u32 {
        let vacant = self.running.iter().position(Option::is_none).unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        self.running[vacant] = Some(running);
        id(vacant) | RUNNING_BIT
    }

    /// Returns the queue of a key that has a message queued or being handled.
    #[inline(always)]
    fn busy_queue(&mut self, key: Key) -> Option<u32> {
        if let Some(slot) = self.running.iter().position(|running| running.as_ref().is_some_and(|it| it.key == key)) {
            return Some(self.queue_of_running(slot));
        }
        self.find(key)
    }

    /// Returns the queue of a key being handled. Creates it if necessary.
    #[cold]
    fn queue_of_running(&mut self, slot: usize) -> u32 {
        let Some(RunningKey { key, bytes, queue: NIL }) = self.running[slot] else {
            return self.running[slot].as_ref().map_or(NIL, |running| running.queue);
        };
        let queue = self.insert(KeyQueue { key, head: NIL, tail: NIL, state: KeyState::Running, count: 1, bytes });
        self.running[slot] = Some(RunningKey { key, bytes, queue });
        queue
    }

    /// Releases a token. Returns the queue of its key, or [`NIL`].
    #[inline(always)]
    fn release(&mut self, token: KeyToken) -> u32 {
        match token.0 {
            NIL => NIL,
            slot if slot & RUNNING_BIT != 0 => {
                self.running[(slot & !RUNNING_BIT) as usize].take().map_or(NIL, |running| running.queue)
            }
            number => number,
        }
    }

    fn next_ready(&mut self, token: &mut KeyToken) -> Option<Envelope<P>> {
        loop {
            *token = KeyToken(self.ready.pop_front()?);
            let first = self.start(*token);
            if first.is_some() {
                return first;
            }
        }
    }

    /// Dequeues a message of a ready key, whose index is `choice` modulo the number of ready keys. For a simulation, which queues all
    /// arrivals first.
    pub(crate) fn next_chosen(&mut self, choice: usize, now: Instant, token: &mut KeyToken) -> Option<Envelope<P>> {
        self.release_due(|| now);
        loop {
            let position = choice.checked_rem(self.ready.len())?;
            *token = KeyToken(self.ready.remove(position)?);
            let first = self.start(*token);
            if first.is_some() {
                return first;
            }
        }
    }

    /// Makes delayed keys ready that are due.
    fn release_due(&mut self, now: impl FnOnce() -> Instant) {
        if self.delayed.is_empty() {
            return;
        }
        let now = now();
        while let Some(&Reverse((due, number))) = self.delayed.peek()
            && due <= now
        {
            self.delayed.pop();
            self.queues[number as usize].state = KeyState::Ready;
            self.ready.push_back(number);
        }
    }

    /// Dequeues the first message of a ready queue, or removes the queue if it is empty.
    fn start(&mut self, KeyToken(number): KeyToken) -> Option<Envelope<P>> {
        self.queues.get(number as usize).filter(|queue| queue.state == KeyState::Ready)?;
        let first = self.unlink_first(number);
        if first.is_some() {
            self.queues[number as usize].state = KeyState::Running;
        } else {
            self.remove(number);
        }
        first
    }

    /// Ends a dequeued message. Its key is ready again, or removed if it has no other message.
    #[inline]
    pub(crate) fn done(&mut self, token: KeyToken, bytes: usize) {
        let number = self.release(token);
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

    /// Puts a dequeued message back, to be retried when it is `due`. The other messages of the key wait for it.
    pub(crate) fn retry(&mut self, token: KeyToken, envelope: Envelope<P>, due: Instant) {
        let (key, bytes) = (envelope.key, envelope.bytes);
        let own = self.release(token);
        let number = if own == NIL {
            let queue = KeyQueue { key, head: NIL, tail: NIL, state: KeyState::Delayed, count: 0, bytes: 0 };
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
        queue.state = KeyState::Delayed;
        self.delayed.push(Reverse((due, number)));
    }

    /// Returns whether a key is ready.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Returns whether a key is ready, or may be after the arrivals have been queued.
    pub(crate) fn has_work(&self) -> bool {
        self.has_ready() || !self.arrivals.is_empty()
    }

    /// Returns when the first delayed key is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.delayed.peek().map(|Reverse((due, _))| *due)
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
                // An empty queue is removed here: if the workers are blocked, empty queues would accumulate.
                Some(_) => self.remove(number),
                None => {}
            }
            self.ready.pop_front();
        }
    }

    /// Removes the first message of a queue. An empty queue stays until it is dequeued next.
    fn pop_from(&mut self, number: u32) -> Option<Envelope<P>> {
        // The first message of a delayed key waits for its retry and is not dropped.
        if self.queues[number as usize].state == KeyState::Delayed {
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

    /// Removes all queued messages, key by key. Keys being handled stay.
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
        self.delayed.clear();
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
    u32::try_from(index).expect("a pool has far fewer than 2^31 messages")
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
        let delivery = Delivery { message: Message::new(key, payload), attempts: 0, ask: None };
        Envelope::new(delivery, payload as usize % 7, 0)
    }

    #[derive(Debug, Clone)]
    enum Operation {
        Push(u64),
        Next,
        NextOf(usize),
        Done(usize),
        Retry(usize, u64),
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
            1 => (any::<usize>(), 0..9_u64).prop_map(|(which, due)| Operation::Retry(which, due)),
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
            assert!(stripe.queues.len() == 1 && stripe.ready.len() == 1, "only the last queue is left");
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
            let mut running: Vec<(KeyToken, Envelope<u32>)> = Vec::new();
            let base = Instant::now();
            let (mut pushed, mut time) = (0, base);
            for operation in operations {
                time += Duration::from_millis(1);
                if matches!(operation, Operation::PopOldest(_) | Operation::PopAny | Operation::Newest(_)) {
                    stripe.queue_arrivals();
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
                        let mut token = KeyToken::UNTRACKED;
                        let next = if let Operation::NextOf(choice) = operation {
                            stripe.queue_arrivals();
                            stripe.next_chosen(choice, time, &mut token)
                        } else {
                            stripe.next(|| time, &mut token)
                        };
                        if let Some(envelope) = next {
                            let key = envelope.key;
                            prop_assert!(running.iter().all(|(_, other)| other.key != key), "one at a time");
                            prop_assert_eq!(model.get_mut(&key.0).unwrap().pop_front(), Some(envelope.payload));
                            running.push((token, envelope));
                        }
                    }
                    Operation::Done(which) => if !running.is_empty() {
                        let (token, envelope) = running.swap_remove(which % running.len());
                        stripe.done(token, envelope.bytes);
                    },
                    Operation::Retry(which, due) => if !running.is_empty() {
                        let (token, envelope) = running.swap_remove(which % running.len());
                        model.get_mut(&envelope.key.0).unwrap().push_front(envelope.payload);
                        stripe.retry(token, envelope, time + Duration::from_millis(due));
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
                    let load = |running: &Vec<(KeyToken, Envelope<u32>)>| {
                        running.iter().filter(|(_, other)| other.key.0 == key).map(|(_, other)| other.bytes)
                            .chain(model.get(&key).into_iter().flatten().map(|payload| *payload as usize % 7))
                            .fold((0, 0), |(count, bytes), size| (count + 1, bytes + size))
                    };
                    prop_assert_eq!(stripe.load(Key(key)), load(&running));
                }
            }
            for (token, envelope) in running {
                stripe.done(token, envelope.bytes);
            }
            stripe.queue_arrivals();
            let rest: usize = model.values().map(VecDeque::len).sum();
            prop_assert_eq!(stripe.clear().len(), rest);
            prop_assert!(stripe.is_empty(), "an idle key uses no memory");
        }
    }
}
