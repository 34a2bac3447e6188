//! Records that refer to others.

use serde_json::{Value as Json, json};

use super::{object, records, store};

fn people() -> (&'static str, Json) {
    ("people", json!({"key": "id", "schema": {"id": {"type": "number"}}}))
}

fn person(on_delete: &str) -> Json {
    json!({"type": "number", "ref": "people", "onDelete": on_delete})
}

#[test]
fn a_record_that_refers_to_another_by_several_fields_does_not_keep_it() {
    for (other, left) in [("set_null", 1), ("cascade", 0)] {
        let schema = json!({"id": {"type": "number"}, "author": person("set_null"), "editor": person(other)});
        let store = store(&[people(), ("posts", json!({"key": "id", "schema": schema}))]);
        store.insert("people", object(json!({"id": 1}))).wait().unwrap();
        store.insert("posts", object(json!({"id": 1, "author": 1, "editor": 1}))).wait().unwrap();
        assert!(store.delete("people", json!(1), None).wait().unwrap());
        let posts = records(&store, "posts");
        assert_eq!(posts.len(), left, "{other}");
        assert!(posts.iter().all(|post| post["author"].is_null() && post["editor"].is_null()), "{posts:?}");
    }
}
