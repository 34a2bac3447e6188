//! Regressions of pushes, last frames and upgrades.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use tidewire_conn::codec::{Codec, FragmentOptions, Fragmented, LengthDelimited};
use tidewire_conn::{
    CloseReason, ConnectionContext, Frame, Protocol, PushHandle, PushPolicy, PushPriority, Reply, ReplyTicket,
    Shutdown, Slot, Supervisor,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;

use crate::test_server::frame;

/// `large` is answered with a frame of a megabyte, and other requests never. Records the tickets of requests.
#[derive(Default)]
struct Unanswering {
    tickets: Mutex<Vec<ReplyTicket>>,
}

impl Protocol for Unanswering {
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
        Some(frame("last frame"))
    }
}

struct Running {
    supervisor: Supervisor<Unanswering>,
    handle: PushHandle<Frame>,
    far: DuplexStream,
    task: tokio::task::JoinHandle<()>,
}

async fn run(
    settings: impl FnOnce(tidewire_conn::Builder<Unanswering>) -> tidewire_conn::Builder<Unanswering>,
) -> Running {
    let supervisor = settings(Supervisor::builder(Unanswering::default()).push_bytes(64 << 20)).build();
    let (near, far) = tokio::io::duplex(10_000);
    let task = tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
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

/// The last frame that was passed to `PushHandle::close` was not counted if the peer did not read.
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

/// The earlier frame of a slot did not count for `slot_bytes`, and a frame that was about to be replaced counted twice.
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
    // Both frames are kept if they fit. The earlier one is dropped when the newest needs its bytes.
    running.handle.after(ticket).push_latest(Slot(2), frame("d".repeat(50))).unwrap();
    assert_eq!(held(), 1000);
    running.handle.after(ticket).push_latest(Slot(2), frame("e".repeat(60))).unwrap();
    assert_eq!(held(), 960);
}

/// The upgrade closure runs in the accept loop, which ended with the panic.
#[tokio::test]
async fn panic_in_an_upgrade_affects_only_its_own_connection() {
    let supervisor = Supervisor::builder(Unanswering::default()).build();
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
}
