//! A bucket at one moment: its records and their indexes, in persistent maps.
//!
//! A clone shares all data and costs a few words, so the writer changes its own clone while readers use the published one.
//! Every record has an *ordinal*, its number in insertion order, which it keeps when it is updated or overwritten. Indexes map
//! values to ordinals, and ordinals map to records.

mod keys;
mod owners;
mod rows;

use std::ops::Bound;
use std::sync::{Arc, LazyLock};

use imbl::OrdSet;
use serde_json::Value as Json;

use self::keys::{KeyHash, Keys};
use self::owners::Owners;
pub(crate) use self::owners::Usage;
use self::rows::Rows;
use crate::query::IndexKey;
use crate::schema::{BucketDefinition, Generated};
use crate::{Change, Field, Row, Value};

/// The number of a record in insertion order.
pub(crate) type Ordinal = u64;

/// The largest generated number. Numbers are 64-bit floats, which cannot represent every larger integer.
pub(crate) const MAX_GENERATED_NUMBER: u64 = (1 << 53) - 1;

/// A bucket at one moment.
#[derive(Debug, Clone)]
pub struct Bucket {
    definition: Arc<BucketDefinition>,
    key: Field,
    rows: Rows,
    keys: Keys,
    indexes: Vec<Index>,
    /// Expiry times of records that expire.
    expiries: OrdSet<(u64, Ordinal)>,
    /// Creation times, in buckets with a maximum size.
    ages: Option<OrdSet<(u64, Ordinal)>>,
    /// Records by owner, in buckets with a quota per owner.
    owners: Option<Owners>,
    /// The largest autoincrement number that was generated or stored. Deleting its record does not lower it.
    counter: u64,
    identity: BucketIdentity,
    next_ordinal: Ordinal,
    /// The memory of all rows.
    bytes: usize,
}

/// The identity of a bucket. It stays the same when records or the definition change. An earlier or later bucket with the same name
/// has another identity.
#[derive(Debug, Clone, Default)]
pub struct BucketIdentity(Arc<()>);

impl PartialEq for BucketIdentity {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for BucketIdentity {}

/// An ordered index over one field or several.
#[derive(Debug, Clone)]
pub(crate) struct Index {
    fields: Arc<[Field]>,
    is_unique: bool,
    /// The key of the fields, and the ordinal: entries with equal keys are in insertion order.
    entries: OrdSet<(IndexKey, Ordinal)>,
}

/// Two records would have the same value in a unique field.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("a record with {field} = {value} already exists")]
#[non_exhaustive]
pub struct NotUnique {
    /// The field.
    pub field: String,
    /// The duplicate value.
    pub value: Json,
}

impl Index {
    fn new(fields: &[String], is_unique: bool) -> Self {
        Self { fields: fields.iter().map(Field::new).collect(), is_unique, entries: OrdSet::new() }
    }

    pub(crate) fn fields(&self) -> &[Field] {
        &self.fields
    }

    pub(crate) fn is_unique(&self) -> bool {
        self.is_unique
    }

    /// Returns whether this is the only field of the index.
    fn is_only_on(&self, name: &str) -> bool {
        matches!(&*self.fields, [only] if only.name() == name)
    }

    /// Returns whether this is the first field of the index.
    fn begins_with(&self, name: &str) -> bool {
        self.fields.first().is_some_and(|first| first.name() == name)
    }

    pub(crate) fn key(&self, row: &Row) -> IndexKey {
        let mut key = IndexKey::new();
        for field in &*self.fields {
            key.push(row.get(field).as_ref());
        }
        key
    }

    /// Returns all ordinals, in the order of the index.
    pub(crate) fn all(&self) -> impl DoubleEndedIterator<Item = Ordinal> {
        self.entries.iter().map(|(_, ordinal)| *ordinal)
    }

    /// Returns the ordinals of the entries after this one.
    pub(crate) fn after<'a>(
        &'a self,
        key: &IndexKey,
        ordinal: Ordinal,
    ) -> impl DoubleEndedIterator<Item = Ordinal> + use<'a> {
        let after = (Bound::Excluded((key.clone(), ordinal)), Bound::Unbounded);
        self.entries.range(after).map(|(_, ordinal)| *ordinal)
    }

    /// Returns the entries with keys from `from` to before `until`, in the order of the index.
    pub(crate) fn entries<'a>(
        &'a self,
        from: &IndexKey,
        until: Option<&IndexKey>,
    ) -> impl DoubleEndedIterator<Item = &'a (IndexKey, Ordinal)> + use<'a> {
        let until = match until {
            Some(until) => Bound::Excluded((until.clone(), 0)),
            None => Bound::Unbounded,
        };
        self.entries.range((Bound::Included((from.clone(), 0)), until))
    }

    /// Returns the ordinals of the entries with keys from `from` to before `until`, in the order of the index.
    pub(crate) fn range<'a>(
        &'a self,
        from: &IndexKey,
        until: Option<&IndexKey>,
    ) -> impl DoubleEndedIterator<Item = Ordinal> + use<'a> {
        self.entries(from, until).map(|(_, ordinal)| *ordinal)
    }
}

impl Bucket {
    /// Creates an empty bucket.
    pub(crate) fn new(definition: Arc<BucketDefinition>) -> Self {
        let mut indexes: Vec<Index> = Vec::new();
        for fields in &definition.indexes {
            let is_unique = matches!(&fields[..], [only] if definition.rule(only).is_some_and(|rule| rule.unique));
            indexes.push(Index::new(fields, is_unique));
        }
        for (name, _) in definition.fields.iter().filter(|(_, rule)| rule.unique) {
            if !definition.indexes.iter().any(|fields| fields[..] == [name.clone()]) {
                indexes.push(Index::new(std::slice::from_ref(name), true));
            }
        }
        // A bucket that is paged in key order needs an index of its keys, even if none is declared.
        if definition.ordered && !indexes.iter().any(|index| index.is_only_on(&definition.key)) {
            indexes.push(Index::new(std::slice::from_ref(&definition.key), false));
        }
        // Reference fields are indexed, so that a deletion finds the referring records without a scan.
        for (name, _) in definition.fields.iter().filter(|(_, rule)| rule.reference.is_some()) {
            if *name != definition.key && !indexes.iter().any(|index| index.begins_with(name)) {
                indexes.push(Index::new(std::slice::from_ref(name), false));
            }
        }
        Self {
            key: Field::new(definition.key.clone()),
            ages: definition.max_size.map(|_| OrdSet::new()),
            definition,
            rows: Rows::default(),
            keys: Keys::with_capacity(0),
            indexes,
            expiries: OrdSet::new(),
            owners: None,
            counter: 0,
            identity: BucketIdentity::default(),
            next_ordinal: 0,
            bytes: 0,
        }
    }

    /// Adds an index of records by owner to an empty bucket.
    pub(crate) fn with_owners(self, owner_of: fn(&Row) -> Arc<str>) -> Self {
        Self { owners: Some(Owners::new(owner_of)), ..self }
    }

    /// Returns the usage of an owner, in a bucket with owners.
    pub(crate) fn usage(&self, owner: &str) -> Usage {
        self.owners.as_ref().map(|owners| owners.usage(owner)).unwrap_or_default()
    }

    /// Returns the oldest record of the owner with the most records.
    pub(crate) fn oldest_by_records(&self) -> Option<Ordinal> {
        self.owners.as_ref()?.oldest_by_records()
    }

    /// Returns the oldest record of the owner with the most bytes.
    pub(crate) fn oldest_by_bytes(&self) -> Option<Ordinal> {
        self.owners.as_ref()?.oldest_by_bytes()
    }

    /// Returns the definition of the bucket.
    pub fn definition(&self) -> &BucketDefinition {
        &self.definition
    }

    pub(crate) fn shared_definition(&self) -> Arc<BucketDefinition> {
        Arc::clone(&self.definition)
    }

    /// Returns the identity of the bucket, which is the same in all states.
    pub fn identity(&self) -> BucketIdentity {
        self.identity.clone()
    }

    /// Returns the number of records, including expired records that are not deleted yet.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether the bucket has no records.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 0
    }

    /// Returns the memory of the records, without indexes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the earliest expiry of a record.
    pub(crate) fn next_expiry(&self) -> Option<u64> {
        self.expiries.get_min().map(|(expiry, _)| *expiry)
    }

    /// Returns the record with this key, expired or not.
    pub fn get(&self, key: &Value<'_>) -> Option<&Row> {
        self.find(&IndexKey::of(Some(key))).map(|(_, row)| row)
    }

    /// Returns the record with this key, if it exists and has not expired. `now` is called only if the bucket has records that expire.
    pub fn record(&self, key: &Json, now: impl FnOnce() -> u64) -> Option<&Row> {
        let row = Value::of_json(key).and_then(|key| self.get(&key));
        row.filter(|row| !self.has_expiring_records() || self.is_live(row, now()))
    }

    /// Returns all records in insertion order, expired ones included.
    pub fn rows(&self) -> impl DoubleEndedIterator<Item = &Row> {
        self.rows.iter().map(|(_, row)| row)
    }

    /// Returns whether a record of this bucket has not expired at that time.
    pub fn is_live(&self, row: &Row, now: u64) -> bool {
        self.expiries.is_empty() || integer(row, &EXPIRES_AT).is_none_or(|expiry| expiry > now)
    }

    /// Returns the records that have expired at that time, in the order of expiry.
    pub fn expired(&self, now: u64) -> impl Iterator<Item = &Row> {
        self.expiries.range(..=(now, Ordinal::MAX)).filter_map(|(_, ordinal)| self.rows.get(*ordinal))
    }

    /// Like [`expired`](Self::expired), after the record with this expiry and ordinal.
    pub(crate) fn expired_after(
        &self,
        after: Option<(u64, Ordinal)>,
        now: u64,
    ) -> impl Iterator<Item = ((u64, Ordinal), &Row)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        // `range` panics if its end is before its start.
        let is_any = after.is_none_or(|after| after < (now, Ordinal::MAX));
        let range = is_any.then(|| self.expiries.range((from, Bound::Included((now, Ordinal::MAX)))));
        range.into_iter().flatten().filter_map(|entry| Some((*entry, self.rows.get(entry.1)?)))
    }

    /// Returns the record with the earliest creation time, in a bucket with a maximum size.
    pub(crate) fn oldest(&self) -> Option<&Row> {
        self.rows.get(self.ages.as_ref()?.get_min()?.1)
    }

    /// Returns the key of a record.
    pub fn key_of<'a>(&self, row: &'a Row) -> Option<Value<'a>> {
        row.get(&self.key)
    }

    pub(crate) fn key_field(&self) -> &Field {
        &self.key
    }

    /// Generates the next autoincrement number, which no record has. Returns `None` if the counter has reached the largest number.
    pub(crate) fn next_number(&mut self) -> Option<u64> {
        self.counter = self.counter.checked_add(1).filter(|next| *next <= MAX_GENERATED_NUMBER)?;
        Some(self.counter)
    }

    /// Returns the largest autoincrement number that was generated or stored.
    pub(crate) fn counter(&self) -> u64 {
        self.counter
    }

    /// Resets the counter when the write that raised it is undone.
    pub(crate) fn reset_counter(&mut self, counter: u64) {
        self.counter = counter;
    }

    pub(crate) fn entries(&self) -> impl DoubleEndedIterator<Item = (Ordinal, &Row)> {
        self.rows.iter()
    }

    /// Returns the records after this ordinal, in insertion order.
    pub(crate) fn rows_after(&self, ordinal: Ordinal) -> impl DoubleEndedIterator<Item = &Row> {
        self.rows.range(ordinal.saturating_add(1)..Ordinal::MAX).map(|(_, row)| row)
    }

    /// Returns the record with this key, and its ordinal.
    pub(crate) fn find(&self, key: &IndexKey) -> Option<(Ordinal, &Row)> {
        self.find_hashed(key, KeyHash::of(key))
    }

    fn find_hashed(&self, key: &IndexKey, hash: KeyHash) -> Option<(Ordinal, &Row)> {
        let mut candidates = self.keys.find(hash).filter_map(|ordinal| Some((ordinal, self.rows.get(ordinal)?)));
        candidates.find(|(_, row)| IndexKey::of(row.get(&self.key).as_ref()) == *key)
    }

    /// Returns whether the bucket has records that expire.
    pub(crate) fn has_expiring_records(&self) -> bool {
        !self.expiries.is_empty()
    }

    /// Returns the index of the keys, if records are paged in key order.
    pub(crate) fn key_order(&self) -> Option<&Index> {
        self.indexes.iter().find(|index| self.definition.ordered && index.is_only_on(self.key.name()))
    }

    pub(crate) fn row(&self, ordinal: Ordinal) -> Option<&Row> {
        self.rows.get(ordinal)
    }

    /// Returns the records whose field has this value, in the order of an index. The field must be a reference field, because only
    /// reference fields are certain to have an index.
    pub(crate) fn referring(&self, field: &Field, value: &Value<'_>) -> impl Iterator<Item = (Ordinal, &Row)> {
        let key = IndexKey::of(Some(value));
        let is_key = *field == self.key;
        let by_key = if is_key { self.find(&key) } else { None };
        let indexes = self.indexes.iter().filter(|index| !is_key && index.begins_with(field.name()));
        let index = indexes.min_by_key(|index| index.fields.len());
        let until = key.after_prefix();
        let ordinals = index.into_iter().flat_map(move |index| index.range(&key, until.as_ref()));
        by_key.into_iter().chain(ordinals.filter_map(|ordinal| Some((ordinal, self.row(ordinal)?))))
    }

    pub(crate) fn indexes(&self) -> &[Index] {
        &self.indexes
    }

    /// Like [`put_row`](Self::put_row), without the ordinal.
    #[cfg(test)]
    pub(crate) fn put(&mut self, row: Row) -> Result<Option<Row>, NotUnique> {
        self.put_row(row).map(|(_, before)| before)
    }

    /// Stores a record: replaces the record with the same key, or appends the record. Returns its ordinal and the replaced record.
    pub(crate) fn put_row(&mut self, row: Row) -> Result<(Ordinal, Option<Row>), NotUnique> {
        let key = IndexKey::of(row.get(&self.key).as_ref());
        let hash = KeyHash::of(&key);
        let (known, before) = self.find_hashed(&key, hash).map(|(ordinal, before)| (ordinal, before.clone())).unzip();
        self.check_unique(&row, known)?;
        let ordinal = known.unwrap_or(self.next_ordinal);
        for index in &mut self.indexes {
            let entry = (index.key(&row), ordinal);
            if let Some(before) = &before {
                let outdated = (index.key(before), ordinal);
                if outdated == entry {
                    continue;
                }
                index.entries.remove(&outdated);
            }
            index.entries.insert(entry);
        }
        if let Some(before) = &before {
            self.unindex_metadata(before, ordinal);
        }
        self.index_metadata(&row, ordinal);
        self.bytes = self.bytes + row.size() - before.as_ref().map_or(0, Row::size);
        self.rows.insert(ordinal, row);
        if known.is_none() {
            self.add_key(hash, ordinal);
            self.next_ordinal += 1;
        }
        Ok((ordinal, before))
    }

    /// Removes all records.
    pub(crate) fn clear(&mut self) {
        let empty = Self::new(Arc::clone(&self.definition));
        let owners = self.owners.as_ref().map(Owners::emptied);
        *self =
            Self { owners, counter: self.counter, identity: self.identity(), next_ordinal: self.next_ordinal, ..empty };
    }

    /// Returns a bucket with the same records and another definition.
    pub(crate) fn redefine(&self, definition: Arc<BucketDefinition>) -> Result<Self, NotUnique> {
        let mut bucket = Self { counter: self.counter, identity: self.identity(), ..Self::new(definition) };
        for (ordinal, row) in self.entries() {
            bucket.next_ordinal = ordinal;
            bucket.put_row(row.clone())?;
        }
        bucket.next_ordinal = self.next_ordinal;
        Ok(bucket)
    }

    /// Like [`remove_row`](Self::remove_row), without the ordinal.
    #[cfg(test)]
    pub(crate) fn remove(&mut self, key: &Value<'_>) -> Option<Row> {
        self.remove_row(key).map(|(_, row)| row)
    }

    /// Removes the record with this key. Returns the record and its ordinal.
    pub(crate) fn remove_row(&mut self, key: &Value<'_>) -> Option<(Ordinal, Row)> {
        self.remove_key(&IndexKey::of(Some(key)))
    }

    pub(crate) fn remove_key(&mut self, key: &IndexKey) -> Option<(Ordinal, Row)> {
        let hash = KeyHash::of(key);
        let (ordinal, _) = self.find_hashed(key, hash)?;
        let row = self.rows.remove(ordinal)?;
        self.keys.remove(hash, ordinal);
        if self.keys.is_sparse(self.rows.len()) {
            self.keys = Keys::rebuilt(self.rows.len(), self.key_entries());
        }
        for index in &mut self.indexes {
            index.entries.remove(&(index.key(&row), ordinal));
        }
        self.unindex_metadata(&row, ordinal);
        self.bytes -= row.size();
        Some((ordinal, row))
    }

    /// Undoes a change. All later changes must have been undone.
    pub(crate) fn revert(&mut self, change: Change) {
        let Change { ordinal, old, new, .. } = change;
        match (old, new) {
            (None, Some(new)) => {
                let key = IndexKey::of(new.get(&self.key).as_ref());
                self.remove_key(&key);
                self.next_ordinal = ordinal;
            }
            (Some(old), new) => {
                let next = self.next_ordinal;
                if new.is_none() {
                    self.next_ordinal = ordinal;
                }
                let reverted = self.put_row(old);
                debug_assert!(
                    reverted.is_ok_and(|(reverted, _)| reverted == ordinal),
                    "a restored record has its ordinal"
                );
                self.next_ordinal = next;
            }
            (None, None) => {}
        }
    }

    /// Adds the key of a record that is already stored.
    fn add_key(&mut self, hash: KeyHash, ordinal: Ordinal) {
        if !self.keys.insert(hash, ordinal) {
            self.keys = self.keys.grown(self.rows.len(), self.key_entries());
            let is_inserted = self.keys.insert(hash, ordinal);
            debug_assert!(is_inserted, "the table has grown");
        }
    }

    /// Returns the key hashes and ordinals of all records.
    fn key_entries(&self) -> impl Iterator<Item = (KeyHash, Ordinal)> {
        self.rows.iter().map(|(ordinal, row)| (KeyHash::of(&IndexKey::of(row.get(&self.key).as_ref())), ordinal))
    }

    /// Indexes the times and the owner of a record, and raises the counter to its autoincrement numbers.
    fn index_metadata(&mut self, row: &Row, ordinal: Ordinal) {
        if let Some(expiry) = integer(row, &EXPIRES_AT) {
            self.expiries.insert((expiry, ordinal));
        }
        if let Some(ages) = &mut self.ages {
            ages.insert((integer(row, &CREATED_AT).unwrap_or(0), ordinal));
        }
        if let Some(owners) = &mut self.owners {
            owners.add(row, ordinal);
        }
        let counted =
            self.definition.fields.iter().filter(|(_, rule)| rule.generated == Some(Generated::Autoincrement));
        let numbers = counted.filter_map(|(name, _)| integer(row, &Field::new(name)));
        // Larger numbers are never generated, so they cannot collide with a generated one.
        for number in numbers.filter(|number| *number <= MAX_GENERATED_NUMBER) {
            self.counter = self.counter.max(number);
        }
    }

    /// Undoes [`index_metadata`](Self::index_metadata), except for the counter.
    fn unindex_metadata(&mut self, row: &Row, ordinal: Ordinal) {
        if let Some(expiry) = integer(row, &EXPIRES_AT) {
            self.expiries.remove(&(expiry, ordinal));
        }
        if let Some(ages) = &mut self.ages {
            ages.remove(&(integer(row, &CREATED_AT).unwrap_or(0), ordinal));
        }
        if let Some(owners) = &mut self.owners {
            owners.remove(row, ordinal);
        }
    }

    /// Fails if another record has the same value in a unique field. Null and absent values never collide.
    fn check_unique(&self, row: &Row, own: Option<Ordinal>) -> Result<(), NotUnique> {
        for index in self.indexes.iter().filter(|index| index.is_unique) {
            let [field] = index.fields() else { continue };
            let value = row.get(field);
            if matches!(value, None | Some(Value::Null | Value::Array(_) | Value::Object(_))) {
                continue;
            }
            let key = IndexKey::of(value.as_ref());
            if index.range(&key, key.after_prefix().as_ref()).any(|other| Some(other) != own) {
                let value = row.text_of(field).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
                return Err(NotUnique { field: field.name().to_owned(), value });
            }
        }
        Ok(())
    }
}

static EXPIRES_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_expiresAt"));
static CREATED_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_createdAt"));

/// Returns the value of a field as an unsigned integer.
fn integer(row: &Row, field: &Field) -> Option<u64> {
    let Some(Value::Number(number)) = row.get(field) else { return None };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of a float saturates")]
    let whole = number as u64;
    Some(whole)
}

/// Counts the records that this thread reads from buckets.
#[cfg(test)]
pub(crate) mod examined {
    use std::cell::Cell;

    thread_local! {
        static EXAMINED: Cell<usize> = const { Cell::new(0) };
    }

    pub(crate) fn count() {
        EXAMINED.set(EXAMINED.get() + 1);
    }

    pub(crate) fn total() -> usize {
        EXAMINED.get()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn bucket() -> Bucket {
        let definition = json!({
            "key": "id",
            "schema": {
                "id": {"type": "number"},
                "name": {"type": "string", "unique": true},
                "group": {"type": "number"},
            },
            "indexes": ["group", ["group", "name"]],
        });
        Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()))
    }

    fn row(json: &Json) -> Row {
        Row::new(json.as_object().unwrap()).unwrap()
    }

    #[test]
    fn replaced_record_keeps_its_position() {
        let mut bucket = bucket();
        for id in [3, 1, 2] {
            assert_eq!(bucket.put(row(&json!({"id": id, "name": id.to_string()}))), Ok(None));
        }
        let before = bucket.clone();
        let replaced = bucket.put(row(&json!({"id": 1, "name": "one"}))).unwrap().unwrap();
        assert_eq!(replaced.text(), r#"{"id":1,"name":"1"}"#);
        let ids = |bucket: &Bucket| bucket.rows().map(|row| row.text().to_owned()).collect::<Vec<_>>();
        assert_eq!(ids(&bucket)[1], r#"{"id":1,"name":"one"}"#);
        assert_eq!(ids(&before)[1], r#"{"id":1,"name":"1"}"#, "the clone is unchanged");
        assert_eq!(bucket.get(&Value::String("1".into())), None, "a string does not equal a number");
        assert!(bucket.remove(&Value::Number(1.0)).is_some());
        assert_eq!((bucket.len(), bucket.remove(&Value::Number(1.0))), (2, None));
        // The unique name can be used again.
        assert_eq!(bucket.put(row(&json!({"id": 9, "name": "one"}))), Ok(None));
    }

    #[test]
    fn duplicate_unique_value_is_rejected_unless_null() {
        let mut bucket = bucket();
        bucket.put(row(&json!({"id": 1, "name": "tide"}))).unwrap();
        let refused = bucket.put(row(&json!({"id": 2, "name": "tide"}))).unwrap_err();
        assert_eq!(refused, NotUnique { field: "name".to_owned(), value: json!("tide") });
        assert_eq!(bucket.len(), 1, "the rejected record is not stored");
        for id in 3..6 {
            bucket.put(row(&json!({"id": id, "name": null}))).unwrap();
            bucket.put(row(&json!({"id": id + 10}))).unwrap();
        }
        // A record may keep its own unique value.
        bucket.put(row(&json!({"id": 1, "name": "tide", "group": 1}))).unwrap();
    }

    #[test]
    fn reference_fields_are_indexed() {
        let number = json!({"type": "number"});
        let reference = json!({"type": "number", "ref": "other"});
        let definition = json!({
            "key": "id",
            "schema": {"id": reference, "a": reference, "b": reference, "c": number},
            "indexes": [["b", "c"]],
        });
        let bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        let firsts: Vec<&str> = bucket.indexes().iter().map(|index| index.fields()[0].name()).collect();
        assert_eq!(firsts, ["b", "a"], "the key needs no index");
        assert_eq!(bucket.definition().index_count(), 1, "internal indexes are not counted");
    }

    proptest! {
        /// After any insertions and removals, each index has exactly one entry for each record.
        #[test]
        fn indexes_agree_with_rows(steps in vec((0..8_u8, prop::option::of((0..4_u8, prop::option::of(0..3_u8)))), 0..60)) {
            let mut bucket = bucket();
            for (id, put) in steps {
                match put {
                    Some((name, group)) => {
                        let _ = bucket.put(row(&json!({"id": id, "name": format!("n{name}"), "group": group})));
                    }
                    None => {
                        bucket.remove(&Value::Number(f64::from(id)));
                    }
                }
            }
            for index in bucket.indexes() {
                let expected: OrdSet<_> = bucket.entries().map(|(ordinal, row)| (index.key(row), ordinal)).collect();
                prop_assert_eq!(&index.entries, &expected);
            }
            for row in bucket.rows() {
                prop_assert_eq!(bucket.get(&bucket.key_of(row).unwrap()), Some(row));
            }
        }
    }
}
