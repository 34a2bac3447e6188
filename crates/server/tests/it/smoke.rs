//! One session from the welcome message to the shutdown.

use std::time::Duration;

use serde_json::json;

use crate::client::{Client, notes_config, options, serve};

#[tokio::test(flavor = "multi_thread")]
async fn first_session() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.welcome["version"], "1.0.0");
    assert_eq!(client.welcome["requiresAuth"], false);
    let created = client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    assert_eq!(created, json!({"name": "notes", "created": true}));
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
    let subscribed = client.call("store.subscribe", json!({"query": "all"})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": []}));
    let note = client.call("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    let push = client.push().await;
    assert_eq!(push, json!({"type": "push", "channel": "subscription", "subscriptionId": "sub-1", "data": [note]}));
    let same = client.call("store.get", json!({"bucket": "notes", "key": note["id"]})).await;
    assert_eq!(same, note);
    let (code, error) = client.call_err("store.gett", json!({})).await;
    assert_eq!(code, "UNKNOWN_OPERATION");
    assert_eq!(error["message"], "Unknown operation \"store.gett\"; did you mean \"store.get\"?");
    assert_eq!(server.connection_count(), 1);
    let stats = client.call("server.stats", json!({})).await;
    assert_eq!(stats["connections"]["totalStoreSubscriptions"], 1);
    let stopping = tokio::spawn(server.stop(Duration::ZERO));
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
    drop(client);
    stopping.await.unwrap();
}
