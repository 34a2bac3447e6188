//! Blocking commands, which have exclusive connections.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tidewire_redis::commands::{self, ListEnd, ScoreEnd, StreamStart, XaddOptions, XreadgroupOptions};
use tidewire_redis::resp::{Decoder, Message};
use tidewire_redis::{
    Client, Command, ConnectionState, Error, FromValue, Pipeline, RequestOutcome, RequestPhase, UnclaimedHook,
    UnclaimedReply, Value,
};
use tidewire_testkit::{FaultProxy, Faults, PATIENCE, RedisServer, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use crate::servers::{Scripted, greeting, options, resp2_and_resp3};

const FOREVER: Duration = Duration::ZERO;

/// Waits until this number of clients are blocked.
async fn blocked(server: &RedisServer, count: usize) {
    let line = format!("blocked_clients:{count}\r");
    wait_until_async("clients are blocked", PATIENCE, async || {
        server.cli(["INFO", "clients"]).split('\n').any(|found| found.trim_end() == line.trim_end())
    })
    .await;
}

/// Options that collect unclaimed replies.
fn collecting(port: u16) -> (tidewire_redis::Options, Arc<Mutex<Vec<UnclaimedReply>>>) {
    let unclaimed = Arc::new(Mutex::new(Vec::new()));
    let collected = Arc::clone(&unclaimed);
    let hook = UnclaimedHook::new(move |reply| collected.lock().unwrap().push(reply));
    (options(port).unclaimed_hook(hook), unclaimed)
}

#[tokio::test]
async fn typed_blocking_commands_return_elements() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        client.rpush("list", ["a", "b", "c", "d", "e"]).await.unwrap();
        let wait = Duration::from_mins(1);
        let text = |text: &'static str| Bytes::from(text);
        let popped = client.send(commands::blpop(["none", "list"], wait)).await.unwrap();
        assert_eq!(popped, Some((text("list"), text("a"))));
        let popped = client.send(commands::brpop(["list"], wait)).await.unwrap();
        assert_eq!(popped, Some((text("list"), text("e"))));
        let popped = client.send(commands::blmpop(["list"], ListEnd::Left, 2, wait)).await.unwrap();
        assert_eq!(popped, Some((text("list"), vec![text("b"), text("c")])));
        let moved = client.send(commands::blmove("list", ListEnd::Left, "other", ListEnd::Right, wait)).await.unwrap();
        assert_eq!(moved, Some(text("d")));
        let scores = [("low", 1.0), ("middle", 2.0), ("high", 3.0), ("top", 4.0)];
        client.send(commands::zadd("set", scores, commands::ZaddOptions::default())).await.unwrap();
        let popped = client.send(commands::bzpopmin(["set"], wait)).await.unwrap();
        assert_eq!(popped, Some((text("set"), text("low"), 1.0)));
        let popped = client.send(commands::bzpopmax(["set"], wait)).await.unwrap();
        assert_eq!(popped, Some((text("set"), text("top"), 4.0)));
        let popped = client.send(commands::bzmpop(["set"], ScoreEnd::Highest, 5, wait)).await.unwrap();
        assert_eq!(popped, Some((text("set"), vec![(text("high"), 3.0), (text("middle"), 2.0)])));
        let id = client.send(commands::xadd("stream", [("f", "v")], XaddOptions::default())).await.unwrap().unwrap();
        let read = commands::xread_blocking([("stream", StreamStart::Beginning)], Some(1), wait);
        let streams = client.send(read).await.unwrap().unwrap();
        assert_eq!((&streams[0].0, streams[0].1[0].id), (&text("stream"), id));
        client.send(commands::xgroup_create("stream", "g", StreamStart::Beginning, false)).await.unwrap();
        let group_options = XreadgroupOptions::default().block(wait);
        let read = commands::xreadgroup("g", "c", [("stream", commands::GroupRead::New)], group_options);
        assert_eq!(client.send(read).await.unwrap().unwrap()[0].1[0].id, id);
        let popped: Option<(String, String)> = client.blpop(["other"], wait).await.unwrap();
        assert_eq!(popped, Some(("other".into(), "d".into())));
        // The shortest timeout is not rounded to no limit.
        let none: Option<(String, String)> = client.blpop(["none"], Duration::from_nanos(1)).await.unwrap();
        assert_eq!(none, None);
        assert_eq!(client.stats().exclusive.opened, 1, "one connection served all of them");
    }
}

#[tokio::test]
async fn blocked_command_does_not_delay_other_tasks() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.blpop::<Option<(String, String)>>(["queue"], FOREVER).await }
    });
    blocked(&server, 1).await;
    for number in 0..100 {
        assert_eq!(client.incr("n").await.unwrap(), number + 1);
    }
    let stats = client.stats().exclusive;
    assert_eq!((stats.open, stats.in_use, stats.opened), (1, 1, 1));
    client.rpush("queue", ["job"]).await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), Some(("queue".into(), "job".into())));
    assert_eq!(client.stats().exclusive.in_use, 0);
}

#[tokio::test]
async fn call_waits_for_a_connection_and_then_fails_as_never_sent() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).max_exclusive(2));
    let mut waiting = JoinSet::new();
    for _ in 0..2 {
        let client = client.clone();
        waiting.spawn(async move { client.blpop::<Option<(String, String)>>(["queue"], FOREVER).await.unwrap() });
    }
    blocked(&server, 2).await;
    let hurried = client.with_timeout(Duration::from_millis(20));
    let error = hurried.blpop::<Value>(["queue"], FOREVER).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { phase: RequestPhase::Queued }), "{error:?}");
    assert_eq!((error.outcome(), error.is_retryable()), (Some(RequestOutcome::NeverSent), true));
    assert_eq!(client.stats().timeouts.queued, 1);
    // A third caller gets the connection of the first that ends.
    let third = tokio::spawn({
        let client = client.clone();
        async move { client.blpop::<Option<(String, String)>>(["queue"], FOREVER).await.unwrap() }
    });
    for job in ["a", "b", "c"] {
        client.rpush("queue", [job]).await.unwrap();
    }
    let mut jobs: Vec<_> = waiting.join_all().await.into_iter().map(|popped| popped.unwrap().1).collect();
    jobs.push(third.await.unwrap().unwrap().1);
    jobs.sort();
    assert_eq!(jobs, ["a", "b", "c"]);
    assert_eq!(client.stats().exclusive.opened, 2);
}

#[tokio::test]
async fn deadline_is_the_timeout_of_the_command_and_that_of_the_client() {
    let server = RedisServer::start();
    // The command blocks for longer than the timeout of the client.
    let client = Client::start(options(server.port()).timeout(Duration::from_secs(2)));
    let none: Option<(String, String)> = client.blpop(["none"], Duration::from_secs(3)).await.unwrap();
    assert_eq!(none, None);
    server.pause();
    let error = client.with_timeout(Duration::from_millis(10)).blpop::<Value>(["none"], Duration::from_millis(1)).await;
    let error = error.unwrap_err();
    assert!(matches!(error, Error::TimedOut { phase: RequestPhase::Waiting }), "{error:?}");
    server.resume();
    // The connection is closed or reused: the next call works.
    wait_until_async("the next call works", PATIENCE, async || {
        client.blpop::<Value>(["none"], Duration::from_millis(1)).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn dropped_call_unblocks_its_connection() {
    let server = RedisServer::start();
    let (options, unclaimed) = collecting(server.port());
    let client = Client::start(options.max_exclusive(1));
    for _ in 0..20 {
        {
            let mut call = pin!(client.blpop::<Value>(["queue"], FOREVER));
            assert!(matches!(poll_once(&mut call).await, Poll::Pending));
            blocked(&server, 1).await;
        }
        blocked(&server, 0).await;
    }
    // Nothing takes an element any more, and the connection is free again.
    client.rpush("queue", ["job"]).await.unwrap();
    let popped: Option<(String, String)> = client.blpop(["queue"], FOREVER).await.unwrap();
    assert_eq!(popped, Some(("queue".into(), "job".into())));
    let stats = client.stats().exclusive;
    assert_eq!((stats.opened, stats.unclaimed, stats.unknown), (1, 0, 0));
    assert!(unclaimed.lock().unwrap().is_empty());
}

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    std::future::poll_fn(|context| Poll::Ready(std::pin::Pin::new(&mut *future).poll(context))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_element_is_lost_when_calls_are_dropped_at_any_time() {
    const JOBS: usize = 300;
    let server = RedisServer::start();
    let (options, unclaimed) = collecting(server.port());
    let client = Client::start(options);
    let (sender, mut received) = mpsc::channel(JOBS);
    let stop = Arc::new(AtomicBool::new(false));
    let mut workers = JoinSet::new();
    for worker in 0..8 {
        let (client, sender, stop) = (client.clone(), sender.clone(), Arc::clone(&stop));
        workers.spawn(async move {
            while !stop.load(SeqCst) {
                let patience = Duration::from_micros(fastrand::u64(0..3000) + worker);
                let call = client.blpop::<Option<(String, String)>>(["queue"], FOREVER);
                match tokio::time::timeout(patience, call).await {
                    Ok(Err(Error::Closed { .. })) if stop.load(SeqCst) => return,
                    Ok(popped) => {
                        let (_, job) = popped.unwrap().expect("a call without a limit returns an element");
                        sender.send(job).await.unwrap();
                    }
                    Err(_) => {}
                }
            }
        });
    }
    for job in 0..JOBS {
        client.rpush("queue", [job]).await.unwrap();
    }
    let mut seen = Vec::new();
    wait_until_async("all jobs are received or unclaimed", PATIENCE, async || {
        while let Ok(job) = received.try_recv() {
            seen.push(job);
        }
        seen.len() + unclaimed.lock().unwrap().len() >= JOBS
    })
    .await;
    stop.store(true, SeqCst);
    // Wakes those that wait without end.
    client.close(PATIENCE).await;
    workers.join_all().await;
    for reply in unclaimed.lock().unwrap().drain(..) {
        assert_eq!(&*reply.command, "BLPOP");
        let Value::Array(popped) = reply.reply else { panic!("{reply:?}") };
        seen.push(String::from_utf8(popped[1].as_bytes().unwrap().to_vec()).unwrap());
    }
    let mut numbers: Vec<usize> = seen.iter().map(|job| job.parse().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..JOBS).collect::<Vec<_>>(), "a job was lost or delivered twice");
    assert_eq!(client.stats().exclusive.unknown, 0);
}

#[tokio::test]
async fn element_that_was_popped_for_a_dropped_call_is_given_to_the_hook() {
    let received = Arc::new(AtomicBool::new(false));
    let server = Scripted::answering({
        let received = Arc::clone(&received);
        move |words, _| match &*words[0] {
            "BLPOP" => {
                received.store(true, SeqCst);
                "*2\r\n$5\r\nqueue\r\n$3\r\njob\r\n".to_owned()
            }
            _ => greeting(words).unwrap_or_default(),
        }
    })
    .await;
    let (options, unclaimed) = collecting(server.port());
    let client = Client::start(options);
    {
        let mut call = pin!(client.blpop::<Value>(["queue"], FOREVER));
        assert!(matches!(poll_once(&mut call).await, Poll::Pending));
        // The future is not polled any more, so it never has the reply.
        wait_until_async("the element is popped", PATIENCE, async || received.load(SeqCst)).await;
    }
    wait_until_async("the hook is called", PATIENCE, async || !unclaimed.lock().unwrap().is_empty()).await;
    let reply = unclaimed.lock().unwrap()[0].clone();
    assert_eq!((&*reply.command, reply.reply), ("BLPOP", Value::Array(vec!["queue".into(), "job".into()])));
    assert_eq!(client.stats().exclusive.unclaimed, 1);
}

#[tokio::test]
async fn lost_connection_ends_a_blocked_call_and_is_counted_if_it_was_dropped() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(proxy.addr().port()));
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.blpop::<Value>(["queue"], FOREVER).await }
    });
    blocked(&server, 1).await;
    server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Lost { outcome: RequestOutcome::MaybeExecuted, .. }), "{error:?}");
    // The next call has another connection.
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    client.rpush("queue", ["job"]).await.unwrap();
    assert!(client.blpop::<Option<(String, String)>>(["queue"], FOREVER).await.unwrap().is_some());
    assert_eq!(client.stats().exclusive.opened, 2);
    // A dropped call that the server cannot be asked about.
    let hurried = Client::start(options(proxy.addr().port()).timeout(Duration::from_millis(100)));
    hurried.ping().await.unwrap();
    {
        let mut call = pin!(hurried.blpop::<Value>(["queue"], FOREVER));
        assert!(matches!(poll_once(&mut call).await, Poll::Pending));
        blocked(&server, 1).await;
        server.pause();
    }
    wait_until_async("the outcome is counted", PATIENCE, async || hurried.stats().exclusive.unknown == 1).await;
    server.resume();
}

#[tokio::test]
async fn close_ends_blocked_calls_at_once() {
    let server = RedisServer::start();
    // Nothing but the close itself ends the wait.
    let client = Client::start(options(server.port()).name("app").timeout(Duration::MAX));
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.blpop::<Value>(["queue"], FOREVER).await }
    });
    blocked(&server, 1).await;
    assert!(server.cli(["CLIENT", "LIST"]).contains("name=app"));
    client.close(Duration::MAX).await;
    let error = call.await.unwrap().unwrap_err();
    // The server has confirmed that it popped nothing.
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{error:?}");
    let error = client.blpop::<Value>(["queue"], FOREVER).await.unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{error:?}");
    wait_until_async("all connections are closed", PATIENCE, async || {
        !server.cli(["CLIENT", "LIST"]).contains("name=app")
    })
    .await;
}

#[tokio::test]
async fn close_without_a_shared_connection_ends_blocked_calls() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(proxy.addr().port()).timeout(Duration::MAX));
    let id = client.send(commands::client_id()).await.unwrap();
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.blpop::<Value>(["queue"], FOREVER).await }
    });
    blocked(&server, 1).await;
    // Only the shared connection is lost, and cannot be replaced.
    proxy.inject(Faults::default().refuse(true));
    server.cli(["CLIENT", "KILL", "ID", &id.to_string()]);
    client.status().wait_for(|status| status.state == ConnectionState::Failed).await.unwrap();
    client.close(Duration::MAX).await;
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::MaybeExecuted }), "{error:?}");
    blocked(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn graceful_shutdown_of_consumers_loses_no_element() {
    let server = RedisServer::start();
    let producer = Client::start(options(server.port()));
    for round in 0..20 {
        let (options, unclaimed) = collecting(server.port());
        let client = Client::connect(options).await.unwrap();
        let received = Arc::new(AtomicUsize::new(0));
        let mut consumers = JoinSet::new();
        for _ in 0..8 {
            let (client, received) = (client.clone(), Arc::clone(&received));
            consumers.spawn(async move {
                while client.blpop::<(String, String)>(["queue"], FOREVER).await.is_ok() {
                    received.fetch_add(1, SeqCst);
                }
            });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let producing = tokio::spawn({
            let (producer, stop) = (producer.clone(), Arc::clone(&stop));
            async move {
                let mut pushed = 0;
                while !stop.load(SeqCst) {
                    producer.rpush("queue", ["job"]).await.unwrap();
                    pushed += 1;
                }
                pushed
            }
        });
        wait_until_async("some jobs are received", PATIENCE, async || received.load(SeqCst) > 20).await;
        // The consumers are cancelled before the client is closed, or end because it is closed.
        if round % 2 == 0 {
            consumers.shutdown().await;
        }
        client.close(PATIENCE).await;
        consumers.join_all().await;
        stop.store(true, SeqCst);
        let pushed = producing.await.unwrap();
        let left = usize::try_from(producer.llen("queue").await.unwrap()).unwrap();
        producer.del(["queue"]).await.unwrap();
        let unclaimed = unclaimed.lock().unwrap().len();
        assert_eq!(received.load(SeqCst) + unclaimed + left, pushed, "{:?}", client.stats().exclusive);
        assert_eq!(client.stats().exclusive.unknown, 0);
    }
}

#[tokio::test]
async fn call_that_is_dropped_while_the_client_closes_does_not_delay_the_close() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).timeout(Duration::MAX));
    for _ in 0..2 {
        let call = tokio::spawn({
            let client = client.clone();
            async move { client.blpop::<Value>(["queue"], FOREVER).await }
        });
        blocked(&server, 1).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
    }
    client.close(Duration::MAX).await;
    blocked(&server, 0).await;
    assert_eq!(client.stats().exclusive.unknown, 0);
}

#[tokio::test]
async fn dropped_call_is_ended_after_the_last_handle_is_dropped() {
    let server = RedisServer::start();
    for _ in 0..20 {
        let client = Client::start(options(server.port()).timeout(Duration::MAX));
        {
            let mut call = pin!(client.blpop::<Value>(["queue"], FOREVER));
            assert!(matches!(poll_once(&mut call).await, Poll::Pending));
            blocked(&server, 1).await;
        }
        drop(client);
        blocked(&server, 0).await;
    }
}

#[tokio::test]
async fn dropped_call_is_ended_over_the_next_shared_connection() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).timeout(Duration::MAX).connect_timeout(PATIENCE));
    let id = client.send(commands::client_id()).await.unwrap();
    {
        let mut call = pin!(client.blpop::<Value>(["queue"], FOREVER));
        assert!(matches!(poll_once(&mut call).await, Poll::Pending));
        blocked(&server, 1).await;
        server.cli(["CLIENT", "KILL", "ID", &id.to_string()]);
    }
    blocked(&server, 0).await;
    let none: Value = client.blpop(["queue"], Duration::from_millis(1)).await.unwrap();
    assert_eq!((none, client.stats().exclusive.unknown), (Value::Null, 0));
}

#[tokio::test]
async fn connection_is_closed_if_unblock_is_refused() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all -client|unblock").start();
    let login = tidewire_redis::Login::new("secret").user("app");
    let client = Client::start(options(server.port()).timeout(Duration::MAX).max_exclusive(1).login(login));
    for _ in 0..3 {
        {
            let mut call = pin!(client.blpop::<Value>(["queue"], FOREVER));
            assert!(matches!(poll_once(&mut call).await, Poll::Pending));
            blocked(&server, 1).await;
        }
        let none: Value = client.blpop(["none"], Duration::from_millis(1)).await.unwrap();
        assert_eq!(none, Value::Null);
    }
    assert_eq!(client.stats().exclusive.unknown, 3);
}

/// The server executes the first `CLIENT UNBLOCK` after the command that it was to end has got an element.
#[tokio::test]
async fn late_unblock_does_not_end_the_call_of_another_task() {
    let (commands, unblocks) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (unblock_received, next_call) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let server = Scripted::start({
        let (commands, unblocks) = (Arc::clone(&commands), Arc::clone(&unblocks));
        let (unblock_received, next_call) = (Arc::clone(&unblock_received), Arc::clone(&next_call));
        move |mut stream, _| {
            let (commands, unblocks) = (Arc::clone(&commands), Arc::clone(&unblocks));
            let (unblock_received, next_call) = (Arc::clone(&unblock_received), Arc::clone(&next_call));
            async move {
                let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
                loop {
                    while let Ok(Some(Message::Reply(request))) = decoder.decode(&mut input) {
                        let words = Vec::<String>::from_value(request).unwrap();
                        let reply = match &*words[0] {
                            "HELLO" => "%2\r\n+proto\r\n:3\r\n+id\r\n:7\r\n".to_owned(),
                            "CLIENT" if words[1] == "UNBLOCK" => {
                                unblock_received.notify_one();
                                // Executed when the next command blocks, or not at all if it does not wait for this reply.
                                let _ = tokio::time::timeout(Duration::from_millis(500), next_call.notified()).await;
                                unblocks.store(commands.load(SeqCst), SeqCst);
                                ":1\r\n".to_owned()
                            }
                            "BLPOP" if commands.fetch_add(1, SeqCst) == 0 => {
                                unblock_received.notified().await;
                                "*2\r\n$5\r\nqueue\r\n$3\r\njob\r\n".to_owned()
                            }
                            "BLPOP" => {
                                next_call.notify_one();
                                while unblocks.load(SeqCst) == 0 {
                                    tokio::task::yield_now().await;
                                }
                                let is_ended = unblocks.load(SeqCst) == 2;
                                let reply = if is_ended { "_\r\n" } else { "*2\r\n$5\r\nqueue\r\n$4\r\nnext\r\n" };
                                reply.to_owned()
                            }
                            _ => greeting(&words).unwrap_or("+OK\r\n".to_owned()),
                        };
                        if stream.write_all(reply.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                    if !matches!(stream.read_buf(&mut input).await, Ok(1..)) {
                        return;
                    }
                }
            }
        }
    })
    .await;
    let (options, unclaimed) = collecting(server.port());
    let client = Client::start(options.max_exclusive(1));
    client.ping().await.unwrap();
    {
        let mut call = pin!(client.blpop::<Value>(["queue"], FOREVER));
        assert!(matches!(poll_once(&mut call).await, Poll::Pending));
        wait_until_async("the command is received", PATIENCE, async || commands.load(SeqCst) == 1).await;
    }
    let next: Option<(String, String)> = client.blpop(["queue"], FOREVER).await.unwrap();
    assert_eq!(next, Some(("queue".into(), "next".into())), "the first UNBLOCK has ended the second command");
    assert_eq!(unclaimed.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn timeout_of_zero_sends_nothing() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.rpush("queue", ["job"]).await.unwrap();
    let error = client.with_timeout(Duration::ZERO).blpop::<Value>(["queue"], FOREVER).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { phase: RequestPhase::Queued }), "{error:?}");
    assert_eq!(client.llen("queue").await.unwrap(), 1);
}

#[tokio::test]
async fn longest_timeout_means_no_limit() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for timeout in [Duration::MAX, Duration::from_secs(1 << 53), Duration::from_hours(24 * 365 * 99)] {
        client.rpush("queue", ["job"]).await.unwrap();
        assert!(client.blpop::<Option<(String, String)>>(["queue"], timeout).await.unwrap().is_some());
        let id = client.send(commands::xadd("stream", [("f", "v")], XaddOptions::default())).await.unwrap();
        let read = commands::xread_blocking([("stream", StreamStart::Beginning)], None, timeout);
        assert_eq!(client.send(read).await.unwrap().unwrap()[0].1.last().map(|entry| entry.id), id);
        let pipeline = Pipeline::new().then(commands::incr("n")).then(commands::wait(0, timeout));
        client.pipeline(pipeline).await.unwrap().1.unwrap();
    }
}

#[tokio::test]
async fn client_that_cannot_connect_does_not_send_a_blocking_command() {
    let port = tidewire_testkit::Port::reserve();
    let client = Client::start(options(port.number()));
    let error = client.blpop::<Value>(["queue"], FOREVER).await.unwrap_err();
    assert_eq!(error.outcome(), Some(RequestOutcome::NeverSent), "{error:?}");
}

#[tokio::test]
async fn pipeline_waits_for_the_replicas_of_its_own_writes() {
    let server = RedisServer::start();
    let replica = RedisServer::options().config(format!("replicaof 127.0.0.1 {}", server.port())).start();
    wait_until_async("the replica is connected", PATIENCE, async || {
        server.cli(["INFO", "replication"]).contains("state=online")
    })
    .await;
    let client = Client::start(options(server.port()));
    let pipeline = Pipeline::new().then(commands::set("a", 1)).then(commands::wait(1, PATIENCE));
    let (set, replicas) = client.pipeline(pipeline).await.unwrap();
    assert_eq!((set.unwrap(), replicas.unwrap()), ((), 1));
    assert_eq!(replica.cli(["GET", "a"]), "1");
    // More replicas than there are: it waits for the timeout of `WAIT`, which may be longer than that of the client.
    let hurried = client.with_timeout(Duration::from_millis(100));
    let pipeline = Pipeline::new().then(commands::incr("a")).then(commands::wait(2, Duration::from_millis(300)));
    let (number, replicas) = hurried.pipeline(pipeline).await.unwrap();
    assert_eq!((number.unwrap(), replicas.unwrap()), (2, 1));
    assert_eq!(client.stats().exclusive.opened, 1);
}

#[tokio::test]
async fn pipeline_waits_for_the_append_only_file() {
    let server = RedisServer::options().config("appendonly yes").start();
    let client = Client::start(options(server.port()));
    let pipeline = Pipeline::new().then(commands::set("a", 1)).then(commands::waitaof(true, 0, PATIENCE));
    let (set, written) = client.pipeline(pipeline).await.unwrap();
    set.unwrap();
    match written {
        Ok(written) => assert_eq!(written, (1, 0)),
        // Before Redis 7.2.
        Err(error) => assert!(error.to_string().contains("unknown command 'WAITAOF'"), "{error}"),
    }
    assert_eq!(client.stats().exclusive.opened, 1);
}

#[tokio::test]
async fn connect_returns_an_open_client_or_the_reason() {
    let server = RedisServer::options().password("secret").start();
    let login = |password: &str| options(server.port()).login(tidewire_redis::Login::new(password)).name("app");
    let client = Client::connect(login("secret")).await.unwrap();
    assert_eq!(client.status().borrow().state, ConnectionState::Open);
    let refused = Client::connect(login("wrong")).await.unwrap_err();
    assert!(refused.to_string().contains("WRONGPASS"), "{refused}");
    let port = tidewire_testkit::Port::reserve();
    let failed = Client::connect(options(port.number())).await.unwrap_err();
    assert!(matches!(failed, tidewire_redis::ConnectionError::Io(_)), "{failed:?}");
    // The client of a failed call does not go on trying.
    wait_until_async("only one client is connected", PATIENCE, async || {
        let list: String = client.send(Command::new("CLIENT").arg("LIST").returning()).await.unwrap();
        list.lines().filter(|line| line.contains("name=app")).count() == 1
    })
    .await;
}
