//! Random updates of a store, and the commits that its followers receive.

use std::sync::Arc;

use serde_json::Value as Json;
use tidewire_store::{Commit, Follower, Snapshot, Store};

use super::rows::{self, BUCKET, MAX_COUNT, Random};

/// A store, and a generator of updates to its rows.
pub(super) struct Updates {
    pub(super) store: Store,
    rows: u64,
    random: Random,
}

impl Updates {
    pub(super) fn new(rows: u64, indexes: &[&str]) -> Self {
        Self { store: rows::store_with_rows(rows, indexes), rows, random: Random(0) }
    }

    /// Sets the count of a random row. Returns the snapshot after the update.
    pub(super) fn update_random(&mut self) -> Arc<Snapshot> {
        let (id, count) = (self.random.below(self.rows), self.random.below(MAX_COUNT));
        self.update(id.into(), count)
    }

    /// Sets the count of a row to a random value below the initial median.
    pub(super) fn move_to_lower_half(&mut self, id: Json) {
        let count = self.random.below(MAX_COUNT / 2);
        self.update(id, count);
    }

    fn update(&self, id: Json, count: u64) -> Arc<Snapshot> {
        let row = self.store.update(BUCKET, id, rows::patch(count), None).wait();
        row.expect("the row exists");
        self.store.snapshot()
    }

    /// Returns all commits that the follower has not read.
    pub(super) fn unread_commits(&self, follower: &mut Follower) -> Vec<Arc<Commit>> {
        let newest = self.store.snapshot().position;
        let mut commits = Vec::new();
        while follower.position() != newest {
            commits.push(follower.wait().expect("the store is open and the follower has not fallen behind"));
        }
        commits
    }
}
