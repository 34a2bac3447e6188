//! Options that nobody should choose: nothing panics, and every request ends.

use std::time::Duration;

use tidewire_redis::{Client, Options, Slow, State, WhenFull, WhileDown};
use tidewire_testkit::{PATIENCE, RedisServer};

use crate::servers::{command, options};

type Change = fn(&mut Options);

/// What is odd, and whether requests succeed; what is not said depends on how fast the machine is.
const ODD: [(&str, Option<bool>, Change); 14] = [
    ("no time", Some(false), |options| options.timeout = Duration::ZERO),
    ("hardly any time", Some(false), |options| options.timeout = Duration::from_nanos(1)),
    ("no time to connect", None, |options| options.connect_timeout = Duration::ZERO),
    ("no room for requests", Some(true), |options| options.max_requests = 0),
    ("no room for bytes", Some(true), |options| options.max_bytes = 0),
    ("all the room", Some(true), |options| (options.max_requests, options.max_bytes) = (usize::MAX, usize::MAX)),
    ("no pauses", Some(true), |options| (options.min_backoff, options.max_backoff) = (Duration::ZERO, Duration::ZERO)),
    ("pauses without end", Some(true), |options| {
        (options.min_backoff, options.max_backoff, options.steady_after) =
            (Duration::MAX, Duration::MAX, Duration::MAX);
    }),
    ("pauses the wrong way round", Some(true), |options| {
        (options.min_backoff, options.max_backoff) = (Duration::MAX, Duration::from_millis(1));
    }),
    ("for ever", Some(true), |options| (options.timeout, options.connect_timeout) = (Duration::MAX, Duration::MAX)),
    ("nothing may be decoded", Some(false), |options| {
        options.decoder.max_elements = 0;
        options.while_down = WhileDown::Fail;
    }),
    ("nothing may be nested", Some(false), |options| {
        options.decoder.max_depth = 0;
        options.while_down = WhileDown::Fail;
    }),
    ("everything may be decoded", Some(true), |options| {
        let decoder = &mut options.decoder;
        (decoder.max_bulk, decoder.max_elements) = (usize::MAX, usize::MAX);
        (decoder.max_depth, decoder.max_line) = (usize::MAX, usize::MAX);
    }),
    ("no name", Some(true), |options| options.name = Some(String::new())),
];

#[tokio::test]
async fn odd_options_end_every_request_and_panic_nowhere() {
    let server = RedisServer::start();
    for (what, works, change) in ODD {
        let mut options = options(server.port());
        change(&mut options);
        let (client, connection) = Client::new(options);
        let running = tokio::spawn(connection.run());
        let both = async { tokio::join!(client.send(command(&["PING"])), client.send(command(&["PING"]))) };
        let (one, two) = tokio::time::timeout(PATIENCE / 4, both).await.unwrap_or_else(|_| panic!("{what}: it hangs"));
        let works_for = |is_ok| works.is_none_or(|works| works == is_ok);
        assert!(works_for(one.is_ok()) && works_for(two.is_ok()), "{what}: {one:?} {two:?}");
        if works == Some(true) {
            // The first attempt after a loss is made at once.
            server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
            client.status().wait_for(|status| status.generation == 2).await.unwrap();
        }
        let closed = tokio::time::timeout(PATIENCE / 4, client.close(Duration::MAX)).await;
        closed.unwrap_or_else(|_| panic!("{what}: it does not close"));
        running.await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((client.status().borrow().state, client.stats().in_flight), (State::Closed, 0), "{what}");
    }
}

#[tokio::test]
async fn a_hook_that_panics_does_so_to_its_own_caller_alone() {
    let server = RedisServer::start();
    let mut options = options(server.port());
    (options.max_requests, options.when_full) = (1, WhenFull::Wait);
    options.slow = Some(Slow::after(Duration::ZERO, |slow| assert_ne!(slow.name, "TIME", "the hook panics")));
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
