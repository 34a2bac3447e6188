//! Permits: the order in which they are granted, and when they are returned.

use std::time::Duration;

use tidewire_redis::{
    Client, ConnectionState, Error, Pipeline, Request, RequestOutcome, RequestPhase, Value, WhenFull, WhileDown,
};
use tidewire_testkit::{CloseMode, FaultProxy, PATIENCE, RedisServer, wait_until_async};
use tokio::task::{JoinHandle, JoinSet};

use crate::servers::{Scripted, command, greeting, options};

fn ask(client: &Client, command: Request<Value>) -> JoinHandle<Result<Value, Error>> {
    let client = client.clone();
    tokio::spawn(async move { client.send(command).await })
}

/// A server that completes the handshake and then answers nothing.
async fn mute() -> Scripted {
    Scripted::answering(|words, _| greeting(words).unwrap_or_default()).await
}

#[tokio::test]
async fn close_rejects_requests_that_wait_for_a_permit() {
    let server = mute().await;
    let options = options(server.port()).max_in_flight(1).timeout(Duration::MAX);
    let client = Client::start(options);
    let first = ask(&client, command(&["PING"]));
    wait_until_async("it is sent", PATIENCE, async || client.stats().requests == 1).await;
    let others = [(); 3].map(|()| ask(&client, command(&["PING"])));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close(Duration::MAX).await }
    });
    // The first request is not answered, so there is no permit, and the others do not wait for one any more.
    for other in others {
        let ended = tokio::time::timeout(PATIENCE / 4, other).await.expect("it fails at once").unwrap();
        assert!(matches!(ended, Err(Error::Closed { outcome: RequestOutcome::NeverSent })), "{ended:?}");
    }
    assert_eq!((client.status().borrow().state, client.stats().in_flight), (ConnectionState::Closing, 1));
    client.close(Duration::ZERO).await;
    closing.await.unwrap();
    assert!(matches!(first.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted })));
    assert_eq!(client.stats().in_flight, 0);
}

#[tokio::test]
async fn closed_client_reports_closed_and_not_full() {
    let server = mute().await;
    for when_full in [WhenFull::Fail, WhenFull::Wait] {
        let options = options(server.port()).max_in_flight(1).when_full(when_full).timeout(Duration::MAX);
        let client = Client::start(options);
        let first = ask(&client, command(&["PING"]));
        wait_until_async("it is sent", PATIENCE, async || client.stats().requests == 1).await;
        let closing = tokio::spawn({
            let client = client.clone();
            async move { client.close(Duration::MAX).await }
        });
        client.status().wait_for(|status| status.state == ConnectionState::Closing).await.unwrap();
        let refused = client.send(command(&["PING"])).await;
        assert!(matches!(refused, Err(Error::Closed { outcome: RequestOutcome::NeverSent })), "{refused:?}");
        client.close(Duration::ZERO).await;
        closing.await.unwrap();
        assert!(first.await.unwrap().is_err());
        assert_eq!(client.stats().rejected, 0);
    }
}

#[tokio::test]
async fn abandoned_request_returns_its_permit_in_an_outage() {
    let port = RedisServer::start().port();
    let options = options(port)
        .max_in_flight(1)
        .timeout(Duration::MAX)
        .while_down(WhileDown::Queue)
        .min_backoff(Duration::from_hours(1))
        .max_backoff(Duration::from_hours(1));
    let client = Client::start(options);
    let mut states = client.states();
    // The second failure is followed by the long delay.
    for _ in 0..2 {
        while states.next().await.unwrap().state != ConnectionState::Failed {}
    }
    let gone = ask(&client, command(&["PING"]));
    wait_until_async("it is queued", PATIENCE, async || client.stats().queued == 1).await;
    let next = command(&["ECHO", "next"]);
    let len = next.command().size();
    let waits = ask(&client, next);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    gone.abort();
    wait_until_async("the next request has the permit", PATIENCE / 4, async || client.stats().in_flight_bytes == len)
        .await;
    client.close(Duration::ZERO).await;
    assert!(matches!(waits.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    assert_eq!(client.stats().in_flight, 0);
}

/// A client with two permits. Its first request is larger than the socket buffers, and the server does not read: it is half written.
struct Stuck {
    client: Client,
    request: JoinHandle<Result<Value, Error>>,
    size: usize,
    _server: Scripted,
}

impl Stuck {
    async fn new() -> Self {
        let server = Scripted::deaf().await;
        let options = options(server.port()).max_in_flight(2).timeout(Duration::MAX);
        let client = Client::start(options);
        let long = command(&["SET", "k", &"v".repeat(32 << 20)]);
        let size = long.command().size();
        let request = ask(&client, long);
        wait_until_async("it is being sent", PATIENCE, async || client.stats().bytes_out > 0).await;
        Self { client, request, size, _server: server }
    }
}

#[tokio::test]
async fn abandoned_request_returns_its_permit_behind_a_stuck_one() {
    let Stuck { client, request: stuck, size: first, _server } = Stuck::new().await;
    let gone = ask(&client, command(&["PING"]));
    wait_until_async("it is queued", PATIENCE, async || client.stats().queued == 1).await;
    let next = command(&["ECHO", "next"]);
    let both = first + next.command().size();
    let waits = ask(&client, next);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    gone.abort();
    wait_until_async("the next request has the permit", PATIENCE / 4, async || client.stats().in_flight_bytes == both)
        .await;
    client.close(Duration::ZERO).await;
    assert!(matches!(waits.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    assert!(matches!(stuck.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted })));
    assert_eq!(client.stats().in_flight, 0);
}

#[tokio::test]
async fn abandoned_request_returns_its_permit_after_a_partly_written_one() {
    let Stuck { client, request: stuck, size: first, _server } = Stuck::new().await;
    let gone = ask(&client, command(&["PING"]));
    wait_until_async("it is queued", PATIENCE, async || client.stats().queued == 1).await;
    let next = command(&["ECHO", "next"]);
    let both = first + next.command().size();
    let waits = ask(&client, next);
    for leaves in [stuck, gone] {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        // The first request is partly written, so the rest of it must be written, too.
        leaves.abort();
    }
    wait_until_async("the next request has the permit", PATIENCE / 4, async || client.stats().in_flight_bytes == both)
        .await;
    client.close(Duration::ZERO).await;
    assert!(matches!(waits.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    assert_eq!(client.stats().in_flight, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_fail_or_are_served_when_the_connection_is_lost() {
    for while_down in [WhileDown::WaitForAttempt, WhileDown::Fail, WhileDown::Queue] {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(server.addr());
        let options = options(proxy.addr().port()).max_in_flight(2).while_down(while_down);
        let client = Client::start(options);
        for turn in 0..30 {
            client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
            let mut asked = JoinSet::new();
            for number in 0..20 {
                let (client, text) = (client.clone(), format!("{turn}-{number}"));
                asked.spawn(async move { (client.send(command(&["ECHO", &text])).await, text) });
            }
            proxy.cut(if turn % 2 == 0 { CloseMode::Reset } else { CloseMode::Graceful });
            while let Some(ended) = asked.join_next().await {
                match ended.unwrap() {
                    (Ok(value), text) => assert_eq!(value, Value::Bulk(text.into())),
                    (Err(Error::Lost { .. }), _) => {}
                    (Err(other), _) => panic!("{other:?}"),
                }
            }
            assert_eq!(client.stats().in_flight, 0);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_request_is_not_starved_by_small_ones() {
    let server = RedisServer::start();
    let options = options(server.port()).max_in_flight(8);
    let client = Client::start(options);
    let mut small = JoinSet::new();
    for _ in 0..32 {
        let client = client.clone();
        small.spawn(async move {
            loop {
                client.send(command(&["PING"])).await.unwrap();
            }
        });
    }
    // It needs all permits, while there are always other requests that need one.
    let large: Pipeline<Vec<Value>> = std::iter::repeat_n(command(&["PING"]), 20).collect();
    for _ in 0..20 {
        let served = tokio::time::timeout(PATIENCE, client.pipeline(large.clone())).await;
        assert_eq!(served.expect("it gets its permits").unwrap().len(), 20);
    }
}

#[tokio::test]
async fn retrying_a_rejected_request_does_not_starve_other_tasks() {
    let server = RedisServer::start();
    let options = options(server.port()).max_in_flight(1).when_full(WhenFull::Fail);
    let (client, connection) = Client::new(options);
    let first = ask(&client, command(&["PING"]));
    wait_until_async("it has the permit", PATIENCE, async || client.stats().in_flight == 1).await;
    tokio::spawn(connection.run());
    // On one thread: the first request can only be answered if this task yields.
    let mut asked = 0;
    while matches!(client.send(command(&["PING"])).await, Err(Error::QueueFull)) {
        asked += 1;
        assert!(asked < 5_000_000, "other tasks do not run");
    }
    assert!(first.await.unwrap().is_ok());
}

#[tokio::test]
async fn request_that_timed_out_keeps_its_permit_until_its_reply() {
    let server = RedisServer::start();
    let options = options(server.port()).max_in_flight(3).connect_timeout(PATIENCE);
    let client = Client::start(options);
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    server.pause();
    let hasty = client.with_timeout(Duration::from_millis(30));
    let late = async || match hasty.send(command(&["INCR", "a"])).await {
        Err(Error::TimedOut { phase }) => phase,
        other => panic!("{other:?}"),
    };
    let mut sent = 0;
    while sent < 3 {
        sent += usize::from(late().await == RequestPhase::Waiting);
    }
    // The server will execute three, so that a fourth would be one too many.
    assert_eq!([late().await, late().await], [RequestPhase::Queued, RequestPhase::Queued]);
    assert_eq!(client.stats().in_flight, 3);
    server.resume();
    wait_until_async("all permits are returned", PATIENCE, async || client.stats().in_flight == 0).await;
    assert_eq!(client.send(command(&["GET", "a"])).await.unwrap(), Value::Bulk("3".into()));
}
