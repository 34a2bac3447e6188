//! The result of a query, as parsed JSON or as text.

use serde_json::Value as Json;

use super::plan::Scan;
use crate::budget::RECORD_WORK;
use crate::query::{Budget, Comparison, Exceeded, Scalar, Test};
use crate::{Aggregate, Bucket, Filter, Query, Row};

/// The result of a query.
#[derive(Debug, Clone, PartialEq)]
pub enum QueryOutput {
    /// The records, with the requested fields.
    Records(Vec<Json>),
    /// The value of an aggregate. `None` is the minimum or maximum of no numbers.
    Value(Option<Json>),
}

impl QueryOutput {
    /// Returns the records, or an empty list for an aggregate.
    pub fn into_records(self) -> Vec<Json> {
        if let Self::Records(records) = self { records } else { Vec::new() }
    }
}

impl Query {
    /// Evaluates the query on a bucket. `now` is the time in milliseconds since 1970; records that have expired are ignored.
    pub fn evaluate(&self, bucket: &Bucket, now: u64, budget: &Budget) -> Result<QueryOutput, Exceeded> {
        Ok(match &self.aggregate {
            Some(aggregate) => QueryOutput::Value(self.compute(aggregate, bucket, now, budget)?),
            None => {
                QueryOutput::Records(self.rows(bucket, now, budget)?.into_iter().map(|row| self.project(row)).collect())
            }
        })
    }

    /// Evaluates the query and appends the result as JSON text of at most `max` bytes, copied from the rows. Returns false and appends
    /// nothing if there is no result: the minimum or maximum of no numbers.
    pub fn write_result(
        &self,
        bucket: &Bucket,
        now: u64,
        out: &mut Vec<u8>,
        max: usize,
        budget: &Budget,
    ) -> Result<bool, Exceeded> {
        let end = out.len().saturating_add(max);
        if let Some(aggregate) = &self.aggregate {
            let value = self.compute(aggregate, bucket, now, budget)?;
            out.extend(value.iter().flat_map(|value| value.to_string().into_bytes()));
            return if out.len() > end { Err(Exceeded::Result { max }) } else { Ok(value.is_some()) };
        }
        out.push(b'[');
        for (index, row) in self.rows(bucket, now, budget)?.into_iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            let before = out.len();
            self.write_record(row, out);
            budget.charge(RECORD_WORK + out.len() - before)?;
            if out.len() >= end {
                return Err(Exceeded::Result { max });
            }
        }
        out.push(b']');
        Ok(true)
    }

    /// Appends the projection of a record as JSON text.
    pub(super) fn write_record(&self, row: &Row, out: &mut Vec<u8>) {
        let Some(fields) = &self.fields else {
            out.extend_from_slice(row.text().as_bytes());
            return;
        };
        out.push(b'{');
        let mut is_first = true;
        for (field, value) in fields.iter().filter_map(|field| Some((field, row.text_of(field)?))) {
            if !is_first {
                out.push(b',');
            }
            is_first = false;
            write_name(field.name(), out);
            out.push(b':');
            out.extend_from_slice(value.as_bytes());
        }
        out.push(b'}');
    }

    fn compute(
        &self,
        aggregate: &Aggregate,
        bucket: &Bucket,
        now: u64,
        budget: &Budget,
    ) -> Result<Option<Json>, Exceeded> {
        if aggregate.is_plain_count() {
            return Ok(Some(Json::from(self.count(bucket, now, budget)?)));
        }
        if let Some((field, direction)) = aggregate.min_or_max() {
            // The result is that of the first record in sorted order, which an index can find.
            let is_number = Test::Order(Comparison::GreaterOrEqual, Scalar::new(f64::MIN));
            let filter = self.filter.clone().and(Filter::Test(field.clone(), is_number));
            let rows = Scan { bucket, filter: &filter, now, budget }.sorted(&[(field.clone(), direction)], 0, 1)?;
            return aggregate.of(rows.into_iter().map(Ok), budget);
        }
        aggregate.of(self.matches(bucket, now, budget).map(|entry| entry.map(|(_, row)| row)), budget)
    }

    pub(super) fn project(&self, row: &Row) -> Json {
        let mut record = row.to_record();
        if let Some(fields) = &self.fields {
            let member = |name: &str| Some((name.to_owned(), record.get(name)?.clone()));
            record = fields.iter().filter_map(|field| member(field.name())).collect();
        }
        Json::Object(record)
    }
}

/// Appends a name as a JSON string. Most names need no escapes.
fn write_name(name: &str, out: &mut Vec<u8>) {
    if name.bytes().any(|byte| byte < b' ' || byte == b'"' || byte == b'\\') {
        out.extend(Json::from(name).to_string().into_bytes());
        return;
    }
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::schema::BucketDefinition;

    fn bucket(rows: &[Json]) -> Bucket {
        let definition = json!({"key": "id", "schema": {"id": {"type": "number"}}});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for row in rows {
            bucket.put(Row::new(row.as_object().unwrap()).unwrap()).unwrap();
        }
        bucket
    }

    fn text(query: &Json, bucket: &Bucket) -> Option<String> {
        let mut out = b"before ".to_vec();
        let query = Query::parse(query).unwrap();
        let has_result = query.write_result(bucket, 0, &mut out, usize::MAX, &Budget::unlimited()).unwrap();
        let text = String::from_utf8(out).unwrap().strip_prefix("before ").unwrap().to_owned();
        assert_eq!(has_result, !text.is_empty());
        has_result.then_some(text)
    }

    #[test]
    fn projection_returns_fields_in_the_requested_order() {
        let bucket = bucket(&[json!({"id": 1, "a": "x", "b": "y", "q\"\u{1}": [1, {"é": null}]}), json!({"id": 2})]);
        let query = json!({"bucket": "b", "fields": ["q\"\u{1}", "b", "c", "id", "b"]});
        let expected = r#"[{"q\"\u0001":[1,{"é":null}],"b":"y","id":1},{"id":2}]"#;
        assert_eq!(text(&query, &bucket).unwrap(), expected);
        let result = Query::parse(&query).unwrap().evaluate(&bucket, 0, &Budget::unlimited()).unwrap();
        let QueryOutput::Records(records) = result else { panic!("expected records, got {result:?}") };
        assert_eq!(Json::from(records).to_string(), expected);
        assert_eq!(text(&json!({"bucket": "b", "fields": []}), &bucket).unwrap(), "[{},{}]");
    }

    #[test]
    fn records_and_values_are_encoded() {
        let rows = [json!({"id": 1, "n": 2.50, "s": "\"\\"}), json!({"id": 2, "n": 1e300})];
        let bucket = bucket(&rows);
        assert_eq!(text(&json!({"bucket": "b"}), &bucket).unwrap(), Json::from(rows.to_vec()).to_string());
        assert_eq!(text(&json!({"bucket": "b", "limit": 0}), &bucket).unwrap(), "[]");
        let of = |function: &str, field: &str| {
            text(&json!({"bucket": "b", "aggregate": {"function": function, "field": field}}), &bucket)
        };
        assert_eq!(of("count", "n").unwrap(), "2");
        assert_eq!(of("min", "n").unwrap(), "2.5");
        assert_eq!(of("sum", "none").unwrap(), "0");
        assert_eq!(of("min", "none"), None);
    }
}
