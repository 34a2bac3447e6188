//! The CPU time of an echoed message on the server, which is a separate process with one thread.

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, run_on_core};
use tokio::net::TcpStream;

use super::super::conn::echo::exchange_batches;
use super::super::conn::process::EchoProcess;
use super::super::conn::{runtime, separate_cores};
use super::server::{BODY_BYTES, MESSAGES};

const CONNECTIONS: usize = 64;

pub(super) fn echo(name: &'static str, depth: usize, messages: u64) -> Workload {
    let contender = |name| Contender::new(name, move |meter| run(meter, name, depth, messages));
    Workload {
        name,
        about: format!(
            "{messages} text messages of {BODY_BYTES} bytes are echoed on {CONNECTIONS} connections, {depth} in flight on each, by a \
             server with one thread. The load is another process{}, which sends prepared frames and compares all replies.",
            if separate_cores().is_some() { " on another core" } else { "" }
        ),
        operation: "message",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: MESSAGES.servers.iter().map(|&(name, _)| contender(name)).collect(),
    }
}

fn run(meter: Meter, name: &str, depth: usize, messages: u64) -> Sample {
    let mut server = EchoProcess::start(MESSAGES, name, CONNECTIONS);
    let (load_core, server_core) = separate_cores().unzip();
    if let Some(core) = server_core {
        server.pin(core);
    }
    server.open(CONNECTIONS);
    let (connections, cpu) = (server.take_connections(), server.cpu());
    let load = move || {
        let runtime = runtime();
        let _entered = runtime.enter();
        let adopt = |socket: std::net::TcpStream| {
            socket.set_nodelay(true).expect("TCP_NODELAY can be set");
            socket.set_nonblocking(true).expect("a socket can be non-blocking");
            TcpStream::from_std(socket).expect("the socket can be registered")
        };
        let connections: Vec<_> = connections.into_iter().map(adopt).collect();
        let batches = (messages / (CONNECTIONS * depth) as u64).max(1);
        let before = cpu.now();
        let sample = meter.measure(batches * (CONNECTIONS * depth) as u64, || {
            let tasks: Vec<_> = connections
                .into_iter()
                .map(|socket| tokio::spawn(exchange_batches(socket, MESSAGES, depth, batches)))
                .collect();
            runtime.block_on(async {
                for task in tasks {
                    task.await.expect("the load does not panic");
                }
            });
        });
        sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
    };
    run_on_core(load_core.unwrap_or(0), load).expect("a thread can be pinned")
}
