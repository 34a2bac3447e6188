//! References between records.

use serde_json::{Value as Json, json};
use tidewire_store::StoreError;

use super::{records, refusal, store};

fn people() -> (&'static str, Json) {
    ("people", json!({"key": "id", "schema": {"id": {"type": "number"}}}))
}

fn person(on_delete: &str) -> Json {
    json!({"type": "number", "ref": "people", "onDelete": on_delete})
}

#[test]
fn set_null_handles_several_references_of_one_record() {
    for (other, left) in [("set_null", 1), ("cascade", 0)] {
        let schema = json!({"id": {"type": "number"}, "author": person("set_null"), "editor": person(other)});
        let store = store(&[people(), ("posts", json!({"key": "id", "schema": schema}))]);
        store.insert("people", json!({"id": 1})).wait().unwrap();
        store.insert("posts", json!({"id": 1, "author": 1, "editor": 1})).wait().unwrap();
        assert!(store.delete("people", json!(1), None).wait().unwrap());
        let posts = records(&store, "posts");
        assert_eq!(posts.len(), left, "{other}");
        assert!(posts.iter().all(|post| post["author"].is_null() && post["editor"].is_null()), "{posts:?}");
    }
}

#[test]
fn record_cannot_reference_a_record_it_evicts() {
    let parent = json!({"type": "number", "ref": "b", "onDelete": "cascade"});
    let schema = json!({"id": {"type": "number"}, "parent": parent});
    let store = store(&[("b", json!({"key": "id", "schema": schema, "maxSize": 2}))]);
    store.insert("b", json!({"id": 1})).wait().unwrap();
    store.insert("b", json!({"id": 2, "parent": 1})).wait().unwrap();
    for parent in [1, 2] {
        let refused = refusal(store.insert("b", json!({"id": 3, "parent": parent})).wait());
        let why = format!(
            "Validation failed for bucket \"b\": parent: references {parent}, which does not exist in bucket \"b\""
        );
        assert_eq!(refused.to_string(), why);
        assert_eq!(records(&store, "b").len(), 2, "the evicted record was restored");
    }
    store.insert("b", json!({"id": 3, "parent": 3})).wait().unwrap();
    assert_eq!(records(&store, "b").len(), 1);
}

#[test]
fn bucket_with_references_to_itself_can_be_cleared() {
    let parent = json!({"type": "number", "ref": "b"});
    let (id, tree) = (json!({"type": "number"}), json!({"type": "number", "ref": "b"}));
    let other = json!({"key": "id", "schema": {"id": id, "tree": tree}});
    let store = store(&[("b", json!({"key": "id", "schema": {"id": id, "parent": parent}})), ("other", other)]);
    store.insert("b", json!({"id": 1})).wait().unwrap();
    store.insert("b", json!({"id": 2, "parent": 1})).wait().unwrap();
    store.insert("other", json!({"id": 1, "tree": 2})).wait().unwrap();
    refusal(store.clear("b").wait());
    assert_eq!(records(&store, "b").len(), 2);
    store.delete("other", json!(1), None).wait().unwrap();
    store.clear("b").wait().unwrap();
    assert_eq!(records(&store, "b").len(), 0);
}

#[test]
fn record_violating_a_newer_schema_does_not_block_deletes() {
    let schema = json!({"id": {"type": "number"}, "author": person("set_null")});
    let store = store(&[people(), ("posts", json!({"key": "id", "schema": schema}))]);
    store.insert("people", json!({"id": 1})).wait().unwrap();
    store.insert("posts", json!({"id": 1, "author": 1})).wait().unwrap();
    let added = json!({"addFields": {"title": {"type": "string", "required": true}}});
    store.update_bucket("posts", added).wait().unwrap();
    assert!(store.delete("people", json!(1), None).wait().unwrap());
    assert!(records(&store, "posts")[0]["author"].is_null());
}

#[test]
fn required_reference_blocks_set_null() {
    let mut author = person("set_null");
    author["required"] = json!(true);
    let schema = json!({"id": {"type": "number"}, "author": author});
    let store = store(&[people(), ("posts", json!({"key": "id", "schema": schema}))]);
    store.insert("people", json!({"id": 1})).wait().unwrap();
    store.insert("posts", json!({"id": 1, "author": 1})).wait().unwrap();
    let refused = refusal(store.delete("people", json!(1), None).wait());
    assert_eq!(refused.to_string(), "Validation failed for bucket \"posts\": author: is required");
    assert_eq!(records(&store, "people").len(), 1);
}

#[test]
fn referenced_bucket_cannot_be_dropped() {
    let refers = |target: &str| json!({"type": "number", "ref": target, "onDelete": "cascade"});
    let person = json!({"key": "id", "schema": {"id": {"type": "number"}, "boss": refers("people")}});
    let post = json!({"key": "id", "schema": {"id": {"type": "number"}, "author": refers("people"), "editor": refers("people")}});
    let note = json!({"key": "id", "schema": {"id": {"type": "number"}, "by": refers("people")}});
    let store = store(&[("people", person), ("posts", post), ("notes", note)]);
    store.insert("people", json!({"id": 1, "boss": 1})).wait().unwrap();
    let refused = refusal(store.drop_bucket("people").wait());
    assert_eq!(
        refused.to_string(),
        "bucket \"people\" is referenced by \"posts\" (field author), \"posts\" (field editor), \"notes\" (field by); \
         drop those buckets first"
    );
    let StoreError::BucketReferenced { bucket, by, others } = refused else { panic!("{refused}") };
    let by: Vec<_> = by.iter().map(|referrer| (&referrer.bucket[..], &referrer.field[..])).collect();
    assert_eq!(bucket, "people");
    assert_eq!((by, others), (vec![("posts", "author"), ("posts", "editor"), ("notes", "by")], 0));
    assert_eq!(records(&store, "people").len(), 1);
    store.drop_bucket("posts").wait().unwrap();
    refusal(store.drop_bucket("people").wait());
    // Also in one write. References of the bucket to itself do not count.
    let both = store.write(|draft| {
        draft.drop_bucket("notes")?;
        draft.drop_bucket("people")
    });
    both.wait().unwrap();
    assert_eq!(store.snapshot().state.names().len(), 0);
}

#[test]
fn error_lists_a_limited_number_of_referrers() {
    let fields: serde_json::Map<String, Json> = (0..50)
        .map(|n| (format!("f{n}"), json!({"type": "number", "ref": "people"})))
        .chain([("id".to_owned(), json!({"type": "number"}))])
        .collect();
    let store = store(&[people(), ("posts", json!({"key": "id", "schema": fields}))]);
    let refused = refusal(store.drop_bucket("people").wait());
    assert!(
        refused.to_string().ends_with("\"posts\" (field f19) and 30 other fields; drop those buckets first"),
        "{refused}"
    );
}
