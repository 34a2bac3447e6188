//! What is there after a restart.

use serde_json::json;
use tidewire_store::{Store, StoreOptions};

use super::{define, object, records};

#[test]
fn a_bucket_that_was_changed_dropped_and_defined_in_one_commit_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), StoreOptions::default()).unwrap().0;
    let text = json!({"type": "string"});
    let schema = json!({"id": {"type": "number"}, "name": {"type": "string", "unique": true}});
    let store = open();
    define(&store, &[("b", json!({"key": "id", "schema": schema}))]);
    store.insert("b", object(json!({"id": 1, "name": "x"}))).wait().unwrap();
    store
        .write(move |draft| {
            draft.delete("b", &json!(1), None)?;
            draft.insert("b", object(json!({"id": 2, "name": "x"})))?;
            draft.drop_bucket("b")?;
            draft.define_bucket("b", &json!({"key": "name", "schema": {"name": text}}))?;
            draft.insert("b", object(json!({"name": "y"})))
        })
        .wait()
        .unwrap();
    let before = records(&store, "b");
    store.close().unwrap();
    assert_eq!(records(&open(), "b"), before);
}
