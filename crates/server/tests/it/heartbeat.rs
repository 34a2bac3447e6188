//! Heartbeat: pings, pongs and timeouts. The clock of the runtime is paused, and advances when all tasks are idle.

use std::time::Duration;

use futures_util::SinkExt as _;
use serde_json::json;
use tidewire::auth::Auth;
use tidewire::{Heartbeat, Server, ServerOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{FaultProxy, Faults};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Client, RoleTokens, notes_config, options, serve, serve_store, wait_for_connections};
use crate::metrics_page::metric;
use crate::raw_client::RawClient;

fn with_heartbeat(interval: u64, timeout: u64) -> ServerOptions {
    let heartbeat = Heartbeat::default().interval(Duration::from_millis(interval));
    options().heartbeat(heartbeat.timeout(Duration::from_millis(timeout)))
}

/// Receives a ping and returns its timestamp.
async fn ping(client: &mut Client) -> u64 {
    let ping = client.receive().await;
    assert_eq!(ping["type"], "ping");
    assert_eq!(ping.as_object().unwrap().len(), 2, "{ping}");
    ping["timestamp"].as_u64().unwrap()
}

async fn pong(client: &mut Client, timestamp: serde_json::Value) {
    client.send_text(json!({"type": "pong", "timestamp": timestamp}).to_string()).await;
}

/// Returns the elapsed time in seconds, because timers are accurate to milliseconds only.
fn seconds(since: Instant) -> u64 {
    since.elapsed().as_secs()
}

async fn expect_heartbeat_timeout(client: &mut Client) {
    assert_eq!(client.closed().await, (4001, "heartbeat_timeout".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn client_that_answers_pings_stays_connected() {
    let server = serve(with_heartbeat(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    let start = Instant::now();
    for round in 1..=5 {
        let timestamp = ping(&mut client).await;
        assert_eq!(seconds(start), round * 30);
        // The timestamp of the ping, a later one, one with a fraction, or a huge one.
        let answer = [
            json!(timestamp),
            json!(timestamp + 12_345),
            serde_json::from_str(&format!("{timestamp}.5")).unwrap(),
            json!(1e300),
        ];
        pong(&mut client, answer[usize::try_from(round).unwrap() % 4].clone()).await;
    }
    client.call("store.buckets", json!({})).await;
    assert_eq!(server.connection_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn silent_client_is_disconnected() {
    for (interval, timeout, closed_after) in [(30_000, 10_000, 40), (5_000, 10_000, 10), (7_000, 7_000, 14)] {
        let server = serve(with_heartbeat(interval, timeout)).await;
        let mut client = Client::connect(&server).await;
        let start = Instant::now();
        ping(&mut client).await;
        expect_heartbeat_timeout(&mut client).await;
        assert_eq!(seconds(start), closed_after);
        wait_for_connections(&server, 0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn pong_with_an_earlier_timestamp_does_not_count() {
    let server = serve(with_heartbeat(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    let first = ping(&mut client).await;
    pong(&mut client, json!(first)).await;
    let second = ping(&mut client).await;
    pong(&mut client, json!(second - 1)).await;
    pong(&mut client, json!(0)).await;
    pong(&mut client, json!(-1e300)).await;
    expect_heartbeat_timeout(&mut client).await;
    wait_for_connections(&server, 0).await;
}

#[tokio::test(start_paused = true)]
async fn other_traffic_does_not_replace_a_pong() {
    let server = serve(with_heartbeat(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    let start = Instant::now();
    let timestamp = ping(&mut client).await;
    for _ in 0..9 {
        tokio::time::advance(Duration::from_secs(1)).await;
        client.call("store.buckets", json!({})).await;
        client.socket.send(Message::Pong("x".into())).await.unwrap();
        client.socket.send(Message::Ping("x".into())).await.unwrap();
    }
    // An invalid pong is answered with an error, and does not count.
    client.send_text(json!({"type": "pong", "timestamp": timestamp.to_string()}).to_string()).await;
    assert_eq!(client.receive().await["code"], "INVALID_REQUEST");
    expect_heartbeat_timeout(&mut client).await;
    assert_eq!(seconds(start), 40);
    wait_for_connections(&server, 0).await;
}

#[tokio::test(start_paused = true)]
async fn unsolicited_pong_does_not_count() {
    let server = serve(with_heartbeat(30_000, 10_000)).await;
    let mut client = Client::connect(&server).await;
    pong(&mut client, json!(0)).await;
    pong(&mut client, json!(1)).await;
    client.call("store.buckets", json!({})).await;
    ping(&mut client).await;
    expect_heartbeat_timeout(&mut client).await;
}

#[tokio::test(start_paused = true)]
async fn pong_counts_while_a_request_is_in_flight() {
    let options = with_heartbeat(30_000, 10_000).request_timeout(Duration::from_secs(100)).auth(Auth::new(RoleTokens));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    let login = client.send("auth.login", json!({"token": "slow"})).await;
    let whoami = client.send("auth.whoami", json!({})).await;
    let start = Instant::now();
    for _ in 0..3 {
        let timestamp = ping(&mut client).await;
        pong(&mut client, json!(timestamp)).await;
    }
    assert_eq!(client.reply(login).await["code"], "TIMEOUT");
    assert_eq!(seconds(start), 100);
    assert_eq!(client.reply(whoami).await["data"]["authenticated"], false);
}

/// Starts a server with a bucket of 6 MiB, more than the socket buffers hold, and a client with a small receive buffer.
async fn with_large_bucket(options: ServerOptions) -> (Server, RawClient) {
    // Written to the store directly: with a paused clock, a request that waits for the store's thread times out.
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("b", notes_config()).wait().unwrap();
    let text = "x".repeat(128 * 1024);
    for _ in 0..48 {
        let record = json!({"text": text});
        store.insert("b", record.as_object().unwrap().clone()).wait().unwrap();
    }
    let server = serve_store(store, options).await;
    let raw = RawClient::with_small_buffer(&server).await;
    (server, raw)
}

const LARGE_QUERY: &str = r#"{"id":1,"type":"store.all","bucket":"b"}"#;

/// Stops the paused clock from advancing by itself: until it is dropped, only `advance` moves time, however long the sockets take.
struct HeldClock {
    _release: std::sync::mpsc::Sender<()>,
}

impl HeldClock {
    fn hold() -> Self {
        let (release, released) = std::sync::mpsc::channel();
        // The runtime does not advance time while a blocking task runs. This one ends when the sender is dropped.
        drop(tokio::task::spawn_blocking(move || released.recv()));
        Self { _release: release }
    }

    /// Advances time, and lets the connections react to it.
    async fn advance(&self, server: &Server, seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
        let mut other = Client::connect(server).await;
        for _ in 0..10 {
            other.call("store.buckets", json!({})).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn pong_counts_while_a_large_reply_is_unread() {
    let (server, mut slow) = with_large_bucket(with_heartbeat(30_000, 10_000)).await;
    let ping = slow.json().await;
    let time = HeldClock::hold();
    slow.send(LARGE_QUERY).await;
    // Part of the reply has arrived, so the output buffer of the connection is full.
    assert!(slow.read_some().await);
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
async fn ping_timeout_starts_when_the_large_reply_before_it_is_read() {
    let (server, mut slow) = with_large_bucket(with_heartbeat(10_000, 5_000)).await;
    let time = HeldClock::hold();
    slow.send(LARGE_QUERY).await;
    assert!(slow.read_some().await);
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

/// A client that reads nothing within the timeout is disconnected, even if the ping is still queued.
#[tokio::test(start_paused = true)]
async fn ping_behind_an_unread_reply_times_out() {
    let (server, mut slow) = with_large_bucket(with_heartbeat(10_000, 5_000)).await;
    let time = HeldClock::hold();
    slow.send(LARGE_QUERY).await;
    assert!(slow.read_some().await);
    time.advance(&server, 10).await;
    time.advance(&server, 5).await;
    assert_eq!(metric(&server, "heartbeats_missed_total").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_connection_is_closed() {
    let server = serve(with_heartbeat(50, 50)).await;
    let proxy = FaultProxy::start(server.address());
    let mut client = Client::connect_to(&format!("ws://{}/", proxy.addr())).await;
    proxy.inject(Faults::default().half_open(true));
    // The pong does not arrive, and the server sees no end of the stream.
    pong(&mut client, json!(1e300)).await;
    wait_for_connections(&server, 0).await;
}
