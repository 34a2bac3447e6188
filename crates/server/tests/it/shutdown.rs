//! How a server ends.

use std::time::Duration;

use serde_json::json;
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::PATIENCE;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::client::{Client, notes, options, serve, serve_store};
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
    let mut again = options();
    again.port = address.port();
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
