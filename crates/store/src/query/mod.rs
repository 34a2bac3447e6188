//! Queries: which records, in which order, and which of their fields.
//!
//! An index never changes the result of a query, only its cost: the plan chooses which records are examined, in which order, and
//! each of them is checked with the whole filter.

mod access;
mod aggregate;
mod answer;
mod canonical;
#[cfg(test)]
mod model;
mod order;
pub(crate) mod plan;

use std::collections::HashSet;

use serde_json::{Map, Value as Json};

use self::access::Conditions;
pub use self::aggregate::{Aggregate, AggregateFunction};
pub use self::answer::Answer;
use self::plan::Scan;
use crate::{Bucket, Budget, Exceeded, Field, Filter, FilterError, Row};

/// Which records, in which order, and what of them.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Query {
    /// The bucket that is asked.
    pub bucket: String,
    /// Which records.
    pub filter: Filter,
    /// By which fields they are sorted. Without any, in the order of coming.
    pub sort: Vec<(Field, Direction)>,
    /// How many are left out at the beginning.
    pub offset: usize,
    /// How many there are at most.
    pub limit: Option<usize>,
    /// Which fields are returned, each once, in which order; all if not said.
    pub fields: Option<Vec<Field>>,
    /// What is computed of all records that are meant. Then there is no sorting, and all the rest.
    pub aggregate: Option<Aggregate>,
}

/// In which direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The least first.
    Ascending,
    /// The greatest first.
    Descending,
}

/// What is wrong with a query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// Its filter.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// Something is missing, or not what it has to be.
    #[error("{at} of a query must be {expected}")]
    Expected {
        /// Where.
        at: String,
        /// What it has to be.
        expected: &'static str,
    },
    /// It has an option that does not exist.
    #[error("a query has an unknown option {option}")]
    UnknownOption {
        /// What it is called.
        option: String,
    },
}

impl Query {
    /// By how many fields records may be sorted.
    pub const MAX_SORT: usize = 32;
    /// How many fields may be asked for.
    pub const MAX_FIELDS: usize = 1000;
    /// By how many fields records may be grouped.
    pub const MAX_GROUP_BY: usize = 32;

    /// All records of a bucket.
    pub fn all(bucket: impl Into<String>) -> Self {
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

    /// The query that JSON describes, with its parameters in place.
    pub fn parse(json: &Json, params: &Map<String, Json>) -> Result<Self, QueryError> {
        Self::read(json, |filter| Filter::parse(filter, params))
    }

    /// Returns the query that JSON describes, with any value in place of each parameter. Fails as [`Query::parse`] would, whatever
    /// the parameters.
    pub fn template(json: &Json) -> Result<Self, QueryError> {
        Self::read(json, Filter::template)
    }

    fn read(json: &Json, filter: impl Fn(&Json) -> Result<Filter, FilterError>) -> Result<Self, QueryError> {
        const OPTIONS: [&str; 7] = ["bucket", "filter", "sort", "offset", "limit", "fields", "aggregate"];
        let members = json.as_object().ok_or_else(|| expected("the definition", "an object"))?;
        if let Some(option) = members.keys().find(|option| !OPTIONS.contains(&option.as_str())) {
            return Err(QueryError::UnknownOption { option: option.clone() });
        }
        let present = |name: &str| members.get(name).filter(|value| !value.is_null());
        let count = |name: &str| {
            present(name).map(|json| whole(json).ok_or_else(|| expected(name, "a whole number from 0"))).transpose()
        };
        let bucket = present("bucket").and_then(Json::as_str).filter(|name| !name.is_empty());
        let bucket = bucket.ok_or_else(|| expected("bucket", "the name of one"))?;
        Ok(Self {
            bucket: bucket.to_owned(),
            filter: present("filter").map_or(Ok(Filter::everything()), filter)?,
            sort: present("sort").map(sort).transpose()?.unwrap_or_default(),
            offset: count("offset")?.unwrap_or(0),
            limit: count("limit")?,
            fields: present("fields").map(fields).transpose()?,
            aggregate: present("aggregate").map(Aggregate::parse).transpose()?,
        })
    }

    /// The same query of the records that a filter means as well: to it there are no others, whatever it asks.
    #[must_use]
    pub fn restrict(mut self, filter: &Filter) -> Self {
        self.filter = self.filter.and(filter.clone());
        self
    }

    /// Returns the records of its result at that time, in its order.
    pub fn rows<'a>(&self, bucket: &'a Bucket, now: u64, budget: &Budget) -> Result<Vec<&'a Row>, Exceeded> {
        let limit = self.limit.unwrap_or(usize::MAX);
        self.scan(bucket, now, budget).sorted(&self.sort, self.offset, limit)
    }

    /// Returns the number of records that match its filter at that time, whatever its offset and limit. With an index, no more
    /// records are examined than needed.
    pub fn count(&self, bucket: &Bucket, now: u64, budget: &Budget) -> Result<usize, Exceeded> {
        self.scan(bucket, now, budget).count()
    }

    /// Returns the records that match its filter at that time, in insertion order, with their ordinals, whatever its sort, offset
    /// and limit. Nothing follows an error.
    pub fn matches<'a>(
        &'a self,
        bucket: &'a Bucket,
        now: u64,
        budget: &'a Budget,
    ) -> impl Iterator<Item = Result<(u64, &'a Row), Exceeded>> + 'a {
        self.scan(bucket, now, budget).entries()
    }

    /// Returns a field whose index would serve the filter, if no index of the bucket does.
    pub(crate) fn missing_index(&self, bucket: &Bucket) -> Option<&Field> {
        Conditions::of(&self.filter).missing_index(bucket)
    }

    fn scan<'a, 'f>(&'f self, bucket: &'a Bucket, now: u64, budget: &'f Budget) -> Scan<'a, 'f> {
        Scan { bucket, filter: &self.filter, now, budget }
    }
}

fn expected(at: &str, expected: &'static str) -> QueryError {
    QueryError::Expected { at: at.to_owned(), expected }
}

/// A number that counts something. Those who write 3 as 3.0 mean the same.
fn whole(json: &Json) -> Option<usize> {
    let number = json.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of floats ends at the bounds")]
    let whole = number as usize;
    Some(whole)
}

fn names(json: &Json, at: &str) -> Result<Vec<String>, QueryError> {
    let names = json.as_array().and_then(|list| list.iter().map(|name| name.as_str().map(str::to_owned)).collect());
    names.ok_or_else(|| expected(at, "a list of field names"))
}

fn fields(json: &Json) -> Result<Vec<Field>, QueryError> {
    let mut seen = HashSet::new();
    let names = names(json, "fields")?;
    if names.len() > Query::MAX_FIELDS {
        return Err(expected("fields", "a list of at most 1000 field names"));
    }
    let names = names.into_iter();
    Ok(names.filter(|name| seen.insert(name.clone())).map(Field::new).collect())
}

fn sort(json: &Json) -> Result<Vec<(Field, Direction)>, QueryError> {
    let wrong = || expected("sort", "an object of fields and \"asc\" or \"desc\"");
    let fields = json.as_object().ok_or_else(wrong)?;
    if fields.len() > Query::MAX_SORT {
        return Err(expected("sort", "an object of at most 32 fields"));
    }
    fields
        .iter()
        .map(|(name, direction)| match direction.as_str() {
            Some("asc") => Ok((Field::new(name), Direction::Ascending)),
            Some("desc") => Ok((Field::new(name), Direction::Descending)),
            _ => Err(wrong()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::BucketDefinition;

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
    fn wrong_queries_say_what_is_wrong() {
        for (query, error) in [
            (json!(1), "the definition of a query must be an object"),
            (json!({}), "bucket of a query must be the name of one"),
            (json!({"bucket": "b", "order": 1}), "a query has an unknown option order"),
            (
                json!({"bucket": "b", "sort": {"a": 1}}),
                "sort of a query must be an object of fields and \"asc\" or \"desc\"",
            ),
            (json!({"bucket": "b", "limit": -1}), "limit of a query must be a whole number from 0"),
            (json!({"bucket": "b", "fields": [1]}), "fields of a query must be a list of field names"),
            (json!({"bucket": "b", "filter": {"$x": 1}}), "unknown operator $x in the filter"),
            (
                json!({"bucket": "b", "aggregate": {"function": "median"}}),
                "aggregate.function of a query must be count, sum, avg, min or max",
            ),
            (
                json!({"bucket": "b", "aggregate": {"function": "sum"}}),
                "aggregate.field of a query must be the name of a field",
            ),
        ] {
            assert_eq!(Query::parse(&query, &Map::new()).unwrap_err().to_string(), error, "{query}");
            assert_eq!(Query::template(&query).unwrap_err().to_string(), error, "{query}");
        }
        let template = json!({"bucket": "b", "filter": {"a": {"$in": "{{ params.list }}"}}, "limit": 3});
        assert!(Query::template(&template).is_ok());
    }

    #[test]
    fn whole_numbers_may_be_written_with_a_fraction_of_nothing() {
        let parse = |limit: Json| Query::parse(&json!({"bucket": "b", "limit": limit}), &Map::new());
        assert_eq!(parse(json!(3.0)).unwrap().limit, Some(3));
        assert_eq!(parse(json!(1e300)).unwrap().limit, Some(usize::MAX));
        for wrong in [json!(2.5), json!(-1.0), json!("3"), json!(true)] {
            assert!(parse(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_restricted_query_knows_of_no_other_records() {
        let rows: Vec<Json> = (0..6).map(|id| json!({"id": id, "a": id % 2, "b": 10 - id})).collect();
        let bucket = bucket(&json!(["a"]), &rows);
        let own = Filter::parse(&json!({"a": 1}), &Map::new()).unwrap();
        let ask = |query: &Json, filter: &Filter| {
            Query::parse(query, &Map::new()).unwrap().restrict(filter).answer(&bucket, 0, &Budget::unlimited()).unwrap()
        };
        let records = |ids: &[u8]| Answer::Records(ids.iter().map(|id| json!({"id": id})).collect());
        let paged = json!({"bucket": "b", "sort": {"b": "asc"}, "offset": 1, "limit": 1, "fields": ["id"]});
        assert_eq!(ask(&paged, &own), records(&[3]));
        assert_eq!(ask(&paged, &Filter::everything()), records(&[4]));
        assert_eq!(ask(&paged, &Filter::nothing()), records(&[]));
        // What it asks for itself does not widen it.
        let wide = json!({"bucket": "b", "filter": {"$or": [{"a": 0}, {"id": 1}]}, "fields": ["id"]});
        assert_eq!(ask(&wide, &own), records(&[1]));
        for (function, value) in [("count", json!(3)), ("sum", json!(21)), ("min", json!(5)), ("max", json!(9))] {
            let query = json!({"bucket": "b", "aggregate": {"function": function, "field": "b"}});
            assert_eq!(ask(&query, &own), Answer::Value(Some(value)), "{function}");
        }
        let groups = json!({"bucket": "b", "aggregate": {"function": "count", "groupBy": "a"}});
        assert_eq!(ask(&groups, &own), Answer::Value(Some(json!([{"key": {"a": 1}, "value": 3}]))));
        let least = json!({"bucket": "b", "aggregate": {"function": "min", "field": "b"}});
        assert_eq!(ask(&least, &Filter::nothing()), Answer::Value(None));
    }
}
