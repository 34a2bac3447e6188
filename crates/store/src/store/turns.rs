//! Items of several flows, taken so that each flow gets the same share of the work.
//!
//! This is start-time fair queueing. Every flow has a start time in a virtual clock, and the flow with the earliest one is served
//! next. The cost of an item moves the start time of its flow forward, so a flow with costly items has fewer turns than one with
//! cheap items. A flow that was idle starts at the current virtual time: it is neither punished for what the others did meanwhile,
//! nor can it save up turns. So an item that is alone in its flow waits for the item that is being served, and for others that are
//! as cheap as itself.
//!
//! An idle flow is remembered while it is ahead of the virtual time. Otherwise a flow that never has more than one item would
//! have a turn for each of them, whatever they cost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use super::lines::Owner;

/// Number of empty queues that are kept for reuse, so that most items need no allocation.
const MAX_SPARE_QUEUES: usize = 16;
/// Capacity above which an empty queue is freed.
const MAX_SPARE_CAPACITY: usize = 256;
/// Number of idle flows above which those that need not be remembered are removed.
const MAX_IDLE_FLOWS: usize = 64;

/// A sequence of items that are served in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Flow {
    pub(super) owner: Owner,
    /// Tells the flows of one owner apart.
    pub(super) origin: u64,
}

pub(super) struct Turns<T> {
    flows: HashMap<Flow, Waiting<T>>,
    /// The flows with items, each once, except the one that is being served.
    order: BinaryHeap<Reverse<Turn>>,
    serving: Option<Flow>,
    /// The start time of the item that is being served. It does not go back.
    now: u64,
    next_number: u64,
    spare: Vec<VecDeque<T>>,
}

/// The items of a flow.
struct Waiting<T> {
    items: VecDeque<T>,
    /// When the first of them may start, in virtual time.
    start: u64,
}

/// Ordered by start, and by age among equals.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    start: u64,
    number: u64,
    flow: Flow,
}

impl<T> Turns<T> {
    pub(super) fn new() -> Self {
        Self {
            flows: HashMap::new(),
            order: BinaryHeap::new(),
            serving: None,
            now: 0,
            next_number: 0,
            spare: Vec::new(),
        }
    }

    /// Appends an item to a flow. Returns whether the flow had none, and is not being served.
    pub(super) fn push(&mut self, flow: Flow, item: T) -> bool {
        let (now, spare) = (self.now, &mut self.spare);
        let waiting =
            self.flows.entry(flow).or_insert_with(|| Waiting { items: spare.pop().unwrap_or_default(), start: now });
        let was_idle = waiting.items.is_empty() && self.serving != Some(flow);
        waiting.items.push_back(item);
        if was_idle {
            waiting.start = waiting.start.max(now);
            let start = waiting.start;
            self.add_turn(start, flow);
        }
        was_idle
    }

    fn add_turn(&mut self, start: u64, flow: Flow) {
        self.next_number += 1;
        self.order.push(Reverse(Turn { start, number: self.next_number, flow }));
    }

    /// Takes the next item. The one before it must be [finished](Self::finish).
    pub(super) fn serve(&mut self) -> Option<(Flow, T)> {
        let Reverse(Turn { start, flow, .. }) = self.order.pop()?;
        self.now = start;
        self.serving = Some(flow);
        let item = self.flows.get_mut(&flow)?.items.pop_front()?;
        Some((flow, item))
    }

    /// The flow that is being served.
    pub(super) fn serving(&self) -> Option<Flow> {
        self.serving
    }

    /// Charges the flow that is being served. Returns whether it has no more items.
    pub(super) fn finish(&mut self, cost: u64) -> bool {
        let Some(flow) = self.serving.take() else { return false };
        let Some(waiting) = self.flows.get_mut(&flow) else { return true };
        waiting.start = waiting.start.saturating_add(cost);
        let (start, is_idle) = (waiting.start, waiting.items.is_empty());
        if !is_idle {
            self.add_turn(start, flow);
        } else if self.order.is_empty() {
            // Nothing waits, so it does not matter how much work each flow has had.
            self.now = self.now.max(start);
            self.forget(|_| true);
        } else if self.flows.len() > self.order.len() + MAX_IDLE_FLOWS {
            let now = self.now;
            self.forget(|start| start <= now);
        }
        is_idle
    }

    /// Removes the idle flows with such a start time.
    fn forget(&mut self, is_outdated: impl Fn(u64) -> bool) {
        let spare = &mut self.spare;
        self.flows.retain(|_, waiting| {
            if !waiting.items.is_empty() || !is_outdated(waiting.start) {
                return true;
            }
            if spare.len() < MAX_SPARE_QUEUES && waiting.items.capacity() <= MAX_SPARE_CAPACITY {
                spare.push(std::mem::take(&mut waiting.items));
            }
            false
        });
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
            prop_assert!(turns.flows.is_empty() && turns.spare.len() <= MAX_SPARE_QUEUES);
        }
    }
}
