//! Timeouts, with a paused clock that advances to the next timer when all tasks wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{CloseReason, ConnectionContext, Frame, Protocol, Reply, Supervisor, Timeouts};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::test_server::{Planned, Server, frame};

/// Pings idle peers, and sends the close reason as the last frame. `never` is never answered.
struct Pinging {
    ends: mpsc::Sender<(String, Duration)>,
    start: Instant,
    pings: Arc<AtomicUsize>,
}

impl Protocol for Pinging {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Planned> {
        match &request.body()[..] {
            b"never" => Reply::future(std::future::pending()),
            b"large" => Reply::Frame(Frame::from(Bytes::from(vec![b'x'; 100_000]))),
            _ => Reply::Frame(request),
        }
    }

    fn on_idle(&self, silent: Duration, _: &mut ConnectionContext) -> Option<Frame> {
        self.pings.fetch_add(1, Ordering::SeqCst);
        Some(frame(format!("ping {}", silent.as_secs())))
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Frame> {
        Some(frame(reason.label()))
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) {
        self.ends.try_send((reason.label().to_owned(), self.start.elapsed())).unwrap();
    }
}

struct Connection {
    supervisor: Supervisor<Pinging>,
    far: DuplexStream,
    ends: mpsc::Receiver<(String, Duration)>,
}

impl Connection {
    fn begin(timeouts: Timeouts) -> Self {
        let (sender, ends) = mpsc::channel(10);
        let protocol = Pinging { ends: sender, start: Instant::now(), pings: Arc::default() };
        let supervisor = Supervisor::builder(protocol).timeouts(timeouts).build();
        let (near, far) = tokio::io::duplex(1000);
        let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
        tokio::spawn(permit.run(near, Vec::new()));
        Self { supervisor, far, ends }
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

    /// Waits for the end of the connection. Returns the reason, and the time in seconds since the test began.
    async fn end(&mut self) -> (String, u64) {
        let (reason, after) = self.ends.recv().await.unwrap();
        (reason, after.as_secs())
    }
}

#[tokio::test(start_paused = true)]
async fn connection_without_a_first_frame_is_closed() {
    let mut connection = Connection::begin(Timeouts::default());
    assert_eq!(connection.receive().await, "first_frame");
    assert_eq!(connection.end().await, ("first_frame".to_owned(), 10));
    assert_eq!(connection.supervisor.stats().ended["first_frame"], 1);

    let mut quiet = Connection::begin(Timeouts::default().first_frame(None));
    tokio::time::sleep(Duration::from_hours(1)).await;
    quiet.send("hello").await;
    assert_eq!(quiet.receive().await, "hello");
}

/// Single bytes do not extend the timeout.
#[tokio::test(start_paused = true)]
async fn incomplete_frame_times_out() {
    let mut connection = Connection::begin(Timeouts::default());
    connection.send("hello").await;
    assert_eq!(connection.receive().await, "hello");
    connection.far.write_all(b"\0\0\0\x64").await.unwrap();
    for _ in 0..13 {
        tokio::time::sleep(Duration::from_secs(5)).await;
        // The last of them is too late.
        let _ = connection.far.write_all(b"x").await;
    }
    assert_eq!(connection.receive().await, "frame");
    assert_eq!(connection.end().await, ("frame".to_owned(), 60));
}

/// The beginning of each frame arrives with the end of the previous one.
#[tokio::test(start_paused = true)]
async fn frame_timeout_begins_anew_with_every_frame() {
    let mut connection = Connection::begin(Timeouts::default());
    connection.far.write_all(b"\0\0").await.unwrap();
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_secs(9)).await;
        connection.far.write_all(b"\0\x05hello\0\0").await.unwrap();
        assert_eq!(connection.receive().await, "hello");
    }
}

#[tokio::test(start_paused = true)]
async fn idle_peer_is_pinged_and_then_closed() {
    let mut connection =
        Connection::begin(Timeouts::default().heartbeat(Duration::from_secs(10)).idle(Duration::from_secs(25)));
    connection.send("hello").await;
    assert_eq!(connection.receive().await, "hello");
    assert_eq!(connection.receive().await, "ping 10");
    connection.send("pong").await;
    assert_eq!(connection.receive().await, "pong");
    assert_eq!(connection.receive().await, "ping 10");
    assert_eq!(connection.receive().await, "ping 20");
    assert_eq!(connection.receive().await, "idle");
    assert_eq!(connection.end().await, ("idle".to_owned(), 35));
}

#[tokio::test(start_paused = true)]
async fn peer_that_waits_for_a_reply_is_not_idle() {
    let mut connection = Connection::begin(Timeouts::default().idle(Duration::from_secs(5)));
    connection.send("never").await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(connection.supervisor.count(), 1);
    assert!(connection.ends.try_recv().is_err());

    let mut idle = Connection::begin(Timeouts::default().idle(Duration::from_secs(5)));
    idle.send("hello").await;
    assert_eq!(idle.end().await, ("idle".to_owned(), 5));
}

#[tokio::test(start_paused = true)]
async fn slow_consumer_is_closed() {
    let mut connection = Connection::begin(Timeouts::default());
    connection.send("large").await;
    // Every read restarts the timeout.
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(20)).await;
        connection.far.read_exact(&mut [0; 1000]).await.unwrap();
    }
    assert_eq!(connection.end().await, ("write_stall".to_owned(), 230));
}

/// The peer may be gone, which only a write would show.
#[tokio::test(start_paused = true)]
async fn half_closed_connection_times_out() {
    let mut connection = Connection::begin(Timeouts::default());
    connection.send("never").await;
    connection.far.shutdown().await.unwrap();
    assert_eq!(connection.end().await, ("half_closed".to_owned(), 30));
    drop(connection.far);
}

/// The peer does not close its side.
#[tokio::test(start_paused = true)]
async fn lingering_ends_at_its_deadline() {
    let mut connection = Connection::begin(Timeouts::default());
    connection.end().await;
    assert_eq!(connection.supervisor.count(), 1);
    let start = Instant::now();
    while connection.supervisor.count() > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(start.elapsed() <= Duration::from_millis(1010), "{:?}", start.elapsed());
}

/// Over a real socket, with real time.
#[tokio::test]
async fn frame_timeout_closes_only_its_own_connection() {
    let mut server = Server::with(|builder| {
        let timeouts = Timeouts::default().frame(Duration::from_millis(50));
        builder.timeouts(timeouts)
    })
    .await;
    let (mut neighbour, _) = server.connected().await;
    let mut slow = server.connect().await;
    slow.0.write_all(b"\0\0").await.unwrap();
    assert_eq!(slow.receive().await, None);
    assert_eq!(server.next_end().await, "conn-2: timed out waiting for the rest of a frame");
    assert_eq!(neighbour.ask("still there").await, "still there");
}
