//! One live query: its matching rows, its result, and its subscribers.
//!
//! Changes are reversible: whether a query matches a row, expiry included, depends only on the row and the time of the evaluation, and
//! sums are exact. So every row that was added can be removed again, and no result is recomputed.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::system::BUCKETS;
use tidewire_store::{Bucket, Change, Field, Query, Row, Value};

use crate::delta::Delta;
use crate::index::IndexEntry;
use crate::net_change::{Hit, NetChange, net_changes};
use crate::rows::{Page, Rows};
use crate::totals::{GroupsCopy, Totals};

/// A live query with its result and its subscribers.
#[derive(Debug)]
pub(crate) struct LiveQuery {
    /// Distinguishes the query from earlier ones in the same slot.
    pub(crate) generation: u32,
    /// The canonical form, which is the same for equal queries.
    pub(crate) canonical: Arc<[u8]>,
    pub(crate) bucket: Arc<str>,
    pub(crate) query: Query,
    /// The time of the evaluation, in milliseconds.
    evaluated_at: u64,
    /// The entries in the index. `None` if every change of the bucket is checked.
    pub(crate) entries: Option<Box<[IndexEntry]>>,
    /// The number of the last change that was checked, so that each change is checked once.
    pub(crate) last_checked: u64,
    result: LiveResult,
    pub(crate) subscribers: Vec<u64>,
    /// Counts the changes of the result.
    pub(crate) version: u64,
    /// Work that is not charged yet, in units of about a nanosecond.
    pub(crate) work: u64,
    /// The number of the last commit that was checked, and the work of checking it.
    pub(crate) commit_work: (u64, u64),
    /// The encoded result, if it has not changed since.
    pub(crate) encoded: Option<QueryResult>,
}

/// A commit dropped the bucket of the query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BucketDropped;

/// The encoded result is larger than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResultTooLarge;

/// A cheap copy of a result, to be encoded by another thread.
#[derive(Debug)]
pub(crate) enum ResultCopy {
    Page(Page),
    Groups(GroupsCopy),
    Encoded(QueryResult),
}

impl ResultCopy {
    /// Encodes the result. Fails if it is larger than `max_bytes`.
    pub(crate) fn encode(self, max_bytes: usize) -> Result<QueryResult, ResultTooLarge> {
        match self {
            Self::Page(page) => page.encode(max_bytes).map(QueryResult::Json),
            Self::Groups(groups) => groups.encode(max_bytes).map(QueryResult::Json),
            Self::Encoded(result) => Ok(result),
        }
    }
}

/// The maintained result of a query.
#[derive(Debug)]
enum LiveResult {
    Rows(Rows),
    Totals(Box<Totals>),
}

/// The encoded result of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueryResult {
    /// A list of records, or the value of an aggregate.
    Json(Bytes),
    /// No value: the minimum or maximum of no numbers.
    NoValue,
}

impl QueryResult {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Json(bytes) => bytes.len(),
            Self::NoValue => 0,
        }
    }
}

/// The change of a result.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ResultChange {
    /// Records were added, changed or removed.
    Records(Delta),
    /// The value of the aggregate has changed.
    Value,
}

impl LiveQuery {
    /// Approximate memory of a query without its rows.
    const OVERHEAD_BYTES: usize = 1024;

    /// Evaluates a query on a bucket, within a budget. `now` is in milliseconds.
    pub(crate) fn evaluate(
        query: &Query,
        canonical: Arc<[u8]>,
        bucket: &Bucket,
        now: u64,
        budget: &Budget,
    ) -> Result<Self, Exceeded> {
        budget.hold(Self::OVERHEAD_BYTES)?;
        let rows = query.matches(bucket, now, budget);
        let result = match &query.aggregate {
            Some(aggregate) => LiveResult::Totals(Box::new(Totals::new(aggregate, rows, budget)?)),
            None => LiveResult::Rows(Rows::new(query, &bucket.definition().key, rows, budget)?),
        };
        Ok(Self {
            generation: 0,
            canonical,
            bucket: query.bucket.as_str().into(),
            query: query.clone(),
            evaluated_at: now,
            entries: None,
            last_checked: 0,
            result,
            subscribers: Vec::new(),
            version: 0,
            work: 0,
            commit_work: (0, 0),
            encoded: None,
        })
    }

    /// Evaluates a query with an unlimited budget.
    pub(crate) fn evaluate_all(query: &Query, canonical: Arc<[u8]>, bucket: &Bucket, now: u64) -> Self {
        let evaluated = Self::evaluate(query, canonical, bucket, now, &Budget::unlimited());
        evaluated.unwrap_or_else(|_| unreachable!("an unlimited budget is not exceeded"))
    }

    /// Returns the number of retained rows.
    pub(crate) fn row_count(&self) -> usize {
        match &self.result {
            LiveResult::Rows(rows) => rows.len(),
            LiveResult::Totals(totals) => totals.len(),
        }
    }

    /// Returns the approximate memory of the query, without the rows themselves, which are shared with the store.
    pub(crate) fn bytes(&self) -> usize {
        Self::OVERHEAD_BYTES
            + match &self.result {
                LiveResult::Rows(rows) => rows.bytes(),
                LiveResult::Totals(totals) => totals.bytes(),
            }
    }

    /// Returns whether the query matches a row with this lifetime. The result is always the same for a row, so that a row that was
    /// added is also removed.
    pub(crate) fn matches(&self, row: &Row, life: RowLifetime, budget: &Budget) -> Result<bool, Exceeded> {
        let is_alive = life.expires.is_none_or(|expiry| expiry > life.written.max(self.evaluated_at));
        Ok(is_alive && self.query.filter.matches_within(row, budget)?)
    }

    /// Applies net changes. Returns the change of the result, if any.
    pub(crate) fn apply(&mut self, changes: &[NetChange<&Row>]) -> Option<ResultChange> {
        let change = match &mut self.result {
            LiveResult::Rows(rows) => rows.apply(changes).map(ResultChange::Records),
            LiveResult::Totals(totals) => totals.apply(changes).then_some(ResultChange::Value),
        };
        self.version += u64::from(change.is_some());
        change
    }

    /// Applies the next commit after the position of the result.
    pub(crate) fn catch_up(
        &mut self,
        changes: &[Change],
        budget: &Budget,
    ) -> Result<Result<(), BucketDropped>, Exceeded> {
        let mut hits = Vec::new();
        for (index, change) in (0..).zip(changes) {
            budget.charge(100)?;
            if *change.bucket == *self.bucket {
                let is_match = |row: &Option<Row>| match row {
                    Some(row) => self.matches(row, RowLifetime::of(row), budget),
                    None => Ok(false),
                };
                let (old_matches, new_matches) = (is_match(&change.old)?, is_match(&change.new)?);
                if old_matches || new_matches {
                    hits.push(Hit { slot: 0, change: index, old_matches, new_matches });
                }
            }
            if dropped_bucket(change).is_some_and(|name| *name == *self.bucket) {
                return Ok(Err(BucketDropped));
            }
        }
        self.apply(&net_changes(&hits, changes));
        Ok(Ok(()))
    }

    /// Adds work. Returns whether this addition reaches the charging threshold, which limits how often the subscribers are visited.
    pub(crate) fn add_work(&mut self, work: u64) -> bool {
        let threshold = 10_000 + 1000 * self.subscribers.len() as u64;
        let was_reached = self.work >= threshold;
        self.work += work;
        !was_reached && self.work >= threshold
    }

    /// Encodes the result. Fails if it is larger than `max_bytes`.
    pub(crate) fn encode(&self, max_bytes: usize) -> Result<QueryResult, ResultTooLarge> {
        match &self.result {
            LiveResult::Rows(rows) => rows.page().encode(max_bytes).map(QueryResult::Json),
            LiveResult::Totals(totals) => totals.encode(max_bytes),
        }
    }

    /// Copies the result, to be encoded by another thread.
    pub(crate) fn copy(&self) -> ResultCopy {
        match &self.result {
            LiveResult::Rows(rows) => ResultCopy::Page(rows.page().clone()),
            LiveResult::Totals(totals) => totals.copy(),
        }
    }
}

/// Returns the name of the bucket that a change drops, if any.
pub(crate) fn dropped_bucket(change: &Change) -> Option<String> {
    static NAME: LazyLock<Field> = LazyLock::new(|| Field::new("name"));
    if *change.bucket != *BUCKETS || change.new.is_some() {
        return None;
    }
    match change.old.as_ref()?.get(&NAME)? {
        Value::String(name) => Some(name.into_owned()),
        _ => None,
    }
}

/// The lifetime of a row, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowLifetime {
    written: u64,
    expires: Option<u64>,
}

impl RowLifetime {
    /// Returns whether the row has expired at a time.
    pub(crate) fn has_expired(self, now: u64) -> bool {
        self.expires.is_some_and(|expiry| expiry <= now)
    }

    pub(crate) fn of(row: &Row) -> Self {
        static EXPIRES_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_expiresAt"));
        static UPDATED_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_updatedAt"));
        let expires = timestamp(row, &EXPIRES_AT);
        // Only needed for rows that expire.
        let written = expires.and_then(|_| timestamp(row, &UPDATED_AT)).unwrap_or(0);
        Self { written, expires }
    }
}

fn timestamp(row: &Row, field: &Field) -> Option<u64> {
    let Some(Value::Number(number)) = row.get(field) else { return None };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts of floats saturate")]
    let milliseconds = number as u64;
    Some(milliseconds)
}
