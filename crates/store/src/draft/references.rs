//! References between records: their targets, and what a deletion does to the records that refer to it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

use super::{UPDATED_AT, VERSION, no_key, version_of};
use crate::check::{self, Issue};
use crate::filter::{Scalar, Test};
use crate::query::plan::Scan;
use crate::{Budget, Draft, Field, Filter, OnDelete, Row, StoreError, ValidationError, Value};

/// The references to records of a bucket.
struct Targeting {
    /// The key field of the bucket.
    key: Field,
    /// The referring buckets and fields, and what a deletion does to their records.
    fields: Vec<(Arc<str>, Field, OnDelete)>,
}

impl Draft {
    /// Deletes a record, and what refers to it.
    pub(super) fn delete_now(&mut self, bucket: &str, row: Row) -> Result<(), StoreError> {
        self.delete_all(bucket, vec![row])
    }

    /// Deletes records of a bucket, and what refers to them. If they refer to each other, that keeps none of them.
    pub(super) fn delete_all(&mut self, bucket: &str, rows: Vec<Row>) -> Result<(), StoreError> {
        let name = Arc::clone(self.state.any(bucket)?.0);
        let is_target = self.is_target(&name);
        let mut gone = Vec::new();
        for row in rows {
            if self.remove_this(&name, &row)? && is_target {
                gone.push((Arc::clone(&name), row));
            }
        }
        let mut references: BTreeMap<Arc<str>, Targeting> = BTreeMap::new();
        while let Some((name, row)) = gone.pop() {
            let targeting = match references.entry(Arc::clone(&name)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(vacant) => vacant.insert(self.targeting(&name)?),
            };
            let text = row.text_of(&targeting.key).unwrap_or("null");
            let key = serde_json::from_str(text).unwrap_or_default();
            for (referring, field, on_delete) in &targeting.fields {
                for row in self.referring(referring, field, &key)? {
                    match on_delete {
                        OnDelete::Cascade => {
                            if self.remove_this(referring, &row)? {
                                gone.push((Arc::clone(referring), row));
                            }
                        }
                        OnDelete::SetNull => self.set_null(referring, &row, field)?,
                        OnDelete::Restrict => {
                            let message = format!("is referred to by \"{referring}\"");
                            let issue = Issue { field: field.name().to_owned(), message, code: "ref" };
                            return Err(ValidationError { bucket: name.to_string(), issues: vec![issue] }.into());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes out the record that has the key of this one, and says whether it was there.
    fn remove_this(&mut self, name: &str, row: &Row) -> Result<bool, StoreError> {
        match self.state.any(name)?.1.key_of(row) {
            Some(key) => self.remove_row(name, &key),
            None => Ok(false),
        }
    }

    /// Whether fields of some bucket refer to this one.
    pub(super) fn is_target(&self, target: &str) -> bool {
        self.state.referring(target).next().is_some()
    }

    /// Returns the references to records of this bucket.
    fn targeting(&self, target: &str) -> Result<Targeting, StoreError> {
        let key = self.state.any(target)?.1.key_field().clone();
        let mut fields = Vec::new();
        for (name, bucket) in self.state.referring(target) {
            for (field, rule) in &bucket.definition().fields {
                if let Some(reference) = rule.reference.as_ref().filter(|reference| reference.bucket == target) {
                    fields.push((name.into(), Field::new(field), reference.on_delete));
                }
            }
        }
        Ok(Targeting { key, fields })
    }

    /// The records that refer to this key.
    fn referring(&self, name: &str, field: &Field, key: &Json) -> Result<Vec<Row>, StoreError> {
        let filter = Filter::Test(field.clone(), Test::Equal(Scalar::new(key.clone())));
        let budget = Budget::unlimited();
        let scan = Scan { bucket: self.state.any(name)?.1, filter: &filter, now: self.now, budget: &budget };
        Ok(scan.entries().map(|entry| entry.map(|(_, row)| row.clone())).collect::<Result<_, _>>()?)
    }

    fn set_null(&mut self, name: &str, row: &Row, field: &Field) -> Result<(), StoreError> {
        // It may have been changed since it was found, by another field of its own.
        let Some(row) = self.known(name, row)?.cloned() else { return Ok(()) };
        let mut record = row.to_record();
        record.insert(field.name().to_owned(), Json::Null);
        record.insert(VERSION.to_owned(), json!(version_of(&row).saturating_add(1)));
        record.insert(UPDATED_AT.to_owned(), json!(self.now));
        // The rest of it is as it was. It may not be what its schema says by now, and it may refer to what is gone by another
        // field, which is next: neither keeps what is deleted.
        let definition = self.state.any(name)?.1.definition();
        let mut issues = Vec::new();
        if let Some(rule) = definition.rule(field.name()) {
            check::field(rule, None, field.name(), &mut issues);
        }
        if issues.is_empty() && definition.key == field.name() {
            issues.push(no_key(&definition.key));
        }
        if !issues.is_empty() {
            return Err(ValidationError { bucket: name.to_owned(), issues }.into());
        }
        self.put_row(name, Row::new(&record)?).map(drop)
    }

    /// Whether the references of a record lead somewhere. One that it had before may lead nowhere: what it led to has expired, or
    /// was not kept, and that must not keep the record from being changed.
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
            // A record may refer to itself.
            let is_itself = reference.bucket == name && Some(value) == record.get(&definition.key);
            let own = Value::of_json(value);
            let had = before.and_then(|before| before.get(&Field::new(field)));
            let is_kept = own.zip(had).is_some_and(|(own, had)| own.strictly_equals(&had));
            if !is_itself && !is_kept && self.live(&reference.bucket, value).is_ok_and(|found| found.is_none()) {
                let message = format!("refers to {value}, which is not in \"{}\"", reference.bucket);
                issues.push(Issue { field: field.clone(), message, code: "ref" });
            }
        }
        if issues.is_empty() { Ok(()) } else { Err(ValidationError { bucket: name.to_owned(), issues }.into()) }
    }
}
