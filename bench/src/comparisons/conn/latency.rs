//! Latency of a push: from when it is queued until the write returns.

use std::convert::Infallible;
use std::io::{self, IoSlice, Read as _};
use std::net;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, run_on_core};
use tidewire_conn::codec::{Codec, LengthDelimited};
use tidewire_conn::{Builder, ConnectionContext, Frame, Protocol, PushHandle, Reply, Supervisor};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::yield_now;

use super::super::Effort;
use super::server::{BODY_BYTES, FRAME_BYTES, frames};
use super::{runtime, separate_cores};

pub(super) fn push(effort: Effort) -> Workload {
    let pushes = effort.operations(20_000);
    Workload {
        name: "conn-push-latency",
        about: format!(
            "{pushes} urgent pushes of {BODY_BYTES} bytes to an idle connection, one after the other, by a task on the only thread \
             of the server. A latency is the time from the return of the push to the return of the write. The receiver is \
             read between pushes."
        ),
        operation: "push",
        metrics: &[Metric::LatencyP50, Metric::LatencyP99, Metric::Allocations],
        contenders: vec![
            Contender::new("queue and write", move |meter| run::<ChannelPusher>(meter, pushes)),
            Contender::new("tidewire-conn", move |meter| run::<Ours>(meter, pushes)),
        ],
    }
}

/// A contender: a connection that writes pushed frames.
trait Pusher: Sized + Send {
    /// Serves the socket on the current runtime.
    async fn serve(socket: ObservedSocket<Arc<LastWrite>>) -> Self;
    /// Pushes a frame. Returns when it is queued.
    async fn push(&self);
}

fn run<P: Pusher>(meter: Meter, pushes: u64) -> Sample {
    let round = || {
        let runtime = runtime();
        let (pusher, written, mut receiver) = runtime.block_on(async {
            let (socket, receiver) = pair();
            let written = Arc::new(LastWrite::default());
            (P::serve(ObservedSocket { socket, observer: Arc::clone(&written) }).await, written, receiver)
        });
        let (expected, mut received) = (frames(1), [0; FRAME_BYTES]);
        let mut delays = Vec::with_capacity(usize::try_from(pushes).expect("64 bits"));
        let sample = meter.measure(pushes, || {
            runtime.block_on(async {
                for _ in 0..pushes {
                    pusher.push().await;
                    let queued = Instant::now();
                    delays.push(written.next().await.duration_since(queued));
                    // Does not block, because the bytes have been written.
                    receiver.read_exact(&mut received).expect("it was written");
                    assert!(received[..] == expected, "the pushed frame is received");
                }
            });
        });
        sample.with_latencies(delays)
    };
    let (_, server_core) = separate_cores().unzip();
    run_on_core(server_core.unwrap_or(0), round).expect("a thread can be pinned")
}

/// Opens a connection. Returns one end, registered with the current runtime, and the other end.
pub(super) fn pair() -> (TcpStream, net::TcpStream) {
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let receiver = net::TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it accepts");
    let (socket, _) = listener.accept().expect("a client has connected");
    socket.set_nodelay(true).expect("TCP_NODELAY can be set");
    socket.set_nonblocking(true).expect("a socket can be non-blocking");
    (TcpStream::from_std(socket).expect("the socket can be registered"), receiver)
}

/// An observer of writes to a socket.
pub(super) trait WriteObserver: Send + Unpin + 'static {
    /// Called after the first `count` bytes of the slices have been written.
    fn on_write(&mut self, slices: &[IoSlice<'_>], count: usize);
}

/// A socket whose writes are observed.
pub(super) struct ObservedSocket<W> {
    pub(super) socket: TcpStream,
    pub(super) observer: W,
}

/// The time of the last write to the socket.
#[derive(Default)]
struct LastWrite {
    at: Mutex<Option<Instant>>,
    notify: Notify,
}

impl LastWrite {
    async fn next(&self) -> Instant {
        self.notify.notified().await;
        self.at.lock().expect("the lock is not poisoned").take().expect("one write is one frame")
    }
}

impl WriteObserver for Arc<LastWrite> {
    fn on_write(&mut self, _: &[IoSlice<'_>], _: usize) {
        *self.at.lock().expect("the lock is not poisoned") = Some(Instant::now());
        self.notify.notify_one();
    }
}

impl<W: WriteObserver> AsyncRead for ObservedSocket<W> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl<W: WriteObserver> AsyncWrite for ObservedSocket<W> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(context, bytes);
        if let Poll::Ready(Ok(count)) = written {
            self.observer.on_write(&[IoSlice::new(bytes)], count);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(context, slices);
        if let Poll::Ready(Ok(count)) = written {
            self.observer.on_write(slices, count);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

/// A minimal implementation: a task that reads frames from a channel and writes them.
struct ChannelPusher {
    sender: mpsc::Sender<Bytes>,
    frame: Bytes,
}

impl Pusher for ChannelPusher {
    async fn serve(mut socket: ObservedSocket<Arc<LastWrite>>) -> Self {
        let (sender, mut pushes) = mpsc::channel::<Bytes>(16);
        tokio::spawn(async move {
            while let Some(frame) = pushes.recv().await {
                socket.write_all(&frame).await.expect("the receiver reads");
            }
        });
        Self { sender, frame: frames(1).into() }
    }

    async fn push(&self) {
        self.sender.send(self.frame.clone()).await.expect("the task is running");
    }
}

struct Ours {
    handle: PushHandle<Frame>,
    body: Bytes,
}

impl Pusher for Ours {
    async fn serve(socket: ObservedSocket<Arc<LastWrite>>) -> Self {
        let server = Supervisor::builder(PushProtocol::new(LengthDelimited::default));
        Self { handle: serve_one(server, socket).await, body: Bytes::from_static(&[b'x'; BODY_BYTES]) }
    }

    async fn push(&self) {
        let frame = Frame::from(self.body.clone());
        self.handle.push_high_priority(frame).await.expect("the connection is open");
    }
}

/// Starts a server for this socket on the current runtime. Returns the push handle of its connection.
pub(super) async fn serve_one<C: Codec<Frame = Frame>, W: WriteObserver>(
    server: Builder<PushProtocol<C>>,
    socket: ObservedSocket<W>,
) -> PushHandle<Frame> {
    let supervisor = server.build();
    let peer = socket.socket.peer_addr().expect("it is connected");
    tokio::spawn(supervisor.admit(peer).expect("the connection limit is not reached").run(socket, Vec::new()));
    loop {
        match supervisor.protocol().handle.get() {
            Some(handle) => return handle.clone(),
            None => yield_now().await,
        }
    }
}

/// A protocol that stores the push handle of its only connection.
pub(super) struct PushProtocol<C> {
    handle: OnceLock<PushHandle<Frame>>,
    codec: fn() -> C,
}

impl<C> PushProtocol<C> {
    pub(super) fn new(codec: fn() -> C) -> Self {
        Self { handle: OnceLock::new(), codec }
    }
}

impl<C: Codec<Frame = Frame>> Protocol for PushProtocol<C> {
    type Frame = Frame;
    type Codec = C;
    type ProtocolError = Infallible;

    fn codec(&self) -> C {
        (self.codec)()
    }

    fn on_connection_setup(&self, handle: PushHandle<Frame>, _: &mut ConnectionContext) {
        assert!(self.handle.set(handle).is_ok(), "there is one connection");
    }

    fn on_frame(&self, _: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::None
    }
}
