//! The delays between attempts to connect.

use std::time::Duration;

use tidewire_redis::{Client, ConnectionState};
use tidewire_testkit::{PATIENCE, RedisServer};
use tokio::time::Instant;

use crate::servers::{command, options};

const HOUR: Duration = Duration::from_hours(1);

/// An open client that waits at least an hour before its third attempt.
async fn client(server: &RedisServer, backoff_reset_after: Duration) -> Client {
    let options =
        options(server.port()).min_backoff(2 * HOUR).max_backoff(2 * HOUR).backoff_reset_after(backoff_reset_after);
    let client = Client::start(options);
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    client
}

#[tokio::test]
async fn steady_connection_resets_the_backoff() {
    let server = RedisServer::start();
    let client = client(&server, Duration::ZERO).await;
    for generation in 2..6 {
        server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
        let mut status = client.status();
        let open = status.wait_for(|status| status.state == ConnectionState::Open && status.generation == generation);
        tokio::time::timeout(PATIENCE / 4, open).await.expect("it reconnects without delay").unwrap();
    }
}

#[tokio::test]
async fn short_connection_does_not_reset_the_backoff() {
    let server = RedisServer::start();
    let client = client(&server, HOUR).await;
    let mut states = client.states();
    // The first attempt has no delay in any case.
    server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
    while states.next().await.unwrap().generation != 2 {}
    server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
    while states.next().await.unwrap().state != ConnectionState::Failed {}
    // No other timer is pending, so the paused clock advances to the end of the delay.
    tokio::time::pause();
    let since = Instant::now();
    assert_eq!(states.next().await.unwrap().state, ConnectionState::Reconnecting);
    assert!(since.elapsed() >= HOUR, "{:?}", since.elapsed());
    tokio::time::resume();
    while states.next().await.unwrap().generation != 3 {}
}

#[tokio::test(start_paused = true)]
async fn delays_double_up_to_the_limit_with_jitter() {
    // Nothing listens on this port, so attempts fail at once, and only the delays take time.
    let port = RedisServer::start().port();
    let options = options(port).min_backoff(Duration::from_millis(100)).max_backoff(Duration::from_secs(30));
    let client = Client::start(options);
    let mut states = client.states();
    let mut pauses = Vec::new();
    for _ in 0..14 {
        while states.next().await.unwrap().state != ConnectionState::Failed {}
        let since = Instant::now();
        assert_eq!(states.next().await.unwrap().state, ConnectionState::Reconnecting);
        pauses.push(since.elapsed());
    }
    assert!(pauses[0] < Duration::from_millis(5), "{pauses:?}");
    let mut longest = Duration::from_millis(100);
    for pause in &pauses[1..] {
        // The clock counts milliseconds, and rounds up.
        assert!((longest / 2..longest + Duration::from_millis(2)).contains(pause), "{longest:?} {pauses:?}");
        longest = (longest * 2).min(Duration::from_secs(30));
    }
    let last = &pauses[pauses.len() - 4..];
    assert!(last.iter().any(|pause| *pause != last[0]), "{pauses:?}");
}

#[tokio::test]
async fn retrying_in_an_outage_does_not_prevent_the_reconnect() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for generation in 2..7 {
        client.send(command(&["PING"])).await.unwrap();
        server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
        // On one thread: requests are rejected at once, and the connection can only be made if this task yields.
        let mut asked = 0;
        while client.send(command(&["PING"])).await.is_err() || client.status().borrow().generation < generation {
            asked += 1;
            assert!(asked < 5_000_000, "other tasks do not run");
        }
    }
}
