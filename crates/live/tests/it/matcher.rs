//! The matcher: sharing of equal queries, the end of queries, expired records, and limits of its cache.

use serde_json::{Map, Value as Json, json};
use tidewire_live::{Matcher, QueryResult, ResultChange, SubscribeError};
use tidewire_store::{Draft, Position, Query, State};

fn query(json: &Json) -> Query {
    Query::parse(json).unwrap()
}

fn state(buckets: &[&str]) -> State {
    let definition = json!({"key": "name", "schema": {"name": {"type": "string"}}});
    let mut draft = Draft::new(State::new(), 1000);
    for bucket in buckets {
        draft.define_bucket(bucket, &definition).unwrap();
    }
    draft.finish().0
}

fn position(sequence: u64) -> Position {
    Position { epoch: 1, sequence }
}

/// The driver owns the matcher on its thread, and other threads read results.
#[test]
fn matcher_and_results_are_send() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    is_send::<Matcher>();
    is_shared::<tidewire_live::Committed>();
}

#[test]
fn equal_queries_share_the_encoded_result() {
    let state = state(&["a"]);
    let mut live = Matcher::new(position(0));
    let bucket = state.bucket("a").unwrap();
    let one = query(&json!({"bucket": "a", "filter": {"x": 1, "y": {"$in": [2]}}}));
    let two = query(&json!({"bucket": "a", "filter": {"y": 2.0, "x": 1}}));
    let ids = [live.subscribe(1, &one, bucket, 0).unwrap(), live.subscribe(2, &two, bucket, 0).unwrap()];
    assert_eq!(ids[0], ids[1]);
    assert_eq!(live.subscribe(1, &one, bucket, 0), Err(SubscribeError::Exists { subscriber: 1 }));
    assert_eq!((live.stats().queries, live.stats().subscribers), (1, 2));

    let mut draft = Draft::new(state, 0);
    draft.insert("a", json!({"name": "n", "x": 1, "y": 2})).unwrap();
    let committed = live.commit(position(1), &draft.finish().1);
    let [update] = &committed.updates[..] else { panic!("{committed:?}") };
    assert_eq!(live.subscribers(update.query), [1, 2]);
    let ResultChange::Records(delta) = &update.change else { panic!("{update:?}") };
    assert_eq!(delta.encoded().as_ptr(), delta.clone().encoded().as_ptr());
    let (Some(QueryResult::Json(first)), Some(QueryResult::Json(second))) = (live.result(ids[0]), live.result(ids[1]))
    else {
        panic!("expected two results")
    };
    assert_eq!(first.as_ptr(), second.as_ptr());

    assert!(live.unsubscribe(1));
    assert_eq!(live.subscribers(ids[0]), [2]);
    assert!(live.unsubscribe(2) && !live.unsubscribe(2));
    assert_eq!((live.result(ids[0]), live.subscribers(ids[0])), (None, &[][..]));
}

#[test]
fn reused_slot_gets_a_new_query_id() {
    let state = state(&["a"]);
    let mut live = Matcher::new(position(0));
    let bucket = state.bucket("a").unwrap();
    let first = live.subscribe(1, &Query::new("a"), bucket, 0).unwrap();
    live.unsubscribe(1);
    let second = live.subscribe(1, &query(&json!({"bucket": "a", "limit": 1})), bucket, 0).unwrap();
    assert_ne!(first, second);
    assert_eq!((live.result(first), live.end(first)), (None, None));
    assert!(live.result(second).is_some());
}

#[test]
fn queries_end_with_their_bucket() {
    let state = state(&["a", "b"]);
    let mut live = Matcher::new(position(0));
    for (subscriber, bucket) in [(1, "a"), (2, "b"), (3, "a")] {
        live.subscribe(subscriber, &Query::new(bucket), state.bucket(bucket).unwrap(), 0).unwrap();
    }
    let other = query(&json!({"bucket": "a", "filter": {"x": {"$gt": 1}}}));
    let other = live.subscribe(5, &other, state.bucket("a").unwrap(), 0).unwrap();

    let mut draft = Draft::new(state, 0);
    draft.insert("a", json!({"name": "n", "x": 5})).unwrap();
    draft.drop_bucket("a").unwrap();
    let committed = live.commit(position(1), &draft.finish().1);
    let ended: Vec<&[u64]> = committed.ended.iter().map(|ended| &ended.subscribers[..]).collect();
    assert_eq!(ended, [&[1, 3][..], &[5]]);
    assert_eq!(live.result(other), None);
    assert!(committed.updates.is_empty(), "no other query changed");
    assert_eq!((live.query_of(1), live.query_of(5), live.stats().queries), (None, None, 1));

    let left = live.query_of(2).unwrap();
    assert_eq!(live.end(left).unwrap().subscribers, [2]);
    assert!(live.end_bucket("b").is_empty());
    assert!(!live.unsubscribe(2));
}

/// A record that has expired before the evaluation is not in the result, before and after it is swept.
#[test]
fn record_expired_at_evaluation_never_appears() {
    let mut state = state(&["a"]);
    let mut draft = Draft::new(state, 1000);
    for (name, expiry) in [("gone", 1500), ("here", 2500), ("permanent", 0)] {
        let mut record: Map<String, Json> = serde_json::from_value(json!({"name": name})).unwrap();
        if expiry > 0 {
            record.insert("_expiresAt".to_owned(), json!(expiry));
        }
        draft.insert("a", record).unwrap();
    }
    state = draft.finish().0;
    let mut live = Matcher::new(position(0));
    let names = query(&json!({"bucket": "a", "fields": ["name"]}));
    let names = live.subscribe(1, &names, state.bucket("a").unwrap(), 2000).unwrap();
    let count = query(&json!({"bucket": "a", "aggregate": {"function": "count"}}));
    let count = live.subscribe(2, &count, state.bucket("a").unwrap(), 2000).unwrap();
    assert_eq!(live.result(names), Some(QueryResult::Json(r#"[{"name":"here"},{"name":"permanent"}]"#.into())));
    assert_eq!(live.result(count), Some(QueryResult::Json("2".into())));

    let mut draft = Draft::new(state, 2100);
    assert_eq!(draft.sweep(10), 1);
    let (state, changes) = draft.finish();
    assert!(live.commit(position(1), &changes).updates.is_empty());

    let mut draft = Draft::new(state, 2500);
    // Already expired when it is written.
    draft.insert("a", json!({"name": "late", "_expiresAt": 2400})).unwrap();
    let (state, changes) = draft.finish();
    assert!(live.commit(position(2), &changes).updates.is_empty());
    let mut draft = Draft::new(state, 2600);
    assert_eq!(draft.sweep(10), 2);
    live.commit(position(3), &draft.finish().1);
    assert_eq!(live.result(count), Some(QueryResult::Json("1".into())));
    assert_eq!(live.result(names), Some(QueryResult::Json(r#"[{"name":"permanent"}]"#.into())));
}

#[test]
fn cached_results_are_limited() {
    let mut state = state(&["a"]);
    let mut draft = Draft::new(state, 0);
    let text = "x".repeat(1 << 19);
    draft.insert("a", json!({"name": "n", "text": text})).unwrap();
    state = draft.finish().0;
    let mut live = Matcher::new(position(0));
    for limit in 1..40 {
        let query = query(&json!({"bucket": "a", "limit": limit}));
        let query = live.subscribe(limit, &query, state.bucket("a").unwrap(), 0).unwrap();
        live.result(query).unwrap();
    }
    assert!(live.stats().encoded_bytes > 2 * Matcher::MAX_ENCODED_BYTES);
    live.commit(position(1), &[]);
    let left = live.stats().encoded_bytes;
    assert!(left > 0 && left <= Matcher::MAX_ENCODED_BYTES, "{left}");
}
