//! Deltas: changes of a result, and their application.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde_json::Value as Json;
use tidewire_store::{Field, Row};

use crate::rows::{Edit, Projection};

/// The change of a result by a commit, for queries that return records.
///
/// Applying it to the result before the commit gives the result after it, in three steps:
///
/// 1. *Removed* rows are removed by key, or by index in the old result, last index first.
/// 2. *Added* rows are inserted in order, each at its index in the new result. If there are no indexes, they are appended.
/// 3. *Changed* rows replace the row with the same key, or at the same index in the new result.
///
/// A row that moves is removed and added. Indexes start at zero and are ascending within each list.
///
/// The JSON has one of two forms, which is fixed for a query:
///
/// - **Plain**, for a query without sort, offset and limit whose result includes the key field:
///   `{"added":[record,…],"changed":[record,…],"removed":[key,…]}`. If the added records are not all at the end of the result, there
///   is also `"at":[index,…]` with the index of each added record.
/// - **Indexed**, for all other queries: `{"added":[{"index":0,"record":…},…],"changed":[{"index":1,"record":…},…],
///   "removed":[{"index":0,"key":…},…]}`.
#[derive(Debug, Clone)]
pub struct Delta(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    form: Arc<Form>,
    removed: Vec<(usize, Row)>,
    added: Vec<(usize, Row)>,
    changed: Vec<(usize, Row)>,
    /// Whether all added rows are at the end.
    is_appended: bool,
    encoded: OnceLock<Bytes>,
}

/// The form of the deltas of a query.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) key: Field,
    pub(crate) projection: Projection,
    pub(crate) is_indexed: bool,
}

impl Delta {
    /// Creates the delta of an edit that results in `len` rows.
    pub(crate) fn new(form: Arc<Form>, edit: Edit, len: usize) -> Self {
        let Edit { removed, added, changed } = edit;
        let changed = changed.into_iter().map(|(index, _, row)| (index, row)).collect();
        let is_appended = added.first().is_none_or(|(first, _)| first + added.len() == len);
        Self(Arc::new(Inner { form, removed, added, changed, is_appended, encoded: OnceLock::new() }))
    }

    /// Returns the number of rows that were added, changed and removed.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.0.added.len(), self.0.changed.len(), self.0.removed.len())
    }

    /// Returns the key field, which identifies removed and changed rows.
    pub fn key(&self) -> &str {
        self.0.form.key.name()
    }

    /// Returns whether the delta has the indexed form.
    pub fn is_indexed(&self) -> bool {
        self.0.form.is_indexed
    }

    /// Returns the delta as JSON. It is encoded on the first call and shared.
    pub fn encoded(&self) -> Bytes {
        self.encoded_within(usize::MAX).unwrap_or_default()
    }

    /// Like [`encoded`](Self::encoded), but returns `None` if the JSON is larger than `max_bytes`.
    pub fn encoded_within(&self, max_bytes: usize) -> Option<Bytes> {
        if self.0.encoded.get().is_none() {
            let encoded = self.0.encode(max_bytes)?;
            self.0.encoded.get_or_init(|| encoded);
        }
        self.0.encoded.get().filter(|encoded| encoded.len() <= max_bytes).cloned()
    }

    /// Applies the delta to the old result. With any other result the outcome is unspecified, but it does not panic.
    pub fn apply(&self, result: &mut Vec<Json>) {
        let Inner { form, removed, added, changed, is_appended, .. } = &*self.0;
        let key = form.key.name();
        let find = |result: &[Json], index: usize, record: &Json| {
            if form.is_indexed {
                return Some(index).filter(|index| *index < result.len());
            }
            result.iter().position(|known| known.get(key) == record.get(key))
        };
        for (index, row) in removed.iter().rev() {
            if let Some(found) = find(result, *index, &form.record(row)) {
                result.remove(found);
            }
        }
        for (index, row) in added {
            let at = if form.is_indexed || !is_appended { (*index).min(result.len()) } else { result.len() };
            result.insert(at, form.record(row));
        }
        for (index, row) in changed {
            let record = form.record(row);
            if let Some(found) = find(result, *index, &record) {
                result[found] = record;
            }
        }
    }
}

impl Inner {
    /// Encodes the delta. Returns `None` as soon as the text is longer than `max_bytes`.
    fn encode(&self, max_bytes: usize) -> Option<Bytes> {
        let Self { form, removed, added, changed, is_appended, .. } = self;
        let mut text = Vec::with_capacity(64);
        let record = |row: &Row, text: &mut Vec<u8>| form.projection.write(row, text);
        let key = |row: &Row, text: &mut Vec<u8>| {
            text.extend(row.text_of(&form.key).unwrap_or("null").as_bytes());
        };
        text.extend(b"{\"added\":");
        form.list(added, "record", record, max_bytes, &mut text)?;
        if !form.is_indexed && !is_appended {
            text.extend(b",\"at\":");
            let indexes: Vec<String> = added.iter().map(|(index, _)| index.to_string()).collect();
            text.extend(format!("[{}]", indexes.join(",")).as_bytes());
        }
        text.extend(b",\"changed\":");
        form.list(changed, "record", record, max_bytes, &mut text)?;
        text.extend(b",\"removed\":");
        form.list(removed, "key", key, max_bytes, &mut text)?;
        text.push(b'}');
        Some(text.into())
    }
}

impl Form {
    fn record(&self, row: &Row) -> Json {
        let mut text = Vec::new();
        self.projection.write(row, &mut text);
        // The projection of a row is valid JSON.
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Appends a list. Returns `None` when the text is longer than `max_bytes`.
    fn list(
        &self,
        rows: &[(usize, Row)],
        name: &str,
        write: impl Fn(&Row, &mut Vec<u8>),
        max_bytes: usize,
        text: &mut Vec<u8>,
    ) -> Option<()> {
        text.push(b'[');
        for (number, (index, row)) in rows.iter().enumerate() {
            if number > 0 {
                text.push(b',');
            }
            if self.is_indexed {
                text.extend(format!("{{\"index\":{index},\"{name}\":").as_bytes());
            }
            write(row, text);
            if self.is_indexed {
                text.push(b'}');
            }
            if text.len() > max_bytes {
                return None;
            }
        }
        text.push(b']');
        Some(())
    }
}
