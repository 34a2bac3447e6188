//! Numbers that a bucket generates and counts.

use serde_json::{Map, json};
use tidewire_store::StoreError;

use super::{object, records, refusal, store};

/// Numbers are 64-bit floats: beyond 2^53 two whole ones may be the same key.
const LAST: u64 = (1 << 53) - 1;

#[test]
fn a_number_that_somebody_chose_never_makes_a_bucket_generate_one_that_is_there() {
    let config = json!({"key": "id", "schema": {"id": {"type": "number", "generated": "autoincrement"}}});
    for chosen in [json!(LAST - 1), json!(LAST), json!(LAST + 1), json!(u64::MAX), json!(1e300)] {
        let store = store(&[("b", config.clone())]);
        for _ in 0..3 {
            store.insert("b", Map::new()).wait().unwrap();
        }
        store.insert("b", object(json!({"id": chosen}))).wait().unwrap();
        for _ in 0..3 {
            let before = records(&store, "b").len();
            match store.insert("b", Map::new()).wait() {
                Ok(_) => assert_eq!(records(&store, "b").len(), before + 1, "one was overwritten after {chosen}"),
                Err(error) => assert!(matches!(refusal::<()>(Err(error)), StoreError::Validation(_)), "after {chosen}"),
            }
        }
    }
}

#[test]
fn a_version_ends_where_numbers_do() {
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
