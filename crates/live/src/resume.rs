//! Resuming: the changes that a subscriber has missed.
//!
//! The state at the mark no longer exists, but the commits since then are in the store's history. Their net changes of matching rows
//! are collected, undone on the current result and applied again, which gives the missed delta. The bucket is not read, so the cost
//! is proportional to the commits. A long history is read by a background thread.

use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::{Commit, Position, Query, Row, Store};

use crate::net_change::{NetChange, NetChanges};
use crate::query::{RowLifetime, dropped_bucket};

/// The net changes of matching rows after a position.
#[derive(Debug)]
pub(crate) struct MissedChanges {
    /// The last commit that is included.
    position: Position,
    changes: NetChanges<Row>,
}

/// The history does not reach back to the mark, or has too many changes. The subscriber needs a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HistoryUnavailable;

impl MissedChanges {
    /// Limit of the changed rows. Above it, the subscriber gets a snapshot.
    const MAX_ROWS: usize = 10_000;

    /// Creates an empty set of changes after this position.
    pub(crate) fn after(position: Position) -> Self {
        Self { position, changes: NetChanges::with_capacity(0) }
    }

    /// Adds the commits up to `until`, which must be in the history already.
    pub(crate) fn read(
        &mut self,
        store: &Store,
        query: &Query,
        until: Position,
        budget: &Budget,
    ) -> Result<Result<(), HistoryUnavailable>, Exceeded> {
        let Ok(mut follower) = store.follow_from(self.position) else { return Ok(Err(HistoryUnavailable)) };
        while self.position.sequence < until.sequence {
            let Ok(Some(commit)) = follower.try_next() else { return Ok(Err(HistoryUnavailable)) };
            if self.add(query, &commit, budget)?.is_err() || self.changes.len() > Self::MAX_ROWS {
                return Ok(Err(HistoryUnavailable));
            }
            self.position = commit.position;
        }
        Ok(Ok(()))
    }

    fn add(
        &mut self,
        query: &Query,
        commit: &Commit,
        budget: &Budget,
    ) -> Result<Result<(), HistoryUnavailable>, Exceeded> {
        let matching = |row: &Option<Row>| match row {
            Some(row) if query.filter.matches_within(row, budget)? => Ok(Some(row.clone())),
            _ => Ok(None),
        };
        for change in &commit.changes {
            budget.charge(100)?;
            // The mark belongs to a dropped bucket with the same name.
            if dropped_bucket(change).is_some_and(|name| name == query.bucket) {
                return Ok(Err(HistoryUnavailable));
            }
            if *change.bucket != *query.bucket {
                continue;
            }
            let (old, new) = (matching(&change.old)?, matching(&change.new)?);
            self.changes.add(NetChange { ordinal: change.ordinal, old, new });
        }
        Ok(Ok(()))
    }

    /// Returns whether a changed row has expired. It is then unknown whether the subscriber has seen the row.
    pub(crate) fn has_expired(&self, now: u64) -> bool {
        self.changes
            .iter()
            .flat_map(|change| [change.old, change.new])
            .flatten()
            .any(|row| RowLifetime::of(row).has_expired(now))
    }

    /// Returns the net changes.
    pub(crate) fn net_changes(&self) -> Vec<NetChange<&Row>> {
        self.changes.iter().collect()
    }
}
