//! A commit that does not change the encoded result is not delivered.

use serde_json::{Value as Json, json};
use tidewire_live::Matcher;
use tidewire_store::Query;

use crate::client::{DecodedResult, current_result};
use crate::strategies::{CommitStep, TestStore};

/// Returns the results after the first and after all steps, and whether the last steps caused an update.
fn commit_and_compare(query: &Json, first: &[CommitStep], then: &[CommitStep]) -> (DecodedResult, DecodedResult, bool) {
    let mut store = TestStore::new(&json!({"key": "id", "schema": {"id": {"type": "number"}}}));
    let mut live = Matcher::new(store.position);
    live.commit(store.position, &store.commit(first));
    let mut query = query.clone();
    query["bucket"] = json!("b");
    let query = Query::parse(&query).unwrap();
    let query = live.subscribe(1, &query, store.state.bucket("b").unwrap(), store.now).unwrap();
    let before = current_result(&mut live, query);
    let changes = store.commit(then);
    let committed = live.commit(store.position, &changes);
    (before, current_result(&mut live, query), !committed.updates.is_empty())
}

fn insert(id: u8, record: Json) -> CommitStep {
    CommitStep::Insert(id, serde_json::from_value(record).unwrap())
}

fn update(id: u8, patch: Json) -> CommitStep {
    CommitStep::Update(id, serde_json::from_value(patch).unwrap())
}

#[test]
fn replacement_by_an_equal_row_is_not_delivered() {
    let query = json!({"fields": ["a"]});
    let first = [insert(1, json!({"a": "x"})), insert(2, json!({"a": "p"}))];
    let then = [CommitStep::Delete(1), update(2, json!({"a": "x"})), insert(3, json!({"a": "p"}))];
    let same = Some(json!([{"a": "x"}, {"a": "p"}]));
    assert_eq!(commit_and_compare(&query, &first, &then), (same.clone(), same.clone(), false));
    let then = [CommitStep::Delete(1), update(2, json!({"a": "x"})), insert(3, json!({"a": "y"}))];
    assert_eq!(commit_and_compare(&query, &first, &then), (same, Some(json!([{"a": "x"}, {"a": "y"}])), true));
}

#[test]
fn equal_result_after_a_change_is_not_delivered() {
    let query = json!({"filter": {"m": true}, "limit": 1, "fields": ["a"]});
    let first = [insert(0, json!({"m": false})), insert(1, json!({"m": true, "a": "x"}))];
    let then = [update(0, json!({"m": true, "a": "x"})), update(1, json!({"a": "z"}))];
    let same = Some(json!([{"a": "x"}]));
    assert_eq!(commit_and_compare(&query, &first, &then), (same.clone(), same.clone(), false));
    let then = [update(0, json!({"m": true, "a": "z"})), update(1, json!({"a": "z"}))];
    assert_eq!(commit_and_compare(&query, &first, &then), (same, Some(json!([{"a": "z"}])), true));
}

#[test]
fn row_deleted_and_inserted_in_the_same_position_is_not_delivered() {
    let first = [insert(1, json!({"a": 1})), insert(2, json!({"a": 2}))];
    let (before, after, is_delivered) =
        commit_and_compare(&json!({}), &first, &[CommitStep::Delete(2), insert(2, json!({"a": 2}))]);
    assert_eq!((before, is_delivered), (after, false));
    let (before, after, is_delivered) =
        commit_and_compare(&json!({}), &first, &[CommitStep::Delete(1), insert(1, json!({"a": 1}))]);
    assert!(before != after && is_delivered);
}

#[test]
fn changed_order_of_groups_is_delivered() {
    let query = json!({"aggregate": {"function": "max", "field": "n", "groupBy": "g"}});
    let first: Vec<CommitStep> =
        [(0, "a"), (1, "b"), (2, "b"), (3, "a")].map(|(id, group)| insert(id, json!({"g": group, "n": 1}))).into();
    let group = |name: &str| json!({"key": {"g": name}, "value": 1});
    let (before, after) = (Some(json!([group("a"), group("b")])), Some(json!([group("b"), group("a")])));
    assert_eq!(
        commit_and_compare(&query, &first, &[CommitStep::Delete(0), CommitStep::Delete(1)]),
        (before.clone(), after.clone(), true)
    );
    assert_eq!(commit_and_compare(&query, &first, &[CommitStep::Delete(0)]), (before.clone(), after, true));
    assert_eq!(commit_and_compare(&query, &first, &[CommitStep::Delete(1)]), (before.clone(), before, false));
}
