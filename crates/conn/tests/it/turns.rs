//! Replies that are decided when all before them is answered.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{
    CloseReason, ConnectionContext, Frame, Protocol, PushHandle, PushPolicy, PushPriority, Reply, Shutdown, Supervisor,
};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, mpsc};

use crate::server::{Planned, frame};

/// `wait` is answered when it is released; `turn` and a word is decided in its turn, as the word says; the rest is echoed. What is
/// handled and decided is noted.
struct Turns {
    notes: Arc<Mutex<Vec<String>>>,
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
        self.notes.lock().unwrap().push(format!("{text}, {} before", context.in_flight()));
        if text == "wait" {
            return Self::wait(Arc::clone(&self.release), &self.waits);
        }
        let Some(word) = text.strip_prefix("turn ").map(str::to_owned) else { return Reply::Frame(request) };
        let (notes, release, waits) = (Arc::clone(&self.notes), Arc::clone(&self.release), Arc::clone(&self.waits));
        let decide = move |context: &mut ConnectionContext| {
            notes.lock().unwrap().push(format!("decided {word}, {} before", context.in_flight()));
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
            // A future gives it, and what comes after it may have been handled.
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
        Reply::in_turn(decide)
    }

    fn on_waiting(&self, frame: &Frame, _: &mut ConnectionContext) -> bool {
        let is_sign = &frame.body()[..] == b"alive";
        if is_sign {
            self.notes.lock().unwrap().push("alive".to_owned());
        }
        is_sign
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
        let (told, ends) = mpsc::channel(10);
        let turns = Turns { notes: Arc::default(), release: Arc::default(), waits: Arc::default(), ends: told };
        let supervisor = Supervisor::builder(turns).max_in_flight(in_flight).build();
        let (near, far) = tokio::io::duplex(1 << 16);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        tokio::spawn(permit.run(near, Vec::new()));
        Self { supervisor, far, ends }
    }

    /// All of them at once.
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

    /// Waits until so many requests wait to be released, and whoever else can go on has done so.
    async fn settle(&self, waits: usize) {
        let turns = self.supervisor.protocol();
        wait_until_async("requests wait", PATIENCE, async || turns.waits.load(Ordering::SeqCst) == waits).await;
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }

    fn release(&self) {
        self.supervisor.protocol().release.notify_one();
    }

    fn notes(&self) -> Vec<String> {
        std::mem::take(&mut *self.supervisor.protocol().notes.lock().unwrap())
    }
}

#[tokio::test]
async fn with_nothing_in_flight_it_is_decided_at_once() {
    let mut connection = Connection::begin(8);
    connection.send(&["turn first", "turn none", "turn twice", "turn again", "last"]).await;
    connection.expect(&["first", "one", "two", "again", "last"]).await;
    let expected = [
        "turn first, 0 before",
        "decided first, 0 before",
        "turn none, 0 before",
        "decided none, 0 before",
        "turn twice, 0 before",
        "decided twice, 0 before",
        "turn again, 0 before",
        "decided again, 0 before",
        "last, 0 before",
    ];
    assert_eq!(connection.notes(), expected);
}

/// What is behind it has come, and is not handled before.
#[tokio::test]
async fn it_is_decided_when_all_before_it_is_answered() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "wait", "turn mine", "behind", "turn other", "wait", "last"]).await;
    connection.settle(2).await;
    assert_eq!(connection.notes(), ["wait, 0 before", "wait, 1 before", "turn mine, 2 before"]);
    connection.release();
    connection.expect(&["waited"]).await;
    connection.settle(2).await;
    assert!(connection.notes().is_empty(), "one is not answered yet");

    connection.release();
    connection.expect(&["waited", "mine", "behind", "other"]).await;
    connection.settle(3).await;
    let expected = [
        "decided mine, 0 before",
        "behind, 0 before",
        "turn other, 0 before",
        "decided other, 0 before",
        "wait, 0 before",
        "last, 1 before",
    ];
    assert_eq!(connection.notes(), expected);
    connection.release();
    connection.expect(&["waited", "last"]).await;
}

/// One that is all that it says is not answered; one that need not wait is a frame like any other.
#[tokio::test]
async fn a_frame_that_has_to_wait_can_be_heard_before_its_turn() {
    let mut connection = Connection::begin(1);
    connection.send(&["wait", "behind", "alive", "last"]).await;
    connection.settle(1).await;
    assert_eq!(connection.notes(), ["wait, 0 before", "alive"]);
    connection.release();
    connection.expect(&["waited", "behind", "last"]).await;
    connection.send(&["alive"]).await;
    connection.expect(&["alive"]).await;
}

/// The peer does not read, so the batch is full and nothing is handled.
#[tokio::test]
async fn a_frame_behind_a_reply_that_is_not_read_can_be_heard() {
    let connection = Connection::begin(1);
    let large = "x".repeat(1 << 20);
    let (mut reading, mut writing) = tokio::io::split(connection.far);
    let mut bytes = u32::try_from(large.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(large.as_bytes());
    writing.write_all(&bytes).await.unwrap();
    // The reply has begun.
    assert_eq!(reading.read_u32().await.unwrap(), 1 << 20);
    let turns = connection.supervisor.protocol();
    turns.notes.lock().unwrap().clear();
    writing.write_all(b"\0\0\0\x06behind\0\0\0\x05alive\0\0\0\x04last").await.unwrap();
    let is_heard = || *turns.notes.lock().unwrap() == ["alive"];
    wait_until_async("the frame is heard", PATIENCE, async || is_heard()).await;
    let mut answers = vec![0; (1 << 20) + 10 + 8];
    reading.read_exact(&mut answers).await.unwrap();
    assert_eq!(&answers[1 << 20..], b"\0\0\0\x06behind\0\0\0\x04last");
}

/// What comes behind it is read ahead, as far as that goes, and nothing of it is forgotten.
#[tokio::test]
async fn more_than_is_read_ahead_may_wait_behind_it() {
    let mut connection = Connection::begin(4);
    connection.send(&["wait", "turn mine"]).await;
    connection.settle(1).await;
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
    assert!(!sending.is_finished(), "the peer holds the rest");
    let turns = connection.supervisor.protocol();
    assert_eq!(turns.notes.lock().unwrap().len(), 2);
    turns.release.notify_one();
    let mut answers = vec![0; 10 + 8 + 10 * 40_004];
    reading.read_exact(&mut answers).await.unwrap();
    assert!(answers.starts_with(b"\0\0\0\x06waited\0\0\0\x04mine\0\0\x9c\x40xx"));
    sending.await.unwrap();
}

/// The ticket is that of its own request, and so is that of a decision that comes when others have been handled.
#[tokio::test]
async fn what_it_ties_comes_after_its_own_reply() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn tied", "behind"]).await;
    connection.settle(1).await;
    connection.release();
    connection.expect(&["waited"]).await;
    connection.settle(2).await;
    assert!(connection.notes().contains(&"behind, 1 before".to_owned()), "it has been decided, and is in flight");
    connection.release();
    connection.expect(&["waited", "behind", "tied"]).await;

    connection.send(&["turn later", "wait"]).await;
    connection.settle(3).await;
    connection.release();
    // It does not wait for the reply to the request that was handled last.
    connection.expect(&["later", "tied"]).await;
    connection.release();
    connection.expect(&["waited"]).await;
}

#[tokio::test]
async fn its_panic_is_a_panic_of_the_handler() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn panic", "behind"]).await;
    connection.settle(1).await;
    connection.release();
    connection.expect(&["waited", "panicked", "behind"]).await;
    assert_eq!(connection.supervisor.stats().panics, 1);
    connection.send(&["turn panic", "behind"]).await;
    connection.expect(&["panicked", "behind"]).await;
}

#[tokio::test]
async fn it_may_close_and_nothing_behind_it_is_handled() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn close", "behind"]).await;
    connection.settle(1).await;
    connection.release();
    connection.expect(&["waited", "bye"]).await;
    assert_eq!(connection.far.read(&mut [0]).await.unwrap(), 0);
    assert_eq!(connection.ends.recv().await.unwrap(), "handler");
    assert!(!connection.notes().iter().any(|note| note.starts_with("behind")));
}

#[tokio::test]
async fn a_peer_that_has_closed_its_side_gets_it_all_the_same() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn mine", "wait", "turn other", "behind"]).await;
    connection.far.shutdown().await.unwrap();
    connection.settle(1).await;
    connection.release();
    connection.expect(&["waited", "mine"]).await;
    connection.settle(2).await;
    connection.release();
    connection.expect(&["waited", "other", "behind"]).await;
    assert_eq!(connection.ends.recv().await.unwrap(), "peer");
}

/// What has been read is answered, whatever has yet to be decided.
#[tokio::test]
async fn a_shutdown_waits_for_it() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn mine", "behind"]).await;
    connection.settle(1).await;
    let supervisor = connection.supervisor.clone();
    let shutdown = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    connection.settle(1).await;
    assert!(!shutdown.is_finished());
    connection.release();
    connection.expect(&["waited", "mine", "behind"]).await;
    assert_eq!(connection.ends.recv().await.unwrap(), "shutdown");
    drop(connection.far);
    shutdown.await.unwrap();
}

/// Whoever closes the connection by a handle waits for no reply: it is never decided.
#[tokio::test]
async fn a_handle_closes_before_it_is_decided() {
    let mut connection = Connection::begin(8);
    connection.send(&["wait", "turn mine", "behind"]).await;
    connection.settle(1).await;
    connection.supervisor.sessions().list()[0].handle().close(Some(frame("enough")));
    connection.expect(&["enough"]).await;
    assert_eq!(connection.ends.recv().await.unwrap(), "handle");
    assert_eq!(connection.notes(), ["wait, 0 before", "turn mine, 1 before"]);
}
