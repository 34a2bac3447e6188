//! Definitions of buckets and queries: errors and limits.

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Limits, Store, StoreError};

use super::{options, plain, refusal};

#[test]
fn invalid_bucket_definition_has_no_effect() {
    let store = Store::memory(options());
    store.define_bucket("b", plain()).wait().unwrap();
    let position = store.snapshot().position;
    for (name, config, error) in [
        ("b", plain(), "bucket \"b\" is already defined"),
        (
            "",
            plain(),
            "invalid name \"\": expected 1 to 255 bytes that do not begin with `$` and do not name a system bucket",
        ),
        (
            "$b",
            plain(),
            "invalid name \"$b\": expected 1 to 255 bytes that do not begin with `$` and do not name a system bucket",
        ),
        ("c", json!({"key": "x", "schema": {}}), "unknown field x in key: the schema does not define it"),
        ("c", json!({"schema": {}}), "key must be the name of a field"),
        (
            "c",
            json!({"key": "x", "schema": {"x": {"type": "array"}}}),
            "key must be a field that is not an object or array",
        ),
        ("c", Json::Null, "the definition must be an object"),
    ] {
        assert_eq!(refusal(store.define_bucket(name, config).wait()).to_string(), error);
    }
    for (updates, error) in [
        (
            json!({"addFields": {"id": {"type": "string"}}}),
            "addFields.id must be a field that the bucket does not have yet",
        ),
        (json!({"addIndexes": ["x"]}), "unknown field x in indexes: the schema does not define it"),
        (json!({"addIndexes": "x"}), "addIndexes must be a list of field names, or of lists of field names"),
        (json!({"maxSize": 1}), "unknown option maxSize in the update"),
        (
            json!({"ttl": "soon"}),
            "ttl must be a positive number of milliseconds, or a string such as \"30s\", \"5m\", \"1h\" or \"7d\"",
        ),
        (json!(1), "the update must be an object"),
    ] {
        assert_eq!(refusal(store.update_bucket("b", updates).wait()).to_string(), error);
    }
    assert_eq!(
        refusal(store.update_bucket("x", json!({})).wait()),
        StoreError::BucketNotDefined { bucket: "x".into() }
    );
    assert_eq!(refusal(store.drop_bucket("x").wait()), StoreError::BucketNotDefined { bucket: "x".into() });
    assert_eq!((store.snapshot().position, store.stats().buckets.len()), (position, 1));
}

#[test]
fn invalid_query_definition_has_no_effect() {
    let store = Store::memory(options());
    store.define_bucket("b", plain()).wait().unwrap();
    store.define_query("q", json!({"bucket": "b"})).wait().unwrap();
    let position = store.snapshot().position;
    for (name, config, error) in [
        ("q", json!({"bucket": "b"}), "query \"q\" is already defined"),
        ("r", json!({"bucket": "x"}), "bucket \"x\" is not defined"),
        ("r", json!({"bucket": "$buckets"}), "bucket \"$buckets\" is not defined"),
        ("r", json!({}), "`bucket` must be a non-empty string"),
        (
            "r",
            json!({"bucket": "b", "filter": {"a": "{{ params.a }}", "b": {"$near": 1}}}),
            "unknown operator $near in b",
        ),
    ] {
        assert_eq!(refusal(store.define_query(name, config).wait()).to_string(), error);
    }
    assert_eq!(refusal(store.undefine_query("r").wait()), StoreError::QueryNotDefined { query: "r".into() });
    assert_eq!(store.snapshot().position, position);
    store.define_query("list", json!({"bucket": "b", "filter": {"id": {"$in": "{{ params.ids }}"}}})).wait().unwrap();
    assert_eq!(store.query_named("list", &Map::new()).unwrap_err().to_string(), "missing parameter params.ids");
}

/// Clients cannot read or write internal buckets.
#[test]
fn internal_buckets_are_inaccessible() {
    let store = Store::memory(options());
    for name in ["$buckets", "$queries", "$replies"] {
        let undefined = StoreError::BucketNotDefined { bucket: name.to_owned() };
        assert_eq!(store.get(name, &json!("b")), Err(undefined.clone()));
        assert_eq!(refusal(store.insert(name, json!({"name": "b"})).wait()), undefined);
        assert_eq!(refusal(store.delete(name, json!("b"), None).wait()), undefined);
        assert_eq!(refusal(store.clear(name).wait()), undefined);
        assert_eq!(refusal(store.drop_bucket(name).wait()), undefined);
    }
    assert!(store.stats().buckets.is_empty());
}

#[test]
fn limits_are_enforced() {
    let options = options().limits(
        Limits::default().max_record_bytes(300).max_depth(3).max_fields(8).max_name_bytes(4).max_definitions(2),
    );
    let store = Store::memory(options);
    store.define_bucket("b", plain()).wait().unwrap();
    for (record, expected) in [
        (json!({"id": 1, "x": "x".repeat(300)}), "bytes, more than the limit of 300"),
        (json!({"id": 1, "x": [[[]]]}), "the record is nested more than 3 levels deep"),
        (json!({"id": 1, "x": {"a": 1, "b": 1, "c": 1, "d": 1}}), "the record has 9 fields, more than the limit of 8"),
    ] {
        let refused = refusal(store.insert("b", record).wait()).to_string();
        assert!(refused.ends_with(expected), "{refused}");
    }
    assert!(matches!(refusal(store.define_bucket("longer", plain()).wait()), StoreError::Name { max: 4, .. }));
    store.define_bucket("c", plain()).wait().unwrap();
    assert_eq!(refusal(store.define_bucket("d", plain()).wait()), StoreError::TooManyDefinitions { max: 2 });
}
