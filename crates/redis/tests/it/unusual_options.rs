//! Unusual options: nothing panics, and every request ends.

use std::time::Duration;

use tidewire_redis::observe::SlowHook;
use tidewire_redis::resp::DecoderOptions;
use tidewire_redis::{Client, ConnectionState, Options, WhenFull, WhileDown};
use tidewire_testkit::{PATIENCE, RedisServer};

use crate::servers::{command, options};

type Change = fn(Options) -> Options;

/// Unusual options, and whether requests succeed with them. `None` where it depends on the speed of the machine.
const UNUSUAL: [(&str, Option<bool>, Change); 16] = [
    ("timeout of zero", Some(false), |options| options.timeout(Duration::ZERO)),
    ("timeout of a nanosecond", Some(false), |options| options.timeout(Duration::from_nanos(1))),
    ("connect timeout of zero", None, |options| options.connect_timeout(Duration::ZERO)),
    ("no commands in flight", Some(true), |options| options.max_in_flight(0)),
    ("no bytes in flight", Some(true), |options| options.max_in_flight_bytes(0)),
    ("no limits", Some(true), |options| options.max_in_flight(usize::MAX).max_in_flight_bytes(usize::MAX)),
    ("no backoff", Some(true), |options| options.min_backoff(Duration::ZERO).max_backoff(Duration::ZERO)),
    ("endless backoff", Some(true), |options| {
        options.min_backoff(Duration::MAX).max_backoff(Duration::MAX).backoff_reset_after(Duration::MAX)
    }),
    ("min_backoff above max_backoff", Some(true), |options| {
        options.min_backoff(Duration::MAX).max_backoff(Duration::from_millis(1))
    }),
    ("no timeouts", Some(true), |options| options.timeout(Duration::MAX).connect_timeout(Duration::MAX)),
    ("no user timeout", Some(true), |options| options.tcp_user_timeout(Duration::ZERO)),
    ("endless user timeout", Some(true), |options| options.tcp_user_timeout(Duration::MAX)),
    ("no elements", Some(false), |options| {
        options.decoder(DecoderOptions::default().max_elements(0)).while_down(WhileDown::Fail)
    }),
    ("no nesting", Some(false), |options| {
        options.decoder(DecoderOptions::default().max_depth(0)).while_down(WhileDown::Fail)
    }),
    ("no limits of the decoder", Some(true), |options| {
        let decoder = DecoderOptions::default().max_bulk(usize::MAX).max_elements(usize::MAX);
        options.decoder(decoder.max_depth(usize::MAX).max_line(usize::MAX))
    }),
    ("empty name", Some(true), |options| options.name("")),
];

#[tokio::test]
async fn every_request_ends_with_unusual_options() {
    let server = RedisServer::start();
    for (what, works, change) in UNUSUAL {
        let (client, connection) = Client::new(change(options(server.port())));
        let running = tokio::spawn(connection.run());
        let both = async { tokio::join!(client.send(command(&["PING"])), client.send(command(&["PING"]))) };
        let (one, two) = tokio::time::timeout(PATIENCE / 4, both).await.unwrap_or_else(|_| panic!("{what}: it hangs"));
        let works_for = |is_ok| works.is_none_or(|works| works == is_ok);
        assert!(works_for(one.is_ok()) && works_for(two.is_ok()), "{what}: {one:?} {two:?}");
        if works == Some(true) {
            // The first attempt after a loss has no delay.
            server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
            client.status().wait_for(|status| status.generation == 2).await.unwrap();
        }
        let closed = tokio::time::timeout(PATIENCE / 4, client.close(Duration::MAX)).await;
        closed.unwrap_or_else(|_| panic!("{what}: it does not close"));
        running.await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((client.status().borrow().state, client.stats().in_flight), (ConnectionState::Closed, 0), "{what}");
    }
}

#[tokio::test]
async fn panic_in_the_slow_hook_affects_only_its_caller() {
    let server = RedisServer::start();
    let options = options(server.port())
        .max_in_flight(1)
        .when_full(WhenFull::Wait)
        .slow_hook(SlowHook::new(Duration::ZERO, |slow| assert_ne!(slow.name, "TIME", "the hook panics")));
    let client = Client::start(options);
    for _ in 0..3 {
        let unlucky = tokio::spawn({
            let client = client.clone();
            async move { client.send(command(&["TIME"])).await }
        });
        let (unlucky, other) = tokio::join!(unlucky, client.send(command(&["PING"])));
        assert!(unlucky.unwrap_err().is_panic() && other.is_ok());
    }
    assert_eq!((client.stats().in_flight, client.status().borrow().generation), (0, 1));
}
