//! `PushHandle::wake` and `Protocol::on_wake`, over real sockets.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{
    Builder, CloseReason, ConnectionContext, Frame, Protocol, PushHandle, PushPolicy, PushPriority, Reply, Shutdown,
    Supervisor, Tick, Timeouts,
};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};

use crate::test_server::{Client, Planned, frame};

/// The action of the hook in a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    Count,
    Push,
    Panic,
    Tick,
}

/// `wait` is answered when the test notifies `release`, and `stream` with an endless stream. Other requests are echoed, or rejected after
/// the grace period.
struct Waking {
    plan: Plan,
    runs: AtomicUsize,
    /// Written by a test before it calls `wake`.
    written: AtomicU64,
    /// The value of `written` in the last run of the hook.
    seen: AtomicU64,
    /// The value of `Counters::bytes_out` in the last run of the hook.
    bytes_out: AtomicU64,
    ticks: AtomicUsize,
    waiting: AtomicUsize,
    has_ended: AtomicBool,
    runs_after_end: AtomicUsize,
    release: Arc<Notify>,
    ends: mpsc::Sender<String>,
}

struct Endless;

impl futures_core::Stream for Endless {
    type Item = Result<Frame, Planned>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(Some(Ok(frame("x".repeat(10_000)))))
    }
}

impl Protocol for Waking {
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
        match &request.body()[..] {
            b"wait" => {
                let release = Arc::clone(&self.release);
                Reply::future(async move {
                    release.notified().await;
                    Ok(frame("waited"))
                })
            }
            b"stream" => Reply::stream(Endless),
            _ if context.is_closing() => Reply::Frame(frame("refused")),
            _ => Reply::Frame(request),
        }
    }

    fn on_waiting(&self, _: &Frame, _: &mut ConnectionContext) -> bool {
        self.waiting.fetch_add(1, SeqCst);
        false
    }

    fn on_wake(&self, context: &mut ConnectionContext) {
        self.seen.store(self.written.load(Relaxed), Relaxed);
        self.bytes_out.store(context.counters().bytes_out, Relaxed);
        self.runs_after_end.fetch_add(usize::from(self.has_ended.load(SeqCst)), SeqCst);
        match self.plan {
            Plan::Count => {}
            Plan::Push => {
                let handle = context.data.as_ref().and_then(|data| data.downcast_ref::<PushHandle<Frame>>()).unwrap();
                for text in ["one", "two"] {
                    handle.try_push(frame(text), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
                }
            }
            Plan::Panic => panic!("as planned"),
            Plan::Tick => context.tick_within(Duration::from_millis(1)),
        }
        self.runs.fetch_add(1, SeqCst);
    }

    fn on_tick(&self, _: &mut ConnectionContext) -> Tick<Frame> {
        self.ticks.fetch_add(1, SeqCst);
        Tick::Stop
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) {
        self.has_ended.store(true, SeqCst);
        self.ends.try_send(reason.label().to_owned()).unwrap();
    }
}

struct Server {
    supervisor: Supervisor<Waking>,
    addr: SocketAddr,
    ends: mpsc::Receiver<String>,
}

impl Server {
    async fn start(plan: Plan) -> Self {
        Self::with(plan, |builder| builder).await
    }

    async fn with(plan: Plan, settings: impl FnOnce(Builder<Waking>) -> Builder<Waking>) -> Self {
        let (sender, ends) = mpsc::channel(10);
        let waking = Waking {
            plan,
            runs: AtomicUsize::new(0),
            written: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
            ticks: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            runs_after_end: AtomicUsize::new(0),
            release: Arc::default(),
            ends: sender,
        };
        let supervisor = settings(Supervisor::builder(waking)).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = supervisor.clone();
        tokio::spawn(async move { serving.serve(listener).await });
        Self { supervisor, addr, ends }
    }

    /// Returns a client whose connection is served, and a handle to it.
    async fn connect(&self) -> (Client, PushHandle<Frame>) {
        let mut client = Client(TcpStream::connect(self.addr).await.unwrap());
        assert_eq!(client.ask("hello").await, "hello");
        let handle = self.supervisor.sessions().list().pop().unwrap().handle();
        (client, handle)
    }

    fn waking(&self) -> &Waking {
        self.supervisor.protocol()
    }

    fn runs(&self) -> usize {
        self.waking().runs.load(SeqCst)
    }

    async fn next_end(&mut self) -> String {
        tokio::time::timeout(PATIENCE, self.ends.recv()).await.unwrap().unwrap()
    }
}

#[tokio::test]
async fn wake_runs_the_hook_and_its_pushes_are_written() {
    let server = Server::start(Plan::Push).await;
    let (mut client, handle) = server.connect().await;
    assert_eq!(server.runs(), 0);
    for run in 1..=3 {
        handle.wake();
        for expected in ["one", "two"] {
            assert_eq!(client.receive().await.unwrap(), expected);
        }
        assert_eq!(server.runs(), run);
    }
}

/// On one thread the actor cannot run between two calls.
#[tokio::test]
async fn wakes_before_a_run_are_coalesced() {
    let server = Server::start(Plan::Push).await;
    let (mut client, handle) = server.connect().await;
    for _ in 0..100 {
        handle.wake();
    }
    for expected in ["one", "two"] {
        assert_eq!(client.receive().await.unwrap(), expected);
    }
    assert_eq!(client.ask("again").await, "again");
    assert_eq!(server.runs(), 1);
}

/// After a call of `wake`, the hook runs and sees all writes before the call, however calls and runs interleave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_is_lost_between_threads() {
    const WAKES: u64 = 100_000;
    let server = Server::start(Plan::Count).await;
    let (_client, handle) = server.connect().await;
    let supervisor = server.supervisor.clone();
    let waker = tokio::task::spawn_blocking(move || {
        let waking = supervisor.protocol();
        for number in 1..=WAKES {
            waking.written.store(number, Relaxed);
            handle.wake();
            if number % 1000 == 0 {
                // No other wake follows until the hook has seen this one.
                tidewire_testkit::wait_until("the hook sees the last number", PATIENCE, || {
                    waking.seen.load(Relaxed) == number
                });
            }
        }
    });
    waker.await.unwrap();
    assert!(server.runs() as u64 <= WAKES);
}

/// The replies never end, so the actor is idle only when the socket and the batch are full.
#[tokio::test]
async fn hook_runs_while_the_peer_does_not_read() {
    let server = Server::start(Plan::Tick).await;
    let (mut client, handle) = server.connect().await;
    client.send("stream").await;
    let is_stalled = || handle.counters().bytes_out > 100_000;
    wait_until_async("the socket is full", PATIENCE, async || is_stalled()).await;
    let written = handle.counters().bytes_out;
    handle.wake();
    wait_until_async("the hook has run", PATIENCE, async || server.runs() == 1).await;
    assert!(server.waking().bytes_out.load(Relaxed) >= written);
    // No tick is configured; the hook has scheduled one.
    wait_until_async("the tick has come", PATIENCE, async || server.waking().ticks.load(SeqCst) == 1).await;
    assert_eq!(client.receive().await.unwrap().len(), 10_000);
}

#[tokio::test]
async fn hook_does_not_run_after_the_end() {
    let timeouts = Timeouts::default().linger(PATIENCE);
    let mut server = Server::with(Plan::Count, |builder| builder.timeouts(timeouts)).await;
    let (client, handle) = server.connect().await;
    handle.close(None);
    handle.wake();
    assert_eq!(server.next_end().await, "handle");
    // The actor lingers, because the client has not closed its side.
    assert_eq!(server.supervisor.count(), 1);
    handle.wake();
    drop(client);
    wait_until_async("the connection has ended", PATIENCE, async || server.supervisor.count() == 0).await;
    handle.wake();
    assert_eq!(server.waking().runs_after_end.load(SeqCst), 0);
}

#[tokio::test]
async fn panic_in_the_hook_ends_only_its_own_connection() {
    let mut server = Server::start(Plan::Panic).await;
    let (mut other, _) = server.connect().await;
    let (mut client, handle) = server.connect().await;
    handle.wake();
    assert_eq!(server.next_end().await, "panic");
    assert_eq!(client.receive().await, None);
    assert_eq!(other.ask("still there").await, "still there");
}

#[tokio::test]
async fn requests_that_wait_at_the_end_of_the_grace_period_can_be_rejected() {
    let mut server = Server::with(Plan::Count, |builder| builder.max_in_flight(1)).await;
    let (mut client, handle) = server.connect().await;
    client.send("wait").await;
    for text in ["first", "second"] {
        client.send(text).await;
    }
    wait_until_async("both are read", PATIENCE, async || server.waking().waiting.load(SeqCst) == 2).await;
    let supervisor = server.supervisor.clone();
    let shutdown = tokio::spawn(async move {
        supervisor.shutdown(Shutdown::default().deadline(PATIENCE)).await;
    });
    wait_until_async("the grace period has ended", PATIENCE, async || handle.is_closed()).await;
    server.waking().release.notify_one();
    for expected in ["waited", "refused", "refused"] {
        assert_eq!(client.receive().await.unwrap(), expected);
    }
    assert_eq!(client.receive().await, None);
    drop(client);
    shutdown.await.unwrap();
    assert_eq!(server.next_end().await, "shutdown");
}
