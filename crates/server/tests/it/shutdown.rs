//! Graceful shutdown, and dropping a server.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tidewire::Server;
use tidewire::auth::{Auth, Session, TokenValidator, Validation};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::PATIENCE;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::client::{Client, notes_config, options, serve, serve_store};
use crate::metrics_page::{MetricsPage, metric, wait_for_metrics};
use crate::raw_client::{CLOSE, RawClient, TEXT, frame, handshake};

const HOUR: Duration = Duration::from_hours(1);

async fn expect_shutdown_notice(client: &mut Client, grace: u64) {
    let notice = client.receive().await;
    assert_eq!(notice, json!({"type": "system", "event": "shutdown", "gracePeriodMs": grace}));
}

async fn expect_shutdown_close(client: &mut Client) {
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_are_served_in_the_grace_period_and_it_ends_early_without_clients() {
    let server = serve(options()).await;
    let address = server.address();
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    one.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    one.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
    one.call("store.subscribe", json!({"query": "all"})).await;
    let mut idle = RawClient::connect(&server).await;
    idle.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    assert_eq!(idle.response().await.0, 200);
    let stopping = tokio::spawn(server.stop(HOUR));
    expect_shutdown_notice(&mut one, 3_600_000).await;
    expect_shutdown_notice(&mut two, 3_600_000).await;
    assert!(!idle.read_some().await, "an idle HTTP connection does not delay the shutdown");
    // New connections fail.
    assert!(TcpStream::connect(address).await.is_err());
    // Existing clients are served.
    two.call("store.insert", json!({"bucket": "notes", "data": {"text": "ebb"}})).await;
    assert_eq!(one.push().await["data"][0]["text"], "ebb");
    one.call("store.count", json!({"bucket": "notes"})).await;
    drop(one);
    two.call("store.count", json!({"bucket": "notes"})).await;
    assert!(!stopping.is_finished());
    drop(two);
    timeout(PATIENCE, stopping).await.expect("the grace period ends early").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn remaining_clients_are_disconnected_after_the_grace_period() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let stopping = tokio::spawn(server.stop(Duration::from_millis(50)));
    expect_shutdown_notice(&mut client, 50).await;
    expect_shutdown_close(&mut client).await;
    drop(client);
    stopping.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_grace_period_sends_no_notice() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    let stopping = tokio::spawn(server.stop(Duration::ZERO));
    let (kind, payload) = raw.frame().await.unwrap();
    assert_eq!((kind, &payload[..2], &payload[2..]), (8, &[0x03, 0xe8][..], &b"server_shutdown"[..]));
    raw.write(&frame(CLOSE, &payload[..2])).await;
    assert!(!raw.read_some().await);
    stopping.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_without_clients_is_immediate() {
    let server = serve(options()).await;
    let mut half = RawClient::connect(&server).await;
    half.write(&handshake("/", "").as_bytes()[..30]).await;
    timeout(PATIENCE, server.stop(HOUR)).await.expect("the grace period ends early");
}

#[tokio::test(start_paused = true)]
async fn client_that_does_not_answer_the_close_delays_shutdown_for_a_limited_time() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    let start = tokio::time::Instant::now();
    server.stop(Duration::from_secs(7)).await;
    assert!(start.elapsed() >= Duration::from_secs(7) && start.elapsed() < Duration::from_secs(20));
    assert_eq!(raw.closed().await, (1000, "server_shutdown".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_sent_in_the_grace_period_are_answered() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    let mut raw = RawClient::websocket(&server).await;
    let stopping = tokio::spawn(server.stop(Duration::from_millis(500)));
    assert_eq!(raw.json().await["type"], "system");
    let mut bytes = Vec::new();
    for id in 1..=50 {
        let insert = json!({"id": id, "type": "store.insert", "bucket": "notes", "data": {"text": "x"}});
        bytes.extend(frame(TEXT, insert.to_string().as_bytes()));
    }
    raw.write(&bytes).await;
    for id in 1..=50 {
        let reply = raw.json().await;
        assert_eq!((&reply["id"], &reply["type"]), (&json!(id), &json!("result")));
    }
    assert_eq!(raw.closed().await, (1000, "server_shutdown".to_owned()));
    drop(client);
    stopping.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_server_closes_at_once_and_its_store_stays_usable() {
    let store = Store::memory(StoreOptions::default());
    let server = serve_store(store.clone(), options()).await;
    let address = server.address();
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    drop(server);
    expect_shutdown_close(&mut client).await;
    tidewire_testkit::wait_until_async("the port is closed", PATIENCE, async || {
        TcpStream::connect(address).await.is_err()
    })
    .await;
    let again = options().port(address.port());
    let server = serve_store(store, again).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.call("store.buckets", json!({})).await["names"], json!(["notes"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_stop_drops_the_server() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let stopping = tokio::spawn(server.stop(HOUR));
    expect_shutdown_notice(&mut client, 3_600_000).await;
    stopping.abort();
    assert!(stopping.await.unwrap_err().is_cancelled());
    expect_shutdown_close(&mut client).await;
}

/// A validator that blocks logins until it gets a permit.
#[derive(Debug)]
struct GatedValidator(Semaphore);

impl TokenValidator for GatedValidator {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            self.0.acquire().await.expect("the semaphore is open").forget();
            Ok(Some(Session::new(token, ["admin"])))
        })
    }
}

async fn serve_gated() -> (Server, Store, Arc<GatedValidator>) {
    let gate = Arc::new(GatedValidator(Semaphore::new(0)));
    let options = options().auth(Auth::new(Arc::clone(&gate)).required(false));
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("notes", notes_config()).wait().unwrap();
    (serve_store(store.clone(), options).await, store, gate)
}

/// Sends a login that blocks in the validator, and requests behind it. Returns when the server has read all of them.
async fn queue_requests(server: &Server, raw: &mut RawClient, behind: u64) {
    let read = metric(server, "messages_received_total").await;
    raw.send(&json!({"id": 0, "type": "auth.login", "token": "mara"}).to_string()).await;
    let mut bytes = Vec::new();
    for id in 1..=behind {
        let insert = json!({"id": id, "type": "store.insert", "bucket": "notes", "data": {"text": "x"}});
        let count = json!({"id": id, "type": "store.count", "bucket": "notes"});
        let request = if id % 2 == 0 { insert } else { count };
        bytes.extend(frame(TEXT, request.to_string().as_bytes()));
    }
    raw.write(&bytes).await;
    let is_read = |page: &MetricsPage| page.get("messages_received_total") == read + 1 + behind;
    wait_for_metrics(server, "all requests are read", is_read).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_requests_are_rejected_when_the_grace_period_ends() {
    for grace in [Duration::ZERO, Duration::from_millis(1)] {
        let (server, store, gate) = serve_gated().await;
        let (mut raw, mut idle) = (RawClient::websocket(&server).await, Client::connect(&server).await);
        queue_requests(&server, &mut raw, 50).await;
        let stopping = tokio::spawn(server.stop(grace));
        // The grace period ends for all connections at once.
        expect_shutdown_close(&mut idle).await;
        drop(idle);
        gate.0.add_permits(1);
        let mut message = raw.json().await;
        if !grace.is_zero() {
            assert_eq!(message["event"], "shutdown", "{message}");
            message = raw.json().await;
        }
        assert_eq!((&message["id"], &message["type"]), (&json!(0), &json!("result")), "the login ran: {message}");
        for id in 1..=50 {
            let reply = raw.json().await;
            assert_eq!((&reply["id"], &reply["code"]), (&json!(id), &json!("SHUTTING_DOWN")), "{reply}");
        }
        assert_eq!(raw.closed().await, (1000, "server_shutdown".to_owned()));
        timeout(PATIENCE, stopping).await.expect("the server stops").unwrap();
        assert_eq!(store.snapshot().state.bucket("notes").unwrap().len(), 0, "nothing was inserted");
    }
}

/// The clock is paused, and advances when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn request_that_does_not_end_is_abandoned_and_its_client_gets_a_close_frame() {
    let (server, _store, _gate) = serve_gated().await;
    let mut raw = RawClient::websocket(&server).await;
    queue_requests(&server, &mut raw, 3).await;
    let start = tokio::time::Instant::now();
    server.stop(Duration::from_secs(7)).await;
    assert!(start.elapsed() < Duration::from_secs(13), "{:?}", start.elapsed());
    assert_eq!(raw.json().await["event"], "shutdown");
    assert_eq!(raw.immediate_close().await, (1000, "server_shutdown".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_http_head_does_not_delay_a_stopped_server() {
    let dir = tempfile::tempdir().unwrap();
    let options = options().handshake_timeout(HOUR);
    let (store, _) = Store::open(dir.path(), StoreOptions::default()).unwrap();
    let server = serve_store(store, options).await;
    let mut raw = RawClient::connect(&server).await;
    raw.write(b"GET /hea").await;
    // A later client is served, so the server has accepted this socket.
    drop(Client::connect(&server).await);
    server.stop(Duration::ZERO).await;
    tidewire_testkit::wait_until_async("the data directory is released", PATIENCE, async || {
        Store::open(dir.path(), StoreOptions::default()).is_ok()
    })
    .await;
    assert!(!raw.read_some().await);
}
