//! Cursor pagination, and the first and last records of a bucket.
//!
//! Records are in insertion order, or in key order if the bucket is an `ordered_set`. Both orders are maintained, so a page costs
//! one search for its start and the visit of its records. Records that do not match the filter are examined and skipped.

use serde_json::Value as Json;

use crate::bucket::Ordinal;
use crate::query::plan::Scan;
use crate::query::{Budget, Exceeded, IndexKey};
use crate::{Bucket, Filter, Row, Value};

/// A page of records.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Page<'a> {
    /// The records.
    pub rows: Vec<&'a Row>,
    /// Whether there are further records.
    pub has_more: bool,
    /// The key of the last record as JSON text, the cursor of the next page. `None` if the page is empty.
    pub next_cursor: Option<&'a str>,
}

impl Bucket {
    /// Returns the first `count` records that match the filter and have not expired.
    pub fn first(&self, count: usize, filter: &Filter, now: u64, budget: &Budget) -> Result<Vec<&Row>, Exceeded> {
        next_selected(&mut self.in_order(), count, Scan { bucket: self, filter, now, budget })
    }

    /// Returns the last `count` records that match the filter and have not expired, in the same order as [`first`](Self::first).
    pub fn last(&self, count: usize, filter: &Filter, now: u64, budget: &Budget) -> Result<Vec<&Row>, Exceeded> {
        let mut rows = next_selected(&mut self.in_order().rev(), count, Scan { bucket: self, filter, now, budget })?;
        rows.reverse();
        Ok(rows)
    }

    /// Returns at most `limit` records after the record with the key `after`, or from the beginning. If that record does not exist,
    /// has expired or does not match the filter, the page is empty, so that it does not reveal a hidden record.
    pub fn page(
        &self,
        after: Option<&Json>,
        limit: usize,
        filter: &Filter,
        now: u64,
        budget: &Budget,
    ) -> Result<Page<'_>, Exceeded> {
        let scan = Scan { bucket: self, filter, now, budget };
        let mut all = match after.map(|key| self.cursor(key)) {
            None => self.in_order(),
            Some(Some((ordinal, row))) if scan.selects(row)? => self.in_order_after(ordinal, row),
            Some(_) => return Ok(Page { rows: Vec::new(), has_more: false, next_cursor: None }),
        };
        let rows = next_selected(&mut all, limit, scan)?;
        let next_cursor = rows.last().and_then(|last| last.text_of(self.key_field()));
        let has_more = !next_selected(&mut all, 1, scan)?.is_empty();
        Ok(Page { rows, has_more, next_cursor })
    }

    fn in_order(&self) -> Box<dyn DoubleEndedIterator<Item = &Row> + '_> {
        match self.key_order() {
            None => Box::new(self.rows()),
            Some(keys) => Box::new(keys.all().filter_map(|ordinal| self.row(ordinal))),
        }
    }

    fn in_order_after(&self, ordinal: Ordinal, row: &Row) -> Box<dyn DoubleEndedIterator<Item = &Row> + '_> {
        match self.key_order() {
            None => Box::new(self.rows_after(ordinal)),
            Some(keys) => Box::new(keys.after(&keys.key(row), ordinal).filter_map(|ordinal| self.row(ordinal))),
        }
    }

    fn cursor(&self, key: &Json) -> Option<(Ordinal, &Row)> {
        let key = Value::of_json(key).filter(|key| !matches!(key, Value::Null))?;
        self.find(&IndexKey::of(Some(&key)))
    }
}

/// Returns the next `count` records that the scan selects.
fn next_selected<'a>(
    rows: &mut dyn Iterator<Item = &'a Row>,
    count: usize,
    scan: Scan<'_, '_>,
) -> Result<Vec<&'a Row>, Exceeded> {
    let mut selected = Vec::new();
    while selected.len() < count
        && let Some(row) = rows.next()
    {
        if scan.selects(row)? {
            scan.budget.hold(size_of::<&Row>())?;
            selected.push(row);
        }
    }
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::schema::BucketDefinition;

    fn bucket(ets_type: &str, keys: &[Json]) -> Bucket {
        let definition = json!({"key": "id", "schema": {"id": {"type": "date"}}, "etsType": ets_type});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for (index, key) in keys.iter().enumerate() {
            bucket.put(row(&json!({"id": key, "even": index % 2 == 0}))).unwrap();
        }
        bucket
    }

    fn row(json: &Json) -> Row {
        Row::new(json.as_object().unwrap()).unwrap()
    }

    fn keys(rows: &[&Row]) -> Vec<Json> {
        rows.iter().map(|row| row.to_record()["id"].clone()).collect()
    }

    fn all_pages(bucket: &Bucket, limit: usize, filter: &Filter, now: u64) -> Vec<Json> {
        let mut found = Vec::new();
        let mut after: Option<Json> = None;
        loop {
            let page = bucket.page(after.as_ref(), limit, filter, now, &Budget::unlimited()).unwrap();
            found.extend(keys(&page.rows));
            let next = page.next_cursor.map(|text| serde_json::from_str(text).unwrap());
            assert_eq!(next.as_ref(), found.last().filter(|_| !page.rows.is_empty()));
            if !page.has_more {
                return found;
            }
            assert_eq!(page.rows.len(), limit);
            after = next;
        }
    }

    #[test]
    fn pages_are_in_key_order_or_insertion_order() {
        let inserted =
            [json!("b"), json!(10), json!("B"), json!(9), json!("ä"), json!("a\u{0}"), json!("a"), json!(-1)];
        let sorted = [json!(-1), json!(9), json!(10), json!("B"), json!("a"), json!("a\u{0}"), json!("b"), json!("ä")];
        let everything = Filter::everything();
        for (ets_type, order) in [("set", &inserted), ("ordered_set", &sorted)] {
            let bucket = bucket(ets_type, &inserted);
            assert_eq!(keys(&bucket.first(3, &everything, 0, &Budget::unlimited()).unwrap()), order[..3]);
            assert_eq!(keys(&bucket.last(3, &everything, 0, &Budget::unlimited()).unwrap()), order[5..]);
            assert_eq!(keys(&bucket.last(100, &everything, 0, &Budget::unlimited()).unwrap()), order[..]);
            for limit in 1..10 {
                assert_eq!(all_pages(&bucket, limit, &everything, 0), order[..], "{ets_type}, {limit} a page");
            }
            // Other reads are in insertion order.
            assert_eq!(keys(&bucket.rows().collect::<Vec<_>>()), inserted);
            assert_eq!(bucket.definition().index_count(), 0);
        }
    }

    #[test]
    fn key_order_is_maintained_by_writes() {
        let mut bucket = bucket("ordered_set", &[json!(3), json!(1), json!(2)]);
        bucket.remove(&Value::Number(2.0));
        bucket.put(row(&json!({"id": 0}))).unwrap();
        bucket.put(row(&json!({"id": 3, "again": true}))).unwrap();
        assert_eq!(all_pages(&bucket, 2, &Filter::everything(), 0), [json!(0), json!(1), json!(3)]);
    }

    #[test]
    fn page_after_the_last_record_is_empty() {
        let bucket = bucket("set", &[json!(1), json!(2)]);
        let everything = Filter::everything();
        let page = bucket.page(None, 2, &everything, 0, &Budget::unlimited()).unwrap();
        assert_eq!((page.rows.len(), page.has_more, page.next_cursor), (2, false, Some("2")));
        let nothing = Page { rows: Vec::new(), has_more: false, next_cursor: None };
        for cursor in [json!(2), json!(7), json!("1"), json!(null), json!([1]), json!({})] {
            assert_eq!(
                bucket.page(Some(&cursor), 2, &everything, 0, &Budget::unlimited()).unwrap(),
                nothing,
                "{cursor}"
            );
        }
    }

    #[test]
    fn hidden_and_expired_records_are_skipped_and_invalid_as_cursors() {
        let even = Filter::parse(&json!({"even": true})).unwrap();
        for ets_type in ["set", "ordered_set"] {
            let mut bucket = bucket(ets_type, &[json!(1), json!(2), json!(3), json!(4), json!(5)]);
            assert_eq!(all_pages(&bucket, 1, &even, 0), [json!(1), json!(3), json!(5)]);
            assert!(
                bucket.page(Some(&json!(2)), 9, &even, 0, &Budget::unlimited()).unwrap().rows.is_empty(),
                "hidden record as a cursor"
            );
            bucket.put(row(&json!({"id": 3, "even": true, "_expiresAt": 100}))).unwrap();
            assert_eq!(
                keys(&bucket.page(Some(&json!(3)), 9, &even, 99, &Budget::unlimited()).unwrap().rows),
                [json!(5)]
            );
            assert!(
                bucket.page(Some(&json!(3)), 9, &even, 100, &Budget::unlimited()).unwrap().rows.is_empty(),
                "expired record as a cursor"
            );
            assert_eq!(all_pages(&bucket, 1, &even, 100), [json!(1), json!(5)]);
            assert_eq!(keys(&bucket.first(2, &even, 100, &Budget::unlimited()).unwrap()), [json!(1), json!(5)]);
            assert_eq!(keys(&bucket.last(2, &even, 100, &Budget::unlimited()).unwrap()), [json!(1), json!(5)]);
        }
    }
}
