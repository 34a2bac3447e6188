//! Subscriptions end as if missed commits had been applied. The history is empty, so the driver misses every commit.

use serde_json::{Map, json};
use tidewire_live::{Live, Mode, Subscription, SubscriptionEnd};
use tidewire_store::{Query, Store, StoreOptions};

use super::{definition, run};

async fn store_without_history() -> Store {
    super::store(StoreOptions::default().history_bytes(1)).await
}

async fn end_of(live: &Live, subscription: &mut Subscription) -> Option<SubscriptionEnd> {
    live.settled().await.unwrap();
    loop {
        match subscription.try_next() {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(end) => return Some(end),
        }
    }
}

#[test]
fn redefined_bucket_ends_the_subscription_after_missed_commits() {
    run(async {
        let store = store_without_history().await;
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
        // Clearing or updating the bucket does not end the subscription.
        store.clear("b").await.unwrap();
        store.update_bucket("b", json!({"addIndexes": ["id"]})).await.unwrap();
        assert_eq!(end_of(&live, &mut subscription).await, None);
        let redefined = store.write(|draft| {
            draft.drop_bucket("b")?;
            draft.define_bucket("b", &definition())
        });
        redefined.await.unwrap();
        assert_eq!(end_of(&live, &mut subscription).await, Some(SubscriptionEnd::BucketDropped));
    });
}

#[test]
fn redefined_named_query_ends_the_subscription_after_missed_commits() {
    run(async {
        let store = store_without_history().await;
        store.define_query("named", json!({"bucket": "b"})).await.unwrap();
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe_named("named", Map::new(), None, Mode::Snapshot).await.unwrap();
        let redefined = store.write(|draft| {
            draft.undefine_query("named")?;
            draft.define_query("named", &json!({"bucket": "b", "filter": {"n": 1}}))
        });
        redefined.await.unwrap();
        assert_eq!(end_of(&live, &mut subscription).await, Some(SubscriptionEnd::QueryUndefined));
    });
}

#[test]
fn dropped_bucket_ends_named_query_after_missed_commits() {
    run(async {
        let store = store_without_history().await;
        store.define_query("named", json!({"bucket": "b"})).await.unwrap();
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe_named("named", Map::new(), None, Mode::Snapshot).await.unwrap();
        store.drop_bucket("b").await.unwrap();
        assert_eq!(end_of(&live, &mut subscription).await, Some(SubscriptionEnd::BucketDropped));
    });
}
