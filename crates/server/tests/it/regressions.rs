//! Regression tests.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, mpsc};

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, TokenExpiry};
use tidewire::{Backpressure, ProgrammaticQuery, RequestError, View};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;

use crate::client::{Client, RoleTokens, options, serve, serve_store};
use crate::raw::{RawClient, handshake};
use crate::test_server::{TestServer, allow_only, ids, own_rows, tokens, user};
use crate::tides::{expect_error, expect_error_details, insert_tides, serve_tides, serve_tides_with};

/// A programmatic query that blocks after a given number of answers. It returns whether tide 1 exists.
#[derive(Debug, Default)]
struct BlockingQuery {
    calls: AtomicUsize,
    /// How many more calls may return. `None` means any number.
    remaining: Mutex<Option<usize>>,
    unblocked: Condvar,
}

impl BlockingQuery {
    fn set_remaining(&self, remaining: Option<usize>) {
        *self.remaining.lock().unwrap() = remaining;
        self.unblocked.notify_all();
    }
}

impl ProgrammaticQuery for BlockingQuery {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        self.calls.fetch_add(1, SeqCst);
        let mut remaining =
            self.unblocked.wait_while(self.remaining.lock().unwrap(), |remaining| *remaining == Some(0)).unwrap();
        *remaining = remaining.map(|remaining| remaining - 1);
        drop(remaining);
        Ok(json!(view.get("tides", &json!(1))?.is_some()))
    }
}

/// Unblocks the query when dropped, even if the test panics.
struct BlockGuard(Arc<BlockingQuery>);

impl BlockGuard {
    /// Blocks the query after this number of answers.
    fn after(query: &Arc<BlockingQuery>, answers: usize) -> Self {
        query.set_remaining(Some(answers));
        Self(Arc::clone(query))
    }
}

impl Drop for BlockGuard {
    fn drop(&mut self) {
        self.0.set_remaining(None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_of_a_blocked_query_can_unsubscribe() {
    let query = Arc::new(BlockingQuery::default());
    let (server, mut writer) = serve_tides_with(options().query("gated", Arc::clone(&query))).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = Client::connect(&server).await;
        client.call("store.subscribe", json!({"query": "gated"})).await;
        clients.push(client);
    }
    let calls = query.calls.load(SeqCst);
    let guard = BlockGuard::after(&query, 0);
    insert_tides(&mut writer, &[("Dover", 4)]).await;
    wait_until_async("the query is called", PATIENCE, async || query.calls.load(SeqCst) > calls).await;
    // The query runs for one of the subscribers. None of them waits for it.
    for (number, client) in clients.iter_mut().enumerate() {
        let subscription = format!("sub-{}", number + 1);
        client.call("store.unsubscribe", json!({"subscriptionId": subscription})).await;
    }
    assert_eq!(server.stats().subscriptions, 0);
    drop(guard);
    // Its result is pushed to no client.
    for client in &mut clients {
        assert!(client.has_no_pushes().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_is_answered_after_the_first_result_of_its_query() {
    let query = Arc::new(BlockingQuery::default());
    let (server, mut client) = serve_tides_with(options().query("gated", Arc::clone(&query))).await;
    let guard = BlockGuard::after(&query, 1);
    let subscribed = client.call("store.subscribe", json!({"query": "gated"})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": false}));
    // The query is called again, in case of a commit in between.
    wait_until_async("the query is called", PATIENCE, async || query.calls.load(SeqCst) == 2).await;
    insert_tides(&mut client, &[("Dover", 4)]).await;
    drop(guard);
    assert_eq!(client.push().await["data"], true);
    assert_eq!(server.stats().subscriptions, 1);
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

#[tokio::test(flavor = "multi_thread")]
async fn revocation_predicate_may_inspect_the_server() {
    let options = options().auth(Auth::new(RoleTokens));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    client.call("auth.login", json!({"token": "ann:reader"})).await;
    let (revoked, result) = mpsc::channel();
    // On its own thread, in case of a deadlock.
    std::thread::spawn(move || {
        let count =
            server.revoke_sessions(|session| server.connections()[0].user_id.as_ref() == Some(&session.user_id));
        revoked.send((count, server)).unwrap();
    });
    let (count, _server) = result.recv_timeout(PATIENCE).expect("deadlock in revoke_sessions");
    assert_eq!(count, 1);
    assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn http_client_that_does_not_read_is_disconnected() {
    let options = options().max_connections(1).handshake_timeout(std::time::Duration::from_millis(50));
    let server = serve(options).await;
    let raw = RawClient::connect(&server).await;
    // More responses than the socket buffers hold. The client may be disconnected before it has sent all requests.
    let requests = b"GET /metrics HTTP/1.1\r\nHost: tide\r\n\r\n".repeat(20_000);
    let client = raw.split(requests);
    wait_until_async("its permit is released", PATIENCE, async || {
        let mut raw = RawClient::connect(&server).await;
        let _ = raw.stream.write_all(b"GET /health HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
        raw.read_some().await && raw.head().await.0 == 200
    })
    .await;
    drop(client);
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_http_head_does_not_delay_a_stopped_server() {
    let dir = tempfile::tempdir().unwrap();
    let options = options().handshake_timeout(std::time::Duration::from_hours(1));
    let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
    let server = serve_store(store, options).await;
    let mut raw = RawClient::connect(&server).await;
    raw.write(b"GET /hea").await;
    // A later client is served, so the server has accepted this one.
    drop(Client::connect(&server).await);
    server.stop(std::time::Duration::ZERO).await;
    wait_until_async("the data directory is released", PATIENCE, async || {
        Store::open(dir.path(), StoreOptions::default()).is_ok()
    })
    .await;
    assert!(!raw.read_some().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn handshake_with_a_body_is_rejected() {
    let server = serve(options()).await;
    for (more, body) in [("Content-Length: 4\r\n", "tide"), ("Transfer-Encoding: chunked\r\n", "0\r\n\r\n")] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(format!("{}{body}", handshake("/", more)).as_bytes()).await;
        assert_eq!(raw.head().await.0, 400, "{more}");
    }
    let mut raw = RawClient::connect(&server).await;
    raw.write(handshake("/", "Content-Length: 0\r\n").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn login_after_expiry_keeps_permitted_subscriptions() {
    let brief = user("brief", &["member"]).expiry(TokenExpiry::After(std::time::Duration::from_secs(1)));
    let auth = allow_only(tokens([brief, user("ann", &["member"])]), [own_rows("member")]);
    let test = TestServer::start_with(options().auth(auth).query("gated", BlockingQuery::default())).await;
    test.bucket("tides", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "brief"})]).await;
    let mut client = test.client("brief").await;
    let first = client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    assert_eq!(ids(&first["data"]), ["b"]);
    client.call("store.subscribe", json!({"query": "gated"})).await;
    test.advance(1000);
    client.call("auth.login", json!({"token": "ann"})).await;
    assert_eq!(ids(&client.push().await["data"]), ["a"]);
    assert_eq!(test.server.stats().subscriptions, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_with_references_to_it_cannot_be_dropped() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "tide": {"type": "number", "ref": "tides"}}});
    client.call("store.defineBucket", json!({"name": "boats", "config": config})).await;
    let message = expect_error(&mut client, "store.dropBucket", json!({"name": "tides"}), "VALIDATION_ERROR").await;
    assert!(message.contains("boats") && message.contains("tide"), "{message}");
    assert_eq!(client.call("store.buckets", json!({})).await["names"], json!(["tides", "boats"]));
    client.call("store.dropBucket", json!({"name": "boats"})).await;
    client.call("store.dropBucket", json!({"name": "tides"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_insert_many_names_the_record() {
    let (_server, mut client) = serve_tides().await;
    let data = json!([{"port": "Hook"}, {"port": "Brest"}, {"port": 7}]);
    let details = json!([{"field": "port", "message": "must be a string", "code": "type"}]);
    let params = json!({"bucket": "tides", "data": data});
    let message = expect_error_details(&mut client, "store.insertMany", params, "VALIDATION_ERROR", details).await;
    assert!(message.starts_with("data[2]: "), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_steps_can_expect_a_version() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &[("Hook", 1), ("Brest", 2)]).await;
    let stale = json!([
        {"op": "delete", "bucket": "tides", "key": 2, "version": 1},
        {"op": "update", "bucket": "tides", "key": 1, "data": {"level": 5}, "version": 9},
    ]);
    let details = json!({"bucket": "tides", "key": 1, "version": 1});
    let params = json!({"operations": stale});
    let message = expect_error_details(&mut client, "store.transaction", params, "CONFLICT", details).await;
    assert!(message.starts_with("operations[1]: "), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 2, "nothing was written");
    let current = json!([{"op": "update", "bucket": "tides", "key": 1, "data": {"level": 5}, "version": 1}]);
    client.call("store.transaction", json!({"operations": current})).await;
    let wrong = json!([{"op": "delete", "bucket": "tides", "key": 1, "version": "one"}]);
    let message =
        expect_error(&mut client, "store.transaction", json!({"operations": wrong}), "VALIDATION_ERROR").await;
    assert!(message.contains("operations[0]") && message.contains("version"), "{message}");
}
