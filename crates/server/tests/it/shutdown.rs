//! How a server ends.

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

use crate::client::{Client, notes, options, serve, serve_store};
use crate::page::{Page, metric, wait_for};
use crate::raw::{CLOSE, Raw, TEXT, frame, handshake};

const HOUR: Duration = Duration::from_hours(1);

async fn is_told(client: &mut Client, grace: u64) {
    let told = client.receive().await;
    assert_eq!(told, json!({"type": "system", "event": "shutdown", "gracePeriodMs": grace}));
}

async fn is_ended(client: &mut Client) {
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_are_served_for_the_grace_and_it_ends_early_when_all_have_left() {
    let server = serve(options()).await;
    let address = server.address();
    let (mut one, mut two) = (Client::connect(&server).await, Client::connect(&server).await);
    one.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    one.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
    one.ask("store.subscribe", json!({"query": "all"})).await;
    let mut idle = Raw::connect(&server).await;
    idle.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    assert_eq!(idle.response().await.0, 200);
    let stopping = tokio::spawn(server.stop(HOUR));
    is_told(&mut one, 3_600_000).await;
    is_told(&mut two, 3_600_000).await;
    assert!(!idle.more().await, "whoever is no client is not waited for");
    // Nobody is let in.
    assert!(TcpStream::connect(address).await.is_err());
    // And all is done for who is there.
    two.ask("store.insert", json!({"bucket": "notes", "data": {"text": "ebb"}})).await;
    assert_eq!(one.push().await["data"][0]["text"], "ebb");
    one.ask("store.count", json!({"bucket": "notes"})).await;
    drop(one);
    two.ask("store.count", json!({"bucket": "notes"})).await;
    assert!(!stopping.is_finished());
    drop(two);
    timeout(PATIENCE, stopping).await.expect("it does not wait for an hour").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_stays_is_ended_when_the_grace_is_over() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let stopping = tokio::spawn(server.stop(Duration::from_millis(50)));
    is_told(&mut client, 50).await;
    is_ended(&mut client).await;
    drop(client);
    stopping.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_grace_there_is_no_notice() {
    let server = serve(options()).await;
    let mut raw = Raw::websocket(&server).await;
    let stopping = tokio::spawn(server.stop(Duration::ZERO));
    let (kind, payload) = raw.frame().await.unwrap();
    assert_eq!((kind, &payload[..2], &payload[2..]), (8, &[0x03, 0xe8][..], &b"server_shutdown"[..]));
    raw.write(&frame(CLOSE, &payload[..2])).await;
    assert!(!raw.more().await);
    stopping.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_there_is_nothing_to_wait_for() {
    let server = serve(options()).await;
    let mut half = Raw::connect(&server).await;
    half.write(&handshake("/", "").as_bytes()[..30]).await;
    timeout(PATIENCE, server.stop(HOUR)).await.expect("it does not wait for an hour");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_answer_the_close_is_not_waited_for_for_ever() {
    let server = serve(options()).await;
    let mut raw = Raw::websocket(&server).await;
    let began = tokio::time::Instant::now();
    server.stop(Duration::from_secs(7)).await;
    assert!(began.elapsed() >= Duration::from_secs(7) && began.elapsed() < Duration::from_secs(20));
    assert_eq!(raw.closed().await, (1000, "server_shutdown".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_asked_before_the_end_is_answered() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    let mut raw = Raw::websocket(&server).await;
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
async fn a_server_that_is_dropped_ends_at_once_and_its_store_goes_on() {
    let store = Store::memory(StoreOptions::default());
    let server = serve_store(store.clone(), options()).await;
    let address = server.address();
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    drop(server);
    is_ended(&mut client).await;
    tidewire_testkit::wait_until_async("nobody listens", PATIENCE, async || TcpStream::connect(address).await.is_err())
        .await;
    let again = options().port(address.port());
    let server = serve_store(store, again).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.ask("store.buckets", json!({})).await["names"], json!(["notes"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_stops_waiting_for_the_end_has_dropped_the_server() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let stopping = tokio::spawn(server.stop(HOUR));
    is_told(&mut client, 3_600_000).await;
    stopping.abort();
    assert!(stopping.await.unwrap_err().is_cancelled());
    is_ended(&mut client).await;
}

/// A validator whose logins wait until the test opens the gate.
#[derive(Debug)]
struct Gate(Semaphore);

impl TokenValidator for Gate {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            self.0.acquire().await.expect("the gate is not closed").forget();
            Ok(Some(Session::new(token, ["admin"])))
        })
    }
}

async fn serve_gate() -> (Server, Store, Arc<Gate>) {
    let gate = Arc::new(Gate(Semaphore::new(0)));
    let options = options().auth(Auth::new(Arc::clone(&gate)).required(false));
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("notes", notes()).wait().unwrap();
    (serve_store(store.clone(), options).await, store, gate)
}

/// Sends a login that waits at the gate, and requests behind it. Returns when the server has read all of them.
async fn queue_requests(server: &Server, raw: &mut Raw, behind: u64) {
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
    let is_read = |page: &Page| page.get("messages_received_total") == read + 1 + behind;
    wait_for(server, "all requests are read", is_read).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_were_read_and_not_run_are_refused_when_the_grace_period_ends() {
    for grace in [Duration::ZERO, Duration::from_millis(1)] {
        let (server, store, gate) = serve_gate().await;
        let (mut raw, mut idle) = (Raw::websocket(&server).await, Client::connect(&server).await);
        queue_requests(&server, &mut raw, 50).await;
        let stopping = tokio::spawn(server.stop(grace));
        // The grace period has ended for all when it has for one.
        is_ended(&mut idle).await;
        drop(idle);
        gate.0.add_permits(1);
        let mut message = raw.json().await;
        if !grace.is_zero() {
            assert_eq!(message["event"], "shutdown", "{message}");
            message = raw.json().await;
        }
        assert_eq!((&message["id"], &message["type"]), (&json!(0), &json!("result")), "it ran: {message}");
        for id in 1..=50 {
            let reply = raw.json().await;
            assert_eq!((&reply["id"], &reply["code"]), (&json!(id), &json!("SHUTTING_DOWN")), "{reply}");
        }
        assert_eq!(raw.closed().await, (1000, "server_shutdown".to_owned()));
        timeout(PATIENCE, stopping).await.expect("the server stops").unwrap();
        assert_eq!(store.snapshot().state.bucket("notes").unwrap().len(), 0, "nothing was inserted");
    }
}

/// Time is paused, and passes when nothing else happens.
#[tokio::test(start_paused = true)]
async fn a_request_that_does_not_end_is_given_up_and_its_client_gets_a_close_frame() {
    let (server, _store, _gate) = serve_gate().await;
    let mut raw = Raw::websocket(&server).await;
    queue_requests(&server, &mut raw, 3).await;
    let began = tokio::time::Instant::now();
    server.stop(Duration::from_secs(7)).await;
    assert!(began.elapsed() < Duration::from_secs(13), "{:?}", began.elapsed());
    assert_eq!(raw.json().await["event"], "shutdown");
    assert_eq!(raw.closed_at_once().await, (1000, "server_shutdown".to_owned()));
}
