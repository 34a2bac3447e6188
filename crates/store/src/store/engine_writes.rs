//! The writes of a commit in the form that an engine stores.
//!
//! A row is stored as its JSON text. The table of members, a third of a row, is rebuilt at start, so the stored format does not
//! depend on it. The key of a row is part of its text, so only deletions store a key. Clearing a bucket is one write without a
//! key, regardless of the number of records.

use std::collections::HashMap;
use std::ops::Range;

use crate::catalog::{self, BUCKETS};
use crate::engine::{Write, WriteSet};
use crate::query::IndexKey;
use crate::{Change, State};

/// The engine's writes of a commit. They refer to its changes by index.
pub(super) struct EngineWrites {
    writes: Vec<EngineWrite>,
    /// The keys of deleted rows, one after the other.
    keys: Vec<u8>,
}

/// A write of the change with this index. The key is a range of [`EngineWrites::keys`].
struct EngineWrite {
    change: usize,
    key: Range<usize>,
}

impl EngineWrites {
    /// Converts changes into writes. Each range in `cleared` has the changes that clear a bucket, and becomes one write without a
    /// key. `state` is the state after the changes.
    pub(super) fn of(changes: &[Change], cleared: &[Range<usize>], state: &State) -> Self {
        let mut writes = Vec::with_capacity(changes.len());
        let mut keys = Vec::new();
        let mut cleared = cleared.iter().peekable();
        let dropped = dropped(changes);
        let mut index = 0;
        while let Some(change) = changes.get(index) {
            let cleared_range = cleared.next_if(|range| range.start == index);
            // Rows of a bucket that is dropped later in the commit need no write, even if a new bucket has the same name.
            let is_dropped = dropped.get(&*change.bucket).is_some_and(|dropped| index < *dropped);
            if let Ok((_, bucket)) = state.any_bucket(&change.bucket)
                && !is_dropped
                && bucket.definition().persistent
            {
                let from = keys.len();
                if let (None, None, Some(old)) = (cleared_range, &change.new, &change.old) {
                    keys.extend_from_slice(IndexKey::of(bucket.key_of(old).as_ref()).as_bytes());
                }
                writes.push(EngineWrite { change: index, key: from..keys.len() });
            }
            index = cleared_range.map_or(index + 1, |range| range.end);
        }
        Self { writes, keys }
    }

    pub(super) fn len(&self) -> usize {
        self.writes.len()
    }

    /// Returns the writes. `changes` must be the changes that they were made from.
    pub(super) fn iter<'a>(&'a self, changes: &'a [Change]) -> impl Iterator<Item = Write<'a>> {
        self.writes.iter().map(|write| {
            let change = &changes[write.change];
            let row = change.new.as_ref().map(|row| row.text().as_bytes());
            Write { bucket: &change.bucket, key: &self.keys[write.key.clone()], row }
        })
    }

    pub(super) fn encoded_len(&self, changes: &[Change]) -> usize {
        WriteSet::encoded_len_of(self.iter(changes))
    }
}

/// Returns the dropped buckets, each with the index of the last change that drops it.
fn dropped(changes: &[Change]) -> HashMap<String, usize> {
    let definitions =
        changes.iter().enumerate().filter(|(_, change)| *change.bucket == *BUCKETS && change.new.is_none());
    definitions.filter_map(|(index, change)| Some((catalog::name_of(change.old.as_ref()?)?, index))).collect()
}
