//! Writes of one connection that are in flight together.

use serde_json::{Value as Json, json};

use crate::client::{Client, notes, options, serve};

const WRITES: u64 = 400;

/// A push did not wait for the reply to the last write in flight when the one before it had been answered, and then deltas came in
/// another order than they were made.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_follows_what_it_writes_hears_the_reply_first_and_everything_in_order() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    client.ask("store.insert", json!({"bucket": "notes", "data": {"id": "a", "text": "x", "rank": 0}})).await;
    let follow = |mode: &str| json!({"config": {"bucket": "notes"}, "mode": mode});
    let deltas = client.ask("store.subscribe", follow("delta")).await["subscriptionId"].clone();
    client.ask("store.subscribe", follow("whole")).await;

    let mut ids = Vec::new();
    let (mut sent, mut answered, mut heard) = (0, 0, 0);
    while heard < WRITES {
        // Two in flight, mostly.
        while sent < WRITES && sent < answered + 2 {
            sent += 1;
            let update = json!({"bucket": "notes", "key": "a", "data": {"rank": sent}});
            ids.push(client.send("store.update", update).await);
        }
        let message = client.receive().await;
        if let Some(id) = message.get("id") {
            assert_eq!(message["data"]["rank"], json!(answered + 1), "{message}");
            assert_eq!(*id, json!(ids[usize::try_from(answered).unwrap()]));
            answered += 1;
            continue;
        }
        let rank = rank(&message);
        assert!(rank <= answered, "write {rank} is pushed when {answered} are answered");
        if message["subscriptionId"] == deltas {
            assert!(rank > heard, "{message} comes after {heard}");
            heard = rank;
        }
    }
}

/// Of the one note that there is.
fn rank(push: &Json) -> u64 {
    let data = &push["data"];
    let rows = data.get("changed").or_else(|| data.get("reset")).unwrap_or(data);
    rows[0]["rank"].as_u64().unwrap_or_else(|| panic!("no note in {push}"))
}
