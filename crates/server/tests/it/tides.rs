//! A server with a bucket of tides, and a clock that stands still: records are known to the last field.

use serde_json::{Value as Json, json};
use tidewire::{Server, ServerOptions};
use tidewire_store::{Clock, Store, StoreOptions};

use crate::client::{Ask, Client, options, serve_store};

/// What the clock says.
pub(crate) const NOW: u64 = 1_000_000;

pub(crate) fn store_options() -> StoreOptions {
    StoreOptions::default().clock(Clock::new(|| NOW))
}

/// Keys count from 1, `port` has to be there, `level` is a number with an index, no two have the same `code`.
pub(crate) fn tides() -> Json {
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

/// A tide as it is when it is new.
pub(crate) fn tide(id: u64, port: &str, level: impl Into<Json>) -> Json {
    let level: Json = level.into();
    json!({"id": id, "port": port, "level": level, "_version": 1, "_createdAt": NOW, "_updatedAt": NOW})
}

/// A server with the bucket, and a client of it.
pub(crate) async fn serve_tides() -> (Server, Client) {
    serve_tides_with(options()).await
}

pub(crate) async fn serve_tides_with(options: ServerOptions) -> (Server, Client) {
    let server = serve_store(Store::memory(store_options()), options).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    (server, client)
}

/// A server with the bucket, and an in-process client of it.
pub(crate) async fn serve_tides_locally() -> (Server, tidewire::Client) {
    let server = serve_store(Store::memory(store_options()), options()).await;
    let mut client = server.client(None);
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    (server, client)
}

/// Inserts tides: ports and levels.
pub(crate) async fn fill(client: &mut impl Ask, tides: &[(&str, i64)]) {
    for (port, level) in tides {
        client.ask("store.insert", json!({"bucket": "tides", "data": {"port": port, "level": level}})).await;
    }
}

/// The four of most tests.
pub(crate) const FOUR: [(&str, i64); 4] = [("Hook", 3), ("Brest", 7), ("Cuxhaven", -2), ("Hook", 5)];

/// That each of these parameters is refused when it is missing or something else, with a message that names it and what was
/// expected, and without details.
pub(crate) async fn refuses(client: &mut impl Ask, operation: &str, good: Json, wrong: &[(&str, &[Json], &str)]) {
    for (name, values, expected) in wrong {
        for value in *values {
            let mut params = good.clone();
            // A null stands for what is missing, and for itself.
            params[*name] = value.clone();
            expect_refusal(client, operation, &params, name, expected).await;
            if value.is_null() {
                params.as_object_mut().unwrap().remove(*name);
                expect_refusal(client, operation, &params, name, expected).await;
            }
        }
    }
}

async fn expect_refusal(client: &mut impl Ask, operation: &str, params: &Json, name: &str, expected: &str) {
    let (code, error) = client.fail(operation, params.clone()).await;
    assert_eq!(code, "VALIDATION_ERROR", "{operation} {params}: {error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(name) && message.contains(expected), "{operation} {params}: {message}");
    assert!(error.get("details").is_none(), "{operation} {params}: {error}");
}

/// That an error is this one, and has no details.
pub(crate) async fn fails(client: &mut impl Ask, operation: &str, params: Json, code: &str) -> String {
    let (found, error) = client.fail(operation, params.clone()).await;
    assert_eq!(found, code, "{operation} {params}: {error}");
    let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys.len(), 4, "id, type, code and message: {error}");
    error["message"].as_str().unwrap().to_owned()
}

/// That an error is this one, with these details.
pub(crate) async fn fails_with(
    client: &mut impl Ask,
    operation: &str,
    params: Json,
    code: &str,
    details: Json,
) -> String {
    let (found, error) = client.fail(operation, params.clone()).await;
    assert_eq!(found, code, "{operation} {params}: {error}");
    assert_eq!(error["details"], details, "{operation} {params}: {error}");
    error["message"].as_str().unwrap().to_owned()
}
