//! Closing, dropping and shutting down, in every state of the connection.

use std::time::Duration;

use tidewire_redis::{Client, Connection, ConnectionState, Error, RequestOutcome, Value};
use tidewire_testkit::{PATIENCE, RedisServer};
use tokio::io::AsyncReadExt;
use tokio::task::JoinHandle;

use crate::servers::{Scripted, command, greeting, options};

/// The states to test.
const STATES: [ConnectionState; 6] = [
    ConnectionState::Init,
    ConnectionState::Connecting,
    ConnectionState::Open,
    ConnectionState::Failed,
    ConnectionState::Reconnecting,
    ConnectionState::Closing,
];

/// A client that stays in a state until it is closed.
struct Left {
    client: Client,
    /// Not run yet.
    connection: Option<Connection>,
    _server: Scripted,
}

impl Left {
    async fn in_state(state: ConnectionState) -> Self {
        // The first connection completes the handshake, and is closed at the first command if it should fail.
        let server = Scripted::start(move |mut stream, number| async move {
            if number > 0 || state == ConnectionState::Connecting {
                let _ = stream.read_to_end(&mut Vec::new()).await;
                return;
            }
            crate::servers::answer(&mut stream, |words| match greeting(words) {
                Some(reply) => Some(reply),
                None if words[0] == "DIE" => None,
                None => Some(String::new()),
            })
            .await;
        })
        .await;
        // Nothing listens on the port of a server that was dropped.
        let port = if state == ConnectionState::Failed { RedisServer::start().port() } else { server.port() };
        let options = options(port)
            .connect_timeout(Duration::MAX)
            .min_backoff(Duration::from_hours(1))
            .max_backoff(Duration::from_hours(1));
        let (client, connection) = Client::new(options);
        let mut left = Self { client, connection: Some(connection), _server: server };
        if state == ConnectionState::Init {
            return left;
        }
        left.run();
        let client = &left.client;
        let mut states = client.states();
        match state {
            // The second failure is followed by the long delay.
            ConnectionState::Failed => {
                for _ in 0..2 {
                    while states.next().await.unwrap().state != ConnectionState::Failed {}
                }
            }
            ConnectionState::Reconnecting | ConnectionState::Closing => {
                while states.next().await.unwrap().state != ConnectionState::Open {}
                let word = if state == ConnectionState::Closing { "PING" } else { "DIE" };
                let asked = ask(client, word);
                if state == ConnectionState::Closing {
                    tidewire_testkit::wait_until_async("it is sent", PATIENCE, async || client.stats().requests == 1)
                        .await;
                    let client = client.clone();
                    tokio::spawn(async move { client.close(Duration::MAX).await });
                } else {
                    assert!(asked.await.unwrap().is_err());
                }
                while states.next().await.unwrap().state != state {}
            }
            state => while states.next().await.unwrap().state != state {},
        }
        assert_eq!(client.status().borrow().state, state);
        left
    }

    fn run(&mut self) {
        if let Some(connection) = self.connection.take() {
            tokio::spawn(connection.run());
        }
    }
}

fn ask(client: &Client, word: &'static str) -> JoinHandle<Result<Value, Error>> {
    let client = client.clone();
    tokio::spawn(async move { client.send(command(&[word])).await })
}

#[tokio::test]
async fn close_ends_the_connection_in_every_state() {
    for state in STATES {
        let mut left = Left::in_state(state).await;
        let client = left.client.clone();
        let mut states = client.states();
        let pending = ask(&client, "PING");
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        let closing = tokio::spawn({
            let client = client.clone();
            async move { tokio::join!(client.close(Duration::ZERO), client.close(Duration::MAX), client.close(PATIENCE)) }
        });
        tokio::task::yield_now().await;
        // A connection that was not run ends when it is run.
        left.run();
        tokio::time::timeout(PATIENCE / 4, closing).await.expect("it is closed").unwrap();
        let error = pending.await.unwrap().unwrap_err();
        match state {
            ConnectionState::Open => {
                assert!(matches!(error, Error::Closed { outcome: RequestOutcome::MaybeExecuted }), "{error:?}");
            }
            ConnectionState::Failed => {
                assert!(matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{error:?}");
            }
            _ => assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{state:?} {error:?}"),
        }
        client.close(Duration::MAX).await;
        assert!(matches!(
            ask(&client, "PING").await.unwrap(),
            Err(Error::Closed { outcome: RequestOutcome::NeverSent })
        ));
        let mut seen = Vec::new();
        while let Some(status) = states.next().await {
            seen.push(status.state);
        }
        let expected: &[_] = match state {
            ConnectionState::Init => &[ConnectionState::Init, ConnectionState::Connecting, ConnectionState::Closed],
            ConnectionState::Open => &[ConnectionState::Open, ConnectionState::Closing, ConnectionState::Closed],
            state => &[state, ConnectionState::Closed],
        };
        assert_eq!(seen, expected);
        assert_eq!(client.stats().in_flight, 0);
    }
}

#[tokio::test]
async fn dropping_the_last_handle_closes_in_every_state() {
    for state in STATES {
        let mut left = Left::in_state(state).await;
        let mut status = left.client.status();
        left.run();
        let Left { client, _server, .. } = left;
        if state == ConnectionState::Closing {
            // Clones exist until it is closed.
            client.close(Duration::ZERO).await;
        }
        drop(client);
        let closed = status.wait_for(|status| status.state == ConnectionState::Closed);
        tokio::time::timeout(PATIENCE / 4, closed).await.unwrap_or_else(|_| panic!("{state:?} is not closed")).unwrap();
    }
}

#[test]
fn shutting_down_the_runtime_ends_all_requests() {
    let server = RedisServer::start();
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let client = first.block_on(async { Client::start(options(server.port())) });
    second.block_on(async {
        client.send(command(&["PING"])).await.unwrap();
        server.pause();
        let pending = ask(&client, "PING");
        tidewire_testkit::wait_until_async("it is sent", PATIENCE, async || client.stats().requests == 2).await;
        first.shutdown_background();
        let error = pending.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Closed { outcome: RequestOutcome::MaybeExecuted }), "{error:?}");
        client.close(Duration::MAX).await;
        let error = client.send(command(&["PING"])).await.unwrap_err();
        assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{error:?}");
        server.resume();
    });
    assert_eq!((client.status().borrow().state, client.stats().in_flight), (ConnectionState::Closed, 0));
}

#[tokio::test]
async fn close_waits_for_replies_within_the_grace_period() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    server.pause();
    let pending = [(); 3].map(|()| ask(&client, "PING"));
    tidewire_testkit::wait_until_async("they are sent", PATIENCE, async || client.stats().requests == 3).await;
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close(PATIENCE).await }
    });
    client.status().wait_for(|status| status.state == ConnectionState::Closing).await.unwrap();
    assert!(matches!(ask(&client, "PING").await.unwrap(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    server.resume();
    for asked in pending {
        assert_eq!(asked.await.unwrap().unwrap(), Value::Simple("PONG".into()));
    }
    closing.await.unwrap();
    assert_eq!(client.status().borrow().state, ConnectionState::Closed);
}

#[tokio::test]
async fn aborted_connection_leaves_an_empty_queue() {
    let server = Scripted::deaf().await;
    let (client, connection) = Client::new(options(server.port()));
    let running = tokio::spawn(connection.run());
    let long = command(&["SET", "k", &"v".repeat(32 << 20)]);
    let stuck = tokio::spawn({
        let client = client.clone();
        async move { client.send(long).await }
    });
    tidewire_testkit::wait_until_async("it is being sent", PATIENCE, async || client.stats().bytes_out > 0).await;
    let behind = ask(&client, "PING");
    tidewire_testkit::wait_until_async("it is queued", PATIENCE, async || client.stats().queued == 1).await;
    running.abort();
    assert!(stuck.await.unwrap().is_err() && behind.await.unwrap().is_err());
    client.close(Duration::MAX).await;
    let stats = client.stats();
    assert_eq!((stats.queued, stats.in_flight, stats.in_flight_bytes), (0, 0, 0));
}
