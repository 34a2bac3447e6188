//! The canonical form of a query: bytes that are equal only if two queries return the same results for every bucket.
//!
//! The order of conditions, repeated conditions, and the notation of numbers make no difference. Queries with equal bytes always
//! have equal results. Queries with different bytes may also have equal results; then they are evaluated twice.

use crate::filter::{Comparison, Filter, Scalar, Test};
use crate::query::{AggregateFunction, IndexKey};
use crate::{Direction, Field, Query, Value};

impl Query {
    /// Returns bytes that are equal only if the queries have equal results for every bucket. They do not depend on the process or
    /// version, so a hash of them can be stored.
    pub fn canonical(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        push(&mut bytes, self.bucket.as_bytes());
        push(&mut bytes, &condition(&self.filter));
        if let Some(aggregate) = &self.aggregate {
            bytes.push(b'a');
            bytes.push(match aggregate.function {
                AggregateFunction::Count => 0,
                AggregateFunction::Sum => 1,
                AggregateFunction::Avg => 2,
                AggregateFunction::Min => 3,
                AggregateFunction::Max => 4,
            });
            push_names(&mut bytes, aggregate.field.iter().map(Field::name));
            push_names(&mut bytes, aggregate.group_by.iter().map(Field::name));
            return bytes;
        }
        bytes.push(b'r');
        bytes.extend((self.sort.len() as u64).to_le_bytes());
        for (field, direction) in &self.sort {
            push(&mut bytes, field.name().as_bytes());
            bytes.push(u8::from(*direction == Direction::Desc));
        }
        for count in [Some(self.offset), self.limit] {
            bytes.push(u8::from(count.is_some()));
            bytes.extend((count.unwrap_or(0) as u64).to_le_bytes());
        }
        bytes.push(u8::from(self.fields.is_some()));
        push_names(&mut bytes, self.fields.iter().flatten().map(Field::name));
        bytes
    }
}

/// Tags of encoded conditions.
mod tag {
    pub(super) const ALL: u8 = 0;
    pub(super) const ANY: u8 = 1;
    pub(super) const IN: u8 = 2;
    pub(super) const NOT_IN: u8 = 3;
    pub(super) const ORDER: u8 = 4;
    pub(super) const CONTAINS: u8 = 5;
    pub(super) const STARTS_WITH: u8 = 6;
    pub(super) const ENDS_WITH: u8 = 7;
    pub(super) const EXISTS: u8 = 8;
    pub(super) const BETWEEN: u8 = 9;
}

fn condition(filter: &Filter) -> Vec<u8> {
    let several = |tag, filters: &[Filter], is_same: fn(&Filter) -> Option<&[Filter]>| {
        let mut parts = Vec::new();
        flatten(filters, is_same, &mut parts);
        parts.sort_unstable();
        parts.dedup();
        if let [_] = parts[..] {
            return parts.swap_remove(0);
        }
        list(tag, &parts)
    };
    match filter {
        Filter::All(filters) => several(tag::ALL, filters, |filter| match filter {
            Filter::All(inner) => Some(inner),
            _ => None,
        }),
        Filter::Any(filters) => several(tag::ANY, filters, |filter| match filter {
            Filter::Any(inner) => Some(inner),
            _ => None,
        }),
        Filter::Test(field, test) => {
            let mut bytes = test_of(test);
            push(&mut bytes, field.name().as_bytes());
            bytes
        }
    }
}

/// Encodes the conditions of a list, including those of nested lists of the same kind.
fn flatten(filters: &[Filter], is_same: fn(&Filter) -> Option<&[Filter]>, parts: &mut Vec<Vec<u8>>) {
    for filter in filters {
        match is_same(filter) {
            Some(inner) => flatten(inner, is_same, parts),
            None => parts.push(condition(filter)),
        }
    }
}

fn test_of(test: &Test) -> Vec<u8> {
    let text = |tag: u8, text: &str| {
        let mut bytes = vec![tag];
        push(&mut bytes, text.as_bytes());
        bytes
    };
    // Arrays and objects are omitted, because they are never equal.
    let values = |tag: u8, scalars: &[Scalar]| {
        let mut values: Vec<Vec<u8>> = scalars.iter().filter_map(|scalar| scalar.value().as_ref().map(value)).collect();
        values.sort_unstable();
        values.dedup();
        list(tag, &values)
    };
    let scalar = |scalar: &Scalar| scalar.value().as_ref().map_or_else(Vec::new, value);
    match test {
        Test::Equal(scalar) => values(tag::IN, std::slice::from_ref(scalar)),
        Test::NotEqual(scalar) => values(tag::NOT_IN, std::slice::from_ref(scalar)),
        Test::In(scalars) => values(tag::IN, scalars.list()),
        Test::NotIn(scalars) => values(tag::NOT_IN, scalars.list()),
        Test::Order(comparison, bound) => {
            let comparison = match comparison {
                Comparison::Greater => 0,
                Comparison::GreaterOrEqual => 1,
                Comparison::Less => 2,
                Comparison::LessOrEqual => 3,
            };
            list(tag::ORDER, &[vec![comparison], scalar(bound)])
        }
        Test::Between(low, high) => list(tag::BETWEEN, &[scalar(low), scalar(high)]),
        Test::Contains(part) => text(tag::CONTAINS, part),
        Test::StartsWith(part) => text(tag::STARTS_WITH, part),
        Test::EndsWith(part) => text(tag::ENDS_WITH, part),
        Test::Exists(wanted) => vec![tag::EXISTS, u8::from(*wanted)],
    }
}

/// Encodes a scalar. Unlike an index key, null differs from an absent value.
fn value(value: &Value<'_>) -> Vec<u8> {
    match value {
        Value::Null => vec![0],
        other => IndexKey::of(Some(other)).as_bytes().to_vec(),
    }
}

fn list(tag: u8, parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.extend((parts.len() as u64).to_le_bytes());
    for part in parts {
        push(&mut bytes, part);
    }
    bytes
}

fn push(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.extend((part.len() as u64).to_le_bytes());
    bytes.extend(part);
}

fn push_names<'a>(bytes: &mut Vec<u8>, names: impl Iterator<Item = &'a str>) {
    let names: Vec<Vec<u8>> = names.map(|name| name.as_bytes().to_vec()).collect();
    bytes.extend(list(0, &names));
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn canonical(json: &Json) -> Vec<u8> {
        let mut query = json.clone();
        query["bucket"] = json!("b");
        Query::parse(&query).unwrap().canonical()
    }

    #[test]
    fn equivalent_queries_have_equal_bytes() {
        for (one, two) in [
            (json!({}), json!({"filter": {}, "offset": 0})),
            (json!({"filter": {"a": 1, "b": 2}}), json!({"filter": {"b": 2, "a": 1.0}})),
            (
                json!({"filter": {"a": -0.0}}),
                json!({"filter": {"$and": [{"a": {"$in": [0, 0]}}, {"$and": [{"a": 0}]}]}}),
            ),
            (
                json!({"filter": {"$or": [{"a": 1}, {"b": 1}]}}),
                json!({"filter": {"$or": [{"b": 1}, {"$or": [{"a": 1}]}]}}),
            ),
            (json!({"filter": {"a": [1]}}), json!({"filter": {"a": {"$in": []}}})),
            (
                json!({"aggregate": {"function": "count"}, "sort": {"a": "asc"}, "limit": 3}),
                json!({"aggregate": {"function": "count"}, "fields": ["x"]}),
            ),
        ] {
            assert_eq!(canonical(&one), canonical(&two), "{one} {two}");
        }
    }

    #[test]
    fn different_queries_have_different_bytes() {
        let queries = [
            json!({}),
            json!({"filter": {"a": 1}}),
            json!({"filter": {"a": "1"}}),
            json!({"filter": {"a": true}}),
            json!({"filter": {"a": null}}),
            json!({"filter": {"a": {"$in": []}}}),
            json!({"filter": {"$or": []}}),
            json!({"filter": {"a": {"$neq": 1}}}),
            json!({"filter": {"a": {"$gt": 1}}}),
            json!({"filter": {"a": {"$gte": 1}}}),
            json!({"filter": {"a": {"$lt": 1}}}),
            json!({"filter": {"a": {"$lte": 1}}}),
            json!({"filter": {"a": {"$between": [1, 2]}}}),
            json!({"filter": {"a": {"$between": [2, 1]}}}),
            json!({"filter": {"a": {"$startsWith": "1"}}}),
            json!({"filter": {"a": {"$endsWith": "1"}}}),
            json!({"filter": {"a": {"$contains": "1"}}}),
            json!({"filter": {"a": {"$exists": true}}}),
            json!({"filter": {"a": {"$exists": false}}}),
            json!({"filter": {"a": 1, "b": 2}}),
            json!({"filter": {"a": 2, "b": 1}}),
            json!({"filter": {"$or": [{"a": 1}, {"b": 2}]}}),
            json!({"sort": {"a": "asc"}}),
            json!({"sort": {"a": "desc"}}),
            json!({"sort": {"a": "asc", "b": "asc"}}),
            json!({"sort": {"b": "asc", "a": "asc"}}),
            json!({"offset": 1}),
            json!({"limit": 1}),
            json!({"limit": 0}),
            json!({"fields": []}),
            json!({"fields": ["a", "b"]}),
            json!({"fields": ["b", "a"]}),
            json!({"aggregate": {"function": "count"}}),
            json!({"aggregate": {"function": "count", "field": "a"}}),
            json!({"aggregate": {"function": "sum", "field": "a"}}),
            json!({"aggregate": {"function": "count", "groupBy": "a"}}),
        ];
        for (index, one) in queries.iter().enumerate() {
            for two in &queries[..index] {
                assert_ne!(canonical(one), canonical(two), "{one} {two}");
            }
        }
    }
}
