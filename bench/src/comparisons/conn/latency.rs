//! How soon a push is written: from the moment when it is queued until the kernel has its bytes.

use std::convert::Infallible;
use std::io::{self, IoSlice, Read as _};
use std::net;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, on_core};
use tidewire_conn::codec::{Codec, LengthDelimited};
use tidewire_conn::{Builder, ConnectionContext, Frame, Protocol, PushHandle, Reply, Supervisor};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::yield_now;

use super::super::Effort;
use super::server::{BODY, FRAME, frames};
use super::{apart, runtime};

pub(super) fn push(effort: Effort) -> Workload {
    let pushes = effort.operations(20_000);
    Workload {
        name: "conn-push-latency",
        about: format!(
            "{pushes} urgent pushes of {BODY} bytes to an idle connection, one after the other, by a task on the one thread \
             that the server has: from the return of the push to that of the write. In between the receiver is read."
        ),
        operation: "push",
        metrics: &[Metric::LatencyP50, Metric::LatencyP99, Metric::Allocations],
        contenders: vec![
            Contender::new("queue and write", move |meter| run::<Queue>(meter, pushes)),
            Contender::new("tidewire-conn", move |meter| run::<Ours>(meter, pushes)),
        ],
    }
}

/// Somebody who writes what is pushed.
trait Pusher: Sized + Send {
    /// Serves this socket, on the runtime that it is called on.
    async fn serve(socket: Watched<Arc<Written>>) -> Self;
    /// Returns when the frame is queued.
    async fn push(&self);
}

fn run<P: Pusher>(meter: Meter, pushes: u64) -> Sample {
    let round = || {
        let runtime = runtime();
        let (pusher, written, mut receiver) = runtime.block_on(async {
            let (socket, receiver) = pair();
            let written = Arc::new(Written::default());
            (P::serve(Watched { socket, watcher: Arc::clone(&written) }).await, written, receiver)
        });
        let (expected, mut received) = (frames(1), [0; FRAME]);
        let mut delays = Vec::with_capacity(usize::try_from(pushes).expect("64 bits"));
        let sample = meter.measure(pushes, || {
            runtime.block_on(async {
                for _ in 0..pushes {
                    pusher.push().await;
                    let queued = Instant::now();
                    delays.push(written.next().await.duration_since(queued));
                    // It is there already: this does not wait.
                    receiver.read_exact(&mut received).expect("it was written");
                    assert!(received[..] == expected, "it is what was pushed");
                }
            });
        });
        sample.with_latencies(delays)
    };
    let (_, server_core) = apart().unzip();
    on_core(server_core.unwrap_or(0), round).expect("a thread can be pinned")
}

/// A connection: one end for the runtime that it is called on, and the other one.
pub(super) fn pair() -> (TcpStream, net::TcpStream) {
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let receiver = net::TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it accepts");
    let (socket, _) = listener.accept().expect("somebody has connected");
    socket.set_nodelay(true).expect("TCP_NODELAY can be set");
    socket.set_nonblocking(true).expect("a socket can be non-blocking");
    (TcpStream::from_std(socket).expect("the runtime takes a socket"), receiver)
}

/// Looks at what is written.
pub(super) trait Watcher: Send + Unpin + 'static {
    /// So many bytes of these slices have just been written.
    fn written(&mut self, slices: &[IoSlice<'_>], count: usize);
}

/// A socket with somebody who looks at what is written to it.
pub(super) struct Watched<W> {
    pub(super) socket: TcpStream,
    pub(super) watcher: W,
}

/// When the socket was last written.
#[derive(Default)]
struct Written {
    at: Mutex<Option<Instant>>,
    notify: Notify,
}

impl Written {
    async fn next(&self) -> Instant {
        self.notify.notified().await;
        self.at.lock().expect("nobody panics").take().expect("one write is one frame")
    }
}

impl Watcher for Arc<Written> {
    fn written(&mut self, _: &[IoSlice<'_>], _: usize) {
        *self.at.lock().expect("nobody panics") = Some(Instant::now());
        self.notify.notify_one();
    }
}

impl<W: Watcher> AsyncRead for Watched<W> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl<W: Watcher> AsyncWrite for Watched<W> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(context, bytes);
        if let Poll::Ready(Ok(count)) = written {
            self.watcher.written(&[IoSlice::new(bytes)], count);
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
            self.watcher.written(slices, count);
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

/// The least one can do: a task that waits for a channel and writes what comes, as it is.
struct Queue {
    sender: mpsc::Sender<Bytes>,
    frame: Bytes,
}

impl Pusher for Queue {
    async fn serve(mut socket: Watched<Arc<Written>>) -> Self {
        let (sender, mut pushes) = mpsc::channel::<Bytes>(16);
        tokio::spawn(async move {
            while let Some(frame) = pushes.recv().await {
                socket.write_all(&frame).await.expect("the receiver reads");
            }
        });
        Self { sender, frame: frames(1).into() }
    }

    async fn push(&self) {
        self.sender.send(self.frame.clone()).await.expect("the task lives");
    }
}

struct Ours {
    handle: PushHandle<Frame>,
    body: Bytes,
}

impl Pusher for Ours {
    async fn serve(socket: Watched<Arc<Written>>) -> Self {
        let server = Supervisor::builder(Pushed::new(LengthDelimited::default));
        Self { handle: push_to(server, socket).await, body: Bytes::from_static(&[b'x'; BODY]) }
    }

    async fn push(&self) {
        let frame = Frame::from(self.body.clone());
        self.handle.push_high_priority(frame).await.expect("the connection lives");
    }
}

/// Has a server of one connection serve this socket, on the runtime that it is called on, and gives the handle of it.
pub(super) async fn push_to<C: Codec<Frame = Frame>, W: Watcher>(
    server: Builder<Pushed<C>>,
    socket: Watched<W>,
) -> PushHandle<Frame> {
    let supervisor = server.build();
    let peer = socket.socket.peer_addr().expect("it is connected");
    tokio::spawn(supervisor.admit(peer).expect("there is room").run(socket, Vec::new()));
    loop {
        match supervisor.protocol().handle.get() {
            Some(handle) => return handle.clone(),
            None => yield_now().await,
        }
    }
}

/// Hands out the handle of its one connection.
pub(super) struct Pushed<C> {
    handle: OnceLock<PushHandle<Frame>>,
    codec: fn() -> C,
}

impl<C> Pushed<C> {
    pub(super) fn new(codec: fn() -> C) -> Self {
        Self { handle: OnceLock::new(), codec }
    }
}

impl<C: Codec<Frame = Frame>> Protocol for Pushed<C> {
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
