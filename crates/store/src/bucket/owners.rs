//! An index of records by owner: the number, the memory and the oldest of the records of each owner.
//!
//! Quotas and evictions use it instead of scanning records. Each operation takes logarithmic time. All maps are persistent, so a
//! clone shares them. The index is rebuilt when a store is opened.

use std::cmp::Reverse;
use std::sync::Arc;

use imbl::{OrdMap, OrdSet};

use super::Ordinal;
use crate::Row;

/// The records of a bucket by owner.
#[derive(Debug, Clone)]
pub(super) struct Owners {
    owner_of: fn(&Row) -> Arc<str>,
    records: OrdSet<(Arc<str>, Ordinal)>,
    usage: OrdMap<Arc<str>, Usage>,
    /// The oldest record of each owner, ordered by the number of records and by the bytes of the owner. Of two owners with equal
    /// usage, the owner with the older record sorts last.
    by_records: OrdSet<(usize, Reverse<Ordinal>)>,
    by_bytes: OrdSet<(usize, Reverse<Ordinal>)>,
}

/// The number and the memory of the records of an owner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
    /// The oldest record. `None` if the owner has no records.
    pub(crate) oldest: Option<Ordinal>,
}

impl Owners {
    pub(super) fn new(owner_of: fn(&Row) -> Arc<str>) -> Self {
        Self {
            owner_of,
            records: OrdSet::new(),
            usage: OrdMap::new(),
            by_records: OrdSet::new(),
            by_bytes: OrdSet::new(),
        }
    }

    /// Returns an empty index with the same owner function.
    pub(super) fn emptied(&self) -> Self {
        Self::new(self.owner_of)
    }

    pub(super) fn add(&mut self, row: &Row, ordinal: Ordinal) {
        let owner = (self.owner_of)(row);
        self.records.insert((Arc::clone(&owner), ordinal));
        let Usage { records, bytes, .. } = self.usage(&owner);
        self.set(owner, records + 1, bytes + row.size());
    }

    pub(super) fn remove(&mut self, row: &Row, ordinal: Ordinal) {
        let owner = (self.owner_of)(row);
        if self.records.remove(&(Arc::clone(&owner), ordinal)).is_some() {
            let Usage { records, bytes, .. } = self.usage(&owner);
            self.set(owner, records - 1, bytes - row.size());
        }
    }

    pub(super) fn usage(&self, owner: &str) -> Usage {
        self.usage.get(owner).copied().unwrap_or_default()
    }

    /// Returns the oldest record of the owner with the most records.
    pub(super) fn oldest_by_records(&self) -> Option<Ordinal> {
        self.by_records.get_max().map(|(_, oldest)| oldest.0)
    }

    /// Returns the oldest record of the owner with the most bytes.
    pub(super) fn oldest_by_bytes(&self) -> Option<Ordinal> {
        self.by_bytes.get_max().map(|(_, oldest)| oldest.0)
    }

    fn set(&mut self, owner: Arc<str>, records: usize, bytes: usize) {
        let before = self.usage(&owner);
        if let Some(oldest) = before.oldest {
            self.by_records.remove(&(before.records, Reverse(oldest)));
            self.by_bytes.remove(&(before.bytes, Reverse(oldest)));
        }
        let mut own = self.records.range((Arc::clone(&owner), 0)..=(Arc::clone(&owner), Ordinal::MAX));
        let Some(oldest) = own.next().map(|(_, ordinal)| *ordinal) else {
            self.usage.remove(&owner);
            return;
        };
        self.by_records.insert((records, Reverse(oldest)));
        self.by_bytes.insert((bytes, Reverse(oldest)));
        self.usage.insert(owner, Usage { records, bytes, oldest: Some(oldest) });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::{Field, Value};

    fn owner_of(row: &Row) -> Arc<str> {
        let Some(Value::String(owner)) = row.get(&Field::new("owner")) else { return "".into() };
        (&*owner).into()
    }

    proptest::proptest! {
        #[test]
        fn usage_matches_the_records(
            steps in proptest::collection::vec((0..30_u64, 0..4_u8, 0..50_usize), 0..100),
        ) {
            let mut owners = Owners::new(owner_of);
            let mut model: BTreeMap<Ordinal, Row> = BTreeMap::new();
            for (ordinal, owner, len) in steps {
                if let Some(row) = model.remove(&ordinal) {
                    owners.remove(&row, ordinal);
                } else {
                    let record = json!({"owner": owner.to_string(), "text": "x".repeat(len)});
                    let row = Row::new(record.as_object().unwrap()).unwrap();
                    owners.add(&row, ordinal);
                    model.insert(ordinal, row);
                }
            }
            let mut expected: BTreeMap<Arc<str>, Usage> = BTreeMap::new();
            for (ordinal, row) in &model {
                let usage = expected.entry(owner_of(row)).or_default();
                usage.records += 1;
                usage.bytes += row.size();
                usage.oldest.get_or_insert(*ordinal);
            }
            let actual: BTreeMap<_, _> = owners.usage.iter().map(|(owner, usage)| (Arc::clone(owner), *usage)).collect();
            proptest::prop_assert_eq!(&actual, &expected);
            let by_records = expected.values().max_by_key(|usage| (usage.records, usage.oldest.map(Reverse)));
            proptest::prop_assert_eq!(owners.oldest_by_records(), by_records.and_then(|usage| usage.oldest));
            let by_bytes = expected.values().max_by_key(|usage| (usage.bytes, usage.oldest.map(Reverse)));
            proptest::prop_assert_eq!(owners.oldest_by_bytes(), by_bytes.and_then(|usage| usage.oldest));
            proptest::prop_assert_eq!(owners.by_records.len(), expected.len());
            proptest::prop_assert_eq!(owners.by_bytes.len(), expected.len());
        }
    }
}
