//! Model-based tests of queries: regardless of the indexes and the history of a bucket, a query has the same result as the model,
//! which scans all records as parsed JSON, without rows, keys or plans.

use std::cmp::Ordering;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value as Json, json};

use crate::query::Budget;
use crate::schema::BucketDefinition;
use crate::{Aggregate, Bucket, Direction, Filter, Query, QueryOutput, Row, Value};

/// `u` is unique; `id` is the key.
const FIELDS: [&str; 5] = ["a", "b", "c", "u", "id"];

type Record = Map<String, Json>;

/// Generates few distinct values, so that they often match.
fn scalar() -> impl Strategy<Value = Json> {
    prop_oneof![
        4 => (0..4_u8).prop_map(Json::from),
        4 => text().prop_map(Json::from),
        1 => select(vec![json!(-0.0), json!(-1), json!(0.5), json!(1e300)]),
        1 => Just(Json::Null),
        1 => any::<bool>().prop_map(Json::from),
        1 => select(vec![json!([1]), json!([]), json!({"x": 1})]),
    ]
}

fn text() -> impl Strategy<Value = &'static str> {
    select(vec!["", "a", "b", "A", "ab", "ba", "aa", "b\0", "\0", "é", "aé", "bA"])
}

fn key() -> impl Strategy<Value = Json> {
    prop_oneof![(0..12_u8).prop_map(Json::from), text().prop_map(Json::from)]
}

/// Generates insertions, replacements and deletions.
fn steps() -> impl Strategy<Value = Vec<(Json, Option<Record>)>> {
    let members = vec((select(&FIELDS[..4]), scalar()), 0..6);
    let record = (members, prop::option::weighted(0.2, 0..10_u64)).prop_map(|(members, expiry)| {
        let mut record: Record = members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        record.extend(expiry.map(|expiry| ("_expiresAt".to_owned(), json!(expiry))));
        record
    });
    vec((key(), prop::option::weighted(0.85, record)), 0..40)
}

fn operators() -> impl Strategy<Value = Json> {
    let order = || select(vec!["$gt", "$gte", "$lt", "$lte"]);
    prop_oneof![
        3 => scalar(),
        2 => (select(vec!["$eq", "$neq"]), scalar()).prop_map(|(operator, value)| json!({operator: value})),
        2 => (order(), scalar()).prop_map(|(operator, value)| json!({operator: value})),
        2 => (order(), scalar(), order(), scalar()).prop_map(|(one, low, two, high)| json!({one: low, two: high})),
        3 => (select(vec!["$in", "$nin"]), vec(scalar(), 0..14))
            .prop_map(|(operator, values)| json!({operator: values})),
        1 => (scalar(), scalar()).prop_map(|(low, high)| json!({"$between": [low, high]})),
        2 => (select(vec!["$startsWith", "$endsWith", "$contains"]), text())
            .prop_map(|(operator, text)| json!({operator: text})),
        1 => (text(), scalar()).prop_map(|(text, value)| json!({"$startsWith": text, "$lt": value})),
        1 => any::<bool>().prop_map(|wanted| json!({"$exists": wanted})),
    ]
}

fn filter() -> impl Strategy<Value = Json> {
    let leaf = vec((select(&FIELDS[..]), operators()), 0..3)
        .prop_map(|tests| Json::Object(tests.into_iter().map(|(name, test)| (name.to_owned(), test)).collect()));
    leaf.prop_recursive(3, 12, 3, |inner| {
        (select(vec!["$or", "$and"]), vec(inner.clone(), 0..4), inner).prop_map(|(operator, filters, mut rest)| {
            rest[operator] = json!(filters);
            rest
        })
    })
}

fn sort() -> impl Strategy<Value = Json> {
    let direction = || select(vec!["asc", "desc"]);
    let mixed = vec((select(&FIELDS[..]), direction()), 0..3);
    let alike = (vec(select(&FIELDS[..]), 0..3), direction())
        .prop_map(|(fields, direction)| fields.into_iter().map(|field| (field, direction)).collect());
    prop_oneof![mixed, alike].prop_map(|fields| {
        Json::Object(fields.into_iter().map(|(name, direction)| (name.to_owned(), json!(direction))).collect())
    })
}

fn aggregate() -> impl Strategy<Value = Json> {
    let function = select(vec!["count", "sum", "avg", "min", "max"]);
    (function, select(&FIELDS[..]), any::<bool>(), vec(select(&FIELDS[..3]), 0..3)).prop_map(
        |(function, field, has_field, groups)| {
            let field = (has_field || function != "count").then_some(field);
            json!({"function": function, "field": field, "groupBy": groups})
        },
    )
}

prop_compose! {
    fn query()(
        filter in filter(),
        sort in sort(),
        offset in 0..4_usize,
        limit in prop::option::of(0..6_usize),
        fields in prop::option::of(vec(select(&FIELDS[..]), 0..4)),
        aggregate in prop::option::weighted(0.3, aggregate()),
    ) -> Json {
        let (offset, limit) = (json!(offset), json!(limit));
        json!({
            "bucket": "b", "filter": filter, "sort": sort, "offset": offset, "limit": limit,
            "fields": fields, "aggregate": aggregate,
        })
    }
}

/// Applies the steps. Returns the bucket, and its records in insertion order.
fn apply_steps(indexes: &[Vec<&str>], ordered: bool, steps: &[(Json, Option<Record>)]) -> (Bucket, Vec<Record>) {
    let any = json!({"type": "string"});
    let definition = json!({
        "key": "id",
        "schema": {"id": any, "a": any, "b": any, "c": any, "u": {"type": "string", "unique": true}},
        "indexes": indexes,
        "etsType": if ordered { "ordered_set" } else { "set" },
    });
    let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&definition).unwrap()));
    let mut records: Vec<Record> = Vec::new();
    for (key, record) in steps {
        let index = records.iter().position(|known| known["id"] == *key);
        match record {
            None => {
                bucket.remove(&Value::of_json(key).unwrap());
                index.map(|index| records.remove(index));
            }
            Some(record) => {
                let mut record = record.clone();
                record.insert("id".to_owned(), key.clone());
                if bucket.put(Row::new(&record).unwrap()).is_err() {
                    continue;
                }
                match index {
                    Some(index) => records[index] = record,
                    None => records.push(record),
                }
            }
        }
    }
    (bucket, records)
}

fn is_live(record: &Record, now: u64) -> bool {
    record.get("_expiresAt").and_then(Json::as_u64).is_none_or(|expiry| expiry > now)
}

fn equal(one: &Json, two: Option<&Json>) -> bool {
    match (one, two) {
        (Json::Number(one), Some(Json::Number(two))) => one.as_f64() == two.as_f64(),
        (Json::Null | Json::Bool(_) | Json::String(_), Some(two)) => one == two,
        _ => false,
    }
}

fn order(one: Option<&Json>, two: &Json) -> Option<Ordering> {
    match (one?, two) {
        (Json::Number(one), Json::Number(two)) => one.as_f64()?.partial_cmp(&two.as_f64()?),
        (Json::String(one), Json::String(two)) => Some(one.cmp(two)),
        _ => None,
    }
}

fn passes(value: Option<&Json>, operator: &str, operand: &Json) -> bool {
    let list = || operand.as_array().unwrap();
    let texts = || Some((value?.as_str()?, operand.as_str()?));
    match operator {
        "$eq" => equal(operand, value),
        "$neq" => !equal(operand, value),
        "$gt" => order(value, operand).is_some_and(Ordering::is_gt),
        "$gte" => order(value, operand).is_some_and(Ordering::is_ge),
        "$lt" => order(value, operand).is_some_and(Ordering::is_lt),
        "$lte" => order(value, operand).is_some_and(Ordering::is_le),
        "$in" => list().iter().any(|one| equal(one, value)),
        "$nin" => !list().iter().any(|one| equal(one, value)),
        "$between" => passes(value, "$gte", &operand[0]) && passes(value, "$lte", &operand[1]),
        "$startsWith" => texts().is_some_and(|(text, part)| text.starts_with(part)),
        "$endsWith" => texts().is_some_and(|(text, part)| text.ends_with(part)),
        "$contains" => texts().is_some_and(|(text, part)| text.to_lowercase().contains(&part.to_lowercase())),
        "$exists" => value.is_some_and(|value| !value.is_null()) == operand.as_bool().unwrap(),
        _ => panic!("{operator} is not in the model"),
    }
}

fn filter_matches(filter: &Json, record: &Record) -> bool {
    let filters = |json: &Json| json.as_array().unwrap().clone();
    filter.as_object().unwrap().iter().all(|(name, test)| match name.as_str() {
        "$or" => filters(test).iter().any(|filter| filter_matches(filter, record)),
        "$and" => filters(test).iter().all(|filter| filter_matches(filter, record)),
        _ => match test.as_object().filter(|tests| tests.keys().any(|operator| operator.starts_with('$'))) {
            Some(tests) => tests.iter().all(|(operator, operand)| passes(record.get(name), operator, operand)),
            None => equal(test, record.get(name)),
        },
    })
}

fn compare(one: &Record, two: &Record, sort: &Json) -> Ordering {
    let rank = |value: &Json| match value {
        Json::Bool(_) => 0,
        Json::Number(_) => 1,
        Json::String(_) => 2,
        _ => 3,
    };
    let by = |(name, direction): (&String, &Json)| {
        let value = |record: &Record| record.get(name).filter(|value| !value.is_null()).cloned();
        match (value(one), value(two)) {
            (None, None) => Ordering::Equal,
            (None, _) => Ordering::Greater,
            (_, None) => Ordering::Less,
            (Some(one), Some(two)) => {
                let ordering = match (&one, &two) {
                    (Json::Bool(one), Json::Bool(two)) => one.cmp(two),
                    _ => order(Some(&one), &two).unwrap_or_else(|| rank(&one).cmp(&rank(&two))),
                };
                if direction == "asc" { ordering } else { ordering.reverse() }
            }
        }
    };
    sort.as_object().unwrap().iter().map(by).find(|ordering| ordering.is_ne()).unwrap_or(Ordering::Equal)
}

fn compute(aggregate: &Json, records: &[&Record]) -> Option<Json> {
    let groups: Vec<&str> = aggregate["groupBy"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
    if groups.is_empty() {
        return compute_one(aggregate, records);
    }
    let mut found: Vec<(Record, Vec<&Record>)> = Vec::new();
    for record in records {
        let value = |name: &str| record.get(name).cloned().unwrap_or_default();
        let is_same =
            |key: &Record| key.iter().all(|(name, known)| *known == value(name) || equal(known, Some(&value(name))));
        match found.iter_mut().find(|(key, _)| is_same(key)) {
            Some((_, members)) => members.push(record),
            None => {
                found.push((groups.iter().map(|name| ((*name).to_owned(), value(name))).collect(), vec![record]));
            }
        }
    }
    let group = |(key, members): &(Record, Vec<&Record>)| json!({"key": key, "value": compute_one(aggregate, members)});
    Some(found.iter().map(group).collect())
}

fn compute_one(aggregate: &Json, records: &[&Record]) -> Option<Json> {
    let Some(field) = aggregate["field"].as_str() else { return Some(json!(records.len())) };
    let numbers: Vec<f64> = records.iter().filter_map(|record| record.get(field)?.as_f64()).collect();
    let sum: f64 = numbers.iter().sum();
    let number = match aggregate["function"].as_str().unwrap() {
        "count" => {
            let present = records.iter().filter(|record| record.get(field).is_some_and(|value| !value.is_null()));
            return Some(json!(present.count()));
        }
        "sum" => sum,
        "avg" if numbers.is_empty() => 0.0,
        #[expect(clippy::cast_precision_loss, reason = "there are few records")]
        "avg" => sum / numbers.len() as f64,
        "min" => numbers.into_iter().reduce(f64::min)?,
        "max" => numbers.into_iter().reduce(f64::max)?,
        function => panic!("{function} is not in the model"),
    };
    Some(json!(number))
}

/// Returns the expected result of the query.
fn model(query: &Json, records: &[Record], now: u64) -> Option<Json> {
    let mut matching: Vec<&Record> =
        records.iter().filter(|record| is_live(record, now) && filter_matches(&query["filter"], record)).collect();
    if query["aggregate"].is_object() {
        return compute(&query["aggregate"], &matching);
    }
    matching.sort_by(|one, two| compare(one, two, &query["sort"]));
    let count = |name: &str| query[name].as_u64().map(|number| usize::try_from(number).unwrap());
    let page = matching.into_iter().skip(count("offset").unwrap_or(0)).take(count("limit").unwrap_or(usize::MAX));
    let project = |record: &Record| match query["fields"].as_array() {
        None => Json::Object(record.clone()),
        Some(fields) => {
            let names = fields.iter().filter_map(Json::as_str);
            Json::Object(names.filter_map(|name| Some((name.to_owned(), record.get(name)?.clone()))).collect())
        }
    };
    Some(page.map(project).collect())
}

/// Converts all numbers to floats, so that 1 equals 1.0.
fn plain(json: &Json) -> Json {
    match json {
        Json::Number(number) => json!(number.as_f64().unwrap() + 0.0),
        Json::Array(list) => list.iter().map(plain).collect(),
        Json::Object(members) => members.iter().map(|(name, value)| (name.clone(), plain(value))).collect(),
        other => other.clone(),
    }
}

fn keys(rows: &[&Row]) -> Vec<Json> {
    rows.iter().map(|row| row.to_record()["id"].clone()).collect()
}

fn indexes() -> impl Strategy<Value = Vec<Vec<&'static str>>> {
    vec(vec(select(&FIELDS[..]), 1..4), 0..4)
}

/// Builds the query that JSON describes by the methods of [`Query`].
fn build(json: &Json) -> Query {
    let names = |json: &Json| -> Vec<String> {
        json.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let count = |json: &Json| json.as_u64().map(|number| usize::try_from(number).unwrap());
    let mut query = Query::new(json["bucket"].as_str().unwrap());
    for (option, value) in json.as_object().unwrap().iter().filter(|(_, value)| !value.is_null()) {
        query = match option.as_str() {
            "filter" => query.filter(value).unwrap(),
            "sort" => value.as_object().unwrap().iter().fold(query, |query, (field, direction)| {
                query.sort(field, if direction == "asc" { Direction::Asc } else { Direction::Desc })
            }),
            "offset" => query.offset(count(value).unwrap()),
            "limit" => query.limit(count(value).unwrap()),
            "fields" => query.fields(names(value)),
            "aggregate" => {
                let aggregate = match (value["function"].as_str().unwrap(), value["field"].as_str()) {
                    ("count", None) => Aggregate::count(),
                    ("count", Some(field)) => Aggregate::count_of(field),
                    ("sum", Some(field)) => Aggregate::sum(field),
                    ("avg", Some(field)) => Aggregate::avg(field),
                    ("min", Some(field)) => Aggregate::min(field),
                    ("max", Some(field)) => Aggregate::max(field),
                    other => panic!("unexpected {other:?}"),
                };
                query.aggregate(aggregate.group_by(names(&value["groupBy"])))
            }
            _ => query,
        };
    }
    query
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn built_query_equals_the_parsed_one(json in query()) {
        prop_assert_eq!(build(&json), Query::parse(&json).unwrap(), "{}", json);
    }

    #[test]
    fn indexes_do_not_change_results(
        steps in steps(),
        indexes in indexes(),
        ordered in any::<bool>(),
        queries in vec(query(), 1..12),
        restriction in prop::option::weighted(0.2, filter()),
        now in 0..10_u64,
    ) {
        let (bucket, records) = apply_steps(&indexes, ordered, &steps);
        for mut json in queries {
            let mut query = Query::parse(&json).unwrap();
            prop_assert!(Query::template(&json).is_ok());
            if let Some(restriction) = &restriction {
                query = query.restrict(&Filter::parse(restriction).unwrap());
                json["filter"] = json!({"$and": [json["filter"], restriction]});
            }
            let expected = model(&json, &records, now);
            let found = match query.evaluate(&bucket, now, &Budget::unlimited()).unwrap() {
                QueryOutput::Records(records) => Some(Json::Array(records)),
                QueryOutput::Value(value) => value,
            };
            prop_assert_eq!(found.as_ref().map(plain), expected.as_ref().map(plain), "{}", json);

            let mut text = Vec::new();
            let has_result = query.write_result(&bucket, now, &mut text, usize::MAX, &Budget::unlimited()).unwrap();
            let text = String::from_utf8(text).unwrap();
            prop_assert_eq!(has_result.then_some(text), found.map(|found| found.to_string()));

            let count = records.iter().filter(|record| is_live(record, now) && filter_matches(&json["filter"], record)).count();
            prop_assert_eq!(query.count(&bucket, now, &Budget::unlimited()).unwrap(), count);
        }
    }

    #[test]
    fn pages_cover_all_records(
        steps in steps(),
        ordered in any::<bool>(),
        filter in prop_oneof![Just(json!({})), filter()],
        limit in 1..5_usize,
        now in 0..10_u64,
    ) {
        let (bucket, records) = apply_steps(&[], ordered, &steps);
        let mut matching: Vec<&Record> =
            records.iter().filter(|record| is_live(record, now) && filter_matches(&filter, record)).collect();
        if ordered {
            matching.sort_by(|one, two| compare(one, two, &json!({"id": "asc"})));
        }
        let all: Vec<Json> = matching.iter().map(|record| record["id"].clone()).collect();
        let filter = Filter::parse(&filter).unwrap();

        let (mut paged, mut after) = (Vec::new(), None);
        loop {
            let page = bucket.page(after.as_ref(), limit, &filter, now, &Budget::unlimited()).unwrap();
            paged.extend(keys(&page.rows));
            prop_assert_eq!(page.has_more, paged.len() < all.len());
            after = page.next_cursor.map(|text| serde_json::from_str(text).unwrap());
            if !page.has_more {
                break;
            }
        }
        prop_assert_eq!(&paged, &all);
        let count = limit.min(all.len());
        prop_assert_eq!(&keys(&bucket.first(limit, &filter, now, &Budget::unlimited()).unwrap()), &all[..count]);
        prop_assert_eq!(&keys(&bucket.last(limit, &filter, now, &Budget::unlimited()).unwrap()), &all[all.len() - count..]);
        for record in &records {
            let is_hidden = !all.contains(&record["id"]);
            let page = bucket.page(Some(&record["id"]), limit, &filter, now, &Budget::unlimited()).unwrap();
            prop_assert!(!is_hidden || page.rows.is_empty() && !page.has_more && page.next_cursor.is_none());
        }
    }
}
