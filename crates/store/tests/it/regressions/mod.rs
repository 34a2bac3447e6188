//! Regression tests.

mod autoincrement;
mod closing;
mod followers;
mod idempotency_keys;
mod query_limits;
mod random_operations;
mod records;
mod recovery;
mod references;
mod row_permissions;
mod sweeps;
mod transactions;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value as Json;
use tidewire_store::{Clock, Store, StoreOptions};

use crate::store::{records, refusal};

/// Creates a store in memory with these buckets.
fn store(buckets: &[(&str, Json)]) -> Store {
    let store = Store::memory(StoreOptions::default());
    define(&store, buckets);
    store
}

fn define(store: &Store, buckets: &[(&str, Json)]) {
    for (name, config) in buckets {
        store.define_bucket(name, config.clone()).wait().unwrap();
    }
}

/// Returns a manual clock and its time.
fn clock(now: u64) -> (Clock, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(now));
    let now = Arc::clone(&time);
    (Clock::new(move || now.load(Ordering::Relaxed)), time)
}
