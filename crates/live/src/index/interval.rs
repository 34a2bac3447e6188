//! An interval tree for stabbing queries: the intervals that contain a value.
//!
//! It is a treap of the intervals, sorted by start; each node stores the greatest end in its subtree. A search skips subtrees in which
//! all intervals end before the value. If it enters a subtree left of the search path, at least one interval there contains the
//! value: all of them start before the value, and one ends after it. So a search that finds k of n intervals takes
//! O(log n + k log(n/k)) steps, regardless of their overlap: O(log n) for one and O(n) for all. Insertion and removal take O(log n).
//! Equal intervals share a node.

use std::borrow::Borrow;
use std::cmp::Ordering;

use slab::Slab;

use super::postings::{Postings, Slot};

/// Half-open intervals, with an optional end.
#[derive(Debug)]
pub(crate) struct Intervals<K> {
    nodes: Slab<Node<K>>,
    root: Option<usize>,
    /// The state of the random generator of priorities.
    seed: u32,
}

#[derive(Debug)]
struct Node<K> {
    from: K,
    until: Option<K>,
    queries: Postings,
    /// The heap priority: no child has a higher one.
    priority: u32,
    /// Children, ordered by start, then by end.
    left: Option<usize>,
    right: Option<usize>,
    /// The greatest end in the subtree. `None` if an interval has no end.
    last: Option<K>,
}

/// Returns whether a value is before an end.
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
        // Xorshift suffices: priorities must only be independent of the order of the intervals.
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

    /// Calls `found` for each query whose interval contains a value.
    pub(crate) fn for_each_containing<Q: Ord + ?Sized>(&self, value: &Q, found: &mut impl FnMut(Slot))
    where
        K: Borrow<Q>,
    {
        self.search(self.root, value, found);
    }

    /// Returns the number of queries whose interval contains a value, up to `max`.
    pub(crate) fn count<Q: Ord + ?Sized>(&self, value: &Q, max: usize) -> usize
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
            if count >= max {
                return max;
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

    /// Returns whether a node is ordered before another one.
    fn is_ordered_before(&self, one: usize, two: usize) -> bool {
        let key = |at: usize| (&self.nodes[at].from, self.nodes[at].until.as_ref());
        compare(key(one), key(two)).is_lt()
    }

    /// Inserts a node into a tree. Returns the new root.
    fn insert_below(&mut self, tree: Option<usize>, node: usize) -> usize {
        let Some(root) = tree else { return node };
        if self.nodes[node].priority > self.nodes[root].priority {
            let (left, right) = self.split(tree, node);
            (self.nodes[node].left, self.nodes[node].right) = (left, right);
            self.update(node);
            return node;
        }
        if self.is_ordered_before(node, root) {
            self.nodes[root].left = Some(self.insert_below(self.nodes[root].left, node));
        } else {
            self.nodes[root].right = Some(self.insert_below(self.nodes[root].right, node));
        }
        self.update(root);
        root
    }

    /// Removes a node from a tree. Returns the new root.
    fn remove_below(&mut self, tree: Option<usize>, node: usize) -> Option<usize> {
        let root = tree?;
        if root == node {
            return self.join(self.nodes[node].left, self.nodes[node].right);
        }
        if self.is_ordered_before(node, root) {
            self.nodes[root].left = self.remove_below(self.nodes[root].left, node);
        } else {
            self.nodes[root].right = self.remove_below(self.nodes[root].right, node);
        }
        self.update(root);
        Some(root)
    }

    /// Splits a tree into the nodes that are ordered before `at`, and the others.
    fn split(&mut self, tree: Option<usize>, at: usize) -> (Option<usize>, Option<usize>) {
        let Some(root) = tree else { return (None, None) };
        if self.is_ordered_before(root, at) {
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

    /// Joins two trees. All nodes of the first are ordered before those of the second.
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

    /// Recomputes the greatest end of a node from its children.
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

/// Compares ends. `None` is the greatest.
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
        intervals.for_each_containing(value, &mut |slot| slots.push(slot));
        slots.sort_unstable();
        slots
    }

    proptest! {
        /// Compares with a linear search, after any insertions and removals.
        #[test]
        fn search_finds_intervals_that_contain_the_value(
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
                    let contains = |(from, until, _): &&(u8, Option<u8>, Slot)| {
                        *from <= value && until.is_none_or(|until| value < until)
                    };
                    let mut expected: Vec<Slot> = model.iter().filter(contains).map(|known| known.2).collect();
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

    /// A number that counts comparisons.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct CountingKey(u32);

    impl Ord for CountingKey {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for CountingKey {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    /// The intervals are inserted in ascending order, which would degenerate an unbalanced tree.
    #[test]
    fn search_visits_few_other_intervals() {
        const MANY: u32 = 10_000;
        let disjoint = |number: u32| (number * 10, number * 10 + 10);
        let nested = |number: u32| (number, 2 * MANY - number);
        let mut intervals = Intervals::default();
        for number in 0..MANY {
            let (from, until) = disjoint(number);
            intervals.insert(CountingKey(from), Some(CountingKey(until)), number);
        }
        COMPARED.set(0);
        assert_eq!(found(&intervals, &CountingKey(54_321)), [5432]);
        assert!(COMPARED.get() < 300, "{} comparisons for one", COMPARED.get());

        let mut intervals = Intervals::default();
        for number in 0..MANY {
            let (from, until) = nested(number);
            intervals.insert(CountingKey(from), Some(CountingKey(until)), number);
        }
        for (value, count) in [(0, 1), (9, 10), (MANY, 10_000), (2 * MANY - 10, 10)] {
            COMPARED.set(0);
            assert_eq!(found(&intervals, &CountingKey(value)).len(), count);
            assert!(COMPARED.get() < 300 + 30 * count, "{} comparisons for {count}", COMPARED.get());
        }
    }
}
