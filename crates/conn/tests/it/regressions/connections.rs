//! Of connections, their time-outs, orders and ends.

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

use crate::server::{Planned, frame};

/// Why a connection ended, and when.
type End = (String, Duration);
/// Who asked.
type Ticket = (PushHandle<Frame>, ReplyTicket);

/// One protocol for all tests.
struct Rig<const HOLD: bool = false, const REPLIES_FIRST: bool = false> {
    ends: mpsc::Sender<(String, Duration)>,
    tickets: mpsc::Sender<(PushHandle<Frame>, ReplyTicket)>,
    release: Arc<Notify>,
    start: Instant,
    setup: Option<Frame>,
    at_end: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct Ticks(u32);
impl futures_core::Stream for Ticks {
    type Item = Result<Frame, Planned>;
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0 += 1;
        Poll::Ready((self.0 <= 200).then(|| Ok(frame("y".repeat(996)))))
    }
}

/// Frames of a channel.
struct Channel(mpsc::Receiver<Frame>);
impl futures_core::Stream for Channel {
    type Item = Result<Frame, Planned>;
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

impl<const HOLD: bool, const REPLIES_FIRST: bool> Protocol for Rig<HOLD, REPLIES_FIRST> {
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
            b"ticks" => Reply::stream(Ticks(0)),
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

struct Line<const HOLD: bool = false, const REPLIES_FIRST: bool = false> {
    supervisor: Supervisor<Rig<HOLD, REPLIES_FIRST>>,
    far: DuplexStream,
    ends: mpsc::Receiver<(String, Duration)>,
    tickets: mpsc::Receiver<(PushHandle<Frame>, ReplyTicket)>,
    task: tokio::task::JoinHandle<()>,
}

fn rig<const H: bool, const R: bool>() -> (Rig<H, R>, mpsc::Receiver<End>, mpsc::Receiver<Ticket>) {
    let (told, ends) = mpsc::channel(1000);
    let (sent, tickets) = mpsc::channel(1000);
    let rig = Rig {
        ends: told,
        tickets: sent,
        release: Arc::default(),
        start: Instant::now(),
        setup: None,
        at_end: OnceLock::new(),
    };
    (rig, ends, tickets)
}

impl<const H: bool, const R: bool> Line<H, R> {
    fn new(settings: impl FnOnce(Builder<Rig<H, R>>) -> Builder<Rig<H, R>>) -> Self {
        Self::with_setup(None, settings)
    }
    fn with_setup(setup: Option<Frame>, settings: impl FnOnce(Builder<Rig<H, R>>) -> Builder<Rig<H, R>>) -> Self {
        let (mut rig, ends, tickets) = rig();
        rig.setup = setup;
        let supervisor = settings(Supervisor::builder(rig)).build();
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

async fn turns() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_endless_timeout_kills_nobody() {
    let mut line = Line::<false, false>::new(|b| b.timeouts(Timeouts::default().idle(Duration::MAX)));
    line.send("hello").await;
    assert_eq!(line.receive().await.as_deref(), Some("hello"));
    turns().await;
    assert_eq!(line.ends.try_recv().ok(), None);
}

#[tokio::test(start_paused = true)]
async fn an_endless_linger_does_not_panic() {
    let mut line = Line::<false, false>::new(|b| b.timeouts(Timeouts::default().linger(Duration::MAX)));
    line.send("close").await;
    assert_eq!(line.receive().await.as_deref(), Some("bye"));
    assert_eq!(line.receive().await, None);
    drop(line.far);
    line.task.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn an_endless_grace_is_cut_by_the_deadline() {
    let line = Line::<false, false>::new(|b| b);
    let shutdown = Shutdown::default().grace(Duration::MAX);
    let supervisor = line.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(shutdown).await }).await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn an_endless_deadline_waits() {
    let line = Line::<false, false>::new(|b| b);
    let shutdown = Shutdown::default().deadline(Duration::MAX);
    let supervisor = line.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(shutdown).await }).await.expect("no panic");
}

/// The peer has sent whole frames only, and reads all the time, slowly. We do not decode because the batch is full.
#[tokio::test(start_paused = true)]
async fn a_whole_frame_behind_a_full_batch_is_no_unfinished_frame() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("large").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    line.send("hello").await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let _ = line.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(line.ends.try_recv().ok(), None);
}

/// The same for the first frame: the server greets with a large push, the peer's first frame is in our input all the time.
#[tokio::test(start_paused = true)]
async fn a_first_frame_behind_a_full_batch_is_a_first_frame() {
    let mut line = Line::<false, false>::with_setup(Some(frame("x".repeat(100_000))), |b| b);
    line.send("hello").await;
    for _ in 0..15 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = line.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(line.ends.try_recv().ok(), None);
}

/// "A peer whose request is being answered is not idle": this one reads its answer.
#[tokio::test(start_paused = true)]
async fn who_reads_its_reply_is_not_idle() {
    let mut line = Line::<false, false>::new(|b| b.timeouts(Timeouts::default().idle(Duration::from_secs(5))));
    line.send("large").await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = line.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(line.ends.try_recv().ok(), None);
}

/// With a heartbeat the ping stands behind the reply, so the peer cannot have answered it.
#[tokio::test(start_paused = true)]
async fn who_has_not_come_to_the_ping_yet_is_not_idle() {
    let mut line = Line::<false, false>::new(|b| {
        b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(10)).idle(Duration::from_secs(25)))
    });
    line.send("large").await;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let _ = line.far.read_exact(&mut [0; 1000]).await;
    }
    assert_eq!(line.ends.try_recv().ok(), None);
}

/// It has closed its side and takes its reply, a kilobyte a second.
#[tokio::test(start_paused = true)]
async fn who_closed_its_side_and_reads_is_given_its_reply() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("ticks").await;
    line.far.shutdown().await.unwrap();
    let mut got = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        match line.far.read(&mut [0; 1000]).await {
            Ok(1..) => got += 1,
            _ => break,
        }
    }
    assert_eq!(line.ends.recv().await.unwrap().0, "peer", "after {got} kB of 200");
}

/// The rest of the frame is in the kernel when the actor looks at the clock, woken by a push after the runtime was blocked.
#[tokio::test]
async fn what_has_arrived_counts_first() {
    use std::io::Write;
    let (rig, mut ends, mut tickets) = rig::<false, false>();
    let supervisor = Supervisor::builder(rig).timeouts(Timeouts::default().frame(Duration::from_secs(1))).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, peer) = listener.accept().await.unwrap();
    tokio::spawn(supervisor.admit(peer).unwrap().run(socket, Vec::new()));
    client.write_all(b"\0\0\0\x05hello\0\0").unwrap();
    let (handle, _) = tickets.recv().await.unwrap();
    turns().await;
    client.write_all(b"\0\x05again").unwrap();
    // A handler that blocks, a machine that stood still.
    std::thread::sleep(Duration::from_millis(1500));
    handle.try_push(frame("push"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    // The second request is handled, and nothing has ended.
    tickets.recv().await.unwrap();
    assert_eq!(ends.try_recv().ok(), None);
}

/// It fills the read-ahead behind a request that takes long, and leaves. Nothing is read, so its end is not seen; nobody pings.
#[tokio::test(start_paused = true)]
async fn a_full_read_ahead_is_no_shelter_from_the_heartbeat() {
    let mut line = Line::<false, false>::new(|b| {
        b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(10)).idle(Duration::from_secs(25)))
    });
    line.send("never").await;
    line.far.write_all(&vec![0; 66_000]).await.unwrap();
    drop(line.far);
    tokio::time::sleep(Duration::from_hours(24)).await;
    assert_eq!(line.supervisor.count(), 0, "held a day by a peer that is long gone");
}

/// Two runtimes share a supervisor, as with a runtime per core; the one that drives the clock ends.
#[test]
fn alarms_survive_the_runtime_that_drove_them() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (one, two) = (runtime(), runtime());
    let (rig, mut ends, _tickets) = rig::<false, false>();
    let supervisor = Supervisor::builder(rig).timeouts(Timeouts::default().first_frame(Duration::from_secs(2))).build();
    let connect = |runtime: &tokio::runtime::Runtime| {
        let (near, far) = tokio::io::duplex(1000);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        runtime.spawn(permit.run(near, Vec::new()));
        far
    };
    let _first = connect(&one);
    wait_until("the first runtime drives", PATIENCE, || one.metrics().num_alive_tasks() == 2);
    let _second = connect(&two);
    wait_until("both run", PATIENCE, || supervisor.sessions().len() == 2);
    drop(one);
    assert_eq!(ends.blocking_recv().unwrap().0, "dropped");
    assert_eq!(ends.blocking_recv().unwrap().0, "first_frame");
}

/// `Reply::Close` is "a last frame, and the end of the connection".
#[tokio::test(start_paused = true)]
async fn nothing_is_written_after_the_last_frame() {
    let mut line = Line::<false, true>::new(|b| b.max_in_flight(2));
    line.send("wait").await;
    line.send("close").await;
    let (handle, _) = line.tickets.recv().await.unwrap();
    line.tickets.recv().await.unwrap();
    turns().await;
    line.release();
    handle.try_push(frame("pushed"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    let mut seen = Vec::new();
    while let Some(text) = line.receive().await {
        seen.push(text);
    }
    assert_eq!(seen.last().map(String::as_str), Some("bye"), "{seen:?}");
}

/// A push tied to the reply of a peer that has closed its side.
#[tokio::test(start_paused = true)]
async fn a_tied_push_follows_the_last_reply() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("wait").await;
    line.far.shutdown().await.unwrap();
    let (handle, ticket) = line.tickets.recv().await.unwrap();
    handle.after(ticket).try_push(frame("tied"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    turns().await;
    line.release();
    assert_eq!(line.receive().await.as_deref(), Some("waited"));
    assert_eq!(line.receive().await.as_deref(), Some("tied"), "{:?}", line.supervisor.stats().push);
}

/// "After an error `output` is as before": what came before it can be written.
#[tokio::test(start_paused = true)]
async fn a_frame_that_cannot_be_encoded_takes_no_reply_with_it() {
    let mut line = Line::<false, false>::new(|b| b);
    line.far.write_all(b"\0\0\0\x05hello\0\0\0\x09too large").await.unwrap();
    assert_eq!(line.receive().await.as_deref(), Some("hello"), "{:?}", line.ends.try_recv());
}

/// With one in flight it is answered; with two its reply is thrown away, for what came after it.
#[tokio::test(start_paused = true)]
async fn bad_bytes_do_not_take_back_earlier_requests() {
    for in_flight in [1, 2] {
        let mut line = Line::<false, false>::new(|b| b.max_in_flight(in_flight));
        line.send("wait").await;
        line.far.write_all(&[0xff; 10]).await.unwrap();
        turns().await;
        line.release();
        assert_eq!(line.receive().await.as_deref(), Some("waited"), "{in_flight} in flight");
        assert_eq!(line.receive().await.as_deref(), Some("bad frame"), "{in_flight} in flight");
    }
}

/// "For protocols whose replies must not be interrupted."
#[tokio::test(start_paused = true)]
async fn a_held_reply_is_not_interrupted_by_a_notice() {
    let mut line = Line::<true, false>::new(|b| b);
    line.send("two").await;
    assert_eq!(line.receive().await.as_deref(), Some("one"));
    let shutdown = Shutdown::default().grace(Duration::from_secs(10)).deadline(Duration::from_secs(20));
    let supervisor = line.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(shutdown).await });
    turns().await;
    line.release();
    assert_eq!(line.receive().await.as_deref(), Some("two"));
    assert_eq!(line.receive().await.as_deref(), Some("going down"));
}

/// The same for a ping.
#[tokio::test(start_paused = true)]
async fn a_held_reply_is_not_interrupted_by_a_ping() {
    let mut line = Line::<true, false>::new(|b| b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(10))));
    line.send("two").await;
    assert_eq!(line.receive().await.as_deref(), Some("one"));
    tokio::time::sleep(Duration::from_secs(11)).await;
    line.release();
    assert_eq!(line.receive().await.as_deref(), Some("two"));
}

/// Replies written before a handler panicked are lost to a reset.
#[tokio::test]
async fn a_panic_leaves_no_reset() {
    let (rig, _ends, _tickets) = rig::<false, false>();
    let supervisor = Supervisor::builder(rig).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (socket, peer) = listener.accept().await.unwrap();
    client.write_all(b"\0\0\0\x05hello\0\0\0\x05panic").await.unwrap();
    client.write_all(&vec![0; 100_000]).await.unwrap();
    supervisor.admit(peer).unwrap().run(socket, Vec::new()).await;
    client.read_exact(&mut [0; 9]).await.unwrap();
    assert_eq!(client.read(&mut [0]).await.map_err(|e| e.kind()), Ok(0), "an end, not a reset");
}

/// "What has been asked is answered": both were read before the shutdown began.
#[tokio::test(start_paused = true)]
async fn a_shutdown_answers_all_that_was_read() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("wait").await;
    line.send("second").await;
    turns().await;
    let supervisor = line.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    turns().await;
    line.release();
    assert_eq!(line.receive().await.as_deref(), Some("waited"));
    assert_eq!(line.receive().await.as_deref(), Some("second"));
}

/// Says goodbye by pushing a last frame, and knows then that all is said.
struct Parting {
    inner: LengthDelimited,
    over: bool,
}
impl Codec for Parting {
    type Frame = Frame;
    type Error = LengthDelimitedError;
    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, LengthDelimitedError> {
        self.inner.decode(input)
    }
    fn finish(&mut self, input: &BytesMut) -> Result<(), LengthDelimitedError> {
        self.inner.finish(input)
    }
    fn encode(&mut self, frame: &Frame, output: &mut Batch) -> Result<(), LengthDelimitedError> {
        self.over |= frame.body() == &b"goodbye"[..];
        self.inner.encode(frame, output)
    }
    fn is_closed(&self) -> bool {
        self.over
    }
}
struct Goodbyes;
impl Protocol for Goodbyes {
    type Frame = Frame;
    type Codec = Parting;
    type ProtocolError = Planned;
    fn codec(&self) -> Parting {
        Parting { inner: LengthDelimited::default(), over: false }
    }
    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Planned> {
        Reply::Frame(request)
    }
}

/// "Whether the conversation is over by its own rules. Then nothing more is read, and the connection ends when everything is
/// written."
#[tokio::test(start_paused = true)]
async fn a_codec_that_is_over_by_what_it_wrote_ends_the_connection() {
    let supervisor = Supervisor::builder(Goodbyes).timeouts(Timeouts::default().first_frame(None)).build();
    let (near, mut far) = tokio::io::duplex(1000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    turns().await;
    supervisor.sessions().broadcast(PushPriority::High, |_| Some(frame("goodbye")));
    far.read_exact(&mut [0; 11]).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(supervisor.count(), 0);
}

/// The registry that the supervisor shows can be written by anyone, and is what a shutdown wakes by.
#[tokio::test(start_paused = true)]
async fn a_connection_that_was_struck_off_hears_of_a_shutdown() {
    let line = Line::<false, false>::new(|b| b.timeouts(Timeouts::default().first_frame(None)));
    turns().await;
    line.supervisor.sessions().remove(&ConnectionId(1));
    let shutting = line.supervisor.shutdown(Shutdown::default());
    tokio::time::timeout(Duration::from_hours(1), shutting).await.expect("the deadline was five seconds");
}

#[tokio::test(start_paused = true)]
async fn traffic_is_not_forgotten_while_a_shutdown_waits() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("wait").await;
    turns().await;
    assert_eq!(line.supervisor.stats().traffic.frames_in, 1);
    let supervisor = line.supervisor.clone();
    tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    turns().await;
    let stats = line.supervisor.stats();
    assert_eq!((stats.connections, stats.traffic.frames_in), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn traffic_is_not_counted_twice_when_a_task_is_aborted() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("hello").await;
    assert_eq!(line.receive().await.as_deref(), Some("hello"));
    turns().await;
    let seen = Arc::new(AtomicU64::new(0));
    let (supervisor, note) = (line.supervisor.clone(), Arc::clone(&seen));
    let _ = line.supervisor.protocol().at_end.set(Box::new(move || {
        note.store(supervisor.stats().traffic.frames_in, Ordering::SeqCst);
    }));
    line.task.abort();
    line.ends.recv().await.unwrap();
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
async fn a_socket_may_run_another_connection() {
    let mut line = Line::<false, false>::new(|b| b);
    let peer = "127.0.0.1:9".parse().unwrap();
    let (inner_near, mut inner_far) = tokio::io::duplex(1000);
    let inner = Box::pin(line.supervisor.admit(peer).unwrap().run(inner_near, Vec::new()));
    let (near, _far) = tokio::io::duplex(1000);
    let tunnel = Tunnel { socket: near, inner, done: false };
    tokio::spawn(line.supervisor.admit(peer).unwrap().run(tunnel, Vec::new()));
    inner_far.write_all(b"\0\0\0\x05hello").await.unwrap();
    turns().await;
    assert_eq!(line.ends.try_recv().ok(), None);
}

struct Alarm(AtomicBool);
impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// "None of them keeps it alive": a handle keeps the waker, which in tokio is the task with all its memory.
#[tokio::test]
async fn a_handle_does_not_keep_the_task() {
    let (rig, _ends, _tickets) = rig::<false, false>();
    let supervisor = Supervisor::builder(rig).build();
    let (near, far) = tokio::io::duplex(1000);
    let mut run = Box::pin(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    let task = Arc::new(Alarm(AtomicBool::new(false)));
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

/// A task that was aborted before it was ever polled has been admitted, and never ends.
#[tokio::test(start_paused = true)]
async fn all_that_are_admitted_end() {
    let line = Line::<false, false>::new(|b| b);
    line.task.abort();
    turns().await;
    let stats = line.supervisor.stats();
    let ended: u64 = stats.ended.values().sum();
    assert_eq!((stats.admitted, stats.connections as u64 + ended), (1, 1));
}

/// Pings pile up for a peer that does not read, without bound if it may stall for ever.
#[tokio::test(start_paused = true)]
async fn pings_do_not_pile_up() {
    let mut line = Line::<false, false>::new(|b| {
        b.timeouts(Timeouts::default().heartbeat(Duration::from_secs(1)).write_stall(None))
    });
    line.send("large").await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    line.receive().await.unwrap();
    let mut pings = 0;
    while let Ok(Some(_)) = tokio::time::timeout(Duration::from_millis(1), line.receive()).await {
        pings += 1;
    }
    assert!(pings < 10, "{pings} pings");
}

/// A heartbeat of nothing spins.
#[test]
fn a_heartbeat_of_zero_does_not_spin() {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut line = Line::<false, false>::new(|b| b.timeouts(Timeouts::default().heartbeat(Duration::ZERO)));
            let mut pings = 0;
            let until = Instant::now() + Duration::from_millis(200);
            while Instant::now() < until {
                if tokio::time::timeout_at(until, line.receive()).await.is_ok() {
                    pings += 1;
                }
            }
            done.send(pings).unwrap();
        });
    });
    let pings = finished.recv_timeout(Duration::from_secs(5)).expect("it ends");
    assert!(pings < 250, "{pings} pings in 200 ms");
}

/// A driver that nobody needs ends: "ends with the last of them".
#[tokio::test(start_paused = true)]
async fn the_clock_ends_with_the_last_alarm() {
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.num_alive_tasks();
    let mut line = Line::<false, false>::new(|b| b.timeouts(Timeouts::default().idle(Duration::from_hours(1000))));
    line.send("hello").await;
    line.receive().await.unwrap();
    turns().await;
    // Without lingering, whose alarm would end it in passing.
    line.task.abort();
    line.ends.recv().await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(line.supervisor.count(), 0);
    assert_eq!(metrics.num_alive_tasks(), before);
}

/// Shared data that looks at its connection when it goes.
struct Shown(Mutex<Option<Session<Frame>>>);
impl Drop for Shown {
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
        context.share(Shown(Mutex::new(session)));
        Reply::Frame(request)
    }
}

#[test]
fn shared_data_may_look_back_when_it_goes() {
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

/// Each future that is done wakes the task, which polls all the others.
struct Crowd {
    polls: Arc<AtomicUsize>,
    gates: Mutex<Vec<Arc<Notify>>>,
}
impl Protocol for Crowd {
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

#[tokio::test(start_paused = true)]
async fn a_thousand_in_flight_are_not_polled_a_million_times() {
    const N: usize = 1000;
    let polls = Arc::new(AtomicUsize::new(0));
    let crowd = Crowd { polls: Arc::clone(&polls), gates: Mutex::default() };
    let supervisor = Supervisor::builder(crowd).max_in_flight(N).build();
    let (near, mut far) = tokio::io::duplex(100_000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    far.write_all(&b"\0\0\0\x01a".repeat(N)).await.unwrap();
    turns().await;
    let gates: Vec<_> = supervisor.protocol().gates.lock().unwrap().clone();
    assert_eq!(gates.len(), N);
    // The last first.
    for gate in gates.iter().rev() {
        gate.notify_one();
        tokio::task::yield_now().await;
    }
    far.read_exact(&mut vec![0; 5 * N]).await.unwrap();
    let polls = polls.load(Ordering::SeqCst);
    assert!(polls < 10 * N, "{polls} polls for {N} requests");
}

/// A connection that subscribes to what it writes itself, and always has a request in flight, hears nothing.
#[tokio::test(start_paused = true)]
async fn a_slot_that_is_tied_again_and_again_is_written_some_time() {
    let mut line = Line::<false, false>::new(|b| b.max_in_flight(2));
    line.send("wait").await;
    let (handle, ticket) = line.tickets.recv().await.unwrap();
    handle.after(ticket).push_latest(Slot(1), frame("newest")).unwrap();
    let mut heard = 0;
    for _ in 0..100 {
        line.send("wait").await;
        let (handle, ticket) = line.tickets.recv().await.unwrap();
        handle.after(ticket).push_latest(Slot(1), frame("newest")).unwrap();
        line.release();
        while let Ok(Some(text)) = tokio::time::timeout(Duration::from_millis(1), line.receive()).await {
            heard += usize::from(text == "newest");
        }
    }
    assert!(heard > 0, "100 replies, and no push");
}

/// Pushes something tied to the request, and something that is not when the request ends.
struct Tying;
impl Protocol for Tying {
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
        // The reply has been given.
        let tied = handle.after(context.ticket());
        tied.try_push(frame("tied late"), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
        free("free late");
    }
}

/// Whoever ties no more what it pushes, since the reply has been given, had what it pushed then written before what was tied.
#[tokio::test]
async fn what_is_pushed_after_the_reply_does_not_overtake_what_was_tied_to_it() {
    let supervisor = Supervisor::builder(Tying).build();
    let (near, mut far) = tokio::io::duplex(100_000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    far.write_all(b"\0\0\0\x05hello").await.unwrap();
    for expected in ["hello", "tied", "free", "tied late", "free late"] {
        let mut body = vec![0; far.read_u32().await.unwrap() as usize];
        far.read_exact(&mut body).await.unwrap();
        assert_eq!(String::from_utf8(body).unwrap(), expected);
    }
}

/// A request was in flight when the input could not be decoded. A handle that closed the connection then lost its last frame.
#[tokio::test(start_paused = true)]
async fn a_handle_closes_a_connection_whose_input_cannot_be_decoded() {
    let mut line = Line::<false, false>::new(|b| b);
    line.send("never").await;
    let (handle, _) = line.tickets.recv().await.unwrap();
    line.far.write_all(&[0xff; 4]).await.unwrap();
    turns().await;
    handle.close(Some(frame("bye")));
    assert_eq!(line.receive().await.as_deref(), Some("bye"));
    assert_eq!(line.ends.recv().await.unwrap().0, "handle");
}
