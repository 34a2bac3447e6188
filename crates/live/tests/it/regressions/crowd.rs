//! Subscribers that poll, pause, leave and resume during concurrent writes, while commits fall out of the history.

use serde_json::{Value as Json, json};
use tidewire_live::{Event, First, Live, LiveOptions, Mark, Mode, QueryResult, SubscribeOptions, Subscription};
use tidewire_store::{Query, Store, StoreOptions};

use super::{run, store};

/// The result and mark of a subscriber, also while it is not subscribed.
struct Held {
    query: Query,
    mode: Mode,
    mark: Option<Mark>,
    result: Vec<Json>,
    subscription: Option<Subscription>,
}

impl Held {
    fn hold(&mut self, whole: &QueryResult) {
        let QueryResult::Json(json) = whole else { panic!("{whole:?}") };
        self.result = serde_json::from_slice(json).unwrap();
    }

    fn pass(&mut self, mark: Mark) {
        let (before, now) = (self.mark.map_or(0, |mark| mark.position().sequence), mark.position().sequence);
        assert!(before < now, "{before} comes before {now}");
        self.mark = Some(mark);
    }

    async fn come(&mut self, live: &Live) {
        let subscription =
            live.subscribe(self.query.clone(), SubscribeOptions::from(self.mode).since(self.mark)).await.unwrap();
        match subscription.first() {
            First::Snapshot(whole) => self.hold(whole),
            First::Resumed(None) => {}
            First::Resumed(Some(delta)) => delta.apply(&mut self.result),
            other => panic!("{other:?}"),
        }
        self.mark = Some(subscription.mark());
        self.subscription = Some(subscription);
    }

    fn look(&mut self) {
        while let Some(event) = self.subscription.as_mut().and_then(|held| held.try_next().unwrap()) {
            match event {
                Event::Snapshot { result: whole, mark } => {
                    self.hold(&whole);
                    // A snapshot may repeat the current result.
                    self.mark = Some(mark);
                }
                Event::Delta { delta, mark } => {
                    delta.apply(&mut self.result);
                    self.pass(mark);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn write(store: &Store, seed: u64) {
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
        let held = |(place, mode): (usize, Mode)| {
            let mut query = queries[place % queries.len()].clone();
            query["bucket"] = json!("b");
            let query = Query::parse(&query).unwrap();
            Held { query, mode, mark: None, result: Vec::new(), subscription: None }
        };
        let modes = [Mode::Delta, Mode::Delta, Mode::Delta, Mode::Snapshot, Mode::Delta];
        let mut all: Vec<Held> = modes.into_iter().cycle().take(15).enumerate().map(held).collect();
        let writers: Vec<_> = (0..3)
            .map(|seed| {
                let store = store.clone();
                std::thread::spawn(move || write(&store, seed))
            })
            .collect();
        let mut rng = fastrand::Rng::with_seed(7);
        while !writers.iter().all(std::thread::JoinHandle::is_finished) {
            let one = rng.usize(..all.len());
            let one = &mut all[one];
            match (rng.u8(..6), &mut one.subscription) {
                (0, _) => {
                    one.look();
                    one.subscription = None;
                }
                (_, None) => one.come(&live).await,
                (1, Some(subscription)) => subscription.pause(),
                (2, Some(subscription)) => subscription.refresh(),
                _ => one.look(),
            }
        }
        for one in &mut all {
            match &mut one.subscription {
                // The subscription may be paused.
                Some(subscription) => subscription.refresh(),
                None => one.come(&live).await,
            }
            // A subscriber that fell behind requests a snapshot when it polls.
            for _ in 0..3 {
                live.settled().await.unwrap();
                one.look();
            }
            let records = store.query(&one.query).unwrap().into_records();
            assert_eq!(one.result, records);
        }
    });
}
