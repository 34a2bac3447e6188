//! Requests that are cancelled at any point: other requests are not affected.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use tidewire_redis::{Client, Command, ConnectionState, Error, Pipeline, Request, Value};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};
use tokio::task::JoinSet;

use crate::servers::{command, options};

/// Polls a future a number of times, yields in between, and drops it. Returns whether it was ready.
async fn give_up_after<T>(polls: usize, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    for _ in 0..polls {
        let ended = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => Poll::Ready(None),
        });
        if let Some(value) = ended.await {
            return Some(value);
        }
        tokio::task::yield_now().await;
    }
    None
}

fn echo(text: &str) -> Request<String> {
    Command::new("ECHO").arg(text).returning()
}

fn many(name: &str, len: usize) -> Pipeline<Vec<String>> {
    (0..len).map(|number| echo(&format!("{name} {number}"))).collect()
}

fn check_replies(values: Vec<Result<String, Error>>, name: &str) {
    for (number, value) in values.into_iter().enumerate() {
        assert_eq!(value.unwrap(), format!("{name} {number}"), "a reply went to another request");
    }
}

#[tokio::test]
async fn request_can_be_cancelled_at_any_await() {
    let server = RedisServer::start();
    for max_in_flight in [1, 5, 1000] {
        let options = options(server.port()).max_in_flight(max_in_flight);
        // Also before there is a connection.
        let client = Client::start(options);
        for polls in 0..24 {
            let name = polls.to_string();
            let one = give_up_after(polls, client.send(echo("gone")));
            let two = give_up_after(polls / 2, client.pipeline(many("gone", 7)));
            let (one, two, stays, all, last) = tokio::join!(
                one,
                two,
                client.send(echo(&name)),
                client.pipeline(many(&name, 3)),
                give_up_after(polls / 3, client.send(echo("gone"))),
            );
            for gone in [one, last].into_iter().flatten() {
                assert_eq!(gone.unwrap(), "gone", "a reply went to another request");
            }
            if let Some(values) = two {
                check_replies(values.unwrap(), "gone");
            }
            assert_eq!(stays.unwrap(), name, "a reply went to another request");
            check_replies(all.unwrap(), &name);
        }
        wait_until_async("all permits are returned", PATIENCE, async || client.stats().in_flight == 0).await;
        assert_eq!((client.stats().in_flight_bytes, client.status().borrow().generation), (0, 1));
    }
}

/// Concurrent callers, some of which cancel, time out or lose their connection, with pushes between the replies.
async fn storm(server: &RedisServer, has_pushes: bool) {
    let options = options(server.port()).max_in_flight(64).timeout(PATIENCE);
    let client = Client::start(options);
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for caller in 0..24_u64 {
        let (client, stop) = (client.clone(), Arc::clone(&stop));
        callers.spawn(async move {
            let mut random = fastrand::Rng::with_seed(caller);
            let mut served = 0;
            for turn in 0_u64.. {
                if stop.load(SeqCst) {
                    break;
                }
                let name = format!("{caller} {turn}");
                let hasty = client.with_timeout(Duration::from_micros(random.u64(0..400)));
                let client = if random.bool() { &client } else { &hasty };
                let polls = random.usize(1..40);
                if random.bool() {
                    match give_up_after(polls, client.send(echo(&name))).await {
                        Some(Ok(text)) => {
                            assert_eq!(text, name, "a reply went to another request");
                            served += 1;
                        }
                        Some(Err(Error::TimedOut { .. } | Error::Lost { .. })) | None => {}
                        Some(Err(other)) => panic!("{other:?}"),
                    }
                } else if let Some(ended) = give_up_after(polls, client.pipeline(many(&name, random.usize(1..9)))).await
                {
                    for (number, value) in ended.unwrap().into_iter().enumerate() {
                        match value {
                            Ok(text) => assert_eq!(text, format!("{name} {number}"), "a reply went to another request"),
                            Err(Error::TimedOut { .. } | Error::Lost { .. }) => {}
                            Err(other) => panic!("{other:?}"),
                        }
                    }
                }
            }
            served
        });
    }
    for turn in 0..60 {
        for number in 0..20 {
            let _ = client.send(command(&["SET", &format!("k{number}"), "v"])).await;
            if has_pushes {
                let _ = client.send(command(&["DEBUG", "PROTOCOL", "push"])).await;
            }
        }
        if turn % 5 == 2 {
            server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
        }
    }
    stop.store(true, SeqCst);
    let mut served = 0;
    while let Some(caller) = tokio::time::timeout(PATIENCE, callers.join_next()).await.expect("every call ends") {
        served += caller.unwrap();
    }
    let stats = client.stats();
    assert!(served > 0 && stats.connections_lost > 0 && (stats.pushes > 0) == has_pushes, "{served} {stats:?}");
    wait_until_async("all permits are returned", PATIENCE, async || client.stats().in_flight == 0).await;
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    assert_eq!(client.send(command(&["ECHO", "end"])).await.unwrap(), Value::Bulk("end".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_do_not_affect_others() {
    storm(&RedisServer::options().config("enable-debug-command yes").start(), true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_do_not_affect_others_in_resp2() {
    let server = RedisServer::options().config("rename-command HELLO \"\"").start();
    storm(&server, false).await;
}

#[tokio::test]
async fn request_cancelled_in_the_queue_is_not_sent() {
    let server = RedisServer::start();
    let (client, connection) = Client::new(options(server.port()));
    assert!(give_up_after(1, client.send(command(&["INCR", "a"]))).await.is_none());
    assert_eq!(client.stats().queued, 1);
    tokio::spawn(connection.run());
    assert_eq!(client.send(command(&["GET", "a"])).await.unwrap(), Value::Null);
}
