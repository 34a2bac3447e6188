//! Budgets of reads: work, memory and stopping.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::{Value as Json, json};
use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::transaction::Operation;
use tidewire_store::{Filter, Limits, Query, Store, StoreError, StoreOptions, WriteError};

/// Creates a store with a bucket of `count` records, each with a text.
fn store(count: usize, text: &str) -> Store {
    let store = Store::memory(StoreOptions::default());
    let number = json!({"type": "number"});
    let config = json!({"key": "id", "schema": {"id": number, "n": number, "m": number}, "indexes": ["n", ["m", "n"]]});
    store.define_bucket("b", config).wait().unwrap();
    let record = |id: usize| json!({"id": id, "n": id, "m": id % 3, "text": text, "own": format!("{id} {text}")});
    store.insert_many("b", (0..count).map(record)).wait().unwrap();
    store
}

fn query(mut json: Json) -> Query {
    json["bucket"] = json!("b");
    Query::parse(&json).unwrap()
}

/// Runs a query with a budget. Returns its result as text.
fn run(store: &Store, json: Json, max: usize, budget: &Budget) -> Result<String, Exceeded> {
    let snapshot = store.snapshot();
    let mut out = Vec::new();
    query(json).write_result(snapshot.state.bucket("b").unwrap(), 0, &mut out, max, budget)?;
    Ok(String::from_utf8(out).unwrap())
}

#[test]
fn every_read_stops_at_its_work_limit() {
    let store = store(2000, "spring tide");
    let contains = json!({"text": {"$contains": "neap"}});
    for json in [
        json!({"filter": contains}),
        json!({"filter": contains, "limit": 1}),
        json!({"filter": contains, "sort": {"n": "desc"}, "limit": 1}),
        json!({"filter": contains, "sort": {"m": "asc"}, "limit": 1}),
        json!({"filter": contains, "sort": {"text": "asc"}}),
        json!({"filter": {"n": {"$gte": 0}, "text": "neap"}}),
        json!({"filter": {"$or": [{"n": {"$gte": 0}}, {"m": 1}], "text": "neap"}}),
        json!({"filter": {"$or": [{"n": {"$gte": 0}}, {"m": 1}]}, "aggregate": {"function": "count"}}),
        json!({"filter": contains, "aggregate": {"function": "count"}}),
        json!({"filter": contains, "aggregate": {"function": "max", "field": "n"}}),
        json!({"aggregate": {"function": "sum", "field": "n"}}),
        json!({"aggregate": {"function": "count", "groupBy": "text"}}),
        json!({"sort": {"own": "asc"}, "limit": 1}),
        json!({"fields": ["id"]}),
    ] {
        let unlimited = Budget::unlimited();
        run(&store, json.clone(), usize::MAX, &unlimited).unwrap();
        assert!(unlimited.work() > 2000 * 8, "{json} took {} units of work", unlimited.work());
        let limited = Budget::unlimited().max_work(10_000);
        assert_eq!(run(&store, json.clone(), usize::MAX, &limited), Err(Exceeded::Work), "{json}");
        // At most one step exceeds the limit.
        assert!(limited.work() < 12_000, "{json} took {} units of work", limited.work());
    }
    let snapshot = store.snapshot();
    let bucket = snapshot.state.bucket("b").unwrap();
    let hidden = Filter::parse(&contains).unwrap();
    let budget = || Budget::unlimited().max_work(10_000);
    assert_eq!(bucket.first(1, &hidden, 0, &budget()), Err(Exceeded::Work));
    assert_eq!(bucket.last(1, &hidden, 0, &budget()), Err(Exceeded::Work));
    assert_eq!(bucket.page(None, 1, &hidden, 0, &budget()), Err(Exceeded::Work));
}

#[test]
fn indexed_reads_take_little_work() {
    let store = store(2000, "spring tide");
    for json in [
        json!({"filter": {"id": 7}}),
        json!({"filter": {"n": {"$in": [7, 8, 9]}}}),
        json!({"filter": {"m": 1, "n": {"$lt": 10}}, "sort": {"n": "desc"}}),
        json!({"sort": {"n": "desc"}, "limit": 3}),
        json!({"aggregate": {"function": "count"}}),
        json!({"aggregate": {"function": "max", "field": "n"}}),
    ] {
        let budget = Budget::unlimited().max_work(2000);
        assert!(run(&store, json.clone(), usize::MAX, &budget).is_ok(), "{json}");
    }
}

#[test]
fn memory_limits_apply_while_results_are_built() {
    let store = store(2000, &"tide ".repeat(100));
    let memory = Err(Exceeded::Memory { max: 100_000 });
    let groups = json!({"aggregate": {"function": "count", "groupBy": "own"}});
    for json in [json!({"sort": {"own": "asc"}, "fields": []}), groups] {
        let budget = Budget::unlimited().max_bytes(100_000);
        assert_eq!(run(&store, json.clone(), usize::MAX, &budget), memory, "{json}");
        // The read failed before all records were examined.
        assert!(budget.work() < 1_000_000, "{json} took {} units of work", budget.work());
    }
    // With a limit, the read keeps the sort keys of only that many records.
    let budget = Budget::unlimited().max_bytes(100_000);
    let sorted = json!({"sort": {"own": "asc"}, "limit": 2, "fields": ["id"]});
    assert_eq!(run(&store, sorted, usize::MAX, &budget).unwrap(), r#"[{"id":0},{"id":1}]"#);
    assert_eq!(run(&store, json!({}), 10_000, &Budget::unlimited()), Err(Exceeded::Result { max: 10_000 }));
}

#[test]
fn read_can_be_stopped_within_one_large_record() {
    let store = store(1, &"tide ".repeat(100_000));
    let conditions: Vec<Json> = (0..200).map(|n| json!({"text": {"$contains": format!("neap {n}")}})).collect();
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let budget = Budget::unlimited().stop_when(move || counter.fetch_add(1, Relaxed) == 20);
    assert_eq!(run(&store, json!({"filter": {"$or": conditions}}), usize::MAX, &budget), Err(Exceeded::Stopped));
    assert_eq!(calls.load(Relaxed), 21);
}

#[test]
fn reads_of_a_transaction_are_limited_and_the_error_names_the_missing_index() {
    let options =
        StoreOptions::default().limits(Limits::default().max_transaction_read(std::time::Duration::from_millis(1)));
    let store = Store::memory(options);
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}, "name": {"type": "string"}}});
    store.define_bucket("b", config).wait().unwrap();
    let records = (0..20_000).map(|id| json!({"id": id, "name": format!("n{id}")}));
    store.insert_many("b", records).wait().unwrap();

    let scan = json!({"op": "findOne", "bucket": "b", "filter": {"name": "none"}});
    let insert = json!({"op": "insert", "bucket": "b", "data": {"id": -1}});
    let run = |operations: Json| store.transact(Operation::parse_all(&operations).unwrap()).wait();
    let Err(WriteError::Refused(StoreError::Transaction(error))) = run(json!([insert, scan])) else {
        panic!("a transaction with a long read succeeded")
    };
    let expected = "operations[1]: the reads of the write exceed the limit of 1 ms in bucket \"b\": \
                    define an index on \"name\", or read before the transaction";
    assert_eq!(error.to_string(), expected);
    assert_eq!(store.get("b", &json!(-1)).unwrap(), None, "the write had no effect");

    // The reads of a transaction count together, and each transaction has its own limit.
    let get = json!({"op": "findOne", "bucket": "b", "filter": {"id": 7}});
    let part = json!({"op": "count", "bucket": "b", "filter": {"id": {"$in": (0..3000).collect::<Vec<_>>()}}});
    assert!(run(json!([insert, get, part])).is_ok());
    assert!(run(json!([get, part])).is_ok());
    assert!(run(json!(vec![part; 20])).is_err());

    store.update_bucket("b", json!({"addIndexes": ["name"]})).wait().unwrap();
    assert!(run(json!([scan])).is_ok());
}
