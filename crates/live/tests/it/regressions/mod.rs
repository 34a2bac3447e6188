//! Regression tests.

mod churn;
mod counters;
mod missed_commits;
mod options;
mod repeated_results;
mod resume;
mod subscription_limit;
mod waker_panics;

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

fn definition() -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}}})
}

/// A store with the buckets `b` and `c`.
async fn store(options: StoreOptions) -> Store {
    let store = Store::memory(options);
    for name in ["b", "c"] {
        store.define_bucket(name, definition()).await.unwrap();
    }
    store
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}
