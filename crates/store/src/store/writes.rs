//! The writes of a commit, as an engine stores them.
//!
//! A row is stored as its JSON text. The table of members is rebuilt at start: it is a third of a row, and every version can read
//! the text. The key of a row is part of its text, so only deletions store a key. Clearing a bucket is one write without a key,
//! whatever the number of its records.

use std::collections::HashMap;
use std::ops::Range;

use crate::catalog::{self, BUCKETS};
use crate::engine::{Write, WriteSet};
use crate::query::IndexKey;
use crate::{Change, State};

/// The writes of a commit, beside its changes.
pub(super) struct KeptWrites {
    kept: Vec<Kept>,
    /// The keys of what is deleted. A row that is there has its key in it.
    keys: Vec<u8>,
}

/// A write to the engine: of this change, with this key.
struct Kept {
    change: usize,
    key: Range<usize>,
}

impl KeptWrites {
    /// What is kept of changes, some parts of which are all that was in a bucket: those are one write, without a key. `state` is
    /// that after the changes.
    pub(super) fn of(changes: &[Change], cleared: &[Range<usize>], state: &State) -> Self {
        let mut kept = Vec::with_capacity(changes.len());
        let mut keys = Vec::new();
        let mut cleared = cleared.iter().peekable();
        let dropped = dropped(changes);
        let mut place = 0;
        while let Some(change) = changes.get(place) {
            let whole = cleared.next_if(|range| range.start == place);
            // A bucket that has been dropped since takes its rows with it, also if there is another one of that name by now.
            let is_gone = dropped.get(&*change.bucket).is_some_and(|dropped| place < *dropped);
            if let Ok((_, bucket)) = state.any(&change.bucket)
                && !is_gone
                && bucket.definition().persistent
            {
                let from = keys.len();
                if let (None, None, Some(old)) = (whole, &change.new, &change.old) {
                    keys.extend_from_slice(IndexKey::of(bucket.key_of(old).as_ref()).as_bytes());
                }
                kept.push(Kept { change: place, key: from..keys.len() });
            }
            place = whole.map_or(place + 1, |range| range.end);
        }
        Self { kept, keys }
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    /// The writes of these changes, which are those that they were made of.
    pub(super) fn iter<'a>(&'a self, changes: &'a [Change]) -> impl Iterator<Item = Write<'a>> {
        self.kept.iter().map(|kept| {
            let change = &changes[kept.change];
            let row = change.new.as_ref().map(|row| row.text().as_bytes());
            Write { bucket: &change.bucket, key: &self.keys[kept.key.clone()], row }
        })
    }

    pub(super) fn encoded_len(&self, changes: &[Change]) -> usize {
        WriteSet::encoded_len_of(self.iter(changes))
    }
}

/// The buckets that are dropped, and by which change they are the last time.
fn dropped(changes: &[Change]) -> HashMap<String, usize> {
    let definitions =
        changes.iter().enumerate().filter(|(_, change)| *change.bucket == *BUCKETS && change.new.is_none());
    definitions.filter_map(|(place, change)| Some((catalog::name_of(change.old.as_ref()?)?, place))).collect()
}
