//! Records that nobody in their right mind would write.

use serde_json::json;
use tidewire_store::StoreError;

use super::{object, refusal, store};

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
