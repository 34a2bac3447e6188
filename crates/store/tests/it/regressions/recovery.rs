//! Recovery after a restart.

use serde_json::json;
use tidewire_store::{RowError, Store, StoreError, StoreOptions};

use super::{define, records, refusal};

#[test]
fn bucket_changed_dropped_and_redefined_in_one_commit_is_recovered() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), StoreOptions::default()).unwrap().0;
    let text = json!({"type": "string"});
    let schema = json!({"id": {"type": "number"}, "name": {"type": "string", "unique": true}});
    let store = open();
    define(&store, &[("b", json!({"key": "id", "schema": schema}))]);
    store.insert("b", json!({"id": 1, "name": "x"})).wait().unwrap();
    store
        .write(move |draft| {
            draft.delete("b", &json!(1), None)?;
            draft.insert("b", json!({"id": 2, "name": "x"}))?;
            draft.drop_bucket("b")?;
            draft.define_bucket("b", &json!({"key": "name", "schema": {"name": text}}))?;
            draft.insert("b", json!({"name": "y"}))
        })
        .wait()
        .unwrap();
    let before = records(&store, "b");
    store.close().unwrap();
    assert_eq!(records(&open(), "b"), before);
}

#[test]
fn too_deep_definition_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), StoreOptions::default()).unwrap().0;
    let store = open();
    let deep = (0..200).fold(json!([]), |inner, _| json!([inner]));
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}, "deep": {"type": "array", "default": deep}}});
    let refused = refusal(store.define_bucket("b", config).wait());
    assert_eq!(refused, StoreError::Row(RowError::TooDeep { max: 100 }));
    store.close().unwrap();
    assert_eq!(open().snapshot().state.names().count(), 0);
}

#[test]
fn unbounded_history_is_supported() {
    let dir = tempfile::tempdir().unwrap();
    let options = StoreOptions::default().history_bytes(usize::MAX);
    let store = Store::open(dir.path(), options.clone()).unwrap().0;
    define(&store, &[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    store.close().unwrap();
    let store = Store::open(dir.path(), options).unwrap().0;
    assert_eq!(store.stats().history_commits, 1);
}
