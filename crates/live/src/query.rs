//! One live query: its matching rows, its result, and its subscribers.
//!
//! Changes are reversible. Whether a query matches a row depends only on the row and on the time when the query was first read,
//! expiry included, and sums are exact. So a row that is removed is always the row that was added, and nothing is recomputed.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use tidewire_store::{Bucket, Budget, Field, Query, Row, Value};

use crate::delta::Delta;
use crate::index::Access;
use crate::net::Net;
use crate::rows::Rows;
use crate::totals::Totals;

/// A live query, however many follow it.
#[derive(Debug)]
pub(crate) struct LiveQuery {
    /// Tells it from others that have had its slot.
    pub(crate) generation: u32,
    /// The bytes by which equal queries are known.
    pub(crate) canonical: Arc<[u8]>,
    pub(crate) bucket: Arc<str>,
    pub(crate) query: Query,
    /// When it was first read.
    since: u64,
    /// The places of the index where it stands; none if it is among those that every change leads to.
    pub(crate) accesses: Option<Box<[Access]>>,
    /// The last change that led here, so that it is looked at once.
    pub(crate) seen: u64,
    result: Kept,
    pub(crate) subscribers: Vec<u64>,
    /// The whole result, if it has been asked for since it changed.
    pub(crate) whole: Option<Whole>,
}

#[derive(Debug)]
enum Kept {
    Rows(Rows),
    Totals(Box<Totals>),
}

/// A whole result, as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Whole {
    /// A list of records, or what was computed.
    Json(Bytes),
    /// There was nothing to compute the least or greatest of.
    Nothing,
}

impl Whole {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Json(bytes) => bytes.len(),
            Self::Nothing => 0,
        }
    }
}

/// How a result has changed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// Some of its records.
    Records(Delta),
    /// It was computed, and is another one.
    Value,
}

impl LiveQuery {
    /// A query, with what it means in a bucket at that time.
    pub(crate) fn new(query: &Query, canonical: Arc<[u8]>, name: Arc<str>, bucket: &Bucket, now: u64) -> Self {
        let budget = Budget::unlimited();
        // A budget without limits is not exceeded.
        let rows = query.matches(bucket, now, &budget).filter_map(Result::ok);
        let result = match &query.aggregate {
            Some(aggregate) => Kept::Totals(Box::new(Totals::new(aggregate, rows))),
            None => Kept::Rows(Rows::new(query, &bucket.definition().key, rows)),
        };
        Self {
            generation: 0,
            canonical,
            bucket: name,
            query: query.clone(),
            since: now,
            accesses: None,
            seen: 0,
            result,
            subscribers: Vec::new(),
            whole: None,
        }
    }

    /// How many rows it keeps.
    pub(crate) fn rows(&self) -> usize {
        match &self.result {
            Kept::Rows(rows) => rows.len(),
            Kept::Totals(totals) => totals.len(),
        }
    }

    /// Whether it means a row that lives so long. The answer is always the same for a row, so that what was taken in is what is
    /// taken out.
    pub(crate) fn means(&self, row: &Row, life: Life) -> bool {
        life.expires.is_none_or(|expiry| expiry > life.written.max(self.since)) && self.query.filter.matches(row)
    }

    /// Takes changes in. Returns how the result has changed, if it has.
    pub(crate) fn apply(&mut self, nets: &[Net<'_>]) -> Option<Outcome> {
        match &mut self.result {
            Kept::Rows(rows) => rows.apply(nets).map(Outcome::Records),
            Kept::Totals(totals) => totals.apply(nets).then_some(Outcome::Value),
        }
    }

    /// The whole result.
    pub(crate) fn encode(&self) -> Whole {
        match &self.result {
            Kept::Rows(rows) => Whole::Json(rows.encode()),
            Kept::Totals(totals) => totals.encode().map_or(Whole::Nothing, Whole::Json),
        }
    }
}

/// From when until when a row lives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Life {
    written: u64,
    expires: Option<u64>,
}

impl Life {
    /// Whether it has expired by then.
    pub(crate) fn has_ended(self, now: u64) -> bool {
        self.expires.is_some_and(|expiry| expiry <= now)
    }

    pub(crate) fn of(row: &Row) -> Self {
        static EXPIRES_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_expiresAt"));
        static UPDATED_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_updatedAt"));
        let expires = time(row, &EXPIRES_AT);
        // It makes no difference to a row that does not expire.
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
