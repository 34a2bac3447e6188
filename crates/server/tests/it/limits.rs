//! Limits on connections, requests and subscriptions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::Auth;
use tidewire::{ConnectionLimits, RateLimit, Server};
use tidewire_store::{Store, StoreOptions};

use crate::client::{
    Client, RoleTokens, notes_config, options, serve, serve_store, store_with_clock, wait_for_connections,
};
use crate::metrics_page::wait_for_metrics;
use crate::raw_client::{RawClient, TEXT, frame, handshake};

#[tokio::test(flavor = "multi_thread")]
async fn connections_per_address_are_limited() {
    let options = options().max_connections_per_ip(2);
    let server = serve(options).await;
    let (mut first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    for _ in 0..3 {
        let mut raw = RawClient::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.head().await.0, 101, "the handshake completes");
        let (kind, payload) = raw.frame().await.unwrap();
        assert_eq!((kind, &payload[..2], &payload[2..]), (8, &[0x0f, 0xa3][..], &b"too_many_connections"[..]));
        assert!(!raw.read_some().await, "the connection ends");
    }
    wait_for_connections(&server, 2).await;
    first.call("store.buckets", json!({})).await;
    drop(second);
    wait_for_connections(&server, 1).await;
    // The permit is released shortly after the connection is no longer counted.
    wait_for_permit(&server).await.call("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn total_connections_are_limited() {
    let options = options().max_connections(2);
    let server = serve(options).await;
    let (mut first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    for _ in 0..3 {
        let mut raw = RawClient::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.response().await.0, 503);
        assert!(!raw.read_some().await, "the connection ends");
    }
    // Requests other than handshakes are answered.
    let mut raw = RawClient::connect(&server).await;
    raw.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    assert_eq!(raw.response().await.0, 200);
    drop(raw);
    first.call("store.buckets", json!({})).await;
    drop(second);
    wait_for_connections(&server, 1).await;
    wait_for_permit(&server).await.call("store.buckets", json!({})).await;
}

/// Connects as soon as a connection is admitted.
async fn wait_for_permit(server: &Server) -> Client {
    loop {
        let mut raw = RawClient::connect(server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        if raw.head().await.0 == 101 && raw.frame().await.unwrap().0 == 1 {
            drop(raw);
            wait_for_connections(server, 1).await;
            return Client::connect(server).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_sockets_count_as_connections() {
    let options = options().max_connections(1);
    let server = serve(options).await;
    let idle = RawClient::connect(&server).await;
    let mut raw = RawClient::connect(&server).await;
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.response().await.0, 503);
    drop(idle);
    loop {
        let mut raw = RawClient::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        if raw.head().await.0 == 101 {
            break;
        }
    }
}

/// While the writer is blocked, at most 4 MiB of writes are in flight, although the client sends a hundred writes of 60 KB.
#[tokio::test(flavor = "multi_thread")]
async fn writes_in_flight_are_limited_in_bytes() {
    const WRITES: usize = 100;
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("notes", notes_config()).wait().unwrap();
    let server = serve_store(store.clone(), options()).await;
    let raw = RawClient::websocket(&server).await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    let busy = store.write(move |_| {
        // Until the test drops the sender, even if it fails.
        let _ = released.recv();
        Ok(())
    });
    let text = "x".repeat(60_000);
    let write = |id| json!({"id": id, "type": "store.insert", "bucket": "notes", "data": {"text": text}}).to_string();
    let mut raw = raw.split((0..WRITES).flat_map(|id| frame(TEXT, write(id).as_bytes())).collect());
    // One more write has been read, and waits.
    let page = wait_for_metrics(&server, "4 MiB are in flight, and not more", |page| {
        page.get("memory_used_bytes") > 4 << 20 && page.get("store_writes_waiting") == (4 << 20) / 61_000
    })
    .await;
    assert!(page.get("memory_used_bytes") < 6 << 20, "{} bytes", page.get("memory_used_bytes"));
    drop(release);
    busy.wait().unwrap();
    for id in 0..WRITES {
        assert_eq!(raw.json().await["id"], id);
    }
    wait_for_metrics(&server, "the memory is released", |page| page.get("memory_used_bytes") == 0).await;
}

fn retry_after(error: &Json) -> u64 {
    assert_eq!(error["code"], "RATE_LIMITED");
    assert_eq!(error["details"].as_object().unwrap().len(), 1);
    error["details"]["retryAfterMs"].as_u64().unwrap()
}

async fn limited(client: &mut Client) -> u64 {
    retry_after(&client.call_err("store.buckets", json!({})).await.1)
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limit_is_exact_to_the_millisecond() {
    let now = Arc::new(AtomicU64::new(10_000));
    let options = options().rate_limit(RateLimit::new(3, Duration::from_secs(1)));
    let server = serve_store(store_with_clock(&now), options).await;
    let mut client = Client::connect(&server).await;
    // An invalid message does not count.
    client.send_text("{").await;
    client.receive().await;
    for at in [10_000, 10_200, 10_500] {
        now.store(at, SeqCst);
        client.call("store.buckets", json!({})).await;
    }
    now.store(10_700, SeqCst);
    assert_eq!(limited(&mut client).await, 300);
    // Rejected requests do not count.
    for _ in 0..10 {
        assert_eq!(limited(&mut client).await, 300);
    }
    // Another connection of the same address shares its budget.
    let mut other = Client::connect(&server).await;
    assert_eq!(limited(&mut other).await, 300);
    now.store(10_999, SeqCst);
    assert_eq!(limited(&mut client).await, 1);
    now.store(11_000, SeqCst);
    other.call("store.buckets", json!({})).await;
    assert_eq!(limited(&mut client).await, 200);
    now.store(11_200, SeqCst);
    // Every request counts, even an unknown operation or one with invalid parameters.
    assert_eq!(client.call_err("store.nothing", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(limited(&mut client).await, 300);
    now.store(11_500, SeqCst);
    assert_eq!(client.call_err("store.get", json!({})).await.0, "VALIDATION_ERROR");
    assert_eq!(limited(&mut client).await, 500);
    now.store(12_000, SeqCst);
    assert_eq!(client.call_err("ping", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(limited(&mut client).await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn users_and_anonymous_clients_have_separate_budgets() {
    let now = Arc::new(AtomicU64::new(10_000));
    let options = options().rate_limit(RateLimit::new(3, Duration::from_secs(1))).auth(Auth::new(RoleTokens));
    let server = serve_store(store_with_clock(&now), options).await;
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    for _ in 0..10 {
        assert_eq!(one.call_err("store.buckets", json!({})).await.0, "UNAUTHORIZED");
        assert_eq!(one.call_err("no.such", json!({})).await.0, "UNAUTHORIZED", "even for an unknown operation");
    }
    // Logins are charged to the address.
    one.call("auth.login", json!({"token": "mara:admin"})).await;
    two.call("auth.login", json!({"token": "mara:admin"})).await;
    let mut third = Client::connect(&server).await;
    assert_eq!(third.call_err("auth.login", json!({"token": "unknown"})).await.0, "UNAUTHORIZED");
    let error = third.call_err("auth.login", json!({"token": "ines:admin"})).await.1;
    assert_eq!(retry_after(&error), 1000);
    // All connections of a user share the budget of the user.
    now.store(10_100, SeqCst);
    one.call("store.buckets", json!({})).await;
    two.call("store.buckets", json!({})).await;
    assert_eq!(one.call_err("ping", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(limited(&mut one).await, 1000);
    assert_eq!(limited(&mut two).await, 1000);
    let error = third.call_err("auth.whoami", json!({})).await.1;
    assert_eq!(retry_after(&error), 900);
}

#[tokio::test(flavor = "multi_thread")]
async fn error_details_are_hidden_for_every_code() {
    let now = Arc::new(AtomicU64::new(10_000));
    let options = options().rate_limit(RateLimit::new(9, Duration::from_secs(1))).expose_error_details(false);
    let server = serve_store(store_with_clock(&now), options).await;
    let mut client = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "n": {"type": "number", "unique": true}}});
    client.call("store.defineBucket", json!({"name": "b", "config": config})).await;
    client.call("store.insert", json!({"bucket": "b", "data": {"id": "1", "n": 1}})).await;
    let insert = |data: Json| json!({"bucket": "b", "data": data});
    let twice = json!({"operations": [{"op": "insert", "bucket": "b", "data": {"id": "1"}}]});
    for (operation, params, code) in [
        ("store.insert", insert(json!({"id": "2", "n": "x"})), "VALIDATION_ERROR"),
        ("store.insert", insert(json!({"id": "2", "n": 1})), "ALREADY_EXISTS"),
        ("store.update", json!({"bucket": "b", "key": "1", "data": {}, "version": 7}), "CONFLICT"),
        ("store.transaction", twice, "CONFLICT"),
        ("store.get", json!({}), "VALIDATION_ERROR"),
        ("store.all", json!({"bucket": "none"}), "BUCKET_NOT_DEFINED"),
        ("store.all", json!({"bucket": "b"}), ""),
        ("store.all", json!({"bucket": "b"}), "RATE_LIMITED"),
    ] {
        if code.is_empty() {
            client.call(operation, params).await;
            continue;
        }
        let (got, error) = client.call_err(operation, params).await;
        assert_eq!(got, code, "{error}");
        let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["id", "type", "code", "message"], "{error}");
    }
}

async fn prepare(client: &mut Client) {
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
}

async fn subscribe(client: &mut Client) -> Json {
    client.call("store.subscribe", json!({"query": "all"})).await["subscriptionId"].clone()
}

async fn expect_too_many_subscriptions(client: &mut Client) {
    let (code, error) = client.call_err("store.subscribe", json!({"query": "all"})).await;
    assert_eq!(code, "RATE_LIMITED");
    assert_eq!(error.get("details"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_per_connection_are_limited() {
    let options = options().connection_limits(ConnectionLimits::default().max_subscriptions_per_connection(3));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    prepare(&mut client).await;
    let first = subscribe(&mut client).await;
    // A failed subscription consumes no permit.
    assert_eq!(client.call_err("store.subscribe", json!({"query": "none"})).await.0, "QUERY_NOT_DEFINED");
    assert_eq!(client.call_err("store.subscribe", json!({})).await.0, "VALIDATION_ERROR");
    subscribe(&mut client).await;
    subscribe(&mut client).await;
    expect_too_many_subscriptions(&mut client).await;
    assert_eq!(server.connections()[0].store_subscriptions, 3);
    wait_for_connections(&server, 1).await;
    // Another connection has its own limit.
    let mut other = Client::connect(&server).await;
    subscribe(&mut other).await;
    client.call("store.unsubscribe", json!({"subscriptionId": first})).await;
    assert_eq!(client.call_err("store.unsubscribe", json!({"subscriptionId": first})).await.0, "NOT_FOUND");
    wait_for_connections(&server, 2).await;
    subscribe(&mut client).await;
    expect_too_many_subscriptions(&mut client).await;
    // All three still receive every change.
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": "flood"}})).await;
    let mut pushed = Vec::new();
    for _ in 0..3 {
        pushed.push(client.push().await["subscriptionId"].as_str().unwrap().to_owned());
    }
    pushed.sort();
    pushed.dedup();
    assert_eq!(pushed.len(), 3);
    assert!(client.has_no_pushes().await);
    drop((client, other));
    wait_for_connections(&server, 0).await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn total_subscriptions_are_limited() {
    let options = options().connection_limits(ConnectionLimits::default().max_total_subscriptions(3));
    let server = serve(options).await;
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    prepare(&mut one).await;
    let first = subscribe(&mut one).await;
    subscribe(&mut two).await;
    subscribe(&mut two).await;
    expect_too_many_subscriptions(&mut one).await;
    expect_too_many_subscriptions(&mut two).await;
    assert_eq!(server.stats().subscriptions, 3);
    one.call("store.unsubscribe", json!({"subscriptionId": first})).await;
    subscribe(&mut one).await;
    expect_too_many_subscriptions(&mut two).await;
    drop(two);
    wait_for_connections(&server, 1).await;
    assert_eq!(server.stats().subscriptions, 1);
    subscribe(&mut one).await;
    subscribe(&mut one).await;
    expect_too_many_subscriptions(&mut one).await;
    // Dropping the bucket ends the subscriptions and releases their permits.
    one.call("store.dropBucket", json!({"name": "notes"})).await;
    tidewire_testkit::wait_until_async("the subscriptions have ended", tidewire_testkit::PATIENCE, async || {
        server.stats().subscriptions == 0
    })
    .await;
    wait_for_connections(&server, 1).await;
}
