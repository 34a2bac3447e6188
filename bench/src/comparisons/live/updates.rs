//! Random updates of a store, and what its followers see of them.

use std::sync::Arc;

use serde_json::Value as Json;
use tidewire_store::{Commit, Follower, Snapshot, Store};

use super::rows::{self, BUCKET, COUNTS, Random};

/// A store whose rows are given other counts, one after the other.
pub(super) struct Updates {
    pub(super) store: Store,
    rows: u64,
    random: Random,
}

impl Updates {
    pub(super) fn new(rows: u64, indexes: &[&str]) -> Self {
        Self { store: rows::filled(rows, indexes), rows, random: Random(0) }
    }

    /// Updates any row. Returns the state that it has made.
    pub(super) fn update_any(&mut self) -> Arc<Snapshot> {
        let (id, count) = (self.random.below(self.rows), self.random.below(COUNTS));
        self.update(id.into(), count)
    }

    /// Gives the row with this key a count that half of all rows have exceeded at first.
    pub(super) fn lower(&mut self, id: Json) {
        let count = self.random.below(COUNTS / 2);
        self.update(id, count);
    }

    fn update(&self, id: Json, count: u64) -> Arc<Snapshot> {
        let row = self.store.update(BUCKET, id, rows::patch(count), None).wait();
        row.expect("the row is there");
        self.store.snapshot()
    }

    /// All commits that a follower has not seen.
    pub(super) fn unseen(&self, follower: &mut Follower) -> Vec<Arc<Commit>> {
        let newest = self.store.snapshot().position;
        let mut commits = Vec::new();
        while follower.position() != newest {
            commits.push(follower.wait().expect("the store is open, and the follower not far behind"));
        }
        commits
    }
}
