//! References between records: validation, and the `onDelete` actions.
//!
//! Fields with references are always indexed, so the cost of a deletion depends on the referring records and not on the size of
//! their buckets.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

use super::{UPDATED_AT, VERSION, missing_key, version_of};
use crate::bucket::Ordinal;
use crate::check::{self, Issue};
use crate::schema::{OnDelete, ValidationError};
use crate::{Draft, Field, Filter, Row, StoreError, Value};

/// A filter on the records that a write can reference: a function from the name of a bucket to a row filter, or to `None`, which
/// permits all records of the bucket. See [`Draft::with_reference_filter`].
#[derive(Clone)]
pub struct ReferenceFilter(Arc<FilterOf>);

/// Returns the filter of a bucket.
type FilterOf = dyn Fn(&str) -> Option<Filter> + Send + Sync;

impl ReferenceFilter {
    /// Creates a filter from a function that is called on the writer's thread, once for each new reference.
    pub fn new(filter: impl Fn(&str) -> Option<Filter> + Send + Sync + 'static) -> Self {
        Self(Arc::new(filter))
    }

    fn matches(&self, bucket: &str, row: &Row) -> bool {
        (self.0)(bucket).is_none_or(|filter| filter.matches(row))
    }
}

impl fmt::Debug for ReferenceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReferenceFilter").finish_non_exhaustive()
    }
}

/// The references to records of a bucket.
struct IncomingReferences {
    /// The key field of the bucket.
    key: Field,
    /// The referring buckets, the referring fields, and the action when a referenced record is deleted.
    fields: Vec<(Arc<str>, Field, OnDelete)>,
}

impl Draft {
    /// Deletes a record, and applies `onDelete` to the records that refer to it.
    pub(super) fn delete_row(&mut self, bucket: &str, row: Row) -> Result<(), StoreError> {
        self.delete_rows(bucket, vec![row])
    }

    /// Deletes records of a bucket, and applies `onDelete` to the records that refer to them. References between the deleted records
    /// do not restrict the deletion.
    pub(super) fn delete_rows(&mut self, bucket: &str, rows: Vec<Row>) -> Result<(), StoreError> {
        let name = Arc::clone(self.state.any_bucket(bucket)?.0);
        let is_target = self.is_target(&name);
        let mut deleted = Vec::new();
        for row in rows {
            if self.remove_existing(&name, &row)? && is_target {
                deleted.push((Arc::clone(&name), row));
            }
        }
        let mut references: BTreeMap<Arc<str>, IncomingReferences> = BTreeMap::new();
        while let Some((name, row)) = deleted.pop() {
            let incoming = match references.entry(Arc::clone(&name)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(vacant) => vacant.insert(self.incoming_references(&name)?),
            };
            let Some(key) = row.get(&incoming.key) else { continue };
            for (referring, field, on_delete) in &incoming.fields {
                match on_delete {
                    OnDelete::Cascade => {
                        for row in self.all_referring(referring, field, &key)? {
                            if self.remove_existing(referring, &row)? {
                                deleted.push((Arc::clone(referring), row));
                            }
                        }
                    }
                    OnDelete::SetNull => {
                        for row in self.all_referring(referring, field, &key)? {
                            self.set_null(referring, &row, field)?;
                        }
                    }
                    // A single referring record restricts the deletion.
                    OnDelete::Restrict if self.referring(referring, field, &key)?.next().is_some() => {
                        let message =
                            format!("the record is referenced by field {} of bucket \"{referring}\"", field.name());
                        let issue = Issue { field: field.name().to_owned(), message, code: "ref" };
                        return Err(ValidationError { bucket: name.to_string(), issues: vec![issue] }.into());
                    }
                    OnDelete::Restrict => {}
                }
            }
        }
        Ok(())
    }

    /// Removes the record with the same key. Returns whether it still existed.
    fn remove_existing(&mut self, name: &str, row: &Row) -> Result<bool, StoreError> {
        match self.state.any_bucket(name)?.1.key_of(row) {
            Some(key) => self.remove_row(name, &key),
            None => Ok(false),
        }
    }

    /// Returns whether fields of any bucket refer to this one.
    pub(super) fn is_target(&self, target: &str) -> bool {
        self.state.referring(target).next().is_some()
    }

    /// Returns the references to records of this bucket.
    fn incoming_references(&self, target: &str) -> Result<IncomingReferences, StoreError> {
        let key = self.state.any_bucket(target)?.1.key_field().clone();
        let mut fields = Vec::new();
        for (name, bucket) in self.state.referring(target) {
            for (field, rule) in &bucket.definition().fields {
                if let Some(reference) = rule.reference.as_ref().filter(|reference| reference.bucket == target) {
                    fields.push((name.into(), Field::new(field), reference.on_delete));
                }
            }
        }
        Ok(IncomingReferences { key, fields })
    }

    /// Returns the records that refer to this key, by an index lookup.
    fn referring(
        &self,
        name: &str,
        field: &Field,
        key: &Value<'_>,
    ) -> Result<impl Iterator<Item = (Ordinal, &Row)>, StoreError> {
        let bucket = self.state.any_bucket(name)?.1;
        Ok(bucket.referring(field, key).filter(|(_, row)| bucket.is_live(row, self.now)))
    }

    /// Returns all records that refer to this key, in insertion order.
    fn all_referring(&self, name: &str, field: &Field, key: &Value<'_>) -> Result<Vec<Row>, StoreError> {
        let mut found: Vec<(Ordinal, Row)> =
            self.referring(name, field, key)?.map(|(ordinal, row)| (ordinal, row.clone())).collect();
        found.sort_unstable_by_key(|(ordinal, _)| *ordinal);
        Ok(found.into_iter().map(|(_, row)| row).collect())
    }

    fn set_null(&mut self, name: &str, row: &Row, field: &Field) -> Result<(), StoreError> {
        // The record may have changed since it was found, if several of its fields refer to the deleted record.
        let Some(row) = self.existing(name, row)?.cloned() else { return Ok(()) };
        let mut record = row.to_record();
        record.insert(field.name().to_owned(), Json::Null);
        record.insert(VERSION.to_owned(), json!(version_of(&row).saturating_add(1)));
        record.insert(UPDATED_AT.to_owned(), json!(self.now));
        // Only this field is validated. The rest of the record is unchanged; it may violate a newer schema, and another field
        // may still refer to the deleted record. Neither prevents the deletion.
        let definition = self.state.any_bucket(name)?.1.definition();
        let mut issues = Vec::new();
        if let Some(rule) = definition.rule(field.name()) {
            check::validate_field(rule, None, field.name(), &mut issues);
        }
        if issues.is_empty() && definition.key == field.name() {
            issues.push(missing_key(&definition.key));
        }
        if !issues.is_empty() {
            return Err(ValidationError { bucket: name.to_owned(), issues }.into());
        }
        self.put_row(name, Row::new(&record)?).map(drop)
    }

    /// Checks that the targets of a record's references exist. An unchanged reference is not checked: its target may have expired, or
    /// may have been lost with a bucket that is not persistent, and the record must remain writable.
    pub(super) fn check_references(
        &self,
        name: &str,
        record: &Map<String, Json>,
        before: Option<&Row>,
    ) -> Result<(), StoreError> {
        let definition = self.bucket(name)?.definition();
        let mut issues = Vec::new();
        for (field, rule) in &definition.fields {
            let Some(reference) = &rule.reference else { continue };
            let Some(value) = record.get(field).filter(|value| !value.is_null()) else { continue };
            // A record can refer to itself.
            let is_self = reference.bucket == name && Some(value) == record.get(&definition.key);
            let new = Value::of_json(value);
            let old = before.and_then(|before| before.get(&Field::new(field)));
            let is_unchanged = new.zip(old).is_some_and(|(new, old)| new.strictly_equals(&old));
            let may_refer =
                |row: &Row| self.reference_filter.as_ref().is_none_or(|filter| filter.matches(&reference.bucket, row));
            let is_missing =
                || self.live_record(&reference.bucket, value).is_ok_and(|found| !found.is_some_and(may_refer));
            if !is_self && !is_unchanged && is_missing() {
                let message = format!("references {value}, which does not exist in bucket \"{}\"", reference.bucket);
                issues.push(Issue { field: field.clone(), message, code: "ref" });
            }
        }
        if issues.is_empty() { Ok(()) } else { Err(ValidationError { bucket: name.to_owned(), issues }.into()) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use crate::bucket::examined;
    use crate::{Store, StoreOptions};

    const DELETED: usize = 20;

    fn insert_all(store: &Store, bucket: &str, records: impl Iterator<Item = Json>) {
        store.insert_many(bucket, records).wait().unwrap();
    }

    /// Runs `work`. Returns the number of records that the writer reads meanwhile.
    fn examined(store: &Store, work: impl FnOnce(&Store)) -> usize {
        let total = || store.write(|_| Ok(examined::total())).wait().unwrap();
        let before = total();
        work(store);
        total() - before
    }

    /// Creates a bucket of targets, half of which have a referring record, and many records that refer to another target.
    fn filled(store: &Store, on_delete: &str, unrelated: usize, define: impl FnOnce(&Store, &Json)) {
        let number = json!({"type": "number"});
        store.define_bucket("targets", json!({"key": "id", "schema": {"id": number}})).wait().unwrap();
        define(store, &json!({"type": "number", "ref": "targets", "onDelete": on_delete}));
        insert_all(store, "targets", (0..=DELETED).map(|id| json!({"id": id})));
        let referring = (0..DELETED / 2).map(|id| json!({"id": id, "target": id}));
        insert_all(store, "referring", referring);
        insert_all(store, "referring", (0..unrelated).map(|id| json!({"id": DELETED + id, "target": DELETED})));
    }

    fn without_index(store: &Store, reference: &Json) {
        let schema = json!({"id": {"type": "number"}, "target": reference});
        store.define_bucket("referring", json!({"key": "id", "schema": schema})).wait().unwrap();
        assert_eq!(store.stats().buckets[1].indexes, 0, "the index is internal");
    }

    fn with_compound_index(store: &Store, reference: &Json) {
        let schema = json!({"id": {"type": "number"}, "target": reference});
        let indexes = json!([["target", "id"]]);
        store.define_bucket("referring", json!({"key": "id", "schema": schema, "indexes": indexes})).wait().unwrap();
        assert_eq!(store.snapshot().state.bucket("referring").unwrap().indexes().len(), 1, "it serves both");
    }

    fn with_added_field(store: &Store, reference: &Json) {
        let config = json!({"key": "id", "schema": {"id": {"type": "number"}}});
        store.define_bucket("referring", config).wait().unwrap();
        store.update_bucket("referring", json!({"addFields": {"target": reference}})).wait().unwrap();
    }

    fn delete_targets(store: &Store) {
        for id in 0..DELETED {
            // Deletions with `restrict` are rejected.
            let deleted = store.delete("targets", json!(id), None).wait();
            assert!(deleted.is_ok() || id < DELETED / 2, "{deleted:?}");
        }
    }

    #[test]
    fn delete_examines_only_records_that_refer_to_the_target() {
        for define in [without_index, with_compound_index, with_added_field] {
            for (on_delete, left) in [("cascade", 1000), ("set_null", 1010), ("restrict", 1010)] {
                let store = Store::memory(StoreOptions::default());
                filled(&store, on_delete, 1000, define);
                let examined = examined(&store, delete_targets);
                assert!(examined < 10 * DELETED, "{on_delete}: {examined} records");
                assert_eq!(store.stats().buckets[1].records, left, "{on_delete}");
            }
        }
    }

    #[test]
    fn restricted_delete_examines_few_records() {
        for define in [without_index, with_compound_index] {
            let store = Store::memory(StoreOptions::default());
            filled(&store, "restrict", 1000, define);
            let examined = examined(&store, |store| {
                store.delete("targets", json!(DELETED), None).wait().unwrap_err();
            });
            assert!(examined < 10, "{examined} records");
        }
    }

    #[test]
    fn clear_examines_each_referring_record_a_few_times() {
        let store = Store::memory(StoreOptions::default());
        filled(&store, "set_null", 1000, without_index);
        let examined = examined(&store, |store| store.clear("targets").wait().unwrap());
        assert!(examined < 10 * (1000 + DELETED), "{examined} records");
    }

    #[test]
    fn references_are_indexed_after_recovery() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
        filled(&store, "cascade", 1000, without_index);
        store.close().unwrap();
        let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
        let examined = examined(&store, delete_targets);
        assert!(examined < 10 * DELETED, "{examined} records");
        assert_eq!(store.stats().buckets[1].records, 1000);
    }
}
