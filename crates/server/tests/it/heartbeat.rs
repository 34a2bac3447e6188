//! Pings, pongs, and those who give no sign of life. Time is the runtime's, and passes when nothing else happens.

use std::time::Duration;

use futures_util::SinkExt as _;
use serde_json::json;
use tidewire::auth::Auth;
use tidewire::{Heartbeat, Server, ServerOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{FaultProxy, Faults};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Client, Tokens, is_left_with, notes, options, serve, serve_store};
use crate::page::metric;
use crate::raw::Raw;

fn beating(interval: u64, timeout: u64) -> ServerOptions {
    let heartbeat = Heartbeat::default().interval(Duration::from_millis(interval));
    options().heartbeat(heartbeat.timeout(Duration::from_millis(timeout)))
}

/// Waits for a ping; gives its timestamp.
async fn ping(client: &mut Client) -> u64 {
    let ping = client.receive().await;
    assert_eq!(ping["type"], "ping");
    assert_eq!(ping.as_object().unwrap().len(), 2, "{ping}");
    ping["timestamp"].as_u64().unwrap()
}

async fn pong(client: &mut Client, timestamp: serde_json::Value) {
    client.send_text(json!({"type": "pong", "timestamp": timestamp}).to_string()).await;
}

/// Seconds, as the runtime counts them; the clock of timers counts milliseconds.
fn seconds(since: Instant) -> u64 {
    since.elapsed().as_secs()
}

async fn is_given_up(client: &mut Client) {
    assert_eq!(client.closed().await, (4001, "heartbeat_timeout".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn whoever_answers_stays() {
    let server = serve(beating(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    let began = Instant::now();
    for round in 1..=5 {
        let timestamp = ping(&mut client).await;
        assert_eq!(seconds(began), round * 30);
        // Its own timestamp, a later one, or one with a fraction.
        let answer = [
            json!(timestamp),
            json!(timestamp + 12_345),
            serde_json::from_str(&format!("{timestamp}.5")).unwrap(),
            json!(1e300),
        ];
        pong(&mut client, answer[usize::try_from(round).unwrap() % 4].clone()).await;
    }
    client.ask("store.buckets", json!({})).await;
    assert_eq!(server.connection_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn whoever_is_silent_is_given_up() {
    for (interval, timeout, ends) in [(30_000, 10_000, 40), (5_000, 10_000, 10), (7_000, 7_000, 14)] {
        let server = serve(beating(interval, timeout)).await;
        let mut client = Client::connect(&server).await;
        let began = Instant::now();
        ping(&mut client).await;
        is_given_up(&mut client).await;
        assert_eq!(seconds(began), ends);
        is_left_with(&server, 0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_earlier_timestamp_is_no_answer() {
    let server = serve(beating(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    let first = ping(&mut client).await;
    pong(&mut client, json!(first)).await;
    let second = ping(&mut client).await;
    pong(&mut client, json!(second - 1)).await;
    pong(&mut client, json!(0)).await;
    pong(&mut client, json!(-1e300)).await;
    is_given_up(&mut client).await;
    is_left_with(&server, 0).await;
}

#[tokio::test(start_paused = true)]
async fn other_traffic_is_no_sign_of_life() {
    let server = serve(beating(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    let began = Instant::now();
    let timestamp = ping(&mut client).await;
    for _ in 0..9 {
        tokio::time::advance(Duration::from_secs(1)).await;
        client.ask("store.buckets", json!({})).await;
        client.socket.send(Message::Pong("x".into())).await.unwrap();
        client.socket.send(Message::Ping("x".into())).await.unwrap();
    }
    // A pong that is wrong is told so, and is none.
    client.send_text(json!({"type": "pong", "timestamp": timestamp.to_string()}).to_string()).await;
    assert_eq!(client.receive().await["code"], "INVALID_REQUEST");
    is_given_up(&mut client).await;
    assert_eq!(seconds(began), 40);
    is_left_with(&server, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_pong_that_nobody_asked_for_is_nothing() {
    let server = serve(beating(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    pong(&mut client, json!(0)).await;
    pong(&mut client, json!(1)).await;
    client.ask("store.buckets", json!({})).await;
    ping(&mut client).await;
    is_given_up(&mut client).await;
}

#[tokio::test(start_paused = true)]
async fn a_pong_counts_also_while_a_request_takes_its_time() {
    let options = beating(30_000, 10_000).request_timeout(Duration::from_secs(100)).auth(Auth::new(Tokens));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    let login = client.send("auth.login", json!({"token": "slow"})).await;
    let whoami = client.send("auth.whoami", json!({})).await;
    let began = Instant::now();
    for _ in 0..3 {
        let timestamp = ping(&mut client).await;
        pong(&mut client, json!(timestamp)).await;
    }
    assert_eq!(client.reply(login).await["code"], "TIMEOUT");
    assert_eq!(seconds(began), 100);
    assert_eq!(client.reply(whoami).await["data"]["authenticated"], false);
}

/// A server with a bucket of 6 MiB, more than the system buffers for a socket, and a client with a small receive buffer.
async fn with_large_bucket(options: ServerOptions) -> (Server, Raw) {
    // Directly: where time is paused, a request that waits for the store's thread times out.
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("b", notes()).wait().unwrap();
    let text = "x".repeat(128 * 1024);
    for _ in 0..48 {
        let record = json!({"text": text});
        store.insert("b", record.as_object().unwrap().clone()).wait().unwrap();
    }
    let server = serve_store(store, options).await;
    let raw = Raw::small(&server).await;
    (server, raw)
}

const LARGE_QUERY: &str = r#"{"id":1,"type":"store.all","bucket":"b"}"#;

/// While it lives, paused time passes only when a test advances it, also if the sockets take a while.
struct Standstill {
    _release: std::sync::mpsc::Sender<()>,
}

impl Standstill {
    fn begin() -> Self {
        let (release, released) = std::sync::mpsc::channel();
        // The runtime does not advance time while a blocking task runs. This one ends when the sender is dropped.
        drop(tokio::task::spawn_blocking(move || released.recv()));
        Self { _release: release }
    }

    /// Advances time, and lets the connections act on it.
    async fn advance(&self, server: &Server, seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
        let mut other = Client::connect(server).await;
        for _ in 0..10 {
            other.ask("store.buckets", json!({})).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pong_counts_while_a_large_reply_waits_to_be_read() {
    let (server, mut slow) = with_large_bucket(beating(30_000, 10_000)).await;
    let ping = slow.json().await;
    let time = Standstill::begin();
    slow.send(LARGE_QUERY).await;
    // The reply has begun, so the batch of the connection is full.
    assert!(slow.more().await);
    slow.send(&json!({"type": "pong", "timestamp": ping["timestamp"]}).to_string()).await;
    for _ in 0..1000 {
        if metric(&server, "messages_received_total").await == 2 {
            break;
        }
    }
    time.advance(&server, 15).await;
    let reply = slow.json().await;
    assert_eq!((&reply["id"], reply["data"].as_array().unwrap().len()), (&json!(1), 48));
    slow.send(r#"{"id":2,"type":"store.buckets"}"#).await;
    assert_eq!(slow.json().await["id"], 2);
    assert_eq!(metric(&server, "heartbeats_missed_total").await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_ping_behind_a_large_reply_has_its_timeout_when_the_reply_is_read() {
    let (server, mut slow) = with_large_bucket(beating(10_000, 5_000)).await;
    let time = Standstill::begin();
    slow.send(LARGE_QUERY).await;
    assert!(slow.more().await);
    time.advance(&server, 10).await;
    // Reading the reply takes longer than the timeout.
    for _ in 0..5 {
        slow.read_more(1 << 20).await;
        time.advance(&server, 3).await;
    }
    assert_eq!(slow.json().await["id"], 1);
    let ping = slow.json().await;
    assert_eq!(ping["type"], "ping");
    slow.send(&json!({"type": "pong", "timestamp": ping["timestamp"]}).to_string()).await;
    slow.send(r#"{"id":2,"type":"store.buckets"}"#).await;
    assert_eq!(slow.json().await["id"], 2);
    time.advance(&server, 4).await;
    slow.send(r#"{"id":3,"type":"store.buckets"}"#).await;
    assert_eq!(slow.json().await["id"], 3);
    assert_eq!(metric(&server, "heartbeats_missed_total").await, 0);
}

/// A client that takes nothing within the timeout is closed, wherever the ping is.
#[tokio::test(start_paused = true)]
async fn a_ping_behind_a_reply_that_is_not_read_is_missed() {
    let (server, mut slow) = with_large_bucket(beating(10_000, 5_000)).await;
    let time = Standstill::begin();
    slow.send(LARGE_QUERY).await;
    assert!(slow.more().await);
    time.advance(&server, 10).await;
    time.advance(&server, 5).await;
    assert_eq!(metric(&server, "heartbeats_missed_total").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_vanished_is_given_up() {
    let server = serve(beating(50, 50)).await;
    let proxy = FaultProxy::start(server.address());
    let mut client = Client::connect_to(&format!("ws://{}/", proxy.addr())).await;
    proxy.inject(Faults::default().half_open(true));
    // What it says does not arrive, and nobody tells the server that it has gone.
    pong(&mut client, json!(1e300)).await;
    is_left_with(&server, 0).await;
}
