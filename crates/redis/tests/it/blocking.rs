//! Blocking commands, which have exclusive connections.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tidewire_redis::commands::{self, ListEnd, ScoreEnd, StreamStart, XaddOptions, XreadgroupOptions};
use tidewire_redis::{
    Client, Command, ConnectionState, Error, Pipeline, RequestOutcome, RequestPhase, UnclaimedHook, UnclaimedReply,
    Value,
};
use tidewire_testkit::{FaultProxy, Faults, PATIENCE, RedisServer, wait_until_async};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::servers::{Scripted, greeting, old_and_new, options};

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
    for (server, _) in old_and_new() {
        let client = Client::start(options(server.port()));
        client.rpush("list", ["a", "b", "c", "d", "e"]).await.unwrap();
        let wait = Duration::from_secs(60);
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
    let mut workers = JoinSet::new();
    for worker in 0..8 {
        let (client, sender) = (client.clone(), sender.clone());
        workers.spawn(async move {
            loop {
                let patience = Duration::from_micros(fastrand::u64(0..3000) + worker);
                let call = client.blpop::<Option<(String, String)>>(["queue"], FOREVER);
                if let Ok(popped) = tokio::time::timeout(patience, call).await {
                    sender.send(popped.unwrap().unwrap().1).await.unwrap();
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
    workers.shutdown().await;
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
    proxy.inject(Faults::default());
}

#[tokio::test]
async fn close_ends_blocked_calls_after_the_grace_period() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).name("app"));
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.blpop::<Value>(["queue"], FOREVER).await }
    });
    blocked(&server, 1).await;
    assert!(server.cli(["CLIENT", "LIST"]).contains("name=app"));
    client.close(Duration::from_millis(10)).await;
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::MaybeExecuted }), "{error:?}");
    let error = client.blpop::<Value>(["queue"], FOREVER).await.unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{error:?}");
    wait_until_async("all connections are closed", PATIENCE, async || {
        !server.cli(["CLIENT", "LIST"]).contains("name=app")
    })
    .await;
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
