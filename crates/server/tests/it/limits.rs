//! How many connections, requests and subscriptions there may be.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::Auth;
use tidewire::{ConnectionLimits, RateLimit, Server};
use tidewire_store::{Store, StoreOptions};

use crate::client::{Client, Tokens, is_left_with, notes, options, serve, serve_store, store_at};
use crate::page::wait_for;
use crate::raw::{Raw, TEXT, frame, handshake};

#[tokio::test(flavor = "multi_thread")]
async fn an_address_has_only_so_many_connections() {
    let options = options().max_connections_per_ip(2);
    let server = serve(options).await;
    let (mut first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    for _ in 0..3 {
        let mut raw = Raw::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.head().await.0, 101, "the handshake completes");
        let (kind, payload) = raw.frame().await.unwrap();
        assert_eq!((kind, &payload[..2], &payload[2..]), (8, &[0x0f, 0xa3][..], &b"too_many_connections"[..]));
        assert!(!raw.more().await, "and that is all");
    }
    is_left_with(&server, 2).await;
    first.ask("store.buckets", json!({})).await;
    drop(second);
    is_left_with(&server, 1).await;
    // The place is free when the connection is out of the count of all, which is a moment later.
    wait_for_place(&server).await.ask("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_are_only_so_many_connections() {
    let options = options().max_connections(2);
    let server = serve(options).await;
    let (mut first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    for _ in 0..3 {
        let mut raw = Raw::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.response().await.0, 503);
        assert!(!raw.more().await, "it ends");
    }
    // Others than clients are answered.
    let mut raw = Raw::connect(&server).await;
    raw.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    assert_eq!(raw.response().await.0, 200);
    drop(raw);
    first.ask("store.buckets", json!({})).await;
    drop(second);
    is_left_with(&server, 1).await;
    wait_for_place(&server).await.ask("store.buckets", json!({})).await;
}

/// Connects when there is room.
async fn wait_for_place(server: &Server) -> Client {
    loop {
        let mut raw = Raw::connect(server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        if raw.head().await.0 == 101 && raw.frame().await.unwrap().0 == 1 {
            drop(raw);
            is_left_with(server, 1).await;
            return Client::connect(server).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_that_say_nothing_are_counted_too() {
    let options = options().max_connections(1);
    let server = serve(options).await;
    let idle = Raw::connect(&server).await;
    let mut raw = Raw::connect(&server).await;
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.response().await.0, 503);
    drop(idle);
    loop {
        let mut raw = Raw::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        if raw.head().await.0 == 101 {
            break;
        }
    }
}

/// The writer is busy. Of a hundred writes of 60 KB only those are started that have 4 MiB together.
#[tokio::test(flavor = "multi_thread")]
async fn writes_in_flight_are_limited_in_bytes() {
    const WRITES: usize = 100;
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("notes", notes()).wait().unwrap();
    let server = serve_store(store.clone(), options()).await;
    let raw = Raw::websocket(&server).await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    let busy = store.write(move |_| {
        // Until the test is done with it, also if it fails.
        let _ = released.recv();
        Ok(())
    });
    let text = "x".repeat(60_000);
    let write = |id| json!({"id": id, "type": "store.insert", "bucket": "notes", "data": {"text": text}}).to_string();
    let mut raw = raw.split((0..WRITES).flat_map(|id| frame(TEXT, write(id).as_bytes())).collect());
    // One more has been read, and waits.
    let page = wait_for(&server, "4 MiB are in flight, and not more", |page| {
        page.get("memory_used_bytes") > 4 << 20 && page.get("store_writes_waiting") == (4 << 20) / 61_000
    })
    .await;
    assert!(page.get("memory_used_bytes") < 6 << 20, "{} bytes", page.get("memory_used_bytes"));
    drop(release);
    busy.wait().unwrap();
    for id in 0..WRITES {
        assert_eq!(raw.json().await["id"], id);
    }
    wait_for(&server, "everything is released", |page| page.get("memory_used_bytes") == 0).await;
}

fn retry_after(error: &Json) -> u64 {
    assert_eq!(error["code"], "RATE_LIMITED");
    assert_eq!(error["details"].as_object().unwrap().len(), 1);
    error["details"]["retryAfterMs"].as_u64().unwrap()
}

async fn limited(client: &mut Client) -> u64 {
    retry_after(&client.fail("store.buckets", json!({})).await.1)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_limited_to_the_millisecond() {
    let now = Arc::new(AtomicU64::new(10_000));
    let options = options().rate_limit(RateLimit::new(3, Duration::from_secs(1)));
    let server = serve_store(store_at(&now), options).await;
    let mut client = Client::connect(&server).await;
    // What is no request does not count.
    client.send_text("{").await;
    client.receive().await;
    for at in [10_000, 10_200, 10_500] {
        now.store(at, SeqCst);
        client.ask("store.buckets", json!({})).await;
    }
    now.store(10_700, SeqCst);
    assert_eq!(limited(&mut client).await, 300);
    // Those that are turned away do not count.
    for _ in 0..10 {
        assert_eq!(limited(&mut client).await, 300);
    }
    // Another connection of the same address shares its budget.
    let mut other = Client::connect(&server).await;
    assert_eq!(limited(&mut other).await, 300);
    now.store(10_999, SeqCst);
    assert_eq!(limited(&mut client).await, 1);
    now.store(11_000, SeqCst);
    other.ask("store.buckets", json!({})).await;
    assert_eq!(limited(&mut client).await, 200);
    now.store(11_200, SeqCst);
    // Whatever it asks counts, also what does not exist and what is wrong.
    assert_eq!(client.fail("store.nothing", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(limited(&mut client).await, 300);
    now.store(11_500, SeqCst);
    assert_eq!(client.fail("store.get", json!({})).await.0, "VALIDATION_ERROR");
    assert_eq!(limited(&mut client).await, 500);
    now.store(12_000, SeqCst);
    assert_eq!(client.fail("ping", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(limited(&mut client).await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_has_one_budget_and_strangers_another() {
    let now = Arc::new(AtomicU64::new(10_000));
    let options = options().rate_limit(RateLimit::new(3, Duration::from_secs(1))).auth(Auth::new(Tokens));
    let server = serve_store(store_at(&now), options).await;
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    for _ in 0..10 {
        assert_eq!(one.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
        assert_eq!(one.fail("no.such", json!({})).await.0, "UNAUTHORIZED", "even if there is no such operation");
    }
    // Logins are charged to the address.
    one.ask("auth.login", json!({"token": "mara:admin"})).await;
    two.ask("auth.login", json!({"token": "mara:admin"})).await;
    let mut third = Client::connect(&server).await;
    assert_eq!(third.fail("auth.login", json!({"token": "nobody"})).await.0, "UNAUTHORIZED");
    let error = third.fail("auth.login", json!({"token": "ines:admin"})).await.1;
    assert_eq!(retry_after(&error), 1000);
    // A user's connections share what is the user's.
    now.store(10_100, SeqCst);
    one.ask("store.buckets", json!({})).await;
    two.ask("store.buckets", json!({})).await;
    assert_eq!(one.fail("ping", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(limited(&mut one).await, 1000);
    assert_eq!(limited(&mut two).await, 1000);
    let error = third.fail("auth.whoami", json!({})).await.1;
    assert_eq!(retry_after(&error), 900);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_details_nobody_learns_them_whatever_the_code() {
    let now = Arc::new(AtomicU64::new(10_000));
    let options = options().rate_limit(RateLimit::new(9, Duration::from_secs(1))).expose_error_details(false);
    let server = serve_store(store_at(&now), options).await;
    let mut client = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "n": {"type": "number", "unique": true}}});
    client.ask("store.defineBucket", json!({"name": "b", "config": config})).await;
    client.ask("store.insert", json!({"bucket": "b", "data": {"id": "1", "n": 1}})).await;
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
            client.ask(operation, params).await;
            continue;
        }
        let (said, error) = client.fail(operation, params).await;
        assert_eq!(said, code, "{error}");
        let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["id", "type", "code", "message"], "{error}");
    }
}

async fn prepare(client: &mut Client) {
    client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
}

async fn subscribe(client: &mut Client) -> Json {
    client.ask("store.subscribe", json!({"query": "all"})).await["subscriptionId"].clone()
}

async fn too_many(client: &mut Client) {
    let (code, error) = client.fail("store.subscribe", json!({"query": "all"})).await;
    assert_eq!(code, "RATE_LIMITED");
    assert_eq!(error.get("details"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_has_only_so_many_subscriptions() {
    let options = options().connection_limits(ConnectionLimits::default().max_subscriptions_per_connection(3));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    prepare(&mut client).await;
    let first = subscribe(&mut client).await;
    // One that fails takes no place.
    assert_eq!(client.fail("store.subscribe", json!({"query": "none"})).await.0, "QUERY_NOT_DEFINED");
    assert_eq!(client.fail("store.subscribe", json!({})).await.0, "VALIDATION_ERROR");
    subscribe(&mut client).await;
    subscribe(&mut client).await;
    too_many(&mut client).await;
    assert_eq!(server.connections()[0].store_subscriptions, 3);
    is_left_with(&server, 1).await;
    // Another connection has its own.
    let mut other = Client::connect(&server).await;
    subscribe(&mut other).await;
    client.ask("store.unsubscribe", json!({"subscriptionId": first})).await;
    assert_eq!(client.fail("store.unsubscribe", json!({"subscriptionId": first})).await.0, "NOT_FOUND");
    is_left_with(&server, 2).await;
    subscribe(&mut client).await;
    too_many(&mut client).await;
    // All three still hear of everything.
    client.ask("store.insert", json!({"bucket": "notes", "data": {"text": "flood"}})).await;
    let mut heard = Vec::new();
    for _ in 0..3 {
        heard.push(client.push().await["subscriptionId"].as_str().unwrap().to_owned());
    }
    heard.sort();
    heard.dedup();
    assert_eq!(heard.len(), 3);
    assert!(client.is_silent().await);
    drop((client, other));
    is_left_with(&server, 0).await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_connections_together_have_only_so_many_subscriptions() {
    let options = options().connection_limits(ConnectionLimits::default().max_total_subscriptions(3));
    let server = serve(options).await;
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    prepare(&mut one).await;
    let first = subscribe(&mut one).await;
    subscribe(&mut two).await;
    subscribe(&mut two).await;
    too_many(&mut one).await;
    too_many(&mut two).await;
    assert_eq!(server.stats().subscriptions, 3);
    one.ask("store.unsubscribe", json!({"subscriptionId": first})).await;
    subscribe(&mut one).await;
    too_many(&mut two).await;
    drop(two);
    is_left_with(&server, 1).await;
    assert_eq!(server.stats().subscriptions, 1);
    subscribe(&mut one).await;
    subscribe(&mut one).await;
    too_many(&mut one).await;
    // What ends with its bucket gives its place back.
    one.ask("store.dropBucket", json!({"name": "notes"})).await;
    tidewire_testkit::wait_until_async("they have ended", tidewire_testkit::PATIENCE, async || {
        server.stats().subscriptions == 0
    })
    .await;
    is_left_with(&server, 1).await;
}
