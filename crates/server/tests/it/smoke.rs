//! A first session, from the first message to the last.

use std::time::Duration;

use serde_json::json;

use crate::client::{Client, notes, options, serve};

#[tokio::test(flavor = "multi_thread")]
async fn a_first_session() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.welcome["version"], "1.0.0");
    assert_eq!(client.welcome["requiresAuth"], false);
    let created = client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    assert_eq!(created, json!({"name": "notes", "created": true}));
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
    let subscribed = client.ask("store.subscribe", json!({"query": "all"})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": []}));
    let note = client.ask("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    let push = client.push().await;
    assert_eq!(push, json!({"type": "push", "channel": "subscription", "subscriptionId": "sub-1", "data": [note]}));
    let same = client.ask("store.get", json!({"bucket": "notes", "key": note["id"]})).await;
    assert_eq!(same, note);
    let (code, error) = client.fail("store.gett", json!({})).await;
    assert_eq!(code, "UNKNOWN_OPERATION");
    assert_eq!(error["message"], "Unknown operation \"store.gett\"; did you mean \"store.get\"?");
    assert_eq!(server.connection_count(), 1);
    let stats = client.ask("server.stats", json!({})).await;
    assert_eq!(stats["connections"]["totalStoreSubscriptions"], 1);
    let stopping = tokio::spawn(server.stop(Duration::ZERO));
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
    drop(client);
    stopping.await.unwrap();
}
