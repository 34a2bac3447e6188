//! Echoed frames: the throughput of a connection.

use std::net::SocketAddr;
use std::thread;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, run_on_core};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::server::{self, BODY_BYTES, EchoProtocol, FRAME_BYTES, FRAMES, Serve};
use super::{runtime, separate_cores};

pub(super) fn echo(name: &'static str, connections: usize, depth: usize, frames: u64) -> Workload {
    let contender =
        |name, serve: Serve| Contender::new(name, move |meter| run(meter, connections, depth, frames, serve));
    Workload {
        name,
        about: format!(
            "{frames} frames of {BODY_BYTES} bytes are echoed on {connections} connections, {depth} in flight on each. Server and \
             load have one thread each{}.",
            if separate_cores().is_some() { ", on separate cores" } else { "" }
        ),
        operation: "frame",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: server::ALL.iter().map(|&(name, serve)| contender(name, serve)).collect(),
    }
}

/// Runs one round, with server and load on separate threads.
fn run(meter: Meter, connections: usize, depth: usize, frames: u64, serve: Serve) -> Sample {
    let (listening, addr) = std::sync::mpsc::sync_channel(1);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = move || {
        runtime().block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            listening.send(listener.local_addr().expect("it is bound")).expect("the load waits");
            serve(listener);
            // An error means that the load has ended, which also stops the server.
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
                let tasks: Vec<_> = sockets
                    .into_iter()
                    .map(|socket| tokio::spawn(exchange_batches(socket, FRAMES, depth, batches)))
                    .collect();
                for task in tasks {
                    task.await.expect("the load does not panic");
                }
            });
        });
        drop(stop);
        sample
    };
    let (load_core, server_core) = separate_cores().unzip();
    let on = |core: Option<usize>| core.unwrap_or(0);
    thread::scope(|scope| {
        scope.spawn(move || run_on_core(on(server_core), server).expect("a thread can be pinned"));
        run_on_core(on(load_core), load).expect("a thread can be pinned")
    })
}

async fn connect(addr: SocketAddr, connections: usize) -> Vec<TcpStream> {
    let mut sockets = Vec::new();
    for _ in 0..connections {
        let mut socket = TcpStream::connect(addr).await.expect("the server accepts");
        socket.set_nodelay(true).expect("TCP_NODELAY can be set");
        exchange(&mut socket, &server::frames(1), &server::frames(1), &mut [0; FRAME_BYTES]).await;
        sockets.push(socket);
    }
    sockets
}

/// Sends batches of `depth` requests, each after all replies to the previous batch.
pub(crate) async fn exchange_batches(mut socket: TcpStream, protocol: EchoProtocol, depth: usize, batches: u64) {
    let (requests, expected) = (protocol.exchange)(depth);
    let mut reply = vec![0; expected.len()];
    for _ in 0..batches {
        exchange(&mut socket, &requests, &expected, &mut reply).await;
    }
}

async fn exchange(socket: &mut TcpStream, requests: &[u8], expected: &[u8], reply: &mut [u8]) {
    socket.write_all(requests).await.expect("the server reads");
    socket.read_exact(reply).await.expect("the server answers");
    assert!(reply == expected, "the reply equals the request");
}
