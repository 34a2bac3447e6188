//! Sweeps of expired records.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until};

use super::{clock, define};

fn options() -> (StoreOptions, Arc<AtomicU64>) {
    let (clock, time) = clock(1000);
    let options = StoreOptions::default().clock(clock).sweep_interval(Duration::from_millis(1));
    (options, time)
}

#[test]
fn large_sweep_is_split_into_commits() {
    let (mut options, time) = options();
    options.embedded.max_group_bytes = 8 << 10;
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path(), options).unwrap();
    define(&store, &[("b", json!({"key": "id", "schema": {"id": {"type": "string"}}, "ttl": 100}))]);
    for id in 0..150 {
        let records = (0..10).map(|place| json!({"id": format!("{id}-{place}-{}", "x".repeat(100))}));
        store.insert_many("b", records).wait().unwrap();
    }
    time.store(1100, Ordering::Relaxed);
    // The writer reads the clock when it handles a message.
    store.write(|_| Ok(())).wait().unwrap();
    wait_until("all are swept", PATIENCE, || store.stats().swept == 1500);
}

#[test]
fn expired_records_that_cannot_be_deleted_do_not_block_others() {
    let (options, time) = options();
    let store = Store::memory(options);
    let id = json!({"type": "number"});
    define(
        &store,
        &[
            ("targets", json!({"key": "id", "schema": {"id": id}, "ttl": 100})),
            ("b", json!({"key": "id", "schema": {"id": id, "target": {"type": "number", "ref": "targets"}}})),
        ],
    );
    store.insert_many("targets", (0..2500).map(|id| json!({"id": id}))).wait().unwrap();
    let referring = (0..2400).map(|id| json!({"id": id, "target": id}));
    store.insert_many("b", referring).wait().unwrap();
    time.store(1100, Ordering::Relaxed);
    store.write(|_| Ok(())).wait().unwrap();
    wait_until("the records without references are swept", PATIENCE, || store.stats().swept == 100);
    // The others are swept when the references to them are deleted.
    store.clear("b").wait().unwrap();
    wait_until("all are swept", PATIENCE, || store.stats().swept == 2500);
}
