//! Subscribers that poll, pause, unsubscribe and resume during concurrent writes, while commits are evicted from the history.

use serde_json::{Value as Json, json};
use tidewire_live::{Event, First, Live, LiveOptions, Mark, Mode, QueryResult, SubscribeOptions, Subscription};
use tidewire_store::{Query, Store, StoreOptions};

use super::{run, store};

/// The result and mark of a subscriber, which it keeps while it is not subscribed.
struct TestSubscriber {
    query: Query,
    mode: Mode,
    mark: Option<Mark>,
    result: Vec<Json>,
    subscription: Option<Subscription>,
}

impl TestSubscriber {
    fn set_result(&mut self, snapshot: &QueryResult) {
        let QueryResult::Json(json) = snapshot else { panic!("{snapshot:?}") };
        self.result = serde_json::from_slice(json).unwrap();
    }

    fn advance(&mut self, mark: Mark) {
        let (before, now) = (self.mark.map_or(0, |mark| mark.position().sequence), mark.position().sequence);
        assert!(before < now, "{before} must be before {now}");
        self.mark = Some(mark);
    }

    async fn subscribe(&mut self, live: &Live) {
        let subscription =
            live.subscribe(self.query.clone(), SubscribeOptions::from(self.mode).since(self.mark)).await.unwrap();
        match subscription.first() {
            First::Snapshot(snapshot) => self.set_result(snapshot),
            First::Resumed(None) => {}
            First::Resumed(Some(delta)) => delta.apply(&mut self.result),
            other => panic!("{other:?}"),
        }
        self.mark = Some(subscription.mark());
        self.subscription = Some(subscription);
    }

    fn drain(&mut self) {
        while let Some(event) = self.subscription.as_mut().and_then(|subscriber| subscriber.try_next().unwrap()) {
            match event {
                Event::Snapshot { result: snapshot, mark } => {
                    self.set_result(&snapshot);
                    // A snapshot may repeat the current result.
                    self.mark = Some(mark);
                }
                Event::Delta { delta, mark } => {
                    delta.apply(&mut self.result);
                    self.advance(mark);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn write_random_records(store: &Store, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..600 {
        let (id, n) = (rng.u64(..40), rng.u64(..10));
        match rng.u8(..8) {
            0 | 1 => _ = store.delete("b", json!(id), None).wait().unwrap(),
            2 if n == 0 => store.clear("b").wait().unwrap(),
            _ => _ = store.insert("b", json!({"id": id, "n": n})).wait().unwrap(),
        }
    }
}

#[test]
fn all_subscribers_converge_under_churn() {
    run(async {
        let store = store(StoreOptions::default().history_bytes(2000)).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_deltas(5));
        let queries = [json!({}), json!({"filter": {"n": {"$gt": 4}}}), json!({"sort": {"n": "desc"}, "limit": 7})];
        let subscriber = |(index, mode): (usize, Mode)| {
            let mut query = queries[index % queries.len()].clone();
            query["bucket"] = json!("b");
            let query = Query::parse(&query).unwrap();
            TestSubscriber { query, mode, mark: None, result: Vec::new(), subscription: None }
        };
        let modes = [Mode::Delta, Mode::Delta, Mode::Delta, Mode::Snapshot, Mode::Delta];
        let mut all: Vec<TestSubscriber> = modes.into_iter().cycle().take(15).enumerate().map(subscriber).collect();
        let writers: Vec<_> = (0..3)
            .map(|seed| {
                let store = store.clone();
                std::thread::spawn(move || write_random_records(&store, seed))
            })
            .collect();
        let mut rng = fastrand::Rng::with_seed(7);
        while !writers.iter().all(std::thread::JoinHandle::is_finished) {
            let index = rng.usize(..all.len());
            let subscriber = &mut all[index];
            match (rng.u8(..6), &mut subscriber.subscription) {
                (0, _) => {
                    subscriber.drain();
                    subscriber.subscription = None;
                }
                (_, None) => subscriber.subscribe(&live).await,
                (1, Some(subscription)) => subscription.pause(),
                (2, Some(subscription)) => subscription.refresh(),
                _ => subscriber.drain(),
            }
        }
        for subscriber in &mut all {
            match &mut subscriber.subscription {
                // The subscription may be paused.
                Some(subscription) => subscription.refresh(),
                None => subscriber.subscribe(&live).await,
            }
            // A subscriber that fell behind requests a snapshot when it polls.
            for _ in 0..3 {
                live.settled().await.unwrap();
                subscriber.drain();
            }
            let records = store.query(&subscriber.query).unwrap().into_records();
            assert_eq!(subscriber.result, records);
        }
    });
}
