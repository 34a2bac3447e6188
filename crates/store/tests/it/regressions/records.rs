//! Records that reach limits, and lists of records.

use serde_json::json;
use tidewire_store::{Limits, Store, StoreError, StoreOptions};

use super::{define, records, refusal, store};

#[test]
fn reported_issues_are_limited() {
    let allowed: Vec<String> = (0..1000).map(|value| format!("value {value}")).collect();
    let tags = json!({"type": "array", "items": {"type": "string", "enum": allowed}});
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}, "tags": tags}}))]);
    let record = json!({"id": 1, "tags": vec!["x"; 10_000]});
    let refused = refusal(store.insert("b", record).wait());
    let StoreError::Validation(error) = &refused else { panic!("{refused}") };
    assert_eq!(error.issues[0].field, "tags[0]");
    assert!(error.issues.len() <= 100, "{} issues", error.issues.len());
    assert!(refused.to_string().len() < 100_000, "{} bytes", refused.to_string().len());
}

#[test]
fn record_at_maximum_depth_survives_a_round_trip() {
    let store = Store::memory(StoreOptions::default().limits(Limits::default().max_depth(1000)));
    define(&store, &[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    for depth in 0..300 {
        let deep = (0..depth).fold(json!(1), |inner, _| json!([inner]));
        let Ok(row) = store.insert("b", json!({"id": 1, "deep": deep})).wait() else {
            assert!(depth > 64, "{depth} is not deep");
            break;
        };
        assert_eq!(row.to_record().get("deep"), Some(&deep), "{depth}");
        let updated = store.update("b", json!(1), json!({"n": 1}), None).wait().unwrap().to_record();
        assert_eq!(updated.get("deep"), Some(&deep), "{depth}");
        let once = store.write(move |draft| {
            let work = |draft: &mut tidewire_store::Draft| {
                Ok(json!({"results": [{"data": draft.get("b", &json!(1))?.map(tidewire_store::Row::to_record)}]}))
            };
            draft.once("u", &depth.to_string(), "r", work)?;
            draft.once("u", &depth.to_string(), "r", work)
        });
        assert_eq!(once.wait().unwrap()["results"][0]["data"]["deep"], deep, "{depth}");
    }
}

#[test]
fn rejected_record_of_a_list_is_reported_by_index() {
    let schema = json!({"id": {"type": "number"}, "name": {"type": "string", "unique": true}});
    let store = store(&[("b", json!({"key": "id", "schema": schema}))]);
    let names = ["a", "b", "c", "a", "x"];
    let same: Vec<_> = names.iter().enumerate().map(|(id, name)| json!({"id": id, "name": name})).collect();
    let refused = refusal(store.insert_many("b", same.clone()).wait());
    assert_eq!(refused.to_string(), "data[3]: bucket \"b\": a record with name = \"a\" already exists");
    let StoreError::Record { index: 3, source } = refused else { panic!("{refused}") };
    assert!(matches!(*source, StoreError::NotUnique { .. }), "{source}");
    let wrong = vec![json!({"id": 1}), json!({"id": "x"})];
    let refused = refusal(store.insert_many("b", wrong).wait());
    assert_eq!(refused.to_string(), "data[1]: Validation failed for bucket \"b\": id: must be a number");
    assert!(records(&store, "b").is_empty());
    // An unknown bucket is not an error of a record.
    let refused = refusal(store.insert_many("none", same).wait());
    assert!(matches!(refused, StoreError::BucketNotDefined { .. }), "{refused}");
}
