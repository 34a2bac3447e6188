//! Regressions of clients.

use std::io;
use std::time::Duration;

use tidewire_conn::Frame;
use tidewire_conn::client::{Client, ClientOptions, ClientProtocol, Connect, Connected, Incoming, Outcome, Pushes};
use tidewire_conn::codec::LengthDelimited;
use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;

use crate::client::{ServerSocket, TestConnector};
use crate::test_server::frame;

struct InOrder {
    greeting: bool,
}

impl ClientProtocol for InOrder {
    type Frame = Frame;
    type Codec = LengthDelimited;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn classify(&self, frame: &Frame) -> Incoming {
        if frame.body().starts_with(b"push") { Incoming::Push } else { Incoming::NextReply }
    }

    fn greeting(&self) -> Vec<Frame> {
        if self.greeting { vec![frame("AUTH secret")] } else { vec![] }
    }

    fn expects_reply(&self, frame: &Frame) -> bool {
        frame.body().starts_with(b"AUTH")
    }

    fn last_frame(&self) -> Option<Frame> {
        Some(frame("goodbye"))
    }
}

struct Harness {
    client: Client<InOrder>,
    pushes: Pushes<Frame>,
    connections: mpsc::Receiver<ServerSocket>,
}

fn start(greeting: bool, options: ClientOptions) -> Harness {
    let (sender, connections) = mpsc::channel(1);
    let (client, pushes, connection) =
        Client::builder(InOrder { greeting }, TestConnector(sender)).options(options).build();
    tokio::spawn(connection.run());
    Harness { client, pushes, connections }
}

/// A request that could not be encoded ended the connection, and with it the requests of other callers.
#[tokio::test(start_paused = true)]
async fn encode_error_affects_only_its_own_request() {
    let mut harness = start(false, ClientOptions::default());
    let mut far = harness.connections.recv().await.unwrap();
    let client = harness.client.clone();
    let other = tokio::spawn(async move { client.request(frame("other")).await });
    assert_eq!(far.receive().await.as_deref(), Some("other"));
    let refused = harness.client.request(frame("x".repeat((1 << 20) + 1))).await;
    // Nothing of the request was sent.
    let outcome = refused.unwrap_err().outcome();
    far.socket.write_all(b"\0\0\0\x05reply").await.ok();
    let other = other.await.unwrap();
    assert_eq!((outcome, other), (Outcome::NeverSent, Ok(frame("reply"))));
}

/// With a full push queue, closing took five seconds, and the last frame was never sent.
#[tokio::test(start_paused = true)]
async fn full_push_queue_does_not_delay_the_last_frame() {
    let mut harness = start(false, ClientOptions::default().push_capacity(1));
    let mut far = harness.connections.recv().await.unwrap();
    far.send("push-1").await;
    far.send("push-2").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let began = tokio::time::Instant::now();
    drop(harness.client);
    let last_frame = far.receive().await;
    let took = began.elapsed();
    assert_eq!((last_frame.as_deref(), took < Duration::from_secs(1)), (Some("goodbye"), true), "{took:?}");
    drop(harness.pushes);
}

/// The time for which a connection lingered counted as served, so the backoff never grew.
#[tokio::test(start_paused = true)]
async fn backoff_grows_if_the_server_sends_invalid_frames() {
    let mut harness = start(false, ClientOptions::default());
    let began = tokio::time::Instant::now();
    let mut open_sockets = Vec::new();
    while began.elapsed() < Duration::from_mins(2) {
        let mut far = harness.connections.recv().await.unwrap();
        far.socket.write_all(&[0xff; 8]).await.unwrap();
        // The server does not close its side.
        open_sockets.push(far);
    }
    // The pauses are 50 ms, 100 ms, 200 ms ... 5 s on average, and the connection lingers for a second before each: fewer than 40
    // connections in two minutes.
    assert!(open_sockets.len() < 50, "{} connections in two minutes", open_sockets.len());
}

/// A connector to a server that cannot be reached.
struct Unreachable;

impl Connect for Unreachable {
    type Socket = DuplexStream;

    async fn connect(&self) -> io::Result<Connected<DuplexStream>> {
        Err(io::Error::other("unreachable"))
    }
}

#[tokio::test(start_paused = true)]
async fn maximum_backoff_does_not_panic() {
    let options = ClientOptions::default().backoff(Duration::MAX).max_backoff(Duration::MAX);
    let (client, _pushes, connection) =
        Client::builder(InOrder { greeting: false }, Unreachable).options(options).build();
    let running = tokio::spawn(connection.run());
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(client);
    running.await.unwrap();
}

/// With replies in the order of requests, the first request got the reply to the greeting.
#[tokio::test(start_paused = true)]
async fn reply_to_the_greeting_is_discarded() {
    let mut harness = start(true, ClientOptions::default());
    let mut far = harness.connections.recv().await.unwrap();
    let client = harness.client.clone();
    let asking = tokio::spawn(async move { client.request(frame("GET a")).await });
    assert_eq!(far.receive().await.as_deref(), Some("AUTH secret"));
    assert_eq!(far.receive().await.as_deref(), Some("GET a"));
    far.send("OK").await;
    far.send("a's value").await;
    assert_eq!(asking.await.unwrap(), Ok(frame("a's value")));
}

/// When writing the next request failed, a reply that had already arrived was dropped.
#[tokio::test(start_paused = true)]
async fn arrived_reply_is_delivered_after_a_write_error() {
    let mut harness = start(false, ClientOptions::default());
    let mut far = harness.connections.recv().await.unwrap();
    let client = harness.client.clone();
    let one = tokio::spawn(async move { client.request(frame("one")).await });
    assert_eq!(far.receive().await.as_deref(), Some("one"));
    far.send("reply").await;
    drop(far);
    let _ = harness.client.request(frame("two")).await;
    assert_eq!(one.await.unwrap(), Ok(frame("reply")));
}
