//! Row filters of writes.

use std::sync::atomic::Ordering;

use serde_json::json;
use tidewire_store::{Filter, Store, StoreOptions};

use super::{clock, define};

#[test]
fn expired_hidden_record_does_not_block_its_key() {
    let (clock, time) = clock(1000);
    let store = Store::memory(StoreOptions::default().clock(clock).sweep_interval(None));
    define(&store, &[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}, "ttl": 100}))]);
    store.insert("b", json!({"id": 1, "owner": "bob"})).wait().unwrap();
    time.store(1100, Ordering::Relaxed);
    let filter = Filter::parse(&json!({"owner": "ann"})).unwrap();
    let record = json!({"id": 1, "owner": "ann"});
    let inserted =
        store.write(move |draft| draft.with_row_filter(&filter, |draft| draft.upsert("b", record))).wait().unwrap();
    assert_eq!(inserted.to_record()["_version"], 1);
}
