//! Regressions of connections: timeouts, order of frames, ends, counters and alarms.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::BytesMut;
use tidewire_conn::codec::{Batch, Codec, LengthDelimited, LengthDelimitedError};
use tidewire_conn::*;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use tidewire_testkit::{PATIENCE, wait_until};

use crate::test_server::{Planned, frame};

/// The label of a close reason, and the time of the end since the test began.
type End = (String, Duration);
/// The handle and the ticket of a request.
type Ticket = (PushHandle<Frame>, ReplyTicket);

/// The protocol of most tests in this file.
struct TestProtocol<const HOLD: bool = false, const REPLIES_FIRST: bool = false> {
    ends: mpsc::Sender<End>,
    tickets: mpsc::Sender<Ticket>,
    /// Lets a `wait`, or the second frame of a `two`, be sent.
    release: Arc<Notify>,
    start: Instant,
    /// Pushed when the connection begins.
    setup: Option<Frame>,
    /// Called when the connection has ended.
    at_end: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A stream of 200 frames of a kilobyte each, with their prefixes.
struct Kilobytes(u32);
impl futures_core::Stream for Kilobytes {
    type Item = Result<Frame, Planned>;
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0 += 1;
        Poll::Ready((self.0 <= 200).then(|| Ok(frame("y".repeat(996)))))
    }
}

/// A stream of the frames of a channel.
struct Channel(mpsc::Receiver<Frame>);
impl futures_core::Stream for Channel {
    type Item = Result<Frame, Planned>;
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

impl<const HOLD: bool, const REPLIES_FIRST: bool> Protocol for TestProtocol<HOLD, REPLIES_FIRST> {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;
    const HOLD_PUSHES: bool = HOLD;
    const ORDER: ServiceOrder = if REPLIES_FIRST { ServiceOrder::RepliesFirst } else { ServiceOrder::PushesFirst };

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }
    fn on_connection_setup(&self, handle: PushHandle<Frame>, context: &mut ConnectionContext) {
        if let Some(frame) = &self.setup {
            handle.try_push(frame.clone(), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
        }
        context.data = Some(Box::new(handle));
    }
    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        let handle: &PushHandle<Frame> = context.data.as_ref().unwrap().downcast_ref().unwrap();
        let _ = self.tickets.try_send((handle.clone(), context.ticket()));
        match &request.body()[..] {
            b"never" => Reply::future(std::future::pending()),
            b"large" => Reply::Frame(frame("x".repeat(100_000))),
            b"too large" => Reply::Frame(frame("x".repeat(2 << 20))),
            b"stream" => Reply::stream(Kilobytes(0)),
            b"close" => Reply::Close(Some(frame("bye"))),
            b"panic" => panic!("as planned"),
            b"wait" => {
                let release = Arc::clone(&self.release);
                Reply::future(async move {
                    release.notified().await;
                    Ok(frame("waited"))
                })
            }
            b"two" => {
                let (send, receive) = mpsc::channel(1000);
                let release = Arc::clone(&self.release);
                tokio::spawn(async move {
                    send.try_send(frame("one")).unwrap();
                    release.notified().await;
                    send.try_send(frame("two")).unwrap();
                });
                Reply::stream(Channel(receive))
            }
            _ => Reply::Frame(request),
        }
    }
    fn on_idle(&self, _: Duration, _: &mut ConnectionContext) -> Option<Frame> {
        Some(frame("ping"))
    }
    fn on_shutdown(&self, _: Duration, _: &mut ConnectionContext) -> Option<Frame> {
        HOLD.then(|| frame("going down"))
    }
    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Frame> {
        matches!(reason, CloseReason::Decode(_)).then(|| frame("bad frame"))
    }
    fn on_connection_closed(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) {
        if let Some(at_end) = self.at_end.get() {
            at_end();
        }
        let _ = self.ends.try_send((reason.label().to_owned(), self.start.elapsed()));
    }
}

struct Harness<const HOLD: bool = false, const REPLIES_FIRST: bool = false> {
    supervisor: Supervisor<TestProtocol<HOLD, REPLIES_FIRST>>,
    far: DuplexStream,
    ends: mpsc::Receiver<End>,
    tickets: mpsc::Receiver<Ticket>,
    task: tokio::task::JoinHandle<()>,
}

fn test_protocol<const H: bool, const R: bool>() -> (TestProtocol<H, R>, mpsc::Receiver<End>, mpsc::Receiver<Ticket>) {
    let (end_sender, ends) = mpsc::channel(1000);
    let (sent, tickets) = mpsc::channel(1000);
    let protocol = TestProtocol {
        ends: end_sender,
        tickets: sent,
        release: Arc::default(),
        start: Instant::now(),
        setup: None,
        at_end: OnceLock::new(),
    };
    (protocol, ends, tickets)
}

impl<const H: bool, const R: bool> Harness<H, R> {
    fn new(settings: impl FnOnce(Builder<TestProtocol<H, R>>) -> Builder<TestProtocol<H, R>>) -> Self {
        Self::with_setup(None, settings)
    }
    fn with_setup(
        setup: Option<Frame>,
        settings: impl FnOnce(Builder<TestProtocol<H, R>>) -> Builder<TestProtocol<H, R>>,
    ) -> Self {
        let (mut protocol, ends, tickets) = test_protocol();
        protocol.setup = setup;
        let supervisor = settings(Supervisor::builder(protocol)).build();
        let (near, far) = tokio::io::duplex(1000);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        let task = tokio::spawn(permit.run(near, Vec::new()));
        Self { supervisor, far, ends, tickets, task }
    }
    async fn send(&mut self, text: &str) {
        self.far.write_u32(u32::try_from(text.len()).unwrap()).await.unwrap();
        self.far.write_all(text.as_bytes()).await.unwrap();
    }
    async fn receive(&mut self) -> Option<String> {
        let mut body = vec![0; self.far.read_u32().await.ok()? as usize];
        self.far.read_exact(&mut body).await.ok()?;
        Some(String::from_utf8(body).unwrap())
    }
    fn release(&self) {
        self.supervisor.protocol().release.notify_one();
    }
}

async fn yield_to_actors() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn maximum_timeout_does_not_panic() {
    let mut harness = Harness::<false, false>::new(|b| b.timeouts(Timeouts::default().idle(Duration::MAX)));
    harness.send("hello").await;
    assert_eq!(harness.receive().await.as_deref(), Some("hello"));
    yield_to_actors().await;
    assert_eq!(harness.ends.try_recv().ok(), None);
}

#[tokio::test(start_paused = true)]
async fn maximum_linger_does_not_panic() {
    let mut harness = Harness::<false, false>::new(|b| b.timeouts(Timeouts::default().linger(Duration::MAX)));
    harness.send("close").await;
    assert_eq!(harness.receive().await.as_deref(), Some("bye"));
    assert_eq!(harness.receive().await, None);
    drop(harness.far);
    harness.task.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn maximum_grace_period_is_limited_by_the_deadline() {
    let harness = Harness::<false, false>::new(|b| b);
    let shutdown = Shutdown::default().grace(Duration::MAX);
    let supervisor = harness.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(shutdown).await }).await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn maximum_deadline_does_not_panic() {
    let harness = Harness::<false, false>::new(|b| b);
    let shutdown = Shutdown::default().deadline(Duration::MAX);
    let supervisor = harness.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(shutdown).await }).await.expect("no panic");
}

/// The peer reads slowly. A complete frame was not decoded because the batch was full, and timed out as incomplete.
#[tokio::test(start_paused = true)]
async fn complete_frame_behind_a_full_batch_does_not_time_out() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("large").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    harness.send("hello").await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let _ = harness.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(harness.ends.try_recv().ok(), None);
}

/// The first frame was not decoded either, if the connection began with a large push.
#[tokio::test(start_paused = true)]
async fn first_frame_behind_a_full_batch_does_not_time_out() {
    let mut harness = Harness::<false, false>::with_setup(Some(frame("x".repeat(100_000))), |b| b);
    harness.send("hello").await;
    for _ in 0..15 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = harness.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(harness.ends.try_recv().ok(), None);
}

/// "A peer that has not yet read its replies is not idle."
#[tokio::test(start_paused = true)]
async fn peer_that_reads_its_reply_is_not_idle() {
    let mut harness = Harness::<false, false>::new(|b| b.timeouts(Timeouts::default().idle(Duration::from_secs(5))));
    harness.send("large").await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = harness.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(harness.ends.try_recv().ok(), None);
}

/// The ping is written after the reply, so the peer cannot answer it before it has read the reply.
#[tokio::test(start_paused = true)]
async fn peer_that_has_not_read_the_ping_is_not_idle() {
    let mut harness = Harness::<false, false>::new(|b| {
        b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(10)).idle(Duration::from_secs(25)))
    });
    harness.send("large").await;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = harness.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(harness.ends.try_recv().ok(), None);
}

/// The peer reads a kilobyte per second.
#[tokio::test(start_paused = true)]
async fn half_closed_peer_that_reads_gets_its_reply() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("stream").await;
    harness.far.shutdown().await.unwrap();
    let mut got = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        match harness.far.read(&mut [0; 1000]).await {
            Ok(1..) => got += 1,
            _ => break,
        }
    }
    assert_eq!(harness.ends.recv().await.unwrap().0, "peer", "after {got} kB of 200");
}

/// The runtime is blocked past the timeout. Then a push wakes the actor while the rest of the frame is still in the kernel.
#[tokio::test]
async fn input_that_has_arrived_prevents_a_timeout() {
    use std::io::Write;
    let (protocol, mut ends, mut tickets) = test_protocol::<false, false>();
    let supervisor = Supervisor::builder(protocol).timeouts(Timeouts::default().frame(Duration::from_secs(1))).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, peer) = listener.accept().await.unwrap();
    tokio::spawn(supervisor.admit(peer).unwrap().run(socket, Vec::new()));
    client.write_all(b"\0\0\0\x05hello\0\0").unwrap();
    let (handle, _) = tickets.recv().await.unwrap();
    yield_to_actors().await;
    client.write_all(b"\0\x05again").unwrap();
    // Blocks the runtime, like a slow handler or a suspended machine.
    std::thread::sleep(Duration::from_millis(1500));
    handle.try_push(frame("push"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    // The second request is handled, and nothing has ended.
    tickets.recv().await.unwrap();
    assert_eq!(ends.try_recv().ok(), None);
}

/// The peer filled the read-ahead and left. Nothing was read, so the end was not noticed, and no ping was sent.
#[tokio::test(start_paused = true)]
async fn heartbeat_applies_while_the_read_ahead_is_full() {
    let mut harness = Harness::<false, false>::new(|b| {
        b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(10)).idle(Duration::from_secs(25)))
    });
    harness.send("never").await;
    harness.far.write_all(&vec![0; 66_000]).await.unwrap();
    drop(harness.far);
    tokio::time::sleep(Duration::from_hours(24)).await;
    assert_eq!(harness.supervisor.count(), 0, "the connection is still open after a day");
}

/// Two runtimes share a supervisor, and the one that runs the alarm task ends.
#[test]
fn alarms_survive_the_runtime_of_their_driver() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (one, two) = (runtime(), runtime());
    let (protocol, mut ends, _tickets) = test_protocol::<false, false>();
    let supervisor =
        Supervisor::builder(protocol).timeouts(Timeouts::default().first_frame(Duration::from_secs(2))).build();
    let connect = |runtime: &tokio::runtime::Runtime| {
        let (near, far) = tokio::io::duplex(1000);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        runtime.spawn(permit.run(near, Vec::new()));
        far
    };
    let _first = connect(&one);
    wait_until("the first runtime runs the alarm task", PATIENCE, || one.metrics().num_alive_tasks() == 2);
    let _second = connect(&two);
    wait_until("both connections run", PATIENCE, || supervisor.sessions().len() == 2);
    drop(one);
    assert_eq!(ends.blocking_recv().unwrap().0, "dropped");
    assert_eq!(ends.blocking_recv().unwrap().0, "first_frame");
}

/// A push was written after the frame of `Reply::Close`.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_after_the_last_frame() {
    let mut harness = Harness::<false, true>::new(|b| b.max_in_flight(2));
    harness.send("wait").await;
    harness.send("close").await;
    let (handle, _) = harness.tickets.recv().await.unwrap();
    harness.tickets.recv().await.unwrap();
    yield_to_actors().await;
    harness.release();
    handle.try_push(frame("pushed"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    let mut seen = Vec::new();
    while let Some(text) = harness.receive().await {
        seen.push(text);
    }
    assert_eq!(seen.last().map(String::as_str), Some("bye"), "{seen:?}");
}

/// A push that was tied to the last reply of a half-closed peer was dropped.
#[tokio::test(start_paused = true)]
async fn tied_push_follows_the_last_reply() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("wait").await;
    harness.far.shutdown().await.unwrap();
    let (handle, ticket) = harness.tickets.recv().await.unwrap();
    handle.after(ticket).try_push(frame("tied"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    yield_to_actors().await;
    harness.release();
    assert_eq!(harness.receive().await.as_deref(), Some("waited"));
    assert_eq!(harness.receive().await.as_deref(), Some("tied"), "{:?}", harness.supervisor.stats().push);
}

/// "After an error `output` is unchanged", so earlier frames can be written.
#[tokio::test(start_paused = true)]
async fn encode_error_does_not_drop_earlier_replies() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.far.write_all(b"\0\0\0\x05hello\0\0\0\x09too large").await.unwrap();
    assert_eq!(harness.receive().await.as_deref(), Some("hello"), "{:?}", harness.ends.try_recv());
}

/// With `max_in_flight` above one, the reply was dropped.
#[tokio::test(start_paused = true)]
async fn requests_before_invalid_input_are_answered() {
    for in_flight in [1, 2] {
        let mut harness = Harness::<false, false>::new(|b| b.max_in_flight(in_flight));
        harness.send("wait").await;
        harness.far.write_all(&[0xff; 10]).await.unwrap();
        yield_to_actors().await;
        harness.release();
        assert_eq!(harness.receive().await.as_deref(), Some("waited"), "{in_flight} in flight");
        assert_eq!(harness.receive().await.as_deref(), Some("bad frame"), "{in_flight} in flight");
    }
}

/// `HOLD_PUSHES` is for protocols whose replies must not be interrupted.
#[tokio::test(start_paused = true)]
async fn shutdown_notice_does_not_interrupt_a_reply_if_pushes_are_held() {
    let mut harness = Harness::<true, false>::new(|b| b);
    harness.send("two").await;
    assert_eq!(harness.receive().await.as_deref(), Some("one"));
    let shutdown = Shutdown::default().grace(Duration::from_secs(10)).deadline(Duration::from_secs(20));
    let supervisor = harness.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(shutdown).await });
    yield_to_actors().await;
    harness.release();
    assert_eq!(harness.receive().await.as_deref(), Some("two"));
    assert_eq!(harness.receive().await.as_deref(), Some("going down"));
}

/// A ping is held as well.
#[tokio::test(start_paused = true)]
async fn ping_does_not_interrupt_a_reply_if_pushes_are_held() {
    let mut harness =
        Harness::<true, false>::new(|b| b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(10))));
    harness.send("two").await;
    assert_eq!(harness.receive().await.as_deref(), Some("one"));
    tokio::time::sleep(Duration::from_secs(11)).await;
    harness.release();
    assert_eq!(harness.receive().await.as_deref(), Some("two"));
}

/// Replies that were written before a handler panicked were lost to a reset.
#[tokio::test]
async fn panic_does_not_reset_the_connection() {
    let (protocol, _ends, _tickets) = test_protocol::<false, false>();
    let supervisor = Supervisor::builder(protocol).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (socket, peer) = listener.accept().await.unwrap();
    client.write_all(b"\0\0\0\x05hello\0\0\0\x05panic").await.unwrap();
    client.write_all(&vec![0; 100_000]).await.unwrap();
    supervisor.admit(peer).unwrap().run(socket, Vec::new()).await;
    client.read_exact(&mut [0; 9]).await.unwrap();
    assert_eq!(client.read(&mut [0]).await.map_err(|e| e.kind()), Ok(0), "an end, not a reset");
}

/// Both requests were read before the shutdown began.
#[tokio::test(start_paused = true)]
async fn shutdown_answers_all_requests_that_were_read() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("wait").await;
    harness.send("second").await;
    yield_to_actors().await;
    let supervisor = harness.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    yield_to_actors().await;
    harness.release();
    assert_eq!(harness.receive().await.as_deref(), Some("waited"));
    assert_eq!(harness.receive().await.as_deref(), Some("second"));
}

/// A codec that is closed when it has encoded `goodbye`.
struct ClosingCodec {
    inner: LengthDelimited,
    is_closed: bool,
}
impl Codec for ClosingCodec {
    type Frame = Frame;
    type Error = LengthDelimitedError;
    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, LengthDelimitedError> {
        self.inner.decode(input)
    }
    fn finish(&mut self, input: &BytesMut) -> Result<(), LengthDelimitedError> {
        self.inner.finish(input)
    }
    fn encode(&mut self, frame: &Frame, output: &mut Batch) -> Result<(), LengthDelimitedError> {
        self.is_closed |= frame.body() == &b"goodbye"[..];
        self.inner.encode(frame, output)
    }
    fn is_closed(&self) -> bool {
        self.is_closed
    }
}
struct ClosingProtocol;
impl Protocol for ClosingProtocol {
    type Frame = Frame;
    type Codec = ClosingCodec;
    type ProtocolError = Planned;
    fn codec(&self) -> ClosingCodec {
        ClosingCodec { inner: LengthDelimited::default(), is_closed: false }
    }
    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Planned> {
        Reply::Frame(request)
    }
}

/// The codec was closed by a frame that it had encoded, and the connection did not end.
#[tokio::test(start_paused = true)]
async fn closed_codec_ends_the_connection() {
    let supervisor = Supervisor::builder(ClosingProtocol).timeouts(Timeouts::default().first_frame(None)).build();
    let (near, mut far) = tokio::io::duplex(1000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    yield_to_actors().await;
    supervisor.sessions().broadcast(PushPriority::High, |_| Some(frame("goodbye")));
    far.read_exact(&mut [0; 11]).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(supervisor.count(), 0);
}

/// The shutdown did not wake connections that the application had removed from the registry.
#[tokio::test(start_paused = true)]
async fn shutdown_reaches_connections_removed_from_the_registry() {
    let harness = Harness::<false, false>::new(|b| b.timeouts(Timeouts::default().first_frame(None)));
    yield_to_actors().await;
    harness.supervisor.sessions().remove(&ConnectionId(1));
    let shutting = harness.supervisor.shutdown(Shutdown::default());
    tokio::time::timeout(Duration::from_hours(1), shutting).await.expect("the deadline was five seconds");
}

#[tokio::test(start_paused = true)]
async fn traffic_is_counted_during_a_shutdown() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("wait").await;
    yield_to_actors().await;
    assert_eq!(harness.supervisor.stats().traffic.frames_in, 1);
    let supervisor = harness.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    yield_to_actors().await;
    let stats = harness.supervisor.stats();
    assert_eq!((stats.connections, stats.traffic.frames_in), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn traffic_is_not_counted_twice_when_a_task_is_aborted() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("hello").await;
    assert_eq!(harness.receive().await.as_deref(), Some("hello"));
    yield_to_actors().await;
    let seen = Arc::new(AtomicU64::new(0));
    let (supervisor, seen_at_end) = (harness.supervisor.clone(), Arc::clone(&seen));
    let _ = harness.supervisor.protocol().at_end.set(Box::new(move || {
        seen_at_end.store(supervisor.stats().traffic.frames_in, Ordering::SeqCst);
    }));
    harness.task.abort();
    harness.ends.recv().await.unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), 1);
}

/// A socket that polls another connection when it is read.
struct Tunnel {
    socket: DuplexStream,
    inner: Pin<Box<dyn Future<Output = ()> + Send>>,
    done: bool,
}
impl AsyncRead for Tunnel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.done {
            self.done = self.inner.as_mut().poll(context).is_ready();
        }
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}
impl AsyncWrite for Tunnel {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

#[tokio::test(start_paused = true)]
async fn socket_may_poll_another_connection() {
    let mut harness = Harness::<false, false>::new(|b| b);
    let peer = "127.0.0.1:9".parse().unwrap();
    let (inner_near, mut inner_far) = tokio::io::duplex(1000);
    let inner = Box::pin(harness.supervisor.admit(peer).unwrap().run(inner_near, Vec::new()));
    let (near, _far) = tokio::io::duplex(1000);
    let tunnel = Tunnel { socket: near, inner, done: false };
    tokio::spawn(harness.supervisor.admit(peer).unwrap().run(tunnel, Vec::new()));
    inner_far.write_all(b"\0\0\0\x05hello").await.unwrap();
    yield_to_actors().await;
    assert_eq!(harness.ends.try_recv().ok(), None);
}

struct WakeFlag(AtomicBool);
impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A handle kept the waker, which keeps the task and its memory.
#[tokio::test]
async fn handle_does_not_keep_the_task() {
    let (protocol, _ends, _tickets) = test_protocol::<false, false>();
    let supervisor = Supervisor::builder(protocol).build();
    let (near, far) = tokio::io::duplex(1000);
    let mut run = Box::pin(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    let task = Arc::new(WakeFlag(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&task));
    let mut context = Context::from_waker(&waker);
    assert!(run.as_mut().poll(&mut context).is_pending());
    let handle = supervisor.sessions().list().pop().unwrap().handle();
    drop(far);
    while run.as_mut().poll(&mut context).is_pending() {
        tokio::task::yield_now().await;
    }
    drop((run, waker));
    assert!(handle.is_closed());
    assert_eq!(Arc::strong_count(&task), 1);
}

/// A connection whose task was aborted before its first poll was never counted as ended.
#[tokio::test(start_paused = true)]
async fn every_admitted_connection_is_counted_as_ended() {
    let harness = Harness::<false, false>::new(|b| b);
    harness.task.abort();
    yield_to_actors().await;
    let stats = harness.supervisor.stats();
    let ended: u64 = stats.ended.values().sum();
    assert_eq!((stats.admitted, stats.connections as u64 + ended), (1, 1));
}

/// Without a write timeout, pings for a peer that does not read were queued without a bound.
#[tokio::test(start_paused = true)]
async fn unread_pings_are_bounded() {
    let mut harness = Harness::<false, false>::new(|b| {
        b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(1)).write_stall(None))
    });
    harness.send("large").await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    harness.receive().await.unwrap();
    let mut pings = 0;
    while let Ok(Some(_)) = tokio::time::timeout(Duration::from_millis(1), harness.receive()).await {
        pings += 1;
    }
    assert!(pings < 10, "{pings} pings");
}

#[test]
fn heartbeat_of_zero_does_not_spin() {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut harness =
                Harness::<false, false>::new(|b| b.timeouts(Timeouts::default().heartbeat(Duration::ZERO)));
            let mut pings = 0;
            let until = Instant::now() + Duration::from_millis(200);
            while Instant::now() < until {
                if tokio::time::timeout_at(until, harness.receive()).await.is_ok() {
                    pings += 1;
                }
            }
            done.send(pings).unwrap();
        });
    });
    let pings = finished.recv_timeout(Duration::from_secs(5)).expect("the connection does not spin");
    assert!(pings < 250, "{pings} pings in 200 ms");
}

#[tokio::test(start_paused = true)]
async fn alarm_task_ends_with_the_last_alarm() {
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.num_alive_tasks();
    let mut harness =
        Harness::<false, false>::new(|b| b.timeouts(Timeouts::default().idle(Duration::from_hours(1000))));
    harness.send("hello").await;
    harness.receive().await.unwrap();
    yield_to_actors().await;
    // Aborted, so that it does not linger: the alarm of lingering would end the task too.
    harness.task.abort();
    harness.ends.recv().await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(harness.supervisor.count(), 0);
    assert_eq!(metrics.num_alive_tasks(), before);
}

/// Shared data that reads the shared data of its connection when it is dropped.
struct ReadsSessionOnDrop(Mutex<Option<Session<Frame>>>);
impl Drop for ReadsSessionOnDrop {
    fn drop(&mut self) {
        if let Some(session) = self.0.get_mut().unwrap().take() {
            let _ = session.data::<u32>();
        }
    }
}
struct Sharer(Arc<OnceLock<Supervisor<Sharer>>>);
impl Protocol for Sharer {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;
    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }
    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        let session = self.0.get().unwrap().sessions().list().pop();
        context.share(ReadsSessionOnDrop(Mutex::new(session)));
        Reply::Frame(request)
    }
}

/// The old data was dropped under the lock.
#[test]
fn shared_data_may_use_its_session_in_drop() {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let cell = Arc::new(OnceLock::new());
            let supervisor = Supervisor::builder(Sharer(Arc::clone(&cell))).build();
            let _ = cell.set(supervisor.clone());
            let (near, mut far) = tokio::io::duplex(1000);
            tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
            far.write_all(b"\0\0\0\x01a\0\0\0\x01b").await.unwrap();
            far.read_exact(&mut [0; 10]).await.unwrap();
            done.send(()).unwrap();
        });
    });
    finished.recv_timeout(Duration::from_secs(3)).expect("no deadlock");
}

/// Counts the polls of its replies.
struct CountPolls {
    polls: Arc<AtomicUsize>,
    gates: Mutex<Vec<Arc<Notify>>>,
}
impl Protocol for CountPolls {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;
    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }
    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Planned> {
        let (polls, gate) = (Arc::clone(&self.polls), Arc::new(Notify::new()));
        self.gates.lock().unwrap().push(Arc::clone(&gate));
        let mut waiting = Box::pin(async move { gate.notified().await });
        Reply::future(std::future::poll_fn(move |context| {
            polls.fetch_add(1, Ordering::SeqCst);
            waiting.as_mut().poll(context).map(|()| Ok(request.clone()))
        }))
    }
}

/// Each reply that became ready woke the task, which polled all the others.
#[tokio::test(start_paused = true)]
async fn only_woken_replies_are_polled() {
    const N: usize = 1000;
    let polls = Arc::new(AtomicUsize::new(0));
    let protocol = CountPolls { polls: Arc::clone(&polls), gates: Mutex::default() };
    let supervisor = Supervisor::builder(protocol).max_in_flight(N).build();
    let (near, mut far) = tokio::io::duplex(100_000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    far.write_all(&b"\0\0\0\x01a".repeat(N)).await.unwrap();
    yield_to_actors().await;
    let gates: Vec<_> = supervisor.protocol().gates.lock().unwrap().clone();
    assert_eq!(gates.len(), N);
    // In reverse order.
    for gate in gates.iter().rev() {
        gate.notify_one();
        tokio::task::yield_now().await;
    }
    far.read_exact(&mut vec![0; 5 * N]).await.unwrap();
    let polls = polls.load(Ordering::SeqCst);
    assert!(polls < 10 * N, "{polls} polls for {N} requests");
}

/// A slot whose frames are tied to the requests of its own connection was never written while a request was always in flight.
#[tokio::test(start_paused = true)]
async fn repeatedly_tied_slot_is_eventually_written() {
    let mut harness = Harness::<false, false>::new(|b| b.max_in_flight(2));
    harness.send("wait").await;
    let (handle, ticket) = harness.tickets.recv().await.unwrap();
    handle.after(ticket).push_latest(Slot(1), frame("newest")).unwrap();
    let mut received = 0;
    for _ in 0..100 {
        harness.send("wait").await;
        let (handle, ticket) = harness.tickets.recv().await.unwrap();
        handle.after(ticket).push_latest(Slot(1), frame("newest")).unwrap();
        harness.release();
        while let Ok(Some(text)) = tokio::time::timeout(Duration::from_millis(1), harness.receive()).await {
            received += usize::from(text == "newest");
        }
    }
    assert!(received > 0, "100 replies, and no push");
}

/// Pushes a frame tied to each request, and frames that are not tied when the request ends.
struct TieOnFrame;
impl Protocol for TieOnFrame {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;
    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }
    fn on_connection_setup(&self, handle: PushHandle<Frame>, context: &mut ConnectionContext) {
        context.data = Some(Box::new(handle));
    }
    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        let handle: &PushHandle<Frame> = context.data.as_ref().unwrap().downcast_ref().unwrap();
        let tied = handle.after(context.ticket());
        tied.try_push(frame("tied"), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
        assert!(!context.is_answered(context.ticket()));
        Reply::Frame(request)
    }
    fn on_command_end(&self, context: &mut ConnectionContext) {
        assert!(context.is_answered(context.ticket()));
        let handle: &PushHandle<Frame> = context.data.as_ref().unwrap().downcast_ref().unwrap();
        let free = |text: &str| handle.try_push(frame(text), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
        free("free");
        // The reply has been encoded.
        let tied = handle.after(context.ticket());
        tied.try_push(frame("tied late"), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
        free("free late");
    }
}

/// When the reply had been encoded, a push that was not tied overtook an earlier push that was tied to the reply.
#[tokio::test]
async fn push_after_the_reply_does_not_overtake_a_tied_push() {
    let supervisor = Supervisor::builder(TieOnFrame).build();
    let (near, mut far) = tokio::io::duplex(100_000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    far.write_all(b"\0\0\0\x05hello").await.unwrap();
    for expected in ["hello", "tied", "free", "tied late", "free late"] {
        let mut body = vec![0; far.read_u32().await.unwrap() as usize];
        far.read_exact(&mut body).await.unwrap();
        assert_eq!(String::from_utf8(body).unwrap(), expected);
    }
}

/// Invalid input arrived while a request was in flight. When a handle then closed the connection, its last frame was not sent.
#[tokio::test(start_paused = true)]
async fn handle_closes_a_connection_with_invalid_input() {
    let mut harness = Harness::<false, false>::new(|b| b);
    harness.send("never").await;
    let (handle, _) = harness.tickets.recv().await.unwrap();
    harness.far.write_all(&[0xff; 4]).await.unwrap();
    yield_to_actors().await;
    handle.close(Some(frame("bye")));
    assert_eq!(harness.receive().await.as_deref(), Some("bye"));
    assert_eq!(harness.ends.recv().await.unwrap().0, "handle");
}
