//! Plans: which records are examined, and in which order.
//!
//! A plan uses parts of indexes that contain all records which can match the filter, or an index with the order of the sort, so
//! that a query with a limit can stop early, or all records. Every examined record is checked with the whole filter, so a bad
//! plan is slow and never wrong.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::Direction;
use super::access::{Access, Conditions};
use super::order::Order;
use crate::bucket::Ordinal;
use crate::{Bucket, Field, Filter, IndexKey, Row};

/// The records that are meant, in the order of coming.
pub(crate) fn unsorted<'a: 'f, 'f>(
    bucket: &'a Bucket,
    filter: &'f Filter,
    now: u64,
) -> impl Iterator<Item = &'a Row> + 'f {
    placed(bucket, filter, now).map(|(_, row)| row)
}

/// The records that are meant, in the order of coming, and their places in it.
pub(super) fn placed<'a: 'f, 'f>(
    bucket: &'a Bucket,
    filter: &'f Filter,
    now: u64,
) -> Box<dyn Iterator<Item = (Ordinal, &'a Row)> + 'f> {
    let entry = |ordinal: Ordinal| bucket.row(ordinal).map(|row| (ordinal, row));
    let meant = move |(_, row): &(Ordinal, &Row)| bucket.is_live(row, now) && filter.matches(row);
    match Access::choose(bucket, &Conditions::of(filter)) {
        None => Box::new(bucket.entries().filter(meant)),
        Some(access) => Box::new(access.into_order().filter_map(entry).filter(meant)),
    }
}

/// How many records are meant.
pub(crate) fn count(bucket: &Bucket, filter: &Filter, now: u64) -> usize {
    if filter.is_everything() {
        return bucket.len() - bucket.expired(now).count();
    }
    let meant = |row: &&Row| bucket.is_live(row, now) && filter.matches(row);
    match Access::choose(bucket, &Conditions::of(filter)) {
        None => bucket.rows().filter(meant).count(),
        Some(access) => {
            let known = if bucket.expires() { None } else { access.count() };
            let ask = || access.ordinals().filter_map(|ordinal| bucket.row(ordinal)).filter(meant).count();
            known.unwrap_or_else(ask)
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
    if limit == 0 {
        return Vec::new();
    }
    if sort.is_empty() {
        return unsorted(bucket, filter, now).skip(offset).take(limit).collect();
    }
    let until = offset.saturating_add(limit);
    let meant = |row: &Row| bucket.is_live(row, now) && filter.matches(row);
    let conditions = Conditions::of(filter);
    let access = Access::choose(bucket, &conditions);
    let order = Order::choose(bucket, &conditions, sort);
    let order = order.filter(|order| access.as_ref().is_none_or(|access| is_cheaper(order, access, bucket, until)));
    if let Some(found) = order.and_then(|order| walk(bucket, &order, meant, offset, until)) {
        return found;
    }
    let found = match access {
        Some(access) => {
            let entries = access.ordinals().filter_map(|ordinal| Some((ordinal, bucket.row(ordinal)?)));
            first(entries.filter(|(_, row)| meant(row)), sort, until)
        }
        None => first(bucket.entries().filter(|(_, row)| meant(row)), sort, until),
    };
    found.into_iter().skip(offset).collect()
}

/// The records in the order of an index. None if so few of the first ones are meant that looking at all, as they lie, is sooner
/// done: an index leads to them in leaps.
fn walk<'a>(
    bucket: &'a Bucket,
    order: &Order<'_>,
    meant: impl Fn(&Row) -> bool,
    offset: usize,
    until: usize,
) -> Option<Vec<&'a Row>> {
    let trial = bucket.len() / 8;
    let mut found = Vec::new();
    let (mut looked, mut passed) = (0_usize, 0_usize);
    let mut goes_well = true;
    order.walk(&mut |ordinal| {
        let Some(row) = bucket.row(ordinal) else { return true };
        looked += 1;
        if meant(row) {
            passed += 1;
            if passed > offset {
                found.push(row);
            }
        }
        if looked == trial {
            let is_rare = passed.saturating_mul(4) < looked;
            goes_well = !is_rare || until.saturating_mul(looked) < passed.saturating_mul(bucket.len() / 2);
        }
        goes_well && passed < until
    });
    goes_well.then_some(found)
}

/// Whether the first records are found sooner in order than by looking at all that can be meant.
pub(super) fn is_cheaper(order: &Order<'_>, access: &Access<'_>, bucket: &Bucket, until: usize) -> bool {
    let worth = access.worth();
    if worth.is_unique {
        return false;
    }
    // It looks at no others, and need not sort them.
    if order.fixed() > worth.fixed || order.fixed() == worth.fixed && (order.is_bounded() || !worth.is_bounded) {
        return true;
    }
    // Among n records, of which m can be meant, so many are found after n / m times as many. With equality nobody knows where
    // they lie: those of one kind are often of one time.
    let few = until.saturating_mul(bucket.len()).isqrt();
    worth.fixed == 0 && access.is_larger_than(few)
}

/// The first `count` of these, sorted; equal ones in the order of coming. No more than those are kept at a time.
fn first<'a>(
    rows: impl Iterator<Item = (Ordinal, &'a Row)>,
    sort: &[(Field, Direction)],
    count: usize,
) -> Vec<&'a Row> {
    let mut kept = BinaryHeap::new();
    for (ordinal, row) in rows {
        let candidate = Candidate::new(ordinal, row, sort);
        if kept.len() < count {
            kept.push(candidate);
        } else if kept.peek().is_some_and(|last| candidate < *last) {
            kept.pop();
            kept.push(candidate);
        }
    }
    kept.into_sorted_vec().into_iter().map(|candidate| candidate.row).collect()
}

/// A row with its place in an order, which is read from it once.
struct Candidate<'a, 's> {
    keys: Box<[IndexKey]>,
    ordinal: Ordinal,
    row: &'a Row,
    sort: &'s [(Field, Direction)],
}

impl<'a, 's> Candidate<'a, 's> {
    fn new(ordinal: Ordinal, row: &'a Row, sort: &'s [(Field, Direction)]) -> Self {
        let keys = sort.iter().map(|(field, _)| IndexKey::of(row.get(field).as_ref())).collect();
        Self { keys, ordinal, row, sort }
    }
}

impl Ord for Candidate<'_, '_> {
    /// Field by field, null and absent ones last in both directions.
    fn cmp(&self, other: &Self) -> Ordering {
        let mut fields = self.keys.iter().zip(&other.keys).zip(self.sort).map(|((one, two), (_, direction))| {
            match (one.is_nothing(), two.is_nothing(), direction) {
                (false, false, Direction::Ascending) => one.cmp(two),
                (false, false, Direction::Descending) => two.cmp(one),
                (one, two, _) => one.cmp(&two),
            }
        });
        let first = fields.find(|ordering| ordering.is_ne());
        first.unwrap_or(Ordering::Equal).then(self.ordinal.cmp(&other.ordinal))
    }
}

impl PartialOrd for Candidate<'_, '_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate<'_, '_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate<'_, '_> {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::BucketDefinition;

    #[test]
    fn an_order_in_which_few_are_meant_is_given_up() {
        let number = json!({"type": "number"});
        let definition = json!({"key": "id", "schema": {"id": number, "a": number}, "indexes": ["a"]});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for id in 0..80 {
            bucket.put(Row::new(json!({"id": id, "a": 80 - id}).as_object().unwrap()).unwrap()).unwrap();
        }
        let sort = [(Field::new("a"), Direction::Ascending)];
        let everything = Filter::everything();
        let order = Order::choose(&bucket, &Conditions::of(&everything), &sort).unwrap();
        let found = |meant: &dyn Fn(&Row) -> bool, until: usize| {
            let looked = std::cell::Cell::new(0);
            let count = |row: &Row| {
                looked.set(looked.get() + 1);
                meant(row)
            };
            (walk(&bucket, &order, count, 1, until).map(|rows| rows.len()), looked.get())
        };
        assert_eq!(found(&|_| true, 3), (Some(2), 3), "no more than is wanted");
        assert_eq!(found(&|_| true, usize::MAX), (Some(79), 80));
        assert_eq!(found(&|_| false, 3), (None, 10), "an eighth of them");
    }
}
