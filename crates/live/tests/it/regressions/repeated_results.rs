//! A result that returns to an earlier value is delivered to subscribers that have received another value since.

use serde_json::json;
use tidewire_live::{Event, Live, Mode, QueryResult, SubscribeOptions};
use tidewire_store::{Query, StoreOptions};

use super::{run, store};

/// The earlier subscribers use mode `Delta`, so the last result that was delivered as a snapshot is the first one.
#[test]
fn late_subscriber_gets_a_result_that_returns_to_its_first_value() {
    run(async {
        for is_resumed in [false, true] {
            let store = store(StoreOptions::default()).await;
            let live = Live::new(store.clone());
            let _delta = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
            store.insert("b", json!({"id": 1})).await.unwrap();
            let mut options = SubscribeOptions::from(Mode::Snapshot);
            if is_resumed {
                options = options.since(live.subscribe(Query::new("b"), Mode::Delta).await.unwrap().mark());
            }
            let mut joined = live.subscribe(Query::new("b"), options).await.unwrap();
            store.delete("b", json!(1), None).await.unwrap();
            live.settled().await.unwrap();
            let event = joined.try_next().unwrap();
            let is_empty =
                matches!(&event, Some(Event::Snapshot { result: QueryResult::Json(json), .. }) if json == "[]");
            assert!(is_empty, "{is_resumed}: {event:?}");
        }
    });
}
