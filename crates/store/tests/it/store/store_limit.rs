//! The limit of the bytes of a store.

use serde_json::json;
use tidewire_store::system::SystemBuckets;
use tidewire_store::transaction::Operation;
use tidewire_store::{Limits, Pending, Store, StoreError, StoreOptions, WriteError};

use super::{ids, plain, records};

const MAX: usize = 10_000;

fn limited() -> StoreOptions {
    let system_buckets = SystemBuckets::default().declare("_audit", &plain()).unwrap();
    StoreOptions::default().limits(Limits::default().max_store_bytes(MAX)).system_buckets(system_buckets)
}

fn insert(store: &Store, id: usize, len: usize) -> Pending<tidewire_store::Row> {
    store.insert("b", json!({"id": id, "text": "x".repeat(len)}))
}

fn is_full<T>(pending: Pending<T>) -> bool {
    matches!(pending.wait(), Err(WriteError::Refused(StoreError::StoreFull { bytes, max: MAX })) if bytes > MAX)
}

/// Inserts records until the store is full. Returns their number.
fn fill(store: &Store) -> usize {
    store.define_bucket("b", plain()).wait().unwrap();
    (0..MAX).find(|id| is_full(insert(store, *id, 500))).expect("the store has a limit")
}

#[test]
fn full_store_rejects_only_growth() {
    let store = Store::memory(limited());
    let count = fill(&store);
    let full = store.stats();
    assert!(full.record_bytes <= MAX && full.record_bytes > MAX - 1500 && full.refused == 1, "{full:?}");
    assert_eq!(ids(&store, "b"), (0..count).collect::<Vec<_>>(), "a rejected write has no effect");

    let grow = store.update("b", json!(0), json!({"text": "x".repeat(3000)}), None);
    assert!(is_full(grow));
    assert_eq!(store.stats().record_bytes, full.record_bytes);
    // A write that replaces bytes is accepted, a write that adds bytes is rejected completely.
    let exchange = |len: usize| {
        let text = "y".repeat(len);
        let operations = json!([
            {"op": "delete", "bucket": "b", "key": 0},
            {"op": "insert", "bucket": "b", "data": {"id": count, "text": text}},
        ]);
        store.transact(Operation::parse_all(&operations).unwrap())
    };
    assert!(is_full(exchange(3000)));
    assert_eq!(records(&store, "b")[0]["text"], "x".repeat(500));
    exchange(500).wait().unwrap();
    // System buckets do not count.
    let audit = json!({"id": 1, "text": "x".repeat(MAX)});
    store.write(|draft| draft.system(|draft| draft.insert("_audit", audit))).wait().unwrap();

    assert!(store.delete("b", json!(1), None).wait().unwrap());
    insert(&store, 1, 500).wait().unwrap();
    store.clear("b").wait().unwrap();
    insert(&store, 1, 3000).wait().unwrap();
}

#[test]
fn store_full_error_names_the_limit_and_the_remedy() {
    let store = Store::memory(limited());
    fill(&store);
    let error = insert(&store, MAX, 20_000).wait().unwrap_err().to_string();
    assert!(error.contains("the limit is 10000; delete records or raise the limit"), "{error}");
}

#[test]
fn store_above_its_limit_opens_and_can_shrink() {
    let dir = tempfile::tempdir().unwrap();
    let store = super::open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    for id in 0..30 {
        insert(&store, id, 1000).wait().unwrap();
    }
    store.close().unwrap();
    let (store, _) = Store::open(dir.path(), limited()).unwrap();
    assert!(store.stats().record_bytes > MAX);
    assert!(is_full(insert(&store, 30, 10)));
    store.update("b", json!(0), json!({"text": "short"}), None).wait().unwrap();
    assert!(store.delete("b", json!(1), None).wait().unwrap());
    assert!(store.stats().record_bytes > MAX, "it is still above its limit");
}
