//! Followers.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::store;

/// A state is published shortly before its commit is in the history.
#[test]
fn snapshot_position_can_be_followed_immediately() {
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                store.insert("b", json!({"id": 1})).wait().unwrap();
            }
        });
        let failed = (0..100_000).find_map(|_| store.follow_from(store.snapshot().position).err());
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(failed, None);
    });
}
