//! Of clients, web sockets and closing.

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

use crate::client::{Far, ToTest};
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

    fn is_answered(&self, frame: &Frame) -> bool {
        frame.body().starts_with(b"AUTH")
    }

    fn last_frame(&self) -> Option<Frame> {
        Some(frame("goodbye"))
    }
}

struct Line {
    client: Client<InOrder>,
    pushes: Pushes<Frame>,
    connections: mpsc::Receiver<Far>,
}

fn line(greeting: bool, options: ClientOptions) -> Line {
    let (told, connections) = mpsc::channel(1);
    let (client, pushes, connection) = Client::builder(InOrder { greeting }, ToTest(told)).options(options).build();
    tokio::spawn(connection.run());
    Line { client, pushes, connections }
}

/// One caller's frame that the codec refuses ends the connection, and with it everybody's requests.
#[tokio::test(start_paused = true)]
async fn a_request_that_cannot_be_encoded_concerns_itself_only() {
    let mut line = line(false, ClientOptions::default());
    let mut far = line.connections.recv().await.unwrap();
    let client = line.client.clone();
    let innocent = tokio::spawn(async move { client.request(frame("innocent")).await });
    assert_eq!(far.receive().await.as_deref(), Some("innocent"));
    let refused = line.client.request(frame("x".repeat((1 << 20) + 1))).await;
    // Nothing of it left the process.
    let outcome = refused.unwrap_err().outcome();
    far.socket.write_all(b"\0\0\0\x05reply").await.ok();
    let innocent = innocent.await.unwrap();
    assert_eq!((outcome, innocent), (Outcome::NeverSent, Ok(frame("reply"))));
}

/// Somebody keeps the pushes and receives none: closing takes five seconds, and the last_frame is never said.
#[tokio::test(start_paused = true)]
async fn a_full_queue_of_pushes_does_not_stop_the_farewell() {
    let mut line = line(false, ClientOptions::default().push_capacity(1));
    let mut far = line.connections.recv().await.unwrap();
    far.send("push-1").await;
    far.send("push-2").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let began = tokio::time::Instant::now();
    drop(line.client);
    let last_frame = far.receive().await;
    let took = began.elapsed();
    assert_eq!((last_frame.as_deref(), took < Duration::from_secs(1)), (Some("goodbye"), true), "{took:?}");
    drop(line.pushes);
}

/// The second that a connection lingers counts as if it had been of use, so the pauses never grow.
#[tokio::test(start_paused = true)]
async fn a_server_that_talks_rubbish_is_left_alone_more_and_more() {
    let mut line = line(false, ClientOptions::default());
    let began = tokio::time::Instant::now();
    let mut kept = Vec::new();
    while began.elapsed() < Duration::from_mins(2) {
        let mut far = line.connections.recv().await.unwrap();
        far.socket.write_all(&[0xff; 8]).await.unwrap();
        // It does not close its side.
        kept.push(far);
    }
    // Pauses of 50 ms, 100 ms, 200 ms ... 5 s on average: about 35 in two minutes, each with a second of lingering: below 40.
    assert!(kept.len() < 50, "{} connections in two minutes", kept.len());
}

struct Unreachable;

impl Connect for Unreachable {
    type Socket = DuplexStream;

    async fn connect(&self) -> io::Result<Connected<DuplexStream>> {
        Err(io::Error::other("unreachable"))
    }
}

/// Any other duration of the crate may be as long as durations go.
#[tokio::test(start_paused = true)]
async fn a_huge_backoff_does_not_panic() {
    let options = ClientOptions::default().backoff(Duration::MAX).max_backoff(Duration::MAX);
    let (client, _pushes, connection) =
        Client::builder(InOrder { greeting: false }, Unreachable).options(options).build();
    let running = tokio::spawn(connection.run());
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(client);
    running.await.unwrap();
}

/// Where replies come in order, the greeting's would be taken for that of the first request.
#[tokio::test(start_paused = true)]
async fn the_reply_to_a_greeting_is_nobodys() {
    let mut line = line(true, ClientOptions::default());
    let mut far = line.connections.recv().await.unwrap();
    let client = line.client.clone();
    let asking = tokio::spawn(async move { client.request(frame("GET a")).await });
    assert_eq!(far.receive().await.as_deref(), Some("AUTH secret"));
    assert_eq!(far.receive().await.as_deref(), Some("GET a"));
    far.send("OK").await;
    far.send("a's value").await;
    assert_eq!(asking.await.unwrap(), Ok(frame("a's value")));
}

/// The reply has arrived. The next request finds that the server has left, and nobody looks for what it said before.
#[tokio::test(start_paused = true)]
async fn a_reply_that_has_come_is_delivered_when_writing_fails() {
    let mut line = line(false, ClientOptions::default());
    let mut far = line.connections.recv().await.unwrap();
    let client = line.client.clone();
    let one = tokio::spawn(async move { client.request(frame("one")).await });
    assert_eq!(far.receive().await.as_deref(), Some("one"));
    far.send("reply").await;
    drop(far);
    let _ = line.client.request(frame("two")).await;
    assert_eq!(one.await.unwrap(), Ok(frame("reply")));
}

/// `wait` is answered when the test says so, `forever` never.
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

/// RFC 6455, 5.5.2: as soon as is practical. Clients that ping close what does not pong.
#[tokio::test(start_paused = true)]
async fn a_ping_is_answered_while_a_reply_is_awaited() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"wait").await;
    browser.send(0x89, b"there?").await;
    assert_eq!(browser.soon().await, Some((0x8a, b"there?".to_vec())));
    browser.release.notify_one();
}

/// The client says that it leaves, and is not heard while anything is being answered.
#[tokio::test(start_paused = true)]
async fn a_close_is_answered_during_a_stream() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"forever").await;
    browser.send(0x88, &1000u16.to_be_bytes()).await;
    assert_eq!(browser.soon().await, Some((0x88, 1000u16.to_be_bytes().to_vec())));
}

/// The stream has no end, and it begins when the client has said that it leaves.
#[tokio::test(start_paused = true)]
async fn a_close_is_answered_before_a_stream_that_begins_later() {
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

/// With one request in flight it is; with two it is not.
#[tokio::test(start_paused = true)]
async fn what_was_asked_before_a_close_is_answered() {
    for in_flight in [1, 2] {
        let mut browser = Browser::connect(in_flight);
        browser.send(0x81, b"wait").await;
        browser.send(0x88, &1000u16.to_be_bytes()).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        browser.release.notify_one();
        assert_eq!(browser.soon().await, Some((0x81, b"answer".to_vec())), "{in_flight} in flight");
    }
}

/// What is pushed behind a close is neither written nor counted, and the peer is said to have closed.
#[tokio::test(start_paused = true)]
async fn what_is_pushed_behind_a_close_is_counted() {
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

/// Each ping takes ten seconds. `Timeouts::frame` is from the first byte of a frame to its last.
#[tokio::test(start_paused = true)]
async fn slow_pings_are_frames_of_their_own() {
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

/// What follows the head is the WebSocket's. A head with bare line feeds swallows it, up to the next empty line of the other kind.
#[test]
fn a_head_ends_where_it_ends() {
    let head = "GET / HTTP/1.1\nHost: t\nUpgrade: websocket\nConnection: Upgrade\nSec-WebSocket-Version: 13\n\
                Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n\n";
    let mut input = BytesMut::from(head.as_bytes());
    input.extend_from_slice(&masked(0x81, b"hello"));
    input.extend_from_slice(b"\r\n\r\n");
    let decoded = ServerHandshake::new().decode(&mut input);
    assert!(decoded.is_err() || input.len() > 4, "accepted, and {} bytes are left of what followed", input.len());
}

#[derive(Default)]
struct Plain {
    /// The tickets of requests, none of which is answered.
    tickets: Mutex<Vec<ReplyTicket>>,
    words: AtomicUsize,
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
        self.words.fetch_add(1, Ordering::SeqCst);
        Some(frame("last word"))
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

/// All that the server says, and whether it ended in the middle of something.
async fn hear_out(far: &mut DuplexStream) -> (Vec<Frame>, bool) {
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

/// Counted when the connection ends, but not when its task is aborted.
#[tokio::test(start_paused = true)]
async fn a_push_in_parts_is_counted_when_the_task_is_aborted() {
    let running = run(|builder| builder).await;
    push(&running.handle, frame("x".repeat(1 << 20)));
    tokio::time::sleep(Duration::from_millis(1)).await;
    running.task.abort();
    assert!(running.task.await.unwrap_err().is_cancelled());
    assert_eq!(running.supervisor.stats().push.unsent, 1);
}

/// Not written, not counted, and not among the dead letters.
#[tokio::test(start_paused = true)]
async fn a_push_that_cannot_be_encoded_is_counted() {
    let (dead, mut letters) = mpsc::channel(9);
    let running = run(|builder| builder.push_bytes(128 << 20).dead_letters(dead).keep_unsent(true)).await;
    push(&running.handle, frame("x".repeat((64 << 20) + 1)));
    running.task.await.unwrap();
    drop(running.far);
    let stats = running.supervisor.stats();
    assert_eq!((stats.ended["encode"], stats.push.unsent, letters.try_recv().is_ok()), (1, 1, true));
}

/// It ends because a frame cannot be encoded; that the peer does not hear of it is another matter.
#[tokio::test(start_paused = true)]
async fn the_reason_of_an_end_is_not_that_its_last_word_failed() {
    let running = run(|builder| builder.push_bytes(128 << 20)).await;
    push(&running.handle, frame("x".repeat((64 << 20) + 1)));
    drop(running.far);
    running.task.await.unwrap();
    let stats = running.supervisor.stats();
    assert_eq!((stats.ended["encode"], stats.ended["io"]), (1, 0));
}

/// The frame that somebody gave to `close` vanishes when the peer does not read.
#[tokio::test(start_paused = true)]
async fn the_last_frame_of_a_handle_is_counted() {
    let running = run(|builder| builder).await;
    push(&running.handle, frame("x".repeat(1 << 20)));
    running.handle.close(Some(frame("bye")));
    running.task.await.unwrap();
    let stats = running.supervisor.stats();
    assert_eq!((stats.ended["write_stall"], stats.push.unsent), (1, 2));
    drop(running.far);
}

/// "Replies that are not complete are dropped": not when the server shuts down at the time, then they are waited for.
#[tokio::test(start_paused = true)]
async fn a_handle_closes_during_a_shutdown() {
    let mut running = run(|builder| builder).await;
    ask(&mut running.far, "wait").await;
    let supervisor = running.supervisor.clone();
    let shutdown = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let began = tokio::time::Instant::now();
    running.handle.close(Some(frame("bye")));
    let (heard, _) = hear_out(&mut running.far).await;
    assert_eq!((heard, began.elapsed().as_secs()), (vec![frame("bye")], 0));
    shutdown.await.unwrap();
}

/// "Not asked … when whoever closed the connection gave a last frame of its own."
#[tokio::test(start_paused = true)]
async fn there_is_one_last_word() {
    let mut running = run(|builder| builder).await;
    running.handle.close(Some(frame("bye")));
    let supervisor = running.supervisor.clone();
    let ((), (heard, _)) = tokio::join!(supervisor.shutdown(Shutdown::default()), hear_out(&mut running.far));
    assert_eq!(heard, [frame("bye")]);
}

/// As above: who closes without a frame gave none, and the protocol is not asked either.
#[tokio::test(start_paused = true)]
async fn the_last_word_is_asked_for_when_a_handle_closes_without_one() {
    let mut running = run(|builder| builder).await;
    running.handle.close(None);
    assert_eq!(hear_out(&mut running.far).await.0, [frame("last word")]);
}

/// A push of which a part was written is finished, a reply is not: the peer sees the middle of a message, a last frame, an end.
#[tokio::test(start_paused = true)]
async fn a_close_does_not_cut_a_reply() {
    let mut running = run(|builder| builder).await;
    ask(&mut running.far, "large").await;
    running.handle.close(Some(frame("bye")));
    let (heard, in_order) = hear_out(&mut running.far).await;
    assert_eq!((heard.last(), in_order), (Some(&frame("bye")), true));
}

/// A slot that keeps an earlier frame beside the newest holds both, and only one is weighed. And then: what a newer frame takes the
/// place of is in its way, so that a slot is full of itself.
#[tokio::test(start_paused = true)]
async fn slots_hold_no_more_than_they_may() {
    let mut running = run(|builder| builder.max_slots(10).slot_bytes(1000)).await;
    ask(&mut running.far, "wait").await;
    let ticket = running.supervisor.protocol().tickets.lock().unwrap()[0];
    // Until here it is not written, because the batch is full.
    for _ in 0..20 {
        push(&running.handle, frame("x".repeat(100_000)));
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = running.handle.queued_bytes();
    let held = || running.handle.queued_bytes() - before;
    running.handle.push_latest(Slot(1), frame("a".repeat(900))).unwrap();
    running.handle.after(ticket).push_latest(Slot(1), frame("b".repeat(900))).unwrap();
    assert_eq!(held(), 900, "both would be more than the slots may hold");
    running.handle.push_latest(Slot(2), frame("c".repeat(101))).unwrap_err();
    running.handle.push_latest(Slot(2), frame("c".repeat(50))).unwrap();
    // Where there is room for both, both are kept; and the earlier one makes way for the newest.
    running.handle.after(ticket).push_latest(Slot(2), frame("d".repeat(50))).unwrap();
    assert_eq!(held(), 1000);
    running.handle.after(ticket).push_latest(Slot(2), frame("e".repeat(60))).unwrap();
    assert_eq!(held(), 960);
}

/// The closure itself runs in the loop that accepts.
#[tokio::test]
async fn an_upgrade_that_panics_concerns_its_own_connection() {
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
    assert!(!serving.is_finished(), "nobody accepts any more");
    let _ = (Batch::default(), Timeouts::default());
}
