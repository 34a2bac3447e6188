//! The index of live queries: finds the queries that a change can affect.
//!
//! A query is registered under the entries that [`entry`] chose for its filter: a value or an interval of a field. A change is
//! looked up by the old row and by the new row. The queries that are found are then checked with the full filter. A query without a
//! usable condition is found for every change of its bucket.

mod entry;
mod interval;
mod postings;

use std::collections::HashMap;

use tidewire_store::{Field, Filter, Row, Value};

pub(crate) use self::entry::IndexEntry;
use self::entry::Text;
use self::interval::Intervals;
use self::postings::Postings;
pub(crate) use self::postings::Slot;
use crate::bits::{ScalarKey, ordered_bits};

/// The index of the queries of one bucket.
#[derive(Debug, Default)]
pub(crate) struct Index {
    fields: HashMap<Box<str>, FieldIndex>,
    /// Queries without a usable condition.
    unindexed: Option<Postings>,
    /// Reused buffer for the key of a lookup.
    key: Vec<u8>,
}

#[derive(Debug)]
struct FieldIndex {
    field: Field,
    equal: HashMap<ScalarKey, Postings>,
    numbers: Intervals<u64>,
    texts: Intervals<Text>,
}

impl Index {
    /// Limit of the indexed fields that are each read from a row. If there are more, each member of the row is looked up in the index
    /// instead, because rows rarely have as many members.
    const MAX_FIELD_SCAN: usize = 16;
    /// Limit of the overlap that is counted.
    const MAX_OVERLAP: usize = 1024;

    pub(crate) fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.unindexed.is_none()
    }

    /// Returns the number of queries that are checked for every change.
    pub(crate) fn unindexed(&self) -> usize {
        self.unindexed.as_ref().map_or(0, Postings::len)
    }

    /// Adds a query. Returns its entries, which are needed to remove it, or `None` if it is unindexed.
    pub(crate) fn insert(&mut self, filter: &Filter, slot: Slot) -> Option<Box<[IndexEntry]>> {
        let chosen = entry::choose(filter, &|entry| self.overlap(entry));
        let Some(entries) = chosen else {
            add(&mut self.unindexed, slot);
            return None;
        };
        for entry in &entries {
            match entry {
                IndexEntry::Equal(field, key) => {
                    let equal = &mut self.field(field).equal;
                    equal.entry(key.clone()).or_insert(Postings::One(slot)).insert(slot);
                }
                IndexEntry::Numbers(field, from, until) => self.field(field).numbers.insert(*from, *until, slot),
                IndexEntry::Texts(field, from, until) => {
                    self.field(field).texts.insert(from.clone(), until.clone(), slot);
                }
            }
        }
        Some(entries.into())
    }

    /// Removes a query and its entries.
    pub(crate) fn remove(&mut self, entries: Option<&[IndexEntry]>, slot: Slot) {
        let Some(entries) = entries else {
            if self.unindexed.as_mut().is_some_and(|unindexed| unindexed.remove(slot)) {
                self.unindexed = None;
            }
            return;
        };
        for entry in entries {
            let (IndexEntry::Equal(field, _) | IndexEntry::Numbers(field, ..) | IndexEntry::Texts(field, ..)) = entry;
            let Some(index) = self.fields.get_mut(field.name()) else { continue };
            match entry {
                IndexEntry::Equal(_, key) => {
                    if index.equal.get_mut(key).is_some_and(|queries| queries.remove(slot)) {
                        index.equal.remove(key);
                    }
                }
                IndexEntry::Numbers(_, from, until) => index.numbers.remove(from, until.as_ref(), slot),
                IndexEntry::Texts(_, from, until) => index.texts.remove(from, until.as_ref(), slot),
            }
            if index.is_empty() {
                self.fields.remove(field.name());
            }
        }
    }

    /// Calls `found` for each query that a change can affect, possibly more than once.
    pub(crate) fn for_each_candidate(&mut self, old: Option<&Row>, new: Option<&Row>, mut found: impl FnMut(Slot)) {
        if let Some(unindexed) = &self.unindexed {
            unindexed.for_each(&mut found);
        }
        if self.fields.len() <= Self::MAX_FIELD_SCAN {
            for index in self.fields.values() {
                let was = old.and_then(|row| row.get(&index.field));
                let is = new.and_then(|row| row.get(&index.field));
                if let Some(was) = &was {
                    index.search(was, &mut self.key, &mut found);
                }
                if let Some(is) = is.as_ref().filter(|is| was.as_ref() != Some(is)) {
                    index.search(is, &mut self.key, &mut found);
                }
            }
            return;
        }
        for row in [old, new].into_iter().flatten() {
            for (raw_name, _) in row.members() {
                let index = match unescape(raw_name) {
                    None => self.fields.get(raw_name),
                    Some(name) => self.fields.get(&*name),
                };
                if let Some((index, value)) = index.and_then(|index| Some((index, row.get(&index.field)?))) {
                    index.search(&value, &mut self.key, &mut found);
                }
            }
        }
    }

    fn field(&mut self, field: &Field) -> &mut FieldIndex {
        self.fields.entry(field.name().into()).or_insert_with(|| FieldIndex {
            field: field.clone(),
            equal: HashMap::new(),
            numbers: Intervals::default(),
            texts: Intervals::default(),
        })
    }

    /// Returns the number of queries that share an entry, up to [`MAX_OVERLAP`](Self::MAX_OVERLAP). For an interval, these are the
    /// queries whose interval contains its start.
    fn overlap(&self, entry: &IndexEntry) -> usize {
        let (IndexEntry::Equal(field, _) | IndexEntry::Numbers(field, ..) | IndexEntry::Texts(field, ..)) = entry;
        let Some(index) = self.fields.get(field.name()) else { return 0 };
        match entry {
            IndexEntry::Equal(_, key) => index.equal.get(key).map_or(0, Postings::len).min(Self::MAX_OVERLAP),
            IndexEntry::Numbers(_, from, _) => index.numbers.count(from, Self::MAX_OVERLAP),
            IndexEntry::Texts(_, from, _) => index.texts.count(&**from, Self::MAX_OVERLAP),
        }
    }
}

impl FieldIndex {
    fn is_empty(&self) -> bool {
        self.equal.is_empty() && self.numbers.is_empty() && self.texts.is_empty()
    }

    fn search(&self, value: &Value<'_>, key: &mut Vec<u8>, found: &mut impl FnMut(Slot)) {
        if !self.equal.is_empty()
            && ScalarKey::write(value, key)
            && let Some(queries) = self.equal.get(&key[..])
        {
            queries.for_each(found);
        }
        match value {
            Value::Number(number) => self.numbers.for_each_containing(&ordered_bits(*number), found),
            Value::String(text) => self.texts.for_each_containing(text.as_bytes(), found),
            _ => {}
        }
    }
}

fn add(queries: &mut Option<Postings>, slot: Slot) {
    match queries {
        Some(queries) => queries.insert(slot),
        None => *queries = Some(Postings::One(slot)),
    }
}

/// Unescapes the name of a member. Returns `None` if it has no escapes.
fn unescape(raw_name: &str) -> Option<String> {
    // A row is valid JSON, so parsing does not fail.
    raw_name.contains('\\').then(|| serde_json::from_str(&format!("\"{raw_name}\"")).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value as Json, json};

    use super::*;

    fn row(json: &Json) -> Row {
        Row::new(json.as_object().unwrap()).unwrap()
    }

    fn found(index: &mut Index, old: Option<&Json>, new: Option<&Json>) -> BTreeSet<Slot> {
        let mut slots = BTreeSet::new();
        index.for_each_candidate(old.map(row).as_ref(), new.map(row).as_ref(), |slot| _ = slots.insert(slot));
        slots
    }

    /// With few and with many indexed fields, which use different lookups.
    #[test]
    fn change_finds_queries_of_old_and_new_row() {
        for more in [0, 100] {
            let mut index = Index::default();
            let filters = [
                json!({"a": 1}),
                json!({"a": 2}),
                json!({"a": null}),
                json!({"n": {"$between": [10, 20]}}),
                json!({"s": {"$startsWith": "ti"}}),
                json!({"a\"b": "x"}),
                json!({"s": {"$contains": "id"}}),
                json!({"$or": [{"a": 1}, {"n": {"$gt": 15}}]}),
            ];
            let filters: Vec<Filter> = filters
                .into_iter()
                .chain((0..more).map(|number| json!({format!("f{number}"): 1})))
                .map(|filter| Filter::parse(&filter).unwrap())
                .collect();
            let entries: Vec<_> = (0..).zip(&filters).map(|(slot, filter)| index.insert(filter, slot)).collect();
            for (old, new, expected) in [
                (None, Some(json!({"a": 1})), vec![0, 6, 7]),
                (Some(json!({"a": 1})), Some(json!({"a": 2})), vec![0, 1, 6, 7]),
                (Some(json!({"a": null, "s": "tide"})), None, vec![2, 4, 6]),
                (None, Some(json!({"b": 1})), vec![6]),
                (Some(json!({"n": 20})), Some(json!({"n": 21, "a\"b": "x"})), vec![3, 5, 6, 7]),
            ] {
                let slots = found(&mut index, old.as_ref(), new.as_ref());
                assert_eq!(slots, BTreeSet::from_iter(expected), "{old:?} {new:?}");
            }
            assert_eq!(index.unindexed(), 1);
            for (slot, entries) in (0..).zip(entries) {
                assert!(!index.is_empty());
                index.remove(entries.as_deref(), slot);
            }
            assert!(index.is_empty());
        }
    }
}
