//! Faults while a worker of streams runs: every entry is handled at least once, and none stays pending.

use std::collections::HashSet;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use tidewire_redis::commands::{self, GroupRead, StreamId, XaddOptions, XreadgroupOptions};
use tidewire_redis::stream::{Delivery, Worker, WorkerHandle, WorkerOptions};
use tidewire_redis::{Client, Error, UnclaimedHook};
use tidewire_testkit::{
    CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, Process, RedisServer, is_rerun, rerun, wait_until_async,
};
use tokio::task::JoinSet;

use crate::examples::stream_worker;
use crate::servers::{Scripted, greeting, options};
use crate::stream_worker::worker_options;

/// Short times, so that entries of lost replies are claimed soon.
fn fast() -> WorkerOptions {
    worker_options().min_idle(Duration::from_millis(300)).max_deliveries(u64::MAX)
}

/// Adds an entry, until it is acknowledged: an entry may be added twice.
async fn add(client: &Client, number: usize) {
    let add = || commands::xadd("s", [("n", number)], XaddOptions::default());
    wait_until_async("the entry is added", PATIENCE, async || client.send(add()).await.is_ok()).await;
}

/// Workers whose handlers collect the numbers of the entries, and fail now and then.
struct Workers {
    seen: Arc<Mutex<HashSet<usize>>>,
    handles: Vec<WorkerHandle>,
    runs: JoinSet<Result<(), Error>>,
}

impl Workers {
    fn start(port: u16, count: usize) -> Self {
        let mut workers = Self { seen: Arc::default(), handles: Vec::new(), runs: JoinSet::new() };
        for number in 0..count {
            let client = Client::start(options(port).timeout(Duration::from_secs(1)));
            let worker = Worker::new(&client, "s", fast().consumer(format!("c{number}")).max_concurrent(3));
            workers.handles.push(worker.handle());
            let seen = Arc::clone(&workers.seen);
            workers.runs.spawn(worker.run(move |delivery: Delivery| {
                let seen = Arc::clone(&seen);
                async move {
                    if fastrand::u8(..) < 10 {
                        return Err("now and then");
                    }
                    let number = str::from_utf8(delivery.field("n").unwrap()).unwrap().parse().unwrap();
                    seen.lock().unwrap().insert(number);
                    Ok(())
                }
            }));
        }
        workers
    }

    /// Waits until all entries were handled and none is pending, and stops the workers.
    async fn finish(mut self, server: &RedisServer, count: usize) {
        let all: HashSet<_> = (0..count).collect();
        wait_until_async("all entries are handled", PATIENCE, async || *self.seen.lock().unwrap() == all).await;
        nothing_is_left(server, "s", "g").await;
        for handle in &self.handles {
            handle.stop();
        }
        while let Some(ended) = self.runs.join_next().await {
            ended.unwrap().unwrap();
        }
    }
}

/// Waits until the group has read all entries and none is pending.
async fn nothing_is_left(server: &RedisServer, stream: &str, group: &str) {
    let client = Client::start(options(server.port()));
    wait_until_async("no entry is pending", PATIENCE, async || {
        client.send(commands::xpending(stream, group)).await.is_ok_and(|summary| summary.count == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_entry_is_lost_when_the_server_is_killed() {
    const ENTRIES: usize = 200;
    let mut server = RedisServer::options().config("appendonly yes").config("appendfsync always").start();
    let client = Client::start(options(server.port()));
    let workers = Workers::start(server.port(), 2);
    for number in 0..ENTRIES {
        if number % 60 == 50 {
            server.kill();
            server.restart();
        }
        add(&client, number).await;
    }
    workers.finish(&server, ENTRIES).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_entry_is_lost_when_connections_are_lost_and_the_server_pauses() {
    const ENTRIES: usize = 300;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(server.port()));
    let workers = Workers::start(proxy.addr().port(), 2);
    let mut faults = 0;
    for number in 0..ENTRIES {
        add(&client, number).await;
        if number % 15 == 14 {
            faults += 1;
            match faults % 4 {
                0 => proxy.cut(CloseMode::Reset),
                1 => {
                    let direction = if fastrand::bool() { Direction::ToClient } else { Direction::ToServer };
                    proxy.inject(Faults::default().cut(Cut::after(fastrand::u64(0..400), direction)));
                }
                2 => drop(server.cli(["CLIENT", "KILL", "TYPE", "normal"])),
                _ => {
                    proxy.heal();
                    server.pause();
                    server.resume();
                }
            }
        }
    }
    proxy.heal();
    workers.finish(&server, ENTRIES).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_waits_for_a_server_that_is_down() {
    let mut server = RedisServer::options().config("appendonly yes").start();
    let port = server.port();
    server.kill();
    let workers = Workers::start(port, 1);
    let handle = workers.handles[0].clone();
    wait_until_async("requests fail", PATIENCE, async || handle.stats().errors >= 3).await;
    server.restart();
    let client = Client::start(options(port));
    add(&client, 0).await;
    workers.finish(&server, 1).await;
}

/// A worker behind a proxy that cuts connections at the first byte of a reply, once told to.
struct LossyWorker {
    server: RedisServer,
    proxy: Arc<FaultProxy>,
    /// Not behind the proxy.
    direct: Client,
    handle: WorkerHandle,
    run: tokio::task::JoinHandle<Result<(), Error>>,
}

impl LossyWorker {
    /// `handler` gets the proxy. No entry is claimed in time.
    async fn start<F: Future<Output = Result<(), String>> + Send + 'static>(
        options: WorkerOptions,
        handler: impl Fn(Arc<FaultProxy>) -> F + Send + Sync + 'static,
    ) -> Self {
        let server = RedisServer::start();
        let proxy = Arc::new(FaultProxy::start(server.addr()));
        let client = Client::start(crate::servers::options(proxy.addr().port()));
        let worker = Worker::new(&client, "s", options.claim_interval(PATIENCE).block(PATIENCE));
        let (handle, lossy) = (worker.handle(), Arc::clone(&proxy));
        let run = tokio::spawn(worker.run(move |_| handler(Arc::clone(&lossy))));
        let direct = Client::start(crate::servers::options(server.port()));
        wait_until_async("the worker reads", PATIENCE, async || {
            server.cli(["INFO", "clients"]).contains("blocked_clients:1")
        })
        .await;
        Self { server, proxy, direct, handle, run }
    }

    async fn finish(self) {
        nothing_is_left(&self.server, "s", "g").await;
        self.handle.stop();
        self.run.await.unwrap().unwrap();
    }
}

fn lose_replies(proxy: &FaultProxy) {
    proxy.inject(Faults::default().cut(Cut::after(1, Direction::ToClient)));
}

#[tokio::test(flavor = "multi_thread")]
async fn entry_whose_delivery_was_lost_is_handled_without_waiting_for_a_claim() {
    let worker = LossyWorker::start(worker_options(), |_| async { Ok(()) }).await;
    lose_replies(&worker.proxy);
    add(&worker.direct, 0).await;
    wait_until_async("the read fails", PATIENCE, async || worker.handle.stats().errors > 0).await;
    worker.proxy.heal();
    wait_until_async("it is acknowledged", PATIENCE, async || worker.handle.stats().acknowledged == 1).await;
    let stats = worker.handle.stats();
    assert_eq!((stats.claimed, stats.delivered), (1, 1));
    worker.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgement_whose_reply_was_lost_is_repeated() {
    let worker = LossyWorker::start(worker_options(), |proxy| async move {
        lose_replies(&proxy);
        Ok(())
    })
    .await;
    add(&worker.direct, 0).await;
    wait_until_async("the reply is lost", PATIENCE, async || worker.handle.stats().errors > 0).await;
    assert_eq!(worker.handle.stats().acknowledged, 0);
    worker.proxy.heal();
    wait_until_async("it is acknowledged", PATIENCE, async || worker.handle.stats().acknowledged == 1).await;
    assert_eq!(worker.handle.stats().delivered, 1);
    worker.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn entry_is_moved_once_when_the_reply_is_lost() {
    let calls = AtomicUsize::new(0);
    let worker = LossyWorker::start(worker_options().max_deliveries(1), move |proxy| {
        // The first call loads the script.
        if calls.fetch_add(1, SeqCst) == 1 {
            lose_replies(&proxy);
        }
        async { Err("no".to_owned()) }
    })
    .await;
    add(&worker.direct, 0).await;
    wait_until_async("the first is moved", PATIENCE, async || worker.handle.stats().dead_lettered == 1).await;
    add(&worker.direct, 1).await;
    let moved = async || worker.direct.send(commands::xlen("s:dead")).await.unwrap();
    wait_until_async("the second is moved", PATIENCE, async || moved().await == 2).await;
    wait_until_async("the reply is lost", PATIENCE, async || worker.handle.stats().errors > 0).await;
    worker.proxy.heal();
    wait_until_async("the worker notices", PATIENCE, async || worker.handle.stats().lost == 1).await;
    assert_eq!((moved().await, worker.handle.stats().delivered), (2, 2));
    worker.finish().await;
}

#[tokio::test]
async fn idle_worker_sends_nothing() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let options = worker_options().claim_interval(PATIENCE).block(PATIENCE);
    let worker = Worker::new(&client, "s", options);
    let handle = worker.handle();
    let run = tokio::spawn(worker.run(async |_| Ok::<_, String>(())));
    let direct = Client::start(crate::servers::options(server.port()));
    let commands = || {
        let info = server.cli(["INFO", "commandstats"]);
        let calls = |line: &str| -> Option<u64> { line.split_once("calls=")?.1.split(',').next()?.parse().ok() };
        let ours = ["xreadgroup", "xpending", "xack", "eval", "xgroup", "xclaim"];
        let ours = |line: &&str| ours.iter().any(|name| line.contains(name));
        info.lines().filter(ours).filter_map(calls).sum::<u64>()
    };
    wait_until_async("the worker reads", PATIENCE, async || {
        server.cli(["INFO", "clients"]).contains("blocked_clients:1")
    })
    .await;
    let before = commands();
    for number in 0..10 {
        add(&direct, number).await;
        wait_until_async("it is acknowledged", PATIENCE, async || handle.stats().acknowledged == number as u64 + 1)
            .await;
    }
    wait_until_async("the worker reads", PATIENCE, async || {
        server.cli(["INFO", "clients"]).contains("blocked_clients:1")
    })
    .await;
    // An acknowledgement and a read for each entry.
    assert_eq!(commands() - before, 20);
    handle.stop();
    run.await.unwrap().unwrap();
}

#[tokio::test]
async fn only_a_read_without_acknowledgement_has_unclaimed_entries() {
    let reads = Arc::new(AtomicUsize::new(0));
    let server = Scripted::answering({
        let reads = Arc::clone(&reads);
        move |words, _| match &*words[0] {
            // With an ID, so that the client can unblock the connection and keep it.
            "HELLO" => "%2\r\n+proto\r\n:3\r\n+id\r\n:7\r\n".to_owned(),
            "XREADGROUP" => {
                reads.fetch_add(1, SeqCst);
                "*1\r\n*2\r\n+s\r\n*1\r\n*2\r\n+1-1\r\n*2\r\n+n\r\n+0\r\n".to_owned()
            }
            _ => greeting(words).unwrap_or_default(),
        }
    })
    .await;
    let (unclaimed, received) = std::sync::mpsc::channel();
    let hook = UnclaimedHook::new(move |reply| unclaimed.send(reply).unwrap());
    let client = Client::start(options(server.port()).unclaimed_hook(hook));
    let read = |options: XreadgroupOptions| {
        client.send(commands::xreadgroup("g", "c", [("s", GroupRead::New)], options.block(PATIENCE)))
    };
    for (turn, no_ack, expected) in [(1, false, 0), (2, true, 1)] {
        {
            // Answered, and never polled again.
            let mut call = Box::pin(read(XreadgroupOptions::default().no_ack(no_ack)));
            let polled = std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
            assert!(polled.is_pending());
            wait_until_async("the server has answered", PATIENCE, async || reads.load(SeqCst) == turn).await;
        }
        wait_until_async("the connection is free", PATIENCE, async || {
            let stats = client.stats().exclusive;
            stats.open == 1 && stats.in_use == 0
        })
        .await;
        assert_eq!((received.try_iter().count(), client.stats().exclusive.unclaimed), (expected, expected as u64));
    }
    assert_eq!(client.stats().exclusive.unknown, 0);
}

/// Starts a process that runs the example.
fn spawn_example(test: &str, server: &RedisServer, consumer: &str) -> Process {
    let mut command: Command = rerun(test);
    command.env("WORKER_URL", format!("redis://{}", server.addr())).env("WORKER_CONSUMER", consumer);
    Process::spawn(command)
}

/// Runs the example, in a process that [`spawn_example`] has started.
async fn run_example() {
    let variable = |name| std::env::var(name).unwrap();
    stream_worker::work(&variable("WORKER_URL"), &variable("WORKER_CONSUMER")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_entry_is_lost_when_worker_processes_are_killed() {
    const ORDERS: usize = 600;
    const TEST: &str = "stream_faults::no_entry_is_lost_when_worker_processes_are_killed";
    if is_rerun() {
        return run_example().await;
    }
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let spawn = |number: usize| spawn_example(TEST, &server, &format!("billing-{number}"));
    let mut workers: Vec<_> = (0..3).map(spawn).collect();
    for worker in &workers {
        worker.wait_for_line("waits for orders");
    }
    let mut ids: Vec<StreamId> = Vec::new();
    let bills = async || client.send(commands::hlen("bills")).await.unwrap();
    for number in 0..ORDERS {
        let order = [("boat", "Tern".to_owned()), ("crew", (number % 9).to_string())];
        ids.extend(client.send(commands::xadd("orders", order, XaddOptions::default())).await.unwrap());
        if number % 60 == 59 {
            // The workers have begun with these, so that the kill interrupts one.
            let handled = number as u64 - 50;
            wait_until_async("the workers go on", PATIENCE, async || bills().await > handled / 2).await;
            let victim = fastrand::usize(..workers.len());
            workers[victim].kill();
            // Some come back with their name, and the entries of others are claimed.
            let name = if fastrand::bool() { victim } else { 10 + number };
            workers[victim] = spawn(name);
        }
    }
    wait_until_async("all orders are billed", PATIENCE, async || bills().await == ORDERS as u64).await;
    nothing_is_left(&server, "orders", "billing").await;
    for id in ids {
        assert!(client.send(commands::hexists("bills", id.to_string())).await.unwrap());
    }
    for worker in &mut workers {
        worker.interrupt();
        assert!(worker.wait().success(), "{}", worker.output());
        assert!(worker.output().contains("WorkerStats"), "{}", worker.output());
    }
    assert!(!client.exists("orders:dead").await.unwrap());
}
