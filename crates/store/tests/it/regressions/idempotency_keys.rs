//! Idempotency keys of several users.

use serde_json::{Value as Json, json};
use tidewire_store::{Limits, Store, StoreOptions};

/// Runs a write with an idempotency key. Returns the stored reply, or `reply` if none is stored.
fn once(store: &Store, user: &str, key: &str, reply: Json) -> Json {
    let (user, key) = (user.to_owned(), key.to_owned());
    store.write(move |draft| draft.once(&user, &key, "pay", |_| Ok(reply))).wait().unwrap()
}

#[test]
fn replies_of_one_user_do_not_evict_those_of_another() {
    for (max_replies, max_reply_bytes, evictions) in [(50, usize::MAX, 151..=151), (usize::MAX, 20_000, 1..=199)] {
        let options =
            StoreOptions::default().limits(Limits::default().max_replies(max_replies).max_reply_bytes(max_reply_bytes));
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(dir.path(), options.clone()).unwrap();
        once(&store, "ann", "payment", json!("first"));
        for key in 0..200 {
            once(&store, "bob", &key.to_string(), json!(key));
        }
        assert_eq!(once(&store, "ann", "payment", json!("second")), "first");
        let evicted = store.stats().evicted_replies;
        assert!(evictions.contains(&evicted), "{evicted} evicted");
        assert_eq!(once(&store, "bob", "199", json!("again")), 199, "the newest reply is stored");
        assert_eq!(once(&store, "bob", "0", json!("again")), "again", "the oldest reply was evicted");
        store.close().unwrap();

        let (store, _) = Store::open(dir.path(), options).unwrap();
        for key in 200..400 {
            once(&store, "bob", &key.to_string(), json!(key));
        }
        assert_eq!(once(&store, "ann", "payment", json!("second")), "first", "after a restart as well");
    }
}
