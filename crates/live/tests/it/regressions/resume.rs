//! A resumed subscription begins with exactly the missed changes, or with a snapshot.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tidewire_live::{Delta, Event, First, Live, LiveOptions, Mark, Mode, QueryResult, SubscribeOptions, Subscription};
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Clock, Pending, Query, Store, StoreOptions};

use crate::follower::{self, Shown};
use crate::world::{self, CommitStep};

/// An action between two polls.
#[derive(Debug, Clone)]
enum Act {
    Commit(Vec<CommitStep>, u64),
    /// Changes the time to live of the bucket.
    Update(u64),
    /// Drops the bucket and defines it again in one commit.
    Anew,
    /// Closes and opens the store, with or without a checkpoint.
    Restart(bool),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        20 => world::commit().prop_map(|(steps, pause)| Act::Commit(steps, pause)),
        1 => (1..40_u64).prop_map(Act::Update),
        1 => Just(Act::Anew),
        2 => any::<bool>().prop_map(Act::Restart),
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

fn follow(store: &Store) -> Live {
    Live::with_options(store.clone(), LiveOptions::default().workers(1))
}

fn write(store: &Store, steps: Vec<CommitStep>) -> Pending<()> {
    store.write(move |draft| {
        world::take(draft, &steps);
        Ok(())
    })
}

fn shown(whole: &QueryResult) -> Shown {
    match whole {
        QueryResult::Json(bytes) => Some(serde_json::from_slice(bytes).unwrap()),
        QueryResult::NoValue => None,
        other => unreachable!("{other:?}"),
    }
}

fn answer(store: &Store, query: &Query) -> Shown {
    follower::answer(query, store.snapshot().state.bucket("b").unwrap(), store.now())
}

fn changed(result: &Shown, delta: &Delta) -> Json {
    let mut records = result.clone().unwrap().as_array().unwrap().clone();
    let mut from_json = records.clone();
    delta.apply(&mut records);
    follower::apply(delta, &mut from_json);
    assert_eq!(records, from_json);
    Json::Array(records)
}

/// Returns the result at the start of a subscription, given the earlier result.
fn begun(subscription: &Subscription, before: &Shown) -> Shown {
    match subscription.first() {
        First::Snapshot(whole) => shown(whole),
        First::Resumed(None) => before.clone(),
        First::Resumed(Some(delta)) => Some(changed(before, delta)),
        other => unreachable!("{other:?}"),
    }
}

async fn resumes(definition: Json, first: Vec<CommitStep>, query: Query, acts: Vec<(Act, prop::sample::Index)>) {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicU64::new(1000));
    let mut store = open(dir.path(), &clock);
    store.define_bucket("b", definition.clone()).await.unwrap();
    write(&store, first).await.unwrap();
    let mut live = follow(&store);
    let subscription = live.subscribe(query.clone(), Mode::Delta).await.unwrap();
    let mut known: Vec<(Mark, Shown)> = vec![(subscription.mark(), begun(&subscription, &None))];
    // A subscriber that stays sees expired records until they are swept.
    let mut stays = Some((subscription, known[0].1.clone()));
    for (act, index) in acts {
        match act.clone() {
            Act::Commit(steps, pause) => {
                clock.fetch_add(pause, Relaxed);
                write(&store, steps).await.unwrap();
            }
            Act::Update(ttl) => store.update_bucket("b", json!({"ttl": ttl})).await.unwrap(),
            Act::Anew => {
                stays = None;
                let definition = definition.clone();
                let anew = store.write(move |draft| {
                    draft.drop_bucket("b")?;
                    draft.define_bucket("b", &definition)
                });
                anew.await.unwrap();
            }
            Act::Restart(checkpoints) => {
                stays = None;
                drop(live);
                if checkpoints {
                    store.checkpoint().unwrap();
                }
                store.close().unwrap();
                store = open(dir.path(), &clock);
                live = follow(&store);
            }
        }
        live.settled().await.unwrap();
        if let Some((subscription, result)) = &mut stays {
            while let Some(event) = subscription.try_next().unwrap() {
                let mark = match event {
                    Event::Snapshot { result: whole, mark } => {
                        *result = shown(&whole);
                        mark
                    }
                    Event::Delta { delta, mark } => {
                        *result = Some(changed(result, &delta));
                        mark
                    }
                    other => unreachable!("{other:?}"),
                };
                known.push((mark, result.clone()));
            }
        }
        let (mark, before) = index.get(&known).clone();
        let resumed = live.subscribe(query.clone(), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        let result = begun(&resumed, &before);
        if stays.is_none() || matches!(resumed.first(), First::Resumed(_)) {
            assert_eq!(result, answer(&store, &query), "{act:?} {mark:?} {:?}", resumed.first());
        }
        known.push((resumed.mark(), result));
    }
}

#[test]
fn bucket_that_is_not_persistent_does_not_resume_after_a_restart() {
    super::run(async {
        let (dir, clock) = (tempfile::tempdir().unwrap(), Arc::default());
        let mut definition = super::plain();
        definition["persistent"] = json!(false);
        let store = open(dir.path(), &clock);
        store.define_bucket("b", definition).await.unwrap();
        store.insert("b", super::json!({"id": 1})).await.unwrap();
        let mark = follow(&store).subscribe(Query::new("b"), Mode::Delta).await.unwrap().mark();
        store.close().unwrap();
        let store = open(dir.path(), &clock);
        let live = follow(&store);
        let resumed = live.subscribe(Query::new("b"), SubscribeOptions::from(Mode::Delta).since(mark)).await.unwrap();
        assert!(
            matches!(resumed.first(), First::Snapshot(QueryResult::Json(json)) if json == "[]"),
            "{:?}",
            resumed.first()
        );
        // Later it can resume.
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
        let live = follow(&store);
        let mark = live.subscribe(Query::new("b"), Mode::Delta).await.unwrap().mark();
        store.define_bucket("d", super::plain()).await.unwrap();
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
        definition in world::definition(),
        is_kept in prop::bool::weighted(0.7),
        first in world::first(),
        query in world::query(),
        acts in prop::collection::vec((act(), any::<prop::sample::Index>()), 1..25),
    ) {
        let mut definition = definition;
        definition["persistent"] = json!(is_kept);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(resumes(definition, first, query, acts));
    }
}
