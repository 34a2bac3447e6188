//! The result of a query that returns records, maintained incrementally.
//!
//! A live query retains all matching rows in order. An entry has 40 bytes besides the shared row: the first bytes of its sort key,
//! its ordinal, and a pointer. So a window is refilled without reading the store. The window before a commit can be computed from the
//! ranks after it and from the rows that were inserted and removed, so no old result is stored for comparison.
//!
//! A [`Page`] is the window over the matching rows. It is cheap to clone, so that another thread can encode it.

mod matches;
mod position;
mod projection;
mod window;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::{Field, Query, Row};

use self::matches::Matches;
use self::position::{RowEntry, Sort};
pub(crate) use self::projection::{Projection, is_same};
pub(crate) use self::window::Edit;
use self::window::{MatchChanges, Window};
use crate::delta::{Delta, Form};
use crate::net_change::NetChange;
use crate::query::ResultTooLarge;

/// The matching rows of a query, and the window that is the result.
#[derive(Debug)]
pub(crate) struct Rows {
    sort: Sort,
    page: Page,
}

/// The window of the matching rows that is the result.
#[derive(Debug, Clone)]
pub(crate) struct Page {
    matches: Matches,
    window: Window,
    form: Arc<Form>,
}

impl Rows {
    /// Limit of the rows that are compared to detect that a result is the same. Windows are rarely larger.
    const MAX_COMPARED: usize = 4096;

    /// Collects the rows of a query, given with their ordinals. `key` is the key field of the bucket. The memory of the entries is
    /// charged to the budget.
    pub(crate) fn new<'a>(
        query: &Query,
        key: &str,
        rows: impl Iterator<Item = Result<(u64, &'a Row), Exceeded>>,
        budget: &Budget,
    ) -> Result<Self, Exceeded> {
        let sort = Sort::new(&query.sort);
        let mut entries = Vec::new();
        for row in rows {
            let (ordinal, row) = row?;
            budget.hold(size_of::<RowEntry>())?;
            entries.push(sort.entry(row, ordinal));
        }
        let matches = Matches::new(entries, &sort);
        let window = Window {
            start: query.offset,
            end: query.limit.map_or(usize::MAX, |limit| query.offset.saturating_add(limit)),
        };
        let projection = Projection::new(query.fields.as_deref());
        // Without a sort or window, clients can find a row by its key if the key is in the result, and an appended row needs no index.
        let is_plain = sort.is_empty() && window.start == 0 && window.end == usize::MAX && projection.includes(key);
        let form = Arc::new(Form { key: Field::new(key), projection, is_indexed: !is_plain });
        Ok(Self { sort, page: Page { matches, window, form } })
    }

    /// Returns the number of matching rows.
    pub(crate) fn len(&self) -> usize {
        self.page.matches.len()
    }

    /// Returns the memory of the entries.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * size_of::<RowEntry>()
    }

    pub(crate) fn page(&self) -> &Page {
        &self.page
    }

    /// Applies the net changes of a commit. Returns the change of the result, if any.
    pub(crate) fn apply(&mut self, changes: &[NetChange<&Row>]) -> Option<Delta> {
        let match_changes = self.apply_to_matches(changes);
        let Page { matches, window, form } = &self.page;
        let mut edit = window.edit(matches, &match_changes, &self.sort);
        self.merge_into_changes(&mut edit);
        edit.changed.retain(|(_, old, new)| !form.projection.is_same(old, new));
        if edit.removed.is_empty() && edit.added.is_empty() && edit.changed.is_empty() || self.is_result_same(&edit) {
            return None;
        }
        let len = matches.len().min(window.end).saturating_sub(window.start);
        Some(Delta::new(Arc::clone(form), edit, len))
    }

    fn apply_to_matches(&mut self, changes: &[NetChange<&Row>]) -> MatchChanges {
        let Self { sort, page: Page { matches, .. } } = self;
        let mut match_changes = MatchChanges::default();
        for change in changes {
            let old = change.old.map(|row| sort.entry(row, change.ordinal));
            let new = change.new.map(|row| sort.entry(row, change.ordinal));
            if let (Some(old), Some(new)) = (&old, &new)
                && sort.compare(old, new).is_eq()
                && let Some(was) = matches.replace(new, sort)
            {
                match_changes.updated.push(RowEntry { position: new.position, row: was });
                continue;
            }
            if let Some(mut old) = old
                && let Some(was) = matches.remove(&old, sort)
            {
                old.row = was;
                match_changes.removed.push(old);
            }
            if let Some(new) = new {
                match matches.insert(new.clone(), sort) {
                    None => match_changes.inserted.push(new),
                    Some(was) => match_changes.updated.push(RowEntry { position: new.position, row: was }),
                }
            }
        }
        for list in [&mut match_changes.removed, &mut match_changes.inserted, &mut match_changes.updated] {
            list.sort_unstable_by(|one, two| sort.compare(one, two));
        }
        match_changes
    }

    /// Replaces the removal and the addition of a row by a change, if the order of the rows stays the same.
    fn merge_into_changes(&self, edit: &mut Edit) {
        if edit.removed.is_empty() || edit.added.is_empty() {
            return;
        }
        let added: HashMap<Option<&str>, usize> =
            edit.added.iter().enumerate().map(|(index, (_, row))| (row.text_of(&self.page.form.key), index)).collect();
        // The row has the same place if the number of unmoved rows before it is the same in the old and the new result, and if it
        // is not swapped with another row in `staying`.
        let mut staying: Vec<(usize, usize)> = Vec::new();
        for (index, (old_index, row)) in edit.removed.iter().enumerate() {
            let Some(new_index) = added.get(&row.text_of(&self.page.form.key)) else { continue };
            let others = (old_index - index, edit.added[*new_index].0 - new_index);
            if others.0 == others.1 && staying.last().is_none_or(|(_, last)| last < new_index) {
                staying.push((index, *new_index));
            }
        }
        if staying.is_empty() {
            return;
        }
        let (old, new): (Vec<usize>, Vec<usize>) = staying.into_iter().unzip();
        let removed = take(&mut edit.removed, &old);
        let added = take(&mut edit.added, &new);
        edit.changed.extend(removed.into_iter().zip(added).map(|((_, old), (index, new))| (index, old, new)));
        edit.changed.sort_unstable_by_key(|(index, ..)| *index);
    }

    /// Returns whether the result is the same after an edit, because the rows differ only in fields that are not in the result. All
    /// rows from the first to the last edited one are compared, so false is returned for a long range.
    fn is_result_same(&self, edit: &Edit) -> bool {
        let projection = &self.page.form.projection;
        if projection.includes(self.page.form.key.name()) || edit.removed.len() != edit.added.len() {
            return false;
        }
        let (Some(first), Some(last)) = (
            edit.removed.first().zip(edit.added.first()).map(|(one, two)| one.0.min(two.0)),
            edit.removed.last().zip(edit.added.last()).map(|(one, two)| one.0.max(two.0)),
        ) else {
            return false;
        };
        // Rows outside this range have not moved.
        if last - first > Self::MAX_COMPARED || edit.changed.iter().any(|(index, ..)| !(first..=last).contains(index)) {
            return false;
        }
        let is = || {
            (first..=last)
                .zip(self.page.matches.from(self.page.window.start + first))
                .map(|(index, entry)| (index, &entry.row))
        };
        // Reconstructs the old result: the new one without added rows and with removed rows.
        let mut added = edit.added.iter().peekable();
        let mut changed = edit.changed.iter().peekable();
        let mut stayed = is()
            .filter(|(index, _)| added.next_if(|(at, _)| at == index).is_none())
            .map(|(index, row)| changed.next_if(|(at, ..)| *at == index).map_or(row, |(_, old, _)| old));
        let mut removed = edit.removed.iter().peekable();
        let mut was = (first..=last).map_while(|index| match removed.next_if(|(at, _)| *at == index) {
            Some((_, row)) => Some(row),
            None => stayed.next(),
        });
        is().all(|(_, row)| was.next().is_some_and(|was| projection.is_same(row, was)))
    }
}

impl Page {
    /// Encodes the result. Fails if it is larger than `max_bytes`.
    pub(crate) fn encode(&self, max_bytes: usize) -> Result<Bytes, ResultTooLarge> {
        let mut text = vec![b'['];
        let count = self.window.end - self.window.start;
        for (index, entry) in self.matches.from(self.window.start).take(count).enumerate() {
            if index > 0 {
                text.push(b',');
            }
            self.form.projection.write(&entry.row, &mut text);
            // One byte is left for the closing bracket.
            if text.len() >= max_bytes {
                return Err(ResultTooLarge);
            }
        }
        text.push(b']');
        // The result may be cached for a long time.
        text.shrink_to_fit();
        Ok(text.into())
    }
}

/// Removes the elements at these ascending indexes from a list, and returns them.
fn take<T>(list: &mut Vec<T>, indexes: &[usize]) -> Vec<T> {
    let mut indexes = indexes.iter().peekable();
    let mut index = 0..;
    list.extract_if(.., |_| index.next().is_some_and(|index| indexes.next_if_eq(&&index).is_some())).collect()
}
