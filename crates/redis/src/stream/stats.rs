//! Statistics of a worker.

use crate::sync::{Mutex, lock};

/// Statistics of a [`Worker`](super::Worker). Returned by [`WorkerHandle::stats`](super::WorkerHandle::stats). Counters never decrease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WorkerStats {
    /// Calls of the handler.
    pub delivered: u64,
    /// Entries that were handled and acknowledged.
    pub acknowledged: u64,
    /// Calls of the handler that returned an error or panicked.
    pub failed: u64,
    /// Entries that this worker took again after their handler had failed.
    pub retried: u64,
    /// Entries that were taken from another consumer, or from an earlier run of this one, and those whose first delivery was lost with
    /// the connection.
    pub claimed: u64,
    /// Entries that were moved to the dead-letter stream.
    pub dead_lettered: u64,
    /// Entries that were deleted while they were pending. They were acknowledged.
    pub deleted: u64,
    /// Entries that this worker gave up because they were no longer pending for it: another consumer claimed them, the group was
    /// deleted, or the reply to the request that moved them to the dead-letter stream was lost.
    pub lost: u64,
    /// Requests that failed. They are repeated.
    pub errors: u64,
}

/// The counters of a worker.
#[derive(Debug, Default)]
pub(super) struct Counters(Mutex<WorkerStats>);

impl Counters {
    pub(super) fn count(&self, add: impl FnOnce(&mut WorkerStats)) {
        add(&mut lock(&self.0));
    }

    pub(super) fn stats(&self) -> WorkerStats {
        *lock(&self.0)
    }
}
