//! A result that looks the same is not delivered, and any other is.

use serde_json::{Value as Json, json};
use tidewire_live::Matcher;
use tidewire_store::Query;

use crate::follower::{Shown, whole};
use crate::world::{CommitStep, World};

/// Returns the results after the first and after all steps, and whether the last steps caused an update.
fn follow(query: &Json, first: &[CommitStep], then: &[CommitStep]) -> (Shown, Shown, bool) {
    let mut world = World::new(&json!({"key": "id", "schema": {"id": {"type": "number"}}}));
    let mut live = Matcher::new(world.position);
    live.commit(world.position, &world.commit(first));
    let mut query = query.clone();
    query["bucket"] = json!("b");
    let query = Query::parse(&query).unwrap();
    let query = live.subscribe(1, &query, world.state.bucket("b").unwrap(), world.now).unwrap();
    let before = whole(&mut live, query);
    let changes = world.commit(then);
    let committed = live.commit(world.position, &changes);
    (before, whole(&mut live, query), !committed.updates.is_empty())
}

fn insert(id: u8, record: Json) -> CommitStep {
    CommitStep::Insert(id, serde_json::from_value(record).unwrap())
}

fn update(id: u8, patch: Json) -> CommitStep {
    CommitStep::Update(id, serde_json::from_value(patch).unwrap())
}

#[test]
fn replacement_by_an_equal_looking_row_is_not_delivered() {
    let query = json!({"fields": ["a"]});
    let first = [insert(1, json!({"a": "x"})), insert(2, json!({"a": "p"}))];
    let then = [CommitStep::Delete(1), update(2, json!({"a": "x"})), insert(3, json!({"a": "p"}))];
    let same = Some(json!([{"a": "x"}, {"a": "p"}]));
    assert_eq!(follow(&query, &first, &then), (same.clone(), same.clone(), false));
    let then = [CommitStep::Delete(1), update(2, json!({"a": "x"})), insert(3, json!({"a": "y"}))];
    assert_eq!(follow(&query, &first, &then), (same, Some(json!([{"a": "x"}, {"a": "y"}])), true));
}

#[test]
fn equal_looking_row_after_a_change_is_not_delivered() {
    let query = json!({"filter": {"m": true}, "limit": 1, "fields": ["a"]});
    let first = [insert(0, json!({"m": false})), insert(1, json!({"m": true, "a": "x"}))];
    let then = [update(0, json!({"m": true, "a": "x"})), update(1, json!({"a": "z"}))];
    let same = Some(json!([{"a": "x"}]));
    assert_eq!(follow(&query, &first, &then), (same.clone(), same.clone(), false));
    let then = [update(0, json!({"m": true, "a": "z"})), update(1, json!({"a": "z"}))];
    assert_eq!(follow(&query, &first, &then), (same, Some(json!([{"a": "z"}])), true));
}

#[test]
fn row_deleted_and_inserted_in_the_same_position_is_not_delivered() {
    let first = [insert(1, json!({"a": 1})), insert(2, json!({"a": 2}))];
    let (before, after, is_told) = follow(&json!({}), &first, &[CommitStep::Delete(2), insert(2, json!({"a": 2}))]);
    assert_eq!((before, is_told), (after, false));
    let (before, after, is_told) = follow(&json!({}), &first, &[CommitStep::Delete(1), insert(1, json!({"a": 1}))]);
    assert!(before != after && is_told);
}

#[test]
fn changed_order_of_groups_is_delivered() {
    let query = json!({"aggregate": {"function": "max", "field": "n", "groupBy": "g"}});
    let first: Vec<CommitStep> =
        [(0, "a"), (1, "b"), (2, "b"), (3, "a")].map(|(id, group)| insert(id, json!({"g": group, "n": 1}))).into();
    let group = |name: &str| json!({"key": {"g": name}, "value": 1});
    let (before, after) = (Some(json!([group("a"), group("b")])), Some(json!([group("b"), group("a")])));
    assert_eq!(
        follow(&query, &first, &[CommitStep::Delete(0), CommitStep::Delete(1)]),
        (before.clone(), after.clone(), true)
    );
    assert_eq!(follow(&query, &first, &[CommitStep::Delete(0)]), (before.clone(), after, true));
    assert_eq!(follow(&query, &first, &[CommitStep::Delete(1)]), (before.clone(), before, false));
}
