//! A model of a client, which applies changes to the first result of a query.

use serde_json::Value as Json;
use tidewire_live::{Delta, Matcher, QueryId, QueryResult, ResultChange};
use tidewire_store::query::Budget;
use tidewire_store::{Query, QueryOutput};

/// Returns the current result of a query as a client decodes it.
pub(crate) fn current_result(live: &mut Matcher, query: QueryId) -> DecodedResult {
    match live.result(query).unwrap() {
        QueryResult::Json(bytes) => Some(serde_json::from_slice(&bytes).unwrap()),
        QueryResult::NoValue => None,
        other => unreachable!("{other:?}"),
    }
}

/// A decoded result: a list of records, a value, or no value.
pub(crate) type DecodedResult = Option<Json>;

/// Returns the result of a new query.
pub(crate) fn fresh_result(query: &Query, bucket: &tidewire_store::Bucket, now: u64) -> DecodedResult {
    match query.evaluate(bucket, now, &Budget::unlimited()).unwrap() {
        QueryOutput::Records(records) => Some(Json::Array(records)),
        QueryOutput::Value(value) => value,
    }
}

/// Returns the result after a change.
pub(crate) fn apply_change(
    result: &DecodedResult,
    change: &ResultChange,
    live: &mut Matcher,
    query: QueryId,
) -> DecodedResult {
    match change {
        ResultChange::Records(delta) => {
            let mut records = result.clone().unwrap().as_array().unwrap().clone();
            let mut from_json = records.clone();
            delta.apply(&mut records);
            apply(delta, &mut from_json);
            assert_eq!(records, from_json, "the delta and its JSON have the same effect: {delta:?}");
            Some(Json::Array(records))
        }
        ResultChange::Value => current_result(live, query),
        other => unreachable!("{other:?}"),
    }
}

/// Applies the JSON of a delta, as documented.
pub(crate) fn apply(delta: &Delta, result: &mut Vec<Json>) {
    let json: Json = serde_json::from_slice(&delta.encoded()).unwrap();
    let list = |name: &str| json[name].as_array().unwrap().iter();
    let index = |entry: &Json| usize::try_from(entry["index"].as_u64().unwrap()).unwrap();
    if delta.is_indexed() {
        let is_not_added = |entry: &Json| list("added").all(|added| added["index"] != entry["index"]);
        assert!(list("changed").all(is_not_added), "{json}");
        for entry in list("removed").rev() {
            let removed = result.remove(index(entry));
            if let Some(key) = removed.get(delta.key()) {
                assert_eq!(*key, entry["key"]);
            }
        }
        list("added").for_each(|entry| result.insert(index(entry), entry["record"].clone()));
        list("changed").for_each(|entry| result[index(entry)] = entry["record"].clone());
        return;
    }
    let index = |result: &[Json], key: &Json| result.iter().position(|record| record[delta.key()] == *key).unwrap();
    for key in list("removed") {
        result.remove(index(result, key));
    }
    match json.get("at") {
        None => list("added").for_each(|record| result.push(record.clone())),
        Some(at) => {
            for (record, at) in list("added").zip(at.as_array().unwrap()) {
                result.insert(usize::try_from(at.as_u64().unwrap()).unwrap(), record.clone());
            }
        }
    }
    for record in list("changed") {
        let index = index(result, &record[delta.key()]);
        result[index] = record.clone();
    }
}
