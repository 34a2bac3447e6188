//! The result of a query that returns records, maintained incrementally.
//!
//! A live query keeps all rows that match, in its order. An entry has 40 bytes beside the shared row: the first bytes of its sort
//! key, its ordinal, and a pointer. So a window is refilled without reading the store. The window before a commit follows from
//! the ranks after it and from the rows that came and went, so no old result is kept for comparison.

mod matches;
mod place;
mod projection;
mod window;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use tidewire_store::{Field, Query, Row};

use self::matches::Matches;
use self::place::Sort;
pub(crate) use self::projection::{Projection, is_same};
pub(crate) use self::window::Edit;
use self::window::{Moves, Window};
use crate::delta::{Delta, Form};
use crate::net::Net;

/// All rows that a query means, in its order.
#[derive(Debug)]
pub(crate) struct Rows {
    sort: Sort,
    window: Window,
    form: Arc<Form>,
    matches: Matches,
}

impl Rows {
    /// Between how many rows it is looked for whether a change shows, if keys are not shown. Windows seldom have more.
    const MAX_COMPARED: usize = 4096;

    /// Those of a query, by the name of the key of its bucket and the rows that it means, with their ordinals.
    pub(crate) fn new<'a>(query: &Query, key: &str, rows: impl Iterator<Item = (u64, &'a Row)>) -> Self {
        let sort = Sort::new(&query.sort);
        let entries = rows.map(|(ordinal, row)| sort.entry(row, ordinal)).collect();
        let matches = Matches::new(entries, &sort);
        let window = Window {
            start: query.offset,
            end: query.limit.map_or(usize::MAX, |limit| query.offset.saturating_add(limit)),
        };
        let projection = Projection::new(query.fields.as_deref());
        // By its key a row can be found if it is shown, and its index need not be told if it comes last.
        let is_plain = sort.is_empty() && window.start == 0 && window.end == usize::MAX && projection.shows(key);
        let form = Arc::new(Form { key: Field::new(key), projection, is_indexed: !is_plain });
        Self { sort, window, form, matches }
    }

    /// How many rows it keeps.
    pub(crate) fn len(&self) -> usize {
        self.matches.len()
    }

    /// Takes changes in. Returns how the result has changed, if it has.
    pub(crate) fn apply(&mut self, nets: &[Net<'_>]) -> Option<Delta> {
        let moves = self.take_in(nets);
        let mut edit = self.window.edit(&self.matches, &moves, &self.sort);
        self.keep_in_place(&mut edit);
        edit.changed.retain(|(_, old, new)| !self.form.projection.is_same(old, new));
        if edit.removed.is_empty() && edit.added.is_empty() && edit.changed.is_empty() || self.looks_the_same(&edit) {
            return None;
        }
        let len = self.matches.len().min(self.window.end).saturating_sub(self.window.start);
        Some(Delta::new(Arc::clone(&self.form), edit, len))
    }

    /// The whole result.
    pub(crate) fn encode(&self) -> Bytes {
        let mut text = vec![b'['];
        let count = self.window.end - self.window.start;
        for (place, entry) in self.matches.from(self.window.start).take(count).enumerate() {
            if place > 0 {
                text.push(b',');
            }
            self.form.projection.write(&entry.row, &mut text);
        }
        text.push(b']');
        // It may be kept for long.
        text.shrink_to_fit();
        text.into()
    }

    fn take_in(&mut self, nets: &[Net<'_>]) -> Moves {
        let Self { sort, matches, .. } = self;
        let mut moves = Moves::default();
        for net in nets {
            let old = net.old.map(|row| sort.entry(row, net.ordinal));
            let new = net.new.map(|row| sort.entry(row, net.ordinal));
            if let (Some(old), Some(new)) = (&old, &new)
                && sort.compare(old, new).is_eq()
                && let Some(was) = matches.replace(new, sort)
            {
                moves.kept.push(place::Entry { place: new.place, row: was });
                continue;
            }
            if let Some(mut old) = old
                && let Some(was) = matches.remove(&old, sort)
            {
                old.row = was;
                moves.gone.push(old);
            }
            if let Some(new) = new {
                match matches.insert(new.clone(), sort) {
                    None => moves.come.push(new),
                    Some(was) => moves.kept.push(place::Entry { place: new.place, row: was }),
                }
            }
        }
        for list in [&mut moves.gone, &mut moves.come, &mut moves.kept] {
            list.sort_unstable_by(|one, two| sort.compare(one, two));
        }
        moves
    }

    /// A row that was taken out and put in again, with none of the others passing it, has changed where it is.
    fn keep_in_place(&self, edit: &mut Edit) {
        if edit.removed.is_empty() || edit.added.is_empty() {
            return;
        }
        let added: HashMap<Option<&str>, usize> =
            edit.added.iter().enumerate().map(|(place, (_, row))| (row.text_of(&self.form.key), place)).collect();
        // How many that were not moved came before it, and come before it. It may stay if those are the same, and if it does not
        // change places with one that stays.
        let mut staying: Vec<(usize, usize)> = Vec::new();
        for (place, (old_index, row)) in edit.removed.iter().enumerate() {
            let Some(new_place) = added.get(&row.text_of(&self.form.key)) else { continue };
            let others = (old_index - place, edit.added[*new_place].0 - new_place);
            if others.0 == others.1 && staying.last().is_none_or(|(_, last)| last < new_place) {
                staying.push((place, *new_place));
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

    /// Whether rows that went and others that came cannot be told apart, because the key is not shown. That takes looking at all
    /// between them, so beyond a number of rows it is not looked into.
    fn looks_the_same(&self, edit: &Edit) -> bool {
        let projection = &self.form.projection;
        if projection.shows(self.form.key.name()) || edit.removed.len() != edit.added.len() {
            return false;
        }
        let (Some(first), Some(last)) = (
            edit.removed.first().zip(edit.added.first()).map(|(one, two)| one.0.min(two.0)),
            edit.removed.last().zip(edit.added.last()).map(|(one, two)| one.0.max(two.0)),
        ) else {
            return false;
        };
        // Before and after those, all stand where they stood.
        if last - first > Self::MAX_COMPARED || edit.changed.iter().any(|(index, ..)| !(first..=last).contains(index)) {
            return false;
        }
        let is = || {
            (first..=last).zip(self.matches.from(self.window.start + first)).map(|(index, entry)| (index, &entry.row))
        };
        // The result as it was is what it is without those that were added, and with those that were removed.
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

/// Takes those at these places, which rise, out of a list.
fn take<T>(list: &mut Vec<T>, places: &[usize]) -> Vec<T> {
    let mut places = places.iter().peekable();
    let mut place = 0..;
    list.extract_if(.., |_| place.next().is_some_and(|place| places.next_if_eq(&&place).is_some())).collect()
}
