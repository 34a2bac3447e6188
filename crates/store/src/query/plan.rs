//! Which records are looked at, and in which order.
//!
//! An index serves if the conditions that must all hold fix its first fields by equality, and perhaps bound the next one. The one
//! that fixes most is taken. What it gives is still asked by the whole filter, so a plan is never wrong, at worst slow.

use std::collections::BinaryHeap;

use super::{Direction, compare};
use crate::bucket::{Index, Ordinal};
use crate::filter::{Comparison, Scalar, Test};
use crate::{Bucket, Field, Filter, IndexKey, Row, Value};

/// A part of an index.
#[derive(Debug)]
struct Access<'a> {
    index: &'a Index,
    from: IndexKey,
    until: Option<IndexKey>,
    /// How many fields are fixed, and whether the next one is bounded.
    worth: (usize, bool),
}

/// The records that are meant, in the order of coming.
pub(crate) fn unsorted<'a>(bucket: &'a Bucket, filter: &'a Filter, now: u64) -> Box<dyn Iterator<Item = &'a Row> + 'a> {
    let meant = move |row: &&Row| bucket.is_live(row, now) && filter.matches(row);
    match Access::choose(bucket, filter) {
        None => Box::new(bucket.rows().filter(meant)),
        Some(access) => {
            let mut ordinals: Vec<Ordinal> = access.ordinals().collect();
            ordinals.sort_unstable();
            Box::new(ordinals.into_iter().filter_map(|ordinal| bucket.row(ordinal)).filter(meant))
        }
    }
}

/// The records that are meant, sorted, from an offset on and up to a limit.
pub(super) fn sorted<'a>(
    bucket: &'a Bucket,
    filter: &Filter,
    sort: &[(Field, Direction)],
    offset: usize,
    limit: usize,
    now: u64,
) -> Vec<&'a Row> {
    let until = offset.saturating_add(limit);
    let entry = |ordinal: Ordinal| bucket.row(ordinal).map(|row| (ordinal, row));
    let meant = |(_, row): &(Ordinal, &Row)| bucket.is_live(row, now) && filter.matches(row);
    let found = match Access::choose(bucket, filter) {
        Some(access) => first(access.ordinals().filter_map(entry).filter(meant), sort, until),
        None if sort.is_empty() => bucket.entries().filter(meant).take(until).collect(),
        None => first(bucket.entries().filter(meant), sort, until),
    };
    found.into_iter().skip(offset).map(|(_, row)| row).collect()
}

/// The first `count` of these, sorted; equal ones in the order of coming. No more than those are kept at a time.
fn first<'a>(
    rows: impl Iterator<Item = (Ordinal, &'a Row)>,
    sort: &[(Field, Direction)],
    count: usize,
) -> Vec<(Ordinal, &'a Row)> {
    let mut kept = BinaryHeap::new();
    for (ordinal, row) in rows {
        let candidate = Candidate { ordinal, row, sort };
        if kept.len() < count {
            kept.push(candidate);
        } else if kept.peek().is_some_and(|last| candidate < *last) {
            kept.pop();
            kept.push(candidate);
        }
    }
    kept.into_sorted_vec().into_iter().map(|candidate| (candidate.ordinal, candidate.row)).collect()
}

/// A row with its place in an order.
struct Candidate<'a, 's> {
    ordinal: Ordinal,
    row: &'a Row,
    sort: &'s [(Field, Direction)],
}

impl Ord for Candidate<'_, '_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        compare(self.row, other.row, self.sort).then(self.ordinal.cmp(&other.ordinal))
    }
}

impl PartialOrd for Candidate<'_, '_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate<'_, '_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate<'_, '_> {}

impl<'a> Access<'a> {
    /// The part of an index that serves best, if one does.
    fn choose(bucket: &'a Bucket, filter: &Filter) -> Option<Self> {
        let mut tests = Vec::new();
        conditions(filter, &mut tests);
        bucket.indexes().iter().filter_map(|index| Self::of(index, &tests)).max_by_key(|access| access.worth)
    }

    fn of(index: &'a Index, tests: &[(&Field, &Test)]) -> Option<Self> {
        let mut key = IndexKey::new();
        let mut fixed = 0;
        for field in index.fields() {
            let of_field = || tests.iter().filter(|(tested, _)| *tested == field).map(|(_, test)| *test);
            let Some(value) = of_field().find_map(equal_to) else {
                let bounds = of_field().find_map(|test| bounds(test, &key));
                let worth = (fixed, bounds.is_some());
                let (from, until) = bounds.or_else(|| (fixed > 0).then(|| (key.clone(), key.after_prefix())))?;
                return Some(Self { index, from, until, worth });
            };
            key.push(Some(&value));
            fixed += 1;
        }
        let until = key.after_prefix();
        Some(Self { index, from: key, until, worth: (fixed, false) })
    }

    fn ordinals(&self) -> impl DoubleEndedIterator<Item = Ordinal> + use<'a> {
        self.index.range(&self.from, self.until.as_ref())
    }
}

/// The conditions that must all hold.
fn conditions<'a>(filter: &'a Filter, tests: &mut Vec<(&'a Field, &'a Test)>) {
    match filter {
        Filter::All(filters) => filters.iter().for_each(|filter| conditions(filter, tests)),
        Filter::Test(field, test) => tests.push((field, test)),
        Filter::Any(filters) => {
            if let [only] = &filters[..] {
                conditions(only, tests);
            }
        }
    }
}

/// The value that a test fixes a field to, if an index has it. Null stands in an index beside absent values, so it is left to the
/// filter.
fn equal_to(test: &Test) -> Option<Value<'_>> {
    let value = match test {
        Test::Equal(scalar) => scalar.value(),
        Test::In(scalars) => match &scalars[..] {
            [only] => only.value(),
            _ => None,
        },
        _ => None,
    };
    value.filter(|value| !matches!(value, Value::Null))
}

/// Between which keys a field lies that passes this test, behind the fields that are fixed.
fn bounds(test: &Test, fixed: &IndexKey) -> Option<(IndexKey, Option<IndexKey>)> {
    let with = |value: &Value<'_>| {
        let mut key = fixed.clone();
        key.push(Some(value));
        key
    };
    // The least and the greatest of the same type: order tests hold within one.
    let ends = |value: &Value<'_>| match value {
        Value::Number(_) => {
            Some((with(&Value::Number(f64::NEG_INFINITY)), with(&Value::Number(f64::INFINITY)).after_prefix()))
        }
        Value::String(_) => {
            let mut beyond = fixed.clone();
            beyond.push(None);
            Some((with(&Value::String("".into())), Some(beyond)))
        }
        _ => None,
    };
    let value = |scalar: &'_ Scalar| -> Option<Value<'static>> {
        match scalar.value()? {
            Value::Number(number) => Some(Value::Number(number)),
            Value::String(text) => Some(Value::String(text.into_owned().into())),
            _ => None,
        }
    };
    match test {
        Test::Order(comparison, scalar) => {
            let value = value(scalar)?;
            let (least, beyond) = ends(&value)?;
            let at = with(&value);
            Some(match comparison {
                Comparison::Greater => (at.after_prefix()?, beyond),
                Comparison::GreaterOrEqual => (at, beyond),
                Comparison::Less => (least, Some(at)),
                Comparison::LessOrEqual => (least, at.after_prefix()),
            })
        }
        Test::Between(low, high) => {
            let (low, high) = (value(low)?, value(high)?);
            Some((with(&low), with(&high).after_prefix()))
        }
        _ => None,
    }
}
