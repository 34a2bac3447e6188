//! Tracing spans of requests, and the log line of a slow request.
//!
//! The tests run on one thread, so that its subscriber receives everything that the server emits.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use serde_json::json;
use tidewire::auth::{Auth, Session};
use tidewire::{RateLimit, ServerOptions};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::client::{Client, RoleTokens, RpcClient, notes_config, options, serve};
use crate::metrics_page::{metric, wait_for_metrics};

/// Records every span and event.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Recorded>>);

#[derive(Default)]
struct Recorded {
    spans: Vec<Span>,
    /// The index of each open span by its id. Ids are reused after a span has closed.
    open: BTreeMap<u64, usize>,
    events: Vec<(Level, Fields)>,
}

#[derive(Debug, Clone)]
struct Span {
    index: usize,
    name: &'static str,
    target: String,
    level: Level,
    parent: Option<usize>,
    fields: Fields,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Fields(BTreeMap<String, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let parent = context.span(id).and_then(|span| span.parent()).map(|parent| parent.id().into_u64());
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let metadata = attributes.metadata();
        let mut recorded = self.0.lock().unwrap();
        let (index, parent) = (recorded.spans.len(), parent.map(|parent| recorded.open[&parent]));
        let (name, target, level) = (metadata.name(), metadata.target().to_owned(), *metadata.level());
        recorded.spans.push(Span { index, name, target, level, parent, fields });
        recorded.open.insert(id.into_u64(), index);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut recorded = self.0.lock().unwrap();
        let index = recorded.open[&id.into_u64()];
        values.record(&mut recorded.spans[index].fields);
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.lock().unwrap().events.push((*event.metadata().level(), fields));
    }
}

impl Recorder {
    /// Records everything on this thread until the guard is dropped.
    fn start() -> (Self, DefaultGuard) {
        // With a single dispatcher, tracing asks only the thread that first reaches a callsite whether it is of interest. That may
        // be a thread of another test without a subscriber, and the answer is cached. With two dispatchers, all of them are asked.
        static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::default()));
        LazyLock::force(&SECOND);
        let recorder = Self::default();
        let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
        (recorder, guard)
    }

    /// Returns the spans with this name, oldest first.
    fn spans(&self, name: &str) -> Vec<Span> {
        self.0.lock().unwrap().spans.iter().filter(|span| span.name == name).cloned().collect()
    }

    /// Returns the newest request span, which must have exactly these fields.
    fn expect_request(&self, expected: &[(&str, &str)]) -> Span {
        let span = self.spans("request").pop().expect("a request has a span");
        let expected = expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        assert_eq!(span.fields, Fields(expected));
        assert_eq!((span.target.as_str(), span.level), ("tidewire::request", Level::DEBUG));
        span
    }

    /// Returns the log lines with this message.
    fn lines(&self, message: &str) -> Vec<(Level, Fields)> {
        let recorded = self.0.lock().unwrap();
        let is_wanted = |(_, fields): &&(Level, Fields)| fields.0.get("message").is_some_and(|text| text == message);
        recorded.events.iter().filter(is_wanted).cloned().collect()
    }
}

/// Returns options with optional login.
fn with_tokens() -> ServerOptions {
    options().auth(Auth::new(RoleTokens).required(false))
}

#[tokio::test]
async fn request_span_has_operation_connection_id_user_and_outcome() {
    let (recorder, _guard) = Recorder::start();
    let server = serve(with_tokens()).await;
    let mut client = Client::connect(&server).await;
    let connection = ("connection", "conn-1");
    client.call("store.buckets", json!({})).await;
    recorder.expect_request(&[("operation", "store.buckets"), connection, ("id", "1"), ("outcome", "ok")]);
    client.call("auth.login", json!({"token": "mara:admin"})).await;
    recorder.expect_request(&[("operation", "auth.login"), connection, ("id", "2"), ("outcome", "ok")]);
    let user = ("user", "mara");
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    recorder.expect_request(&[("operation", "store.defineBucket"), connection, ("id", "3"), user, ("outcome", "ok")]);
    client.call_err("store.insert", json!({"bucket": "notes", "data": {"rank": "x"}})).await;
    let failed = ("outcome", "VALIDATION_ERROR");
    recorder.expect_request(&[("operation", "store.insert"), connection, ("id", "4"), user, failed]);
    // The name of an unknown operation comes from the client, so it is not recorded.
    client.call_err("store.steal", json!({})).await;
    let unknown = ("outcome", "UNKNOWN_OPERATION");
    recorder.expect_request(&[("operation", "unknown"), connection, ("id", "5"), user, unknown]);
    let mut local = server.client(Session::new("ines", ["reader"]));
    local.call("store.buckets", json!({})).await;
    let local = ("connection", "local-1");
    recorder.expect_request(&[("operation", "store.buckets"), local, ("id", "0"), ("user", "ines"), ("outcome", "ok")]);
    // An abandoned request has an outcome too.
    let read = metric(&server, "messages_received_total").await;
    client.send("auth.login", json!({"token": "slow"})).await;
    wait_for_metrics(&server, "the request is read", |page| page.get("messages_received_total") == read + 1).await;
    assert!(server.disconnect("conn-1"));
    client.closed().await;
    wait_for_metrics(&server, "the request has ended", |page| page.requests("auth.login", "abandoned") == 1).await;
    recorder.expect_request(&[("operation", "auth.login"), connection, ("id", "6"), user, ("outcome", "abandoned")]);
    assert_eq!(recorder.spans("request").len(), 7, "one span per request");
}

#[tokio::test]
async fn request_span_has_a_valid_trace_context_only() {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";
    let (recorder, _guard) = Recorder::start();
    let server = serve(with_tokens()).await;
    let mut client = Client::connect(&server).await;
    for flags in ["00", "01", "ff"] {
        let traceparent = format!("00-{TRACE}-{PARENT}-{flags}");
        client.call("store.buckets", json!({"traceparent": traceparent})).await;
        let span = recorder.spans("request").pop().unwrap();
        assert_eq!(span.fields.0.get("traceparent"), Some(&traceparent));
    }
    let zeros = "0".repeat(32);
    for invalid in [
        json!(""),
        json!(7),
        json!(null),
        json!([]),
        json!(TRACE),
        json!(format!("00-{TRACE}-{PARENT}")),
        json!(format!("00-{TRACE}-{PARENT}-01-x")),
        json!(format!("00-{TRACE}-{PARENT}-1")),
        json!(format!("00-{}-{PARENT}-01", TRACE.to_uppercase())),
        json!(format!("00-{}-{PARENT}-01", &TRACE[1..])),
        json!(format!("00-{zeros}-{PARENT}-01")),
        json!(format!("00-{TRACE}-{}-01", &zeros[..16])),
        json!(format!("ff-{TRACE}-{PARENT}-01")),
        json!(format!("00-{TRACE}-{PARENT}-0g")),
        json!(format!("{TRACE}\n{}", "x".repeat(10_000))),
    ] {
        client.call("store.buckets", json!({"traceparent": invalid})).await;
        let span = recorder.spans("request").pop().unwrap();
        assert_eq!(span.fields.0.get("traceparent"), None, "{invalid}");
        assert_eq!(span.fields.0["outcome"], "ok", "the request is still served");
    }
}

#[tokio::test]
async fn commits_and_evaluations_are_children_of_their_request() {
    let (recorder, _guard) = Recorder::start();
    let server = serve(with_tokens()).await;
    let mut client = Client::connect(&server).await;
    let mut local = server.client(None);
    let insert = json!({"bucket": "notes", "data": {"text": "x"}});
    let define = json!({"name": "notes", "config": notes_config()});
    for (operation, params, child) in [
        ("store.defineBucket", define, Some("store_commit")),
        ("store.insert", insert.clone(), Some("store_commit")),
        ("store.transaction", json!({"operations": [{"op": "count", "bucket": "notes"}]}), Some("store_commit")),
        ("store.subscribe", json!({"config": {"bucket": "notes"}}), Some("live_evaluation")),
        ("store.count", json!({"bucket": "notes"}), None),
    ] {
        let before = recorder.0.lock().unwrap().spans.len();
        client.call(operation, params).await;
        let spans: Vec<Span> = recorder.0.lock().unwrap().spans[before..].to_vec();
        let spans: Vec<&Span> = spans.iter().filter(|span| span.target == "tidewire::request").collect();
        assert_eq!(spans[0].fields.0["operation"], operation);
        let children: Vec<_> = spans[1..].iter().map(|span| (span.name, span.parent)).collect();
        assert_eq!(children, child.map(|name| (name, Some(spans[0].index))).into_iter().collect::<Vec<_>>());
    }
    // Concurrent requests have one child each.
    let mut ids = Vec::new();
    for _ in 0..10 {
        ids.push(client.send("store.insert", insert.clone()).await);
    }
    for id in ids {
        assert_eq!(client.reply(id).await["type"], "result");
    }
    local.call("store.insert", insert).await;
    let requests = recorder.spans("request");
    let of =
        |span: &Span| requests.iter().find(|request| Some(request.index) == span.parent).expect("a request").clone();
    let commits = recorder.spans("store_commit");
    let mut parents: Vec<usize> = commits.iter().map(|span| of(span).index).collect();
    parents.sort_unstable();
    parents.dedup();
    assert_eq!((commits.len(), parents.len()), (14, 14));
    assert_eq!(of(commits.last().unwrap()).fields.0["connection"], "local-1");
}

#[tokio::test]
async fn failed_logins_are_logged_without_their_tokens() {
    let (recorder, _guard) = Recorder::start();
    let limit = RateLimit::new(3, Duration::from_mins(1));
    let server = serve(options().auth(Auth::new(RoleTokens).required(false).login_rate_limit(limit))).await;
    let mut client = Client::connect(&server).await;
    for _ in 0..10 {
        client.call_err("auth.login", json!({"token": "hush-hush"})).await;
    }
    let fields = |expected: &[(&str, &str)]| {
        Fields(expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    };
    let failed = fields(&[
        ("message", "login failed"),
        ("connection", "conn-1"),
        ("address", "127.0.0.1"),
        ("reason", "invalid or expired token"),
    ]);
    assert_eq!(recorder.lines("login failed"), vec![(Level::DEBUG, failed); 3]);
    let throttled = fields(&[
        ("message", "logins throttled"),
        ("address", "127.0.0.1"),
        ("failures", "3"),
        ("window_ms", "60000"),
        ("unlogged", "0"),
    ]);
    assert_eq!(recorder.lines("logins throttled"), [(Level::WARN, throttled)], "logged once");
    let recorded = recorder.0.lock().unwrap();
    assert!(!format!("{:?} {:?}", recorded.events, recorded.spans).contains("hush-hush"));
}

#[tokio::test]
async fn slow_request_is_logged_and_counted() {
    for (limit, is_slow) in [(Duration::ZERO, true), (Duration::from_hours(1), false)] {
        let (recorder, _guard) = Recorder::start();
        let server = serve(with_tokens().slow_request(limit)).await;
        let mut client = Client::connect(&server).await;
        client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
        client.call_err("store.get", json!({"bucket": "none", "key": "k"})).await;
        client.call_err("no.such", json!({})).await;
        let lines = recorder.lines("slow request");
        assert_eq!(metric(&server, "requests_slow_total").await, if is_slow { 3 } else { 0 });
        let expected = [
            ("1", "store.defineBucket", "ok"),
            ("2", "store.get", "BUCKET_NOT_DEFINED"),
            ("3", "unknown", "UNKNOWN_OPERATION"),
        ];
        assert_eq!(lines.len(), if is_slow { expected.len() } else { 0 });
        for ((level, mut fields), (id, operation, outcome)) in lines.into_iter().zip(expected) {
            assert_eq!(level, Level::WARN);
            assert!(fields.0.remove("millis").unwrap().parse::<u64>().is_ok());
            let expected = [
                ("message", "slow request"),
                ("connection", "conn-1"),
                ("id", id),
                ("operation", operation),
                ("outcome", outcome),
            ];
            let expected = expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            assert_eq!(fields, Fields(expected.collect()));
        }
    }
}
