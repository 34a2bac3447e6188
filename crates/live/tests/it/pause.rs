//! Subscriptions that are paused and refreshed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Wake, Waker};

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use tidewire_live::{Event, First, Live, LiveOptions, Mode, QueryResult, Subscription, SubscriptionEnd};
use tidewire_store::{Query, Store, StoreOptions};

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}

async fn store() -> Store {
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("b", json!({"key": "id", "schema": {"id": {"type": "number"}}})).await.unwrap();
    store
}

async fn insert(store: &Store, id: u64) {
    store.insert("b", json!({"id": id, "n": id % 10})).await.unwrap();
}

fn records(snapshot: &QueryResult) -> Vec<Json> {
    match snapshot {
        QueryResult::Json(json) => serde_json::from_slice(json).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn snapshot(event: Event) -> Vec<Json> {
    match event {
        Event::Snapshot { result: snapshot, .. } => records(&snapshot),
        other => panic!("{other:?}"),
    }
}

/// A waker that counts its calls.
#[derive(Default)]
struct WakeCounter(AtomicUsize);

impl Wake for WakeCounter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn paused_subscription_resumes_with_a_snapshot() {
    run(async {
        for mode in [Mode::Delta, Mode::Snapshot] {
            let store = store().await;
            let live = Live::new(store.clone());
            let mut subscription = live.subscribe(Query::new("b"), mode).await.unwrap();
            insert(&store, 0).await;
            live.settled().await.unwrap();
            subscription.pause();
            assert_eq!((live.stats().events, live.stats().conflated), (1, 1));
            for id in 1..100 {
                insert(&store, id).await;
            }
            live.settled().await.unwrap();
            assert!(subscription.try_next().unwrap().is_none());
            assert_eq!((live.stats().events, live.stats().conflated), (1, 1), "no event was delivered or replaced");

            subscription.refresh();
            let result = snapshot(subscription.next().await.unwrap());
            assert_eq!(result.len(), 100);
            insert(&store, 100).await;
            match (mode, subscription.next().await.unwrap()) {
                (Mode::Delta, Event::Delta { delta, .. }) => assert_eq!(delta.counts(), (1, 0, 0)),
                (Mode::Snapshot, event) => assert_eq!(snapshot(event).len(), 101),
                (_, other) => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn refresh_delivers_a_snapshot_even_without_changes() {
    run(async {
        let store = store().await;
        insert(&store, 1).await;
        let live = Live::new(store.clone());
        for mode in [Mode::Delta, Mode::Snapshot] {
            let mut subscription = live.subscribe(Query::new("b"), mode).await.unwrap();
            for has_paused in [true, false] {
                if has_paused {
                    subscription.pause();
                }
                subscription.refresh();
                assert_eq!(snapshot(subscription.next().await.unwrap()).len(), 1);
            }
        }
        assert_eq!(live.stats().conflated, 0, "no event was queued");
    });
}

#[test]
fn pause_and_refresh_converge_in_any_order() {
    run(async {
        let store = store().await;
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
        for id in 0..1000 {
            subscription.pause();
            subscription.refresh();
            subscription.refresh();
            if id % 10 == 0 {
                insert(&store, id).await;
            }
        }
        live.settled().await.unwrap();
        // The live thread may deliver the last snapshot before it applies the last insert, which is then a delta.
        let mut result = snapshot(subscription.try_next().unwrap().unwrap());
        while let Some(event) = subscription.try_next().unwrap() {
            match event {
                Event::Delta { delta, .. } => delta.apply(&mut result),
                event => result = snapshot(event),
            }
        }
        assert_eq!(result.len(), 100);

        // The requested snapshot is not delivered during a pause.
        subscription.refresh();
        subscription.pause();
        live.settled().await.unwrap();
        assert!(subscription.try_next().unwrap().is_none());
        insert(&store, 1000).await;
        live.settled().await.unwrap();
        subscription.refresh();
        result = snapshot(subscription.next().await.unwrap());
        assert_eq!(result.len(), 101);
        live.settled().await.unwrap();
        assert!(subscription.try_next().unwrap().is_none());
    });
}

#[test]
fn paused_subscriber_is_woken_only_by_the_end() {
    run(async {
        let store = store().await;
        store.define_query("named", json!({"bucket": "b"})).await.unwrap();
        let live = Live::new(store.clone());
        let named = live.subscribe_named("named", Map::new(), None, Mode::Snapshot).await.unwrap();
        let delta = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap();
        let mut both = [named, delta];
        let count = Arc::new(WakeCounter::default());
        let waker = Waker::from(Arc::clone(&count));
        for subscription in &mut both {
            subscription.pause();
            assert!(subscription.poll_event(&mut Context::from_waker(&waker)).is_pending());
        }
        insert(&store, 1).await;
        live.settled().await.unwrap();
        assert_eq!(count.0.load(SeqCst), 0);
        store.undefine_query("named").await.unwrap();
        store.drop_bucket("b").await.unwrap();
        live.settled().await.unwrap();
        assert_eq!(count.0.load(SeqCst), 2);
        let ends: Vec<SubscriptionEnd> =
            both.iter_mut().map(|subscription| subscription.try_next().unwrap_err()).collect();
        assert_eq!(ends, [SubscriptionEnd::QueryUndefined, SubscriptionEnd::BucketDropped]);
        // Requests after the end have no effect.
        for subscription in &mut both {
            subscription.refresh();
        }
        live.settled().await.unwrap();
        assert_eq!(both[0].try_next().unwrap_err(), SubscriptionEnd::QueryUndefined);
    });
}

/// An action of a subscriber or a writer.
#[derive(Debug, Clone)]
enum PauseStep {
    Insert(u64),
    Delete(u64),
    WaitSettled,
    Drain(usize),
    Pause(usize),
    Refresh(usize),
}

fn step() -> impl Strategy<Value = PauseStep> {
    prop_oneof![
        4 => (0..20_u64).prop_map(PauseStep::Insert),
        2 => (0..20_u64).prop_map(PauseStep::Delete),
        2 => Just(PauseStep::WaitSettled),
        2 => (0..SUBSCRIBERS).prop_map(PauseStep::Drain),
        1 => (0..SUBSCRIBERS).prop_map(PauseStep::Pause),
        2 => (0..SUBSCRIBERS).prop_map(PauseStep::Refresh),
    ]
}

const SUBSCRIBERS: usize = 4;

/// A subscriber and the result that it has built from its events.
struct TestSubscriber {
    subscription: Subscription,
    query: Query,
    result: Vec<Json>,
    is_paused: bool,
}

impl TestSubscriber {
    async fn new(live: &Live, query: Query, mode: Mode) -> Self {
        let subscription = live.subscribe(query.clone(), mode).await.unwrap();
        let First::Snapshot(first) = subscription.first() else { panic!("{:?}", subscription.first()) };
        Self { result: records(first), subscription, query, is_paused: false }
    }

    fn drain(&mut self) {
        while let Some(event) = self.subscription.try_next().unwrap() {
            assert!(!self.is_paused, "{event:?}");
            match event {
                Event::Snapshot { result: snapshot, .. } => self.result = records(&snapshot),
                Event::Delta { delta, .. } => delta.apply(&mut self.result),
                other => panic!("{other:?}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// With random pauses and refreshes, between and during commits, subscribers end with the same result as a new query.
    #[test]
    fn random_pauses_leave_no_gap(steps in vec(step(), 1..60)) {
        run(async {
            let store = store().await;
            let live = Live::with_options(store.clone(), LiveOptions::default().max_deltas(3));
            let limited = Query::parse(&json!({"bucket": "b", "sort": {"n": "desc"}, "limit": 4})).unwrap();
            let mut all = Vec::with_capacity(SUBSCRIBERS);
            for query in [Query::new("b"), limited] {
                for mode in [Mode::Delta, Mode::Snapshot] {
                    all.push(TestSubscriber::new(&live, query.clone(), mode).await);
                }
            }
            for step in steps {
                match step {
                    PauseStep::Insert(id) => _ = store.insert("b", json!({"id": id, "n": id % 7})).await.unwrap(),
                    PauseStep::Delete(id) => _ = store.delete("b", json!(id), None).await.unwrap(),
                    PauseStep::WaitSettled => _ = live.settled().await.unwrap(),
                    PauseStep::Drain(one) => all[one].drain(),
                    PauseStep::Pause(one) => {
                        all[one].subscription.pause();
                        all[one].is_paused = true;
                    }
                    PauseStep::Refresh(one) => {
                        all[one].subscription.refresh();
                        all[one].is_paused = false;
                    }
                }
            }
            for subscriber in &mut all {
                if subscriber.is_paused {
                    subscriber.subscription.refresh();
                    subscriber.is_paused = false;
                }
                // A subscriber that fell behind requests a snapshot when it polls.
                for _ in 0..3 {
                    live.settled().await.unwrap();
                    subscriber.drain();
                }
                let records = store.query(&subscriber.query).unwrap().into_records();
                assert_eq!(subscriber.result, records, "{:?}", subscriber.query);
            }
        });
    }
}
