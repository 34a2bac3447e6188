//! Access paths: ranges of indexes that contain all records which can match a filter.
//!
//! An index is usable if the filter requires a value, or one of a few values, in each of its first fields. A range of the field after
//! them, or of the first field, is used too. A disjunction can use indexes if each of its alternatives can; then the ranges of all
//! alternatives are read.

use std::borrow::Cow;
use std::cmp::Reverse;

use crate::bucket::{Index, Ordinal};
use crate::filter::{Comparison, Test};
use crate::query::{Budget, Exceeded, IndexKey};
use crate::{Bucket, Field, Filter};

/// An access path: records and ranges of indexes that contain all records which can match.
#[derive(Debug)]
pub(super) struct Access<'a> {
    parts: Vec<AccessPart<'a>>,
    selectivity: Selectivity,
    /// Whether a record can be in several parts.
    may_overlap: bool,
    /// Whether the parts return the records in insertion order.
    is_in_insertion_order: bool,
    /// Whether all records in the parts match, so that the filter need not be evaluated.
    is_exact: bool,
}

/// A part of an access path: one record, or a range of an index.
#[derive(Debug)]
enum AccessPart<'a> {
    One(Ordinal),
    Range { index: &'a Index, from: IndexKey, until: Option<IndexKey> },
}

/// The expected selectivity of an access path. A greater value means fewer records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Selectivity {
    /// Whether each part has at most one record.
    pub(super) is_unique: bool,
    /// The number of first fields of the index with a required value, or one of a few.
    pub(super) fixed: usize,
    /// Whether the values of the field after the fixed fields are limited to a range.
    pub(super) is_bounded: bool,
}

/// Conditions that records must match: all tests, and at least one filter of each union.
#[derive(Debug, Clone, Default)]
pub(super) struct Conditions<'f> {
    /// Tests that must all pass.
    tests: Vec<(&'f Field, &'f Test)>,
    /// Lists of filters. At least one filter of each list must match.
    unions: Vec<&'f [Filter]>,
}

impl<'a> Access<'a> {
    /// Chooses the most selective access path, if an index is usable.
    pub(super) fn choose(
        bucket: &'a Bucket,
        conditions: &Conditions<'_>,
        budget: &Budget,
    ) -> Result<Option<Self>, Exceeded> {
        let mut planner = Planner { bucket, steps_left: Planner::MAX_STEPS, budget, exceeded: Ok(()) };
        let chosen = planner.choose(conditions);
        planner.exceeded.map(|()| chosen)
    }

    pub(super) fn selectivity(&self) -> Selectivity {
        self.selectivity
    }

    /// Returns the ordinals of the records, each once, in any order.
    pub(super) fn ordinals(&self, budget: &Budget) -> Result<Box<dyn Iterator<Item = Ordinal> + '_>, Exceeded> {
        if self.may_overlap {
            return Ok(Box::new(self.collect(budget)?.into_iter()));
        }
        Ok(Box::new(self.parts.iter().flat_map(AccessPart::ordinals)))
    }

    /// Returns the ordinals of the records, each once, in insertion order.
    pub(super) fn into_insertion_order(
        self,
        budget: &Budget,
    ) -> Result<Box<dyn Iterator<Item = Ordinal> + 'a>, Exceeded> {
        if self.is_in_insertion_order {
            return Ok(Box::new(self.parts.into_iter().flat_map(|part| part.ordinals())));
        }
        Ok(Box::new(self.collect(budget)?.into_iter()))
    }

    fn collect(&self, budget: &Budget) -> Result<Vec<Ordinal>, Exceeded> {
        let mut ordinals = Vec::new();
        for ordinal in self.parts.iter().flat_map(AccessPart::ordinals) {
            budget.charge(ENTRY_WORK)?;
            budget.hold(size_of::<Ordinal>())?;
            ordinals.push(ordinal);
        }
        ordinals.sort_unstable();
        ordinals.dedup();
        Ok(ordinals)
    }

    /// Returns whether there are more than `count` records.
    pub(super) fn is_larger_than(&self, count: usize, budget: &Budget) -> Result<bool, Exceeded> {
        let mut ordinals = self.parts.iter().flat_map(AccessPart::ordinals);
        for _ in 0..count {
            if ordinals.next().is_none() {
                return Ok(false);
            }
            budget.charge(ENTRY_WORK)?;
        }
        Ok(ordinals.next().is_some())
    }

    /// Returns the number of records that match, if it is known without examining them.
    pub(super) fn count(&self, budget: &Budget) -> Result<Option<usize>, Exceeded> {
        if !self.is_exact && !self.parts.is_empty() {
            return Ok(None);
        }
        let mut count = 0;
        for _ in self.ordinals(budget)? {
            budget.charge(ENTRY_WORK)?;
            count += 1;
        }
        Ok(Some(count))
    }
}

impl<'a> AccessPart<'a> {
    fn ordinals(&self) -> Box<dyn Iterator<Item = Ordinal> + 'a> {
        match self {
            Self::One(ordinal) => Box::new(std::iter::once(*ordinal)),
            Self::Range { index, from, until } => Box::new(index.range(from, until.as_ref())),
        }
    }
}

impl<'f> Conditions<'f> {
    pub(super) fn of(filter: &'f Filter) -> Self {
        let mut conditions = Self::default();
        conditions.add(filter);
        conditions
    }

    fn add(&mut self, filter: &'f Filter) {
        match filter {
            Filter::All(filters) => filters.iter().for_each(|filter| self.add(filter)),
            Filter::Test(field, test) => self.tests.push((field, test)),
            Filter::Any(filters) => match &filters[..] {
                [only] => self.add(only),
                filters => self.unions.push(filters),
            },
        }
    }

    fn tests_of(&self, field: &Field) -> impl Iterator<Item = &'f Test> {
        self.tests.iter().filter(move |(tested, _)| *tested == field).map(|(_, test)| *test)
    }

    /// Returns whether the conditions test only these fields.
    fn test_only(&self, fields: &[&Field]) -> bool {
        self.unions.is_empty() && self.tests.iter().all(|(field, _)| fields.contains(field))
    }

    /// Returns the keys of the possible values of a field, if a test lists them.
    fn values(&self, field: &Field) -> Option<Values<'f>> {
        let values = self.tests_of(field).filter_map(Values::of).min_by_key(|values| values.keys.len())?;
        Some(Values { is_exact: values.is_exact && self.tests_of(field).count() == 1, ..values })
    }

    /// Returns the key of the only possible value of a field.
    pub(super) fn value(&self, field: &Field) -> Option<IndexKey> {
        match &*self.values(field)?.keys {
            [only] => Some(only.clone()),
            _ => None,
        }
    }

    /// Returns a field that has no index but should have one for these conditions: preferably a field with listed values, otherwise a
    /// field with a range.
    pub(super) fn missing_index(&self, bucket: &Bucket) -> Option<&'f Field> {
        let has_index = |field: &Field| bucket.indexes().iter().any(|index| index.fields().first() == Some(field));
        let fields = || self.tests.iter().filter(|(field, _)| !has_index(field));
        let exact = fields().find(|(_, test)| Values::of(test).is_some());
        exact.or_else(|| fields().find(|(_, test)| Bounds::of(test).is_some())).map(|(field, _)| *field)
    }

    /// Returns the range of the keys of a field.
    pub(super) fn bounds(&self, field: &Field) -> Option<Bounds> {
        let mut found: Option<Bounds> = None;
        let mut is_exact = true;
        for test in self.tests_of(field) {
            match Bounds::of(test) {
                Some(bounds) => found = Some(found.map_or(bounds.clone(), |found| found.and(bounds))),
                None => is_exact = false,
            }
        }
        found.map(|bounds| Bounds { is_exact, ..bounds })
    }
}

/// The sorted keys of the possible values of a field, without duplicates.
struct Values<'f> {
    keys: Cow<'f, [IndexKey]>,
    /// Whether every record with one of these keys passes all tests of the field.
    is_exact: bool,
}

impl<'f> Values<'f> {
    fn of(test: &'f Test) -> Option<Self> {
        let keys = match test {
            Test::Equal(scalar) => {
                Cow::Owned(scalar.value().map(|value| IndexKey::of(Some(&value))).into_iter().collect())
            }
            Test::In(scalars) => Cow::Borrowed(scalars.keys()),
            Test::Exists(false) => return Some(Self { keys: Cow::Owned(vec![IndexKey::of(None)]), is_exact: true }),
            _ => return None,
        };
        Some(Self { is_exact: !includes_null(&keys), keys })
    }
}

/// Returns whether the keys include null. An index does not distinguish null from an absent field.
fn includes_null(sorted: &[IndexKey]) -> bool {
    sorted.last().is_some_and(IndexKey::is_null)
}

/// The range of the keys of a field.
#[derive(Debug, Clone)]
pub(super) struct Bounds {
    from: IndexKey,
    until: IndexKey,
    /// Whether every value in the range passes all tests of the field.
    is_exact: bool,
}

impl Bounds {
    fn of(test: &Test) -> Option<Self> {
        let (from, until) = match test {
            Test::Order(comparison, scalar) => {
                let value = scalar.value()?;
                let (start, end) = IndexKey::type_range(&value)?;
                let at = IndexKey::of(Some(&value));
                match comparison {
                    Comparison::Greater => (at.after_prefix()?, end),
                    Comparison::GreaterOrEqual => (at, end),
                    Comparison::Less => (start, at),
                    Comparison::LessOrEqual => (start, at.after_prefix()?),
                }
            }
            Test::Between(low, high) => {
                let (low, high) = (low.value()?, high.value()?);
                // If the bounds have different types, the range is empty.
                let (_, end) = IndexKey::type_range(&low)?;
                let (start, _) = IndexKey::type_range(&high)?;
                let until = IndexKey::of(Some(&high)).after_prefix()?;
                (IndexKey::of(Some(&low)).max(start), until.min(end))
            }
            Test::StartsWith(beginning) => {
                let mut from = IndexKey::new();
                from.push_prefix(beginning);
                let until = from.after_prefix()?;
                (from, until)
            }
            _ => return None,
        };
        Some(Self { from, until, is_exact: true })
    }

    fn and(self, other: Self) -> Self {
        Self { from: self.from.max(other.from), until: self.until.min(other.until), ..self }
    }

    /// Returns the range of compound keys with this prefix. `None` if it is empty.
    pub(super) fn with_prefix(&self, prefix: &IndexKey) -> Option<(IndexKey, IndexKey)> {
        (self.from < self.until).then(|| (prefix.join(&self.from), prefix.join(&self.until)))
    }
}

/// Work of reading one entry of an index.
pub(super) const ENTRY_WORK: usize = 32;

struct Planner<'a, 'b> {
    bucket: &'a Bucket,
    /// The number of conditions and values that may still be considered. It limits the time to plan a large filter.
    steps_left: usize,
    budget: &'b Budget,
    /// The error if the budget is exceeded. Planning stops then.
    exceeded: Result<(), Exceeded>,
}

impl<'a> Planner<'a, '_> {
    /// Limit of the conditions and values that are considered.
    const MAX_STEPS: usize = 100_000;
    /// Limit of the parts of an access path.
    const MAX_PARTS: usize = Filter::MAX_CONDITIONS;

    fn choose(&mut self, conditions: &Conditions<'_>) -> Option<Access<'a>> {
        let bucket = self.bucket;
        let mut found = Vec::new();
        found.extend(self.by_key(conditions));
        for index in bucket.indexes() {
            self.spend(conditions.tests.len() + 1)?;
            found.extend(self.by_index(index, conditions));
        }
        for union in &conditions.unions {
            found.extend(self.by_union(union, conditions));
        }
        // An access path with more parts than records is slower than a scan.
        found.retain(|access| access.parts.len() <= bucket.len());
        found
            .into_iter()
            .max_by_key(|access| (access.selectivity, access.is_in_insertion_order, Reverse(access.parts.len())))
    }

    /// Counts steps. Returns `None` if planning must stop.
    fn spend(&mut self, steps: usize) -> Option<()> {
        self.steps_left = self.steps_left.checked_sub(steps)?;
        self.exceeded = self.exceeded.and_then(|()| self.budget.charge(steps * ENTRY_WORK));
        self.exceeded.ok()
    }

    fn by_key(&mut self, conditions: &Conditions<'_>) -> Option<Access<'a>> {
        let key = self.bucket.key_field();
        let Values { keys, is_exact } = conditions.values(key)?;
        self.spend(keys.len())?;
        let parts: Vec<AccessPart<'_>> =
            keys.iter().filter_map(|key| self.bucket.find(key)).map(|(ordinal, _)| AccessPart::One(ordinal)).collect();
        Some(Access {
            is_in_insertion_order: parts.len() <= 1,
            parts,
            selectivity: Selectivity { is_unique: true, fixed: 1, is_bounded: false },
            may_overlap: false,
            is_exact: is_exact && conditions.test_only(&[key]),
        })
    }

    fn by_index(&mut self, index: &'a Index, conditions: &Conditions<'_>) -> Option<Access<'a>> {
        let mut prefixes = vec![IndexKey::new()];
        let mut fields = Vec::new();
        let mut bounds = None;
        let (mut has_null_key, mut is_exact) = (false, true);
        for field in index.fields() {
            let values = conditions.values(field);
            let Some(values) = values.filter(|values| values.keys.len() * prefixes.len() <= Self::MAX_PARTS) else {
                bounds = conditions.bounds(field);
                is_exact &= bounds.as_ref().is_none_or(|bounds| bounds.is_exact);
                break;
            };
            self.spend(values.keys.len() * prefixes.len())?;
            is_exact &= values.is_exact;
            has_null_key |= includes_null(&values.keys);
            prefixes = prefixes.iter().flat_map(|prefix| values.keys.iter().map(|key| prefix.join(key))).collect();
            fields.push(field);
        }
        let fixed = fields.len();
        if fixed == 0 && bounds.is_none() {
            return None;
        }
        let selectivity = Selectivity {
            is_unique: prefixes.is_empty() || index.is_unique() && fixed == 1 && !has_null_key,
            fixed,
            is_bounded: bounds.is_some(),
        };
        // Entries with equal keys are in insertion order.
        let is_in_insertion_order = prefixes.len() <= 1 && fixed == index.fields().len();
        if bounds.is_some() {
            fields.push(&index.fields()[fixed]);
        }
        let part = |prefix: IndexKey| match &bounds {
            None => Some(AccessPart::Range { index, until: prefix.after_prefix(), from: prefix }),
            Some(bounds) => {
                let (from, until) = bounds.with_prefix(&prefix)?;
                Some(AccessPart::Range { index, from, until: Some(until) })
            }
        };
        Some(Access {
            parts: prefixes.into_iter().filter_map(part).collect(),
            selectivity,
            may_overlap: false,
            is_in_insertion_order,
            is_exact: is_exact && conditions.test_only(&fields),
        })
    }

    /// Returns an access path for the records that match one of these filters and pass the tests of `conditions`.
    fn by_union(&mut self, filters: &[Filter], conditions: &Conditions<'_>) -> Option<Access<'a>> {
        let mut all = Access {
            parts: Vec::new(),
            selectivity: Selectivity { is_unique: true, fixed: usize::MAX, is_bounded: true },
            may_overlap: true,
            is_in_insertion_order: false,
            is_exact: conditions.unions.len() == 1,
        };
        for filter in filters {
            self.spend(conditions.tests.len() + 1)?;
            let mut own = Conditions { tests: conditions.tests.clone(), unions: Vec::new() };
            own.add(filter);
            let access = self.choose(&own)?;
            all.parts.extend(access.parts);
            all.selectivity = all.selectivity.min(access.selectivity);
            all.is_exact &= access.is_exact;
        }
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value as Json, json};

    use super::*;
    use crate::Row;
    use crate::schema::BucketDefinition;

    fn bucket(indexes: &Json) -> Bucket {
        let any = json!({"type": "number"});
        let schema = json!({"id": any, "a": any, "b": any, "s": any, "u": {"type": "number", "unique": true}});
        let definition = json!({"key": "id", "schema": schema, "indexes": indexes});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for id in 0..100 {
            let text = format!("{}{}", if id % 2 == 0 { "x" } else { "y" }, id / 2);
            let row = json!({"id": id, "a": id % 10, "b": id / 10, "s": text, "u": 1000 - id, "plain": id});
            bucket.put(Row::new(row.as_object().unwrap()).unwrap()).unwrap();
        }
        bucket
    }

    /// Returns the examined records, and the number of matches if it is known without examining them.
    fn examined(bucket: &Bucket, filter: &Json) -> Option<(Vec<Ordinal>, Option<usize>)> {
        let filter = Filter::parse(filter).unwrap();
        let budget = Budget::unlimited();
        let access = Access::choose(bucket, &Conditions::of(&filter), &budget).unwrap()?;
        let count = access.count(&budget).unwrap();
        Some((access.into_insertion_order(&budget).unwrap().collect(), count))
    }

    #[test]
    fn index_limits_the_examined_records() {
        let bucket = bucket(&json!(["a", ["b", "a"], "s"]));
        for (filter, ordinals, is_exact) in [
            (json!({"id": 7}), vec![7], true),
            (json!({"id": {"$in": [9, 7, 7, "7", 700]}}), vec![7, 9], true),
            (json!({"id": 7, "plain": 8}), vec![7], false),
            (json!({"u": 990, "a": 1, "b": 1}), vec![10], false),
            (json!({"a": 3, "b": {"$in": [4, 2]}}), vec![23, 43], true),
            (json!({"a": {"$in": [3, 4]}, "b": {"$in": [4, 2, 99]}}), vec![23, 24, 43, 44], true),
            (json!({"b": 4, "a": {"$gt": 2, "$lte": 4}}), vec![43, 44], true),
            (json!({"b": {"$between": [9, 9]}, "a": {"$in": []}}), vec![], true),
            (json!({"b": {"$gt": 8, "$lt": 9}}), vec![], true),
            (json!({"b": {"$gte": 9, "$lt": 10, "$neq": 5}}), (90..100).collect(), false),
            (json!({"b": {"$between": [1, "x"]}}), vec![], true),
            (json!({"b": {"$between": ["x", 1]}}), vec![], true),
            (json!({"a": [1]}), vec![], true),
            (json!({"a": {"$exists": false}}), vec![], true),
            (json!({"s": {"$startsWith": "y4"}}), vec![9, 81, 83, 85, 87, 89, 91, 93, 95, 97, 99], true),
            (json!({"$or": [{"id": 3}, {"a": 3, "b": 0}, {"u": 999}]}), vec![1, 3], true),
            (json!({"$or": [{"id": 3}, {"a": 3, "b": 1, "plain": 0}]}), vec![3, 13], false),
            (json!({"b": 2, "$or": [{"a": 3}, {"$or": [{"a": 4}, {"id": 99}]}]}), vec![23, 24, 99], false),
            (json!({"$and": [{"$or": [{"a": 1}, {"a": 2}]}, {"$or": [{"id": 1}, {"id": 2}]}]}), vec![1, 2], false),
            (json!({"$or": []}), vec![], true),
        ] {
            let (found, count) = examined(&bucket, &filter).unwrap_or_else(|| panic!("{filter} has no plan"));
            assert_eq!((found, count), (ordinals.clone(), is_exact.then_some(ordinals.len())), "{filter}");
        }
        for filter in [json!({"plain": 1}), json!({"$or": [{"a": 1}, {"plain": 1}]}), json!({"a": {"$neq": 1}})] {
            assert_eq!(examined(&bucket, &filter), None, "{filter}");
        }
        // An index does not distinguish null from absent, so the count is unknown.
        assert_eq!(examined(&bucket, &json!({"a": null})), Some((vec![], None)));
    }

    #[test]
    fn index_in_insertion_order_is_preferred() {
        for indexes in [json!(["a", ["a", "b"]]), json!([["a", "b"], "a"])] {
            let bucket = bucket(&indexes);
            let filter = Filter::parse(&json!({"a": 1})).unwrap();
            let access = Access::choose(&bucket, &Conditions::of(&filter), &Budget::unlimited()).unwrap().unwrap();
            assert!(access.is_in_insertion_order, "{indexes}");
        }
    }

    #[test]
    fn planning_steps_are_limited() {
        let bucket = bucket(&json!(["a", "b"]));
        let many: Vec<Json> = (0..50).map(|n| json!({"a": n})).collect();
        assert!(examined(&bucket, &json!({"$or": many})).is_some());
        let tests: Vec<Json> = (0..3000).map(|n| json!({"b": {"$neq": n}})).collect();
        assert_eq!(examined(&bucket, &json!({"$or": many, "$and": tests})), None);
        // If the limit is reached, an access path that was found earlier is used.
        let values: Vec<u32> = (0..5000).collect();
        let filters: Vec<Json> = (0..2000).map(|n| json!({"plain": n})).collect();
        let (found, count) = examined(&bucket, &json!({"id": {"$in": values}, "$or": filters})).unwrap();
        assert_eq!((found.len(), count), (100, None));
    }
}
