//! What once went wrong, and must hold.

mod numbers;
mod references;
mod restart;

use serde_json::{Map, Value as Json};
use tidewire_store::{Query, Store, StoreError, StoreOptions, WriteError};

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
