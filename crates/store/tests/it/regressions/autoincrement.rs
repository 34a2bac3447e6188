//! Autoincrement numbers and versions.

use serde_json::{Map, json};
use tidewire_store::StoreError;

use super::{records, refusal, store};

/// Numbers are 64-bit floats: above 2^53 different integers can be the same key.
const LAST: u64 = (1 << 53) - 1;

#[test]
fn generated_number_never_collides_with_a_supplied_one() {
    let config = json!({"key": "id", "schema": {"id": {"type": "number", "generated": "autoincrement"}}});
    for chosen in [json!(LAST - 1), json!(LAST), json!(LAST + 1), json!(u64::MAX), json!(1e300)] {
        let store = store(&[("b", config.clone())]);
        for _ in 0..3 {
            store.insert("b", Map::new()).wait().unwrap();
        }
        store.insert("b", json!({"id": chosen})).wait().unwrap();
        for _ in 0..3 {
            let before = records(&store, "b").len();
            match store.insert("b", Map::new()).wait() {
                Ok(_) => assert_eq!(records(&store, "b").len(), before + 1, "a record was overwritten after {chosen}"),
                Err(error) => assert!(matches!(refusal::<()>(Err(error)), StoreError::Validation(_)), "after {chosen}"),
            }
        }
    }
}

#[test]
fn version_saturates_at_the_largest_number() {
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    let lines = format!(
        "{}\n{}\n{}\n",
        json!({"tidewire": "export", "version": 1}),
        json!({"in": "b", "record": {"id": 1, "_version": u64::MAX}}),
        json!({"end": 1}),
    );
    store.import(lines.as_bytes()).unwrap();
    let updated = store.update("b", json!(1), Map::new(), None).wait().unwrap();
    assert_eq!(updated.to_record()["_version"], u64::MAX);
}

#[test]
fn rolled_back_largest_number_does_not_exhaust_autoincrement() {
    let config = json!({"key": "id", "schema": {
        "id": {"type": "number", "generated": "autoincrement"}, "name": {"type": "string", "unique": true},
    }});
    let store = store(&[("b", config)]);
    store.insert("b", json!({"name": "first"})).wait().unwrap();
    let fail = || StoreError::BucketNotDefined { bucket: "none".to_owned() };
    // Rolled back by its own write.
    let write = store.write(move |draft| {
        draft.insert("b", json!({"id": LAST}))?;
        Err::<(), _>(fail())
    });
    refusal(write.wait());
    // Generated after a number that is rolled back with it.
    let write = store.write(move |draft| {
        draft.insert("b", json!({"id": LAST - 1}))?;
        draft.insert("b", Map::new())?;
        Err::<(), _>(fail())
    });
    refusal(write.wait());
    // Rolled back within a write that continues, before and after a change of definitions.
    let write = store.write(move |draft| {
        let _ = draft.atomically(|draft| {
            draft.insert("b", json!({"id": LAST - 2}))?;
            draft.define_bucket("c", &json!({"key": "id", "schema": {"id": {"type": "number"}}}))?;
            draft.insert("b", json!({"id": LAST}))?;
            Err::<(), _>(fail())
        });
        Ok(())
    });
    write.wait().unwrap();
    // Rejected, alone and in a transaction.
    refusal(store.insert("b", json!({"id": LAST, "name": "first"})).wait());
    let operations = json!([
        {"op": "insert", "bucket": "b", "data": {"id": LAST}},
        {"op": "insert", "bucket": "b", "data": {"name": "first"}},
    ]);
    refusal(store.transact(tidewire_store::transaction::Operation::parse_all(&operations).unwrap()).wait());

    let id = store.insert("b", Map::new()).wait().unwrap().to_record()["id"].as_u64().unwrap();
    assert!((2..100).contains(&id), "generated {id}");
}

#[test]
fn exhausted_autoincrement_is_reported() {
    let config = json!({"key": "id", "schema": {"id": {"type": "number", "generated": "autoincrement"}}});
    let store = store(&[("b", config)]);
    store.insert("b", json!({"id": LAST})).wait().unwrap();
    let refused = refusal(store.insert("b", Map::new()).wait());
    assert!(refused.to_string().contains("9007199254740991"), "{refused}");
    // Numbers that a caller supplies are still accepted.
    store.insert("b", json!({"id": 7})).wait().unwrap();
    assert_eq!(records(&store, "b").len(), 2);
}

#[test]
fn failed_insert_consumes_its_number() {
    let config = json!({"key": "id", "schema": {
        "id": {"type": "number", "generated": "autoincrement"}, "name": {"type": "string", "required": true},
    }});
    let store = store(&[("b", config)]);
    let insert = |record| store.insert("b", record).wait();
    assert_eq!(insert(json!({"name": "first"})).unwrap().to_record()["id"], 1);
    refusal(insert(json!({})));
    refusal(insert(json!({"name": 7})));
    assert_eq!(insert(json!({"name": "second"})).unwrap().to_record()["id"], 4);
}
