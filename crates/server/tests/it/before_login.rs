//! Limits on clients before their first login, if login is required.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, BeforeLogin};
use tidewire::{Heartbeat, RateLimit, Server};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Client, RoleTokens, options, serve};
use crate::metrics_page::{MetricsPage, metric, wait_for_metrics};
use crate::raw_client::{RawClient, TEXT, frame, handshake};
use crate::test_server::{TestServer, tokens, user};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const OTHER_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

async fn serve_with(auth: Auth) -> Server {
    serve(options().auth(auth)).await
}

/// Returns a message of this length that is not JSON.
fn filler(bytes: usize) -> String {
    "x".repeat(bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn message_size_is_limited_before_the_first_login() {
    let server = serve_with(Auth::new(RoleTokens)).await;
    let mut client = Client::connect(&server).await;
    // A message at the limit is accepted. A failed login does not remove the limit.
    client.call_err("auth.login", json!({"token": "unknown"})).await;
    client.send_text(filler(16 * KIB)).await;
    assert_eq!(client.receive().await["code"], "PARSE_ERROR");
    client.send_text(filler(16 * KIB + 1)).await;
    assert_eq!(client.closed().await.0, 1009);

    // The limit also applies to the sum of small fragments.
    let mut raw = RawClient::websocket(&server).await;
    raw.write(&frame(0x01, filler(10 * KIB).as_bytes())).await;
    raw.write(&frame(0x80, filler(10 * KIB).as_bytes())).await;
    assert_eq!(raw.closed().await.0, 1009);
    wait_for_metrics(&server, "both connections are counted", |page| page.ended("decode") == 2).await;

    // After a login the limit of the server applies, also after a logout.
    let mut client = Client::connect(&server).await;
    client.call("auth.login", json!({"token": "mara:admin"})).await;
    for size in [16 * KIB + 1, MIB] {
        client.send_text(filler(size)).await;
        assert_eq!(client.receive().await["code"], "PARSE_ERROR");
    }
    client.call("auth.logout", json!({})).await;
    client.send_text(filler(MIB)).await;
    assert_eq!(client.receive().await["code"], "PARSE_ERROR");
    client.socket.send(Message::text(filler(MIB + 1))).await.unwrap();
    assert_eq!(client.closed().await.0, 1009);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_message_is_accepted_right_after_login() {
    let server = serve_with(Auth::new(RoleTokens)).await;
    let mut client = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
    client.call("auth.login", json!({"token": "mara:admin"})).await;
    client.call("store.defineBucket", json!({"name": "b", "config": config})).await;
    for _ in 0..50 {
        let mut client = Client::connect(&server).await;
        client.call("auth.login", json!({"token": "mara:admin"})).await;
        client.call("store.insert", json!({"bucket": "b", "data": {"pad": filler(100 * KIB)}})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn optional_login_lifts_the_limits() {
    let limits = BeforeLogin::default()
        .max_payload_bytes(10)
        .max_connections_per_ip(0)
        .rate_limit(RateLimit::new(0, Duration::from_hours(1)));
    let auth = Auth::new(RoleTokens).required(false).login_timeout(Duration::from_millis(1)).before_login(limits);
    let server = serve_with(auth).await;
    let mut client = Client::connect(&server).await;
    client.call("store.buckets", json!({})).await;
    client.send_text(filler(MIB)).await;
    assert_eq!(client.receive().await["code"], "PARSE_ERROR");
}

/// The clients send messages of 1 MiB without their last byte, as an attacker would. Without the limit, 200 of them would take 200 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn anonymous_connections_hold_little_memory() {
    const SOCKETS: usize = 200;
    let server = serve_with(Auth::new(RoleTokens)).await;
    let mut large = frame(TEXT, filler(MIB).as_bytes());
    large.pop();
    let large = Arc::new(large);
    let mut writing = Vec::new();
    for _ in 0..SOCKETS {
        let (mut raw, large) = (RawClient::websocket(&server).await, Arc::clone(&large));
        writing.push(tokio::spawn(async move {
            // The client is disconnected before it has written everything.
            let _ = raw.stream.write_all(&large).await;
            raw
        }));
    }
    let mut peak = 0;
    wait_until_async("all connections are closed", PATIENCE, async || {
        let page = MetricsPage::read(&server).await;
        peak = peak.max(page.get("memory_used_bytes"));
        page.ended("decode") + page.ended("io") == SOCKETS as u64
    })
    .await;
    assert!(peak < (SOCKETS * 48 * KIB) as u64, "{peak} bytes were held");
    for task in writing {
        task.await.unwrap();
    }

    // Incomplete messages within the limit: each connection holds up to twice the size of its message and a read buffer.
    let mut small = frame(TEXT, filler(16 * KIB).as_bytes());
    small.pop();
    let mut sockets = Vec::new();
    for _ in 0..SOCKETS {
        let mut raw = RawClient::websocket(&server).await;
        raw.write(&small).await;
        sockets.push(raw);
    }
    let read = |page: &MetricsPage| page.get("memory_used_bytes") >= (SOCKETS * 16 * KIB) as u64;
    let used = wait_for_metrics(&server, "all messages are read", read).await.get("memory_used_bytes");
    assert!(used < (SOCKETS * 48 * KIB) as u64, "{used} bytes are held");
    drop(sockets);
    wait_for_metrics(&server, "the memory is released", |page| page.get("memory_used_bytes") == 0).await;
}

#[tokio::test(start_paused = true)]
async fn client_that_does_not_log_in_is_disconnected() {
    // With the first ping after the deadline, and with pings before it.
    for interval in [Duration::from_hours(1), Duration::from_secs(30)] {
        let options = options().auth(Auth::new(RoleTokens)).heartbeat(Heartbeat::default().interval(interval));
        let server = serve(options).await;
        let mut client = Client::connect(&server).await;
        let start = Instant::now();
        assert_eq!(client.call_err("auth.login", json!({"token": "unknown"})).await.0, "UNAUTHORIZED");
        let closed = loop {
            match next_message(&mut client).await {
                Message::Text(text) => {
                    let ping: Json = serde_json::from_str(text.as_str()).unwrap();
                    client.send_text(json!({"type": "pong", "timestamp": ping["timestamp"]}).to_string()).await;
                }
                Message::Close(close) => break close.unwrap(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((u16::from(closed.code), closed.reason.as_str()), (4009, "login_timeout"));
        assert_eq!(start.elapsed().as_secs(), 120);
        assert_eq!(metric(&server, "logins_timed_out_total").await, 1);
    }
}

async fn next_message(client: &mut Client) -> Message {
    client.socket.next().await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn one_login_lifts_the_login_timeout() {
    let server = serve_with(Auth::new(RoleTokens)).await;
    let (mut user, mut guest) = (Client::connect(&server).await, Client::connect(&server).await);
    tokio::time::advance(Duration::from_secs(119)).await;
    for client in [&mut user, &mut guest] {
        client.call("auth.login", json!({"token": "mara:admin"})).await;
    }
    guest.call("auth.logout", json!({})).await;
    tokio::time::advance(Duration::from_mins(30)).await;
    assert_eq!(user.call("auth.whoami", json!({})).await["userId"], "mara");
    assert_eq!(guest.call("auth.whoami", json!({})).await["authenticated"], false);

    // Without a timeout, the client stays connected.
    let server = serve_with(Auth::new(RoleTokens).login_timeout(None)).await;
    let mut client = Client::connect(&server).await;
    tokio::time::advance(Duration::from_mins(30)).await;
    client.call("auth.whoami", json!({})).await;
    assert_eq!(metric(&server, "logins_timed_out_total").await, 0);
}

async fn start_limited_server(max_requests: usize) -> TestServer {
    let limit = RateLimit::new(max_requests, Duration::from_secs(1));
    TestServer::start(tokens([user("ann", &["writer"])]).before_login(BeforeLogin::default().rate_limit(limit))).await
}

fn limited(id: u64, retry_after: u64) -> Json {
    let message = format!("Too many messages from this address before login: try again in {retry_after} ms");
    let details = json!({"retryAfterMs": retry_after});
    json!({"id": id, "type": "error", "code": "RATE_LIMITED", "message": message, "details": details})
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_before_login_counts_towards_the_rate_limit() {
    let test = start_limited_server(6).await;
    let mut ann = test.client("ann").await;
    let mut raw = RawClient::websocket(&test.server).await;
    for (message, code) in [
        ("{", "PARSE_ERROR"),
        (r#"{"type":"store.get"}"#, "INVALID_REQUEST"),
        (r#"{"id":1,"type":"no.such"}"#, "UNAUTHORIZED"),
        (r#"{"id":2,"type":"auth.no"}"#, "UNKNOWN_OPERATION"),
        (r#"{"id":3,"type":"auth.login"}"#, "VALIDATION_ERROR"),
    ] {
        raw.send(message).await;
        assert_eq!(raw.json().await["code"], code, "{message}");
    }
    test.advance(300);
    for (message, id) in [("{", 0), (r#"{"id":7,"type":"auth.whoami"}"#, 7), (r#"{"id":8,"type":"no.such"}"#, 8)] {
        raw.send(message).await;
        assert_eq!(raw.json().await, limited(id, 700), "{message}");
    }
    // All connections of an address share its budget, and a login consumes it.
    let mut other = test.anonymous().await;
    let (code, error) = other.call_err("auth.login", json!({"token": "ann"})).await;
    assert_eq!((&*code, error), ("RATE_LIMITED", limited(1, 700)));
    // Other addresses have their own.
    let mut elsewhere = RawClient::websocket_from(&test.server, OTHER_ADDRESS).await;
    assert_eq!(elsewhere.call(&json!({"id": 1, "type": "auth.whoami"})).await["type"], "result");
    // Logged-in users have a separate budget.
    for _ in 0..20 {
        ann.call("store.buckets", json!({})).await;
    }
    let page = MetricsPage::read(&test.server).await;
    assert_eq!((page.get("before_login_rate_limited_total"), page.get("requests_rate_limited_total")), (4, 0));
    test.advance(700);
    other.call("auth.login", json!({"token": "ann"})).await;
    assert_eq!(raw.call(&json!({"id": 9, "type": "auth.whoami"})).await["type"], "result");
}

#[tokio::test(start_paused = true)]
async fn pongs_are_not_rate_limited() {
    let limits = BeforeLogin::default().rate_limit(RateLimit::new(1, Duration::from_hours(10_000)));
    let auth = Auth::new(RoleTokens).login_timeout(None).before_login(limits);
    let heartbeat = Heartbeat::default().interval(Duration::from_secs(30));
    let server = serve(options().auth(auth).heartbeat(heartbeat)).await;
    let mut client = Client::connect(&server).await;
    client.call("auth.whoami", json!({})).await;
    for _ in 0..5 {
        let ping = client.receive().await;
        assert_eq!(ping["type"], "ping");
        client.send_text(json!({"type": "pong", "timestamp": ping["timestamp"]}).to_string()).await;
    }
    assert_eq!(client.call_err("auth.whoami", json!({})).await.0, "RATE_LIMITED");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_an_address_before_login_are_limited() {
    let limits = BeforeLogin::default().max_connections_per_ip(2);
    let server = serve_with(Auth::new(RoleTokens).before_login(limits)).await;
    let (mut first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    let rejected = async || {
        let mut raw = RawClient::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.head().await.0, 101, "a browser sees the reason only in a close frame");
        raw.immediate_close().await
    };
    let too_many = (4003, "too_many_connections".to_owned());
    assert_eq!(rejected().await, too_many);
    let elsewhere = RawClient::websocket_from(&server, OTHER_ADDRESS).await;
    // Only the first successful login releases the permit. A logout does not acquire it again.
    first.call_err("auth.login", json!({"token": "unknown"})).await;
    assert_eq!(rejected().await, too_many);
    first.call("auth.login", json!({"token": "mara:admin"})).await;
    first.call("auth.logout", json!({})).await;
    let third = Client::connect(&server).await;
    assert_eq!(rejected().await, too_many);
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("connections_admitted_total"), page.get("connections_refused_total")), (4, 3));
    drop((second, elsewhere));
    wait_until_async("both connections have closed", PATIENCE, async || server.connection_count() == 2).await;
    let _fourth = Client::connect(&server).await;
    drop(third);
    first.call("auth.whoami", json!({})).await;
}
