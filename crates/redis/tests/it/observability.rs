//! Statistics, spans, logs and the slow hook.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidewire_redis::observe::{ClientStats, SlowHook};
use tidewire_redis::{Client, ConnectionState, Pipeline, Value, WhenFull, WhileDown};
use tidewire_testkit::{PATIENCE, RedisServer};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use crate::servers::{Scripted, command, greeting, options};

/// Returns the statistics once the condition holds.
async fn stats(client: &Client, what: &str, is_so: impl Fn(&ClientStats) -> bool) -> ClientStats {
    tidewire_testkit::wait_until_async(what, PATIENCE, async || is_so(&client.stats())).await;
    client.stats()
}

#[tokio::test]
async fn requests_and_connections_are_counted() {
    let server = RedisServer::options().config("enable-debug-command yes").start();
    let client = Client::start(options(server.port()));
    assert_eq!(client.stats(), ClientStats::default());
    let (set, get) = (command(&["SET", "k", "v"]), command(&["GET", "k"]));
    client.send(set.clone()).await.unwrap();
    let many: Pipeline<Vec<_>> = [get.clone(), get.clone(), get].into_iter().collect();
    client.pipeline(many.clone()).await.unwrap();
    let seen = stats(&client, "replies are counted", |stats| stats.replies == 4).await;
    assert_eq!((seen.requests, seen.pushes, seen.connect_attempts, seen.connections_lost), (2, 0, 1, 0));
    assert_eq!(seen.bytes_out, (set.command().size() + many.size()) as u64);
    assert_eq!(seen.bytes_in, ("+OK\r\n".len() + 3 * "$1\r\nv\r\n".len()) as u64);
    let counts = [seen.queue_latency, seen.write_latency, seen.reply_latency].map(|latency| latency.count());
    assert_eq!(counts, [2, 2, 2]);
    assert!(seen.reply_latency.max() > Duration::ZERO && seen.reply_latency.sum() >= seen.reply_latency.max());
    assert_eq!((seen.in_flight, seen.in_flight_bytes, seen.queued), (0, 0, 0));

    // Counters survive a reconnect.
    server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    client.send(command(&["DEBUG", "PROTOCOL", "push"])).await.unwrap();
    let seen = stats(&client, "a push is counted", |stats| stats.pushes == 1).await;
    assert_eq!((seen.requests, seen.replies, seen.connect_attempts, seen.connections_lost), (3, 5, 2, 1));
}

#[tokio::test]
async fn requests_in_flight_timeouts_and_rejections_are_counted() {
    // Two requests have no reply until another one is sent, as the client does when a reply is overdue.
    let asked = AtomicUsize::new(0);
    let answer = move || if asked.fetch_add(1, Relaxed) == 2 { "+PONG\r\n".repeat(3) } else { String::new() };
    let server = Scripted::answering(move |words, _| greeting(words).unwrap_or_else(&answer)).await;
    let options = options(server.port()).max_in_flight(2).when_full(WhenFull::Fail).timeout(Duration::from_millis(200));
    let (client, connection) = Client::new(options);
    let ask = || {
        let client = client.clone();
        tokio::spawn(async move { client.send(command(&["PING"])).await })
    };
    let (one, two) = (ask(), ask());
    let seen = stats(&client, "both are queued", |stats| stats.queued == 2).await;
    assert_eq!((seen.in_flight, seen.in_flight_bytes), (2, 2 * command(&["PING"]).command().size()));
    assert!(client.send(command(&["PING"])).await.is_err());
    assert_eq!(client.stats().rejected, 1);
    tokio::spawn(connection.run());
    let seen = stats(&client, "both are sent", |stats| stats.requests == 2).await;
    assert_eq!((seen.in_flight, seen.queued), (2, 0));
    assert!(one.await.unwrap().is_err() && two.await.unwrap().is_err());
    // A request that timed out keeps its permit until its reply has come.
    let seen = stats(&client, "late replies have come", |stats| stats.replies == 3).await;
    assert_eq!((seen.timeouts.waiting, seen.timeouts.connecting, seen.in_flight), (2, 0, 0));
    // Probes are not counted as requests.
    assert_eq!((seen.requests, seen.write_latency.count(), seen.reply_latency.count()), (2, 2, 2));
}

#[tokio::test]
async fn timeouts_without_a_connection_are_counted() {
    let port = RedisServer::start().port();
    let options = options(port).while_down(WhileDown::Queue).timeout(Duration::from_millis(20));
    let client = Client::start(options);
    client.status().wait_for(|status| status.state == ConnectionState::Failed).await.unwrap();
    assert!(client.send(command(&["PING"])).await.is_err());
    let seen = client.stats();
    assert_eq!((seen.timeouts.connecting, seen.requests, seen.in_flight), (1, 0, 0));
    assert!(seen.connect_attempts > 0);
}

#[tokio::test]
async fn slow_hook_runs_on_the_task_of_the_caller() {
    let server = RedisServer::start();
    let reported = Arc::new(Mutex::new(Vec::new()));
    for (after, is_reported) in [(Duration::ZERO, true), (Duration::from_hours(1), false)] {
        let received = Arc::clone(&reported);
        let hook = SlowHook::new(after, move |slow| {
            let line = (slow.name.to_owned(), slow.commands, slow.bytes, slow.error.is_some(), tokio::task::id());
            received.lock().unwrap().push(line);
        });
        let client = Client::start(options(server.port()).slow_hook(hook));
        let many: Pipeline<Vec<_>> = [command(&["GET", "a"]), command(&["PING"])].into_iter().collect();
        let bytes = many.size();
        let asker = tokio::spawn(async move {
            client.send(command(&["set", "a", "secret"])).await.unwrap();
            client.pipeline(many).await.unwrap();
            client.close(PATIENCE).await;
            client.send(command(&["PING"])).await.unwrap_err();
            tokio::task::id()
        });
        let id = asker.await.unwrap();
        let lines = std::mem::take(&mut *reported.lock().unwrap());
        let one = ("set".to_owned(), 1, command(&["set", "a", "secret"]).command().size(), false, id);
        let failed = ("PING".to_owned(), 1, command(&["PING"]).command().size(), true, id);
        let expected = if is_reported { vec![one, ("GET".to_owned(), 2, bytes, false, id), failed] } else { vec![] };
        assert_eq!(lines, expected);
    }
}

/// Collects the spans of requests as text.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<String>>>);

impl Visit for Spans {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.lock().unwrap().push(format!("{field}={value:?}"));
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        if attributes.metadata().name() == "redis" {
            attributes.record(&mut self.clone());
        }
    }

    fn on_record(&self, _: &Id, values: &Record<'_>, _: Context<'_, S>) {
        values.record(&mut self.clone());
    }
}

#[tokio::test]
async fn requests_have_spans_if_trace_is_set() {
    let server = RedisServer::start();
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(spans.clone()));
    for is_wanted in [false, true] {
        let options = options(server.port()).trace(is_wanted);
        let client = Client::start(options);
        assert_eq!(client.send(command(&["ECHO", "secret"])).await.unwrap(), Value::Bulk("secret".into()));
        client.close(PATIENCE).await;
        client.send(command(&["PING"])).await.unwrap_err();
        let seen = std::mem::take(&mut *spans.0.lock().unwrap()).join(" ");
        if is_wanted {
            assert!(seen.starts_with("command=\"ECHO\" commands=1 bytes=26 command=\"PING\""), "{seen}");
            assert!(seen.contains("error=") && !seen.contains("secret"), "{seen}");
        } else {
            assert_eq!(seen, "");
        }
    }
}

/// Collects the events about connections as text.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<String>>);

impl Visit for Events {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0.lock().unwrap(), "{field}={value:?} ").unwrap();
    }

    fn record_error(&mut self, field: &Field, mut error: &(dyn std::error::Error + 'static)) {
        let mut text = error.to_string();
        while let Some(source) = error.source() {
            text = format!("{text}: {source}");
            error = source;
        }
        write!(self.0.lock().unwrap(), "{field}={text} ").unwrap();
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Events {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target().starts_with("tidewire_redis") {
            write!(self.0.lock().unwrap(), "{} ", event.metadata().level()).unwrap();
            event.record(&mut self.clone());
        }
    }
}

#[tokio::test]
async fn connection_failures_are_logged() {
    let port = RedisServer::start().port();
    let server = RedisServer::options().password("right").start();
    let (unused, guarded) = (port, server.port());
    // A final failure is a warning.
    for (port, reconnect, level, cause) in
        [(unused, true, "DEBUG", "refused"), (unused, false, "WARN", "refused"), (guarded, true, "WARN", "NOAUTH")]
    {
        let events = Events::default();
        let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(events.clone()));
        let options = options(port).reconnect(reconnect);
        let client = Client::start(options);
        client.send(command(&["PING"])).await.unwrap_err();
        let reported = events.0.lock().unwrap().clone();
        assert!(
            reported.starts_with(level) && reported.contains(cause) && reported.contains(&port.to_string()),
            "{reported}"
        );
    }
}
