//! The admission of items to a queue that is bounded for each owner, and their turns.
//!
//! An owner is charged for its items. Queued items are bounded by number and bytes, in total and per owner. An item for which there
//! is no capacity is *outside*: it waits in the line of its owner, and can be canceled by its ticket. Capacity goes to the owners
//! with outside items by turns. An owner at its own bound has no turn, and therefore delays no other.
//!
//! Queued items are served by [`Turns`].

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::turns::{Flow, Turns};

/// The divisor of the capacity that one owner can use.
const OWNER_SHARE: usize = 4;
/// Limits of the items and of the bytes of one, so that sums do not overflow.
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
    /// Bounds in total. One owner can use a quarter of them.
    pub(super) fn new(items: usize, bytes: usize) -> Self {
        let (items, bytes) = (items.clamp(1, MAX_ITEMS), bytes.max(OWNER_SHARE));
        Self { items, bytes, owner_items: (items / OWNER_SHARE).max(1), owner_bytes: bytes / OWNER_SHARE }
    }

    /// Returns the bytes that an item counts for. An item larger than the share of an owner counts for the whole share: it is
    /// queued when its owner has nothing else in the queue.
    fn charge(&self, bytes: usize) -> usize {
        bytes.min(self.owner_bytes)
    }
}

/// Who is charged for an item.
pub(super) type Owner = u64;

/// Identifies an outside item within the line of its owner.
pub(super) type Ticket = u64;

pub(super) struct Lines<T> {
    bounds: Bounds,
    by_owner: HashMap<Owner, Line<T>>,
    /// The queued items, with their bytes.
    turns: Turns<(usize, T)>,
    /// The owners whose first outside item waits for capacity that all owners share, each once, the next one first.
    entering: VecDeque<Owner>,
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
struct Line<T> {
    /// The items outside, in the order of submission.
    outside: VecDeque<Entry<T>>,
    /// The number of queued items.
    queued: usize,
    /// The sum of their charges.
    charged: usize,
    /// Whether the owner is in [`Lines::entering`].
    is_entering: bool,
}

struct Entry<T> {
    ticket: Ticket,
    flow: Flow,
    bytes: usize,
    item: T,
}

impl<T> Line<T> {
    fn new() -> Self {
        Self { outside: VecDeque::new(), queued: 0, charged: 0, is_entering: false }
    }

    fn has_capacity(&self, bounds: &Bounds, bytes: usize) -> bool {
        self.queued < bounds.owner_items && self.charged + bounds.charge(bytes) <= bounds.owner_bytes
    }

    /// Returns the bytes of the first outside item, if its owner has capacity for it.
    fn next(&self, bounds: &Bounds) -> Option<usize> {
        self.outside.front().map(|entry| entry.bytes).filter(|bytes| self.has_capacity(bounds, *bytes))
    }

    fn is_empty(&self) -> bool {
        self.outside.is_empty() && self.queued == 0
    }
}

impl<T> Lines<T> {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            by_owner: HashMap::new(),
            turns: Turns::new(),
            entering: VecDeque::new(),
            queued: Usage::default(),
            next_ticket: 0,
        }
    }

    /// Returns the number and the bytes of the queued items.
    pub(super) fn queued(&self) -> Usage {
        self.queued
    }

    /// Appends an item to a flow. Returns its ticket if it is outside.
    pub(super) fn push(&mut self, flow: Flow, bytes: usize, item: T) -> Option<Ticket> {
        let bytes = bytes.min(MAX_ITEM_BYTES);
        let line = self.by_owner.entry(flow.owner).or_insert_with(Line::new);
        let is_next = line.outside.is_empty() && line.has_capacity(&self.bounds, bytes);
        if is_next && self.entering.is_empty() && self.queued.has_capacity(&self.bounds, bytes) {
            self.queue(flow, bytes, item);
            return None;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        line.outside.push_back(Entry { ticket, flow, bytes, item });
        // An item for which its owner has no capacity enters after other items of the owner are taken.
        if is_next && !line.is_entering {
            line.is_entering = true;
            self.entering.push_back(flow.owner);
        }
        Some(ticket)
    }

    /// Queues an item for which there is capacity.
    fn queue(&mut self, flow: Flow, bytes: usize, item: T) {
        let charge = self.bounds.charge(bytes);
        self.queued.items += 1;
        self.queued.bytes += bytes;
        self.queued.charged += charge;
        self.turns.push(flow, (bytes, item));
        if let Some(line) = self.by_owner.get_mut(&flow.owner) {
            line.queued += 1;
            line.charged += charge;
        }
    }

    /// Takes the next queued item. The one before it must be [finished](Self::finish).
    pub(super) fn take(&mut self) -> Option<T> {
        let (flow, (bytes, item)) = self.turns.serve()?;
        let charge = self.bounds.charge(bytes);
        self.queued.items -= 1;
        self.queued.bytes -= bytes;
        self.queued.charged -= charge;
        if let Some(line) = self.by_owner.get_mut(&flow.owner) {
            line.queued -= 1;
            line.charged -= charge;
        }
        self.tidy(flow.owner);
        self.admit();
        Some(item)
    }

    /// Charges the owner of the last item that was taken, once.
    pub(super) fn finish(&mut self, cost: u64) {
        self.turns.finish(cost);
    }

    /// Takes an outside item out of its line. Returns `None` if it is queued or was taken.
    pub(super) fn cancel(&mut self, owner: Owner, ticket: Ticket) -> Option<T> {
        let line = self.by_owner.get_mut(&owner)?;
        let index = line.outside.binary_search_by_key(&ticket, |entry| entry.ticket).ok()?;
        let canceled = line.outside.remove(index)?;
        self.tidy(owner);
        self.admit();
        Some(canceled.item)
    }

    /// Takes out all outside items.
    pub(super) fn cancel_all(&mut self) -> Vec<T> {
        self.entering.clear();
        let mut canceled = Vec::new();
        self.by_owner.retain(|_, line| {
            line.is_entering = false;
            canceled.extend(line.outside.drain(..).map(|entry| entry.item));
            !line.is_empty()
        });
        canceled
    }

    /// Removes the line of an owner if it is empty, and lets its first outside item enter if its owner has capacity.
    fn tidy(&mut self, owner: Owner) {
        let Some(line) = self.by_owner.get_mut(&owner) else { return };
        // A line that is entering is removed when it has its turn there.
        if line.is_entering {
            return;
        }
        if line.next(&self.bounds).is_some() {
            line.is_entering = true;
            self.entering.push_back(owner);
        } else if line.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    /// Queues outside items by turns, until there is no capacity for the next one.
    fn admit(&mut self) {
        while let Some(&owner) = self.entering.front() {
            let next = self.by_owner.get(&owner).and_then(|line| line.next(&self.bounds));
            if next.is_some_and(|bytes| !self.queued.has_capacity(&self.bounds, bytes)) {
                // Nobody passes it, so it has its capacity once enough items are taken.
                return;
            }
            self.entering.pop_front();
            let Some(line) = self.by_owner.get_mut(&owner) else { continue };
            line.is_entering = false;
            if let Some(Entry { flow, bytes, item, .. }) = next.and_then(|_| line.outside.pop_front()) {
                self.queue(flow, bytes, item);
            }
            self.tidy(owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Push {
            flow: Flow,
            bytes: usize,
        },
        /// The last item has this cost.
        Take(u64),
        /// Cancels the outside item with this index among all tickets that were given.
        Cancel(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        let flow = (0..6_u64, 0..2_u64).prop_map(|(owner, origin)| Flow { owner, origin });
        prop_oneof![
            4 => (flow, 0..80_usize).prop_map(|(flow, bytes)| Step::Push { flow, bytes }),
            3 => (0..50_u64).prop_map(Step::Take),
            1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        ]
    }

    /// An item: its number, its flow and its bytes.
    type Item = (usize, Flow, usize);

    /// Checks the bounds, with the items that are expected to be queued or outside.
    fn check(lines: &Lines<Item>, expected: &BTreeMap<Flow, VecDeque<Item>>) {
        let bounds = lines.bounds;
        let (mut items, mut charged) = (0, 0);
        for (owner, line) in &lines.by_owner {
            assert!(line.charged <= bounds.owner_bytes && line.queued <= bounds.owner_items);
            assert_eq!(lines.entering.iter().filter(|turn| *turn == owner).count(), usize::from(line.is_entering));
            assert!(line.is_entering || line.next(&bounds).is_none(), "an owner with capacity has a turn");
            let of_owner = expected.iter().filter(|(flow, _)| flow.owner == *owner).map(|(_, items)| items.len());
            assert_eq!(line.queued + line.outside.len(), of_owner.sum::<usize>());
            items += line.queued;
            charged += line.charged;
        }
        assert_eq!((lines.queued.items, lines.queued.charged), (items, charged));
        assert!(items <= bounds.items && charged <= bounds.bytes);
        let all: usize = expected.values().flatten().map(|(.., bytes)| bytes).sum();
        let outside: usize = lines.by_owner.values().flat_map(|line| &line.outside).map(|entry| entry.bytes).sum();
        assert_eq!(lines.queued.bytes + outside, all);
    }

    proptest! {
        #[test]
        fn items_keep_their_order_and_the_bounds_hold(steps in prop::collection::vec(step(), 1..200)) {
            let mut lines = Lines::new(Bounds::new(12, 200));
            let mut expected: BTreeMap<Flow, VecDeque<Item>> = BTreeMap::new();
            let mut tickets = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Push { flow, bytes } => {
                        let item = (number, flow, bytes);
                        expected.entry(flow).or_default().push_back(item);
                        tickets.extend(lines.push(flow, bytes, item).map(|ticket| (flow.owner, ticket)));
                    }
                    Step::Take(cost) => {
                        lines.finish(cost);
                        match lines.take() {
                            Some(item) => prop_assert_eq!(expected.entry(item.1).or_default().pop_front(), Some(item)),
                            None => prop_assert!(expected.values().all(VecDeque::is_empty)),
                        }
                    }
                    Step::Cancel(index) => {
                        if let Some((owner, ticket)) = (!tickets.is_empty()).then(|| *index.get(&tickets))
                            && let Some(item) = lines.cancel(owner, ticket)
                        {
                            expected.entry(item.1).or_default().retain(|other| *other != item);
                        }
                    }
                }
                check(&lines, &expected);
            }
            let outside = lines.cancel_all().len();
            let take = || {
                lines.finish(0);
                lines.take()
            };
            let left = std::iter::from_fn(take).count();
            prop_assert_eq!(outside + left, expected.values().map(VecDeque::len).sum::<usize>());
            prop_assert!(lines.by_owner.is_empty() && lines.queued == Usage::default());
        }

        #[test]
        fn an_owner_with_several_flows_has_no_larger_share(
            flows in prop::collection::vec(1_u64..6, 2..5),
            costs in prop::collection::vec(1_u64..100, 1000),
        ) {
            const ITEMS: usize = 200;
            let mut lines = Lines::new(Bounds::new(100_000, usize::MAX));
            for (owner, flows) in flows.iter().enumerate() {
                for number in 0..ITEMS {
                    let flow = Flow { owner: owner as u64, origin: number as u64 % flows };
                    prop_assert_eq!(lines.push(flow, 0, owner), None);
                }
            }
            let mut spent = vec![0; flows.len()];
            for cost in costs.into_iter().take(ITEMS) {
                let owner = lines.take().unwrap();
                lines.finish(cost);
                spent[owner] += cost;
                let (least, most) = (spent.iter().min().unwrap(), spent.iter().max().unwrap());
                // Each flow of an owner may be ahead by one item.
                prop_assert!(most - least <= 7 * 100, "{spent:?}");
            }
        }
    }
}
