//! The net effect of a commit on one query: for each row, the version before the commit and the version after it.

use std::collections::HashMap;

use tidewire_store::{Change, Row};

use crate::index::Slot;

/// A change that matches a query.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hit {
    pub(crate) slot: Slot,
    /// Its index in the commit.
    pub(crate) change: u32,
    /// Whether the row before the change matches.
    pub(crate) was: bool,
    /// Whether the row after the change matches.
    pub(crate) is: bool,
}

/// The net change of a row in a result: the row before, the row after, or both.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Net<'a> {
    pub(crate) ordinal: u64,
    pub(crate) old: Option<&'a Row>,
    pub(crate) new: Option<&'a Row>,
}

/// The net effect of changes, in order. A row that is not in the result before or after is left out.
pub(crate) fn net<'a>(hits: &[Hit], changes: &'a [Change]) -> Vec<Net<'a>> {
    let mut nets: Vec<Net<'a>> = Vec::with_capacity(hits.len());
    let mut places: HashMap<u64, usize> = HashMap::new();
    for hit in hits {
        let Some(change) = changes.get(hit.change as usize) else { continue };
        let old = change.old.as_ref().filter(|_| hit.was);
        let new = change.new.as_ref().filter(|_| hit.is);
        let net = Net { ordinal: change.ordinal, old, new };
        // Most commits have one change for a query.
        if hits.len() == 1 {
            nets.push(net);
            continue;
        }
        let place = *places.entry(change.ordinal).or_insert(nets.len());
        match nets.get_mut(place) {
            Some(known) => known.new = new,
            None => nets.push(net),
        }
    }
    nets.retain(|net| net.old.is_some() || net.new.is_some());
    nets
}
