//! Evaluations and encodings by background threads.
//!
//! A gate blocks the evaluating threads when they read the clock, which they do after they have taken their snapshot.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire_live::{
    Event, First, Live, LiveError, LiveOptions, MemoryLimit, Mode, QueryResult, SubscribeOptions, Subscription,
    SubscriptionEnd,
};
use tidewire_store::{Clock, Query, Store, StoreOptions};

const EVALUATOR: &str = "live-evaluate";
/// Number of records. With these, the evaluation of a costly query exceeds the limit of the live thread.
const ROWS: u64 = 4000;

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}

fn is_evaluator() -> bool {
    std::thread::current().name().is_some_and(|name| name.starts_with(EVALUATOR))
}

/// Blocks evaluating threads while it is closed.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    arrivals: AtomicU64,
}

#[derive(Default)]
struct GateState {
    is_closed: bool,
    passes: u64,
}

impl Gate {
    fn options(self: &Arc<Self>) -> StoreOptions {
        let gate = Arc::clone(self);
        StoreOptions::default().clock(Clock::new(move || {
            if is_evaluator() {
                gate.arrivals.fetch_add(1, SeqCst);
                gate.wait();
            }
            1000
        }))
    }

    fn wait(&self) {
        let state = self.state.lock().unwrap();
        let is_held = |state: &mut GateState| state.is_closed && state.passes == 0;
        // A failed test does not open the gate, so the wait is limited.
        let (mut state, _) = self.changed.wait_timeout_while(state, Duration::from_mins(1), is_held).unwrap();
        state.passes = state.passes.saturating_sub(1);
    }

    fn set(&self, is_closed: bool) {
        self.state.lock().unwrap().is_closed = is_closed;
        self.changed.notify_all();
    }

    /// Lets one thread pass.
    fn pass(&self) {
        self.state.lock().unwrap().passes += 1;
        self.changed.notify_all();
    }

    /// Waits until `count` evaluations have taken their snapshots.
    async fn arrived(&self, count: u64) {
        while self.arrivals.load(SeqCst) < count {
            tokio::task::yield_now().await;
        }
    }
}

fn definition() -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}}})
}

fn record(id: u64) -> Json {
    json!({"id": id, "n": id % 10, "text": "the quick brown fox jumps over the lazy dog".repeat(8)})
}

/// A store with a large bucket `b` and an empty bucket `c`.
async fn store(options: StoreOptions) -> Store {
    let store = Store::memory(options);
    for name in ["b", "c"] {
        store.define_bucket(name, definition()).await.unwrap();
    }
    store.insert_many("b", (0..ROWS).map(record)).await.unwrap();
    store
}

fn query(json: &Json) -> Query {
    let mut query = json.clone();
    query["bucket"] = json!("b");
    Query::parse(&query).unwrap()
}

/// A query without a usable index, with a small result.
fn costly() -> Query {
    query(&json!({"filter": {"text": {"$contains": "lazy dog"}}, "sort": {"id": "desc"}, "limit": 3, "fields": ["id"]}))
}

fn poll_pending<T>(future: Pin<&mut impl Future<Output = T>>) {
    assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

fn records(snapshot: &QueryResult) -> Vec<Json> {
    match snapshot {
        QueryResult::Json(json) => serde_json::from_slice(json).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn first(subscription: &Subscription) -> Vec<Json> {
    match subscription.first() {
        First::Snapshot(snapshot) => records(snapshot),
        other => panic!("{other:?}"),
    }
}

fn apply(result: &mut Vec<Json>, event: Event) {
    match event {
        Event::Snapshot { result: snapshot, .. } => *result = records(&snapshot),
        Event::Delta { delta, .. } => delta.apply(result),
        other => panic!("{other:?}"),
    }
}

fn fresh_result(store: &Store, query: &Query) -> Vec<Json> {
    store.query(query).unwrap().into_records()
}

fn ids(ids: &[u64]) -> Vec<Json> {
    ids.iter().map(|id| json!({"id": id})).collect()
}

#[test]
fn commits_and_other_queries_continue_during_an_evaluation() {
    run(async {
        let gate = Arc::new(Gate::default());
        let store = store(gate.options()).await;
        let live = Live::new(store.clone());
        let mut other = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        gate.set(true);
        let mut subscribing = pin!(live.subscribe(costly(), Mode::Delta));
        poll_pending(subscribing.as_mut());
        gate.arrived(1).await;
        for id in 0..100 {
            store.insert("c", json!({"id": id})).await.unwrap();
            assert!(matches!(other.next().await, Ok(Event::Delta { .. })));
            store.insert("b", record(ROWS + id)).await.unwrap();
        }
        poll_pending(subscribing.as_mut());
        gate.set(false);
        // The commits since the snapshot of the evaluation are in the first result, and are not delivered again.
        let mut subscription = subscribing.await.unwrap();
        assert_eq!(first(&subscription), ids(&[ROWS + 99, ROWS + 98, ROWS + 97]));
        assert_eq!(subscription.mark().position(), store.snapshot().position);
        assert!(subscription.try_next().unwrap().is_none());
        let mut result = first(&subscription);
        store.insert("b", record(ROWS + 100)).await.unwrap();
        apply(&mut result, subscription.next().await.unwrap());
        assert_eq!(result, ids(&[ROWS + 100, ROWS + 99, ROWS + 98]));
        assert_eq!((live.stats().evaluations, live.stats().reevaluations), (1, 0));
    });
}

#[test]
fn cheap_query_is_evaluated_on_the_live_thread() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::new(store.clone());
        let subscription = live.subscribe(query(&json!({"filter": {"id": 7}, "fields": ["id"]})), Mode::Delta).await;
        assert_eq!(first(&subscription.unwrap()), ids(&[7]));
        assert_eq!(live.stats().evaluations, 0);
    });
}

#[test]
fn equal_pending_queries_are_evaluated_once_and_see_earlier_writes() {
    run(async {
        let gate = Arc::new(Gate::default());
        let store = store(gate.options()).await;
        let live = Live::new(store.clone());
        gate.set(true);
        let mut one = pin!(live.subscribe(costly(), Mode::Delta));
        poll_pending(one.as_mut());
        gate.arrived(1).await;
        // The subscriber joins an evaluation whose snapshot does not have this write.
        store.insert("b", record(ROWS)).await.unwrap();
        let mut two = pin!(live.subscribe(costly(), Mode::Snapshot));
        poll_pending(two.as_mut());
        gate.set(false);
        for subscription in [one.await.unwrap(), two.await.unwrap()] {
            assert_eq!(first(&subscription), ids(&[ROWS, ROWS - 1, ROWS - 2]));
        }
        assert_eq!(live.stats().evaluations, 1);
    });
}

#[test]
fn dropping_the_subscribe_future_cancels_the_evaluation() {
    run(async {
        let gate = Arc::new(Gate::default());
        let store = store(gate.options()).await;
        let live = Live::new(store.clone());
        gate.set(true);
        {
            let mut subscribing = pin!(live.subscribe(costly(), Mode::Delta));
            poll_pending(subscribing.as_mut());
            gate.arrived(1).await;
            assert_eq!(live.stats().subscriptions, 1);
        }
        live.settled().await.unwrap();
        assert_eq!((live.stats().subscriptions, live.stats().queries), (0, 0));
        gate.set(false);
        // The next subscriber starts a new evaluation.
        let subscription = live.subscribe(costly(), Mode::Delta).await.unwrap();
        assert_eq!(first(&subscription).len(), 3);
        assert_eq!((live.stats().subscriptions, live.stats().evaluations), (1, 2));
    });
}

#[test]
fn evaluation_is_retried_when_the_history_is_too_short_and_finally_fails() {
    run(async {
        let gate = Arc::new(Gate::default());
        let options = gate.options().history_bytes(1);
        let store = store(options).await;
        let live = Live::new(store.clone());
        gate.set(true);
        let mut subscribing = pin!(live.subscribe(costly(), Mode::Delta));
        poll_pending(subscribing.as_mut());
        for attempt in 1..=3 {
            gate.arrived(attempt).await;
            store.insert("b", record(ROWS + attempt)).await.unwrap();
            gate.pass();
        }
        assert_eq!(subscribing.await.unwrap_err(), LiveError::TooManyCommits);
        assert_eq!((live.stats().evaluations, live.stats().reevaluations, live.stats().subscriptions), (3, 2, 0));
        // With fewer commits it succeeds.
        let mut subscribing = pin!(live.subscribe(costly(), Mode::Delta));
        poll_pending(subscribing.as_mut());
        gate.arrived(4).await;
        store.insert("b", record(ROWS + 4)).await.unwrap();
        gate.pass();
        gate.arrived(5).await;
        gate.set(false);
        assert_eq!(first(&subscribing.await.unwrap()), ids(&[ROWS + 4, ROWS + 3, ROWS + 2]));
    });
}

#[test]
fn bucket_dropped_during_evaluation_fails_and_a_new_one_is_evaluated() {
    run(async {
        for is_defined_again in [false, true] {
            let gate = Arc::new(Gate::default());
            let store = store(gate.options()).await;
            let live = Live::new(store.clone());
            gate.set(true);
            let mut subscribing = pin!(live.subscribe(costly(), Mode::Delta));
            poll_pending(subscribing.as_mut());
            gate.arrived(1).await;
            store.drop_bucket("b").await.unwrap();
            if is_defined_again {
                store.define_bucket("b", definition()).await.unwrap();
                store.insert("b", record(1)).await.unwrap();
            }
            gate.set(false);
            match subscribing.await {
                Ok(subscription) => assert_eq!((is_defined_again, first(&subscription)), (true, ids(&[1]))),
                Err(error) => {
                    assert_eq!(
                        (is_defined_again, error.to_string()),
                        (false, "bucket \"b\" is not defined".to_owned())
                    );
                }
            }
        }
    });
}

#[test]
fn undefining_a_named_query_during_evaluation_ends_the_subscription() {
    run(async {
        let gate = Arc::new(Gate::default());
        let store = store(gate.options()).await;
        let filter = json!({"text": {"$contains": "lazy dog"}});
        store.define_query("costly", json!({"bucket": "b", "filter": filter})).await.unwrap();
        let live = Live::new(store.clone());
        gate.set(true);
        let mut subscribing = pin!(live.subscribe_named("costly", Map::new(), None, Mode::Delta));
        poll_pending(subscribing.as_mut());
        gate.arrived(1).await;
        store.undefine_query("costly").await.unwrap();
        assert_eq!(subscribing.await.unwrap_err(), LiveError::Ended(SubscriptionEnd::QueryUndefined));
        gate.set(false);
        assert_eq!((live.stats().subscriptions, live.stats().ended), (0, 0));
    });
}

#[test]
fn subscribing_fails_when_the_store_closes() {
    run(async {
        let gate = Arc::new(Gate::default());
        let store = store(gate.options()).await;
        let live = Live::new(store.clone());
        gate.set(true);
        let mut subscribing = pin!(live.subscribe(costly(), Mode::Delta));
        poll_pending(subscribing.as_mut());
        gate.arrived(1).await;
        store.close().unwrap();
        assert_eq!(subscribing.await.unwrap_err(), LiveError::Closed);
        gate.set(false);
    });
}

/// The history is empty, so the commit causes another evaluation.
#[test]
fn dropping_live_during_an_evaluation_ends_subscriptions() {
    run(async {
        let gate = Arc::new(Gate::default());
        let options = gate.options().history_bytes(1);
        let store = store(options).await;
        let live = Live::new(store.clone());
        let mut subscription = live.subscribe(costly(), Mode::Delta).await.unwrap();
        gate.set(true);
        store.insert("b", record(ROWS)).await.unwrap();
        gate.arrived(2).await;
        let dropping = std::thread::spawn(move || drop(live));
        assert_eq!(subscription.next().await.unwrap_err(), SubscriptionEnd::Closed);
        gate.set(false);
        dropping.join().unwrap();
    });
}

#[test]
fn panic_in_an_evaluation_fails_one_subscription() {
    run(async {
        let must_panic = Arc::new(AtomicBool::new(true));
        let clock_panics = Arc::clone(&must_panic);
        let clock = Clock::new(move || {
            assert!(!is_evaluator() || !clock_panics.load(SeqCst), "injected panic");
            1000
        });
        let store = store(StoreOptions::default().clock(clock)).await;
        let live = Live::new(store.clone());
        let _other = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        assert_eq!(live.subscribe(costly(), Mode::Delta).await.unwrap_err(), LiveError::Panicked);
        must_panic.store(false, SeqCst);
        assert!(live.subscribe(costly(), Mode::Delta).await.is_ok());
    });
}

#[test]
fn evaluation_fails_at_its_deadline() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::new(store.clone());
        let options = SubscribeOptions::default().deadline(std::time::Instant::now());
        assert_eq!(live.subscribe(costly(), options).await.unwrap_err(), LiveError::Deadline);
        let live = Live::with_options(store, LiveOptions::default().evaluation_timeout(Duration::ZERO));
        assert_eq!(live.subscribe(costly(), Mode::Delta).await.unwrap_err(), LiveError::Deadline);
    });
}

/// The history is empty, so the driver restarts with every commit.
#[test]
fn restart_delivers_snapshots_before_other_events() {
    run(async {
        let gate = Arc::new(Gate::default());
        let options = gate.options().history_bytes(1);
        let store = store(options).await;
        let live = Live::new(store.clone());
        let mut costly = live.subscribe(costly(), Mode::Delta).await.unwrap();
        let mut other = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        gate.set(true);
        store.insert("b", record(ROWS)).await.unwrap();
        gate.arrived(2).await;
        assert!(costly.try_next().unwrap().is_none());
        // A cheap query gets its result immediately, and requests are handled.
        assert!(matches!(other.next().await, Ok(Event::Snapshot { .. })));
        let another = live.subscribe(Query::new("c"), Mode::Snapshot).await.unwrap();
        assert_eq!(live.stats().subscriptions, 3);
        drop(another);
        gate.set(false);
        live.settled().await.unwrap();
        let mut result = Vec::new();
        apply(&mut result, costly.try_next().unwrap().unwrap());
        assert_eq!(result, ids(&[ROWS, ROWS - 1, ROWS - 2]));
        assert_eq!(live.stats().restarts, 1);
    });
}

#[test]
fn too_large_result_is_rejected_and_growth_ends_the_subscription() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_result_bytes(100_000));
        let too_large = LiveError::ResultTooLarge { max: 100_000 };
        let groups = query(&json!({"aggregate": {"function": "count", "groupBy": ["id"]}}));
        for query in [Query::new("b"), groups] {
            for mode in [Mode::Snapshot, Mode::Delta] {
                assert_eq!(live.subscribe(query.clone(), mode).await.unwrap_err(), too_large);
            }
        }
        assert_eq!((live.stats().queries, live.stats().subscriptions), (0, 0));
        let mut snapshot = live.subscribe(Query::new("c"), Mode::Snapshot).await.unwrap();
        let mut delta = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        let mut slow = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        slow.pause();
        for id in 0..300 {
            store.insert("c", record(id)).await.unwrap();
            // Deltas are small.
            assert!(matches!(delta.next().await, Ok(Event::Delta { .. })));
        }
        slow.refresh();
        for subscription in [&mut snapshot, &mut slow] {
            let end = loop {
                match subscription.next().await {
                    Ok(Event::Snapshot { result: QueryResult::Json(json), .. }) => assert!(json.len() <= 100_000),
                    Ok(other) => panic!("{other:?}"),
                    Err(end) => break end,
                }
            };
            assert_eq!(end, SubscriptionEnd::ResultTooLarge);
        }
        live.settled().await.unwrap();
        assert_eq!((live.stats().subscriptions, live.stats().ended), (1, 2));
    });
}

/// Results of a megabyte are encoded while commits continue.
#[test]
fn large_snapshots_are_in_order_and_deltas_follow_without_a_gap() {
    run(async {
        let store = store(StoreOptions::default()).await;
        // There can be more commits than this during an encoding.
        let live = Live::with_options(store.clone(), LiveOptions::default().max_deltas(8));
        let all = query(&json!({"limit": 3000, "sort": {"n": "asc"}}));
        let mut snapshot = live.subscribe(all.clone(), Mode::Snapshot).await.unwrap();
        let mut delta = live.subscribe(all.clone(), Mode::Delta).await.unwrap();
        let (mut snapshot_result, mut delta_result) = (first(&snapshot), first(&delta));
        let writer = std::thread::spawn({
            let store = store.clone();
            move || {
                let mut rng = fastrand::Rng::with_seed(7);
                for _ in 0..300 {
                    let patch = json!({"n": rng.u64(..10)});
                    store.update("b", json!(rng.u64(..ROWS)), patch, None).wait().unwrap();
                }
            }
        });
        let mut last = snapshot.mark().position().sequence;
        while !writer.is_finished() {
            while let Some(event) = snapshot.try_next().unwrap() {
                let Event::Snapshot { mark, .. } = &event else { panic!("{event:?}") };
                assert!(mark.position().sequence > last);
                last = mark.position().sequence;
                apply(&mut snapshot_result, event);
            }
            if fastrand::u8(..4) == 0 {
                delta.pause();
                delta.refresh();
            }
            while let Some(event) = delta.try_next().unwrap() {
                apply(&mut delta_result, event);
            }
            // A new subscriber sees all earlier writes.
            if fastrand::u8(..8) == 0 {
                let before = store.snapshot().position.sequence;
                let new = live.subscribe(all.clone(), Mode::Delta).await.unwrap();
                assert!(new.mark().position().sequence >= before);
            }
            tokio::task::yield_now().await;
        }
        writer.join().unwrap();
        for _ in 0..3 {
            live.settled().await.unwrap();
            while let Some(event) = snapshot.try_next().unwrap() {
                apply(&mut snapshot_result, event);
            }
            while let Some(event) = delta.try_next().unwrap() {
                apply(&mut delta_result, event);
            }
        }
        let expected = fresh_result(&store, &all);
        assert!(snapshot_result == expected && delta_result == expected);
    });
}

#[test]
fn long_history_is_read_in_the_background() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::new(store.clone());
        let mark = live.subscribe(costly(), Mode::Delta).await.unwrap();
        let (mark, mut result) = (mark.mark(), first(&mark));
        for id in 0..2000 {
            store.update("b", json!(id), json!({"n": 0}), None).await.unwrap();
        }
        store.insert("b", record(ROWS)).await.unwrap();
        let resumed = live.subscribe(costly(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        let First::Resumed(Some(delta)) = resumed.first() else { panic!("{:?}", resumed.first()) };
        delta.apply(&mut result);
        assert_eq!(result, ids(&[ROWS, ROWS - 1, ROWS - 2]));
    });
}

#[test]
fn owner_above_its_work_limit_loses_its_costliest_subscription() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_owner_work(3_000_000));
        let owned = |owner: u64| SubscribeOptions::from(Mode::Delta).owner(owner);
        let mut costly = live.subscribe(costly(), owned(1)).await.unwrap();
        let mut cheap = live.subscribe(query(&json!({"filter": {"id": 1}})), owned(1)).await.unwrap();
        let mut other = live.subscribe(query(&json!({"filter": {"id": 2}})), owned(2)).await.unwrap();
        // Two commits, each with a text that costs the filter two milliseconds by the budget's estimate.
        for id in 1..=2 {
            let text = "x".repeat(1_000_000);
            store.update("b", json!(id), json!({"text": text}), None).await.unwrap();
            store.update("b", json!(id), json!({"text": ""}), None).await.unwrap();
        }
        loop {
            match costly.next().await {
                Ok(_) => {}
                Err(end) => break assert_eq!(end, SubscriptionEnd::TooCostly),
            }
        }
        live.settled().await.unwrap();
        assert!(matches!(cheap.try_next(), Ok(Some(_))) && matches!(other.try_next(), Ok(Some(_))));
        let stats = live.stats();
        assert_eq!((stats.too_costly, stats.ended, stats.subscriptions, stats.queries), (1, 1, 2, 2));
    });
}

#[test]
fn query_above_the_work_limit_of_a_commit_ends() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_owner_work(100_000));
        let mut costly = live.subscribe(costly(), Mode::Delta).await.unwrap();
        let mut cheap = live.subscribe(query(&json!({"filter": {"id": {"$lt": 10}}})), Mode::Delta).await.unwrap();
        store.insert_many("b", (0..1000).map(record)).await.unwrap();
        assert_eq!(costly.next().await.unwrap_err(), SubscriptionEnd::TooCostly);
        assert!(live.settled().await.is_ok() && cheap.try_next().is_ok());
        assert_eq!((live.stats().too_costly, live.stats().queries), (1, 1));
    });
}

#[test]
fn retained_memory_is_limited_per_owner_and_in_total() {
    run(async {
        let store = store(StoreOptions::default()).await;
        let options = LiveOptions::default().max_owner_bytes(400_000).max_bytes(700_000);
        let live = Live::with_options(store.clone(), options);
        let all = |limit: u64| query(&json!({"limit": limit, "fields": ["id"]}));
        let owned = |owner: u64| SubscribeOptions::from(Mode::Delta).owner(owner);
        // Each query retains about 160 kB.
        let mut subscriptions = Vec::new();
        for limit in 1..=2 {
            subscriptions.push(live.subscribe(all(limit), owned(1)).await.unwrap());
        }
        let kept_bytes = live.stats().kept_bytes;
        assert!((300_000..400_000).contains(&kept_bytes), "{kept_bytes}");
        let rejected = live.subscribe(all(3), owned(1)).await.unwrap_err();
        assert_eq!(rejected, LiveError::TooLarge { limit: MemoryLimit::Owner, max: 400_000 });
        // A second subscriber of a live query adds nothing to the total, but counts for its owner.
        subscriptions.push(live.subscribe(all(1), owned(2)).await.unwrap());
        subscriptions.push(live.subscribe(all(3), owned(2)).await.unwrap());
        assert!(live.subscribe(all(4), owned(2)).await.is_err());
        subscriptions.push(live.subscribe(all(4), owned(3)).await.unwrap());
        let rejected = live.subscribe(all(5), owned(3)).await.unwrap_err();
        assert_eq!(rejected, LiveError::TooLarge { limit: MemoryLimit::Total, max: 700_000 });
        drop(subscriptions);
        live.settled().await.unwrap();
        assert_eq!(live.stats().kept_bytes, 0);
        // A query that grows beyond the limit ends.
        let mut grows = live.subscribe(Query::new("c"), owned(1)).await.unwrap();
        let mut stays = live.subscribe(query(&json!({"filter": {"id": 1}})), owned(1)).await.unwrap();
        for part in 0..4 {
            let records = (part * 4000..(part + 1) * 4000).map(|id| json!({"id": id}));
            store.insert_many("c", records).await.unwrap();
        }
        let end = loop {
            match grows.next().await {
                Ok(_) => {}
                Err(end) => break end,
            }
        };
        assert_eq!(end, SubscriptionEnd::TooLarge);
        assert!(stays.try_next().is_ok());
    });
}
