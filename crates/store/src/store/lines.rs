//! Lines of waiting items: one line per owner, served by turns.
//!
//! An owner is charged for its items. Each turn takes one item, so an item that is alone in its line waits for at most one item of
//! every other owner, however many the others have submitted. Within a line the order is that of submission.
//!
//! The front of each line is *queued*, the rest is *outside*. Queued items are bounded by number and bytes, in total and per owner;
//! an outside item can still be canceled by its ticket. Capacity goes to the owners with outside items by turns as well. An owner
//! at its own bound has no turn, and therefore delays nobody else.

use std::collections::{HashMap, VecDeque};

/// The divisor of the capacity that one owner can use.
const OWNER_SHARE: usize = 4;
/// Limits of the items and of the bytes of one, so that sums do not overflow.
const MAX_ITEMS: usize = 1 << 24;
const MAX_ITEM_BYTES: usize = usize::MAX / MAX_ITEMS;
/// Number of empty lines that are kept for reuse.
const MAX_SPARE_LINES: usize = 16;
/// Capacity above which an empty line is freed.
const MAX_SPARE_CAPACITY: usize = 256;

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
    /// The owners with queued items, each once, the next one first.
    turns: VecDeque<Owner>,
    /// The owners whose first outside item waits for capacity that all owners share, each once, the next one first.
    entering: VecDeque<Owner>,
    queued: Usage,
    next_ticket: Ticket,
    /// Empty lines for reuse, so that most items need no allocation.
    spare: Vec<VecDeque<Entry<T>>>,
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

/// The first outside item of a line.
struct Next {
    bytes: usize,
    charge: usize,
}

impl Usage {
    fn has_capacity(&self, bounds: &Bounds, next: &Next) -> bool {
        self.items < bounds.items && self.charged + next.charge <= bounds.bytes
    }

    fn add(&mut self, next: &Next) {
        self.items += 1;
        self.bytes += next.bytes;
        self.charged += next.charge;
    }
}

/// The items of one owner.
struct Line<T> {
    /// In the order of submission. The first ones are queued.
    entries: VecDeque<Entry<T>>,
    /// The number of queued entries.
    queued: usize,
    /// The sum of their charges.
    charged: usize,
    /// Whether the owner is in [`Lines::entering`].
    is_entering: bool,
}

struct Entry<T> {
    ticket: Ticket,
    bytes: usize,
    item: T,
}

impl<T> Line<T> {
    fn new(entries: VecDeque<Entry<T>>) -> Self {
        Self { entries, queued: 0, charged: 0, is_entering: false }
    }

    /// Returns the first outside item, if its owner has capacity for it.
    fn next(&self, bounds: &Bounds) -> Option<Next> {
        let bytes = self.entries.get(self.queued)?.bytes;
        let charge = bounds.charge(bytes);
        let has_capacity = self.queued < bounds.owner_items && self.charged + charge <= bounds.owner_bytes;
        has_capacity.then_some(Next { bytes, charge })
    }

    /// Queues the first outside item.
    fn admit(&mut self, next: &Next) {
        self.queued += 1;
        self.charged += next.charge;
    }
}

impl<T> Lines<T> {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            by_owner: HashMap::new(),
            turns: VecDeque::new(),
            entering: VecDeque::new(),
            queued: Usage::default(),
            next_ticket: 0,
            spare: Vec::new(),
        }
    }

    /// Returns the number and the bytes of the queued items.
    pub(super) fn queued(&self) -> Usage {
        self.queued
    }

    /// Appends an item to the line of its owner. Returns its ticket if it is outside.
    pub(super) fn push(&mut self, owner: Owner, bytes: usize, item: T) -> Option<Ticket> {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let spare = &mut self.spare;
        let line = self.by_owner.entry(owner).or_insert_with(|| Line::new(spare.pop().unwrap_or_default()));
        line.entries.push_back(Entry { ticket, bytes: bytes.min(MAX_ITEM_BYTES), item });
        let is_first_outside = line.entries.len() == line.queued + 1;
        if !is_first_outside || line.is_entering {
            return Some(ticket);
        }
        // An item for which its owner has no capacity enters after other items of the owner are taken.
        let Some(next) = line.next(&self.bounds) else { return Some(ticket) };
        if !self.entering.is_empty() || !self.queued.has_capacity(&self.bounds, &next) {
            line.is_entering = true;
            self.entering.push_back(owner);
            return Some(ticket);
        }
        if line.queued == 0 {
            self.turns.push_back(owner);
        }
        line.admit(&next);
        self.queued.add(&next);
        None
    }

    /// Takes the next queued item.
    pub(super) fn take(&mut self) -> Option<T> {
        let owner = self.turns.pop_front()?;
        let line = self.by_owner.get_mut(&owner)?;
        let Entry { bytes, item, .. } = line.entries.pop_front()?;
        let charge = self.bounds.charge(bytes);
        line.queued -= 1;
        line.charged -= charge;
        self.queued.items -= 1;
        self.queued.bytes -= bytes;
        self.queued.charged -= charge;
        if line.queued > 0 {
            self.turns.push_back(owner);
        }
        self.tidy(owner);
        self.admit();
        Some(item)
    }

    /// Takes an outside item out of its line. Returns `None` if it is queued or was taken.
    pub(super) fn cancel(&mut self, owner: Owner, ticket: Ticket) -> Option<T> {
        let line = self.by_owner.get_mut(&owner)?;
        let index = line.entries.binary_search_by_key(&ticket, |entry| entry.ticket).ok()?;
        if index < line.queued {
            return None;
        }
        let canceled = line.entries.remove(index)?;
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
            canceled.extend(line.entries.drain(line.queued..).map(|entry| entry.item));
            line.queued > 0
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
        } else if line.entries.is_empty() {
            let entries = std::mem::take(&mut line.entries);
            self.by_owner.remove(&owner);
            if self.spare.len() < MAX_SPARE_LINES && entries.capacity() <= MAX_SPARE_CAPACITY {
                self.spare.push(entries);
            }
        }
    }

    /// Queues outside items by turns, until there is no capacity for the next one.
    fn admit(&mut self) {
        while let Some(&owner) = self.entering.front() {
            let next = self.by_owner.get(&owner).and_then(|line| line.next(&self.bounds));
            if next.as_ref().is_some_and(|next| !self.queued.has_capacity(&self.bounds, next)) {
                // Nobody passes it, so it has its capacity once enough items are taken.
                return;
            }
            self.entering.pop_front();
            let Some(line) = self.by_owner.get_mut(&owner) else { continue };
            line.is_entering = false;
            if let Some(next) = next {
                if line.queued == 0 {
                    self.turns.push_back(owner);
                }
                line.admit(&next);
                self.queued.add(&next);
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
            owner: Owner,
            bytes: usize,
        },
        Take,
        /// Cancels the outside item with this index among all tickets that were given.
        Cancel(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..6_u64, 0..80_usize).prop_map(|(owner, bytes)| Step::Push { owner, bytes }),
            3 => Just(Step::Take),
            1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        ]
    }

    /// An item: its number, its owner and its bytes.
    type Item = (usize, Owner, usize);

    fn check(lines: &Lines<Item>) {
        let bounds = lines.bounds;
        let (mut items, mut bytes) = (0, 0);
        for (owner, line) in &lines.by_owner {
            let queued: Vec<&Item> = line.entries.iter().take(line.queued).map(|entry| &entry.item).collect();
            let charged = queued.iter().map(|(.., bytes)| bounds.charge(*bytes)).sum::<usize>();
            assert_eq!(line.charged, charged);
            assert!(charged <= bounds.owner_bytes && queued.len() <= bounds.owner_items);
            assert_eq!(lines.turns.iter().filter(|turn| *turn == owner).count(), usize::from(!queued.is_empty()));
            assert_eq!(lines.entering.iter().filter(|turn| *turn == owner).count(), usize::from(line.is_entering));
            assert!(line.is_entering || line.next(&bounds).is_none(), "an owner with capacity has a turn");
            items += queued.len();
            bytes += queued.iter().map(|(.., bytes)| bytes).sum::<usize>();
        }
        assert_eq!((lines.queued.items, lines.queued.bytes), (items, bytes));
        assert!(items <= bounds.items && lines.queued.charged <= bounds.bytes);
    }

    proptest! {
        #[test]
        fn items_keep_their_order_and_the_bounds_hold(steps in prop::collection::vec(step(), 1..200)) {
            let mut lines = Lines::new(Bounds::new(12, 200));
            let mut expected: BTreeMap<Owner, VecDeque<Item>> = BTreeMap::new();
            let mut tickets = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Push { owner, bytes } => {
                        let item = (number, owner, bytes);
                        expected.entry(owner).or_default().push_back(item);
                        tickets.extend(lines.push(owner, bytes, item).map(|ticket| (owner, ticket)));
                    }
                    Step::Take => match lines.take() {
                        Some(item) => prop_assert_eq!(expected.entry(item.1).or_default().pop_front(), Some(item)),
                        None => prop_assert!(expected.values().all(VecDeque::is_empty)),
                    },
                    Step::Cancel(index) => {
                        if let Some((owner, ticket)) = (!tickets.is_empty()).then(|| *index.get(&tickets))
                            && let Some(item) = lines.cancel(owner, ticket)
                        {
                            expected.entry(owner).or_default().retain(|other| *other != item);
                        }
                    }
                }
                check(&lines);
            }
            let outside = lines.cancel_all().len();
            check(&lines);
            let left = std::iter::from_fn(|| lines.take()).count();
            prop_assert_eq!(outside + left, expected.values().map(VecDeque::len).sum::<usize>());
            prop_assert!(lines.by_owner.is_empty() && lines.queued == Usage::default());
        }
    }
}
