//! The queries of one index entry.

use std::collections::BTreeSet;

/// The index of a live query in the matcher's slab.
pub(crate) type Slot = u32;

/// A set of queries. A single query, the common case, needs no allocation. Removal takes logarithmic time.
#[derive(Debug)]
pub(crate) enum Postings {
    One(Slot),
    #[expect(clippy::box_collection, reason = "halves the size of the common variant")]
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

    /// Removes a query. Returns true if no query is left, so that the caller must drop the set.
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
