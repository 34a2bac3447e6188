//! Admission control of the write queue, with limits for each owner and in total.
//!
//! Queued items are limited by number and bytes, in total and per owner. An item that exceeds a limit is *held back*: it waits in a
//! queue of its owner, and can be canceled by its ticket. Free capacity goes to the owners with held-back items in round-robin
//! order. An owner that has reached its own limit is skipped, so it does not delay other owners.
//!
//! Queued items are served by a [`FairQueue`].

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::fair_queue::{FairQueue, Flow};

/// The share of one owner is the capacity divided by this number.
const OWNER_DIVISOR: usize = 4;
/// Limits of the number of items and of the bytes of an item, so that sums do not overflow.
const MAX_ITEMS: usize = 1 << 24;
const MAX_ITEM_BYTES: usize = usize::MAX / MAX_ITEMS;

/// Limits of the queued items.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    items: usize,
    bytes: usize,
    owner_items: usize,
    owner_bytes: usize,
}

impl Bounds {
    /// Creates bounds from the limits in total. One owner can use a quarter of them.
    pub(super) fn new(items: usize, bytes: usize) -> Self {
        let (items, bytes) = (items.clamp(1, MAX_ITEMS), bytes.max(OWNER_DIVISOR));
        Self { items, bytes, owner_items: (items / OWNER_DIVISOR).max(1), owner_bytes: bytes / OWNER_DIVISOR }
    }

    /// Returns the bytes that an item is charged for. An item larger than the share of an owner is charged for the share, so it is
    /// queued when its owner has no other queued item.
    fn charge(&self, bytes: usize) -> usize {
        bytes.min(self.owner_bytes)
    }
}

/// The owner that is charged for an item.
pub(super) type Owner = u64;

/// Identifies a held-back item of an owner.
pub(super) type Ticket = u64;

/// Items of several owners: queued, or held back until there is capacity.
pub(super) struct Admission<T> {
    bounds: Bounds,
    by_owner: HashMap<Owner, OwnerQueue<T>>,
    /// The queued items, with their bytes.
    admitted: FairQueue<(usize, T)>,
    /// The owners whose first held-back item waits for shared capacity, each once, in round-robin order.
    waiting_owners: VecDeque<Owner>,
    queued: Usage,
    next_ticket: Ticket,
}

/// The queued items of all owners.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Their number.
    pub(super) items: usize,
    /// The sum of their bytes.
    pub(super) bytes: usize,
    /// The sum of their charges.
    charged: usize,
}

impl Usage {
    fn has_capacity(&self, bounds: &Bounds, bytes: usize) -> bool {
        self.items < bounds.items && self.charged + bounds.charge(bytes) <= bounds.bytes
    }
}

/// The items of one owner.
struct OwnerQueue<T> {
    /// The held-back items, in the order of submission.
    held_back: VecDeque<HeldBackItem<T>>,
    /// The number of queued items.
    queued: usize,
    /// The sum of their charges.
    charged: usize,
    /// Whether the owner is in [`Admission::waiting_owners`].
    is_waiting: bool,
}

struct HeldBackItem<T> {
    ticket: Ticket,
    flow: Flow,
    bytes: usize,
    item: T,
}

impl<T> OwnerQueue<T> {
    fn new() -> Self {
        Self { held_back: VecDeque::new(), queued: 0, charged: 0, is_waiting: false }
    }

    fn has_capacity(&self, bounds: &Bounds, bytes: usize) -> bool {
        self.queued < bounds.owner_items && self.charged + bounds.charge(bytes) <= bounds.owner_bytes
    }

    /// Returns the bytes of the first held-back item, if its owner has capacity for it.
    fn next(&self, bounds: &Bounds) -> Option<usize> {
        self.held_back.front().map(|entry| entry.bytes).filter(|bytes| self.has_capacity(bounds, *bytes))
    }

    fn is_empty(&self) -> bool {
        self.held_back.is_empty() && self.queued == 0
    }
}

impl<T> Admission<T> {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            by_owner: HashMap::new(),
            admitted: FairQueue::new(),
            waiting_owners: VecDeque::new(),
            queued: Usage::default(),
            next_ticket: 0,
        }
    }

    /// Returns the number and the bytes of the queued items.
    pub(super) fn queued(&self) -> Usage {
        self.queued
    }

    /// Appends an item to a flow. Returns its ticket if it is held back.
    pub(super) fn push(&mut self, flow: Flow, bytes: usize, item: T) -> Option<Ticket> {
        let bytes = bytes.min(MAX_ITEM_BYTES);
        let owner_queue = self.by_owner.entry(flow.owner).or_insert_with(OwnerQueue::new);
        let is_next = owner_queue.held_back.is_empty() && owner_queue.has_capacity(&self.bounds, bytes);
        if is_next && self.waiting_owners.is_empty() && self.queued.has_capacity(&self.bounds, bytes) {
            self.enqueue(flow, bytes, item);
            return None;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        owner_queue.held_back.push_back(HeldBackItem { ticket, flow, bytes, item });
        // An owner without capacity begins to wait when one of its items is taken: see `update_owner`.
        if is_next && !owner_queue.is_waiting {
            owner_queue.is_waiting = true;
            self.waiting_owners.push_back(flow.owner);
        }
        Some(ticket)
    }

    /// Queues an item for which there is capacity.
    fn enqueue(&mut self, flow: Flow, bytes: usize, item: T) {
        let charge = self.bounds.charge(bytes);
        self.queued.items += 1;
        self.queued.bytes += bytes;
        self.queued.charged += charge;
        self.admitted.push(flow, (bytes, item));
        if let Some(owner_queue) = self.by_owner.get_mut(&flow.owner) {
            owner_queue.queued += 1;
            owner_queue.charged += charge;
        }
    }

    /// Removes and returns the next queued item. The previous item must be [finished](Self::finish).
    pub(super) fn pop(&mut self) -> Option<T> {
        let (flow, (bytes, item)) = self.admitted.serve()?;
        let charge = self.bounds.charge(bytes);
        self.queued.items -= 1;
        self.queued.bytes -= bytes;
        self.queued.charged -= charge;
        if let Some(owner_queue) = self.by_owner.get_mut(&flow.owner) {
            owner_queue.queued -= 1;
            owner_queue.charged -= charge;
        }
        self.update_owner(flow.owner);
        self.admit();
        Some(item)
    }

    /// Charges the cost of the last item to its owner. A second call does nothing.
    pub(super) fn finish(&mut self, cost: u64) {
        self.admitted.finish(cost);
    }

    /// Removes a held-back item. Returns `None` if it is queued or was taken.
    pub(super) fn cancel(&mut self, owner: Owner, ticket: Ticket) -> Option<T> {
        let owner_queue = self.by_owner.get_mut(&owner)?;
        let index = owner_queue.held_back.binary_search_by_key(&ticket, |entry| entry.ticket).ok()?;
        let canceled = owner_queue.held_back.remove(index)?;
        self.update_owner(owner);
        self.admit();
        Some(canceled.item)
    }

    /// Removes all held-back items.
    pub(super) fn cancel_all(&mut self) -> Vec<T> {
        self.waiting_owners.clear();
        let mut canceled = Vec::new();
        self.by_owner.retain(|_, owner_queue| {
            owner_queue.is_waiting = false;
            canceled.extend(owner_queue.held_back.drain(..).map(|entry| entry.item));
            !owner_queue.is_empty()
        });
        canceled
    }

    /// Updates the entry of an owner: removes it if it is empty, and lets the owner wait for shared capacity if it has capacity of its
    /// own for its next item.
    fn update_owner(&mut self, owner: Owner) {
        let Some(owner_queue) = self.by_owner.get_mut(&owner) else { return };
        // `admit` updates an owner that waits.
        if owner_queue.is_waiting {
            return;
        }
        if owner_queue.next(&self.bounds).is_some() {
            owner_queue.is_waiting = true;
            self.waiting_owners.push_back(owner);
        } else if owner_queue.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    /// Queues held-back items, one owner after the other, until there is no capacity for the next one.
    fn admit(&mut self) {
        while let Some(&owner) = self.waiting_owners.front() {
            let next = self.by_owner.get(&owner).and_then(|owner_queue| owner_queue.next(&self.bounds));
            if next.is_some_and(|bytes| !self.queued.has_capacity(&self.bounds, bytes)) {
                // Later items do not overtake this one, so it is admitted when enough items have been taken.
                return;
            }
            self.waiting_owners.pop_front();
            let Some(owner_queue) = self.by_owner.get_mut(&owner) else { continue };
            owner_queue.is_waiting = false;
            if let Some(HeldBackItem { flow, bytes, item, .. }) = next.and_then(|_| owner_queue.held_back.pop_front()) {
                self.enqueue(flow, bytes, item);
            }
            self.update_owner(owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum TestStep {
        Push {
            flow: Flow,
            bytes: usize,
        },
        /// Takes an item, after finishing the last one with this cost.
        Take(u64),
        /// Cancels a held-back item.
        Cancel(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = TestStep> {
        let flow = (0..6_u64, 0..2_u64).prop_map(|(owner, origin)| Flow { owner, origin });
        prop_oneof![
            4 => (flow, 0..80_usize).prop_map(|(flow, bytes)| TestStep::Push { flow, bytes }),
            3 => (0..50_u64).prop_map(TestStep::Take),
            1 => any::<prop::sample::Index>().prop_map(TestStep::Cancel),
        ]
    }

    /// An item: its number, its flow and its bytes.
    type TestItem = (usize, Flow, usize);

    /// Checks the limits against the items that are expected to be queued or held back.
    fn check(admission: &Admission<TestItem>, expected: &BTreeMap<Flow, VecDeque<TestItem>>) {
        let bounds = admission.bounds;
        let (mut items, mut charged) = (0, 0);
        for (owner, owner_queue) in &admission.by_owner {
            assert!(owner_queue.charged <= bounds.owner_bytes && owner_queue.queued <= bounds.owner_items);
            assert_eq!(
                admission.waiting_owners.iter().filter(|turn| *turn == owner).count(),
                usize::from(owner_queue.is_waiting)
            );
            assert!(
                owner_queue.is_waiting || owner_queue.next(&bounds).is_none(),
                "an owner with capacity for its next item waits"
            );
            let of_owner = expected.iter().filter(|(flow, _)| flow.owner == *owner).map(|(_, items)| items.len());
            assert_eq!(owner_queue.queued + owner_queue.held_back.len(), of_owner.sum::<usize>());
            items += owner_queue.queued;
            charged += owner_queue.charged;
        }
        assert_eq!((admission.queued.items, admission.queued.charged), (items, charged));
        assert!(items <= bounds.items && charged <= bounds.bytes);
        let all: usize = expected.values().flatten().map(|(.., bytes)| bytes).sum();
        let held_back: usize =
            admission.by_owner.values().flat_map(|owner_queue| &owner_queue.held_back).map(|entry| entry.bytes).sum();
        assert_eq!(admission.queued.bytes + held_back, all);
    }

    proptest! {
        #[test]
        fn items_keep_their_order_within_the_limits(steps in prop::collection::vec(step(), 1..200)) {
            let mut admission = Admission::new(Bounds::new(12, 200));
            let mut expected: BTreeMap<Flow, VecDeque<TestItem>> = BTreeMap::new();
            let mut tickets = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    TestStep::Push { flow, bytes } => {
                        let item = (number, flow, bytes);
                        expected.entry(flow).or_default().push_back(item);
                        tickets.extend(admission.push(flow, bytes, item).map(|ticket| (flow.owner, ticket)));
                    }
                    TestStep::Take(cost) => {
                        admission.finish(cost);
                        match admission.pop() {
                            Some(item) => prop_assert_eq!(expected.entry(item.1).or_default().pop_front(), Some(item)),
                            None => prop_assert!(expected.values().all(VecDeque::is_empty)),
                        }
                    }
                    TestStep::Cancel(index) => {
                        if let Some((owner, ticket)) = (!tickets.is_empty()).then(|| *index.get(&tickets))
                            && let Some(item) = admission.cancel(owner, ticket)
                        {
                            expected.entry(item.1).or_default().retain(|other| *other != item);
                        }
                    }
                }
                check(&admission, &expected);
            }
            let held_back = admission.cancel_all().len();
            let take = || {
                admission.finish(0);
                admission.pop()
            };
            let left = std::iter::from_fn(take).count();
            prop_assert_eq!(held_back + left, expected.values().map(VecDeque::len).sum::<usize>());
            prop_assert!(admission.by_owner.is_empty() && admission.queued == Usage::default());
        }

        #[test]
        fn more_flows_do_not_increase_the_share_of_an_owner(
            flows in prop::collection::vec(1_u64..6, 2..5),
            costs in prop::collection::vec(1_u64..100, 1000),
        ) {
            const ITEMS: usize = 200;
            let mut admission = Admission::new(Bounds::new(100_000, usize::MAX));
            for (owner, flows) in flows.iter().enumerate() {
                for number in 0..ITEMS {
                    let flow = Flow { owner: owner as u64, origin: number as u64 % flows };
                    prop_assert_eq!(admission.push(flow, 0, owner), None);
                }
            }
            let mut spent = vec![0; flows.len()];
            for cost in costs.into_iter().take(ITEMS) {
                let owner = admission.pop().unwrap();
                admission.finish(cost);
                spent[owner] += cost;
                let (least, most) = (spent.iter().min().unwrap(), spent.iter().max().unwrap());
                // Each flow of an owner can be ahead by one item.
                prop_assert!(most - least <= 7 * 100, "{spent:?}");
            }
        }
    }
}
