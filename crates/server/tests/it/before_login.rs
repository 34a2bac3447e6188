//! What a client may do before its first login, where a login is required.

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

use crate::client::{Client, Tokens, options, serve};
use crate::house::{House, tokens, user};
use crate::page::{Page, metric, wait_for};
use crate::raw::{Raw, TEXT, frame, handshake};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

async fn serve_with(auth: Auth) -> Server {
    serve(options().auth(auth)).await
}

/// A message of so many bytes that is no JSON.
fn filler(bytes: usize) -> String {
    "x".repeat(bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_small_until_the_first_login() {
    let server = serve_with(Auth::new(Tokens)).await;
    let mut client = Client::connect(&server).await;
    // Small enough, and a failed login changes nothing.
    client.fail("auth.login", json!({"token": "nobody"})).await;
    client.send_text(filler(16 * KIB)).await;
    assert_eq!(client.receive().await["code"], "PARSE_ERROR");
    client.send_text(filler(16 * KIB + 1)).await;
    assert_eq!(client.closed().await.0, 1009);

    // Also in fragments, each of them small.
    let mut raw = Raw::websocket(&server).await;
    raw.write(&frame(0x01, filler(10 * KIB).as_bytes())).await;
    raw.write(&frame(0x80, filler(10 * KIB).as_bytes())).await;
    assert_eq!(raw.closed().await.0, 1009);
    wait_for(&server, "both are counted", |page| page.ended("decode") == 2).await;

    // After a login the limit of the server holds, also when the user has logged out.
    let mut client = Client::connect(&server).await;
    client.ask("auth.login", json!({"token": "mara:admin"})).await;
    for size in [16 * KIB + 1, MIB] {
        client.send_text(filler(size)).await;
        assert_eq!(client.receive().await["code"], "PARSE_ERROR");
    }
    client.ask("auth.logout", json!({})).await;
    client.send_text(filler(MIB)).await;
    assert_eq!(client.receive().await["code"], "PARSE_ERROR");
    client.socket.send(Message::text(filler(MIB + 1))).await.unwrap();
    assert_eq!(client.closed().await.0, 1009);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_message_passes_right_behind_the_reply_to_the_login() {
    let server = serve_with(Auth::new(Tokens)).await;
    let mut client = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
    client.ask("auth.login", json!({"token": "mara:admin"})).await;
    client.ask("store.defineBucket", json!({"name": "b", "config": config})).await;
    for _ in 0..50 {
        let mut client = Client::connect(&server).await;
        client.ask("auth.login", json!({"token": "mara:admin"})).await;
        client.ask("store.insert", json!({"bucket": "b", "data": {"pad": filler(100 * KIB)}})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_no_login_is_required_nothing_is_limited() {
    let limits = BeforeLogin::default()
        .max_payload_bytes(10)
        .max_connections_per_ip(0)
        .rate_limit(RateLimit::new(0, Duration::from_hours(1)));
    let auth = Auth::new(Tokens).required(false).login_timeout(Duration::from_millis(1)).before_login(limits);
    let server = serve_with(auth).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.buckets", json!({})).await;
    client.send_text(filler(MIB)).await;
    assert_eq!(client.receive().await["code"], "PARSE_ERROR");
}

/// A message of 1 MiB of which the last byte is missing, as an attacker sends it: without the limit, 200 of them take 200 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_hold_little_memory() {
    const SOCKETS: usize = 200;
    let server = serve_with(Auth::new(Tokens)).await;
    let mut large = frame(TEXT, filler(MIB).as_bytes());
    large.pop();
    let large = Arc::new(large);
    let mut writing = Vec::new();
    for _ in 0..SOCKETS {
        let (mut raw, large) = (Raw::websocket(&server).await, Arc::clone(&large));
        writing.push(tokio::spawn(async move {
            // It is cut off before it has written all.
            let _ = raw.stream.write_all(&large).await;
            raw
        }));
    }
    let mut peak = 0;
    wait_until_async("all are cut off", PATIENCE, async || {
        let page = Page::of(&server).await;
        peak = peak.max(page.get("memory_used_bytes"));
        page.ended("decode") + page.ended("io") == SOCKETS as u64
    })
    .await;
    assert!(peak < (SOCKETS * 48 * KIB) as u64, "{peak} bytes were held");
    for task in writing {
        task.await.unwrap();
    }

    // Messages that are small enough, and not finished either: twice as much is held for each, and a read.
    let mut small = frame(TEXT, filler(16 * KIB).as_bytes());
    small.pop();
    let mut sockets = Vec::new();
    for _ in 0..SOCKETS {
        let mut raw = Raw::websocket(&server).await;
        raw.write(&small).await;
        sockets.push(raw);
    }
    let read = |page: &Page| page.get("memory_used_bytes") >= (SOCKETS * 16 * KIB) as u64;
    let used = wait_for(&server, "all are read", read).await.get("memory_used_bytes");
    assert!(used < (SOCKETS * 48 * KIB) as u64, "{used} bytes are held");
    drop(sockets);
    wait_for(&server, "everything is released", |page| page.get("memory_used_bytes") == 0).await;
}

#[tokio::test(start_paused = true)]
async fn whoever_does_not_log_in_is_disconnected() {
    // The deadline falls between two pings, or the pings come first.
    for interval in [Duration::from_hours(1), Duration::from_secs(30)] {
        let options = options().auth(Auth::new(Tokens)).heartbeat(Heartbeat::default().interval(interval));
        let server = serve(options).await;
        let mut client = Client::connect(&server).await;
        let began = Instant::now();
        assert_eq!(client.fail("auth.login", json!({"token": "nobody"})).await.0, "UNAUTHORIZED");
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
        assert_eq!(began.elapsed().as_secs(), 120);
        assert_eq!(metric(&server, "logins_timed_out_total").await, 1);
    }
}

async fn next_message(client: &mut Client) -> Message {
    client.socket.next().await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn whoever_has_logged_in_once_may_stay() {
    let server = serve_with(Auth::new(Tokens)).await;
    let (mut user, mut guest) = (Client::connect(&server).await, Client::connect(&server).await);
    tokio::time::advance(Duration::from_secs(119)).await;
    for client in [&mut user, &mut guest] {
        client.ask("auth.login", json!({"token": "mara:admin"})).await;
    }
    guest.ask("auth.logout", json!({})).await;
    tokio::time::advance(Duration::from_mins(30)).await;
    assert_eq!(user.ask("auth.whoami", json!({})).await["userId"], "mara");
    assert_eq!(guest.ask("auth.whoami", json!({})).await["authenticated"], false);

    // Without a deadline nobody is disconnected.
    let server = serve_with(Auth::new(Tokens).login_timeout(None)).await;
    let mut client = Client::connect(&server).await;
    tokio::time::advance(Duration::from_mins(30)).await;
    client.ask("auth.whoami", json!({})).await;
    assert_eq!(metric(&server, "logins_timed_out_total").await, 0);
}

async fn limited_house(max_requests: usize) -> House {
    let limit = RateLimit::new(max_requests, Duration::from_secs(1));
    House::open(tokens([user("ann", &["writer"])]).before_login(BeforeLogin::default().rate_limit(limit))).await
}

fn limited(id: u64, retry_after: u64) -> Json {
    let message = format!("Too many messages from this address before login: try again in {retry_after} ms");
    let details = json!({"retryAfterMs": retry_after});
    json!({"id": id, "type": "error", "code": "RATE_LIMITED", "message": message, "details": details})
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_stranger_sends_counts() {
    let house = limited_house(6).await;
    let mut ann = house.client("ann").await;
    let mut raw = Raw::websocket(&house.server).await;
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
    house.advance(300);
    for (message, id) in [("{", 0), (r#"{"id":7,"type":"auth.whoami"}"#, 7), (r#"{"id":8,"type":"no.such"}"#, 8)] {
        raw.send(message).await;
        assert_eq!(raw.json().await, limited(id, 700), "{message}");
    }
    // The sockets of an address share its budget, and a login needs it as well.
    let mut other = house.stranger().await;
    let (code, error) = other.fail("auth.login", json!({"token": "ann"})).await;
    assert_eq!((&*code, error), ("RATE_LIMITED", limited(1, 700)));
    // Others do not.
    let mut elsewhere = Raw::websocket_from(&house.server, ELSEWHERE).await;
    assert_eq!(elsewhere.ask(&json!({"id": 1, "type": "auth.whoami"})).await["type"], "result");
    // Users have another budget, and take nothing from this one.
    for _ in 0..20 {
        ann.ask("store.buckets", json!({})).await;
    }
    let page = Page::of(&house.server).await;
    assert_eq!((page.get("before_login_rate_limited_total"), page.get("requests_rate_limited_total")), (4, 0));
    house.advance(700);
    other.ask("auth.login", json!({"token": "ann"})).await;
    assert_eq!(raw.ask(&json!({"id": 9, "type": "auth.whoami"})).await["type"], "result");
}

#[tokio::test(start_paused = true)]
async fn a_pong_is_heard_whatever_the_address_has_sent() {
    let limits = BeforeLogin::default().rate_limit(RateLimit::new(1, Duration::from_hours(10_000)));
    let auth = Auth::new(Tokens).login_timeout(None).before_login(limits);
    let heartbeat = Heartbeat::default().interval(Duration::from_secs(30));
    let server = serve(options().auth(auth).heartbeat(heartbeat)).await;
    let mut client = Client::connect(&server).await;
    client.ask("auth.whoami", json!({})).await;
    for _ in 0..5 {
        let ping = client.receive().await;
        assert_eq!(ping["type"], "ping");
        client.send_text(json!({"type": "pong", "timestamp": ping["timestamp"]}).to_string()).await;
    }
    assert_eq!(client.fail("auth.whoami", json!({})).await.0, "RATE_LIMITED");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_has_only_so_many_connections_before_a_login() {
    let limits = BeforeLogin::default().max_connections_per_ip(2);
    let server = serve_with(Auth::new(Tokens).before_login(limits)).await;
    let (mut first, second) = (Client::connect(&server).await, Client::connect(&server).await);
    let refused = async || {
        let mut raw = Raw::connect(&server).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.head().await.0, 101, "only a close frame tells a browser why");
        raw.closed_at_once().await
    };
    let too_many = (4003, "too_many_connections".to_owned());
    assert_eq!(refused().await, too_many);
    let elsewhere = Raw::websocket_from(&server, ELSEWHERE).await;
    // A login that fails leaves it where it is; the first that succeeds does not, and a logout does not bring it back.
    first.fail("auth.login", json!({"token": "nobody"})).await;
    assert_eq!(refused().await, too_many);
    first.ask("auth.login", json!({"token": "mara:admin"})).await;
    first.ask("auth.logout", json!({})).await;
    let third = Client::connect(&server).await;
    assert_eq!(refused().await, too_many);
    let page = Page::of(&server).await;
    assert_eq!((page.get("connections_admitted_total"), page.get("connections_refused_total")), (4, 3));
    drop((second, elsewhere));
    wait_until_async("they have ended", PATIENCE, async || server.connection_count() == 2).await;
    let _fourth = Client::connect(&server).await;
    drop(third);
    first.ask("auth.whoami", json!({})).await;
}
