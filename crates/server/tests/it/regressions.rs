//! Faults that there were, and must not be again.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, mpsc};

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, TokenExpiry};
use tidewire::{Backpressure, ProgrammaticQuery, RequestError, View};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;

use crate::client::{Client, Tokens, options, serve, serve_store};
use crate::house::{House, ids, only, own_rows, tokens, user};
use crate::raw::{Raw, handshake};
use crate::tides::{fails, fails_with, fill, serve_tides, serve_tides_with};

/// Code of a host that says whether there is a tide, when it is let.
#[derive(Debug, Default)]
struct Gated {
    asked: AtomicUsize,
    /// How many more times it is let, if not for ever.
    left: Mutex<Option<usize>>,
    opened: Condvar,
}

impl Gated {
    fn set_left(&self, left: Option<usize>) {
        *self.left.lock().unwrap() = left;
        self.opened.notify_all();
    }
}

impl ProgrammaticQuery for Gated {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn answer(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        self.asked.fetch_add(1, SeqCst);
        let mut left = self.opened.wait_while(self.left.lock().unwrap(), |left| *left == Some(0)).unwrap();
        *left = left.map(|left| left - 1);
        drop(left);
        Ok(json!(view.get("tides", &json!(1))?.is_some()))
    }
}

/// Lets everybody go on when the test is over, however it ends.
struct Shut(Arc<Gated>);

impl Shut {
    /// After it has answered so many times.
    fn after(gated: &Arc<Gated>, answers: usize) -> Self {
        gated.set_left(Some(answers));
        Self(Arc::clone(gated))
    }
}

impl Drop for Shut {
    fn drop(&mut self) {
        self.0.set_left(None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_follows_slow_code_may_leave_it() {
    let gated = Arc::new(Gated::default());
    let (server, mut writer) = serve_tides_with(options().query("gated", Arc::clone(&gated))).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = Client::connect(&server).await;
        client.ask("store.subscribe", json!({"query": "gated"})).await;
        clients.push(client);
    }
    let asked = gated.asked.load(SeqCst);
    let shut = Shut::after(&gated, 0);
    fill(&mut writer, &[("Dover", 4)]).await;
    wait_until_async("the code is asked", PATIENCE, async || gated.asked.load(SeqCst) > asked).await;
    // It is asked for one of them, whichever that is, and none of them waits for it.
    for (number, client) in clients.iter_mut().enumerate() {
        let subscription = format!("sub-{}", number + 1);
        client.ask("store.unsubscribe", json!({"subscriptionId": subscription})).await;
    }
    assert_eq!(server.stats().subscriptions, 0);
    drop(shut);
    // What it answers is nobody's any more.
    for client in &mut clients {
        assert!(client.is_silent().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_to_code_is_answered_when_the_code_has_answered_once() {
    let gated = Arc::new(Gated::default());
    let (server, mut client) = serve_tides_with(options().query("gated", Arc::clone(&gated))).await;
    let shut = Shut::after(&gated, 1);
    let subscribed = client.ask("store.subscribe", json!({"query": "gated"})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": false}));
    // It is asked again, in case that something has changed meanwhile.
    wait_until_async("the code is asked", PATIENCE, async || gated.asked.load(SeqCst) == 2).await;
    fill(&mut client, &[("Dover", 4)]).await;
    drop(shut);
    assert_eq!(client.push().await["data"], true);
    assert_eq!(server.stats().subscriptions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_task_minds_a_reader_however_often_it_falls_behind() {
    const SUBSCRIPTIONS: usize = 20;
    let options = options().backpressure(Backpressure::default().max_buffered_bytes(8 * 1024));
    let server = serve(options).await;
    let mut writer = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}}});
    writer.ask("store.defineBucket", json!({"name": "b", "config": config})).await;
    let mut reader = Client::connect(&server).await;
    for _ in 0..SUBSCRIPTIONS {
        reader.ask("store.subscribe", json!({"config": {"bucket": "b"}})).await;
    }
    let tasks = tokio::runtime::Handle::current().metrics();
    let before = tasks.num_alive_tasks();
    for round in 0..200 {
        let data = json!({"id": "x", "round": round, "pad": "x".repeat(5000)});
        writer.ask("store.upsert", json!({"bucket": "b", "data": data})).await;
        // There is room for one of them at a time, and it reads them all.
        for _ in 0..SUBSCRIPTIONS {
            assert_eq!(reader.push().await["data"][0]["round"], round);
        }
    }
    let more = tasks.num_alive_tasks().saturating_sub(before);
    assert!(more < 20, "{more} tasks mind one reader");
    assert_eq!(server.stats().slow_consumers, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_revokes_may_look_at_the_server_meanwhile() {
    let options = options().auth(Auth::new(Tokens));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    client.ask("auth.login", json!({"token": "ann:reader"})).await;
    let (revoked, hears) = mpsc::channel();
    // If it waits for itself, it does so on a thread of its own.
    std::thread::spawn(move || {
        let count =
            server.revoke_sessions(|session| server.connections()[0].user_id.as_ref() == Some(&session.user_id));
        revoked.send((count, server)).unwrap();
    });
    let (count, _server) = hears.recv_timeout(PATIENCE).expect("it does not wait for itself");
    assert_eq!(count, 1);
    assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_by_http_and_does_not_read_is_cut_off() {
    let options = options().max_connections(1).handshake_timeout(std::time::Duration::from_millis(50));
    let server = serve(options).await;
    let raw = Raw::connect(&server).await;
    // More than is sent to somebody who reads none of it. It may be cut off before it has asked for all.
    let asks = b"GET /metrics HTTP/1.1\r\nHost: tide\r\n\r\n".repeat(20_000);
    let asking = raw.split(asks);
    wait_until_async("its place is free", PATIENCE, async || {
        let mut raw = Raw::connect(&server).await;
        let _ = raw.stream.write_all(b"GET /health HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
        raw.more().await && raw.head().await.0 == 200
    })
    .await;
    drop(asking);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_dawdles_over_a_head_does_not_hold_a_server_that_has_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let options = options().handshake_timeout(std::time::Duration::from_hours(1));
    let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
    let server = serve_store(store, options).await;
    let mut raw = Raw::connect(&server).await;
    raw.write(b"GET /hea").await;
    // Whoever comes later is answered, so the server has this one.
    drop(Client::connect(&server).await);
    server.stop(std::time::Duration::ZERO).await;
    wait_until_async("the data is free", PATIENCE, async || Store::open(dir.path(), StoreOptions::default()).is_ok())
        .await;
    assert!(!raw.more().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_has_no_body() {
    let server = serve(options()).await;
    for (more, body) in [("Content-Length: 4\r\n", "tide"), ("Transfer-Encoding: chunked\r\n", "0\r\n\r\n")] {
        let mut raw = Raw::connect(&server).await;
        raw.write(format!("{}{body}", handshake("/", more)).as_bytes()).await;
        assert_eq!(raw.head().await.0, 400, "{more}");
    }
    let mut raw = Raw::connect(&server).await;
    raw.write(handshake("/", "Content-Length: 0\r\n").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_logs_in_after_their_time_goes_on_with_what_they_may_follow() {
    let brief = user("brief", &["member"]).expiry(TokenExpiry::After(std::time::Duration::from_secs(1)));
    let auth = only(tokens([brief, user("ann", &["member"])]), [own_rows("member")]);
    let house = House::open_with(options().auth(auth).query("gated", Gated::default())).await;
    house.bucket("tides", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "brief"})]).await;
    let mut client = house.client("brief").await;
    let first = client.ask("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    assert_eq!(ids(&first["data"]), ["b"]);
    client.ask("store.subscribe", json!({"query": "gated"})).await;
    house.advance(1000);
    client.ask("auth.login", json!({"token": "ann"})).await;
    assert_eq!(ids(&client.push().await["data"]), ["a"]);
    assert_eq!(house.server.stats().subscriptions, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_is_not_dropped_while_others_refer_to_it() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "tide": {"type": "number", "ref": "tides"}}});
    client.ask("store.defineBucket", json!({"name": "boats", "config": config})).await;
    let message = fails(&mut client, "store.dropBucket", json!({"name": "tides"}), "VALIDATION_ERROR").await;
    assert!(message.contains("boats") && message.contains("tide"), "{message}");
    assert_eq!(client.ask("store.buckets", json!({})).await["names"], json!(["tides", "boats"]));
    client.ask("store.dropBucket", json!({"name": "boats"})).await;
    client.ask("store.dropBucket", json!({"name": "tides"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_many_inserts_names_the_record() {
    let (_server, mut client) = serve_tides().await;
    let data = json!([{"port": "Hook"}, {"port": "Brest"}, {"port": 7}]);
    let details = json!([{"field": "port", "message": "must be a string", "code": "type"}]);
    let params = json!({"bucket": "tides", "data": data});
    let message = fails_with(&mut client, "store.insertMany", params, "VALIDATION_ERROR", details).await;
    assert!(message.starts_with("data[2]: "), "{message}");
    assert_eq!(client.ask("store.count", json!({"bucket": "tides"})).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_a_transaction_may_expect_a_version() {
    let (_server, mut client) = serve_tides().await;
    fill(&mut client, &[("Hook", 1), ("Brest", 2)]).await;
    let stale = json!([
        {"op": "delete", "bucket": "tides", "key": 2, "version": 1},
        {"op": "update", "bucket": "tides", "key": 1, "data": {"level": 5}, "version": 9},
    ]);
    let details = json!({"bucket": "tides", "key": 1, "version": 1});
    let params = json!({"operations": stale});
    let message = fails_with(&mut client, "store.transaction", params, "CONFLICT", details).await;
    assert!(message.starts_with("operations[1]: "), "{message}");
    assert_eq!(client.ask("store.count", json!({"bucket": "tides"})).await, 2, "nothing was done");
    let current = json!([{"op": "update", "bucket": "tides", "key": 1, "data": {"level": 5}, "version": 1}]);
    client.ask("store.transaction", json!({"operations": current})).await;
    let wrong = json!([{"op": "delete", "bucket": "tides", "key": 1, "version": "one"}]);
    let message = fails(&mut client, "store.transaction", json!({"operations": wrong}), "VALIDATION_ERROR").await;
    assert!(message.contains("operations[0]") && message.contains("version"), "{message}");
}
