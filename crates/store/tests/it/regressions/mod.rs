//! What once went wrong, and must hold.

mod anything;
mod closing;
mod follow;
mod numbers;
mod permissions;
mod queries;
mod records;
mod references;
mod replies;
mod restart;
mod sweeps;
mod transactions;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value as Json};
use tidewire_store::{Clock, Query, Store, StoreError, StoreOptions, WriteError};

fn object(json: Json) -> Map<String, Json> {
    serde_json::from_value(json).unwrap()
}

/// A store in memory with these buckets.
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

/// A clock that stands still until it is told, and what tells it.
fn clock(now: u64) -> (Clock, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(now));
    let told = Arc::clone(&time);
    (Clock::new(move || told.load(Ordering::Relaxed)), time)
}

fn records(store: &Store, bucket: &str) -> Vec<Json> {
    match store.query(&Query::all(bucket)).unwrap() {
        tidewire_store::Answer::Records(records) => records,
        tidewire_store::Answer::Value(value) => panic!("{value:?} are no records"),
    }
}

/// Why a write was refused.
fn refusal<T: std::fmt::Debug>(done: Result<T, WriteError>) -> StoreError {
    match done {
        Err(WriteError::Refused(error)) => error,
        other => panic!("{other:?} is no refusal"),
    }
}
