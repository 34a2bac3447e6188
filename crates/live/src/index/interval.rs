//! Stabbing queries: which intervals contain a value.
//!
//! A treap of the intervals, sorted by their start; every node knows the greatest end in its subtree. A search skips each subtree
//! in which all intervals have ended. Of the subtrees that it enters, each one left of its path has an interval that contains the
//! value: all of them start before it, and the one that ends last ends after it. So a search that finds k of n intervals takes
//! O(log n + k log(n/k)) steps, which is O(log n) for one and O(n) for all of them, however they overlap. Insertion and removal
//! take O(log n). Equal intervals are one node.

use std::borrow::Borrow;
use std::cmp::Ordering;

use slab::Slab;

use super::postings::{Postings, Slot};

/// Intervals from a value, which is in them, until another one, which is not, or without end.
#[derive(Debug)]
pub(crate) struct Intervals<K> {
    nodes: Slab<Node<K>>,
    root: Option<usize>,
    /// The source of priorities.
    seed: u32,
}

#[derive(Debug)]
struct Node<K> {
    from: K,
    until: Option<K>,
    queries: Postings,
    /// No child has a higher one.
    priority: u32,
    /// All that begin before this one, and all that begin after it; of those that begin with it, by where they end.
    left: Option<usize>,
    right: Option<usize>,
    /// When the last one ends, of this and all below it.
    last: Option<K>,
}

/// Whether a value comes before an end.
fn is_before<K: Borrow<Q>, Q: Ord + ?Sized>(value: &Q, end: Option<&K>) -> bool {
    end.is_none_or(|end| value < end.borrow())
}

impl<K> Default for Intervals<K> {
    fn default() -> Self {
        Self { nodes: Slab::new(), root: None, seed: 0x9e37_79b9 }
    }
}

impl<K: Ord + Clone> Intervals<K> {
    pub(crate) fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    pub(crate) fn insert(&mut self, from: K, until: Option<K>, slot: Slot) {
        if let Some(node) = self.find(&from, until.as_ref()) {
            self.nodes[node].queries.insert(slot);
            return;
        }
        // Xorshift: all that is asked of it is that it has nothing to do with the order of the intervals.
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 17;
        self.seed ^= self.seed << 5;
        let last = until.clone();
        let (queries, priority) = (Postings::One(slot), self.seed);
        let node = self.nodes.insert(Node { from, until, queries, priority, left: None, right: None, last });
        self.root = Some(self.insert_below(self.root, node));
    }

    pub(crate) fn remove(&mut self, from: &K, until: Option<&K>, slot: Slot) {
        if let Some(node) = self.find(from, until)
            && self.nodes[node].queries.remove(slot)
        {
            self.root = self.remove_below(self.root, node);
            self.nodes.remove(node);
        }
    }

    /// Calls with each query whose interval contains the value.
    pub(crate) fn containing<Q: Ord + ?Sized>(&self, value: &Q, found: &mut impl FnMut(Slot))
    where
        K: Borrow<Q>,
    {
        self.search(self.root, value, found);
    }

    /// How many intervals contain the value, up to a number that is enough.
    pub(crate) fn count<Q: Ord + ?Sized>(&self, value: &Q, enough: usize) -> usize
    where
        K: Borrow<Q>,
    {
        let mut count = 0;
        let mut trees = vec![self.root];
        while let Some(tree) = trees.pop() {
            let Some(node) = tree.map(|at| &self.nodes[at]).filter(|node| is_before(value, node.last.as_ref())) else {
                continue;
            };
            trees.push(node.left);
            if node.from.borrow() <= value {
                trees.push(node.right);
                count += if is_before(value, node.until.as_ref()) { node.queries.len() } else { 0 };
            }
            if count >= enough {
                return enough;
            }
        }
        count
    }

    fn search<Q: Ord + ?Sized>(&self, tree: Option<usize>, value: &Q, found: &mut impl FnMut(Slot))
    where
        K: Borrow<Q>,
    {
        let Some(node) = tree.map(|at| &self.nodes[at]) else { return };
        if !is_before(value, node.last.as_ref()) {
            return;
        }
        self.search(node.left, value, found);
        if node.from.borrow() <= value {
            if is_before(value, node.until.as_ref()) {
                node.queries.for_each(found);
            }
            self.search(node.right, value, found);
        }
    }

    fn find(&self, from: &K, until: Option<&K>) -> Option<usize> {
        let mut next = self.root;
        while let Some(at) = next {
            let node = &self.nodes[at];
            next = match compare((from, until), (&node.from, node.until.as_ref())) {
                Ordering::Equal => return Some(at),
                Ordering::Less => node.left,
                Ordering::Greater => node.right,
            };
        }
        None
    }

    /// Whether a node stands before another one.
    fn stands_before(&self, one: usize, two: usize) -> bool {
        let key = |at: usize| (&self.nodes[at].from, self.nodes[at].until.as_ref());
        compare(key(one), key(two)).is_lt()
    }

    /// Puts a node into a tree; the tree with it.
    fn insert_below(&mut self, tree: Option<usize>, node: usize) -> usize {
        let Some(root) = tree else { return node };
        if self.nodes[node].priority > self.nodes[root].priority {
            let (left, right) = self.split(tree, node);
            (self.nodes[node].left, self.nodes[node].right) = (left, right);
            self.update(node);
            return node;
        }
        if self.stands_before(node, root) {
            self.nodes[root].left = Some(self.insert_below(self.nodes[root].left, node));
        } else {
            self.nodes[root].right = Some(self.insert_below(self.nodes[root].right, node));
        }
        self.update(root);
        root
    }

    /// Takes a node out of a tree; the tree without it.
    fn remove_below(&mut self, tree: Option<usize>, node: usize) -> Option<usize> {
        let root = tree?;
        if root == node {
            return self.join(self.nodes[node].left, self.nodes[node].right);
        }
        if self.stands_before(node, root) {
            self.nodes[root].left = self.remove_below(self.nodes[root].left, node);
        } else {
            self.nodes[root].right = self.remove_below(self.nodes[root].right, node);
        }
        self.update(root);
        Some(root)
    }

    /// What is before a node and what is after it.
    fn split(&mut self, tree: Option<usize>, at: usize) -> (Option<usize>, Option<usize>) {
        let Some(root) = tree else { return (None, None) };
        if self.stands_before(root, at) {
            let (before, after) = self.split(self.nodes[root].right, at);
            self.nodes[root].right = before;
            self.update(root);
            (Some(root), after)
        } else {
            let (before, after) = self.split(self.nodes[root].left, at);
            self.nodes[root].left = after;
            self.update(root);
            (before, Some(root))
        }
    }

    /// One tree of two, of which all of the first comes before all of the second.
    fn join(&mut self, before: Option<usize>, after: Option<usize>) -> Option<usize> {
        let (Some(one), Some(two)) = (before, after) else { return before.or(after) };
        let root = if self.nodes[one].priority > self.nodes[two].priority {
            self.nodes[one].right = self.join(self.nodes[one].right, after);
            one
        } else {
            self.nodes[two].left = self.join(before, self.nodes[two].left);
            two
        };
        self.update(root);
        Some(root)
    }

    /// Finds out anew when the last interval ends, when those below have done so.
    fn update(&mut self, at: usize) {
        let node = &self.nodes[at];
        let below = [node.left, node.right].into_iter().flatten().map(|child| self.nodes[child].last.as_ref());
        let later = |one, two| if compare_ends(one, two).is_lt() { two } else { one };
        let last = below.fold(node.until.as_ref(), later).cloned();
        self.nodes[at].last = last;
    }
}

fn compare<K: Ord>(one: (&K, Option<&K>), two: (&K, Option<&K>)) -> Ordering {
    one.0.cmp(two.0).then_with(|| compare_ends(one.1, two.1))
}

/// What has no end ends last.
fn compare_ends<K: Ord>(one: Option<&K>, two: Option<&K>) -> Ordering {
    match (one, two) {
        (None, None) => Ordering::Equal,
        (None, Some(_)) => Ordering::Greater,
        (Some(_), None) => Ordering::Less,
        (Some(one), Some(two)) => one.cmp(two),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn found<K: Ord + Clone>(intervals: &Intervals<K>, value: &K) -> Vec<Slot> {
        let mut slots = Vec::new();
        intervals.containing(value, &mut |slot| slots.push(slot));
        slots.sort_unstable();
        slots
    }

    proptest! {
        /// After any insertions and removals, a search finds what looking at each interval finds.
        #[test]
        fn a_search_finds_what_contains_the_value(
            steps in vec((0..20_u8, prop::option::of(0..20_u8), 0..12_u32, any::<bool>()), 0..80),
        ) {
            let mut intervals = Intervals::default();
            let mut model: Vec<(u8, Option<u8>, Slot)> = Vec::new();
            for (from, until, slot, is_insertion) in steps {
                if is_insertion {
                    intervals.insert(from, until, slot);
                    model.retain(|known| *known != (from, until, slot));
                    model.push((from, until, slot));
                } else if !model.is_empty() {
                    let (from, until, slot) = model.swap_remove(usize::from(from) % model.len());
                    intervals.remove(&from, until.as_ref(), slot);
                }
                for value in 0..21 {
                    let meant = |(from, until, _): &&(u8, Option<u8>, Slot)| {
                        *from <= value && until.is_none_or(|until| value < until)
                    };
                    let mut expected: Vec<Slot> = model.iter().filter(meant).map(|known| known.2).collect();
                    expected.sort_unstable();
                    prop_assert_eq!(intervals.count(&value, 3), expected.len().min(3));
                    prop_assert_eq!(found(&intervals, &value), expected);
                }
            }
            for (from, until, slot) in model {
                intervals.remove(&from, until.as_ref(), slot);
            }
            prop_assert!(intervals.is_empty() && intervals.nodes.is_empty());
        }
    }

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// A number that counts how often numbers are compared.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Counted(u32);

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    /// In the order of coming, too, which would make a list of a tree that is not balanced.
    #[test]
    fn a_search_passes_few_that_do_not_contain_the_value() {
        const MANY: u32 = 10_000;
        let disjoint = |place: u32| (place * 10, place * 10 + 10);
        let nested = |place: u32| (place, 2 * MANY - place);
        let mut intervals = Intervals::default();
        for place in 0..MANY {
            let (from, until) = disjoint(place);
            intervals.insert(Counted(from), Some(Counted(until)), place);
        }
        COMPARED.set(0);
        assert_eq!(found(&intervals, &Counted(54_321)), [5432]);
        assert!(COMPARED.get() < 300, "{} comparisons for one", COMPARED.get());

        let mut intervals = Intervals::default();
        for place in 0..MANY {
            let (from, until) = nested(place);
            intervals.insert(Counted(from), Some(Counted(until)), place);
        }
        for (value, count) in [(0, 1), (9, 10), (MANY, 10_000), (2 * MANY - 10, 10)] {
            COMPARED.set(0);
            assert_eq!(found(&intervals, &Counted(value)).len(), count);
            assert!(COMPARED.get() < 300 + 30 * count, "{} comparisons for {count}", COMPARED.get());
        }
    }
}
