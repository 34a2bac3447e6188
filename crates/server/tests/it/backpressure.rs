//! Backpressure: a client that does not read uses bounded memory, and delays no other client.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::Rule;
use tidewire::{Backpressure, Heartbeat, Server, ServerOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;

use crate::client::{Client, options, serve, wait_for_connections};
use crate::gated_query::{Gate, GatedQuery};
use crate::metrics_page::metric;
use crate::raw_client::{RawClient, TEXT, frame};
use crate::test_server::{TestServer, allow_only, object, own_rows, tokens, user};

fn with_backpressure(max_buffered_bytes: usize, high_water_mark: f64) -> ServerOptions {
    options()
        .backpressure(Backpressure::default().max_buffered_bytes(max_buffered_bytes).high_water_mark(high_water_mark))
}

/// A client that writes numbered records with padding.
struct Writer {
    client: Client,
    pad: String,
    written: u64,
}

impl Writer {
    async fn new(server: &Server, pad: usize) -> Self {
        let mut client = Client::connect(server).await;
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "required": true}}});
        client.call("store.defineBucket", json!({"name": "b", "config": config})).await;
        Self { client, pad: "x".repeat(pad), written: 0 }
    }

    /// Writes the next version of a record, and waits for the reply.
    async fn write(&mut self, key: &str) {
        self.written += 1;
        let data = json!({"id": key, "n": self.written, "pad": self.pad});
        self.client.call("store.upsert", json!({"bucket": "b", "data": data})).await;
    }

    async fn write_until(&mut self, key: &str, condition: impl AsyncFn() -> bool) {
        for _ in 0..20_000 {
            self.write(key).await;
            if condition().await {
                return;
            }
        }
        panic!("the condition never held");
    }
}

async fn subscribe(raw: &mut RawClient, id: u64, more: &Json) {
    let mut request = json!({"id": id, "type": "store.subscribe", "config": {"bucket": "b"}});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    raw.send(&request.to_string()).await;
    let reply = raw.json().await;
    assert_eq!((&reply["id"], &reply["type"]), (&json!(id), &json!("result")), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_subscriber_gets_the_newest_result_when_it_reads_again() {
    let server = serve(options()).await;
    let mut writer = Writer::new(&server, 16_000).await;
    let mut healthy = RawClient::websocket(&server).await;
    subscribe(&mut healthy, 1, &json!({})).await;
    let mut stalled = RawClient::with_small_buffer(&server).await;
    subscribe(&mut stalled, 1, &json!({})).await;
    let (server, mut last) = (&server, 0);
    for _ in 0..3 {
        let before = metric(server, "pushes_replaced_total").await;
        writer.write_until("x", async || metric(server, "pushes_replaced_total").await > before + 50).await;
    }
    // Other subscribers are not delayed.
    while last < writer.written {
        last = healthy.json().await["data"][0]["n"].as_u64().unwrap();
    }
    wait_for_connections(server, 3).await;
    let (mut pushes, mut last) = (0, 0);
    while last < writer.written {
        let push = stalled.json().await;
        assert_eq!(push["type"], "push");
        let seen = push["data"][0]["n"].as_u64().unwrap();
        assert!(seen > last, "results must not go back");
        (pushes, last) = (pushes + 1, seen);
    }
    assert!(pushes < writer.written - 100, "{pushes} of {}", writer.written);
    // From now on it receives every push.
    writer.write("x").await;
    assert_eq!(stalled.json().await["data"][0]["n"], json!(writer.written));
    assert_eq!(server.stats().slow_consumers, 0);
    drop((healthy, stalled));
    wait_for_connections(server, 1).await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_unread_subscriptions_disconnect_a_slow_consumer() {
    let server = serve(with_backpressure(64 * 1024, 0.8)).await;
    let mut writer = Writer::new(&server, 1000).await;
    writer.write("x").await;
    let mut healthy = RawClient::websocket(&server).await;
    subscribe(&mut healthy, 1, &json!({})).await;
    let mut stalled = RawClient::with_small_buffer(&server).await;
    for id in 0..5 {
        subscribe(&mut stalled, id, &json!({})).await;
    }
    writer.pad = "x".repeat(20_000);
    let server = &server;
    writer.write_until("x", async || server.stats().slow_consumers == 1).await;
    assert_eq!(stalled.closed().await, (4008, "slow_consumer".to_owned()));
    wait_for_connections(server, 2).await;
    assert_eq!(server.stats().subscriptions, 1);
    assert_eq!(server.stats().slow_consumers, 1);
    writer.write("x").await;
    let mut last = 0;
    while last < writer.written {
        last = healthy.json().await["data"][0]["n"].as_u64().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_reads_no_close_frame_is_disconnected() {
    let interval = std::time::Duration::from_millis(300);
    let heartbeat = Heartbeat::default().interval(interval).timeout(interval);
    let server = serve(with_backpressure(64 * 1024, 0.8).heartbeat(heartbeat)).await;
    let mut stalled = RawClient::with_small_buffer(&server).await;
    stalled.send(r#"{"id":1,"type":"store.defineBucket","name":"b","config":{"key":"id","schema":{"id":{"type":"string"}}}}"#).await;
    assert_eq!(stalled.json().await["type"], "result");
    subscribe(&mut stalled, 2, &json!({})).await;
    // The client requests more than the socket buffers hold, and reads nothing.
    let requests = frame(TEXT, json!({"id": 1, "type": "server.stats"}).to_string().as_bytes()).repeat(1000);
    let gone = async { while stalled.stream.write_all(&requests).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, gone).await.expect("the client is disconnected");
    wait_for_connections(&server, 0).await;
    assert_eq!(server.stats().subscriptions, 0);
    assert_eq!(metric(&server, "heartbeats_missed_total").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_above_the_high_water_mark_are_rejected_and_not_run() {
    let server = serve(with_backpressure(512 * 1024, 0.02)).await;
    let mut writer = Writer::new(&server, 1000).await;
    writer.write("x").await;
    let mut stalled = RawClient::with_small_buffer(&server).await;
    for id in 0..20 {
        subscribe(&mut stalled, id, &json!({})).await;
    }
    writer.pad = "x".repeat(20_000);
    let server = &server;
    writer.write_until("x", async || metric(server, "pushes_replaced_total").await > 40).await;
    for id in 100..105 {
        stalled
            .send(
                &json!({"id": id, "type": "store.insert", "bucket": "b", "data": {"id": format!("s{id}")}}).to_string(),
            )
            .await;
    }
    let mut rejected = 0;
    for id in 100..105 {
        let reply = loop {
            let message = stalled.json().await;
            if message["type"] != "push" {
                break message;
            }
        };
        assert_eq!(reply["id"], json!(id), "{reply}");
        let is_rejected = reply["code"] == "BACKPRESSURE";
        assert!(is_rejected || reply["type"] == "result", "{reply}");
        let record = writer.client.call("store.get", json!({"bucket": "b", "key": format!("s{id}")})).await;
        assert_eq!(record.is_null(), is_rejected, "a rejected request must not run");
        rejected += u64::from(is_rejected);
    }
    assert!(rejected > 0);
    assert_eq!(metric(server, "requests_backpressure_total").await, rejected);
    // The client is served again when it has read.
    stalled.send(r#"{"id":200,"type":"store.buckets"}"#).await;
    loop {
        let message = stalled.json().await;
        if message["id"] == 200 && message["type"] == "result" {
            break;
        }
        if message["id"] == 200 {
            assert_eq!(message["code"], "BACKPRESSURE");
            stalled.send(r#"{"id":200,"type":"store.buckets"}"#).await;
        }
    }
    wait_for_connections(server, 2).await;
    assert_eq!(server.stats().slow_consumers, 0);
}

/// Applies a delta or a reset to the records that a client holds. Returns whether it was a reset.
fn apply(records: &mut BTreeMap<String, Json>, data: &Json) -> bool {
    let key = |record: &Json| record["id"].as_str().unwrap().to_owned();
    let reset = data.get("reset").and_then(Json::as_array);
    if let Some(snapshot) = reset {
        *records = snapshot.iter().map(|record| (key(record), record.clone())).collect();
        return true;
    }
    for part in ["added", "changed"] {
        for record in data[part].as_array().unwrap() {
            records.insert(key(record), record.clone());
        }
    }
    for key in data["removed"].as_array().unwrap() {
        records.remove(key.as_str().unwrap());
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn held_back_deltas_are_replaced_by_a_snapshot() {
    let server = serve(with_backpressure(64 * 1024, 0.5)).await;
    let mut writer = Writer::new(&server, 16_000).await;
    let mut stalled = RawClient::with_small_buffer(&server).await;
    subscribe(&mut stalled, 1, &json!({"mode": "delta"})).await;
    let server = &server;
    writer.write_until("x", async || metric(server, "pushes_held_back_total").await > 0).await;
    for number in 0..200 {
        writer.write(&format!("k{}", number % 5)).await;
    }
    writer.client.call("store.delete", json!({"bucket": "b", "key": "k3"})).await;
    let all = writer.client.call("store.all", json!({"bucket": "b"})).await;
    let all: BTreeMap<String, Json> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|record| (record["id"].as_str().unwrap().to_owned(), record.clone()))
        .collect();
    let (mut known, mut resets) = (BTreeMap::new(), 0);
    while known != all {
        let push = stalled.json().await;
        assert_eq!(push["type"], "push");
        resets += usize::from(apply(&mut known, &push["data"]));
    }
    assert!(resets > 0);
    // After that, deltas are sent again.
    writer.write("y").await;
    assert!(!apply(&mut known, &stalled.json().await["data"]));
    assert_eq!(known["y"]["n"], json!(writer.written));
    assert_eq!(server.stats().slow_consumers, 0);
    drop(stalled);
    wait_for_connections(server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn result_may_exceed_the_push_buffer_limit() {
    let server = serve(with_backpressure(4096, 0.8)).await;
    let mut writer = Writer::new(&server, 100_000).await;
    for mode in [json!({}), json!({"mode": "delta"})] {
        let mut reader = RawClient::websocket(&server).await;
        subscribe(&mut reader, 1, &mode).await;
        for _ in 0..20 {
            writer.write("x").await;
            let push = reader.json().await;
            assert!(push.to_string().len() > 100_000);
        }
        assert_eq!(server.stats().slow_consumers, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_of_its_own_writes_is_not_a_slow_consumer() {
    for mode in [json!({}), json!({"mode": "delta"})] {
        let server = serve(with_backpressure(64 * 1024, 0.8)).await;
        let _writer = Writer::new(&server, 0).await;
        let mut raw = RawClient::websocket(&server).await;
        subscribe(&mut raw, 0, &mode).await;
        let pad = "x".repeat(40_000);
        let mut bytes = Vec::new();
        for id in 1..=200 {
            let data = json!({"id": "x", "n": id, "pad": pad});
            let request = json!({"id": id, "type": "store.upsert", "bucket": "b", "data": data});
            bytes.extend(frame(TEXT, request.to_string().as_bytes()));
        }
        let (mut answered, mut seen) = (0, 0);
        let mut reader = raw.split(bytes);
        while answered < 200 || seen < 200 {
            let message = reader.json().await;
            if message["type"] == "push" {
                let data = &message["data"];
                let records = ["added", "changed", "reset"]
                    .iter()
                    .find_map(|part| data.get(part).filter(|part| part.get(0).is_some()));
                seen = records.unwrap_or(data)[0]["n"].as_u64().unwrap();
                assert!(seen <= answered, "a write is answered before its push");
            } else {
                answered += 1;
                assert_eq!(
                    (&message["id"], &message["type"]),
                    (&json!(answered), &json!("result")),
                    "{}",
                    message["code"]
                );
            }
        }
        assert_eq!(server.stats().slow_consumers, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_are_answered_in_order() {
    let server = serve(options()).await;
    let mut writer = Writer::new(&server, 2_000).await;
    writer.write("x").await;
    let mut bytes = Vec::new();
    for id in 0..10_000 {
        bytes.extend(frame(
            TEXT,
            json!({"id": id, "type": "store.get", "bucket": "b", "key": "x"}).to_string().as_bytes(),
        ));
    }
    let before = server.stats().requests;
    let mut reader = RawClient::with_small_buffer(&server).await.split(bytes);
    // While the client does not read, the server handles only part of the requests.
    let (mut last, mut same) = (0, 0);
    wait_until_async("no more requests are handled", PATIENCE, async || {
        let now = server.stats().requests - before;
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
        same == 50
    })
    .await;
    assert!(last < 9_000, "{last} of 10 000 requests were handled while the client did not read");
    writer.write("y").await;
    for id in 0..10_000 {
        let reply = reader.json().await;
        assert_eq!((&reply["id"], &reply["type"]), (&json!(id), &json!("result")));
    }
    drop(reader);
    wait_for_connections(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_a_subscription_during_its_refresh_does_not_stop_others() {
    let gate = Arc::new(Gate::default());
    let gated = GatedQuery { bucket: "p", gate: Arc::clone(&gate), owner: None };
    let server = &serve(with_backpressure(4096, 1.0).query("gated", gated)).await;
    let mut writer = Writer::new(server, 20_000).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string", "required": true}}});
    for bucket in ["p", "q"] {
        writer.client.call("store.defineBucket", json!({"name": bucket, "config": config})).await;
    }
    let mut slow = RawClient::with_small_buffer(server).await;
    subscribe(&mut slow, 1, &json!({})).await;
    subscribe(&mut slow, 2, &json!({"query": "gated", "config": null})).await;
    subscribe(&mut slow, 3, &json!({"config": {"bucket": "q"}})).await;
    let before = metric(server, "pushes_replaced_total").await;
    writer.write_until("x", async || metric(server, "pushes_replaced_total").await > before + 5).await;
    // Neither result fits into the buffer with the one already queued. First the programmatic query falls behind, then the other.
    for (bucket, behind) in [("p", 1), ("q", 2)] {
        let data = json!({"id": "a", "pad": "x".repeat(5000)});
        writer.client.call("store.insert", json!({"bucket": bucket, "data": data})).await;
        let is_behind = async || metric(server, "pushes_held_back_total").await >= behind;
        wait_until_async("the subscription is behind", PATIENCE, is_behind).await;
    }
    let shut = gate.shut();
    let mut refreshed =
        pin!(wait_until_async("the programmatic query is refreshed", PATIENCE, async || gate.waiting() > 0));
    loop {
        tokio::select! {
            () = &mut refreshed => break,
            _ = slow.json() => {}
        }
    }
    slow.send(r#"{"id":4,"type":"store.unsubscribe","subscriptionId":"sub-2"}"#).await;
    while slow.json().await["id"] != 4 {}
    drop(shut);
    let push = loop {
        let message = slow.json().await;
        assert_ne!(message["subscriptionId"], "sub-2");
        if message["subscriptionId"] == "sub-3" {
            break message;
        }
    };
    assert_eq!(push["data"][0]["id"], "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_result_of_the_previous_session_is_sent_after_a_login() {
    const LIMIT: usize = 4 << 20;
    let gate = Arc::new(Gate::default());
    let auth = tokens([user("ann", &["member"]), user("bob", &["member"])]);
    let auth = allow_only(auth, [own_rows("member"), Rule::new("member", ["store.*"]).on_buckets(["b"])]);
    let mine = GatedQuery { bucket: "notes", gate: Arc::clone(&gate), owner: Some("bob") };
    let options = with_backpressure(LIMIT, 1.0).max_result_bytes(2 * LIMIT).auth(auth).query("mine", mine);
    let test = TestServer::start_with(options).await;
    test.bucket("b", []).await;
    // The result of the second user does not fit into the buffer with anything else.
    let big = |id: u64| json!({"id": id.to_string(), "owner": "bob", "pad": "x".repeat(LIMIT / 5 - 500)});
    test.bucket("notes", (0..5).map(big)).await;
    let server = &test.server;
    let mut slow = RawClient::with_small_buffer(server).await;
    slow.send(r#"{"id":0,"type":"auth.login","token":"ann"}"#).await;
    assert_eq!(slow.json().await["type"], "result");
    subscribe(&mut slow, 1, &json!({"query": "mine", "config": null})).await;
    for id in 2..92 {
        subscribe(&mut slow, id, &json!({})).await;
    }
    let replaced = async || metric(server, "pushes_replaced_total").await;
    let write = async |bucket: &'static str, n: u64, pad: usize| {
        let record = json!({"id": "x", "owner": "ann", "n": n, "pad": "x".repeat(pad)});
        test.write(move |draft| draft.upsert(bucket, object(record))).await;
    };
    let mut written = 0;
    for (bucket, pad, more) in [("b", 40_000, 90), ("notes", 10, 1)] {
        let before = replaced().await;
        while replaced().await < before + more {
            written += 1;
            write(bucket, written, pad).await;
        }
    }
    // A result of the first user is now queued behind all others. The second user logs in before it is sent.
    let shut = gate.shut();
    slow.send(r#"{"id":100,"type":"auth.login","token":"bob"}"#).await;
    let is_begun = async || wait_until_async("the login has started", PATIENCE, async || gate.waiting() > 0).await;
    while tokio::time::timeout(Duration::from_millis(20), is_begun()).await.is_err() {
        assert_ne!(slow.json().await["subscriptionId"], "sub-1", "the other results come first");
    }
    drop(shut);
    let is_held_back = async || metric(server, "pushes_held_back_total").await > 0;
    wait_until_async("the result of the second user is held back", PATIENCE, is_held_back).await;
    let mut is_answered = false;
    let push = loop {
        let message = slow.json().await;
        is_answered |= message["id"] == 100;
        if message["subscriptionId"] == "sub-1" {
            break message;
        }
    };
    assert!(is_answered);
    assert_eq!((push["data"][0]["owner"].as_str(), push["data"].as_array().map(Vec::len)), (Some("bob"), Some(5)));
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_consumer_uses_one_task_however_often_it_falls_behind() {
    const SUBSCRIPTIONS: usize = 20;
    let options = options().backpressure(Backpressure::default().max_buffered_bytes(8 * 1024));
    let server = serve(options).await;
    let mut writer = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}}});
    writer.call("store.defineBucket", json!({"name": "b", "config": config})).await;
    let mut reader = Client::connect(&server).await;
    for _ in 0..SUBSCRIPTIONS {
        reader.call("store.subscribe", json!({"config": {"bucket": "b"}})).await;
    }
    let tasks = tokio::runtime::Handle::current().metrics();
    let before = tasks.num_alive_tasks();
    for round in 0..200 {
        let data = json!({"id": "x", "round": round, "pad": "x".repeat(5000)});
        writer.call("store.upsert", json!({"bucket": "b", "data": data})).await;
        // The buffer holds one result at a time, and the reader reads them all.
        for _ in 0..SUBSCRIPTIONS {
            assert_eq!(reader.push().await["data"][0]["round"], round);
        }
    }
    let more = tasks.num_alive_tasks().saturating_sub(before);
    assert!(more < 20, "{more} more tasks for one reader");
    assert_eq!(server.stats().slow_consumers, 0);
}
