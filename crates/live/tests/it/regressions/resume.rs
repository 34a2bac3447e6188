//! A resumed subscription begins with exactly the missed changes, or with a snapshot.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tidewire_live::{Delta, Event, First, Live, LiveOptions, Mark, Mode, QueryResult, SubscribeOptions, Subscription};
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Clock, Pending, Query, Store, StoreOptions};

use crate::client::{self, DecodedResult};
use crate::strategies::{self, CommitStep};

/// An action between two polls.
#[derive(Debug, Clone)]
enum Action {
    Commit(Vec<CommitStep>, u64),
    /// Changes the time to live of the bucket.
    SetTtl(u64),
    /// Drops and defines the bucket in one commit.
    Redefine,
    /// Closes and opens the store, with or without a checkpoint.
    Restart(bool),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        20 => strategies::commit().prop_map(|(steps, pause)| Action::Commit(steps, pause)),
        1 => (1..40_u64).prop_map(Action::SetTtl),
        1 => Just(Action::Redefine),
        2 => any::<bool>().prop_map(Action::Restart),
    ]
}

fn open(dir: &Path, clock: &Arc<AtomicU64>) -> Store {
    let clock = Arc::clone(clock);
    let options = StoreOptions::default()
        .clock(Clock::new(move || clock.load(Relaxed)))
        .sweep_interval(None)
        .embedded(EmbeddedOptions::default().segment_bytes(1 << 16));
    Store::open(dir, options).unwrap().0
}

fn live_queries(store: &Store) -> Live {
    Live::with_options(store.clone(), LiveOptions::default().workers(1))
}

fn write(store: &Store, steps: Vec<CommitStep>) -> Pending<()> {
    store.write(move |draft| {
        strategies::apply_steps(draft, &steps);
        Ok(())
    })
}

fn decoded(snapshot: &QueryResult) -> DecodedResult {
    match snapshot {
        QueryResult::Json(bytes) => Some(serde_json::from_slice(bytes).unwrap()),
        QueryResult::NoValue => None,
        other => unreachable!("{other:?}"),
    }
}

fn fresh_result(store: &Store, query: &Query) -> DecodedResult {
    client::fresh_result(query, store.snapshot().state.bucket("b").unwrap(), store.now())
}

fn apply_delta(result: &DecodedResult, delta: &Delta) -> Json {
    let mut records = result.clone().unwrap().as_array().unwrap().clone();
    let mut from_json = records.clone();
    delta.apply(&mut records);
    client::apply(delta, &mut from_json);
    assert_eq!(records, from_json);
    Json::Array(records)
}

/// Returns the result at the start of a subscription, given the result at its mark.
fn first_result(subscription: &Subscription, before: &DecodedResult) -> DecodedResult {
    match subscription.first() {
        First::Snapshot(snapshot) => decoded(snapshot),
        First::Resumed(None) => before.clone(),
        First::Resumed(Some(delta)) => Some(apply_delta(before, delta)),
        other => unreachable!("{other:?}"),
    }
}

async fn check_resume(
    definition: Json,
    first: Vec<CommitStep>,
    query: Query,
    actions: Vec<(Action, prop::sample::Index)>,
) {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicU64::new(1000));
    let mut store = open(dir.path(), &clock);
    store.define_bucket("b", definition.clone()).await.unwrap();
    write(&store, first).await.unwrap();
    let mut live = live_queries(&store);
    let subscription = live.subscribe(query.clone(), Mode::Delta).await.unwrap();
    let mut results: Vec<(Mark, DecodedResult)> = vec![(subscription.mark(), first_result(&subscription, &None))];
    // A subscriber that stays subscribed sees expired records until they are swept.
    let mut staying = Some((subscription, results[0].1.clone()));
    for (action, index) in actions {
        match action.clone() {
            Action::Commit(steps, pause) => {
                clock.fetch_add(pause, Relaxed);
                write(&store, steps).await.unwrap();
            }
            Action::SetTtl(ttl) => store.update_bucket("b", json!({"ttl": ttl})).await.unwrap(),
            Action::Redefine => {
                staying = None;
                let definition = definition.clone();
                let redefined = store.write(move |draft| {
                    draft.drop_bucket("b")?;
                    draft.define_bucket("b", &definition)
                });
                redefined.await.unwrap();
            }
            Action::Restart(checkpoints) => {
                staying = None;
                drop(live);
                if checkpoints {
                    store.checkpoint().unwrap();
                }
                store.close().unwrap();
                store = open(dir.path(), &clock);
                live = live_queries(&store);
            }
        }
        live.settled().await.unwrap();
        if let Some((subscription, result)) = &mut staying {
            while let Some(event) = subscription.try_next().unwrap() {
                let mark = match event {
                    Event::Snapshot { result: snapshot, mark } => {
                        *result = decoded(&snapshot);
                        mark
                    }
                    Event::Delta { delta, mark } => {
                        *result = Some(apply_delta(result, &delta));
                        mark
                    }
                    other => unreachable!("{other:?}"),
                };
                results.push((mark, result.clone()));
            }
        }
        let (mark, before) = index.get(&results).clone();
        let resumed = live.subscribe(query.clone(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        let result = first_result(&resumed, &before);
        if staying.is_none() || matches!(resumed.first(), First::Resumed(_)) {
            assert_eq!(result, fresh_result(&store, &query), "{action:?} {mark:?} {:?}", resumed.first());
        }
        results.push((resumed.mark(), result));
    }
}

#[test]
fn bucket_that_is_not_persistent_does_not_resume_after_a_restart() {
    super::run(async {
        let (dir, clock) = (tempfile::tempdir().unwrap(), Arc::default());
        let mut definition = super::definition();
        definition["persistent"] = json!(false);
        let store = open(dir.path(), &clock);
        store.define_bucket("b", definition).await.unwrap();
        store.insert("b", super::json!({"id": 1})).await.unwrap();
        let mark = live_queries(&store).subscribe(Query::new("b"), Mode::Delta).await.unwrap().mark();
        store.close().unwrap();
        let store = open(dir.path(), &clock);
        let live = live_queries(&store);
        let resumed = live.subscribe(Query::new("b"), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        assert!(
            matches!(resumed.first(), First::Snapshot(QueryResult::Json(json)) if json == "[]"),
            "{:?}",
            resumed.first()
        );
        // From a mark after the restart it can resume.
        store.insert("b", super::json!({"id": 2})).await.unwrap();
        let mark = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap().mark();
        let resumed = live.subscribe(Query::new("b"), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        assert!(matches!(resumed.first(), First::Resumed(None)), "{:?}", resumed.first());
    });
}

#[test]
fn changed_definition_keeps_marks_valid() {
    super::run(async {
        let store = super::store(StoreOptions::default()).await;
        let live = live_queries(&store);
        let mark = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap().mark();
        store.define_bucket("d", super::definition()).await.unwrap();
        store.drop_bucket("c").await.unwrap();
        store.update_bucket("b", json!({"addIndexes": ["id"]})).await.unwrap();
        store.insert("b", super::json!({"id": 1})).await.unwrap();
        let resumed = live.subscribe(Query::new("b"), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        let First::Resumed(Some(delta)) = resumed.first() else { panic!("{:?}", resumed.first()) };
        assert_eq!(delta.counts(), (1, 0, 0));
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, max_shrink_iters: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resumed_subscriptions_have_the_current_result(
        definition in strategies::definition(),
        is_persistent in prop::bool::weighted(0.7),
        first in strategies::initial_records(),
        query in strategies::query(),
        actions in prop::collection::vec((action(), any::<prop::sample::Index>()), 1..25),
    ) {
        let mut definition = definition;
        definition["persistent"] = json!(is_persistent);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(check_resume(definition, first, query, actions));
    }
}
