//! Regression tests.

mod anew;
mod counts;
mod crowd;
mod order;
mod panics;
mod resume;
mod returning;
mod settings;

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

fn plain() -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}}})
}

/// A store with the buckets `b` and `c`.
async fn store(options: StoreOptions) -> Store {
    let store = Store::memory(options);
    for name in ["b", "c"] {
        store.define_bucket(name, plain()).await.unwrap();
    }
    store
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}
