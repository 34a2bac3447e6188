//! Evaluation of a query by a background thread.
//!
//! A query is evaluated on a snapshot of the store, and its result then catches up with the commits that were made meanwhile. When no
//! commit is left, the result goes to the driver, which applies the few commits since then. If the history no longer has the commits
//! after the snapshot, the query is evaluated again on a newer snapshot.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::{BucketIdentity, FollowError, Position, Query, Store, StoreError};

use crate::lock::lock;
use crate::query::LiveQuery;
use crate::shared::Counters;

/// A query with its result at a position.
#[derive(Debug)]
pub(crate) struct Evaluated {
    pub(crate) live: LiveQuery,
    pub(crate) position: Position,
    pub(crate) bucket: BucketIdentity,
}

/// Why an evaluation failed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum EvaluationError {
    Store(StoreError),
    /// In every attempt, the history no longer had the commits after the snapshot.
    TooManyCommits,
    /// The deadline has passed.
    Deadline,
    /// The retained rows exceed this limit.
    TooLarge {
        max: usize,
    },
    /// No subscriber waits for the result, or the driver has ended.
    Cancelled,
    /// The evaluation panicked.
    Panicked,
}

/// Cancellation and deadline of an evaluation, shared with the driver.
#[derive(Debug)]
pub(crate) struct EvaluationControl {
    is_cancelled: AtomicBool,
    deadline: Mutex<Instant>,
}

impl EvaluationControl {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { is_cancelled: AtomicBool::new(false), deadline: Mutex::new(deadline) }
    }

    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
    }

    /// Extends the deadline, unless the current one is later.
    pub(crate) fn extend(&self, deadline: Instant) {
        let mut known = lock(&self.deadline);
        *known = deadline.max(*known);
    }

    fn is_late(&self) -> bool {
        Instant::now() >= *lock(&self.deadline)
    }

    fn must_stop(&self) -> bool {
        self.is_cancelled.load(Relaxed) || self.is_late()
    }

    fn failure(&self, exceeded: Exceeded) -> EvaluationError {
        match exceeded {
            Exceeded::Memory { max } | Exceeded::Result { max } => EvaluationError::TooLarge { max },
            _ if self.is_cancelled.load(Relaxed) => EvaluationError::Cancelled,
            _ => EvaluationError::Deadline,
        }
    }
}

/// The evaluation of a query, as a job.
pub(crate) struct Evaluation {
    pub(crate) store: Store,
    pub(crate) query: Arc<Query>,
    pub(crate) canonical: Arc<[u8]>,
    pub(crate) control: Arc<EvaluationControl>,
    /// Limit of the memory of retained rows.
    pub(crate) max_bytes: usize,
    /// The result of an earlier run, which must catch up.
    pub(crate) earlier: Option<Evaluated>,
}

/// Why a result cannot catch up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CatchUpError {
    /// The history no longer has the next commit.
    Behind,
    /// A commit dropped the bucket.
    BucketDropped,
    Exceeded(Exceeded),
}

impl Evaluation {
    /// Limit of the snapshots on which the query is evaluated.
    pub(crate) const MAX_ATTEMPTS: u32 = 3;

    /// Evaluates the query, and catches up with later commits.
    pub(crate) fn run(mut self, counters: &Counters) -> Result<Evaluated, EvaluationError> {
        let control = Arc::clone(&self.control);
        let budget = Budget::unlimited().max_bytes(self.max_bytes).stop_when({
            let control = Arc::clone(&control);
            move || control.must_stop()
        });
        let mut attempts = 0;
        loop {
            let mut evaluated = match self.earlier.take() {
                Some(earlier) => earlier,
                None if attempts == Self::MAX_ATTEMPTS => return Err(EvaluationError::TooManyCommits),
                None => {
                    if control.must_stop() {
                        return Err(control.failure(Exceeded::Stopped));
                    }
                    attempts += 1;
                    counters.evaluations.fetch_add(1, Relaxed);
                    counters.reevaluations.fetch_add(u64::from(attempts > 1), Relaxed);
                    self.evaluate(&budget)?
                }
            };
            match evaluated.catch_up(&self.store, None, &budget) {
                Ok(()) => return Ok(evaluated),
                Err(CatchUpError::Exceeded(exceeded)) => return Err(control.failure(exceeded)),
                Err(CatchUpError::Behind | CatchUpError::BucketDropped) => {}
            }
        }
    }

    fn evaluate(&self, budget: &Budget) -> Result<Evaluated, EvaluationError> {
        let snapshot = self.store.snapshot();
        let bucket = snapshot.state.bucket(&self.query.bucket).map_err(EvaluationError::Store)?;
        let now = self.store.now();
        let live = LiveQuery::evaluate(&self.query, Arc::clone(&self.canonical), bucket, now, budget);
        let live = live.map_err(|exceeded| self.control.failure(exceeded))?;
        Ok(Evaluated { live, position: snapshot.position, bucket: bucket.identity() })
    }
}

impl Evaluated {
    /// Applies the commits up to a position. With `None`, applies all commits in the history.
    pub(crate) fn catch_up(
        &mut self,
        store: &Store,
        until: Option<Position>,
        budget: &Budget,
    ) -> Result<(), CatchUpError> {
        if until.is_some_and(|until| until.sequence <= self.position.sequence) {
            return Ok(());
        }
        let mut follower = store.follow_from(self.position).map_err(|_| CatchUpError::Behind)?;
        while until.is_none_or(|until| self.position.sequence < until.sequence) {
            match follower.try_next() {
                Ok(Some(commit)) => {
                    let applied = self.live.catch_up(&commit.changes, budget).map_err(CatchUpError::Exceeded)?;
                    applied.map_err(|_| CatchUpError::BucketDropped)?;
                    self.position = commit.position;
                }
                Ok(None) | Err(FollowError::Closed) => return Ok(()),
                Err(_) => return Err(CatchUpError::Behind),
            }
        }
        Ok(())
    }
}
