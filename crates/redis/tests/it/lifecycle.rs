//! States, closing, and permits.

use std::sync::Arc;
use std::time::Duration;

use tidewire_redis::{
    Client, ConnectionState, Error, Pipeline, RequestOutcome, RequestPhase, Value, WhenFull, WhileDown, commands,
};
use tidewire_testkit::{Cut, Direction, FaultProxy, Faults, PATIENCE, RedisServer};

use crate::servers::{Scripted, command, greeting, options};

async fn ping(client: &Client) -> Result<Value, Error> {
    client.send(command(&["PING"])).await
}

/// A server that completes the handshake and then answers nothing.
async fn mute() -> Scripted {
    Scripted::answering(|words, _| greeting(words).unwrap_or_default()).await
}

/// Sends a request, and waits until it is written.
async fn send_until_written(client: &Client) -> tokio::task::JoinHandle<Result<Value, Error>> {
    let mut status = client.status();
    status.wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    let task = tokio::spawn({
        let client = client.clone();
        async move { ping(&client).await }
    });
    // On one thread: the request is submitted before the connection sends.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    task
}

#[tokio::test]
async fn states_are_streamed_in_order() {
    let mut server = RedisServer::start();
    let (client, connection) = Client::new(options(server.port()));
    let mut states = client.states();
    let running = tokio::spawn(connection.run());
    assert_eq!(ping(&client).await.unwrap(), Value::Simple("PONG".into()));
    server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    server.kill();
    client.status().wait_for(|status| status.state == ConnectionState::Failed).await.unwrap();
    client.close(PATIENCE).await;
    running.await.unwrap();
    let mut seen = Vec::new();
    while let Some(status) = states.next().await {
        seen.push((status.state, status.generation, status.last_error.is_some()));
    }
    let beginning = [
        (ConnectionState::Init, 0, false),
        (ConnectionState::Connecting, 0, false),
        (ConnectionState::Open, 1, false),
        (ConnectionState::Failed, 1, true),
        (ConnectionState::Reconnecting, 1, true),
        (ConnectionState::Open, 2, true),
        (ConnectionState::Failed, 2, true),
    ];
    assert_eq!(seen[..7], beginning);
    for pair in seen[6..seen.len() - 1].windows(2) {
        let states = (pair[0].0, pair[1].0);
        assert!(
            matches!(
                states,
                (ConnectionState::Failed, ConnectionState::Reconnecting)
                    | (ConnectionState::Reconnecting, ConnectionState::Failed)
            ),
            "{states:?}"
        );
    }
    assert_eq!(seen.last(), Some(&(ConnectionState::Closed, 2, true)));
    assert_eq!((states.missed(), states.next().await.is_none()), (0, true));
}

#[tokio::test]
async fn client_killed_by_the_server_reconnects_once() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for generation in 1..10 {
        assert_eq!(ping(&client).await.unwrap(), Value::Simple("PONG".into()));
        assert_eq!(client.status().borrow().generation, generation);
        server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
        client.status().wait_for(|status| status.generation == generation + 1).await.unwrap();
    }
}

#[tokio::test]
async fn client_pause_of_the_server_delays_requests() {
    let server = RedisServer::start();
    let options = options(server.port()).timeout(Duration::from_millis(100));
    let client = Client::start(options);
    ping(&client).await.unwrap();
    server.cli(["CLIENT", "PAUSE", "60000", "WRITE"]);
    let late = client.send(command(&["SET", "a", "1"])).await.unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Waiting }), "{late:?}");
    server.cli(["CLIENT", "UNPAUSE"]);
    // The late reply is dropped, and the next replies go to their requests.
    let value = client.send(command(&["ECHO", "2"])).await.unwrap();
    assert_eq!((value, client.status().borrow().generation), (Value::Bulk("2".into()), 1));
}

#[tokio::test]
async fn close_waits_no_longer_than_the_grace_period() {
    let server = mute().await;
    // Nothing but the close itself ends the wait.
    let options = options(server.port()).timeout(Duration::MAX);
    let client = Client::start(options);
    let pending = send_until_written(&client).await;
    let closed = tokio::time::timeout(PATIENCE / 4, client.close(Duration::from_millis(20))).await;
    closed.expect("it closes within the grace period");
    let error = pending.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::MaybeExecuted }), "{error:?}");
    assert_eq!(client.status().borrow().state, ConnectionState::Closed);
}

#[tokio::test]
async fn second_close_can_shorten_the_grace_period() {
    let server = mute().await;
    let client = Client::start(options(server.port()));
    let pending = send_until_written(&client).await;
    tokio::join!(client.close(Duration::MAX), client.close(Duration::ZERO));
    assert!(pending.await.unwrap().is_err());
}

#[tokio::test]
async fn close_interrupts_a_backoff_delay() {
    let port = RedisServer::start().port();
    let options = options(port)
        .min_backoff(Duration::from_hours(1))
        .max_backoff(Duration::from_hours(2))
        .while_down(WhileDown::Queue);
    let client = Client::start(options);
    let mut states = client.states();
    // The second failure is followed by the long delay.
    for _ in 0..2 {
        while states.next().await.unwrap().state != ConnectionState::Failed {}
    }
    let pending = tokio::spawn({
        let client = client.clone();
        async move { ping(&client).await }
    });
    tokio::task::yield_now().await;
    client.close(Duration::MAX).await;
    let error = pending.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{error:?}");
}

#[tokio::test]
async fn connection_lost_while_closing_is_closed() {
    let mut server = RedisServer::start();
    let client = Client::start(options(server.port()));
    ping(&client).await.unwrap();
    server.pause();
    let mut states = client.states();
    let pending = send_until_written(&client).await;
    let closing = async {
        client.status().wait_for(|status| status.state == ConnectionState::Closing).await.unwrap();
        server.kill();
    };
    tokio::join!(client.close(PATIENCE), closing);
    let error = pending.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Lost { outcome: RequestOutcome::MaybeExecuted, .. }), "{error:?}");
    let mut seen = Vec::new();
    while let Some(status) = states.next().await {
        seen.push(status.state);
    }
    assert_eq!(seen, [ConnectionState::Open, ConnectionState::Closing, ConnectionState::Closed]);
}

#[tokio::test]
async fn dropping_the_last_handle_closes_the_connection() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let other = client.clone();
    ping(&client).await.unwrap();
    let mut status = client.status();
    drop(client);
    assert_eq!(ping(&other).await.unwrap(), Value::Simple("PONG".into()));
    drop(other);
    assert!(status.wait_for(|status| status.state == ConnectionState::Closed).await.is_ok());
}

#[tokio::test]
async fn dropping_the_connection_ends_all_requests() {
    let (client, connection) = Client::new(options(1));
    let pending = tokio::spawn({
        let client = client.clone();
        async move { ping(&client).await }
    });
    tokio::task::yield_now().await;
    drop(connection);
    assert!(matches!(pending.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    client.close(Duration::MAX).await;

    let server = mute().await;
    let (client, connection) = Client::new(options(server.port()));
    let running = tokio::spawn(connection.run());
    let pending = send_until_written(&client).await;
    running.abort();
    assert!(matches!(pending.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted })));
    assert!(matches!(ping(&client).await, Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    client.close(Duration::MAX).await;
}

#[tokio::test]
async fn without_reconnect_a_failure_closes_the_client() {
    let mut server = RedisServer::start();
    let options = options(server.port()).reconnect(false).while_down(WhileDown::Queue);
    let client = Client::start(options);
    ping(&client).await.unwrap();
    server.kill();
    let mut status = client.status();
    let status = status.wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
    assert!(status.last_error.is_some());
}

#[tokio::test]
async fn timeouts_can_be_unlimited() {
    let server = RedisServer::start();
    let options = options(server.port()).timeout(Duration::MAX).connect_timeout(Duration::MAX);
    let client = Client::start(options);
    assert_eq!(ping(&client).await.unwrap(), Value::Simple("PONG".into()));
    client.close(Duration::MAX).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pipeline_cut_anywhere_keeps_received_replies() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(proxy.addr().port()));
    let pipeline: Pipeline<Vec<u8>> = (0..8).map(|number| commands::echo(number).returning()).collect();
    let mut cuts = 0;
    for direction in [Direction::ToClient, Direction::ToServer] {
        for bytes in (0..=pipeline.size() as u64).step_by(5) {
            client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
            proxy.inject(Faults::default().cut(Cut::after(bytes, direction)));
            let results = client.pipeline(pipeline.clone()).await.unwrap();
            let came = results.iter().take_while(|result| result.is_ok()).count();
            let (replies, lost) = results.split_at(came);
            assert!(replies.iter().zip(0..).all(|(reply, number)| matches!(reply, Ok(echo) if *echo == number)));
            assert!(lost.iter().all(|result| matches!(result, Err(Error::Lost { .. }))), "{results:?}");
            assert_eq!(results.len(), 8);
            cuts += usize::from(came < 8);
            proxy.heal();
        }
    }
    assert!(cuts > 10, "{cuts}");
    let mut status = client.status();
    loop {
        status.wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
        let results: Result<Vec<_>, _> = client.pipeline(pipeline.clone()).await.unwrap().into_iter().collect();
        if let Ok(values) = results {
            break assert_eq!(values, [0, 1, 2, 3, 4, 5, 6, 7]);
        }
    }
}

#[tokio::test]
async fn when_full_decides_about_requests_without_a_permit() {
    let server = mute().await;
    for when_full in [WhenFull::Fail, WhenFull::Wait] {
        let options = options(server.port()).max_in_flight(1).when_full(when_full);
        let client = Client::start(options);
        let first = send_until_written(&client).await;
        let second = send_until_written(&client).await;
        if when_full == WhenFull::Fail {
            assert!(matches!(second.await.unwrap(), Err(Error::QueueFull)));
            client.close(Duration::ZERO).await;
        } else {
            assert!(!second.is_finished());
            client.close(Duration::ZERO).await;
            // It gets the permit of the first request after its deadline.
            assert!(matches!(second.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
        }
        assert!(matches!(first.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted })));
    }
}

#[tokio::test]
async fn waiting_for_a_permit_ends_at_the_deadline() {
    let server = mute().await;
    let options = options(server.port()).max_in_flight_bytes(20).timeout(Duration::from_millis(50));
    let client = Client::start(options);
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    let (first, second) = tokio::join!(ping(&client), ping(&client));
    assert!(matches!(first, Err(Error::TimedOut { phase: RequestPhase::Waiting })), "{first:?}");
    assert!(
        matches!(second, Err(Error::TimedOut { phase: RequestPhase::Queued | RequestPhase::Waiting })),
        "{second:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn all_permits_are_returned_after_faults() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let options = options(proxy.addr().port()).max_in_flight(4).max_in_flight_bytes(100).when_full(WhenFull::Fail);
    let client = Client::start(options);
    let client = Arc::new(client);
    for turn in 0..100_u64 {
        client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
        proxy.inject(
            Faults::default()
                .cut(Cut::after(turn % 30, if turn % 2 == 0 { Direction::ToClient } else { Direction::ToServer })),
        );
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..6 {
            let client = Arc::clone(&client);
            tasks.spawn(async move {
                // Some are cancelled.
                if number % 3 == 0 {
                    let _ = tokio::time::timeout(Duration::ZERO, ping(&client)).await;
                } else {
                    let _ = ping(&client).await;
                }
            });
        }
        tasks.join_all().await;
        proxy.heal();
    }
    // A request that needs all permits is served.
    let pipeline: Pipeline<Vec<_>> = (0..4).map(|_| commands::ping()).collect();
    let mut status = client.status();
    loop {
        status.wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
        let results: Result<Vec<_>, _> = client.pipeline(pipeline.clone()).await.unwrap().into_iter().collect();
        match results {
            Ok(values) => break assert_eq!(values.len(), 4),
            Err(Error::Lost { .. }) => {}
            // Cancelled requests return their permits when their replies have come.
            Err(Error::QueueFull) => tokio::task::yield_now().await,
            Err(other) => panic!("{other:?}"),
        }
    }
}
