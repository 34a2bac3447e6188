//! A server with a bucket of tides and a fixed clock, so that tests can compare whole records.

use serde_json::{Value as Json, json};
use tidewire::{Server, ServerOptions};
use tidewire_store::{Clock, Store, StoreOptions};

use crate::client::{Client, RpcClient, options, serve_store};

/// The time of the fixed clock, in milliseconds since the epoch.
pub(crate) const NOW: u64 = 1_000_000;

pub(crate) fn store_options() -> StoreOptions {
    StoreOptions::default().clock(Clock::new(|| NOW))
}

/// Returns the configuration of a bucket of tides: `id` counts from 1, `port` is required, `level` is an indexed number, `code` is unique.
pub(crate) fn tides_config() -> Json {
    json!({
        "key": "id",
        "schema": {
            "id": {"type": "number", "generated": "autoincrement"},
            "port": {"type": "string", "required": true},
            "level": {"type": "number"},
            "code": {"type": "string", "unique": true},
        },
        "indexes": ["level"],
    })
}

/// Returns a newly inserted tide.
pub(crate) fn tide(id: u64, port: &str, level: impl Into<Json>) -> Json {
    let level: Json = level.into();
    json!({"id": id, "port": port, "level": level, "_version": 1, "_createdAt": NOW, "_updatedAt": NOW})
}

/// Starts a server with the bucket, and a WebSocket client.
pub(crate) async fn serve_tides() -> (Server, Client) {
    serve_tides_with(options()).await
}

pub(crate) async fn serve_tides_with(options: ServerOptions) -> (Server, Client) {
    let server = serve_store(Store::memory(store_options()), options).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    (server, client)
}

/// Starts a server with the bucket, and an in-process client.
pub(crate) async fn serve_tides_locally() -> (Server, tidewire::Client) {
    let server = serve_store(Store::memory(store_options()), options()).await;
    let mut client = server.client(None);
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    (server, client)
}

/// Inserts tides with these ports and levels.
pub(crate) async fn insert_tides(client: &mut impl RpcClient, tides: &[(&str, i64)]) {
    for (port, level) in tides {
        client.call("store.insert", json!({"bucket": "tides", "data": {"port": port, "level": level}})).await;
    }
}

/// The tides that most tests insert.
pub(crate) const FOUR_TIDES: [(&str, i64); 4] = [("Hook", 3), ("Brest", 7), ("Cuxhaven", -2), ("Hook", 5)];

/// Asserts that each of these parameters is rejected when it is missing or has one of the wrong values. The message must name the
/// parameter and the expected type, without details.
pub(crate) async fn expect_invalid_params(
    client: &mut impl RpcClient,
    operation: &str,
    good: Json,
    wrong: &[(&str, &[Json], &str)],
) {
    for (name, values, expected) in wrong {
        for value in *values {
            let mut params = good.clone();
            // Null is tested as a value and as a missing parameter.
            params[*name] = value.clone();
            expect_invalid_param(client, operation, &params, name, expected).await;
            if value.is_null() {
                params.as_object_mut().unwrap().remove(*name);
                expect_invalid_param(client, operation, &params, name, expected).await;
            }
        }
    }
}

async fn expect_invalid_param(client: &mut impl RpcClient, operation: &str, params: &Json, name: &str, expected: &str) {
    let (code, error) = client.call_err(operation, params.clone()).await;
    assert_eq!(code, "VALIDATION_ERROR", "{operation} {params}: {error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(name) && message.contains(expected), "{operation} {params}: {message}");
    assert!(error.get("details").is_none(), "{operation} {params}: {error}");
}

/// Asserts that a request fails with this code and no details. Returns the message.
pub(crate) async fn expect_error(client: &mut impl RpcClient, operation: &str, params: Json, code: &str) -> String {
    let (found, error) = client.call_err(operation, params.clone()).await;
    assert_eq!(found, code, "{operation} {params}: {error}");
    let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys.len(), 4, "expected id, type, code and message: {error}");
    error["message"].as_str().unwrap().to_owned()
}

/// Asserts that a request fails with this code and these details. Returns the message.
pub(crate) async fn expect_error_details(
    client: &mut impl RpcClient,
    operation: &str,
    params: Json,
    code: &str,
    details: Json,
) -> String {
    let (found, error) = client.call_err(operation, params.clone()).await;
    assert_eq!(found, code, "{operation} {params}: {error}");
    assert_eq!(error["details"], details, "{operation} {params}: {error}");
    error["message"].as_str().unwrap().to_owned()
}
