//! Rows by ordinal: an ordered map with structural sharing.
//!
//! Ordinals are consecutive, so a radix tree over their bits is dense: a lookup takes one step per level without comparisons, and
//! a new row goes to the last leaf. A clone shares all nodes; a shared leaf and the path to it are copied on write. (A B-tree of
//! pairs takes twice the memory and is several times slower.)

use std::ops::Range;
use std::sync::Arc;

use super::Ordinal;
use crate::Row;

/// Bits of an ordinal per level.
const BITS: u32 = 4;
const WIDTH: usize = 1 << BITS;

/// A map from ordinals to rows.
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

/// Returns the index of the child for this ordinal, in a node at this height above the leaves.
fn child(ordinal: Ordinal, height: u32) -> usize {
    // The mask makes it less than the width, so the conversion cannot fail.
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

    /// Returns the number of ordinals that fit at the current height.
    fn capacity(&self) -> u64 {
        1_u64.checked_shl((self.height + 1) * BITS).unwrap_or(u64::MAX)
    }

    pub(super) fn get(&self, ordinal: Ordinal) -> Option<&Row> {
        #[cfg(test)]
        super::examined::count();
        self.leaf(ordinal)?[child(ordinal, 0)].as_ref()
    }

    fn leaf(&self, ordinal: Ordinal) -> Option<&[Option<Row>; WIDTH]> {
        if ordinal >= self.capacity() {
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

    /// Inserts a row. Returns the row that it replaces.
    pub(super) fn insert(&mut self, ordinal: Ordinal, row: Row) -> Option<Row> {
        while ordinal >= self.capacity() {
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
                    let index = child(ordinal, height);
                    height = height.saturating_sub(1);
                    node = Arc::make_mut(children)[index].get_or_insert_with(|| Node::empty(height));
                }
            }
        }
    }

    /// Removes a row.
    pub(super) fn remove(&mut self, ordinal: Ordinal) -> Option<Row> {
        self.get(ordinal)?;
        let removed = remove(&mut self.root, ordinal, self.height);
        self.len -= usize::from(removed.is_some());
        removed
    }

    /// Returns all rows and their ordinals, in order.
    pub(super) fn iter(&self) -> Iter<'_> {
        self.range(0..Ordinal::MAX)
    }

    /// Returns the rows in a range of ordinals.
    pub(super) fn range(&self, range: Range<Ordinal>) -> Iter<'_> {
        let end = range.end.min(self.capacity());
        Iter { rows: self, range: range.start.min(end)..end, front: None, back: None }
    }

    /// Returns the leaf with this ordinal, or the nearest one in the given direction, and its first ordinal.
    fn seek(&self, ordinal: Ordinal, is_forward: bool) -> Option<(Ordinal, &[Option<Row>; WIDTH])> {
        if ordinal >= self.capacity() {
            return None;
        }
        seek(self.root.as_ref()?, ordinal, self.height, is_forward)
    }
}

/// Removes a row from a subtree. An empty subtree is removed.
fn remove(subtree: &mut Option<Node>, ordinal: Ordinal, height: u32) -> Option<Row> {
    let node = subtree.as_mut()?;
    let removed = match node {
        Node::Leaf(rows) => Arc::make_mut(rows)[child(ordinal, 0)].take(),
        Node::Branch(children) => remove(&mut Arc::make_mut(children)[child(ordinal, height)], ordinal, height - 1),
    };
    if node.is_empty() {
        *subtree = None;
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
    // Otherwise the nearest sibling, from its nearest end.
    let shift = height * BITS;
    let base = ordinal.checked_shr(shift + BITS).unwrap_or(0).checked_shl(shift + BITS).unwrap_or(0);
    let sibling = |index: usize| {
        let start = base | (index as u64) << shift;
        let near = if is_forward { start } else { start | ((1 << shift) - 1) };
        seek(children[index].as_ref()?, near, height - 1, is_forward)
    };
    if is_forward { (own + 1..WIDTH).find_map(sibling) } else { (0..own).rev().find_map(sibling) }
}

/// A double-ended iterator over rows and their ordinals.
#[derive(Debug, Clone)]
pub(crate) struct Iter<'a> {
    rows: &'a Rows,
    /// The remaining ordinals.
    range: Range<Ordinal>,
    front: Option<(Ordinal, &'a [Option<Row>; WIDTH])>,
    back: Option<(Ordinal, &'a [Option<Row>; WIDTH])>,
}

/// Returns the entry of an ordinal, if it is in this leaf.
fn entry_in(leaf: Option<(Ordinal, &[Option<Row>; WIDTH])>, ordinal: Ordinal) -> Option<&Option<Row>> {
    let (start, rows) = leaf?;
    rows.get(usize::try_from(ordinal.checked_sub(start)?).ok()?)
}

impl<'a> Iterator for Iter<'a> {
    type Item = (Ordinal, &'a Row);

    fn next(&mut self) -> Option<Self::Item> {
        while !self.range.is_empty() {
            let ordinal = self.range.start;
            let Some(found) = entry_in(self.front, ordinal) else {
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
            let Some(found) = entry_in(self.back, ordinal) else {
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
        /// Compares with a `BTreeMap`. A clone is not changed by later steps.
        #[test]
        fn behaves_like_an_ordered_map(
            steps in vec((prop_oneof![0..40_u64, 0..5000_u64, 0..10_000_000_u64, any::<u64>().prop_map(|n| n / 2)], any::<bool>()), 0..80),
            clone_at in 0..80_usize,
            range in (0..6000_u64, 0..6000_u64),
        ) {
            let (mut rows, mut model) = (Rows::default(), BTreeMap::new());
            let mut cloned = None;
            for (step, (ordinal, is_insert)) in steps.into_iter().enumerate() {
                if step == clone_at {
                    cloned = Some((rows.clone(), model.clone()));
                }
                if is_insert {
                    prop_assert_eq!(rows.insert(ordinal, row(ordinal)), model.insert(ordinal, row(ordinal)));
                } else {
                    let ordinal = model.range(ordinal..).next().map_or(ordinal, |(found, _)| *found);
                    prop_assert_eq!(rows.remove(ordinal), model.remove(&ordinal));
                }
            }
            for (rows, model) in cloned.into_iter().chain([(rows, model)]) {
                prop_assert_eq!(rows.len(), model.len());
                prop_assert!(rows.iter().eq(model.iter().map(|(ordinal, row)| (*ordinal, row))));
                prop_assert!(rows.iter().rev().eq(model.iter().rev().map(|(ordinal, row)| (*ordinal, row))));
                let (from, until) = (range.0.min(range.1), range.0.max(range.1));
                prop_assert!(rows.range(from..until).eq(model.range(from..until).map(|(ordinal, row)| (*ordinal, row))));
                // Alternately from both ends, until they meet.
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
