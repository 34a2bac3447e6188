//! Ordering: replies in request order, the reply to a write before its push, pushes in commit order.

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

use crate::client::{Client, notes_config, options, serve, serve_store};
use crate::tides_server::{serve_tides, tides_config};

/// The ids of answered requests, and the pushes, each with the number of replies before it.
struct Received {
    answered: Vec<u64>,
    pushes: Vec<(usize, Json)>,
}

/// Reads until this many replies and a push that satisfies `is_last` have arrived.
async fn receive_until(client: &mut Client, replies: usize, is_last: impl Fn(&Json) -> bool) -> Received {
    let mut received = Received { answered: Vec::new(), pushes: Vec::new() };
    let mut has_last = false;
    while received.answered.len() < replies || !has_last {
        let message = client.receive().await;
        if let Some(id) = message["id"].as_u64() {
            assert_eq!(message["type"], "result", "{message}");
            received.answered.push(id);
        } else {
            has_last |= is_last(&message);
            received.pushes.push((received.answered.len(), message));
        }
    }
    received
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_to_a_write_precedes_its_push() {
    let (_server, mut client) = serve_tides().await;
    let subscribed = client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    assert_eq!(subscribed["data"], json!([]));
    let mut sent = Vec::new();
    for level in 0..50 {
        sent.push(
            client.send("store.insert", json!({"bucket": "tides", "data": {"port": "Hook", "level": level}})).await,
        );
    }
    let received = receive_until(&mut client, 50, |push| push["data"].as_array().unwrap().len() == 50).await;
    assert_eq!(received.answered, sent);
    let mut before = 0;
    for (answered, push) in received.pushes {
        let records = push["data"].as_array().unwrap();
        assert!(records.len() <= answered, "a push shows {} records after {answered} replies", records.len());
        assert!(records.len() > before, "each push shows more than the one before");
        before = records.len();
        let levels: Vec<&Json> = records.iter().map(|tide| &tide["level"]).collect();
        assert!(levels.iter().enumerate().all(|(index, level)| **level == json!(index)), "{levels:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_to_subscribe_precedes_its_first_push() {
    let (server, mut writer) = serve_tides().await;
    let mut client = Client::connect(&server).await;
    // Another client writes during the whole test.
    let writing = tokio::spawn(async move {
        for level in 0..200 {
            let data = json!({"port": "Hook", "level": level});
            writer.call("store.insert", json!({"bucket": "tides", "data": data})).await;
        }
    });
    let config = json!({"bucket": "tides", "aggregate": {"function": "count"}});
    let mut subscriptions: Vec<(String, u64)> = Vec::new();
    let mut sent = 0;
    let mut last = 0;
    while last < 200 || sent < 40 || subscriptions.len() < 40 {
        if sent < 40 && sent == subscriptions.len() {
            client.send("store.subscribe", json!({"config": config})).await;
            sent += 1;
        }
        let message = client.receive().await;
        if message.get("id").is_some() {
            let data = &message["data"];
            subscriptions.push((data["subscriptionId"].as_str().unwrap().to_owned(), data["data"].as_u64().unwrap()));
            last = last.max(data["data"].as_u64().unwrap());
            continue;
        }
        let (_, seen) = subscriptions
            .iter_mut()
            .find(|(id, _)| message["subscriptionId"] == json!(id))
            .expect("no reply to subscribe before its push");
        let count = message["data"].as_u64().unwrap();
        assert!(count > *seen, "a push continues from the reply: {count} after {seen}");
        *seen = count;
        last = last.max(count);
    }
    writing.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_see_earlier_writes_and_no_later_ones() {
    let (_server, mut client) = serve_tides().await;
    let mut sent = Vec::new();
    for level in 0..30 {
        let data = json!({"port": "Hook", "level": level});
        sent.push((client.send("store.insert", json!({"bucket": "tides", "data": data})).await, None));
        if level % 3 == 0 {
            sent.push((client.send("store.count", json!({"bucket": "tides"})).await, Some(level + 1)));
        }
        if level % 10 == 0 {
            let subscribed = client.send("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
            sent.push((subscribed, Some(level + 1)));
        }
    }
    for (id, expected) in sent {
        let reply = client.reply(id).await;
        assert_eq!(reply["type"], "result", "{reply}");
        let Some(expected) = expected else { continue };
        let found = match &reply["data"] {
            Json::Number(count) => usize::try_from(count.as_u64().unwrap()).unwrap(),
            subscribed => subscribed["data"].as_array().unwrap().len(),
        };
        assert_eq!(found, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn definitions_and_writes_keep_their_order() {
    let (_server, mut client) = serve_tides().await;
    let mut sent = Vec::new();
    for round in 0..5 {
        let name = format!("bucket{round}");
        for (operation, params, code) in [
            ("store.insert", json!({"bucket": name, "data": {"port": "Hook"}}), Some("BUCKET_NOT_DEFINED")),
            ("store.defineBucket", json!({"name": name, "config": tides_config()}), None),
            ("store.insert", json!({"bucket": name, "data": {"port": "Hook"}}), None),
            ("store.insert", json!({"bucket": name, "data": {}}), Some("VALIDATION_ERROR")),
            ("store.get", json!({"bucket": name, "key": 1}), None),
            ("store.gett", json!({}), Some("UNKNOWN_OPERATION")),
            ("store.dropBucket", json!({"name": name}), None),
            ("store.get", json!({"bucket": name, "key": 1}), Some("BUCKET_NOT_DEFINED")),
        ] {
            sent.push((client.send(operation, params).await, code));
        }
    }
    for (id, code) in sent {
        let reply = client.reply(id).await;
        assert_eq!(reply.get("code").and_then(Json::as_str), code, "{reply}");
    }
}

/// Every client writes and subscribes.
#[tokio::test(flavor = "multi_thread")]
async fn deltas_arrive_in_commit_order() {
    let (server, _client) = serve_tides().await;
    let (writers, rounds) = (4_usize, 150_usize);
    let all = writers * rounds;
    let mut clients = Vec::new();
    for _ in 0..writers {
        let mut client = Client::connect(&server).await;
        let subscribed = client.call("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
        assert_eq!(subscribed["data"], json!([]));
        clients.push(client);
    }
    let mut tasks = Vec::new();
    for (writer, mut client) in clients.into_iter().enumerate() {
        tasks.push(tokio::spawn(async move {
            let mut ids = Vec::new();
            let mut own = Vec::new();
            let mut in_flight = None;
            let mut sent = 0;
            while ids.len() < all {
                if in_flight.is_none() && sent < rounds {
                    let data = json!({"port": writer.to_string(), "level": sent});
                    in_flight = Some(client.send("store.insert", json!({"bucket": "tides", "data": data})).await);
                    sent += 1;
                }
                let message = client.receive().await;
                if message.get("id").is_some() {
                    assert_eq!(message["id"].as_u64(), in_flight.take(), "{message}");
                    own.push(message["data"]["id"].as_u64().unwrap());
                    continue;
                }
                let mut records = &message["data"]["added"];
                if let Some(reset) = message["data"].get("reset") {
                    // A slow consumer gets a snapshot, which replaces what it had.
                    ids.clear();
                    records = reset;
                }
                for tide in records.as_array().expect("records") {
                    let id = tide["id"].as_u64().unwrap();
                    assert!(
                        tide["port"] != json!(writer.to_string()) || own.contains(&id),
                        "{id} was pushed before its reply"
                    );
                    ids.push(id);
                }
            }
            assert_eq!(ids, (1..=all as u64).collect::<Vec<_>>());
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_writes_share_syncs() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    // The number of writes that share a sync depends on the speed of the disk. Even on a very fast disk, some writes share one.
    let mut inserts = 0;
    let mut syncs = 0;
    for _ in 0..10 {
        let before = store.stats().engine.syncs;
        let mut sent = Vec::new();
        for _ in 0..64 {
            sent.push(client.send("store.insert", json!({"bucket": "tides", "data": {"port": "Hook"}})).await);
        }
        for id in sent {
            assert_eq!(client.reply(id).await["type"], "result");
        }
        inserts += 64;
        syncs += store.stats().engine.syncs - before;
    }
    assert!(syncs > 0 && syncs < inserts, "{syncs} for {inserts}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_precedes_the_end_message_it_causes_and_no_push_follows_the_end() {
    let (server, mut client) = serve_tides().await;
    let mut other = Client::connect(&server).await;
    for mode in ["whole", "delta"] {
        for round in 0..10 {
            let name = format!("{mode}{round}");
            client.call("store.defineBucket", json!({"name": name, "config": tides_config()})).await;
            for client in [&mut client, &mut other] {
                client.call("store.subscribe", json!({"config": {"bucket": name}, "mode": mode})).await;
            }
            let insert = client.send("store.insert", json!({"bucket": name, "data": {"port": "Hook"}})).await;
            let dropped = client.send("store.dropBucket", json!({"name": name})).await;
            let mut answered = Vec::new();
            let mut has_ended = false;
            while !has_ended {
                let message = client.receive().await;
                if let Some(id) = message["id"].as_u64() {
                    assert_eq!(message["type"], "result", "{message}");
                    answered.push(id);
                    continue;
                }
                has_ended = message.get("error").is_some();
                let cause = if has_ended { dropped } else { insert };
                assert!(answered.contains(&cause), "{message}");
            }
            // The other client is notified too. The next push to either client belongs to the next round.
            while other.push().await.get("error").is_none() {}
        }
    }
    for client in [&mut client, &mut other] {
        client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    }
    let id = client.send("store.insert", json!({"bucket": "tides", "data": {"port": "Hook"}})).await;
    assert_eq!(client.receive().await["id"].as_u64(), Some(id), "nothing must follow the end");
    let (own, others) = (client.push().await, other.push().await);
    assert!(own.get("data").is_some() && others.get("data").is_some(), "{own} {others}");
}

/// Regression: with two writes in flight, a push was sent before the reply to the last write, and deltas were reordered.
#[tokio::test(flavor = "multi_thread")]
async fn subscriber_of_its_own_writes_gets_each_reply_first_and_deltas_in_order() {
    const WRITES: u64 = 400;
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    client.call("store.insert", json!({"bucket": "notes", "data": {"id": "a", "text": "x", "rank": 0}})).await;
    let params = |mode: &str| json!({"config": {"bucket": "notes"}, "mode": mode});
    let deltas = client.call("store.subscribe", params("delta")).await["subscriptionId"].clone();
    client.call("store.subscribe", params("whole")).await;

    let mut ids = Vec::new();
    let (mut sent, mut answered, mut last_delta) = (0, 0, 0);
    while last_delta < WRITES {
        // At most two writes are in flight.
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
        assert!(rank <= answered, "write {rank} is pushed after {answered} replies");
        if message["subscriptionId"] == deltas {
            assert!(rank > last_delta, "{message} comes after {last_delta}");
            last_delta = rank;
        }
    }
}

/// Returns the rank of the only note.
fn rank(push: &Json) -> u64 {
    let data = &push["data"];
    let rows = data.get("changed").or_else(|| data.get("reset")).unwrap_or(data);
    rows[0]["rank"].as_u64().unwrap_or_else(|| panic!("no note in {push}"))
}
