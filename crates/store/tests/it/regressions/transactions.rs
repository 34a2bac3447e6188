//! Transactions.

use serde_json::json;
use tidewire_store::{Operation, Problem, StoreError, WriteError};

use super::{object, records, store};

#[test]
fn a_key_that_is_not_given_is_not_taken_from_another_record_either() {
    for (rule, count) in [
        (json!({"type": "string", "default": "main"}), 1),
        // All that a write does is done at one time.
        (json!({"type": "number", "generated": "timestamp"}), 0),
    ] {
        let store = store(&[("b", json!({"key": "id", "schema": {"id": rule}}))]);
        for n in 0..count {
            store.insert("b", object(json!({"n": n}))).wait().unwrap();
        }
        let before = records(&store, "b");
        let insert = json!({"op": "insert", "bucket": "b", "data": {"n": 7}});
        let operations = Operation::parse_all(&json!([insert, insert])).unwrap();
        let refused = store.transact(operations).wait().unwrap_err();
        let WriteError::Refused(StoreError::Transaction(error)) = &refused else { panic!("{refused}") };
        assert!(matches!(*error.problem, Problem::Exists { .. }), "{error}");
        assert_eq!(records(&store, "b"), before);
    }
}

#[test]
fn what_a_transaction_returns_is_bounded() {
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    for id in 0..4 {
        store.insert("b", object(json!({"id": id, "text": "x".repeat(500_000)}))).wait().unwrap();
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
        let why = format!("operations[{enough}]: all results of a transaction together may have 16777216 bytes");
        assert_eq!(refused.to_string(), why);
        assert_eq!(records(&store, "b").len(), before, "nothing has happened");
    }
}
