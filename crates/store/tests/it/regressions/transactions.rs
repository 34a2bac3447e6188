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
