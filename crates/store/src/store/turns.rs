//! Items of several flows, taken so that owners, and the flows of an owner, get equal shares of the work.
//!
//! This is start-time fair queueing, on two levels. Every owner has a start time in a virtual clock, and the owner with the earliest
//! one is served next. The cost of an item moves the start time of its owner forward, so an owner of costly items has fewer turns
//! than one of cheap items. An owner that was idle starts at the current virtual time: it is neither punished for what the others
//! did meanwhile, nor can it save up turns. So an item that is alone waits for the item that is being served, and for others that
//! are as cheap as itself. The turns of an owner are shared by its flows in the same way, so that further flows give an owner no
//! larger share.
//!
//! What is idle is remembered while it is ahead of the virtual time. Otherwise an owner that never has more than one item would
//! have a turn for each of them, whatever they cost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::Hash;

use hashbrown::HashMap;

use super::lines::Owner;

/// Number of empty queues that are kept for reuse, so that most items need no allocation.
const MAX_SPARE_QUEUES: usize = 16;
/// Capacity above which an empty queue is freed.
const MAX_SPARE_CAPACITY: usize = 256;
/// Number of keys above which those that need not be remembered are looked for.
const MIN_REMEMBERED: usize = 64;

/// A sequence of items that are served in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Flow {
    pub(super) owner: Owner,
    /// Tells the flows of one owner apart.
    pub(super) origin: u64,
}

/// The items of all flows.
pub(super) struct Turns<T>(Shares<Owner, Shares<u64, VecDeque<T>>>);

impl<T> Turns<T> {
    pub(super) fn new() -> Self {
        Self(Shares::default())
    }

    /// Appends an item to a flow.
    pub(super) fn push(&mut self, flow: Flow, item: T) {
        self.0.fill(flow.owner).fill(flow.origin).push_back(item);
    }

    /// Takes the next item. The one before it must be [finished](Self::finish).
    pub(super) fn serve(&mut self) -> Option<(Flow, T)> {
        let (owner, flows) = self.0.serve()?;
        let (origin, items) = flows.serve()?;
        Some((Flow { owner, origin }, items.pop_front()?))
    }

    /// Charges the owner and the flow that are being served, if there are any.
    pub(super) fn finish(&mut self, cost: u64) {
        if let Some(flows) = self.0.serving() {
            flows.finish(cost);
        }
        self.0.finish(cost);
    }
}

/// A queue that can be one of several with equal shares.
trait Queue: Default {
    fn is_empty(&self) -> bool;

    /// Whether it may be kept for reuse when it is empty.
    fn is_small(&self) -> bool;
}

impl<T> Queue for VecDeque<T> {
    fn is_empty(&self) -> bool {
        self.is_empty()
    }

    fn is_small(&self) -> bool {
        self.capacity() <= MAX_SPARE_CAPACITY
    }
}

/// Queues that are served by turns, each for the same share of the work.
struct Shares<K, Q> {
    queues: HashMap<K, Share<Q>>,
    /// The keys with items, each once, except the one that is being served.
    order: BinaryHeap<Reverse<Turn<K>>>,
    serving: Option<K>,
    /// The start time of the item that is being served. It does not go back.
    now: u64,
    next_number: u64,
    /// Number of keys at which those that need not be remembered are removed.
    forget_at: usize,
    spare: Vec<Q>,
}

/// The queue of one key.
struct Share<Q> {
    queue: Q,
    /// When its next item may start, in virtual time.
    start: u64,
}

/// Ordered by start, and by age among equals.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn<K> {
    start: u64,
    number: u64,
    key: K,
}

impl<K: Ord, Q> Default for Shares<K, Q> {
    fn default() -> Self {
        Self {
            queues: HashMap::new(),
            order: BinaryHeap::new(),
            serving: None,
            now: 0,
            next_number: 0,
            forget_at: MIN_REMEMBERED,
            spare: Vec::new(),
        }
    }
}

impl<K: Copy + Ord + Hash, Q: Queue> Queue for Shares<K, Q> {
    fn is_empty(&self) -> bool {
        self.order.is_empty() && self.serving.is_none()
    }

    fn is_small(&self) -> bool {
        self.queues.capacity() <= MAX_SPARE_CAPACITY
    }
}

impl<K: Copy + Ord + Hash, Q: Queue> Shares<K, Q> {
    /// Returns the queue of a key, to which an item must be added then.
    fn fill(&mut self, key: K) -> &mut Q {
        let Self { queues, order, serving, now, next_number, spare, .. } = self;
        let share = queues.entry(key).or_insert_with(|| Share { queue: spare.pop().unwrap_or_default(), start: *now });
        if share.queue.is_empty() && *serving != Some(key) {
            share.start = share.start.max(*now);
            order.push(Reverse(Turn { start: share.start, number: *next_number, key }));
            *next_number += 1;
        }
        &mut share.queue
    }

    /// Returns the key that is served next, and its queue, from which an item must be taken then.
    fn serve(&mut self) -> Option<(K, &mut Q)> {
        let Reverse(Turn { start, key, .. }) = self.order.pop()?;
        self.now = start;
        self.serving = Some(key);
        Some((key, &mut self.queues.get_mut(&key)?.queue))
    }

    /// The queue that is being served.
    fn serving(&mut self) -> Option<&mut Q> {
        self.queues.get_mut(&self.serving?).map(|share| &mut share.queue)
    }

    /// Charges the key that is being served, if there is one.
    fn finish(&mut self, cost: u64) {
        let Some(key) = self.serving.take() else { return };
        let Some(share) = self.queues.get_mut(&key) else { return };
        share.start = share.start.saturating_add(cost);
        let start = share.start;
        if !share.queue.is_empty() {
            self.order.push(Reverse(Turn { start, number: self.next_number, key }));
            self.next_number += 1;
        } else if self.order.is_empty() {
            // Nothing waits, so it does not matter how much work each has had.
            self.now = self.now.max(start);
            self.forget(|_| true);
        } else if self.queues.len() >= self.forget_at {
            let now = self.now;
            self.forget(|start| start <= now);
        }
    }

    /// Removes the idle keys with such a start time. Next when there are twice as many, so that each item pays little for it.
    fn forget(&mut self, is_outdated: impl Fn(u64) -> bool) {
        let spare = &mut self.spare;
        self.queues.retain(|_, share| {
            if !share.queue.is_empty() || !is_outdated(share.start) {
                return true;
            }
            if spare.len() < MAX_SPARE_QUEUES && share.queue.is_small() {
                spare.push(std::mem::take(&mut share.queue));
            }
            false
        });
        self.forget_at = MIN_REMEMBERED.max(2 * self.queues.len());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flow(origin: u64) -> Flow {
        Flow { owner: 1, origin }
    }

    /// Serves the next item, whose cost is the item itself.
    fn serve(turns: &mut Turns<u64>) -> Option<(u64, u64)> {
        let (flow, cost) = turns.serve()?;
        turns.finish(cost);
        Some((flow.origin, cost))
    }

    #[test]
    fn equal_items_are_served_by_turns() {
        let mut turns = Turns::new();
        for origin in [1, 1, 1, 2, 3, 3] {
            turns.push(flow(origin), 10);
        }
        let served: Vec<u64> = std::iter::from_fn(|| serve(&mut turns)).map(|(origin, _)| origin).collect();
        assert_eq!(served, [1, 2, 3, 1, 3, 1]);
    }

    #[test]
    fn a_costly_flow_waits_until_the_others_had_as_much() {
        let mut turns = Turns::new();
        for _ in 0..3 {
            turns.push(flow(1), 1000);
        }
        assert_eq!(serve(&mut turns), Some((1, 1000)));
        // It comes later, and has one item at a time.
        for _ in 0..100 {
            turns.push(flow(2), 10);
            assert_eq!(serve(&mut turns), Some((2, 10)));
        }
        turns.push(flow(2), 10);
        assert_eq!(serve(&mut turns), Some((1, 1000)));
        assert_eq!(serve(&mut turns), Some((2, 10)));
    }

    #[test]
    fn a_flow_with_one_costly_item_at_a_time_is_remembered() {
        let mut turns = Turns::new();
        for _ in 0..50 {
            turns.push(flow(2), 10);
        }
        turns.push(flow(1), 300);
        let mut served = Vec::new();
        while let Some((origin, _)) = serve(&mut turns) {
            served.push(origin);
            if origin == 1 {
                turns.push(flow(1), 300);
            }
            if served.len() == 53 {
                break;
            }
        }
        assert_eq!(served.iter().filter(|origin| **origin == 1).count(), 3, "{served:?}");
        assert_eq!(served[..2], [2, 1]);
    }

    #[test]
    fn an_owner_that_uses_another_flow_for_each_item_has_no_larger_share() {
        let mut turns = Turns::new();
        let victim = Flow { owner: 2, origin: 0 };
        for _ in 0..200 {
            turns.push(victim, 10);
        }
        let (mut next_origin, mut waiting) = (0, 0);
        let mut served = [0_u64; 2];
        for _ in 0..200 {
            while waiting < 10 {
                next_origin += 1;
                waiting += 1;
                turns.push(flow(next_origin % 1000), 10);
            }
            let (flow, cost) = turns.serve().unwrap();
            turns.finish(cost);
            waiting -= usize::from(flow.owner == 1);
            served[usize::try_from(flow.owner).unwrap() - 1] += 1;
        }
        assert!(served[1] >= 80, "{served:?}");
    }

    #[test]
    fn flows_that_need_not_be_remembered_are_removed() {
        let mut turns = Turns::new();
        turns.push(Flow { owner: 0, origin: 0 }, 1);
        for origin in 0..10_000 {
            turns.push(Flow { owner: origin, origin: 1 }, 1);
            turns.push(Flow { owner: 0, origin: 0 }, 1);
            for _ in 0..2 {
                let (_, cost) = turns.serve().unwrap();
                turns.finish(cost);
            }
            assert!(turns.0.queues.len() <= 2 * MIN_REMEMBERED);
        }
    }

    proptest! {
        #[test]
        fn flows_with_items_get_equal_shares(
            costs in prop::collection::vec(prop::collection::vec(1_u64..100, 60), 2..6),
        ) {
            let mut turns = Turns::new();
            for (origin, costs) in costs.iter().enumerate() {
                for cost in costs {
                    turns.push(flow(origin as u64), *cost);
                }
            }
            let mut spent = vec![0_u64; costs.len()];
            let mut left = vec![60_usize; costs.len()];
            while left.iter().all(|left| *left > 0) {
                let (origin, cost) = serve(&mut turns).unwrap();
                let origin = usize::try_from(origin).unwrap();
                spent[origin] += cost;
                left[origin] -= 1;
                let (least, most) = (spent.iter().min().unwrap(), spent.iter().max().unwrap());
                prop_assert!(most - least < 200, "{spent:?}");
            }
        }

        #[test]
        fn every_item_is_served_once_and_in_the_order_of_its_flow(
            steps in prop::collection::vec(prop::option::weighted(0.6, (0_u64..5, 0_u64..50)), 0..300),
        ) {
            let mut turns = Turns::new();
            let (mut pushed, mut served) = (vec![Vec::new(); 5], vec![Vec::new(); 5]);
            for (number, step) in steps.into_iter().enumerate() {
                if let Some((origin, cost)) = step {
                    turns.push(flow(origin), (number, cost));
                    pushed[usize::try_from(origin).unwrap()].push(number);
                } else if let Some((flow, (number, cost))) = turns.serve() {
                    turns.finish(cost);
                    served[usize::try_from(flow.origin).unwrap()].push(number);
                }
            }
            while let Some((flow, (number, cost))) = turns.serve() {
                turns.finish(cost);
                served[usize::try_from(flow.origin).unwrap()].push(number);
            }
            prop_assert_eq!(pushed, served);
            prop_assert!(turns.0.queues.is_empty() && turns.0.spare.len() <= MAX_SPARE_QUEUES);
        }
    }
}
