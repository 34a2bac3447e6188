//! Parsing of queries from JSON.

use serde_json::Value as Json;

use crate::query::{FilterError, Parameters};
use crate::{Aggregate, Direction, Field, Filter, Query};

/// An error in a query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// The filter is invalid.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The query is not an object.
    #[error("the query must be an object")]
    NotAnObject,
    /// A member is missing or has an invalid value.
    #[error("`{at}` must be {expected}")]
    Expected {
        /// The path of the member.
        at: &'static str,
        /// The expected value.
        expected: &'static str,
    },
    /// The query has an unknown member.
    #[error("unknown option {option} in the query")]
    UnknownOption {
        /// The path of the member.
        option: String,
    },
}

impl Query {
    /// Limit of the fields that a query in JSON may sort by.
    pub const MAX_SORT: usize = 32;
    /// Limit of the fields that a query in JSON may return.
    pub const MAX_FIELDS: usize = 1000;
    /// Limit of the fields that a query in JSON may group by.
    pub const MAX_GROUP_BY: usize = 32;

    /// Parses a query: an object with the members `bucket`, `filter`, `sort`, `offset`, `limit`, `fields` and `aggregate`.
    ///
    /// Parameters are not expanded: `{{ params.x }}` is an ordinary string.
    pub fn parse(json: &Json) -> Result<Self, QueryError> {
        Self::parse_with(json, &Parameters::new())
    }

    /// Parses a query whose filter may contain parameters.
    pub fn parse_with(json: &Json, parameters: &Parameters<'_>) -> Result<Self, QueryError> {
        Self::read(json, |filter| Filter::parse_with(filter, parameters))
    }

    /// Parses a query whose `params` have no values yet. A placeholder replaces each parameter. Fails if
    /// [`parse_with`](Self::parse_with) would fail with any values.
    pub fn template(json: &Json) -> Result<Self, QueryError> {
        Self::read(json, Filter::template)
    }

    fn read(json: &Json, filter: impl Fn(&Json) -> Result<Filter, FilterError>) -> Result<Self, QueryError> {
        const OPTIONS: [&str; 7] = ["bucket", "filter", "sort", "offset", "limit", "fields", "aggregate"];
        let members = json.as_object().ok_or(QueryError::NotAnObject)?;
        if let Some(option) = members.keys().find(|option| !OPTIONS.contains(&option.as_str())) {
            return Err(QueryError::UnknownOption { option: option.clone() });
        }
        let present = |name: &str| members.get(name).filter(|value| !value.is_null());
        let count = |name: &'static str| {
            present(name).map(|json| parse_count(json).ok_or(expected(name, "a non-negative integer"))).transpose()
        };
        let bucket = present("bucket").and_then(Json::as_str).filter(|name| !name.is_empty());
        let mut query = Self::new(bucket.ok_or(expected("bucket", "a non-empty string"))?);
        query.filter = present("filter").map_or(Ok(query.filter), filter)?;
        query.sort = present("sort").map(sort).transpose()?.unwrap_or_default();
        query.offset = count("offset")?.unwrap_or(0);
        query.limit = count("limit")?;
        if let Some(json) = present("fields") {
            let fields = names(json, "fields")?;
            if fields.len() > Self::MAX_FIELDS {
                return Err(expected("fields", "a list of at most 1000 field names"));
            }
            query = query.fields(fields);
        }
        query.aggregate = present("aggregate").map(Aggregate::parse).transpose()?;
        Ok(query)
    }
}

pub(super) fn expected(at: &'static str, expected: &'static str) -> QueryError {
    QueryError::Expected { at, expected }
}

/// Reads a count. An integer may be written with a fraction of zero, such as 3.0.
fn parse_count(json: &Json) -> Option<usize> {
    let number = json.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of a float saturates")]
    let count = number as usize;
    Some(count)
}

pub(super) fn names(json: &Json, at: &'static str) -> Result<Vec<String>, QueryError> {
    let names = json.as_array().and_then(|list| list.iter().map(|name| name.as_str().map(str::to_owned)).collect());
    names.ok_or(expected(at, "a list of field names"))
}

/// Parses an object of fields and directions.
fn sort(json: &Json) -> Result<Vec<(Field, Direction)>, QueryError> {
    let wrong = expected("sort", "an object that maps field names to \"asc\" or \"desc\"");
    let Some(fields) = json.as_object() else { return Err(wrong) };
    if fields.len() > Query::MAX_SORT {
        return Err(expected("sort", "an object with at most 32 fields"));
    }
    let direction = |json: &Json| match json.as_str()? {
        "asc" => Some(Direction::Asc),
        "desc" => Some(Direction::Desc),
        _ => None,
    };
    let sort = fields.iter().map(|(name, json)| Some((Field::new(name), direction(json)?)));
    sort.collect::<Option<_>>().ok_or(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn invalid_query_is_rejected_with_a_specific_error() {
        for (query, error) in [
            (json!(1), "the query must be an object"),
            (json!({}), "`bucket` must be a non-empty string"),
            (json!({"bucket": "b", "order": 1}), "unknown option order in the query"),
            (
                json!({"bucket": "b", "sort": {"a": 1}}),
                "`sort` must be an object that maps field names to \"asc\" or \"desc\"",
            ),
            (json!({"bucket": "b", "limit": -1}), "`limit` must be a non-negative integer"),
            (json!({"bucket": "b", "fields": [1]}), "`fields` must be a list of field names"),
            (json!({"bucket": "b", "filter": {"$x": 1}}), "unknown operator $x in the filter"),
            (
                json!({"bucket": "b", "aggregate": {"function": "median"}}),
                "`aggregate.function` must be count, sum, avg, min or max",
            ),
            (json!({"bucket": "b", "aggregate": {"function": "sum"}}), "`aggregate.field` must be the name of a field"),
        ] {
            assert_eq!(Query::parse(&query).unwrap_err().to_string(), error, "{query}");
            assert_eq!(Query::template(&query).unwrap_err().to_string(), error, "{query}");
        }
        let template = json!({"bucket": "b", "filter": {"a": {"$in": "{{ params.list }}"}}, "limit": 3});
        assert!(Query::template(&template).is_ok());
    }

    #[test]
    fn counts_accept_integers_written_as_floats() {
        let parse = |limit: Json| Query::parse(&json!({"bucket": "b", "limit": limit}));
        assert_eq!(parse(json!(3.0)).unwrap().limit, Some(3));
        assert_eq!(parse(json!(1e300)).unwrap().limit, Some(usize::MAX));
        for wrong in [json!(2.5), json!(-1.0), json!("3"), json!(true)] {
            assert!(parse(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
