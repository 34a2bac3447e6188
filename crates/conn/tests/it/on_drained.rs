//! `Protocol::on_drained`: called when all pushes of a connection have been encoded.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{
    Builder, ConnectionContext, Frame, Protocol, PushHandle, PushPolicy, PushPriority, Reply, ReplyTicket, Shutdown,
    Slot, Supervisor,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::Notify;

use crate::test_server::{Planned, frame};

/// Counts the calls of `on_drained`, each of which pushes the next frame that is held back. `wait` is answered when the test notifies
/// `release`. Other requests are echoed.
#[derive(Default)]
struct Holding {
    drained: AtomicUsize,
    held_back: Mutex<VecDeque<&'static str>>,
    /// No frame is queued. Read and changed under the lock of `held_back`.
    is_free: AtomicBool,
    /// The handle of the connection, and the ticket of its last request.
    handle_and_ticket: Mutex<Option<(PushHandle<Frame>, Option<ReplyTicket>)>>,
    release: Arc<Notify>,
}

impl Protocol for Holding {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_connection_setup(&self, handle: PushHandle<Frame>, _: &mut ConnectionContext) {
        *self.handle_and_ticket.lock().unwrap() = Some((handle, None));
    }

    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        self.handle_and_ticket.lock().unwrap().as_mut().unwrap().1 = Some(context.ticket());
        if request.body() != &b"wait"[..] {
            return Reply::Frame(request);
        }
        let release = Arc::clone(&self.release);
        Reply::future(async move {
            release.notified().await;
            Ok(frame("waited"))
        })
    }

    fn on_drained(&self, _: &mut ConnectionContext) {
        self.drained.fetch_add(1, Ordering::SeqCst);
        let mut held_back = self.held_back.lock().unwrap();
        match held_back.pop_front() {
            Some(next) => push(&self.handle(), next),
            None => self.is_free.store(true, Ordering::SeqCst),
        }
    }
}

impl Holding {
    fn handle(&self) -> PushHandle<Frame> {
        self.handle_and_ticket.lock().unwrap().as_ref().unwrap().0.clone()
    }

    fn ticket(&self) -> ReplyTicket {
        self.handle_and_ticket.lock().unwrap().as_ref().unwrap().1.unwrap()
    }

    fn drained(&self) -> usize {
        self.drained.load(Ordering::SeqCst)
    }
}

fn push(handle: &PushHandle<Frame>, text: &str) {
    handle.try_push(frame(text), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
}

struct Connection {
    supervisor: Supervisor<Holding>,
    far: DuplexStream,
}

impl Connection {
    /// Creates a connection that has answered a request, with a socket buffer of `capacity` bytes.
    async fn begin(capacity: usize, settings: impl FnOnce(Builder<Holding>) -> Builder<Holding>) -> Self {
        let supervisor = settings(Supervisor::builder(Holding::default())).build();
        let (near, far) = tokio::io::duplex(capacity);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        tokio::spawn(permit.run(near, Vec::new()));
        let mut connection = Self { supervisor, far };
        connection.send("hello").await;
        connection.expect(&["hello"]).await;
        connection
    }

    fn protocol(&self) -> &Holding {
        self.supervisor.protocol()
    }

    async fn send(&mut self, text: &str) {
        self.far.write_u32(u32::try_from(text.len()).unwrap()).await.unwrap();
        self.far.write_all(text.as_bytes()).await.unwrap();
    }

    async fn receive(&mut self) -> String {
        let mut body = vec![0; self.far.read_u32().await.unwrap() as usize];
        self.far.read_exact(&mut body).await.unwrap();
        String::from_utf8(body).unwrap()
    }

    async fn expect(&mut self, frames: &[&str]) {
        for expected in frames {
            assert_eq!(self.receive().await, *expected);
        }
    }

    /// Yields to the actor until it is idle. Needs a runtime with one thread.
    async fn run_actor(&self) {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn on_drained_is_called_once_per_burst() {
    let mut connection = Connection::begin(1000, |builder| builder).await;
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 0, "nothing was pushed");
    let handle = connection.protocol().handle();
    for text in ["one", "two", "three"] {
        push(&handle, text);
    }
    handle.push_latest(Slot(1), frame("slot")).unwrap();
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 1);
    for _ in 0..4 {
        connection.receive().await;
    }
    connection.send("again").await;
    connection.expect(&["again"]).await;
    assert_eq!(connection.protocol().drained(), 1);
    handle.push_latest(Slot(1), frame("slot")).unwrap();
    connection.expect(&["slot"]).await;
    assert_eq!(connection.protocol().drained(), 2);
}

/// Each frame is pushed when the one before it has been encoded, so a queue with a capacity of one is enough.
#[tokio::test]
async fn on_drained_can_push() {
    let mut connection =
        Connection::begin(1000, |builder| builder.high_priority_capacity(1).low_priority_capacity(1)).await;
    connection.protocol().held_back.lock().unwrap().extend(["two", "three", "four"]);
    push(&connection.protocol().handle(), "one");
    connection.expect(&["one", "two", "three", "four"]).await;
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 4);
}

#[tokio::test]
async fn pushes_from_on_drained_do_not_block_requests() {
    let mut connection = Connection::begin(100_000, |builder| builder).await;
    connection.protocol().held_back.lock().unwrap().extend(std::iter::repeat_n("more", 1000));
    push(&connection.protocol().handle(), "more");
    connection.send("hello").await;
    let mut before = 0;
    while connection.receive().await == "more" {
        before += 1;
    }
    assert!(before < 1000, "the reply was written after all pushes");
    for _ in before..1001 {
        connection.expect(&["more"]).await;
    }
}

#[tokio::test]
async fn tied_frames_keep_the_outbox_undrained() {
    let mut connection = Connection::begin(1000, |builder| builder).await;
    connection.send("wait").await;
    connection.run_actor().await;
    let (handle, ticket) = (connection.protocol().handle(), connection.protocol().ticket());
    handle.after(ticket).push_latest(Slot(1), frame("tied slot")).unwrap();
    push(&handle, "free");
    connection.expect(&["free"]).await;
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 0, "a tied frame is in a slot");

    handle.after(ticket).try_push(frame("tied"), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
    assert!(handle.clear_slot(Slot(1)));
    push(&handle, "free");
    connection.expect(&["free"]).await;
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 0, "a tied frame is in a lane");

    connection.protocol().release.notify_one();
    connection.expect(&["waited", "tied"]).await;
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 1);
}

#[tokio::test]
async fn clearing_the_last_slot_drains_the_outbox() {
    let mut connection = Connection::begin(1000, |builder| builder).await;
    connection.send("wait").await;
    connection.run_actor().await;
    let (handle, ticket) = (connection.protocol().handle(), connection.protocol().ticket());
    for slot in [Slot(1), Slot(2)] {
        handle.after(ticket).push_latest(slot, frame("tied")).unwrap();
    }
    connection.run_actor().await;
    assert!(handle.clear_slot(Slot(1)));
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 0);
    assert!(handle.clear_slot(Slot(2)));
    connection.run_actor().await;
    assert_eq!(connection.protocol().drained(), 1);
}

#[tokio::test]
async fn outbox_is_not_drained_while_the_peer_does_not_read() {
    const FRAMES: usize = 100;
    let mut connection = Connection::begin(1000, |builder| builder.batch_bytes(4000)).await;
    let handle = connection.protocol().handle();
    for _ in 0..FRAMES {
        push(&handle, &"x".repeat(1000));
    }
    for _ in 0..FRAMES - 10 {
        connection.receive().await;
        assert_eq!(connection.protocol().drained(), 0);
    }
    assert!(handle.queued_bytes() > 0);
    for _ in 0..10 {
        connection.receive().await;
    }
    connection.run_actor().await;
    assert_eq!((connection.protocol().drained(), handle.queued_bytes()), (1, 0));
}

/// Pushes are rejected during the shutdown.
#[tokio::test]
async fn shutdown_drains_queued_pushes() {
    let mut connection = Connection::begin(1000, |builder| builder.batch_bytes(4000)).await;
    let handle = connection.protocol().handle();
    for _ in 0..20 {
        push(&handle, &"x".repeat(1000));
    }
    let supervisor = connection.supervisor.clone();
    let shutdown = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    connection.run_actor().await;
    for _ in 0..20 {
        connection.receive().await;
    }
    assert_eq!(connection.far.read(&mut [0]).await.unwrap(), 0);
    assert_eq!(connection.protocol().drained(), 1);
    drop(connection.far);
    shutdown.await.unwrap();
}

/// At most one frame is queued at a time: the test pushes it if none is queued, and `on_drained` otherwise. A missed call would block the
/// test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_drained_is_never_missed_between_threads() {
    const FRAMES: usize = 20_000;
    let mut connection = Connection::begin(1000, |builder| builder).await;
    connection.protocol().is_free.store(true, Ordering::SeqCst);
    let supervisor = connection.supervisor.clone();
    let pushing = tokio::task::spawn_blocking(move || {
        let holding = supervisor.protocol();
        let handle = holding.handle();
        for number in 0..FRAMES {
            let mut held_back = holding.held_back.lock().unwrap();
            if !holding.is_free.swap(false, Ordering::SeqCst) {
                held_back.push_back("held back");
            } else if number % 2 == 0 {
                push(&handle, "at once");
            } else {
                handle.push_latest(Slot(1), frame("latest")).unwrap();
            }
        }
    });
    for _ in 0..FRAMES {
        connection.receive().await;
    }
    pushing.await.unwrap();
}
