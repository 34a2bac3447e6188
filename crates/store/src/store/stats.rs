//! Statistics of a store.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::Shared;
use crate::{EngineStats, Position};

/// What is counted since the store was opened.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) commits: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) not_kept: AtomicU64,
    pub(super) swept: AtomicU64,
    pub(super) is_stopped: AtomicBool,
}

/// How a store is, and what it has done since it was opened.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StoreStats {
    /// The newest commit.
    pub position: Position,
    /// Each bucket, in the order of definition.
    pub buckets: Vec<BucketStats>,
    /// How many named queries there are.
    pub queries: usize,
    /// Whether what is written outlives the process.
    pub is_persistent: bool,
    /// How often what has expired is deleted.
    pub sweep_interval: Option<Duration>,
    /// Writes that wait for the writer.
    pub waiting: usize,
    /// Commits made.
    pub commits: u64,
    /// Writes refused, of which nothing has happened.
    pub refused: u64,
    /// Writes that were given up by whoever made them before there was room in the queue, or because the store was closed.
    pub abandoned: u64,
    /// Groups of writes that the engine did not keep.
    pub not_kept: u64,
    /// Records deleted because they had expired.
    pub swept: u64,
    /// Commits that followers can still see.
    pub history_commits: usize,
    /// The bytes of those.
    pub history_bytes: usize,
    /// How often a follower has fallen out of the history.
    pub followers_behind: u64,
    /// Whether the disk has failed, so that nothing is written until a restart.
    pub is_stopped: bool,
    /// What the engine has done.
    pub engine: EngineStats,
}

/// How a bucket is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketStats {
    /// What it is called.
    pub name: String,
    /// How many records it has.
    pub records: usize,
    /// The memory that they take, without what leads to them.
    pub bytes: usize,
    /// How many indexes it has.
    pub indexes: usize,
}

impl StoreStats {
    pub(super) fn of(shared: &Shared) -> Self {
        let snapshot = shared.published.load_full();
        let (history_commits, history_bytes, followers_behind) = shared.history.measure();
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        let buckets = snapshot.state.buckets().map(|(name, bucket)| BucketStats {
            name: name.to_owned(),
            records: bucket.len(),
            bytes: bucket.bytes(),
            indexes: bucket.definition().index_count(),
        });
        Self {
            position: snapshot.position,
            buckets: buckets.collect(),
            queries: snapshot.state.query_count(),
            is_persistent: shared.keeps,
            sweep_interval: shared.sweep_interval,
            waiting: shared.queue.len(),
            commits: count(&shared.counters.commits),
            refused: count(&shared.counters.refused),
            abandoned: shared.queue.abandoned(),
            not_kept: count(&shared.counters.not_kept),
            swept: count(&shared.counters.swept),
            history_commits,
            history_bytes,
            followers_behind,
            is_stopped: shared.counters.is_stopped.load(Relaxed),
            engine: *shared.engine_stats(),
        }
    }
}
