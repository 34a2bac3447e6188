//! The contract of a store with each engine, with and without a restart.

use serde_json::{Map, json};
use tidewire_store::transaction::Operation;
use tidewire_store::{Draft, QueryOutput, StoreError, WriteError};

use super::{ids, open, options, plain, records, with_each_engine};

#[test]
fn writes_and_definitions_persist_in_order() {
    with_each_engine(|store, reopen| {
        for name in ["zebra", "ant", "mole"] {
            store.define_bucket(name, plain()).wait().unwrap();
        }
        store.define_query("high", json!({"bucket": "mole", "filter": {"tide": "{{ params.tide }}"}})).wait().unwrap();
        store.define_query("gone", json!({"bucket": "ant"})).wait().unwrap();
        for id in [5, 3, 9, 1] {
            store.insert("mole", json!({"id": id, "tide": "low"})).wait().unwrap();
        }
        store.update("mole", json!(3), json!({"tide": "high"}), None).wait().unwrap();
        store.insert("mole", json!({"id": 5, "tide": "high"})).wait().unwrap();
        assert!(store.delete("mole", json!(9), None).wait().unwrap());
        store.insert("ant", json!({"id": 1})).wait().unwrap();
        store.drop_bucket("ant").wait().unwrap();
        store.insert_many("zebra", (0..3).map(|id| json!({"id": id}))).wait().unwrap();
        store.clear("zebra").wait().unwrap();
        store.insert("zebra", json!({"id": 7})).wait().unwrap();
        let before = (records(&store, "mole"), store.snapshot().position.sequence);

        let store = reopen(store);
        let snapshot = store.snapshot();
        assert_eq!(snapshot.state.names().collect::<Vec<_>>(), ["zebra", "mole"]);
        assert_eq!((records(&store, "mole"), snapshot.position.sequence), before);
        assert_eq!(ids(&store, "mole"), [5, 3, 1]);
        assert_eq!(ids(&store, "zebra"), [7]);
        let output = store.query_named("high", json!({"tide": "high"}).as_object().unwrap()).unwrap();
        assert!(matches!(output, QueryOutput::Records(records) if records.len() == 2));
        assert_eq!(snapshot.state.queries().count(), 1, "dropping a bucket removes the queries on it");
        assert_eq!(
            store.query(&tidewire_store::Query::new("ant")),
            Err(StoreError::BucketNotDefined { bucket: "ant".to_owned() })
        );
        // Writes continue.
        store.insert("mole", json!({"id": 2})).wait().unwrap();
        let store = reopen(store);
        assert_eq!(ids(&store, "mole"), [5, 3, 1, 2]);
    });
}

#[test]
fn redefined_bucket_is_empty() {
    with_each_engine(|store, reopen| {
        store.define_bucket("b", plain()).wait().unwrap();
        store.insert("b", json!({"id": 1})).wait().unwrap();
        let config = json!({"key": "name", "schema": {"name": {"type": "string"}}});
        let again = config.clone();
        store
            .write(move |draft| {
                draft.insert("b", json!({"id": 2}))?;
                draft.delete("b", &json!(1), None)?;
                draft.drop_bucket("b")?;
                draft.define_bucket("b", &again)?;
                draft.insert("b", json!({"name": "x"}))
            })
            .wait()
            .unwrap();
        let store = reopen(store);
        assert_eq!(store.snapshot().state.bucket("b").unwrap().definition().config, config);
        assert_eq!(records(&store, "b").len(), 1);
        assert!(store.get("b", &json!("x")).unwrap().is_some());
    });
}

#[test]
fn updated_bucket_has_new_fields_and_indexes() {
    with_each_engine(|store, reopen| {
        store.define_bucket("b", plain()).wait().unwrap();
        for id in 0..10 {
            store.insert("b", json!({"id": id, "tide": id % 3, "name": "same"})).wait().unwrap();
        }
        let refused =
            store.update_bucket("b", json!({"addFields": {"name": {"type": "string", "unique": true}}})).wait();
        assert!(matches!(refused, Err(WriteError::Refused(StoreError::NotUnique { .. }))), "{refused:?}");
        let updates = json!({"addFields": {"tide": {"type": "number", "max": 2}}, "addIndexes": ["tide"], "ttl": "1h"});
        store.update_bucket("b", updates).wait().unwrap();
        let store = reopen(store);
        let expected = json!({"key": "id", "schema": {"id": {"type": "number"}, "tide": {"type": "number", "max": 2}},
            "indexes": ["tide"], "ttl": "1h"});
        assert_eq!(store.snapshot().state.bucket("b").unwrap().definition().config, expected);
        assert_eq!(store.stats().buckets[0].indexes, 1);
        assert!(store.insert("b", json!({"id": 10, "tide": 3})).wait().is_err());
        let row = store.insert("b", json!({"id": 10, "tide": 1})).wait().unwrap().to_record();
        assert_eq!(row["_expiresAt"].as_u64().unwrap() - row["_createdAt"].as_u64().unwrap(), 3_600_000);
        store.update_bucket("b", json!({"ttl": null})).wait().unwrap();
        let store = reopen(store);
        let row = store.insert("b", json!({"id": 11})).wait().unwrap().to_record();
        assert_eq!(row.get("_expiresAt"), None);
    });
}

#[test]
fn generated_numbers_continue_after_a_restart() {
    with_each_engine(|store, reopen| {
        let config = json!({"key": "id", "schema": {"id": {"type": "number", "generated": "autoincrement"}}});
        store.define_bucket("b", config).wait().unwrap();
        for _ in 0..3 {
            store.insert("b", Map::new()).wait().unwrap();
        }
        store.insert("b", json!({"id": 41})).wait().unwrap();
        let store = reopen(store);
        assert_eq!(store.insert("b", Map::new()).wait().unwrap().to_record()["id"], 42);
    });
}

#[test]
fn idempotency_keys_survive_a_restart() {
    with_each_engine(|store, reopen| {
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
        store.define_bucket("b", config).wait().unwrap();
        let once = |draft: &mut Draft| {
            draft.once("user", "key", "insert", |draft| Ok(draft.insert("b", Map::new())?.to_record().into()))
        };
        let first = store.write(once).wait().unwrap();
        let store = reopen(store);
        assert_eq!(store.write(once).wait().unwrap(), first);
        assert_eq!(records(&store, "b").len(), 1);
    });
}

#[test]
fn transaction_is_one_commit_or_none() {
    with_each_engine(|store, reopen| {
        store.define_bucket("b", plain()).wait().unwrap();
        let (_, mut follower) = store.follow();
        let transact = |operations| store.transact(Operation::parse_all(&operations).unwrap()).wait();
        let results = transact(json!([
            {"op": "insert", "bucket": "b", "data": {"id": 1}},
            {"op": "insert", "bucket": "b", "data": {"id": 2}},
            {"op": "count", "bucket": "b"},
        ]));
        assert_eq!(results.unwrap()[2], tidewire_store::transaction::OperationResult::Count(2));
        let refused = transact(json!([
            {"op": "insert", "bucket": "b", "data": {"id": 3}},
            {"op": "update", "bucket": "b", "key": 9, "data": {}},
        ]));
        assert_eq!(refused.unwrap_err().to_string(), "operations[1]: record 9 not found in bucket \"b\"");
        let commit = follower.try_next().unwrap().unwrap();
        assert_eq!(commit.changes.len(), 2);
        assert!(follower.try_next().unwrap().is_none());
        assert_eq!(ids(&reopen(store), "b"), [1, 2]);
    });
}

/// The bucket still exists, without its records.
#[test]
fn non_persistent_bucket_is_empty_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    for checkpoint in [false, true] {
        let store = open(dir.path());
        let name = if checkpoint { "one" } else { "two" };
        let config = json!({"key": "id", "schema": {"id": {"type": "number"}}, "persistent": false});
        store.define_bucket(name, config).wait().unwrap();
        store.insert(name, json!({"id": 1})).wait().unwrap();
        let position = store.snapshot().position;
        if checkpoint {
            store.checkpoint().unwrap();
        }
        store.close().unwrap();
        let store = open(dir.path());
        assert_eq!(store.snapshot().position, position);
        assert!(records(&store, name).is_empty());
    }
}

#[test]
fn expired_records_are_hidden_then_swept_and_followed() {
    let clock = super::TestClock::new(1000);
    let options = options().clock(clock.clock()).sweep_interval(None);
    let store = tidewire_store::Store::memory(options);
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}}, "ttl": 100});
    store.define_bucket("b", config).wait().unwrap();
    store.insert("b", json!({"id": 1})).wait().unwrap();
    store.insert("b", json!({"id": 2, "_expiresAt": 5000})).wait().unwrap();
    let (_, mut follower) = store.follow();
    clock.set(1100);
    assert_eq!(store.get("b", &json!(1)).unwrap(), None);
    assert_eq!(ids(&store, "b"), [2]);
    assert!(follower.try_next().unwrap().is_none());
    assert_eq!(store.sweep().wait().unwrap(), 1);
    let commit = follower.try_next().unwrap().unwrap();
    assert_eq!((commit.changes.len(), &commit.changes[0].new), (1, &None));
    // The background sweep deletes expired records too.
    let dir = tempfile::tempdir().unwrap();
    let options = super::options().sweep_interval(std::time::Duration::from_millis(1));
    let (store, _) = tidewire_store::Store::open(dir.path(), options).unwrap();
    store.define_bucket("b", json!({"key": "id", "schema": {"id": {"type": "number"}}, "ttl": 1})).wait().unwrap();
    let (_, mut follower) = store.follow();
    for id in 0..2000 {
        store.insert("b", json!({"id": id})).wait().unwrap();
    }
    let mut left = 0_i64;
    let mut seen = 0;
    while seen < 2000 || left > 0 {
        for change in &follower.wait().unwrap().changes {
            left += i64::from(change.new.is_some()) - i64::from(change.old.is_some());
            seen += i32::from(change.new.is_some());
        }
    }
    tidewire_testkit::wait_until("all are swept", tidewire_testkit::PATIENCE, || store.stats().swept == 2000);
    assert_eq!(store.stats().buckets[0].records, 0);
}

/// The target may have expired, or was lost with a bucket that is not persistent.
#[test]
fn record_with_a_dangling_reference_can_be_updated() {
    let clock = super::TestClock::new(1000);
    let options = options().clock(clock.clock()).sweep_interval(None);
    let store = tidewire_store::Store::memory(options);
    store
        .define_bucket("short", json!({"key": "id", "schema": {"id": {"type": "number"}}, "ttl": 100}))
        .wait()
        .unwrap();
    let refers = json!({"key": "id", "schema": {"id": {"type": "number"}, "to": {"type": "number", "ref": "short"}}});
    store.define_bucket("b", refers).wait().unwrap();
    store.insert("short", json!({"id": 1})).wait().unwrap();
    store.insert("b", json!({"id": 1, "to": 1})).wait().unwrap();
    clock.set(2000);
    store.update("b", json!(1), json!({"x": 1}), None).wait().unwrap();
    store.update("b", json!(1), json!({"to": 1}), None).wait().unwrap();
    assert!(
        store.update("b", json!(1), json!({"to": 2}), None).wait().is_err(),
        "the target of a new reference must exist"
    );
    assert!(store.insert("b", json!({"id": 2, "to": 1})).wait().is_err());
}
