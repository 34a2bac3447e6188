//! A queue that gives equal shares of the work to owners, and to the flows of an owner.
//!
//! This is start-time fair queueing on two levels. Each owner has a start time in a virtual clock, and the owner with the earliest
//! start time is served next. The cost of an item advances the start time of its owner, so an owner of costly items is served less
//! often than an owner of cheap items. An idle owner starts at the current virtual time: it is not penalized for the work of others,
//! and cannot accumulate credit. An owner that submits one item at a time therefore waits for the item in service, and until the
//! other owners have used as much work as its last item, however long their backlogs are. The flows of an owner share its turns in
//! the same way, so more flows do not increase the share of an owner.
//!
//! The start time of an idle owner is kept while it is ahead of the virtual time. Otherwise an owner that submits one item at a
//! time would never be charged for its cost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::Hash;

use hashbrown::HashMap;

use super::admission::Owner;

/// Number of empty queues that are kept for reuse, so that most items need no allocation.
const MAX_SPARE_QUEUES: usize = 16;
/// Capacity above which an empty queue is freed.
const MAX_SPARE_CAPACITY: usize = 256;
/// Minimum number of keys before outdated idle keys are removed.
const MIN_KEYS_TO_PRUNE: usize = 64;

/// A sequence of items that are served in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Flow {
    pub(super) owner: Owner,
    /// Distinguishes the flows of one owner.
    pub(super) origin: u64,
}

/// Queued items of all owners and flows.
pub(super) struct FairQueue<T>(Shares<Owner, Shares<u64, VecDeque<T>>>);

impl<T> FairQueue<T> {
    pub(super) fn new() -> Self {
        Self(Shares::default())
    }

    /// Appends an item to a flow.
    pub(super) fn push(&mut self, flow: Flow, item: T) {
        self.0.activate(flow.owner).activate(flow.origin).push_back(item);
    }

    /// Removes and returns the next item. The previous item must be [finished](Self::finish).
    pub(super) fn serve(&mut self) -> Option<(Flow, T)> {
        let (owner, flows) = self.0.serve()?;
        let (origin, items) = flows.serve()?;
        Some((Flow { owner, origin }, items.pop_front()?))
    }

    /// Charges the cost of the item in service to its owner and flow.
    pub(super) fn finish(&mut self, cost: u64) {
        if let Some(flows) = self.0.serving() {
            flows.finish(cost);
        }
        self.0.finish(cost);
    }
}

/// A queue of [`Shares`].
trait Queue: Default {
    fn is_empty(&self) -> bool;

    /// Returns whether the queue can be kept for reuse when it is empty.
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

/// Queues by key, which get equal shares of the work.
struct Shares<K, Q> {
    queues: HashMap<K, Share<Q>>,
    /// The keys with items, each once, except the key in service.
    order: BinaryHeap<Reverse<Turn<K>>>,
    serving: Option<K>,
    /// The virtual time: the start time of the item in service. It never decreases.
    now: u64,
    next_number: u64,
    /// Number of keys at which outdated idle keys are removed.
    prune_at: usize,
    spare: Vec<Q>,
}

/// The queue of one key.
struct Share<Q> {
    queue: Q,
    /// The virtual start time of the next item.
    start: u64,
}

/// An entry of the heap, ordered by start time, then by age.
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
            prune_at: MIN_KEYS_TO_PRUNE,
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
    /// Returns the queue of a key, and schedules the key if it was idle. The caller must append an item to the queue.
    fn activate(&mut self, key: K) -> &mut Q {
        let Self { queues, order, serving, now, next_number, spare, .. } = self;
        let share = queues.entry(key).or_insert_with(|| Share { queue: spare.pop().unwrap_or_default(), start: *now });
        if share.queue.is_empty() && *serving != Some(key) {
            share.start = share.start.max(*now);
            order.push(Reverse(Turn { start: share.start, number: *next_number, key }));
            *next_number += 1;
        }
        &mut share.queue
    }

    /// Returns the next key and its queue. The caller must take an item from it.
    fn serve(&mut self) -> Option<(K, &mut Q)> {
        let Reverse(Turn { start, key, .. }) = self.order.pop()?;
        self.now = start;
        self.serving = Some(key);
        Some((key, &mut self.queues.get_mut(&key)?.queue))
    }

    /// Returns the queue in service.
    fn serving(&mut self) -> Option<&mut Q> {
        self.queues.get_mut(&self.serving?).map(|share| &mut share.queue)
    }

    /// Charges the cost to the key in service, if there is one.
    fn finish(&mut self, cost: u64) {
        let Some(key) = self.serving.take() else { return };
        let Some(share) = self.queues.get_mut(&key) else { return };
        share.start = share.start.saturating_add(cost);
        let start = share.start;
        if !share.queue.is_empty() {
            self.order.push(Reverse(Turn { start, number: self.next_number, key }));
            self.next_number += 1;
        } else if self.order.is_empty() {
            // All queues are empty, so past work no longer matters.
            self.now = self.now.max(start);
            self.prune(|_| true);
        } else if self.queues.len() >= self.prune_at {
            let now = self.now;
            self.prune(|start| start <= now);
        }
    }

    /// Removes idle keys with an outdated start time. The next prune runs when the number of keys has doubled, so its amortized cost
    /// is constant.
    fn prune(&mut self, is_outdated: impl Fn(u64) -> bool) {
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
        self.prune_at = MIN_KEYS_TO_PRUNE.max(2 * self.queues.len());
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
    fn serve(queue: &mut FairQueue<u64>) -> Option<(u64, u64)> {
        let (flow, cost) = queue.serve()?;
        queue.finish(cost);
        Some((flow.origin, cost))
    }

    #[test]
    fn equal_items_are_served_round_robin() {
        let mut queue = FairQueue::new();
        for origin in [1, 1, 1, 2, 3, 3] {
            queue.push(flow(origin), 10);
        }
        let served: Vec<u64> = std::iter::from_fn(|| serve(&mut queue)).map(|(origin, _)| origin).collect();
        assert_eq!(served, [1, 2, 3, 1, 3, 1]);
    }

    #[test]
    fn costly_flow_waits_until_others_have_used_as_much() {
        let mut queue = FairQueue::new();
        for _ in 0..3 {
            queue.push(flow(1), 1000);
        }
        assert_eq!(serve(&mut queue), Some((1, 1000)));
        // A flow that starts later, with one item at a time.
        for _ in 0..100 {
            queue.push(flow(2), 10);
            assert_eq!(serve(&mut queue), Some((2, 10)));
        }
        queue.push(flow(2), 10);
        assert_eq!(serve(&mut queue), Some((1, 1000)));
        assert_eq!(serve(&mut queue), Some((2, 10)));
    }

    #[test]
    fn idle_flow_is_still_charged_for_its_last_item() {
        let mut queue = FairQueue::new();
        for _ in 0..50 {
            queue.push(flow(2), 10);
        }
        queue.push(flow(1), 300);
        let mut served = Vec::new();
        while let Some((origin, _)) = serve(&mut queue) {
            served.push(origin);
            if origin == 1 {
                queue.push(flow(1), 300);
            }
            if served.len() == 53 {
                break;
            }
        }
        assert_eq!(served.iter().filter(|origin| **origin == 1).count(), 3, "{served:?}");
        assert_eq!(served[..2], [2, 1]);
    }

    #[test]
    fn new_flow_for_each_item_does_not_increase_the_share_of_an_owner() {
        let mut queue = FairQueue::new();
        let victim = Flow { owner: 2, origin: 0 };
        for _ in 0..200 {
            queue.push(victim, 10);
        }
        let (mut next_origin, mut waiting) = (0, 0);
        let mut served = [0_u64; 2];
        for _ in 0..200 {
            while waiting < 10 {
                next_origin += 1;
                waiting += 1;
                queue.push(flow(next_origin % 1000), 10);
            }
            let (flow, cost) = queue.serve().unwrap();
            queue.finish(cost);
            waiting -= usize::from(flow.owner == 1);
            served[usize::try_from(flow.owner).unwrap() - 1] += 1;
        }
        assert!(served[1] >= 80, "{served:?}");
    }

    #[test]
    fn outdated_idle_flows_are_removed() {
        let mut queue = FairQueue::new();
        queue.push(Flow { owner: 0, origin: 0 }, 1);
        for origin in 0..10_000 {
            queue.push(Flow { owner: origin, origin: 1 }, 1);
            queue.push(Flow { owner: 0, origin: 0 }, 1);
            for _ in 0..2 {
                let (_, cost) = queue.serve().unwrap();
                queue.finish(cost);
            }
            assert!(queue.0.queues.len() <= 2 * MIN_KEYS_TO_PRUNE);
        }
    }

    proptest! {
        #[test]
        fn flows_with_items_get_equal_shares(
            costs in prop::collection::vec(prop::collection::vec(1_u64..100, 60), 2..6),
        ) {
            let mut queue = FairQueue::new();
            for (origin, costs) in costs.iter().enumerate() {
                for cost in costs {
                    queue.push(flow(origin as u64), *cost);
                }
            }
            let mut spent = vec![0_u64; costs.len()];
            let mut left = vec![60_usize; costs.len()];
            while left.iter().all(|left| *left > 0) {
                let (origin, cost) = serve(&mut queue).unwrap();
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
            let mut queue = FairQueue::new();
            let (mut pushed, mut served) = (vec![Vec::new(); 5], vec![Vec::new(); 5]);
            for (number, step) in steps.into_iter().enumerate() {
                if let Some((origin, cost)) = step {
                    queue.push(flow(origin), (number, cost));
                    pushed[usize::try_from(origin).unwrap()].push(number);
                } else if let Some((flow, (number, cost))) = queue.serve() {
                    queue.finish(cost);
                    served[usize::try_from(flow.origin).unwrap()].push(number);
                }
            }
            while let Some((flow, (number, cost))) = queue.serve() {
                queue.finish(cost);
                served[usize::try_from(flow.origin).unwrap()].push(number);
            }
            prop_assert_eq!(pushed, served);
            prop_assert!(queue.0.queues.is_empty() && queue.0.spare.len() <= MAX_SPARE_QUEUES);
        }
    }
}
