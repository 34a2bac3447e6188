//! Records by ordinal: an ordered map with structural sharing.
//!
//! Ordinals are consecutive, so a tree that is indexed by their bits is dense: a lookup takes one step per level and no
//! comparison, and a new record goes to the last leaf. A clone shares everything; a shared leaf and the path to it are copied
//! before they are changed. (An ordered map of pairs takes twice the memory and several times as long.)

use std::ops::Range;
use std::sync::Arc;

use super::Ordinal;
use crate::Row;

/// How many bits of an ordinal a level takes.
const BITS: u32 = 4;
const WIDTH: usize = 1 << BITS;

/// Records by ordinal.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows {
    root: Option<Node>,
    /// Levels of branches above the leaves.
    height: u32,
    len: usize,
}

#[derive(Debug, Clone)]
enum Node {
    Branch(Arc<[Option<Node>; WIDTH]>),
    Leaf(Arc<[Option<Row>; WIDTH]>),
}

/// Which child an ordinal is in, so many levels above the leaves.
fn child(ordinal: Ordinal, height: u32) -> usize {
    // It is masked to less than the width.
    usize::try_from(ordinal.checked_shr(height * BITS).unwrap_or(0) & (WIDTH as u64 - 1)).unwrap_or(0)
}

impl Node {
    fn empty(height: u32) -> Self {
        match height {
            0 => Self::Leaf(Arc::default()),
            _ => Self::Branch(Arc::default()),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Branch(children) => children.iter().all(Option::is_none),
            Self::Leaf(rows) => rows.iter().all(Option::is_none),
        }
    }
}

impl Rows {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many ordinals there is room for, without another level.
    fn reach(&self) -> u64 {
        1_u64.checked_shl((self.height + 1) * BITS).unwrap_or(u64::MAX)
    }

    pub(super) fn get(&self, ordinal: Ordinal) -> Option<&Row> {
        #[cfg(test)]
        super::examined::count();
        self.leaf(ordinal)?[child(ordinal, 0)].as_ref()
    }

    fn leaf(&self, ordinal: Ordinal) -> Option<&[Option<Row>; WIDTH]> {
        if ordinal >= self.reach() {
            return None;
        }
        let mut node = self.root.as_ref()?;
        let mut height = self.height;
        loop {
            match node {
                Node::Leaf(rows) => return Some(rows),
                Node::Branch(children) => {
                    node = children[child(ordinal, height)].as_ref()?;
                    height = height.saturating_sub(1);
                }
            }
        }
    }

    /// Puts a record in a place. Returns the one that was there.
    pub(super) fn insert(&mut self, ordinal: Ordinal, row: Row) -> Option<Row> {
        while ordinal >= self.reach() {
            if let Some(root) = self.root.take() {
                let mut children: [Option<Node>; WIDTH] = Default::default();
                children[0] = Some(root);
                self.root = Some(Node::Branch(Arc::new(children)));
            }
            self.height += 1;
        }
        let mut height = self.height;
        let mut node = self.root.get_or_insert_with(|| Node::empty(height));
        loop {
            match node {
                Node::Leaf(rows) => {
                    let before = Arc::make_mut(rows)[child(ordinal, 0)].replace(row);
                    self.len += usize::from(before.is_none());
                    return before;
                }
                Node::Branch(children) => {
                    let place = child(ordinal, height);
                    height = height.saturating_sub(1);
                    node = Arc::make_mut(children)[place].get_or_insert_with(|| Node::empty(height));
                }
            }
        }
    }

    /// Takes a record out.
    pub(super) fn remove(&mut self, ordinal: Ordinal) -> Option<Row> {
        self.get(ordinal)?;
        let removed = remove(&mut self.root, ordinal, self.height);
        self.len -= usize::from(removed.is_some());
        removed
    }

    /// All records and their places, in order.
    pub(super) fn iter(&self) -> Iter<'_> {
        self.range(0..Ordinal::MAX)
    }

    /// Those in a range of places.
    pub(super) fn range(&self, range: Range<Ordinal>) -> Iter<'_> {
        let end = range.end.min(self.reach());
        Iter { rows: self, range: range.start.min(end)..end, front: None, back: None }
    }

    /// The first leaf that has ordinals from this one on, or the last that has some up to it; and its first ordinal.
    fn seek(&self, ordinal: Ordinal, is_forward: bool) -> Option<(Ordinal, &[Option<Row>; WIDTH])> {
        if ordinal >= self.reach() {
            return None;
        }
        seek(self.root.as_ref()?, ordinal, self.height, is_forward)
    }
}

/// Takes a record out of what is below, which goes when nothing is left of it.
fn remove(place: &mut Option<Node>, ordinal: Ordinal, height: u32) -> Option<Row> {
    let node = place.as_mut()?;
    let removed = match node {
        Node::Leaf(rows) => Arc::make_mut(rows)[child(ordinal, 0)].take(),
        Node::Branch(children) => remove(&mut Arc::make_mut(children)[child(ordinal, height)], ordinal, height - 1),
    };
    if node.is_empty() {
        *place = None;
    }
    removed
}

fn seek(node: &Node, ordinal: Ordinal, height: u32, is_forward: bool) -> Option<(Ordinal, &[Option<Row>; WIDTH])> {
    let children = match node {
        Node::Leaf(rows) => return Some((ordinal & !(WIDTH as u64 - 1), rows)),
        Node::Branch(children) => children,
    };
    let own = child(ordinal, height);
    if let Some(found) = children[own].as_ref().and_then(|node| seek(node, ordinal, height - 1, is_forward)) {
        return Some(found);
    }
    // Then the nearest one beside it, from its near end.
    let shift = height * BITS;
    let base = ordinal.checked_shr(shift + BITS).unwrap_or(0).checked_shl(shift + BITS).unwrap_or(0);
    let beside = |place: usize| {
        let start = base | (place as u64) << shift;
        let near = if is_forward { start } else { start | ((1 << shift) - 1) };
        seek(children[place].as_ref()?, near, height - 1, is_forward)
    };
    if is_forward { (own + 1..WIDTH).find_map(beside) } else { (0..own).rev().find_map(beside) }
}

/// Records and their places, in order, from both ends.
#[derive(Debug, Clone)]
pub(crate) struct Iter<'a> {
    rows: &'a Rows,
    /// What is left.
    range: Range<Ordinal>,
    front: Option<(Ordinal, &'a [Option<Row>; WIDTH])>,
    back: Option<(Ordinal, &'a [Option<Row>; WIDTH])>,
}

/// The place of an ordinal, if it is in that leaf.
fn within(leaf: Option<(Ordinal, &[Option<Row>; WIDTH])>, ordinal: Ordinal) -> Option<&Option<Row>> {
    let (start, rows) = leaf?;
    rows.get(usize::try_from(ordinal.checked_sub(start)?).ok()?)
}

impl<'a> Iterator for Iter<'a> {
    type Item = (Ordinal, &'a Row);

    fn next(&mut self) -> Option<Self::Item> {
        while !self.range.is_empty() {
            let ordinal = self.range.start;
            let Some(found) = within(self.front, ordinal) else {
                self.front = Some(self.rows.seek(ordinal, true)?);
                self.range.start = ordinal.max(self.front?.0);
                continue;
            };
            self.range.start += 1;
            if let Some(row) = found {
                #[cfg(test)]
                super::examined::count();
                return Some((ordinal, row));
            }
        }
        None
    }
}

impl DoubleEndedIterator for Iter<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        while !self.range.is_empty() {
            let ordinal = self.range.end - 1;
            let Some(found) = within(self.back, ordinal) else {
                self.back = Some(self.rows.seek(ordinal, false)?);
                self.range.end = self.range.end.min(self.back?.0 + WIDTH as u64);
                continue;
            };
            self.range.end -= 1;
            if let Some(row) = found {
                #[cfg(test)]
                super::examined::count();
                return Some((ordinal, row));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn row(number: u64) -> Row {
        Row::new(json!({"number": number}).as_object().unwrap()).unwrap()
    }

    proptest! {
        /// It is an ordered map, and a clone stays as it is.
        #[test]
        fn it_is_an_ordered_map(
            steps in vec((prop_oneof![0..40_u64, 0..5000_u64, 0..10_000_000_u64, any::<u64>().prop_map(|n| n / 2)], any::<bool>()), 0..80),
            cut in 0..80_usize,
            range in (0..6000_u64, 0..6000_u64),
        ) {
            let (mut rows, mut model) = (Rows::default(), BTreeMap::new());
            let mut kept = None;
            for (place, (ordinal, is_insert)) in steps.into_iter().enumerate() {
                if place == cut {
                    kept = Some((rows.clone(), model.clone()));
                }
                if is_insert {
                    prop_assert_eq!(rows.insert(ordinal, row(ordinal)), model.insert(ordinal, row(ordinal)));
                } else {
                    let ordinal = model.range(ordinal..).next().map_or(ordinal, |(found, _)| *found);
                    prop_assert_eq!(rows.remove(ordinal), model.remove(&ordinal));
                }
            }
            for (rows, model) in kept.into_iter().chain([(rows, model)]) {
                prop_assert_eq!(rows.len(), model.len());
                prop_assert!(rows.iter().eq(model.iter().map(|(ordinal, row)| (*ordinal, row))));
                prop_assert!(rows.iter().rev().eq(model.iter().rev().map(|(ordinal, row)| (*ordinal, row))));
                let (from, until) = (range.0.min(range.1), range.0.max(range.1));
                prop_assert!(rows.range(from..until).eq(model.range(from..until).map(|(ordinal, row)| (*ordinal, row))));
                // From both ends by turns, until they meet.
                let (mut both, mut expected) = (rows.iter(), model.iter());
                loop {
                    let (one, two) = (both.next(), expected.next());
                    prop_assert_eq!(one.map(|(ordinal, _)| ordinal), two.map(|(ordinal, _)| *ordinal));
                    let (one, two) = (both.next_back(), expected.next_back());
                    prop_assert_eq!(one.map(|(ordinal, _)| ordinal), two.map(|(ordinal, _)| *ordinal));
                    if one.is_none() {
                        break;
                    }
                }
                for ordinal in model.keys() {
                    prop_assert_eq!(rows.get(*ordinal), model.get(ordinal));
                    prop_assert_eq!(rows.get(ordinal ^ 1).is_some(), model.contains_key(&(ordinal ^ 1)));
                }
            }
        }
    }
}
