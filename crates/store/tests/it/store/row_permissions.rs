//! Row filters and reference filters of writes.

use serde_json::{Map, Value as Json, json};
use tidewire_store::transaction::{Operation, OperationResult};
use tidewire_store::{Draft, Filter, Query, QueryOutput, ReferenceFilter, Store, StoreError, WriteError};

use super::{ids, options};

fn store() -> Store {
    let store = Store::memory(options());
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}, "owner": {"type": "string"}}});
    store.define_bucket("b", config).wait().unwrap();
    for (id, owner) in [(1, "ann"), (2, "bob"), (3, "ann")] {
        store.insert("b", json!({"id": id, "owner": owner, "n": id})).wait().unwrap();
    }
    store
}

fn as_ann<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let filter = Filter::parse(&json!({"owner": "ann"})).unwrap();
    match store.write(move |draft| draft.with_row_filter(&filter, work)).wait() {
        Ok(done) => Ok(done),
        Err(WriteError::Refused(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn hidden_records_are_not_found() {
    let store = store();
    let not_found = Err(StoreError::NotFound { bucket: "b".into(), key: json!(2) });
    let get = |key: Json| as_ann(&store, move |draft| Ok(draft.get("b", &key)?.is_some())).unwrap();
    assert_eq!((get(json!(1)), get(json!(2)), get(json!(9))), (true, false, false));
    assert_eq!(as_ann(&store, |draft| draft.update("b", &json!(2), Map::new(), None).map(drop)), not_found);
    for (key, version) in [(2, None), (2, Some(7)), (9, None), (9, Some(7))] {
        assert_eq!(as_ann(&store, move |draft| draft.delete("b", &json!(key), version)), Ok(false), "{key}");
    }
    assert_eq!(ids(&store, "b"), [1, 2, 3]);
    let count = json!({"bucket": "b", "aggregate": {"function": "sum", "field": "n"}});
    let sum = as_ann(&store, move |draft| draft.query(&Query::parse(&count)?));
    assert_eq!(sum, Ok(QueryOutput::Value(Some(json!(4)))));
    as_ann(&store, |draft| draft.clear("b")).unwrap();
    assert_eq!(ids(&store, "b"), [2]);
}

#[test]
fn written_record_must_match_the_row_filter_before_and_after() {
    let store = store();
    let forbidden = Err(StoreError::Forbidden { bucket: "b".into() });
    // The key is new, or that of a hidden record.
    for id in [4, 2] {
        for record in [json!({"id": id, "owner": "bob"}), json!({"id": id})] {
            let copy = record.clone();
            assert_eq!(as_ann(&store, |draft| draft.insert("b", record).map(drop)), forbidden);
            assert_eq!(as_ann(&store, |draft| draft.upsert("b", copy).map(drop)), forbidden);
        }
    }
    let give = |draft: &mut Draft| draft.update("b", &json!(1), json!({"owner": "bob"}), None).map(drop);
    assert_eq!(as_ann(&store, give), forbidden);
    // The key of a hidden record is not available, like a unique value.
    let taken = || "bucket \"b\": a record with id = 2 already exists".to_owned();
    let own = || json!({"id": 2, "owner": "ann"});
    assert_eq!(as_ann(&store, move |draft| draft.insert("b", own())).unwrap_err().to_string(), taken());
    assert_eq!(as_ann(&store, move |draft| draft.upsert("b", own())).unwrap_err().to_string(), taken());
    as_ann(&store, |draft| draft.insert("b", json!({"id": 1, "owner": "ann"}))).unwrap();
    as_ann(&store, |draft| draft.upsert("b", json!({"id": 4, "owner": "ann"}))).unwrap();
    assert_eq!(ids(&store, "b"), [1, 2, 3, 4]);
}

#[test]
fn operations_of_a_transaction_have_separate_row_filters() {
    let store = store();
    let operations = json!([
        {"op": "get", "bucket": "b", "key": 2},
        {"op": "count", "bucket": "b"},
        {"op": "where", "bucket": "b", "filter": {"id": {"$gte": 2}}},
        {"op": "get", "bucket": "b", "key": 2},
    ]);
    let mut operations = Operation::parse_all(&operations).unwrap();
    for operation in &mut operations[..3] {
        operation.row_filter = Some(Filter::parse(&json!({"owner": "ann"})).unwrap());
    }
    let results: Vec<Json> = store.transact(operations).wait().unwrap().iter().map(OperationResult::to_json).collect();
    assert_eq!((&results[0], &results[1]), (&Json::Null, &json!(2)));
    assert_eq!((results[2].as_array().unwrap().len(), &results[3]["id"]), (1, &json!(2)));
    let transact = |operation: Json| {
        let mut operations = Operation::parse_all(&json!([operation])).unwrap();
        operations[0].row_filter = Some(Filter::parse(&json!({"owner": "ann"})).unwrap());
        store.transact(operations).wait().map_err(|error| error.to_string())
    };
    for key in [2, 9] {
        assert_eq!(transact(json!({"op": "delete", "bucket": "b", "key": key})), Ok(vec![OperationResult::Deleted]));
    }
    let insert = |id: u64, owner: &str| json!({"op": "insert", "bucket": "b", "data": {"id": id, "owner": owner}});
    assert_eq!(transact(insert(2, "bob")), transact(insert(9, "bob")));
    let exists = "operations[0]: record 2 already exists in bucket \"b\"";
    assert_eq!(transact(insert(2, "ann")), Err(exists.to_owned()));
    assert_eq!(ids(&store, "b"), [1, 2, 3]);
}

#[test]
fn reference_to_a_hidden_record_is_rejected() {
    let store = store();
    let note = json!({"key": "id", "schema": {
        "id": {"type": "number"}, "of": {"type": "number", "ref": "b"}, "next": {"type": "number", "ref": "notes"},
    }});
    store.define_bucket("notes", note).wait().unwrap();
    let own = Filter::parse(&json!({"owner": "ann"})).unwrap();
    let references = ReferenceFilter::new(move |bucket| (bucket == "b").then(|| own.clone()));
    let write = |work: fn(&mut Draft, u64) -> Result<(), StoreError>, of: u64| {
        let references = references.clone();
        let written = store.write(move |draft| draft.with_reference_filter(&references, |draft| work(draft, of)));
        written.wait().map_err(|error| error.to_string())
    };
    let insert = |draft: &mut Draft, of: u64| draft.insert("notes", json!({"id": of, "of": of})).map(drop);
    let error = |of: u64| {
        format!("Validation failed for bucket \"notes\": of: references {of}, which does not exist in bucket \"b\"")
    };
    for of in [2, 9] {
        assert_eq!(write(insert, of), Err(error(of)));
    }
    assert_eq!(write(insert, 1), Ok(()));
    let change = |draft: &mut Draft, of: u64| draft.update("notes", &json!(1), json!({"of": of}), None).map(drop);
    for of in [2, 9] {
        assert_eq!(write(change, of), Err(error(of)));
    }
    // A bucket without a filter has no hidden records, and an unchanged reference is not checked.
    let next = |draft: &mut Draft, id: u64| draft.insert("notes", json!({"id": id, "next": 1})).map(drop);
    assert_eq!(write(next, 5), Ok(()));
    store.insert("notes", json!({"id": 7, "of": 2})).wait().unwrap();
    let keep = |draft: &mut Draft, of: u64| draft.update("notes", &json!(7), json!({"of": of, "n": 1}), None).map(drop);
    assert_eq!(write(keep, 2), Ok(()));
}
