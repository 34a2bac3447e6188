//! Queries that exceed the limits of their options.

use serde_json::{Value as Json, json};
use tidewire_store::Query;

#[test]
fn query_options_are_limited() {
    let names: Vec<String> = (0..100_000).map(|name| format!("f{name}")).collect();
    let parse = |query: Json| Query::parse(&query);
    let wrong = parse(json!({"bucket": "b", "fields": names})).unwrap_err();
    assert_eq!(wrong.to_string(), "`fields` must be a list of at most 1000 field names");
    let wrong = parse(json!({"bucket": "b", "aggregate": {"function": "count", "groupBy": names}})).unwrap_err();
    assert_eq!(wrong.to_string(), "`aggregate.groupBy` must be a list of at most 32 field names");
    assert!(parse(json!({"bucket": "b", "fields": names[..1000]})).is_ok());
}
