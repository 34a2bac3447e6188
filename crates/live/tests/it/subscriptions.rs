//! Subscriptions to live queries over a store.

use serde_json::{Map, Value as Json, json};
use tidewire_live::{
    Event, First, Live, LiveError, LiveOptions, Mode, QueryResult, SubscribeOptions, Subscription, SubscriptionEnd,
};
use tidewire_store::{Filter, Query, Store, StoreOptions};

fn query(json: &Json) -> Query {
    let mut query = json.clone();
    query["bucket"] = json!("b");
    Query::parse(&query).unwrap()
}

fn definition() -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}}})
}

async fn store() -> Store {
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("b", definition()).await.unwrap();
    store
}

async fn insert(store: &Store, id: u64, n: u64) {
    store.insert("b", json!({"id": id, "n": n})).await.unwrap();
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}

fn records(snapshot: &QueryResult) -> Vec<Json> {
    match snapshot {
        QueryResult::Json(json) => serde_json::from_slice(json).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// A subscriber and the result that it has built from its events.
struct TestSubscriber {
    subscription: Subscription,
    result: Vec<Json>,
    events: usize,
    snapshots: usize,
}

impl TestSubscriber {
    fn new(subscription: Subscription) -> Self {
        let result = match subscription.first() {
            First::Snapshot(snapshot) => records(snapshot),
            other => panic!("{other:?}"),
        };
        Self { subscription, result, events: 0, snapshots: 0 }
    }

    fn apply(&mut self, event: Event) {
        self.events += 1;
        match event {
            Event::Snapshot { result: snapshot, .. } => {
                self.snapshots += 1;
                self.result = records(&snapshot);
            }
            Event::Delta { delta, .. } => delta.apply(&mut self.result),
            other => panic!("{other:?}"),
        }
    }

    /// Applies all queued events.
    fn drain(&mut self) {
        while let Some(event) = self.subscription.try_next().unwrap() {
            self.apply(event);
        }
    }
}

fn fresh_result(store: &Store, query: &Query) -> Vec<Json> {
    store.query(query).unwrap().into_records()
}

#[test]
fn inserted_changed_and_removed_rows_are_delivered() {
    run(async {
        let store = store().await;
        let live = Live::new(store.clone());
        let high = query(&json!({"filter": {"n": {"$gt": 5}}, "fields": ["id", "n"]}));
        let mut delta = live.subscribe(high.clone(), Mode::Delta).await.unwrap();
        let mut snapshot = live.subscribe(high, Mode::Snapshot).await.unwrap();
        insert(&store, 1, 1).await;
        insert(&store, 2, 6).await;
        store.update("b", json!(2), json!({"n": 7}), None).await.unwrap();
        store.update("b", json!(2), json!({"n": 2}), None).await.unwrap();
        let mut received = Vec::new();
        for _ in 0..3 {
            let Event::Delta { delta, .. } = delta.next().await.unwrap() else { panic!("no delta") };
            received.push(String::from_utf8(delta.encoded().to_vec()).unwrap());
        }
        assert_eq!(
            received,
            [
                r#"{"added":[{"id":2,"n":6}],"changed":[],"removed":[]}"#,
                r#"{"added":[],"changed":[{"id":2,"n":7}],"removed":[]}"#,
                r#"{"added":[],"changed":[],"removed":[2]}"#,
            ]
        );
        live.settled().await.unwrap();
        // The result has its first value again, so there may be no event.
        if let Some(event) = snapshot.try_next().unwrap() {
            let Event::Snapshot { result: last, mark } = event else { panic!("no result") };
            assert_eq!((records(&last), mark.position()), (vec![], store.snapshot().position));
        }
        insert(&store, 4, 9).await;
        let Event::Snapshot { result: last, mark } = snapshot.next().await.unwrap() else { panic!("no result") };
        assert_eq!((records(&last), mark.position()), (vec![json!({"id": 4, "n": 9})], store.snapshot().position));
        assert!(matches!(delta.next().await.unwrap(), Event::Delta { .. }));
        assert_eq!(live.stats().queries, 1);
        // This commit does not change the result.
        insert(&store, 3, 1).await;
        live.settled().await.unwrap();
        assert!(delta.try_next().unwrap().is_none() && snapshot.try_next().unwrap().is_none());
    });
}

#[test]
fn subscribers_converge_under_concurrent_writes() {
    run(async {
        let store = store().await;
        let live = Live::new(store.clone());
        let queries = [
            json!({}),
            json!({"filter": {"n": {"$lt": 40}}}),
            json!({"sort": {"n": "desc"}, "limit": 5}),
            json!({"filter": {"$or": [{"n": 3}, {"id": {"$gte": 50}}]}, "sort": {"n": "asc"}, "offset": 2, "fields": ["n"]}),
        ];
        let mut all = Vec::new();
        for mode in [Mode::Delta, Mode::Snapshot] {
            for json in &queries {
                let query = query(json);
                all.push((query.clone(), TestSubscriber::new(live.subscribe(query, mode).await.unwrap())));
            }
        }
        let writers: Vec<_> = (0..3_u64)
            .map(|seed| {
                let store = store.clone();
                std::thread::spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    for _ in 0..500 {
                        let (id, n) = (rng.u64(..100), rng.u64(..100));
                        if rng.u8(..4) == 0 {
                            store.delete("b", json!(id), None).wait().unwrap();
                        } else {
                            store.insert("b", json!({"id": id, "n": n})).wait().unwrap();
                        }
                    }
                })
            })
            .collect();
        // Some subscribers poll often, others rarely.
        while !writers.iter().all(std::thread::JoinHandle::is_finished) {
            for (index, (_, subscriber)) in all.iter_mut().enumerate() {
                if index % 2 == 0 || fastrand::u8(..) == 0 {
                    subscriber.drain();
                }
            }
            tokio::task::yield_now().await;
        }
        for writer in writers {
            writer.join().unwrap();
        }
        live.settled().await.unwrap();
        for (query, subscriber) in &mut all {
            // A subscriber that fell behind requests a snapshot when it polls.
            for _ in 0..2 {
                subscriber.drain();
                live.settled().await.unwrap();
            }
            subscriber.drain();
            assert_eq!(subscriber.result, fresh_result(&store, query), "{query:?}");
            assert!(subscriber.events > 0);
        }
        assert_eq!(live.stats().commits, store.stats().commits - 1, "all but the definition");
    });
}

#[test]
fn slow_subscriber_has_bounded_backlog_and_does_not_delay_others() {
    run(async {
        let store = store().await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_deltas(4));
        let mut slow = TestSubscriber::new(live.subscribe(query(&json!({})), Mode::Delta).await.unwrap());
        let mut snapshot = TestSubscriber::new(live.subscribe(query(&json!({})), Mode::Snapshot).await.unwrap());
        let mut quick = TestSubscriber::new(live.subscribe(query(&json!({})), Mode::Delta).await.unwrap());
        for id in 0..100 {
            insert(&store, id, id).await;
            let event = quick.subscription.next().await.unwrap();
            quick.apply(event);
        }
        assert_eq!((quick.events, quick.snapshots), (100, 0));
        let event = slow.subscription.next().await.unwrap();
        slow.apply(event);
        live.settled().await.unwrap();
        snapshot.drain();
        slow.drain();
        assert_eq!((slow.events, slow.snapshots, snapshot.events), (1, 1, 1));
        for subscriber in [&slow, &snapshot, &quick] {
            assert_eq!(subscriber.result, fresh_result(&store, &query(&json!({}))));
        }
        assert!(live.stats().conflated > 0);
        // After the snapshot, the slow subscriber gets deltas again.
        insert(&store, 100, 0).await;
        let event = slow.subscription.next().await.unwrap();
        assert!(matches!(event, Event::Delta { .. }));
    });
}

#[test]
fn subscription_resumes_from_a_mark() {
    run(async {
        let store = store().await;
        for id in 0..10 {
            insert(&store, id, id).await;
        }
        let live = Live::new(store.clone());
        for json in [json!({"filter": {"n": {"$gt": 3}}}), json!({"sort": {"n": "desc"}, "offset": 1, "limit": 3})] {
            let query = query(&json);
            let subscriber = TestSubscriber::new(live.subscribe(query.clone(), Mode::Delta).await.unwrap());
            let mark = subscriber.subscription.mark();
            let mut result = subscriber.result.clone();
            drop(subscriber);
            insert(&store, 20, 5).await;
            insert(&store, 21, 0).await;
            store.update("b", json!(9), json!({"n": 1}), None).await.unwrap();
            store.delete("b", json!(7), None).await.unwrap();
            store.insert("b", json!({"id": 7, "n": 8})).await.unwrap();
            store.delete("b", json!(20), None).await.unwrap();
            let resumed = live.subscribe(query.clone(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
            let First::Resumed(Some(delta)) = resumed.first() else { panic!("{:?}", resumed.first()) };
            delta.apply(&mut result);
            assert_eq!(result, fresh_result(&store, &query));
            // Resumes without changes. The mark is converted to text and back.
            let mark: tidewire_live::Mark = resumed.mark().to_string().parse().unwrap();
            let again = live.subscribe(query.clone(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
            assert!(matches!(again.first(), First::Resumed(None)));
            store.update("b", json!(9), json!({"n": 9}), None).await.unwrap();
        }
        // A mark of another query gives a snapshot. So does a mark of an aggregate that has changed since.
        let all = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        let other = live
            .subscribe(query(&json!({"limit": 1})), SubscribeOptions::from(Mode::Delta).since(all.mark()))
            .await
            .unwrap();
        assert!(matches!(other.first(), First::Snapshot(_)));
        let count = query(&json!({"aggregate": {"function": "count"}}));
        let counted = live.subscribe(count.clone(), Mode::Delta).await.unwrap();
        let again =
            live.subscribe(count.clone(), SubscribeOptions::from(Mode::Delta).since(counted.mark())).await.unwrap();
        assert!(matches!(again.first(), First::Resumed(None)));
        insert(&store, 50, 1).await;
        let again = live.subscribe(count, SubscribeOptions::from(Mode::Delta).since(counted.mark())).await.unwrap();
        assert!(matches!(again.first(), First::Snapshot(_)));
        assert!("00".parse::<tidewire_live::Mark>().is_err());
    });
}

#[test]
fn subscription_resumes_after_a_restart_within_the_history() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), StoreOptions::default()).unwrap().0;
        let all = query(&json!({}));
        let store = open();
        store.define_bucket("b", definition()).await.unwrap();
        insert(&store, 1, 1).await;
        let live = Live::new(store.clone());
        let mark = live.subscribe(all.clone(), Mode::Delta).await.unwrap().mark();
        insert(&store, 2, 2).await;
        drop(live);
        store.close().unwrap();
        let store = open();
        let live = Live::new(store.clone());
        insert(&store, 3, 3).await;
        let resumed = live.subscribe(all.clone(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        let First::Resumed(Some(delta)) = resumed.first() else { panic!("{:?}", resumed.first()) };
        assert_eq!(delta.counts(), (2, 0, 0));
        drop(live);
        store.checkpoint().unwrap();
        store.close().unwrap();
        let store = open();
        let live = Live::new(store.clone());
        let begun = live.subscribe(all.clone(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        assert!(matches!(begun.first(), First::Snapshot(_)));
        // Positions of another store are not valid.
        let other = self::store().await;
        let live = Live::new(other);
        let begun = live.subscribe(all, SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        assert!(matches!(begun.first(), First::Snapshot(_)));
    });
}

/// The history is empty, so the driver misses every commit.
#[test]
fn driver_restarts_when_it_misses_commits() {
    run(async {
        let store = Store::memory(StoreOptions::default().history_bytes(1));
        store.define_bucket("b", definition()).await.unwrap();
        store.define_bucket("c", definition()).await.unwrap();
        store.define_query("named", json!({"bucket": "b"})).await.unwrap();
        let live = Live::new(store.clone());
        let mut delta = TestSubscriber::new(live.subscribe(query(&json!({})), Mode::Delta).await.unwrap());
        let mut named = live.subscribe_named("named", Map::new(), None, Mode::Snapshot).await.unwrap();
        let mut dropped = live.subscribe(Query::new("c"), Mode::Snapshot).await.unwrap();
        for id in 0..20 {
            insert(&store, id, id).await;
        }
        store.undefine_query("named").await.unwrap();
        store.drop_bucket("c").await.unwrap();
        live.settled().await.unwrap();
        delta.drain();
        assert_eq!((delta.result.len(), delta.snapshots, delta.events), (20, 1, 1));
        for (subscription, end) in
            [(&mut named, SubscriptionEnd::QueryUndefined), (&mut dropped, SubscriptionEnd::BucketDropped)]
        {
            // Snapshots may precede the end.
            while let Ok(Some(_)) = subscription.try_next() {}
            assert_eq!(subscription.try_next().unwrap_err(), end);
        }
        assert!(live.stats().restarts > 0);
    });
}

#[test]
fn subscriptions_end_with_their_bucket_or_named_query() {
    run(async {
        let store = store().await;
        store.define_bucket("c", definition()).await.unwrap();
        store.define_query("named", json!({"bucket": "b", "filter": {"n": "{{ params.n }}"}})).await.unwrap();
        let live = Live::new(store.clone());
        let unknown = live.subscribe_named("x", Map::new(), None, Mode::Snapshot).await.unwrap_err();
        assert_eq!(unknown.to_string(), "query \"x\" is not defined");
        let missing = live.subscribe_named("named", Map::new(), None, Mode::Snapshot).await.unwrap_err();
        assert_eq!(missing.to_string(), "missing parameter params.n");
        let undefined = live.subscribe(Query::new("x"), Mode::Snapshot).await.unwrap_err();
        assert_eq!(undefined.to_string(), "bucket \"x\" is not defined");
        let params = json!({"n": 1, "extra": 2});
        let mut named =
            live.subscribe_named("named", params.as_object().unwrap().clone(), None, Mode::Snapshot).await.unwrap();
        let mut dropped = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        let mut closed = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        store.undefine_query("named").await.unwrap();
        store.drop_bucket("c").await.unwrap();
        assert_eq!(named.next().await.unwrap_err(), SubscriptionEnd::QueryUndefined);
        assert_eq!(dropped.next().await.unwrap_err(), SubscriptionEnd::BucketDropped);
        assert_eq!(live.stats().ended, 2);
        // Events before the end are received first.
        insert(&store, 1, 1).await;
        live.settled().await.unwrap();
        store.close().unwrap();
        assert!(matches!(closed.next().await, Ok(Event::Delta { .. })));
        assert_eq!(closed.next().await.unwrap_err(), SubscriptionEnd::Closed);
        let rejected = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap_err();
        assert_eq!(rejected, LiveError::Closed);
    });
}

#[test]
fn permission_filter_is_part_of_the_query() {
    run(async {
        let store = store().await;
        for id in 0..4 {
            insert(&store, id, id % 2).await;
        }
        store.define_query("all", json!({"bucket": "b"})).await.unwrap();
        let live = Live::new(store.clone());
        let visible = |n: u64| Filter::parse(&json!({"n": n})).unwrap();
        let subscription = live.subscribe_named("all", Map::new(), Some(visible(0)), Mode::Delta).await.unwrap();
        let mut subscriber = TestSubscriber::new(subscription);
        assert_eq!(subscriber.result.len(), 2);
        // One row becomes visible, another one hidden.
        store.update("b", json!(1), json!({"n": 0}), None).await.unwrap();
        store.update("b", json!(2), json!({"n": 5}), None).await.unwrap();
        live.settled().await.unwrap();
        subscriber.drain();
        let ids: Vec<&Json> = subscriber.result.iter().map(|record| &record["id"]).collect();
        assert_eq!(ids, [0, 1]);
        assert_eq!(live.stats().queries, 1);
    });
}

#[test]
fn subscription_limit_is_enforced_and_freed_on_drop() {
    run(async {
        let store = store().await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_subscriptions(2));
        let one = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        let _two = live.subscribe(query(&json!({"limit": 1})), Mode::Delta).await.unwrap();
        let rejected = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap_err();
        assert_eq!(rejected, LiveError::TooMany { max: 2 });
        drop(one);
        let _three = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        live.settled().await.unwrap();
        assert_eq!((live.stats().queries, live.stats().subscriptions), (2, 2));
        drop(live);
    });
}

#[test]
fn commit_with_many_changed_queries_is_delivered_in_order() {
    run(async {
        let store = store().await;
        let live = Live::with_options(store.clone(), LiveOptions::default().workers(4));
        let mut all = Vec::new();
        for limit in 1..=300 {
            let query = query(&json!({"filter": {"n": {"$gte": 0}}, "limit": limit}));
            all.push((query.clone(), TestSubscriber::new(live.subscribe(query, Mode::Delta).await.unwrap())));
        }
        for id in 0..40 {
            insert(&store, id, id).await;
        }
        live.settled().await.unwrap();
        for (query, subscriber) in &mut all {
            subscriber.drain();
            assert_eq!(subscriber.snapshots, 0);
            assert_eq!(subscriber.result, fresh_result(&store, query));
        }
    });
}

/// Some executors run a woken task immediately, and the task may drop its subscription.
#[test]
fn waker_can_poll_and_drop_the_subscription() {
    struct PollImmediately(std::sync::Mutex<Option<(Subscription, Live)>>, std::sync::mpsc::SyncSender<bool>);

    impl std::task::Wake for PollImmediately {
        fn wake(self: std::sync::Arc<Self>) {
            let taken = self.0.lock().unwrap().take();
            if let Some((mut subscription, live)) = taken {
                let has_event = matches!(subscription.try_next(), Ok(Some(_)));
                drop((subscription, live));
                let _ = self.1.send(has_event);
            }
        }
    }

    run(async {
        let store = store().await;
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        let (woken, is_woken) = std::sync::mpsc::sync_channel(1);
        let waker = std::sync::Arc::new(PollImmediately(std::sync::Mutex::new(None), woken));
        {
            let waker = std::task::Waker::from(std::sync::Arc::clone(&waker));
            let mut context = std::task::Context::from_waker(&waker);
            let next = std::pin::pin!(subscription.next());
            assert!(next.poll(&mut context).is_pending());
        }
        *waker.0.lock().unwrap() = Some((subscription, live));
        insert(&store, 1, 1).await;
        assert!(is_woken.recv_timeout(std::time::Duration::from_mins(1)).unwrap());
    });
}

/// A waker that blocks the live thread until the gate is opened.
struct Gate {
    opened: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    reached: std::sync::mpsc::SyncSender<()>,
}

impl std::task::Wake for Gate {
    fn wake(self: std::sync::Arc<Self>) {
        self.reached.send(()).unwrap();
        self.opened.lock().unwrap().recv().unwrap();
    }
}

#[test]
fn result_that_returns_to_its_last_value_is_not_delivered() {
    run(async {
        let store = store().await;
        store.define_bucket("gate", definition()).await.unwrap();
        let live = Live::new(store.clone());
        let count = query(&json!({"aggregate": {"function": "count"}}));
        let mut counted = live.subscribe(count, Mode::Snapshot).await.unwrap();
        let mut listed = live.subscribe(query(&json!({})), Mode::Snapshot).await.unwrap();
        let at_gate = Query::parse(&json!({"bucket": "gate"})).unwrap();
        let mut at_gate = live.subscribe(at_gate, Mode::Delta).await.unwrap();
        let (reached, is_reached) = std::sync::mpsc::sync_channel(1);
        let (open, opened) = std::sync::mpsc::sync_channel(1);
        let waker = std::task::Waker::from(std::sync::Arc::new(Gate { opened: opened.into(), reached }));
        assert!(at_gate.poll_event(&mut std::task::Context::from_waker(&waker)).is_pending());
        store.insert("gate", json!({"id": 1})).await.unwrap();
        is_reached.recv().unwrap();
        // The result changes and changes back between two polls.
        insert(&store, 1, 1).await;
        store.delete("b", json!(1), None).await.unwrap();
        open.send(()).unwrap();
        live.settled().await.unwrap();
        assert!(counted.try_next().unwrap().is_none() && listed.try_next().unwrap().is_none());
        // A different result is delivered.
        insert(&store, 2, 2).await;
        live.settled().await.unwrap();
        assert!(counted.try_next().unwrap().is_some() && listed.try_next().unwrap().is_some());
    });
}
