//! Net changes of rows: the row before the first of several changes, and the row after the last one.

use std::collections::HashMap;

use tidewire_store::{Change, Row};

use crate::index::Slot;

/// A change that matches a query.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hit {
    pub(crate) slot: Slot,
    /// The index of the change in the commit.
    pub(crate) change: u32,
    /// Whether the row before the change matches.
    pub(crate) old_matches: bool,
    /// Whether the row after the change matches.
    pub(crate) new_matches: bool,
}

/// The net change of a row in a result. A row that is not in the result is `None`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NetChange<R> {
    pub(crate) ordinal: u64,
    pub(crate) old: Option<R>,
    pub(crate) new: Option<R>,
}

impl<R> NetChange<R> {
    /// Returns whether the row is in the result before or after.
    fn is_in_result(&self) -> bool {
        self.old.is_some() || self.new.is_some()
    }
}

/// The net changes of rows, in the order in which the rows were first changed.
#[derive(Debug)]
pub(crate) struct NetChanges<R> {
    changes: Vec<NetChange<R>>,
    by_ordinal: HashMap<u64, usize>,
}

impl<R> NetChanges<R> {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self { changes: Vec::with_capacity(capacity), by_ordinal: HashMap::new() }
    }

    /// Adds a later change.
    pub(crate) fn add(&mut self, change: NetChange<R>) {
        let index = *self.by_ordinal.entry(change.ordinal).or_insert(self.changes.len());
        match self.changes.get_mut(index) {
            Some(known) => known.new = change.new,
            None => self.changes.push(change),
        }
    }

    /// Returns the number of rows that were changed.
    pub(crate) fn len(&self) -> usize {
        self.changes.len()
    }

    /// Returns the changes of rows that are in the result before or after.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NetChange<&R>> {
        let changes = self.changes.iter().filter(|change| change.is_in_result());
        changes.map(|change| NetChange { ordinal: change.ordinal, old: change.old.as_ref(), new: change.new.as_ref() })
    }
}

/// Returns the net changes that a commit makes to the result of one query.
pub(crate) fn net_changes<'a>(hits: &[Hit], changes: &'a [Change]) -> Vec<NetChange<&'a Row>> {
    let net = |hit: &Hit| {
        let change = changes.get(hit.change as usize)?;
        let (old, new) =
            (change.old.as_ref().filter(|_| hit.old_matches), change.new.as_ref().filter(|_| hit.new_matches));
        Some(NetChange { ordinal: change.ordinal, old, new })
    };
    // Most commits have one change for a query.
    if let [hit] = hits {
        return net(hit).filter(NetChange::is_in_result).into_iter().collect();
    }
    let mut folded = NetChanges::with_capacity(hits.len());
    hits.iter().filter_map(net).for_each(|net| folded.add(net));
    folded.changes.retain(NetChange::is_in_result);
    folded.changes
}
