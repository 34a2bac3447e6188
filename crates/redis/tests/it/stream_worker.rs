//! The worker of streams: retries, dead letters, claims, and how it stops.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidewire_redis::commands::{self, GroupRead, StreamId, StreamStart, XaddOptions, XreadgroupOptions};
use tidewire_redis::stream::{Delivery, Worker, WorkerHandle, WorkerOptions, WorkerStats};
use tidewire_redis::{Client, Error, ErrorCode};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::servers::{options, resp2_and_resp3};

/// Options with short intervals and a `min_idle` that no test reaches.
pub(crate) fn worker_options() -> WorkerOptions {
    WorkerOptions::default()
        .group("g")
        .consumer("c")
        .block(Duration::from_millis(100))
        .min_backoff(Duration::from_millis(10))
        .max_backoff(Duration::from_millis(20))
        .min_idle(PATIENCE)
        .claim_interval(Duration::from_millis(10))
}

/// Adds entries with the field `n`, from 0 on.
async fn add(client: &Client, stream: &str, count: usize) -> Vec<StreamId> {
    let mut ids = Vec::new();
    for number in 0..count {
        let id = client.send(commands::xadd(stream, [("n", number)], XaddOptions::default())).await.unwrap();
        ids.push(id.unwrap());
    }
    ids
}

/// Returns the number in the field `n`.
fn number(delivery: &Delivery) -> usize {
    str::from_utf8(delivery.field("n").unwrap()).unwrap().parse().unwrap()
}

/// The deliveries of a handler, in order.
type Log = Arc<Mutex<Vec<Delivery>>>;

fn numbers(log: &Log) -> Vec<usize> {
    log.lock().unwrap().iter().map(number).collect()
}

/// Starts a worker whose handler logs each entry.
fn start_logging(worker: Worker) -> (Log, WorkerHandle, JoinHandle<Result<(), Error>>) {
    let (log, handle) = (Log::default(), worker.handle());
    let logged = Arc::clone(&log);
    let run = tokio::spawn(worker.run(move |delivery| {
        logged.lock().unwrap().push(delivery);
        async { Ok::<_, String>(()) }
    }));
    (log, handle, run)
}

/// Starts a worker whose handler does not end until it is notified. Returns the number of handlers that run.
fn start_waiting(worker: Worker) -> (Arc<AtomicUsize>, Arc<Notify>, JoinHandle<Result<(), Error>>) {
    let (running, notify) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (started, end) = (Arc::clone(&running), Arc::clone(&notify));
    let run = tokio::spawn(worker.run(move |_| {
        let (started, end) = (Arc::clone(&started), Arc::clone(&end));
        async move {
            started.fetch_add(1, SeqCst);
            end.notified().await;
            Ok::<_, String>(())
        }
    }));
    (running, notify, run)
}

async fn until(what: &str, handle: &WorkerHandle, condition: impl Fn(WorkerStats) -> bool) {
    wait_until_async(what, PATIENCE, async || condition(handle.stats())).await;
}

async fn pending(client: &Client, stream: &str) -> u64 {
    client.send(commands::xpending(stream, "g")).await.unwrap().count
}

/// Delivers all new entries of a stream to a consumer that never acknowledges them.
async fn deliver_to(client: &Client, stream: &str, consumer: &str) {
    let created = client.send(commands::xgroup_create(stream, "g", StreamStart::Beginning, true)).await;
    assert!(matches!(&created, Ok(())) || created.unwrap_err().code() == Some(&ErrorCode::BusyGroup));
    let read = commands::xreadgroup("g", consumer, [(stream, GroupRead::New)], XreadgroupOptions::default());
    client.send(read).await.unwrap();
}

#[tokio::test]
async fn entries_are_handled_once_and_in_order() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let ids = add(&client, "s", 50).await;
        let (log, handle, run) = start_logging(Worker::new(&client, "s", worker_options()));
        until("the first are acknowledged", &handle, |stats| stats.acknowledged == 50).await;
        add(&client, "s", 50).await;
        until("all are acknowledged", &handle, |stats| stats.acknowledged == 100).await;
        handle.stop();
        run.await.unwrap().unwrap();
        assert_eq!(numbers(&log), (0..50).chain(0..50).collect::<Vec<_>>());
        let first = log.lock().unwrap()[0].clone();
        assert_eq!((&first.stream[..], first.id, first.deliveries), (&b"s"[..], ids[0], 1));
        let stats = handle.stats();
        assert_eq!((stats.delivered, stats.failed, stats.claimed, stats.lost, stats.errors), (100, 0, 0, 0, 0));
        assert_eq!(pending(&client, "s").await, 0);
    }
}

#[tokio::test]
async fn handlers_run_concurrently_up_to_the_limit() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    add(&client, "s", 10).await;
    let worker = Worker::new(&client, "s", worker_options().max_concurrent(4).batch(2));
    let handle = worker.handle();
    let (running, notify, run) = start_waiting(worker);
    wait_until_async("four handlers run", PATIENCE, async || running.load(SeqCst) == 4).await;
    // Four run, and one batch waits.
    wait_until_async("a batch waits", PATIENCE, async || pending(&client, "s").await == 6).await;
    assert_eq!((running.load(SeqCst), handle.stats().delivered), (4, 4));
    wait_until_async("all are acknowledged", PATIENCE, async || {
        notify.notify_one();
        handle.stats().acknowledged == 10
    })
    .await;
    handle.stop();
    run.await.unwrap().unwrap();
}

#[tokio::test]
async fn entries_of_several_streams_are_handled() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let worker = Worker::new(&client, "a", worker_options().batch(1)).stream("b").stream("c");
    let (log, handle, run) = start_logging(worker);
    for stream in ["a", "b", "c"] {
        add(&client, stream, 10).await;
    }
    until("all are acknowledged", &handle, |stats| stats.acknowledged == 30).await;
    handle.stop();
    run.await.unwrap().unwrap();
    for stream in ["a", "b", "c"] {
        let log = log.lock().unwrap();
        let numbers: Vec<_> = log.iter().filter(|entry| entry.stream == stream).map(number).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn failed_entry_is_retried_while_others_go_on() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    add(&client, "s", 5).await;
    let worker = Worker::new(&client, "s", worker_options());
    let (log, handle) = (Log::default(), worker.handle());
    let logged = Arc::clone(&log);
    let run = tokio::spawn(worker.run(move |delivery: Delivery| {
        logged.lock().unwrap().push(delivery.clone());
        async move {
            // The second fails twice: with an error, and with a panic.
            match (number(&delivery), delivery.deliveries) {
                (1, 1) => Err("not now"),
                (1, 2) => panic!("not now either"),
                _ => Ok(()),
            }
        }
    }));
    until("all are acknowledged", &handle, |stats| stats.acknowledged == 5).await;
    handle.stop();
    run.await.unwrap().unwrap();
    let attempts: Vec<_> =
        log.lock().unwrap().iter().filter(|entry| number(entry) == 1).map(|entry| entry.deliveries).collect();
    assert_eq!(attempts, [1, 2, 3]);
    let stats = handle.stats();
    assert_eq!((stats.delivered, stats.failed, stats.retried, stats.dead_lettered), (7, 2, 2, 0));
    assert_eq!(pending(&client, "s").await, 0);
}

#[tokio::test]
async fn entry_that_fails_too_often_is_moved_to_the_dead_letter_stream() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let fields = [("boat", "Tern"), ("boat", "Petrel"), ("crew", "3")];
    let id = client.send(commands::xadd("s", fields, XaddOptions::default())).await.unwrap().unwrap();
    let worker = Worker::new(&client, "s", worker_options().max_deliveries(3));
    let handle = worker.handle();
    let run = tokio::spawn(worker.run(async |delivery: Delivery| {
        if delivery.deliveries == 3 { panic!("attempt {}", delivery.deliveries) } else { Err("no") }
    }));
    until("the entry is moved", &handle, |stats| stats.dead_lettered == 1).await;
    handle.stop();
    run.await.unwrap().unwrap();
    let dead = client.send(commands::xrange("s:dead", StreamId::ZERO, StreamId::MAX, None)).await.unwrap();
    assert_eq!(dead.len(), 1);
    let expected = [
        ("dead_letter.stream", "s"),
        ("dead_letter.group", "g"),
        ("dead_letter.id", &id.to_string()),
        ("dead_letter.deliveries", "3"),
        ("dead_letter.error", "the handler panicked: attempt 3"),
        ("boat", "Tern"),
        ("boat", "Petrel"),
        ("crew", "3"),
    ];
    assert_eq!(dead[0].fields, expected.map(|(field, value)| (field.to_owned().into(), value.to_owned().into())));
    let stats = handle.stats();
    assert_eq!((stats.delivered, stats.failed, stats.retried, stats.errors), (3, 3, 2, 0));
    assert_eq!(pending(&client, "s").await, 0);
}

#[tokio::test]
async fn dead_letter_with_many_fields_is_split() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let fields: Vec<_> = (0..7000).map(|number| (format!("f{number}"), number)).collect();
    client.send(commands::xadd("s", &fields, XaddOptions::default())).await.unwrap();
    let worker = Worker::new(&client, "s", worker_options().max_deliveries(1).dead_letter_stream("dead"));
    let handle = worker.handle();
    let run = tokio::spawn(worker.run(async |_| Err::<(), _>("no")));
    until("the entry is moved", &handle, |stats| stats.dead_lettered == 1).await;
    handle.stop();
    run.await.unwrap().unwrap();
    let dead = client.send(commands::xrange("dead", StreamId::ZERO, StreamId::MAX, None)).await.unwrap();
    assert_eq!(dead.iter().map(|entry| entry.fields.len()).collect::<Vec<_>>(), [3005, 3005, 1005]);
    let moved: Vec<_> = dead.iter().flat_map(|entry| &entry.fields[5..]).cloned().collect();
    let fields: Vec<_> = fields.into_iter().map(|(field, number)| (field.into(), number.to_string().into())).collect();
    assert!(moved == fields);
}

#[tokio::test]
async fn entry_that_cannot_be_moved_stays_pending() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.set("s:dead", "not a stream").await.unwrap();
    add(&client, "s", 2).await;
    let worker = Worker::new(&client, "s", worker_options().max_deliveries(1));
    let handle = worker.handle();
    let run = tokio::spawn(worker.run(async |delivery| if number(&delivery) == 0 { Err("no") } else { Ok(()) }));
    until("moving has failed twice", &handle, |stats| stats.errors >= 2).await;
    until("the other entry is acknowledged", &handle, |stats| stats.acknowledged == 1).await;
    assert_eq!((pending(&client, "s").await, handle.stats().dead_lettered), (1, 0));
    client.del(["s:dead"]).await.unwrap();
    until("the entry is moved", &handle, |stats| stats.dead_lettered == 1).await;
    assert_eq!((pending(&client, "s").await, handle.stats().delivered), (0, 2), "the handler is not called again");
    handle.stop();
    run.await.unwrap().unwrap();
}

#[tokio::test]
async fn entry_whose_workers_are_killed_is_moved_without_a_call() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let ids = add(&client, "s", 1).await;
    deliver_to(&client, "s", "c").await;
    let claim = || commands::xclaim("s", "g", "c", Duration::ZERO, ids.clone());
    client.send(claim()).await.unwrap();
    let worker = Worker::new(&client, "s", worker_options().max_deliveries(2));
    let (log, handle, run) = start_logging(worker);
    until("the entry is moved", &handle, |stats| stats.dead_lettered == 1).await;
    handle.stop();
    run.await.unwrap().unwrap();
    assert!(log.lock().unwrap().is_empty());
    let dead = client.send(commands::xrange("s:dead", StreamId::ZERO, StreamId::MAX, None)).await.unwrap();
    assert_eq!((&dead[0].fields[3].1[..], dead[0].fields.len()), (&b"2"[..], 6));
}

#[tokio::test]
async fn worker_takes_its_own_pending_entries_at_the_start() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        add(&client, "s", 25).await;
        deliver_to(&client, "s", "c").await;
        // In several batches, and before new entries.
        client.send(commands::xadd("s", [("n", 25)], XaddOptions::default())).await.unwrap();
        let (log, handle, run) = start_logging(Worker::new(&client, "s", worker_options()));
        until("all are acknowledged", &handle, |stats| stats.acknowledged == 26).await;
        handle.stop();
        run.await.unwrap().unwrap();
        assert_eq!(numbers(&log), (0..26).collect::<Vec<_>>());
        let deliveries: Vec<_> = log.lock().unwrap().iter().map(|entry| entry.deliveries).collect();
        assert_eq!(deliveries, [vec![2; 25], vec![1]].concat());
        assert_eq!((handle.stats().claimed, pending(&client, "s").await), (25, 0));
    }
}

#[tokio::test]
async fn stale_entries_of_another_consumer_are_claimed() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    add(&client, "s", 25).await;
    deliver_to(&client, "s", "dead").await;
    let options = worker_options().min_idle(Duration::from_millis(200)).batch(10);
    let (log, handle, run) = start_logging(Worker::new(&client, "s", options));
    until("all are acknowledged", &handle, |stats| stats.acknowledged >= 25).await;
    handle.stop();
    run.await.unwrap().unwrap();
    let mut handled = numbers(&log);
    handled.sort_unstable();
    handled.dedup();
    assert_eq!(handled, (0..25).collect::<Vec<_>>());
    assert!(handle.stats().claimed >= 25);
    assert_eq!(pending(&client, "s").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn entry_of_a_long_handler_is_not_claimed() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    add(&client, "s", 3).await;
    let min_idle = Duration::from_secs(4);
    let worker = Worker::new(&client, "s", worker_options().min_idle(min_idle));
    let first = worker.handle();
    // One runs, and two wait.
    let (running, notify, run) = start_waiting(worker);
    wait_until_async("all are delivered", PATIENCE, async || {
        running.load(SeqCst) == 1 && pending(&client, "s").await == 3
    })
    .await;
    let other = Worker::new(&client, "s", worker_options().consumer("other").min_idle(min_idle));
    let (log, second, other_run) = start_logging(other);
    // Longer than it would take to claim them.
    let start = std::time::Instant::now();
    wait_until_async("the time has passed", PATIENCE, async || start.elapsed() > min_idle * 3 / 2).await;
    assert!(log.lock().unwrap().is_empty() && second.stats().claimed == 0);
    wait_until_async("all are acknowledged", PATIENCE, async || {
        notify.notify_one();
        first.stats().acknowledged == 3
    })
    .await;
    assert_eq!((first.stats().lost, first.stats().delivered), (0, 3));
    for (handle, run) in [(first, run), (second, other_run)] {
        handle.stop();
        run.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn claimed_entry_is_left_to_its_new_consumer() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let ids = add(&client, "s", 3).await;
    let worker = Worker::new(&client, "s", worker_options().min_idle(Duration::from_secs(30)).max_deliveries(1));
    let handle = worker.handle();
    let (started, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (running, ended) = (Arc::clone(&started), Arc::clone(&end));
    let run = tokio::spawn(worker.run(move |_| {
        let (running, ended) = (Arc::clone(&running), Arc::clone(&ended));
        async move {
            running.notify_one();
            ended.notified().await;
            Err::<(), _>("fails after the claim")
        }
    }));
    started.notified().await;
    wait_until_async("all are delivered", PATIENCE, async || pending(&client, "s").await == 3).await;
    client.send(commands::xclaim("s", "g", "other", Duration::ZERO, ids.clone())).await.unwrap();
    wait_until_async("the handlers end", PATIENCE, async || {
        end.notify_one();
        handle.stats().lost == 3
    })
    .await;
    // It was not moved, although it must not be delivered again.
    assert_eq!((handle.stats().dead_lettered, client.exists("s:dead").await.unwrap()), (0, false));
    let summary = client.send(commands::xpending("s", "g")).await.unwrap();
    assert_eq!(summary.consumers, [("other".into(), 3)]);
    handle.stop();
    run.await.unwrap().unwrap();
}

#[tokio::test]
async fn stop_waits_for_the_running_handler_and_releases_the_others() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    add(&client, "s", 5).await;
    let worker = Worker::new(&client, "s", worker_options().grace(PATIENCE));
    let handle = worker.handle();
    let (running, notify, run) = start_waiting(worker);
    wait_until_async("all are delivered", PATIENCE, async || {
        running.load(SeqCst) == 1 && pending(&client, "s").await == 5
    })
    .await;
    handle.stop();
    // Others claim what was not started, without waiting for `min_idle`, and it does not count as a delivery.
    let (log, other, other_run) = start_logging(Worker::new(&client, "s", worker_options().consumer("other")));
    until("the others are handled", &other, |stats| stats.acknowledged == 4).await;
    assert_eq!(numbers(&log), [1, 2, 3, 4]);
    assert!(log.lock().unwrap().iter().all(|entry| entry.deliveries == 1));
    assert!(!run.is_finished());
    notify.notify_one();
    run.await.unwrap().unwrap();
    assert_eq!((handle.stats().delivered, handle.stats().acknowledged), (1, 1));
    assert_eq!(pending(&client, "s").await, 0);
    other.stop();
    other_run.await.unwrap().unwrap();
}

/// Sets a flag when it is dropped.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[tokio::test]
async fn handler_is_aborted_after_the_grace_period_and_with_the_future() {
    for is_stopped in [true, false] {
        let server = RedisServer::start();
        let client = Client::start(options(server.port()));
        add(&client, "s", 1).await;
        let worker = Worker::new(&client, "s", worker_options().grace(Duration::from_millis(20)));
        let handle = worker.handle();
        let dropped = Arc::new(AtomicUsize::new(0));
        let in_handler = Arc::clone(&dropped);
        let run = tokio::spawn(worker.run(move |_| {
            let guard = Dropped(Arc::clone(&in_handler));
            async move {
                let _guard = guard;
                std::future::pending::<Result<(), String>>().await
            }
        }));
        until("the handler runs", &handle, |stats| stats.delivered == 1).await;
        if is_stopped {
            handle.stop();
            run.await.unwrap().unwrap();
        } else {
            run.abort();
            assert!(run.await.unwrap_err().is_cancelled());
        }
        wait_until_async("the handler is dropped", PATIENCE, async || dropped.load(SeqCst) == 1).await;
        assert_eq!(pending(&client, "s").await, 1);
        // The next run handles it.
        let (log, handle, run) = start_logging(Worker::new(&client, "s", worker_options()));
        until("it is acknowledged", &handle, |stats| stats.acknowledged == 1).await;
        assert_eq!(log.lock().unwrap()[0].deliveries, 2);
        handle.stop();
        run.await.unwrap().unwrap();
        // The read that was cancelled took nothing from anyone.
        assert_eq!((client.stats().exclusive.unclaimed, client.stats().exclusive.unknown), (0, 0));
    }
}

#[tokio::test]
async fn entries_that_are_deleted_while_they_are_pending_are_acknowledged() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let ids = add(&client, "s", 4).await;
        // Two before the start, and one between two attempts.
        deliver_to(&client, "s", "c").await;
        client.send(commands::xdel("s", ids[..2].iter().copied())).await.unwrap();
        let worker = Worker::new(&client, "s", worker_options());
        let handle = worker.handle();
        let deleting = client.clone();
        let run = tokio::spawn(worker.run(move |delivery: Delivery| {
            let client = deleting.clone();
            async move {
                if number(&delivery) == 3 {
                    return Ok(());
                }
                client.send(commands::xdel("s", [delivery.id])).await.unwrap();
                Err("deleted")
            }
        }));
        until("three are deleted", &handle, |stats| stats.deleted == 3 && stats.acknowledged == 1).await;
        assert_eq!((pending(&client, "s").await, handle.stats().delivered), (0, 2));
        handle.stop();
        run.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn group_starts_where_the_options_say_and_is_created_again() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let ids = add(&client, "s", 4).await;
    for (group, start, expected) in [
        ("beginning", StreamStart::Beginning, vec![0, 1, 2, 3, 0]),
        ("after", StreamStart::After(ids[1]), vec![2, 3, 0]),
        ("now", StreamStart::Now, vec![0]),
    ] {
        let worker = Worker::new(&client, "s", worker_options().group(group).start(start));
        let (log, handle, run) = start_logging(worker);
        wait_until_async("the group exists", PATIENCE, async || {
            server.cli(["XINFO", "GROUPS", "s"]).lines().any(|line| line == group)
        })
        .await;
        let id = add(&client, "s", 1).await[0];
        let count = expected.len() as u64;
        until("all are acknowledged", &handle, |stats| stats.acknowledged == count).await;
        assert_eq!(numbers(&log), expected, "{group}");
        // Without the group the same entries are delivered again.
        client.send(commands::xgroup_destroy("s", group)).await.unwrap();
        until("all are acknowledged again", &handle, |stats| stats.acknowledged == 2 * count).await;
        assert_eq!(numbers(&log), [expected.clone(), expected].concat(), "{group}");
        assert!(handle.stats().errors > 0);
        client.send(commands::xdel("s", [id])).await.unwrap();
        handle.stop();
        run.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn worker_goes_on_after_flushall() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for start in [StreamStart::Beginning, StreamStart::Now] {
        let (log, handle, run) = start_logging(Worker::new(&client, "s", worker_options().start(start)));
        wait_until_async("the group exists", PATIENCE, async || client.exists("s").await.unwrap()).await;
        for turn in 1..=3 {
            // With smaller IDs than before.
            let id = StreamId { milliseconds: 10 - turn, sequence: 0 };
            client.send(commands::xadd("s", [("n", turn)], XaddOptions::default().id(id))).await.unwrap();
            until("the entry is acknowledged", &handle, |stats| stats.acknowledged == turn).await;
            server.cli(["FLUSHALL"]);
        }
        handle.stop();
        run.await.unwrap().unwrap();
        assert_eq!(numbers(&log), [1, 2, 3]);
        server.cli(["FLUSHALL"]);
    }
}

#[tokio::test]
async fn error_that_repeating_cannot_help_ends_the_worker() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.set("text", "x").await.unwrap();
    let error = Worker::new(&client, "text", worker_options()).run(async |_| Ok::<_, String>(())).await.unwrap_err();
    assert_eq!(error.code(), Some(&ErrorCode::WrongType));
    let (_, handle, run) = start_logging(Worker::new(&client, "s", worker_options()));
    wait_until_async("the group exists", PATIENCE, async || client.exists("s").await.unwrap()).await;
    client.close(Duration::ZERO).await;
    assert!(matches!(run.await.unwrap().unwrap_err(), Error::Closed { .. }));
    assert!(handle.stats().errors > 0);
}

#[tokio::test]
async fn no_new_entries_are_read_while_too_many_wait_for_another_attempt() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    add(&client, "s", 20).await;
    let options = worker_options().max_retrying(3).batch(1).min_backoff(PATIENCE).max_backoff(PATIENCE);
    let worker = Worker::new(&client, "s", options);
    let handle = worker.handle();
    let run = tokio::spawn(worker.run(async |_| Err::<(), _>("no")));
    until("three have failed", &handle, |stats| stats.failed >= 3).await;
    // A read may have begun before the third failed.
    wait_until_async("the worker does not read", PATIENCE, async || client.stats().exclusive.in_use == 0).await;
    assert!(handle.stats().delivered <= 4 && pending(&client, "s").await <= 4, "{:?}", handle.stats());
    handle.stop();
    run.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_of_a_group_share_the_entries() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let seen = Arc::new(Mutex::new(HashMap::<StreamId, usize>::new()));
    let mut workers = Vec::new();
    for consumer in ["a", "b", "c"] {
        let worker = Worker::new(&client, "s", worker_options().consumer(consumer).max_concurrent(4));
        let (handle, seen) = (worker.handle(), Arc::clone(&seen));
        let run = tokio::spawn(worker.run(move |delivery: Delivery| {
            *seen.lock().unwrap().entry(delivery.id).or_default() += 1;
            async { Ok::<_, String>(()) }
        }));
        workers.push((handle, run));
    }
    let ids = add(&client, "s", 600).await;
    let acknowledged = || workers.iter().map(|(handle, _)| handle.stats().acknowledged).sum::<u64>();
    wait_until_async("all are acknowledged", PATIENCE, async || acknowledged() == 600).await;
    for (handle, run) in workers {
        handle.stop();
        run.await.unwrap().unwrap();
    }
    let seen = seen.lock().unwrap();
    assert!(ids.iter().all(|id| seen.get(id) == Some(&1)) && seen.len() == 600);
}
