//! Connection actors against a loop written by hand and against Framed.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::thread;

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::{FutureExt as _, SinkExt, StreamExt as _};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, available_cores, on_core};
use tidewire_conn::{ConnectionContext, Frame, LengthDelimited, Protocol, Reply, Supervisor};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{self, Runtime};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "conn",
    about: "Echo over TCP: connection actors against a raw tokio loop and Framed",
    workloads,
};

const BODY: usize = 64;
const FRAME: usize = 4 + BODY;

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        echo("conn-echo", 50, 32, effort.operations(800_000)),
        echo("conn-echo-depth-1", 50, 1, effort.operations(50_000)),
    ]
}

fn echo(name: &'static str, connections: usize, depth: usize, frames: u64) -> Workload {
    let contender =
        |name, serve: fn(TcpListener)| Contender::new(name, move |meter| run(meter, connections, depth, frames, serve));
    Workload {
        name,
        about: format!(
            "{frames} frames of {BODY} bytes, echoed on {connections} connections, {depth} at a time on each. Server and load \
             have a thread each{}.",
            if apart().is_some() { ", on cores of their own" } else { "" }
        ),
        operation: "frame",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![
            contender("raw loop", |listener| {
                accept(listener, raw);
            }),
            contender("Framed", |listener| {
                accept(listener, framed);
            }),
            contender("tidewire-conn", |listener| {
                tokio::spawn(async move { Supervisor::with_protocol(Echo).build().serve(listener).await });
            }),
        ],
    }
}

fn apart() -> Option<(usize, usize)> {
    match available_cores().expect("the kernel tells which cores there are")[..] {
        [load, server, ..] => Some((load, server)),
        _ => None,
    }
}

fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts")
}

/// One round: a server on a thread of its own, and a load on another.
fn run(meter: Meter, connections: usize, depth: usize, frames: u64, serve: fn(TcpListener)) -> Sample {
    let (told, addr) = std::sync::mpsc::sync_channel(1);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = move || {
        runtime().block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            told.send(listener.local_addr().expect("it is bound")).expect("the load waits");
            serve(listener);
            // An error means that the load has gone, which is as good.
            let _ = stopped.await;
        });
    };
    let load = move || {
        let addr = addr.recv().expect("the server starts");
        let runtime = runtime();
        let sockets = runtime.block_on(connect(addr, connections));
        let batches = frames / (connections * depth) as u64;
        let sample = meter.measure(batches * (connections * depth) as u64, || {
            runtime.block_on(async {
                let tasks: Vec<_> =
                    sockets.into_iter().map(|socket| tokio::spawn(ask(socket, depth, batches))).collect();
                for task in tasks {
                    task.await.expect("the load does not panic");
                }
            });
        });
        drop(stop);
        sample
    };
    let (load_core, server_core) = apart().unzip();
    let on = |core: Option<usize>| core.unwrap_or(0);
    thread::scope(|scope| {
        scope.spawn(move || on_core(on(server_core), server).expect("a thread can be pinned"));
        on_core(on(load_core), load).expect("a thread can be pinned")
    })
}

async fn connect(addr: SocketAddr, connections: usize) -> Vec<TcpStream> {
    let mut sockets = Vec::new();
    for _ in 0..connections {
        let mut socket = TcpStream::connect(addr).await.expect("the server accepts");
        socket.set_nodelay(true).expect("TCP_NODELAY can be set");
        exchange(&mut socket, &frames(1), &mut [0; FRAME]).await;
        sockets.push(socket);
    }
    sockets
}

fn frames(count: usize) -> Vec<u8> {
    let mut frame = u32::try_from(BODY).expect("small").to_be_bytes().to_vec();
    frame.resize(FRAME, b'x');
    frame.repeat(count)
}

async fn ask(mut socket: TcpStream, depth: usize, batches: u64) {
    let (batch, mut answer) = (frames(depth), vec![0; depth * FRAME]);
    for _ in 0..batches {
        exchange(&mut socket, &batch, &mut answer).await;
    }
}

async fn exchange(socket: &mut TcpStream, batch: &[u8], answer: &mut [u8]) {
    socket.write_all(batch).await.expect("the server reads");
    socket.read_exact(answer).await.expect("the server answers");
    assert!(answer == batch, "an echo is what was sent");
}

fn accept<F: Future<Output = ()> + Send + 'static>(listener: TcpListener, serve: fn(TcpStream) -> F) {
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            socket.set_nodelay(true).expect("TCP_NODELAY can be set");
            tokio::spawn(serve(socket));
        }
    });
}

/// What one writes by hand: a buffer in, a buffer out, one write per read.
async fn raw(mut socket: TcpStream) {
    let (mut input, mut output) = (BytesMut::with_capacity(16 * 1024), Vec::with_capacity(16 * 1024));
    loop {
        match socket.read_buf(&mut input).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        while input.len() >= 4 {
            let length = 4 + u32::from_be_bytes([input[0], input[1], input[2], input[3]]) as usize;
            if input.len() < length {
                break;
            }
            output.extend_from_slice(&input[..length]);
            input.advance(length);
        }
        if socket.write_all(&output).await.is_err() {
            return;
        }
        output.clear();
    }
}

/// Framed, which flushes when nothing more is there to be read.
async fn framed(socket: TcpStream) {
    let mut framed = Framed::new(socket, LengthDelimitedCodec::new());
    while let Some(Ok(frame)) = framed.next().await {
        if framed.feed(frame.freeze()).await.is_err() {
            return;
        }
        while let Some(Some(Ok(frame))) = framed.next().now_or_never() {
            if framed.feed(frame.freeze()).await.is_err() {
                return;
            }
        }
        if SinkExt::<Bytes>::flush(&mut framed).await.is_err() {
            return;
        }
    }
}

struct Echo;

impl Protocol for Echo {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, frame: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::Frame(frame)
    }
}
