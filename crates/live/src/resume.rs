//! Resuming: what a subscriber missed while it was away.
//!
//! There is no old state, but the commits since then are in the store's history. Their net effect on the matching rows is
//! collected. Undone on the present result and applied again, it gives the delta that the subscriber missed. The bucket is not
//! read, so the cost is that of the commits. Long histories are read by a background thread.

use std::collections::HashMap;

use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::{Commit, Position, Query, Row, Store};

use crate::net::Net;
use crate::query::{Life, dropped_bucket};

/// The net changes of matching rows after a position.
#[derive(Debug)]
pub(crate) struct Missed {
    /// The last commit that is included.
    position: Position,
    changes: Vec<NetChange>,
    by_ordinal: HashMap<u64, usize>,
}

/// The net change of one row: before the first commit and after the last.
#[derive(Debug)]
struct NetChange {
    ordinal: u64,
    old: Option<Row>,
    new: Option<Row>,
}

/// The changes are not known any more, or cannot be told as a delta. The subscriber needs the whole result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotKnown;

impl Missed {
    /// With more changed rows than this, the whole result is sent.
    const MAX_ROWS: usize = 10_000;

    /// Nothing, after this position.
    pub(crate) fn after(position: Position) -> Self {
        Self { position, changes: Vec::new(), by_ordinal: HashMap::new() }
    }

    /// Adds the commits up to `until`, which must be in the history already.
    pub(crate) fn read(
        &mut self,
        store: &Store,
        query: &Query,
        until: Position,
        budget: &Budget,
    ) -> Result<Result<(), NotKnown>, Exceeded> {
        let Ok(mut follower) = store.follow_from(self.position) else { return Ok(Err(NotKnown)) };
        while self.position.sequence < until.sequence {
            let Ok(Some(commit)) = follower.try_next() else { return Ok(Err(NotKnown)) };
            if self.add(query, &commit, budget)?.is_err() || self.changes.len() > Self::MAX_ROWS {
                return Ok(Err(NotKnown));
            }
            self.position = commit.position;
        }
        Ok(Ok(()))
    }

    fn add(&mut self, query: &Query, commit: &Commit, budget: &Budget) -> Result<Result<(), NotKnown>, Exceeded> {
        let matching = |row: &Option<Row>| match row {
            Some(row) if query.filter.matches_within(row, budget)? => Ok(Some(row.clone())),
            _ => Ok(None),
        };
        for change in &commit.changes {
            budget.charge(100)?;
            // The result at the mark was one of another bucket.
            if dropped_bucket(change).is_some_and(|name| name == query.bucket) {
                return Ok(Err(NotKnown));
            }
            if *change.bucket != *query.bucket {
                continue;
            }
            let (old, new) = (matching(&change.old)?, matching(&change.new)?);
            let place = *self.by_ordinal.entry(change.ordinal).or_insert(self.changes.len());
            match self.changes.get_mut(place) {
                Some(known) => known.new = new,
                None => self.changes.push(NetChange { ordinal: change.ordinal, old, new }),
            }
        }
        Ok(Ok(()))
    }

    /// Whether a changed row has expired at that time. Then it is not known whether the subscriber has seen it.
    pub(crate) fn has_expired(&self, now: u64) -> bool {
        self.changes
            .iter()
            .flat_map(|change| [&change.old, &change.new])
            .flatten()
            .any(|row| Life::of(row).has_ended(now))
    }

    /// The net changes.
    pub(crate) fn nets<'a>(&'a self) -> Vec<Net<'a>> {
        let changes = self.changes.iter().filter(|change| change.old.is_some() || change.new.is_some());
        let net = |NetChange { ordinal, old, new }: &'a NetChange| Net {
            ordinal: *ordinal,
            old: old.as_ref(),
            new: new.as_ref(),
        };
        changes.map(net).collect()
    }
}
