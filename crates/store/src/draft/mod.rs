//! A state that is being changed.
//!
//! A write that fails leaves nothing behind: its changes are undone one by one. Cloning the state for each write would be
//! simpler, but shared nodes are copied before they are changed, so a group of 64 writes would copy the same nodes 64 times. The
//! state is cloned only when it is published, and before operations that do not change single records (definitions, clearing a
//! bucket). Time is an argument.

mod references;
mod sweep;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

pub use self::references::ReferenceFilter;
pub(crate) use self::sweep::Sweep;
use crate::bucket::LAST_NUMBER;
use crate::check::Issue;
use crate::query::{Budget, Exceeded};
use crate::record::members;
use crate::schema::{Generated, NotUnique, ValidationError};
use crate::{Answer, Bucket, Field, Filter, IntoRecord, Limits, Query, Row, RowError, State, StoreError, Value};

const VERSION: &str = "_version";
const CREATED_AT: &str = "_createdAt";
const UPDATED_AT: &str = "_updatedAt";
const EXPIRES_AT: &str = "_expiresAt";

/// What has become of a record.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Change {
    /// The bucket that it is in.
    pub bucket: Arc<str>,
    /// Its place in the order of coming, which it keeps as long as it is there.
    pub ordinal: u64,
    /// What it was; none if it was not.
    pub old: Option<Row>,
    /// What it is; none if it is not any more.
    pub new: Option<Row>,
}

/// A state to return to, with the length of the lists that belong to it.
#[derive(Debug, Clone)]
struct Saved {
    changes: usize,
    counters: usize,
    state: State,
}

/// An autoincrement counter that was raised.
#[derive(Debug, Clone)]
struct RaisedCounter {
    bucket: Arc<str>,
    before: u64,
    /// Whether a number was generated. It is used up, even if the write is undone.
    is_generated: bool,
}

/// A point in a draft to which it can be reverted.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    changes: usize,
    counters: usize,
    saved: usize,
}

/// A state that is being changed, at one moment.
#[derive(Debug, Clone)]
pub struct Draft {
    state: State,
    changes: Vec<Change>,
    /// Parts of the changes that are all that was in a bucket.
    cleared: Vec<Range<usize>>,
    /// Counters that were raised, so that a number that a caller supplied counts only if it is stored.
    counters: Vec<RaisedCounter>,
    /// States before operations that are not undone change by change.
    saved: Vec<Saved>,
    /// Whether a change is in progress. If it still is after a panic, the state is unknown.
    is_torn: bool,
    now: u64,
    limits: Limits,
    /// The bytes of all records when the changes began.
    bytes_before: usize,
    /// The records that may be touched, if not all.
    guard: Option<Filter>,
    /// The records that may be referred to, if not all.
    references: Option<ReferenceFilter>,
    /// Whether names are those of system buckets.
    is_system: bool,
    /// The work of the reads of the current write.
    read_work: Cell<u64>,
}

impl Draft {
    /// Changes to a state, at that time in milliseconds.
    pub fn new(state: State, now: u64) -> Self {
        Self {
            bytes_before: state.totals().bytes,
            state,
            changes: Vec::new(),
            cleared: Vec::new(),
            counters: Vec::new(),
            saved: Vec::new(),
            is_torn: false,
            now,
            limits: Limits::default(),
            guard: None,
            references: None,
            is_system: false,
            read_work: Cell::new(0),
        }
    }

    /// With other limits than the usual ones.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The state as it is by now.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The time at which it is changed.
    pub fn now(&self) -> u64 {
        self.now
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The new state, and how it differs, in order.
    pub fn finish(self) -> (State, Vec<Change>) {
        (self.state, self.changes)
    }

    /// Goes on at a later time.
    pub(crate) fn set_now(&mut self, now: u64) {
        self.now = now;
    }

    /// What has changed, and which parts of it are all that was in a bucket.
    pub(crate) fn changes(&self) -> (&[Change], &[Range<usize>]) {
        (&self.changes, &self.cleared)
    }

    /// Fails if the changes make the records grow beyond [`Limits::max_store_bytes`].
    pub(crate) fn check_store_bytes(&self) -> Result<(), StoreError> {
        let (bytes, max) = (self.state.totals().bytes, self.limits.max_store_bytes);
        if bytes > max && bytes > self.bytes_before { Err(StoreError::StoreFull { bytes, max }) } else { Ok(()) }
    }

    /// Returns the changes, which can no longer be undone.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        self.bytes_before = self.state.totals().bytes;
        self.saved.clear();
        self.cleared.clear();
        self.counters.clear();
        std::mem::take(&mut self.changes)
    }

    /// Undoes all changes after a failure or panic. Returns whether that was possible.
    pub(crate) fn roll_back(&mut self) -> bool {
        (self.guard, self.references) = (None, None);
        self.is_system = false;
        if !self.is_torn {
            self.revert(Mark::default());
        }
        !self.is_torn
    }

    /// Runs `work`, and undoes its changes if it fails.
    pub fn atomically<T, E>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let mark = Mark { changes: self.changes.len(), counters: self.counters.len(), saved: self.saved.len() };
        let done = work(self);
        if done.is_err() {
            self.revert(mark);
        }
        done
    }

    /// Undoes everything after the mark.
    fn revert(&mut self, mark: Mark) {
        self.is_torn = true;
        let generated = self.counters[mark.counters..].iter().filter(|raised| raised.is_generated);
        let generated: Vec<Arc<str>> = generated.map(|raised| Arc::clone(&raised.bucket)).collect();
        if let Some(saved) = self.saved.drain(mark.saved..).next() {
            self.state = saved.state;
            self.changes.truncate(saved.changes);
            self.counters.truncate(saved.counters);
        }
        self.cleared.retain(|cleared| cleared.start < mark.changes);
        while self.changes.len() > mark.changes
            && let Some(change) = self.changes.pop()
        {
            let name = Arc::clone(&change.bucket);
            // A bucket that no longer exists has nothing to undo.
            let _ = self.state.change(&name, |bucket| bucket.revert(change));
        }
        for raised in self.counters.drain(mark.counters..).rev() {
            let _ = self.state.change(&raised.bucket, |bucket| bucket.reset_counter(raised.before));
        }
        for bucket in generated {
            let _ = self.state.change(&bucket, Bucket::next_number);
        }
        self.is_torn = false;
    }

    /// Changes the state in a way that is not undone record by record: definitions, or all records of a bucket.
    pub(crate) fn restructure(&mut self, work: impl FnOnce(&mut State)) {
        let (changes, counters) = (self.changes.len(), self.counters.len());
        self.saved.push(Saved { changes, counters, state: self.state.clone() });
        self.is_torn = true;
        work(&mut self.state);
        self.is_torn = false;
    }

    /// Does something to records that match a filter only. Others are not there for reads, updates and deletes, and what is
    /// written must match before and after. A key of a hidden record is taken, like a unique value: see [`StoreError::NotUnique`].
    /// What a deletion does to those that refer to a record is not asked.
    pub fn guarded<T>(&mut self, guard: &Filter, work: impl FnOnce(&mut Self) -> T) -> T {
        let narrower = match &self.guard {
            Some(outer) => outer.clone().and(guard.clone()),
            None => guard.clone(),
        };
        let outer = self.guard.replace(narrower);
        let done = work(self);
        self.guard = outer;
        done
    }

    /// Does something whose records may refer only to records that match a filter. Others are not there for new references.
    pub fn referring_to<T>(&mut self, references: &ReferenceFilter, work: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.references.replace(references.clone());
        let done = work(self);
        self.references = outer;
        done
    }

    /// Does something to system buckets: inside, reads and writes of records reach the system buckets that the program has
    /// declared, and no others. Neither a [guard](Self::guarded) nor a [reference filter](Self::referring_to) holds there.
    /// Definitions are those of ordinary buckets, inside as outside.
    pub fn system<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let outer = (std::mem::replace(&mut self.is_system, true), self.guard.take(), self.references.take());
        let done = work(self);
        (self.is_system, self.guard, self.references) = outer;
        done
    }

    /// Returns the bucket that a name stands for, here.
    pub(crate) fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        if self.is_system { self.state.system_bucket(name) } else { self.state.bucket(name) }
    }

    /// The record with this key, if there is one.
    pub fn get(&self, bucket: &str, key: &Json) -> Result<Option<&Row>, StoreError> {
        Ok(self.live(bucket, key)?.filter(|row| self.is_visible(row)))
    }

    /// Returns the result of a query. The reads of one write may take [`Limits::max_transaction_read`] together.
    pub fn query(&self, query: &Query) -> Result<Answer, StoreError> {
        self.read(query, |query, bucket, budget| query.answer(bucket, self.now, budget))
    }

    /// Returns the records of the result of a query, in its order.
    pub(crate) fn rows(&self, query: &Query) -> Result<Vec<&Row>, StoreError> {
        self.read(query, |query, bucket, budget| query.rows(bucket, self.now, budget))
    }

    /// Returns the number of records that match a query, whatever its offset and limit.
    pub fn count(&self, query: &Query) -> Result<usize, StoreError> {
        self.read(query, |query, bucket, budget| query.count(bucket, self.now, budget))
    }

    /// Reads within what is left of the budget of this write.
    fn read<'a, T>(
        &'a self,
        query: &Query,
        read: impl FnOnce(&Query, &'a Bucket, &Budget) -> Result<T, Exceeded>,
    ) -> Result<T, StoreError> {
        let bucket = self.bucket(&query.bucket)?;
        let restricted = self.guard.as_ref().map(|guard| query.clone().restrict(guard));
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

    /// The work of the reads of this write, in nanoseconds by estimate.
    pub(crate) fn read_work(&self) -> u64 {
        self.read_work.get()
    }

    /// Lets the next write read as much as any.
    pub(crate) fn reset_read_work(&self) {
        self.read_work.set(0);
    }

    /// Inserts a record, or replaces the one with the same key.
    pub fn insert(&mut self, bucket: &str, record: impl IntoRecord) -> Result<Row, StoreError> {
        let record = members(record, bucket)?;
        self.atomically(|draft| draft.insert_now(bucket, record))
    }

    /// Inserts all of these records, or none. A record that is refused is named by its index: see [`StoreError::Record`].
    pub fn insert_many(
        &mut self,
        bucket: &str,
        records: impl IntoIterator<Item = impl IntoRecord>,
    ) -> Result<Vec<Row>, StoreError> {
        self.bucket(bucket)?;
        self.atomically(|draft| {
            let insert = |(index, record)| {
                let inserted = members(record, bucket).and_then(|record| draft.insert_now(bucket, record));
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
        self.atomically(|draft| draft.update_now(bucket, key, patch, version))
    }

    /// Merges a record into the one with the same key, or inserts it.
    pub fn upsert(&mut self, bucket: &str, record: impl IntoRecord) -> Result<Row, StoreError> {
        let record = members(record, bucket)?;
        self.atomically(|draft| {
            let key = record.get(&draft.bucket(bucket)?.definition().key).cloned().unwrap_or_default();
            if draft.get(bucket, &key)?.is_some() {
                draft.update_now(bucket, &key, record, None)
            } else {
                draft.insert_now(bucket, record)
            }
        })
    }

    /// Deletes a record, and the records that refer to it with `onDelete: cascade`. Returns whether it existed.
    pub fn delete(&mut self, bucket: &str, key: &Json, version: Option<u64>) -> Result<bool, StoreError> {
        let Some(row) = self.get(bucket, key)?.cloned() else { return Ok(false) };
        expect_version(bucket, key, &row, version)?;
        self.atomically(|draft| draft.delete_now(bucket, row))?;
        Ok(true)
    }

    /// Deletes all records of a bucket.
    pub fn clear(&mut self, name: &str) -> Result<(), StoreError> {
        let bucket = self.bucket(name)?;
        if self.guard.is_some() || self.is_target(name) {
            let rows: Vec<Row> = bucket.rows().filter(|row| self.is_visible(row)).cloned().collect();
            return self.atomically(|draft| draft.delete_all(name, rows));
        }
        let name = Arc::clone(self.state.any(name)?.0);
        let mut gone = Vec::with_capacity(bucket.len());
        for (ordinal, row) in bucket.entries() {
            gone.push(Change { bucket: Arc::clone(&name), ordinal, old: Some(row.clone()), new: None });
        }
        if !gone.is_empty() {
            self.restructure(|state| drop(state.change(&name, Bucket::clear)));
            self.cleared.push(self.changes.len()..self.changes.len() + gone.len());
            self.changes.extend(gone);
        }
        Ok(())
    }

    fn is_visible(&self, row: &Row) -> bool {
        self.guard.as_ref().is_none_or(|guard| guard.matches(row))
    }

    fn expect_visible(&self, bucket: &str, row: &Row) -> Result<(), StoreError> {
        if self.is_visible(row) { Ok(()) } else { Err(StoreError::Forbidden { bucket: bucket.to_owned() }) }
    }

    /// The record with this key that has not expired.
    pub(crate) fn live(&self, bucket: &str, key: &Json) -> Result<Option<&Row>, StoreError> {
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
                    json!(self.next_number(name)?.ok_or_else(|| no_number(name, field))?)
                }
            };
            record.insert(field.clone(), value);
        }
        Ok(record)
    }

    /// Generates an autoincrement number. Returns `None` if the largest number is in use.
    fn next_number(&mut self, name: &str) -> Result<Option<u64>, StoreError> {
        let (shared, bucket) = self.state.any(name)?;
        let (shared, before) = (Arc::clone(shared), bucket.counter());
        let number = self.state.change(name, Bucket::next_number)?;
        if number.is_some() {
            self.counters.push(RaisedCounter { bucket: shared, before, is_generated: true });
        }
        Ok(number)
    }

    fn insert_now(&mut self, name: &str, record: Map<String, Json>) -> Result<Row, StoreError> {
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
        let known = self.known(name, &row)?;
        // A record that has expired is not there, and one that is hidden keeps its key.
        let is_live = |known: &Row| self.bucket(name).is_ok_and(|bucket| bucket.is_live(known, now));
        if known.is_some_and(|known| is_live(known) && !self.is_visible(known)) {
            let field = self.bucket(name)?.definition().key.clone();
            let value = record.get(&field).cloned().unwrap_or_default();
            return Err(StoreError::NotUnique { bucket: name.to_owned(), source: NotUnique { field, value } });
        }
        // It makes room only for one that takes another place.
        if let (None, Some(max)) = (known, max_size)
            && self.make_room(name, max)?
        {
            // What it refers to may be what has made way.
            self.check_references(name, &record, None)?;
        }
        self.put_row(name, row)
    }

    /// Deletes the oldest records until there is room for one more. Returns whether there were any.
    fn make_room(&mut self, name: &str, max: usize) -> Result<bool, StoreError> {
        let mut has_deleted = false;
        loop {
            let bucket = self.bucket(name)?;
            let Some(oldest) = bucket.oldest().filter(|_| bucket.len() >= max).cloned() else { return Ok(has_deleted) };
            self.delete_now(name, oldest)?;
            has_deleted = true;
        }
    }

    /// Puts a record in place as it is, with its version and times. References are not asked.
    pub(crate) fn restore(&mut self, name: &str, mut record: Map<String, Json>) -> Result<(), StoreError> {
        let definition = self.bucket(name)?.definition();
        for (field, missing) in [(VERSION, 1), (CREATED_AT, self.now), (UPDATED_AT, self.now)] {
            if !record.get(field).is_some_and(Json::is_u64) {
                record.insert(field.to_owned(), json!(missing));
            }
        }
        let max_size = definition.max_size;
        let row = self.check_alone(name, &record)?;
        if let (None, Some(max)) = (self.known(name, &row)?, max_size) {
            self.make_room(name, max)?;
        }
        self.put_row(name, row).map(drop)
    }

    /// The record that has the key of this one, expired or not.
    fn known(&self, name: &str, row: &Row) -> Result<Option<&Row>, StoreError> {
        let (_, bucket) = self.state.any(name)?;
        Ok(bucket.key_of(row).and_then(|key| bucket.get(&key)))
    }

    fn update_now(
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
            let is_ours = [VERSION, CREATED_AT, UPDATED_AT].contains(&field.as_str());
            if field != definition.key && !is_ours && !is_generated {
                record.insert(field, value);
            }
        }
        record.insert(VERSION.to_owned(), json!(version_of(row).saturating_add(1)));
        record.insert(UPDATED_AT.to_owned(), json!(self.now));
        let row = self.check(name, &record, Some(row))?;
        self.expect_visible(name, &row)?;
        self.put_row(name, row)
    }

    /// The row of a record, if it is one: as its schema says, and with a key.
    fn check_alone(&self, name: &str, record: &Map<String, Json>) -> Result<Row, StoreError> {
        self.limits.check(record)?;
        let definition = self.bucket(name)?.definition();
        definition.validate(name, record)?;
        let key = record.get(&definition.key).and_then(Value::of_json);
        if matches!(key, None | Some(Value::Null)) {
            return Err(ValidationError { bucket: name.to_owned(), issues: vec![no_key(&definition.key)] }.into());
        }
        let row = Row::new(record)?;
        let (len, max) = (row.text().len(), self.limits.max_record_bytes);
        if len > max { Err(RowError::TooLarge { len, max }.into()) } else { Ok(row) }
    }

    /// The row of a record, if it is one, and its references lead somewhere, but for those that it had before.
    fn check(&self, name: &str, record: &Map<String, Json>, before: Option<&Row>) -> Result<Row, StoreError> {
        let row = self.check_alone(name, record)?;
        self.check_references(name, record, before)?;
        Ok(row)
    }

    /// Stores a row as it is.
    pub(crate) fn put_row(&mut self, name: &str, row: Row) -> Result<Row, StoreError> {
        let bucket = Arc::clone(self.state.any(name)?.0);
        self.is_torn = true;
        let changed = self.state.change(name, |bucket| {
            let before = bucket.counter();
            let placed = bucket.place(row.clone());
            (placed, before, bucket.counter() > before)
        });
        self.is_torn = false;
        let (placed, before, is_raised) = changed?;
        let (ordinal, old) = placed.map_err(|source| StoreError::NotUnique { bucket: name.to_owned(), source })?;
        if is_raised {
            self.counters.push(RaisedCounter { bucket: Arc::clone(&bucket), before, is_generated: false });
        }
        self.changes.push(Change { bucket, ordinal, old, new: Some(row.clone()) });
        Ok(row)
    }

    /// Takes a record out, and says whether it was there.
    pub(crate) fn remove_row(&mut self, name: &str, key: &Value<'_>) -> Result<bool, StoreError> {
        let bucket = Arc::clone(self.state.any(name)?.0);
        self.is_torn = true;
        let taken = self.state.change(name, |bucket| bucket.take(key));
        self.is_torn = false;
        let Some((ordinal, old)) = taken? else { return Ok(false) };
        self.changes.push(Change { bucket, ordinal, old: Some(old), new: None });
        Ok(true)
    }
}

fn no_key(field: &str) -> Issue {
    Issue { field: field.to_owned(), message: "is required".to_owned(), code: "required" }
}

fn no_number(bucket: &str, field: &str) -> StoreError {
    let message =
        format!("cannot be generated: the largest autoincrement number, {LAST_NUMBER}, is in use; supply a value");
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
    fn inserts_fill_in_what_is_absent_and_ours() {
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
        // A failed insert uses up a number, and numbers up to the largest that a caller supplied are skipped.
        draft.insert("b", json!({"n": "x"})).unwrap_err();
        assert_eq!(draft.insert("b", json!({})).unwrap().to_record()["id"], 3);
        draft.insert("b", json!({"id": 10})).unwrap();
        assert_eq!(draft.insert("b", json!({})).unwrap().to_record()["id"], 11);
        let uuid = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
        draft.define_bucket("u", &uuid).unwrap();
        assert_eq!(draft.insert("u", Map::new()).unwrap().to_record()["id"].as_str().unwrap().len(), 36);
    }

    #[test]
    fn updates_merge_and_leave_alone_what_is_not_theirs() {
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
        // An insert begins anew, in the same place.
        draft.insert("b", json!({"id": 1})).unwrap();
        assert_eq!(records(&draft, "b")[0]["_version"], 1);
    }

    #[test]
    fn many_are_inserted_or_none() {
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
    fn the_oldest_make_way() {
        let mut draft = draft(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}, "maxSize": 2}))]);
        for id in 1..=3 {
            draft.now += 1;
            draft.insert("b", json!({"id": id})).unwrap();
        }
        let ids = |draft: &Draft| records(draft, "b").iter().map(|record| record["id"].clone()).collect::<Vec<_>>();
        assert_eq!(ids(&draft), [json!(2), json!(3)]);
        // The second is now the youngest, and took nobody's place.
        draft.now += 1;
        draft.insert("b", json!({"id": 2})).unwrap();
        assert_eq!(ids(&draft), [json!(2), json!(3)]);
        draft.now += 1;
        draft.insert("b", json!({"id": 4})).unwrap();
        assert_eq!(ids(&draft), [json!(2), json!(4)]);
    }

    #[test]
    fn what_has_expired_is_gone_for_readers_and_swept_later() {
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
    fn references_lead_somewhere_and_say_what_becomes_of_them() {
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

    /// A step of a draft, whether or not it succeeds.
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

    /// Every bucket, ordinal, record and index. Counters are left out: numbers that were generated are used up.
    fn everything(state: &State) -> Vec<String> {
        state.check_accounts();
        let buckets = state.all().map(|(name, bucket)| {
            let indexes: Vec<_> = bucket.indexes().iter().map(|index| index.all().collect::<Vec<_>>()).collect();
            let keys: Vec<_> = bucket.rows().map(|row| bucket.get(&bucket.key_of(row).unwrap()) == Some(row)).collect();
            format!("{name} {:?} {indexes:?} {keys:?} {}", bucket.entries().collect::<Vec<_>>(), bucket.bytes())
        });
        buckets.chain(state.names().map(str::to_owned)).collect()
    }

    proptest::proptest! {
        /// What fails is taken back as if it had never been, and nothing else is.
        #[test]
        fn what_fails_leaves_nothing(
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
            // A clone would be copied rather than changed, and hide what is not taken back.
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
            // What was done before can be taken back as well.
            proptest::prop_assert!(draft.roll_back());
            proptest::prop_assert_eq!(draft.state.names().collect::<Vec<_>>(), ["b"]);
            proptest::prop_assert!(draft.state.bucket("b").is_ok_and(Bucket::is_empty));
        }
    }

    /// Each leaves its key in the table of keys, all for one place.
    #[test]
    fn many_may_fail_one_after_the_other() {
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

    /// In a circle, and to itself.
    #[test]
    fn a_cascade_ends() {
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
