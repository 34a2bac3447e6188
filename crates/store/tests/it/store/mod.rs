//! Tests of the store.

mod contract;
mod definitions;
mod disk_failure;
mod export_and_backup;
mod followers;
mod killed_process;
mod old_formats;
mod read_budgets;
mod row_permissions;
mod store_limit;
mod system_buckets;
mod write_queue;
mod writes;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value as Json, json};
use tidewire_store::{Clock, Query, Store, StoreError, StoreOptions, WriteError};

/// A manual clock.
#[derive(Clone)]
struct TestClock(Arc<AtomicU64>);

impl TestClock {
    fn new(now: u64) -> Self {
        Self(Arc::new(AtomicU64::new(now)))
    }

    fn set(&self, now: u64) {
        self.0.store(now, Ordering::Relaxed);
    }

    fn clock(&self) -> Clock {
        let now = Arc::clone(&self.0);
        Clock::new(move || now.load(Ordering::Relaxed))
    }
}

fn options() -> StoreOptions {
    StoreOptions::default()
}

/// Opens a store in a directory.
fn open(dir: &Path) -> Store {
    Store::open(dir, options()).unwrap().0
}

/// Runs a test with each engine. `reopen` restarts a persistent store, and returns a store in memory unchanged.
fn with_each_engine(test: impl Fn(Store, &dyn Fn(Store) -> Store)) {
    test(Store::memory(options()), &|store| store);
    let dir = tempfile::tempdir().unwrap();
    test(open(dir.path()), &|store| {
        store.close().unwrap();
        open(dir.path())
    });
    let dir = tempfile::tempdir().unwrap();
    test(open(dir.path()), &|store| {
        store.checkpoint().unwrap();
        store.close().unwrap();
        open(dir.path())
    });
}

pub(crate) fn records(store: &Store, bucket: &str) -> Vec<Json> {
    store.query(&Query::new(bucket)).unwrap().into_records()
}

/// Returns the error of a rejected write.
pub(crate) fn refusal<T: std::fmt::Debug>(done: Result<T, WriteError>) -> StoreError {
    match done {
        Err(WriteError::Refused(error)) => error,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn ids(store: &Store, bucket: &str) -> Vec<Json> {
    records(store, bucket).iter().map(|record| record["id"].clone()).collect()
}

/// Returns the definition of a bucket whose keys are numbers.
fn plain() -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}}})
}
