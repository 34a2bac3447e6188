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
use tidewire_conn::{ConnectionContext, Frame, LengthDelimited, Protocol, PushHandle, Reply, Supervisor};
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
    async fn serve(socket: Timed) -> Self;
    /// Returns when the frame is queued.
    async fn push(&self);
}

fn run<P: Pusher>(meter: Meter, pushes: u64) -> Sample {
    let round = || {
        let runtime = runtime();
        let (pusher, written, mut receiver) = runtime.block_on(async {
            let (socket, receiver) = pair();
            let written = Arc::new(Written::default());
            (P::serve(Timed { socket, written: Arc::clone(&written) }).await, written, receiver)
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

fn pair() -> (TcpStream, net::TcpStream) {
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let receiver = net::TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it accepts");
    let (socket, _) = listener.accept().expect("somebody has connected");
    socket.set_nodelay(true).expect("TCP_NODELAY can be set");
    socket.set_nonblocking(true).expect("a socket can be non-blocking");
    (TcpStream::from_std(socket).expect("the runtime takes a socket"), receiver)
}

/// A socket that tells when it was last written.
struct Timed {
    socket: TcpStream,
    written: Arc<Written>,
}

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

impl Timed {
    fn note(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(_)) = written {
            *self.written.at.lock().expect("nobody panics") = Some(Instant::now());
            self.written.notify.notify_one();
        }
        written
    }
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(context, slices);
        self.note(written)
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
    async fn serve(mut socket: Timed) -> Self {
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
    async fn serve(socket: Timed) -> Self {
        let supervisor = Supervisor::with_protocol(Pushed::default()).build();
        let peer = socket.socket.peer_addr().expect("it is connected");
        tokio::spawn(supervisor.admit(peer).expect("there is room").run(socket, Vec::new()));
        let handle = loop {
            match supervisor.protocol().handle.get() {
                Some(handle) => break handle.clone(),
                None => yield_now().await,
            }
        };
        Self { handle, body: Bytes::from_static(&[b'x'; BODY]) }
    }

    async fn push(&self) {
        let frame = Frame::from(self.body.clone());
        self.handle.push_high_priority(frame).await.expect("the connection lives");
    }
}

/// Hands out the handle of its one connection.
#[derive(Default)]
struct Pushed {
    handle: OnceLock<PushHandle<Frame>>,
}

impl Protocol for Pushed {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_connection_setup(&self, handle: PushHandle<Frame>, _: &mut ConnectionContext) {
        assert!(self.handle.set(handle).is_ok(), "there is one connection");
    }

    fn on_frame(&self, _: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::None
    }
}
