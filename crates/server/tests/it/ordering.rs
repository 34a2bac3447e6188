//! What comes before what: replies in the order of requests, a write's reply before its push, pushes in the order of commits.

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

use crate::client::{Client, notes, options, serve, serve_store};
use crate::tides::{serve_tides, tides};

/// The ids of the requests to which the replies have come, and what each push showed.
struct Heard {
    answered: Vec<u64>,
    pushes: Vec<(usize, Json)>,
}

/// Reads until so many replies have come and a push shows what is awaited.
async fn hear(client: &mut Client, replies: usize, is_last: impl Fn(&Json) -> bool) -> Heard {
    let mut heard = Heard { answered: Vec::new(), pushes: Vec::new() };
    let mut is_over = false;
    while heard.answered.len() < replies || !is_over {
        let message = client.receive().await;
        if let Some(id) = message["id"].as_u64() {
            assert_eq!(message["type"], "result", "{message}");
            heard.answered.push(id);
        } else {
            is_over |= is_last(&message);
            heard.pushes.push((heard.answered.len(), message));
        }
    }
    heard
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writes_reply_comes_before_its_push() {
    let (_server, mut client) = serve_tides().await;
    let subscribed = client.ask("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    assert_eq!(subscribed["data"], json!([]));
    let mut sent = Vec::new();
    for level in 0..50 {
        sent.push(
            client.send("store.insert", json!({"bucket": "tides", "data": {"port": "Hook", "level": level}})).await,
        );
    }
    let heard = hear(&mut client, 50, |push| push["data"].as_array().unwrap().len() == 50).await;
    assert_eq!(heard.answered, sent);
    let mut before = 0;
    for (answered, push) in heard.pushes {
        let records = push["data"].as_array().unwrap();
        assert!(records.len() <= answered, "{} were shown when {answered} had been answered", records.len());
        assert!(records.len() > before, "a push shows more than the one before");
        before = records.len();
        let levels: Vec<&Json> = records.iter().map(|tide| &tide["level"]).collect();
        assert!(levels.iter().enumerate().all(|(place, level)| **level == json!(place)), "{levels:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reply_to_subscribe_comes_before_its_first_push() {
    let (server, mut writer) = serve_tides().await;
    let mut client = Client::connect(&server).await;
    // Somebody writes all the time.
    let writing = tokio::spawn(async move {
        for level in 0..200 {
            let data = json!({"port": "Hook", "level": level});
            writer.ask("store.insert", json!({"bucket": "tides", "data": data})).await;
        }
    });
    let config = json!({"bucket": "tides", "aggregate": {"function": "count"}});
    let mut known: Vec<(String, u64)> = Vec::new();
    let mut asked = 0;
    let mut last = 0;
    while last < 200 || asked < 40 || known.len() < 40 {
        if asked < 40 && asked == known.len() {
            client.send("store.subscribe", json!({"config": config})).await;
            asked += 1;
        }
        let message = client.receive().await;
        if message.get("id").is_some() {
            let data = &message["data"];
            known.push((data["subscriptionId"].as_str().unwrap().to_owned(), data["data"].as_u64().unwrap()));
            last = last.max(data["data"].as_u64().unwrap());
            continue;
        }
        let (_, seen) = known.iter_mut().find(|(id, _)| message["subscriptionId"] == json!(id)).expect("it is known");
        let count = message["data"].as_u64().unwrap();
        assert!(count > *seen, "it goes on from where it began: {count} after {seen}");
        *seen = count;
        last = last.max(count);
    }
    writing.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_see_the_writes_before_them_and_not_those_after() {
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
            ("store.defineBucket", json!({"name": name, "config": tides()}), None),
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

/// Everybody writes and follows; whatever is told as a delta is told in the order of the commits.
#[tokio::test(flavor = "multi_thread")]
async fn deltas_come_in_the_order_of_commits_whoever_writes() {
    let (server, _client) = serve_tides().await;
    let (writers, rounds) = (4_usize, 150_usize);
    let all = writers * rounds;
    let mut clients = Vec::new();
    for _ in 0..writers {
        let mut client = Client::connect(&server).await;
        let subscribed = client.ask("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
        assert_eq!(subscribed["data"], json!([]));
        clients.push(client);
    }
    let mut tasks = Vec::new();
    for (writer, mut client) in clients.into_iter().enumerate() {
        tasks.push(tokio::spawn(async move {
            let mut ids = Vec::new();
            let mut own = Vec::new();
            let mut open = None;
            let mut sent = 0;
            while ids.len() < all {
                if open.is_none() && sent < rounds {
                    let data = json!({"port": writer.to_string(), "level": sent});
                    open = Some(client.send("store.insert", json!({"bucket": "tides", "data": data})).await);
                    sent += 1;
                }
                let message = client.receive().await;
                if message.get("id").is_some() {
                    assert_eq!(message["id"].as_u64(), open.take(), "{message}");
                    own.push(message["data"]["id"].as_u64().unwrap());
                    continue;
                }
                let mut told = &message["data"]["added"];
                if let Some(reset) = message["data"].get("reset") {
                    // A reader that fell behind gets the whole result, which goes on from what it had.
                    ids.clear();
                    told = reset;
                }
                for tide in told.as_array().expect("records") {
                    let id = tide["id"].as_u64().unwrap();
                    assert!(tide["port"] != json!(writer.to_string()) || own.contains(&id), "{id} was not answered");
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
async fn writes_that_wait_together_share_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    // What the disk is waited for depends on how fast it is: with one that has no time at all, some still wait together.
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
async fn the_reply_comes_before_the_end_that_it_causes_and_nothing_comes_after_the_end() {
    let (server, mut client) = serve_tides().await;
    let mut other = Client::connect(&server).await;
    for mode in ["whole", "delta"] {
        for round in 0..10 {
            let name = format!("{mode}{round}");
            client.ask("store.defineBucket", json!({"name": name, "config": tides()})).await;
            for client in [&mut client, &mut other] {
                client.ask("store.subscribe", json!({"config": {"bucket": name}, "mode": mode})).await;
            }
            let insert = client.send("store.insert", json!({"bucket": name, "data": {"port": "Hook"}})).await;
            let dropped = client.send("store.dropBucket", json!({"name": name})).await;
            let mut answered = Vec::new();
            let mut is_over = false;
            while !is_over {
                let message = client.receive().await;
                if let Some(id) = message["id"].as_u64() {
                    assert_eq!(message["type"], "result", "{message}");
                    answered.push(id);
                    continue;
                }
                is_over = message.get("error").is_some();
                let cause = if is_over { dropped } else { insert };
                assert!(answered.contains(&cause), "{message}");
            }
            // The other is told as well; the next that either hears is of the next round.
            while other.push().await.get("error").is_none() {}
        }
    }
    for client in [&mut client, &mut other] {
        client.ask("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    }
    let id = client.send("store.insert", json!({"bucket": "tides", "data": {"port": "Hook"}})).await;
    assert_eq!(client.receive().await["id"].as_u64(), Some(id), "nothing came after an end");
    let (own, others) = (client.push().await, other.push().await);
    assert!(own.get("data").is_some() && others.get("data").is_some(), "{own} {others}");
}

/// A push did not wait for the reply to the last write in flight when the one before it had been answered, and then deltas came in
/// another order than they were made.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_follows_what_it_writes_hears_the_reply_first_and_everything_in_order() {
    const WRITES: u64 = 400;
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
