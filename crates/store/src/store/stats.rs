//! Statistics of a store.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{Snapshot, StoreShared};
use crate::Position;
use crate::engine::EngineStats;
use crate::state::Totals;

/// Counters since the store was opened.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) commits: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) not_kept: AtomicU64,
    pub(super) swept: AtomicU64,
    pub(super) evicted_replies: AtomicU64,
    pub(super) is_stopped: AtomicBool,
}

/// Statistics of a store: gauges, and counters since it was opened.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StoreStats {
    /// The position of the newest commit.
    pub position: Position,
    /// The ordinary buckets, in the order of definition. The list is computed when it is first read.
    pub buckets: BucketList,
    /// The number of records in ordinary buckets.
    pub records: usize,
    /// The memory of these records, without their indexes.
    pub record_bytes: usize,
    /// The number of named queries.
    pub queries: usize,
    /// Whether commits are stored on disk.
    pub is_persistent: bool,
    /// The interval at which expired records are deleted.
    pub sweep_interval: Option<Duration>,
    /// The number of queued writes.
    pub waiting: usize,
    /// The memory of the queued writes, as stated by their callers: see [`WriteOptions::bytes`](crate::WriteOptions::bytes).
    pub queued_bytes: usize,
    /// The number of commits.
    pub commits: u64,
    /// Writes that were rejected. They had no effect.
    pub refused: u64,
    /// Held-back writes that were canceled, by the caller or because the store was closed.
    pub abandoned: u64,
    /// Groups of writes that the engine did not store, and expired records whose deletion is too large for a commit.
    pub not_kept: u64,
    /// Records deleted because they had expired.
    pub swept: u64,
    /// Replies to writes with an idempotency key that were evicted before they expired: see
    /// [`Limits::max_user_replies`](crate::Limits::max_user_replies).
    pub evicted_replies: u64,
    /// The number of commits in the history, which followers can still read.
    pub history_commits: usize,
    /// The memory of these commits.
    pub history_bytes: usize,
    /// The number of times that a follower fell behind the history.
    pub followers_behind: u64,
    /// Whether the disk has failed. No write is accepted until a restart.
    pub is_stopped: bool,
    /// The statistics of the engine.
    pub engine: EngineStats,
}

/// Statistics of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketStats {
    /// The name.
    pub name: String,
    /// The number of records.
    pub records: usize,
    /// The memory of the records, without their indexes.
    pub bytes: usize,
    /// The number of indexes: the declared indexes, and one for each unique field without a declared index.
    pub indexes: usize,
}

/// The statistics of all ordinary buckets of one snapshot, as a slice.
///
/// The list is computed when it is first read, because most callers need only totals, and a store may have thousands of buckets. It
/// keeps the snapshot alive.
#[derive(Clone)]
pub struct BucketList {
    snapshot: Arc<Snapshot>,
    list: OnceLock<Vec<BucketStats>>,
}

impl BucketList {
    /// Returns the number of buckets, without computing the list.
    pub fn len(&self) -> usize {
        self.snapshot.state.names().len()
    }

    /// Returns whether there are no buckets.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Deref for BucketList {
    type Target = [BucketStats];

    fn deref(&self) -> &[BucketStats] {
        self.list.get_or_init(|| {
            let buckets = self.snapshot.state.buckets().map(|(name, bucket)| BucketStats {
                name: name.to_owned(),
                records: bucket.len(),
                bytes: bucket.bytes(),
                indexes: bucket.definition().index_count(),
            });
            buckets.collect()
        })
    }
}

impl PartialEq for BucketList {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl fmt::Debug for BucketList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl StoreStats {
    pub(super) fn of(shared: &StoreShared) -> Self {
        let snapshot = shared.published.load_full();
        let (history_commits, history_bytes, followers_behind) = shared.history.stats();
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        let Totals { records, bytes } = snapshot.state.totals();
        let queued = shared.queue.usage();
        Self {
            position: snapshot.position,
            queries: snapshot.state.query_count(),
            buckets: BucketList { snapshot, list: OnceLock::new() },
            records,
            record_bytes: bytes,
            is_persistent: shared.is_persistent,
            sweep_interval: shared.sweep_interval,
            waiting: queued.items,
            queued_bytes: queued.bytes,
            commits: count(&shared.counters.commits),
            refused: count(&shared.counters.refused),
            abandoned: shared.queue.canceled_writes(),
            not_kept: count(&shared.counters.not_kept),
            swept: count(&shared.counters.swept),
            evicted_replies: count(&shared.counters.evicted_replies),
            history_commits,
            history_bytes,
            followers_behind,
            is_stopped: shared.counters.is_stopped.load(Relaxed),
            engine: *shared.engine_stats(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::state::visits;
    use crate::{Store, StoreOptions};

    #[test]
    fn totals_are_computed_without_visiting_buckets() {
        let store = Store::memory(StoreOptions::default());
        for number in 0..20 {
            let name = format!("b{number}");
            store.define_bucket(&name, json!({"key": "id", "schema": {"id": {"type": "number"}}})).wait().unwrap();
            let records = (0..number).map(|id| json!({"id": id, "text": "x"}));
            store.insert_many(&name, records).wait().unwrap();
        }
        store.drop_bucket("b5").wait().unwrap();
        store.delete("b6", json!(1), None).wait().unwrap();
        store.clear("b7").wait().unwrap();
        store.update("b8", json!(1), json!({"text": "longer"}), None).wait().unwrap();
        store
            .update_bucket("b9", json!({"addIndexes": ["text"], "addFields": {"text": {"type": "string"}}}))
            .wait()
            .unwrap();
        let before = visits::total();
        let stats = store.stats();
        assert_eq!((stats.buckets.len(), stats.records), (19, 190 - 5 - 1 - 7));
        assert_eq!(visits::total(), before, "no bucket was visited");
        assert_eq!(stats.records, stats.buckets.iter().map(|bucket| bucket.records).sum::<usize>());
        assert_eq!(stats.record_bytes, stats.buckets.iter().map(|bucket| bucket.bytes).sum::<usize>());
    }
}
