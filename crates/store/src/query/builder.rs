//! Queries and their builder methods.

use std::borrow::Borrow;
use std::collections::HashSet;

use serde_json::Value as Json;

use super::QueryError;
use super::access::Conditions;
use super::plan::Scan;
use crate::query::{Budget, Exceeded};
use crate::{Aggregate, Bucket, Field, Filter, Row};

/// A query on a bucket: a filter, an order, a range and the fields of the records, or an aggregate.
///
/// ```
/// use serde_json::json;
/// use tidewire_store::Direction::Desc;
/// use tidewire_store::{Aggregate, Query};
///
/// let highest = Query::new("tides").filter(json!({"port": "Husum"}))?.sort("metres", Desc).limit(10).fields(["metres"]);
/// let by_port = Query::new("tides").aggregate(Aggregate::avg("metres").group_by(["port"]));
/// # let parsed = Query::parse(&json!({
/// #     "bucket": "tides", "filter": {"port": "Husum"}, "sort": {"metres": "desc"}, "limit": 10, "fields": ["metres"],
/// # }))?;
/// # assert_eq!(highest, parsed);
/// # Ok::<(), tidewire_store::query::QueryError>(())
/// ```
///
/// [`parse`](Self::parse) parses the same queries from JSON.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Query {
    /// The bucket.
    pub bucket: String,
    /// The filter that records must match. Default: all records.
    pub filter: Filter,
    /// The fields that records are sorted by. Default: none, which is insertion order.
    pub sort: Vec<(Field, Direction)>,
    /// The number of records that are skipped at the beginning. Default: 0.
    pub offset: usize,
    /// Limit of the number of records. Default: none.
    pub limit: Option<usize>,
    /// The fields that are returned, each once, in this order. Default: all fields.
    pub fields: Option<Vec<Field>>,
    /// The aggregate of all records that match. With it, sort, offset, limit and fields have no effect. Default: none.
    pub aggregate: Option<Aggregate>,
}

/// The direction of a sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Ascending: the least value first.
    Asc,
    /// Descending: the greatest value first.
    Desc,
}

impl Query {
    /// Creates a query for all records of a bucket.
    pub fn new(bucket: impl Into<String>) -> Self {
        Self {
            bucket: bucket.into(),
            filter: Filter::everything(),
            sort: Vec::new(),
            offset: 0,
            limit: None,
            fields: None,
            aggregate: None,
        }
    }

    /// Adds a filter. Records must match all filters of a query.
    ///
    /// # Errors
    ///
    /// Fails if the filter is invalid. To add a parsed [`Filter`], use [`restrict`](Self::restrict), which does not fail.
    pub fn filter(mut self, filter: impl Borrow<Json>) -> Result<Self, QueryError> {
        self.filter = self.filter.and(Filter::parse(filter.borrow())?);
        Ok(self)
    }

    /// Restricts the query to records that also match this filter.
    #[must_use]
    pub fn restrict(mut self, filter: &Filter) -> Self {
        self.filter = self.filter.and(filter.clone());
        self
    }

    /// Sorts by a field. Records with equal values are sorted by the fields of later calls, and then in insertion order.
    #[must_use]
    pub fn sort(mut self, field: impl Into<String>, direction: Direction) -> Self {
        self.sort.push((Field::new(field), direction));
        self
    }

    /// Sets [`offset`](#structfield.offset).
    #[must_use]
    pub fn offset(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }

    /// Sets [`limit`](#structfield.limit).
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Sets [`fields`](#structfield.fields).
    #[must_use]
    pub fn fields(mut self, fields: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let mut seen = HashSet::new();
        let fields = fields.into_iter().map(Into::into).filter(|name| seen.insert(name.clone()));
        self.fields = Some(fields.map(Field::new).collect());
        self
    }

    /// Sets [`aggregate`](#structfield.aggregate).
    #[must_use]
    pub fn aggregate(mut self, aggregate: Aggregate) -> Self {
        self.aggregate = Some(aggregate);
        self
    }

    /// Returns the records of the result at that time, in order.
    pub fn rows<'a>(&self, bucket: &'a Bucket, now: u64, budget: &Budget) -> Result<Vec<&'a Row>, Exceeded> {
        let limit = self.limit.unwrap_or(usize::MAX);
        self.scan(bucket, now, budget).sorted(&self.sort, self.offset, limit)
    }

    /// Returns the number of records that match the filter at that time, ignoring offset and limit. An index reduces the number of
    /// examined records.
    pub fn count(&self, bucket: &Bucket, now: u64, budget: &Budget) -> Result<usize, Exceeded> {
        self.scan(bucket, now, budget).count()
    }

    /// Returns the records that match the filter at that time, in insertion order, with their ordinals, ignoring sort, offset and
    /// limit. An item is an error if the budget is exceeded; the items after it are unspecified.
    pub fn matches<'a>(
        &'a self,
        bucket: &'a Bucket,
        now: u64,
        budget: &'a Budget,
    ) -> impl Iterator<Item = Result<(u64, &'a Row), Exceeded>> + 'a {
        self.scan(bucket, now, budget).entries()
    }

    /// Returns a field that has no index, but should have one for the filter, if any.
    pub(crate) fn missing_index(&self, bucket: &Bucket) -> Option<&Field> {
        Conditions::of(&self.filter).missing_index(bucket)
    }

    fn scan<'a, 'f>(&'f self, bucket: &'a Bucket, now: u64, budget: &'f Budget) -> Scan<'a, 'f> {
        Scan { bucket, filter: &self.filter, now, budget }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::QueryOutput;
    use crate::schema::BucketDefinition;

    fn bucket(indexes: &Json, rows: &[Json]) -> Bucket {
        let any = json!({"type": "string"});
        let definition = json!({
            "key": "id",
            "schema": {"id": {"type": "number"}, "a": any, "b": any, "c": any, "d": any},
            "indexes": indexes,
        });
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
        for row in rows {
            bucket.put(Row::new(row.as_object().unwrap()).unwrap()).unwrap();
        }
        bucket
    }

    #[test]
    fn filters_are_validated_and_combined() {
        let wrong = Query::new("b").filter(json!({"a": {"$above": 1}})).unwrap_err();
        assert_eq!(Some(wrong), Query::parse(&json!({"bucket": "b", "filter": {"a": {"$above": 1}}})).err());
        let both = Query::new("b").filter(json!({"a": 1})).unwrap().filter(json!({"b": 2})).unwrap();
        assert_eq!(both, Query::new("b").filter(json!({"a": 1, "b": 2})).unwrap());
        // A value is never a parameter.
        assert!(Query::new("b").filter(json!({"a": "{{ params.x }}"})).is_ok());
    }

    #[test]
    fn restricted_query_ignores_hidden_records() {
        let rows: Vec<Json> = (0..6).map(|id| json!({"id": id, "a": id % 2, "b": 10 - id})).collect();
        let bucket = bucket(&json!(["a"]), &rows);
        let own = Filter::parse(&json!({"a": 1})).unwrap();
        let ask = |query: &Json, filter: &Filter| {
            Query::parse(query).unwrap().restrict(filter).evaluate(&bucket, 0, &Budget::unlimited()).unwrap()
        };
        let records = |ids: &[u8]| QueryOutput::Records(ids.iter().map(|id| json!({"id": id})).collect());
        let paged = json!({"bucket": "b", "sort": {"b": "asc"}, "offset": 1, "limit": 1, "fields": ["id"]});
        assert_eq!(ask(&paged, &own), records(&[3]));
        assert_eq!(ask(&paged, &Filter::everything()), records(&[4]));
        assert_eq!(ask(&paged, &Filter::nothing()), records(&[]));
        // The query's own filter does not widen the restriction.
        let wide = json!({"bucket": "b", "filter": {"$or": [{"a": 0}, {"id": 1}]}, "fields": ["id"]});
        assert_eq!(ask(&wide, &own), records(&[1]));
        for (function, value) in [("count", json!(3)), ("sum", json!(21)), ("min", json!(5)), ("max", json!(9))] {
            let query = json!({"bucket": "b", "aggregate": {"function": function, "field": "b"}});
            assert_eq!(ask(&query, &own), QueryOutput::Value(Some(value)), "{function}");
        }
        let groups = json!({"bucket": "b", "aggregate": {"function": "count", "groupBy": "a"}});
        assert_eq!(ask(&groups, &own), QueryOutput::Value(Some(json!([{"key": {"a": 1}, "value": 3}]))));
        let least = json!({"bucket": "b", "aggregate": {"function": "min", "field": "b"}});
        assert_eq!(ask(&least, &Filter::nothing()), QueryOutput::Value(None));
    }
}
