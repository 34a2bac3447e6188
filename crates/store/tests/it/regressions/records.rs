//! Records that nobody in their right mind would write.

use serde_json::json;
use tidewire_store::{Store, StoreError, StoreOptions};

use super::{define, object, refusal, store};

#[test]
fn a_record_with_a_thousand_faults_is_not_told_of_all() {
    let allowed: Vec<String> = (0..1000).map(|value| format!("value {value}")).collect();
    let tags = json!({"type": "array", "items": {"type": "string", "enum": allowed}});
    let store = store(&[("b", json!({"key": "id", "schema": {"id": {"type": "number"}, "tags": tags}}))]);
    let record = object(json!({"id": 1, "tags": vec!["x"; 10_000]}));
    let refused = refusal(store.insert("b", record).wait());
    let StoreError::Validation(error) = &refused else { panic!("{refused}") };
    assert_eq!(error.issues[0].field, "tags[0]");
    assert!(error.issues.len() <= 100, "{} issues", error.issues.len());
    assert!(refused.to_string().len() < 100_000, "{} bytes", refused.to_string().len());
}

#[test]
fn a_record_as_deep_as_may_be_is_read_as_it_was_written() {
    let mut options = StoreOptions::default();
    options.limits.max_depth = 1000;
    let store = Store::memory(options);
    define(&store, &[("b", json!({"key": "id", "schema": {"id": {"type": "number"}}}))]);
    for depth in 0..300 {
        let deep = (0..depth).fold(json!(1), |inner, _| json!([inner]));
        let Ok(row) = store.insert("b", object(json!({"id": 1, "deep": deep}))).wait() else {
            assert!(depth > 64, "{depth} is not deep");
            break;
        };
        assert_eq!(row.to_record().get("deep"), Some(&deep), "{depth}");
        let updated = store.update("b", json!(1), object(json!({"n": 1})), None).wait().unwrap().to_record();
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
