//! The queries that stand at one place of an index.

use std::collections::BTreeSet;

/// The number of a live query, as indexes know it.
pub(crate) type Slot = u32;

/// A set of queries. Most places have one, which takes no memory of its own; any of many is found and removed without passing the
/// others.
#[derive(Debug)]
pub(crate) enum Postings {
    One(Slot),
    #[expect(clippy::box_collection, reason = "so that one takes half of the memory")]
    Many(Box<BTreeSet<Slot>>),
}

impl Postings {
    pub(crate) fn insert(&mut self, slot: Slot) {
        match self {
            Self::One(only) if *only == slot => {}
            Self::One(only) => *self = Self::Many(Box::new(BTreeSet::from([*only, slot]))),
            Self::Many(slots) => _ = slots.insert(slot),
        }
    }

    /// Removes a query; says whether there is none left.
    pub(crate) fn remove(&mut self, slot: Slot) -> bool {
        match self {
            Self::One(only) => *only == slot,
            Self::Many(slots) => {
                slots.remove(&slot);
                slots.is_empty()
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(slots) => slots.len(),
        }
    }

    pub(crate) fn for_each(&self, found: &mut impl FnMut(Slot)) {
        match self {
            Self::One(only) => found(*only),
            Self::Many(slots) => slots.iter().for_each(|slot| found(*slot)),
        }
    }
}
