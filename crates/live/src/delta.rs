//! Deltas: the change of a result, and how it is applied to the old result.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde_json::Value as Json;
use tidewire_store::{Field, Row};

use crate::rows::{Edit, Projection};

/// How the result of a query that returns records has changed with one commit.
///
/// Applied to the result as it was before the commit it gives the result as it is after it, in three steps:
///
/// 1. What was *removed* is taken out, by its key or by its index in the old result. With indexes, the last one is taken first.
/// 2. What was *added* is put in, one after the other, each at its index in the new result. Without indexes it is put at the end.
/// 3. What was *changed* is put in the place of what has its key, or is at its index in the new result.
///
/// A row that moves is removed and added. Indexes count from zero and rise within each list.
///
/// As JSON it has one of two forms, which a query does not change:
///
/// - **Plain**, for a query without sort, offset and limit that shows the key of its records:
///   `{"added":[record,…],"changed":[record,…],"removed":[key,…]}`. A record that begins to match when others that came after it
///   do so already is not put at the end. Then there is `"at":[index,…]` too, with an index for each that was added.
/// - **Indexed**, for all others: `{"added":[{"index":0,"record":…},…],"changed":[{"index":1,"record":…},…],
///   "removed":[{"index":0,"key":…},…]}`.
#[derive(Debug, Clone)]
pub struct Delta(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    form: Arc<Form>,
    removed: Vec<(usize, Row)>,
    added: Vec<(usize, Row)>,
    changed: Vec<(usize, Row)>,
    /// Whether all that was added came last.
    is_appended: bool,
    encoded: OnceLock<Bytes>,
}

/// How rows are shown and found.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) key: Field,
    pub(crate) projection: Projection,
    pub(crate) is_indexed: bool,
}

impl Delta {
    /// The delta of an edit that leads to a result with `len` rows.
    pub(crate) fn new(form: Arc<Form>, edit: Edit, len: usize) -> Self {
        let Edit { removed, added, changed } = edit;
        let changed = changed.into_iter().map(|(index, _, row)| (index, row)).collect();
        let is_appended = added.first().is_none_or(|(first, _)| first + added.len() == len);
        Self(Arc::new(Inner { form, removed, added, changed, is_appended, encoded: OnceLock::new() }))
    }

    /// How many rows were added, changed and removed.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.0.added.len(), self.0.changed.len(), self.0.removed.len())
    }

    /// The field by which rows are known that were removed or changed.
    pub fn key(&self) -> &str {
        self.0.form.key.name()
    }

    /// Whether rows carry their indexes.
    pub fn is_indexed(&self) -> bool {
        self.0.form.is_indexed
    }

    /// The delta as JSON. It is encoded on the first call and shared.
    pub fn encoded(&self) -> Bytes {
        self.encoded_within(usize::MAX).unwrap_or_default()
    }

    /// Like [`encoded`](Self::encoded), unless the JSON is larger than `max_bytes`. Encoding stops there.
    pub fn encoded_within(&self, max_bytes: usize) -> Option<Bytes> {
        if self.0.encoded.get().is_none() {
            let encoded = self.0.encode(max_bytes)?;
            self.0.encoded.get_or_init(|| encoded);
        }
        self.0.encoded.get().filter(|encoded| encoded.len() <= max_bytes).cloned()
    }

    /// Makes the new result of the old one. Into any other than the old one it puts what it can.
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
            if let Some(place) = find(result, *index, &form.record(row)) {
                result.remove(place);
            }
        }
        for (index, row) in added {
            let place = if form.is_indexed || !is_appended { (*index).min(result.len()) } else { result.len() };
            result.insert(place, form.record(row));
        }
        for (index, row) in changed {
            let record = form.record(row);
            if let Some(place) = find(result, *index, &record) {
                result[place] = record;
            }
        }
    }
}

impl Inner {
    /// Encodes the delta. Stops after the first record beyond `max_bytes`.
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
        // It is made of the texts of values.
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
        for (place, (index, row)) in rows.iter().enumerate() {
            if place > 0 {
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
