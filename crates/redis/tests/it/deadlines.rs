//! Deadlines are kept, and requests past their deadline are not sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tidewire_redis::{
    Client, ConnectionError, ConnectionState, Error, RequestOutcome, RequestPhase, Script, WhileDown,
};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};

use crate::servers::{Scripted, command, greeting, options};

#[tokio::test]
async fn deadlines_are_kept_behind_a_stuck_request() {
    let server = Scripted::deaf().await;
    let options = options(server.port()).timeout(Duration::MAX);
    let client = Client::start(options);
    // Larger than the socket buffers.
    let long = command(&["SET", "k", &"v".repeat(32 << 20)]);
    let stuck = tokio::spawn({
        let client = client.clone();
        async move { client.send(long).await }
    });
    wait_until_async("it is being sent", PATIENCE, async || client.stats().bytes_out > 0).await;
    let ask = |millis| {
        let hasty = client.with_timeout(Duration::from_millis(millis));
        tokio::spawn(async move { hasty.send(command(&["PING"])).await })
    };
    for late in [20, 60].map(ask) {
        let late = tokio::time::timeout(PATIENCE / 4, late).await.expect("it ends at its deadline");
        let late = late.unwrap().unwrap_err();
        assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Queued }), "{late:?}");
    }
    // Its deadline passes while the client closes, before the end of the grace period.
    let late = ask(100);
    tokio::task::yield_now().await;
    let closed = tokio::time::timeout(PATIENCE / 4, client.close(Duration::from_millis(400))).await;
    closed.expect("it closes within the grace period");
    assert_eq!(late.await.unwrap().unwrap_err().outcome(), Some(RequestOutcome::NeverSent));
    assert!(stuck.await.unwrap().is_err());
}

#[tokio::test]
async fn request_past_its_deadline_is_not_sent() {
    let received = Arc::new(AtomicUsize::new(0));
    let server = Scripted::answering({
        let received = Arc::clone(&received);
        move |words, _| {
            received.fetch_add(usize::from(words[0] == "INCR"), SeqCst);
            greeting(words).unwrap_or_else(|| "+OK\r\n".to_owned())
        }
    })
    .await;
    let client = Client::start(options(server.port()));
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    let hasty = client.with_timeout(Duration::ZERO);
    for _ in 0..10 {
        let late = hasty.send(command(&["INCR", "a"])).await.unwrap_err();
        assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Queued }), "{late:?}");
    }
    // The server reads it after everything that was sent before.
    client.send(command(&["PING"])).await.unwrap();
    assert_eq!((received.load(SeqCst), client.stats().timeouts.queued), (0, 10));
}

#[tokio::test]
async fn source_of_a_script_is_sent_within_the_same_deadline() {
    let server = Scripted::answering(|words, _| match &*words[0] {
        "EVALSHA" => "-NOSCRIPT No matching script.\r\n".to_owned(),
        // The source of the script is never answered.
        _ => greeting(words).unwrap_or_default(),
    })
    .await;
    let (client, connection) = Client::new(options(server.port()));
    let hour = Duration::from_hours(1);
    let invocation = Script::new("return 1").returning::<i64>();
    let asked = tokio::spawn({
        let client = client.with_timeout(hour + Duration::from_millis(200));
        async move { client.invoke(&invocation).await }
    });
    wait_until_async("it is queued", PATIENCE, async || client.stats().queued == 1).await;
    // Most of its time passes before there is a connection.
    tokio::time::pause();
    tokio::time::advance(hour).await;
    tokio::time::resume();
    tokio::spawn(connection.run());
    let late = tokio::time::timeout(PATIENCE / 4, asked).await.expect("it ends at its deadline").unwrap().unwrap_err();
    assert!(matches!(late, Error::TimedOut { .. }), "{late:?}");
}

#[tokio::test]
async fn deadlines_are_kept_in_an_outage() {
    let port = RedisServer::start().port();
    let options = options(port)
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
    let ask = |timeout| {
        let client = client.with_timeout(timeout);
        tokio::spawn(async move { client.send(command(&["PING"])).await })
    };
    let patient = ask(Duration::MAX);
    for millis in [60, 20, 40] {
        let hasty = ask(Duration::from_millis(millis));
        let late =
            tokio::time::timeout(PATIENCE / 4, hasty).await.expect("it ends at its deadline").unwrap().unwrap_err();
        assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Connecting }), "{late:?}");
    }
    assert_eq!(client.stats().queued, 1);
    client.close(Duration::ZERO).await;
    assert!(matches!(patient.await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
}

#[tokio::test]
async fn server_that_does_not_read_is_detected() {
    let server = Scripted::deaf().await;
    let options = options(server.port()).connect_timeout(Duration::from_millis(200));
    let client = Client::start(options);
    let mut states = client.states();
    while states.next().await.unwrap().state != ConnectionState::Open {}
    // Larger than the socket buffers.
    let long = command(&["SET", "k", &"v".repeat(32 << 20)]);
    let late = client.with_timeout(Duration::from_millis(300)).send(long).await.unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Writing }), "{late:?}");
    assert_eq!(client.stats().timeouts.writing, 1);
    let failed = states.next().await.unwrap();
    let error = failed.last_error.unwrap();
    assert!(matches!(&*error, ConnectionError::Unresponsive), "{error:?}");
}
