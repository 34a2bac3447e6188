//! Grouped rows, and the aggregates of each group.
//!
//! In the result, the key of a group is that of its first row in insertion order, and groups are in the order of their first rows. So
//! the rows of each group are retained, and the groups are indexed by their first rows.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value as Json;
use tidewire_store::query::IndexKey;
use tidewire_store::{Aggregate, Field, Row};

use super::tally::Tally;
use crate::net_change::NetChange;
use crate::query::ResultTooLarge;
use crate::rows::{Projection, is_same};

/// The groups of an aggregate query.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The fields by which rows are grouped.
    key_fields: Arc<Projection>,
    by_key: HashMap<IndexKey, Group>,
    /// The keys of the groups, by the ordinals of their first rows.
    order: BTreeMap<u64, IndexKey>,
    /// The number of rows of all groups.
    rows: usize,
    /// The memory of the tallies of all groups.
    tally_bytes: usize,
}

/// The result, to be encoded by another thread.
#[derive(Debug, Clone)]
pub(crate) struct GroupsCopy {
    key_fields: Arc<Projection>,
    /// The first row and the aggregate of each group.
    groups: Vec<(Row, Option<Json>)>,
}

#[derive(Debug)]
struct Group {
    /// The rows in insertion order, never empty.
    rows: BTreeMap<u64, Row>,
    tally: Tally,
}

/// The entry of a group in the result.
#[derive(Debug)]
struct ResultGroup {
    /// The ordinal of the first row.
    first: u64,
    row: Row,
    value: Option<Json>,
}

impl Groups {
    pub(crate) fn new(aggregate: &Aggregate) -> Self {
        Self {
            key_fields: Arc::new(Projection::new(Some(&aggregate.group_by))),
            by_key: HashMap::new(),
            order: BTreeMap::new(),
            rows: 0,
            tally_bytes: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows
    }

    /// Returns the approximate memory of the groups and their entries.
    pub(crate) fn bytes(&self) -> usize {
        const GROUP_BYTES: usize = size_of::<Group>() + 3 * size_of::<IndexKey>() + 32;
        // An entry is an ordinal and a row, and the nodes of the tree are about two thirds full.
        const ENTRY_BYTES: usize = 36;
        self.by_key.len() * GROUP_BYTES + self.rows * ENTRY_BYTES + self.tally_bytes
    }

    pub(crate) fn add(&mut self, aggregate: &Aggregate, row: &Row, ordinal: u64) {
        let key = aggregate.group_of(row);
        let group = self.by_key.entry(key.clone()).or_insert_with(|| {
            self.order.insert(ordinal, key.clone());
            Group { rows: BTreeMap::new(), tally: Tally::new(aggregate.function) }
        });
        if let Some((first, _)) = group.rows.first_key_value()
            && ordinal < *first
        {
            self.order.remove(first);
            self.order.insert(ordinal, key);
        }
        let before = group.tally.bytes();
        match group.rows.insert(ordinal, row.clone()) {
            Some(known) => group.tally.remove(&known, aggregate.field.as_ref()),
            None => self.rows += 1,
        }
        group.tally.add(row, aggregate.field.as_ref());
        self.tally_bytes = self.tally_bytes + group.tally.bytes() - before;
    }

    fn remove(&mut self, aggregate: &Aggregate, row: &Row, ordinal: u64) {
        let key = aggregate.group_of(row);
        let Some(group) = self.by_key.get_mut(&key) else { return };
        let was_first = group.rows.first_key_value().is_some_and(|(first, _)| *first == ordinal);
        let Some(known) = group.rows.remove(&ordinal) else { return };
        let before = group.tally.bytes();
        group.tally.remove(&known, aggregate.field.as_ref());
        self.tally_bytes = self.tally_bytes + group.tally.bytes() - before;
        self.rows -= 1;
        if !was_first {
            return;
        }
        self.order.remove(&ordinal);
        match group.rows.first_key_value() {
            Some((first, _)) => _ = self.order.insert(*first, key),
            None => _ = self.by_key.remove(&key),
        }
    }

    /// Applies net changes. Returns whether the result has changed.
    pub(crate) fn apply(&mut self, aggregate: &Aggregate, changes: &[NetChange<&Row>]) -> bool {
        let mut before: HashMap<IndexKey, Option<ResultGroup>> = HashMap::new();
        for row in changes.iter().flat_map(|change| [change.old, change.new]).flatten() {
            let key = aggregate.group_of(row);
            if let Entry::Vacant(vacant) = before.entry(key) {
                let group = self.result_group(aggregate, vacant.key());
                vacant.insert(group);
            }
        }
        // All removals come first, so that a row is never in two groups.
        for change in changes {
            if let Some(row) = change.old {
                self.remove(aggregate, row, change.ordinal);
            }
        }
        for change in changes {
            if let Some(row) = change.new {
                self.add(aggregate, row, change.ordinal);
            }
        }
        let mut moved = Vec::new();
        for (key, was) in &before {
            match (was, self.result_group(aggregate, key)) {
                (None, None) => {}
                (Some(was), Some(is)) if was.value == is.value && is_key_same(aggregate, &was.row, &is.row) => {
                    if was.first != is.first {
                        moved.push((was.first, is.first));
                    }
                }
                _ => return true,
            }
        }
        self.has_order_changed(moved)
    }

    /// Returns whether the order of groups has changed, given the old and new first rows of the groups that moved.
    fn has_order_changed(&self, mut moved: Vec<(u64, u64)>) -> bool {
        let new_firsts: HashSet<u64> = moved.iter().map(|(_, is)| *is).collect();
        let has_passed = |(was, is): &(u64, u64)| {
            self.order.range(*was.min(is)..=*was.max(is)).any(|(first, _)| !new_firsts.contains(first))
        };
        moved.sort_unstable();
        moved.iter().any(has_passed) || !moved.is_sorted_by_key(|(_, is)| *is)
    }

    fn result_group(&self, aggregate: &Aggregate, key: &IndexKey) -> Option<ResultGroup> {
        let group = self.by_key.get(key)?;
        let (first, row) = group.rows.first_key_value()?;
        Some(ResultGroup { first: *first, row: row.clone(), value: group.tally.result(aggregate.function) })
    }

    /// Returns the groups in order, each with its first row and its aggregate.
    fn result_groups(&self, aggregate: &Aggregate) -> impl Iterator<Item = (&Row, Option<Json>)> {
        let function = aggregate.function;
        self.order.values().filter_map(move |key| {
            let group = self.by_key.get(key)?;
            let (_, row) = group.rows.first_key_value()?;
            Some((row, group.tally.result(function)))
        })
    }

    /// Encodes the result. Fails if it is larger than `max_bytes`.
    pub(crate) fn encode(&self, aggregate: &Aggregate, max_bytes: usize) -> Result<Bytes, ResultTooLarge> {
        encode(&self.key_fields, self.result_groups(aggregate), max_bytes)
    }

    pub(crate) fn copy(&self, aggregate: &Aggregate) -> GroupsCopy {
        let groups = self.result_groups(aggregate).map(|(row, value)| (row.clone(), value)).collect();
        GroupsCopy { key_fields: Arc::clone(&self.key_fields), groups }
    }
}

impl GroupsCopy {
    pub(crate) fn encode(self, max_bytes: usize) -> Result<Bytes, ResultTooLarge> {
        encode(&self.key_fields, self.groups.iter().map(|(row, value)| (row, value.clone())), max_bytes)
    }
}

fn encode<'a>(
    key_fields: &Projection,
    groups: impl Iterator<Item = (&'a Row, Option<Json>)>,
    max_bytes: usize,
) -> Result<Bytes, ResultTooLarge> {
    let mut text = vec![b'['];
    for (index, (row, value)) in groups.enumerate() {
        text.extend(if index > 0 { &b",{\"key\":"[..] } else { b"{\"key\":" });
        key_fields.write_all(row, &mut text);
        text.extend(format!(",\"value\":{}}}", value.unwrap_or_default()).as_bytes());
        // One byte is left for the closing bracket.
        if text.len() >= max_bytes {
            return Err(ResultTooLarge);
        }
    }
    text.push(b']');
    text.shrink_to_fit();
    Ok(text.into())
}

/// Returns whether two rows of a group display the same group key: equal numbers can have different texts, and an absent field is
/// displayed as null.
fn is_key_same(aggregate: &Aggregate, one: &Row, two: &Row) -> bool {
    fn text<'a>(row: &'a Row, field: &Field) -> &'a str {
        row.text_of(field).unwrap_or("null")
    }
    aggregate.group_by.iter().all(|field| is_same(text(one, field), text(two, field)))
}
