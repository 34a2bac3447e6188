//! Extreme values of options.

use serde_json::json;
use tidewire_live::{Event, Live, LiveOptions, Mode};
use tidewire_store::{Query, StoreOptions};

use super::{run, store};

#[test]
fn extreme_options_are_accepted() {
    run(async {
        for size in [0, usize::MAX] {
            let store = store(StoreOptions::default()).await;
            let options = LiveOptions::default().max_deltas(size).queue(size).workers(size);
            let live = Live::with_options(store.clone(), options);
            let mut subscription = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
            store.insert("b", json!({"id": 1})).await.unwrap();
            assert!(matches!(subscription.next().await, Ok(Event::Delta { .. })));
        }
    });
}
