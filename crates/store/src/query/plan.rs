//! Plans: the choice of the records to examine, and of their order.
//!
//! A plan reads ranges of indexes that contain all records which can match the filter, or an index in the order of the sort, so that
//! a query with a limit can stop early. Otherwise it scans all records. Every record in a result has been checked with the whole
//! filter, so a bad plan is slow but never wrong. Only a count skips the check, if all records in the ranges match.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::access::{Access, Conditions};
use super::order::SortedScan;
use crate::bucket::Ordinal;
use crate::budget::CONDITION_WORK;
use crate::query::{Budget, Exceeded, IndexKey};
use crate::{Bucket, Direction, Field, Filter, Row};

/// Work of visiting one record in a scan, without evaluating the filter.
const VISIT_WORK: usize = 24;

/// A read of the records of a bucket that match a filter and have not expired at a given time, within a budget.
#[derive(Clone, Copy)]
pub(crate) struct Scan<'a, 'f> {
    pub(crate) bucket: &'a Bucket,
    pub(crate) filter: &'f Filter,
    pub(crate) now: u64,
    pub(crate) budget: &'f Budget,
}

type Entry<'a> = (Ordinal, &'a Row);

impl<'a: 'f, 'f> Scan<'a, 'f> {
    /// Returns whether a row matches and has not expired.
    pub(crate) fn selects(&self, row: &Row) -> Result<bool, Exceeded> {
        self.budget.charge(VISIT_WORK)?;
        Ok(self.bucket.is_live(row, self.now) && self.filter.matches_within(row, self.budget)?)
    }

    /// Returns the selected rows, in the order of the entries.
    fn select(
        self,
        entries: impl Iterator<Item = Entry<'a>> + 'f,
    ) -> Box<dyn Iterator<Item = Result<Entry<'a>, Exceeded>> + 'f> {
        Box::new(entries.filter_map(move |entry| match self.selects(entry.1) {
            Ok(true) => Some(Ok(entry)),
            Ok(false) => None,
            Err(exceeded) => Some(Err(exceeded)),
        }))
    }

    /// Returns the selected rows in insertion order, with their ordinals. The items after an error are unspecified.
    pub(crate) fn entries(self) -> Box<dyn Iterator<Item = Result<Entry<'a>, Exceeded>> + 'f> {
        match self.candidates() {
            Ok(None) => self.select(self.bucket.entries()),
            Ok(Some(ordinals)) => self.select(ordinals.filter_map(move |ordinal| self.entry(ordinal))),
            Err(exceeded) => Box::new(std::iter::once(Err(exceeded))),
        }
    }

    /// Returns the candidates from an index in insertion order, or `None` if no index is usable.
    fn candidates(self) -> Result<Option<Box<dyn Iterator<Item = Ordinal> + 'a>>, Exceeded> {
        let access = Access::choose(self.bucket, &Conditions::of(self.filter), self.budget)?;
        access.map(|access| access.into_insertion_order(self.budget)).transpose()
    }

    fn entry(&self, ordinal: Ordinal) -> Option<Entry<'a>> {
        self.bucket.row(ordinal).map(|row| (ordinal, row))
    }

    /// Returns the number of selected rows.
    pub(crate) fn count(self) -> Result<usize, Exceeded> {
        let Self { bucket, filter, now, budget } = self;
        let mut count = 0;
        if filter.is_everything() {
            for _ in bucket.expired(now) {
                budget.charge(VISIT_WORK)?;
                count += 1;
            }
            return Ok(bucket.len() - count);
        }
        let access = Access::choose(bucket, &Conditions::of(filter), budget)?;
        if let Some(access) = &access
            && !bucket.has_expiring_records()
            && let Some(known) = access.count(budget)?
        {
            return Ok(known);
        }
        match &access {
            None => {
                for row in bucket.rows() {
                    count += usize::from(self.selects(row)?);
                }
            }
            Some(access) => {
                for row in access.ordinals(budget)?.filter_map(|ordinal| bucket.row(ordinal)) {
                    count += usize::from(self.selects(row)?);
                }
            }
        }
        Ok(count)
    }

    /// Returns the selected rows, sorted, with an offset and a limit.
    pub(super) fn sorted(
        self,
        sort: &[(Field, Direction)],
        offset: usize,
        limit: usize,
    ) -> Result<Vec<&'a Row>, Exceeded> {
        let Self { bucket, filter, budget, .. } = self;
        if limit == 0 {
            return Ok(Vec::new());
        }
        if sort.is_empty() {
            let mut found = Vec::new();
            for entry in self.entries().skip(offset).take(limit) {
                budget.hold(size_of::<&Row>())?;
                found.push(entry?.1);
            }
            return Ok(found);
        }
        let wanted = offset.saturating_add(limit);
        let conditions = Conditions::of(filter);
        let access = Access::choose(bucket, &conditions, budget)?;
        let order = match (SortedScan::choose(bucket, &conditions, sort), &access) {
            (Some(order), Some(access)) if !is_cheaper(&order, access, bucket, wanted, budget)? => None,
            (order, _) => order,
        };
        if let Some(order) = order
            && let Some(found) = self.walk(&order, offset, wanted)?
        {
            return Ok(found);
        }
        let found = match access {
            Some(access) => {
                let entries = access.ordinals(budget)?.filter_map(|ordinal| self.entry(ordinal));
                self.first(entries, sort, wanted)?
            }
            None => self.first(bucket.entries(), sort, wanted)?,
        };
        Ok(found.into_iter().skip(offset).collect())
    }

    /// Returns the selected rows in the order of an index, without the first `offset` rows, until `wanted` rows are selected in total.
    /// Returns `None` if so few of the first rows are selected that a sequential scan is faster than random access through the index.
    fn walk(self, order: &SortedScan<'_>, offset: usize, wanted: usize) -> Result<Option<Vec<&'a Row>>, Exceeded> {
        let Self { bucket, budget, .. } = self;
        let trial_rows = bucket.len() / 8;
        let mut found = Vec::new();
        let (mut examined, mut passed) = (0_usize, 0_usize);
        let mut is_worthwhile = true;
        let mut exceeded = Ok(());
        let mut visit = |ordinal| -> Result<bool, Exceeded> {
            let Some(row) = bucket.row(ordinal) else { return Ok(true) };
            examined += 1;
            if self.selects(row)? {
                passed += 1;
                if passed > offset {
                    budget.hold(size_of::<&Row>())?;
                    found.push(row);
                }
            }
            if examined == trial_rows {
                let is_rare = passed.saturating_mul(4) < examined;
                is_worthwhile = !is_rare || wanted.saturating_mul(examined) < passed.saturating_mul(bucket.len() / 2);
            }
            Ok(is_worthwhile && passed < wanted)
        };
        order.walk(budget, &mut |ordinal| {
            visit(ordinal).unwrap_or_else(|error| {
                exceeded = Err(error);
                false
            })
        })?;
        exceeded.map(|()| is_worthwhile.then_some(found))
    }

    /// Returns the first `count` selected rows in sorted order. Rows that sort equal are in insertion order. Keeps at most `count` rows
    /// in memory.
    fn first(
        self,
        entries: impl Iterator<Item = Entry<'a>>,
        sort: &[(Field, Direction)],
        count: usize,
    ) -> Result<Vec<&'a Row>, Exceeded> {
        let mut heap = BinaryHeap::new();
        for (ordinal, row) in entries {
            if !self.selects(row)? {
                continue;
            }
            self.budget.charge(sort.len() * (CONDITION_WORK + row.member_count()))?;
            let candidate = Candidate::new(ordinal, row, sort);
            self.budget.charge(candidate.bytes())?;
            if heap.len() < count {
                self.budget.hold(candidate.bytes())?;
                heap.push(candidate);
            } else if heap.peek().is_some_and(|last| candidate < *last)
                && let Some(last) = heap.pop()
            {
                self.budget.hold(candidate.bytes().saturating_sub(last.bytes()))?;
                heap.push(candidate);
            }
        }
        Ok(heap.into_sorted_vec().into_iter().map(|candidate| candidate.row).collect())
    }
}

/// Returns whether a sorted scan is expected to be cheaper than examining and sorting all candidates.
pub(super) fn is_cheaper(
    order: &SortedScan<'_>,
    access: &Access<'_>,
    bucket: &Bucket,
    wanted: usize,
    budget: &Budget,
) -> Result<bool, Exceeded> {
    let selectivity = access.selectivity();
    if selectivity.is_unique {
        return Ok(false);
    }
    // The sorted scan examines no additional records and avoids the sort.
    if order.fixed() > selectivity.fixed
        || order.fixed() == selectivity.fixed && (order.is_bounded() || !selectivity.is_bounded)
    {
        return Ok(true);
    }
    // With m candidates among n records, a sorted scan finds `wanted` candidates after about `wanted * n / m` records if they are
    // spread evenly. Candidates of equality conditions often are not, so the estimate is used only without such conditions.
    // The sorted scan is cheaper if this is less than m, which means that m is greater than the square root of `wanted * n`.
    let break_even = wanted.saturating_mul(bucket.len()).isqrt();
    Ok(selectivity.fixed == 0 && access.is_larger_than(break_even, budget)?)
}

/// A row with its sort keys.
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

    /// Returns the memory of the candidate in bytes.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.keys.iter().map(IndexKey::memory).sum::<usize>()
    }
}

impl Ord for Candidate<'_, '_> {
    /// Compares field by field. Null and absent values are last in both directions.
    fn cmp(&self, other: &Self) -> Ordering {
        let mut fields = self.keys.iter().zip(&other.keys).zip(self.sort).map(|((one, two), (_, direction))| {
            match (one.is_null(), two.is_null(), direction) {
                (false, false, Direction::Asc) => one.cmp(two),
                (false, false, Direction::Desc) => two.cmp(one),
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

    use serde_json::{Value as Json, json};

    use super::*;
    use crate::schema::BucketDefinition;

    #[test]
    fn sorted_scan_with_few_matches_is_abandoned() {
        let number = json!({"type": "number"});
        let definition = json!({"key": "id", "schema": {"id": number, "a": number}, "indexes": ["a"]});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for id in 0..80 {
            bucket.put(Row::new(json!({"id": id, "a": 80 - id}).as_object().unwrap()).unwrap()).unwrap();
        }
        let sort = [(Field::new("a"), Direction::Asc)];
        let budget = Budget::unlimited();
        let found = |filter: &Json, wanted: usize| {
            let filter = Filter::parse(filter).unwrap();
            let order = SortedScan::choose(&bucket, &Conditions::of(&filter), &sort).unwrap();
            let scan = Scan { bucket: &bucket, filter: &filter, now: 0, budget: &budget };
            scan.walk(&order, 1, wanted).unwrap().map(|rows| rows.len())
        };
        assert_eq!(found(&json!({}), 3), Some(2), "stops at the limit");
        assert_eq!(found(&json!({}), usize::MAX), Some(79));
        assert_eq!(found(&json!({"none": 1}), 3), None, "no match in the first eighth");
    }
}
