//! Every metric of `/metrics` is documented, and counts its events.
//!
//! These metrics are tested in other modules:
//!
//! | Metrics | Module |
//! |---|---|
//! | `store_*`, `engine_*`, `live_restarts_total` | [`store_health`](crate::store_health) |
//! | `live_kept_bytes`, `live_evaluations_total`, `live_reevaluations_total`, `live_too_costly_total` | [`expensive_requests`](crate::expensive_requests) |
//! | `slow_consumers_total`, `heartbeats_missed_total`, `sessions_revoked_total`, `panics_total` | [`close_codes`](crate::close_codes) |
//! | `connections_ended_total` for `handle`, `handler` and `panic` | [`close_codes`](crate::close_codes) |
//! | `pushes_replaced_total`, `pushes_held_back_total`, `requests_backpressure_total` | [`backpressure`](crate::backpressure) |
//! | `memory_*` | [`close_codes`](crate::close_codes), [`limits`](crate::limits) |
//! | `subscriptions_ended_total` | [`subscriptions`](crate::subscriptions) |
//! | `backups_total`, `backups_failed_total` | [`backup`](crate::backup) |
//! | `requests_slow_total` | [`request_tracing`](crate::request_tracing) |
//! | `forwarded_*`, `proxy_headers_refused_total` | [`proxies`](crate::proxies) |
//! | `logins_timed_out_total`, `before_login_rate_limited_total` | [`before_login`](crate::before_login) |
//! | `logins_throttled_total` | [`login_throttle`](crate::login_throttle) |
//!
//! `pushes_dropped_total` stays at zero: only the notice of a revoked session can be dropped, and there is one per connection.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Session};
use tidewire::{RateLimit, Server};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;

use crate::client::{Client, RoleTokens, RpcClient as _, notes_config, options, serve, wait_for_connections};
use crate::metrics_page::{MetricsPage, metric, wait_for_metrics};
use crate::raw_client::{RawClient, TEXT, frame, handshake};

/// Returns the metric names in the table of the manual.
fn documented() -> Vec<String> {
    let manual = include_str!("../../../../docs/reference/metrics.md");
    let (_, section) = manual.split_once("\n## Metrics\n").expect("a section on metrics");
    let (section, _) = section.split_once("\n## ").unwrap_or((section, ""));
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let names = cells.filter_map(|cell| cell.split(['`', '{']).next()).filter(|name| !name.starts_with("tidewire_"));
    names.map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn manual_lists_every_metric_once() {
    let server = serve(options()).await;
    let page = MetricsPage::read(&server).await;
    let mut listed = documented();
    listed.sort();
    let served: Vec<String> = page.types.keys().cloned().collect();
    let (in_manual, on_page): (BTreeSet<_>, BTreeSet<_>) = (listed.iter().collect(), served.iter().collect());
    assert_eq!(
        listed,
        served,
        "only in one of them: {:?}",
        in_manual.symmetric_difference(&on_page).collect::<Vec<_>>()
    );
    for (name, kind) in &page.types {
        let expected = match name.as_str() {
            "operation_duration_seconds" => "histogram",
            name if name.ends_with("_total") => "counter",
            _ => "gauge",
        };
        assert_eq!(kind, expected, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_subscriptions_and_traffic_are_counted() {
    let server = serve(options()).await;
    let mut local = server.client(None);
    local.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    let mut raw = RawClient::websocket(&server).await;
    let page = wait_for_metrics(&server, "the welcome is sent", |page| page.get("messages_sent_total") == 1).await;
    assert_eq!((page.get("connections"), page.get("connections_admitted_total")), (2, 1), "with an in-process client");
    assert_eq!((page.get("bytes_received_total"), page.get("messages_received_total")), (0, 0));
    let (mut written, mut read) = (0, page.get("bytes_sent_total"));
    for (id, pad) in [(1, 1), (2, 200), (3, 20_000)] {
        let request = json!({"id": id, "type": "store.insert", "bucket": "notes", "data": {"text": "x".repeat(pad)}});
        let request = frame(TEXT, request.to_string().as_bytes());
        raw.write(&request).await;
        written += request.len() as u64;
        let (kind, reply) = raw.frame().await.unwrap();
        assert_eq!(kind, 1);
        // A header has 2 bytes, or 4 for messages of 126 bytes and more.
        read += reply.len() as u64 + if reply.len() < 126 { 2 } else { 4 };
    }
    let page =
        wait_for_metrics(&server, "three requests are answered", |page| page.get("messages_sent_total") == 4).await;
    assert_eq!((page.get("messages_received_total"), page.get("bytes_received_total")), (3, written));
    assert_eq!(page.get("bytes_sent_total"), read);

    let subscription = local.subscribe::<Json>(json!({"config": {"bucket": "notes"}})).await.unwrap();
    raw.send(&json!({"id": 4, "type": "store.subscribe", "config": {"bucket": "notes"}}).to_string()).await;
    raw.json().await;
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("subscriptions"), page.get("live_queries")), (2, 1), "equal queries are shared");
    drop((subscription, local, raw));
    wait_for_connections(&server, 0).await;
    let page = wait_for_metrics(&server, "the query has ended", |page| page.get("live_queries") == 0).await;
    assert_eq!((page.get("connections"), page.get("subscriptions")), (0, 0));
    assert_eq!(page.get("connections_admitted_total"), 1);
    assert!(page.get("bytes_received_total") > written, "bytes of closed connections still count");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_origins_are_counted() {
    let options = options().allowed_origins(["https://tide.example"]);
    let server = serve(options).await;
    let mut raw = RawClient::connect(&server).await;
    raw.write(handshake("/", "Origin: https://evil.example\r\n").as_bytes()).await;
    assert_eq!(raw.response().await.0, 403);
    assert!(!raw.read_some().await);
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("origins_refused_total"), page.get("connections_admitted_total")), (1, 0));
}

/// There is one permit for sockets. It is released shortly after the client has seen the end of its socket.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_sockets_and_connections_are_counted() {
    let options = options().max_connections(1);
    let server = serve(options).await;
    // An idle socket holds the permit.
    let idle = RawClient::connect(&server).await;
    let mut rejected = RawClient::connect(&server).await;
    let (status, head) = rejected.head().await;
    assert_eq!(status, 503);
    assert!(head.contains("connection: close") && !rejected.read_some().await);
    drop(idle);
    let page = page_when_permitted(&server).await;
    assert!(page.get("sockets_refused_total") > 0);
    assert_eq!((page.get("connections_admitted_total"), page.get("connections_refused_total")), (0, 0));

    // An upgraded connection releases its socket permit, and is the only connection allowed.
    let client = connect_when_permitted(&server).await;
    let server = &server;
    wait_until_async("a second connection is rejected", PATIENCE, async || {
        let mut second = RawClient::connect(server).await;
        // The server may close a rejected socket before the handshake is written.
        let _ = second.stream.write_all(handshake("/", "").as_bytes()).await;
        if second.has_response().await {
            assert_eq!(second.head().await.0, 503);
        }
        page_when_permitted(server).await.get("connections_refused_total") > 0
    })
    .await;
    assert_eq!(page_when_permitted(server).await.get("connections_admitted_total"), 1);
    drop(client);
}

/// Reads the metrics of a server with one socket permit, as soon as it is free.
async fn page_when_permitted(server: &Server) -> MetricsPage {
    let start = tokio::time::Instant::now();
    loop {
        if let Some(page) = MetricsPage::try_read(server).await {
            return page;
        }
        assert!(start.elapsed() < PATIENCE, "the permit is not released");
    }
}

/// Opens the only connection of a server, as soon as its socket permit is free.
async fn connect_when_permitted(server: &Server) -> RawClient {
    let start = tokio::time::Instant::now();
    loop {
        let mut raw = RawClient::connect(server).await;
        let _ = raw.stream.write_all(handshake("/", "").as_bytes()).await;
        if raw.has_response().await && raw.head().await.0 == 101 {
            assert_eq!(raw.json().await["type"], "welcome");
            return raw;
        }
        assert!(start.elapsed() < PATIENCE, "the permit is not released");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_by_operation_and_outcome() {
    let auth = Auth::new(RoleTokens).required(false);
    let options = options().auth(auth).request_timeout(Duration::from_millis(20));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    for _ in 0..3 {
        client.call("store.buckets", json!({})).await;
    }
    client.call_err("store.get", json!({"bucket": "none", "key": 1})).await;
    client.call_err("store.get", json!({})).await;
    client.call_err("no.such", json!({})).await;
    client.call_err("rules.emit", json!({})).await;
    assert_eq!(client.call_err("auth.login", json!({"token": "slow"})).await.0, "TIMEOUT");
    assert_eq!(client.call_err("auth.login", json!({"token": "unknown"})).await.0, "UNAUTHORIZED");
    client.send_text("no JSON").await;
    assert_eq!(client.reply(0).await["code"], "PARSE_ERROR");
    let page = MetricsPage::read(&server).await;
    for (operation, outcome, count) in [
        ("store.buckets", "ok", 3),
        ("store.get", "BUCKET_NOT_DEFINED", 1),
        ("store.get", "VALIDATION_ERROR", 1),
        ("store.get", "ok", 0),
        ("unknown", "UNKNOWN_OPERATION", 1),
        ("no.such", "UNKNOWN_OPERATION", 0),
        ("rules.emit", "RULES_NOT_AVAILABLE", 1),
        ("auth.login", "TIMEOUT", 1),
        ("auth.login", "UNAUTHORIZED", 1),
    ] {
        assert_eq!(page.requests(operation, outcome), count, "{operation} {outcome}");
    }
    assert_eq!((page.get("requests_total"), page.get("requests_failed_total")), (9, 6));
    assert_eq!((page.get("requests_invalid_total"), page.get("requests_timed_out_total")), (1, 1));
    assert_eq!((page.get("logins_failed_total"), page.get("requests_slow_total")), (1, 0));

    let seconds = |sample: &str| page.text(sample).map(|text| text.parse::<f64>().unwrap());
    for (operation, count) in [("store.buckets", 3.0), ("store.get", 2.0), ("auth.login", 2.0), ("unknown", 1.0)] {
        let name = "operation_duration_seconds";
        let label = format!("operation=\"{operation}\"");
        let bucket = |bound: &str| seconds(&format!("{name}_bucket{{{label},le=\"{bound}\"}}"));
        assert_eq!(seconds(&format!("{name}_count{{{label}}}")), Some(count), "{operation}");
        assert_eq!(bucket("+Inf"), Some(count), "{operation}");
        let bounds = ["0.000005", "0.001", "0.005", "0.025", "0.1", "0.5", "2.5", "10", "+Inf"].map(bucket);
        let bounds: Vec<f64> = bounds.iter().map(|bound| bound.expect("a bucket")).collect();
        assert!(bounds.is_sorted(), "{operation}: {bounds:?}");
        let sum = seconds(&format!("{name}_sum{{{label}}}")).unwrap();
        assert!(sum >= 0.0 && sum < 60.0 * count, "{operation}: {sum}");
        if operation == "auth.login" {
            assert!(sum >= 0.02, "one login took as long as the request timeout: {sum}");
            assert!(bucket("0.005").unwrap() <= 1.0, "{bounds:?}");
        }
    }
    assert_eq!(
        seconds("operation_duration_seconds_count{operation=\"store.insert\"}"),
        None,
        "the operation was not used"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limited_requests_are_counted() {
    let options = options().rate_limit(RateLimit::new(2, Duration::from_hours(1)));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    for _ in 0..2 {
        client.call("store.buckets", json!({})).await;
    }
    for _ in 0..3 {
        assert_eq!(client.call_err("store.buckets", json!({})).await.0, "RATE_LIMITED");
    }
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("requests_rate_limited_total"), page.get("requests_failed_total")), (3, 3));
    assert_eq!(page.requests("store.buckets", "RATE_LIMITED"), 3);
    assert_eq!(page.get("rate_keys_forgotten_total"), 0);
}

/// The rate limiter tracks 100 000 users. Evicted users are counted.
#[tokio::test(flavor = "multi_thread")]
async fn evicted_rate_limit_keys_are_counted() {
    let options = options().rate_limit(RateLimit::new(1, Duration::from_hours(1)));
    let server = serve(options.auth(Auth::new(RoleTokens).required(false))).await;
    let mut users = 0_u64;
    while metric(&server, "rate_keys_forgotten_total").await == 0 {
        assert!(users < 200_000, "all of {users} users are still tracked");
        for _ in 0..10_000 {
            users += 1;
            let client = server.client(Session::new(users.to_string(), ["reader"]));
            client.request::<Json>("auth.whoami", ()).await.unwrap();
        }
    }
    assert!(users > 50_000, "a user was evicted after only {users}");
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_connections_are_counted_by_reason() {
    let server = serve(options()).await;
    let reasons =
        ["decode", "dropped", "encode", "handle", "handler", "io", "panic", "peer", "shutdown", "write_stall"];
    let page = MetricsPage::read(&server).await;
    assert!(reasons.iter().all(|reason| page.ended(reason) == 0));

    let mut client = Client::connect(&server).await;
    client.socket.close(None).await.unwrap();
    assert_eq!(client.closed().await.0, 1005);
    wait_for_metrics(&server, "the close is counted", |page| page.ended("peer") == 1).await;

    let mut broken = RawClient::websocket(&server).await;
    broken.write(&frame(0x83, b"a reserved kind of frame")).await;
    assert_eq!(broken.closed().await.0, 1002);
    wait_for_metrics(&server, "the protocol error is counted", |page| page.ended("decode") == 1).await;

    let reset = RawClient::websocket(&server).await;
    reset.stream.set_zero_linger().unwrap();
    drop(reset);
    let page = wait_for_metrics(&server, "the reset is counted", |page| page.ended("io") == 1).await;
    assert_eq!((page.ended("peer"), page.ended("decode"), page.get("connections_admitted_total")), (1, 1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn unsent_pushes_are_counted() {
    let server = serve(options()).await;
    let local = server.client(None);
    local.request::<Json>("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await.unwrap();
    let mut stalled = RawClient::with_small_buffer(&server).await;
    stalled.send(&json!({"id": 1, "type": "store.subscribe", "config": {"bucket": "notes"}}).to_string()).await;
    stalled.json().await;
    let record = json!({"id": "x", "text": "x".repeat(20_000)});
    let mut written = 0;
    // The results were replaced before they were sent, so one is queued.
    while metric(&server, "pushes_replaced_total").await < 3 {
        assert!(written < 20_000, "the client reads");
        local.insert::<Json>("notes", record.clone()).await.unwrap();
        written += 1;
    }
    assert_eq!(metric(&server, "pushes_unsent_total").await, 0);
    stalled.stream.set_zero_linger().unwrap();
    drop(stalled);
    wait_for_connections(&server, 1).await;
    wait_for_metrics(&server, "the queued push is counted", |page| page.get("pushes_unsent_total") > 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn live_query_events_are_counted() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    client.call("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let insert = json!({"bucket": "notes", "data": {"text": "x"}});
    let before = metric(&server, "live_events_total").await;
    for count in 1..=5_usize {
        client.call("store.insert", insert.clone()).await;
        assert_eq!(client.push().await["data"].as_array().unwrap().len(), count);
    }
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("live_events_total") - before, page.get("live_conflated_total")), (5, 0));
    assert_eq!((page.get("live_queries"), page.get("live_restarts_total")), (1, 0));
    // A subscription that is not read gets the newest result instead of all results.
    let local = server.client(None);
    let _unread = local.subscribe::<Json>(json!({"config": {"bucket": "notes"}})).await.unwrap();
    let mut written = 0;
    while metric(&server, "live_conflated_total").await == 0 {
        assert!(written < 10_000, "every event is kept");
        client.call("store.insert", insert.clone()).await;
        written += 1;
    }
}
