//! `Reply::InTurn`: replies by a closure that is called when all earlier requests have been answered.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{
    CloseReason, ConnectionContext, Frame, Protocol, PushHandle, PushPolicy, PushPriority, Reply, Shutdown, Supervisor,
};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, mpsc};

use crate::test_server::{Planned, frame};

/// `wait` is answered when the test notifies `release`, and `turn WORD` by a closure in its turn, according to the word. Other requests are
/// echoed. `events` records each request when it is handled, and when its closure is called.
struct Turns {
    events: Arc<Mutex<Vec<String>>>,
    release: Arc<Notify>,
    waits: Arc<AtomicUsize>,
    ends: mpsc::Sender<String>,
}

impl Turns {
    fn wait(release: Arc<Notify>, waits: &AtomicUsize) -> Reply<Frame, Planned> {
        waits.fetch_add(1, Ordering::SeqCst);
        Reply::future(async move {
            release.notified().await;
            Ok(frame("waited"))
        })
    }
}

impl Protocol for Turns {
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
        let text = String::from_utf8(request.body().to_vec()).unwrap();
        self.events.lock().unwrap().push(format!("{text}, {} before", context.in_flight()));
        if text == "wait" {
            return Self::wait(Arc::clone(&self.release), &self.waits);
        }
        let Some(word) = text.strip_prefix("turn ").map(str::to_owned) else { return Reply::Frame(request) };
        let (events, release, waits) = (Arc::clone(&self.events), Arc::clone(&self.release), Arc::clone(&self.waits));
        let closure = move |context: &mut ConnectionContext| {
            events.lock().unwrap().push(format!("called {word}, {} before", context.in_flight()));
            let handle: &PushHandle<Frame> = context.data.as_ref().unwrap().downcast_ref().unwrap();
            let tied = handle.after(context.ticket());
            match &*word {
                "none" => Reply::None,
                "twice" => Reply::Frames(vec![frame("one"), frame("two")]),
                "again" => Reply::in_turn(move |_| Reply::in_turn(|_| Reply::Frame(frame("again")))),
                "panic" => panic!("as planned"),
                "close" => Reply::Close(Some(frame("bye"))),
                "tied" => {
                    tied.try_push(frame("tied"), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
                    Turns::wait(release, &waits)
                }
                _ => Reply::Frame(frame(word)),
            }
        };
        if text == "turn later" {
            // A future returns the closure, so later requests may have been handled.
            let waiting = Arc::clone(&self.release);
            return Reply::later(async move {
                waiting.notified().await;
                Ok(Reply::in_turn(move |context| {
                    let handle: &PushHandle<Frame> = context.data.as_ref().unwrap().downcast_ref().unwrap();
                    let tied = handle.after(context.ticket());
                    tied.try_push(frame("tied"), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
                    Reply::Frame(frame("later"))
                }))
            });
        }
        Reply::in_turn(closure)
    }

    fn on_waiting(&self, frame: &Frame, _: &mut ConnectionContext) -> bool {
        let is_heartbeat = &frame.body()[..] == b"alive";
        if is_heartbeat {
            self.events.lock().unwrap().push("alive".to_owned());
        }
        is_heartbeat
    }

    fn on_panic(&self, _: &mut ConnectionContext) -> Option<Frame> {
        Some(frame("panicked"))
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) {
        self.ends.try_send(reason.label().to_owned()).unwrap();
    }
}

struct Connection {
    supervisor: Supervisor<Turns>,
    far: DuplexStream,
    ends: mpsc::Receiver<String>,
}

impl Connection {
    fn begin(in_flight: usize) -> Self {
        let (sender, ends) = mpsc::channel(10);
        let turns = Turns { events: Arc::default(), release: Arc::default(), waits: Arc::default(), ends: sender };
        let supervisor = Supervisor::builder(turns).max_in_flight(in_flight).build();
        let (near, far) = tokio::io::duplex(1 << 16);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        tokio::spawn(permit.run(near, Vec::new()));
        Self { supervisor, far, ends }
    }

    /// Sends all requests at once.
    async fn send(&mut self, requests: &[&str]) {
        let mut bytes = Vec::new();
        for text in requests {
            bytes.extend_from_slice(&u32::try_from(text.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        self.far.write_all(&bytes).await.unwrap();
    }

    async fn expect(&mut self, answers: &[&str]) {
        for answer in answers {
            let mut body = vec![0; self.far.read_u32().await.unwrap() as usize];
            self.far.read_exact(&mut body).await.unwrap();
            assert_eq!(String::from_utf8(body).unwrap(), *answer);
        }
    }

    /// Waits until this many requests have waited for `release`, and the actor is idle.
    async fn wait_until_idle(&self, waits: usize) {
        let turns = self.supervisor.protocol();
        wait_until_async("requests wait", PATIENCE, async || turns.waits.load(Ordering::SeqCst) == waits).await;
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }

    fn release(&self) {
        self.supervisor.protocol().release.notify_one();
    }

    fn events(&self) -> Vec<String> {
        std::mem::take(&mut *self.supervisor.protocol().events.lock().unwrap())
    }
}

#[tokio::test]
async fn closure_is_called_at_once_if_nothing_is_in_flight() {
    let mut connection = Connection::begin(8);
    connection.send(&["turn first", "turn none", "turn twice", "turn again", "last"]).await;
    connection.expect(&["first", "one", "two", "again", "last"]).await;
    let expected = [
        "turn first, 0 before",
        "called first, 0 before",
        "turn none, 0 before",
        "called none, 0 before",
        "turn twice, 0 before",
        "called twice, 0 before",
        "turn again, 0 before",
        "called again, 0 before",
        "last, 0 before",
    ];
    assert_eq!(connection.events(), expected);
}

/// Later requests have arrived, but are not handled before the closure is called.
#[tokio::test]
async fn closure_is_called_when_all_earlier_requests_are_answered() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "wait", "turn mine", "behind", "turn other", "wait", "last"]).await;
    connection.wait_until_idle(2).await;
    assert_eq!(connection.events(), ["wait, 0 before", "wait, 1 before", "turn mine, 2 before"]);
    connection.release();
    connection.expect(&["waited"]).await;
    connection.wait_until_idle(2).await;
    assert!(connection.events().is_empty(), "an earlier request is not answered yet");

    connection.release();
    connection.expect(&["waited", "mine", "behind", "other"]).await;
    connection.wait_until_idle(3).await;
    let expected = [
        "called mine, 0 before",
        "behind, 0 before",
        "turn other, 0 before",
        "called other, 0 before",
        "wait, 0 before",
        "last, 1 before",
    ];
    assert_eq!(connection.events(), expected);
    connection.release();
    connection.expect(&["waited", "last"]).await;
}

/// A frame that `on_waiting` consumes is not handled. A frame that need not wait is handled normally.
#[tokio::test]
async fn on_waiting_is_called_for_frames_behind_a_request_in_flight() {
    let mut connection = Connection::begin(1);
    connection.send(&["wait", "behind", "alive", "last"]).await;
    connection.wait_until_idle(1).await;
    assert_eq!(connection.events(), ["wait, 0 before", "alive"]);
    connection.release();
    connection.expect(&["waited", "behind", "last"]).await;
    connection.send(&["alive"]).await;
    connection.expect(&["alive"]).await;
}

/// The peer does not read, so the batch is full and nothing is handled.
#[tokio::test]
async fn on_waiting_is_called_for_frames_behind_an_unread_reply() {
    let connection = Connection::begin(1);
    let large = "x".repeat(1 << 20);
    let (mut reading, mut writing) = tokio::io::split(connection.far);
    let mut bytes = u32::try_from(large.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(large.as_bytes());
    writing.write_all(&bytes).await.unwrap();
    // The reply has begun.
    assert_eq!(reading.read_u32().await.unwrap(), 1 << 20);
    let turns = connection.supervisor.protocol();
    turns.events.lock().unwrap().clear();
    writing.write_all(b"\0\0\0\x06behind\0\0\0\x05alive\0\0\0\x04last").await.unwrap();
    let is_seen = || *turns.events.lock().unwrap() == ["alive"];
    wait_until_async("on_waiting is called", PATIENCE, async || is_seen()).await;
    let mut answers = vec![0; (1 << 20) + 10 + 8];
    reading.read_exact(&mut answers).await.unwrap();
    assert_eq!(&answers[1 << 20..], b"\0\0\0\x06behind\0\0\0\x04last");
}

/// All requests are answered after that.
#[tokio::test]
async fn input_is_read_up_to_the_read_ahead_limit_while_a_request_is_in_flight() {
    let mut connection = Connection::begin(4);
    connection.send(&["wait", "turn mine"]).await;
    connection.wait_until_idle(1).await;
    let large = "x".repeat(40_000);
    let (mut reading, mut writing) = tokio::io::split(connection.far);
    let sending = tokio::spawn(async move {
        for _ in 0..10 {
            writing.write_u32(40_000).await.unwrap();
            writing.write_all(large.as_bytes()).await.unwrap();
        }
        writing
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!sending.is_finished(), "more than the read-ahead was read");
    let turns = connection.supervisor.protocol();
    assert_eq!(turns.events.lock().unwrap().len(), 2);
    turns.release.notify_one();
    let mut answers = vec![0; 10 + 8 + 10 * 40_004];
    reading.read_exact(&mut answers).await.unwrap();
    assert!(answers.starts_with(b"\0\0\0\x06waited\0\0\0\x04mine\0\0\x9c\x40xx"));
    sending.await.unwrap();
}

/// The closure gets the ticket of its own request, even if later requests have been handled.
#[tokio::test]
async fn push_tied_in_the_closure_follows_its_own_reply() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn tied", "behind"]).await;
    connection.wait_until_idle(1).await;
    connection.release();
    connection.expect(&["waited"]).await;
    connection.wait_until_idle(2).await;
    assert!(
        connection.events().contains(&"behind, 1 before".to_owned()),
        "the closure was called, and its reply is in flight"
    );
    connection.release();
    connection.expect(&["waited", "behind", "tied"]).await;

    connection.send(&["turn later", "wait"]).await;
    connection.wait_until_idle(3).await;
    connection.release();
    // The tied push does not wait for the reply to the last request.
    connection.expect(&["later", "tied"]).await;
    connection.release();
    connection.expect(&["waited"]).await;
}

#[tokio::test]
async fn panic_in_the_closure_is_answered_by_on_panic() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn panic", "behind"]).await;
    connection.wait_until_idle(1).await;
    connection.release();
    connection.expect(&["waited", "panicked", "behind"]).await;
    assert_eq!(connection.supervisor.stats().panics, 1);
    connection.send(&["turn panic", "behind"]).await;
    connection.expect(&["panicked", "behind"]).await;
}

#[tokio::test]
async fn no_request_is_handled_after_a_close() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn close", "behind"]).await;
    connection.wait_until_idle(1).await;
    connection.release();
    connection.expect(&["waited", "bye"]).await;
    assert_eq!(connection.far.read(&mut [0]).await.unwrap(), 0);
    assert_eq!(connection.ends.recv().await.unwrap(), "handler");
    assert!(!connection.events().iter().any(|event| event.starts_with("behind")));
}

#[tokio::test]
async fn half_closed_peer_gets_all_replies() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn mine", "wait", "turn other", "behind"]).await;
    connection.far.shutdown().await.unwrap();
    connection.wait_until_idle(1).await;
    connection.release();
    connection.expect(&["waited", "mine"]).await;
    connection.wait_until_idle(2).await;
    connection.release();
    connection.expect(&["waited", "other", "behind"]).await;
    assert_eq!(connection.ends.recv().await.unwrap(), "peer");
}

/// All requests that were read are answered, even if their closure was not called before the shutdown.
#[tokio::test]
async fn shutdown_waits_for_replies_in_turn() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn mine", "behind"]).await;
    connection.wait_until_idle(1).await;
    let supervisor = connection.supervisor.clone();
    let shutdown = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    connection.wait_until_idle(1).await;
    assert!(!shutdown.is_finished());
    connection.release();
    connection.expect(&["waited", "mine", "behind"]).await;
    assert_eq!(connection.ends.recv().await.unwrap(), "shutdown");
    drop(connection.far);
    shutdown.await.unwrap();
}

/// A handle that closes the connection does not wait for replies, so the closure is never called.
#[tokio::test]
async fn close_by_handle_drops_replies_in_turn() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn mine", "behind"]).await;
    connection.wait_until_idle(1).await;
    connection.supervisor.sessions().list()[0].handle().close(Some(frame("enough")));
    connection.expect(&["enough"]).await;
    assert_eq!(connection.ends.recv().await.unwrap(), "handle");
    assert_eq!(connection.events(), ["wait, 0 before", "turn mine, 1 before"]);
}
