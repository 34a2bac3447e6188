//! Changes of a window over the matching rows.
//!
//! Rows are inserted, removed and moved anywhere among the matches. Other rows enter or leave the window because of changes before
//! them. Both are computed from ranks: the old rank of a row is its new rank, minus the rows inserted before it, plus the rows removed
//! before it. So the cost depends on the number of changed rows, not on the size of the window or of the matches.

use tidewire_store::Row;

use super::matches::Matches;
use super::position::{RowEntry, Sort};

/// The range of ranks that is the result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// The rank of the first row.
    pub(crate) start: usize,
    /// The rank after the last row.
    pub(crate) end: usize,
}

/// The changes of the matches. Each list is sorted.
#[derive(Debug, Default)]
pub(crate) struct MatchChanges {
    /// Entries that were removed.
    pub(crate) removed: Vec<RowEntry>,
    /// Entries that were inserted.
    pub(crate) inserted: Vec<RowEntry>,
    /// Old entries of rows that were replaced in the same position.
    pub(crate) updated: Vec<RowEntry>,
}

/// The change of a window. Each list is sorted by index.
#[derive(Debug, Default)]
pub(crate) struct Edit {
    /// Removed rows, with their indexes in the old result.
    pub(crate) removed: Vec<(usize, Row)>,
    /// Added rows, with their indexes in the new result.
    pub(crate) added: Vec<(usize, Row)>,
    /// Changed rows, with their indexes in the new result, the old row and the new row.
    pub(crate) changed: Vec<(usize, Row, Row)>,
}

impl Window {
    fn contains(self, rank: usize) -> bool {
        (self.start..self.end).contains(&rank)
    }

    /// Returns the change of the result for these changes of the matches.
    pub(crate) fn edit(self, matches: &Matches, match_changes: &MatchChanges, sort: &Sort) -> Edit {
        let Self { start, end } = self;
        let mut edit = Edit::default();
        let old_rank = |entry: &RowEntry, rank: usize| {
            (rank + before(&match_changes.removed, entry, sort)).saturating_sub(before(
                &match_changes.inserted,
                entry,
                sort,
            ))
        };
        for entry in &match_changes.removed {
            let rank = old_rank(entry, matches.rank(entry, sort));
            if self.contains(rank) {
                edit.removed.push((rank - start, entry.row.clone()));
            }
        }
        for entry in &match_changes.inserted {
            let rank = matches.rank(entry, sort);
            if self.contains(rank) {
                edit.added.push((rank - start, entry.row.clone()));
            }
        }
        for was in &match_changes.updated {
            let rank = matches.rank(was, sort);
            if self.contains(rank)
                && self.contains(old_rank(was, rank))
                && let Some(is) = matches.from(rank).next()
            {
                edit.changed.push((rank - start, was.row.clone(), is.row.clone()));
            }
        }
        // Rows that were not inserted can cross an edge of the window. They have the same order as before, so each walk from an edge
        // ends at the first row that has not crossed it.
        let has_stayed = |entry: &RowEntry| find(&match_changes.inserted, entry, sort).is_none();
        let was = |entry: &RowEntry| find(&match_changes.updated, entry, sort).unwrap_or(entry).row.clone();
        let edge = start.min(matches.len());
        for (rank, entry) in (0..edge).rev().zip(matches.back_from(edge)).filter(|(_, entry)| has_stayed(entry)) {
            match old_rank(entry, rank) {
                old if old < start => break,
                old if old < end => edit.removed.push((old - start, was(entry))),
                _ => {}
            }
        }
        for (entry, rank) in matches.from(end).zip(end..).filter(|(entry, _)| has_stayed(entry)) {
            match old_rank(entry, rank) {
                old if old >= end => break,
                old if old >= start => edit.removed.push((old - start, was(entry))),
                _ => {}
            }
        }
        let inner = if start == 0 { 0..0 } else { start..end };
        for (rank, entry) in inner.zip(matches.from(start)).filter(|(_, entry)| has_stayed(entry)) {
            if old_rank(entry, rank) >= start {
                break;
            }
            edit.added.push((rank - start, entry.row.clone()));
        }
        let last = if end == usize::MAX { start } else { end.min(matches.len()) };
        for (rank, entry) in (start..last).rev().zip(matches.back_from(last)).filter(|(_, entry)| has_stayed(entry)) {
            if old_rank(entry, rank) < end {
                break;
            }
            edit.added.push((rank - start, entry.row.clone()));
        }
        edit.removed.sort_unstable_by_key(|(index, _)| *index);
        edit.added.sort_unstable_by_key(|(index, _)| *index);
        edit
    }
}

/// Returns the number of entries of a sorted list that are before an entry.
fn before(list: &[RowEntry], entry: &RowEntry, sort: &Sort) -> usize {
    list.partition_point(|known| sort.compare(known, entry).is_lt())
}

fn find<'a>(list: &'a [RowEntry], entry: &RowEntry, sort: &Sort) -> Option<&'a RowEntry> {
    list.binary_search_by(|known| sort.compare(known, entry)).ok().map(|index| &list[index])
}
