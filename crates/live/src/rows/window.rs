//! Changes of a window of all matches.
//!
//! Rows are added, removed and moved anywhere among the matches, and rows at the edges of the window enter or leave it because of
//! changes before them. All of it follows from ranks: the rank of a row among the new matches is counted, and its rank among the
//! old ones is the same, minus the rows before it that were added, plus those that were removed. So the cost depends on the
//! number of changed rows, not on the size of the window or of the matches.

use tidewire_store::Row;

use super::matches::Matches;
use super::position::{Entry, Sort};

/// Which of the matches are the result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// The rank of the first.
    pub(crate) start: usize,
    /// The rank after the last.
    pub(crate) end: usize,
}

/// How the matches have changed. Each list is sorted.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    /// They were there, and are not there any more.
    pub(crate) removed: Vec<Entry>,
    /// They were not there.
    pub(crate) inserted: Vec<Entry>,
    /// They stand where they stood, with another row: what they were.
    pub(crate) updated: Vec<Entry>,
}

/// How a result has changed. Each list is sorted by index.
#[derive(Debug, Default)]
pub(crate) struct Edit {
    /// With their indexes in the result as it was, and the rows as they were.
    pub(crate) removed: Vec<(usize, Row)>,
    /// With their indexes in the result as it is.
    pub(crate) added: Vec<(usize, Row)>,
    /// With their indexes in the result as it is: what they were, and what they are.
    pub(crate) changed: Vec<(usize, Row, Row)>,
}

impl Window {
    fn contains(self, rank: usize) -> bool {
        (self.start..self.end).contains(&rank)
    }

    /// How the result has changed when the matches have.
    pub(crate) fn edit(self, matches: &Matches, moves: &Moves, sort: &Sort) -> Edit {
        let Self { start, end } = self;
        let mut edit = Edit::default();
        // The rank that a row had: that which it has, less those before it that have come, plus those that have gone.
        let old_rank = |entry: &Entry, rank: usize| {
            (rank + before(&moves.removed, entry, sort)).saturating_sub(before(&moves.inserted, entry, sort))
        };
        for entry in &moves.removed {
            let rank = old_rank(entry, matches.rank(entry, sort));
            if self.contains(rank) {
                edit.removed.push((rank - start, entry.row.clone()));
            }
        }
        for entry in &moves.inserted {
            let rank = matches.rank(entry, sort);
            if self.contains(rank) {
                edit.added.push((rank - start, entry.row.clone()));
            }
        }
        for was in &moves.updated {
            let rank = matches.rank(was, sort);
            if self.contains(rank)
                && self.contains(old_rank(was, rank))
                && let Some(is) = matches.from(rank).next()
            {
                edit.changed.push((rank - start, was.row.clone(), is.row.clone()));
            }
        }
        // Those that have not moved themselves: ranks that they had rise with those that they have, so each walk from an edge
        // ends at the first that stayed on its side.
        let has_stayed = |entry: &Entry| find(&moves.inserted, entry, sort).is_none();
        let was = |entry: &Entry| find(&moves.updated, entry, sort).unwrap_or(entry).row.clone();
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

/// How many of a sorted list come before an entry.
fn before(list: &[Entry], entry: &Entry, sort: &Sort) -> usize {
    list.partition_point(|known| sort.compare(known, entry).is_lt())
}

fn find<'a>(list: &'a [Entry], entry: &Entry, sort: &Sort) -> Option<&'a Entry> {
    list.binary_search_by(|known| sort.compare(known, entry)).ok().map(|place| &list[place])
}
