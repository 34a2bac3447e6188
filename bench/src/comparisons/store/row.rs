//! The rows of the comparison. All contenders store the same bytes.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

/// The length of a row as JSON.
pub(super) const BYTES: usize = 256;

/// A generator of rows. The index is on their group, and about ten rows share a group.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    groups: u64,
}

/// A row to insert.
pub(super) struct NewRow {
    /// The key.
    pub(super) id: u64,
    /// The indexed field.
    pub(super) group: String,
    /// The row as JSON, including key and group.
    pub(super) text: String,
}

impl Rows {
    /// Creates a generator with ten rows per group for this number of rows.
    pub(super) fn new(count: u64) -> Self {
        Self { groups: (count / 10).max(1) }
    }

    pub(super) fn groups(self) -> u64 {
        self.groups
    }

    /// Returns the row with this key.
    pub(super) fn row(self, id: u64) -> NewRow {
        // Consecutive keys have different groups, as in real data.
        let group = group_name(id.wrapping_mul(7919) % self.groups);
        let mut text = String::with_capacity(BYTES);
        write!(text, r#"{{"id":{id},"group":"{group}","name":"row {id}","count":{},"text":""#, id % 100)
            .expect("writing to a string does not fail");
        text.extend(std::iter::repeat_n('x', BYTES - "\"}".len() - text.len()));
        text.push_str("\"}");
        NewRow { id, group, text }
    }
}

impl NewRow {
    /// Returns the row as a record.
    pub(super) fn record(&self) -> Map<String, Json> {
        serde_json::from_str(&self.text).expect("the text is a JSON object")
    }
}

/// Returns the name of a group.
pub(super) fn group_name(number: u64) -> String {
    format!("g{number:08}")
}

/// Panics unless the text is the row with this key.
pub(super) fn check(id: u64, text: &str) {
    let starts = text.strip_prefix(r#"{"id":"#).and_then(|rest| rest.split_once(','));
    let found = starts.and_then(|(number, _)| number.parse::<u64>().ok());
    assert!(found == Some(id) && text.len() >= BYTES, "row {id} is {text:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_256_bytes_and_groups_have_ten_rows() {
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
