//! Clients, against servers of this crate and servers that misbehave.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use tidewire_conn::Frame;
use tidewire_conn::client::{
    Client, ClientOptions, ClientProtocol, Connect, Connected, Incoming, Outcome, Pushes, RequestError, RequestOptions,
    TcpConnector,
};
use tidewire_conn::codec::{Codec, LengthDelimited};
use tidewire_testkit::{CloseMode, FaultProxy, PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::test_server::{Server, frame};

/// Replies are `number text`; frames without a number are pushes.
struct Numbered {
    greeting: bool,
}

impl ClientProtocol for Numbered {
    type Frame = Frame;
    type Codec = LengthDelimited;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn classify(&self, frame: &Frame) -> Incoming {
        let text = std::str::from_utf8(frame.body()).unwrap();
        match text.split_once(' ').map(|(number, _)| number.parse()) {
            Some(Ok(number)) => Incoming::Reply(number),
            _ if text == "pong" => Incoming::Discard,
            _ => Incoming::Push,
        }
    }

    fn number(&self, request: &mut Frame, number: u64) {
        *request = frame(format!("{number} {}", String::from_utf8_lossy(request.body())));
    }

    fn greeting(&self) -> Vec<Frame> {
        if self.greeting { vec![frame("hello-there")] } else { vec![] }
    }

    fn last_frame(&self) -> Option<Frame> {
        Some(frame("goodbye"))
    }
}

/// Replies arrive in the order of the requests.
struct InOrder;

impl ClientProtocol for InOrder {
    type Frame = Frame;
    type Codec = LengthDelimited;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn classify(&self, _: &Frame) -> Incoming {
        Incoming::NextReply
    }
}

/// The server's end of a connection, which the test controls.
pub(crate) struct ServerSocket {
    pub(crate) socket: DuplexStream,
    input: BytesMut,
}

impl ServerSocket {
    pub(crate) async fn receive(&mut self) -> Option<String> {
        loop {
            if let Some(frame) = LengthDelimited::default().decode(&mut self.input).unwrap() {
                return Some(String::from_utf8(frame.body().to_vec()).unwrap());
            }
            if self.socket.read_buf(&mut self.input).await.unwrap() == 0 {
                return None;
            }
        }
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.socket.write_u32(u32::try_from(text.len()).unwrap()).await.unwrap();
        self.socket.write_all(text.as_bytes()).await.unwrap();
    }
}

/// A connector that passes the server's end of each connection to the test.
pub(crate) struct TestConnector(pub(crate) tokio::sync::mpsc::Sender<ServerSocket>);

impl Connect for TestConnector {
    type Socket = DuplexStream;

    async fn connect(&self) -> std::io::Result<Connected<DuplexStream>> {
        let (near, far) = tokio::io::duplex(100_000);
        let far = ServerSocket { socket: far, input: BytesMut::new() };
        self.0.send(far).await.map_err(|_| std::io::Error::other("the test is over"))?;
        Ok(Connected::new(near, "127.0.0.1:9".parse().unwrap()))
    }
}

struct Harness<P: ClientProtocol> {
    client: Client<P>,
    pushes: Pushes<Frame>,
    connections: tokio::sync::mpsc::Receiver<ServerSocket>,
}

fn start<P: ClientProtocol<Frame = Frame>>(protocol: P, options: ClientOptions) -> Harness<P> {
    let (sender, connections) = tokio::sync::mpsc::channel(1);
    let (client, pushes, connection) = Client::builder(protocol, TestConnector(sender)).options(options).build();
    tokio::spawn(connection.run());
    Harness { client, pushes, connections }
}

impl<P: ClientProtocol<Frame = Frame>> Harness<P> {
    async fn next_connection(&mut self) -> ServerSocket {
        self.connections.recv().await.unwrap()
    }

    fn ask(&self, text: &'static str) -> tokio::task::JoinHandle<Result<Frame, RequestError>> {
        let client = self.client.clone();
        tokio::spawn(async move { client.request(frame(text)).await })
    }
}

#[tokio::test(start_paused = true)]
async fn replies_find_their_requests_by_number() {
    let mut harness = start(Numbered { greeting: true }, ClientOptions::default());
    let (one, two) = (harness.ask("one"), harness.ask("two"));
    let mut far = harness.next_connection().await;
    assert_eq!(far.receive().await.as_deref(), Some("hello-there"));
    assert_eq!(far.receive().await.as_deref(), Some("1 one"));
    assert_eq!(far.receive().await.as_deref(), Some("2 two"));
    far.send("2 second").await;
    far.send("news").await;
    far.send("9 unexpected").await;
    far.send("1 first").await;
    assert_eq!(two.await.unwrap().unwrap(), frame("2 second"));
    assert_eq!(one.await.unwrap().unwrap(), frame("1 first"));
    let pushed = harness.pushes.recv().await.unwrap();
    assert_eq!((pushed.frame, pushed.connection), (frame("news"), 1));
    assert_eq!(harness.client.stats().unexpected_replies, 1);
}

/// A cancelled request still consumes its reply, so that no other request gets it.
#[tokio::test(start_paused = true)]
async fn late_reply_is_not_given_to_another_request() {
    let mut harness = start(InOrder, ClientOptions::default());
    let mut far = {
        let cancelled = harness.ask("cancelled");
        let mut far = harness.next_connection().await;
        assert_eq!(far.receive().await.as_deref(), Some("cancelled"));
        cancelled.abort();
        assert!(cancelled.await.unwrap_err().is_cancelled());
        far
    };
    let timed_out =
        harness.client.request_with(frame("too slow"), RequestOptions::default().timeout(Duration::from_secs(1))).await;
    assert_eq!(timed_out, Err(RequestError::TimedOut { outcome: Outcome::MaybeExecuted }));
    let third = harness.ask("third");
    assert_eq!(far.receive().await.as_deref(), Some("too slow"));
    assert_eq!(far.receive().await.as_deref(), Some("third"));
    for reply in ["late", "later", "in time"] {
        far.send(reply).await;
    }
    assert_eq!(third.await.unwrap().unwrap(), frame("in time"));
    assert_eq!(harness.client.stats().unexpected_replies, 2);
}

#[tokio::test(start_paused = true)]
async fn lost_connection_reports_whether_a_request_may_have_been_executed() {
    let mut harness = start(Numbered { greeting: false }, ClientOptions::default().max_in_flight(2));
    let sent = harness.ask("sent");
    let mut far = harness.next_connection().await;
    assert_eq!(far.receive().await.as_deref(), Some("1 sent"));
    drop(far);
    assert_eq!(sent.await.unwrap(), Err(RequestError::Lost { outcome: Outcome::MaybeExecuted }));

    // The next request waits for the next connection, and is sent once.
    let next = harness.ask("next");
    let mut far = harness.next_connection().await;
    assert_eq!(far.receive().await.as_deref(), Some("1 next"));
    far.send("push").await;
    far.send("1 reply").await;
    assert_eq!(next.await.unwrap().unwrap(), frame("1 reply"));
    assert_eq!(
        harness.pushes.recv().await.unwrap().connection,
        2,
        "the number of the connection shows that pushes may be lost"
    );
}

/// The request waits for `max_in_flight`.
#[tokio::test(start_paused = true)]
async fn request_that_timed_out_before_it_was_queued_is_never_sent() {
    let mut harness = start(Numbered { greeting: false }, ClientOptions::default().max_in_flight(1));
    let first = harness.ask("first");
    let mut far = harness.next_connection().await;
    assert_eq!(far.receive().await.as_deref(), Some("1 first"));
    let waited = harness
        .client
        .request_with(frame("no capacity"), RequestOptions::default().timeout(Duration::from_secs(1)))
        .await;
    assert_eq!(waited, Err(RequestError::TimedOut { outcome: Outcome::NeverSent }));
    far.send("1 reply").await;
    assert_eq!(first.await.unwrap().unwrap(), frame("1 reply"));
}

/// The socket is full, so the request stays in the queue until it times out.
#[tokio::test(start_paused = true)]
async fn request_that_timed_out_in_the_queue_is_never_sent() {
    let mut harness = start(Numbered { greeting: false }, ClientOptions::default());
    let mut far = harness.next_connection().await;
    let large: &'static str = "x".repeat(300_000).leak();
    let stuck = harness.ask(large);
    tokio::task::yield_now().await;
    let never =
        harness.client.request_with(frame("never"), RequestOptions::default().timeout(Duration::from_secs(1))).await;
    assert_eq!(never, Err(RequestError::TimedOut { outcome: Outcome::NeverSent }));
    assert!(far.receive().await.unwrap().starts_with("1 x"));
    far.send("1 reply").await;
    stuck.await.unwrap().unwrap();
    let last = harness.ask("last");
    assert_eq!(far.receive().await.as_deref(), Some("3 last"));
    far.send("3 reply").await;
    last.await.unwrap().unwrap();
}

/// The queue of pushes stays bounded, and no push is lost.
#[tokio::test(start_paused = true)]
async fn client_stops_reading_when_the_push_queue_is_full() {
    let mut harness = start(Numbered { greeting: false }, ClientOptions::default().push_capacity(2));
    let mut far = harness.next_connection().await;
    let pushed = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&pushed);
    let pushing = tokio::spawn(async move {
        for number in 0..1000 {
            far.send(&format!("push-{number}-{}", "x".repeat(1000))).await;
            counter.fetch_add(1, Ordering::SeqCst);
        }
        far
    });
    tokio::time::sleep(Duration::from_mins(1)).await;
    let stopped_at = pushed.load(Ordering::SeqCst);
    assert!(stopped_at < 400, "{stopped_at} pushes were accepted");
    for number in 0..1000 {
        let pushed = harness.pushes.recv().await.unwrap();
        assert!(pushed.frame.body().starts_with(format!("push-{number}-").as_bytes()));
    }
    pushing.await.unwrap();
}

/// Queued frames and the last frame are sent before the connection closes.
#[tokio::test(start_paused = true)]
async fn dropping_the_last_client_closes_the_connection() {
    let mut harness = start(Numbered { greeting: false }, ClientOptions::default());
    let mut far = harness.next_connection().await;
    harness.client.connected().await.unwrap();
    harness.client.send(frame("no reply wanted")).await.unwrap();
    drop(harness.client);
    assert_eq!(far.receive().await.as_deref(), Some("no reply wanted"));
    assert_eq!(far.receive().await.as_deref(), Some("goodbye"));
    assert_eq!(far.receive().await, None);
    drop(far);
    assert!(harness.pushes.recv().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn dropping_the_connection_ends_all_requests() {
    let (sender, _connections) = tokio::sync::mpsc::channel(1);
    let (client, mut pushes, connection) = Client::builder(InOrder, TestConnector(sender)).build();
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.request(frame("hello")).await }
    });
    tokio::task::yield_now().await;
    drop(connection);
    assert_eq!(asking.await.unwrap(), Err(RequestError::Closed));
    assert_eq!(client.send(frame("hello")).await, Err(RequestError::Closed));
    assert!(pushes.recv().await.is_none());
}

/// Two thousand requests over a connection that breaks repeatedly: each ends once, and none gets the reply of another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_ends_once_while_connections_break() {
    let server = Server::start().await;
    let proxy = FaultProxy::start(server.addr);
    let options = ClientOptions::default().backoff(Duration::from_millis(1)).request_timeout(Duration::from_mins(1));
    let (client, _pushes, connection) =
        Client::builder(InOrder, TcpConnector::new(proxy.addr().to_string())).options(options).build();
    tokio::spawn(connection.run());
    let lost = Arc::new(AtomicUsize::new(0));
    let asking: Vec<_> = (0..20)
        .map(|task| {
            let (client, lost) = (client.clone(), Arc::clone(&lost));
            tokio::spawn(async move {
                for number in 0..100 {
                    let question = frame(format!("{task}-{number}"));
                    match client.request(question.clone()).await {
                        Ok(reply) => assert_eq!(reply, question),
                        Err(RequestError::Lost { .. }) => {
                            lost.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        })
        .collect();
    let break_connections = async {
        loop {
            let before = client.stats().connections.traffic.frames_in;
            wait_until_async("some requests are answered", PATIENCE, async || {
                client.stats().connections.traffic.frames_in > before + 50
                    || asking.iter().all(tokio::task::JoinHandle::is_finished)
            })
            .await;
            if asking.iter().all(tokio::task::JoinHandle::is_finished) {
                return;
            }
            proxy.cut(CloseMode::Reset);
        }
    };
    break_connections.await;
    for task in asking {
        task.await.unwrap();
    }
    assert!(client.stats().connections.admitted > 1, "no connection broke");
}
