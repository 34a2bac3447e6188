//! One live query: its matching rows, its result, and its subscribers.
//!
//! Changes are reversible. Whether a query matches a row depends only on the row and on the time when the query was first read,
//! expiry included, and sums are exact. So a row that is removed is always the row that was added, and nothing is recomputed.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::system::BUCKETS;
use tidewire_store::{Bucket, Change, Field, Query, Row, Value};

use crate::delta::Delta;
use crate::index::Access;
use crate::net_change::{Hit, NetChange, net_changes};
use crate::rows::{Page, Rows};
use crate::totals::{GroupsCopy, Totals};

/// A live query with its result and its subscribers.
#[derive(Debug)]
pub(crate) struct LiveQuery {
    /// Distinguishes it from earlier queries in its slot.
    pub(crate) generation: u32,
    /// The bytes that equal queries share.
    pub(crate) canonical: Arc<[u8]>,
    pub(crate) bucket: Arc<str>,
    pub(crate) query: Query,
    /// The time of its evaluation.
    since: u64,
    /// Its entries in the index of filters. `None` if every change of the bucket is checked with its filter.
    pub(crate) accesses: Option<Box<[Access]>>,
    /// The last change that was checked with its filter, so that each change is checked once.
    pub(crate) seen: u64,
    result: LiveResult,
    pub(crate) subscribers: Vec<u64>,
    /// Counts the changes of the result.
    pub(crate) version: u64,
    /// The work that was done for the query, and that is not charged yet.
    pub(crate) work: u64,
    /// The number of the last commit that was checked with its filter, and the work of that.
    pub(crate) commit_work: (u64, u64),

    /// The whole result, if it has been encoded since it changed.
    pub(crate) encoded: Option<QueryResult>,
}

/// The bucket of a query was dropped by a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BucketDropped;

/// A whole result is larger than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResultTooLarge;

/// A copy of a result, which is cheap to make, to be encoded by another thread.
#[derive(Debug)]
pub(crate) enum ResultCopy {
    Page(Page),
    Groups(GroupsCopy),
    Encoded(QueryResult),
}

impl ResultCopy {
    /// Encodes the result. Stops when it is larger than `max_bytes`.
    pub(crate) fn encode(self, max_bytes: usize) -> Result<QueryResult, ResultTooLarge> {
        match self {
            Self::Page(page) => page.encode(max_bytes).map(QueryResult::Json),
            Self::Groups(groups) => groups.encode(max_bytes).map(QueryResult::Json),
            Self::Encoded(result) => Ok(result),
        }
    }
}

#[derive(Debug)]
enum LiveResult {
    Rows(Rows),
    Totals(Box<Totals>),
}

/// A whole result, as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueryResult {
    /// A list of records, or the value of an aggregate.
    Json(Bytes),
    /// The minimum or maximum of no records.
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

/// How a result has changed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ResultChange {
    /// Some of its records have changed.
    Records(Delta),
    /// The value of the aggregate has changed.
    Value,
}

impl LiveQuery {
    /// The memory of a query beside its rows, roughly.
    const OVERHEAD_BYTES: usize = 1024;

    /// Evaluates a query on a bucket at that time, within a budget.
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
            since: now,
            accesses: None,
            seen: 0,
            result,
            subscribers: Vec::new(),
            version: 0,
            work: 0,
            commit_work: (0, 0),
            encoded: None,
        })
    }

    /// Evaluates a query without a limit.
    pub(crate) fn evaluate_all(query: &Query, canonical: Arc<[u8]>, bucket: &Bucket, now: u64) -> Self {
        let evaluated = Self::evaluate(query, canonical, bucket, now, &Budget::unlimited());
        evaluated.unwrap_or_else(|_| unreachable!("an unlimited budget is not exceeded"))
    }

    /// The number of rows that are kept.
    pub(crate) fn rows(&self) -> usize {
        match &self.result {
            LiveResult::Rows(rows) => rows.len(),
            LiveResult::Totals(totals) => totals.len(),
        }
    }

    /// The approximate memory of what is kept, without the rows themselves, which the store shares.
    pub(crate) fn bytes(&self) -> usize {
        Self::OVERHEAD_BYTES
            + match &self.result {
                LiveResult::Rows(rows) => rows.bytes(),
                LiveResult::Totals(totals) => totals.bytes(),
            }
    }

    /// Whether the query matches a row with this lifetime. The answer never changes for a row, so a row that was added is also
    /// removed.
    pub(crate) fn matches(&self, row: &Row, life: RowLifetime, budget: &Budget) -> Result<bool, Exceeded> {
        let is_alive = life.expires.is_none_or(|expiry| expiry > life.written.max(self.since));
        Ok(is_alive && self.query.filter.matches_within(row, budget)?)
    }

    /// Applies changes. Returns how the result has changed, if it has.
    pub(crate) fn apply(&mut self, nets: &[NetChange<&Row>]) -> Option<ResultChange> {
        let change = match &mut self.result {
            LiveResult::Rows(rows) => rows.apply(nets).map(ResultChange::Records),
            LiveResult::Totals(totals) => totals.apply(nets).then_some(ResultChange::Value),
        };
        self.version += u64::from(change.is_some());
        change
    }

    /// Applies a commit that follows the state of the result.
    pub(crate) fn catch_up(
        &mut self,
        changes: &[Change],
        budget: &Budget,
    ) -> Result<Result<(), BucketDropped>, Exceeded> {
        let mut hits = Vec::new();
        for (place, change) in (0..).zip(changes) {
            budget.charge(100)?;
            if *change.bucket == *self.bucket {
                let is_match = |row: &Option<Row>| match row {
                    Some(row) => self.matches(row, RowLifetime::of(row), budget),
                    None => Ok(false),
                };
                let (was, is) = (is_match(&change.old)?, is_match(&change.new)?);
                if was || is {
                    hits.push(Hit { slot: 0, change: place, was, is });
                }
            }
            if dropped_bucket(change).is_some_and(|name| *name == *self.bucket) {
                return Ok(Err(BucketDropped));
            }
        }
        self.apply(&net_changes(&hits, changes));
        Ok(Ok(()))
    }

    /// Counts work. Returns whether there is enough now to be charged. Less is not worth a visit of all subscribers.
    pub(crate) fn add_work(&mut self, work: u64) -> bool {
        let enough = 10_000 + 1000 * self.subscribers.len() as u64;
        let was_enough = self.work >= enough;
        self.work += work;
        !was_enough && self.work >= enough
    }

    /// Encodes the result. Stops when it is larger than `max_bytes`.
    pub(crate) fn encode(&self, max_bytes: usize) -> Result<QueryResult, ResultTooLarge> {
        match &self.result {
            LiveResult::Rows(rows) => rows.page().encode(max_bytes).map(QueryResult::Json),
            LiveResult::Totals(totals) => totals.encode(max_bytes),
        }
    }

    /// A copy of the result, to be encoded by another thread.
    pub(crate) fn copy(&self) -> ResultCopy {
        match &self.result {
            LiveResult::Rows(rows) => ResultCopy::Page(rows.page().clone()),
            LiveResult::Totals(totals) => totals.copy(),
        }
    }
}

/// The name of the bucket that a change drops, if it drops one.
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

/// The lifetime of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowLifetime {
    written: u64,
    expires: Option<u64>,
}

impl RowLifetime {
    /// Whether the row has expired at that time.
    pub(crate) fn has_ended(self, now: u64) -> bool {
        self.expires.is_some_and(|expiry| expiry <= now)
    }

    pub(crate) fn of(row: &Row) -> Self {
        static EXPIRES_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_expiresAt"));
        static UPDATED_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_updatedAt"));
        let expires = time(row, &EXPIRES_AT);
        // The time is not needed for a row that does not expire.
        let written = expires.and_then(|_| time(row, &UPDATED_AT)).unwrap_or(0);
        Self { written, expires }
    }
}

fn time(row: &Row, field: &Field) -> Option<u64> {
    let Some(Value::Number(number)) = row.get(field) else { return None };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of floats ends at the bounds")]
    let milliseconds = number as u64;
    Some(milliseconds)
}
