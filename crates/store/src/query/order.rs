//! Scans of an index in the order of a sort.
//!
//! An index is usable if the filter fixes each of its first fields to one value, and its next fields are the sort fields, all in one
//! direction. In both directions, records that sort equal are in insertion order, and missing values come last. A reverse scan would
//! reverse that, so a descending sort reads the index group by group.

use super::access::{Conditions, ENTRY_WORK};
use crate::bucket::{Index, Ordinal};
use crate::query::{Budget, Exceeded, IndexKey};
use crate::{Bucket, Direction, Field};

/// A range of an index in the requested order.
#[derive(Debug)]
pub(super) struct SortedScan<'a> {
    index: &'a Index,
    direction: Direction,
    /// The key of the fixed fields.
    prefix: IndexKey,
    /// The number of fixed fields.
    fixed: usize,
    /// The number of sort fields.
    levels: usize,
    /// The range of the first sort field, if it is bounded.
    bounds: Option<(IndexKey, IndexKey)>,
    /// Whether the index has more fields, so that records that sort equal are not in insertion order.
    has_more_fields: bool,
}

/// A callback for each record, which returns whether to continue.
type Visitor<'t> = &'t mut dyn FnMut(Ordinal) -> bool;

impl<'a> SortedScan<'a> {
    /// Chooses the index that excludes the most records, if an index is usable.
    pub(super) fn choose(bucket: &'a Bucket, conditions: &Conditions<'_>, sort: &[(Field, Direction)]) -> Option<Self> {
        // A field with a fixed value does not affect the order.
        let sort: Vec<&(Field, Direction)> =
            sort.iter().filter(|(field, _)| conditions.value(field).is_none()).collect();
        let direction = sort.first()?.1;
        if sort.iter().any(|(_, other)| *other != direction) {
            return None;
        }
        let all = bucket.indexes().iter().filter_map(|index| Self::of(index, conditions, &sort, direction));
        all.max_by_key(|order| (order.fixed, order.bounds.is_some(), !order.has_more_fields))
    }

    fn of(
        index: &'a Index,
        conditions: &Conditions<'_>,
        sort: &[&(Field, Direction)],
        direction: Direction,
    ) -> Option<Self> {
        let mut prefix = IndexKey::new();
        let mut remaining = index.fields();
        while let Some((field, others)) = remaining.split_first()
            && let Some(key) = conditions.value(field)
        {
            prefix = prefix.join(&key);
            remaining = others;
        }
        let fixed = index.fields().len() - remaining.len();
        if remaining.len() < sort.len() || remaining.iter().zip(sort).any(|(field, (wanted, _))| field != wanted) {
            return None;
        }
        let bounds = match conditions.bounds(&remaining[0]) {
            Some(bounds) => Some(bounds.with_prefix(&prefix)?),
            None => None,
        };
        Some(Self {
            index,
            direction,
            fixed,
            levels: sort.len(),
            has_more_fields: remaining.len() > sort.len(),
            prefix,
            bounds,
        })
    }

    pub(super) fn fixed(&self) -> usize {
        self.fixed
    }

    pub(super) fn is_bounded(&self) -> bool {
        self.bounds.is_some()
    }

    /// Visits records in order, until the callback returns false.
    pub(super) fn walk(&self, budget: &Budget, visit: Visitor<'_>) -> Result<(), Exceeded> {
        let (from, until) = match &self.bounds {
            Some((from, until)) => (from.clone(), Some(until.clone())),
            None => (self.prefix.clone(), self.prefix.after_prefix()),
        };
        match self.direction {
            Direction::Asc => self.ascend(&from, until.as_ref(), budget, visit),
            Direction::Desc => self.descend(&self.prefix, &from, until.as_ref(), self.levels, budget, visit),
        }
        .map(drop)
    }

    fn ascend(
        &self,
        from: &IndexKey,
        until: Option<&IndexKey>,
        budget: &Budget,
        visit: Visitor<'_>,
    ) -> Result<bool, Exceeded> {
        if !self.has_more_fields {
            return Ok(self.index.range(from, until).all(visit));
        }
        let mut entries = self.index.entries(from, until).peekable();
        let mut group = Vec::new();
        while let Some((key, ordinal)) = entries.next() {
            collect(&mut group, *ordinal, budget)?;
            let parts = |key: &IndexKey| key.prefix_parts(&self.prefix, self.levels);
            if entries.peek().is_none_or(|(next, _)| parts(next) != parts(key)) {
                group.sort_unstable();
                if !group.drain(..).all(&mut *visit) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Visits the entries with a prefix in descending order of the next `levels` fields, null last. Returns whether to continue.
    fn descend(
        &self,
        prefix: &IndexKey,
        from: &IndexKey,
        until: Option<&IndexKey>,
        levels: usize,
        budget: &Budget,
        visit: Visitor<'_>,
    ) -> Result<bool, Exceeded> {
        let null_key = prefix.join(&IndexKey::of(None));
        let mut end = until.map_or(&null_key, |until| until.min(&null_key)).clone();
        loop {
            let mut entries = self.index.entries(from, Some(&end)).rev().peekable();
            let group = loop {
                let Some((key, ordinal)) = entries.next() else { break None };
                let is_alone =
                    levels == 1 && !self.has_more_fields && entries.peek().is_none_or(|(next, _)| next != key);
                if !is_alone {
                    break Some(key.prefix_parts(prefix, 1));
                }
                if !visit(*ordinal) {
                    return Ok(false);
                }
            };
            let Some(group) = group else { break };
            if !self.visit_group(&group, levels, budget, visit)? {
                return Ok(false);
            }
            end = group;
        }
        Ok(until.is_some_and(|until| *until <= null_key) || self.visit_group(&null_key, levels, budget, visit)?)
    }

    /// Visits the entries with one key after the prefix.
    fn visit_group(
        &self,
        key: &IndexKey,
        levels: usize,
        budget: &Budget,
        visit: Visitor<'_>,
    ) -> Result<bool, Exceeded> {
        let until = key.after_prefix();
        if levels > 1 {
            return self.descend(key, key, until.as_ref(), levels - 1, budget, visit);
        }
        let mut ordinals = self.index.range(key, until.as_ref());
        if !self.has_more_fields {
            return Ok(ordinals.all(visit));
        }
        let mut group = Vec::new();
        for ordinal in ordinals {
            collect(&mut group, ordinal, budget)?;
        }
        group.sort_unstable();
        Ok(group.into_iter().all(visit))
    }
}

/// Adds a record to the buffer of a group. The buffer is reused, so only its growth is charged.
fn collect(group: &mut Vec<Ordinal>, ordinal: Ordinal, budget: &Budget) -> Result<(), Exceeded> {
    budget.charge(ENTRY_WORK)?;
    if group.len() == group.capacity() {
        budget.hold(group.len().max(4) * size_of::<Ordinal>())?;
    }
    group.push(ordinal);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value as Json, json};

    use super::*;
    use crate::query::access::Access;
    use crate::query::plan;
    use crate::schema::BucketDefinition;
    use crate::{Query, Row};

    fn bucket(indexes: &Json, rows: impl Iterator<Item = Json>) -> Bucket {
        let any = json!({"type": "number"});
        let definition = json!({"key": "id", "schema": {"id": any, "a": any, "b": any}, "indexes": indexes});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for row in rows {
            bucket.put(Row::new(row.as_object().unwrap()).unwrap()).unwrap();
        }
        bucket
    }

    fn query(filter: &Json, sort: &Json) -> Query {
        Query::parse(&json!({"bucket": "b", "filter": filter, "sort": sort})).unwrap()
    }

    /// Returns the first records that are visited.
    fn walked(bucket: &Bucket, query: &Query, count: usize) -> Option<Vec<Ordinal>> {
        let order = SortedScan::choose(bucket, &Conditions::of(&query.filter), &query.sort)?;
        let mut found = Vec::new();
        let walked = order.walk(&Budget::unlimited(), &mut |ordinal| {
            found.push(ordinal);
            found.len() < count
        });
        walked.unwrap();
        Some(found)
    }

    #[test]
    fn scan_stops_when_enough_records_are_found() {
        let rows = (0..100).map(|id| json!({"id": id, "a": id % 10, "b": (id * 7) % 100}));
        let bucket = bucket(&json!([["a", "b"], "b"]), rows);
        for (filter, sort, expected) in [
            (json!({}), json!({"b": "asc"}), Some([0, 43, 86])),
            (json!({}), json!({"b": "desc"}), Some([57, 14, 71])),
            (json!({"b": {"$gt": 50, "$lt": 90}}), json!({"b": "desc"}), Some([27, 84, 41])),
            (json!({"a": 1}), json!({"b": "asc"}), Some([1, 31, 61])),
            (json!({"a": 1}), json!({"b": "desc"}), Some([71, 41, 11])),
            (json!({"a": 1}), json!({"a": "desc", "b": "asc"}), Some([1, 31, 61])),
            // Equal records are in insertion order in both directions, although the index has more fields.
            (json!({}), json!({"a": "asc"}), Some([0, 10, 20])),
            (json!({}), json!({"a": "desc"}), Some([9, 19, 29])),
            (json!({}), json!({"a": "desc", "b": "desc"}), Some([99, 69, 39])),
            (json!({}), json!({"a": "asc", "b": "desc"}), None),
            (json!({}), json!({"b": "asc", "a": "asc"}), None),
        ] {
            let query = query(&filter, &sort);
            let expected = expected.map(|ordinals| ordinals.to_vec());
            assert_eq!(walked(&bucket, &query, 3), expected, "{filter} {sort}");
        }
    }

    #[test]
    fn index_without_further_fields_is_preferred() {
        for indexes in [json!(["a", ["a", "b"]]), json!([["a", "b"], "a"])] {
            let bucket = bucket(&indexes, std::iter::empty());
            let query = query(&json!({}), &json!({"a": "desc"}));
            let order = SortedScan::choose(&bucket, &Conditions::of(&query.filter), &query.sort).unwrap();
            assert!(!order.has_more_fields, "{indexes}");
        }
    }

    #[test]
    fn null_sorts_last_and_arrays_sort_after_strings() {
        let values = [json!(null), json!([1]), json!(2), json!("x"), json!({"c": 1}), json!(2), json!(false)];
        let rows = values.iter().enumerate().map(|(id, value)| json!({"id": id, "a": value}));
        let bucket = bucket(&json!(["a"]), rows.chain([json!({"id": 7})]));
        let all = |direction: &str| walked(&bucket, &query(&json!({}), &json!({"a": direction})), 99).unwrap();
        assert_eq!(all("asc"), [6, 2, 5, 3, 1, 4, 0, 7]);
        assert_eq!(all("desc"), [1, 4, 3, 2, 5, 6, 0, 7]);
    }

    #[test]
    fn selective_filter_is_preferred_over_sorted_scan() {
        let rows = (0..1000).map(|id| json!({"id": id, "a": id % 100, "b": id}));
        let bucket = bucket(&json!(["a", "b"]), rows);
        let is_cheaper = |filter: &Json, sort: &Json, until: usize| {
            let query = query(filter, sort);
            let conditions = Conditions::of(&query.filter);
            let budget = Budget::unlimited();
            let access = Access::choose(&bucket, &conditions, &budget).unwrap().unwrap();
            let order = SortedScan::choose(&bucket, &conditions, &query.sort).unwrap();
            plan::is_cheaper(&order, &access, &bucket, until, &budget).unwrap()
        };
        let by_b = json!({"b": "asc"});
        assert!(!is_cheaper(&json!({"a": 1}), &by_b, 1));
        assert!(!is_cheaper(&json!({"id": 1}), &by_b, 1));
        assert!(is_cheaper(&json!({"b": {"$gt": 1}}), &by_b, 1));
        assert!(is_cheaper(&json!({"a": {"$gt": 1}}), &by_b, 1));
        assert!(!is_cheaper(&json!({"a": {"$gt": 98}}), &by_b, 1));
        assert!(!is_cheaper(&json!({"a": {"$gt": 1}}), &by_b, usize::MAX));
    }
}
