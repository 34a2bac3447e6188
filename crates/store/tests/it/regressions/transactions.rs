//! Transactions.

use serde_json::json;
use tidewire_store::transaction::{Operation, OperationError, OperationResult};
use tidewire_store::{StoreError, WriteError};

use super::{records, store};

#[test]
fn generated_key_of_an_existing_record_is_rejected() {
    for (rule, count) in [
        (json!({"type": "string", "default": "main"}), 1),
        // All operations of a write have the same time.
        (json!({"type": "number", "generated": "timestamp"}), 0),
    ] {
        let store = store(&[("b", json!({"key": "id", "schema": {"id": rule}}))]);
        for n in 0..count {
            store.insert("b", json!({"n": n})).wait().unwrap();
        }
        let before = records(&store, "b");
        let insert = json!({"op": "insert", "bucket": "b", "data": {"n": 7}});
        let operations = Operation::parse_all(&json!([insert, insert])).unwrap();
        let refused = store.transact(operations).wait().unwrap_err();
        let WriteError::Refused(StoreError::Transaction(error)) = &refused else { panic!("{refused}") };
        assert!(matches!(*error.problem, OperationError::Exists { .. }), "{error}");
        assert_eq!(records(&store, "b"), before);
    }
}

#[test]
fn transaction_results_are_limited() {
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    for id in 0..4 {
        store.insert("b", json!({"id": id, "text": "x".repeat(500_000)})).wait().unwrap();
    }
    let before = records(&store, "b").len();
    let insert = json!({"op": "insert", "bucket": "b", "data": {"id": 9}});
    for (read, enough) in [
        (json!({"op": "get", "bucket": "b", "key": 1}), 34),
        (json!({"op": "findOne", "bucket": "b", "filter": {"id": 1}}), 34),
        (json!({"op": "where", "bucket": "b", "filter": {}}), 9),
        (json!({"op": "update", "bucket": "b", "key": 1, "data": {}}), 34),
    ] {
        let transact = |reads: usize| {
            let operations: Vec<_> = std::iter::once(&insert).chain(std::iter::repeat_n(&read, reads)).collect();
            store.transact(Operation::parse_all(&json!(operations)).unwrap()).wait()
        };
        let refused = transact(enough).unwrap_err();
        let why = format!("operations[{enough}]: the results of the transaction are larger than 16777216 bytes");
        assert_eq!(refused.to_string(), why);
        assert_eq!(records(&store, "b").len(), before, "the transaction had no effect");
    }
}

#[test]
fn transaction_checks_versions() {
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    store.insert("b", json!({"id": 1})).wait().unwrap();
    store.update("b", json!(1), json!({"n": 1}), None).wait().unwrap();
    let transact = |operations: &serde_json::Value| store.transact(Operation::parse_all(operations).unwrap()).wait();
    for stale in [
        json!({"op": "update", "bucket": "b", "key": 1, "data": {"n": 2}, "version": 1}),
        json!({"op": "delete", "bucket": "b", "key": 1, "version": 7}),
    ] {
        let refused = transact(&json!([{"op": "insert", "bucket": "b", "data": {"id": 2}}, stale])).unwrap_err();
        assert_eq!(refused.to_string(), "operations[1]: version conflict: record 1 in bucket \"b\" has version 2");
        let WriteError::Refused(StoreError::Transaction(error)) = refused else { panic!("{refused}") };
        let conflict = StoreError::Conflict { bucket: "b".to_owned(), key: json!(1), current: 2 };
        assert_eq!((error.index, *error.problem), (1, OperationError::Store(conflict)));
        assert_eq!(records(&store, "b").len(), 1, "the transaction had no effect");
    }
    // Each operation sees the version of the previous one.
    let update = |version: u64| json!({"op": "update", "bucket": "b", "key": 1, "data": {}, "version": version});
    let results =
        transact(&json!([update(2), update(3), {"op": "delete", "bucket": "b", "key": 1, "version": 4}])).unwrap();
    assert_eq!(results[1].to_json()["_version"], 4);
    assert!(records(&store, "b").is_empty());
    for wrong in [json!("1"), json!(1.5), json!(-1), json!([1]), json!(true)] {
        for op in ["update", "delete"] {
            let operation = json!({"op": op, "bucket": "b", "key": 1, "data": {}, "version": wrong});
            let error = Operation::parse_all(&json!([update(1), operation])).unwrap_err();
            assert_eq!(error.to_string(), "operations[1]: version must be a non-negative integer");
        }
    }
    let none = json!([{"op": "delete", "bucket": "b", "key": 1, "version": null}]);
    assert_eq!(transact(&none).unwrap(), [OperationResult::Deleted]);
}
