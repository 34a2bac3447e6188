//! What must hold, each found where it did not.

mod resume;

use serde_json::{Map, Value as Json, json};

fn object(json: Json) -> Map<String, Json> {
    serde_json::from_value(json).unwrap()
}

fn plain() -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}}})
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
}
