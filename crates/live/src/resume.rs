//! Resuming: what has changed for a subscriber that was away.
//!
//! There is no old state, but the changes since are known. The query is read as it is now, the changes are undone on the result,
//! and then applied again: the delta of that last step is what the subscriber missed.

use std::collections::HashMap;
use std::sync::Arc;

use tidewire_store::{Bucket, Change, Query, Row};

use crate::net::Net;
use crate::query::{Life, LiveQuery, Outcome};

/// What has changed.
#[derive(Debug)]
pub(crate) enum Since {
    /// Nothing that shows.
    Nothing,
    /// The result differs like this.
    Changed(Outcome),
}

/// What has changed for a query with these changes, in order, the last of which made the bucket what it is. None if it cannot be
/// said: when a record that has expired is among them, nobody knows who has still seen it.
pub(crate) fn since<'a>(
    query: &Query,
    bucket: &Bucket,
    now: u64,
    changes: impl Iterator<Item = &'a Change>,
) -> Option<Since> {
    if bucket.expired(now).next().is_some() {
        return None;
    }
    let mut nets: Vec<Net<'a>> = Vec::new();
    let mut places: HashMap<u64, usize> = HashMap::new();
    for change in changes.filter(|change| *change.bucket == *query.bucket) {
        let meant = |row: &'a Option<Row>| row.as_ref().filter(|row| query.filter.matches(row));
        let (old, new) = (meant(&change.old), meant(&change.new));
        if [old, new].into_iter().flatten().any(|row| Life::of(row).has_ended(now)) {
            return None;
        }
        let place = *places.entry(change.ordinal).or_insert(nets.len());
        match nets.get_mut(place) {
            Some(known) => known.new = new,
            None => nets.push(Net { ordinal: change.ordinal, old, new }),
        }
    }
    nets.retain(|net| net.old.is_some() || net.new.is_some());
    // When many come back at once, this is what most of them find.
    if nets.is_empty() {
        return Some(Since::Nothing);
    }
    let mut live = LiveQuery::new(query, query.canonical().into(), Arc::from(&*query.bucket), bucket, now);
    let back: Vec<Net<'_>> = nets.iter().map(|net| Net { ordinal: net.ordinal, old: net.new, new: net.old }).collect();
    live.apply(&back);
    Some(live.apply(&nets).map_or(Since::Nothing, Since::Changed))
}
