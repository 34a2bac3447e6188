//! The queue of one stripe: messages in a slab, linked per key, and the keys that are ready.
//!
//! A core: it has no lock, thread or clock. Messages arrive in batches, in the order of their submission. A message whose key is
//! free is handed out straight from the batch; a message whose key is busy is *sorted in*, to wait in the slab. So the slab holds
//! only messages that wait for their key, and stays small. A key exists here only while it has a message sorted in or being
//! handled. It is in one of three states, and only a `Ready` or absent key is handed out, so no two messages of a key are handled
//! at once:
//!
//! ```text
//!             next, from the arrivals
//!     ┌───────────────────────────────────┐
//!     │       sorted in             next  ▼  done, nothing queued
//!  (absent) ──────▶ Ready ──────────────▶ Running ─────────────────────▶ (absent)
//!                     ▲                    │   │
//!                     │ done, more queued  │   │ again: the message goes back to the front
//!                     ├────────────────────┘   ▼
//!                     └────────────────────── Held, until it is due
//!                        due
//! ```
//!
//! [`Tracking`] decides what is stored for a key that is being handled and has nothing queued. Usually that is less than a queue,
//! because creating and removing a queue is most of the cost of a message here.
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

/// A key that was handed out with a message; given back by [`Stripe::done`] or [`Stripe::again`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn(u32);

impl Turn {
    /// The turn of a key that is not tracked.
    pub(crate) const UNTRACKED: Self = Self(NIL);
}

const NIL: u32 = u32::MAX;
/// Set in a turn that counts in `running` and not in `queues`.
const RUNNING: u32 = 1 << 31;

/// What a stripe remembers of a key that is being handled while it has nothing queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Nothing. Only one worker takes from the stripe, so no other could handle another message of the key.
    Nothing,
    /// That it is, in a list as long as there are workers.
    Key,
    /// A queue, for those who ask what it holds.
    Load,
}

pub(crate) struct Stripe<P> {
    messages: Slab<Node<P>>,
    queues: Slab<Queue>,
    /// Finds the queue of a key.
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// Every queue in state `Ready`. What is no longer in that state when its turn comes is passed over.
    ready: VecDeque<u32>,
    /// Queues in state `Held`, each once.
    held: BinaryHeap<Reverse<(Instant, u32)>>,
    /// What has arrived and is not sorted in, in order. Behind everything that is.
    arrivals: VecDeque<Envelope<P>>,
    /// Whose turn it is.
    arrivals_first: bool,
    tracking: Tracking,
    /// Keys being handled that had nothing queued when their turn began. Vacant places are used again.
    running: Vec<Option<Running>>,
}

/// How many arrivals are sorted in at most before a ready key has its turn.
const SORT_IN: usize = 32;

struct Node<P> {
    envelope: Envelope<P>,
    next: u32,
}

struct Queue {
    key: Key,
    head: u32,
    tail: u32,
    state: State,
    /// What the key holds, the message being handled included.
    count: usize,
    bytes: usize,
}

struct Running {
    key: Key,
    bytes: usize,
    /// Its queue, once it has one.
    queue: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
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
        let number = self.busy(key).unwrap_or_else(|| {
            let number = self.insert(Queue { key, head: NIL, tail: NIL, state: State::Ready, count: 0, bytes: 0 });
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

    fn insert(&mut self, queue: Queue) -> u32 {
        let Self { index, queues, hasher, .. } = self;
        let number = id(queues.insert(queue));
        let hash = |&number: &u32| hasher.hash_one(queues[number as usize].key.0);
        index.insert_unique(hash(&number), number, hash);
        number
    }

    /// The buffer to which arrivals are appended.
    pub(crate) fn arrivals(&mut self) -> &mut VecDeque<Envelope<P>> {
        &mut self.arrivals
    }

    /// Sorts in all arrivals.
    pub(crate) fn sort_in(&mut self) {
        while let Some(envelope) = self.arrivals.pop_front() {
            self.push(envelope);
        }
    }

    /// The message whose turn it is: of the key that has waited longest since it was ready, and of the first arrivals, by
    /// turns; of the latter only, if nothing else is. `now` is called only if keys are held. The turn goes
    /// into `turn`, because in a tuple the message would be copied once more.
    #[inline(always)]
    pub(crate) fn next(&mut self, now: impl FnOnce() -> Instant, turn: &mut Turn) -> Option<Envelope<P>> {
        self.release_due(now);
        self.arrivals_first = !self.arrivals_first;
        if self.arrivals_first || self.ready.is_empty() {
            // What has to be sorted in first is limited only if there is something else to do.
            let limit = if self.ready.is_empty() { usize::MAX } else { SORT_IN };
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
            if let Some(number) = self.busy(key) {
                let envelope = self.arrivals.pop_front()?;
                self.link(number, envelope);
                continue;
            }
            *turn = match self.tracking {
                Tracking::Nothing => Turn::UNTRACKED,
                Tracking::Key => Turn(self.run(Running { key, bytes, queue: NIL })),
                Tracking::Load => {
                    Turn(self.insert(Queue { key, head: NIL, tail: NIL, state: State::Running, count: 1, bytes }))
                }
            };
            return self.arrivals.pop_front();
        }
        None
    }

    fn run(&mut self, running: Running) -> u32 {
        let vacant = self.running.iter().position(Option::is_none).unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        self.running[vacant] = Some(running);
        id(vacant) | RUNNING
    }

    /// The queue of a key for which one of its messages is queued or being handled.
    #[inline(always)]
    fn busy(&mut self, key: Key) -> Option<u32> {
        if let Some(place) = self.running.iter().position(|running| running.as_ref().is_some_and(|it| it.key == key)) {
            return Some(self.queue_of_running(place));
        }
        self.find(key)
    }

    #[cold]
    fn queue_of_running(&mut self, place: usize) -> u32 {
        let Some(Running { key, bytes, queue: NIL }) = self.running[place] else {
            return self.running[place].as_ref().map_or(NIL, |running| running.queue);
        };
        let queue = self.insert(Queue { key, head: NIL, tail: NIL, state: State::Running, count: 1, bytes });
        self.running[place] = Some(Running { key, bytes, queue });
        queue
    }

    /// The queue of the key whose turn ends, if it has one.
    #[inline(always)]
    fn end(&mut self, turn: Turn) -> u32 {
        match turn.0 {
            NIL => NIL,
            place if place & RUNNING != 0 => {
                self.running[(place & !RUNNING) as usize].take().map_or(NIL, |running| running.queue)
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

    /// Of the `choice`th ready key, modulo their number: for a simulation, which sorts in everything before.
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
            self.queues[number as usize].state = State::Ready;
            self.ready.push_back(number);
        }
    }

    /// Takes the first message of a queue if it is ready, or removes it if it was emptied.
    fn start(&mut self, Turn(number): Turn) -> Option<Envelope<P>> {
        self.queues.get(number as usize).filter(|queue| queue.state == State::Ready)?;
        let first = self.unlink_first(number);
        if first.is_some() {
            self.queues[number as usize].state = State::Running;
        } else {
            self.remove(number);
        }
        first
    }

    /// Ends the turn of a key whose message has ended.
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
            queue.state = State::Ready;
            self.ready.push_back(number);
        }
    }

    /// Ends the turn of a key whose message is to be tried again when it is `due`; the others of the key wait for it.
    pub(crate) fn again(&mut self, turn: Turn, envelope: Envelope<P>, due: Instant) {
        let (key, bytes) = (envelope.key, envelope.bytes);
        let own = self.end(turn);
        let number = if own == NIL {
            let queue = Queue { key, head: NIL, tail: NIL, state: State::Held, count: 0, bytes: 0 };
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
        queue.state = State::Held;
        self.held.push(Reverse((due, number)));
    }

    /// Whether a key is ready.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Whether a key is ready, or might be once the arrivals are sorted in.
    pub(crate) fn has_work(&self) -> bool {
        self.has_ready() || !self.arrivals.is_empty()
    }

    /// When the first of the held keys is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.held.peek().map(|Reverse((due, _))| *due)
    }

    /// What a key holds: messages and bytes, the one being handled included.
    pub(crate) fn load(&self, key: Key) -> (usize, usize) {
        self.find(key).map_or((0, 0), |number| {
            let queue = &self.queues[number as usize];
            (queue.count, queue.bytes)
        })
    }

    /// Takes out the oldest queued message of the key.
    pub(crate) fn pop_oldest(&mut self, key: Key) -> Option<Envelope<P>> {
        let number = self.find(key)?;
        self.pop_of(number)
    }

    /// Takes out the oldest queued message of the key that has waited longest for its turn.
    pub(crate) fn pop_oldest_of_any(&mut self) -> Option<Envelope<P>> {
        loop {
            let number = *self.ready.front()?;
            match self.queues.get(number as usize).filter(|queue| queue.state == State::Ready) {
                Some(queue) if queue.head != NIL => return self.pop_of(number),
                // Emptied before. Removed here, because stuck workers do not, and keys would add up.
                Some(_) => self.remove(number),
                None => {}
            }
            self.ready.pop_front();
        }
    }

    /// Takes a queued message out of a queue. The queue stays, in `ready` or running, and is removed from there.
    fn pop_of(&mut self, number: u32) -> Option<Envelope<P>> {
        // What a held key is held for is not in the way: it is being handled, with a pause.
        if self.queues[number as usize].state == State::Held {
            return None;
        }
        let envelope = self.unlink_first(number)?;
        let queue = &mut self.queues[number as usize];
        queue.count -= 1;
        queue.bytes -= envelope.bytes;
        Some(envelope)
    }

    /// The newest queued message of the key, to be changed.
    pub(crate) fn newest(&mut self, key: Key) -> Option<&mut Envelope<P>> {
        let number = self.find(key)?;
        let tail = self.queues[number as usize].tail;
        self.messages.get_mut(tail as usize).map(|node| &mut node.envelope)
    }

    /// A queued message of the key was changed, and with it its size.
    pub(crate) fn resize(&mut self, key: Key, from: usize, to: usize) {
        if let Some(number) = self.find(key) {
            let queue = &mut self.queues[number as usize];
            queue.bytes = queue.bytes - from + to;
        }
    }

    /// Takes out everything that is queued and sorted in, key by key. Keys being handled stay.
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
            if self.queues[number as usize].state != State::Running {
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
    // The number of messages is limited far below 2^31.
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
    enum Step {
        Push(u64),
        Next,
        NextOf(usize),
        Done(usize),
        Again(usize, u64),
        PopOldest(u64),
        PopAny,
        Newest(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..5_u64).prop_map(Step::Push),
            3 => Just(Step::Next),
            1 => any::<usize>().prop_map(Step::NextOf),
            3 => any::<usize>().prop_map(Step::Done),
            1 => (any::<usize>(), 0..9_u64).prop_map(|(which, due)| Step::Again(which, due)),
            1 => (0..5_u64).prop_map(Step::PopOldest),
            1 => Just(Step::PopAny),
            1 => (0..5_u64).prop_map(Step::Newest),
        ]
    }

    #[test]
    fn keys_that_were_emptied_do_not_add_up() {
        let mut stripe = Stripe::new(Tracking::Key);
        for key in 0..100 {
            stripe.push(envelope(key, 1));
            assert_eq!(stripe.pop_oldest_of_any().unwrap().key, Key(key));
            assert!(stripe.queues.len() == 1 && stripe.ready.len() == 1, "only the last one is still there");
        }
        assert!(stripe.pop_oldest_of_any().is_none() && stripe.is_empty());
    }

    proptest! {
        /// Against a plain list per key: everything comes out once, in the order of its key, one at a time per key.
        #[test]
        fn every_message_comes_out_once_in_the_order_of_its_key(
            steps in prop::collection::vec(step(), 0..200),
            tracking in prop_oneof![Just(Tracking::Nothing), Just(Tracking::Key), Just(Tracking::Load)],
        ) {
            let mut stripe = Stripe::new(tracking);
            let mut model: BTreeMap<u64, VecDeque<u32>> = BTreeMap::new();
            let mut running: Vec<(Turn, Envelope<u32>)> = Vec::new();
            let base = Instant::now();
            let (mut pushed, mut time) = (0, base);
            for step in steps {
                time += Duration::from_millis(1);
                if matches!(step, Step::PopOldest(_) | Step::PopAny | Step::Newest(_)) {
                    stripe.sort_in();
                }
                match step {
                    Step::Push(key) => {
                        pushed += 1;
                        model.entry(key).or_default().push_back(pushed);
                        stripe.arrivals().push_back(envelope(key, pushed));
                    }
                    // Without tracking there is only one worker.
                    Step::Next | Step::NextOf(_) if tracking == Tracking::Nothing && !running.is_empty() => {}
                    Step::Next | Step::NextOf(_) => {
                        let mut turn = Turn::UNTRACKED;
                        let next = if let Step::NextOf(choice) = step {
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
                    Step::Done(which) => if !running.is_empty() {
                        let (turn, envelope) = running.swap_remove(which % running.len());
                        stripe.done(turn, envelope.bytes);
                    },
                    Step::Again(which, due) => if !running.is_empty() {
                        let (turn, envelope) = running.swap_remove(which % running.len());
                        model.get_mut(&envelope.key.0).unwrap().push_front(envelope.payload);
                        stripe.again(turn, envelope, time + Duration::from_millis(due));
                    },
                    Step::PopOldest(key) => if let Some(envelope) = stripe.pop_oldest(Key(key)) {
                        prop_assert_eq!(model.get_mut(&key).unwrap().pop_front(), Some(envelope.payload));
                    },
                    Step::PopAny => if let Some(envelope) = stripe.pop_oldest_of_any() {
                        let key = envelope.key.0;
                        prop_assert_eq!(model.get_mut(&key).unwrap().pop_front(), Some(envelope.payload));
                    },
                    Step::Newest(key) => {
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
            prop_assert!(stripe.is_empty(), "a key with nothing queued costs no memory");
        }
    }
}
