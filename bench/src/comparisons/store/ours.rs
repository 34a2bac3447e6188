//! The store tidewire-store.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::wait_until;

use super::contender::{Reader, RowStore};
use super::row::{NewRow, check};

pub(super) const BUCKET: &str = "rows";

pub(super) struct Ours(Store);

impl Ours {
    pub(super) fn open_with(folder: &Path, options: StoreOptions) -> Self {
        let (store, _) = Store::open(folder, options).expect("the store opens");
        Self::with_index(store)
    }

    /// Uses a bucket with an index on the group.
    pub(super) fn with_index(store: Store) -> Self {
        Self::with_indexes(store, &json!(["group"]))
    }

    /// Uses a bucket without an index.
    pub(super) fn without_index(store: Store) -> Self {
        Self::with_indexes(store, &json!([]))
    }

    fn with_indexes(store: Store, indexes: &Json) -> Self {
        if store.snapshot().state.bucket(BUCKET).is_err() {
            let schema = json!({"id": {"type": "number"}, "group": {"type": "string"}});
            let bucket = json!({"key": "id", "schema": schema, "indexes": indexes});
            store.define_bucket(BUCKET, bucket).wait().expect("a bucket can be defined");
        }
        Self(store)
    }

    /// Waits until a checkpoint has been completed.
    pub(super) fn wait_for_checkpoint(&self) {
        wait_until("a checkpoint has been completed", Duration::from_mins(1), || self.0.stats().engine.checkpoints > 0);
    }

    pub(super) fn store(&self) -> &Store {
        &self.0
    }
}

impl RowStore for Ours {
    type Reader = Store;

    fn open(folder: &Path) -> Self {
        Self::open_with(folder, StoreOptions::default())
    }

    async fn insert(&self, row: NewRow) {
        self.0.insert(BUCKET, row.record()).await.expect("the row is stored");
    }

    fn reader(&self) -> Store {
        self.0.clone()
    }

    fn close(self) {
        self.0.close().expect("the store closes");
    }
}

impl Reader for Store {
    fn read(&mut self, id: u64) {
        let row = self.get(BUCKET, &id.into()).expect("the bucket exists").expect("the row exists");
        check(id, row.text());
    }

    fn count(&mut self) -> u64 {
        self.snapshot().state.bucket(BUCKET).expect("the bucket exists").len() as u64
    }
}
