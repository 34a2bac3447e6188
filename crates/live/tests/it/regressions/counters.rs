//! Counters and gauges.

use serde_json::json;
use tidewire_live::{Event, Live, LiveOptions, Mode, SubscriptionEnd};
use tidewire_store::{Query, StoreOptions};

use super::{run, store};

#[test]
fn dropped_deltas_are_not_counted_as_events() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_deltas(2));
        let mut slow = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
        for id in 0..10 {
            store.insert("b", json!({"id": id})).await.unwrap();
        }
        live.settled().await.unwrap();
        assert_eq!((live.stats().events, live.stats().conflated), (2, 1));
        assert!(matches!(slow.next().await, Ok(Event::Snapshot { .. })));
        assert_eq!((live.stats().events, live.stats().conflated), (3, 1));
    });
}

#[test]
fn subscriptions_ended_by_close_are_counted() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
        store.close().unwrap();
        assert_eq!(subscription.next().await.unwrap_err(), SubscriptionEnd::Closed);
        let stats = live.stats();
        assert_eq!((stats.queries, stats.subscriptions, stats.ended), (0, 0, 1));
    });
}
