//! Regressions of clients, WebSocket connections and closing.

use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use tidewire_conn::client::{Client, ClientOptions, ClientProtocol, Connect, Connected, Incoming, Outcome, Pushes};
use tidewire_conn::codec::{Batch, Codec, FragmentOptions, Fragmented, LengthDelimited};
use tidewire_conn::websocket::{CloseCode, Message, ServerHandshake, WebSocket, WebSocketOptions};
use tidewire_conn::{
    CloseReason, ConnectionContext, Frame, Protocol, PushHandle, PushPolicy, PushPriority, Reply, ReplyTicket,
    Shutdown, Slot, Supervisor, Timeouts,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;

use crate::client::{ServerSocket, TestConnector};
use crate::server::frame;

fn peer() -> std::net::SocketAddr {
    "127.0.0.1:9".parse().unwrap()
}

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
    let mut kept = Vec::new();
    while began.elapsed() < Duration::from_mins(2) {
        let mut far = harness.connections.recv().await.unwrap();
        far.socket.write_all(&[0xff; 8]).await.unwrap();
        // The server does not close its side.
        kept.push(far);
    }
    // The pauses are 50 ms, 100 ms, 200 ms ... 5 s on average, each with a second of lingering: fewer than 40 in two minutes.
    assert!(kept.len() < 50, "{} connections in two minutes", kept.len());
}

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

/// The reply to the greeting was given to the first request, if replies arrive in order.
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

/// The next request failed to be written, and a reply that had already arrived was dropped.
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

/// `wait` is answered when it is released, `forever` never.
struct Sockets {
    release: Arc<tokio::sync::Notify>,
}

struct Forever;

impl futures_core::Stream for Forever {
    type Item = Result<Message, Infallible>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Pending
    }
}

impl Protocol for Sockets {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match message.as_text() {
            Some("wait") => {
                let release = Arc::clone(&self.release);
                Reply::future(async move {
                    release.notified().await;
                    Ok(Message::text("answer"))
                })
            }
            Some("forever") => Reply::stream(Forever),
            Some("forever in turn") => Reply::in_turn(|_| Reply::stream(Forever)),
            _ => Reply::None,
        }
    }
}

fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first, 0x80 | u8::try_from(payload.len()).unwrap(), 1, 2, 3, 4];
    frame.extend(payload.iter().zip([1, 2, 3, 4].iter().cycle()).map(|(byte, key)| byte ^ key));
    frame
}

struct Browser {
    socket: DuplexStream,
    release: Arc<tokio::sync::Notify>,
    supervisor: Supervisor<Sockets>,
}

impl Browser {
    fn connect(in_flight: usize) -> Self {
        let release = Arc::new(tokio::sync::Notify::new());
        let supervisor =
            Supervisor::builder(Sockets { release: Arc::clone(&release) }).max_in_flight(in_flight).build();
        let (near, far) = tokio::io::duplex(100_000);
        tokio::spawn(supervisor.admit(peer()).unwrap().run(near, Vec::new()));
        Self { socket: far, release, supervisor }
    }

    async fn send(&mut self, first: u8, payload: &[u8]) {
        self.socket.write_all(&masked(first, payload)).await.unwrap();
    }

    async fn receive(&mut self) -> Option<(u8, Vec<u8>)> {
        let first = self.socket.read_u8().await.ok()?;
        let length = self.socket.read_u8().await.ok()?;
        let mut payload = vec![0; length.into()];
        self.socket.read_exact(&mut payload).await.ok()?;
        Some((first, payload))
    }

    async fn soon(&mut self) -> Option<(u8, Vec<u8>)> {
        tokio::time::timeout(Duration::from_mins(10), self.receive()).await.ok().flatten()
    }
}

/// RFC 6455 (5.5.2) demands a pong as soon as is practical. It was sent after the reply.
#[tokio::test(start_paused = true)]
async fn ping_is_answered_while_a_request_is_in_flight() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"wait").await;
    browser.send(0x89, b"there?").await;
    assert_eq!(browser.soon().await, Some((0x8a, b"there?".to_vec())));
    browser.release.notify_one();
}

/// A close frame was not decoded while a reply was in progress.
#[tokio::test(start_paused = true)]
async fn close_is_answered_during_a_stream() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"forever").await;
    browser.send(0x88, &1000u16.to_be_bytes()).await;
    assert_eq!(browser.soon().await, Some((0x88, 1000u16.to_be_bytes().to_vec())));
}

/// An endless stream that began after the close frame had arrived was not cut off.
#[tokio::test(start_paused = true)]
async fn close_is_answered_before_a_stream_that_begins_later() {
    for (in_flight, stream) in [(2, "forever in turn"), (1, "forever")] {
        let mut browser = Browser::connect(in_flight);
        browser.send(0x81, b"wait").await;
        browser.send(0x81, stream.as_bytes()).await;
        browser.send(0x88, &1000u16.to_be_bytes()).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        browser.release.notify_one();
        assert_eq!(browser.soon().await, Some((0x81, b"answer".to_vec())), "{stream}");
        assert_eq!(browser.soon().await, Some((0x88, 1000u16.to_be_bytes().to_vec())), "{stream}");
    }
}

/// With `max_in_flight` above one, the reply was dropped.
#[tokio::test(start_paused = true)]
async fn requests_before_a_close_are_answered() {
    for in_flight in [1, 2] {
        let mut browser = Browser::connect(in_flight);
        browser.send(0x81, b"wait").await;
        browser.send(0x88, &1000u16.to_be_bytes()).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        browser.release.notify_one();
        assert_eq!(browser.soon().await, Some((0x81, b"answer".to_vec())), "{in_flight} in flight");
    }
}

/// A push after a close frame was neither written nor counted, and the end was reported as closed by the peer.
#[tokio::test(start_paused = true)]
async fn pushes_after_a_close_are_counted_as_unsent() {
    let mut browser = Browser::connect(1);
    tokio::task::yield_now().await;
    let handle = browser.supervisor.sessions().list()[0].handle();
    for message in [Message::close(CloseCode::NORMAL, ""), Message::text("late")] {
        handle.try_push(message, PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
    }
    assert_eq!(browser.soon().await.unwrap().0, 0x88);
    assert_eq!(browser.soon().await, None);
    let stats = browser.supervisor.stats();
    assert_eq!((stats.push.unsent, stats.traffic.frames_out, stats.ended["peer"]), (1, 1, 0));
}

/// Pings that each took ten seconds counted as one frame for `Timeouts::frame`.
#[tokio::test(start_paused = true)]
async fn frame_timeout_begins_anew_after_a_ping() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"first").await;
    let ping = masked(0x89, b"ping");
    let (one, two) = ping.split_at(5);
    browser.socket.write_all(one).await.unwrap();
    for number in 0..10 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let next = [two, one].concat();
        assert!(browser.socket.write_all(&next).await.is_ok(), "ended after {number} pings");
        assert_eq!(browser.soon().await.map(|(first, _)| first), Some(0x8a), "after {number} pings");
    }
}

/// A head with bare line feeds also consumed the following frames, up to the next empty line with carriage returns.
#[test]
fn head_with_bare_line_feeds_is_rejected() {
    let head = "GET / HTTP/1.1\nHost: t\nUpgrade: websocket\nConnection: Upgrade\nSec-WebSocket-Version: 13\n\
                Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n\n";
    let mut input = BytesMut::from(head.as_bytes());
    input.extend_from_slice(&masked(0x81, b"hello"));
    input.extend_from_slice(b"\r\n\r\n");
    let decoded = ServerHandshake::new().decode(&mut input);
    assert!(decoded.is_err() || input.len() > 4, "accepted, with {} bytes left of the following frames", input.len());
}

#[derive(Default)]
struct Plain {
    tickets: Mutex<Vec<ReplyTicket>>,
    last_frames: AtomicUsize,
}

impl Protocol for Plain {
    type Frame = Frame;
    type Codec = Fragmented<LengthDelimited>;
    type ProtocolError = Infallible;

    fn codec(&self) -> Self::Codec {
        Fragmented::new(LengthDelimited::default(), FragmentOptions::default())
    }

    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        self.tickets.lock().unwrap().push(context.ticket());
        if request.body() == &b"large"[..] {
            return Reply::Frame(frame("x".repeat(1 << 20)));
        }
        Reply::future(std::future::pending())
    }

    fn last_frame(&self, _: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Frame> {
        self.last_frames.fetch_add(1, Ordering::SeqCst);
        Some(frame("last frame"))
    }
}

struct Running {
    supervisor: Supervisor<Plain>,
    handle: PushHandle<Frame>,
    far: DuplexStream,
    task: tokio::task::JoinHandle<()>,
}

async fn run(settings: impl FnOnce(tidewire_conn::Builder<Plain>) -> tidewire_conn::Builder<Plain>) -> Running {
    let supervisor = settings(Supervisor::builder(Plain::default()).push_bytes(64 << 20)).build();
    let (near, far) = tokio::io::duplex(10_000);
    let task = tokio::spawn(supervisor.admit(peer()).unwrap().run(near, Vec::new()));
    tokio::task::yield_now().await;
    let handle = supervisor.sessions().list()[0].handle();
    Running { supervisor, handle, far, task }
}

async fn ask(far: &mut DuplexStream, text: &str) {
    let length = u32::try_from(text.len() + 1).unwrap();
    let request = [&length.to_be_bytes()[..], &[0b11], text.as_bytes()].concat();
    far.write_all(&request).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// Returns all frames until the end of the stream, and whether the stream ended between messages.
async fn receive_all(far: &mut DuplexStream) -> (Vec<Frame>, bool) {
    let mut codec = Fragmented::new(LengthDelimited::default(), FragmentOptions::default());
    let (mut input, mut frames) = (BytesMut::new(), Vec::new());
    while far.read_buf(&mut input).await.unwrap() > 0 {
        while let Some(frame) = codec.decode(&mut input).unwrap() {
            frames.push(frame);
        }
    }
    (frames, codec.finish(&input).is_ok())
}

fn push(handle: &PushHandle<Frame>, frame: Frame) {
    handle.try_push(frame, PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
}

/// A push that was encoded in part was not counted when the task was aborted.
#[tokio::test(start_paused = true)]
async fn partial_push_is_counted_as_unsent_when_the_task_is_aborted() {
    let running = run(|builder| builder).await;
    push(&running.handle, frame("x".repeat(1 << 20)));
    tokio::time::sleep(Duration::from_millis(1)).await;
    running.task.abort();
    assert!(running.task.await.unwrap_err().is_cancelled());
    assert_eq!(running.supervisor.stats().push.unsent, 1);
}

/// The push was neither counted nor passed to the dead letters.
#[tokio::test(start_paused = true)]
async fn push_that_cannot_be_encoded_is_counted_as_unsent() {
    let (dead, mut letters) = mpsc::channel(9);
    let running = run(|builder| builder.push_bytes(128 << 20).dead_letters(dead).keep_unsent(true)).await;
    push(&running.handle, frame("x".repeat((64 << 20) + 1)));
    running.task.await.unwrap();
    drop(running.far);
    let stats = running.supervisor.stats();
    assert_eq!((stats.ended["encode"], stats.push.unsent, letters.try_recv().is_ok()), (1, 1, true));
}

/// The failed write of the last frame was reported instead of the encode error.
#[tokio::test(start_paused = true)]
async fn close_reason_is_kept_if_the_last_frame_cannot_be_written() {
    let running = run(|builder| builder.push_bytes(128 << 20)).await;
    push(&running.handle, frame("x".repeat((64 << 20) + 1)));
    drop(running.far);
    running.task.await.unwrap();
    let stats = running.supervisor.stats();
    assert_eq!((stats.ended["encode"], stats.ended["io"]), (1, 0));
}

/// The frame of `PushHandle::close` was not counted if the peer did not read.
#[tokio::test(start_paused = true)]
async fn last_frame_of_a_handle_is_counted_as_unsent() {
    let running = run(|builder| builder).await;
    push(&running.handle, frame("x".repeat(1 << 20)));
    running.handle.close(Some(frame("bye")));
    running.task.await.unwrap();
    let stats = running.supervisor.stats();
    assert_eq!((stats.ended["write_stall"], stats.push.unsent), (1, 2));
    drop(running.far);
}

/// During a shutdown, closing by a handle waited for incomplete replies.
#[tokio::test(start_paused = true)]
async fn handle_closes_during_a_shutdown() {
    let mut running = run(|builder| builder).await;
    ask(&mut running.far, "wait").await;
    let supervisor = running.supervisor.clone();
    let shutdown = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let began = tokio::time::Instant::now();
    running.handle.close(Some(frame("bye")));
    let (received, _) = receive_all(&mut running.far).await;
    assert_eq!((received, began.elapsed().as_secs()), (vec![frame("bye")], 0));
    shutdown.await.unwrap();
}

/// `Protocol::last_frame` was called although the handle had given a last frame.
#[tokio::test(start_paused = true)]
async fn only_one_last_frame_is_sent() {
    let mut running = run(|builder| builder).await;
    running.handle.close(Some(frame("bye")));
    let supervisor = running.supervisor.clone();
    let ((), (received, _)) = tokio::join!(supervisor.shutdown(Shutdown::default()), receive_all(&mut running.far));
    assert_eq!(received, [frame("bye")]);
}

/// `Protocol::last_frame` was not called when a handle closed without a frame.
#[tokio::test(start_paused = true)]
async fn protocol_sends_a_last_frame_if_the_handle_has_none() {
    let mut running = run(|builder| builder).await;
    running.handle.close(None);
    assert_eq!(receive_all(&mut running.far).await.0, [frame("last frame")]);
}

/// A reply that was encoded in part was not completed before the last frame.
#[tokio::test(start_paused = true)]
async fn close_completes_a_partial_reply() {
    let mut running = run(|builder| builder).await;
    ask(&mut running.far, "large").await;
    running.handle.close(Some(frame("bye")));
    let (received, in_order) = receive_all(&mut running.far).await;
    assert_eq!((received.last(), in_order), (Some(&frame("bye")), true));
}

/// The earlier frame of a slot did not count for `slot_bytes`, and a frame to be replaced counted twice.
#[tokio::test(start_paused = true)]
async fn slots_respect_their_byte_limit() {
    let mut running = run(|builder| builder.max_slots(10).slot_bytes(1000)).await;
    ask(&mut running.far, "wait").await;
    let ticket = running.supervisor.protocol().tickets.lock().unwrap()[0];
    // Fills the batch, so that the slots are not written.
    for _ in 0..20 {
        push(&running.handle, frame("x".repeat(100_000)));
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = running.handle.queued_bytes();
    let held = || running.handle.queued_bytes() - before;
    running.handle.push_latest(Slot(1), frame("a".repeat(900))).unwrap();
    running.handle.after(ticket).push_latest(Slot(1), frame("b".repeat(900))).unwrap();
    assert_eq!(held(), 900, "both frames would exceed the limit");
    running.handle.push_latest(Slot(2), frame("c".repeat(101))).unwrap_err();
    running.handle.push_latest(Slot(2), frame("c".repeat(50))).unwrap();
    // Both frames are kept if they fit; the earlier one is dropped when the newest needs its capacity.
    running.handle.after(ticket).push_latest(Slot(2), frame("d".repeat(50))).unwrap();
    assert_eq!(held(), 1000);
    running.handle.after(ticket).push_latest(Slot(2), frame("e".repeat(60))).unwrap();
    assert_eq!(held(), 960);
}

/// The upgrade closure runs in the accept loop, which ended with the panic.
#[tokio::test]
async fn panic_in_an_upgrade_affects_only_its_own_connection() {
    let supervisor = Supervisor::builder(Plain::default()).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let first = Arc::new(AtomicUsize::new(0));
    let serving = tokio::spawn({
        let supervisor = supervisor.clone();
        async move {
            let upgrade = |socket: tokio::net::TcpStream| {
                assert!(first.fetch_add(1, Ordering::SeqCst) > 0, "planned");
                async move { Ok((socket, Vec::new())) }
            };
            supervisor.serve_with(listener, upgrade).await
        }
    });
    let _one = tokio::net::TcpStream::connect(addr).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!serving.is_finished(), "the accept loop has ended");
    let _ = (Batch::default(), Timeouts::default());
}
