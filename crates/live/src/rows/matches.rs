//! The matching rows of a query in order, with ranks.
//!
//! The structure is a list of lists of a few hundred entries. A row is found by two binary searches. Its insertion or removal moves
//! the entries of one list. Its rank is its index plus the lengths of the preceding lists, which are stored contiguously. A million
//! rows are two or three thousand lists. A row takes one entry and no other memory.
//!
//! Lists are shared with clones: cloning a million rows takes a few microseconds, and a later change copies one list.

use std::sync::Arc;

use super::position::{RowEntry, Sort};
use tidewire_store::Row;

/// Rows in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Matches {
    /// No list is empty.
    lists: Vec<Arc<Vec<RowEntry>>>,
    /// The number of entries of each list.
    counts: Vec<u32>,
    len: usize,
}

impl Matches {
    /// Length at which a list is split.
    const MAX_LIST_LEN: usize = 512;

    /// Sorts entries.
    pub(crate) fn new(mut entries: Vec<RowEntry>, sort: &Sort) -> Self {
        entries.sort_unstable_by(|one, two| sort.compare(one, two));
        let len = entries.len();
        let mut lists = Vec::with_capacity(len.div_ceil(Self::MAX_LIST_LEN / 4 * 3));
        if len <= Self::MAX_LIST_LEN {
            entries.shrink_to_fit();
            lists.extend((len > 0).then(|| Arc::new(entries)));
        } else {
            let mut entries = entries.into_iter();
            while entries.len() > 0 {
                lists.push(Arc::new(entries.by_ref().take(Self::MAX_LIST_LEN / 4 * 3).collect::<Vec<_>>()));
            }
        }
        let counts = lists.iter().map(|list| count(list)).collect();
        Self { lists, counts, len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Inserts a row. Returns the row that it replaces, if any.
    pub(crate) fn insert(&mut self, entry: RowEntry, sort: &Sort) -> Option<Row> {
        let (list, index) = self.find(&entry, sort);
        match index {
            Ok(index) => return Some(std::mem::replace(&mut self.list(list)[index].row, entry.row)),
            Err(_) if self.lists.is_empty() => {
                self.lists.push(Arc::new(vec![entry]));
                self.counts.push(1);
            }
            Err(index) => {
                self.list(list).insert(index, entry);
                self.counts[list] += 1;
                if self.lists[list].len() >= Self::MAX_LIST_LEN {
                    self.split(list);
                }
            }
        }
        self.len += 1;
        None
    }

    /// Removes the row with the position of an entry. Returns the row, if it was present.
    pub(crate) fn remove(&mut self, entry: &RowEntry, sort: &Sort) -> Option<Row> {
        let (list, Ok(index)) = self.find(entry, sort) else { return None };
        let removed = self.list(list).remove(index);
        self.counts[list] -= 1;
        self.len -= 1;
        if self.lists[list].len() < Self::MAX_LIST_LEN / 8 {
            self.join(list);
        }
        Some(removed.row)
    }

    /// Replaces the row with the position of an entry. Returns the old row, if it was present.
    pub(crate) fn replace(&mut self, entry: &RowEntry, sort: &Sort) -> Option<Row> {
        let (list, Ok(index)) = self.find(entry, sort) else { return None };
        Some(std::mem::replace(&mut self.list(list)[index].row, entry.row.clone()))
    }

    /// Returns the number of rows before an entry, which need not be present.
    pub(crate) fn rank(&self, entry: &RowEntry, sort: &Sort) -> usize {
        let (list, Ok(index) | Err(index)) = self.find(entry, sort);
        self.before(list) + index
    }

    /// Returns the entries from a rank on.
    pub(crate) fn from(&self, rank: usize) -> impl Iterator<Item = &RowEntry> {
        let (list, index) = self.at(rank);
        let mut lists = self.lists[list..].iter();
        let nearest = lists.next().map_or(&[][..], |list| &list[index..]);
        nearest.iter().chain(lists.flat_map(|list| list.iter()))
    }

    /// Returns the entries before a rank, in reverse order.
    pub(crate) fn back_from(&self, rank: usize) -> impl Iterator<Item = &RowEntry> {
        let (list, index) = self.at(rank);
        let nearest = self.lists.get(list).map_or(&[][..], |list| &list[..index]);
        nearest.iter().rev().chain(self.lists[..list].iter().rev().flat_map(|list| list.iter().rev()))
    }

    /// Returns a list to be changed, after copying it if a clone shares it.
    fn list(&mut self, list: usize) -> &mut Vec<RowEntry> {
        Arc::make_mut(&mut self.lists[list])
    }

    fn before(&self, list: usize) -> usize {
        self.counts[..list].iter().map(|count| *count as usize).sum()
    }

    /// Returns the list of a rank and the index in the list. A rank beyond the last row gives the end.
    fn at(&self, rank: usize) -> (usize, usize) {
        let mut left = rank;
        for (list, count) in self.counts.iter().enumerate() {
            if left < *count as usize {
                return (list, left);
            }
            left -= *count as usize;
        }
        (self.lists.len(), 0)
    }

    /// Returns the list and the index of an entry, or of the place where it would be inserted.
    fn find(&self, entry: &RowEntry, sort: &Sort) -> (usize, Result<usize, usize>) {
        let begins_before =
            |list: &Arc<Vec<RowEntry>>| list.first().is_some_and(|first| sort.compare(first, entry).is_le());
        let list = self.lists.partition_point(begins_before).saturating_sub(1);
        let index =
            self.lists.get(list).map_or(Err(0), |list| list.binary_search_by(|known| sort.compare(known, entry)));
        (list, index)
    }

    fn split(&mut self, list: usize) {
        let first = self.list(list);
        let second = first.split_off(Self::MAX_LIST_LEN / 2);
        first.shrink_to(Self::MAX_LIST_LEN / 4 * 3);
        self.counts[list] = count(&self.lists[list]);
        self.counts.insert(list + 1, count(&second));
        self.lists.insert(list + 1, Arc::new(second));
    }

    /// Merges a list with a neighbour, if both are short. Removes it if it is empty.
    fn join(&mut self, list: usize) {
        if self.lists[list].is_empty() {
            self.lists.remove(list);
            self.counts.remove(list);
            return;
        }
        let first = list.saturating_sub(1);
        if first + 1 < self.lists.len()
            && self.lists[first].len() + self.lists[first + 1].len() <= Self::MAX_LIST_LEN / 2
        {
            let second = self.lists.remove(first + 1);
            self.counts.remove(first + 1);
            self.list(first).extend(Arc::unwrap_or_clone(second));
            self.counts[first] = count(&self.lists[first]);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "lists are short")]
fn count(list: &[RowEntry]) -> u32 {
    list.len() as u32
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::json;
    use tidewire_store::{Direction, Field};

    use super::*;

    fn row(n: u16) -> Row {
        Row::new(json!({"n": n % 7}).as_object().unwrap()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Compares with a model, with enough rows that lists are split and merged. A clone is not changed by later steps.
        #[test]
        fn behaves_like_a_sorted_set(first in vec(0..4000_u16, 0..1500), steps in vec((0..4000_u16, any::<bool>()), 0..1500)) {
            let sort = Sort::new(&[(Field::new("n"), Direction::Asc)]);
            let entry = |n: u16| sort.entry(&row(n), u64::from(n));
            let mut model: std::collections::BTreeSet<(u16, u16)> = first.iter().map(|n| (n % 7, *n)).collect();
            let mut matches = Matches::new(model.iter().map(|(_, n)| entry(*n)).collect(), &sort);
            let copy = matches.clone();
            let copied: Vec<u64> = model.iter().map(|(_, n)| u64::from(*n)).collect();
            for (n, is_insertion) in steps {
                if is_insertion {
                    prop_assert_eq!(matches.insert(entry(n), &sort).is_none(), model.insert((n % 7, n)));
                } else {
                    prop_assert_eq!(matches.remove(&entry(n), &sort).is_some(), model.remove(&(n % 7, n)));
                }
                prop_assert_eq!(matches.replace(&entry(n), &sort).is_some(), is_insertion);
            }
            let model: Vec<u64> = model.into_iter().map(|(_, n)| u64::from(n)).collect();
            prop_assert_eq!(matches.len(), model.len());
            let ordinals = |entries: &mut dyn Iterator<Item = &RowEntry>| -> Vec<u64> {
                entries.map(|entry| entry.position.ordinal).collect()
            };
            for rank in (0..model.len() + 3).step_by(97) {
                let (before, after) = model.split_at(rank.min(model.len()));
                prop_assert_eq!(ordinals(&mut matches.from(rank)), after);
                let backwards: Vec<u64> = before.iter().rev().copied().collect();
                prop_assert_eq!(ordinals(&mut matches.back_from(rank)), backwards);
            }
            for n in (0..4000).step_by(61) {
                let expected = model.iter().filter(|known| (*known % 7, **known) < (u64::from(n) % 7, u64::from(n))).count();
                prop_assert_eq!(matches.rank(&entry(n), &sort), expected);
            }
            prop_assert_eq!(ordinals(&mut copy.from(0)), copied);
            for list in &matches.lists {
                prop_assert!(!list.is_empty() && list.len() < Matches::MAX_LIST_LEN);
            }
        }

        #[test]
        fn removals_merge_short_lists(count in 0..3000_u16) {
            let sort = Sort::new(&[]);
            let mut matches = Matches::default();
            for n in 0..count {
                matches.insert(sort.entry(&row(n), u64::from(n)), &sort);
            }
            for n in 0..count {
                prop_assert!(matches.lists.len() <= 2 + matches.len() * 16 / Matches::MAX_LIST_LEN, "{}", matches.lists.len());
                matches.remove(&sort.entry(&row(n), u64::from(n)), &sort);
            }
            prop_assert!(matches.lists.is_empty() && matches.counts.is_empty());
        }
    }
}
