//! Row permissions: a filter that binds reads and writes.

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Answer, Draft, Filter, Operation, OperationResult, Query, Store, StoreError, WriteError};

use super::{ids, object, options};

fn store() -> Store {
    let store = Store::memory(options());
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}, "owner": {"type": "string"}}});
    store.define_bucket("b", config).wait().unwrap();
    for (id, owner) in [(1, "ann"), (2, "bob"), (3, "ann")] {
        store.insert("b", object(json!({"id": id, "owner": owner, "n": id}))).wait().unwrap();
    }
    store
}

fn as_ann<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let guard = Filter::parse(&json!({"owner": "ann"}), &Map::new()).unwrap();
    match store.write(move |draft| draft.guarded(&guard, work)).wait() {
        Ok(done) => Ok(done),
        Err(WriteError::Refused(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_is_hidden_is_not_there() {
    let store = store();
    let not_found = Err(StoreError::NotFound { bucket: "b".into(), key: json!(2) });
    let get = |key: Json| as_ann(&store, move |draft| Ok(draft.get("b", &key)?.is_some())).unwrap();
    assert_eq!((get(json!(1)), get(json!(2)), get(json!(9))), (true, false, false));
    assert_eq!(as_ann(&store, |draft| draft.update("b", &json!(2), Map::new(), None).map(drop)), not_found);
    assert_eq!(as_ann(&store, |draft| draft.delete("b", &json!(2), None).map(drop)), not_found);
    assert_eq!(as_ann(&store, |draft| draft.delete("b", &json!(9), None)), Ok(false));
    let count = json!({"bucket": "b", "aggregate": {"function": "sum", "field": "n"}});
    let sum = as_ann(&store, move |draft| draft.query(&Query::parse(&count, &Map::new())?));
    assert_eq!(sum, Ok(Answer::Value(Some(json!(4)))));
    as_ann(&store, |draft| draft.clear("b")).unwrap();
    assert_eq!(ids(&store, "b"), [2]);
}

#[test]
fn a_write_must_match_before_and_after() {
    let store = store();
    let forbidden = Err(StoreError::Forbidden { bucket: "b".into() });
    for record in [json!({"id": 4, "owner": "bob"}), json!({"id": 4}), json!({"id": 2, "owner": "ann"})] {
        assert_eq!(as_ann(&store, |draft| draft.insert("b", object(record)).map(drop)), forbidden);
    }
    let give = |draft: &mut Draft| draft.update("b", &json!(1), object(json!({"owner": "bob"})), None).map(drop);
    assert_eq!(as_ann(&store, give), forbidden);
    let take = |draft: &mut Draft| draft.upsert("b", object(json!({"id": 2, "owner": "ann"}))).map(drop);
    assert_eq!(as_ann(&store, take), Err(StoreError::NotFound { bucket: "b".into(), key: json!(2) }));
    as_ann(&store, |draft| draft.insert("b", object(json!({"id": 1, "owner": "ann"})))).unwrap();
    as_ann(&store, |draft| draft.upsert("b", object(json!({"id": 4, "owner": "ann"})))).unwrap();
    assert_eq!(ids(&store, "b"), [1, 2, 3, 4]);
}

#[test]
fn operations_of_a_transaction_are_bound_one_by_one() {
    let store = store();
    let operations = json!([
        {"op": "get", "bucket": "b", "key": 2},
        {"op": "count", "bucket": "b"},
        {"op": "where", "bucket": "b", "filter": {"id": {"$gte": 2}}},
        {"op": "get", "bucket": "b", "key": 2},
    ]);
    let mut operations = Operation::parse_all(&operations).unwrap();
    for operation in &mut operations[..3] {
        operation.guard = Some(Filter::parse(&json!({"owner": "ann"}), &Map::new()).unwrap());
    }
    let results: Vec<Json> = store.transact(operations).wait().unwrap().iter().map(OperationResult::to_json).collect();
    assert_eq!((&results[0], &results[1]), (&Json::Null, &json!(2)));
    assert_eq!((results[2].as_array().unwrap().len(), &results[3]["id"]), (1, &json!(2)));
    let mut operations = Operation::parse_all(&json!([{"op": "delete", "bucket": "b", "key": 2}])).unwrap();
    operations[0].guard = Some(Filter::parse(&json!({"owner": "ann"}), &Map::new()).unwrap());
    assert_eq!(
        store.transact(operations).wait().unwrap_err().to_string(),
        "operations[0]: there is no record 2 in bucket \"b\""
    );
}
