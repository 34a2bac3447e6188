//! The rows that all contenders store: the same bytes for all.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

/// The bytes that a row has as JSON.
pub(super) const BYTES: usize = 256;

/// Rows in groups of about ten, which the index finds.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    groups: u64,
}

/// A row on its way into a store.
pub(super) struct NewRow {
    /// Its key.
    pub(super) id: u64,
    /// What it is indexed by.
    pub(super) group: String,
    /// The whole of it, key and group included, as JSON.
    pub(super) text: String,
}

impl Rows {
    /// So many rows, whose groups have ten each.
    pub(super) fn new(count: u64) -> Self {
        Self { groups: (count / 10).max(1) }
    }

    pub(super) fn groups(self) -> u64 {
        self.groups
    }

    /// The row with this key.
    pub(super) fn row(self, id: u64) -> NewRow {
        // Neighbours are in groups far apart, as those of real rows are.
        let group = group_name(id.wrapping_mul(7919) % self.groups);
        let mut text = String::with_capacity(BYTES);
        write!(text, r#"{{"id":{id},"group":"{group}","name":"row {id}","count":{},"text":""#, id % 100)
            .expect("a string takes it");
        text.extend(std::iter::repeat_n('x', BYTES - "\"}".len() - text.len()));
        text.push_str("\"}");
        NewRow { id, group, text }
    }
}

impl NewRow {
    /// The row as the tree that a store of records is given.
    pub(super) fn record(&self) -> Map<String, Json> {
        serde_json::from_str(&self.text).expect("it was made as an object")
    }
}

/// What the group of this number is called.
pub(super) fn group_name(number: u64) -> String {
    format!("g{number:08}")
}

/// Panics unless this is the row with that key, as it was stored.
pub(super) fn check(id: u64, text: &str) {
    let starts = text.strip_prefix(r#"{"id":"#).and_then(|rest| rest.split_once(','));
    let found = starts.and_then(|(number, _)| number.parse::<u64>().ok());
    assert!(found == Some(id) && text.len() >= BYTES, "row {id} is {text:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_its_size_and_a_group_has_ten() {
        let rows = Rows::new(1000);
        let mut groups = std::collections::BTreeMap::<String, u64>::new();
        for id in 0..1000 {
            let row = rows.row(id);
            assert_eq!(row.text.len(), BYTES);
            assert_eq!(row.record()["group"], Json::from(row.group.clone()));
            check(id, &row.text);
            *groups.entry(row.group).or_default() += 1;
        }
        assert_eq!(groups.len(), 100);
        assert!(groups.values().all(|&count| count == 10));
    }
}
