//! Drafts: mutable copies of a state.
//!
//! A failed write is rolled back by undoing its changes one by one. Cloning the state before each write would be simpler, but
//! shared nodes are copied on write, so a group of 64 writes would copy the same nodes 64 times. The state is cloned only when it
//! is published, and before operations that do not change single records (definitions, clearing a bucket). The time is an
//! argument, so that a draft does not depend on a clock.

mod references;
mod sweep;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

pub use self::references::ReferenceFilter;
pub(crate) use self::sweep::Sweep;
use crate::bucket::MAX_GENERATED_NUMBER;
use crate::check::Issue;
use crate::query::{Budget, Exceeded};
use crate::record::members;
use crate::schema::{Generated, NotUnique, ValidationError};
use crate::{Bucket, Field, Filter, IntoRecord, Limits, Query, QueryOutput, Row, RowError, State, StoreError, Value};

const VERSION: &str = "_version";
const CREATED_AT: &str = "_createdAt";
const UPDATED_AT: &str = "_updatedAt";
const EXPIRES_AT: &str = "_expiresAt";

/// The change of a record.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Change {
    /// The bucket of the record.
    pub bucket: Arc<str>,
    /// The number of the record in insertion order, which it keeps until it is deleted.
    pub ordinal: u64,
    /// The record before the change. `None` if it was inserted.
    pub old: Option<Row>,
    /// The record after the change. `None` if it was deleted.
    pub new: Option<Row>,
}

/// A saved state, and the lengths of [`Draft::changes`] and [`Draft::counters`] when it was saved.
#[derive(Debug, Clone)]
struct SavedState {
    changes: usize,
    counters: usize,
    state: State,
}

/// An autoincrement counter that was raised.
#[derive(Debug, Clone)]
struct RaisedCounter {
    bucket: Arc<str>,
    before: u64,
    /// Whether a number was generated. It is consumed even if the write is undone.
    is_generated: bool,
}

/// A point to which a draft can be rolled back: the lengths of its lists.
#[derive(Debug, Clone, Copy, Default)]
struct Savepoint {
    changes: usize,
    counters: usize,
    saved: usize,
}

/// A mutable state, at a fixed time.
#[derive(Debug, Clone)]
pub struct Draft {
    state: State,
    changes: Vec<Change>,
    /// Ranges of the changes that clear a bucket.
    cleared: Vec<Range<usize>>,
    /// Raised counters, which are reset on rollback: a number that a caller supplied counts only if its record is stored.
    counters: Vec<RaisedCounter>,
    /// States saved before operations that are not undone change by change.
    saved: Vec<SavedState>,
    /// Whether a change is in progress. If it is still set after a panic, the state is inconsistent.
    is_changing: bool,
    now: u64,
    limits: Limits,
    /// The memory of all records before the changes.
    bytes_before: usize,
    /// The filter that records must match to be read or written. `None` permits all records.
    row_filter: Option<Filter>,
    /// The filter of the records that can be referenced. `None` permits all records.
    reference_filter: Option<ReferenceFilter>,
    /// Whether names refer to system buckets.
    is_system: bool,
    /// Estimated work of the reads of the current write, in nanoseconds.
    read_work: Cell<u64>,
}

impl Draft {
    /// Creates a draft of a state. `now` is the time in milliseconds since 1970.
    pub fn new(state: State, now: u64) -> Self {
        Self {
            bytes_before: state.totals().bytes,
            state,
            changes: Vec::new(),
            cleared: Vec::new(),
            counters: Vec::new(),
            saved: Vec::new(),
            is_changing: false,
            now,
            limits: Limits::default(),
            row_filter: None,
            reference_filter: None,
            is_system: false,
            read_work: Cell::new(0),
        }
    }

    /// Sets the limits. Default: [`Limits::default`].
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Returns the current state of the draft.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the time of the draft, in milliseconds since 1970.
    pub fn now(&self) -> u64 {
        self.now
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the new state and the changes, in order.
    pub fn finish(self) -> (State, Vec<Change>) {
        (self.state, self.changes)
    }

    /// Sets the time.
    pub(crate) fn set_now(&mut self, now: u64) {
        self.now = now;
    }

    /// Returns the changes, and the ranges of them that clear a bucket.
    pub(crate) fn changes(&self) -> (&[Change], &[Range<usize>]) {
        (&self.changes, &self.cleared)
    }

    /// Fails if the changes make the records grow beyond [`Limits::max_store_bytes`].
    pub(crate) fn check_store_bytes(&self) -> Result<(), StoreError> {
        let (bytes, max) = (self.state.totals().bytes, self.limits.max_store_bytes);
        if bytes > max && bytes > self.bytes_before { Err(StoreError::StoreFull { bytes, max }) } else { Ok(()) }
    }

    /// Takes the changes and drops the undo information.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        self.bytes_before = self.state.totals().bytes;
        self.saved.clear();
        self.cleared.clear();
        self.counters.clear();
        std::mem::take(&mut self.changes)
    }

    /// Undoes all changes after a failure or panic. Returns false if a panic has left the state inconsistent.
    pub(crate) fn roll_back(&mut self) -> bool {
        (self.row_filter, self.reference_filter) = (None, None);
        self.is_system = false;
        if !self.is_changing {
            self.revert(Savepoint::default());
        }
        !self.is_changing
    }

    /// Runs `work`, and undoes its changes if it fails.
    pub fn atomically<T, E>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let savepoint =
            Savepoint { changes: self.changes.len(), counters: self.counters.len(), saved: self.saved.len() };
        let done = work(self);
        if done.is_err() {
            self.revert(savepoint);
        }
        done
    }

    /// Undoes all changes after the savepoint.
    fn revert(&mut self, savepoint: Savepoint) {
        self.is_changing = true;
        let generated = self.counters[savepoint.counters..].iter().filter(|raised| raised.is_generated);
        let generated: Vec<Arc<str>> = generated.map(|raised| Arc::clone(&raised.bucket)).collect();
        if let Some(saved) = self.saved.drain(savepoint.saved..).next() {
            self.state = saved.state;
            self.changes.truncate(saved.changes);
            self.counters.truncate(saved.counters);
        }
        self.cleared.retain(|cleared| cleared.start < savepoint.changes);
        while self.changes.len() > savepoint.changes
            && let Some(change) = self.changes.pop()
        {
            let name = Arc::clone(&change.bucket);
            // The bucket may no longer exist. Then there is nothing to undo.
            let _ = self.state.change_bucket(&name, |bucket| bucket.revert(change));
        }
        for raised in self.counters.drain(savepoint.counters..).rev() {
            let _ = self.state.change_bucket(&raised.bucket, |bucket| bucket.reset_counter(raised.before));
        }
        for bucket in generated {
            let _ = self.state.change_bucket(&bucket, Bucket::next_number);
        }
        self.is_changing = false;
    }

    /// Changes definitions, or all records of a bucket. The state is saved before, because this is not undone change by change.
    pub(crate) fn restructure(&mut self, work: impl FnOnce(&mut State)) {
        let (changes, counters) = (self.changes.len(), self.counters.len());
        self.saved.push(SavedState { changes, counters, state: self.state.clone() });
        self.is_changing = true;
        work(&mut self.state);
        self.is_changing = false;
    }

    /// Runs `work` with access only to records that match a filter. Reads, updates and deletes do not find other records, and a
    /// written record must match before and after the write. An insert with the key of a hidden record fails like a duplicate
    /// unique value: see [`StoreError::NotUnique`]. The `onDelete` actions are not restricted by the filter.
    pub fn with_row_filter<T>(&mut self, filter: &Filter, work: impl FnOnce(&mut Self) -> T) -> T {
        let narrower = match &self.row_filter {
            Some(outer) => outer.clone().and(filter.clone()),
            None => filter.clone(),
        };
        let outer = self.row_filter.replace(narrower);
        let done = work(self);
        self.row_filter = outer;
        done
    }

    /// Runs `work` with a filter on the targets of new references. Records that do not match cannot be referenced.
    pub fn with_reference_filter<T>(&mut self, filter: &ReferenceFilter, work: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.reference_filter.replace(filter.clone());
        let done = work(self);
        self.reference_filter = outer;
        done
    }

    /// Runs `work` with access to system buckets. Inside `work`, reads and writes of records use only the system buckets that the
    /// program has declared, and an outer [row filter](Self::with_row_filter) or [reference filter](Self::with_reference_filter) has
    /// no effect. Definitions still apply to ordinary buckets.
    pub fn system<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let outer =
            (std::mem::replace(&mut self.is_system, true), self.row_filter.take(), self.reference_filter.take());
        let done = work(self);
        (self.is_system, self.row_filter, self.reference_filter) = outer;
        done
    }

    /// Returns the bucket with this name: a system bucket inside [`system`](Self::system), otherwise an ordinary one.
    pub(crate) fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        if self.is_system { self.state.system_bucket(name) } else { self.state.bucket(name) }
    }

    /// Returns the record with this key, if it exists and is visible.
    pub fn get(&self, bucket: &str, key: &Json) -> Result<Option<&Row>, StoreError> {
        Ok(self.live_record(bucket, key)?.filter(|row| self.is_visible(row)))
    }

    /// Returns the result of a query. All reads of one write together are limited by [`Limits::max_transaction_read`].
    pub fn query(&self, query: &Query) -> Result<QueryOutput, StoreError> {
        self.read(query, |query, bucket, budget| query.evaluate(bucket, self.now, budget))
    }

    /// Returns the records of the result of a query, in its order.
    pub(crate) fn rows(&self, query: &Query) -> Result<Vec<&Row>, StoreError> {
        self.read(query, |query, bucket, budget| query.rows(bucket, self.now, budget))
    }

    /// Returns the number of records that match a query, ignoring its offset and limit.
    pub fn count(&self, query: &Query) -> Result<usize, StoreError> {
        self.read(query, |query, bucket, budget| query.count(bucket, self.now, budget))
    }

    /// Runs a read within the remaining read budget of this write.
    fn read<'a, T>(
        &'a self,
        query: &Query,
        read: impl FnOnce(&Query, &'a Bucket, &Budget) -> Result<T, Exceeded>,
    ) -> Result<T, StoreError> {
        let bucket = self.bucket(&query.bucket)?;
        let restricted = self.row_filter.as_ref().map(|filter| query.clone().restrict(filter));
        let query = restricted.as_ref().unwrap_or(query);
        let limit = self.limits.max_transaction_read;
        let max_work = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let max_bytes = self.limits.max_result_bytes.saturating_mul(4);
        let budget = Budget::unlimited().max_work(max_work.saturating_sub(self.read_work.get())).max_bytes(max_bytes);
        let result = read(query, bucket, &budget);
        self.read_work.set(self.read_work.get().saturating_add(budget.work()));
        result.map_err(|exceeded| match exceeded {
            Exceeded::Work => StoreError::LongRead {
                bucket: query.bucket.clone(),
                max: limit,
                missing_index: query.missing_index(bucket).map(|field| field.name().to_owned()),
            },
            other => StoreError::Exceeded(other),
        })
    }

    /// Returns the estimated work of the reads of this write, in nanoseconds.
    pub(crate) fn read_work(&self) -> u64 {
        self.read_work.get()
    }

    /// Resets the read budget for the next write.
    pub(crate) fn reset_read_work(&self) {
        self.read_work.set(0);
    }

    /// Inserts a record, or replaces the record with the same key.
    pub fn insert(&mut self, bucket: &str, record: impl IntoRecord) -> Result<Row, StoreError> {
        let record = members(record, bucket)?;
        self.atomically(|draft| draft.insert_inner(bucket, record))
    }

    /// Inserts all of these records, or none. The error has the index of the rejected record: see [`StoreError::Record`].
    pub fn insert_many(
        &mut self,
        bucket: &str,
        records: impl IntoIterator<Item = impl IntoRecord>,
    ) -> Result<Vec<Row>, StoreError> {
        self.bucket(bucket)?;
        self.atomically(|draft| {
            let insert = |(index, record)| {
                let inserted = members(record, bucket).and_then(|record| draft.insert_inner(bucket, record));
                inserted.map_err(|source| StoreError::Record { index, source: Box::new(source) })
            };
            records.into_iter().enumerate().map(insert).collect()
        })
    }

    /// Merges fields into a record. If a version is given, the record must have it.
    pub fn update(
        &mut self,
        bucket: &str,
        key: &Json,
        patch: impl IntoRecord,
        version: Option<u64>,
    ) -> Result<Row, StoreError> {
        let patch = members(patch, bucket)?;
        self.atomically(|draft| draft.update_inner(bucket, key, patch, version))
    }

    /// Merges a record into the record with the same key, or inserts it if there is none.
    pub fn upsert(&mut self, bucket: &str, record: impl IntoRecord) -> Result<Row, StoreError> {
        let record = members(record, bucket)?;
        self.atomically(|draft| {
            let key = record.get(&draft.bucket(bucket)?.definition().key).cloned().unwrap_or_default();
            if draft.get(bucket, &key)?.is_some() {
                draft.update_inner(bucket, &key, record, None)
            } else {
                draft.insert_inner(bucket, record)
            }
        })
    }

    /// Deletes a record, and the records that refer to it with `onDelete: cascade`. Returns whether it existed.
    pub fn delete(&mut self, bucket: &str, key: &Json, version: Option<u64>) -> Result<bool, StoreError> {
        let Some(row) = self.get(bucket, key)?.cloned() else { return Ok(false) };
        expect_version(bucket, key, &row, version)?;
        self.atomically(|draft| draft.delete_row(bucket, row))?;
        Ok(true)
    }

    /// Deletes all records of a bucket.
    pub fn clear(&mut self, name: &str) -> Result<(), StoreError> {
        let bucket = self.bucket(name)?;
        if self.row_filter.is_some() || self.is_target(name) {
            let rows: Vec<Row> = bucket.rows().filter(|row| self.is_visible(row)).cloned().collect();
            return self.atomically(|draft| draft.delete_rows(name, rows));
        }
        let name = Arc::clone(self.state.any_bucket(name)?.0);
        let mut deleted = Vec::with_capacity(bucket.len());
        for (ordinal, row) in bucket.entries() {
            deleted.push(Change { bucket: Arc::clone(&name), ordinal, old: Some(row.clone()), new: None });
        }
        if !deleted.is_empty() {
            self.restructure(|state| drop(state.change_bucket(&name, Bucket::clear)));
            self.cleared.push(self.changes.len()..self.changes.len() + deleted.len());
            self.changes.extend(deleted);
        }
        Ok(())
    }

    fn is_visible(&self, row: &Row) -> bool {
        self.row_filter.as_ref().is_none_or(|filter| filter.matches(row))
    }

    fn expect_visible(&self, bucket: &str, row: &Row) -> Result<(), StoreError> {
        if self.is_visible(row) { Ok(()) } else { Err(StoreError::Forbidden { bucket: bucket.to_owned() }) }
    }

    /// Returns the record with this key, if it exists and has not expired.
    pub(crate) fn live_record(&self, bucket: &str, key: &Json) -> Result<Option<&Row>, StoreError> {
        Ok(self.bucket(bucket)?.record(key, || self.now))
    }

    /// Returns the record with defaults and generated values for absent fields.
    pub(crate) fn fill(&mut self, name: &str, mut record: Map<String, Json>) -> Result<Map<String, Json>, StoreError> {
        let definition = self.bucket(name)?.shared_definition();
        for (field, rule) in &definition.fields {
            if record.contains_key(field) {
                continue;
            }
            let value = match (&rule.default, rule.generated) {
                (Some(default), _) => default.clone(),
                (None, None) => continue,
                (None, Some(Generated::Uuid)) => json!(uuid::Uuid::new_v4().to_string()),
                (None, Some(Generated::Cuid)) => json!(format!("c{}", uuid::Uuid::new_v4().simple())),
                (None, Some(Generated::Timestamp)) => json!(self.now),
                (None, Some(Generated::Autoincrement)) => {
                    json!(self.next_number(name)?.ok_or_else(|| numbers_exhausted(name, field))?)
                }
            };
            record.insert(field.clone(), value);
        }
        Ok(record)
    }

    /// Generates an autoincrement number. Returns `None` if the counter has reached the largest number.
    fn next_number(&mut self, name: &str) -> Result<Option<u64>, StoreError> {
        let (shared, bucket) = self.state.any_bucket(name)?;
        let (shared, before) = (Arc::clone(shared), bucket.counter());
        let number = self.state.change_bucket(name, Bucket::next_number)?;
        if number.is_some() {
            self.counters.push(RaisedCounter { bucket: shared, before, is_generated: true });
        }
        Ok(number)
    }

    fn insert_inner(&mut self, name: &str, record: Map<String, Json>) -> Result<Row, StoreError> {
        let now = self.now;
        let mut record = self.fill(name, record)?;
        let definition = self.bucket(name)?.definition();
        if let Some(ttl) = definition.ttl
            && record.get(EXPIRES_AT).is_none_or(Json::is_null)
        {
            record.insert(EXPIRES_AT.to_owned(), json!(now.saturating_add(ttl)));
        }
        for (field, value) in [(VERSION, 1), (CREATED_AT, now), (UPDATED_AT, now)] {
            record.insert(field.to_owned(), json!(value));
        }
        let max_size = definition.max_size;
        let row = self.check(name, &record, None)?;
        self.expect_visible(name, &row)?;
        let known = self.existing(name, &row)?;
        // The key of a hidden record cannot be used, unless the record has expired.
        let is_live = |known: &Row| self.bucket(name).is_ok_and(|bucket| bucket.is_live(known, now));
        if known.is_some_and(|known| is_live(known) && !self.is_visible(known)) {
            let field = self.bucket(name)?.definition().key.clone();
            let value = record.get(&field).cloned().unwrap_or_default();
            return Err(StoreError::NotUnique { bucket: name.to_owned(), source: NotUnique { field, value } });
        }
        // A replaced record does not change the size of the bucket.
        if let (None, Some(max)) = (known, max_size)
            && self.evict_oldest(name, max)?
        {
            // The evicted record may be the target of a reference.
            self.check_references(name, &record, None)?;
        }
        self.put_row(name, row)
    }

    /// Deletes the oldest records until the bucket has fewer than `max` records. Returns whether records were deleted.
    fn evict_oldest(&mut self, name: &str, max: usize) -> Result<bool, StoreError> {
        let mut has_deleted = false;
        loop {
            let bucket = self.bucket(name)?;
            let Some(oldest) = bucket.oldest().filter(|_| bucket.len() >= max).cloned() else { return Ok(has_deleted) };
            self.delete_row(name, oldest)?;
            has_deleted = true;
        }
    }

    /// Stores an imported record with its version and times. References are not checked.
    pub(crate) fn import_record(&mut self, name: &str, mut record: Map<String, Json>) -> Result<(), StoreError> {
        let definition = self.bucket(name)?.definition();
        for (field, missing) in [(VERSION, 1), (CREATED_AT, self.now), (UPDATED_AT, self.now)] {
            if !record.get(field).is_some_and(Json::is_u64) {
                record.insert(field.to_owned(), json!(missing));
            }
        }
        let max_size = definition.max_size;
        let row = self.check_record(name, &record)?;
        if let (None, Some(max)) = (self.existing(name, &row)?, max_size) {
            self.evict_oldest(name, max)?;
        }
        self.put_row(name, row).map(drop)
    }

    /// Returns the stored record with the same key, expired or not.
    fn existing(&self, name: &str, row: &Row) -> Result<Option<&Row>, StoreError> {
        let (_, bucket) = self.state.any_bucket(name)?;
        Ok(bucket.key_of(row).and_then(|key| bucket.get(&key)))
    }

    fn update_inner(
        &mut self,
        name: &str,
        key: &Json,
        patch: Map<String, Json>,
        version: Option<u64>,
    ) -> Result<Row, StoreError> {
        let not_found = || StoreError::NotFound { bucket: name.to_owned(), key: key.clone() };
        let row = self.get(name, key)?.ok_or_else(not_found)?;
        expect_version(name, key, row, version)?;
        let definition = self.bucket(name)?.definition();
        let mut record = row.to_record();
        for (field, value) in patch {
            let is_generated = definition.rule(&field).is_some_and(|rule| rule.generated.is_some());
            let is_managed = [VERSION, CREATED_AT, UPDATED_AT].contains(&field.as_str());
            if field != definition.key && !is_managed && !is_generated {
                record.insert(field, value);
            }
        }
        record.insert(VERSION.to_owned(), json!(version_of(row).saturating_add(1)));
        record.insert(UPDATED_AT.to_owned(), json!(self.now));
        let row = self.check(name, &record, Some(row))?;
        self.expect_visible(name, &row)?;
        self.put_row(name, row)
    }

    /// Validates a record without its references, and converts it into a row.
    fn check_record(&self, name: &str, record: &Map<String, Json>) -> Result<Row, StoreError> {
        self.limits.check(record)?;
        let definition = self.bucket(name)?.definition();
        definition.validate(name, record)?;
        let key = record.get(&definition.key).and_then(Value::of_json);
        if matches!(key, None | Some(Value::Null)) {
            return Err(ValidationError { bucket: name.to_owned(), issues: vec![missing_key(&definition.key)] }.into());
        }
        let row = Row::new(record)?;
        let (len, max) = (row.text().len(), self.limits.max_record_bytes);
        if len > max { Err(RowError::TooLarge { len, max }.into()) } else { Ok(row) }
    }

    /// Validates a record and its references, and converts it into a row. References that are unchanged from `before` are not checked.
    fn check(&self, name: &str, record: &Map<String, Json>, before: Option<&Row>) -> Result<Row, StoreError> {
        let row = self.check_record(name, record)?;
        self.check_references(name, record, before)?;
        Ok(row)
    }

    /// Stores a row. Only unique fields are checked.
    pub(crate) fn put_row(&mut self, name: &str, row: Row) -> Result<Row, StoreError> {
        let bucket = Arc::clone(self.state.any_bucket(name)?.0);
        self.is_changing = true;
        let changed = self.state.change_bucket(name, |bucket| {
            let before = bucket.counter();
            let placed = bucket.put_row(row.clone());
            (placed, before, bucket.counter() > before)
        });
        self.is_changing = false;
        let (placed, before, is_raised) = changed?;
        let (ordinal, old) = placed.map_err(|source| StoreError::NotUnique { bucket: name.to_owned(), source })?;
        if is_raised {
            self.counters.push(RaisedCounter { bucket: Arc::clone(&bucket), before, is_generated: false });
        }
        self.changes.push(Change { bucket, ordinal, old, new: Some(row.clone()) });
        Ok(row)
    }

    /// Removes a record. Returns whether it existed.
    pub(crate) fn remove_row(&mut self, name: &str, key: &Value<'_>) -> Result<bool, StoreError> {
        let bucket = Arc::clone(self.state.any_bucket(name)?.0);
        self.is_changing = true;
        let taken = self.state.change_bucket(name, |bucket| bucket.remove_row(key));
        self.is_changing = false;
        let Some((ordinal, old)) = taken? else { return Ok(false) };
        self.changes.push(Change { bucket, ordinal, old: Some(old), new: None });
        Ok(true)
    }
}

fn missing_key(field: &str) -> Issue {
    Issue { field: field.to_owned(), message: "is required".to_owned(), code: "required" }
}

fn numbers_exhausted(bucket: &str, field: &str) -> StoreError {
    let message = format!(
        "cannot be generated: the largest autoincrement number, {MAX_GENERATED_NUMBER}, is in use; supply a value"
    );
    let issue = Issue { field: field.to_owned(), message, code: "generated" };
    ValidationError { bucket: bucket.to_owned(), issues: vec![issue] }.into()
}

fn version_of(row: &Row) -> u64 {
    row.text_of(&Field::new(VERSION)).and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn expect_version(bucket: &str, key: &Json, row: &Row, expected: Option<u64>) -> Result<(), StoreError> {
    let current = version_of(row);
    if expected.is_none_or(|expected| expected == current) {
        return Ok(());
    }
    Err(StoreError::Conflict { bucket: bucket.to_owned(), key: key.clone(), current })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(buckets: &[(&str, Json)]) -> Draft {
        let mut draft = Draft::new(State::new(), 1000);
        for (name, definition) in buckets {
            draft.define_bucket(name, definition).unwrap();
        }
        draft.take_changes();
        draft
    }

    fn records(draft: &Draft, bucket: &str) -> Vec<Json> {
        draft.state().bucket(bucket).unwrap().rows().map(|row| Json::Object(row.to_record())).collect()
    }

    #[test]
    fn insert_fills_defaults_and_generated_fields() {
        let mut draft = draft(&[(
            "b",
            json!({"key": "id", "schema": {
            "id": {"type": "number", "generated": "autoincrement"},
            "at": {"type": "date", "generated": "timestamp"},
            "n": {"type": "number", "default": 7},
        }, "ttl": "1s"}),
        )]);
        let row = draft.insert("b", json!({"x": [1], "_version": 9, "n": null})).unwrap();
        let expected = json!({"x": [1], "_version": 1, "n": null, "id": 1, "at": 1000, "_expiresAt": 2000,
            "_createdAt": 1000, "_updatedAt": 1000});
        assert_eq!(Json::Object(row.to_record()), expected);
        // A failed insert consumes a number, and numbers up to the largest supplied one are skipped.
        draft.insert("b", json!({"n": "x"})).unwrap_err();
        assert_eq!(draft.insert("b", json!({})).unwrap().to_record()["id"], 3);
        draft.insert("b", json!({"id": 10})).unwrap();
        assert_eq!(draft.insert("b", json!({})).unwrap().to_record()["id"], 11);
        let uuid = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
        draft.define_bucket("u", &uuid).unwrap();
        assert_eq!(draft.insert("u", Map::new()).unwrap().to_record()["id"].as_str().unwrap().len(), 36);
    }

    #[test]
    fn update_merges_fields_and_keeps_key_and_generated_fields() {
        let mut draft = draft(&[(
            "b",
            json!({"key": "id", "schema": {
                "id": {"type": "number"}, "made": {"type": "number", "generated": "timestamp"}, "n": {"type": "number"},
            }}),
        )]);
        draft.insert("b", json!({"id": 1, "n": 1})).unwrap();
        draft.now = 2000;
        let patch = json!({"id": 5, "made": 5, "_createdAt": 5, "_version": 9, "n": 2, "extra": null});
        let row = draft.update("b", &json!(1), patch, Some(1)).unwrap();
        let expected = json!({"id": 1, "n": 2, "made": 1000, "_version": 2, "_createdAt": 1000, "_updatedAt": 2000, "extra": null});
        assert_eq!(Json::Object(row.to_record()), expected);
        let conflict = draft.update("b", &json!(1), Map::new(), Some(1)).unwrap_err();
        assert_eq!(conflict, StoreError::Conflict { bucket: "b".into(), key: json!(1), current: 2 });
        let missing = draft.update("b", &json!("1"), Map::new(), None).unwrap_err();
        assert_eq!(missing, StoreError::NotFound { bucket: "b".into(), key: json!("1") });
        draft.upsert("b", json!({"id": 1, "n": 3})).unwrap();
        draft.upsert("b", json!({"id": 2, "n": 4})).unwrap();
        let versions: Vec<_> = records(&draft, "b").iter().map(|record| record["_version"].clone()).collect();
        assert_eq!(versions, [json!(3), json!(1)]);
        // An insert replaces the record in its position, with version 1.
        draft.insert("b", json!({"id": 1})).unwrap();
        assert_eq!(records(&draft, "b")[0]["_version"], 1);
    }

    #[test]
    fn insert_many_is_atomic() {
        let mut draft = draft(&[(
            "b",
            json!({"key": "id", "schema": {
                "id": {"type": "number"}, "name": {"type": "string", "unique": true},
            }}),
        )]);
        let some = |names: [&str; 2]| {
            names.iter().enumerate().map(|(id, name)| json!({"id": id, "name": name})).collect::<Vec<_>>()
        };
        let refused = draft.insert_many("b", some(["a", "a"])).unwrap_err();
        assert_eq!(refused.to_string(), "data[1]: bucket \"b\": a record with name = \"a\" already exists");
        assert!(records(&draft, "b").is_empty() && draft.changes.is_empty());
        assert_eq!(draft.insert_many("b", some(["a", "b"])).unwrap().len(), 2);
        assert_eq!(draft.finish().1.len(), 2);
    }

    #[test]
    fn max_size_evicts_oldest_records() {
        let mut draft = draft(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}, "maxSize": 2}))]);
        for id in 1..=3 {
            draft.now += 1;
            draft.insert("b", json!({"id": id})).unwrap();
        }
        let ids = |draft: &Draft| records(draft, "b").iter().map(|record| record["id"].clone()).collect::<Vec<_>>();
        assert_eq!(ids(&draft), [json!(2), json!(3)]);
        // Replacing the second record makes it the newest and evicts none.
        draft.now += 1;
        draft.insert("b", json!({"id": 2})).unwrap();
        assert_eq!(ids(&draft), [json!(2), json!(3)]);
        draft.now += 1;
        draft.insert("b", json!({"id": 4})).unwrap();
        assert_eq!(ids(&draft), [json!(2), json!(4)]);
    }

    #[test]
    fn expired_records_are_hidden_until_swept() {
        let mut draft = draft(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}, "ttl": 100}))]);
        draft.insert("b", json!({"id": 1})).unwrap();
        draft.insert("b", json!({"id": 2, "_expiresAt": 5000})).unwrap();
        draft.now = 1100;
        let found = |now| draft.state().bucket("b").unwrap().record(&json!(1), || now).is_some();
        assert!(found(1099) && !found(1100));
        assert!(draft.update("b", &json!(1), Map::new(), None).is_err());
        assert!(!draft.delete("b", &json!(1), None).unwrap());
        assert_eq!((records(&draft, "b").len(), draft.sweep(10), records(&draft, "b").len()), (2, 1, 1));
    }

    #[test]
    fn references_are_validated_and_on_delete_is_applied() {
        for (on_delete, left) in [("restrict", 2), ("cascade", 0), ("set_null", 2)] {
            let team = json!({"key": "id", "schema": {"id": {"type": "string"}}});
            let member = json!({"key": "id", "schema": {
                "id": {"type": "number"}, "team": {"type": "string", "ref": "teams", "onDelete": on_delete},
            }, "indexes": ["team"]});
            let mut draft = draft(&[("teams", team), ("members", member)]);
            let refused = draft.insert("members", json!({"id": 1, "team": "a"})).unwrap_err();
            assert_eq!(
                refused.to_string(),
                "Validation failed for bucket \"members\": team: references \"a\", which does not exist in bucket \"teams\""
            );
            draft.insert("teams", json!({"id": "a"})).unwrap();
            for id in 1..=2 {
                draft.insert("members", json!({"id": id, "team": "a"})).unwrap();
            }
            let deleted = draft.delete("teams", &json!("a"), None);
            assert_eq!(deleted.is_ok(), on_delete != "restrict", "{deleted:?}");
            assert_eq!(records(&draft, "teams").len(), usize::from(on_delete == "restrict"));
            assert_eq!(records(&draft, "members").len(), left);
            if on_delete == "set_null" {
                assert_eq!(
                    (&records(&draft, "members")[1]["team"], &records(&draft, "members")[1]["_version"]),
                    (&Json::Null, &json!(2))
                );
            }
        }
    }

    /// Runs an operation, which may fail.
    fn step(draft: &mut Draft, kind: u8, id: u8) {
        let record = || json!({"id": id % 6, "name": format!("n{}", id % 5), "to": id % 7, "x": id});
        let _ = match kind {
            0..3 => draft.insert("b", record()).map(drop),
            3 => draft.update("b", &json!(id % 6), json!({"x": id, "name": null}), None).map(drop),
            4 | 5 => draft.delete("b", &json!(id % 6), None).map(drop),
            6 => draft.insert_many("b", vec![record(), record()]).map(drop),
            7 => draft.clear("c"),
            8 => draft.insert("c", record()).map(drop),
            9 => draft.drop_bucket("c"),
            10 => draft.define_bucket("c", &json!({"key": "id", "schema": {"id": {"type": "number"}}, "maxSize": 3})),
            11 => draft.update_bucket("b", &json!({"addIndexes": ["x"], "addFields": {"x": {"type": "number"}}})),
            12 => draft.define_query("q", &json!({"bucket": "c"})),
            _ => draft.atomically(|draft| {
                step(draft, id % 13, id);
                step(draft, id % 3, id);
                Err(StoreError::BucketNotDefined { bucket: "x".to_owned() })
            }),
        };
    }

    /// Lists all buckets, ordinals, records and index entries. Counters are omitted, because generated numbers are consumed.
    fn everything(state: &State) -> Vec<String> {
        state.check_aggregates();
        let buckets = state.all_buckets().map(|(name, bucket)| {
            let indexes: Vec<_> = bucket.indexes().iter().map(|index| index.all().collect::<Vec<_>>()).collect();
            let keys: Vec<_> = bucket.rows().map(|row| bucket.get(&bucket.key_of(row).unwrap()) == Some(row)).collect();
            format!("{name} {:?} {indexes:?} {keys:?} {}", bucket.entries().collect::<Vec<_>>(), bucket.bytes())
        });
        buckets.chain(state.names().map(str::to_owned)).collect()
    }

    proptest::proptest! {
        /// A rollback restores the state before the failed operations exactly.
        #[test]
        fn rollback_restores_the_state(
            before in proptest::collection::vec((0..13_u8, 0..40_u8), 0..20),
            failing in proptest::collection::vec((0..14_u8, 0..40_u8), 0..20),
        ) {
            let config = json!({"key": "id", "schema": {
                "id": {"type": "number"},
                "name": {"type": "string", "unique": true},
                "to": {"type": "number", "ref": "b", "onDelete": "cascade"},
                "number": {"type": "number", "generated": "autoincrement"},
            }, "maxSize": 4, "ttl": 100, "indexes": [["name", "to"]]});
            let mut draft = draft(&[("b", config)]);
            for (kind, id) in before {
                step(&mut draft, kind, id);
            }
            // The state is not cloned here, because a clone would hide a change that the rollback does not undo.
            let (expected, changes) = (everything(&draft.state), draft.changes.len());
            let failed = draft.atomically(|draft| {
                for (kind, id) in failing {
                    step(draft, kind, id);
                }
                Err::<(), _>(())
            });
            proptest::prop_assert!(failed.is_err());
            proptest::prop_assert_eq!(everything(&draft.state), expected);
            proptest::prop_assert_eq!(draft.changes.len(), changes);
            // Earlier changes can be rolled back too.
            proptest::prop_assert!(draft.roll_back());
            proptest::prop_assert_eq!(draft.state.names().collect::<Vec<_>>(), ["b"]);
            proptest::prop_assert!(draft.state.bucket("b").is_ok_and(Bucket::is_empty));
        }
    }

    /// Each failed insert leaves a dead entry in the key table.
    #[test]
    fn many_consecutive_failures_are_rolled_back() {
        let mut draft = draft(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
        for id in 0..1000 {
            let failed = draft.atomically(|draft| {
                draft.insert("b", json!({"id": id})).unwrap();
                Err::<(), ()>(())
            });
            assert!(failed.is_err() && draft.get("b", &json!(id)).unwrap().is_none());
            draft.insert("b", json!({"id": "x"})).unwrap_err();
        }
        draft.insert("b", json!({"id": 7})).unwrap();
        assert_eq!(records(&draft, "b").len(), 1);
        assert!(draft.get("b", &json!(7)).unwrap().is_some());
    }

    /// The references form a cycle, and one refers to its own record.
    #[test]
    fn cascade_over_a_cycle_terminates() {
        let node = json!({"key": "id", "schema": {
            "id": {"type": "number"}, "next": {"type": "number", "ref": "nodes", "onDelete": "cascade"},
        }});
        let mut draft = draft(&[("nodes", node)]);
        draft.insert("nodes", json!({"id": 1, "next": 1})).unwrap();
        draft.insert("nodes", json!({"id": 2, "next": 1})).unwrap();
        draft.insert("nodes", json!({"id": 3, "next": 2})).unwrap();
        draft.update("nodes", &json!(1), json!({"next": 3}), None).unwrap();
        assert!(draft.delete("nodes", &json!(2), None).unwrap());
        assert!(records(&draft, "nodes").is_empty());
    }
}
