//! Budgets: limits on the cost of one read.
//!
//! The cost of a read is counted, not measured: each examined record, each condition, and each byte of text that a condition
//! compares. The same read of the same data always has the same cost, regardless of the load of the machine. A unit of work is
//! about one nanosecond on a current processor.

use std::cell::Cell;
use std::fmt;

/// Work of finding a record and reading its header, without the conditions of the filter.
pub(crate) const RECORD_WORK: usize = 64;
/// Work of one condition, without the text that it compares.
pub(crate) const CONDITION_WORK: usize = 16;

/// Limits on the work and the memory of one read. A budget is `Send`, but not `Sync`.
///
/// ```
/// use serde_json::json;
/// use tidewire_store::{Query, Store, StoreOptions};
/// use tidewire_store::query::{Budget, Exceeded};
///
/// let store = Store::memory(StoreOptions::default());
/// store.define_bucket("tides", json!({"key": "id", "schema": {"id": {"type": "number"}}})).wait()?;
/// for id in 0..1000 {
///     store.insert("tides", json!({"id": id, "note": "spring tide"})).wait()?;
/// }
/// let query = Query::new("tides").filter(json!({"note": {"$contains": "neap"}}))?;
/// let snapshot = store.snapshot();
/// let bucket = snapshot.state.bucket("tides")?;
/// assert_eq!(query.count(bucket, store.now(), &Budget::unlimited()), Ok(0));
/// assert_eq!(query.count(bucket, store.now(), &Budget::unlimited().max_work(10_000)), Err(Exceeded::Work));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Budget {
    max_work: u64,
    max_bytes: usize,
    stop: Option<Box<dyn Fn() -> bool + Send>>,
    /// Work up to the last check.
    checked: Cell<u64>,
    /// Work since the last check: at most [`Self::CHECK_INTERVAL_WORK`] plus one charge.
    unchecked: Cell<u64>,
    /// The value of `unchecked` at which the next check runs.
    check_at: Cell<u64>,
    bytes: Cell<usize>,
}

/// A read exceeded a limit of its [`Budget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Exceeded {
    /// The limit of work.
    #[error("the read exceeds its work budget")]
    Work,
    /// The limit of memory.
    #[error("the read needs more than {max} bytes of memory")]
    Memory {
        /// The limit in bytes.
        max: usize,
    },
    /// The limit of the result's length.
    #[error("the result is larger than {max} bytes")]
    Result {
        /// The limit in bytes.
        max: usize,
    },
    /// [`Budget::stop_when`] returned true.
    #[error("the read was stopped")]
    Stopped,
}

impl Budget {
    /// The work between two checks of [`stop_when`](Self::stop_when): about a tenth of a millisecond.
    pub const CHECK_INTERVAL_WORK: u64 = 100_000;

    /// Creates a budget without limits.
    pub const fn unlimited() -> Self {
        Self {
            max_work: u64::MAX,
            max_bytes: usize::MAX,
            stop: None,
            checked: Cell::new(0),
            unchecked: Cell::new(0),
            check_at: Cell::new(u64::MAX),
            bytes: Cell::new(0),
        }
    }

    /// Limits the work.
    #[must_use]
    pub fn max_work(self, max_work: u64) -> Self {
        Self { max_work, ..self }.scheduled()
    }

    /// Limits the memory of the read, not counting its result: sort keys, groups, lists of candidates.
    #[must_use]
    pub fn max_bytes(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// Stops the read when `stop` returns true. It is called after every [`CHECK_INTERVAL_WORK`](Self::CHECK_INTERVAL_WORK) units of
    /// work.
    #[must_use]
    pub fn stop_when(self, stop: impl Fn() -> bool + Send + 'static) -> Self {
        Self { stop: Some(Box::new(stop)), ..self }.scheduled()
    }

    /// Returns the work so far.
    pub fn work(&self) -> u64 {
        self.checked.get().saturating_add(self.unchecked.get())
    }

    /// Counts work. Fails if the budget is exceeded.
    #[inline]
    pub fn charge(&self, work: usize) -> Result<(), Exceeded> {
        let unchecked = self.unchecked.get().saturating_add(work as u64);
        self.unchecked.set(unchecked);
        if unchecked < self.check_at.get() { Ok(()) } else { self.check() }
    }

    /// Counts memory that the read holds until its end. Fails if the budget is exceeded.
    #[inline]
    pub fn hold(&self, bytes: usize) -> Result<(), Exceeded> {
        let held = self.bytes.get().saturating_add(bytes);
        self.bytes.set(held);
        if held > self.max_bytes { Err(Exceeded::Memory { max: self.max_bytes }) } else { Ok(()) }
    }

    #[cold]
    fn check(&self) -> Result<(), Exceeded> {
        self.checked.set(self.work());
        self.unchecked.set(0);
        self.schedule();
        if self.checked.get() > self.max_work {
            return Err(Exceeded::Work);
        }
        if self.stop.as_ref().is_some_and(|stop| stop()) { Err(Exceeded::Stopped) } else { Ok(()) }
    }

    fn scheduled(self) -> Self {
        self.schedule();
        self
    }

    /// Schedules the next check.
    fn schedule(&self) {
        let left = self.max_work.saturating_sub(self.checked.get()).saturating_add(1);
        let interval = if self.stop.is_some() { Self::CHECK_INTERVAL_WORK } else { u64::MAX };
        self.check_at.set(left.min(interval));
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::unlimited()
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("work", &self.work())
            .field("max_work", &self.max_work)
            .field("bytes", &self.bytes.get())
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    #[test]
    fn work_is_limited_exactly() {
        let budget = Budget::unlimited().max_work(100);
        assert_eq!(budget.charge(60), Ok(()));
        assert_eq!(budget.charge(40), Ok(()));
        assert_eq!((budget.charge(1), budget.charge(0)), (Err(Exceeded::Work), Ok(())));
        assert_eq!(budget.charge(1), Err(Exceeded::Work));
        assert_eq!(budget.work(), 102);
        assert_eq!(Budget::unlimited().max_work(5).charge(usize::MAX), Err(Exceeded::Work));
        assert_eq!(Budget::unlimited().charge(usize::MAX), Ok(()));
    }

    #[test]
    fn memory_is_limited_exactly() {
        let budget = Budget::unlimited().max_bytes(10);
        assert_eq!((budget.hold(10), budget.hold(1)), (Ok(()), Err(Exceeded::Memory { max: 10 })));
    }

    #[test]
    fn stop_condition_is_checked_after_a_fixed_amount_of_work() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&calls);
        let budget = Budget::unlimited().stop_when(move || counter.fetch_add(1, Relaxed) == 2);
        for _ in 0..299 {
            assert_eq!(budget.charge(1000), Ok(()));
        }
        assert_eq!(calls.load(Relaxed), 2);
        assert_eq!(budget.charge(1000), Err(Exceeded::Stopped));
        assert_eq!(budget.work(), 300_000);
    }
}
