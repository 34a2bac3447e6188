//! `Protocol::on_tick`, with a paused clock: ticks come in time whether the connection is idle, busy or stalled.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{
    CloseReason, ConnectionContext, Frame, Protocol, PushPolicy, PushPriority, Reply, Supervisor, Tick, Timeouts,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::test_server::{Planned, frame};

/// Ticks according to a plan. `within N` schedules a tick within N seconds. `wait` is answered when the test notifies `release`, `large`
/// with a frame larger than the socket buffer, and `stream` with an endless stream. Other requests are echoed.
struct Ticking<const HOLD: bool> {
    /// Returns the result of the tick with this number.
    plan: fn(usize) -> Tick<Frame>,
    ticks: AtomicUsize,
    release: Arc<Notify>,
    start: Instant,
    ends: mpsc::Sender<(String, u64)>,
}

impl<const HOLD: bool> Protocol for Ticking<HOLD> {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;
    const HOLD_PUSHES: bool = HOLD;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        match &request.body()[..] {
            b"within 1" | b"within 100" => {
                let seconds = if request.body().len() == 8 { 1 } else { 100 };
                context.tick_within(Duration::from_secs(seconds));
                Reply::Frame(request)
            }
            b"wait" => {
                let release = Arc::clone(&self.release);
                Reply::future(async move {
                    release.notified().await;
                    Ok(frame("waited"))
                })
            }
            b"large" => Reply::Frame(Frame::from(Bytes::from(vec![b'x'; 100_000]))),
            b"stream" => Reply::stream(Endless),
            _ => Reply::Frame(request),
        }
    }

    fn on_tick(&self, _: &mut ConnectionContext) -> Tick<Frame> {
        (self.plan)(self.ticks.fetch_add(1, Ordering::SeqCst) + 1)
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Frame> {
        Some(frame(reason.label()))
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) {
        self.ends.try_send((reason.label().to_owned(), self.start.elapsed().as_secs())).unwrap();
    }
}

struct Endless;

impl futures_core::Stream for Endless {
    type Item = Result<Frame, Planned>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(Some(Ok(Frame::from(Bytes::from_static(&[b'x'; 1000])))))
    }
}

fn next(after: u64, text: Option<&str>) -> Tick<Frame> {
    Tick::Next { frame: text.map(frame), after: Duration::from_secs(after) }
}

struct Connection<const HOLD: bool> {
    supervisor: Supervisor<Ticking<HOLD>>,
    far: DuplexStream,
    ends: mpsc::Receiver<(String, u64)>,
}

type Ends = mpsc::Receiver<(String, u64)>;

/// Creates a supervisor with a first tick after five seconds and without timeouts.
fn supervisor<const HOLD: bool>(plan: fn(usize) -> Tick<Frame>) -> (Supervisor<Ticking<HOLD>>, Ends) {
    let (sender, ends) = mpsc::channel(10);
    let timeouts =
        Timeouts::default().first_frame(None).write_stall(None).half_closed(None).tick(Duration::from_secs(5));
    let ticks = AtomicUsize::new(0);
    let ticking = Ticking { plan, ticks, release: Arc::default(), start: Instant::now(), ends: sender };
    (Supervisor::builder(ticking).timeouts(timeouts).build(), ends)
}

impl<const HOLD: bool> Connection<HOLD> {
    fn begin(plan: fn(usize) -> Tick<Frame>) -> Self {
        let (supervisor, ends) = supervisor(plan);
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

    fn ticks(&self) -> usize {
        self.supervisor.protocol().ticks.load(Ordering::SeqCst)
    }

    fn second(&self) -> u64 {
        self.supervisor.protocol().start.elapsed().as_secs()
    }
}

#[tokio::test(start_paused = true)]
async fn ticks_come_at_the_returned_times() {
    let mut connection = Connection::<false>::begin(|tick| match tick {
        1 => next(1, Some("one")),
        2 => next(10, None),
        3 => next(0, Some("three")),
        4 => next(u64::MAX, Some("four")),
        _ => unreachable!("never"),
    });
    for (text, second) in [("one", 5), ("three", 16), ("four", 16)] {
        assert_eq!(connection.receive().await, text);
        assert_eq!(connection.second(), second);
    }
    connection.send("still there").await;
    assert_eq!(connection.receive().await, "still there");
}

#[tokio::test(start_paused = true)]
async fn tick_within_never_delays_a_tick() {
    let mut connection = Connection::<false>::begin(|tick| match tick {
        1 => next(10, Some("one")),
        2 => Tick::Stop,
        _ => next(2, Some("more")),
    });
    for text in ["within 1", "within 100"] {
        connection.send(text).await;
        assert_eq!(connection.receive().await, text);
    }
    assert_eq!(connection.receive().await, "one");
    assert_eq!(connection.second(), 1);
    // The second tick comes when the first has scheduled it, and stops the ticks.
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(connection.ticks(), 2);
    connection.send("within 1").await;
    for (text, second) in [("within 1", 31), ("more", 32), ("more", 34)] {
        assert_eq!(connection.receive().await, text);
        assert_eq!(connection.second(), second);
    }
}

#[tokio::test(start_paused = true)]
async fn ticks_come_while_the_peer_keeps_sending() {
    let mut connection = Connection::<false>::begin(|tick| if tick == 3 { Tick::Stop } else { next(5, Some("tick")) });
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_millis(900)).await;
        connection.send("hello").await;
        while connection.receive().await == "tick" {}
    }
    assert_eq!(connection.ticks(), 3, "no tick after `Tick::Stop`");
}

#[tokio::test(start_paused = true)]
async fn no_ticks_without_a_first_tick() {
    let timeouts = Timeouts::default().first_frame(None);
    assert_eq!(timeouts.tick, None);
    let (sender, mut ends) = mpsc::channel(1);
    let plan = |_| Tick::Close(None);
    let ticking = Ticking::<false> {
        plan,
        ticks: AtomicUsize::new(0),
        release: Arc::default(),
        start: Instant::now(),
        ends: sender,
    };
    let supervisor = Supervisor::builder(ticking).timeouts(timeouts).build();
    let (near, _far) = tokio::io::duplex(1000);
    tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert!(ends.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn tick_closes_with_its_frame_or_the_last_frame() {
    let mut connection = Connection::<false>::begin(|_| Tick::Close(Some(frame("enough"))));
    connection.send("wait").await;
    assert_eq!(connection.receive().await, "enough");
    assert_eq!(connection.far.read(&mut [0]).await.unwrap(), 0);
    assert_eq!(connection.ends.recv().await.unwrap(), ("handler".to_owned(), 5));

    let mut connection = Connection::<false>::begin(|_| Tick::Close(None));
    assert_eq!(connection.receive().await, "handler");
    assert_eq!(connection.ends.recv().await.unwrap(), ("handler".to_owned(), 5));
}

/// The socket is full, and no timeout is configured.
#[tokio::test(start_paused = true)]
async fn tick_closes_a_peer_that_does_not_read() {
    for plan in [
        |tick| if tick < 3 { next(5, Some("tick")) } else { Tick::Close(Some(frame("enough"))) },
        |tick| if tick < 3 { next(5, None) } else { Tick::Close(None) },
    ] {
        let mut connection = Connection::<false>::begin(plan);
        connection.send("large").await;
        assert_eq!(connection.ends.recv().await.unwrap(), ("handler".to_owned(), 15));
        // The connection is released although the peer has not closed its side.
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(connection.supervisor.count(), 0);
    }
}

/// The frame of a tick follows frames that are already encoded.
#[tokio::test(start_paused = true)]
async fn frame_of_a_tick_overtakes_queued_frames() {
    let mut connection =
        Connection::<false>::begin(|tick| if tick == 1 { next(1000, Some("tick")) } else { Tick::Stop });
    connection.send("large").await;
    connection.send("next").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let handle = connection.supervisor.sessions().list()[0].handle();
    handle.try_push(frame("pushed"), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(connection.ticks(), 1);
    assert_eq!(connection.receive().await.len(), 100_000);
    for expected in ["tick", "pushed", "next"] {
        assert_eq!(connection.receive().await, expected);
    }
}

/// The tick comes in time, and its frame waits for the reply.
#[tokio::test(start_paused = true)]
async fn frame_of_a_tick_does_not_interrupt_a_reply_if_pushes_are_held() {
    let mut connection = Connection::<true>::begin(|tick| match tick {
        1 => next(5, Some("first")),
        2 => next(5, Some("second")),
        3 => next(50, None),
        _ => Tick::Close(Some(frame("enough"))),
    });
    connection.send("wait").await;
    tokio::time::sleep(Duration::from_secs(18)).await;
    assert_eq!(connection.ticks(), 3);
    connection.supervisor.protocol().release.notify_one();
    // Of two unsent frames of ticks, only the newer one is sent.
    for expected in ["waited", "second"] {
        assert_eq!(connection.receive().await, expected);
    }
    connection.send("wait").await;
    assert_eq!(connection.receive().await, "enough");
    assert_eq!(connection.ends.recv().await.unwrap(), ("handler".to_owned(), 65));
}

#[tokio::test(start_paused = true)]
async fn half_closed_connection_has_ticks() {
    let mut connection =
        Connection::<false>::begin(|tick| if tick < 3 { next(5, Some("tick")) } else { Tick::Close(None) });
    connection.send("wait").await;
    connection.far.shutdown().await.unwrap();
    for expected in ["tick", "tick", "handler"] {
        assert_eq!(connection.receive().await, expected);
    }
    assert_eq!(connection.ends.recv().await.unwrap(), ("handler".to_owned(), 15));
}

/// A socket that accepts all output at once, and has these bytes as input.
struct Sink(Option<&'static [u8]>);

impl AsyncRead for Sink {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let Some(bytes) = self.0.take() else { return Poll::Pending };
        buffer.put_slice(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Sink {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A paused clock does not advance while a task is ready, so the test advances it.
#[tokio::test(start_paused = true)]
async fn connection_that_is_never_idle_has_ticks() {
    let (supervisor, mut ends) =
        supervisor::<false>(|tick| if tick < 3 { next(5, Some("tick")) } else { Tick::Close(None) });
    let permit = supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
    tokio::spawn(permit.run(Sink(Some(b"\0\0\0\x06stream")), Vec::new()));
    let ticks = &supervisor.protocol().ticks;
    let run_others = async || {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    };
    run_others().await;
    for expected in 1..=3 {
        tokio::time::advance(Duration::from_secs(4)).await;
        run_others().await;
        assert_eq!(ticks.load(Ordering::SeqCst), expected - 1);
        // Timers fire at most a millisecond late.
        tokio::time::advance(Duration::from_millis(1001)).await;
        run_others().await;
        assert_eq!(ticks.load(Ordering::SeqCst), expected);
    }
    assert_eq!(ends.try_recv().unwrap(), ("handler".to_owned(), 15));
}
