//! Frames that are queued when a connection ends, and the dead letters.

use std::convert::Infallible;
use std::time::Duration;

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Protocol, PushPolicy, PushPriority, Reply, Slot, Supervisor};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::test_server::frame;

/// Never answers, and holds pushes while a request is in flight, so pushes stay queued.
struct Silent;

impl Protocol for Silent {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    const HOLD_PUSHES: bool = true;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, _: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::future(std::future::pending())
    }
}

/// Resets a connection that has queued frames. Returns the dead letters, and the number of frames that were counted as unsent.
async fn reset_with_queued_frames(keep_unsent: bool) -> (Vec<Frame>, u64) {
    let (dead, mut letters) = mpsc::channel(100);
    let server = Supervisor::builder(Silent).dead_letters(dead).keep_unsent(keep_unsent).build();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let serving = server.clone();
    tokio::spawn(async move { serving.serve(listener).await });

    client.write_all(b"\0\0\0\x04wait").await.unwrap();
    wait_until_async("the request is in flight", PATIENCE, async || {
        server.sessions().list().iter().any(|session| session.counters().frames_in == 1)
    })
    .await;
    let handle = server.sessions().list().pop().unwrap().handle();
    for (text, priority) in [
        ("low 1", PushPriority::Low),
        ("high 1", PushPriority::High),
        ("low 2", PushPriority::Low),
        ("high 2", PushPriority::High),
    ] {
        handle.try_push(frame(text), priority, PushPolicy::ReturnErrorIfFull).unwrap();
    }
    handle.push_latest(Slot(1), frame("replaced")).unwrap();
    handle.push_latest(Slot(1), frame("latest")).unwrap();
    // With this option, closing the socket resets the connection.
    client.set_zero_linger().unwrap();
    drop(client);
    wait_until_async("the connection has ended", PATIENCE, async || server.count() == 0).await;
    let letters = std::iter::from_fn(|| letters.try_recv().ok()).collect();
    (letters, server.stats().push.unsent)
}

#[tokio::test]
async fn keep_unsent_passes_queued_frames_to_the_dead_letters() {
    let (letters, unsent) = tokio::time::timeout(Duration::from_mins(1), reset_with_queued_frames(true)).await.unwrap();
    assert_eq!(letters, ["high 1", "high 2", "low 1", "low 2", "latest"].map(frame));
    assert_eq!(unsent, 5);
}

#[tokio::test]
async fn queued_frames_are_only_counted_by_default() {
    assert_eq!(reset_with_queued_frames(false).await, (Vec::new(), 5));
}
