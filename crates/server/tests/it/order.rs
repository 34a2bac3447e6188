//! The order in which a subscription is told of changes.

use serde_json::json;

use crate::client::{Client, notes, options, serve};

#[tokio::test(flavor = "multi_thread")]
async fn deltas_come_in_order_whoever_writes() {
    let server = serve(options()).await;
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    one.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    let first = one.ask("store.subscribe", json!({"config": {"bucket": "notes"}, "mode": "delta"})).await;
    let mut last = first["pos"].as_str().unwrap().to_owned();
    let insert = || json!({"bucket": "notes", "data": {"text": "tide"}});
    for _ in 0..300 {
        // One's own change waits for its reply; those of others do not, and must not overtake it.
        let (own, other) = (one.send("store.insert", insert()).await, two.send("store.insert", insert()).await);
        one.reply(own).await;
        two.reply(other).await;
        for _ in 0..2 {
            let push = one.push().await;
            let position = push["pos"].as_str().unwrap();
            assert!(position > last.as_str(), "{position} comes after {last}");
            position.clone_into(&mut last);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_comes_after_the_end() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    for _ in 0..200 {
        client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
        client.ask("store.subscribe", json!({"config": {"bucket": "notes"}, "mode": "delta"})).await;
        client.ask("store.insert", json!({"bucket": "notes", "data": {"text": "tide"}})).await;
        client.ask("store.dropBucket", json!({"name": "notes"})).await;
        let mut ended = client.push().await;
        while ended.get("error").is_none() {
            ended = client.push().await;
        }
        assert_eq!(ended["error"]["code"], "BUCKET_NOT_DEFINED");
        assert!(client.is_silent().await);
    }
}
